"""Measure how long a training step takes with each aggregation, on real links.

``python -m benchmarks.aggregation`` trains with a gradient function that computes nothing but takes
a given time, delays included: only the summation is real. In the network lab each of 12 workers is
a process behind its own link, and the root is behind a link of the same rate. The clusters of the
CodedReduce paper are simulated by `benchmarks.evidence`.

Steps without delays come first, then steps with delays. The former are reported as a median, the
latter as a mean, because it matters how often a step is late. Delays are drawn in advance and are
the same for all aggregations. From the costs that `measure_costs` finds, the timing model predicts
the steps without delays and recommends an aggregation. Both are compared with the measurements.

Workers sleep instead of computing, because twelve workers on the cores of one machine would slow
each other down, which is not the question here. Their messages do cost processor time, which is
visible in a ring of twelve with its 264 messages per step.
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
from scipy.special import expit

from benchmarks.network import NetworkLab, unavailable
from benchmarks.report import Report, options
from dask_coded.aggregation import (
    Aggregation,
    CodedReduce,
    DynamicClusters,
    GradientCoding,
    Ring,
    Star,
    StaticClusters,
    Tree,
)
from dask_coded.aggregation.timing import Costs, Prediction, recommend
from dask_coded.simulation import Delays, additive
from dask_coded.training import SGD, train
from dask_coded.training.costs import measure_costs

#: References of each aggregation: its step time is divided by theirs.
REFERENCES = {
    "star": ["ring"],
    "tree": ["ring", "star"],
    "gradient coding": ["ring", "star"],
    "GC-SC": ["gradient coding"],
    "GC-DC": ["GC-SC"],
    "CodedReduce": ["gradient coding", "ring", "tree", "star"],
}


@dataclass(frozen=True)
class Case:
    """Size of a gradient, rate of the links, and steps with and without delays.

    Parameters
    ----------
    nbytes : int
        Bytes of a float32 gradient.
    rate : str
        Rate of each link.
    computation : float
        Seconds that one worker would need for the whole batch.
    share, mean : float
        Probability that a worker is delayed in a step, and the mean delay in seconds.
    undelayed, delayed : int
        Numbers of steps without and with delays. One more step at the start is not counted.
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
        """Return the size of the gradient for display."""
        kilobytes = self.nbytes / 1000
        return f"{kilobytes:g} KB" if kilobytes < 1000 else f"{kilobytes / 1000:g} MB"

    def delays(self, workers: int, seed: int = 0) -> Delays:
        """Return the delays of all steps: none in the first ones, random ones in the others."""
        quiet = 1 + self.undelayed
        drawn = additive(workers, self.delayed, share=self.share, mean=self.mean, seed=seed)
        extra = np.concatenate([np.zeros((quiet, workers)), drawn.extra])
        return Delays(np.ones_like(extra), extra)

    def means(self, seconds: np.ndarray) -> dict[str, float]:
        """Return the seconds of a step without delays (median) and with them (mean)."""
        quiet, late = seconds[1 : 1 + self.undelayed], seconds[1 + self.undelayed :]
        return {"none": float(np.median(quiet)), "additive": float(late.mean())}


LAB = [
    Case(40_000, "100mbit", 0.12, share=0.05, mean=0.2, undelayed=10, delayed=25),
    Case(8_000_000, "400mbit", 1.2, share=0.05, mean=2.0, undelayed=2, delayed=3),
]
LAB_SMOKE = [Case(4_000, "100mbit", 0.004, share=0.2, mean=0.01, undelayed=2, delayed=2)]


def choices(workers: int, fan_in: int, depth: int, stragglers: int) -> dict[str, Aggregation]:
    """Return the aggregations to compare, for the number of workers of a tree.

    Gradient coding tolerates ``stragglers`` late workers, the coded tree one late child of each
    parent, and clusters one late worker each. In the paper's trees the first two are the same share
    of the workers.
    """
    return {
        "star": Star(),
        "ring": Ring(),
        "tree": Tree(fan_in, depth),
        "gradient coding": GradientCoding(stragglers),
        "GC-SC": StaticClusters(size=4, load=2, code="cyclic"),
        "GC-DC": DynamicClusters(size=4, load=2, candidates=2, code="cyclic"),
        "CodedReduce": coded_reduce(workers, fan_in, depth),
    }


def coded_reduce(workers: int, fan_in: int, depth: int) -> Aggregation:
    """Return a coded tree with one late child per parent; an odd fan-in needs another tree."""
    if fan_in % 2:
        return CodedReduce(stragglers=1)
    return CodedReduce(fan_in, depth, stragglers=1)


