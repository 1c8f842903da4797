"""Measure pipelined steps, which overlap computation with communication, and the cost of staleness.

On worker processes behind limited links, a ring sums a gradient whose computation takes 3, 1 or 1/3
times as long as its communication. A synchronous step takes the sum of the two. A pipelined step
should take the longer of them with width 2, and no less with width 3. The computation is either on
a separate device, as in each of the paper's nodes, or on the processors, which the workers share
with each other and with all communication. Then the paper's combination of width 2 and 8 bits in a
ring is compared with a synchronous parameter server, whose link has the same rate as the others.

Replays of a convolutional network on MNIST show how the stale gradients of widths 2 and 3 change
the accuracy, over learning rates. Those of one learning rate are checked against the cluster, bit
by bit.

Without a network lab only the replays are run.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import dask.array as da
import numpy as np

import dask_coded as coded
from benchmarks import mnist
from benchmarks.network import NetworkLab, unavailable
from benchmarks.replay import replay
from benchmarks.report import Report, Summary, options, picture
from dask_coded.aggregation import Aggregation, Ring, Star
from dask_coded.compression import Compression, Quantization
from dask_coded.training import SGD, Pipelined, Schedule, Synchronous

#: Seconds of computation over seconds of communication.
REGIMES = {"computation-bound": 3.0, "balanced": 1.0, "communication-bound": 1 / 3}

WIDTHS = (1, 2, 3)

#: Where gradients are computed: on a device that is not the worker's processor, or on it.
DEVICES = {"on a device": True, "on the processors": False}

#: Momentum 0.5 with five times the rate moves as far as 0.9 with the same gradients.
OPTIMIZERS = (
    *(SGD(rate, momentum=0.9) for rate in (0.01, 0.02, 0.05, 0.1)),
    *(SGD(rate, momentum=0.5) for rate in (0.05, 0.1, 0.25)),
)


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    workers: int = 4
    rate: str = "100mbit"
    #: Length of the gradient that is timed.
    numbers: int = 2**18
    #: Timed steps of a training, and trainings of each kind, which take turns.
    steps: int = 8
    turns: int = 2
    #: Settings of the network that learns.
    batch: int = 128
    optimizers: tuple[SGD, ...] = OPTIMIZERS
    learning_steps: int = 120
    samples: int | None = None


SMOKE = Size(
    workers=2,
    rate="100mbit",
    numbers=2**12,
    steps=2,
    turns=1,
    batch=16,
    optimizers=OPTIMIZERS[:1],
    learning_steps=10,
    samples=400,
)

#: Steps that are not timed: the first waits for the data, the next fill the pipeline, and the last
#: drain it.
FILLING, DRAINING = 3, 3


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Time steps by width, against the longer of computation and communication."""
    size = SMOKE if smoke else Size()
    report = Report("pipeline")
    if reason := unavailable():
        report.machine["without a network lab"] = reason
        print(f"Skipping the runs over limited links: {reason}")
    else:
        with NetworkLab(size.workers, size.rate, free_rate=size.rate) as lab:
            lab_steps = Steps(lab, size)
            unhidden = lab_steps.communication()
            for where, (regime, ratio) in itertools.product(DEVICES, REGIMES.items()):
                by_width(report, size, lab_steps, regime, where, ratio * unhidden)
            against_a_server(report, size, lab_steps, REGIMES["communication-bound"] * unhidden)
            as_replayed(report, size, lab)
    accuracies = accuracy_by_learning_rate(report, size)
    if png_file is not None:
        draw(png_file, size, accuracies)
    report.finish(json_file)


# -------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Busy:
    """A gradient of ones that takes a given time.

    Parameters
    ----------
    seconds
        On a device: seconds that the thread waits. Otherwise its seconds of processor time in
        NumPy's loops, nearly all without the interpreter's lock, like a real gradient.
    on_device
        Whether a separate device computes.
    """

    seconds: float
    on_device: bool

    def __call__(self, parameters: Any, samples: Any, targets: Any) -> np.ndarray:
        if self.on_device:
            time.sleep(self.seconds)
            return np.ones_like(parameters)
        end = time.thread_time() + self.seconds
        block = np.ones(2**17)
        while time.thread_time() < end:
            np.add(block, 0.0, out=block)
        return np.ones_like(parameters)


