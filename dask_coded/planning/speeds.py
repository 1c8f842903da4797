"""Worker speeds: what was measured, and what to expect next.

Speeds are relative: rounds of different arrays measure in different units, so each round is put on
the scale of what had been predicted for the workers that took part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dask_coded.planning.layout import Floats

#: A predictor maps histories (workers, rounds), oldest first and NaN where a worker took no part,
#: to the speeds (workers,) expected in the next round. A worker without any history gets NaN.
Predictor = Callable[[Floats], Floats]

# How fast a worker that has taken no part is given the benefit of the doubt again, per round.
_FORGIVING = 0.05


def last_value(history: Floats) -> Floats:
    """The last speed that was measured."""
    rounds = history.shape[1]
    seen = ~np.isnan(history)
    newest = np.where(seen, np.arange(rounds), -1).max(axis=1, initial=-1)
    values = np.take_along_axis(history, np.maximum(newest, 0)[:, None], axis=1)[:, 0]
    return np.where(newest >= 0, values, np.nan)


def exponentially_weighted(history: Floats, alpha: float = 0.5) -> Floats:
    """Exponentially weighted mean; rounds without a measurement pull slowly back to the average.

    Without that pull a worker once found slow would never be given work, nor be found fast.
    """
    estimate = np.full(history.shape[0], np.nan)
    for column in history.T:
        fresh = np.isnan(estimate)
        measured = ~np.isnan(column)
        estimate = np.where(
            measured,
            np.where(fresh, column, (1 - alpha) * estimate + alpha * column),
            (1 - _FORGIVING) * estimate + _FORGIVING,
        )
    return estimate


def uniform(history: Floats) -> Floats:
    """Nothing is known: everybody is as fast as everybody else."""
    return np.ones(history.shape[0])


#: Predictors by name. ``coded.predictor`` in the configuration selects one.
PREDICTORS: dict[str, Predictor] = {
    "exponential": exponentially_weighted,
    "last": last_value,
    "uniform": uniform,
}


class SpeedHistory:
    """Measured speeds of all workers over all rounds, and the speeds to expect.

    Parameters
    ----------
    length : int
        Rounds to remember.

    Examples
    --------
    >>> history = SpeedHistory()
    >>> history.record({"a": 30.0, "b": 10.0})
    >>> history.predict(["a", "b", "c"]).tolist()
    [1.5, 0.5, 1.0]
    """

    def __init__(self, length: int = 64) -> None:
        self._length = length
        self._rounds: dict[str, list[float]] = {}

    def record(self, measured: Mapping[str, float]) -> None:
        """Enter one round: work per second of each worker that took part, in any common unit."""
        measured = {w: s for w, s in measured.items() if s >= 0 and np.isfinite(s)}
        total = sum(measured.values())
        if not total:
            return
        # A worker's speed on the scale of what was expected of those that took part with it.
        scale = float(self.predict(list(measured)).sum()) / total
        for worker in measured:
            self._rounds.setdefault(worker, [])
        for worker, values in self._rounds.items():
            values.append(measured[worker] * scale if worker in measured else np.nan)
            del values[: -self._length]

    def forget(self, worker: str) -> None:
        """Drop a worker that has left."""
        self._rounds.pop(worker, None)

    def predict(self, workers: Sequence[str], predictor: str = "exponential") -> Floats:
        """Speeds to expect, shape (workers,); 1.0 for a worker never seen.

        Parameters
        ----------
        workers : sequence of str
        predictor : str
            A key of ``PREDICTORS``.
        """
        length = max((len(values) for values in self._rounds.values()), default=0)
        history = np.full((len(workers), length), np.nan)
        for row, worker in zip(history, workers, strict=True):
            if values := self._rounds.get(worker):
                row[-len(values) :] = values
        return np.nan_to_num(PREDICTORS[predictor](history), nan=1.0)
