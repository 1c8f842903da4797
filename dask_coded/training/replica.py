"""One worker's copy of the model: parameters, optimizer state and compressor state.

All replicas receive the same sums in the same order, so they are identical to the last bit. If the
parts of the data are dealt out as units, a replica also has the grid on which their gradients are
summed, see :mod:`dask_coded.aggregation.grid`.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_coded.aggregation import UnitSum
from dask_coded.aggregation.grid import (
    NOT_FINITE,
    Exponents,
    Grid,
    GridBlocks,
    Integers,
    PeakHistory,
    peaks_of,
)
from dask_coded.arguments import check_unmasked, unwrapped
from dask_coded.compression import Compression, Compressor, sum_dtype
from dask_coded.training.batches import Batches
from dask_coded.training.optimizers import Optimizer, Vector
from dask_coded.training.runtime.norms import same_norm

#: ``gradient(parameters, samples, targets)`` returns a flat array, or the loss and a flat array.
Gradient = Callable[[Vector, Any, Any], Any]
#: ``augment(samples, keys)`` returns as many samples.
Augment = Callable[[Any, NDArray[np.uint64]], Any]


@dataclass(frozen=True, eq=False)
class Model:
    """The specification from which every replica is made.

    Parameters
    ----------
    gradient : callable
        ``gradient(parameters, samples, targets)`` returns the sum of the gradients of some samples
        as a flat array, or a pair of the sum of their losses and that array.
    parameters : ndarray, shape (n,)
        Initial parameters.
    optimizer : Optimizer
    samples : int
        Number of samples in all data.
    batch_size : int or None
    seed : int
    compression : Compression or None
    layers : sequence of tuple of int
        Shapes of the layers that lie one after the other in the parameters.
    width : int
        How many steps may be in flight at once.
    state : dict or None
        State of a replica to continue from.
    dealt : bool
        Whether the parts of the data are units, whose gradients are summed on a grid.
    clip_norm : float or None
        Mean gradients with a larger norm are scaled down to it.
    averages : ndarray, shape (m,)
        The last ``m`` parameters are running averages, with these momenta. The optimizer has the
        others.
    augment : callable or None
        ``augment(samples, keys)`` returns what the gradient function gets instead of the samples.
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
    dealt: bool = False
    clip_norm: float | None = None
    averages: Vector = field(default_factory=lambda: np.zeros(0))
    augment: Augment | None = None

    @property
    def learned(self) -> int:
        """Number of parameters that the optimizer has, the first ones."""
        return self.parameters.size - self.averages.size

    def replica(self, parts: int, segments: int) -> Replica:
        """Make a replica for data in ``parts`` parts and gradients in ``segments`` segments."""
        return (UnitReplica if self.dealt else Replica)(self, parts, segments)


