"""Slack squeeze (S2C2) as published: loads by predicted speed, one recovery after a timeout.

References
----------
.. [1] Narra et al., "Slack squeeze coded computing for adaptive straggler mitigation", SC'19.
"""

from __future__ import annotations

import numpy as np

from dask_coded.rounds.assignment import deal
from dask_coded.rounds.layout import Layout, StripeRange
from dask_coded.rounds.policies._policy import POLICIES, Policy
from dask_coded.rounds.state import RoundState, cover
from dask_coded.typing import Bools, Floats

#: Extra time for late workers, as a share of the others' mean time. The authors set it to about the
#: error of their speed predictor.
PATIENCE = 0.15
# If no worker has finished, there is nothing to compare with. The first deadline is then this many
# report intervals after the start: about three rounds of seven reports.
_SILENT_REPORTS = 20
# Seconds between two recoveries, at least.
_LEAST_WAIT = 1e-3
# A worker predicted below this share of the median speed is a straggler for basic S2C2.
_SLOW = 0.5


@POLICIES.register("s2c2")
class S2C2(Policy):
    """General S2C2: loads in proportion to predicted speeds.

    Once enough workers to decode from have finished, the others get 15 % more than the mean time of
    those workers. Then what they owe is assigned to the workers that have finished.
    """

    def __init__(self) -> None:
        self._late: set[int] = set()
        self._again: float | None = None

    @classmethod
    def first(cls, layout: Layout, speeds: Floats, lags: Floats) -> list[list[StripeRange]]:
        # As published: the plan ignores how long messages take.
        return deal(layout, speeds)

    def react(self, state: RoundState) -> float | None:
        took_part = ~np.isnan(state.workers.began) & state.present
        finished = took_part & (state.workers.todo == 0)
        finished[list(self._late)] = False
        if self._again is None and (deadline := self._deadline(state, took_part, finished)):
            self._again = deadline
        if self._again is None or state.now < self._again:
            return self._again
        return self._recover(state, took_part, finished)

    def _deadline(self, state: RoundState, took_part: Bools, finished: Bools) -> float | None:
        """Return when to give up on late workers: 15 % after the others' mean time, if known."""
        tolerance = len(np.unique(state.layout.place)) - state.layout.sufficient
        needed = int(took_part.sum()) - tolerance
        # More workers may be gone than the code tolerates in general. Those that are free may
        # suffice all the same.
        free = state.available & (state.workers.todo == 0)[state.layout.host]
        suffice = not state.layout.lacking(free[:, None]).any()
        if (needed <= 0 or suffice) and not finished.any():
            # So few workers were assigned work that all of them may be gone.
            return state.started + _SILENT_REPORTS * state.reporting.interval
        if finished.sum() < needed and not suffice:
            return None
        spent = float((state.workers.heard - state.workers.began)[finished].mean())
        return state.started + spent * (1 + PATIENCE)

    def _recover(self, state: RoundState, took_part: Bools, finished: Bools) -> float:
        late = took_part & (state.workers.todo > 0)
        short = cover(state, finished, trusted=~late)
        if short.any():
            short = cover(state, state.present & ~late, trusted=~late)
        settled = short == 0
        for worker in np.flatnonzero(late).tolist():
            owed = list(state.queues[worker])
            if all(settled[state.layout.group[r.piece], r.start : r.stop].all() for r in owed):
                state.withdraw(worker, owed)
                self._late.add(worker)
        # A helper may fail as well: look again when its work should be done.
        expected = state.estimate().latest[~late].max(initial=0.0)
        spent = state.now - state.started
        patience = max(expected * (1 + PATIENCE), PATIENCE * spent)
        self._again = state.now + max(min(patience, spent), _LEAST_WAIT)
        return self._again


@POLICIES.register("s2c2-basic")
class BasicS2C2(S2C2):
    """Basic S2C2: a worker is a straggler or it is not; the others get equal loads.

    A straggler is a worker predicted below half of the median speed. At most as many workers count
    as stragglers as the code tolerates.
    """

    @classmethod
    def first(cls, layout: Layout, speeds: Floats, lags: Floats) -> list[list[StripeRange]]:
        holders = np.unique(layout.host[layout.host >= 0])
        order = holders[np.argsort(speeds[holders], kind="stable")]
        slow = speeds[order] < _SLOW * np.median(speeds[holders])
        stragglers = order[slow][: max(len(holders) - layout.sufficient, 0)]
        equal = np.zeros(layout.workers)
        equal[holders] = 1.0
        equal[stragglers] = 0.0
        return deal(layout, equal)
