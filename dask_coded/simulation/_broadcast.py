"""A large operand on its way to the hosts of a cluster, in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dask_coded.arguments import check_positive, check_whole
from dask_coded.rounds.broadcast import (
    Broadcast,
    Confirm,
    PassOn,
    Relay,
    ReportLacking,
    Route,
    SendChunk,
    chunk_bytes,
)
from dask_coded.typing import Floats, Ints

# The coordinator's place in arrays of links.
_HUB = -1


@dataclass(frozen=True)
class Outage:
    """A host that drops out of a broadcast.

    Parameters
    ----------
    time : float
        Seconds from the start of the broadcast.
    until : float
        When it continues; what it had to send, and what came for it, waits until then. Infinity
        for a host that is dead or cut off.
    noticed : float
        When the others notice that it is dead; infinity if they do not.
    """

    time: float
    until: float = np.inf
    noticed: float = np.inf


class _Transfer(NamedTuple):
    """A chunk on its way from one host to another."""

    sender: int
    host: int
    chunk: int
    below: Route
    until: float = 0.0  # when its last byte arrives, if the receiver's link is fast enough


class _Link:
    """One direction of a host's link, where transfers follow one another."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.queue: deque[_Transfer] = deque()
        self.busy = False


def broadcast_times(
    size: int,
    rates: Floats,
    latency: float = 5e-4,
    delays: Floats | None = None,
    outages: Mapping[int, Outage] | None = None,
    limit: float = np.inf,
    joining: Mapping[int, float] | None = None,
) -> tuple[Floats, Ints]:
    """Send an operand to all hosts, and return when it has reached each.

    Parameters
    ----------
    size : int
        Bytes of the operand.
    rates : ndarray, shape (hosts + 1,)
        Bytes per second of each host's link in either direction; the coordinator's comes last.
    latency : float
        Seconds from one host to another.
    delays : ndarray, shape (hosts,), optional
        Seconds after which the coordinator expects each host to answer; zeros if not given.
    outages : mapping of int to Outage, optional
        By host.
    limit : float
        Seconds after which the simulation ends.
    joining : mapping of int to float, optional
        Hosts that need the operand only from a time on.

    Returns
    -------
    times : ndarray, shape (hosts,)
        Seconds until each host has all of the operand; infinity for one that it does not reach.
    sent : ndarray of int, shape (hosts + 1,)
        Bytes that each link has carried away from its host; the coordinator's comes last.

    Raises
    ------
    ValueError
        If there is no host, or a size, a rate or the latency is out of range.

    Examples
    --------
    Four hosts, and links of 100 MB per second. The operand takes 0.2 s on each.

    >>> times, sent = broadcast_times(20_000_000, np.full(5, 1e8))
    >>> times.round(2), sent.max()
    (array([0.23, 0.23, 0.24, 0.24]), np.int64(20000000))
    """
    check_whole("size", size, least=0)
    check_positive("latency", latency, or_zero=True)
    rates = np.asarray(rates)
    if rates.ndim != 1 or len(rates) < 2 or not (rates > 0).all():
        raise ValueError(
            f"Argument 'rates' must hold positive numbers, one for each host and one for the "
            f"coordinator, it is {rates}."
        )
    run = _VirtualBroadcast(size, rates, latency, delays, dict(outages or {}), dict(joining or {}))
    run.run(limit)
    return run.times, run.sent


