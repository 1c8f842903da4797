"""GradiVeQ (Yu et al., NeurIPS 2018): aggregation and accuracy beside other compressions.

Sections, for each network: `accuracy` replays each compression, `aggregation` times steps with 4
and 8 workers, with and without segments that overlap, `powersgd` trains by PyTorch's hook. `energy`
says how much of each layer's gradient principal directions keep, `errors` what sums lose in a ring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.papers import Claim, Finding, Paper, Section
from benchmarks.evidence.summing import Qsgd
from benchmarks.evidence.tables import span, table
from benchmarks.evidence.trainings import (
    TARGETS,
    Method,
    add_curve,
    curve,
    links,
    load,
    net_of,
    one_thread,
    replays,
    size_of,
    steps_to,
    time_steps,
)
from benchmarks.evidence.verdicts import Interval, Published, mean, ratio
from dask_coded.compression import (
    Codec,
    GradiVeQ,
    Partial,
    Projection,
    Quantization,
    Truncation,
)
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
    checked : bool
        Whether replays check the steps; those of a large network take longer than the steps.
    """

    net: str
    link: str
    runs: int
    replayed: tuple[Method, ...]
    rank: int
    suffix: str = ""
    checked: bool = True

    @property
    def powersgd(self) -> Method:
        return Method("PowerSGD", "DDP", f"PowerSGD {self.rank}")

    @property
    def timed(self) -> tuple[Method, ...]:
        """Four segments overlap compression with communication; PyTorch's is not replayed."""
        return (
            *self.replayed,
            Method("none, 4 segments", "ring, 4 segments", "none"),
            Method("GradiVeQ, 4 segments", "ring, 4 segments", "GradiVeQ"),
            Method("PyTorch DDP", "DDP", "none"),
            self.powersgd,
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
    Trial("residual", "50mbit", 3, SOME, 48, "-residual", checked=False),
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
    timed = trial.timed
    some = [timed[0], trial.replayed[-1], timed[-1]] if kept.smoke else timed
    with links(kept, trial.net, 2 if kept.smoke else workers, trial.link) as there:
        for method in some:
            time_steps(kept, there, trial.net, method, turn, trial.checked)


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
    "energy": Section({"all": energy}, 2),
    "errors": Section({"all": errors}, 1),
}


# ------------------------------------------------------------------------------- what was measured


def _steps(kept: Kept, trial: Trial, workers: int, method: str) -> list[dict[str, Any]]:
    rows = kept.rows(measure="step", net=trial.net, workers=workers, method=method)
    return sorted(rows, key=lambda row: row["turn"])


def _summing(rows: list[dict[str, Any]]) -> np.ndarray:
    """Return the seconds of each turn from the end of computing until all have the sum."""
    return np.array([row["value"] - row["computing"] for row in rows])


def faster(kept: Kept) -> list[Finding]:
    """Find how many times as fast gradients are summed as without compression."""
    found = []
    for trial, workers in itertools.product(TRIALS, WORKERS):
        plain = _steps(kept, trial, workers, "none")
        for method in trial.replayed:
            if method.compression not in ("GradiVeQ", "GradiVeQ, period 100"):
                continue
            ours = _steps(kept, trial, workers, method.name)
            count = min(len(plain), len(ours))
            if not count:
                continue
            theirs, ours = _summing(plain[:count]), ours[:count]
            packed = np.array([row["compressed"] for row in ours])
            for what, times in (("all steps", _summing(ours)), ("compressed steps", packed)):
                share = 100 * times.mean() / np.mean([row["value"] for row in ours])
                found.append(
                    Finding(
                        f"{trial.net} network, {workers} workers, {method.name}, {what}",
                        ratio(theirs, times),
                        None,
                        f"summing is still {share:.0f} % of a step: messages cost time at any size",
                    )
                )
    return found


