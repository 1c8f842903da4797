"""The interface of predictors, and the code that they share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dask_coded.registry import Registry
from dask_coded.typing import Floats

Predictor = Callable[[Floats], Floats]

#: Predictors by name. ``coded.predictor`` in the configuration selects one.
PREDICTORS: Registry[Predictor] = Registry("predictor")

#: Share by which an old measurement counts less, per round in which its worker takes no part.
FORGETTING = 0.05


def carried(history: Floats) -> Floats:
    """Fill gaps with the previous speed, moved a little towards the average of 1 in each round.

    Without this move, a worker that was measured to be slow would get no work, and would therefore
    never be measured again. Rounds before a worker's first one get its first speed. A worker
    without any round stays NaN.
    """
    missing = np.isnan(history)
    if not missing.any():
        return history
    filled = history.copy()
    for now in range(1, history.shape[1]):
        before = (1 - FORGETTING) * filled[:, now - 1] + FORGETTING
        filled[:, now] = np.where(missing[:, now], before, filled[:, now])
    first = np.argmin(missing, axis=1)
    unknown = np.arange(history.shape[1]) < first[:, None]
    return np.where(unknown, np.take_along_axis(filled, first[:, None], axis=1), filled)
