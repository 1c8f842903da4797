"""When a worker should have answered a `Recall` of the units that it was granted."""

from __future__ import annotations

from collections.abc import Sequence

from dask_coded.rounds.state import RoundState

# An answer is due after the time of one unit and this many lags. The worker answers while it
# computes; the unit's time is for a worker that could not answer meanwhile.
_LAGS = 2


class Patience:
    """When the answers of workers are due.

    Parameters
    ----------
    state : RoundState
    epochs : sequence of int
        The present epoch of each worker.

    Attributes
    ----------
    due : dict of int to float
        By worker, of those that owe an answer.
    """

    def __init__(self, state: RoundState, epochs: Sequence[int]) -> None:
        self.due: dict[int, float] = {}
        self._state = state
        self._epochs = epochs

    def wait(self, worker: int, again: bool = True) -> None:
        """Record that a worker was asked; ``again`` says that earlier questions are answered."""
        if again or worker not in self.due:
            self.due[worker] = self.until(worker)

    def until(self, worker: int) -> float:
        """Return the time at which an answer is due if a worker is asked now."""
        workers = self._state.workers
        speeds = workers.estimate(self._state.now).speed
        speed = speeds[worker] or speeds.max()
        expected = _LAGS * workers.lag + (1 / speed if speed > 0 else 0.0)
        # Longer each time, and if no duration is known, as long as the step has taken. Otherwise
        # holders of a unit could take it from each other again and again.
        known = expected or self._state.now - self._state.started
        return self._state.now + float(known * 2 ** min(self._epochs[worker], 60))
