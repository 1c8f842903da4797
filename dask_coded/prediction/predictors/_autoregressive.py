"""AR(p): the next speed is a linear function of the last p, fitted by ridge in each round."""

from __future__ import annotations

import numpy as np

from dask_coded.prediction.predictors._basic import exponentially_weighted
from dask_coded.prediction.predictors._predictor import carried, over_window
from dask_coded.typing import Floats

# Penalty on the coefficients, as a share of the mean variance of the inputs.
_RIDGE = 0.01


@over_window("ar")
def autoregressive(history: Floats, order: int = 8) -> Floats:
    """Predict by AR(order) around each worker's own mean, with one set of coefficients for all.

    The workers of a cluster resemble each other more in how their speed varies than in the speed
    itself, so their samples are pooled. Ten workers give enough samples within a few rounds. Until
    then the exponentially weighted mean is used.

    Parameters
    ----------
    history : ndarray, shape (workers, rounds)
    order : int

    Returns
    -------
    ndarray, shape (workers,)
    """
    rounds = history.shape[1]
    samples = ~np.isnan(history[:, order:])
    if rounds < order + 2 or samples.sum() < 4 * order:
        return exponentially_weighted(history)
    values = carried(history)
    level = np.maximum(values.mean(axis=1, keepdims=True), 1e-12)
    with np.errstate(invalid="ignore"):
        relative = values / level - 1
    windows = np.lib.stride_tricks.sliding_window_view(relative, order, axis=1)
    inputs, targets = windows[:, :-1][samples], relative[:, order:][samples]
    gram = inputs.T @ inputs
    penalty = _RIDGE * np.trace(gram) / order + 1e-12
    weights = np.linalg.solve(gram + penalty * np.eye(order), inputs.T @ targets)
    # The prediction may be negative, but a speed cannot be.
    return np.asarray(level[:, 0] * np.maximum(1 + windows[:, -1] @ weights, 0.0))
