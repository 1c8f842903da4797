"""The way of a large operand: each chunk goes to one host, which passes it on to the others.

If the coordinator sent the operand to every host itself, its link would carry it once for each.
Here its link carries each chunk about once. The chunks are spread over several trees of hosts, and
no host passes chunks on in more than one tree, so that every link carries about one operand in
each direction. With up to 17 hosts, a tree is one host and all others below it.

.. [1] M. Castro et al., "SplitStream: High-Bandwidth Multicast in Cooperative Environments",
   SOSP 2003: forests of trees whose inner nodes are disjoint.

:class:`Broadcast` decides for the coordinator, :class:`Relay` for each host. The cluster, the
simulator and the tests drive both. Every method takes the time of its event and returns commands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dask_coded.typing import Floats, Ints

#: Hosts that one host passes a chunk on to, at most. More make each tree flatter, and the tail of
#: the broadcast longer, because a host sends the last chunk to them one after the other.
FANOUT = 16
# Chunks that a relay may hold at once without having passed them on. With one it would be idle
# while the next is under way. A relay that has not passed anything on yet gets only one.
_WINDOW = 2
# Least seconds without a chunk after which a host reports what it lacks.
_QUIET = 0.5
# At most, because a neighbour of the host that reports may wait for a host that has stopped.
_SELDOM = 8.0
# A chunk is overdue after this many times the usual time, and given to another relay.
_OVERDUE = 2.0
# Bytes of a chunk. Small ones cost processor time for their messages, large ones make the last
# chunk late: a relay sends it to all hosts below, while the other relays have nothing left to do.
LEAST_CHUNK, _LARGEST_CHUNK = 1 << 17, 1 << 20
# Chunks for each relay, if they are not too small.
_CHUNKS = 6

#: Hosts below a relay, each with the hosts below it.
Route: TypeAlias = "tuple[tuple[Any, Route], ...]"


@dataclass(frozen=True)
class SendChunk:
    """Send a chunk to a host, which passes it on.

    Parameters
    ----------
    host, chunk : int
    below : Route
        To which hosts it passes the chunk on, and what these do.
    """

    host: int
    chunk: int
    below: Route


def chunk_bytes(size: int, hosts: int) -> int:
    """Return the bytes of each chunk but the last, for an operand of a size in bytes.

    Examples
    --------
    >>> chunk_bytes(8_000_000, hosts=7), chunk_bytes(800_000_000, hosts=1000)
    (190464, 1048576)
    """
    each = size // (_CHUNKS * min(hosts, FANOUT)) // 64 * 64
    return min(max(each, LEAST_CHUNK), _LARGEST_CHUNK)


def route(hosts: Sequence[int], fanout: int, at: int = 0) -> Route:
    """Return what is below the host at a position, if the hosts form a tree in this order.

    Examples
    --------
    >>> route([3, 1, 2, 0], fanout=2)
    ((1, ((0, ()),)), (2, ()))
    """
    first = fanout * at + 1
    below = range(first, min(first + fanout, len(hosts)))
    return tuple((hosts[i], route(hosts, fanout, i)) for i in below)


class Broadcast:
    """What the coordinator sends to which host, and when.

    Parameters
    ----------
    parts : sequence of (int, sequence of int)
        How many chunks each part of the operand has, and which hosts need them; more may join.
        Chunks of all parts are numbered together, and share the windows of relays and the link of
        the coordinator.
    delays : ndarray, shape (hosts,)
        Seconds after which each host usually begins to answer. Hosts that need more than twice the
        median pass nothing on. Zeros if nothing is known.
    patience : float
        Seconds after which a chunk is overdue, before any relay has passed one on. Later it is
        twice what relays usually need, and at least a tenth of this.

    Examples
    --------
    Two hosts need the first part, a third one needs the second. One more needs the first part, too,
    after its chunks have left.

    >>> broadcast = Broadcast([(2, [0, 1]), (1, [2])], np.zeros(4))
    >>> for command in broadcast.start(now=0.0):
    ...     print(command)
    SendChunk(host=0, chunk=0, below=((1, ()),))
    SendChunk(host=1, chunk=1, below=((0, ()),))
    SendChunk(host=2, chunk=2, below=())
    >>> for command in broadcast.join(3, part=0, now=0.1):
    ...     print(command)
    SendChunk(host=3, chunk=0, below=())
    SendChunk(host=3, chunk=1, below=())
    """

    def __init__(
        self, parts: Sequence[tuple[int, Sequence[int]]], delays: Floats, patience: float = 1.0
    ) -> None:
        self._hosts = [set(hosts) for _, hosts in parts]
        self._part_of = [part for part, (chunks, _) in enumerate(parts) for _ in range(chunks)]
        self._delays = np.asarray(delays, dtype=np.float64)
        self._alive = np.ones(len(self._delays), dtype=bool)
        # Relays that have let a chunk become overdue. They get no more.
        self._late: set[int] = set()
        # For each part, chunks to be sent to all its hosts, the first one last.
        self._waiting: list[list[int]] = [[] for _ in parts]
        for chunk in reversed(range(len(self._part_of))):
            self._waiting[self._part_of[chunk]].append(chunk)
        # When each chunk was sent to a relay, until the relay has passed it on or is overdue.
        self._out: dict[tuple[int, int], float] = {}
        # Chunks that left before a host needed them, or that it lacks, in order, and whether they
        # may come by another host that is owed them, too.
        self._owed: dict[int, dict[int, bool]] = {}
        # Those on their way, by the host that they are sent to, each with all hosts that get it.
        self._behind: dict[int, dict[int, set[int]]] = {}
        self._held = np.zeros(len(self._delays), dtype=np.intp)  # how many chunks, by relay
        self._window = np.ones(len(self._delays), dtype=np.intp)
        self._passed = np.zeros(len(self._part_of), dtype=bool)
        self._repeated: set[int] = set()
        self._first = self._patience = patience
        self._usual = 0.0  # seconds that relays need to pass a chunk on, of late the slowest
        self._trees: list[list[tuple[int, Route]]] = [[] for _ in parts]
        self._plant(range(len(self._delays)))

    @property
    def finished(self) -> bool:
        """Whether no chunk waits, and none is on its way."""
        waits = any(w and t for w, t in zip(self._waiting, self._trees, strict=True))
        return not (waits or self._out or any(self._owed.values()))

    @property
    def wake(self) -> float | None:
        """When to call :meth:`react` if nothing else happens."""
        return min(self._out.values()) + self._patience if self._out else None

    def start(self, now: float) -> list[SendChunk]:
        """Return the first chunks to send."""
        return self._hand_out(now)

    def join(self, host: int, part: int, now: float) -> list[SendChunk]:
        """Record that one more host needs a part.

        Chunks that have left already leave once more for all hosts that have joined by then; those
        that wait come as to all hosts.
        """
        if not self._alive[host] or host in self._hosts[part]:
            return []
        self._hosts[part].add(host)
        left = set(self._waiting[part])
        owed = (c for c, its in enumerate(self._part_of) if its == part and c not in left)
        self._owed.setdefault(host, {}).update(dict.fromkeys(owed, True))
        self._plant([host])
        return self._hand_out(now)

    def passed(self, host: int, chunk: int, now: float) -> list[SendChunk]:
        """Record that a host has a chunk, and has passed it on to most hosts below it."""
        since, behind = self._forget(host, chunk)
        self._passed[chunk] |= since is not None and behind is None
        self._owed.get(host, {}).pop(chunk, None)
        self._window[host] = _WINDOW
        if since is not None:
            taken = now - since
            # Chunks that wait for one link arrive one after the other, the first of them soon. A
            # mean would not grow as fast as these times do.
            self._usual = max(taken, 0.8 * self._usual + 0.2 * taken)
            self._patience = max(_OVERDUE * self._usual, self._first / 10)
        return self._hand_out(now)

    def lost(self, hosts: Iterable[int], now: float) -> list[SendChunk]:
        """Record that hosts are gone. What they have not passed on goes to other relays."""
        gone = {host for host in hosts if self._alive[host]}
        if not gone:
            return []
        self._alive[list(gone)] = False
        for relay, chunk in [key for key in self._out if key[0] in gone]:
            _, behind = self._forget(relay, chunk)
            for host in behind or ():
                if self._alive[host]:
                    self._owed[host][chunk] = True
            if behind is None and not self._passed[chunk]:
                self._wait(chunk)
        for host in gone:
            self._owed.pop(host, None)
        self._plant(gone)
        return self._hand_out(now)

    def lacking(self, host: int, chunks: Iterable[int], now: float) -> list[SendChunk]:
        """Record that a host still waits for chunks, and send some that no relay will bring."""
        if not self._alive[host]:
            return []
        # A chunk sent to few others only does not come to this one.
        coming = set()
        for to, chunk in self._out:
            behind = self._behind.get(to, {}).get(chunk)
            if behind is None or host in behind or host == to:
                coming.add(chunk)
        for waiting, hosts in zip(self._waiting, self._hosts, strict=True):
            if host in hosts:
                coming.update(waiting)
        owed = self._owed.setdefault(host, {})
        # Not all at once: a host behind a thin link reports what is already on its way there.
        wanted = [chunk for chunk in chunks if chunk not in coming and chunk not in owed]
        owed.update(dict.fromkeys(wanted[: max(2 * _WINDOW - len(owed), 0)], False))
        return self._hand_out(now)

    def react(self, now: float) -> list[SendChunk]:
        """Give chunks that are overdue to other relays."""
        overdue = [key for key, since in self._out.items() if now >= since + self._patience]
        late = set()
        for relay, chunk in overdue:
            late.add(relay)
            if (behind := self._behind.get(relay, {}).get(chunk)) is not None:
                # It may be on its way behind a thin link, so its host is sent no more until it
                # confirms; the others get it otherwise.
                del self._out[relay, chunk]
                for host in behind - {relay}:
                    if self._alive[host]:
                        self._owed.setdefault(host, {})[chunk] = True
                behind.intersection_update({relay})
                continue
            self._forget(relay, chunk)
            # If only this host needs it, it will get there the way that it was sent.
            again = len(self._hosts[self._part_of[chunk]]) > 1 and chunk not in self._repeated
            if again and not self._passed[chunk]:
                self._repeated.add(chunk)  # once; then hosts say what they lack
                self._wait(chunk)
        self._late |= late
        if late:
            self._plant(late)
        return self._hand_out(now)

    def _wait(self, chunk: int) -> None:
        self._waiting[self._part_of[chunk]].append(chunk)

    def _forget(self, host: int, chunk: int) -> tuple[float | None, set[int] | None]:
        """Record that a chunk is not on its way to a host.

        Return since when it has been, and which hosts it was for, if not for all of a part.
        """
        since = self._out.pop((host, chunk), None)
        behind = self._behind.get(host, {}).pop(chunk, None)
        self._held[host] -= since is not None and behind is None
        return since, behind

    def _plant(self, changed: Iterable[int]) -> None:
        """Choose the trees of all parts that go to some of these hosts."""
        changed = set(changed)
        for part, hosts in enumerate(self._hosts):
            if not hosts.isdisjoint(changed):
                self._trees[part] = self._forest(np.array(sorted(hosts)))

    def _forest(self, hosts: Ints) -> list[tuple[int, Route]]:
        """Choose the inner hosts of each tree, among those that are not known to be slow."""
        alive = hosts[self._alive[hosts]]
        order = alive[np.argsort(self._delays[alive], kind="stable")]
        median = np.median(self._delays[alive]) if len(alive) else 0.0
        fast = [
            host
            for host in order.tolist()
            if self._delays[host] <= 2 * median and host not in self._late
        ]
        # If all are late, the network is; then any host is as good as another.
        fast = fast or order.tolist()
        inner = max(math.ceil((len(order) - 1) / FANOUT), 1)
        fanout = max(math.ceil((len(order) - 1) / inner), 1)
        trees = max(len(fast) // inner, 1)
        # Neighbours in speed share a tree, so that a slow host holds up only others like it.
        forest = []
        for i in range(trees if fast else 0):
            tree = fast[i * inner : (i + 1) * inner]
            members = list(dict.fromkeys([*tree, *fast, *order.tolist()]))
            forest.append((members[0], route(members, fanout)))
        return forest

    def _hand_out(self, now: float) -> list[SendChunk]:
        commands = []
        for waiting, trees in zip(self._waiting, self._trees, strict=True):
            while waiting and trees:
                relay, below = min(
                    trees, key=lambda tree: self._held[tree[0]] - self._window[tree[0]]
                )
                if self._held[relay] >= self._window[relay]:
                    break
                chunk = waiting.pop()
                self._forget(relay, chunk)  # it comes once more, with a longer route
                self._held[relay] += 1
                commands.append(self._sent(relay, chunk, below, now))
        for host, owed in self._owed.items():
            sent = self._behind.setdefault(host, {})
            while owed and len(sent) < 2 * _WINDOW:
                chunk = next(iter(owed))
                shared = owed.pop(chunk)
                if (host, chunk) in self._out:
                    continue
                shared = shared and host not in self._late
                others = [w for w, its in self._owed.items() if shared and its.get(chunk)]
                for other in others:
                    del self._owed[other][chunk]
                sent[chunk] = {host, *others}
                commands.append(self._sent(host, chunk, route([host, *others], FANOUT), now))
        return commands

    def _sent(self, host: int, chunk: int, below: Route, now: float) -> SendChunk:
        """Record that a chunk goes to a host."""
        self._out[host, chunk] = now
        return SendChunk(host, chunk, below)


@dataclass(frozen=True)
class PassOn:
    """Send a chunk to a host below this one.

    Parameters
    ----------
    host
    chunk : int
    below : Route
    """

    host: Any
    chunk: int
    below: Route


@dataclass(frozen=True)
class Confirm:
    """Tell the sender of a chunk that it is here, and at most hosts below.

    Parameters
    ----------
    sender
    chunk : int
    """

    sender: Any
    chunk: int


@dataclass(frozen=True)
class ReportLacking:
    """Tell the coordinator which chunks have not come.

    Parameters
    ----------
    chunks : tuple of int
    """

    chunks: tuple[int, ...]


class Relay:
    """What a host does with the chunks that reach it.

    A host confirms a chunk to its sender once half of the hosts right below it have confirmed it;
    if there is only one, at once.
    So the coordinator learns how fast a relay really is: a write to a socket returns long before
    the bytes have left. The slower half does not count, because a slow receiver says nothing about
    the relay.

    Parameters
    ----------
    now : float
        Seconds on the host's clock.

    Attributes
    ----------
    wake : float or None
        When to call :meth:`react`; None while no chunk is lacking.

    Examples
    --------
    >>> relay = Relay(now=0.0)
    >>> relay.expect([0, 1], now=0.0)
    >>> relay.received(0, "coordinator", (("b", ()), ("c", ())), now=0.1)
    [PassOn(host='b', chunk=0, below=()), PassOn(host='c', chunk=0, below=())]
    >>> relay.confirmed("c", 0)
    [Confirm(sender='coordinator', chunk=0)]
    >>> relay.react(now=relay.wake)
    [ReportLacking(chunks=(1,))]
    """

    def __init__(self, now: float) -> None:
        self._here: set[int] = set()
        self._lacking: set[int] = set()
        self._last = now
        self._patience = _QUIET
        self.wake: float | None = None
        # For each chunk on its way down: its sender, the hosts that have not confirmed it, and how
        # many of them may still be missing.
        self._pending: dict[int, list[tuple[Any, set[Any], int]]] = {}

    def expect(self, chunks: Iterable[int], now: float) -> None:
        """Record that the host needs these chunks; some may have come already."""
        self._lacking.update(chunk for chunk in chunks if chunk not in self._here)
        self._last = now
        self.wake = now + self._patience if self._lacking else None

    def received(self, chunk: int, sender: Any, below: Route, now: float) -> list[PassOn | Confirm]:
        """Record a chunk that has come, and pass it on."""
        self._here.add(chunk)
        self._lacking.discard(chunk)
        self._patience = max(_QUIET, 4 * (now - self._last))
        self._last = now
        self.wake = now + self._patience if self._lacking else None
        passed: list[PassOn | Confirm] = [PassOn(host, chunk, further) for host, further in below]
        if len(below) <= 1:
            # If one slow host had to confirm, it would hold up the other one.
            return [*passed, Confirm(sender, chunk)]
        hosts = {host for host, _ in below}
        self._pending.setdefault(chunk, []).append((sender, hosts, len(hosts) // 2))
        return passed

    def confirmed(self, host: Any, chunk: int) -> list[Confirm]:
        """Record that a host below has a chunk."""
        confirms = []
        waiting = []
        for sender, hosts, missing in self._pending.pop(chunk, ()):
            hosts.discard(host)
            if len(hosts) <= missing:
                confirms.append(Confirm(sender, chunk))
            else:
                waiting.append((sender, hosts, missing))
        if waiting:
            self._pending[chunk] = waiting
        return confirms

    def lost(self, host: Any) -> list[Confirm]:
        """Record that a host below is gone; nothing waits for it any more."""
        return [done for chunk in list(self._pending) for done in self.confirmed(host, chunk)]

    def react(self, now: float) -> list[ReportLacking]:
        """Report what is lacking, if nothing has come for long; less and less often."""
        if self.wake is None or now < self.wake:
            return []
        self._patience = min(2 * self._patience, _SELDOM)
        self.wake = now + self._patience
        return [ReportLacking(tuple(sorted(self._lacking)))]
