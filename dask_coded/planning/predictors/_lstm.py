"""The LSTM: trained on traces of real machines, shipped as a small file of weights.

The network sees the last speeds of one worker, each divided by their mean, and gives the next one
in the same unit::

    h, c = 0, 0
    for z in (s[-steps:] / mean - 1):             one cell, shared by all workers
        i, f, g, o = W z + U h + b                 gates: input, forget, cell, output
        c = sigmoid(f) c + sigmoid(i) tanh(g)
        h = sigmoid(o) tanh(c)
    next = mean * (1 + v . h + w . z[-steps:] + d)

The straight line ``w . z`` lets it fall back on what an autoregression would say. The authors'
network looks one step back and keeps no state, which makes it a fixed function of the last speed.
Training is in ``benchmarks/lstm.py``; the record of it is in the file beside the weights.

References
----------
.. [1] Narra et al., "Slack squeeze coded computing for adaptive straggler mitigation", SC'19,
   section 6 (speed prediction).
.. [2] Hochreiter, Schmidhuber, "Long short-term memory", Neural Computation 9 (1997).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np

from dask_coded.planning.layout import Floats
from dask_coded.planning.predictors._basic import carried

#: Names of the arrays in the file of weights, after PyTorch's.
NAMES = ("weight_ih", "weight_hh", "bias", "head", "line", "offset")


@cache
def shipped() -> dict[str, Floats]:
    """The weights that come with the package, by name."""
    with (files(__package__) / "lstm.npz").open("rb") as file, np.load(file) as archive:
        return {name: archive[name] for name in NAMES}


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
    steps = len(weights["line"])
    values = carried(history)[:, -steps:]
    if (lacking := steps - values.shape[1]) > 0:
        values = np.pad(values, ((0, 0), (lacking, 0)), mode="edge")
    mean = np.maximum(values.mean(axis=1), 1e-12)
    relative = values / mean[:, None] - 1
    return np.asarray(mean * np.maximum(1 + forward(relative, weights), 0.0))


def forward(z: Floats, weights: dict[str, Floats]) -> Floats:
    """The network itself.

    Parameters
    ----------
    z : ndarray, shape (workers, steps)
        Speeds over their mean, less 1.
    weights : dict
        Arrays by the names in ``NAMES``: shapes (4 h, 1), (4 h, h), (4 h,), (h,), (steps,), ().

    Returns
    -------
    ndarray, shape (workers,)
        The next speed over the mean, less 1.
    """
    size = weights["weight_hh"].shape[1]
    # Workers along the last axis: each gate is then one contiguous block.
    hidden, cell = np.zeros((2, size, len(z)))
    inputs, bias = weights["weight_ih"], weights["bias"][:, None]
    for step in z.T:
        gates = weights["weight_hh"] @ hidden + (inputs * step + bias)
        new = np.tanh(gates[2 * size : 3 * size])
        gates = 0.5 + 0.5 * np.tanh(0.5 * gates)  # the sigmoid, without overflow
        cell = gates[size : 2 * size] * cell + gates[:size] * new
        hidden = gates[3 * size :] * np.tanh(cell)
    return np.asarray(weights["head"] @ hidden + z @ weights["line"] + weights["offset"])
