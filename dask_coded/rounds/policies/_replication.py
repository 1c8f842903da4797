"""Copies and speculation: what data-parallel systems do without a code.

Every block lies on several workers. Each worker computes its own block. A worker that has finished
takes over a whole block from a slow worker, and the first of the two to finish counts.

References
----------
.. [1] Zaharia et al., "Improving MapReduce performance in heterogeneous environments", OSDI'08
   (LATE: the task with the longest time to go, on a worker that is not slow itself, a bounded
   number at once).
"""

from __future__ import annotations

import numpy as np

from dask_coded.rounds.layout import Layout, StripeRange
from dask_coded.rounds.marks import ranges_of_bits
from dask_coded.rounds.policies._policy import POLICIES, Policy
from dask_coded.rounds.state import RoundState
from dask_coded.typing import Bools, Floats

# LATE looks for slow tasks again after this share of the elapsed time, at least this many seconds.
_RETRY = 0.05
_LEAST_WAIT = 1e-3
# A worker is stuck if it is expected to need as long again as it has had, or nearly so.
_STUCK = 0.9
# Keeps divisions by progress rates finite.
_SLOWEST = 1e-12


@POLICIES.register("replication")
class Replication(Policy):
    """Whole blocks with LATE speculation, for codes that are copies, such as ``Repetition(n, 3)``.

    Tasks behave as in such systems: a copy starts at the first stripe and cannot use what the
    original has computed.

    Parameters
    ----------
    cap : int
        The most speculative copies at once.
    slow : float
        Tasks below this quantile of progress rates are slow.
    """

    def __init__(self, cap: int = 6, slow: float = 0.25) -> None:
        self.cap = cap
        self.slow = slow
        self._helpers: dict[tuple[int, int], int] = {}  # (worker, group) -> worker

    @classmethod
    def first(cls, layout: Layout, speeds: Floats, lags: Floats) -> list[list[StripeRange]]:
        ranges: list[list[StripeRange]] = [[] for _ in range(layout.workers)]
        given = np.zeros(len(layout.need), dtype=int)
        for worker, pieces in enumerate(layout.pieces_of):
            # Blocks that this leaves out, because of a lost worker, are assigned by the round.
            own = [p for p in pieces if given[layout.group[p]] < layout.need[layout.group[p]]]
            for piece in own[:1]:
                ranges[worker].append(StripeRange(piece, 0, layout.stripes))
                given[layout.group[piece]] += 1
        return ranges

    def react(self, state: RoundState) -> float | None:
        layout = state.layout
        for worker, queue in enumerate(state.queues):
            # The other copy was faster: drop this one.
            done = [r for r in queue if not state.open[layout.group[r.piece]]]
            state.withdraw(worker, done)
        running = np.flatnonzero(state.workers.todo > 0)
        idle = np.flatnonzero(state.present & (state.workers.todo == 0))
        if not len(idle) or not len(running):
            return None
        started = ~np.isnan(state.workers.began)
        elapsed = np.maximum(state.now - np.nan_to_num(state.workers.began), 1e-9)
        share = state.workers.done / np.maximum(state.workers.done + state.workers.todo, 1e-300)
        rate = np.where(started, share / elapsed, 0.0)
        threshold = np.quantile(rate[started], self.slow)
        # A worker that has not started anything is assumed to have the median rate.
        fastest = np.maximum(np.where(started, rate, np.median(rate[started])), _SLOWEST)
        idle = idle[np.argsort(-fastest[idle], kind="stable")]
        left = (1 - share) / np.maximum(rate, _SLOWEST)
        # A quantile alone would trust some workers that have stopped, if many have.
        stuck = state.estimate().latest > _STUCK * elapsed
        slow = (state.workers.todo > 0) & ((rate <= threshold) | stuck)
        # Helpers that have become slow themselves count for nothing.
        helping = {key for key, w in self._helpers.items() if state.workers.todo[w] and not slow[w]}
        tasks = (
            (donor, group)
            for donor in running[np.argsort(-left[running], kind="stable")].tolist()
            for group in dict.fromkeys(int(layout.group[r.piece]) for r in state.queues[donor])
        )
        for donor, group in tasks:
            if len(helping) >= self.cap:
                break
            if (donor, group) in helping or not slow[donor]:
                continue
            for helper in idle.tolist():
                if state.workers.todo[helper] > 0:
                    continue
                if left[donor] * fastest[helper] < 1 and not stuck[donor]:
                    continue
                if (piece := self._copy(state, helper, group, slow)) is not None:
                    state.assign(helper, ranges_of_bits(piece, state.free(piece)))
                    self._helpers[donor, group] = helper
                    helping.add((donor, group))
                    break
        return state.now + max(_RETRY * (state.now - state.started), _LEAST_WAIT)

    @staticmethod
    def _copy(state: RoundState, worker: int, group: int, slow: Bools) -> int | None:
        """Return a piece of ``worker`` that can replace what slow workers owe of a group.

        The worker may have been assigned some of its stripes already, when another one was lost.
        """
        for piece in state.layout.pieces_of[worker]:
            if (
                state.layout.group[piece] == group
                and state.available[piece]
                and state.free(piece)
                and state.layout.adds(piece, state.secured(~slow)).any()
            ):
                return piece
        return None
