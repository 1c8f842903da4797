"""What the rounds of a loop measure about its workers, kept for the next round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from dask_coded.prediction import LagHistory
from dask_coded.rounds.reporting import Pace, Reporting
from dask_coded.rounds.round import Round


class LoopHistory:
    """Speeds, lags and pace, as the rounds of one loop have measured them.

    The cluster and the simulator keep the same history, so that both plan rounds in the same way.

    Parameters
    ----------
    lead : float
        Seconds before a worker runs dry at which it is fed, in the first round.
    reporting : Reporting
        How often workers report in the first round.

    Attributes
    ----------
    speeds : dict of str to float
        The last measured work per second of each worker, since the last :meth:`take_speeds`.
    lags : LagHistory
    pace : Pace
    """

    def __init__(self, lead: float, reporting: Reporting) -> None:
        self.speeds: dict[str, float] = {}
        self.lags = LagHistory()
        self.pace = Pace(lead, reporting)

    def record(self, round_: Round, workers: Sequence[str], elapsed: float) -> dict[str, float]:
        """Record a round that has ended.

        Parameters
        ----------
        round_ : Round
        workers : sequence of str
            The name of each worker of the layout.
        elapsed : float
            Seconds from the operand to the decoded result.

        Returns
        -------
        dict of str to float
            The work per second that the round measured, by worker.
        """
        state = round_.state
        measured = {workers[w]: s for w, s in state.measured_speeds(elapsed).items()}
        self.speeds |= measured
        self.lags.record({workers[w]: s for w, s in state.measured_lags(elapsed).items()})
        error = state.misprediction(elapsed)
        self.pace.record(elapsed, state.workers.lag, error, len(workers))
        return measured

    def take_speeds(self) -> dict[str, float]:
        """Return the measured speeds and forget them."""
        speeds, self.speeds = self.speeds, {}
        return speeds


class Rest:
    """Which workers get no work for a while, because they have raised exceptions.

    The cause may pass, such as a lack of memory, or it may last, such as a broken library. With
    each failure, the number of rounds for which a worker rests doubles. In ``r`` rounds, a worker
    that always fails is therefore tried ``log2(r)`` times.
    """

    def __init__(self) -> None:
        self._round = 0
        self._failures: dict[str, int] = {}
        self._until: dict[str, int] = {}

    def record(self, failed: Iterable[str]) -> None:
        """Record a round that has ended, and the workers that raised exceptions in it."""
        self._round += 1
        for worker in failed:
            count = self._failures[worker] = self._failures.get(worker, 0) + 1
            self._until[worker] = self._round + (1 << count - 1)

    def keep(self, workers: Collection[str]) -> None:
        """Forget all workers but these: an address may become that of another process."""
        for worker in self._failures.keys() - set(workers):
            del self._failures[worker], self._until[worker]

    def __contains__(self, worker: object) -> bool:
        """Whether a worker rests in the next round."""
        return isinstance(worker, str) and self._round < self._until.get(worker, 0)
