"""Operands at a participant: read in shared memory, or received in chunks and passed on.

A participant that has received one says where it lies, so that others on its host can read it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from time import monotonic
from typing import Any

import numpy as np
from dask.typing import Key

from dask_coded.config import timeouts
from dask_coded.rounds.broadcast import Confirm, PassOn, Relay, ReportLacking
from dask_coded.rounds.footprint import indices_of
from dask_coded.runtime.operand import (
    ChunkConfirmed,
    ChunksLacking,
    Entries,
    OperandAt,
    OperandChunk,
    Part,
    Ticket,
    checked_part,
    numbers_of,
)
from dask_coded.transport import Answer, Channel, Exchange
from dask_coded.transport.memory import RESULTS, Mappings, Segment, SharedArray
from dask_coded.transport.messages import Closed, Message
from dask_coded.typing import Ints

# Chunks may come before their round is started here, or after it has ended. This many operands
# without a round are kept, and this many rounds that have ended are remembered.
_UNCLAIMED = 8
_ENDED = 1024
# Of how many blocks the columns are kept unpacked. Loops ask for the same ones in every round, and
# a receiver needs those of all blocks on its host.
_UNPACKED = 256

#: Takes an operand that is here.
Ready = Callable[[Any], None]
#: Takes the reason why there is none.
Fail = Callable[[Exception], None]
#: Unpacks a footprint; called from any thread.
Columns = Callable[[bytes], Ints]


class Operands:
    """The operands of the rounds that a worker takes part in.

    All methods run on the worker's event loop.

    Parameters
    ----------
    exchange : Exchange
        Of the worker.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        # A coordinator uses the same segment in every round, or those of its last results in turn.
        self._mappings = Mappings(most=RESULTS, room=exchange.room)
        self._columns = lru_cache(maxsize=_UNPACKED)(indices_of)
        self._coming: dict[Key, _Coming] = {}
        self._ended: dict[Key, None] = {}
        exchange.register(self._handle, [OperandChunk, OperandAt])

    def expect(
        self, run_id: Key, ticket: Ticket, ready: Ready, failed: Fail, answer: Answer
    ) -> None:
        """Call ``ready`` with the operand of a round once it is here, and pass it on meanwhile.

        Parameters
        ----------
        run_id : Key
        ticket : Ticket
        ready : callable(ndarray or None)
        failed : callable(Exception)
            Called instead if the operand cannot be put together here.
        answer : callable(Message)
            Sends a message to the coordinator.
        """
        operand, parts = ticket
        if isinstance(operand, tuple):
            try:
                operand = self._mappings.view(SharedArray.received(operand))
            except OSError:
                self._of(run_id).claim((), ready, failed, answer)
                answer(ChunksLacking(run_id, (), unreadable=True))
                return
        if operand is None and parts:
            self._of(run_id).claim(parts, ready, failed, answer)
        else:
            ready(operand)

    def drop(self, run_id: Key, over: bool) -> None:
        """Pass nothing on any more, and keep nothing of the operand.

        Parameters
        ----------
        run_id : Key
        over : bool
            Whether the round has ended for all workers. Otherwise others on this host may still
            compute with the operand in this worker's memory.
        """
        if (operand := self._coming.pop(run_id, None)) is None:
            return
        operand.close(over)
        self._ended[run_id] = None
        while len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]

    def _expire(self, run_id: Key) -> None:
        operand = self._coming.get(run_id)
        if operand is not None and not operand.claimed:
            # The round is not over: its first message may still come.
            self._coming.pop(run_id).close(over=False)

    def trim(self) -> None:
        """Keep no memory of other workers mapped if memory is short."""
        self._mappings.trim(RESULTS)

    def release(self) -> None:
        """Keep no memory of other workers mapped, and no columns."""
        self._mappings.clear()
        self._columns.cache_clear()

    def _of(self, run_id: Key) -> _Coming:
        operand = self._coming.get(run_id)
        if operand is None:
            unclaimed = [key for key, other in self._coming.items() if not other.claimed]
            for key in unclaimed[: 1 - _UNCLAIMED]:
                self._coming.pop(key).close(over=False)
            # If its coordinator has died, nothing else would ever remove it.
            asyncio.get_running_loop().call_later(timeouts().unclaimed, self._expire, run_id)
            operand = self._coming[run_id] = _Coming(self._exchange, run_id, self._columns)
        return operand

    def _handle(self, message: Message, answer: Answer) -> None:
        if message.run_id in self._ended:
            return
        match message:
            case OperandChunk(run_id):
                coming = self._of(run_id)
                try:
                    coming.receive(message, answer)
                except Exception as exc:
                    if not coming.claimed:
                        raise
                    coming.fail(exc)
            case OperandAt(run_id, place):
                if operand := self._coming.get(run_id):
                    operand.found(place, self._mappings)


