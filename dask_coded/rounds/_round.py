"""The round: what to do when a share arrives, a worker is lost, or time has passed.

The cluster, the simulator and the tests drive this same class. Every method takes the time of the
event and returns commands; after each, :attr:`Round.wake` says when to call :meth:`Round.react` if
nothing else happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dask_coded.planning import (
    Command,
    Finish,
    Layout,
    Policy,
    Progress,
    Reporting,
    Run,
    Withdraw,
)
from dask_coded.planning.layout import Bools, Floats
from dask_coded.planning.progress import cover


class Round:
    """One coded operation, from the first assignment to the last sufficient share.

    Parameters
    ----------
    layout : Layout
    policy : Policy
        A fresh instance.
    speeds : ndarray, shape (workers,)
        Predicted speeds, in any common unit.
    now : float
        Seconds on the caller's clock.
    reporting : Reporting, optional
        How often workers report.
    lags : ndarray, shape (workers,), optional
        Seconds that each worker is expected to need to begin and to tell; by default none.

    Attributes
    ----------
    finished : bool
        Every stripe has the pieces that it needs.
    failed : str or None
        Why the round can never finish: too many pieces are out of reach.
    wake : float or None
        When to call :meth:`react`.
    """

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        speeds: Floats,
        now: float,
        reporting: Reporting | None = None,
        lags: Floats | None = None,
    ) -> None:
        self.layout = layout
        self.policy = policy
        self.progress = Progress(layout, speeds, now, reporting, lags)
        self.finished = False
        self.failed: str | None = None
        self.wake: float | None = None

    def start(self, first: Sequence[Sequence[Run]] | None = None) -> list[Command]:
        """Begin, with an assignment made elsewhere or with the policy's own."""
        progress = self.progress
        if first is None and not self._unreachable().any():
            first = self.policy.first(self.layout, progress.prior, progress.lags)
        for worker, runs in enumerate(first or ()):
            progress.assign(worker, list(runs))
        return self._after(progress.now, repair=True)

    def share(
        self, worker: int, runs: Iterable[Run], seconds: float, now: float
    ) -> tuple[list[Run], list[Command]]:
        """Results of ``runs`` have arrived after ``seconds`` of computing.

        Returns
        -------
        fresh : list of Run
            The runs that hold anything new; the others are duplicates and may be dropped.
        commands : list
        """
        fresh = self.record(worker, runs, seconds, now)
        return fresh, self.react(now)

    def record(self, worker: int, runs: Iterable[Run], seconds: float, now: float) -> list[Run]:
        """Enter results without reacting yet: :meth:`react` once for all that came together."""
        if self.finished:
            return []
        self.progress.now = now
        return self.progress.record(worker, list(runs), seconds)

    def react(self, now: float) -> list[Command]:
        """Act upon what was recorded, or upon time having passed."""
        return [] if self.finished else self._after(now)

    def lost(self, workers: Iterable[int], now: float) -> list[Command]:
        """Workers are gone, with all their pieces."""
        gone = set(workers)
        return self.lost_pieces(
            [p for p, w in enumerate(self.layout.host.tolist()) if w in gone], now
        )

    def lost_pieces(self, pieces: Iterable[int], now: float) -> list[Command]:
        """Pieces are no longer where they were."""
        gone = [p for p in pieces if self.progress.available[p]]
        if self.finished or not gone:
            return []
        self.progress.lose(gone)
        return self._after(now, repair=True)

    def _after(self, now: float, repair: bool = False) -> list[Command]:
        progress = self.progress
        progress.now = now
        if not progress.unfinished:
            self.finished, self.wake = True, None
            return [*progress.take(), Finish()]
        if repair:
            if (lacking := self._unreachable()).any():
                group, stripe = np.argwhere(lacking)[0]
                pieces = "pieces" if self.layout.code is None else "independent pieces"
                self.failed = (
                    f"Stripe {stripe} needs {self.layout.need[group]} {pieces}, too few are within "
                    f"reach: {int(progress.available.sum())} of {self.layout.pieces} are left."
                )
                self.wake = None
                return progress.take()
            # Whatever the policy, a round that can finish has enough copies under way.
            cover(progress, progress.present())
        self.wake = self.policy.react(progress)
        # Only a withdrawal can leave a stripe short: a policy that makes such a mistake must not
        # make the round wait for ever.
        if any(isinstance(command, Withdraw) for command in progress.commands):
            cover(progress, progress.present())
        return progress.take()

    def _unreachable(self) -> Bools:
        """Stripes that no assignment can finish any more, shape (groups, stripes)."""
        progress = self.progress
        possible = progress.available[:, None] | progress.computed
        return np.asarray(self.layout.lacking(possible) > 0)