class _VirtualBroadcast:
    def __init__(
        self,
        size: int,
        rates: Floats,
        latency: float,
        delays: Floats | None,
        outages: dict[int, Outage],
        joining: dict[int, float],
    ) -> None:
        hosts = len(rates) - 1
        each = chunk_bytes(size, hosts)
        chunks = max(-(-size // each), 1)
        self._sizes = [each] * (chunks - 1) + [size - each * (chunks - 1)]
        self._latency = latency
        self._outages = outages
        self.now = 0.0
        self.times = np.full(hosts, np.inf)
        self.sent = np.zeros(hosts + 1, dtype=np.int64)
        self._up = [_Link(rate) for rate in rates.tolist()]
        self._down = [_Link(rate) for rate in rates.tolist()]
        self._relays = [Relay(0.0) for _ in range(hosts)]
        members = [host for host in range(hosts) if host not in joining]
        for host in members:
            self._relays[host].expect(range(chunks), 0.0)
        self._joining = joining
        self._quiet = [np.inf] * hosts  # when each host's `Relay.react` is due
        self._events: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self._count = itertools.count()
        self._broadcast = Broadcast(
            [(chunks, members)], np.zeros(hosts) if delays is None else delays
        )

    def run(self, limit: float) -> None:
        for host, outage in self._outages.items():
            self._at(outage.noticed, "noticed", host)
        for host, time in self._joining.items():
            self._at(time, "joins", host)
        for host in range(len(self._relays)):
            self._watch(host)
        self._send_out(self._broadcast.start(0.0))
        while self._events and np.isinf(self.times).any():
            wake = self._broadcast.wake
            if wake is not None and wake <= self._events[0][0]:
                self.now = max(wake, self.now)
                self._send_out(self._broadcast.react(self.now))
                continue
            self.now, _, kind, what = heapq.heappop(self._events)
            if self.now > limit:
                break
            getattr(self, f"_{kind}")(*what)

    # -- the coordinator -----------------------------------------------------------------------

    def _send_out(self, commands: list[SendChunk]) -> None:
        for command in commands:
            self._send(_HUB, command.host, command.chunk, command.below)

    def _noticed(self, host: int) -> None:
        self._send_out(self._broadcast.lost([host], self.now))
        for other, relay in enumerate(self._relays):
            self._obey(other, relay.lost(host))

    def _joins(self, host: int) -> None:
        self._relays[host].expect(range(len(self._sizes)), self.now)
        self._watch(host)
        self._send_out(self._broadcast.join(host, 0, self.now))

    # -- the hosts -----------------------------------------------------------------------------

    def _obey(self, host: int, commands: Sequence[PassOn | Confirm | ReportLacking]) -> None:
        for command in commands:
            match command:
                case PassOn(below, chunk, further):
                    self._send(host, below, chunk, further)
                case Confirm(sender, chunk):
                    self._message("confirmed", sender, host, chunk)
                case ReportLacking(chunks):
                    self._message("lacking", _HUB, host, chunks)

    def _message(self, kind: str, receiver: int, sender: int, what: Any) -> None:
        """Send a message so small that its size does not matter."""
        left = self._resumed(sender, self.now)
        self._at(self._resumed(receiver, left + self._latency), kind, receiver, sender, what)

    def _confirmed(self, receiver: int, host: int, chunk: int) -> None:
        if receiver == _HUB:
            self._send_out(self._broadcast.passed(host, chunk, self.now))
        else:
            self._obey(receiver, self._relays[receiver].confirmed(host, chunk))

    def _lacking(self, _: int, host: int, chunks: tuple[int, ...]) -> None:
        self._send_out(self._broadcast.lacking(host, chunks, self.now))

    def _watch(self, host: int) -> None:
        """See to it that a host's relay reacts in time."""
        wake = self._relays[host].wake
        if wake is not None and wake < self._quiet[host]:
            self._quiet[host] = wake
            self._at(self._resumed(host, wake), "react", host)

    def _react(self, host: int) -> None:
        self._quiet[host] = np.inf
        self._obey(host, self._relays[host].react(self.now))
        self._watch(host)

    # -- links ---------------------------------------------------------------------------------

    def _send(self, sender: int, host: int, chunk: int, below: Route) -> None:
        self._up[sender].queue.append(_Transfer(sender, host, chunk, below))
        self._depart(sender)

    def _depart(self, sender: int) -> None:
        """Let the next transfer leave a host. Its first byte arrives one latency later."""
        link = self._up[sender]
        if link.busy or not link.queue:
            return
        transfer = link.queue.popleft()
        link.busy = True
        size = self._sizes[transfer.chunk]
        self.sent[sender] += size
        seconds = size / link.rate
        end = self._resumed(sender, self._resumed(sender, self.now) + seconds)
        self._at(end, "departed", sender)
        until = end + self._latency
        # If the sender stops on the way, others use the receiver's link meanwhile.
        self._at(until - seconds, "arrive", transfer._replace(until=until))

    def _departed(self, sender: int) -> None:
        self._up[sender].busy = False
        self._depart(sender)

    def _arrive(self, transfer: _Transfer) -> None:
        self._down[transfer.host].queue.append(transfer)
        self._take_in(transfer.host)

    def _take_in(self, host: int) -> None:
        """Let the next transfer come in at a host."""
        link = self._down[host]
        if link.busy or not link.queue:
            return
        transfer = link.queue.popleft()
        link.busy = True
        end = max(self.now + self._sizes[transfer.chunk] / link.rate, transfer.until)
        self._at(self._resumed(host, end), "came", transfer)

    def _came(self, transfer: _Transfer) -> None:
        _, host, chunk, below, _ = transfer
        self._down[host].busy = False
        self._take_in(host)
        relay = self._relays[host]
        self._obey(host, relay.received(chunk, transfer.sender, below, self.now))
        self._watch(host)
        if relay.wake is None:
            self.times[host] = min(self.times[host], self.now)

    def _resumed(self, host: int, time: float) -> float:
        """Return when something that a host would do at a time really happens."""
        outage = self._outages.get(host)
        return time if outage is None or not outage.time <= time < outage.until else outage.until

    def _at(self, time: float, kind: str, *what: Any) -> None:
        if np.isfinite(time):
            heapq.heappush(self._events, (time, next(self._count), kind, what))
