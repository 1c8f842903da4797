"""The state of a running round, and the two moves that a policy can make: assign and withdraw."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dask_coded.rounds.layout import Layout, StripeRange, ranges_of, without
from dask_coded.rounds.reporting import Reporting
from dask_coded.typing import Bools, Floats, Ints

# A worker is late once it has been silent for this many times as long as expected. The margin is
# for a report that is just due, and for the stripe in hand, which the worker has to finish first.
_LATE = 2
# Before the first report of a round no duration is known, because predicted speeds may be in any
# unit. A stripe is then expected to take this many report intervals.
_INTERVALS_OF_A_STRIPE = 10
# Keeps divisions by speeds finite; far below any speed that a worker can have.
_SLOWEST = 1e-12


@dataclass(frozen=True)
class Assign:
    """Command: ``worker`` computes these ranges, after those that it was assigned before."""

    worker: int
    ranges: tuple[StripeRange, ...]


@dataclass(frozen=True)
class Withdraw:
    """Command: ``worker`` drops these ranges; stripes that it has computed already still count."""

    worker: int
    ranges: tuple[StripeRange, ...]


@dataclass(frozen=True)
class Finish:
    """Command: the round has all shares that it needs; all workers drop what is left."""


Command = Assign | Withdraw | Finish


class Estimate(NamedTuple):
    """The expected state of all workers, each field of shape (workers,).

    Attributes
    ----------
    speed : ndarray
        Work per second from now on.
    backlog : ndarray
        Work owed, minus the work believed to be done since the last report.
    latest, eta : ndarray
        Seconds until the worker runs dry, according to its reports (``latest``) and to the estimate
        (``eta``). Infinite for a worker that owes work and makes no progress.
    """

    speed: Floats
    backlog: Floats
    latest: Floats
    eta: Floats


class RoundState:
    """What was assigned, what has come back, and how fast each worker turns out to be.

    Policies read the arrays and call :meth:`assign` and :meth:`withdraw`.

    Attributes
    ----------
    computed : ndarray of bool, shape (pieces, stripes)
        Stripes that have come back.
    held : ndarray of bool, shape (pieces, stripes)
        Stripes that have come back, or were assigned and not withdrawn. They must not be assigned
        again.
    missing : ndarray of int, shape (groups, stripes)
        How many more pieces each stripe needs, at least.
    queues : list of deque of StripeRange
        What each worker still owes, in its order.
    todo, done : ndarray, shape (workers,)
        Work owed, and work that has come back in this round.
    available : ndarray of bool, shape (pieces,)
        Pieces that have not been lost.
    prior : ndarray, shape (workers,)
        Predicted speeds.
    """

    def __init__(
        self,
        layout: Layout,
        speeds: Floats,
        now: float,
        reporting: Reporting | None = None,
        lags: Floats | None = None,
    ) -> None:
        shape = layout.pieces, layout.stripes
        self.layout = layout
        self.started = now
        self.reporting = reporting or Reporting()
        self.computed: Bools = np.zeros(shape, dtype=bool)
        self.held: Bools = np.zeros(shape, dtype=bool)
        self.missing: Ints = np.repeat(layout.need[:, None], layout.stripes, axis=1)
        self.queues: list[deque[StripeRange]] = [deque() for _ in range(layout.workers)]
        self.available: Bools = layout.host >= 0
        self.prior: Floats = np.asarray(speeds, dtype=np.float64)
        self.todo: Floats = np.zeros(layout.workers)
        self.done: Floats = np.zeros(layout.workers)
        self.busy: Floats = np.zeros(layout.workers)
        self.began: Floats = np.full(layout.workers, np.nan)
        self.heard: Floats = np.full(layout.workers, np.nan)
        # Since when a worker has owed a report; NaN if it owes none. A withdrawal does not reset
        # it, because a stopped worker would then look healthy after each one.
        self.asked: Floats = np.full(layout.workers, np.nan)
        # From an assignment to the first report, minus the computing: messages, queues, stalls.
        self._lags: Floats = np.full(layout.workers, np.nan)
        self._expected_lags = np.zeros(layout.workers) if lags is None else lags
        self._stripe = float(layout.work.mean())
        self.commands: list[Command] = []
        self.now = now

    # -- moves ---------------------------------------------------------------------------------

    def assign(self, worker: int, ranges: list[StripeRange]) -> None:
        """Assign ranges that are not held yet."""
        for part in ranges:
            self.held[part.piece, part.start : part.stop] = True
            self.todo[worker] += self.layout.cost(part)
            self.queues[worker].append(part)
        if ranges:
            if np.isnan(self.began[worker]):
                self.began[worker] = self.heard[worker] = self.now
            if np.isnan(self.asked[worker]):
                self.asked[worker] = self.now
            self.commands.append(Assign(worker, tuple(ranges)))

    def withdraw(self, worker: int, ranges: list[StripeRange]) -> None:
        """Take back ranges that the worker owes."""
        for part in ranges:
            self._drop(worker, part)
            stripes = slice(part.start, part.stop)
            self.held[part.piece, stripes] = self.computed[part.piece, stripes]
        if ranges:
            self.commands.append(Withdraw(worker, tuple(ranges)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send the commands given in this context as one for each worker and kind.

        Each move still counts at once: the next one sees what it has assigned and withdrawn.
        """
        before, self.commands = self.commands, []
        try:
            yield
        finally:
            merged: dict[tuple[type[Assign | Withdraw], int], list[StripeRange]] = {}
            for command in self.commands:
                assert not isinstance(command, Finish)
                merged.setdefault((type(command), command.worker), []).extend(command.ranges)
            self.commands = before + [
                kind(worker, tuple(ranges)) for (kind, worker), ranges in merged.items()
            ]

    # -- what a policy asks --------------------------------------------------------------------

    @property
    def complete(self) -> Bools:
        """Stripes that have come back often enough, in all groups: shape (stripes,)."""
        return np.asarray((self.missing <= 0).all(axis=0))

    @property
    def unfinished(self) -> bool:
        return not self.complete.all()

    def present(self) -> Bools:
        """Return which workers hold at least one available piece, shape (workers,)."""
        hosts = self.layout.host[self.available]
        return np.bincount(hosts, minlength=self.layout.workers) > 0

    @property
    def unheard(self) -> Bools:
        """Workers that were assigned work and have not reported yet, shape (workers,)."""
        return np.isnan(self._lags) & ~np.isnan(self.began)

    def secured(self, workers: Bools | None = None) -> Bools:
        """Return what has come back or is under way, shape (pieces, stripes).

        With ``workers``, shape (workers,), only work under way at these workers counts.
        """
        if workers is None:
            return self.held
        trusted = (workers[self.layout.host] & (self.layout.host >= 0))[:, None]
        return self.computed | (self.held & trusted)

    def replaceable(self, part: StripeRange, piece: int) -> Bools:
        """Return where ``piece`` can replace a range under way, shape (stripes of the range,).

        That is wherever it is not held, if the number of pieces decides whether they suffice.
        Otherwise the code is asked stripe by stripe.
        """
        code = self.layout.code
        free = ~self.held[piece, part.start : part.stop]
        if code is not None:
            for i in np.flatnonzero(free).tolist():
                have = self.held[:, part.start + i].copy()
                if not code.span(have).spare[part.piece]:
                    have[part.piece] = False
                    free[i] = code.span(have).adds[piece]
        return free

    def estimate(self) -> Estimate:
        """Estimate the state of all workers at this moment.

        The speed of a worker is the one measured in this round. Before its first report it is the
        predicted one, scaled by what other workers have reported. A worker is believed to go on at
        that speed until its next report is due. A worker that stays silent for longer is believed
        to slow down more and more. This distinguishes a stopped worker from a busy one.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            measured = self.done / self.busy
            known = (self.done > 0) & (self.busy > 0)
            trusted = known & (self.prior > 0)
            ratios = measured[trusted] / self.prior[trusted]
            scale = float(np.median(ratios)) if len(ratios) else 1.0
            speed = np.where(known, measured, self.prior * scale)
            stripe, left = self._stripe / speed, self.todo / speed
            if not len(ratios):
                unknown = _INTERVALS_OF_A_STRIPE * self.reporting.interval
                stripe, left = np.full(len(speed), unknown), np.zeros(len(speed))
            normal = _LATE * (self.reporting.gap(self.heard - self.began, left) + stripe)
            quiet = np.nan_to_num(self.now - self.asked)
            late = quiet - normal
            computed = speed * (quiet - np.where(known, 0.0, self.lags)) if len(ratios) else 0.0
            backlog = np.where(late > 0, self.todo, np.clip(self.todo - computed, 0.0, self.todo))
            # A worker that is late already is expected to be late by as much again.
            slowed = np.where(
                self.todo > 0,
                self.todo / (self.todo / speed + late),
                speed * normal / (normal + late),
            )
            speed = np.where(late > 0, slowed, speed)
            return Estimate(
                np.nan_to_num(speed, nan=0.0, posinf=0.0),
                backlog,
                np.where(self.todo > 0, self.todo / speed, 0.0),
                np.where(backlog > 0, backlog / speed, 0.0),
            )

    @property
    def lag(self) -> float:
        """Seconds that a worker typically needs to start on new work and to report it."""
        known = self._lags[~np.isnan(self._lags)]
        return float(np.median(known)) if len(known) else float(np.median(self._expected_lags))

    @property
    def lags(self) -> Floats:
        """The lag of each worker, shape (workers,): measured, else expected, else typical."""
        expected = np.where(self._expected_lags > 0, self._expected_lags, self.lag)
        return np.where(np.isnan(self._lags), expected, self._lags)

    # -- what a round teaches ------------------------------------------------------------------

    def measured_speeds(self, elapsed: float) -> dict[int, float]:
        """Return the work per second of each worker that was assigned any, after ``elapsed`` s."""
        found = {}
        for worker in np.flatnonzero(~np.isnan(self.began)).tolist():
            if self.busy[worker] > 0 and self.done[worker] > 0:
                found[worker] = float(self.done[worker] / self.busy[worker])
            elif self.todo[worker] > 0:
                # No share has come: at best the worker was about to send its first stripe.
                pieces = self.layout.pieces_of[worker]
                found[worker] = float(self.layout.work[pieces, 0].mean()) / elapsed
        return found

    def measured_lags(self, elapsed: float) -> dict[int, float]:
        """Return the lag in seconds of each worker that was assigned any work."""
        # A worker that has not reported needs longer than the whole round.
        lags = np.where(np.isnan(self._lags), elapsed, self._lags).tolist()
        return {worker: lags[worker] for worker in np.flatnonzero(~np.isnan(self.began)).tolist()}

    # -- events, from the round ----------------------------------------------------------------

    def record(self, worker: int, ranges: list[StripeRange], seconds: float) -> list[StripeRange]:
        """Record ranges that came back; return those that hold any new stripe."""
        fresh = []
        if np.isnan(self._lags[worker]):
            self._lags[worker] = max(self.now - self.asked[worker] - seconds, 0.0)
        self.heard[worker] = self.now
        self.busy[worker] += seconds
        for part in ranges:
            self.done[worker] += self.layout.cost(part)
            self._drop(worker, part)
        self.asked[worker] = self.now if self.todo[worker] > 0 else np.nan
        for part in ranges:
            stripes = slice(part.start, part.stop)
            self.held[part.piece, stripes] = True
            new = ~self.computed[part.piece, stripes]
            if new.any():
                self.computed[part.piece, stripes] = True
                if self.layout.code is None:
                    self.missing[self.layout.group[part.piece], stripes] -= new
                else:
                    self.missing[:, stripes] = self.layout.lacking(self.computed[:, stripes])
                fresh.append(part)
        return fresh

    def lose(self, pieces: list[int]) -> None:
        """Record that pieces are lost; their stripes that have come back still count."""
        for piece in pieces:
            worker = int(self.layout.host[piece])
            self.available[piece] = False
            self.held[piece] = self.computed[piece]
            if worker < 0:
                continue
            self.queues[worker] = deque(r for r in self.queues[worker] if r.piece != piece)
            self.todo[worker] = sum(self.layout.cost(r) for r in self.queues[worker])

    def take(self) -> list[Command]:
        """Return the commands given since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def _drop(self, worker: int, gone: StripeRange) -> None:
        """Remove the stripes of a range from what a worker owes."""
        kept = deque(without(self.queues[worker], gone))
        self.queues[worker] = kept
        # A new sum instead of a difference: the list is short, and an empty one is exactly zero.
        self.todo[worker] = sum(self.layout.cost(part) for part in kept)


