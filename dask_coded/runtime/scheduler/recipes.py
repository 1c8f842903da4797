"""From what pieces and checks are made, and where workers read it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dask.typing import Key
from distributed.core import Status
from distributed.metrics import monotonic
from distributed.utils import offload

from dask_coded.codes import DecodeError
from dask_coded.config import timeouts
from dask_coded.runtime.answers import Lost, Recipe, Reply, Source, Stored, Waiting, reply
from dask_coded.runtime.scheduler.homes import Homes
from dask_coded.runtime.scheduler.state import RELEASED, ArrayState
from dask_coded.runtime.spec import ArraySpec, CodedSpec

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState


class Recipes:
    """Answers how to make the pieces and checks of arrays, or that they will come, or are lost.

    Parameters
    ----------
    scheduler : Scheduler
    arrays : mapping of str to ArrayState
        The coded arrays by id; changes.
    homes : Homes
    """

    def __init__(
        self, scheduler: Scheduler, arrays: Mapping[str, ArrayState], homes: Homes
    ) -> None:
        self._scheduler = scheduler
        self._arrays = arrays
        self._homes = homes
        scheduler.handlers.update(coded_block=self.block, coded_sources=self.sources)

    async def sources(
        self,
        array: str,
        piece: int,
        avoid: Sequence[str] = (),
        unread: str = "",
        reason: str = "",
    ) -> Reply:
        """Handler: how to make a piece.

        Answers :class:`Stored`, :class:`Recipe`, :class:`Waiting` or :class:`Lost`.

        Workers in ``avoid`` do not answer and must not be asked. If the others do not suffice, the
        answer is :class:`Waiting`. ``unread`` says why the piece cannot be read from its store:
        ``damaged``, ``refused`` if the worker may not, or ``unreachable`` as long as the store is.
        ``reason`` says it to people.
        """
        if (state := self._arrays.get(array)) is None:
            return reply(Lost(RELEASED))
        spec, keys = state.spec, state.sources
        self._homes.not_held(spec.keys[piece])
        if unread:
            state.opening = False
            if unread == "damaged":
                state.damaged.add(piece)
            elif unread == "refused":
                state.refused[piece] = str(reason)
        elif state.storage is not None and keys is None and piece < state.storage.pieces:
            if self._comes_later(state, piece):
                return reply(Waiting())
            return reply(Stored(_without_sizes(spec), state.storage))
        if keys is not None:
            ingredients = spec.from_sources(piece)
        else:
            keys = spec.keys
            others = self._held_beside(piece, keys, avoid)
            slow = self._homes.slow_holders(keys[i] for i in others)
            # Without slow holders, if the others suffice.
            for some in ([i for i in others if keys[i] not in slow], others):
                with contextlib.suppress(DecodeError, ValueError):
                    ingredients = await offload(spec.from_pieces, piece, some)
                    break
            else:
                # Those that do not answer may do so later, and one may have come back meanwhile.
                unknown = others != self._held_beside(piece, keys, avoid) or any(
                    self._homes.holders(key) or self._homes.is_held(key)
                    for key in keys
                    if not self._homes.holders(key, avoid)
                )
                unknown = unknown or unread == "unreachable" or self._is_read(state, piece)
                return reply(Waiting() if unknown else Lost(self.lost_message(state)))
        found, weights = [], dict[int, float]()
        for source, weight, rows, start, at, block in ingredients:
            key = keys[source]
            ts = self._scheduler.tasks.get(key)
            if ts is None or ts.state == "erred":
                return reply(Lost(self.lost_message(state)))
            if not (holders := self._homes.holders(key, avoid)):
                return reply(Waiting())
            found.append(Source(key, tuple(holders), weight, rows, start, at, block))
            weights[source] = weight
        written = state.storage if state.sources is not None or unread == "damaged" else None
        # While an array is encoded, its sources are no pieces. Those of pairs count twice.
        follow = state.sources is None and isinstance(spec, ArraySpec)
        growth = state.errors.combined(piece, weights) if follow else 0.0
        return reply(Recipe(_without_sizes(spec), tuple(found), growth, written))

    def checks_come(self, state: ArrayState) -> bool:
        """Whether to wait for checks of an array that was opened, which are being made.

        Not if their blocks or workers do not answer, and not for long: coordinators make what they
        lack, whenever rounds can be finished at all.
        """
        if (now := monotonic()) >= state.checks_due:
            return False
        state.checks_due = min(state.checks_due, now + timeouts().longest)
        keys, blocks = state.spec.keys, state.spec.code.systematic_pieces
        for key, block in zip(state.spec.check_keys, blocks, strict=False):
            ts = self._scheduler.tasks.get(key)
            lacking = ts is not None and not ts.who_has and self._is_made_now(ts)
            if lacking and self._homes.answering(keys[block]):
                return True
        state.checks_due = -math.inf
        return False

    def _is_made_now(self, ts: TaskState) -> bool:
        """Whether a worker that answers, and is not paused, makes a piece or a check."""
        ws = ts.processing_on
        return ws is not None and ws.status == Status.running and self._homes.answers(ws.address)

    def _comes_later(self, state: ArrayState, piece: int) -> bool:
        """Whether other pieces of an array that is opened are to be read first.

        A round needs any k. So the blocks are read first, which need no decoding, until no more are
        lacking than other pieces can replace.
        """
        first = state.spec.code.systematic_pieces
        if not state.opening or piece in first:
            return False
        tasks = [self._scheduler.tasks.get(state.spec.keys[i]) for i in first]
        reading = [ts for ts in tasks if ts and self._is_made_now(ts)]
        state.opening = len(reading) > state.spec.code.pieces - len(first)
        return state.opening

    def _is_read(self, state: ArrayState, piece: int) -> bool:
        """Whether another piece of an array is to be read from a store."""
        return any(
            other != piece and state.is_stored(other) and self._is_being_made(key)
            for other, key in enumerate(state.spec.keys)
        )

    def _held_beside(self, piece: int, keys: Sequence[Key], avoid: Collection[str]) -> list[int]:
        """Return which other pieces of an array are held by workers that may be asked."""
        return [i for i, key in enumerate(keys) if i != piece and self._homes.holders(key, avoid)]

    def block(self, array: str, block: int, avoid: Sequence[str] = ()) -> Reply:
        """Handler: where to read a block.

        Answers :class:`Recipe` with a single source, :class:`Waiting` or :class:`Lost`. Workers
        in ``avoid`` do not answer and must not be asked.
        """
        if (state := self._arrays.get(array)) is None:
            return reply(Lost(RELEASED))
        key = state.spec.keys[state.spec.code.systematic_pieces[block]]
        if not (holders := self._homes.answering(key, avoid)):
            coming = self._homes.holders(key) or self.is_coming(state)
            return reply(Waiting() if coming else Lost(self.lost_message(state)))
        source = Source(key, tuple(holders), 1.0, state.spec.geometry.rows[block], 0, 0, block)
        growth = state.errors.of(int(state.spec.code.systematic_pieces[block]))
        return reply(Recipe(_without_sizes(state.spec), (source,), growth))

    def lost_message(self, state: ArrayState) -> str:
        """Say that the pieces that are left of an array do not suffice."""
        return state.lost_message(sum(bool(self._homes.holders(key)) for key in state.spec.keys))

    def is_coming(self, state: ArrayState) -> bool:
        """Whether a piece of an array is being made, or will be."""
        return any(map(self._is_being_made, state.spec.keys))

    def _is_being_made(self, key: Key) -> bool:
        ts = self._scheduler.tasks.get(key)
        coming = ("processing", "waiting", "no-worker", "queued", "released")
        return ts is not None and ts.state in coming


def _without_sizes(spec: CodedSpec) -> CodedSpec:
    """Return what those who make pieces and checks need of a spec."""
    if isinstance(spec, ArraySpec) and spec.sizes is not None:
        return replace(spec, sizes=None)
    return spec
