"""Continuous squeeze: S2C2's assignment, then work flows from late workers to free ones, at once.

Workers stream what they have computed. A worker that is about to run dry receives the tail of the
list of the worker that is predicted to finish last. No data are copied: every worker holds a
piece of every stripe. Partial work counts, and there is no timeout. At the end of the round, free
workers compute a second copy of the stripes that slow or silent workers still hold.

If a worker owes some stripes more than it can compute until all could end together, its work flows
at once, and not only to workers that run dry. While all workers have much to do, others can take
any of its stripes, and a few large moves suffice. Later some workers have nothing left, and each
remaining stripe takes a message. In simulation, with two of eight workers five times slower, no
prediction, and 5 ms for a message, rounds took 1.175 of the fluid bound without this rule and 1.087
with it. Punctual workers keep their work. The first reports are mostly noise, and acting on them
would move work back and forth between all workers.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from dask_coded.rounds.assignment import deal
from dask_coded.rounds.layout import Layout, StripeRange
from dask_coded.rounds.marks import ranges_of_bits, words_of
from dask_coded.rounds.options import RoundOptions
from dask_coded.rounds.policies._policy import POLICIES, Policy
from dask_coded.rounds.state import RoundState
from dask_coded.rounds.workers import Estimate
from dask_coded.typing import Bools, Floats, Ints

# A worker may pass work on before any worker runs dry if it owes this many stripes more than it can
# compute until the common end. Workers that would end a stripe before that take it. In simulated
# rounds of traces, the worst median was 1.047 of the fluid bound with 3 stripes, and 1.061 with one
# stripe and a quarter of the time left. On processes, both took the same time.
_SURPLUS = 3
# Moved work must end earlier by the lead and this many lags, because each move costs both workers a
# message. A lag is the time that a worker needs to react, and the lead is no shorter. On processes
# with 0.15 of a core, with lags of 10 ms and the speeds of cloud machines, rounds of 0.3 s took
# 0.97 of the time with 1 lag instead of 2, and 0.99 with none. Rounds of 0.17 s with lags of 25 ms
# took 1.06. Without any moves, rounds took 0.99 if predictions held, and 1.04 otherwise.
_GAIN_LAGS = 1
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
    gain : float, optional
        Seconds by which moved work must end earlier, at least; by default ``lead``.
    """

    def __init__(self, lead: float = RoundOptions.lead, gain: float | None = None) -> None:
        self.lead = lead
        self.gain = lead if gain is None else gain
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
                gain = max(self.gain, workers.lag) + _GAIN_LAGS * workers.lag
                outlook = _Outlook(state, now, lead, gain)
            for receiver in hungry[now.latest[hungry].argsort(kind="stable")].tolist():
                idle = not workers.todo[receiver]
                # Taking work from other punctual workers would only chase noise.
                donors = None if dry[receiver] else outlook.through(state, receiver, late)
                moved = self._feed(state, outlook, receiver, donors)
                if idle and not moved and not self._duplicate(state, outlook, receiver):
                    self._retry[receiver] = again
        return again if (free & (workers.todo == 0)).any() else None

    @staticmethod
    def _uneven(state: RoundState, now: Estimate) -> tuple[Bools, Bools]:
        """Return which workers receive work although they have some, and which give, (workers,).

        None do as long as no worker owes much more than it can compute until the common end.
        """
        stripe = state.layout.mean_stripe
        # What each worker can do until all could end together.
        able = now.speed * (now.backlog.sum() / max(now.speed.sum(), _SLOWEST))
        # Reports are about one lag old. On a host with more workers than cores, workers take turns
        # of tens of milliseconds, and seem late in between: with eight workers on two cores, rounds
        # of 180 ms took 95 messages without this and 80 with it.
        doubt = state.workers.lag * now.speed
        late: Bools = now.backlog - doubt > able + _SURPLUS * stripe
        if not late.any():
            return late, late
        # A worker that has not reported yet may itself be slow: give it no extra work.
        return ~state.workers.unheard & (now.backlog + stripe < able), late

    def _feed(
        self, state: RoundState, outlook: _Outlook, receiver: int, only: Bools | None
    ) -> bool:
        """Move tails of others, or ``only`` of some, so that a worker ends together with them."""
        layout, level, gain = state.layout, outlook.level, outlook.gain
        pieces = [piece for piece in layout.pieces_of[receiver] if state.available[piece]]
        if not pieces:
            return False
        least = min(layout.least_stripe[piece] for piece in pieces)
        own = float(outlook.speed[receiver])
        # The receiver starts on new work once the message has come and its own work is done.
        start = max(float(outlook.eta[receiver]), float(outlook.lags[receiver]))
        changed: list[int] = []
        if not outlook.has_for(own, start, least):
            return False
        places = outlook.places(start + gain, only)
        donors = outlook.donors[places]
        etas = outlook.eta[donors]
        spare = outlook.backlog[donors] - outlook.speed[donors] * level
        with state.together():
            while len(places):
                # A move costs a message and a wait on both sides: ignore small differences. This
                # leaves out nearly all of thousands of donors, more with each move, which delays
                # the receiver.
                worth = own * (etas - start) > least
                if level > start:
                    worth |= spare >= least
                worth &= etas > start + gain
                kept = worth.nonzero()[0]
                places, donors, etas, spare = places[kept], donors[kept], etas[kept], spare[kept]
                at = outlook.last(state, pieces, places, etas)
                if at is None:
                    break
                donor, eta = int(donors[at]), float(etas[at])
                etas[donors == donor] = -np.inf
                surplus, room = float(spare[at]), own * (level - start)
                if surplus <= 0 or room <= 0:
                    if changed:
                        break
                    # No reachable worker is later than the average. Share evenly with the latest
                    # one, so that work diffuses to this worker through its neighbours.
                    slow = float(outlook.speed[donor])
                    surplus = room = (eta - start) / (1 / own + (1 / slow if slow else 0))
                else:
                    room += _ROUNDED_UP * layout.mean_stripe
                moved = self._move(state, donor, receiver, min(surplus, room), own * (eta - start))
                if moved:
                    changed.append(donor)
                    start += moved / own
        if changed:
            outlook.update(state, [receiver, *changed])
        return bool(changed)

    def _move(
        self, state: RoundState, donor: int, receiver: int, amount: float, most: float
    ) -> float:
        """Move up to ``amount`` of work from the tail of one list to the end of another.

        A single stripe may be larger, up to ``most``. Returns the work moved.
        """
        layout = state.layout
        moved = 0.0
        for owed in reversed(list(state.queues[donor])):
            for piece in layout.pieces_of[receiver]:
                if layout.group[piece] != layout.group[owed.piece] or not state.available[piece]:
                    continue
                free = state.replaceable(owed, piece) & state.movable.of[owed.piece]
                edges = layout.edges[piece]
                taken = 0
                while free:
                    stripe = free.bit_length() - 1
                    work = edges[stripe + 1] - edges[stripe]
                    if moved + work > amount and (moved or work >= most):
                        break
                    moved += work
                    taken += 1 << stripe
                    free -= 1 << stripe
                if not taken:
                    continue
                # At once: the donor may owe the same stripe of another of its pieces, and the
                # receiver's piece can replace only one of them.
                ranges = ranges_of_bits(owed.piece, taken)
                state.withdraw(donor, ranges)
                state.assign(receiver, [part._replace(piece=piece) for part in ranges])
                break
            if moved >= amount:
                break
        return moved

    @staticmethod
    def _duplicate(state: RoundState, outlook: _Outlook, receiver: int) -> bool:
        """Assign an idle worker a copy of a stripe whose holders are slower than it would be."""
        layout = state.layout
        pieces = layout.pieces_of[receiver]
        smallest = sum(layout.stripe_of[piece] for piece in pieces) / len(pieces)
        soon = smallest / float(outlook.speed[receiver]) + outlook.gain
        for piece in pieces:
            if not state.available[piece]:
                continue
            group = int(layout.group[piece])
            stripes = state.open[group] & state.free(piece)
            while stripes:
                stripe = stripes.bit_length() - 1
                stripes -= 1 << stripe
                if outlook.late(state, piece, stripe, soon):
                    # One stripe at a time, so that the next free worker can take the next one.
                    state.assign(receiver, [StripeRange(piece, stripe, stripe + 1)])
                    outlook.update(state, [receiver], stripe)
                    return True
        return False


