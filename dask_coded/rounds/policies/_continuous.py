"""Continuous squeeze: S2C2's assignment, then work flows from late workers to free ones, at once.

Workers stream what they have computed. A worker that is about to run dry receives the tail of the
list of the worker that is predicted to finish last. No data moves, because every worker holds a
piece of every stripe. Partial work counts, and there is no timeout. At the end of the round, free
workers compute a second copy of the stripes that slow or silent workers still hold.

If a worker turns out so slow that it would end much later than the others, its work flows at once,
and not only to workers that run dry. While all workers have much to do, others can take any of its
stripes, and a few large moves suffice. Later some workers have nothing left, and each remaining
stripe takes a message. In simulation, with two of eight workers five times slower, no prediction,
and 5 ms for a message, rounds take 1.175 of the fluid bound without this rule and 1.087 with it.
Punctual workers keep their work. The first reports are mostly noise, and acting on them would move
work back and forth between all workers.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from dask_coded.rounds.assignment import deal
from dask_coded.rounds.layout import Layout, StripeRange, ranges_of
from dask_coded.rounds.options import RoundOptions
from dask_coded.rounds.policies._policy import POLICIES, Policy
from dask_coded.rounds.state import RoundState
from dask_coded.rounds.workers import Estimate
from dask_coded.typing import Bools, Floats, Ints

# Work flows before any worker runs dry if a worker would end later than the common end by this
# share of the time left. Smaller values cost messages and gain nothing.
_IMBALANCE = 0.25
# A worker for which there was no work is tried again after this share of the elapsed time: soon
# enough to notice lateness, and rarely enough to cost nothing.
_RETRY = 0.02
# A move is rounded up to whole stripes, because a stripe that stays behind costs one more move.
_ROUNDED_UP = 0.99
# Keeps divisions by speeds finite.
_SLOWEST = 1e-300


@POLICIES.register("continuous")
class Continuous(Policy):
    """Move work from the worker that would end last to the worker that runs dry.

    Parameters
    ----------
    lead : float
        Seconds before running dry at which a worker is fed, at least: the time for a message there
        and back, so that the worker does not idle. Workers that turn out to need longer to react
        are fed earlier.
    """

    def __init__(self, lead: float = RoundOptions.lead) -> None:
        self.lead = lead
        # When to look again for work for each worker that could be given none, shape (workers,).
        self._retry: Floats = np.zeros(0)

    @classmethod
    def from_options(cls, options: RoundOptions) -> Self:
        return cls(options.lead)

    @classmethod
    def first(cls, layout: Layout, speeds: Floats, lags: Floats) -> list[list[StripeRange]]:
        return deal(layout, speeds, lags)

    def react(self, state: RoundState) -> float | None:
        if not state.unfinished:
            return None
        if not len(self._retry):
            self._retry = np.full(state.layout.workers, -np.inf)
        workers = state.workers
        now = state.estimate()
        lead = max(self.lead, workers.lag)
        free = state.present & (now.speed > 0)
        again = state.now + max(lead, _RETRY * (state.now - state.started))
        if now.latest.max() > lead:  # otherwise all workers are about to end anyway
            # Only a report proves that a worker is idle; estimates do not.
            dry = now.latest <= lead
            short, late = self._uneven(state, now)
            hungry = (free & (dry | short) & (self._retry <= state.now)).nonzero()[0]
            if len(hungry):
                level = self._level(state, now, lead)
                # Moves during this call only take stripes away from these.
                from_all = state.offered()
                from_late = state.offered(late) if late.any() else from_all
            for receiver in hungry[now.latest[hungry].argsort(kind="stable")].tolist():
                idle = not workers.todo[receiver]
                # Taking work from punctual workers would only chase noise.
                donors, offered = (None, from_all) if dry[receiver] else (late, from_late)
                if (
                    self._wants(state, receiver, offered)
                    and self._feed(state, now, receiver, lead, level, donors)
                ) or (idle and self._duplicate(state, now, receiver, lead)):
                    now = state.estimate()
                    level = self._level(state, now, lead)
                elif idle:
                    self._retry[receiver] = again
        return again if (free & (workers.todo == 0)).any() else None

    @staticmethod
    def _wants(state: RoundState, receiver: int, offered: Bools) -> bool:
        """Whether a worker could compute any of the stripes offered, (groups, stripes)."""
        return any(
            state.available[piece]
            and (offered[state.layout.group[piece]] & ~state.held[piece]).any()
            for piece in state.layout.pieces_of[receiver]
        )

    @staticmethod
    def _uneven(state: RoundState, now: Estimate) -> tuple[Bools, Bools]:
        """Return which workers receive work although they have some, and which give, (workers,).

        None do as long as all workers are expected to end at about the same time.
        """
        level = _mean_time(state, now.backlog, now.speed)
        stripe = state.layout.mean_stripe / np.maximum(now.speed, _SLOWEST)
        late: Bools = now.eta - stripe > (1 + _IMBALANCE) * level
        if not late.any():
            return late, late
        # A worker that has not reported yet may itself be slow: give it no extra work.
        return ~state.workers.unheard & (now.eta + stripe < level), late

    @staticmethod
    def _level(state: RoundState, now: Estimate, lead: float) -> float:
        """Return when all workers could end together if dry ones start again after one lag."""
        idle = np.where(now.latest <= lead, state.workers.lags, 0.0)
        return _mean_time(state, now.backlog + now.speed * idle, now.speed)

    def _feed(
        self,
        state: RoundState,
        now: Estimate,
        receiver: int,
        lead: float,
        level: float,
        donors: Bools | None,
    ) -> bool:
        """Move tails of ``donors`` to ``receiver`` so that it ends together with the others."""
        speed, backlog, _, eta = now
        own = speed[receiver]
        # The receiver starts on new work once the message has come and its own work is done.
        start = max(eta[receiver], state.workers.lags[receiver])
        waiting = eta.copy() if donors is None else np.where(donors, eta, 0.0)
        taken = False
        # A move costs a message and a wait on both sides: ignore small differences.
        while len(
            givers := self._givers(state, now, receiver, start, level, waiting > start + lead)
        ):
            donor = int(givers[waiting[givers].argmax()])
            waiting[donor] = 0.0
            surplus = backlog[donor] - speed[donor] * level
            room = own * (level - start)
            if surplus <= 0 or room <= 0:
                if taken:
                    break
                # No reachable worker is later than the average. Share evenly with the latest one,
                # so that work diffuses to this worker through its neighbours.
                slow = 1 / speed[donor] if speed[donor] else 0
                surplus = room = (eta[donor] - start) / (1 / own + slow)
            else:
                room += _ROUNDED_UP * state.layout.mean_stripe
            moved = self._move(
                state, donor, receiver, min(surplus, room), own * (eta[donor] - start)
            )
            taken |= moved > 0
            start += moved / own
        return taken

    @staticmethod
    def _givers(
        state: RoundState, now: Estimate, receiver: int, start: float, level: float, later: Bools
    ) -> Ints:
        """Return the late workers that may have a stripe for the receiver, shape (givers,).

        There may be thousands that have none: this leaves them out all at once.
        """
        layout = state.layout
        pieces = [piece for piece in layout.pieces_of[receiver] if state.available[piece]]
        reached = np.zeros(layout.workers, dtype=bool)
        for piece in pieces if later.any() else ():
            useful = state.movable.T[~state.held[piece]].any(axis=0).nonzero()[0]
            if len(layout.need) > 1:
                useful = useful[layout.group[useful] == layout.group[piece]]
            reached[layout.host[useful]] = True
        givers: Ints = (later & reached).nonzero()[0]
        if not len(givers):
            return givers
        # What a donor can spare, or what the receiver can do before the donor, is a stripe or more.
        own, least = now.speed[receiver], layout.least_stripe[pieces].min()
        enough = own * (now.eta[givers] - start) > least
        if level > start:
            enough |= now.backlog[givers] - now.speed[givers] * level >= least
        return np.asarray(givers[enough])

    def _move(
        self, state: RoundState, donor: int, receiver: int, amount: float, most: float
    ) -> float:
        """Move up to ``amount`` of work from the tail of one list to the end of another.

        A single stripe may be larger, up to ``most``. Returns the work moved.
        """
        layout = state.layout
        moved = 0.0
        with state.together():
            for index, owed in reversed(list(enumerate(state.queues[donor]))):
                for piece in layout.pieces_of[receiver]:
                    if layout.group[piece] != layout.group[owed.piece]:
                        continue
                    if not state.available[piece]:
                        continue
                    free = state.replaceable(owed, piece)
                    if index == 0:
                        free[0] = False  # the donor is believed to be computing this stripe
                    stripes = np.flatnonzero(free)[::-1] + owed.start
                    sums = moved + np.cumsum(layout.work[piece, stripes])
                    count = int(np.searchsorted(sums, amount, side="right"))
                    if not count and not moved and len(sums) and sums[0] < most:
                        count = 1
                    if not count:
                        continue
                    mask = np.zeros(layout.stripes, dtype=bool)
                    mask[stripes[:count]] = True
                    # At once: the donor may owe the same stripe of another of its pieces, and the
                    # receiver's piece can replace only one of them.
                    ranges = ranges_of(owed.piece, mask)
                    state.withdraw(donor, ranges)
                    state.assign(receiver, [part._replace(piece=piece) for part in ranges])
                    moved = float(sums[count - 1])
                    break
                if moved >= amount:
                    break
        return moved

    def _duplicate(self, state: RoundState, now: Estimate, receiver: int, lead: float) -> bool:
        """Assign an idle worker a copy of a stripe whose holders are slower than it would be."""
        layout = state.layout
        pieces = layout.pieces_of[receiver]
        smallest = sum(layout.stripe_of[piece] for piece in pieces) / len(pieces)
        smallest /= now.speed[receiver]
        prompt: Bools = now.latest <= smallest + lead
        if prompt.all():
            return False
        for piece in pieces:
            if not state.available[piece]:
                continue
            group = layout.group[piece]
            stripes = ((state.missing[group] > 0) & ~state.held[piece]).nonzero()[0]
            if not len(stripes):
                continue
            secured = state.secured(prompt, stripes)
            unsafe = layout.lacking(secured)[group] > 0
            stripes = stripes[unsafe & layout.adds(piece, secured)]
            if len(stripes):
                # One stripe at a time, so that the next free worker can take the next one.
                last = int(stripes[-1])
                state.assign(receiver, [StripeRange(piece, last, last + 1)])
                return True
        return False


def _mean_time(state: RoundState, work: Floats, speed: Floats) -> float:
    """Return the time in which the present workers do their work if they share it."""
    if not state.present.all():
        work, speed = work[state.present], speed[state.present]
    return float(work.sum() / max(speed.sum(), _SLOWEST))
