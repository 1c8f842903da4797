"""The round: what to do when a share arrives, a worker is lost, or time has passed.

The cluster, the simulator and the tests drive this class. Every method takes the time of its event
and returns commands. After each event, :attr:`Round.wake` is the time at which to call
:meth:`Round.react` if nothing else happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dask_coded.rounds.layout import Layout, StripeRange
from dask_coded.rounds.policies import Policy
from dask_coded.rounds.reporting import Reporting
from dask_coded.rounds.state import Command, Finish, RoundState, Withdraw, cover
from dask_coded.typing import Bools, Floats


class Round:
    """One coded operation, from the first assignment to the last sufficient share.

    Parameters
    ----------
    layout : Layout
    policy : Policy
        A new instance.
    speeds : ndarray, shape (workers,)
        Predicted speeds, in any common unit.
    now : float
        Seconds on the caller's clock.
    reporting : Reporting, optional
        How often workers report.
    lags : ndarray, shape (workers,), optional
        Seconds that each worker is expected to need to start and to report, if the speeds are work
        per second; by default neither is known.
    least_batch : int
        Stripes that workers compute at least by one product.

    Attributes
    ----------
    finished : bool
        Every stripe has the pieces that it needs.
    failed : str or None
        Why the round cannot finish: too few pieces are left.
    erred : bool
        Whether a failed round could finish if no worker had raised an exception.
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
        least_batch: int = 1,
    ) -> None:
        self.layout = layout
        self.policy = policy
        self.state = RoundState(layout, speeds, now, reporting, lags, least_batch)
        self.finished = False
        self.failed: str | None = None
        self.erred = False
        self._raised = np.zeros(layout.pieces, dtype=bool)
        self.wake: float | None = None

    def start(self, first: Sequence[Sequence[StripeRange]] | None = None) -> list[Command]:
        """Start with the given assignment, or with the policy's own.

        Raises
        ------
        InfeasibleError
            If the policy cannot make one, because too few workers are expected to make progress.
        """
        state = self.state
        if first is None and not self._lacking(state.available).any():
            first = self.policy.first(self.layout, state.workers.prior, state.workers.lags)
        for worker, ranges in enumerate(first or ()):
            state.assign(worker, list(ranges))
        return self._after(state.now, repair=True)

    def expect(self, worker: int, speed: float) -> None:
        """Change the predicted speed of a worker."""
        self.state.workers.expect(worker, speed)

    def share(
        self, worker: int, ranges: Iterable[StripeRange], seconds: float, now: float
    ) -> tuple[list[StripeRange], list[Command]]:
        """Record results of ``ranges``, which took ``seconds`` to compute, and react.

        Returns
        -------
        fresh : list of StripeRange
            The ranges that hold any new stripe; the others are duplicates and can be dropped.
        commands : list of Command
        """
        fresh = self.record(worker, ranges, seconds, now)
        return fresh, self.react(now)

    def record(
        self, worker: int, ranges: Iterable[StripeRange], seconds: float, now: float
    ) -> list[StripeRange]:
        """Record results without reacting; call :meth:`react` once for all that came together."""
        if self.finished:
            return []
        self.state.now = now
        return self.state.record(worker, list(ranges), seconds)

    def react(self, now: float) -> list[Command]:
        """React to what was recorded, or to time that has passed."""
        return [] if self.finished else self._after(now)

    def lost(self, workers: Iterable[int], now: float) -> list[Command]:
        """Record that workers are gone, with all their pieces, and react."""
        pieces_of = self.layout.pieces_of
        return self.lost_pieces([piece for worker in workers for piece in pieces_of[worker]], now)

    def lost_pieces(self, pieces: Iterable[int], now: float) -> list[Command]:
        """Record that pieces are no longer on their workers, and react."""
        gone = [p for p in pieces if self.state.available[p]]
        if self.finished or not gone:
            return []
        self.state.lose(gone)
        return self._after(now, repair=True)

    def forgot(self, worker: int, ranges: list[StripeRange], now: float) -> list[Command]:
        """Record that a worker is gone, and with it what it has computed of some ranges, and react.

        A round that had finished may go on.
        """
        self.state.forget(ranges)
        self.state.lose(self.layout.pieces_of[worker])
        return self._reopened(now)

    def regained(self, workers: Iterable[int], now: float) -> list[Command]:
        """Record that workers are back with their pieces but without results, and react."""
        self.state.regain([p for worker in workers for p in self.layout.pieces_of[worker]])
        return self._reopened(now)

    def _reopened(self, now: float) -> list[Command]:
        self.finished, self.failed, self.erred = False, None, False
        return self._after(now, repair=True)

    def raised(self, pieces: Iterable[int], now: float) -> list[Command]:
        """Record that computing pieces raises an exception on their workers, and react."""
        gone = list(pieces)
        self._raised[gone] = True
        return self.lost_pieces(gone, now)

    def _after(self, now: float, repair: bool = False) -> list[Command]:
        state = self.state
        state.now = now
        if not state.unfinished:
            self.finished, self.wake = True, None
            return [*state.take(), Finish()]
        if repair:
            if (lacking := self._lacking(state.available)).any():
                return self._fail(lacking)
            # Under every policy, a round that can finish has enough copies under way.
            cover(state, state.present)
        self.wake = self.policy.react(state)
        # Only a withdrawal can leave a stripe short. If a policy makes that mistake, repair it:
        # otherwise the round would wait forever.
        if any(isinstance(command, Withdraw) for command in state.commands):
            cover(state, state.present)
        # Of nearly dependent pieces there may be enough by count, and still none that helps.
        if not any(state.queues):
            missing = cover(state, state.present) > 0
            if missing.any() and not any(state.queues):
                return self._fail(missing)
        return state.take()

    def _fail(self, lacking: Bools) -> list[Command]:
        """End without a result, because stripes lack pieces, shape (groups, stripes)."""
        state = self.state
        group, stripe = np.argwhere(lacking)[0]
        pieces = "pieces" if self.layout.code is None else "independent pieces"
        self.failed = (
            f"Stripe {stripe} needs {self.layout.need[group]} {pieces}, too few are within "
            f"reach: {int(state.available.sum())} of {self.layout.pieces} are left."
        )
        raised = bool(self._raised.any())
        self.erred = raised and not self._lacking(state.available | self._raised).any()
        self.wake = None
        return state.take()

    def _lacking(self, available: Bools) -> Bools:
        """Stripes that no assignment of available pieces can finish, shape (groups, stripes)."""
        possible = available[:, None] | self.state.computed.array()
        return np.asarray(self.layout.lacking(possible) > 0)
