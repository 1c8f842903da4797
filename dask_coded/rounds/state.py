"""The state of a running round, and the two moves that a policy can make: assign and withdraw."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dask_coded.rounds.layout import Layout, StripeRange, ranges_of, without
from dask_coded.rounds.reporting import Reporting
from dask_coded.rounds.workers import Estimate, Workers
from dask_coded.typing import Bools, Floats, Ints, Words

# Keeps divisions by speeds finite; far below any speed that a worker can have.
_SLOWEST = 1e-12
_WORD = (1 << 64) - 1


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


class RoundState:
    """What was assigned, what has come back, and how fast each worker turns out to be.

    Policies read the arrays and call :meth:`assign` and :meth:`withdraw`.

    Attributes
    ----------
    workers : Workers
        What each worker owes and has done.
    computed : ndarray of bool, shape (pieces, stripes)
        Stripes that have come back.
    held : ndarray of bool, shape (pieces, stripes)
        Stripes that have come back, or were assigned and not withdrawn. They must not be assigned
        again.
    movable : ndarray of uint64, shape (words, pieces)
        Stripes under way that another worker can take over: all but the first that a worker owes,
        which it is believed to be computing. Stripes are bits, as in :func:`packed`, so that a
        search over thousands of pieces takes microseconds.
    missing, short : ndarray of int, shape (groups, stripes)
        How many more pieces each stripe needs, at least, in addition to those computed and to those
        held. Zero or less if these suffice.
    queues : list of deque of StripeRange
        What each worker still owes, in its order.
    available : ndarray of bool, shape (pieces,)
        Pieces that have not been lost.
    present : ndarray of bool, shape (workers,)
        Workers that hold at least one available piece.
    """

    def __init__(
        self,
        layout: Layout,
        speeds: Floats,
        now: float,
        reporting: Reporting | None = None,
        lags: Floats | None = None,
    ) -> None:
        # The pieces of a stripe lie next to each other in memory, because most searches are for
        # pieces: transposes of (stripes, pieces).
        shape = layout.stripes, layout.pieces
        self.layout = layout
        self.started = now
        self.reporting = reporting or Reporting()
        self.computed: Bools = np.zeros(shape, dtype=bool).T
        self.held: Bools = np.zeros(shape, dtype=bool).T
        self.movable: Words = np.zeros((-(-layout.stripes // 64), layout.pieces), dtype=np.uint64)
        self.missing: Ints = np.repeat(layout.need[:, None], layout.stripes, axis=1)
        self.short = self.missing.copy()
        self._open = int((self.missing > 0).sum())
        self.queues: list[deque[StripeRange]] = [deque() for _ in range(layout.workers)]
        self.available: Bools = layout.host >= 0
        self._pieces = np.bincount(layout.host[self.available], minlength=layout.workers)
        self.present: Bools = self._pieces > 0
        self.workers = Workers(
            speeds,
            np.zeros(layout.workers) if lags is None else lags,
            self.reporting,
            layout.mean_stripe,
        )
        self.commands: list[Command] = []
        self.now = now

    # -- moves ---------------------------------------------------------------------------------

    def assign(self, worker: int, ranges: list[StripeRange]) -> None:
        """Assign ranges that are not held yet."""
        if not ranges:
            return
        for part in ranges:
            self._hold(part, True)
        self.queues[worker].extend(ranges)
        self.workers.assign(worker, self._owed(worker), self.now)
        self.commands.append(Assign(worker, tuple(ranges)))

    def withdraw(self, worker: int, ranges: list[StripeRange]) -> None:
        """Take back ranges that the worker owes."""
        if not ranges:
            return
        for part in ranges:
            self._drop(worker, part)
            self._hold(part, self.computed[part.piece, part.start : part.stop])
        self.workers.owe(worker, self._owed(worker))
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
        return self._open > 0

    def secured(self, workers: Bools, stripes: slice | list[int] = slice(None)) -> Bools:
        """Return what has come back or is under way at some workers, shape (pieces, stripes).

        ``workers`` has the shape (workers,); ``stripes`` selects some.
        """
        trusted = workers[self.layout.host] & (self.layout.host >= 0)
        secured: Bools = self.computed.T[stripes] | (self.held.T[stripes] & trusted)
        return secured.T

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
        """Estimate the state of all workers at this moment."""
        return self.workers.estimate(self.now)

    # -- what a round teaches ------------------------------------------------------------------

    def measured_speeds(self, elapsed: float) -> dict[int, float]:
        """Return the work per second of each worker that was assigned any, after ``elapsed`` s."""
        known = self.workers
        found = {}
        for worker in np.flatnonzero(~np.isnan(known.began)).tolist():
            if known.busy[worker] > 0 and known.done[worker] > 0:
                found[worker] = float(known.done[worker] / known.busy[worker])
            elif known.todo[worker] > 0:
                # No share has come: at best the worker was about to send its first stripe.
                pieces = self.layout.pieces_of[worker]
                found[worker] = float(self.layout.work[pieces, 0].mean()) / elapsed
        return found

    def misprediction(self, elapsed: float) -> float:
        """Return the mean relative error of the predicted speeds, which may be in any unit.

        A worker counts 1 at most, so that a recovered worker does not outweigh all others.
        """
        prior = self.workers.prior
        measured = self.measured_speeds(elapsed).items()
        ratios = np.array(
            [speed / prior[worker] for worker, speed in measured if prior[worker] > 0]
        )
        if not len(ratios):
            return 1.0
        return float(np.minimum(np.abs(ratios / np.median(ratios) - 1), 1.0).mean())

    def measured_lags(self, elapsed: float) -> dict[int, float]:
        """Return the lag in seconds of each worker that was assigned any work."""
        # A worker that has not reported needs longer than the whole round.
        measured = self.workers.measured_lag
        lags = np.where(np.isnan(measured), elapsed, measured).tolist()
        began = ~np.isnan(self.workers.began)
        return {worker: lags[worker] for worker in np.flatnonzero(began).tolist()}

    # -- events, from the round ----------------------------------------------------------------

    def record(self, worker: int, ranges: list[StripeRange], seconds: float) -> list[StripeRange]:
        """Record ranges that came back; return those that hold any new stripe."""
        fresh = []
        done = float(self.workers.done[worker])
        for part in ranges:
            done += self.layout.cost(part)
            self._drop(worker, part)
            if not self.held[part.piece, part.start : part.stop].all():
                self._hold(part, True)
            if self._compute(part):
                fresh.append(part)
        self.workers.report(worker, done, seconds, self._owed(worker), self.now)
        return fresh

    def lose(self, pieces: list[int]) -> None:
        """Record that pieces are lost; their stripes that have come back still count."""
        for piece in pieces:
            if not self.available[piece]:
                continue
            worker = int(self.layout.host[piece])
            self.available[piece] = False
            self._hold(StripeRange(piece, 0, self.layout.stripes), self.computed[piece])
            self._pieces[worker] -= 1
            self.present[worker] = self._pieces[worker] > 0
            self.queues[worker] = deque(r for r in self.queues[worker] if r.piece != piece)
            self.workers.owe(worker, self._owed(worker))

    def take(self) -> list[Command]:
        """Return the commands given since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def _hold(self, part: StripeRange, held: Bools | bool) -> None:
        """Set which stripes of a range are held."""
        stripes = slice(part.start, part.stop)
        before = self.held[part.piece, stripes].astype(np.intp)
        self.held[part.piece, stripes] = held
        if self.layout.code is None:
            self.short[self.layout.group[part.piece], stripes] += before - held
        else:
            self.short[:, stripes] = self.layout.lacking(self.held[:, stripes])

    def _compute(self, part: StripeRange) -> bool:
        """Set that a range has come back; return whether any of it is new."""
        stripes = slice(part.start, part.stop)
        new = ~self.computed[part.piece, stripes]
        if not np.count_nonzero(new):
            return False
        self.computed[part.piece, stripes] = True
        if self.layout.code is None:
            missing = self.missing[self.layout.group[part.piece], stripes]
            missing -= new
            self._open -= int(np.count_nonzero(missing[new] == 0))
        else:
            missing = self.missing[:, stripes]
            before = np.count_nonzero(missing)
            missing[:] = self.layout.lacking(self.computed[:, stripes])
            self._open -= int(before - np.count_nonzero(missing))
        return True

    def _drop(self, worker: int, gone: StripeRange) -> None:
        """Remove the stripes of a range from what a worker owes."""
        self.queues[worker] = deque(without(self.queues[worker], gone))

    def _owed(self, worker: int) -> float:
        """Return the work that a worker owes, after a change of its list."""
        queue = self.queues[worker]
        movable = dict.fromkeys(self.layout.pieces_of[worker], 0)
        # A new sum instead of a difference: the list is short, and an empty one is exactly zero.
        owed, first = 0.0, 1
        for piece, start, stop in queue:
            work = self.layout.edges[piece]
            owed += work[stop] - work[start]
            movable[piece] |= (1 << stop) - (1 << (start + first))
            first = 0
        for piece, stripes in movable.items():
            for word in range(len(self.movable)):
                self.movable[word, piece] = stripes >> 64 * word & _WORD
        return owed


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
    if trusted is None:
        secured, short = state.held, np.maximum(state.short, 0)
    else:
        secured = state.secured(trusted)
        short = layout.lacking(secured)
    if not short.any():
        return short
    speeds = np.maximum(state.estimate().speed, _SLOWEST)
    load = state.workers.todo.copy()
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
