"""One worker's copy of what is trained: parameters, the optimizer's state, the compressor's.

All replicas are given the same sums in the same order, and are the same to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_coded.compression import Compression, Compressor
from dask_coded.training.batches import Batches
from dask_coded.training.optimizers import Optimizer, Vector

#: ``gradient(parameters, samples, targets)``: a flat array, or the loss and a flat array.
Gradient = Callable[[Vector, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Model:
    """What every replica is made from.

    Parameters
    ----------
    gradient : callable
        ``gradient(parameters, samples, targets)`` is the sum of the gradients of some samples, a
        flat array, or the sum of their losses and that.
    parameters : ndarray, shape (n,)
        To begin with.
    optimizer : Optimizer
    samples : int
        In all of the data.
    batch_size : int or None
    seed : int
    compression : Compression or None
    layers : sequence of tuple of int
        Shapes of the layers that lie one after the other in the parameters.
    width : int
        How many steps may be under way at a time.
    state : dict or None
        A replica's state to go on from.
    """

    gradient: Gradient
    parameters: Vector
    optimizer: Optimizer
    samples: int
    batch_size: int | None
    seed: int
    compression: Compression | None
    layers: Sequence[tuple[int, ...]]
    width: int = 1
    state: dict[str, Any] | None = None

    def replica(self, parts: int, segments: int) -> Replica:
        """A replica for data in so many parts and gradients in so many segments."""
        return Replica(self, parts, segments)


class Replica:
    """One worker's copy.

    Parameters
    ----------
    model : Model
    parts : int
        That the data are cut into.
    segments : int
        That gradients are cut into.

    Attributes
    ----------
    version : int
        How many updates have been applied.
    losses : list of float
        Mean loss of the samples of each step; NaN where the gradient gives none.
    """

    def __init__(self, model: Model, parts: int, segments: int) -> None:
        self._model = model
        self._parameters = model.parameters.copy()
        self._optimizer_state = model.optimizer.start(self._parameters)
        self._batches = Batches(model.samples, parts, model.batch_size, model.seed)
        self._compressor = (
            Compressor()
            if model.compression is None
            else model.compression.compressor(model.layers, segments, model.width)
        )
        self.version = 0
        self.losses: list[float] = []
        if model.state is not None:
            self.restore(model.state)

    def part(self, part: int) -> tuple[int, int]:
        """First row of a part of the data, and the end."""
        return self._batches.part(part)

    def gradient(self, step: int, part: int, samples: Any, targets: Any) -> tuple[Vector, float]:
        """What a part contributes to a step: a new array, and the loss.

        Raises
        ------
        TypeError, ValueError
            If the gradient is no array as it should be.
        FloatingPointError
            If it is not finite.
        """
        rows = self._batches.rows(part, step)
        if not isinstance(rows, slice):  # all rows of a sparse matrix would be copied
            samples, targets = samples[rows], targets[rows]
        if not samples.shape[0]:
            return np.zeros_like(self._parameters), 0.0
        parameters = self._parameters.view()
        # Who changed them would train another model than the other workers.
        parameters.flags.writeable = False
        result = self._model.gradient(parameters, samples, targets)
        if isinstance(result, tuple) and len(result) == 2:
            loss, vector = result
            if np.ndim(loss):
                raise TypeError(
                    f"The loss must be a number, the sum over the samples; its shape is "
                    f"{np.shape(loss)}."
                )
            return self._checked(vector, step), float(loss)
        return self._checked(result, step), float("nan")

    def _checked(self, result: Any, step: int) -> Vector:
        wanted = self._parameters
        if result is None or isinstance(result, tuple):
            what = "None" if result is None else f"a tuple of {len(result)}"
            raise TypeError(
                f"The gradient must be a flat array, or a pair of the loss and that; it is {what}."
            )
        vector = np.asarray(result)
        if vector.dtype.kind != "f":
            raise TypeError(
                f"The gradient must hold real floating-point numbers, its dtype is {vector.dtype}."
            )
        if vector.shape != wanted.shape:
            raise ValueError(
                f"The gradient must be as long as the parameters, a flat array of "
                f"{wanted.size} elements; its shape is {vector.shape}."
            )
        if not np.isfinite(vector).all():
            raise FloatingPointError(
                f"The gradient of step {step} holds NaN or infinity: lower the learning rate, "
                f"or mend the gradient or the data."
            )
        return vector.astype(wanted.dtype)

    def compress(self, step: int, segment: int, vector: Vector) -> Vector:
        """What of this worker's gradient is added up."""
        return self._compressor.compress(step, segment, vector)

    def apply(self, totals: Sequence[Vector], loss: float) -> None:
        """Apply the next update.

        Parameters
        ----------
        totals : sequence of ndarray
            The sum of all gradients, by segment, as compressed.
        loss : float
            Sum over the samples.
        """
        step = self.version
        segments = [self._compressor.expand(step, i, total) for i, total in enumerate(totals)]
        gradient = segments[0] if len(segments) == 1 else np.concatenate(segments)
        samples = max(self._batches.count(step), 1)
        mean = (gradient / samples).astype(self._parameters.dtype, copy=False)
        self._model.optimizer.update(self._parameters, mean, self._optimizer_state, step)
        self.losses.append(loss / samples)
        self.version += 1

    def state(self) -> dict[str, Any]:
        """What a replica that joins or resumes needs; arrays are this replica's own."""
        return {
            "version": self.version,
            "parameters": self._parameters,
            "optimizer": self._optimizer_state,
            "compressor": self._compressor.state(),
            "losses": self.losses,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the state of another replica."""
        self.version = state["version"]
        self._parameters = np.array(state["parameters"])
        self._optimizer_state = {name: np.array(a) for name, a in state["optimizer"].items()}
        self._compressor.restore(state["compressor"])
        self.losses = list(state["losses"])

    def digest(self) -> str:
        """Of the parameters, bit by bit."""
        return hashlib.blake2b(self._parameters.tobytes(), digest_size=8).hexdigest()
