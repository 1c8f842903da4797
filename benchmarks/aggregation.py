"""How long a step of a training takes with each aggregation: on real links, and simulated.

``python -m benchmarks.aggregation`` trains with a gradient function that computes nothing, but
takes as long as it is told to, delays included: only summing is real. In the network lab every one
of 12 workers is a process behind a link of its own, and the root is behind one like theirs.
Simulated are the two trees of the CodedReduce paper, of 84 and 156 workers.

Steps without delays come first, then those with; of the former the median counts, of the latter the
mean, because what matters is how often a step is late. Delays are drawn in advance and the same for
all aggregations. With what `measure_costs` finds, the timing model predicts the steps without
delays, and recommends an aggregation: that is compared with what was measured.

A worker's computing is sleep: twelve workers on the cores of one machine would else slow each other
down, which is not what is asked here. Their messages do cost processor time, and that a ring of
twelve sends 264 of them a step shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.network import NetworkLab, bits_per_second, unavailable
from benchmarks.report import Report, options
from dask_coded.aggregation import (
    Aggregation,
    CodedReduce,
    DynamicClusters,
    GradientCoding,
    Ring,
    Speculation,
    Star,
    StaticClusters,
    Tree,
)
from dask_coded.planning.timing import Costs, Prediction, recommend
from dask_coded.simulation import Delays, TrainingSimulation, additive
from dask_coded.training import SGD, train
from dask_coded.training.costs import measure_costs

#: What the abstract of the CodedReduce paper claims, "up to": arXiv 1902.01981.
CLAIMS = {"gradient coding": 27.2, "ring": 7.0}

#: What steps are divided by, for each aggregation.
REFERENCES = {
    "star": ["ring"],
    "tree": ["ring", "star"],
    "gradient coding": ["ring", "star"],
    "GC-SC": ["gradient coding"],
    "GC-DC": ["GC-SC"],
    "speculation": ["star"],
    "CodedReduce": ["gradient coding", "ring", "tree", "star"],
}


@dataclass(frozen=True)
class Case:
    """A gradient on links, with steps of both kinds.

    Parameters
    ----------
    nbytes : int
        Of a gradient of float32.
    rate : str
        Of each link.
    computation : float
        Seconds in which one worker would compute the whole batch.
    share, mean : float
        Delays: the share of the workers that is held up in a step, and by how many seconds.
    undelayed, delayed : int
        Steps of either kind; one more, at the beginning, does not count.
    """

    nbytes: int
    rate: str
    computation: float
    share: float
    mean: float
    undelayed: int
    delayed: int

    @property
    def gradient(self) -> str:
        """For people."""
        kilobytes = self.nbytes / 1000
        return f"{kilobytes:g} KB" if kilobytes < 1000 else f"{kilobytes / 1000:g} MB"

    def delays(self, workers: int, seed: int = 0) -> Delays:
        """The first steps without, the others with."""
        quiet = 1 + self.undelayed
        drawn = additive(workers, self.delayed, share=self.share, mean=self.mean, seed=seed)
        extra = np.concatenate([np.zeros((quiet, workers)), drawn.extra])
        return Delays(np.ones_like(extra), extra)

    def means(self, seconds: np.ndarray) -> dict[str, float]:
        """A step without delays, and one with them."""
        quiet, late = seconds[1 : 1 + self.undelayed], seconds[1 + self.undelayed :]
        return {"none": float(np.median(quiet)), "additive": float(late.mean())}


LAB = [
    Case(40_000, "100mbit", 0.12, share=0.05, mean=0.2, undelayed=10, delayed=25),
    Case(8_000_000, "400mbit", 1.2, share=0.05, mean=2.0, undelayed=2, delayed=3),
]
LAB_SMOKE = [Case(4_000, "100mbit", 0.004, share=0.2, mean=0.01, undelayed=2, delayed=2)]

PAPER = [
    Case(40_000, "500mbit", 0.1, share=0.05, mean=0.2, undelayed=2, delayed=12),
    Case(8_000_000, "500mbit", 0.1, share=0.05, mean=1.0, undelayed=2, delayed=12),
]
PAPER_SMOKE = [Case(40_000, "500mbit", 0.1, share=0.05, mean=0.2, undelayed=2, delayed=2)]


def choices(workers: int, fan_in: int, depth: int, stragglers: int) -> dict[str, Aggregation]:
    """The aggregations, for as many workers as a tree has; codes put up with the same share late.

    ``stragglers`` is of gradient coding; the tree's own is one child of each parent, and so is that
    of the clusters.
    """
    return {
        "star": Star(),
        "ring": Ring(),
        "tree": Tree(fan_in, depth),
        "gradient coding": GradientCoding(stragglers),
        "GC-SC": StaticClusters(size=4, load=2, code="cyclic"),
        "GC-DC": DynamicClusters(size=4, load=2, candidates=2, code="cyclic"),
        "speculation": Speculation(),
        "CodedReduce": coded_reduce(workers, fan_in, depth),
    }


def coded_reduce(workers: int, fan_in: int, depth: int) -> Aggregation:
    """One child of each parent may be late; where the given tree does not allow it, another one."""
    if fan_in % 2:
        return CodedReduce(stragglers=1)
    return CodedReduce(fan_in, depth, stragglers=1)


# --------------------------------------------------------------------------------------------- lab


class Synthetic:
    """A gradient that takes as long as it is told to, and counts the steps.

    Parameters
    ----------
    seconds : float
        For one sample.
    delays : Delays
    workers : mapping of int to int
        From process ids to columns of the delays.
    size : int
        Numbers in the gradient. The first is -1 a sample, so that with plain gradient descent the
        first parameter is the number of the step.
    """

    def __init__(
        self, seconds: float, delays: Delays, workers: Mapping[int, int], size: int
    ) -> None:
        self._seconds = seconds
        self._delays = delays
        self._workers = dict(workers)
        self._size = size
        self._step = -1

    def __call__(self, parameters: np.ndarray, samples: Any, targets: Any) -> np.ndarray:
        step = round(float(parameters[0]))
        worker = self._workers[os.getpid()]
        seconds = self._delays.seconds(step, worker, self._seconds * len(samples))
        if step == self._step:  # held up once a step, not once a part
            seconds -= self._delays.seconds(step, worker, 0.0)
        self._step = step
        time.sleep(seconds)
        gradient = np.zeros(self._size, np.float32)
        gradient[0] = -len(samples)
        return gradient


def measured(
    lab: NetworkLab,
    aggregation: Aggregation,
    delays: Delays,
    *,
    nbytes: int,
    computation: float,
    steps: int,
) -> np.ndarray:
    """Seconds of each step of a training in the lab, as its leader saw them."""
    pids = lab.client.run(os.getpid, workers=lab.workers)
    columns = {pids[worker]: i for i, worker in enumerate(lab.workers)}
    samples = 840  # which can be cut into many equal parts
    size = nbytes // 4
    result = train(
        Synthetic(computation / samples, delays, columns, size),
        np.zeros(size, np.float32),
        (np.zeros((samples, 1), np.float32), np.zeros(samples, np.float32)),
        optimizer=SGD(1.0),
        steps=steps,
        aggregation=aggregation,
        client=lab.client,
        workers=lab.workers,
        leader=[lab.free],
    )
    assert round(float(result.parameters[0])) == steps
    return np.array([step.seconds for step in result.history])


def lab_rows(report: Report, cases: Iterable[Case], workers: int, fan_in: int) -> None:
    """Measure all aggregations in the network lab, and the recommendation."""
    for case in cases:
        with NetworkLab(workers, case.rate, free_rate=case.rate) as lab:
            costs = measure_costs(client=lab.client, workers=lab.workers, leader=[lab.free])
            costs = Costs(costs.latency, costs.bandwidth, costs.summation, case.computation)
            delays = case.delays(workers)
            steps = 1 + case.undelayed + case.delayed
            found = {}
            for name, aggregation in choices(workers, fan_in, 2, stragglers=1).items():
                seconds = measured(
                    lab,
                    aggregation,
                    delays,
                    nbytes=case.nbytes,
                    computation=case.computation,
                    steps=steps,
                )
                found[name] = case.means(seconds)
                click.echo(f"  {case.gradient} {name}: {show(found[name])}", err=True)
        add_rows(report, found, case, f"lab, {workers} workers", workers)
        add_predictions(report, found, case, costs, workers)


def show(seconds: Mapping[str, float]) -> str:
    """Milliseconds, for people."""
    return ", ".join(f"{1e3 * value:.1f} ms ({name})" for name, value in seconds.items())


# --------------------------------------------------------------------------------------- simulated


def simulated_rows(
    report: Report, cases: Iterable[Case], shapes: Iterable[tuple[int, ...]]
) -> None:
    """Simulate all aggregations at the clusters of the paper."""
    for case in cases:
        for workers, fan_in, depth, stragglers in shapes:
            costs = Costs(
                latency=3e-4,
                bandwidth=bits_per_second(case.rate) / 8,
                summation=1e-9,
                computation=case.computation,
            )
            delays = case.delays(workers)
            found = {}
            for name, aggregation in choices(workers, fan_in, depth, stragglers).items():
                simulation = TrainingSimulation(
                    aggregation.plan(workers), costs, case.nbytes, delays
                )
                seconds = simulation.run(1 + case.undelayed + case.delayed).seconds
                found[name] = case.means(seconds)
            add_rows(report, found, case, f"simulated, ({fan_in}, {depth}) tree", workers)


# -------------------------------------------------------------------------------------------- rows


def add_rows(
    report: Report, found: Mapping[str, Mapping[str, float]], case: Case, where: str, workers: int
) -> None:
    """Steps of each aggregation over those of its references."""
    for delays in ("none", "additive"):
        keys: dict[str, Any] = {
            "gradient_bytes": case.nbytes,
            "link": case.rate,
            "delays": delays,
            "where": where,
            "workers": workers,
        }
        for name, seconds in found.items():
            report.add(
                f"{where}, {case.gradient}, delays {delays}: {name}",
                "step",
                seconds[delays] * 1e3,
                "ms",
                aggregation=name,
                **keys,
            )
        for name, references in REFERENCES.items():
            for reference in references:
                # Claimed for small gradients on machines that straggle.
                claimed = name == "CodedReduce" and delays != "none" and case.nbytes < 10**6
                claim = CLAIMS.get(reference) if claimed else None
                report.add(
                    f"{where}, {case.gradient}, delays {delays}: {name} over {reference}",
                    "step_over_reference",
                    found[name][delays] / found[reference][delays],
                    goal=1 / claim if claim else None,
                    aggregation=name,
                    reference=reference,
                    **keys,
                )


def add_predictions(
    report: Report,
    found: Mapping[str, Mapping[str, float]],
    case: Case,
    costs: Costs,
    workers: int,
) -> None:
    """What the timing model says, with measured costs, over what was measured."""
    report.machine[f"costs at {case.rate}"] = str(costs)
    recommendation = recommend(costs, workers, case.nbytes)
    for prediction in (recommendation.best, *recommendation.others):
        name = of_shape(prediction, found)
        if name is None:
            continue
        report.add(
            f"{case.gradient}: {prediction}, measured {found[name]['none'] * 1e3:.3g}",
            "predicted_over_measured",
            prediction.seconds / found[name]["none"],
            aggregation=name,
            gradient_bytes=case.nbytes,
            link=case.rate,
            recommended=prediction is recommendation.best,
        )
    chosen = of_shape(recommendation.best, found)
    if chosen is not None:
        report.add(
            f"{case.gradient}: {recommendation.best.shape} recommended, over the best measured",
            "recommended_over_best",
            found[chosen]["none"] / min(seconds["none"] for seconds in found.values()),
            goal=1.1,
            aggregation=chosen,
            gradient_bytes=case.nbytes,
            link=case.rate,
        )


def of_shape(prediction: Prediction, found: Mapping[str, Any]) -> str | None:
    """The name here of what was predicted."""
    names = {"Ring": "ring", "Star": "star", "Tree": "tree", "GradientCoding": "gradient coding"}
    name = names.get(prediction.shape.kind, prediction.shape.kind)
    return name if name in found else None


@click.command()
@options
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["lab", "simulated"]),
    help="Not both parts.",
)
def main(json_file: Path | None, png_file: Path | None, smoke: bool, only: tuple[str, ...]) -> None:
    """Time steps of trainings whose gradients are summed in different ways."""
    if png_file is not None:
        raise click.UsageError("This benchmark has tables only, no picture.")
    parts = only or ("lab", "simulated")
    report = Report("aggregation")
    if "lab" in parts:
        if reason := unavailable():
            report.machine["lab"] = reason
            click.echo(f"No measurement on links: {reason}", err=True)
        elif smoke:
            lab_rows(report, LAB_SMOKE, workers=6, fan_in=2)
        else:
            lab_rows(report, LAB, workers=12, fan_in=3)
    if "simulated" in parts:
        if smoke:
            simulated_rows(report, PAPER_SMOKE, [(20, 4, 2, 4)])
        else:
            simulated_rows(report, PAPER, [(84, 4, 3, 21), (156, 12, 2, 13)])
    report.finish(json_file)


if __name__ == "__main__":
    main()
