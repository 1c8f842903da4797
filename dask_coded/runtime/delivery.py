"""How the operand of a round reaches each worker.

Workers that share memory with the coordinator read the operand there, and a small one travels in a
worker's first message. A large one travels in chunks. One worker of each host, its *receiver*, gets
them, passes them on to the receivers of other hosts, and lets its neighbours on the host read the
operand in its memory. The worker that is expected to report first becomes the receiver.

If the blocks of a sparse array touch few columns each, the operand travels in parts: the entries
that one block needs go to the hosts whose pieces equal or combine this block.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key
from distributed.comm import get_address_host

from dask_coded.rounds.broadcast import Broadcast, Route, SendChunk, chunk_bytes
from dask_coded.rounds.footprint import Footprints
from dask_coded.transport import Channel, Exchange
from dask_coded.transport.memory import LEAST_BYTES, SharedArray
from dask_coded.transport.messages import LendOperand, OperandChunk, Part
from dask_coded.typing import Floats, Ints

# Operands go from host to host if the coordinator would have to send this many bytes otherwise.
# Below that, the way over another host takes longer.
_LEAST_SENT = 1 << 20
# A worker that could not read its neighbour's memory this often is on another host, in effect. Once
# may be because the neighbour died just then.
_APART = 2
# A worker that has reported this often that it waits for a lender gets the operand from the
# coordinator. It reports after half a second, then ever less often.
_REPORTS = 3


# Stands for all blocks, if the operand travels as a whole.
_ALL = -1


class Parcel(NamedTuple):
    """What a worker's first message says about the operand; see :class:`StartRound`."""

    operand: Any
    parts: tuple[tuple[Part, bytes | None], ...] = ()
    neighbours: tuple[str, ...] = ()


