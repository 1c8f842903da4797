"""Simulate squeezed training steps on the speeds of real machines, beside a ring and a code.

``python -m benchmarks.squeeze`` replays two traces: machines that differ little from step to step
(`stream-triad`), and ranks of a training job that differ much (`bytedance-SE`). A row is the time
of a step over its fluid bound, the time in which workers of these speeds could compute all units
without any message. The same speeds slow down the steps of `Ring` and `GradientCoding(1)`.

The number of units for a worker is varied, without and with a fixed cost of each pass. With 4 % of
the time of a worker's samples for each pass, 4, 8 and 16 units take 1.16, 1.32 and 1.64 times as
long as one; on a dense model of 1.3 million weights they took 1.18, 1.33 and 1.61 times as long.
Then the seats of eight workers are compared, two of which have a quarter of the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.evidence.s2c2.cases import replayed
from benchmarks.report import Report, Summary, options
from dask_coded.aggregation import Aggregation, GradientCoding, Ring
from dask_coded.aggregation.timing import Costs
from dask_coded.simulation import (
    Delays,
    Speeds,
    SqueezeSimulation,
    TrainingSimulation,
    constant,
)
from dask_coded.squeeze.units import seat

TRACES = ("stream-triad", "bytedance-SE")
#: Bytes of a gradient of a convolutional network and of a dense one, float32.
NBYTES = {"0.3 MB": 320_000, "5 MB": 5_200_000}
#: Fixed cost of a pass over a unit, as a share of the time of all units of a worker.
PASSES = (0.0, 0.04)
#: Steps that are not counted, in which speeds are learnt.
WARM_UP = 8


def costs(workers: int) -> Costs:
    """Return the costs of links of 10 Gbit/s; a worker computes its share in 0.1 seconds."""
    return Costs(latency=3e-4, bandwidth=1.25e9, summation=1e-9, computation=0.1 * workers)


def squeezed(
    speeds: np.ndarray, nbytes: int, units: int, cost_of_pass: float
) -> Iterator[tuple[float, float]]:
    """Yield time over fluid bound, and the moved share of the units, of each counted step."""
    workers = speeds.shape[1]
    simulation = SqueezeSimulation(
        Speeds(speeds),
        costs(workers),
        nbytes,
        units=units * workers,
        seats=seat(speeds[:WARM_UP].mean(axis=0)),
        pass_seconds=0.1 * cost_of_pass,
    )
    for step in simulation.run(len(speeds))[WARM_UP:]:
        yield step.seconds / step.bound, step.moved / (units * workers)


def waiting(aggregation: Aggregation, speeds: np.ndarray, nbytes: int) -> np.ndarray:
    """Return time over fluid bound of each counted step of an aggregation that moves no work."""
    workers = speeds.shape[1]
    delays = Delays(1 / speeds, np.zeros_like(speeds))
    simulation = TrainingSimulation(aggregation.plan(workers), costs(workers), nbytes, delays)
    fluid = costs(workers).computation / speeds.sum(axis=1)
    return (simulation.run(len(speeds)).seconds / fluid)[WARM_UP:]


def add(report: Report, case: str, ratios: np.ndarray, goal: float | None, **keys: Any) -> None:
    """Add the median and the 99th percentile of a step's time."""
    report.add(case, "step_over_fluid", Summary.of(ratios), goal=goal, quantile=0.5, **keys)
    late = float(np.quantile(ratios, 0.99))
    report.add(f"{case}, 99 %", "step_over_fluid", late, quantile=0.99, **keys)


def trace_rows(
    report: Report, trace: str, workers: int, steps: int, seeds: int, counts: tuple[int, ...]
) -> None:
    """Add the steps of one trace."""
    traces = [replayed(trace, workers, WARM_UP + steps, seed) for seed in range(seeds)]
    traces = [speeds / speeds.mean() for speeds in traces]
    for size, nbytes in NBYTES.items():
        where = f"{trace}, {workers} workers, {size}"
        keys = {"trace": trace, "workers": workers, "gradient_bytes": nbytes}
        for aggregation in (Ring(), GradientCoding(1)):
            name = repr(aggregation)
            ratios = np.concatenate([waiting(aggregation, s, nbytes) for s in traces])
            add(report, f"{where}: {name}", ratios, None, aggregation=name, **keys)
        for cost in PASSES:
            for units in counts:
                found = [pair for s in traces for pair in squeezed(s, nbytes, units, cost)]
                ratios, moved = np.array(found).T
                case = f"{where}: Squeeze, {units} units a worker, passes {cost:.0%}"
                more = {"units": units, "pass_share": cost, "moved": float(moved.mean())}
                # A worker needs at least eight units to even out its speed.
                goal = 1.15 if not cost and units >= 8 else None
                add(report, case, ratios, goal, aggregation="Squeeze", **more, **keys)


def seat_rows(report: Report, steps: int) -> None:
    """Add the steps of eight workers, two of them slow: side by side, and apart."""
    speeds = np.array([1.0] * 6 + [0.25] * 2)
    for name, seats in (("best first", [*range(8)]), ("apart", seat(speeds))):
        simulation = SqueezeSimulation(
            constant(speeds), costs(8), NBYTES["0.3 MB"], units=128, seats=seats
        )
        ratios = [step.seconds / step.bound for step in simulation.run(WARM_UP + steps)[WARM_UP:]]
        case = f"two of eight at a quarter, seats {name}"
        report.add(case, "step_over_fluid", Summary.of(ratios), aggregation="Squeeze", seats=name)


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Simulate squeezed training steps on the speeds of real machines."""
    if png_file is not None:
        raise click.UsageError("This benchmark draws no picture: leave out --png.")
    report = Report("squeeze")
    seat_rows(report, steps=2 if smoke else 10)
    for trace in TRACES[:1] if smoke else TRACES:
        if smoke:
            trace_rows(report, trace, workers=3, steps=2, seeds=1, counts=(4,))
        else:
            trace_rows(report, trace, workers=8, steps=40, seeds=2, counts=(4, 8, 16))
    report.finish(json_file)


if __name__ == "__main__":
    main()
