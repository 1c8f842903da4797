"""Slack squeeze (S2C2) as published: loads by predicted speed, one recovery after a time-out.

References
----------
.. [1] Narra et al., "Slack squeeze coded computing for adaptive straggler mitigation", SC'19.
"""

from __future__ import annotations

import numpy as np

from dask_coded.planning.assignment import deal
from dask_coded.planning.layout import Bools, Floats, Layout, Run
from dask_coded.planning.policies._policy import Policy
from dask_coded.planning.progress import Progress, cover

# The authors' rule: about the error of their speed predictor.
PATIENCE = 0.15


class S2C2(Policy):
    """General S2C2: loads in proportion to predicted speeds.

    When enough workers to decode from have finished, the others get 15 % of those workers' mean
    time more; then what they owe is dealt to the ones that have finished.
    """

    def __init__(self) -> None:
        self._late: set[int] = set()
        self._again: float | None = None

    def first(self, layout: Layout, speeds: Floats, lags: Floats) -> list[list[Run]]:
        # As published: what a message takes is not planned for.
        return deal(layout, speeds)

    def react(self, progress: Progress) -> float | None:
        took_part = ~np.isnan(progress.began) & progress.present()
        finished = took_part & (progress.todo == 0)
        finished[list(self._late)] = False
        if self._again is None and (deadline := self._deadline(progress, took_part, finished)):
            self._again = deadline
        if self._again is None or progress.now < self._again:
            return self._again
        return self._recover(progress, took_part, finished)

    def _deadline(self, progress: Progress, took_part: Bools, finished: Bools) -> float | None:
        """When to give up on the others: 15 % after those that finish in any case have finished."""
        tolerance = len(np.unique(progress.layout.place)) - progress.layout.sufficient
        needed = int(took_part.sum()) - tolerance
        # Should more be gone than may be, whichever they are, those that are free may suffice yet.
        free = progress.available & (progress.todo == 0)[progress.layout.host]
        suffice = not progress.layout.lacking(free[:, None]).any()
        if (needed <= 0 or suffice) and not finished.any():
            # So few were given work that all of them may be gone: there is nobody to compare with.
            return progress.started + 20 * progress.reporting.interval
        if finished.sum() < needed and not suffice:
            return None
        spent = float((progress.heard - progress.began)[finished].mean())
        return progress.started + spent * (1 + PATIENCE)

    def _recover(self, progress: Progress, took_part: Bools, finished: Bools) -> float:
        late = took_part & (progress.todo > 0)
        short = cover(progress, finished, trusted=~late)
        if short.any():
            short = cover(progress, progress.present() & ~late, trusted=~late)
        settled = short == 0
        for worker in np.flatnonzero(late).tolist():
            owed = list(progress.queues[worker])
            if all(settled[progress.layout.group[r.piece], r.start : r.stop].all() for r in owed):
                progress.withdraw(worker, owed)
                self._late.add(worker)
        # Should a helper fail too, look again when what it was given ought to be done.
        expected = progress.estimate().latest[~late].max(initial=0.0)
        spent = progress.now - progress.started
        patience = max(expected * (1 + PATIENCE), PATIENCE * spent)
        self._again = progress.now + max(min(patience, spent), 1e-3)
        return self._again


class BasicS2C2(S2C2):
    """Basic S2C2: a worker is a straggler or not; those that are not get equal loads.

    A straggler is a worker predicted at less than half of the median speed; there are never more of
    them than the code tolerates.
    """

    def first(self, layout: Layout, speeds: Floats, lags: Floats) -> list[list[Run]]:
        holders = np.unique(layout.host[layout.host >= 0])
        order = holders[np.argsort(speeds[holders], kind="stable")]
        slow = speeds[order] < 0.5 * np.median(speeds[holders])
        stragglers = order[slow][: max(len(holders) - layout.sufficient, 0)]
        equal = np.zeros(layout.workers)
        equal[holders] = 1.0
        equal[stragglers] = 0.0
        return deal(layout, equal)