class Delivery:
    """Brings one operand to the workers of a round.

    A worker that is called in late gets the whole operand from a receiver, or its parts from here.

    Parameters
    ----------
    exchange : Exchange
    run_id : Key
        Of the round.
    channels : sequence of Channel
        To each worker of the round.
    operand : ndarray or None
        Contiguous.
    shared : SharedArray or None
        The operand in memory that workers of this host can read.
    lags : ndarray, shape (workers,)
        Seconds that each worker is expected to need before it reports.
    speeds : ndarray, shape (workers,)
        Predicted speeds, in any unit.
    footprints : Footprints or None
        Which entries of the operand each block needs, if these are few.
    blocks_of : callable(int) -> collection of int
        Returns the blocks that the pieces of a worker equal or combine.
    """

    def __init__(
        self,
        exchange: Exchange,
        run_id: Key,
        channels: Sequence[Channel],
        operand: np.ndarray[Any, Any] | None,
        shared: SharedArray | None,
        lags: Floats,
        speeds: Floats,
        footprints: Footprints | None,
        blocks_of: Callable[[int], Collection[int]],
    ) -> None:
        self._exchange = exchange
        self._run_id = run_id
        self._channels = channels
        self._operand = operand
        self._shared = shared
        self._lags = lags
        # The workers that are expected to report first; in a first round no lags are known.
        self._rank = np.lexsort((-speeds, lags)).argsort()
        self._footprints = footprints
        self._blocks_of = blocks_of
        self._hosts: list[list[int]] = []  # workers of each host; the first one is its receiver
        self._host_of: dict[int, int] = {}
        self._ways: list[_Way] = []  # in the order of the numbers of their chunks
        self._way_of: dict[int, _Way] = {}  # by block; that of the whole operand by _ALL
        self._whole: set[int] = set()  # workers that have been sent all that they need at once
        self._arrived: set[int] = set()  # workers that have it, because they have sent a share
        self._lender_of: dict[int, int] = {}
        self._reports: Counter[int] = Counter()  # of workers that wait for a lender
        self._lent: Counter[int] = Counter()  # how often each receiver was asked to lend it
        self._begun = False

    def plan(self, workers: Iterable[int]) -> None:
        """Choose the way of the operand to the workers that take part from the start."""
        if self._operand is None or self._operand.nbytes < LEAST_BYTES:
            return
        hosts: dict[str, list[int]] = {}
        for worker in workers:
            channel = self._channels[worker]
            if channel.near or (channel.shared and self._shared):
                continue
            alone = channel.unreadable >= _APART or not self._exchange.has_memory
            host = channel.address if alone else get_address_host(channel.address)
            hosts.setdefault(host, []).append(worker)
        distant = sum(map(len, hosts.values()))
        if distant < 2 or distant * self._operand.nbytes < _LEAST_SENT:
            return
        self._hosts = [sorted(there, key=self._rank.__getitem__) for there in hosts.values()]
        self._host_of = {w: host for host, there in enumerate(self._hosts) for w in there}
        receivers: dict[int, list[int]] = {}
        for there in self._hosts:
            for block in self._needed(there[0]):
                receivers.setdefault(block, []).append(there[0])
        for block, those in receivers.items():
            self._add(block, those)

    def _needed(self, worker: int) -> list[int]:
        """Return the keys of the ways that lead to a worker and its neighbours."""
        if self._footprints is None:
            return [_ALL]
        there = self._hosts[self._host_of[worker]] if worker in self._host_of else [worker]
        return sorted({block for each in there for block in self._blocks_of(each)})

    def _add(self, block: int, receivers: Sequence[int]) -> None:
        assert self._operand is not None
        first = self._ways[-1].part.first + self._ways[-1].part.chunks if self._ways else 0
        entries = None if self._footprints is None else self._footprints.indices[block]
        packed = None if self._footprints is None else self._footprints.packed[block]
        way = _Way(
            self._run_id,
            self._channels,
            receivers,
            self._lags,
            first,
            self._operand,
            entries,
            packed,
        )
        self._ways.append(way)
        self._way_of[block] = way

    def parcel(self, worker: int) -> Parcel:
        """Return what the first message to a worker says about the operand."""
        channel = self._channels[worker]
        if (host := self._host_of.get(worker)) is not None:
            receiver, *others = self._hosts[host]
            neighbours = () if worker != receiver else (self._channels[w].address for w in others)
            return Parcel(None, self._parts(worker), tuple(neighbours))
        if self._shared and channel.shared:
            return Parcel(self._shared)
        if not self._ways or channel.near:
            return Parcel(self._operand)
        if self._footprints is not None:
            for block in self._needed(worker):
                if block not in self._way_of:
                    self._add(block, [])
            # The chunks must not overtake the first message.
            asyncio.get_running_loop().call_soon(self._send_whole, worker)
            return Parcel(None, self._parts(worker))
        # A receiver that has the operand, or else one that will have it; they take turns.
        receivers = [there[0] for there in self._hosts if not self._channels[there[0]].closed]
        lenders = [w for w in receivers if w in self._arrived] or receivers
        if not lenders:
            return Parcel(self._operand)
        lender = min(lenders, key=lambda w: self._lent[w])
        self._lent[lender] += 1
        self._lender_of[worker] = lender
        self._channels[lender].post(LendOperand(self._run_id, channel.address))
        return Parcel(None, self._parts(worker))

    def _ways_to(self, worker: int) -> list[_Way]:
        return [self._way_of[block] for block in self._needed(worker) if block in self._way_of]

    def _parts(self, worker: int) -> tuple[tuple[Part, bytes | None], ...]:
        return tuple((way.part, way.packed) for way in self._ways_to(worker))

    def arrived(self, worker: int) -> None:
        """Record that a worker has the operand, because it has sent a share."""
        self._arrived.add(worker)

    def begin(self) -> None:
        """Send the first chunks, once all workers have their first message."""
        if not self._begun:
            self._begun = True
            for way in self._ways:
                way.begin()

    def confirmed(self, worker: int, chunk: int) -> None:
        """Record that a receiver has passed a chunk on."""
        if way := self._way_with(chunk):
            way.confirmed(worker, chunk)

    def _way_with(self, chunk: int) -> _Way | None:
        number = bisect_right(self._ways, chunk, key=lambda way: way.part.first) - 1
        return self._ways[number] if number >= 0 else None

    def lacking(self, worker: int, chunks: Sequence[int]) -> None:
        """Record that a worker waits for chunks, or for the receiver of its host."""
        if (host := self._host_of.get(worker)) is not None:
            receiver = self._hosts[host][0]
            channel = self._channels[receiver]
            if worker == receiver:
                for way, its in groupby(chunks, self._way_with):
                    if way is not None:
                        way.lacking(worker, list(its))
            elif channel.silent or channel.closed or receiver in self._arrived:
                self._send_whole(worker)
        elif worker in self._lender_of:
            self._reports[worker] += 1
            lender = self._channels[self._lender_of[worker]]
            if lender.silent or lender.closed or self._reports[worker] >= _REPORTS:
                self._send_whole(worker)

    def lost(self, worker: int) -> None:
        """Record that a worker is gone. Its neighbours get the operand from here."""
        host = self._host_of.get(worker)
        if host is None or worker != self._hosts[host][0]:
            return
        for other in self._hosts[host][1:]:
            if other not in self._arrived:
                self._send_whole(other)
        for way in self._ways_to(worker):
            way.lost(worker)

    def unreadable(self, worker: int) -> bool:
        """Record that a worker cannot read the memory that it was to find the operand in.

        Returns
        -------
        bool
            Whether it gets the operand in another way.
        """
        self._channels[worker].unreadable += 1
        if worker not in self._host_of:
            return False
        self._send_whole(worker)
        return True

    def end(self) -> None:
        """Do nothing any more."""
        for way in self._ways:
            way.end()
        self._ways, self._way_of = [], {}

    def _send_whole(self, worker: int) -> None:
        if worker not in self._whole:
            self._whole.add(worker)
            for way in self._ways_to(worker):
                way.send_whole(worker)


