"""Checks of the arguments of a training, before anything reaches the workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed import Client

from dask_coded.aggregation import Aggregation, Squeeze
from dask_coded.arguments import check_unmasked, unwrapped
from dask_coded.compression import Compression
from dask_coded.runtime.client.waiting import threads_of
from dask_coded.training.checkpoints import Checkpoint
from dask_coded.training.optimizers import Optimizer, Vector
from dask_coded.training.schedules import Schedule
from dask_coded.training.validation import Validation

# Samples of a unit. A smaller unit of a dense model costs more: it takes about 10 / b of its
# computation to add its gradient, with b samples. Small batches are cut into this many units.
_UNIT, _UNITS = 64, 16


def check_choices(
    gradient: Any,
    augment: Any,
    optimizer: Any,
    aggregation: Any,
    compression: Any,
    schedule: Any,
    checkpoint: Any,
    validation: Any,
    callback: Any,
) -> None:
    """Refuse names and uninstantiated classes before they reach the workers."""
    for name, function in (("gradient", gradient), ("augment", augment), ("callback", callback)):
        if not (callable(function) or (name != "gradient" and function is None)):
            raise TypeError(f"Argument {name!r} must be a function, it is {function!r}.")
    for name, value, kind, example in (
        ("optimizer", optimizer, Optimizer, "Adam() or TorchModule.optimizer(...)"),
        ("aggregation", aggregation, Aggregation, "Ring()"),
        ("compression", compression, Compression, "Quantization()"),
        ("schedule", schedule, Schedule, "Pipelined()"),
        ("checkpoint", checkpoint, Checkpoint, "Checkpoint('file', every=100)"),
        ("validation", validation, Validation, "Validation(score, (samples, targets))"),
    ):
        if not (value is None or isinstance(value, kind)):
            raise TypeError(
                f"Argument {name!r} must be an instance of {kind.__name__}, such as {example}, "
                f"it is {value!r}."
            )
    if aggregation is None:
        return
    if isinstance(aggregation, Squeeze) and compression is not None:
        raise ValueError(
            f"{aggregation!r} cannot be used with {compression!r}, whose errors would depend on "
            "which worker adds what: leave out the compression, or use another aggregation."
        )
    if isinstance(aggregation, Squeeze) and schedule is not None and schedule.width > 1:
        raise ValueError(
            f"{aggregation!r} needs `schedule=Synchronous()`, it is {schedule!r}: a helper "
            "must still have the parameters of the step. Use a code or `Star()` instead."
        )
    if aggregation.moves and compression is not None and compression.remembers:
        raise ValueError(
            f"{aggregation!r} cannot be used with {compression!r}, which keeps a residual of "
            "each worker's own gradients: two workers may keep that of one part. Use "
            "GradiVeQ(residual=False), or another aggregation."
        )


def check_grid(
    aggregation: Squeeze,
    start: Vector,
    layers: Sequence[tuple[int, ...]],
    state: dict[str, Any] | None,
) -> None:
    """Refuse parameters and layers whose gradients have no grid, or another than before."""
    if start.dtype.itemsize > 8:
        raise ValueError(
            f"{aggregation!r} sums gradients of at most 64 bits, the parameters are of "
            f"{start.dtype}: pass them in float64, or use another aggregation."
        )
    sizes = [math.prod(layer) for layer in layers]
    if state is not None and state.get("layers", sizes) != sizes:
        raise ValueError(
            f"The checkpoint is of a training with layers of {_few(state['layers'])} parameters, "
            f"argument 'layers' has {_few(sizes)}: resume with the same layers, because the "
            f"parameters depend on them."
        )


def _few(sizes: Sequence[int]) -> str:
    """Return the first of some numbers, for a message."""
    return ", ".join(map(str, sizes[:4])) + ", …" * (len(sizes) > 4)


def with_units(
    aggregation: Squeeze, samples: int, most: int, state: dict[str, Any] | None
) -> Squeeze:
    """Return an aggregation that knows the number of units, which must not depend on the workers.

    Parameters
    ----------
    aggregation : Squeeze
    samples : int
        Of a step.
    most : int
        Units that are chosen at most.
    state : dict or None
        State that the training resumes from.
    """
    units = aggregation.units
    if state is not None:
        if "units" not in state:
            raise ValueError(
                f"The checkpoint is of a training without units: resume it with the aggregation "
                f"that wrote it, not with {aggregation!r}."
            )
        if units not in (None, state["units"]):
            raise ValueError(
                f"The checkpoint is of a training with {state['units']} units, {aggregation!r} has "
                f"{units}: resume with as many, because the parameters depend on them."
            )
        units = state["units"]
    return replace(aggregation, units=units or min(max(samples // _UNIT, _UNITS), most))


def named_workers(client: Client, name: str, workers: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of an argument, of which at least one must be in the cluster."""
    named: Any = (workers,) if isinstance(workers, str) else workers
    addresses = tuple(named) if isinstance(named, Iterable) else (None,)
    if not all(isinstance(address, str) for address in addresses):
        raise TypeError(
            f"Argument {name!r} must be an address or a list of addresses, it is {workers!r}."
        )
    if not set(addresses) & set(threads_of(client)):
        raise ValueError(
            f"Argument {name!r} must contain the address of a worker in the cluster, as listed by "
            f"`client.nthreads()`, it is {workers!r}."
        )
    return addresses


def first_parameters(parameters: npt.ArrayLike) -> Vector:
    """Return the initial parameters as a flat array of floating-point numbers."""
    start = np.array(check_unmasked("Argument 'parameters'", unwrapped(parameters)))
    if start.ndim != 1 or not start.size or start.dtype.kind not in "fiub":
        raise ValueError(
            f"Argument 'parameters' must be a flat array of real numbers, it has shape "
            f"{start.shape} and dtype {start.dtype}."
        )
    return start if start.dtype.kind == "f" else start.astype(np.float64)


def shapes_of(layers: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shapes of layers as tuples of whole numbers."""
    layers = list(layers)
    try:
        return [tuple(map(index, layer)) for layer in layers]
    except TypeError:
        raise TypeError(
            f"Argument 'layers' must be a sequence of shapes, such as [(784, 10), (10,)], it is "
            f"{layers!r}."
        ) from None


def momenta_of(momenta: npt.ArrayLike, start: Vector, compression: Compression | None) -> Vector:
    """Return the momenta of running averages in the dtype of the parameters."""
    found: Vector = np.asarray(momenta, dtype=start.dtype)
    if found.ndim != 1 or found.size >= start.size or not ((found >= 0) & (found <= 1)).all():
        raise ValueError(
            f"Argument 'averages' must be a flat array of momenta from 0 to 1, of fewer than the "
            f"{start.size} parameters, it is {momenta!r}."
        )
    if found.size and compression is not None:
        raise ValueError(
            f"Running averages, as of batch normalisation, cannot be compressed by "
            f"{compression!r}: leave out the compression."
        )
    return found
