"""What is measured of GradiVeQ and of other compressions, for each network that trains.

Sections: `accuracy` replays each compression, `aggregation` times steps with 4 and 8 workers, with
and without segments that overlap, `powersgd` trains by PyTorch's hook. `energy` says how much of
each layer's gradient principal directions keep, `errors` what sums lose in a ring, `timeline` where
the time of a step goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.papers import Section
from benchmarks.evidence.summing import Qsgd
from benchmarks.evidence.timeline import timeline
from benchmarks.evidence.trainings import (
    Method,
    add_curve,
    curve,
    links,
    load,
    net_of,
    one_thread,
    size_of,
    time_steps,
)
from dask_coded.compression import Codec, GradiVeQ, Partial, Projection, Quantization, Truncation
from dask_coded.training import SGD

WORKERS = (4, 8)
#: All compressions train alike.
OPTIMIZER = SGD(0.05, momentum=0.9)

METHODS = (
    Method("none", "ring", "none"),
    Method("16 bits", "ring", "16 bits"),
    Method("8 bits", "ring", "8 bits"),
    Method("GradiVeQ", "ring", "GradiVeQ"),
    Method("GradiVeQ and 8 bits", "ring", "GradiVeQ and 8 bits"),
    Method("QSGD, round the ring", "ring", "QSGD, 4 bits"),
    Method("QSGD, all-gather", "all-gather", "QSGD, 4 bits"),
    Method("TernGrad, all-gather", "all-gather", "TernGrad"),
)
#: What a larger network is trained with. It has more numbers to fit directions to, for longer.
SOME = (
    *METHODS[:1],
    *METHODS[2:5],
    Method("GradiVeQ, period 100", "ring", "GradiVeQ, period 100"),
    METHODS[6],
)


@dataclass(frozen=True)
class Trial:
    """A network, the links that it trains over, and what is compared.

    Parameters
    ----------
    net, link : str
    runs : int
        Number of seeds, and of turns of timed steps.
    replayed : tuple of Method
    rank : int
        Rank with which PowerSGD sends about as many bytes as GradiVeQ; tables have the bytes.
    suffix : str
        How its sections are told from those of others.
    large : bool
        Whether its steps take seconds: replays, which take longer, do not check them, and with
        eight workers only some of the methods are timed.
    """

    net: str
    link: str
    runs: int
    replayed: tuple[Method, ...]
    rank: int
    suffix: str = ""
    large: bool = False

    @property
    def powersgd(self) -> Method:
        return Method("PowerSGD", "DDP", f"PowerSGD {self.rank}")

    def timed(self, workers: int) -> tuple[Method, ...]:
        """Return what is timed: also segments, which overlap, and what is not replayed."""
        others = (Method("PyTorch DDP", "DDP", "none"), self.powersgd)
        if self.large and workers > WORKERS[0]:
            return (*self.replayed[:4], *others)
        return (
            *self.replayed,
            Method("none, 4 segments", "ring, 4 segments", "none"),
            Method("GradiVeQ, 4 segments", "ring, 4 segments", "GradiVeQ"),
            *others,
        )

    @property
    def curves(self) -> str:
        """The section with its curves."""
        return f"accuracy{self.suffix}"

    def steps(self, workers: int) -> str:
        """Return the section with its steps."""
        return f"aggregation{self.suffix}-{workers}"


TRIALS = (
    Trial("convolutional", "20mbit", 5, METHODS, 16),
    Trial("residual", "50mbit", 3, SOME, 48, "-residual", large=True),
)
#: The network whose gradients are examined.
NET = TRIALS[0].net

LAYERS = ("convolution 1", "bias 1", "convolution 2", "bias 2", "dense 1", "bias 3", "dense 2")
#: Gradients are examined over two periods of this compression.
LOOKED_AT = GradiVeQ(residual=False)
LOOKED_AT_SMOKE = GradiVeQ(exact_steps=3, period=9, residual=False)

CODECS: dict[str, Codec] = {
    "16 bits": Truncation(),
    "8 bits": Quantization(),
    "QSGD, 4 bits": Qsgd(levels=7),
    "TernGrad": Qsgd(levels=1, norm="max", block=2**20),
    "8 bits, one scale": Quantization(block=2**20),
    "16 bits, evenly spaced": Quantization(bits=16),
}


# ---------------------------------------------------------------------------------------- sections


def replayed(kept: Kept, trial: Trial, method: Method, seed: int) -> None:
    """Replay a compression."""
    curve(kept, trial.net, method, OPTIMIZER, seed)


def aggregation(kept: Kept, trial: Trial, workers: int, turn: int) -> None:
    """Time the steps of all methods once."""
    if not kept.processes:
        return
    timed = trial.timed(workers)
    some = [timed[0], trial.replayed[-1], timed[-1]] if kept.smoke else timed
    with links(kept, trial.net, 2 if kept.smoke else workers, trial.link) as there:
        for method in some:
            time_steps(kept, there, trial.net, method, turn, not trial.large)


def powersgd(kept: Kept, trial: Trial, seed: int) -> None:
    """Train by PyTorch's PowerSGD on workers, and add its accuracy."""
    if not kept.processes:
        return
    from benchmarks.evidence import ddp

    size = size_of(kept)
    _, held_out = load(size, trial.net)
    with links(kept, trial.net, size.workers, trial.link) as there:
        found = ddp.train(
            there.lab.client,
            there.lab.workers,
            net_of(trial.net),
            there.data,
            optimizer=OPTIMIZER,
            batch=size.batch,
            steps=size.steps,
            hook=trial.powersgd.compression,
            every=size.every,
            seed=seed,
        )
    trained = iter([found.snapshots.get(step, np.zeros(1)) for step in range(1, size.steps + 1)])
    add_curve(kept, trial.net, trial.powersgd, OPTIMIZER, seed, trained, held_out, "curve")


