"""Continuous squeeze: S2C2's assignment, then work flows from late workers to free ones, at once.

Workers stream what they have computed. When one is about to run dry it is given the tail of the
list of the worker that is predicted to finish last. No data moves, because every worker holds a
piece of every stripe; partial work is used; nothing waits for a time-out. What is left in the hands
of slow or silent workers at the very end is computed a second time by free ones.

As soon as a worker turns out so slow that it would be late by a good deal, its work flows at once,
and not only to those who run dry: while all still have much to do, there are others that can take
any of its stripes, and a few large moves suffice. Later some have none left to take, and the rest
takes a message for every stripe. In simulation, two of eight workers five times slower, nothing
known, 5 ms for a message: 1.175 of the fluid bound without, 1.087 with that. Workers that are not
late keep what they have: what the first reports say of them is mostly noise, and everybody would
take from everybody and give back.
"""

from __future__ import annotations

import numpy as np

from dask_coded.planning.assignment import deal
from dask_coded.planning.layout import Bools, Floats, Layout, Run, runs_of
from dask_coded.planning.policies._policy import Policy
from dask_coded.planning.progress import Estimate, Progress

# Work flows before anybody runs dry if someone would end later than all together by this share of
# the time that is left. Smaller values cost messages and gain nothing.
_IMBALANCE = 0.25


