"""Histories of worker speeds and lags, from which the next round is planned.

Speeds are relative, because rounds of different arrays measure them in different units. Each round
is scaled so that most of its workers have their usual speeds, which are running medians. Newcomers
do not count for that, nor does a worker whose speed has just changed: the others would seem to
change with it. If usual speeds were means, each burst of a worker would raise them, and with them
the scale of all later rounds. Numbers would overflow after some thousand rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.prediction.records import CHANGED, STEP, Records
from dask_coded.typing import Floats, Ints

# A worker on trial counts as at least this share of the median speed, and at least as fast as it
# takes to get this many stripes: one, with a margin for rounding and for others that are faster.
_TRIAL = 1 / 16
_TRIAL_STRIPES = 1.25
# In each round without a worker, its expected lag falls by this share, until the worker is tried
# again. A trial of a worker that is still slow makes about two rounds long. With shares of 0.05,
# 0.02 and 0.01, the mean round of 5 ms beside two workers slowed 20 times was 25, 19, 13 % longer
# than the median. A lag of 25 ms then keeps a worker out of such rounds for 30, 80 or 160 of them.
_LAG_FORGETTING = 0.02
# Rounds after which a running median has settled: from then on, its steps are the shortest.
_LASTING = round(1 / STEP)


class SpeedHistory:
    """Measured speeds of all workers in the rounds of all arrays, and predictions from them.

    Parameters
    ----------
    length : int
        Rounds of which every speed is remembered.

    Examples
    --------
    >>> history = SpeedHistory()
    >>> history.record({"a": 30.0, "b": 10.0})
    >>> history.predict(["a", "b", "c"]).round(3).tolist()
    [1.5, 0.5, 1.0]
    """

    def __init__(self, length: int = 64) -> None:
        self._records = Records(length)
        self._rows: dict[str, int] = {}
        # Rows of workers that have left.
        self._free: list[int] = []

    @property
    def rounds(self) -> int:
        """The number of rounds recorded."""
        return self._records.rounds

    def __contains__(self, worker: str) -> bool:
        """Whether the speed of a worker was measured in any round."""
        return worker in self._rows

    def record(self, measured: Mapping[str, float], reach: Iterable[str] | None = None) -> None:
        """Record one round.

        Parameters
        ----------
        measured : mapping of str to float
            Work per second of each worker that took part, in any common unit.
        reach : iterable of str, optional
            Workers that could have taken part, besides these. For all others, the round does not
            count: their speeds become no older. Default: all workers.
        """
        workers = list(measured)
        speeds = np.fromiter(measured.values(), np.float64, len(workers))
        useful = (speeds >= 0) & np.isfinite(speeds)
        if not speeds[useful].any():
            return
        if not useful.all():
            workers, speeds = [workers[i] for i in np.flatnonzero(useful)], speeds[useful]
        rows = self._find(workers)
        speeds *= self._scale(rows, speeds)
        for i in np.flatnonzero(rows < 0).tolist():
            rows[i] = self._free.pop() if self._free else len(self._rows)
            self._rows[workers[i]] = int(rows[i])
        self._records.reserve(len(self._rows) + len(self._free))
        if reach is None:
            self._records.record(rows, speeds)
            return
        counts = np.zeros(self._records.rows, dtype=np.bool_)
        others = self._find(reach)
        counts[others[others >= 0]] = counts[rows] = True
        self._records.record(rows, speeds, np.flatnonzero(counts))

    def forget(self, worker: str) -> None:
        """Drop a worker that has left."""
        if (row := self._rows.pop(worker, None)) is not None:
            self._records.clear(row)
            self._free.append(row)

    def predict(self, workers: Sequence[str], predictor: str = "adaptive") -> Floats:
        """Return the predicted speeds, shape (workers,).

        A worker without a history counts as the average of the others.

        Parameters
        ----------
        workers : sequence of str
        predictor : str
            A key of ``PREDICTORS``.
        """
        rows = self._find(workers)
        known = rows >= 0
        speeds = np.ones(len(rows))
        if known.any():
            speeds[known] = PREDICTORS[predictor](self._records, rows[known])
            speeds[~known] = speeds[known].mean()
        return speeds

    def assured(self, workers: Sequence[str]) -> Floats:
        """Return the predicted or the last speeds, whichever are lower, shape (workers,).

        For the choice of a worker that all others wait for: it should not have been slow when last
        measured, even if it usually is fast.
        """
        rows = self._find(workers)
        known = rows >= 0
        speeds = self.predict(workers)
        speeds[known] = np.minimum(speeds[known], self._records.latest(rows[known]))
        return speeds

    def lasting(self, workers: Sequence[str]) -> Floats:
        """Return the running medians of speeds, shape (workers,), which no single round changes.

        For what costs more than a round: another machine, or moving a piece. A worker that took
        part in fewer than 50 rounds counts as the average of the others.
        """
        rows = self._find(workers)
        known = rows >= 0
        known[known] &= self._records.count(rows[known]) >= _LASTING
        speeds = np.ones(len(rows))
        if known.any():
            speeds[known] = np.exp(np.nan_to_num(self._records.middle(rows[known]), nan=-np.inf))
            speeds[~known] = speeds[known].mean()
        return speeds

    def with_trials(self, workers: Sequence[str], speeds: Floats, stripes: float = 40.0) -> Floats:
        """Return the speeds to plan a round by: some workers are tried that would get no work.

        A worker that is expected to be slow gets no work, so that it would never be measured again.
        Once it has taken no part in 32 rounds that it could have, it counts as at least a sixteenth
        of the median speed in one round, or as fast as one stripe needs, and again every 32 such
        rounds. Workers with a speed of zero are left alone.

        Parameters
        ----------
        workers : sequence of str
        speeds : ndarray, shape (workers,)
            Predicted speeds.
        stripes : float
            Stripes that each worker would compute in this round if all were equally fast.
        """
        rows = self._find(workers)
        able = np.flatnonzero((rows >= 0) & (speeds > 0))
        due = able[self._records.due(rows[able])]
        if not len(due):
            return speeds
        tried = speeds.copy()
        share = min(max(_TRIAL, _TRIAL_STRIPES / stripes), 1.0)
        tried[due] = np.maximum(tried[due], share * np.median(speeds[speeds > 0]))
        return tried

    def _find(self, workers: Iterable[str]) -> Ints:
        """Return the row of each worker, -1 without one."""
        get = self._rows.get
        return np.array([get(worker, -1) for worker in workers], dtype=np.intp)

    def _scale(self, rows: Ints, speeds: Floats) -> float:
        """Return the factor that puts measured speeds on the scale of the recorded ones."""
        known = (rows >= 0) & (speeds > 0)
        off = self._records.middle(rows[known]) - np.log(speeds[known])
        off = off[~np.isnan(off)]
        if not len(off):
            return len(speeds) / float(speeds.sum())
        usual = np.abs(off - np.median(off)) <= math.log1p(CHANGED)
        if not usual.any():  # as many have changed as not
            usual[:] = True
        return math.exp(off[usual].mean())


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
    {'a': 0.003, 'b': 0.049}
    """

    def __init__(self) -> None:
        #: Expected lag of each worker that has taken part, in seconds.
        self.known: dict[str, float] = {}

    def record(self, measured: Mapping[str, float]) -> None:
        """Record one round: the lag of each worker that took part, in seconds."""
        for worker, lag in self.known.items():
            last = measured.get(worker)
            self.known[worker] = (1 - _LAG_FORGETTING) * lag if last is None else (lag + last) / 2
        self.known = {**measured, **self.known}

    def keep(self, workers: Collection[str]) -> None:
        """Forget all workers but these, so that the lags of those that have left do not pile up."""
        self.known = {worker: self.known[worker] for worker in workers if worker in self.known}


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
