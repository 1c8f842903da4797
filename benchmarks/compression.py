"""Measure compressed gradients: a convolutional network on MNIST over slow links.

There are three questions, each answered relative to no compression:

* What is lost: how much of each layer's gradient the principal directions keep, and for how long,
  compared with as many random directions; and the error of a sum that is packed for every message.
* How many steps the same accuracy takes: trainings are replayed in this process.
* How long these steps take: the same trainings run on worker processes behind limited links, in a
  ring, with their bytes counted on the links. They end with the replayed parameters, bit by bit.

Without a network lab the last part is skipped, and the report has the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import dask.array as da
import numpy as np
from threadpoolctl import threadpool_limits

import dask_coded as coded
from benchmarks import mnist
from benchmarks.network import NetworkLab, Traffic, unavailable
from benchmarks.replay import replay
from benchmarks.report import Report, Summary, options, picture
from dask_coded.aggregation import Ring
from dask_coded.compression import (
    Codec,
    Compression,
    GradiVeQ,
    Partial,
    Projection,
    Quantization,
    Truncation,
)
from dask_coded.loop import Progress
from dask_coded.training import SGD, TrainingResult

LAYERS = ("convolution 1", "bias 1", "convolution 2", "bias 2", "dense 1", "bias 3", "dense 2")

COMPRESSIONS: dict[str, Compression | None] = {
    "none": None,
    "16 bits": Truncation(),
    "8 bits": Quantization(),
    "GradiVeQ": GradiVeQ(exact_steps=5, period=50),
    "GradiVeQ and 8 bits": GradiVeQ(exact_steps=5, period=50, codec=Quantization()),
}

CODECS: dict[str, Codec] = {
    "16 bits": Truncation(),
    "8 bits": Quantization(),
    "8 bits, one scale": Quantization(block=2**20),
    "16 bits, evenly spaced": Quantization(bits=16),
}

#: Gradients are examined over two periods of this compression.
LOOKED_AT = GradiVeQ(residual=False)


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    workers: tuple[int, ...] = (4, 8)
    rate: str = "20mbit"
    batch: int = 128
    target: float = 0.97
    #: Steps before the accuracy is first checked, steps between checks, and most steps.
    before: int = 40
    every: int = 5
    most: int = 400
    #: Seeds of the order of the samples.
    seeds: tuple[int, ...] = (0, 1, 2)
    looked_at: GradiVeQ = LOOKED_AT
    samples: int | None = None
    compressions: tuple[str, ...] = tuple(COMPRESSIONS)


SMOKE = Size(
    workers=(2,),
    rate="100mbit",
    batch=16,
    target=0.15,
    before=0,
    every=2,
    most=60,
    seeds=(0,),
    looked_at=GradiVeQ(exact_steps=3, period=9, residual=False),
    samples=400,
    compressions=("none", "8 bits", "GradiVeQ"),
)


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure bytes, time and accuracy of compressed gradients, and how much of them is kept."""
    size = SMOKE if smoke else Size()
    training, held_out = mnist.load()
    training = mnist.Split(*(part[: size.samples] for part in training))
    report = Report("compression")
    energies = energy_kept(report, size, training)
    errors_of_sums(report, size, training)
    reason = unavailable()
    for workers in size.workers:
        goals = steps_to_accuracy(report, size, workers, training, held_out)
        if reason is None:
            on_the_cluster(report, size, workers, training, goals)
    if reason is not None:
        report.machine["without a network lab"] = reason
        print(f"Skipping the runs over limited links: {reason}")
    if png_file is not None:
        draw(png_file, energies)
    report.finish(json_file)


def settings(size: Size) -> dict[str, Any]:
    """Return the settings that all trainings share."""
    return {
        "optimizer": SGD(0.05, momentum=0.9),
        "batch_size": size.batch,
        "aggregation": Ring(),
        "layers": mnist.layers(),
    }


# ------------------------------------------------------------------------------------ what is lost


