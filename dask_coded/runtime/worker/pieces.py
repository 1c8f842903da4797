"""Making pieces on the workers that will hold them, in bounded memory.

A piece is a linear combination: of source blocks when the array is encoded, of enough other pieces
when it was lost. Either way its worker fetches the parts slice by slice, straight from the
workers that hold them, and accumulates them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import scipy.sparse
from dask.sizeof import sizeof
from dask.utils import parse_bytes
from distributed import get_worker, secede
from distributed.protocol.serialize import ToPickle
from distributed.utils import sync

from dask_coded.arguments import check_chunk
from dask_coded.chunks import as_declared, check_type, some_rows, unchanging
from dask_coded.rounds.accuracy import doubtful_when_rebuilt
from dask_coded.rounds.footprint import Footprint, footprint_of
from dask_coded.rounds.scaling import (
    NOT_FINITE,
    Exponents,
    exponents_of,
    restored,
    scaled,
    squares_of,
    typical_of,
)
from dask_coded.runtime.answers import Lost, Recipe, Source, Stored, Waiting, ask
from dask_coded.runtime.spec import CodedDataLostError, CodedSpec, as_key, say_inaccurate
from dask_coded.runtime.worker.disk import FULL, MappedArray
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin, worker_plugin
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.rows import RowReader, RowsGoneError
from dask_coded.typing import Bools, Floats

logger = logging.getLogger("distributed.dask_coded")

# Rows of a sparse source that are fetched at once, because the bytes of a row are not known.
_SPARSE_ROWS = 2**16
# Bytes of rows that are scaled and added at once.
_CACHED = 2**19
_WHAT = "the matrix to encode"
_BAD = (
    "The array holds NaN or infinity: replace them, or encode with `check_finite=False` if the "
    "products of their rows may be NaN."
)


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
    worker = get_worker()
    plugin, key = worker_plugin(worker), worker.get_current_task()
    if (held := plugin.disk.still_held(key)) is not None:
        return plugin.disk.keep(key, held)
    # Its sources may be on slow or stopped workers. Meanwhile coordinators may need this thread.
    secede()
    return sync(worker.loop, _make, plugin, array_id, piece)


async def _make(plugin: CodedWorkerPlugin, array_id: str, piece: int) -> Any:
    avoid: list[str] = []
    meter = _Meter()
    backoff = Backoff()
    scheduler = plugin.worker.scheduler
    unread, reason, said = "", "", ""
    while True:
        match await ask(
            scheduler.coded_sources,
            array=array_id,
            piece=piece,
            avoid=avoid,
            unread=unread,
            reason=reason,
        ):
            case Lost(message):
                raise CodedDataLostError(message)
            case Waiting():
                avoid.clear()  # these workers may answer by now
                unread = "" if unread == "unreachable" else unread
            case Stored(spec, storage):
                data, growth, failure = await plugin.stores.read(spec, storage, piece)
                if failure is not None:
                    unread, reason = failure
                    continue
                await scheduler.coded_made(
                    array=array_id,
                    piece=piece,
                    received=0,
                    work=_work(spec, piece, data),
                    exponents=ToPickle({}),
                    squares=ToPickle({}),
                    footprint=None,
                    growth=growth,
                    stored=True,
                    weights={},
                    worker=plugin.exchange.address,
                )
                return plugin.disk.keep(spec.keys[piece], data)
            case Recipe(spec, sources, growth, storage):
                mixer = _Mixer(spec, piece, sources)
                try:
                    data = await _combine(plugin, mixer, sources, meter)
                except RowsGoneError as gone:
                    avoid.append(gone.address)
                except OSError as exc:
                    if exc.errno not in FULL or as_key(sources[0].key) not in spec.keys:
                        raise
                    # A piece is rebuilt once there is room again. Only an encoding ends.
                    if said != (said := str(exc)):
                        logger.warning("A piece is not rebuilt yet: %s", exc)
                else:
                    doubtful = await asyncio.to_thread(_doubtful, mixer, sources)
                    if doubtful.any():
                        say_inaccurate(
                            f"{np.count_nonzero(doubtful)} of {len(doubtful)} rows of a block of "
                            f"{spec.code!r} have lost more than half of their digits: the block "
                            "was rebuilt from pieces with much larger rows. Encode the array "
                            "again, with columns of one scale or with `dask_coded.Repetition`."
                        )
                    encoding = as_key(sources[0].key) not in spec.keys
                    stored = storage is not None and await plugin.stores.write(
                        spec, storage, piece, data, growth, must=encoding
                    )
                    await scheduler.coded_made(
                        array=array_id,
                        piece=piece,
                        received=meter.received,
                        work=_work(spec, piece, data),
                        exponents=ToPickle(mixer.report()),
                        squares=ToPickle(mixer.squares),
                        footprint=mixer.footprint,
                        growth=growth,
                        stored=stored,
                        weights={} if encoding else _weights(spec, sources),
                        worker=plugin.exchange.address,
                    )
                    return plugin.disk.keep(spec.keys[piece], data)
        await backoff.wait()


def _doubtful(mixer: _Mixer, sources: Sequence[Source]) -> Bools:
    """Return which rows have lost digits, if a block was made from other pieces."""
    spec = mixer.spec
    if not mixer.restores or len(sources) == 1:
        return np.zeros(0, dtype=bool)
    weights = list(_weights(spec, sources).items())
    eps = float(np.finfo(spec.dtype).eps)
    return doubtful_when_rebuilt(spec.code, weights, spec.typical, mixer.block, eps)


def _weights(spec: CodedSpec, sources: Sequence[Source]) -> dict[int, float]:
    """Return the weights of the pieces that another one is made from."""
    number = {key: piece for piece, key in enumerate(spec.keys)}
    return {number[as_key(source.key)]: source.weight for source in sources}


class _Mixer:
    """Adds up the rows of a piece, scaled by the exponents of the blocks that they are from.

    Exponents are found in the rows while the array is encoded. Later the spec has them, and a
    rebuilt block must be scaled by those and not by its own, which rounding may have changed.
    """

    def __init__(self, spec: CodedSpec, piece: int, sources: Sequence[Source]) -> None:
        self.spec = spec
        self.piece = piece
        #: The block that the piece equals, -1 for parity.
        self.block = int(spec.code.block_of[piece])
        #: Footprint of the block that the piece equals, if this piece's maker reports it.
        self.footprint: Footprint | None = None
        self._found: dict[int, Exponents] = {}
        #: Exponents of the typical entries of the blocks that this piece's maker reports.
        self._typical: dict[int, Exponents] = {}
        #: For a block that it reports, the sum of squares of each column; not of pairs.
        self.squares: dict[int, Floats] = {}
        if spec.scaled and spec.exponents is None:
            self._found = {s.block: np.zeros(s.rows, np.int16) for s in sources}
            reporters = spec.reporters  # of pairs they are found in the code each time
            self._typical = {
                b: np.zeros_like(found) for b, found in self._found.items() if reporters[b] == piece
            }

    @property
    def rows(self) -> int:
        return self.spec.piece_rows(self.piece)

    @property
    def restores(self) -> bool:
        """Whether the finished sum has to be scaled back."""
        return self.block >= 0 and self.spec.exponents is not None

    def add(self, into: Any, part: Any, source: Source, first: int) -> None:
        """Add rows of a dense source, from row ``first`` on."""
        # A few rows at a time, which stay in the cache from one step to the next. In workers new
        # arrays of megabytes are slow, because freed memory is returned to the system at once.
        step = max(1, _CACHED // max(into[:1].nbytes, 1))
        room = np.empty((min(step, len(part)), into.shape[1]), into.dtype)
        for a in range(0, len(part), step):
            rows = part[a : a + step]
            into[a : a + step] += self.scaled(rows, source, first + a, room[: len(rows)])

    def scaled(self, part: Any, source: Source, first: int, out: Any = None) -> Any:
        """Return the rows of a source from row ``first`` on as they are added to the piece."""
        spec, weight, block = self.spec, source.weight, source.block
        part = part.astype(spec.dtype, copy=False)
        if block < 0 or not spec.combines:
            weight = np.float64(weight)
            return part * weight if out is None else np.multiply(part, weight, out=out)
        if spec.exponents is not None:
            exponents = spec.exponents[block][first : first + part.shape[0]]
        else:
            exponents = exponents_of(part, spec.least_exponent)
            if spec.check_finite and (exponents == NOT_FINITE).any():
                raise ValueError(_BAD)
            self._found[block][first : first + len(exponents)] = exponents
            if spec.combines and block in self._typical:
                self._typical[block][first : first + len(exponents)] = typical_of(part, exponents)
        return scaled(part, exponents, weight, out=out)

    def restored(self, total: Any, first: int) -> Any:
        """Return rows of the finished sum, from row ``first`` on, as the piece stores them."""
        if not self.restores:
            return total
        assert self.spec.exponents is not None
        exponents = self.spec.exponents[self.block][first : first + total.shape[0]]
        with np.errstate(over="ignore"):
            rows = restored(total, exponents)
        # Rounding must not make the largest numbers of a block infinite.
        values = rows.data if scipy.sparse.issparse(rows) else rows
        largest = np.finfo(self.spec.dtype).max
        for part in (values.real, values.imag) if values.dtype.kind == "c" else (values,):
            np.clip(part, -largest, largest, out=part)
        return rows

    def finished(self, data: Any) -> Any:
        """Return the piece as it is stored: checked, of its dtype, contiguous and aligned."""
        spec = self.spec
        if kind := spec.sparse_type:
            data = kind(data, dtype=spec.dtype)
            if spec.footprints is not None:
                data = spec.footprints.within(data, spec.blocks_of([self.piece]))
            elif self.block >= 0 and spec.reporters[self.block] == self.piece:
                self.footprint = footprint_of(data)
            data = unchanging(data)
        elif not isinstance(data, MappedArray):
            data = np.require(np.asarray(data, dtype=spec.dtype), requirements=["C", "A"])
        finite = True
        if self.block in self._found:
            self._examine(self.block, data)
            finite = not (self._found[self.block] == NOT_FINITE).any()
        elif spec.exponents is None and spec.dtype.kind in "fc":
            values = (p.data if spec.sparse_type else p for p in self._parts(data))
            finite = all(np.isfinite(part).all() for part in values)
        # What is rebuilt was checked when the array was encoded.
        if spec.check_finite and not finite:
            raise ValueError(_BAD)
        return data

    def _examine(self, block: int, data: Any) -> None:
        """Find the exponents of the rows of a block that this piece equals."""
        parts = list[tuple[Exponents, Exponents]]()
        for rows in self._parts(data):
            found = exponents_of(rows, self.spec.least_exponent)
            # Only rows that are recovered are examined for lost digits.
            typical = np.zeros_like(found)
            if self.spec.combines:
                typical = typical_of(rows, found)
                if block in self._typical and self.spec.sized:
                    self.squares[block] = self.squares.get(block, 0.0) + squares_of(rows, found)
            parts.append((found, typical))
        self._found[block], typical = map(np.concatenate, zip(*parts, strict=True))
        if block in self._typical:
            self._typical[block] = typical

    def _parts(self, data: Any) -> Iterator[Any]:
        """Yield the rows of a piece, of a dense one a slice at a time."""
        rows = data.shape[0]
        if self.spec.sparse_type:
            yield data
            return
        step = slice_rows(self.spec)
        for first in range(0, max(rows, 1), step):
            last = min(first + step, rows)
            yield np.asarray(data[first:last])
            if isinstance(data, MappedArray):
                data.release(first, last)

    def report(self) -> dict[int, Exponents]:
        """Return what the maker of this piece reports, for each block of shape (2, rows).

        The exponents of the rows, and those of their typical entries.
        """
        return {b: np.stack([self._found[b], typical]) for b, typical in self._typical.items()}


def _work(spec: CodedSpec, piece: int, data: Any) -> list[float] | None:
    """Return the work of each stripe of a sparse piece; None for a dense one, which is uniform."""
    if not spec.sparse_type:
        return None
    edges = np.minimum(spec.geometry.edges(int(spec.code.group[piece])), data.shape[0])
    # A row costs its non-zeros, plus one for writing its result.
    work: list[float] = np.diff(data.indptr[edges] + edges).astype(float).tolist()
    return work


async def _combine(
    plugin: CodedWorkerPlugin, mixer: _Mixer, sources: Sequence[Source], meter: _Meter
) -> Any:
    """Return ``sum weight * source``: a copy if there is a single source of weight one."""
    loop = asyncio.get_running_loop()
    spec, rows = mixer.spec, mixer.rows
    copy = len(sources) == 1 and sources[0].weight == 1
    if copy and plugin.exchange.address in sources[0].holders:
        if (data := _held(plugin, sources[0], spec)) is None:
            raise RowsGoneError(plugin.exchange.address, silent=False)
        if not plugin.disk.is_spilled(as_key(sources[0].key)) or spec.sparse_type:
            # In the client's process a chunk may be memory of the caller, who may change it. What
            # this package has made is not.
            shared = plugin.exchange.address.startswith("inproc://")
            key = sources[0].key
            ours = str(key[0] if isinstance(key, tuple | list) else key).startswith("coded-")
            own = data.copy() if shared and not ours else data
            return await loop.run_in_executor(
                None, lambda: mixer.finished(_as_declared(own, sources[0], spec))
            )
        # Its rows are copied to where a round can read them stripe by stripe, while it is in use.
    if spec.sparse_type:
        data = await _combine_sparse(plugin, mixer, sources, meter, copy)
        return await loop.run_in_executor(None, mixer.finished, data)
    reader = RowReader(plugin.worker, plugin.exchange.readable_memory)
    # In a thread, because space for a large file may take seconds.
    out = await loop.run_in_executor(
        None, plugin.disk.zeros, spec.keys[mixer.piece], (rows, spec.columns), spec.dtype
    )
    wide = spec.dtype if copy else np.result_type(spec.dtype, np.float64)
    direct = wide == spec.dtype and not (mixer.restores and not copy)
    # Each worker starts with another source, so that they do not all ask one holder at once.
    turns = rotated(sources, mixer.piece)
    step = slice_rows(spec)
    for first in range(0, rows, step):
        total = np.asarray(out[first : first + step])
        if not direct:
            total = np.zeros(total.shape, dtype=wide)
        async for source, begin, part, into in parts_from(
            plugin, reader, turns, total, first, spec, meter
        ):
            if copy:
                await loop.run_in_executor(None, into.__setitem__, ..., part)
            else:
                await loop.run_in_executor(None, mixer.add, into, part, source, begin)

        def store(total: Any = total, first: int = first) -> None:
            out[first : first + len(total)] = mixer.restored(total, first)

        if not direct:
            await loop.run_in_executor(None, store)
        if isinstance(out, MappedArray):
            out.release(first, first + len(total))
        plugin.disk.filled(spec.keys[mixer.piece], out[first : first + step].nbytes)
    return await loop.run_in_executor(None, mixer.finished, out)


async def _combine_sparse(
    plugin: CodedWorkerPlugin,
    mixer: _Mixer,
    sources: Sequence[Source],
    meter: _Meter,
    copy: bool,
) -> Any:
    loop = asyncio.get_running_loop()
    reader = RowReader(plugin.worker, None)
    total, step = None, _SPARSE_ROWS
    for source in sources:
        parts = [
            await rows_from(
                plugin, reader, source, start, min(start + step, source.rows), mixer.spec, meter
            )
            for start in range(0, max(source.rows, 1), _SPARSE_ROWS)
        ]

        def add(parts: list[Any] = parts, s: Source = source, so_far: Any = total) -> Any:
            block = scipy.sparse.vstack(parts, format="csr")
            if not copy:
                block = mixer.scaled(block, s, 0)
            block.resize((mixer.rows, mixer.spec.columns))
            return block if so_far is None else so_far + block

        total = await loop.run_in_executor(None, add)
    return total if copy else await loop.run_in_executor(None, mixer.restored, total, 0)


def rotated(sources: Sequence[Source], shift: int) -> tuple[Source, ...]:
    """Return the sources in the same order, but from another one on."""
    first = shift % len(sources)
    return (*sources[first:], *sources[:first])


async def parts_from(
    plugin: CodedWorkerPlugin,
    reader: RowReader,
    sources: Sequence[Source],
    total: Any,
    first: int,
    spec: CodedSpec,
    meter: _Meter | None = None,
) -> AsyncIterator[tuple[Source, int, Any, Any]]:
    """Yield the sources of some rows of a sum: ``total``, from row ``first`` on.

    With each source come the number of its first row, its rows, which are valid until the next
    source is asked for, and the part of ``total`` that they belong to.

    Raises
    ------
    RowsGoneError
        As :func:`rows_from`.
    """
    for source in sources:
        begin = max(first - source.at, 0)
        end = min(first + len(total) - source.at, source.rows)
        if begin < end:
            part = await rows_from(plugin, reader, source, begin, end, spec, meter)
            shift = source.at - first
            yield source, begin, part, total[begin + shift : end + shift]


async def rows_from(
    plugin: CodedWorkerPlugin,
    reader: RowReader,
    source: Source,
    begin: int,
    end: int,
    spec: CodedSpec,
    meter: _Meter | None = None,
) -> Any:
    """Return rows of a source, from this worker or from one that holds them.

    They are valid until the reader is asked again.

    Raises
    ------
    RowsGoneError
        If that worker no longer holds them, or does not answer.
    """
    key, begin, end = as_key(source.key), source.start + begin, source.start + end
    if plugin.exchange.address in source.holders:
        data = _held(plugin, source, spec)
        if isinstance(data, MappedArray):
            return await asyncio.to_thread(data.read, begin, end)
        if scipy.sparse.issparse(data):
            data = await asyncio.to_thread(some_rows, data, begin, end)
            return await asyncio.to_thread(_as_declared, data, source, spec)
        if data is not None:
            return _as_declared(some_rows(data, begin, end), source, spec)
    row = 0 if spec.sparse_type else spec.columns * spec.dtype.itemsize
    part = await reader.read(source.holders[0], key, begin, end, row, _declared_shape(source, spec))
    part = _as_declared(part, source, spec)
    if meter is not None:
        meter.count(part)
    return part


def _held(plugin: CodedWorkerPlugin, source: Source, spec: CodedSpec) -> Any:
    """Return the data of a source on this worker; None if they are not here, or not readable."""
    data = plugin.disk.held(as_key(source.key))
    if data is not None and (declared := _declared_shape(source, spec)):
        check_type(_WHAT, data)
        check_chunk(_WHAT, data.shape, declared)
    return data


def _declared_shape(source: Source, spec: CodedSpec) -> tuple[int, int] | None:
    """Return the shape of a source block, which may be a chunk of the user's; None for a piece."""
    return None if as_key(source.key) in spec.keys else (source.rows, spec.columns)


def _as_declared(rows: Any, source: Source, spec: CodedSpec) -> Any:
    """Return rows of a source block, or of a piece, as the array says that they are."""
    if as_key(source.key) in spec.keys or isinstance(rows, MappedArray):
        return rows
    return as_declared(_WHAT, rows, spec.dtype, spec.sparse_type)


def slice_rows(spec: CodedSpec) -> int:
    """Return how many rows of a piece are fetched at once."""
    size = parse_bytes(dask.config.get("coded.encode.slice"))
    return max(1, size // max(spec.columns * spec.dtype.itemsize, 1))