class _Way:
    """The way of an operand, or of some of its entries, to the hosts that need them.

    Parameters
    ----------
    run_id : Key
    channels : sequence of Channel
        To each worker of the round.
    receivers : sequence of int
        The worker of each of these hosts that gets the chunks.
    lags : ndarray, shape (workers,)
    first : int
        Number of the first chunk.
    operand : ndarray
    entries : ndarray of int, or None
        Which entries, in order; None for all of them.
    packed : bytes or None
        The same, as they travel.
    """

    def __init__(
        self,
        run_id: Key,
        channels: Sequence[Channel],
        receivers: Sequence[int],
        lags: Floats,
        first: int,
        operand: np.ndarray[Any, Any],
        entries: Ints | None,
        packed: bytes | None,
    ) -> None:
        self.packed = packed
        self._run_id = run_id
        self._channels = channels
        self._receivers = receivers
        self._place = {worker: i for i, worker in enumerate(receivers)}
        self._operand = operand
        self._entries = entries
        self._bytes = operand.reshape(-1).view(np.uint8)
        count = len(operand) if entries is None else len(entries)
        self._entry = operand.nbytes // len(operand)
        size = count * self._entry
        each = chunk_bytes(size, max(len(receivers), 1))
        if entries is not None:
            # Each chunk is gathered when it is sent, so it holds whole entries.
            each = max(each // self._entry, 1) * self._entry
        shape = (count, *operand.shape[1:])
        chunks = -(-size // each)
        self.part = Part(first, chunks, each, operand.dtype.str, shape, len(operand))
        self._broadcast = Broadcast(chunks, lags[list(receivers)], monotonic())
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Send the first chunks."""
        self._send(self._broadcast.start(monotonic()))

    def confirmed(self, receiver: int, chunk: int) -> None:
        """Record that a receiver has passed a chunk on."""
        if (place := self._place.get(receiver)) is not None:
            self._send(self._broadcast.passed(place, chunk - self.part.first, monotonic()))

    def lacking(self, receiver: int, chunks: Sequence[int]) -> None:
        """Record that a receiver waits for chunks."""
        numbers = [chunk - self.part.first for chunk in chunks]
        self._send(self._broadcast.lacking(self._place[receiver], numbers, monotonic()))

    def lost(self, receiver: int) -> None:
        """Record that a receiver is gone."""
        self._send(self._broadcast.lost([self._place[receiver]], monotonic()))

    def send_whole(self, worker: int) -> None:
        """Send all chunks to a worker, whether it is a receiver or not."""
        for chunk in range(self.part.chunks):
            self._post(worker, chunk, ())

    def end(self) -> None:
        """Send nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _send(self, commands: Sequence[SendChunk]) -> None:
        for command in commands:
            below = self._addresses(command.below)
            self._post(self._receivers[command.host], command.chunk, below)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._broadcast.wake is not None:
            delay = max(self._broadcast.wake - monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _post(self, worker: int, chunk: int, below: Route) -> None:
        begin, end = chunk * self.part.chunk_bytes, (chunk + 1) * self.part.chunk_bytes
        if self._entries is None:
            data = self._bytes[begin:end]
        else:
            some = self._entries[begin // self._entry : end // self._entry]
            data = self._operand[some].reshape(-1).view(np.uint8)
        number = self.part.first + chunk
        self._channels[worker].post(OperandChunk(self._run_id, self.part, number, data, below))

    def _addresses(self, route: Route) -> Route:
        """Put addresses in the place of numbers of hosts."""
        return tuple(
            (self._channels[self._receivers[host]].address, self._addresses(below))
            for host, below in route
        )

    def _tick(self) -> None:
        self._timer = None
        self._send(self._broadcast.react(monotonic()))
