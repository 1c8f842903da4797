"""Two-state Markov: a worker is in its good or its bad state, and changes now and then.

References
----------
.. [1] Yang, Pedarsani, Avestimehr, "Timely coded computing", ISIT 2019, and "Timely-throughput
   optimal coded computing over cloud networks", MobiHoc'19 (LEA: the transition matrix is
   estimated from what was seen; there the two speeds are known beforehand).
"""

from __future__ import annotations

import numpy as np

from dask_coded.prediction.predictors._predictor import PREDICTORS, carried
from dask_coded.typing import Floats

# Weight of what all workers together have shown against what one has, in rounds.
_PRIOR = 4.0


@PREDICTORS.register("markov")
def markov(history: Floats) -> Floats:
    """Expected speed one round on, given the state that a worker is in.

    A worker's states are parted half way between its lowest and its highest speed. How often it
    changes is estimated from its own rounds and, as long as these are few, from those of all.

    Parameters
    ----------
    history : ndarray, shape (workers, rounds)

    Returns
    -------
    ndarray, shape (workers,)
    """
    if history.shape[1] < 2:
        return np.array(history.mean(axis=1)) if history.shape[1] else np.full(len(history), np.nan)
    values = carried(history)
    good = values > (values.min(axis=1) + values.max(axis=1))[:, None] / 2
    seen = good.sum(axis=1)
    mean = values.mean(axis=1)
    high = np.where(seen > 0, (values * good).sum(axis=1) / np.maximum(seen, 1), mean)
    low = (values * ~good).sum(axis=1) / np.maximum(history.shape[1] - seen, 1)

    def staying(state: np.ndarray) -> Floats:
        """Probability that a worker in this state is in it one round later, shape (workers,)."""
        visits = state[:, :-1].sum(axis=1)
        stays = (state[:, :-1] & state[:, 1:]).sum(axis=1)
        pooled = (stays.sum() + 1) / (visits.sum() + 2)
        return np.asarray((stays + _PRIOR * pooled) / (visits + _PRIOR))

    probability = np.where(good[:, -1], staying(good), 1 - staying(~good))
    expected = probability * high + (1 - probability) * low
    return np.asarray(np.where(np.isnan(values[:, -1]), np.nan, expected))
