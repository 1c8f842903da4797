"""Speed predictors: functions from the speeds of earlier rounds to those of the next one.

A predictor is registered by ``@PREDICTORS.register(name)``. It maps the records of all workers, and
the rows of some of them, to the speeds expected of these. Most need only the last rounds: these are
functions of an array ``(workers, rounds)``, registered by ``@over_window(name)``.
"""

from __future__ import annotations

# Importing a module registers its predictors.
from dask_coded.prediction.predictors import (  # noqa: F401
    _adaptive,
    _autoregressive,
    _basic,
    _lstm,
    _markov,
)
from dask_coded.prediction.predictors._predictor import PREDICTORS, Predictor

__all__ = ["PREDICTORS", "Predictor"]
