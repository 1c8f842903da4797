"""Operands at a participant: read in shared memory, or received in chunks and passed on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
from dask.typing import Key

from dask_coded.rounds.broadcast import Confirm, PassOn, Relay, ReportLacking
from dask_coded.transport import Answer, Channel, Exchange
from dask_coded.transport.memory import Mappings, Segment, SharedArray
from dask_coded.transport.messages import (
    ChunkConfirmed,
    ChunksLacking,
    Closed,
    Coming,
    LendOperand,
    MemoryLost,
    Message,
    OperandChunk,
    OperandShared,
)

# Chunks may come before their round is started here, or after it has ended. This many operands
# without a round are kept, for this many seconds, and this many rounds that have ended are
# remembered.
_UNCLAIMED = 8
_UNCLAIMED_SECONDS = 30.0
_ENDED = 1024

#: Takes an operand that is here.
Ready = Callable[[Any], None]


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
        # A coordinator uses the same segment in every round, or two in turn.
        self._mappings = Mappings(most=2)
        self._coming: dict[Key, _Coming] = {}
        self._ended: dict[Key, None] = {}
        exchange.register(self._handle, [OperandChunk, OperandShared, LendOperand])

    def here(self, operand: Any) -> Any:
        """Return an operand that came with its round, wherever it lies.

        Raises
        ------
        OSError
            If it lies in memory that this worker cannot read.
        """
        return self._mappings.view(SharedArray(*operand)) if isinstance(operand, tuple) else operand

    def expect(
        self, run_id: Key, coming: Coming, neighbours: Sequence[str], ready: Ready, answer: Answer
    ) -> None:
        """Call ``ready`` with the operand of a round once it is here, and pass it on meanwhile.

        Parameters
        ----------
        run_id : Key
        coming : Coming
        neighbours : sequence of str
            Addresses on the same host that wait for it.
        ready : callable(ndarray)
        answer : callable(Message)
            Sends a message to the coordinator.
        """
        self._of(run_id, coming).claim(neighbours, ready, answer)

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
            self.drop(run_id, over=False)

    def release(self) -> None:
        """Keep no memory of other workers mapped."""
        self._mappings.clear()

    def _of(self, run_id: Key, coming: Coming) -> _Coming:
        operand = self._coming.get(run_id)
        if operand is None or (coming.chunks and operand.is_elsewhere):
            unclaimed = [key for key, other in self._coming.items() if not other.claimed]
            for key in unclaimed[: 1 - _UNCLAIMED]:
                self._coming.pop(key).close(over=False)
            if operand is None:
                # If its coordinator has died, nothing else would ever remove it.
                asyncio.get_running_loop().call_later(_UNCLAIMED_SECONDS, self._expire, run_id)
            found = _Coming(self._exchange, run_id, coming)
            if operand is not None:  # its host's receiver is gone, so it comes from the coordinator
                found.replace(operand)
            operand = self._coming[run_id] = found
        return operand

    def _handle(self, message: Message, answer: Answer) -> None:
        if message.run_id in self._ended:
            return
        match message:
            case OperandChunk(run_id, coming):
                self._of(run_id, Coming(*coming)).receive(message, answer)
            case OperandShared(run_id, shared):
                found = SharedArray(*shared)
                coming = Coming(0, 0, found.dtype, found.shape)
                self._of(run_id, coming).found(found, self._mappings)
            case LendOperand(run_id, address):
                if operand := self._coming.get(run_id):
                    operand.lend(address)


class _Coming:
    """One operand on its way."""

    def __init__(self, exchange: Exchange, run_id: Key, coming: Coming) -> None:
        self.coming = coming
        self._exchange = exchange
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._ready: Ready | None = None
        self._answer: Answer | None = None
        self._neighbours: Sequence[str] = ()
        self._borrowers: list[str] = []
        self._operand: Any = None
        self._unreadable = False
        self._channels: dict[str, Channel] = {}  # to workers that this one passes chunks on to
        self._relay = Relay(max(coming.chunks, 1), monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._segment: Segment | None = None
        if coming.chunks:
            dtype = np.dtype(coming.dtype)
            size = math.prod(coming.shape) * dtype.itemsize
            self._segment = exchange.memory.lease(size) if exchange.has_memory else None
            if self._segment is not None:
                self._array = self._segment.array(dtype, coming.shape)
            else:
                self._array = np.empty(coming.shape, dtype)
            self._bytes = self._array.reshape(-1).view(np.uint8)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it was to come in another worker's memory, and has not come."""
        return not self.coming.chunks and self._operand is None

    @property
    def claimed(self) -> bool:
        """Whether its round has been started here."""
        return self._ready is not None

    def claim(self, neighbours: Sequence[str], ready: Ready, answer: Answer) -> None:
        self._neighbours, self._ready, self._answer = neighbours, ready, answer
        self._deliver()
        self._set_timer()

    def replace(self, other: _Coming) -> None:
        """Stand in for an operand that was to come another way."""
        if other._ready is not None and other._answer is not None:
            self.claim(other._neighbours, other._ready, other._answer)
        other._ready = None
        other.close(over=False)

    def receive(self, chunk: OperandChunk, answer: Answer) -> None:
        at = chunk.number * self.coming.chunk_bytes
        self._bytes[at : at + len(chunk.data)] = chunk.data
        commands = self._relay.received(chunk.number, answer, chunk.below, monotonic())
        self._obey(commands, chunk.data)
        if self._operand is None and self._relay.wake is None:
            self._operand = self._array
            self._deliver()
        self._set_timer()

    def found(self, shared: SharedArray, mappings: Mappings) -> None:
        """Record where the receiver of this host has left the operand."""
        try:
            self._operand = mappings.view(shared)
        except OSError:
            self._unreadable = True
        self._deliver()

    def _deliver(self) -> None:
        """Hand on the operand, once it is here and its round has been started."""
        if self._answer is None or self._ready is None:
            return
        if self._unreadable:
            self._answer(MemoryLost(self._run_id))
        if self._operand is None:
            return
        ready, self._ready = self._ready, _done
        ready(self._operand)
        for address in self._neighbours:
            if self._segment is not None:
                shared = self._segment.place(self._array)
                self._exchange.channel(address).post(OperandShared(self._run_id, shared))
            else:
                self._send_whole(address)
        for address in self._borrowers:
            self._send_whole(address)
        self._neighbours, self._borrowers = (), []

    def lend(self, address: str) -> None:
        """Send all of it to a worker, once it is here."""
        self._borrowers.append(address)
        self._deliver()

    def _send_whole(self, address: str) -> None:
        channel = self._exchange.channel(address)
        self._channels.setdefault(address, channel)  # to take back what is not sent at the end
        each = self.coming.chunk_bytes
        for number in range(self.coming.chunks):
            data = self._bytes[number * each : (number + 1) * each]
            channel.post(OperandChunk(self._run_id, self.coming, number, data, ()))

    def _obey(self, commands: Sequence[PassOn | Confirm | ReportLacking], data: Any = None) -> None:
        for command in commands:
            match command:
                case PassOn(address, number, below):
                    channel = self._exchange.channel(address)
                    if self._channels.get(address) is not channel:
                        self._channels[address] = channel
                        channel.listen(self._run_id, partial(self._heard, address))
                    channel.post(OperandChunk(self._run_id, self.coming, number, data, below))
                case Confirm(answer, number):
                    answer(ChunkConfirmed(self._run_id, number))
                case ReportLacking(numbers):
                    if self._answer is not None:
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
        if self._operand is None and self._answer is not None and self._relay.wake is not None:
            self._timer = self._loop.call_at(
                self._loop.time() + max(self._relay.wake - monotonic(), 0.0), self._tick
            )

    def _tick(self) -> None:
        self._timer = None
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


def _done(operand: Any) -> None:
    """Stand for a round that has its operand."""