class Replica:
    """One worker's copy of the model.

    Parameters
    ----------
    model : Model
    parts : int
        Number of parts of the data.
    segments : int
        Number of segments of a gradient.

    Attributes
    ----------
    version : int
        Number of updates applied so far.
    losses : array of float
        Mean loss of the samples of each step; NaN if the gradient function returns no loss.
    """

    def __init__(self, model: Model, parts: int, segments: int) -> None:
        self._model = model
        self._parameters = model.parameters.copy()
        self._optimizer_state = model.optimizer.start(self._parameters[: model.learned])
        self._batches = Batches(model.samples, parts, model.batch_size, model.seed)
        self._compressor = (
            Compressor()
            if model.compression is None
            else model.compression.compressor(model.layers, segments, model.width)
        )
        self.version = 0
        self.losses = array("d")
        # What the gradient function is given, and in which version.
        self._view: Vector | None = None
        self._viewed = 0
        if model.state is not None:
            self.restore(model.state)

    def part(self, part: int) -> tuple[int, int]:
        """Return the first row of a part of the data and the row after its last."""
        return self._batches.part(part)

    def gradient(self, step: int, part: int, samples: Any, targets: Any) -> tuple[Vector, float]:
        """Return what a part contributes to a step: a new array and the loss.

        Raises
        ------
        TypeError, ValueError
            If what the gradient function returns has a wrong type, dtype or shape.
        FloatingPointError
            If the gradient is not finite.
        """
        vector, loss = self._computed(step, part, samples, targets)
        with np.errstate(over="ignore"):  # what the dtype of sums cannot hold becomes infinite
            sums = vector.astype(sum_dtype(self._parameters.dtype))
        if not np.isfinite(sums).all():
            raise self._not_finite(step, vector)
        return sums, loss

    def _computed(self, step: int, part: int, samples: Any, targets: Any) -> tuple[Vector, float]:
        """Return what the gradient function returns: a flat array, and the loss or NaN."""
        rows = self._batches.rows(part, step)
        if not isinstance(rows, slice):  # a full slice would copy a sparse matrix
            samples, targets = samples[rows], targets[rows]
        if not samples.shape[0]:
            return np.zeros_like(self._parameters, dtype=sum_dtype(self._parameters.dtype)), 0.0
        if self._model.augment is not None:
            samples = self._augmented(step, part, samples, shared=isinstance(rows, slice))
        result = self._model.gradient(self._held(), samples, targets)
        # A list of two numbers may be a gradient.
        if (
            isinstance(result, tuple | list)
            and len(result) == 2
            and (isinstance(result, tuple) or np.ndim(result[1]))  # two numbers are a gradient
        ):
            loss, vector = result
            if loss is None or np.ndim(loss):
                raise TypeError(
                    f"The loss must be a number, the sum over the samples; it is of type "
                    f"{type(loss).__name__} and of shape {np.shape(loss)}."
                )
            return self._checked(vector), float(loss)
        return self._checked(result), float("nan")

    def _augmented(self, step: int, part: int, samples: Any, shared: bool) -> Any:
        """Return what the model's function makes of samples; shared ones are used again."""
        assert self._model.augment is not None
        keys = self._batches.keys(part, step)
        # A function that changes its argument must not change the data.
        found = unwrapped(self._model.augment(samples.copy() if shared else samples, keys))
        if getattr(found, "shape", ())[:1] != (len(keys),):
            what = f"of shape {found.shape}" if hasattr(found, "shape") else type(found).__name__
            raise ValueError(
                f"The function 'augment' must return an array of as many samples as it got, "
                f"{len(keys)}, it returned {what}."
            )
        return found

    def _held(self) -> Vector:
        """Return the parameters, the same view until the next update.

        If the gradient function is a method of an object with a method ``hold_parameters``, that is
        called first with each new view.
        """
        version, view = self.version, self._view
        if view is None or self._viewed != version:
            view = self._parameters.view()
            # A gradient function that changed them would make this replica differ from the others.
            view.flags.writeable = False
            self._view, self._viewed = view, version
            hold = getattr(getattr(self._model.gradient, "__self__", None), "hold_parameters", None)
            if hold is not None:
                hold(view)
        return view

    def _checked(self, result: Any) -> Vector:
        wanted = self._parameters
        if result is None or isinstance(result, tuple):
            what = "None" if result is None else f"a tuple of {len(result)}"
            raise TypeError(
                f"The gradient function must return a flat array or a pair (loss, flat array), "
                f"it returned {what}."
            )
        vector = np.asarray(check_unmasked("The gradient", unwrapped(result)))
        if vector.dtype.kind != "f":
            raise TypeError(
                f"The gradient must hold real floating-point numbers, its dtype is {vector.dtype}."
            )
        if vector.shape != wanted.shape:
            raise ValueError(
                f"The gradient must be as long as the parameters, a flat array of "
                f"{wanted.size} elements, or a pair (loss, such an array); its shape is "
                f"{vector.shape}."
            )
        return vector

    @staticmethod
    def _not_finite(step: int, vector: Vector) -> FloatingPointError:
        half = vector.dtype == np.float16
        return FloatingPointError(
            f"The gradient of step {step} contains NaN or infinity: lower the learning rate, "
            f"or check the gradient function and the data"
            f"{', or have it sum in float32, because float16 ends at 65504' * half}."
        )

    def compress(self, step: int, segment: int, vector: Vector) -> Vector:
        """Return this worker's contribution to the sum: its gradient segment, compressed."""
        return self._compressor.compress(step, segment, vector)

    def unit(
        self, step: int, unit: int, samples: Any, targets: Any, grid: Exponents | None = None
    ) -> UnitSum:
        """Return what a unit contributes to a step, see :meth:`UnitReplica.unit`."""
        raise TypeError("Only a model whose parts are dealt out has units.")

    def apply(self, totals: Sequence[Any], beside: bool = False) -> Vector:
        """Apply the next update.

        Parameters
        ----------
        totals : sequence of Partial or of UnitSum
            The sum of all compressed gradients, one for each segment.
        beside : bool
            Whether another thread may be computing a gradient with the present parameters, which
            must not change then.

        Returns
        -------
        ndarray
            The sum of the gradients of the parameters that the optimizer has.

        Raises
        ------
        FloatingPointError
            If the sum or the new parameters are not finite.
        """
        step = self.version
        segments = [self._compressor.expand(step, i, t.vector) for i, t in enumerate(totals)]
        gradient = segments[0] if len(segments) == 1 else np.concatenate(segments)
        self._update(gradient, sum(total.loss for total in totals), beside)
        return gradient[: self._model.learned]

    def _update(self, gradient: Vector, loss: float, beside: bool) -> None:
        step, model = self.version, self._model
        samples = max(self._batches.count(step), 1)
        parameters = self._parameters.copy() if beside else self._parameters
        with np.errstate(over="ignore", invalid="ignore"):
            # A new array each time, because an optimizer may keep it. Not in the dtype of the
            # parameters: float16 loses small entries, and large ones before they are clipped.
            mean = (gradient / samples).astype(sum_dtype(parameters.dtype), copy=False)
            learned, running = np.split(parameters, [model.learned])
            own, found = np.split(mean, [model.learned])
            # The same factor on all workers.
            if model.clip_norm is not None and (norm := same_norm(own)) > model.clip_norm:
                own *= model.clip_norm / norm
            model.optimizer.update(learned, own, self._optimizer_state, step)
            running += model.averages * (found - running)
        self._parameters = parameters
        # After the last step no gradient would show it.
        if not np.isfinite(self._parameters).all():
            raise FloatingPointError(
                f"The parameters contain NaN or infinity after step {step}: lower the learning "
                f"rate, or check the gradient function and the data."
            )
        self.losses.append(loss / samples)
        self.version += 1

    def state(self) -> dict[str, Any]:
        """Return what a joining or resuming replica needs; its large arrays are not copies."""
        return {
            "version": self.version,
            "parameters": self._parameters,
            "optimizer": self._optimizer_state,
            "compressor": self._compressor.state(),
            "losses": np.array(self.losses),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state of another replica."""
        self.version = state["version"]
        self._parameters = np.array(state["parameters"])
        self._view = None
        self._optimizer_state = {name: np.array(a) for name, a in state["optimizer"].items()}
        self._compressor.restore(state["compressor"])
        self.losses = array("d", state["losses"])  # of checkpoints up to version 0.2, a list

    def digest(self) -> str:
        """Return a hash of the bytes of the parameters."""
        return hashlib.blake2b(self._parameters.tobytes(), digest_size=8).hexdigest()


class UnitReplica(Replica):
    """A replica whose parts are units: their gradients are integers on a grid of each step.

    Parameters
    ----------
    model : Model
    parts : int
        Number of units.
    segments : int
        One.
    """

    def __init__(self, model: Model, parts: int, segments: int) -> None:
        self._units = parts
        self._blocks = GridBlocks(model.layers)
        self._peaks = PeakHistory(self._blocks)
        # Arrays for the integers of units.
        self._spare: list[Integers] = []
        self._restored: Vector | None = None
        # The last grid, and the step and the peaks that it is for.
        self._known: tuple[int, Exponents | None, Grid | None] = (-1, None, None)
        super().__init__(model, parts, segments)

    def unit(
        self, step: int, unit: int, samples: Any, targets: Any, grid: Exponents | None = None
    ) -> UnitSum:
        """Return what a unit contributes to a step: a new array, or only its peaks.

        Parameters
        ----------
        step, unit : int
        samples, targets : array_like
            All rows of the unit.
        grid : ndarray of int16, optional
            The peaks for the grid; by default they are predicted. The first step has no prediction.

        Raises
        ------
        TypeError, ValueError, FloatingPointError
            As :meth:`gradient`.
        """
        vector, loss = self._computed(step, unit, samples, targets)
        losses = {unit: loss}
        found = self._grid(step, grid)
        with np.errstate(over="ignore"):  # what the dtype of sums cannot hold becomes infinite
            gradient = vector.astype(sum_dtype(self._parameters.dtype), copy=False)
        if found is not None:
            integers, peaks = found.rounded(gradient, self._spare.pop() if self._spare else None)
            if found.fits(peaks):
                return UnitSum(integers, peaks, losses, spare=self._spare)
            self._spare.append(integers)
        # Scaled for a grid that is far too fine, even finite entries may have become infinite.
        peaks = peaks_of(self._blocks, gradient)
        if (peaks == NOT_FINITE).any():
            raise self._not_finite(step, vector)
        return UnitSum(None, peaks, losses)

    def apply(self, totals: Sequence[Any], beside: bool = False) -> Vector:
        """Apply the next update, as :meth:`Replica.apply`.

        Raises
        ------
        RuntimeError
            If a unit did not fit the grid that was made for it.
        """
        (total,) = totals
        grid = self._grid(self.version, total.grid)
        self._peaks.record(total.peaks, self.version)
        if grid is None or total.integers is None:
            raise RuntimeError(
                f"Gradients of step {self.version} differ from those of the same samples and "
                f"parameters a moment before: the gradient function must return the same result "
                f"for the same arguments."
            )
        gradient = self._restored = grid.restored(total.integers, self._restored)
        self._update(gradient, total.loss, beside)
        return gradient[: self._model.learned]

    def _grid(self, step: int, peaks: Exponents | None) -> Grid | None:
        """Return the grid of a step, on these peaks or on the predicted ones."""
        known, of, grid = self._known
        if known != step or of is not peaks:
            largest = self._peaks.predicted() if peaks is None else peaks
            dtype = self._parameters.dtype
            grid = None if largest is None else Grid(self._blocks, largest, self._units, dtype)
            self._known = step, peaks, grid
        return grid

    def state(self) -> dict[str, Any]:
        """Return the state that a joining or resuming replica needs, units and grid among it."""
        layers = [math.prod(layer) for layer in self._model.layers]
        own = {"units": self._units, "layers": layers, "peaks": self._peaks.state()}
        return {**super().state(), **own}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state of another replica."""
        super().restore(state)
        self._peaks.restore(state["peaks"])
