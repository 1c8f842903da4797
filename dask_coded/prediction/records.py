"""What is remembered of each worker's speed: its last rounds, and running means with their errors.

A worker with speeds ``x`` in the rounds in which it took part has five running means ``m``. Each
predicts the next speed, and the mean square ``v`` of its errors says how well::

    e = x - m              v += (e ** 2 - v) / min(t, 64)              m += gain * e

``t`` counts the worker's rounds. The means differ in how fast they forget:

==========  =====================  ============================================================
mean        gain                   good for
==========  =====================  ============================================================
level       1 / min(t, 64)         a speed that varies without a pattern
recent      1 / min(s, 64)         a speed that has changed for good; ``s`` counts the rounds since
fast means  0.8, 0.3, 0.1          a speed that drifts, quickly or slowly
==========  =====================  ============================================================

A speed has changed if it is off the recent mean by more than 30 %, and by more than five times the
root mean square error of the best mean. The recent mean then starts again.

Besides, each worker has a running median of the logarithms of its speeds. It takes a step of a
fixed size up or down, so bursts and stalls do not move it any further than other speeds do.

Each worker has its own count of rounds: those in which it could have taken part. A round of another
array on other workers says nothing of how old its speed is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

import numpy as np

from dask_coded.typing import Bools, Floats, Ints

#: Share by which an estimate moves towards its worker's level in each round without that worker.
FORGETTING = 0.05

#: A speed that is off by this share is not noise of a steady worker, whatever its errors were.
CHANGED = 0.3
# The same in units of the root mean square error: a change is beyond the noise of its worker.
_BEYOND = 5.0
# A worker without work for so many rounds is due for a trial.
_TRIED_AFTER = 32
#: Step of running medians. A shorter one follows a lasting change too late.
STEP = 0.02
# Speeds are divided by their average if it leaves this range, so that no number overflows.
_LOW, _HIGH = 1e-3, 1e3
# Gains of the means that forget at a fixed rate.
_GAINS = np.array([[0.8], [0.3], [0.1]])
# Rounds over which the other means and all errors are averaged.
_MEMORY = 64

#: Rows of :meth:`Records.means` and :meth:`Records.errors`; the fast means follow.
LEVEL, RECENT = 0, 1
_MEANS = 2 + len(_GAINS)


class Records:
    """Speeds of workers by row, in one unit; the caller knows which row is which worker's.

    Recording a round and reading the means take a few array operations, whatever the number of
    rounds before. A worker takes about 650 bytes.

    Parameters
    ----------
    length : int
        Rounds of which every speed is remembered.

    Attributes
    ----------
    rounds : int
        Rounds recorded so far, of all workers.
    """

    def __init__(self, length: int = 64) -> None:
        self.rounds = 0
        # The rounds of each worker in turn, shape (length, rows).
        self._window: Floats = np.empty((length, 0))
        self._means: Floats = np.empty((_MEANS, 0))
        self._errors: Floats = np.empty((_MEANS, 0))
        self._middle: Floats = np.empty(0)
        # The last speed, and the lowest and the highest ever.
        self._latest: Floats = np.empty(0)
        self._range: Floats = np.empty((2, 0))
        # Rounds with the worker, and those since its speed has changed.
        self._count: Ints = np.empty(0, dtype=np.intp)
        self._since: Ints = np.empty(0, dtype=np.intp)
        # Its rounds, with those in which it could have taken part; the numbers of the last one in
        # which it did, and of its last trial, which may be the next round.
        self._rounds: Ints = np.empty(0, dtype=np.intp)
        self._last: Ints = np.empty(0, dtype=np.intp)
        self._tried: Ints = np.empty(0, dtype=np.intp)

    @classmethod
    def of(cls, speeds: Floats) -> Self:
        """Return the records of all rounds of an array (workers, rounds); NaN: took no part."""
        records = cls()
        records.reserve(len(speeds))
        for column in speeds.T:
            rows = np.flatnonzero(~np.isnan(column))
            records.record(rows, column[rows])
        return records

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self._count)

    def reserve(self, rows: int) -> None:
        """Make room for at least so many rows."""
        if rows <= self.rows:
            return
        # Room for as many more, so that workers who join one by one do not copy the table each.
        lacking = max(rows, 2 * self.rows) - self.rows
        for name, table in vars(self).items():
            if not isinstance(table, np.ndarray):
                continue
            fill = np.nan if table.dtype.kind == "f" else 0
            more = np.full((*table.shape[:-1], lacking), fill, dtype=table.dtype)
            setattr(self, name, np.concatenate([table, more], axis=-1))

    def clear(self, row: int) -> None:
        """Forget what a row holds, so that another worker can have it."""
        self._window[:, row] = self._means[:, row] = self._range[:, row] = np.nan
        self._middle[row] = np.nan
        self._count[row] = self._rounds[row] = self._last[row] = self._tried[row] = 0

    def record(self, rows: Ints, speeds: Floats, reach: Ints | None = None) -> None:
        """Record a round.

        Parameters
        ----------
        rows : ndarray of int
            The workers that took part.
        speeds : ndarray, shape (rows,)
            Their speeds.
        reach : ndarray of int, optional
            The workers that could have taken part, each once, with those that did; default: all.
        """
        reach = np.arange(self.rows) if reach is None else reach
        now = self._rounds % len(self._window)
        self._window[now[reach], reach] = np.nan
        self._window[now[rows], rows] = speeds
        self._rounds[reach] += 1
        self.rounds += 1
        count = self._count[rows]
        first = count == 0
        means = np.where(first, speeds, self._means.take(rows, axis=1))
        errors = np.where(first, 0.0, self._errors.take(rows, axis=1))
        error = speeds - means
        square = error * error
        changed = square[RECENT] > _BEYOND**2 * errors.min(axis=0, initial=np.inf)
        changed &= square[RECENT] > (CHANGED * means[RECENT]) ** 2
        since = np.where(changed | first, 1, self._since[rows] + 1)
        # The first speed is no prediction's error, so errors are one round behind.
        errors += (square - errors) / np.clip(count, 1, _MEMORY)
        share = 1 / (count + 1)
        error[LEVEL] *= np.maximum(share, 1 / _MEMORY)
        error[RECENT] /= np.minimum(since, _MEMORY)
        error[RECENT + 1 :] *= np.maximum(share, _GAINS)
        _put(self._means, rows, means + error)
        _put(self._errors, rows, errors)
        low, high = self._range.take(rows, axis=1)
        _put(self._range, rows, (np.fmin(low, speeds), np.fmax(high, speeds)))
        self._count[rows] = count + 1
        self._since[rows] = since
        self._latest[rows] = speeds
        self._last[rows] = self._rounds[rows]
        self._move_middle(rows[speeds > 0], np.log(speeds[speeds > 0]))
        if not self.rounds % len(self._window):
            self._rescale()

    def _move_middle(self, rows: Ints, logs: Floats) -> None:
        middle = self._middle[rows]
        steps = np.maximum(1 / self._count[rows], STEP) * np.sign(logs - middle)
        self._middle[rows] = np.where(np.isnan(middle), logs, middle + steps)

    def _rescale(self) -> None:
        levels = self._means[LEVEL][self._count > 0]
        if not levels.any() or _LOW < (average := float(levels.mean())) < _HIGH:
            return
        for table in (self._window, self._means, self._latest, self._range):
            table /= average
        self._errors /= average**2
        self._middle -= math.log(average)

    def middle(self, rows: Ints) -> Floats:
        """Return the running medians of the logarithms of speeds, shape (rows,); NaN: none yet."""
        return np.asarray(self._middle[rows])

    def count(self, rows: Ints) -> Ints:
        """Return the number of rounds in which each worker took part, shape (rows,)."""
        return np.asarray(self._count[rows])

    def window(self, rows: Ints) -> Floats:
        """Return the last speeds, shape (rows, rounds), oldest first; NaN: took no part.

        Workers that could have taken part in fewer rounds begin with NaN.
        """
        own, length = self._rounds[rows], len(self._window)
        back = np.arange(min(own.max(initial=0), length), 0, -1)
        found = self._window.take(rows, axis=1)
        if len(own) and (own == own[0]).all():  # as if there is one array; seven times as fast
            return np.asarray(found[(own[0] - back) % length].T)
        numbers = own - back[:, None]
        speeds = np.take_along_axis(found, numbers % length, axis=0)
        return np.asarray(np.where(numbers < 0, np.nan, speeds).T)

    def means(self, rows: Ints) -> Floats:
        """Return the running means, shape (means, rows)."""
        return np.asarray(self._means.take(rows, axis=1))

    def errors(self, rows: Ints) -> Floats:
        """Return the mean squared error of each running mean, shape (means, rows)."""
        return np.asarray(self._errors.take(rows, axis=1))

    def latest(self, rows: Ints) -> Floats:
        """Return the last speed of each worker, shape (rows,)."""
        return np.asarray(self._latest[rows])

    def idle(self, rows: Ints) -> Ints:
        """Return in how many of its rounds each worker took no part since, shape (rows,)."""
        return np.asarray(self._rounds[rows] - self._last[rows])

    def due(self, rows: Ints) -> Bools:
        """Return which workers are due for a trial in their next round, shape (rows,).

        They count as tried once a round has been recorded. Until then they stay due, because not
        every plan is used: a single product leaves one for a round that never comes.
        """
        rounds = self._rounds[rows]
        due = rounds - np.maximum(self._last[rows], self._tried[rows] - 1) >= _TRIED_AFTER
        due |= self._tried[rows] == rounds + 1
        self._tried[rows[due]] = rounds[due] + 1
        return due

    def settled(self, speeds: Floats, rows: Ints) -> Floats:
        """Return what estimates, shape (rows,), have become in the rounds without their workers.

        An estimate without new evidence falls back to the worker's level, and stays between the
        lowest and the highest speed that the worker ever had. It is not moved towards the speeds of
        other workers, which are no evidence.
        """
        idle = self.idle(rows)
        if not idle.any():
            return speeds
        level = self._means[LEVEL, rows]
        fallen = level + (1 - FORGETTING) ** idle * (speeds - level)
        # A predictor that looks back over a window knows nothing of an older round.
        fallen = np.clip(np.where(np.isnan(speeds), level, fallen), *self._range.take(rows, axis=1))
        return np.where(idle > 0, fallen, speeds)


def _put(table: Floats, rows: Ints, values: Iterable[Floats]) -> None:
    """Set columns of a table line by line, which is several times as fast as all lines at once."""
    for line, new in zip(table, values, strict=True):
        line[rows] = new