class Timed(NamedTuple):
    """Means over the steps of a training.

    Parameters
    ----------
    seconds
        Seconds of a step. Single steps mean little in a pipeline, because two may end at once.
    computing
        Seconds that its slowest worker computed.
    """

    seconds: float
    computing: float


class Steps:
    """Trainings of the synthetic gradient in a lab."""

    def __init__(self, lab: NetworkLab, size: Size) -> None:
        self._lab = lab
        self._size = size
        self._data = (np.zeros((size.workers, 1)), np.zeros(size.workers))

    def run(
        self,
        computing: float,
        schedule: Schedule,
        aggregation: Aggregation | None = None,
        compression: Compression | None = None,
        on_device: bool = False,
    ) -> Timed:
        """Time the steps of one training.

        Parameters
        ----------
        computing
            Seconds that a gradient should take while all workers compute.
        schedule, aggregation, compression
            As for `dask_coded.training.train`; a ring by default.
        on_device
            Whether the gradient takes no processor time.
        """
        # Workers that compute at the same time share the cores.
        share = 1.0 if on_device else min(1.0, (os.cpu_count() or 1) / self._size.workers)
        result = coded.training.train(
            Busy(computing * share, on_device),
            np.zeros(self._size.numbers, dtype=np.float32),
            self._data,
            optimizer=SGD(0.1),
            steps=FILLING + self._size.steps + DRAINING,
            schedule=schedule,
            aggregation=aggregation or Ring(),
            compression=compression,
            client=self._lab.client,
            workers=self._lab.workers,
            leader=self._lab.free,
        )
        history = result.history[FILLING:-DRAINING]
        # The leader does not hear who computed a step that ends while a new group is formed.
        slowest = [max(step.computing.values()) for step in history if step.computing]
        return Timed(float(np.mean([step.seconds for step in history])), float(np.mean(slowest)))

    def communication(self) -> float:
        """Return the seconds of a step with nothing to compute."""
        self.run(0.0, Synchronous())  # workers import what they need
        return self.run(0.0, Synchronous()).seconds


def schedule_of(width: int) -> Schedule:
    return Synchronous() if width == 1 else Pipelined(width)


def by_width(
    report: Report, size: Size, steps: Steps, regime: str, where: str, computing: float
) -> None:
    """Time the widths in turns, with the same computation."""
    found: dict[int, list[Timed]] = {width: [] for width in WIDTHS}
    for _ in range(size.turns):
        for width in WIDTHS:
            timed = steps.run(computing, schedule_of(width), on_device=DEVICES[where])
            found[width].append(timed)
    computation = float(np.median([timed.computing for timed in found[1]]))
    communication = float(np.median([timed.seconds - timed.computing for timed in found[1]]))
    longer = max(computation, communication)
    keys: dict[str, Any] = {
        "workers": size.workers,
        "link": size.rate,
        "regime": regime,
        "computed": where,
    }
    report.add(f"{regime}, {where}", "computation", computation * 1e3, "ms", **keys)
    report.add(f"{regime}, {where}", "communication", communication * 1e3, "ms", **keys)
    synchronous = np.array([timed.seconds for timed in found[1]])
    for width in WIDTHS:
        case = f"{regime}, {where}, width {width}"
        seconds = np.array([timed.seconds for timed in found[width]])
        ratio = Summary.of(seconds / longer, "range")
        goal = 1.1 if width == 2 else None
        report.add(case, "step_over_longer", ratio, goal=goal, width=width, **keys)
        if width > 1:
            gain = Summary.of(seconds / synchronous, "range")
            report.add(case, "step_over_synchronous", gain, width=width, **keys)