class _Coming:
    """One operand on its way."""

    def __init__(self, exchange: Exchange, run_id: Key, columns: Columns) -> None:
        self._exchange = exchange
        self._columns = columns
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        # Those of the round, once it has been started here.
        self._ready: Ready
        self._failed: Fail
        self._gave_up = False  # only passes chunks on
        self._answer: Answer | None = None
        self._expected: Sequence[tuple[Part, bytes | None]] = ()
        self._entries: dict[int, Entries] = {}  # by the number of the first chunk
        self._operand: Any = None
        self._channels: dict[str, Channel] = {}  # to workers that this one passes chunks on to
        self._relay = Relay(monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._segment: Segment | None = None

    def _room(self, part: Part, length: int) -> np.ndarray[Any, Any]:
        """Return room for the operand, in memory that neighbours can read if possible."""
        dtype, shape = np.dtype(part.dtype), (length, *part.shape[1:])
        size = math.prod(shape) * dtype.itemsize
        self._segment = self._exchange.memory.lease(size) if self._exchange.has_memory else None
        if self._segment is None:
            return np.empty(shape, dtype)
        room: np.ndarray[Any, Any] = self._segment.array(dtype, shape)
        return room

    @property
    def claimed(self) -> bool:
        """Whether its round has been started here."""
        return self._answer is not None

    def claim(
        self,
        parts: Sequence[tuple[Part, bytes | None]],
        ready: Ready,
        failed: Fail,
        answer: Answer,
    ) -> None:
        """Record that the round has been started here; without parts the whole operand comes."""
        self._ready, self._failed, self._answer = ready, failed, answer
        if packed := [footprint for _, footprint in parts if footprint is not None]:
            # In a thread, because millions of columns take milliseconds. They are here before the
            # last chunk, as a rule.
            self._loop.run_in_executor(None, lambda: [self._columns(found) for found in packed])
        self._expect(parts)
        self._complete()
        self._set_timer()

    def fail(self, exc: Exception) -> None:
        """Compute nothing here, and have a neighbour receive the operand instead."""
        assert self._answer is not None
        if not self._gave_up:
            self._gave_up = True
            self._failed(exc)
            self._answer(OperandAt(self._run_id, None))

    def _expect(self, parts: Sequence[tuple[Part, bytes | None]]) -> None:
        self._expected = parts
        self._relay.expect((n for part, _ in parts for n in numbers_of(part)), monotonic())

    def receive(self, chunk: OperandChunk, answer: Answer) -> None:
        if self._operand is None and not self._gave_up:
            self._store(chunk)
        now = monotonic()
        self._obey(self._relay.received(chunk.number, answer, chunk.below, now), chunk)
        self._complete()
        self._set_timer()

    def _store(self, chunk: OperandChunk) -> None:
        part = checked_part(chunk.part)
        if chunk.number not in numbers_of(part):
            raise ValueError(f"Chunk {chunk.number} is not of the part {part}")
        whole = part.shape[0] == part.length
        if (entries := self._entries.get(part.first)) is None:
            array = self._room(part, part.length) if whole else np.empty(part.shape, part.dtype)
            entries = self._entries[part.first] = Entries(part, array)
        entries.chunk(chunk.number)[...] = chunk.data
        if whole and self.claimed and not self._expected:
            self._expect([(part, None)])

    def _complete(self) -> None:
        """Put the parts together once all of them are here, and hand them on."""
        if self._gave_up or self._operand is not None or not self._expected:
            return
        if self._relay.wake is not None:
            return
        assert self._answer is not None
        part, packed = self._expected[0]
        if packed is None:
            self._operand = self._entries[part.first].array
        else:
            # Products do not read the entries that do not come, so these may hold anything.
            self._operand = self._room(part, part.length)
            for part, packed in self._expected:
                if not part.chunks:
                    continue
                assert packed is not None
                self._operand[self._columns(packed)] = self._entries[part.first].array
        self._ready(self._operand)
        place = None if self._segment is None else self._segment.place(self._operand)
        self._answer(OperandAt(self._run_id, place))

    def found(self, place: Any, mappings: Mappings) -> None:
        """Record where the receiver of this host has left the operand."""
        if self._operand is not None or self._gave_up or self._answer is None:
            return  # it came another way meanwhile, or nothing is computed here
        try:
            self._operand = mappings.view(SharedArray.received(place))
        except OSError:
            self._answer(ChunksLacking(self._run_id, (), unreadable=True))
        else:
            self._ready(self._operand)

    def _obey(
        self, commands: Sequence[PassOn | Confirm | ReportLacking], chunk: Any = None
    ) -> None:
        for command in commands:
            match command:
                case PassOn(address, _, below):
                    channel = self._exchange.channel(address)
                    if self._channels.get(address) is not channel:
                        self._channels[address] = channel
                        channel.listen(self._run_id, partial(self._heard, address))
                    channel.post(replace(chunk, below=below))
                case Confirm(answer, number):
                    answer(ChunkConfirmed(self._run_id, number))
                case ReportLacking(numbers):
                    assert self._answer is not None  # nothing is lacking before
                    self._answer(ChunksLacking(self._run_id, numbers))

    def _heard(self, address: str, message: Message) -> None:
        match message:
            case ChunkConfirmed(_, number):
                self._obey(self._relay.confirmed(address, number))
            case Closed():
                self._obey(self._relay.lost(address))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._operand is None and self._relay.wake is not None:
            self._timer = self._loop.call_at(
                self._loop.time() + max(self._relay.wake - monotonic(), 0.0), self._tick
            )

    def _tick(self) -> None:
        self._timer = None
        if self._operand is None:
            self._obey(self._relay.react(monotonic()))
            self._set_timer()

    def close(self, over: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for channel in self._channels.values():
            channel.unlisten(self._run_id)
        if self._segment is not None and over:
            # A late thread may still read it, for a round whose messages are dropped.
            self._exchange.memory.reuse(self._segment)
