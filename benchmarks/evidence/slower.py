"""One worker four times slower than the others: which aggregation pays on which links.

Simulated: the package's state machines in virtual time. ``python -m benchmarks.ddp`` measures some
of it on processes, beside PyTorch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.tables import spans, table
from dask_coded.aggregation import Aggregation, CodedReduce, GradientCoding, Tree
from dask_coded.aggregation.timing import Costs, Shape, communication
from dask_coded.simulation import Delays, SqueezeSimulation, TrainingSimulation, constant
from dask_coded.squeeze.units import seat

WORKERS, SLOWER = 20, 4.0
#: Mbit/s.
LINKS = (20, 50, 200, 500, 2000, 10_000)
LATENCY, SUMMATION = 3e-4, 1e-9
#: `Squeeze` learns speeds in the first half of the steps; only the other half counts.
STEPS, UNITS = 16, 4

WAYS: dict[str, Aggregation] = {
    "uncoded tree": Tree(4, 2),
    "gradient coding": GradientCoding(1),
    "CodedReduce": CodedReduce(4, 2),
}


@dataclass(frozen=True)
class Net:
    """Seconds in which a worker computes its even share of a batch, and bytes of a gradient."""

    share: float
    nbytes: int


NETS = {"dense": Net(0.028, 5_200_000), "convolutional": Net(0.060, 320_000)}


def slower(kept: Kept, name: str) -> None:
    """Add the step of each aggregation on links of each rate, for each worker that may be slow."""
    net = NETS[name]
    for link in LINKS[:2] if kept.smoke else LINKS:
        costs = Costs(LATENCY, link * 1e6 / 8, SUMMATION, net.share * WORKERS)
        for slow in range(2 if kept.smoke else WORKERS):
            for way, seconds in _steps(net, costs, slow).items():
                kept.report.add(
                    f"{name}, {link} Mbit/s, worker {slow} slow: {way}",
                    "one_slower",
                    seconds,
                    "s",
                    net=name,
                    link=link,
                    slow=slow,
                    method=way,
                )


def _steps(net: Net, costs: Costs, slow: int) -> dict[str, float]:
    """Return the seconds of a step by aggregation."""
    factor = np.ones((1, WORKERS))
    factor[0, slow] = SLOWER
    delays = Delays(factor, np.zeros_like(factor))
    messages = communication(Shape("Ring"), costs, WORKERS, net.nbytes)
    found = {"ring": SLOWER * net.share + messages}
    for way, aggregation in WAYS.items():
        run = TrainingSimulation(aggregation.plan(WORKERS), costs, net.nbytes, delays).run(1)
        found[way] = float(run.ended[0])
    speeds = 1 / factor[0]
    units = UNITS * WORKERS
    squeezed = SqueezeSimulation(
        constant(speeds), costs, net.nbytes, units=units, seats=seat(speeds)
    )
    steps = [step.seconds for step in squeezed.run(STEPS)]
    return {**found, "Squeeze": float(np.mean(steps[STEPS // 2 :]))}


def one_slower(kept: Kept) -> Iterator[str]:
    """Yield tables of the steps by the rate of the links."""
    if not kept.rows(measure="one_slower"):
        return
    yield "## One worker four times slower\n"
    yield (
        f"Simulated: {WORKERS} workers, one of which takes {SLOWER:g} times as long in every step; "
        "milliseconds of a step, medians and ranges over which worker it is. All links have the "
        "same rate, also that of the leader. Gradient coding and the tree tolerate one late "
        "worker, or one late child of each parent. A ring is not simulated: it waits for the slow "
        "worker, then its messages follow. `Squeeze` is simulated without the time to round units; "
        "[measured steps](../squeeze.md#compared-with-pytorchs-ddp) contain it. The least is bold."
    )
    for name, net in NETS.items():
        rows = kept.rows(measure="one_slower", net=name)
        names = list(dict.fromkeys(row["method"] for row in rows))
        size = f"{net.nbytes / 1e6:g} MB"
        yield f"\n### {name.capitalize()} network, share of {1e3 * net.share:g} ms, {size}\n"
        lines = []
        for link in dict.fromkeys(row["link"] for row in rows):
            found = [_milliseconds(rows, link, way) for way in names]
            lines.append([f"{link:g} Mbit/s", *spans(found)])
        yield from table(["links", *names], lines)


def _milliseconds(rows: list[dict[str, Any]], link: float, way: str) -> np.ndarray:
    wanted = (link, way)
    return np.array([1e3 * row["value"] for row in rows if (row["link"], row["method"]) == wanted])
