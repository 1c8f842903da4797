"""How the operand of a round reaches each worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key
from distributed.comm import get_address_host

from dask_coded.rounds.broadcast import Broadcast, Route, SendChunk, chunk_bytes
from dask_coded.transport import Channel, Exchange
from dask_coded.transport.memory import LEAST_BYTES, SharedArray
from dask_coded.transport.messages import Coming, LendOperand, OperandChunk
from dask_coded.typing import Floats

# Operands go from host to host if the coordinator would have to send this many bytes otherwise.
# Below that, the way over another host takes longer.
_LEAST_SENT = 1 << 20
# A worker that could not read its neighbour's memory this often is on another host, in effect. Once
# may be because the neighbour died just then.
_APART = 2
# A worker that has reported this often that it waits for a lender gets the operand from the
# coordinator. It reports after half a second, then ever less often.
_REPORTS = 3


class Parcel(NamedTuple):
    """What a worker's first message says about the operand; see :class:`StartRound`."""

    operand: Any
    coming: Coming | None = None
    neighbours: tuple[str, ...] = ()


class Delivery:
    """Brings one operand to the workers of a round.

    Workers that share memory with the coordinator read it there. A small operand travels in a
    worker's first message. Otherwise one worker of each host, its *receiver*, gets the operand in
    chunks, passes them on to the receivers of other hosts, and lets its neighbours on the host read
    the operand in its memory. A worker that is called in late gets it from a receiver.

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
    """

    def __init__(
        self,
        exchange: Exchange,
        run_id: Key,
        channels: Sequence[Channel],
        operand: np.ndarray[Any, Any] | None,
        shared: SharedArray | None,
        lags: Floats,
    ) -> None:
        self._exchange = exchange
        self._run_id = run_id
        self._channels = channels
        self._operand = operand
        self._shared = shared
        self._lags = lags
        self._loop = asyncio.get_running_loop()
        self._broadcast: Broadcast | None = None
        self._hosts: list[list[int]] = []  # workers of each host; the first one is its receiver
        self._host_of: dict[int, int] = {}
        self._whole: set[int] = set()  # workers that have been sent the operand in one message
        self._arrived: set[int] = set()  # workers that have it, because they have sent a share
        self._lender_of: dict[int, int] = {}
        self._reports: Counter[int] = Counter()  # of workers that wait for a lender
        self._lent: Counter[int] = Counter()  # how often each receiver was asked to lend it
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None

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
        self._hosts = list(hosts.values())
        self._host_of = {w: host for host, there in enumerate(self._hosts) for w in there}
        self._bytes = self._operand.reshape(-1).view(np.uint8)
        self._each = chunk_bytes(len(self._bytes), len(self._hosts))
        chunks = -(-len(self._bytes) // self._each)
        self._coming = Coming(chunks, self._each, self._operand.dtype.str, self._operand.shape)
        delays = np.array([self._lags[there[0]] for there in self._hosts])
        self._broadcast = Broadcast(chunks, delays, monotonic())

    def parcel(self, worker: int) -> Parcel:
        """Return what the first message to a worker says about the operand."""
        host = self._host_of.get(worker)
        if host is None:
            channel = self._channels[worker]
            if self._shared and channel.shared:
                return Parcel(self._shared)
            if not self._hosts or channel.near:
                return Parcel(self._operand)
            # A receiver that has the operand, or else one that will have it; they take turns.
            receivers = [there[0] for there in self._hosts if not self._channels[there[0]].closed]
            lenders = [w for w in receivers if w in self._arrived] or receivers
            if not lenders:
                return Parcel(self._operand)
            lender = min(lenders, key=lambda w: self._lent[w])
            self._lent[lender] += 1
            self._lender_of[worker] = lender
            self._channels[lender].post(LendOperand(self._run_id, channel.address))
            return Parcel(None, self._coming._replace(chunks=0))
        receiver, *others = self._hosts[host]
        if worker != receiver:
            return Parcel(None, self._coming._replace(chunks=0))
        neighbours = tuple(self._channels[other].address for other in others)
        return Parcel(None, self._coming, neighbours)

    def arrived(self, worker: int) -> None:
        """Record that a worker has the operand, because it has sent a share."""
        self._arrived.add(worker)

    def begin(self) -> None:
        """Send the first chunks, once all workers have their first message."""
        if self._broadcast is not None and not self._begun:
            self._begun = True
            self._send(self._broadcast.start(monotonic()))

    def confirmed(self, worker: int, chunk: int) -> None:
        """Record that a receiver has passed a chunk on."""
        host = self._host_of.get(worker)
        if self._broadcast is not None and host is not None and worker == self._hosts[host][0]:
            self._send(self._broadcast.passed(host, chunk, monotonic()))

    def lacking(self, worker: int, chunks: Sequence[int]) -> None:
        """Record that a worker waits for chunks, or for the receiver of its host."""
        if self._broadcast is None:
            return
        if worker not in self._host_of:
            self._reports[worker] += 1
            lender = self._channels[self._lender_of.get(worker, worker)]
            if lender.silent or lender.closed or self._reports[worker] >= _REPORTS:
                self._send_whole(worker)
            return
        host = self._host_of[worker]
        receiver = self._channels[self._hosts[host][0]]
        if worker == self._hosts[host][0]:
            self._send(self._broadcast.lacking(host, chunks, monotonic()))
        elif receiver.silent or receiver.closed or self._hosts[host][0] in self._arrived:
            self._send_whole(worker)

    def lost(self, worker: int) -> None:
        """Record that a worker is gone. Its neighbours get the operand from here."""
        host = self._host_of.get(worker)
        if self._broadcast is None or host is None or worker != self._hosts[host][0]:
            return
        for other in self._hosts[host][1:]:
            if other not in self._arrived:
                self._send_whole(other)
        self._send(self._broadcast.lost([host], monotonic()))

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
        if self._timer is not None:
            self._timer.cancel()
        self._broadcast = None

    def _send_whole(self, worker: int) -> None:
        if worker in self._whole:
            return
        self._whole.add(worker)
        for chunk in range(self._coming.chunks):
            self._post(worker, chunk, ())

    def _send(self, commands: Sequence[SendChunk]) -> None:
        assert self._broadcast is not None
        for command in commands:
            receiver = self._hosts[command.host][0]
            self._post(receiver, command.chunk, self._addresses(command.below))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._broadcast.wake is not None:
            delay = max(self._broadcast.wake - monotonic(), 0.0)
            self._timer = self._loop.call_later(delay, self._tick)

    def _post(self, worker: int, chunk: int, below: Route) -> None:
        data = self._bytes[chunk * self._each : (chunk + 1) * self._each]
        message = OperandChunk(self._run_id, self._coming, chunk, data, below)
        self._channels[worker].post(message)

    def _addresses(self, route: Route) -> Route:
        """Put addresses in the place of numbers of hosts."""
        return tuple(
            (self._channels[self._hosts[host][0]].address, self._addresses(below))
            for host, below in route
        )

    def _tick(self) -> None:
        self._timer = None
        if self._broadcast is not None:
            self._send(self._broadcast.react(monotonic()))