class Continuous(Policy):
    """Feed whoever runs dry from whoever is latest.

    Parameters
    ----------
    lead : float
        Seconds before running dry at which a worker is fed, at least: the time for a message there
        and back, so that it does not stand idle meanwhile. Where workers are found to need longer
        to react, they are fed that much earlier.
    """

    def __init__(self, lead: float = 0.004) -> None:
        self.lead = lead
        # When to try again to find work for a worker that there was none for.
        self._retry: dict[int, float] = {}

    def first(self, layout: Layout, speeds: Floats, lags: Floats) -> list[list[Run]]:
        return deal(layout, speeds, lags)

    def react(self, progress: Progress) -> float | None:
        if not progress.unfinished:
            return None
        now = progress.estimate()
        lead = max(self.lead, progress.lag)
        free = progress.present() & (now.speed > 0)
        if now.latest.max() > lead:  # else everybody is about to be done anyway
            # Who is dry is told by reports: a stopped worker is not to be fed on a belief.
            dry = now.latest <= lead
            short, late = self._uneven(progress, now)
            hungry = np.flatnonzero(free & (dry | short))
            for thief in hungry[np.argsort(now.latest[hungry], kind="stable")].tolist():
                if self._retry.get(thief, -np.inf) > progress.now:
                    continue
                # From who is not late would be taken, and given back, what a moment's noise says.
                if self._steal(progress, now, thief, lead, late | dry[thief]) or (
                    not progress.todo[thief] and self._second(progress, now, thief, lead)
                ):
                    now = progress.estimate()
                elif not progress.todo[thief]:
                    # Nothing worth taking: look again soon, lateness shows in time.
                    wait = max(lead, 0.02 * (progress.now - progress.started))
                    self._retry[thief] = progress.now + wait
        if not (free & (progress.todo == 0)).any():
            return None
        return progress.now + max(lead, 0.02 * (progress.now - progress.started))

    @staticmethod
    def _uneven(progress: Progress, now: Estimate) -> tuple[Bools, Bools]:
        """Who is to be given more although he still has work, and who gives, each (workers,).

        Nobody, as long as all are expected to end at about the same time.
        """
        backlog, speed, eta = now.backlog, np.maximum(now.speed, 1e-300), now.eta
        present = progress.present()
        level = backlog[present].sum() / speed[present].sum()
        stripe = float(progress.layout.work.mean()) / speed
        late: Bools = eta - stripe > (1 + _IMBALANCE) * level
        # One that has not been heard of yet may be the next straggler.
        short: Bools = late.any() & ~progress.unheard & (eta + stripe < level)
        return short, late

    def _steal(
        self, progress: Progress, now: Estimate, thief: int, lead: float, victims: Bools
    ) -> bool:
        """Move tails of ``victims`` to ``thief`` so that it ends together with everybody else."""
        speed, backlog, latest, eta = now
        own = speed[thief]
        stripe = float(progress.layout.work.mean())
        present = progress.present()
        # When all could end together, if everybody who is dry begins anew one lag from now.
        idle = np.where(latest <= lead, progress.lags, 0.0)
        level = (backlog + speed * idle)[present].sum() / speed[present].sum()
        # What is given now is begun when the message is there, and not before the rest is done.
        start = max(eta[thief], progress.lags[thief])
        taken = False
        if eta.max() <= start + lead:
            return False
        # A move costs a message and a wait on either side: small differences are left alone.
        victims = victims & self._reachable(progress, thief)
        latest_first = np.argsort(-eta, kind="stable")
        for victim in latest_first[victims[latest_first]].tolist():
            if eta[victim] <= start + lead:
                break
            surplus = backlog[victim] - speed[victim] * level
            room = own * (level - start)
            if surplus <= 0 or room <= 0:
                if taken:
                    break
                # Nobody within reach is later than the average: share evenly with the latest, so
                # that work diffuses to this worker through its neighbours.
                slow = 1 / speed[victim] if speed[victim] else 0
                surplus = room = (eta[victim] - start) / (1 / own + slow)
            else:
                # Rounded up: what is left behind costs one more move, and a wait.
                room += 0.99 * stripe
            moved = self._move(
                progress, victim, thief, min(surplus, room), own * (eta[victim] - start)
            )
            taken |= moved > 0
            start += moved / own
        return taken

    @staticmethod
    def _reachable(progress: Progress, thief: int) -> Bools:
        """Workers that owe a stripe which the thief could compute, shape (workers,)."""
        layout = progress.layout
        owed = progress.held & ~progress.computed
        found = np.zeros(layout.workers, dtype=bool)
        for piece in layout.pieces_of[thief]:
            if progress.available[piece]:
                others = np.flatnonzero((layout.group == layout.group[piece]) & progress.available)
                common = (owed[others] & ~progress.held[piece]).any(axis=1)
                found[layout.host[others[common]]] = True
        found[thief] = False
        return found

    def _move(
        self, progress: Progress, victim: int, thief: int, amount: float, most: float
    ) -> float:
        """Move up to ``amount`` of work from the tail of one list to the end of another.

        A single stripe may be larger, up to ``most``. Returns the work moved.
        """
        layout = progress.layout
        moved = 0.0
        with progress.together():
            for index, run in reversed(list(enumerate(progress.queues[victim]))):
                for piece in layout.pieces_of[thief]:
                    if layout.group[piece] != layout.group[run.piece]:
                        continue
                    if not progress.available[piece]:
                        continue
                    free = progress.replaceable(run, piece)
                    if index == 0:
                        free[0] = False  # the victim is believed to be at this stripe
                    stripes = np.flatnonzero(free)[::-1] + run.start
                    sums = moved + np.cumsum(layout.work[piece, stripes])
                    count = int(np.searchsorted(sums, amount, side="right"))
                    if not count and not moved and len(sums) and sums[0] < most:
                        count = 1
                    if not count:
                        continue
                    mask = np.zeros(layout.stripes, dtype=bool)
                    mask[stripes[:count]] = True
                    # At once, because the donor may owe the same stripe of another of its pieces:
                    # the receiver's piece can make up for one of them only.
                    progress.withdraw(victim, runs_of(run.piece, mask))
                    progress.assign(thief, runs_of(piece, mask))
                    moved = float(sums[count - 1])
                    break
                if moved >= amount:
                    break
        return moved

    def _second(self, progress: Progress, now: Estimate, thief: int, lead: float) -> bool:
        """Give an idle worker a copy of stripes whose last holders are slower than it would be."""
        layout = progress.layout
        smallest = float(layout.work[layout.pieces_of[thief]].mean()) / now.speed[thief]
        prompt: Bools = now.latest <= smallest + lead
        if prompt.all():
            return False
        secured = progress.secured(prompt)
        unsafe = layout.lacking(secured) > 0
        for piece in layout.pieces_of[thief]:
            if not progress.available[piece]:
                continue
            unheld = unsafe[layout.group[piece]] & ~progress.held[piece]
            stripes = np.flatnonzero(unheld & layout.adds(piece, secured))
            if len(stripes):
                # One at a time: the next free worker takes the next, nobody hoards.
                last = int(stripes[-1])
                progress.assign(thief, [Run(piece, last, last + 1)])
                return True
        return False
