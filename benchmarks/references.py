"""Models of speeds that know more than a new cluster can, for comparison with the predictors.

They know a machine's own past, or other machines of its trace. Each maps the speeds of a machine,
and the number of its samples before the test, to predictions of the samples from there on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial

import click
import numpy as np

from benchmarks.traces import PARTS, before_test, series

#: Orders of the ARIMA models, and how many rounds before the test they are fitted to.
ARIMA = ((1, 0, 0), (2, 0, 0), (1, 1, 1))
FITTED_TO = 1000

#: Rounds over which the recent mean is taken.
RECENT_ROUNDS = 64

OWN = "AR(8), own past"
TRACE = "AR(8), same trace"
RECENT = "AR(8), recent mean"
PUBLISHED = "LSTM as published"

Model = Callable[[np.ndarray, int], np.ndarray]


def coefficients(samples: list[np.ndarray], order: int = 8, ridge: float = 0.01) -> np.ndarray:
    """Return AR coefficients of series with mean 0, by ridge regression."""
    gram, product = np.zeros((order, order)), np.zeros(order)
    for values in samples:
        inputs = np.lib.stride_tricks.sliding_window_view(values, order)[:-1]
        gram += inputs.T @ inputs
        product += inputs.T @ values[order:]
    penalty = ridge * np.trace(gram) / order + 1e-12
    return np.linalg.solve(gram + penalty * np.eye(order), product)


def autoregression(
    values: np.ndarray, cut: int, weights: np.ndarray | None = None, recent: bool = False
) -> np.ndarray:
    """Predict the samples from ``cut`` on by an AR(8), by default fitted to the samples before.

    It predicts deviations from the mean of the samples before or, if ``recent``, from the mean of
    the last rounds before each prediction.
    """
    mean = values[:cut].mean()
    if weights is None:
        weights = coefficients([values[:cut] - mean])
    if recent:
        mean = np.array(
            [values[max(0, t - RECENT_ROUNDS) : t].mean() for t in range(cut, len(values))]
        )
    inputs = np.lib.stride_tricks.sliding_window_view(values, len(weights))
    return mean + (inputs[cut - len(weights) : -1] - np.reshape(mean, (-1, 1))) @ weights


def arima(values: np.ndarray, cut: int, order: tuple[int, int, int]) -> np.ndarray:
    """Predict the samples from ``cut`` on by a model that is fitted once, to those before."""
    try:
        from statsmodels.tsa.arima.model import ARIMA as Model
    except ModuleNotFoundError:
        raise click.ClickException(
            "ARIMA needs statsmodels: pip install 'dask-coded[bench]'."
        ) from None
    start = max(0, cut - FITTED_TO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about starting values and slow convergence
        fitted = Model(values[start:cut], order=order).fit()
        return np.asarray(fitted.apply(values[start:]).fittedvalues[cut - start :])


class PublishedLSTM:
    """The network of S2C2 as published: one LSTM layer of 4 units, one step back, a dense layer.

    With one step and no state it is a function of the last speed alone: the recurrent weights and
    the forget gate do nothing ::

        next = w . (s(o) tanh(s(i) tanh(g))) + b,    i, g, o = gains * last + biases

    Training is that of the authors' script: squared error, Adam at 0.001, 5 epochs, one sample at a
    time, no scaling, and Keras 2.0's hard sigmoid ``s(x) = min(max(0.2 x + 0.5, 0), 1)``. Their
    speeds are not public, so it is trained on ours.

    Parameters
    ----------
    last, following : ndarray, shape (samples,)
        Speeds, and the speeds one round later.
    units, epochs : int
    rate : float
    seed : int

    References
    ----------
    .. [1] Narra et al., "Slack squeeze coded computing for adaptive straggler mitigation", SC'19,
       and its artifact, github.com/krishnagirinarra/S2C2.
    """

    def __init__(
        self,
        last: np.ndarray,
        following: np.ndarray,
        units: int = 4,
        epochs: int = 5,
        rate: float = 1e-3,
        seed: int = 7,
    ) -> None:
        rng = np.random.default_rng(seed)
        self._units = units
        # Rows: gains and biases of the gates i, g and o, read-out. Keras draws by Glorot.
        edge, out = np.sqrt(6 / (1 + 4 * units)), np.sqrt(6 / (1 + units))
        self._weights = np.zeros((7, units))
        self._weights[:3] = rng.uniform(-edge, edge, (3, units))
        self._weights[6] = rng.uniform(-out, out, units)
        self._bias = 0.0
        mean, square, steps = np.zeros(7 * units + 1), np.zeros(7 * units + 1), 0
        for _ in range(epochs):
            for sample in rng.permutation(len(last)).tolist():
                slope = self._slope(float(last[sample]), float(following[sample]))
                steps += 1
                mean += 0.1 * (slope - mean)
                square += 0.001 * (slope * slope - square)
                size = rate * np.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
                change = size * mean / (np.sqrt(square) + 1e-8)
                self._weights -= change[:-1].reshape(7, units)
                self._bias -= change[-1]

    def __call__(self, last: np.ndarray) -> np.ndarray:
        """Predict the speeds one round later, shape (samples,)."""
        gates = np.multiply.outer(last, self._weights[:3]) + self._weights[3:6]
        i, o = (np.clip(0.2 * gates[:, n] + 0.5, 0, 1) for n in (0, 2))
        hidden = o * np.tanh(i * np.tanh(gates[:, 1]))
        return np.maximum(hidden @ self._weights[6] + self._bias, 0.0)

    def _slope(self, last: float, following: float) -> np.ndarray:
        """Return the gradient of one sample's squared error: weights row by row, then the bias."""
        gates = self._weights[:3] * last + self._weights[3:6]
        i, o = np.clip(0.2 * gates[0] + 0.5, 0, 1), np.clip(0.2 * gates[2] + 0.5, 0, 1)
        g = np.tanh(gates[1])
        cell = np.tanh(i * g)
        wrong = 2 * (float(o * cell @ self._weights[6]) + self._bias - following)
        down = wrong * self._weights[6] * o * (1 - cell * cell)
        into = np.empty((3, self._units))
        into[0] = down * g * 0.2 * (np.abs(gates[0]) < 2.5)
        into[1] = down * i * (1 - g * g)
        into[2] = wrong * self._weights[6] * cell * 0.2 * (np.abs(gates[2]) < 2.5)
        return np.concatenate([(into * last).ravel(), into.ravel(), wrong * o * cell, [wrong]])


