"""What a squeezed training must give, to the bit: its units in one process, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dask_coded.aggregation.grid import Grid, GridBlocks, PeakHistory, peaks_of
from dask_coded.training import SGD
from dask_coded.training.batches import Batches


def squeezed(
    gradient: Callable[..., Any],
    start: np.ndarray,
    data: tuple[np.ndarray, np.ndarray],
    *,
    units: int,
    steps: int,
    batch_size: int | None = None,
    optimizer: Any = None,
    layers: Any = None,
    averages: np.ndarray | None = None,
    augment: Callable[..., Any] | None = None,
) -> np.ndarray:
    """Return the parameters after some steps."""
    X, y = data
    optimizer = optimizer or SGD(0.1)
    parameters = start.copy()
    momenta = np.zeros(0) if averages is None else averages.astype(start.dtype)
    learned, running = np.split(parameters, [len(start) - len(momenta)])
    state = optimizer.start(learned)
    batches = Batches(len(X), units, batch_size, seed=0)
    blocks = GridBlocks(layers or [start.shape])
    history = PeakHistory(blocks)
    for step in range(steps):
        gradients = []
        for unit in range(units):
            own = slice(*batches.part(unit))
            rows = batches.rows(unit, step)
            samples = X[own].copy()[rows], y[own].copy()[rows]
            if augment is not None:
                samples = augment(samples[0], batches.keys(unit, step)), samples[1]
            if len(samples[0]):
                found = gradient(parameters, *samples)
                gradients.append(found[1] if isinstance(found, tuple) else found)
        peaks = np.max([peaks_of(blocks, each) for each in gradients], axis=0)
        for largest in (history.predicted(), peaks):
            if largest is None:
                continue
            grid = Grid(blocks, largest, units, start.dtype)
            total = grid.zeros()
            found = np.max([grid.fold(each, total) for each in gradients], axis=0)
            if grid.fits(found):
                break
        history.record(found, step)
        mean = (grid.restored(total) / max(batches.count(step), 1)).astype(start.dtype)
        optimizer.update(learned, mean[: len(learned)], state, step)
        running += momenta * (mean[len(learned) :] - running)
    return parameters
