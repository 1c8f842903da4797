r"""Optimizers: SGD, with plain or Nesterov momentum, and Adam.

The formulas are PyTorch's, so learning rates carry over. Every worker has the parameters and the
optimizer's state, and applies the same sums in the same order. Elementwise operations of IEEE
arithmetic then keep all copies identical to the last bit.

References
----------
.. [1] I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and
       momentum in deep learning", ICML 2013.
.. [2] D. P. Kingma, J. Ba, "Adam: A method for stochastic optimization", ICLR 2015,
       arXiv:1412.6980, algorithm 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_fraction, check_positive, check_whole
from dask_coded.compression import sum_dtype

Vector = npt.NDArray[np.floating[Any]]

#: Maps a step, counted from 0, to the factor of the learning rate.
Decay = Callable[[int], float]


@dataclass(frozen=True)
class StepDecay:
    """Multiply the learning rate by ``factor`` every ``every`` steps.

    Parameters
    ----------
    every : int
        Number of steps.
    factor : float

    Examples
    --------
    >>> decay = StepDecay(every=100, factor=0.5)
    >>> decay(99), decay(100), decay(200)
    (1.0, 0.5, 0.25)
    """

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_whole("every", self.every)
        check_positive("factor", self.factor)

    def __call__(self, step: int) -> float:
        return float(self.factor ** (step // self.every))


@dataclass(frozen=True)
class CosineDecay:
    """Lower the learning rate along half a cosine, optionally after a linear rise.

    Parameters
    ----------
    steps : int
        The step at which the floor is reached.
    warmup : int
        Number of steps at the start in which the rate rises in proportion to the step.
    floor : float
        Final rate, as a share of the learning rate.

    Examples
    --------
    >>> decay = CosineDecay(steps=100)
    >>> decay(0), round(decay(50), 6), round(decay(100), 6)
    (1.0, 0.5, 0.0)
    """

    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_whole("warmup", self.warmup, least=0)
        if self.warmup >= self.steps:
            raise ValueError(
                f"Argument 'warmup' must be less than 'steps', {self.warmup} is not less than "
                f"{self.steps}."
            )
        check_fraction("floor", self.floor)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        share = min((step - self.warmup) / (self.steps - self.warmup), 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class: updates parameters from a mean gradient. Instances hold no state.

    Parameters
    ----------
    learning_rate : float
    """

    learning_rate: float

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)

    @abstractmethod
    def start(self, parameters: Vector) -> dict[str, Vector]:
        """Return the state before the first step: arrays by name."""

    @abstractmethod
    def update(
        self, parameters: Vector, gradient: Vector, state: dict[str, Vector], step: int
    ) -> None:
        """Update parameters and state in place.

        Parameters
        ----------
        parameters : ndarray, shape (n,)
        gradient : ndarray, shape (n,)
            Mean over the samples of the step, of float16 parameters in float32; it is not changed.
        state : dict of ndarray
        step : int
            Counted from 0.
        """


@dataclass(frozen=True)
class SGD(Optimizer):
    r"""Stochastic gradient descent.

    With ``g`` the mean gradient (plus ``weight_decay`` times the parameters) and ``m`` the
    momentum, the velocity is :math:`v \leftarrow m v + g`, and the parameters change by ``-rate``
    times ``v``, or with Nesterov's momentum by ``-rate`` times :math:`g + m v`.

    Parameters
    ----------
    learning_rate : float
    momentum : float
        From 0 to below 1.
    nesterov : bool
    weight_decay : float
    decay : callable, optional
        ``decay(step)`` is the factor of the learning rate in a step: :class:`StepDecay`,
        :class:`CosineDecay` or any function; by default it is constant.

    Examples
    --------
    >>> import numpy as np
    >>> optimizer, x = SGD(0.1, momentum=0.9), np.array([1.0])
    >>> state = optimizer.start(x)
    >>> for step in range(2):
    ...     optimizer.update(x, 2 * x, state, step)
    >>> x.round(6)
    array([0.46])
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay: Decay | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"Argument 'momentum' must be from 0 to below 1, it is {self.momentum}."
            )
        if not isinstance(self.nesterov, bool):
            raise TypeError(f"Argument 'nesterov' must be True or False, it is {self.nesterov!r}.")
        if self.nesterov and not self.momentum:
            raise ValueError("Argument 'nesterov' needs a positive momentum: pass `momentum=0.9`.")
        check_positive("weight_decay", self.weight_decay, or_zero=True)
        check_decay(self.decay)

    def start(self, parameters: Vector) -> dict[str, Vector]:
        return {"velocity": _zeros(parameters)} if self.momentum else {}

    def update(
        self, parameters: Vector, gradient: Vector, state: dict[str, Vector], step: int
    ) -> None:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * parameters
        if self.momentum:
            velocity = state["velocity"]
            velocity *= self.momentum
            velocity += gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
        parameters -= _rate(self.learning_rate, self.decay, step) * gradient


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam: steps in units of the gradients' running root mean square.

    Parameters
    ----------
    learning_rate : float
    betas : (float, float)
        Shares of the running mean and of the running mean square that a step keeps.
    epsilon : float
        Added to the root mean square.
    weight_decay : float
        This factor times the parameters is added to the gradient.
    decay : callable, optional
        As for :class:`SGD`.

    Examples
    --------
    >>> import numpy as np
    >>> optimizer, x = Adam(0.1), np.array([1.0, -5.0])
    >>> optimizer.update(x, 2 * x, optimizer.start(x), 0)
    >>> x.round(6)
    array([ 0.9, -4.9])
    """

    learning_rate: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay: Decay | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        betas: Any = self.betas
        if np.shape(betas) != (2,) or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Argument 'betas' must be two numbers from 0 to below 1, it is {betas!r}."
            )
        check_positive("epsilon", self.epsilon)
        check_positive("weight_decay", self.weight_decay, or_zero=True)
        check_decay(self.decay)

    def start(self, parameters: Vector) -> dict[str, Vector]:
        return {"mean": _zeros(parameters), "square": _zeros(parameters)}

    def update(
        self, parameters: Vector, gradient: Vector, state: dict[str, Vector], step: int
    ) -> None:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * parameters
        (keep_mean, keep_square), mean, square = self.betas, state["mean"], state["square"]
        gradient = gradient.astype(square.dtype, copy=False)
        mean *= keep_mean
        mean += (1 - keep_mean) * gradient
        square *= keep_square
        square += (1 - keep_square) * gradient * gradient
        # Both start at zero, so each is divided by the sum of its weights so far.
        scale = math.sqrt(1 - keep_square ** (step + 1))
        rate = _rate(self.learning_rate, self.decay, step) / (1 - keep_mean ** (step + 1))
        parameters -= rate * (mean / (np.sqrt(square) / scale + self.epsilon))


def check_decay(decay: Decay | None) -> None:
    """Check that a decay can be called.

    Raises
    ------
    TypeError
        If it is neither a function nor None.
    """
    if not (decay is None or callable(decay)):
        raise TypeError(
            f"Argument 'decay' must be a function of the step, such as `CosineDecay(steps=1000)`, "
            f"it is {decay!r}."
        )


def _zeros(parameters: Vector) -> Vector:
    """Return zeros for a running sum. Squares in float16 would mostly be 0 or infinite."""
    return np.zeros_like(parameters, dtype=sum_dtype(parameters.dtype))


def _rate(learning_rate: float, decay: Decay | None, step: int) -> float:
    # A plain float: a NumPy one would turn float32 parameters into float64.
    return float(learning_rate if decay is None else learning_rate * decay(step))