class _Outlook:
    """What is expected of all workers during one reaction, kept up to date while work moves.

    Attributes
    ----------
    speed, backlog, latest, eta : ndarray, shape (workers,)
        As in :class:`Estimate`.
    ends : ndarray, shape (workers,)
        Seconds until the worker ends: ``latest`` if it is overdue, otherwise ``eta``.
    lags : ndarray, shape (workers,)
    donors : ndarray of int
        Workers with stripes to pass on, once for each piece.
    gain : float
        Seconds by which moved work, or a second copy, must end earlier.
    """

    def __init__(self, state: RoundState, now: Estimate, lead: float, gain: float) -> None:
        self._lead, self.gain = lead, gain
        self.speed, self.backlog, self.eta = now.speed, now.backlog, now.eta
        self.latest, self._overdue = now.latest.copy(), now.overdue
        # Where predictions hold, the last report may be a third of the round old. If only reports
        # counted, workers that have ended would be given 14 second copies in each round of 0.27 s
        # (on processes with 0.15 of a core), whose messages make rounds 2 % longer.
        self.ends = np.where(self._overdue, self.latest, self.eta)
        self._todo = state.workers.todo.copy()
        self.lags = state.workers.lags
        # The work until the common end, where dry workers start again after one lag.
        work = self.backlog + self.speed * np.where(self.latest <= lead, self.lags, 0.0)
        self._work = float(work.sum(where=state.present))
        self._pace = max(float(self.speed.sum(where=state.present)), _SLOWEST)
        host = state.layout.host
        # Pieces that have stripes to pass on. Moves only take stripes away from them.
        self._offered = (state.movable.words.any(axis=0) & (self.eta[host] > lead)).nonzero()[0]
        self.donors = host[self._offered]
        # The latest end of a donor, and the most that one owes beyond the common end.
        self._extremes: tuple[float, float] | None = None
        self._stripes = state.movable.words[:, self._offered]
        # When each stripe has all its copies, by group and stripe.
        self._complete: dict[tuple[int, int], float] = {}

    @property
    def level(self) -> float:
        """Seconds until all workers could end together."""
        return self._work / self._pace

    def has_for(self, own: float, start: float, least: float) -> bool:
        """Whether any donor may be worth a look for a receiver of this speed, from this time on.

        Near the end of a round thousands of idle workers ask, and almost none of them gets work.
        """
        if self._extremes is None:
            spare = self.backlog[self.donors] - self.speed[self.donors] * self.level
            etas = self.eta[self.donors]
            self._extremes = float(etas.max(initial=0.0)), float(spare.max(initial=-np.inf))
        eta, most = self._extremes
        if eta <= start + self.gain:
            return False
        return own * (eta - start) > least or (self.level > start and most >= least)

    def through(self, state: RoundState, receiver: int, late: Bools) -> Bools:
        """Return which workers may pass work on to a receiver that is not dry, shape (workers,).

        The late ones; if it holds nothing that these owe, those that can take nothing more until
        the common end, so that they can take more from the late ones.
        """
        layout = state.layout
        if len(layout.need) == 1:
            return late
        places = late[self.donors].nonzero()[0]
        if not len(places) or self._useful(state, layout.pieces_of[receiver], places).any():
            return late
        full: Bools = self.backlog + layout.mean_stripe > self.speed * self.level
        return full

    def places(self, after: float, only: Bools | None) -> Ints:
        """Return the places in :attr:`donors` of workers that end after a time.

        All, or those of ``only`` some, shape (workers,).
        """
        late = self.eta > after
        if only is not None:
            late &= only
        return late[self.donors].nonzero()[0]

    def last(self, state: RoundState, pieces: list[int], places: Ints, etas: Floats) -> int | None:
        """Return which of some places has stripes for a piece and ends last, None without one.

        ``etas`` has the expected ends of the workers at these places.
        """
        if not len(places):
            return None
        first = int(etas.argmax())
        # As a rule the worker that ends last has some. Otherwise all are asked at once.
        if self._useful(state, pieces, places[first : first + 1])[0]:
            return first
        useful = self._useful(state, pieces, places).nonzero()[0]
        return int(useful[etas[useful].argmax()]) if len(useful) else None

    def _useful(self, state: RoundState, pieces: list[int], places: Ints) -> Bools:
        """Find the places with stripes that one of the pieces can replace, shape of ``places``."""
        layout = state.layout
        stripes = self._stripes[:, places]
        found: Bools = np.zeros(len(places), dtype=bool)
        for piece in pieces:
            free = words_of(state.free(piece), len(stripes))
            useful = (stripes & free[:, None]).any(axis=0)
            if len(layout.need) > 1:
                useful &= layout.group[self._offered[places]] == layout.group[piece]
            found |= useful
        return found

    def update(self, state: RoundState, workers: list[int], stripe: int | None = None) -> None:
        """Account for what these workers owe now; only ``stripe`` has moved, if that is given."""
        for worker in workers:
            self._work -= self._until_dry(worker)
            speed, todo = float(self.speed[worker]), float(state.workers.todo[worker])
            # What the worker is believed to have done since its last report stays done.
            gained, self._todo[worker] = todo - float(self._todo[worker]), todo
            self.backlog[worker] = max(float(self.backlog[worker]) + gained, 0.0)
            self.latest[worker] = todo / max(speed, _SLOWEST)
            self.eta[worker] = self.backlog[worker] / max(speed, _SLOWEST)
            self.ends[worker] = (self.latest if self._overdue[worker] else self.eta)[worker]
            self._work += self._until_dry(worker)
            for piece in state.layout.pieces_of[worker]:
                place = int(self._offered.searchsorted(piece))
                if place < len(self._offered) and self._offered[place] == piece:
                    self._stripes[:, place] &= state.movable.words[:, piece]
        self._extremes = None
        if stripe is None:
            self._complete.clear()
        else:
            for group in range(len(state.missing)):
                self._complete.pop((group, stripe), None)

    def _until_dry(self, worker: int) -> float:
        idle = float(self.lags[worker]) if self.latest[worker] <= self._lead else 0.0
        return float(self.backlog[worker]) + float(self.speed[worker]) * idle

    def late(self, state: RoundState, piece: int, stripe: int, soon: float) -> bool:
        """Whether a stripe lacks copies ``soon`` seconds from now, and the piece can replace one.

        A worker is believed to go on as before until it is overdue. Then only its last report
        counts.
        """
        layout = state.layout
        if layout.code is not None:
            secured = state.secured(self.ends <= soon, [stripe])
            return bool(layout.lacking(secured)[0, 0] and layout.adds(piece, secured)[0])
        group = int(layout.group[piece])
        if (complete := self._complete.get((group, stripe))) is None:
            under_way = (state.held.at(stripe) & ~state.computed.at(stripe)).nonzero()[0]
            if len(layout.need) > 1:
                under_way = under_way[layout.group[under_way] == group]
            needed = int(state.missing[group, stripe])
            complete = np.inf
            if len(under_way) >= needed:
                times = self.ends[layout.host[under_way]]
                complete = float(np.partition(times, needed - 1)[needed - 1])
            self._complete[group, stripe] = complete
        return complete > soon
