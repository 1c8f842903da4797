"""Copies and speculation: what data-parallel systems do without a code.

Every block lies on several workers. Each worker computes its own block; one that is done takes over
a whole block from a worker that is found slow, and the first of the two to finish counts.

References
----------
.. [1] Zaharia et al., "Improving MapReduce performance in heterogeneous environments", OSDI'08
   (LATE: the task with the longest time to go, on a worker that is not slow itself, a bounded
   number at once).
"""

from __future__ import annotations

import numpy as np

from dask_coded.planning.layout import Floats, Layout, Run, runs_of
from dask_coded.planning.policies._policy import Policy
from dask_coded.planning.progress import Progress


class Replication(Policy):
    """Whole blocks with LATE speculation; for codes that are copies, such as ``Repetition(n, 3)``.

    Tasks are what they are in such systems: a copy begins at the first stripe, and what its
    original has computed is of no use to it.

    Parameters
    ----------
    cap : int
        Speculative copies at once, at most.
    slow : float
        Tasks below this quantile of progress rates are slow.
    """

    def __init__(self, cap: int = 6, slow: float = 0.25) -> None:
        self.cap = cap
        self.slow = slow
        self._helpers: dict[tuple[int, int], int] = {}  # (worker, group) -> worker

    def first(self, layout: Layout, speeds: Floats, lags: Floats) -> list[list[Run]]:
        runs: list[list[Run]] = [[] for _ in range(layout.workers)]
        given = np.zeros(len(layout.need), dtype=int)
        for worker, pieces in enumerate(layout.pieces_of):
            # A code without copies to spare, or a lost worker: the round engine deals the rest.
            own = [p for p in pieces if given[layout.group[p]] < layout.need[layout.group[p]]]
            for piece in own[:1]:
                runs[worker].append(Run(piece, 0, layout.stripes))
                given[layout.group[piece]] += 1
        return runs

    def react(self, progress: Progress) -> float | None:
        layout = progress.layout
        for worker, queue in enumerate(progress.queues):
            # The other copy was faster: this one is killed.
            done = [r for r in queue if not progress.missing[layout.group[r.piece]].any()]
            progress.withdraw(worker, done)
        running = np.flatnonzero(progress.todo > 0)
        idle = np.flatnonzero(progress.present() & (progress.todo == 0))
        if not len(idle) or not len(running):
            return None
        started = ~np.isnan(progress.began)
        elapsed = np.maximum(progress.now - np.nan_to_num(progress.began), 1e-9)
        share = progress.done / np.maximum(progress.done + progress.todo, 1e-300)
        rate = np.where(started, share / elapsed, 0.0)
        threshold = np.quantile(rate[started], self.slow)
        # A worker that was given nothing yet may be as fast as any, and able if none has begun.
        fastest = np.maximum(np.where(started, rate, np.median(rate[started])), 1e-12)
        idle = idle[np.argsort(-fastest[idle], kind="stable")]
        left = (1 - share) / np.maximum(rate, 1e-12)
        under_way = sum(bool(progress.todo[worker] > 0) for worker in self._helpers.values())
        for victim in running[np.argsort(-left[running], kind="stable")].tolist():
            group = int(layout.group[progress.queues[victim][0].piece])
            if under_way >= self.cap:
                break
            if (victim, group) in self._helpers or rate[victim] > threshold:
                continue
            for helper in idle.tolist():
                if progress.todo[helper] > 0 or left[victim] * fastest[helper] < 1:
                    continue
                slow = [victim, *(worker for worker, _ in self._helpers)]
                if (piece := self._copy(progress, helper, group, slow)) is not None:
                    progress.assign(helper, runs_of(piece, ~progress.held[piece]))
                    self._helpers[victim, group] = helper
                    under_way += 1
                    break
        return progress.now + max(0.05 * (progress.now - progress.started), 1e-3)

    @staticmethod
    def _copy(progress: Progress, worker: int, group: int, slow: list[int]) -> int | None:
        """A piece of a worker with stripes that it does not owe yet and that slow workers owe.

        All stripes of it, unless the worker was dealt some of them when another one was lost.
        """
        trusted = ~np.isin(np.arange(progress.layout.workers), slow)
        for piece in progress.layout.pieces_of[worker]:
            if (
                progress.layout.group[piece] == group
                and progress.available[piece]
                and not progress.held[piece].all()
                and progress.layout.adds(piece, progress.secured(trusted)).any()
            ):
                return piece
        return None