def energy_kept(
    report: Report, size: Size, training: mnist.Split
) -> dict[str, dict[str, np.ndarray]]:
    """Return the share of each layer's gradient kept by fitted and by random directions.

    Returns
    -------
    dict of dict of ndarray
        Shares by directions and layer, one per step; 1 in exact steps.
    """
    choice = size.looked_at
    compressors = {name: choice.compressor(mnist.layers(), 1) for name in ("principal", "random")}
    edges = [0, *itertools.accumulate(int(np.prod(layer)) for layer in mnist.layers())]
    shares: dict[str, list[list[float]]] = {name: [] for name in compressors}
    steps = 2 * choice.period
    for step, gradient in enumerate(itertools.islice(gradients(size, training), steps)):
        for name, compressor in compressors.items():
            kept = compressor.expand(step, 0, compressor.compress(step, 0, gradient))
            energy, whole = (
                np.add.reduceat(v.astype(float) ** 2, edges[:-1]) for v in (kept, gradient)
            )
            shares[name].append((energy / np.maximum(whole, 1e-300)).tolist())
            if name == "random" and step % choice.period == choice.exact_steps - 1:
                forget(compressor)
    found = {
        name: {layer: np.array(share) for layer, share in zip(LAYERS, np.transpose(rows))}
        for name, rows in shares.items()
    }
    for layer, share in found["principal"].items():
        if np.all(share > 1 - 1e-9):  # sent exactly
            continue
        for start in range(0, steps, choice.period):
            ends = np.linspace(start + choice.exact_steps, start + choice.period, 4).astype(int)
            for first, end in itertools.pairwise(ends.tolist()):
                for name in compressors:
                    report.add(
                        f"{layer}, steps {first} to {end - 1}",
                        "energy_kept",
                        Summary.of(found[name][layer][first:end]),
                        directions=name,
                        layer=layer,
                        after_fit=first - start - choice.exact_steps,
                    )
    return found


def gradients(size: Size, training: mnist.Split) -> Iterator[np.ndarray]:
    """Yield the summed gradients of a training without compression."""
    optimizer = settings(size)["optimizer"]
    parameters = mnist.start()
    state = optimizer.start(parameters)
    rng = np.random.default_rng(0)
    for step in itertools.count():
        rows = rng.choice(len(training.targets), size.batch, replace=False)
        _, gradient = mnist.gradient(parameters, training.samples[rows], training.targets[rows])
        yield gradient
        optimizer.update(parameters, gradient / size.batch, state, step)


def forget(compressor: Projection) -> None:
    """Replace the learnt directions with as many random ones."""
    rng = np.random.default_rng(0)
    state = [
        (
            period,
            [
                (None, np.linalg.qr(rng.standard_normal(basis.shape[::-1]))[0].T)
                for _, basis in runs
            ],
        )
        for period, runs in compressor.state()
    ]
    compressor.restore(state)


def errors_of_sums(report: Report, size: Size, training: mnist.Split) -> None:
    """Measure the error of a sum of real gradients that is packed for every message of a ring."""
    for workers in size.workers:
        cut = (np.array_split(part[: size.batch], workers) for part in training)
        parts = [mnist.gradient(mnist.start(), *rows)[1] for rows in zip(*cut)]
        exact = np.sum(parts, axis=0, dtype=float)
        for name, codec in CODECS.items():
            total = np.zeros_like(parts[0])
            for part in parts:
                total = codec.unpack(codec.pack(Partial(total + part))).vector
            report.add(
                f"{name}, {workers} workers",
                "sum_relative_error",
                float(np.linalg.norm(total - exact) / np.linalg.norm(exact)),
                codec=name,
                workers=workers,
            )


# ----------------------------------------------------------------------- how many steps, how long


class Goal(NamedTuple):
    """Steps and parameters with which a training reaches the target accuracy."""

    steps: int
    parameters: np.ndarray


def steps_to_accuracy(
    report: Report, size: Size, workers: int, training: mnist.Split, held_out: mnist.Split
) -> dict[str, Goal]:
    """Replay the trainings to the target accuracy; return the goals for the first seed."""
    # Different numbers of workers only change the order of the samples.
    seeds = size.seeds if workers == size.workers[0] else size.seeds[:1]
    goals = {
        name: [_goal(size, workers, COMPRESSIONS[name], seed, training, held_out) for seed in seeds]
        for name in size.compressions
    }
    steps = {name: np.array([goal.steps for goal in found]) for name, found in goals.items()}
    for name in size.compressions:
        keys: dict[str, Any] = {"compression": name, "workers": workers}
        case = f"{name}, {workers} workers"
        summary = Summary.of(steps[name], "range")
        report.add(case, "steps_to_accuracy", summary, "steps", accuracy=size.target, **keys)
        if name != "none":
            ratio = Summary.of(steps[name] / steps["none"], "range")
            report.add(case, "steps_to_accuracy_over_none", ratio, accuracy=size.target, **keys)
    return {name: found[0] for name, found in goals.items()}


def _goal(
    size: Size,
    workers: int,
    compression: Compression | None,
    seed: int,
    training: mnist.Split,
    held_out: mnist.Split,
) -> Goal:
    trained = replay(
        mnist.gradient,
        mnist.start(),
        training,
        workers=workers,
        compression=compression,
        seed=seed,
        **settings(size),
    )
    # One thread as on the workers, because the last digits of LAPACK depend on their number.
    with threadpool_limits(1):
        for step, parameters in enumerate(itertools.islice(trained, size.most), start=1):
            if step <= size.before or step % size.every:
                continue
            if mnist.accuracy(parameters, held_out) >= size.target:
                break
    return Goal(step, parameters.copy())


