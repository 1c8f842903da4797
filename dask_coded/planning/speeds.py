"""Worker speeds: what was measured, and what to expect next.

Speeds are relative: rounds of different arrays measure in different units, so each round is put on
the scale of what had been predicted for the workers that took part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dask_coded.planning.layout import Floats
from dask_coded.planning.predictors import PREDICTORS


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
        self._rows: dict[str, int] = {}
        self._table: Floats = np.empty((0, length))
        self._rounds = 0

    def record(self, measured: Mapping[str, float]) -> None:
        """Enter one round: work per second of each worker that took part, in any common unit."""
        measured = {w: s for w, s in measured.items() if s >= 0 and np.isfinite(s)}
        total = sum(measured.values())
        if not total:
            return
        # A worker's speed on the scale of what was expected of those that took part with it.
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
        """Speeds to expect, shape (workers,); 1.0 for a worker never seen.

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
