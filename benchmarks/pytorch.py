"""Measure 200 training steps of a linear PyTorch model beside the same steps by PyTorch alone.

The model is that of the manual, on 50 columns and all rows in each step. PyTorch alone runs in one
process, with one thread and with one for each core.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.cluster import local_workers
from benchmarks.report import Report, options, side_by_side
from dask_coded.training import Adam, TorchModule, train

COLUMNS, STEPS = 50, 200
#: The manual's example has 100,000 rows.
ROWS = (20_000, 40_000, 100_000)


def model() -> Any:
    """Return a new model, always with the same parameters."""
    torch.manual_seed(0)
    return torch.nn.Linear(COLUMNS, 2)


def alone(X: np.ndarray, y: np.ndarray, threads: int, steps: int) -> None:
    """Train by PyTorch in this process."""
    torch.set_num_threads(threads)
    net, loss = model(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    samples, targets = torch.from_numpy(X), torch.from_numpy(y)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(samples), targets).backward()
        optimizer.step()


def coded(X: np.ndarray, y: np.ndarray, steps: int) -> None:
    """Train on the current cluster."""
    module = TorchModule(model(), torch.nn.CrossEntropyLoss(reduction="sum"))
    train(
        module.gradient,
        module.parameters,
        (X, y),
        optimizer=Adam(0.01),
        layers=module.layers,
        steps=steps,
    )


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Time a training on four workers over the same steps by PyTorch alone."""
    report = Report("pytorch")
    rng = np.random.default_rng(0)
    steps = 3 if smoke else STEPS
    with local_workers(2 if smoke else 4):
        for rows in (200,) if smoke else ROWS:
            X = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
            y = (X[:, 0] > X[:, 1]).astype(np.int64)
            timings = side_by_side(
                {
                    "coded": partial(coded, X, y, steps),
                    "one thread": partial(alone, X, y, 1, steps),
                    "all cores": partial(alone, X, y, os.cpu_count() or 1, steps),
                },
                repeats=1 if smoke else 7,
                warmup=1,
            )
            goal = 2.0 if rows == max(ROWS) else None
            for name in ("one thread", "all cores"):
                ratio = timings.ratio("coded", over=name)
                report.add(f"{rows} rows", f"over_{name.replace(' ', '_')}", ratio, goal=goal)
            report.add(f"{rows} rows", "coded", timings.summary("coded"), "s")
    report.finish(json_file)


if __name__ == "__main__":
    main()
