"""When to close a training step: as soon as no move is worth its messages."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf

import numpy as np

from dask_coded.rounds.state import RoundState
from dask_coded.rounds.workers import Estimate
from dask_coded.squeeze.units import UnitLayout


def best_gain(
    units: UnitLayout,
    owed: Sequence[Set[int]],
    now: Estimate,
    state: RoundState,
    doubt: float,
) -> float:
    """Return the seconds, beyond a lag, by which moving one unit could end its worker earlier.

    Parameters
    ----------
    units : UnitLayout
    owed : sequence of set of int
        The units that each worker has yet to compute.
    now : Estimate
    state : RoundState
    doubt : float
        Relative error of the estimate: the worker may be slower by it, and the others faster.

    Returns
    -------
    float
        Zero or less if no move pays. A move ends when the other worker is done with its own units,
        or has the message, and has computed the unit.
    """
    lags, lag = state.workers.lags, state.workers.lag
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        unit_seconds = np.where(now.speed > 0, 1 / now.speed, inf)
        late, soon = now.eta * (1 + doubt), now.eta * max(1 - doubt, 0.0)
        ends = np.maximum(soon, lags) + unit_seconds + lag
    ends[~state.present] = inf
    best = -inf
    for holder, own in enumerate(owed):
        others = units.storing(own) - {holder}
        if others:
            best = max(best, float(late[holder]) - min(float(ends[other]) for other in others))
    return best