# --------------------------------------------------------------------------------------------- lab


class Synthetic:
    """A gradient that takes a given time and counts the steps.

    Parameters
    ----------
    seconds : float
        Seconds per sample.
    delays : Delays
    workers : mapping of str to int
        Column of the delays for each process id.
    size : int
        Length of the gradient. Its first entry is -1 per sample, so that under plain gradient
        descent the first parameter is the number of the step.
    """

    def __init__(
        self, seconds: float, delays: Delays, workers: Mapping[str, int], size: int
    ) -> None:
        self._seconds = seconds
        self._delays = delays
        self._workers = dict(workers)
        self._size = size
        self._step = -1

    def __call__(self, parameters: np.ndarray, samples: Any, targets: Any) -> np.ndarray:
        step = round(float(parameters[0]))
        worker = self._workers[own_network()]
        seconds = self._delays.seconds(step, worker, self._seconds * len(samples))
        if step == self._step:  # delayed once per step, not once per part
            seconds -= self._delays.seconds(step, worker, 0.0)
        self._step = step
        time.sleep(seconds)
        gradient = np.zeros(self._size, np.float32)
        gradient[0] = -len(samples)
        return gradient

    @staticmethod
    def data(samples: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return samples and targets: of a synthetic gradient, next to nothing."""
        return np.zeros((samples, 1), np.float32), np.zeros(samples, np.float32)


class Logistic(Synthetic):
    """The gradient of logistic regression on random samples, whose workers are delayed.

    The parameters after the first one are those of the regression; the first one counts steps.
    """

    def __call__(self, parameters: np.ndarray, samples: Any, targets: Any) -> np.ndarray:
        gradient = super().__call__(parameters, samples, targets)
        error = expit(samples @ parameters[1:]) - targets
        # The learning rate of 1 is that of the counter.
        gradient[1:] = 0.01 * (samples.T @ error)
        return gradient

    @staticmethod
    def data(samples: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return random samples, and targets of some true parameters."""
        rng = np.random.default_rng(0)
        X = rng.standard_normal((samples, size - 1), dtype=np.float32)
        return X, (X @ rng.standard_normal(size - 1) > 0).astype(np.float32)


def own_network() -> str:
    """Return the network namespace of this process, which each worker of the lab has to itself."""
    return os.readlink("/proc/self/ns/net")


def measured(
    lab: NetworkLab,
    aggregation: Aggregation,
    delays: Delays,
    *,
    nbytes: int,
    computation: float,
    steps: int,
    kind: type[Synthetic] = Synthetic,
    samples: int = 840,  # has many divisors, so it splits into equal parts
) -> np.ndarray:
    """Train in the lab and return the seconds of each step, as measured by the leader."""
    networks = lab.client.run(own_network, workers=lab.workers)
    columns = {networks[worker]: i for i, worker in enumerate(lab.workers)}
    size = nbytes // 4
    result = train(
        kind(computation / samples, delays, columns, size),
        np.zeros(size, np.float32),
        kind.data(samples, size),
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
    """Measure all aggregations in the network lab, and check the recommendation."""
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
    """Format seconds as milliseconds for display."""
    return ", ".join(f"{1e3 * value:.1f} ms ({name})" for name, value in seconds.items())


# -------------------------------------------------------------------------------------------- rows


def add_rows(
    report: Report, found: Mapping[str, Mapping[str, float]], case: Case, where: str, workers: int
) -> None:
    """Add the steps of each aggregation, and their ratios to those of its references."""
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
                report.add(
                    f"{where}, {case.gradient}, delays {delays}: {name} over {reference}",
                    "step_over_reference",
                    found[name][delays] / found[reference][delays],
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
    """Add the timing model's predictions from measured costs, over the measured steps."""
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
    """Return the name used here for a predicted aggregation, or None if it was not measured."""
    names = {"Ring": "ring", "Star": "star", "Tree": "tree", "GradientCoding": "gradient coding"}
    name = names.get(prediction.shape.kind, prediction.shape.kind)
    return name if name in found else None


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Time training steps with different aggregations of gradients."""
    if png_file is not None:
        raise click.UsageError("This benchmark draws no picture: leave out --png.")
    report = Report("aggregation")
    if reason := unavailable():
        report.machine["lab"] = reason
        click.echo(f"Skipping the network lab: {reason}", err=True)
    elif smoke:
        lab_rows(report, LAB_SMOKE, workers=6, fan_in=2)
    else:
        lab_rows(report, LAB, workers=12, fan_in=3)
    report.finish(json_file)


if __name__ == "__main__":
    main()