def against_a_server(report: Report, size: Size, steps: Steps, computing: float) -> None:
    """Measure the gain of each technique that the paper combines."""
    cases: dict[str, tuple[Schedule, Aggregation, Compression | None]] = {
        "parameter server": (Synchronous(), Star(), None),
        "ring": (Synchronous(), Ring(), None),
        "ring, width 2": (Pipelined(2), Ring(), None),
        "ring, width 2, 8 bits": (Pipelined(2), Ring(), Quantization()),
    }
    seconds = {name: np.empty(size.turns) for name in cases}
    for turn in range(size.turns):
        for name, (schedule, aggregation, compression) in cases.items():
            timed = steps.run(computing, schedule, aggregation, compression)
            seconds[name][turn] = timed.seconds
    server = seconds.pop("parameter server")
    keys: dict[str, Any] = {"workers": size.workers, "link": size.rate}
    report.add("parameter server", "step", Summary.of(server * 1e3, "range"), "ms", **keys)
    for name, ours in seconds.items():
        goal = 1 / 5.4 if "8 bits" in name else None
        report.add(name, "step_over_server", Summary.of(ours / server, "range"), goal=goal, **keys)


# ---------------------------------------------------------------------------------------- accuracy


def settings(size: Size, optimizer: SGD, width: int) -> dict[str, Any]:
    """Return the settings for training the network."""
    return {
        "optimizer": optimizer,
        "batch_size": size.batch,
        "schedule": schedule_of(width),
        "aggregation": Ring(),
    }


def accuracy_by_learning_rate(report: Report, size: Size) -> dict[int, list[float]]:
    """Return the accuracy on the held-out images by width, for each learning rate."""
    training, held_out = mnist.load()
    data = mnist.Split(*(part[: size.samples] for part in training))
    found: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for optimizer in size.optimizers:
        rate, momentum = optimizer.learning_rate, optimizer.momentum
        for width in WIDTHS:
            trained = replay(
                mnist.gradient,
                mnist.start(),
                data,
                workers=size.workers,
                **settings(size, optimizer, width),
            )
            accuracies = [
                mnist.accuracy(parameters, held_out)
                for step, parameters in enumerate(itertools.islice(trained, size.learning_steps))
                # Averages the last checks, ten steps apart: a single one depends on the last batch.
                if step % 10 == 9 and step >= size.learning_steps - 50
            ]
            found[width].append(float(np.mean(accuracies)))
            keys: dict[str, Any] = {"width": width, "learning_rate": rate, "momentum": momentum}
            case = f"learning rate {rate:g}, momentum {momentum:g}, width {width}"
            report.add(case, "accuracy", Summary.of(accuracies, "range"), "", **keys)
            if width > 1:
                difference = found[width][-1] - found[1][-1]
                report.add(case, "accuracy_difference", difference, "", **keys)
    return found


def as_replayed(report: Report, size: Size, lab: NetworkLab) -> None:
    """Check that the cluster ends with the parameters of a replay, to the last bit."""
    training, _ = mnist.load()
    data = mnist.Split(*(part[: size.samples] for part in training))
    steps = min(size.learning_steps, 30)
    for width in WIDTHS[1:]:
        chosen = settings(size, size.optimizers[0], width)
        chunks = -(-len(data.targets) // size.workers)
        result = coded.training.train(
            mnist.gradient,
            mnist.start(),
            tuple(da.from_array(part, chunks=(chunks, *part.shape[1:])) for part in data),
            steps=steps,
            client=lab.client,
            workers=lab.workers,
            leader=lab.free,
            **chosen,
        )
        replayed = replay(mnist.gradient, mnist.start(), data, workers=size.workers, **chosen)
        parameters = next(itertools.islice(replayed, steps - 1, None))
        same = result.parameters.tobytes() == parameters.tobytes()
        report.add(
            f"width {width}, {steps} steps of the network",
            "equals_replay",
            same,
            goal=1,
            goal_sense="at least",
            width=width,
        )


def draw(file: Path, size: Size, accuracies: Mapping[int, Sequence[float]]) -> None:
    """Plot accuracy over the learning rate, one line for each width and momentum."""
    with picture(file, figsize=(6, 4)) as figure:
        axes = figure.subplots()
        for momentum, style in ((0.9, "o-"), (0.5, "s:")):
            for width, values in accuracies.items():
                points = [
                    (optimizer.learning_rate, value)
                    for optimizer, value in zip(size.optimizers, values)
                    if optimizer.momentum == momentum
                ]
                label = f"width {width}, momentum {momentum:g}"
                axes.plot(*np.array(points).reshape(-1, 2).T, style, color=f"C{width}", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("accuracy")
        axes.legend()


if __name__ == "__main__":
    main()
