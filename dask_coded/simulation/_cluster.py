"""One round in virtual time: the real round engine with workers that are only numbers."""

from __future__ import annotations

import gc
import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_coded.arguments import check_positive
from dask_coded.rounds import (
    Assign,
    Command,
    Finish,
    InfeasibleError,
    Layout,
    Reporting,
    Round,
    StripeRange,
    batch_size,
    stripes_in,
    without,
)
from dask_coded.rounds.assignment import all_tried
from dask_coded.typing import Bools, Floats


@dataclass(frozen=True)
class Network:
    """The costs of messages.

    Parameters
    ----------
    latency : float
        Seconds from one process to another.
    bandwidth : float
        Bytes per second of the coordinator's link, shared by all messages in one direction.
    operand : int
        Bytes of the operand, which each worker receives with its first message.
    result : int
        Bytes of the product with one whole piece.
    notice : float
        Seconds until a lost worker is noticed.
    tick : float
        After the coordinator has acted on shares, it waits so many seconds before it acts on the
        next ones, together. With 0, it acts on each at once.
    handling : float
        Seconds of computing that a worker of speed 1 loses for each message that it sends or
        receives.

    Raises
    ------
    ValueError
        If a number is negative or NaN, or the bandwidth is 0.
    """

    latency: float = 5e-4
    bandwidth: float = 1e9
    operand: int = 0
    result: int = 0
    notice: float = 0.01
    tick: float = 0.0
    handling: float = 0.0

    def __post_init__(self) -> None:
        check_positive("bandwidth", self.bandwidth, or_infinite=True)
        for name in ("latency", "operand", "result", "notice", "tick", "handling"):
            check_positive(name, getattr(self, name), or_zero=True, or_infinite=name == "notice")


@dataclass(slots=True)
class _Worker:
    """The state of a worker; the counterpart of the runtime's job."""

    queue: deque[StripeRange] = field(default_factory=deque)
    asked: bool = False  # whether the operand has been sent
    begun: float | None = None  # when its first list arrived
    since: float = 0.0  # time up to which its progress is accounted for
    partial: float = 0.0  # work done on the stripe at the head of the list
    batch: int = 0  # stripes at the head of the list that it computes by one product
    stripe: float = 0.0  # seconds that a stripe took last; 0 before the first one
    owed: float = 0.0  # work that it will lose to messages not yet handled
    busy: float = 0.0  # seconds at work, not yet reported
    unreported: float = 0.0  # work done, likewise
    unsent: list[StripeRange] = field(default_factory=list)
    reported: float = 0.0
    hinted: bool = False
    version: int = 0  # of its next report; those of earlier versions are obsolete

    def split(self) -> tuple[list[StripeRange], list[StripeRange]]:
        """Return what can no longer be withdrawn, and the rest of the list."""
        if not self.batch:
            return [], list(self.queue)
        (piece, start, stop), *others = self.queue
        until = start + self.batch
        rest = [StripeRange(piece, until, stop)] if until < stop else []
        return [StripeRange(piece, start, until)], rest + others


