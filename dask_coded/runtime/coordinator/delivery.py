"""How the operand of a round reaches each worker.

The hosts of a cluster form a forest with the coordinator's host at its root. Within a host the
operand lies in memory that all workers there read; between hosts it travels in chunks. One worker
of each other host, its *receiver*, gets the chunks, passes them on to other hosts, and says where
it has put the operand. The worker that is expected to report first becomes the receiver.

A worker *joins* the forest as a host of its own if it cannot read the memory of its host. One
that is called in late does so if no worker of its host receives what it needs. If a receiver is
lost or silent, one of its neighbours joins instead.

If the blocks of a sparse array touch few columns each, the operand travels in parts: the entries
that one block needs go to the hosts whose pieces equal or combine this block.

A small operand rides in a worker's first message.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from distributed.comm import get_address_host

from dask_coded.rounds.broadcast import Broadcast, Route, SendChunk
from dask_coded.runtime.coordinator.run_spec import RunSpec
from dask_coded.runtime.operand import (
    ChunkConfirmed,
    ChunksLacking,
    Entries,
    OperandAt,
    OperandChunk,
    Ticket,
    entries_of,
)
from dask_coded.transport import Exchange
from dask_coded.transport.memory import LEAST_BYTES, SharedArray
from dask_coded.transport.messages import Message

# Operands go from host to host if the coordinator would have to send this many bytes otherwise.
# Below that, the way over another host takes longer.
_LEAST_SENT = 1 << 20
# A worker that could not read its neighbour's memory this often is on another host, in effect. Once
# may be because the neighbour died just then.
_APART = 2


class Offer(NamedTuple):
    """The operand of a round at its coordinator.

    Parameters
    ----------
    array : ndarray or None
        Contiguous.
    place : SharedArray or None
        The same in memory that workers of this host can read.
    """

    array: np.ndarray[Any, Any] | None
    place: SharedArray | None = None


@contextmanager
def offered(exchange: Exchange, operand: np.ndarray[Any, Any] | None) -> Iterator[Offer]:
    """Put a large operand where the workers of this host can read it, if there are any.

    Called from a thread, because a large operand takes milliseconds to copy.
    """
    if operand is None or operand.nbytes < LEAST_BYTES or not exchange.shares_memory:
        yield Offer(None if operand is None else np.ascontiguousarray(operand))
        return
    operand = np.ascontiguousarray(operand)
    segment, place = exchange.memory.share(operand) or (None, None)
    try:
        yield Offer(operand, place)
    finally:
        if segment is not None:
            # A late worker may still read it, for a round whose messages are dropped.
            exchange.memory.reuse(segment)


@dataclass
class _Host:
    """Workers that read the operand in the memory of one of them."""

    blocks: list[int]  # whose entries come
    receiver: int
    waiting: list[int] = field(default_factory=list)  # for the place, in the order of their turns
    place: tuple[Any, ...] | None = None
    lends: bool = True  # whether the receiver can let others read the operand


class Delivery:
    """Brings one operand to the workers of a round.

    Parameters
    ----------
    exchange : Exchange
    run_spec : RunSpec
    operand : Offer

    Attributes
    ----------
    size : int
        Bytes of the operand.
    """

    def __init__(self, exchange: Exchange, run_spec: RunSpec, operand: Offer) -> None:
        self._exchange = exchange
        self._run_spec = run_spec
        self._channels = [exchange.channel(address) for address in run_spec.plan.addresses]
        self._operand, self._place = operand
        self.size = 0 if operand.array is None else operand.array.nbytes
        # Which entries of the operand each block needs, if these are few.
        self._footprints = run_spec.spec.footprints
        self._ended = False
        self._rides = True  # whether the operand is in the first message
        self._hosts: dict[str, _Host] = {}
        self._host_of: dict[int, _Host] = {}  # of workers that chunks or a place are to come to
        # One for each block, if there are footprints; the last one is the whole operand.
        self._parts: list[Entries] = []
        self._broadcast: Broadcast | None = None  # to the receivers
        self._timer: asyncio.TimerHandle | None = None

    def plan(self, workers: Iterable[int]) -> None:
        """Choose the way of the operand to the workers that take part from the start."""
        if self.size < LEAST_BYTES:
            return
        hosts: dict[str, list[int]] = {}
        for worker in workers:
            if not (self._channels[worker].near or self._reads(worker)):
                hosts.setdefault(self._name(worker), []).append(worker)
        distant = sum(map(len, hosts.values()))
        # Parts are less to send even to a single worker, which may be called in late.
        least = 1 if self._footprints is None else 2
        self._rides = max(distant, least) * self.size < _LEAST_SENT
        if self._rides:
            return
        # Workers that are expected to report first; in a first round no lags are known.
        plan, silent = self._run_spec.plan, [channel.silent for channel in self._channels]
        # A worker that is silent, or is to compute nothing, should be nobody's source.
        keys = (-plan.speed, np.array(plan.lags), plan.speed == 0, np.array(silent))
        rank = np.lexsort(keys).argsort()
        for name, there in hosts.items():
            receiver, *others = sorted(there, key=rank.__getitem__)
            blocks = {block for worker in there for block in self._needed(worker)}
            host = _Host(sorted(blocks), receiver, others)
            self._hosts[name] = host
            self._host_of |= dict.fromkeys(there, host)
        if hosts:
            self._forest()

    def _reads(self, worker: int) -> bool:
        """Whether a worker reads the operand in this worker's memory, as far as is known."""
        return self._place is not None and self._channels[worker].may_share

    def _name(self, worker: int) -> str:
        """Return the name of a worker's host; its address, if it shares memory with no other."""
        channel = self._channels[worker]
        alone = channel.unreadable >= _APART or not self._exchange.has_memory
        return channel.address if alone else get_address_host(channel.address)

    def _needed(self, worker: int) -> list[int]:
        """Return the parts that a worker needs."""
        if self._footprints is None:
            return [0]
        return sorted(self._run_spec.spec.blocks_of(self._run_spec.layout.pieces_of[worker]))

    def _forest(self) -> Broadcast:
        """Return the broadcast; the first call makes it, with those that receive by then."""
        if self._broadcast is None:
            assert self._operand is not None
            columns = () if self._footprints is None else self._footprints.indices
            receivers: list[list[int]] = [[] for _ in (*columns, None)]
            for host in self._hosts.values():
                for block in host.blocks:
                    receivers[block].append(host.receiver)
            self._parts = entries_of(self._operand, columns, list(map(len, receivers)))
            parts = [(len(e.numbers), to) for e, to in zip(self._parts, receivers, strict=True)]
            self._broadcast = Broadcast(parts, np.asarray(self._run_spec.plan.lags))
        return self._broadcast

    def ticket(self, worker: int) -> Ticket:
        """Return what the first message to a worker says about the operand."""
        if self._reads(worker):
            return Ticket(self._place)
        if self._rides or self._channels[worker].near:
            return Ticket(self._operand)
        host = self._host_of.get(worker) or self._late(worker)
        if host is None:
            return Ticket(self._hosts[self._name(worker)].place)
        packed = self._footprints.packed if self._footprints else (None,)
        return Ticket(None, tuple((self._parts[b].part, packed[b]) for b in host.blocks))

    def _late(self, worker: int) -> _Host | None:
        """Return the host of a worker that is called in late; None if it can read there now."""
        needed, name = self._needed(worker), self._name(worker)
        host = self._hosts.get(name)
        joins = host is None or not self._brings(host) or not set(needed) <= set(host.blocks)
        if host is not None and not joins and host.place is not None:
            return None
        if host is None or joins:
            self._forest()  # before this worker is among those that receive from the start
            host = self._hosts[name] = _Host(needed, worker)
            # The chunks must not overtake the first message.
            asyncio.get_running_loop().call_soon(self._join, worker, host)
        else:
            host.waiting.append(worker)
        self._host_of[worker] = host
        return host

    def _brings(self, host: _Host) -> bool:
        """Whether the receiver of a host will say where the operand lies, as far as is known."""
        return host.lends and self._answers(host.receiver)

    def _answers(self, worker: int) -> bool:
        return not (self._channels[worker].closed or self._channels[worker].silent)

    def _join(self, worker: int, host: _Host) -> None:
        """Let a worker receive what the workers of a host need."""
        if self._ended or worker not in self._host_of:  # lost meanwhile
            return
        host.receiver, host.lends = worker, True
        if worker in host.waiting:
            host.waiting.remove(worker)
        for block in host.blocks:
            self._obey(self._forest().join(worker, block, monotonic()))

    def begin(self) -> None:
        """Send the first chunks, once all workers have their first message."""
        if self._broadcast is not None:
            self._obey(self._broadcast.start(monotonic()))

    def heard(self, worker: int, message: Message) -> None:
        """Act on what a worker says about the operand."""
        host = self._host_of.get(worker)
        match message:
            case ChunkConfirmed(_, number) if host is not None:
                self._obey(self._forest().passed(worker, number, monotonic()))
            case ChunksLacking(_, _, True):
                self._channels[worker].unreadable += 1
                self._join_alone(worker, host)
            case ChunksLacking(_, numbers) if host is not None:
                if worker not in host.waiting:
                    self._obey(self._forest().lacking(worker, numbers, monotonic()))
                elif not self._brings(host):
                    self._join(worker, host)
            case OperandAt(_, None) if host is not None and host.receiver == worker:
                waiting, host.waiting, host.lends = host.waiting, [], False
                for other in waiting:
                    self._join_alone(other, host)
            case OperandAt(_, place) if host is not None and place is not None:
                host.place = place
                waiting, host.waiting = host.waiting, []
                for other in waiting:
                    self._channels[other].post(message)

    def _join_alone(self, worker: int, host: _Host | None) -> None:
        """Let a worker receive the operand that cannot read it in the memory of its host."""
        if host is None:
            if self._reads(worker):
                self._channels[worker].shared = False
            # Its first message said where the operand lies, and nothing of parts.
            self._forest()
            host = _Host([len(self._parts) - 1], worker)
        elif worker in host.waiting:
            host.waiting.remove(worker)
        self._host_of[worker] = alone = _Host(host.blocks, worker)
        self._join(worker, alone)

    def lost(self, worker: int) -> None:
        """Record that a worker is gone. If others read in its memory, one of them joins."""
        if (host := self._host_of.pop(worker, None)) is None:
            return
        if self._broadcast is not None:
            self._obey(self._broadcast.lost([worker], monotonic()))
        if worker in host.waiting:
            host.waiting.remove(worker)
        if host.receiver == worker:
            host.place, host.lends = None, False
            if others := list(filter(self._answers, host.waiting)) or host.waiting:
                self._join(others[0], host)

    def end(self) -> None:
        """Do nothing any more."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._broadcast, self._parts = None, []

    def _obey(self, commands: Sequence[SendChunk]) -> None:
        for command in commands:
            number = command.chunk
            entries = self._parts[bisect_right(self._parts, number, key=_first) - 1]
            below = self._addresses(command.below)
            data = entries.chunk(number)
            message = OperandChunk(self._run_spec.run_id, entries.part, number, data, below)
            self._channels[command.host].post(message)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (wake := self._forest().wake) is not None:
            delay = max(wake - monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._obey(self._forest().react(monotonic()))

    def _addresses(self, route: Route) -> Route:
        """Put addresses in the place of numbers of workers."""
        return tuple(
            (self._channels[worker].address, self._addresses(below)) for worker, below in route
        )


def _first(entries: Entries) -> int:
    return entries.part.first
