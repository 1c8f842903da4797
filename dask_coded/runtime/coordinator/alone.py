"""Products that the coordinator computes alone, where a round would take longer.

It multiplies the blocks that lie in its own memory, in the algorithm's thread. Blocks of a small
matrix that it lacks are fetched once it has lost as much time by rounds as fetching takes. A
product of which a block is not here is a round.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from dask_coded.membership import Timeouts
from dask_coded.rounds import Layout
from dask_coded.rounds.kernels import KERNELS
from dask_coded.rounds.quicker import Quicker
from dask_coded.runtime.coordinator.report import RoundReport
from dask_coded.runtime.spec import ArraySpec, CodedSpec
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin
from dask_coded.transport.rows import rows_of

# A core reads about this much in the time of a round of a few workers, 6 ms. A larger matrix is not
# fetched.
_MOST = 1 << 26
# Bytes per second at which blocks come, at least; half of what links of 2 Gbit/s carry.
_RATE = 1e8
# Bytes of an entry of a sparse block beside its value: its column.
_INDEX = 8

#: What the time of a product depends on: the shape of a row of the operand, and its type.
_Kind = tuple[tuple[int, ...], np.dtype[Any]]
#: Returns a piece, or None if it is not in memory any more.
_Found = Callable[[], Any]


class _Blocks(NamedTuple):
    """All blocks of an array, as far as they are still in this worker's memory.

    Parameters
    ----------
    spec : ArraySpec
    pieces : list of int
        For each block, the number of the piece that equals it.
    data : list of callables
        For each block, returns that piece; None if Dask has dropped it or moved it to the disk.
    copies : bool
        Whether any of them was fetched, and takes memory.
    """

    spec: ArraySpec
    pieces: list[int]
    data: list[_Found]
    copies: bool


class Alone:
    """Computes products of one array for one task, without other workers.

    Parameters
    ----------
    plugin : CodedWorkerPlugin
        Of the coordinator's worker.
    """

    def __init__(self, plugin: CodedWorkerPlugin) -> None:
        self._plugin = plugin
        self._times: defaultdict[_Kind, Quicker] = defaultdict(Quicker)
        self._blocks: _Blocks | None = None
        self._expected = math.inf
        self._lost = 0.0  # seconds by which rounds took longer, until blocks are fetched
        self._fetching: asyncio.Task[None] | None = None
        self._looked = -math.inf  # when memory was looked at

    def product(
        self, operand: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], RoundReport] | None:
        """Return a product and its report, in the algorithm's thread; None if a round is to run."""
        times = self._times[_kind(operand)]
        blocks = self._blocks
        if blocks is None or not times.is_alone:
            return None
        began = monotonic()
        pieces = [found() for found in blocks.data]
        if any(piece is None for piece in pieces) or self._lacks_memory(blocks, began):
            self._blocks = None
            return None
        spec = blocks.spec
        operand = np.require(operand, requirements=["C", "A"])
        assembler = spec.assembler(operand, self._plugin.exchange.empty)
        try:
            with np.errstate(all="ignore"):
                for number, piece in zip(blocks.pieces, pieces, strict=True):
                    rows = assembler.block(number)
                    KERNELS[spec.kernel](piece, len(rows), operand)(0, len(rows), rows)
        except Exception:  # the round raises it again, and says where
            self._blocks = None
            return None
        result = spec.result(assembler.result)
        seconds = monotonic() - began
        times.took_alone(seconds)
        return result, self._report(blocks, seconds)

    def _lacks_memory(self, blocks: _Blocks, now: float) -> bool:
        """Whether copies of blocks take memory that is short; looks only once in a while."""
        if not blocks.copies or now < self._looked + Timeouts.WATCH:
            return False
        self._looked = now
        return self._plugin.exchange.room() <= 0

    def _report(self, blocks: _Blocks, seconds: float) -> RoundReport:
        here, stripes = self._plugin.exchange.address, blocks.spec.geometry.stripes
        report = RoundReport(seconds=seconds, workers=1, alone=True)
        rows = np.array(blocks.spec.geometry.rows, dtype=float)
        ends = (np.cumsum(rows) * (seconds / max(rows.sum(), 1))).tolist()
        for piece, begin, end in zip(blocks.pieces, [0.0, *ends], ends, strict=False):
            report.timeline.append((here, piece, 0, stripes, begin, end))
        return report

    def look(
        self, spec: CodedSpec, layout: Layout, addresses: tuple[str, ...], speed: float
    ) -> None:
        """Look which blocks are here, on the event loop after a round.

        Parameters
        ----------
        spec : CodedSpec
        layout : Layout
        addresses : tuple of str
            Of the workers of the layout.
        speed : float
            Work per second of this worker in that round; 0 if it has computed nothing.
        """
        self._expected = math.inf
        if not isinstance(spec, ArraySpec) or spec.check_keys or spec.dtype.hasobject:
            return  # shares that are to be checked come in rounds
        here = self._plugin.exchange.address
        holders: dict[int, tuple[int, str]] = {}
        for piece, (host, block) in enumerate(zip(layout.host, spec.code.block_of, strict=True)):
            if block >= 0 and host >= 0 and (block not in holders or addresses[host] == here):
                holders[int(block)] = piece, addresses[host]
        if len(holders) < spec.code.k or speed <= 0:
            return
        chosen = [holders[block] for block in range(spec.code.k)]
        work = sum(layout.edges[piece][-1] for piece, _ in chosen)
        self._expected = work / speed * self._plugin.threads
        if self._blocks is None and self._fetching is None:
            missing = [piece for piece, holder in chosen if holder != here]
            if self._pays(sum(_size(spec, layout, piece) for piece in missing)):
                self._fetching = asyncio.create_task(self._fetch(spec, chosen))

    def _pays(self, size: int) -> bool:
        """Whether rounds have cost as much time as it takes to fetch so many bytes."""
        exchange = self._plugin.exchange
        return not size or (size <= _MOST and size < exchange.room() and self._lost >= size / _RATE)

    async def _fetch(self, spec: ArraySpec, chosen: list[tuple[int, str]]) -> None:
        """Take hold of all blocks: of those here weakly, of copies of others as long as needed."""
        here = self._plugin.exchange.address
        # Whatever fails, a round does without it, or says what is wrong.
        try:
            # Any of those here may be on the disk: then the others are of no use.
            held = {piece: self._held(spec, piece) for piece, holder in chosen if holder == here}
            if None in held.values():
                return
            fetched = {piece: holder for piece, holder in chosen if piece not in held}
            copies = await asyncio.gather(
                *(self._copy(spec, *each) for each in fetched.items()), return_exceptions=True
            )
        except Exception:
            return
        finally:
            self._lost = 0.0
            self._fetching = None
        if not any(isinstance(copy, BaseException) for copy in copies):
            found: dict[int, Any] = held | dict(zip(fetched, copies, strict=True))
            pieces = [piece for piece, _ in chosen]
            self._blocks = _Blocks(spec, pieces, [found[p] for p in pieces], bool(fetched))

    def _held(self, spec: ArraySpec, piece: int) -> _Found | None:
        data = self._plugin.piece_in_memory(spec.keys[piece])
        return None if data is None else ref(data)

    async def _copy(self, spec: ArraySpec, piece: int, holder: str) -> _Found:
        rows = spec.piece_rows(piece)
        copy = await rows_of(self._plugin.worker, holder, spec.keys[piece], 0, rows)
        if isinstance(copy, np.ndarray):
            copy = np.require(copy, requirements=["C", "A"])
        return lambda: copy

    def took_round(self, operand: np.ndarray[Any, Any], seconds: float) -> None:
        """Record how long a round took, in the algorithm's thread."""
        times = self._times[_kind(operand)]
        times.took_round(seconds, self._expected)
        self._lost += times.gain


def _kind(operand: np.ndarray[Any, Any]) -> _Kind:
    return operand.shape[1:], operand.dtype


def _size(spec: ArraySpec, layout: Layout, piece: int) -> int:
    """Return the bytes of a piece, about."""
    if spec.sparse_type is None:
        return spec.piece_rows(piece) * spec.columns * spec.dtype.itemsize
    return int(layout.edges[piece][-1]) * (spec.dtype.itemsize + _INDEX)
