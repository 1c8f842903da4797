"""The default: running means of different memory, weighted by each worker's own recent errors.

A long mean is best for a worker whose speed varies without a pattern, a short one for a worker
whose speed drifts or has just changed. Which one a worker needs shows in its own errors. The
prediction is the mean of all running means of `dask_coded.prediction.records`, with weights ::

    w = (c v) ** -16           v: mean squared error, c: 1.1, but 1 for the recent mean

A mean whose root mean square error is 5 % above that of the best one thus counts a fifth as much.
The factor ``c`` decides ties. It keeps out fast means that chance has made look good, and lets the
recent mean win as long as a worker's speed has never jumped and come back. So the prediction
follows the first jump almost at once.

The prediction lies between the worker's lowest and highest speed, because the means do.
`benchmarks.prediction` measures how well it predicts, `benchmarks.constants` how much its constants
matter, on traces that they were not chosen on.
"""

from __future__ import annotations

import numpy as np

from dask_coded.prediction.predictors._predictor import PREDICTORS
from dask_coded.prediction.records import RECENT, Records
from dask_coded.typing import Floats, Ints

_HANDICAP = 1.1
# Weights are the errors to the power of minus two to this.
_DOUBLINGS = 4
# Errors below this share of the speed are rounding.
_STILL = 1e-12


@PREDICTORS.register("adaptive")
def adaptive(records: Records, rows: Ints) -> Floats:
    """Predict the mean of running means, each weighted by how well it has predicted so far.

    Parameters
    ----------
    records : Records
    rows : ndarray of int, shape (workers,)

    Returns
    -------
    ndarray, shape (workers,)
    """
    means = records.means(rows)
    errors = np.maximum(records.errors(rows), (_STILL * means) ** 2 + 1e-300)
    errors[RECENT] /= _HANDICAP
    weights = errors.min(axis=0) / errors
    for _ in range(_DOUBLINGS):
        weights *= weights
    return records.settled((weights * means).sum(axis=0) / weights.sum(axis=0), rows)