def seconds(kept: Kept, trial: Trial, workers: int = WORKERS[0]) -> dict[str, np.ndarray]:
    """Return the seconds to the accuracy of each method, by seed; infinite if never."""
    found = {}
    runs = kept.rows(measure="curve", net=trial.net)
    for method in dict.fromkeys(run["method"] for run in runs):
        each = [
            row["value"] * steps_to(run)
            for row in _steps(kept, trial, workers, method)
            for run in runs
            if (run["method"], run["seed"]) == (method, row["turn"])
        ]
        if each:
            found[method] = np.array(each)
    return found


def end_to_end(kept: Kept) -> list[Finding]:
    """Find how many times as long training to the accuracy takes without compression."""
    found = []
    for trial in TRIALS:
        times = seconds(kept, trial)
        if not times.keys() >= {"none", "GradiVeQ"}:
            continue
        count = min(len(times["none"]), len(times["GradiVeQ"]))
        theirs, ours = times["none"][:count], times["GradiVeQ"][:count]
        if np.isfinite([theirs, ours]).all():
            value, reason = ratio(theirs, ours), f"{_slower(kept, trial):.1f} times as many steps"
        else:
            value, reason = Interval(0, 0, 0), "some seeds never reach the accuracy"
        found.append(Finding(f"{trial.net} network", value, None, reason))
    return found


def _slower(kept: Kept, trial: Trial) -> float:
    """Return how many times as many steps GradiVeQ needs to the accuracy, by medians over seeds."""
    plain, ours = (
        np.median([steps_to(run) for run in kept.rows(measure="curve", net=trial.net, method=name)])
        for name in ("none", "GradiVeQ")
    )
    return float(ours / plain)


def lost(kept: Kept) -> list[Finding]:
    """Find how many points of accuracy each compression loses."""
    found = []
    for trial in TRIALS:
        rows = kept.rows(measure="curve", net=trial.net)
        plain = {row["seed"]: row["value"] for row in rows if row["method"] == "none"}
        for method in trial.replayed:
            if not method.compression.startswith("GradiVeQ"):
                continue
            some = [row for row in rows if row["method"] == method.name and row["seed"] in plain]
            if some:
                points = [100 * (plain[row["seed"]] - row["value"]) for row in some]
                gained, usual = (
                    _gained([row for row in rows if row["method"] == name])
                    for name in (method.name, "none")
                )
                reason = (
                    f"in the last quarter of the steps it still gains {gained:.1f} points, without "
                    f"compression {usual:.1f}"
                )
                found.append(
                    Finding(
                        f"{trial.net} network, {method.name}",
                        mean(points),
                        None,
                        reason if np.mean(points) > 1 else "",
                    )
                )
    return found


