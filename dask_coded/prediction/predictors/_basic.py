"""Predictors without a model: uniform speeds, the last speed, a running mean."""

from __future__ import annotations

import numpy as np

from dask_coded.prediction.predictors._predictor import PREDICTORS, carried, over_window
from dask_coded.prediction.records import Records
from dask_coded.typing import Floats, Ints


@PREDICTORS.register("uniform")
def uniform(records: Records, rows: Ints) -> Floats:
    """Predict the same speed for all workers, whatever was measured."""
    return np.ones(len(rows))


@over_window("last")
def last_value(history: Floats) -> Floats:
    """Predict the last measured speed.

    Examples
    --------
    >>> last_value(np.array([[1.0, 3.0], [2.0, np.nan]])).tolist()
    [3.0, 2.0]
    """
    if not history.shape[1]:
        return np.full(history.shape[0], np.nan)
    return np.array(carried(history)[:, -1])


@over_window("exponential")
def exponentially_weighted(history: Floats, alpha: float = 0.5) -> Floats:
    """Predict the exponentially weighted mean: ``alpha`` is the weight of the last speed.

    Examples
    --------
    >>> exponentially_weighted(np.array([[1.0, 3.0]])).tolist()
    [2.0]
    """
    values = carried(history)
    estimate = np.array(values[:, 0]) if values.shape[1] else np.full(len(values), np.nan)
    for column in values.T[1:]:
        estimate += alpha * (column - estimate)
    return estimate