class VirtualRound:
    """Runs one round to its end.

    Parameters
    ----------
    round_ : Round
        Not yet started.
    rates : callable(time) -> (speeds, until)
        Returns the work per second of every worker, and the time until which it holds.
    network : Network
    reporting : Reporting
    lead : float
        Seconds before running dry at which a worker reports, as in the runtime's jobs.
    able : ndarray of bool, shape (workers,), optional
        Workers whose speed is above zero at any time; by default all.
    """

    def __init__(
        self,
        round_: Round,
        rates: Callable[[float], tuple[Floats, float]],
        network: Network,
        reporting: Reporting,
        lead: float,
        able: Bools | None = None,
    ) -> None:
        self.round = round_
        self.layout: Layout = round_.layout
        self.now = round_.state.now
        self.messages = 0
        self.computed = 0.0  # work done by all workers, useful or wasted
        self._rates = rates
        self._network = network
        self._reporting = reporting
        self._lead = lead
        self._workers = [_Worker() for _ in range(self.layout.workers)]
        self._events: list[tuple[float, int, str, int, Any]] = []
        self._count = itertools.count()
        self._sending = self._receiving = self.now  # when the link is free again
        # When the coordinator acts on the shares that have come, and when it has last done so.
        self._acts: float | None = None
        self._acted = -np.inf
        self._gone = np.zeros(self.layout.workers, dtype=bool)
        self._able = ~self._gone if able is None else able
        self._work = float(self.layout.work.sum(axis=1).mean())
        # Tolerance, so that a stripe is complete at its predicted time in spite of rounding.
        self._sliver = 1e-6 * float(self.layout.work.min())

    def run(
        self, first: list[list[StripeRange]] | None = None, delays: Floats | None = None
    ) -> None:
        """Run until the round has finished or can never finish.

        Parameters
        ----------
        first : list of lists of StripeRange, optional
            The first assignment; by default the policy's.
        delays : ndarray, shape (workers,), optional
            Seconds before each worker can start; by default zero.

        Raises
        ------
        RuntimeError
            If too many workers are stopped or gone for the round to finish.
        """
        until = self._read_speeds()
        self._notice_the_gone(after=0.0)
        if np.isfinite(until):
            self._at(until, "change")
        self._delays = np.zeros(self.layout.workers) if delays is None else delays
        with _uncollected():
            try:
                commands = self.round.start(first)
            except InfeasibleError:  # as in the cluster
                expected = all_tried(self.round.state.workers.prior)
                for number, speed in enumerate(expected.tolist()):
                    self.round.expect(number, speed)
                commands = self.round.start()
            self._obey(commands)
            while not (self.round.finished or self.round.failed):
                wake = self.round.wake
                if wake is not None and (not self._events or wake < self._events[0][0]):
                    self.now, kind = max(wake, self.now), "wake"
                    self._obey(self.round.react(self.now))
                elif self._events:
                    self.now, _, kind, worker, what = heapq.heappop(self._events)
                    getattr(self, f"_{kind}")(worker, what)
                else:
                    break
                # Of these alone there may be no end.
                if kind in ("wake", "change") and self._is_stuck():
                    break
        for number, idle in enumerate(self._workers):
            self._settle(number, idle)
        if not self.round.finished:
            reason = self.round.failed or "All workers that could finish it have stopped."
            raise RuntimeError(f"At {self.now:g} s the round can no longer finish. {reason}")

    def _is_stuck(self) -> bool:
        """Whether nothing more will come of what the round needs."""
        able = self._able & ~self._gone
        if able.all():
            return False
        pending = (kind for time, _, kind, _, _ in self._events if time < np.inf)
        if any(kind in ("report", "share", "act", "lost") for kind in pending):
            return False
        if self.round.wake is None and all(event[2] != "message" for event in self._events):
            return not any(self._workers[number].queue for number in np.flatnonzero(able))
        host, state = self.layout.host, self.round.state
        reachable = state.available & able[host] & (host >= 0)
        possible = reachable[:, None] | state.computed.array()
        return bool(self.layout.lacking(possible).any())

    # -- the coordinator -----------------------------------------------------------------------

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Finish):
                return
            self.messages += 1
            size, delay = 0, 0.0
            receiver = self._workers[command.worker]
            if not receiver.asked:
                receiver.asked, size = True, self._network.operand
                delay = float(self._delays[command.worker])
            self._sending = max(self._sending, self.now) + size / self._network.bandwidth
            arrival = self._sending + self._network.latency + delay
            self._at(arrival, "message", command.worker, command)

    def _share(self, worker: int, what: tuple[list[StripeRange], float]) -> None:
        """Record shares that arrive, and act on them, with a tick not too soon after others."""
        self.messages += 1
        self.round.record(worker, *what, self.now)
        if self._acts is None:
            self._acts = max(self.now, self._acted + self._network.tick)
            if self._acts > self.now:
                self._at(self._acts, "act")
            else:
                self._act()

    def _act(self, worker: int = -1, _: None = None) -> None:
        self._acts, self._acted = None, self.now
        self._obey(self.round.react(self.now))

    def _lost(self, worker: int, _: None) -> None:
        self._obey(self.round.lost([worker], self.now))

    # -- the workers ---------------------------------------------------------------------------

    def _message(self, number: int, command: Command) -> None:
        worker = self._workers[number]
        if self._gone[number] or isinstance(command, Finish):
            return
        self._settle(number, worker)
        worker.owed += self._network.handling
        if isinstance(command, Assign):
            if worker.begun is None:
                worker.begun = worker.reported = self.now
            worker.queue.extend(command.ranges)
            worker.hinted = False
        else:
            in_hand, rest = worker.split()
            for gone in command.ranges:
                rest = without(rest, gone)
            worker.queue = deque(in_hand + rest)
        self._plan_report(number, worker)

    def _settle(self, number: int, worker: _Worker) -> None:
        """Account for what has been computed since the last call."""
        rate, elapsed = self._speeds[number], self.now - worker.since
        worker.since = self.now
        if not rate > 0:
            return
        able = rate * elapsed
        handled = min(worker.owed, able)
        worker.owed -= handled
        if not worker.queue:
            return
        able -= handled
        have = worker.partial + able
        queue = worker.queue
        while queue:
            piece, start, end = queue[0]
            edges = self.layout.edges[piece]
            if not worker.batch:
                worker.batch = min(batch_size(stripes_in(queue), worker.stripe), end - start)
            reached = edges[start] + have + self._sliver
            stop = bisect_right(edges, reached, start, start + worker.batch + 1) - 1
            if stop <= start:
                break
            done = edges[stop] - edges[start]
            have -= done
            worker.batch -= stop - start
            worker.unreported += done
            worker.stripe = self.layout.mean_stripe / rate
            unsent = worker.unsent
            if unsent and unsent[-1].piece == piece and unsent[-1].stop == start:
                unsent[-1] = unsent[-1]._replace(stop=stop)
            else:
                unsent.append(StripeRange(piece, start, stop))
            if stop < end:
                queue[0] = StripeRange(piece, stop, end)
            else:
                queue.popleft()
        have = max(have, 0.0)
        idle = have if not queue else 0.0  # its list ran out
        worker.partial = have - idle
        worker.busy += elapsed - idle / rate
        self.computed += able - idle

    def _plan_report(self, number: int, worker: _Worker) -> None:
        """Schedule the report after the first batch at which one is due."""
        worker.version += 1
        rate = self._speeds[number]
        if not worker.queue:
            if worker.unsent:
                self._at(self.now, "report", number, worker.version)
            return
        if not rate > 0:
            return
        begun, reported = worker.begun, worker.reported
        assert begun is not None
        ahead = worker.owed - worker.partial  # work before the first stripe, minus what is done
        todo = self._todo(worker)
        dry = self.now + (ahead + todo) / rate
        due = reported + self._reporting.gap(reported - begun, dry - reported)
        if not worker.hinted:
            due = min(due, max(dry - self._lead, begun + self._lead))
        # The worker reports after the first batch that ends when a report is due, or later.
        wanted = min((due - self.now) * rate - ahead - self._sliver, todo)
        until, left, seconds = 0.0, stripes_in(worker.queue), worker.stripe
        size = worker.batch
        for piece, start, stop in worker.queue:
            row = self.layout.edges[piece]
            enough = bisect_left(row, wanted - until + row[start], start + 1, stop + 1)
            end = start
            while end < min(enough, stop):
                size = min(size or batch_size(left, seconds), stop - end)
                end, left, size = end + size, left - size, 0
                seconds = self.layout.mean_stripe / rate
            until += row[end] - row[start]
            if enough <= stop:
                break
        self._at(self.now + (ahead + until) / rate, "report", number, worker.version)

    def _todo(self, worker: _Worker) -> float:
        todo = 0.0
        for piece, start, stop in worker.queue:
            edges = self.layout.edges[piece]
            todo += edges[stop] - edges[start]
        return todo

    def _report(self, number: int, version: int) -> None:
        worker = self._workers[number]
        if version != worker.version or self._gone[number]:
            return
        self._settle(number, worker)
        if worker.unsent:
            if not worker.hinted:
                worker.hinted = self._todo(worker) <= self._lead * self._speeds[number]
            worker.reported = self.now
            share = worker.unsent, worker.busy
            size = worker.unreported / self._work * self._network.result
            worker.unsent, worker.busy, worker.unreported = [], 0.0, 0.0
            worker.owed += self._network.handling
            self._receiving = max(self._receiving, self.now + self._network.latency)
            self._receiving += size / self._network.bandwidth
            self._at(self._receiving, "share", number, share)
        self._plan_report(number, worker)

    def _change(self, _: int, __: None) -> None:
        """Switch to the speeds that hold from now on."""
        for number, worker in enumerate(self._workers):
            self._settle(number, worker)
        until = self._read_speeds()
        if np.isfinite(until):
            self._at(until, "change")
        self._notice_the_gone(after=self._network.notice)
        for number, worker in enumerate(self._workers):
            if worker.queue:
                self._plan_report(number, worker)

    def _read_speeds(self) -> float:
        """Read the speeds of this moment and return the time until which they hold."""
        speeds, until = self._rates(self.now)
        self._speeds: list[float] = speeds.tolist()
        return until

    def _notice_the_gone(self, after: float) -> None:
        for number in np.flatnonzero(np.isnan(self._speeds) & ~self._gone).tolist():
            self._gone[number] = True
            self._at(self.now + after, "lost", number)

    def _at(self, time: float, kind: str, worker: int = -1, what: Any = None) -> None:
        heapq.heappush(self._events, (time, next(self._count), kind, worker, what))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the collection of garbage.

    With 10,000 workers it took a fifth of the time, because each of many new events brings the next
    search through all modules nearer. Rounds leave no cycles for it to find.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