def _gained(rows: list[dict[str, Any]]) -> float:
    """Return how many points of accuracy the last quarter of the steps adds, over seeds."""
    gained = []
    for row in rows:
        before = row["accuracy"][: max(len(row["accuracy"]) * 3 // 4, 1)]
        gained.append(100 * (row["value"] - np.mean(before[-3:])))
    return float(np.median(gained))


# ------------------------------------------------------------------------------------------- tables


def comparison(kept: Kept) -> Iterator[str]:
    for trial, workers in itertools.product(TRIALS, WORKERS):
        found = kept.rows(measure="step", net=trial.net, workers=workers)
        if not found:
            continue
        yield (
            f"## Compressions beside each other: {trial.net} network, {workers} workers, links of "
            f"{trial.link}\n"
        )
        yield (
            f"Medians over turns; time to the accuracy is that of {trial.runs} seeds. *Summing* is "
            "from the end of computing until all have the sum; PyTorch overlaps the two, but "
            "PowerSGD has one bucket, because with several its hook ends the workers; its bytes "
            "contain those of its first two steps, which are not compressed."
            + ("" if trial.checked else " These steps are not compared with replays.")
        )
        times = seconds(kept, trial, workers)
        lines = []
        for name in dict.fromkeys(row["method"] for row in found):
            rows = _steps(kept, trial, workers, name)
            step, received = (np.median([row[key] for row in rows]) for key in ("value", "bytes"))
            computed = all(row["computing"] is not None for row in rows)
            summing = f"{1e3 * np.median(_summing(rows)):.0f} ms" if computed else "–"
            lines.append(
                [
                    name,
                    f"{received / 2**10:.0f} KiB",
                    summing,
                    f"{1e3 * step:.0f} ms",
                    span(times[name], "s") if name in times else "–",
                ]
            )
        to = f"time to {TARGETS[trial.net]:.0%}"
        yield from table(["", "received in a step", "summing", "step", to], lines)


def accuracies(kept: Kept) -> Iterator[str]:
    for trial in TRIALS:
        rows = kept.rows(measure="curve", net=trial.net)
        if not rows:
            continue
        last = max(max(row["steps"]) for row in rows)
        to = f"steps to {TARGETS[trial.net]:.0%}"
        yield f"## Accuracy of each compression: {trial.net} network\n"
        yield f"{to.capitalize()} and accuracy after {last} steps: medians and ranges over seeds."
        lines = []
        for name in dict.fromkeys(row["method"] for row in rows):
            runs = [row for row in rows if row["method"] == name]
            taken = span([steps_to(run) for run in runs], digits=0)
            final = span([run["value"] for run in runs], digits=3)
            lines.append([name, str(len(runs)), taken, final])
        yield from table(["", "seeds", to, "accuracy"], lines)


def kept_energy(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="energy")
    if not rows:
        return
    yield "## How much of a layer's gradient its directions keep\n"
    yield (
        "Mean share of the squared norm over the compressed steps of two periods, and the least, "
        "for principal directions and for as many random ones."
    )
    lines = []
    for layer, period in dict.fromkeys((row["layer"], row["period"]) for row in rows):
        cells = []
        for directions in ("principal", "random"):
            (row,) = kept.rows(measure="energy", layer=layer, period=period, directions=directions)
            cells.append(f"{row['value']:.2f} ({row['least']:.2f})")
        lines.append([f"{layer}, period {period + 1}", *cells])
    yield from table(["", "principal", "random"], lines)


def lost_in_sums(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="error")
    if not rows:
        return
    yield "## What a sum loses on its way round a ring\n"
    yield "Error of a sum of real gradients, relative to its norm."
    lines = []
    for codec in dict.fromkeys(row["codec"] for row in rows):
        found = {row["workers"]: row["value"] for row in kept.rows(measure="error", codec=codec)}
        lines.append([codec, *(f"{found[workers]:.2g}" for workers in WORKERS)])
    yield from table(["", *(f"{workers} workers" for workers in WORKERS)], lines)


_TIMED = tuple(trial.steps(workers) for trial in TRIALS for workers in WORKERS)
_CURVES = tuple(trial.curves for trial in TRIALS)

PAPER = Paper(
    name="gradiveq",
    title="Evidence: GradiVeQ",
    intro=(
        "GradiVeQ (Yu et al., NeurIPS 2018, arXiv:1811.03617) projects slices of a gradient on "
        "their principal directions, which can be added up in a ring as they are. "
        "[Compression](../gradiveq.md) explains it. Here a convolutional network of 80,000 weights "
        "learns MNIST, and a residual one of 1.2 million weights learns made images of the size of "
        "CIFAR's, on worker processes behind limited links; the paper's networks are larger."
    ),
    claims=(
        Claim(
            "Aggregation, times as fast as without compression",
            Published(5, float("inf"), "times"),
            "abstract",
            "fairly sure",
            _TIMED,
            faster,
        ),
        Claim(
            "Time to accuracy end to end, 4 workers",
            Published(50, 50),
            "abstract",
            'fairly sure, "almost"',
            (*_CURVES, *(trial.steps(WORKERS[0]) for trial in TRIALS)),
            end_to_end,
        ),
        Claim(
            "Accuracy lost",
            Published(0, 1, "level", "points", at_most=True),
            'abstract, "not noticeable"; the limit of one point is ours',
            "sure",
            _CURVES,
            lost,
        ),
    ),
    sections=SECTIONS,
    parts=(comparison, accuracies, kept_energy, lost_in_sums, replays),
)