def cover(state: RoundState, eligible: Bools, trusted: Bools | None = None) -> Ints:
    """Assign more copies of stripes with too few under way, each to the worker that ends it first.

    Parameters
    ----------
    state : RoundState
    eligible : ndarray of bool, shape (workers,)
        Workers that may be assigned work.
    trusted : ndarray of bool, shape (workers,), optional
        Workers whose work under way counts; by default all.

    Returns
    -------
    ndarray of int, shape (groups, stripes)
        How many copies of each stripe are still lacking, because no eligible worker can make one.
    """
    layout = state.layout
    secured = state.secured(trusted)
    short = layout.lacking(secured)
    if not short.any():
        return short
    speeds = np.maximum(state.estimate().speed, _SLOWEST)
    load = state.todo.copy()
    dealt: dict[int, Bools] = {}
    usable = state.available & eligible[layout.host] & (layout.host >= 0)
    for g, stripe in np.argwhere(short > 0).tolist():
        have = secured[:, stripe].copy()
        free = usable & (layout.group == g) & ~state.held[:, stripe]
        while short[g, stripe]:
            useful = free if layout.code is None else free & layout.code.span(have).adds
            if not len(holders := np.flatnonzero(useful)):
                break
            workers = layout.host[holders]
            costs = layout.work[holders, stripe]
            best = int(np.argmin((load[workers] + costs) / speeds[workers]))
            piece = int(holders[best])
            load[workers[best]] += costs[best]
            dealt.setdefault(piece, np.zeros(layout.stripes, dtype=bool))[stripe] = True
            short[g, stripe] -= 1
            have[piece], free[piece] = True, False
    for piece, mask in dealt.items():
        state.assign(int(layout.host[piece]), ranges_of(piece, mask))
    return short