def energy(kept: Kept) -> None:
    """Add the share of each layer's gradient that fitted and random directions keep."""
    net, choice = net_of(NET), LOOKED_AT_SMOKE if kept.smoke else LOOKED_AT
    compressors = {name: choice.compressor(net.layers(), 1) for name in ("principal", "random")}
    edges = [0, *itertools.accumulate(int(np.prod(layer)) for layer in net.layers())]
    shares: dict[str, list[Any]] = {name: [] for name in compressors}
    with one_thread():
        for step, gradient in enumerate(itertools.islice(_gradients(kept), 2 * choice.period)):
            for name, compressor in compressors.items():
                sent = compressor.expand(step, 0, compressor.compress(step, 0, gradient))
                parts = (
                    np.add.reduceat(v.astype(float) ** 2, edges[:-1]) for v in (sent, gradient)
                )
                found, whole = parts
                shares[name].append((found / np.maximum(whole, 1e-300)).tolist())
                if name == "random" and step % choice.period == choice.exact_steps - 1:
                    _forget(compressor)
    for number, layer in enumerate(LAYERS):
        both = {name: np.array(rows)[:, number] for name, rows in shares.items()}
        if np.all(both["principal"] > 1 - 1e-9):  # sent exactly
            continue
        for start in (0, choice.period):
            steps = slice(start + choice.exact_steps, start + choice.period)
            for name, share in both.items():
                kept.report.add(
                    f"{layer}, period {start // choice.period}, {name} directions",
                    "energy",
                    float(share[steps].mean()),
                    layer=layer,
                    directions=name,
                    period=start // choice.period,
                    least=float(share[steps].min()),
                )


def _gradients(kept: Kept) -> Iterator[np.ndarray]:
    """Yield the summed gradients of a training without compression."""
    size, net = size_of(kept), net_of(NET)
    training, _ = load(size, NET)
    parameters = net.start()
    state = OPTIMIZER.start(parameters)
    rng = np.random.default_rng(0)
    for step in itertools.count():
        rows = rng.choice(len(training.targets), size.batch, replace=False)
        _, gradient = net.gradient(parameters, training.samples[rows], training.targets[rows])
        yield gradient
        OPTIMIZER.update(parameters, gradient / size.batch, state, step)


def _forget(compressor: Projection) -> None:
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


def errors(kept: Kept) -> None:
    """Add the error of a sum of real gradients that is packed for every message of a ring."""
    size, net = size_of(kept), net_of(NET)
    training, _ = load(size, NET)
    for workers in WORKERS:
        cut = (np.array_split(part[: size.batch], workers) for part in training)
        parts = [net.gradient(net.start(), *rows)[1] for rows in zip(*cut)]
        exact = np.sum(parts, axis=0, dtype=float)
        for name, codec in CODECS.items():
            total = np.zeros_like(parts[0])
            for part in parts:
                total = codec.unpack(codec.pack(Partial(total + part))).vector
            error = float(np.linalg.norm(total - exact) / np.linalg.norm(exact))
            kept.report.add(
                f"{name}, {workers} workers", "error", error, codec=name, workers=workers
            )


SECTIONS = {
    **{
        trial.curves: Section(
            {
                f"seed {i}, {method.name}": partial(replayed, trial=trial, method=method, seed=i)
                for i in range(trial.runs)
                for method in trial.replayed
            },
            20,
        )
        for trial in TRIALS
    },
    **{
        trial.steps(workers): Section(
            {
                f"turn {i}": partial(aggregation, trial=trial, workers=workers, turn=i)
                for i in range(trial.runs)
            },
            20,
        )
        for trial in TRIALS
        for workers in WORKERS
    },
    **{
        f"powersgd{trial.suffix}": Section(
            {f"seed {i}": partial(powersgd, trial=trial, seed=i) for i in range(trial.runs)}, 20
        )
        for trial in TRIALS
    },
    "timeline-residual": Section(
        {
            f"{segments} segments": partial(
                timeline, net=TRIALS[1].net, link=TRIALS[1].link, segments=segments
            )
            for segments in (1, 4)
        },
        3,
    ),
    "energy": Section({"all": energy}, 2),
    "errors": Section({"all": errors}, 1),
}
