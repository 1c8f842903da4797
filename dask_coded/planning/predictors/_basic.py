"""Predictors without a model: nothing is known, the last speed, a running mean."""

from __future__ import annotations

import numpy as np

from dask_coded.planning.layout import Floats

# How fast a worker that has taken no part is given the benefit of the doubt again, per round.
_FORGIVING = 0.05


def carried(history: Floats) -> Floats:
    """Fill the gaps: a missing speed is the one before, drawn a little towards the average of 1.

    Without that pull a worker once found slow would never be given work, nor be found fast. What
    lies before a worker's first round is filled with that; a worker without any round stays NaN.
    """
    missing = np.isnan(history)
    if not missing.any():
        return history
    filled = history.copy()
    for now in range(1, history.shape[1]):
        before = (1 - _FORGIVING) * filled[:, now - 1] + _FORGIVING
        filled[:, now] = np.where(missing[:, now], before, filled[:, now])
    first = np.argmin(missing, axis=1)
    unknown = np.arange(history.shape[1]) < first[:, None]
    return np.where(unknown, np.take_along_axis(filled, first[:, None], axis=1), filled)


def uniform(history: Floats) -> Floats:
    """Nothing is known: everybody is as fast as everybody else."""
    return np.ones(history.shape[0])


def last_value(history: Floats) -> Floats:
    """The last speed that was measured.

    Examples
    --------
    >>> last_value(np.array([[1.0, 3.0], [2.0, np.nan]])).tolist()
    [3.0, 1.95]
    """
    if not history.shape[1]:
        return np.full(history.shape[0], np.nan)
    return np.array(carried(history)[:, -1])


def exponentially_weighted(history: Floats, alpha: float = 0.5) -> Floats:
    """Exponentially weighted mean: ``alpha`` times the last speed and the rest the mean before.

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
