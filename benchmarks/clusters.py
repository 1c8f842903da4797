"""Measure the gain of dynamic clusters (GC-DC) over static ones (GC-SC), by memory of straggling.

``python -m benchmarks.clusters`` simulates 20 workers in 5 clusters. Their computing times follow a
two-state Markov chain with a given memory, the correlation of being slow from one step to the next.
Messages cost nothing in the simulation. One case with memory and one without are also measured in
the network lab, with 12 workers that sleep for the times of the chain.

If straggling has no memory, no placement can gain. `DynamicClusters` should detect this and leave
the clusters as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.aggregation import measured
from benchmarks.network import NetworkLab, unavailable
from benchmarks.report import Report, options
from dask_coded.aggregation import Aggregation, DynamicClusters, GradientCoding, StaticClusters
from dask_coded.aggregation.timing import Costs
from dask_coded.simulation import Delays, TrainingSimulation, markov

#: Load, candidates, share of slow workers, memory, slowdown; and the gain over static clusters in a
#: simpler model, in which all workers start every step afresh and are known to be slow or fast.
SIMULATED = [
    (2, 3, 0.20, 0.94, 10.0, 0.24),
    (3, 2, 0.20, 0.94, 10.0, 0.13),
    (3, 3, 0.20, 0.94, 10.0, 0.15),
    (3, 3, 0.50, 0.90, 10.0, 0.24),
    (3, 3, 0.20, 0.94, 2.0, 0.01),
    (3, 3, 0.25, 0.99, 10.0, 0.14),
    (3, 3, 0.25, 0.87, 10.0, 0.18),
    (3, 3, 0.25, 0.73, 10.0, 0.17),
    (3, 3, 0.25, 0.47, 10.0, 0.07),
    (3, 3, 0.25, 0.00, 10.0, 0.02),
]

#: Memories that are measured in the lab.
LAB = (0.9, 0.0)


def simulate(aggregation: Aggregation, delays: Delays, steps: int) -> float:
    """Return the mean seconds of a step if a worker of mean speed computes a part in one second."""
    workers = delays.workers
    plan = aggregation.plan(workers)
    costs = Costs(latency=0.0, bandwidth=1e15, computation=float(plan.parts))
    return float(TrainingSimulation(plan, costs, 8, delays).run(steps).ended[-1]) / steps


def simulated_rows(report: Report, cases: list[tuple[Any, ...]], steps: int) -> None:
    """Simulate GC, GC-SC and GC-DC on Markov chains, GC-DC with both placements."""
    workers, size = 20, 4
    for load, candidates, share, memory, slowdown, expected in cases:
        delays = markov(
            workers, steps, share=share, memory=memory, slowdown=slowdown, shift=0.1, seed=1
        )
        case = (
            f"load {load}, {candidates} candidates, share {share}, memory {memory}, x{slowdown:g}"
        )
        static = simulate(StaticClusters(size, load, code="cyclic"), delays, steps)
        found = {
            "GC": simulate(GradientCoding(load - 1, "cyclic"), delays, steps),
            "GC-DC": simulate(
                DynamicClusters(size, load, candidates, code="cyclic"), delays, steps
            ),
            "GC-DC, greedy": simulate(
                DynamicClusters(size, load, candidates, "greedy", code="cyclic"), delays, steps
            ),
        }
        for name, seconds in found.items():
            report.add(
                f"simulated, {case}: {name} over GC-SC",
                "step_over_reference",
                seconds / static,
                aggregation=name,
                reference="GC-SC",
                delays=f"Markov, memory {memory}",
                simpler_model=1 - expected if name == "GC-DC" else None,
                where="simulated",
            )


def lab_rows(report: Report, workers: int, steps: int, seconds: float) -> None:
    """Measure on real links, with a load of 2 in clusters of four, and simulate for comparison.

    A hundred steps of a chain of twelve workers are few. Simulating the same delays shows whether a
    gain is luck.
    """
    aggregations: dict[str, Aggregation] = {
        "GC-SC": StaticClusters(4, 2, code="cyclic"),
        "GC-DC": DynamicClusters(4, 2, 3, code="cyclic"),
    }
    costs = Costs(latency=5e-3, bandwidth=12.5e6, computation=seconds)
    nbytes = 4_000
    with NetworkLab(workers, "100mbit") as lab:
        for memory in LAB:
            delays = markov(workers, steps, share=0.25, memory=memory, slowdown=10.0, seed=1)
            found, simulated = {}, {}
            for name, aggregation in aggregations.items():
                taken = measured(
                    lab, aggregation, delays, nbytes=nbytes, computation=seconds, steps=steps
                )
                training = TrainingSimulation(aggregation.plan(workers), costs, nbytes, delays)
                # The first third is left out: without a history both aggregations are the same.
                found[name] = float(np.mean(taken[steps // 3 :]))
                simulated[name] = float(np.mean(training.run(steps).seconds[steps // 3 :]))
            expected = simulated["GC-DC"] / simulated["GC-SC"]
            report.add(
                f"lab, {workers} workers, memory {memory}: GC-DC over GC-SC "
                f"(simulated: {expected:.3g})",
                "step_over_reference",
                found["GC-DC"] / found["GC-SC"],
                aggregation="GC-DC",
                reference="GC-SC",
                delays=f"Markov, memory {memory}",
                simulated=expected,
                where=f"lab, {workers} workers",
            )


@click.command()
@options
@click.option("--only", multiple=True, type=click.Choice(["lab", "simulated"]))
def main(json_file: Path | None, png_file: Path | None, smoke: bool, only: tuple[str, ...]) -> None:
    """Compare dynamic with static clusters, with and without memory."""
    if png_file is not None:
        raise click.UsageError("This benchmark draws no picture: leave out --png.")
    parts = only or ("lab", "simulated")
    report = Report("clusters")
    if "simulated" in parts:
        simulated_rows(report, SIMULATED[:1] if smoke else SIMULATED, 40 if smoke else 800)
    if "lab" in parts:
        if reason := unavailable():
            report.machine["lab"] = reason
            click.echo(f"Skipping the network lab: {reason}", err=True)
        else:
            lab_rows(report, *((4, 6, 0.01) if smoke else (12, 90, 0.5)))
    report.finish(json_file)


if __name__ == "__main__":
    main()