@cache
def published_lstm(names: tuple[str, ...], most: int = 2000) -> PublishedLSTM:
    """Train the published network on the training part of traces, evenly over the traces."""
    part, last, following = PARTS["training"], [], []
    for name in names:
        known = [
            values[: part.targets(len(values)).stop]
            for number, values in enumerate(series(name))
            if part.has(number)
        ]
        before = np.concatenate([values[:-1] for values in known])
        after = np.concatenate([values[1:] for values in known])
        chosen = np.linspace(0, len(before), min(most, len(before)), endpoint=False)
        last.append(before[chosen.astype(np.intp)])
        following.append(after[chosen.astype(np.intp)])
    return PublishedLSTM(np.concatenate(last), np.concatenate(following))


def references(machines: Sequence[np.ndarray], names: tuple[str, ...]) -> dict[str, Model]:
    """Return the models of a trace's machines; the published network is trained on ``names``."""
    training = [v[: before_test(v)] for i, v in enumerate(machines) if PARTS["training"].has(i)]
    pooled = coefficients([values - 1 for values in training])
    found: dict[str, Model] = {
        "mean": lambda values, cut: np.full(len(values) - cut, values[:cut].mean()),
        OWN: autoregression,
        TRACE: partial(autoregression, weights=pooled),
        RECENT: partial(autoregression, weights=pooled, recent=True),
    }
    network = published_lstm(names)
    found[PUBLISHED] = lambda values, cut: network(values[cut - 1 : -1])
    for order in ARIMA:
        found["ARIMA({},{},{})".format(*order)] = partial(arima, order=order)
    return found
