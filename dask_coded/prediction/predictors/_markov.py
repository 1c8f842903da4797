"""Two-state Markov chain: each worker is in a good or a bad state, and sometimes changes.

References
----------
.. [1] Yang, Pedarsani, Avestimehr, "Timely coded computing", ISIT 2019, and "Timely-throughput
   optimal coded computing over cloud networks", MobiHoc'19 (LEA: the transition matrix is
   estimated from observations; the papers assume that the two speeds are known).
"""

from __future__ import annotations

import numpy as np

from dask_coded.prediction.predictors._predictor import carried, over_window
from dask_coded.typing import Floats

# The estimate over all workers counts as much as this many rounds of the worker itself.
_PRIOR = 4.0


@over_window("markov")
def markov(history: Floats) -> Floats:
    """Predict the expected speed in the next round, given the state that a worker is in.

    The threshold between the two states is halfway between the worker's lowest and highest speed.
    How often it changes is estimated from its own rounds and, as long as these are few, from those
    of all workers.

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
        """Return the probability of the same state one round later, shape (workers,)."""
        visits = state[:, :-1].sum(axis=1)
        stays = (state[:, :-1] & state[:, 1:]).sum(axis=1)
        pooled = (stays.sum() + 1) / (visits.sum() + 2)
        return np.asarray((stays + _PRIOR * pooled) / (visits + _PRIOR))

    probability = np.where(good[:, -1], staying(good), 1 - staying(~good))
    expected = probability * high + (1 - probability) * low
    return np.asarray(np.where(np.isnan(values[:, -1]), np.nan, expected))
