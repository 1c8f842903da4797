"""What the papers on training share: methods, curves of accuracy, and steps over limited links.

How many steps an accuracy takes does not depend on a clock, so *curves* come from replays in this
process, five seeds each. How long steps take is measured on worker processes behind limited links,
with the gradients of the same network, method by method in turns. The time to an accuracy is the
product of both, seed by seed. Methods that add up the same numbers in another order have the same
curve, up to rounding. Of an asynchronous server nothing can be replayed: it trains for real.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import dask_coded as coded
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.summing import AllGather, HalvingDoubling, Qsgd
from benchmarks.network import NetworkLab, Traffic, unavailable
from benchmarks.replay import replay
from dask_coded.aggregation import Aggregation, Ring, Star
from dask_coded.compression import Compression, GradiVeQ, Quantization, Truncation
from dask_coded.loop import Progress
from dask_coded.training import SGD, Pipelined, Schedule, Synchronous

if TYPE_CHECKING:
    from benchmarks.images import Split
    from benchmarks.mnist import Net

#: The accuracy that a training is timed to. The wide network gets no further than 93 % in the runs
#: that tune it, whatever the rate.
TARGETS = {"convolutional": 0.97, "wide": 0.9, "residual": 0.93}

#: Steps that are not timed: the first waits for the data, the next fill the pipeline, and the last
#: drain it.
FILLING, DRAINING = 3, 3
#: How often a training is begun until all workers take part from its first step on.
_ATTEMPTS = 5

AGGREGATIONS: Mapping[str, Aggregation] = {
    "server": Star(),
    "ring": Ring(),
    "ring, 4 segments": Ring(segments=4),
    "halving-doubling": HalvingDoubling(),
    "all-gather": AllGather(),
}

COMPRESSIONS: Mapping[str, Compression | None] = {
    "none": None,
    "16 bits": Truncation(),
    "8 bits": Quantization(),
    "GradiVeQ": GradiVeQ(exact_steps=5, period=50),
    "GradiVeQ and 8 bits": GradiVeQ(exact_steps=5, period=50, codec=Quantization()),
    "GradiVeQ, period 100": GradiVeQ(exact_steps=5, period=100),
    "QSGD, 4 bits": Qsgd(levels=7),
    "TernGrad": Qsgd(levels=1, norm="max", block=2**20),
}


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    workers: int = 4
    batch: int = 128
    steps: int = 200
    every: int = 5
    timed: int = 8
    samples: int | None = None
    seeds: int = 5
    tuned: int = 3


SMOKE = Size(workers=2, batch=16, steps=6, every=2, timed=2, samples=200, seeds=1, tuned=1)


def size_of(kept: Kept) -> Size:
    """Return the size of a run."""
    return SMOKE if kept.smoke else Size()


@dataclass(frozen=True)
class Method:
    """A way to train.

    Parameters
    ----------
    name : str
    aggregation : str
        A key of `AGGREGATIONS`, or ``"DDP"`` for PyTorch alone.
    compression : str
        A key of `COMPRESSIONS`, or a hook of PyTorch.
    width : int
    """

    name: str
    aggregation: str = "ring"
    compression: str = "none"
    width: int = 1


def load(size: Size, net: str) -> tuple[Split, Split]:
    """Return the training and held-out images that a network learns."""
    from benchmarks import images, mnist

    training, held_out = images.made() if net == "residual" else mnist.load()
    return images.Split(*(part[: size.samples] for part in training)), held_out


def load_for_tuning(size: Size, net: str) -> tuple[Split, Split]:
    """Return the training images, cut in two: tuning must not see the held-out ones."""
    from benchmarks.images import Split

    training, _ = load(size, net)
    cut = len(training.targets) * 7 // 8
    return Split(*(part[:cut] for part in training)), Split(*(part[cut:] for part in training))


def net_of(kind: str) -> Net:
    """Return a network by name."""
    from benchmarks.mnist import Net

    return Net(kind)  # type: ignore[arg-type]


def schedule_of(width: int, warmup: int = 0) -> Schedule:
    return Synchronous() if width == 1 else Pipelined(width, warmup)


# ------------------------------------------------------------------------------------------ curves


def curve(
    kept: Kept,
    net: str,
    method: Method,
    optimizer: SGD,
    seed: int,
    *,
    warmup: int = 0,
    measure: str = "curve",
    longer: int = 1,
) -> None:
    """Replay a training, so many times as long, and add its accuracy after every few steps."""
    size = size_of(kept)
    training, judged_by = (load_for_tuning if measure == "tuning" else load)(size, net)
    chosen = net_of(net)
    trained = replay(
        chosen.gradient,
        chosen.start(seed),
        training,
        workers=size.workers,
        optimizer=optimizer,
        batch_size=size.batch,
        aggregation=AGGREGATIONS[method.aggregation],
        compression=COMPRESSIONS[method.compression],
        schedule=schedule_of(method.width, warmup),
        seed=seed,
        layers=chosen.layers(),
    )
    add_curve(
        kept,
        net,
        method,
        optimizer,
        seed,
        trained,
        judged_by,
        measure,
        warmup=warmup,
        longer=longer,
    )


def add_curve(
    kept: Kept,
    net: str,
    method: Method,
    optimizer: SGD,
    seed: int,
    trained: Iterator[np.ndarray],
    judged_by: Split,
    measure: str,
    updates: int = 1,
    warmup: int = 0,
    longer: int = 1,
) -> None:
    """Add the accuracy of parameters after every few steps, each of so many updates."""
    size = size_of(kept)
    count, every = longer * size.steps, longer * size.every
    chosen = net_of(net)
    steps, accuracy = [], []
    with one_thread(), np.errstate(over="ignore", invalid="ignore"):
        found = itertools.islice(_until_diverged(trained), count * updates)
        for update, parameters in enumerate(found, 1):
            diverged = not np.isfinite(parameters).all()
            if update % (every * updates) and not diverged:
                continue
            steps.append(update // updates)
            accuracy.append(chosen.accuracy(parameters, judged_by))
            if diverged:
                break
    final = float(np.mean(accuracy[-3:]))
    kept.report.add(
        f"{net}, {method.name}, {method.compression}, seed {seed}",
        measure,
        final,
        "",
        net=net,
        method=method.name,
        aggregation=method.aggregation,
        compression=method.compression,
        width=method.width,
        seed=seed,
        learning_rate=optimizer.learning_rate,
        momentum=optimizer.momentum,
        warmup=warmup,
        steps=steps,
        accuracy=accuracy,
    )


def _until_diverged(trained: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield parameters; NaN in the end if a gradient is not finite any more."""
    parameters = np.array([])
    try:
        for parameters in trained:
            yield parameters
    except FloatingPointError:
        yield np.full_like(parameters, np.nan)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as on the workers: the last digits of LAPACK depend on it."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield


def steps_to(row: Mapping[str, Any]) -> float:
    """Return the steps after which a curve reaches its network's accuracy; infinity if never.

    Examples
    --------
    >>> curve = {"net": "convolutional", "steps": [5, 10]}
    >>> [steps_to(curve | {"accuracy": [0.9, last]}) for last in (0.98, 0.95)]
    [10.0, inf]
    """
    target = TARGETS[row["net"]]
    return next(
        (float(s) for s, a in zip(row["steps"], row["accuracy"], strict=True) if a >= target),
        float("inf"),
    )


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tuning run that reaches the accuracy first, or else is the most accurate.

    Raises
    ------
    ValueError
        If there is none.
    """
    if not rows:
        raise ValueError("Rates are not tuned yet: measure the section 'tuning' of the network.")
    return min(rows, key=lambda row: (steps_to(row), -(row["value"] or 0.0)))


def optimizer_of(row: Mapping[str, Any]) -> SGD:
    return SGD(row["learning_rate"], momentum=row["momentum"])


# ------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Links:
    """A lab with the images on its workers."""

    lab: NetworkLab
    data: tuple[list[Any], list[Any]]
    rate: str


@contextmanager
def links(kept: Kept, net: str, workers: int, rate: str) -> Iterator[Links]:
    """Start workers with what a network learns; their links, and the server's, have a rate.

    Raises
    ------
    OSError
        If a network lab cannot run here.
    """
    if reason := unavailable():
        raise OSError(reason)
    training, _ = load(size_of(kept), net)
    with NetworkLab(workers, rate, free_rate=rate) as lab:
        kept.report.machine["links"] = rate
        samples, targets = (
            [
                lab.client.scatter(rows, workers=[worker], hash=False)
                for worker, rows in zip(lab.workers, np.array_split(part, workers), strict=True)
            ]
            for part in training
        )
        yield Links(lab, (samples, targets), rate)


def time_steps(
    kept: Kept, there: Links, net: str, method: Method, turn: int, checked: bool = True
) -> None:
    """Time the steps of a method and add their mean; the first turn may be checked by a replay."""
    compression = COMPRESSIONS.get(method.compression)
    # A whole period, because its steps differ.
    timed = compression.period if isinstance(compression, GradiVeQ) else size_of(kept).timed
    steps = FILLING + timed + DRAINING
    for _ in range(_ATTEMPTS):
        found = _timed(kept, there, net, method, turn, steps, checked and not turn)
        if found is not None:
            break
    else:
        raise RuntimeError(f"{method.name}: some workers were never there from the first step on.")
    seconds, computing, received, more = found
    kept.report.add(
        f"{net}, {method.name}, {method.compression}, {there.rate}, turn {turn}",
        "step",
        seconds,
        "s",
        net=net,
        method=method.name,
        aggregation=method.aggregation,
        compression=method.compression,
        width=method.width,
        link=there.rate,
        workers=len(there.lab.workers),
        turn=turn,
        computing=computing,
        bytes=received,
        **more,
    )


def _timed(
    kept: Kept, there: Links, net: str, method: Method, turn: int, steps: int, checked: bool
) -> tuple[float, float | None, float, dict[str, Any]] | None:
    """Return seconds of a step and of its computation, and bytes that a worker receives in it.

    None if a step was without some workers, such as those that were still importing PyTorch.
    """
    size, chosen, lab = size_of(kept), net_of(net), there.lab
    optimizer = SGD(0.01)
    if method.aggregation == "DDP":
        from benchmarks.evidence import ddp

        before = lab.traffic()
        hook = "" if method.compression == "none" else method.compression
        found = ddp.train(
            lab.client,
            lab.workers,
            chosen,
            there.data,
            optimizer=optimizer,
            batch=size.batch,
            steps=steps,
            hook=hook,
            seed=turn,
        )
        received = _received(before, lab.traffic(), steps)
        return float(found.seconds[FILLING:-DRAINING].mean()), None, received, {}
    compression = COMPRESSIONS[method.compression]
    begun: list[tuple[int, Traffic]] = []

    def callback(progress: Progress) -> None:
        if not begun:
            begun.append((progress.round, lab.traffic()))

    result = coded.training.train(
        chosen.gradient,
        chosen.start(),
        there.data,
        optimizer=optimizer,
        batch_size=size.batch,
        steps=steps,
        aggregation=AGGREGATIONS[method.aggregation],
        compression=compression,
        schedule=schedule_of(method.width),
        layers=chosen.layers(),
        seed=turn,
        client=lab.client,
        workers=lab.workers,
        leader=lab.free,
        callback=callback,
    )
    if any(0 < len(step.computing) < len(lab.workers) for step in result.history[:-DRAINING]):
        return None
    if checked and not result.aggregation.plan(len(lab.workers)).rooted:
        _check(kept, there, net, method, steps, result.parameters)
    (first, before) = begun[0]
    received = _received(before, lab.traffic(), max(steps - first, 1))
    # The leader does not hear who computed a step that ends while a new group is formed.
    history = [
        (number, step.seconds, max(step.computing.values()))
        for number, step in enumerate(result.history)
        if step.computing and np.isfinite(step.seconds)
    ]
    timed = range(FILLING, steps - DRAINING)
    some = [step for step in history if step[0] in timed]
    _, seconds, computing = np.mean(some, axis=0)
    more = {}
    if isinstance(compression, GradiVeQ):
        packed = [step for step in some if step[0] % compression.period >= compression.exact_steps]
        more["compressed"] = float(np.mean([seconds - busy for _, seconds, busy in packed]))
    return float(seconds), float(computing), received, more


def _check(
    kept: Kept, there: Links, net: str, method: Method, steps: int, found: np.ndarray
) -> None:
    """Add whether a training on the cluster ended with the bits of a replay."""
    size, chosen = size_of(kept), net_of(net)
    replayed = replay(
        chosen.gradient,
        chosen.start(),
        load(size, net)[0],
        workers=len(there.lab.workers),
        optimizer=SGD(0.01),
        batch_size=size.batch,
        aggregation=AGGREGATIONS[method.aggregation],
        compression=COMPRESSIONS[method.compression],
        schedule=schedule_of(method.width),
        layers=chosen.layers(),
    )
    with one_thread():
        expected = next(itertools.islice(replayed, steps - 1, None))
    kept.report.add(
        f"{net}, {method.name}, {method.compression}, {there.rate}",
        "equals_replay",
        found.tobytes() == expected.tobytes(),
        goal=1,
        goal_sense="at least",
        net=net,
        link=there.rate,
        workers=len(there.lab.workers),
        method=method.name,
    )


def replays(kept: Kept) -> Iterator[str]:
    """Yield how many trainings on the cluster ended with the bits of a replay."""
    rows = kept.rows(measure="equals_replay")
    if rows:
        same = sum(row["value"] for row in rows)
        yield "## Replays\n"
        yield (
            f"{same:.0f} of {len(rows)} trainings on the cluster ended with the parameters of "
            "their replay, to the last bit. Methods that add up the same numbers in another order "
            "share a curve; so do PyTorch's and our 16 bits, which round differently.\n"
        )


def _received(before: Traffic, after: Traffic, steps: int) -> float:
    return float((after.received - before.received)[:-1].mean()) / steps
