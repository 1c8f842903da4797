"""How the operand of a round reaches each worker.

Workers that share memory with the coordinator read the operand there, and a small one travels in a
worker's first message. A large one travels in chunks. One worker of each host, its *receiver*, gets
them, passes them on to the receivers of other hosts, and lets its neighbours on the host read the
operand in its memory. The worker that is expected to report first becomes the receiver.

In the first round of two workers it is not known yet whether they share memory. If they seem to be
on one host, the operand is offered in shared memory, and sent only if it cannot be read there.

If the blocks of a sparse array touch few columns each, the operand travels in parts: the entries
that one block needs go to the hosts whose pieces equal or combine this block.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key
from distributed.comm import get_address_host

from dask_coded.rounds.broadcast import Broadcast, Route, SendChunk, chunk_bytes
from dask_coded.rounds.footprint import Footprints
from dask_coded.runtime.messages import LendOperand, OperandChunk, Part
from dask_coded.transport import Channel, Exchange
from dask_coded.transport.memory import LEAST_BYTES, SharedArray
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

    A worker that is called in late gets each part from a receiver that needs this part, too.

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
        self._needed_on: dict[int, list[int]] = {}  # blocks, by host
        self._in_chunks = False
        self._parts: list[_Entries] = []  # in the order of the numbers of their chunks
        self._part_of: dict[int, _Entries] = {}  # by block; that of the whole operand by _ALL
        self._broadcast: Broadcast | None = None  # to the receivers, by the numbers of their hosts
        self._timer: asyncio.TimerHandle | None = None
        self._offered: set[int] = set()  # workers that may fail to read it in this worker's memory
        self._whole: set[int] = set()  # workers that have been sent all that they need at once
        self._arrived: set[int] = set()  # workers that have it, because they have sent a share
        self._lenders_of: dict[int, set[int]] = {}
        self._reports: Counter[int] = Counter()  # of workers that wait for a lender
        self._lent: Counter[int] = Counter()  # how many parts each receiver was asked to lend

    def plan(self, workers: Iterable[int]) -> None:
        """Choose the way of the operand to the workers that take part from the start."""
        if self._operand is None or self._operand.nbytes < LEAST_BYTES:
            return
        hosts: dict[str, list[int]] = {}
        for worker in workers:
            channel = self._channels[worker]
            if channel.near or (channel.may_share and self._shared):
                continue
            alone = channel.unreadable >= _APART or not self._exchange.has_memory
            host = channel.address if alone else get_address_host(channel.address)
            hosts.setdefault(host, []).append(worker)
        distant = sum(map(len, hosts.values()))
        if self._footprints is not None:
            # Parts are less to send even to a single worker, which may be called in late.
            distant = max(distant, 2)
        if distant < 2 or distant * self._operand.nbytes < _LEAST_SENT:
            return
        self._in_chunks = True
        self._hosts = [sorted(there, key=self._rank.__getitem__) for there in hosts.values()]
        self._host_of = {w: host for host, there in enumerate(self._hosts) for w in there}
        needed: dict[int, list[int]] = {}
        for number, (receiver, *_) in enumerate(self._hosts):
            for block in self._needed(receiver):
                needed.setdefault(block, []).append(number)
        for block, those in needed.items():
            self._add(block, those)
        receivers = [there[0] for there in self._hosts]
        parts = [(entries.part.chunks, entries.hosts) for entries in self._parts]
        self._broadcast = Broadcast(parts, self._lags[receivers])

    def _needed(self, worker: int) -> list[int]:
        """Return the blocks whose entries a worker and its neighbours need."""
        if self._footprints is None:
            return [_ALL]
        host = self._host_of.get(worker)
        if host is None:
            return sorted(set(self._blocks_of(worker)))
        # Once for each host: for each worker it would be quadratic in the workers of a host.
        if host not in self._needed_on:
            found = {block for each in self._hosts[host] for block in self._blocks_of(each)}
            self._needed_on[host] = sorted(found)
        return self._needed_on[host]

    def _add(self, block: int, hosts: Sequence[int]) -> _Entries:
        assert self._operand is not None
        first = self._parts[-1].part.first + self._parts[-1].part.chunks if self._parts else 0
        indices = None if self._footprints is None else self._footprints.indices[block]
        packed = None if self._footprints is None else self._footprints.packed[block]
        entries = _Entries(hosts, first, self._operand, indices, packed)
        self._parts.append(entries)
        self._part_of[block] = entries
        return entries

    def parcel(self, worker: int) -> Parcel:
        """Return what the first message to a worker says about the operand."""
        channel = self._channels[worker]
        if (host := self._host_of.get(worker)) is not None:
            receiver, *others = self._hosts[host]
            neighbours = () if worker != receiver else (self._channels[w].address for w in others)
            return Parcel(None, self._described(worker), tuple(neighbours))
        if self._shared and channel.shared:
            return Parcel(self._shared)
        if self._shared and channel.may_share:
            self._offered.add(worker)
            for block in self._needed(worker):
                if block not in self._part_of:
                    self._add(block, [])
            return Parcel(self._shared, self._described(worker))
        if channel.near or not self._in_chunks:
            return Parcel(self._operand)
        self._lenders_of[worker] = set()
        for block in self._needed(worker):
            entries = self._part_of.get(block) or self._add(block, [])
            if (lender := self._lender(entries)) is not None:
                self._lenders_of[worker].add(lender)
                lend = LendOperand(self._run_id, channel.address, entries.part.first)
                self._channels[lender].post(lend)
            else:
                # The chunks must not overtake the first message.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._send_part, worker, entries)
        return Parcel(None, self._described(worker))

    def _lender(self, entries: _Entries) -> int | None:
        """Return a receiver that has a part, or that will have it; receivers take turns."""
        receivers = [self._hosts[host][0] for host in entries.hosts]
        usable = [w for w in receivers if not self._channels[w].closed]
        lenders = [w for w in usable if w in self._arrived] or usable
        lender = min(lenders, key=lambda w: self._lent[w], default=None)
        if lender is not None:
            self._lent[lender] += 1
        return lender

    def _parts_for(self, worker: int) -> list[_Entries]:
        return [self._part_of[block] for block in self._needed(worker) if block in self._part_of]

    def _described(self, worker: int) -> tuple[tuple[Part, bytes | None], ...]:
        return tuple((entries.part, entries.packed) for entries in self._parts_for(worker))

    def arrived(self, worker: int) -> None:
        """Record that a worker has the operand, because it has sent a share."""
        self._arrived.add(worker)

    def begin(self) -> None:
        """Send the first chunks, once all workers have their first message."""
        if self._broadcast is not None:
            self._obey(self._broadcast.start(monotonic()))

    def confirmed(self, worker: int, chunk: int) -> None:
        """Record that a receiver has passed a chunk on."""
        if (host := self._receives(worker)) is not None and self._broadcast is not None:
            self._obey(self._broadcast.passed(host, chunk, monotonic()))

    def _receives(self, worker: int) -> int | None:
        """Return the host that a worker is the receiver of, if it is one."""
        host = self._host_of.get(worker)
        return host if host is not None and self._hosts[host][0] == worker else None

    def lacking(self, worker: int, chunks: Sequence[int]) -> None:
        """Record that a worker waits for chunks, or for the receiver of its host."""
        if (host := self._host_of.get(worker)) is not None:
            receiver = self._hosts[host][0]
            channel = self._channels[receiver]
            if worker == receiver:
                if self._broadcast is not None:
                    self._obey(self._broadcast.lacking(host, chunks, monotonic()))
            elif channel.silent or channel.closed or receiver in self._arrived:
                self._send_whole(worker)
        elif lenders := [self._channels[w] for w in self._lenders_of.get(worker, ())]:
            self._reports[worker] += 1
            gone = any(lender.silent or lender.closed for lender in lenders)
            if gone or self._reports[worker] >= _REPORTS:
                self._send_whole(worker)

    def lost(self, worker: int) -> None:
        """Record that a worker is gone. Its neighbours get the operand from here."""
        if (host := self._receives(worker)) is None:
            return
        for other in self._hosts[host][1:]:
            if other not in self._arrived:
                self._send_whole(other)
        if self._broadcast is not None:
            self._obey(self._broadcast.lost([host], monotonic()))

    def unreadable(self, worker: int) -> bool:
        """Record that a worker cannot read the memory that it was to find the operand in.

        Returns
        -------
        bool
            Whether it gets the operand in another way.
        """
        channel = self._channels[worker]
        channel.unreadable += 1
        channel.shared = channel.shared or False
        if worker not in self._host_of and worker not in self._offered:
            return False
        self._send_whole(worker)
        return True

    def end(self) -> None:
        """Do nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._broadcast, self._parts, self._part_of = None, [], {}

    def _send_whole(self, worker: int) -> None:
        if worker not in self._whole:
            self._whole.add(worker)
            for entries in self._parts_for(worker):
                self._send_part(worker, entries)

    def _send_part(self, worker: int, entries: _Entries) -> None:
        for chunk in entries.numbers:
            self._post(worker, entries, chunk, ())

    def _obey(self, commands: Sequence[SendChunk]) -> None:
        assert self._broadcast is not None
        for host, chunk, below in ((c.host, c.chunk, c.below) for c in commands):
            number = bisect_right(self._parts, chunk, key=lambda entries: entries.part.first) - 1
            receiver = self._hosts[host][0]
            self._post(receiver, self._parts[number], chunk, self._addresses(below))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._broadcast.wake is not None:
            delay = max(self._broadcast.wake - monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._broadcast is not None:
            self._obey(self._broadcast.react(monotonic()))

    def _post(self, worker: int, entries: _Entries, chunk: int, below: Route) -> None:
        data = entries.chunk(chunk)
        message = OperandChunk(self._run_id, entries.part, chunk, data, below)
        self._channels[worker].post(message)

    def _addresses(self, route: Route) -> Route:
        """Put addresses in the place of numbers of hosts."""
        return tuple(
            (self._channels[self._hosts[host][0]].address, self._addresses(below))
            for host, below in route
        )


class _Entries:
    """An operand, or the entries of it that one block needs, in chunks.

    Parameters
    ----------
    hosts : sequence of int
        Hosts whose receivers get them.
    first : int
        Number of the first chunk.
    operand : ndarray
    indices : ndarray of int, or None
        Which entries, in order; None for all of them.
    packed : bytes or None
        The same, as they travel.
    """

    def __init__(
        self,
        hosts: Sequence[int],
        first: int,
        operand: np.ndarray[Any, Any],
        indices: Ints | None,
        packed: bytes | None,
    ) -> None:
        self.hosts = hosts
        self.packed = packed
        self._operand = operand
        self._indices = indices
        self._bytes = operand.reshape(-1).view(np.uint8)
        count = len(operand) if indices is None else len(indices)
        self._entry = operand.nbytes // len(operand)
        size = count * self._entry
        each = chunk_bytes(size, max(len(hosts), 1))
        if indices is not None:
            # Each chunk is gathered when it is sent, so it holds whole entries.
            each = max(each // self._entry, 1) * self._entry
        shape = (count, *operand.shape[1:])
        self.part = Part(first, -(-size // each), each, operand.dtype.str, shape, len(operand))

    @property
    def numbers(self) -> range:
        """The numbers of the chunks."""
        return range(self.part.first, self.part.first + self.part.chunks)

    def chunk(self, number: int) -> np.ndarray[Any, Any]:
        """Return the bytes of a chunk."""
        begin = (number - self.part.first) * self.part.chunk_bytes
        end = begin + self.part.chunk_bytes
        if self._indices is None:
            return self._bytes[begin:end]
        some = self._indices[begin // self._entry : end // self._entry]
        return self._operand[some].reshape(-1).view(np.uint8)