@dataclass(frozen=True)
class Trained:
    """Costs of a training on the cluster.

    Attributes
    ----------
    steps
        Number of steps.
    seconds
        Seconds of each step except the first, which waits for the data. The last is missing, too,
        if the end of the training was reported before that of the step.
    aggregation
        Part of these seconds after the slowest worker has computed its gradient.
    bytes
        Bytes that workers received, per step.
    replayed
        Whether the parameters equal those of the replay to the last bit.
    """

    steps: int
    seconds: np.ndarray
    aggregation: np.ndarray
    bytes: float
    replayed: bool


def on_the_cluster(
    report: Report, size: Size, workers: int, training: mnist.Split, goals: Mapping[str, Goal]
) -> None:
    """Train over limited links, and compare with the training without compression."""
    with NetworkLab(workers, size.rate) as lab:
        held = [
            da.from_array(part, chunks=(-(-len(part) // workers), *part.shape[1:]))
            for part in training
        ]
        data = lab.client.persist(held, workers=lab.workers)
        _train(lab, size, data, None, 3)  # workers import PyTorch
        trained = {
            name: _measure(lab, size, data, COMPRESSIONS[name], goal)
            for name, goal in goals.items()
        }
        del data  # otherwise workers that leave first would send it to the others
    none = trained["none"]
    for name, found in trained.items():
        case = f"{name}, {workers} workers, {size.rate}"
        keys: dict[str, Any] = {"compression": name, "workers": workers, "link": size.rate}
        report.add(case, "equals_replay", found.replayed, goal=1, goal_sense="at least", **keys)
        share = float(found.aggregation.sum() / found.seconds.sum())
        report.add(case, "aggregation_share_of_step", share, **keys)
        if name == "none":
            report.add(case, "bytes_per_step", found.bytes / 2**20, "MiB", **keys)
            report.add(case, "step", Summary.of(found.seconds * 1e3), "ms", **keys)
            continue
        report.add(case, "bytes_over_none", found.bytes / none.bytes, **keys)
        aggregation = float(found.aggregation.mean() / none.aggregation.mean())
        report.add(case, "aggregation_over_none", aggregation, **keys)
        step = float(found.seconds.mean() / none.seconds.mean())
        report.add(case, "step_over_none", step, **keys)
        time = step * found.steps / none.steps
        ours = name == "GradiVeQ"
        report.add(case, "time_to_accuracy_over_none", time, goal=0.5 if ours else None, **keys)
        choice = COMPRESSIONS[name]
        if isinstance(choice, GradiVeQ):
            numbers = np.arange(1, len(found.seconds) + 1) % choice.period
            compressed = found.aggregation[numbers >= choice.exact_steps]
            if len(compressed):
                ratio = Summary.of(compressed / np.median(none.aggregation))
                goal = 0.2 if ours else None
                report.add(case, "compressed_aggregation_over_none", ratio, goal=goal, **keys)


def _measure(
    lab: NetworkLab, size: Size, data: list[Any], compression: Compression | None, goal: Goal
) -> Trained:
    begun: list[tuple[int, Traffic]] = []

    def callback(progress: Progress) -> None:
        if not begun:  # by now the workers have the data
            begun.append((progress.round, lab.traffic()))

    result = _train(lab, size, data, compression, goal.steps, callback)
    (first, before), after = begun[0], lab.traffic()
    received = (after.received - before.received)[:-1].sum()
    history = [step for step in result.history[1:] if np.isfinite(step.seconds)]
    seconds = np.array([step.seconds for step in history])
    computing = np.array([max(step.computing.values()) for step in history])
    return Trained(
        goal.steps,
        seconds,
        seconds - computing,
        float(received) / max(goal.steps - first, 1),
        result.parameters.tobytes() == goal.parameters.tobytes(),
    )


def _train(
    lab: NetworkLab,
    size: Size,
    data: list[Any],
    compression: Compression | None,
    steps: int,
    callback: Any = None,
) -> TrainingResult:
    return coded.training.train(
        mnist.gradient,
        mnist.start(),
        tuple(data),
        steps=steps,
        compression=compression,
        client=lab.client,
        workers=lab.workers,
        leader=lab.free,
        callback=callback,
        **settings(size),
    )


# -------------------------------------------------------------------------------------- the picture


def draw(file: Path, energies: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Plot the share of each layer's gradient that is kept, over the steps."""
    layers = [layer for layer, share in energies["principal"].items() if np.any(share < 1 - 1e-9)]
    with picture(file, figsize=(9, 4)) as figure:
        axes = figure.subplots()
        for number, layer in enumerate(layers):
            for name, style in (("principal", "-"), ("random", ":")):
                share = energies[name][layer]
                axes.plot(share, style, color=f"C{number}", label=f"{layer}, {name} directions")
        axes.set_xlabel("step")
        axes.set_ylabel("share of the gradient's energy that is kept")
        axes.set_ylim(0, 1.02)
        axes.legend()


if __name__ == "__main__":
    main()
