"""The state of a running round as a policy sees it, and the two moves that a policy has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dask_coded.planning.layout import Bools, Floats, Ints, Layout, Run, runs_of, without
from dask_coded.planning.reporting import Reporting


@dataclass(frozen=True)
class Assign:
    """Command: have ``worker`` compute these runs, after what it was given before."""

    worker: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Withdraw:
    """Command: take these runs back from ``worker``; what it has computed already is welcome."""

    worker: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Finish:
    """Command: everything needed has come back; all workers may drop what is left."""


Command = Assign | Withdraw | Finish


class Estimate(NamedTuple):
    """What to think of every worker, each of shape (workers,).

    Attributes
    ----------
    speed : ndarray
        Work per second from now on.
    backlog : ndarray
        Work owed, less what is believed to have been computed since the last report.
    latest, eta : ndarray
        Seconds until it runs dry, going by what has been reported, and by what is believed;
        infinite for one that owes work and makes none.
    """

    speed: Floats
    backlog: Floats
    latest: Floats
    eta: Floats


class Progress:
    """What has been dealt, what has come back, and how fast every worker turns out to be.

    Policies read the arrays and call :meth:`assign` and :meth:`withdraw`.

    Attributes
    ----------
    computed : ndarray of bool, shape (pieces, stripes)
        Stripes that have come back.
    held : ndarray of bool, shape (pieces, stripes)
        Stripes that have come back, or were dealt and not withdrawn: not to be dealt again.
    missing : ndarray of int, shape (groups, stripes)
        How many more pieces each stripe needs, at least.
    queues : list of deque of Run
        What each worker still owes, in its order.
    todo, done : ndarray, shape (workers,)
        Work owed and work come back in this round.
    available : ndarray of bool, shape (pieces,)
        Pieces on workers that are there.
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
        self.queues: list[deque[Run]] = [deque() for _ in range(layout.workers)]
        self.available: Bools = layout.host >= 0
        self.prior: Floats = np.asarray(speeds, dtype=np.float64)
        self.todo: Floats = np.zeros(layout.workers)
        self.done: Floats = np.zeros(layout.workers)
        self.busy: Floats = np.zeros(layout.workers)
        self.began: Floats = np.full(layout.workers, np.nan)
        self.heard: Floats = np.full(layout.workers, np.nan)
        # Since when a worker has owed an answer; NaN if it owes none. Taking work back does not
        # excuse it: a stopped worker would look as good as new each time.
        self.asked: Floats = np.full(layout.workers, np.nan)
        # From an assignment to the first report, less the computing: messages, queues, stalls.
        self._lags: Floats = np.full(layout.workers, np.nan)
        self._expected_lags = np.zeros(layout.workers) if lags is None else lags
        self._stripe = float(layout.work.mean())
        self.commands: list[Command] = []
        self.now = now

    # -- moves ---------------------------------------------------------------------------------

    def assign(self, worker: int, runs: list[Run]) -> None:
        """Deal runs that the worker does not hold yet."""
        for run in runs:
            self.held[run.piece, run.start : run.stop] = True
            self.todo[worker] += self.layout.cost(run)
            self.queues[worker].append(run)
        if runs:
            if np.isnan(self.began[worker]):
                self.began[worker] = self.heard[worker] = self.now
            if np.isnan(self.asked[worker]):
                self.asked[worker] = self.now
            self.commands.append(Assign(worker, tuple(runs)))

    def withdraw(self, worker: int, runs: list[Run]) -> None:
        """Take back runs that the worker owes."""
        for run in runs:
            self._drop(worker, run)
            self.held[run.piece, run.start : run.stop] = self.computed[
                run.piece, run.start : run.stop
            ]
        if runs:
            self.commands.append(Withdraw(worker, tuple(runs)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send the commands that are given within as one for each worker and kind.

        Each move counts at once all the same: the next one sees what it has dealt and withdrawn.
        """
        before, self.commands = self.commands, []
        try:
            yield
        finally:
            merged: dict[tuple[type[Assign | Withdraw], int], list[Run]] = {}
            for command in self.commands:
                assert not isinstance(command, Finish)
                merged.setdefault((type(command), command.worker), []).extend(command.runs)
            self.commands = before + [
                kind(worker, tuple(runs)) for (kind, worker), runs in merged.items()
            ]

    # -- what a policy asks --------------------------------------------------------------------

    @property
    def complete(self) -> Bools:
        """Stripes that have come back often enough, of all groups: shape (stripes,)."""
        return np.asarray((self.missing <= 0).all(axis=0))

    @property
    def unfinished(self) -> bool:
        return not self.complete.all()

    def present(self) -> Bools:
        """Workers with at least one piece within reach, shape (workers,)."""
        hosts = self.layout.host[self.available]
        return np.bincount(hosts, minlength=self.layout.workers) > 0

    @property
    def unheard(self) -> Bools:
        """Workers that have been dealt work and have not reported, shape (workers,)."""
        return np.isnan(self._lags) & ~np.isnan(self.began)

    def secured(self, workers: Bools | None = None) -> Bools:
        """What has come back or is under way, shape (pieces, stripes).

        Under way at ``workers`` only, shape (workers,), if they are given: those that are trusted.
        """
        if workers is None:
            return self.held
        trusted = (workers[self.layout.host] & (self.layout.host >= 0))[:, None]
        return self.computed | (self.held & trusted)

    def replaceable(self, run: Run, piece: int) -> Bools:
        """Where another piece can take the place of a run that is under way, (stripes of run,).

        That is everywhere, unless counting pieces does not tell whether they suffice.
        """
        code = self.layout.code
        free = ~self.held[piece, run.start : run.stop]
        if code is not None:
            for i in np.flatnonzero(free).tolist():
                have = self.held[:, run.start + i].copy()
                if not code.span(have).spare[run.piece]:
                    have[run.piece] = False
                    free[i] = code.span(have).adds[piece]
        return free

    def estimate(self) -> Estimate:
        """What to think of every worker at this moment.

        A worker's speed is what was measured in this round, or its prediction on the scale of the
        others. It is believed to go on at that speed until its next report is due. A worker that
        has been silent for longer is believed to be slowing down, ever more: this is how a stopped
        worker is told from a busy one.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            measured = self.done / self.busy
            known = (self.done > 0) & (self.busy > 0)
            trusted = known & (self.prior > 0)
            ratios = measured[trusted] / self.prior[trusted]
            scale = float(np.median(ratios)) if len(ratios) else 1.0
            speed = np.where(known, measured, self.prior * scale)
            # A report may be due, and the stripe in hand has to be finished first: twice that.
            # Before anything has come back there is no telling how long a stripe takes, or a list:
            # predicted speeds may be in any unit.
            stripe = self._stripe / speed if len(ratios) else 10 * self.reporting.interval
            left = self.todo / speed if len(ratios) else np.zeros(len(speed))
            normal = 2 * (self.reporting.gap(self.heard - self.began, left) + stripe)
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
        """Seconds that a worker typically needs to begin with new work and to tell of it."""
        known = self._lags[~np.isnan(self._lags)]
        return float(np.median(known)) if len(known) else float(np.median(self._expected_lags))

    @property
    def lags(self) -> Floats:
        """The same of each worker, shape (workers,): measured, or expected, or typical."""
        expected = np.where(self._expected_lags > 0, self._expected_lags, self.lag)
        return np.where(np.isnan(self._lags), expected, self._lags)

    # -- what is learnt of a round -------------------------------------------------------------

    def measured_speeds(self, elapsed: float) -> dict[int, float]:
        """Work per second of each worker that was dealt any, ``elapsed`` seconds in."""
        found = {}
        for worker in np.flatnonzero(~np.isnan(self.began)).tolist():
            if self.busy[worker] > 0 and self.done[worker] > 0:
                found[worker] = float(self.done[worker] / self.busy[worker])
            elif self.todo[worker] > 0:
                # Not one share: at best it was about to send its first.
                pieces = self.layout.pieces_of[worker]
                found[worker] = float(self.layout.work[pieces, 0].mean()) / elapsed
        return found

    def measured_lags(self, elapsed: float) -> dict[int, float]:
        """Seconds that each worker that was dealt any work needed to begin and to tell."""
        # One that has not told anything yet needs longer than all that.
        lags = np.where(np.isnan(self._lags), elapsed, self._lags).tolist()
        return {worker: lags[worker] for worker in np.flatnonzero(~np.isnan(self.began)).tolist()}

    # -- events, from the round ----------------------------------------------------------------

    def record(self, worker: int, runs: list[Run], seconds: float) -> list[Run]:
        """Enter runs that came back; returns those that were new."""
        fresh = []
        if np.isnan(self._lags[worker]):
            self._lags[worker] = max(self.now - self.asked[worker] - seconds, 0.0)
        self.heard[worker] = self.now
        self.busy[worker] += seconds
        for run in runs:
            self.done[worker] += self.layout.cost(run)
            self._drop(worker, run)
        self.asked[worker] = self.now if self.todo[worker] > 0 else np.nan
        for run in runs:
            span = slice(run.start, run.stop)
            self.held[run.piece, span] = True
            new = ~self.computed[run.piece, span]
            if new.any():
                self.computed[run.piece, span] = True
                if self.layout.code is None:
                    self.missing[self.layout.group[run.piece], span] -= new
                else:
                    self.missing[:, span] = self.layout.lacking(self.computed[:, span])
                fresh.append(run)
        return fresh

    def lose(self, pieces: list[int]) -> None:
        """Enter that pieces are out of reach; what they have computed stays."""
        for piece in pieces:
            worker = int(self.layout.host[piece])
            self.available[piece] = False
            self.held[piece] = self.computed[piece]
            if worker < 0:
                continue
            self.queues[worker] = deque(r for r in self.queues[worker] if r.piece != piece)
            self.todo[worker] = sum(self.layout.cost(r) for r in self.queues[worker])

    def take(self) -> list[Command]:
        """The commands given since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def _drop(self, worker: int, gone: Run) -> None:
        """Remove a run, or what there is of it, from what a worker owes."""
        kept = deque(without(self.queues[worker], gone))
        self.queues[worker] = kept
        # Summed anew rather than subtracted: a queue is short, and an empty one is exactly zero.
        self.todo[worker] = sum(self.layout.cost(run) for run in kept)


def cover(progress: Progress, eligible: Bools, trusted: Bools | None = None) -> Ints:
    """Deal copies of stripes that have too few under way, each to whoever is done with it first.

    Parameters
    ----------
    progress : Progress
    eligible : ndarray of bool, shape (workers,)
        Who may be given work.
    trusted : ndarray of bool, shape (workers,), optional
        On whose work under way to count; by default on everybody's.

    Returns
    -------
    ndarray of int, shape (groups, stripes)
        How many copies of each stripe are still lacking: nobody eligible could have been dealt one.
    """
    layout = progress.layout
    secured = progress.secured(trusted)
    short = layout.lacking(secured)
    if not short.any():
        return short
    speeds = np.maximum(progress.estimate().speed, 1e-12)
    load = progress.todo.copy()
    dealt: dict[int, Bools] = {}
    usable = progress.available & eligible[layout.host] & (layout.host >= 0)
    for g, stripe in np.argwhere(short > 0).tolist():
        have = secured[:, stripe].copy()
        free = usable & (layout.group == g) & ~progress.held[:, stripe]
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
        progress.assign(int(layout.host[piece]), runs_of(piece, mask))
    return short
