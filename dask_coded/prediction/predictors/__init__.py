"""Speed predictors: functions from the speeds of earlier rounds to those of the next one.

A predictor is registered by ``@PREDICTORS.register(name)``. It maps histories
``(workers, rounds)``, oldest round first and NaN where a worker took no part, to the expected
speeds ``(workers,)``, NaN for a worker without any history, unless the predictor needs none.
"""

from __future__ import annotations

# Importing a module registers its predictors.
from dask_coded.prediction.predictors import (  # noqa: F401
    _autoregressive,
    _basic,
    _lstm,
    _markov,
)
from dask_coded.prediction.predictors._predictor import PREDICTORS, Predictor

__all__ = ["PREDICTORS", "Predictor"]
