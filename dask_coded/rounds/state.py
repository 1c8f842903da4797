"""The state of a running round, and the two moves that a policy can make: assign and withdraw."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dask_coded.rounds.layout import Layout, StripeRange, ranges_of, without
from dask_coded.rounds.marks import Marks, bits_of, ranges_of_bits
from dask_coded.rounds.reporting import Reporting
from dask_coded.rounds.workers import Estimate, Workers
from dask_coded.typing import Bools, Floats, Ints

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


class RoundState:
    """What was assigned, what has come back, and how fast each worker turns out to be.

    Policies read the arrays and call :meth:`assign` and :meth:`withdraw`.

    Attributes
    ----------
    workers : Workers
        What each worker owes and has done.
    computed : Marks
        Stripes that have come back.
    held : Marks
        Stripes that have come back, or were assigned and not withdrawn. They must not be assigned
        again.
    movable : Marks
        Stripes under way that another worker can take over: all but the first batch that a worker
        owes, which it is believed to be computing.
    open : list of int
        Stripes of each group that have not come back often enough, as bits.
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
        least_batch: int = 1,
    ) -> None:
        self.layout = layout
        self.started = now
        self.reporting = reporting or Reporting()
        self.computed = Marks(layout.pieces, layout.stripes)
        self.held = Marks(layout.pieces, layout.stripes)
        self.movable = Marks(layout.pieces, layout.stripes)
        self.missing: Ints = np.repeat(layout.need[:, None], layout.stripes, axis=1)
        self.short = self.missing.copy()
        self._all = (1 << layout.stripes) - 1
        self.open = [self._all if need > 0 else 0 for need in layout.need.tolist()]
        self.queues: list[deque[StripeRange]] = [deque() for _ in range(layout.workers)]
        self.available: Bools = layout.host >= 0
        self._pieces = np.bincount(layout.host[self.available], minlength=layout.workers)
        self.present: Bools = self._pieces > 0
        self.workers = Workers(
            speeds,
            np.zeros(layout.workers) if lags is None else lags,
            self.reporting,
            layout.mean_stripe,
            least_batch,
        )
        self._least_batch = least_batch
        self.commands: list[Command] = []
        self.now = now

    # -- moves ---------------------------------------------------------------------------------

    def assign(self, worker: int, ranges: list[StripeRange]) -> None:
        """Assign ranges that are not held yet."""
        if not ranges:
            return
        for part in ranges:
            self._hold(part)
        self.queues[worker].extend(ranges)
        self.workers.assign(worker, self._owed(worker), self.now)
        self.commands.append(Assign(worker, tuple(ranges)))

    def withdraw(self, worker: int, ranges: list[StripeRange]) -> None:
        """Take back ranges that the worker owes."""
        if not ranges:
            return
        for part in ranges:
            self._drop(worker, part)
            self._release(part)
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
        return any(self.open)

    def secured(self, workers: Bools, stripes: slice | list[int] = slice(None)) -> Bools:
        """Return what has come back or is under way at some workers, shape (pieces, stripes).

        ``workers`` has the shape (workers,); ``stripes`` selects some.
        """
        trusted = workers[self.layout.host] & (self.layout.host >= 0)
        under_way = self.held.array(stripes) & trusted[:, None]
        return self.computed.array(stripes) | under_way

    def free(self, piece: int) -> int:
        """Return the stripes of a piece that are not held, as bits."""
        return self._all & ~self.held.of[piece]

    def replaceable(self, part: StripeRange, piece: int) -> int:
        """Return the stripes of a range under way that ``piece`` can replace, as bits.

        These are all that it does not hold, if the number of pieces decides whether they suffice.
        Otherwise the code is asked stripe by stripe.
        """
        code = self.layout.code
        free = bits_of(part) & self.free(piece)
        if code is not None:
            for stripe in range(part.start, part.stop):
                if free >> stripe & 1:
                    have = self.held.at(stripe)
                    if not code.span(have).spare[part.piece]:
                        have[part.piece] = False
                        if not code.span(have).adds[piece]:
                            free -= 1 << stripe
        return free

    def estimate(self) -> Estimate:
        """Estimate the state of all workers at this moment."""
        return self.workers.estimate(self.now)

    # -- what a round teaches ------------------------------------------------------------------

    def measured_speeds(self, elapsed: float) -> dict[int, float]:
        """Return the work per second of workers that were assigned any, after ``elapsed`` s.

        Not of those that got their first work late, and have sent nothing.
        """
        known = self.workers
        found = {}
        for worker in np.flatnonzero(~np.isnan(known.began)).tolist():
            if known.busy[worker] > 0 and known.done[worker] > 0:
                found[worker] = float(known.done[worker] / known.busy[worker])
            elif known.todo[worker] > 0 and self._had_time(worker, elapsed):
                # No share has come: at best the worker was about to send its first stripe.
                pieces = self.layout.pieces_of[worker]
                found[worker] = float(self.layout.work[pieces, 0].mean()) / self._had(
                    worker, elapsed
                )
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
        """Return the lag in seconds of the same workers as :meth:`measured_speeds`."""
        found = {}
        for worker in np.flatnonzero(~np.isnan(self.workers.began)).tolist():
            lag = float(self.workers.measured_lag[worker])
            if not np.isnan(lag):
                found[worker] = lag
            elif self._had_time(worker, elapsed):  # it needs longer than it has had
                found[worker] = self._had(worker, elapsed)
        return found

    def _had_time(self, worker: int, elapsed: float) -> bool:
        """Whether a worker has had time for a share: its first work came in the first half."""
        return 2 * self._had(worker, elapsed) >= elapsed > 0

    def _had(self, worker: int, elapsed: float) -> float:
        """Return for how many seconds a worker has had work, ``elapsed`` after the round began."""
        return self.started + elapsed - float(self.workers.began[worker])

    # -- events, from the round ----------------------------------------------------------------

    def record(self, worker: int, ranges: list[StripeRange], seconds: float) -> list[StripeRange]:
        """Record ranges that came back; return those that hold any new stripe."""
        fresh = []
        done = float(self.workers.done[worker])
        for part in ranges:
            done += self.layout.cost(part)
            self._drop(worker, part)
            self._hold(part)
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
            self._release(StripeRange(piece, 0, self.layout.stripes))
            self._pieces[worker] -= 1
            self.present[worker] = self._pieces[worker] > 0
            self.queues[worker] = deque(r for r in self.queues[worker] if r.piece != piece)
            self.workers.owe(worker, self._owed(worker))
            if not self.present[worker]:
                self.workers.leave(worker)

    def credit(self, ranges: list[StripeRange]) -> None:
        """Record ranges that were computed before the round; they say nothing about speeds."""
        for part in ranges:
            self._hold(part)
            self._compute(part)

    def forget(self, ranges: list[StripeRange]) -> None:
        """Record that ranges do not count any more, whether they have come back or are owed."""
        for part in ranges:
            worker, group = int(self.layout.host[part.piece]), self.layout.group[part.piece]
            before = self.computed.of[part.piece]
            self.computed.set(part.piece, before & ~bits_of(part))
            self._count(self.missing, self.computed, before, part)
            for stripe in (self.missing[group, part.start : part.stop] > 0).nonzero()[0].tolist():
                self.open[group] |= 1 << part.start + stripe
            self._drop(worker, part)
            self._release(part)
            self.workers.owe(worker, self._owed(worker))

    def regain(self, pieces: list[int]) -> None:
        """Record that lost pieces are available again."""
        for piece in pieces:
            if not self.available[piece]:
                worker = int(self.layout.host[piece])
                self.available[piece] = self.present[worker] = True
                self._pieces[worker] += 1

    def take(self) -> list[Command]:
        """Return the commands given since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def _hold(self, part: StripeRange) -> None:
        """Hold all stripes of a range."""
        before = self.held.of[part.piece]
        self.held.set(part.piece, before | bits_of(part))
        self._count(self.short, self.held, before, part)

    def _release(self, part: StripeRange) -> None:
        """Hold no more of a range than has come back."""
        before, computed = self.held.of[part.piece], self.computed.of[part.piece]
        self.held.set(part.piece, before & ~bits_of(part) | computed)
        self._count(self.short, self.held, before, part)

    def _compute(self, part: StripeRange) -> bool:
        """Set that a range has come back; return whether any of it is new."""
        before = self.computed.of[part.piece]
        self.computed.set(part.piece, before | bits_of(part))
        if before == self.computed.of[part.piece]:
            return False
        self._count(self.missing, self.computed, before, part)
        group = self.layout.group[part.piece]
        for stripe in (self.missing[group, part.start : part.stop] == 0).nonzero()[0].tolist():
            self.open[group] &= ~(1 << part.start + stripe)
        return True

    def _count(self, lacking: Ints, marks: Marks, before: int, part: StripeRange) -> None:
        """Update how many marks stripes lack, after a change of one piece within a range."""
        piece, start, stop = part
        if not (changed := before ^ marks.of[piece]):
            return
        if self.layout.code is not None:
            lacking[:, start:stop] = self.layout.lacking(marks.array(slice(start, stop)))
            return
        change = 1 if changed & before else -1
        counts = lacking[self.layout.group[piece]]
        if changed == bits_of(part):
            counts[start:stop] += change
        else:
            for _, first, end in ranges_of_bits(piece, changed):
                counts[first:end] += change

    def _drop(self, worker: int, gone: StripeRange) -> None:
        """Remove the stripes of a range from what a worker owes."""
        self.queues[worker] = deque(without(self.queues[worker], gone))

    def _owed(self, worker: int) -> float:
        """Return the work that a worker owes, after a change of its list."""
        queue = self.queues[worker]
        movable = dict.fromkeys(self.layout.pieces_of[worker], 0)
        # A new sum instead of a difference: the list is short, and an empty one is exactly zero.
        owed, in_hand = 0.0, self._least_batch
        for piece, start, stop in queue:
            work = self.layout.edges[piece]
            owed += work[stop] - work[start]
            first = min(start + in_hand, stop)
            movable[piece] |= (1 << stop) - (1 << first)
            in_hand -= first - start
        for piece, stripes in movable.items():
            self.movable.set(piece, stripes)
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
        if not (state.short > 0).any():
            return np.zeros_like(state.short)
        secured, short = state.held.array(), np.maximum(state.short, 0)
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
        free = usable & (layout.group == g) & ~state.held.at(stripe)
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
            if layout.code is not None and not short[g, stripe]:
                # There were as many pieces as are needed at least.
                short[g, stripe] = layout.lacking(have[:, None])[g, 0]
    for piece, mask in dealt.items():
        state.assign(int(layout.host[piece]), ranges_of(piece, mask))
    return short
