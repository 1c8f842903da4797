"""The LSTM predictor, trained on traces of real machines and shipped as a small file of weights.

The input of the network is the last 64 speeds of one worker, as deviations from their mean in units
of their own spread. The output is the next deviation in the same unit::

    z = speeds / mean - 1
    u = z / spread                                 spread: root mean square of z
    h, c = 0, 0
    for x in (u in 16 runs of 4 rounds):           one cell, shared by all workers
        i, f, g, o = W [x, l] + U h + b            gates: input, forget, cell, output
        c = sigmoid(f) c + sigmoid(i) tanh(g)
        h = sigmoid(o) tanh(c)
    next = mean * (1 + spread * (w . u + v . h))

``l``, the logarithm of the spread, distinguishes restless workers from quiet ones. The linear term
``w . u`` is the prediction of an autoregression of order 64. The cell, which reads four rounds per
step, corrects it, for example after a spike or after a change of level. A worker whose speed never
varies is predicted to keep it. Rounds before a worker's first one count as its mean.

The network of [1]_ looks one round back and keeps no state, which makes it a fixed function of the
last speed. ``benchmarks/lstm.py`` trains the network, the file of weights also holds the training
record, and ``docs/prediction.md`` reports how well it predicts.

References
----------
.. [1] Narra et al., "Slack squeeze coded computing for adaptive straggler mitigation", SC'19,
   section 6 (speed prediction).
.. [2] Hochreiter, Schmidhuber, "Long short-term memory", Neural Computation 9 (1997).
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.prediction.predictors._predictor import carried, over_window
from dask_coded.typing import Floats

#: Names of the arrays in the file of weights, after PyTorch's.
NAMES = ("weight_ih", "weight_hh", "bias", "head", "line")

# A spread of less than this, relative to the mean, is rounding.
_STILL = 1e-9


@cache
def shipped() -> dict[str, Floats]:
    """Return the weights that come with the package, by name."""
    with (files(__package__) / "lstm.npz").open("rb") as file, np.load(file) as archive:
        return {name: archive[name] for name in NAMES}


def record() -> dict[str, Any]:
    """Return how the shipped weights were trained: data, split, seed, losses, versions."""
    with (files(__package__) / "lstm.npz").open("rb") as file, np.load(file) as archive:
        return dict(json.loads(str(archive["record"])))


@over_window("lstm")
def lstm(history: Floats) -> Floats:
    """Predict with the shipped weights.

    Parameters
    ----------
    history : ndarray, shape (workers, rounds)

    Returns
    -------
    ndarray, shape (workers,)
    """
    if not history.shape[1]:
        return np.full(history.shape[0], np.nan)
    weights = shipped()
    mean, spread, u = normalised(history, len(weights["line"]))
    # Single precision takes a fifth of the time, and no speed is known to seven digits.
    change = forward(u.astype(np.float32), spread.astype(np.float32), weights)
    return np.asarray(mean * np.maximum(1 + spread * change, 0.0))


def normalised(history: Floats, window: int) -> tuple[Floats, Floats, Floats]:
    """Return the inputs of the network for a history.

    Parameters
    ----------
    history : ndarray, shape (workers, rounds)
        At least one round.
    window : int
        Rounds that the network looks back.

    Returns
    -------
    mean, spread : ndarray, shape (workers,)
        Of the last ``window`` rounds; the spread is relative to the mean.
    u : ndarray, shape (workers, window)
        Deviations from the mean in units of the spread; 0 before a worker's first round.
    """
    values = carried(history)[:, -window:]
    missing = np.isnan(history)
    known = np.ones(values.shape)
    if missing[:, 0].any():
        known -= np.logical_and.accumulate(missing, axis=1)[:, -window:]
    count = np.maximum(known.sum(axis=1), 1)
    # A worker without any round is NaN throughout, and stays so.
    mean = np.maximum((values * known).sum(axis=1) / count, 1e-12)
    z = (values / mean[:, None] - 1) * known
    spread = np.maximum(np.sqrt((z * z).sum(axis=1) / count), _STILL)
    lacking = window - values.shape[1]
    return mean, spread, np.pad(z / spread[:, None], ((0, 0), (lacking, 0)))


def forward(
    u: npt.NDArray[np.floating[Any]],
    spread: npt.NDArray[np.floating[Any]],
    weights: dict[str, Floats],
) -> npt.NDArray[np.floating[Any]]:
    """Compute the output of the network, in the precision of ``u``.

    Parameters
    ----------
    u : ndarray, shape (workers, window)
        Deviations from the mean in units of the spread.
    spread : ndarray, shape (workers,)
    weights : dict
        Arrays by the names in ``NAMES``: shapes (4 h, width + 1), (4 h, h), (4 h,), (h,),
        (window,), where ``width`` is the number of rounds that the cell takes per step.

    Returns
    -------
    ndarray, shape (workers,)
        The next deviation, in the same unit.
    """
    inputs, recurrent, bias, head, line = (weights[name].astype(u.dtype) for name in NAMES)
    size, width = recurrent.shape[1], inputs.shape[1] - 1
    # Workers along the last axis: each gate is then one contiguous block.
    steps = np.ascontiguousarray(u.T).reshape(-1, width, len(u))
    # One exp computes all gates, at half the cost of tanh: sigmoid(x) = 1 / (1 + exp(-x)), and
    # tanh(x) = 2 sigmoid(2 x) - 1. The factors of x go into the weights.
    factor = np.full((4 * size, 1), -1, u.dtype)
    factor[2 * size : 3 * size] = -2
    inputs, recurrent = factor * inputs, factor * recurrent
    constant = np.outer(inputs[:, width], loudness(spread)) + factor * bias[:, None]
    hidden, cell = np.zeros((2, size, len(u)), u.dtype)
    for step in steps:
        gates = recurrent @ hidden
        gates += inputs[:, :width] @ step
        gates += constant
        with np.errstate(over="ignore"):  # 1 / infinity is zero, as it should be
            np.exp(gates, out=gates)
        gates += 1
        np.reciprocal(gates, out=gates)
        cell *= gates[size : 2 * size]
        cell += gates[:size] * (2 * gates[2 * size : 3 * size] - 1)
        hidden = gates[3 * size :] * np.tanh(cell)
    return np.asarray(head @ hidden + u @ line)


def loudness(spread: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
    """Return the spread as an input of the cell: its logarithm, scaled to about -1 .. 1."""
    return np.asarray((np.log(spread + 1e-3) + 3) / 1.5)
