"""Histories of worker speeds and lags, from which the next round is planned.

Speeds are relative, because rounds of different arrays measure them in different units. Each round
is scaled so that its speeds add up to those predicted for the workers that took part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.prediction.predictors._predictor import FORGETTING
from dask_coded.typing import Floats


class SpeedHistory:
    """Measured speeds of all workers in the rounds of all arrays, and predictions from them.

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
        self._rows: dict[str, int] = {}
        self._table: Floats = np.empty((0, length))
        self._rounds = 0

    def record(self, measured: Mapping[str, float]) -> None:
        """Record one round: work per second of each worker that took part, in any common unit."""
        measured = {w: s for w, s in measured.items() if s >= 0 and np.isfinite(s)}
        total = sum(measured.values())
        if not total:
            return
        # Put the speeds on the scale of those predicted for the workers that took part.
        scale = float(self.predict(list(measured)).sum()) / total
        for worker in measured:
            if worker not in self._rows:
                self._rows[worker] = len(self._rows)
        if lacking := len(self._rows) - len(self._table):
            empty = np.full((lacking, self._table.shape[1]), np.nan)
            self._table = np.concatenate([self._table, empty])
        self._table[:, :-1] = self._table[:, 1:]
        self._table[:, -1] = np.nan
        rows = [self._rows[worker] for worker in measured]
        self._table[rows, -1] = np.array(list(measured.values())) * scale
        self._rounds = min(self._rounds + 1, self._table.shape[1])

    def forget(self, worker: str) -> None:
        """Drop a worker that has left."""
        if (row := self._rows.pop(worker, None)) is not None:
            self._table = np.delete(self._table, row, axis=0)
            self._rows = {w: r - (r > row) for w, r in self._rows.items()}

    def predict(self, workers: Sequence[str], predictor: str = "exponential") -> Floats:
        """Return the predicted speeds, shape (workers,); 1.0 for a worker without a history.

        Parameters
        ----------
        workers : sequence of str
        predictor : str
            A key of ``PREDICTORS``.
        """
        history = np.full((len(workers), self._rounds), np.nan)
        known = [(i, self._rows[w]) for i, w in enumerate(workers) if w in self._rows]
        if known:
            here, rows = map(list, zip(*known, strict=True))
            history[here] = self._table[rows, self._table.shape[1] - self._rounds :]
        return np.nan_to_num(PREDICTORS[predictor](history), nan=1.0)


class LagHistory:
    """Lags: the time that each worker needs to start on its part of a round and to report it.

    A worker contributes nothing to a round that is shorter than its lag, however fast it is. Lags
    depend on the operand, so each loop learns its own. The expected lag of a worker that takes no
    part falls a little in each round, until the worker is tried again.

    Examples
    --------
    >>> history = LagHistory()
    >>> history.record({"a": 0.002, "b": 0.050})
    >>> history.record({"a": 0.004})
    >>> history.known
    {'a': 0.003, 'b': 0.0475}
    """

    def __init__(self) -> None:
        #: Expected lag of each worker that has taken part, in seconds.
        self.known: dict[str, float] = {}

    def record(self, measured: Mapping[str, float]) -> None:
        """Record one round: the lag of each worker that took part, in seconds."""
        for worker, lag in self.known.items():
            last = measured.get(worker)
            self.known[worker] = (1 - FORGETTING) * lag if last is None else (lag + last) / 2
        self.known = {**measured, **self.known}


def in_seconds(
    workers: Sequence[str], speeds: Floats, measured: Mapping[str, float], lags: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """Return predicted speeds as work per second, and lags in seconds to go with them.

    Parameters
    ----------
    workers : sequence of str
    speeds : ndarray, shape (workers,)
        In any common unit.
    measured : mapping of str to float
        Work per second of workers in the last round.
    lags : mapping of str to float
        Seconds; 0 for a worker that is not in the mapping.

    Returns
    -------
    speeds, lags : ndarray, shape (workers,)
        If nothing was measured, the speeds as they are and lags of zero, because the units would
        not match.

    Examples
    --------
    >>> in_seconds(["a", "b"], np.array([1.5, 1.0]), {"a": 30.0}, {"b": 0.01})
    (array([30., 20.]), array([0.  , 0.01]))
    """
    here = [(i, worker) for i, worker in enumerate(workers) if worker in measured and speeds[i] > 0]
    if not here:
        return speeds, np.zeros(len(workers))
    scale = float(np.median([measured[worker] / speeds[i] for i, worker in here]))
    return scale * speeds, np.array([lags.get(worker, 0.0) for worker in workers])
