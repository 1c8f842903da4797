"""Making pieces on the workers that will hold them, in bounded memory.

A piece is a linear combination: of source blocks when the array is encoded, of enough other pieces
when it was lost. Either way its worker fetches the parts slice by slice, straight from the
workers that hold them, and accumulates them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import scipy.sparse
from dask.sizeof import sizeof
from dask.utils import parse_bytes
from distributed import get_worker
from distributed.utils import sync

from dask_coded.arguments import check_unmasked
from dask_coded.runtime.answers import Lost, Recipe, Source, ask
from dask_coded.runtime.spec import CodedDataLostError, CodedSpec, as_key
from dask_coded.runtime.worker import CodedWorkerPlugin, worker_plugin
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.rows import RowsGoneError, rows_of

# Rows of a sparse source that are fetched at once, because the bytes of a row are not known.
_SPARSE_ROWS = 2**16


@sizeof.register(scipy.sparse.sparray)
def _sizeof_sparse(array: scipy.sparse.sparray) -> int:
    # Dask can size sparse matrices but not sparse arrays, so workers would never spill the latter.
    return sum(sizeof(value) for value in vars(array).values())


@dataclass
class _Meter:
    """Counts the bytes of rows that came from other workers."""

    received: int = 0

    def count(self, rows: Any) -> None:
        parts = (rows.data, rows.indices, rows.indptr) if scipy.sparse.issparse(rows) else (rows,)
        self.received += sum(part.nbytes for part in parts)


def make_piece(array_id: str, piece: int) -> Any:
    """Make one piece on this worker, as a task."""
    plugin = worker_plugin(get_worker())
    return sync(plugin.worker.loop, _make, plugin, array_id, piece)


async def _make(plugin: CodedWorkerPlugin, array_id: str, piece: int) -> Any:
    avoid: list[str] = []
    meter = _Meter()
    backoff = Backoff()
    scheduler = plugin.worker.scheduler
    while True:
        match await ask(scheduler.coded_sources, array=array_id, piece=piece, avoid=avoid):
            case Lost(message):
                raise CodedDataLostError(message)
            case Recipe(spec, sources):
                try:
                    data = await _combine(plugin, spec, piece, sources, meter)
                except RowsGoneError as gone:
                    if gone.silent:
                        avoid.append(gone.address)
                    continue
                await scheduler.coded_made(
                    array=array_id,
                    piece=piece,
                    received=meter.received,
                    work=_work(spec, piece, data),
                )
                return data
        await backoff.wait()


def _work(spec: CodedSpec, piece: int, data: Any) -> list[float] | None:
    """Return the work of each stripe of a sparse piece; None for a dense one, which is uniform."""
    if not spec.sparse_type:
        return None
    edges = np.minimum(spec.geometry.edges(int(spec.code.group[piece])), data.shape[0])
    # A row costs its non-zeros, plus one for writing its result.
    work: list[float] = np.diff(data.indptr[edges] + edges).astype(float).tolist()
    return work


async def _combine(
    plugin: CodedWorkerPlugin,
    spec: CodedSpec,
    piece: int,
    sources: Sequence[Source],
    meter: _Meter,
) -> Any:
    """Return ``sum weight * source``: a copy if there is a single source of weight one."""
    loop = asyncio.get_running_loop()
    rows = spec.piece_rows(piece)
    copy = len(sources) == 1 and sources[0].weight == 1
    if copy and plugin.worker.address in sources[0].holders:
        data = _unmasked(plugin.worker.data[as_key(sources[0].key)])
        return await loop.run_in_executor(None, _finished, data, spec)
    if spec.sparse_type:
        return await _combine_sparse(plugin, spec, rows, sources, meter)
    out = np.zeros((rows, spec.columns), dtype=spec.dtype)
    step = _slice_rows(spec)
    # Each worker starts with another source, so that they do not all ask one holder at once.
    shift = piece % len(sources)
    for source in (*sources[shift:], *sources[:shift]):
        weight, length, at = source.weight, min(source.rows, rows), source.at
        async for start, part in _slices(plugin, source, length, step, meter):
            into = out[at + start : at + start + len(part)]
            await loop.run_in_executor(None, _accumulate, into, part, None if copy else weight)
    return await loop.run_in_executor(None, _finished, out, spec)


async def _combine_sparse(
    plugin: CodedWorkerPlugin,
    spec: CodedSpec,
    rows: int,
    sources: Sequence[Source],
    meter: _Meter,
) -> Any:
    loop = asyncio.get_running_loop()
    total = None
    for source in sources:
        parts = [
            part async for _, part in _slices(plugin, source, source.rows, _SPARSE_ROWS, meter)
        ]

        def add(
            parts: list[Any] = parts, weight: float = source.weight, so_far: Any = total
        ) -> Any:
            block = scipy.sparse.vstack(parts, format="csr")
            block.resize((rows, spec.columns))
            if weight != 1:
                block = block * weight
            return block if so_far is None else so_far + block

        total = await loop.run_in_executor(None, add)
    return await loop.run_in_executor(None, _finished, total, spec)


async def _slices(
    plugin: CodedWorkerPlugin, source: Source, rows: int, step: int, meter: _Meter
) -> AsyncIterator[tuple[int, Any]]:
    """Yield the wanted part of a source as (first row, rows), slice by slice."""
    key, first, address = as_key(source.key), source.start, source.holders[0]
    here = plugin.worker.address in source.holders
    local: Any = plugin.worker.data.get(key) if here else None
    for start in range(0, max(rows, 1), step):
        stop = min(start + step, rows)
        if local is not None:
            yield start, _unmasked(local[first + start : first + stop])
            continue
        part = await rows_of(plugin.worker, address, key, first + start, first + stop)
        meter.count(part)
        yield start, _unmasked(part)


def _unmasked(part: Any) -> Any:
    # Chunks may be masked even if the dask array does not say so.
    return check_unmasked("A chunk of the matrix to encode", part)


def _accumulate(
    out: np.ndarray[Any, Any], part: np.ndarray[Any, Any], weight: float | None
) -> None:
    if weight is None:
        out[:] = part
    else:
        out += out.dtype.type(weight) * part


def _finished(data: Any, spec: CodedSpec) -> Any:
    """Return the piece as it is stored: checked, of the array's dtype, contiguous and aligned."""
    if kind := spec.sparse_type:
        data = kind(data, dtype=spec.dtype)
        values = data.data
    else:
        data = values = np.require(np.asarray(data, dtype=spec.dtype), requirements=["C", "A"])
    if spec.check_finite and values.dtype.kind in "fc" and not np.isfinite(values).all():
        raise ValueError(
            "The array holds NaN or infinity, which a coded product would spread: "
            "replace them, or encode with `check_finite=False`."
        )
    return data


def _slice_rows(spec: CodedSpec) -> int:
    size = parse_bytes(dask.config.get("coded.encode.slice"))
    return max(1, size // max(spec.columns * spec.dtype.itemsize, 1))
