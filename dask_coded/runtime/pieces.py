"""Making pieces on the workers that will hold them, in bounded memory.

A piece is a linear combination of other things in the cluster: of source blocks when the array is
encoded, of any sufficient other pieces when one was lost. Either way it is accumulated slice by
slice, fetched straight from the workers that hold the parts.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import scipy.sparse
from dask.sizeof import sizeof
from dask.utils import parse_bytes
from distributed import get_worker
from distributed.utils import sync

from dask_coded.runtime.rows import RowsGoneError, rows_of
from dask_coded.runtime.spec import ArraySpec, CodedDataLostError, as_key
from dask_coded.runtime.worker import CodedWorkerPlugin, worker_plugin


@sizeof.register(scipy.sparse.sparray)
def _sizeof_sparse(array: scipy.sparse.sparray) -> int:
    """Dask knows the size of sparse matrices, not of sparse arrays: workers would never spill."""
    return sum(sizeof(value) for value in vars(array).values())


#: Key, workers that hold it, weight; how many rows, from which on, to where in the piece.
Source = tuple[Any, list[str], float, int, int, int]


@dataclass
class _Meter:
    """Bytes of rows that have come over a comm; what lies on the worker itself does not count."""

    received: int = 0

    def count(self, rows: Any) -> None:
        parts = (rows.data, rows.indices, rows.indptr) if scipy.sparse.issparse(rows) else (rows,)
        self.received += sum(part.nbytes for part in parts)


def make_piece(array_id: str, piece: int) -> Any:
    """Task: make one piece, on this worker."""
    plugin = worker_plugin(get_worker())
    return sync(plugin.worker.loop, _make, plugin, array_id, piece)


async def _make(plugin: CodedWorkerPlugin, array_id: str, piece: int) -> Any:
    avoid: list[str] = []
    meter = _Meter()
    for attempt in itertools.count():
        answer = await plugin.worker.scheduler.coded_sources(
            array=array_id, piece=piece, avoid=avoid
        )
        if answer["status"] == "lost":
            raise CodedDataLostError(answer["message"])
        if answer["status"] == "OK":
            spec: ArraySpec = answer["spec"]
            try:
                data = await _combine(plugin, spec, piece, answer["sources"], meter)
            except RowsGoneError as gone:
                if gone.silent:
                    avoid.append(gone.address)
                continue
            work = None
            if spec.sparse:
                edges = np.minimum(spec.geometry.edges(int(spec.code.group[piece])), data.shape[0])
                # A row costs its non-zeros, plus one for being written.
                work = np.diff(data.indptr[edges] + edges).astype(float).tolist()
            await plugin.worker.scheduler.coded_made(
                array=array_id, piece=piece, received=meter.received, work=work
            )
            return data
        await asyncio.sleep(min(0.01 * 2**attempt, 0.5))
    raise AssertionError("unreachable")  # pragma: no cover


async def _combine(
    plugin: CodedWorkerPlugin, spec: ArraySpec, piece: int, sources: list[Source], meter: _Meter
) -> Any:
    """``sum weight * source``: a copy if there is one source of weight one, else accumulated."""
    loop = asyncio.get_running_loop()
    rows = spec.piece_rows(piece)
    copy = len(sources) == 1 and sources[0][2] == 1
    if copy and plugin.worker.address in sources[0][1]:
        data = plugin.worker.data[as_key(sources[0][0])]
        return await loop.run_in_executor(None, _finished, data, spec)
    if spec.sparse:
        return await _combine_sparse(plugin, spec, rows, sources, meter)
    out = np.zeros((rows, spec.columns), dtype=spec.dtype)
    step = _slice_rows(spec)
    # Each worker begins elsewhere, lest all of them ask the first holder at once.
    shift = piece % len(sources)
    for source in sources[shift:] + sources[:shift]:
        weight, length, at = source[2], min(source[3], rows), source[5]
        async for start, part in _slices(plugin, source, length, step, meter):
            into = out[at + start : at + start + len(part)]
            await loop.run_in_executor(None, _accumulate, into, part, None if copy else weight)
    return await loop.run_in_executor(None, _finished, out, spec)


async def _combine_sparse(
    plugin: CodedWorkerPlugin, spec: ArraySpec, rows: int, sources: list[Source], meter: _Meter
) -> Any:
    loop = asyncio.get_running_loop()
    total = None
    for source in sources:
        parts = [part async for _, part in _slices(plugin, source, source[3], 2**16, meter)]

        def add(parts: list[Any] = parts, weight: float = source[2], so_far: Any = total) -> Any:
            block = scipy.sparse.vstack(parts, format="csr")
            block.resize((rows, spec.columns))
            if weight != 1:
                block = block * weight
            return block if so_far is None else so_far + block

        total = await loop.run_in_executor(None, add)
    return await loop.run_in_executor(None, _finished, total, spec)


async def _slices(
    plugin: CodedWorkerPlugin, source: Source, rows: int, step: int, meter: _Meter
) -> Any:
    """(first row, rows) of the wanted part of a source, one slice at a time."""
    key, addresses, _, _, first, _ = source
    address = addresses[0]
    local: Any = plugin.worker.data.get(as_key(key)) if plugin.worker.address in addresses else None
    for start in range(0, max(rows, 1), step):
        stop = min(start + step, rows)
        if local is not None:
            yield start, local[first + start : first + stop]
            continue
        part = await rows_of(plugin.worker, address, key, first + start, first + stop)
        meter.count(part)
        yield start, part


def _accumulate(
    out: np.ndarray[Any, Any], part: np.ndarray[Any, Any], weight: float | None
) -> None:
    if weight is None:
        out[:] = part
    else:
        out += out.dtype.type(weight) * part


def _finished(data: Any, spec: ArraySpec) -> Any:
    """The piece as it is stored: checked, of the array's dtype, contiguous and aligned."""
    if spec.sparse:
        data = spec.sparse(data, dtype=spec.dtype)
        values = data.data
    else:
        data = values = np.require(np.asarray(data, dtype=spec.dtype), requirements=["C", "A"])
    if spec.check_finite and values.dtype.kind in "fc" and not np.isfinite(values).all():
        raise ValueError(
            "The array holds NaN or infinity, which a coded product would spread: "
            "replace them, or encode with `check_finite=False`."
        )
    return data


def _slice_rows(spec: ArraySpec) -> int:
    size = parse_bytes(dask.config.get("coded.encode.slice"))
    return max(1, size // max(spec.columns * spec.dtype.itemsize, 1))
