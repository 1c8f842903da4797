"""Speed predictors: from what each worker showed in earlier rounds to the round that comes.

A predictor maps histories ``(workers, rounds)``, oldest first and NaN where a worker took no part,
to the speeds ``(workers,)`` to expect next; NaN for a worker without any history.
"""

from __future__ import annotations

from collections.abc import Callable

from dask_coded.planning.layout import Floats
from dask_coded.planning.predictors._autoregressive import autoregressive
from dask_coded.planning.predictors._basic import exponentially_weighted, last_value, uniform
from dask_coded.planning.predictors._lstm import lstm
from dask_coded.planning.predictors._markov import markov

Predictor = Callable[[Floats], Floats]

#: Predictors by name. ``coded.predictor`` in the configuration selects one.
PREDICTORS: dict[str, Predictor] = {
    "ar": autoregressive,
    "exponential": exponentially_weighted,
    "last": last_value,
    "lstm": lstm,
    "markov": markov,
    "uniform": uniform,
}

__all__ = ["PREDICTORS", "Predictor"]
