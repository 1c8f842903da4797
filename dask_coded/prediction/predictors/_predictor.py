"""The interface of predictors, and the code that they share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dask_coded.prediction.records import Records
from dask_coded.registry import Registry
from dask_coded.typing import Floats, Ints

#: From the records of all workers and the rows of some, to the speeds expected of these.
Predictor = Callable[[Records, Ints], Floats]

#: From the last rounds of some workers, shape (workers, rounds), to the speeds expected of them.
Windowed = Callable[[Floats], Floats]

#: Predictors by name. ``coded.predictor`` in the configuration selects one.
PREDICTORS: Registry[Predictor] = Registry("predictor")


def over_window(name: str) -> Callable[[Windowed], Windowed]:
    """Register a function of the last rounds as a predictor.

    The function gets the last speeds, shape (workers, rounds), oldest first and NaN where a worker
    took no part. It returns the expected speeds, shape (workers,), and NaN for a worker without any
    speed in these rounds. For a worker that has taken no part lately, its estimate then falls back
    as `Records.settled` says.
    """

    def register(function: Windowed) -> Windowed:
        @PREDICTORS.register(name)
        def predict(records: Records, rows: Ints) -> Floats:
            return records.settled(function(records.window(rows)), rows)

        return function

    return register


def carried(history: Floats) -> Floats:
    """Fill gaps with the previous speed.

    Rounds before a worker's first one get its first speed. A worker without any round stays NaN.
    """
    missing = np.isnan(history)
    if not missing.any():
        return history
    rounds = np.arange(history.shape[1])
    source = np.maximum.accumulate(np.where(missing, 0, rounds), axis=1)
    source = np.maximum(source, np.argmin(missing, axis=1)[:, None])
    return np.asarray(np.take_along_axis(history, source, axis=1))
