"""CodedReduce: expected time of a step and its order; delays from short to long, beside others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.papers import Claim, Finding, Paper, Section
from benchmarks.evidence.slower import NETS, one_slower, slower
from benchmarks.evidence.tables import span, spans, table
from benchmarks.evidence.verdicts import Interval, Published, mean, ratio
from dask_coded.aggregation import Aggregation, CodedReduce, GradientCoding, Tree
from dask_coded.aggregation.expectation import expected_step
from dask_coded.aggregation.timing import Costs, Shape, communication
from dask_coded.aggregation.trees import shape
from dask_coded.simulation import (
    Delays,
    Speeds,
    SqueezeSimulation,
    TrainingSimulation,
    additive,
    proportional,
)

#: Steps of the sweep, and single steps for an expected time, of each seed.
SEEDS, STEPS, DRAWS = 5, 8, 10
#: Links of 500 Mbit/s; a gradient of 5,000 numbers, as of the data set gisette.
LATENCY, BANDWIDTH, SUMMATION, NBYTES = 3e-4, 6.25e7, 1e-9, 40_000
#: In the sweep, 5 % of the workers are delayed in a step, by so many times a worker's even share.
SHARE, RATIOS = 0.05, (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
#: Mean of the random part of a worker's time over its constant part, in expected times.
STRAGGLING = 1.0


def costs(computation: float) -> Costs:
    """Return costs in which one worker computes the whole batch in so many seconds."""
    return Costs(LATENCY, BANDWIDTH, SUMMATION, computation)


# -------------------------------------------------------------------------------- expected seconds

#: Seconds in which one worker computes the whole batch.
COMPUTATIONS = {"messages dominate": 0.1, "both count": 1.0, "computation dominates": 10.0}

#: Fan-ins of trees with one late child per parent; the last one is a star.
FAN_INS = {84: (4, 6, 10, 14, 28, 84), 156: (4, 6, 12, 14, 28, 156)}

#: Fan-ins of (n, 2) trees for the order in N, and the seconds of the whole batch: nearly nothing.
ORDERS, NEARLY_NOTHING = (8, 16, 32), 0.01


def once(
    aggregation: Aggregation, workers: int, computation: float, draws: int, seed: int
) -> np.ndarray:
    """Return the simulated seconds of single steps."""
    ended = []
    for draw in range(draws):
        delays = proportional(workers, 1, straggling=STRAGGLING, seed=seed * draws + draw)
        plan = aggregation.plan(workers)
        ended.append(TrainingSimulation(plan, costs(computation), NBYTES, delays).run(1).ended[0])
    return np.array(ended)


def expected(kept: Kept, seed: int) -> None:
    """Add the expected and the simulated seconds of trees for the same workers."""
    for workers, fan_ins in FAN_INS.items():
        for about, computation in COMPUTATIONS.items():
            for fan_in in fan_ins[: 1 if kept.smoke else None]:
                _, depth = shape(workers, 1, fan_in=fan_in)
                tree = CodedReduce(fan_in, depth)
                found = expected_step(
                    tree, workers, costs(computation), NBYTES, straggling=STRAGGLING
                )
                times = once(tree, workers, computation, 2 if kept.smoke else DRAWS, seed)
                kept.report.add(
                    f"{workers} workers, {about}, ({fan_in}, {depth}), seed {seed}",
                    "expected",
                    float(times.mean()),
                    "s",
                    workers=workers,
                    about=about,
                    fan_in=fan_in,
                    depth=depth,
                    seed=seed,
                    variance=float(times.var(ddof=1)),
                    draws=len(times),
                    least=found.least,
                    most=found.most,
                )


def order(kept: Kept, seed: int) -> None:
    """Add the seconds of coded trees and of gradient coding for more and more workers."""
    for n in ORDERS[: 2 if kept.smoke else None]:
        workers = n + n * n
        ways: dict[str, CodedReduce | GradientCoding] = {
            "CodedReduce": CodedReduce(n, 2),
            "gradient coding": GradientCoding(1),
        }
        for name, aggregation in ways.items():
            found = expected_step(
                aggregation, workers, costs(NEARLY_NOTHING), NBYTES, straggling=STRAGGLING
            )
            draws = 1 if kept.smoke else 3
            kept.report.add(
                f"{name}, {workers} workers, seed {seed}",
                "order",
                float(once(aggregation, workers, NEARLY_NOTHING, draws, seed).mean()),
                "s",
                method=name,
                workers=workers,
                seed=seed,
                least=found.least,
                most=found.most,
            )


# ------------------------------------------------------------------------------------------- sweep


@dataclass(frozen=True)
class Setting:
    """Workers, the seconds of a worker's even share of a batch, and the bytes of a gradient.

    ``squeezed`` says whether `Squeeze` is simulated too: its messages grow with the square of the
    workers.
    """

    workers: int
    share: float
    tree: CodedReduce
    plain: Tree
    code: GradientCoding
    nbytes: int = NBYTES
    squeezed: bool = False

    @property
    def costs(self) -> Costs:
        return costs(self.share * self.workers)

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e6:g} MB" if self.nbytes >= 1e6 else f"{self.nbytes / 1e3:g} KB"
        return f"{self.workers} workers, share of {1e3 * self.share:g} ms, {size}"


_SMALL = (CodedReduce(6, 2), Tree(5, 2), GradientCoding(3))

SETTINGS = {
    "sweep-84": Setting(84, 1e-3, CodedReduce(4, 3), Tree(4, 3), GradientCoding(20)),
    "sweep-156": Setting(156, 1e-3, CodedReduce(12, 2), Tree(12, 2), GradientCoding(12)),
    "sweep-24": Setting(24, 1e-2, *_SMALL, squeezed=True),
    "sweep-24-large": Setting(24, 1e-2, *_SMALL, nbytes=8_000_000, squeezed=True),
}


def ring(setting: Setting, delays: Delays) -> np.ndarray:
    """Return the seconds of each step of a ring: its last worker, and all messages after it."""
    messages = communication(Shape("Ring"), setting.costs, setting.workers, setting.nbytes)
    return setting.share + delays.extra.max(axis=1) + messages


def squeezed(setting: Setting, delays: Delays, steps: int) -> np.ndarray:
    """Return the seconds of each step of `Squeeze`, to which a delay is a slow step."""
    speeds = Speeds(setting.share / (setting.share + delays.extra))
    units = 4 * setting.workers
    simulation = SqueezeSimulation(speeds, setting.costs, setting.nbytes, units=units)
    return np.array([step.seconds for step in simulation.run(steps)])


def sweep(kept: Kept, name: str, seed: int) -> None:
    """Add the mean step of each aggregation, with delays from short to long."""
    setting, steps = SETTINGS[name], 2 if kept.smoke else STEPS
    for times in RATIOS[3:4] if kept.smoke else RATIOS:
        delays = additive(
            setting.workers, steps, share=SHARE, mean=times * setting.share, seed=seed
        )
        found = {"ring": float(ring(setting, delays).mean())}
        ways = {
            "uncoded tree": setting.plain,
            "gradient coding": setting.code,
            "CodedReduce": setting.tree,
        }
        for way, aggregation in ways.items():
            plan = aggregation.plan(setting.workers)
            run = TrainingSimulation(plan, setting.costs, setting.nbytes, delays).run(steps)
            found[way] = float(run.ended.max()) / steps
        if setting.squeezed:
            found["Squeeze"] = float(squeezed(setting, delays, steps).mean())
        for way, seconds in found.items():
            kept.report.add(
                f"{setting}, delay {times:g}, seed {seed}: {way}",
                "delayed",
                seconds,
                "s",
                setting=name,
                times=times,
                method=way,
                seed=seed,
            )


# --------------------------------------------------------------------------------------- processes


def lab(kept: Kept, times: float, seed: int) -> None:
    """Add the mean step of logistic regression of gisette's shape on thin worker processes."""
    if not kept.processes:
        return
    from benchmarks.aggregation import Logistic, measured
    from benchmarks.network import NetworkLab
    from dask_coded.aggregation import Ring

    workers, steps, features = (4, 3, 8) if kept.smoke else (24, 15, 5000)
    samples = 840 if kept.smoke else 6552
    with NetworkLab(workers, "500mbit", free_rate="500mbit") as there:
        share = SETTINGS["sweep-24"].share
        delays = additive(workers, steps, share=SHARE, mean=times * share, seed=seed)
        ways: dict[str, Aggregation] = {
            "ring": Ring(),
            "gradient coding": GradientCoding(3),
            "CodedReduce": CodedReduce(),
        }
        for way, aggregation in ways.items():
            seconds = measured(
                there,
                aggregation,
                delays,
                nbytes=4 * features,
                computation=0.0,
                steps=steps,
                kind=Logistic,
                samples=samples,
            )
            kept.report.add(
                f"processes, delay {times:g}, seed {seed}: {way}",
                "on_processes",
                float(seconds[1:].mean()),
                "s",
                times=times,
                method=way,
                seed=seed,
            )


SECTIONS = {
    "expected": Section({f"seed {i}": partial(expected, seed=i) for i in range(SEEDS)}, 6),
    "order": Section({f"seed {i}": partial(order, seed=i) for i in range(SEEDS)}, 3),
    **{
        name: Section({f"seed {i}": partial(sweep, name=name, seed=i) for i in range(SEEDS)}, 8)
        for name in SETTINGS
    },
    "slower": Section({name: partial(slower, name=name) for name in NETS}, 2),
    "processes": Section(
        {
            f"seed {i}, delay {times:g}": partial(lab, times=times, seed=i)
            for i in range(SEEDS)
            for times in (0.1, 1.0, 10.0, 100.0)
        },
        20,
    ),
}


# ------------------------------------------------------------------------------- what was measured


def _values(kept: Kept, measure: str, **wanted: Any) -> np.ndarray:
    rows = kept.rows(measure=measure, **wanted)
    return np.array([row["value"] for row in sorted(rows, key=lambda row: row["seed"])])


def faster(kept: Kept, versus: str) -> list[Finding]:
    """Find how many times as long steps take with another aggregation as with CodedReduce."""
    found = []
    for times in (0.1, 1.0, 10.0, 100.0):
        ours = _values(kept, "on_processes", times=times, method="CodedReduce")
        theirs = _values(kept, "on_processes", times=times, method=versus)
        if len(ours) and len(ours) == len(theirs):
            found.append(Finding(f"24 processes, delay {times:g}", ratio(theirs, ours)))
    for name in ("sweep-84", "sweep-156"):
        for times in RATIOS:
            ours, theirs = (
                _values(kept, "delayed", setting=name, times=times, method=method)
                for method in ("CodedReduce", versus)
            )
            if len(ours):
                case = f"{SETTINGS[name].workers} workers, delay {times:g}"
                found.append(Finding(case, None, ratio(theirs, ours)))
    return found


def trees(kept: Kept) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
    """Yield workers, what dominates, and for each tree its expected and simulated seconds."""
    for workers in FAN_INS:
        for about in COMPUTATIONS:
            rows = kept.rows(measure="expected", workers=workers, about=about)
            some = []
            for fan_in in dict.fromkeys(row["fan_in"] for row in rows):
                same = [row for row in rows if row["fan_in"] == fan_in]
                some.append({**same[0], "simulated": _simulated(same)})
            if some:
                yield workers, about, some


def _simulated(rows: list[dict[str, Any]]) -> Interval:
    """Return the mean of all draws, with an interval that holds for all trees together."""
    value = float(np.mean([row["value"] for row in rows]))
    draws = sum(row["draws"] for row in rows)
    error = float(np.sqrt(np.mean([row["variance"] for row in rows]) / draws))
    count = len(COMPUTATIONS) * sum(map(len, FAN_INS.values()))
    reach = float(ndtri(1 - 0.025 / count)) * error
    return Interval(value, value - reach, value + reach)


def within(kept: Kept) -> list[Finding]:
    """Find the share of trees whose simulated interval meets the bounds of the expected time."""
    found = []
    for workers, about, some in trees(kept):
        inside = [row for row in some if _inside(row)]
        share = 100 * len(inside) / len(some)
        out = [f"({row['fan_in']}, {row['depth']})" for row in some if row not in inside]
        reason = f"outside: {', '.join(out)}" if out else ""
        value = Interval(share, float("nan"), float("nan"))
        found.append(Finding(f"{workers} workers, {about}", None, value, reason))
    return found


def _inside(row: dict[str, Any]) -> bool:
    low, high = row["simulated"].low, row["simulated"].high
    return bool(high >= row["least"] and low <= row["most"])


def best(kept: Kept) -> list[Finding]:
    """Find the simulated time of the tree that the formula chooses, over that of the fastest."""
    found = []
    for workers, about, some in trees(kept):
        chosen = min(some, key=lambda row: row["least"] + row["most"])
        fastest = min(some, key=lambda row: row["simulated"].value)
        times = [
            _values(kept, "expected", workers=workers, about=about, fan_in=row["fan_in"])
            for row in (chosen, fastest)
        ]
        reason = "" if chosen is fastest else f"the fastest is {_name(fastest)}"
        case = f"{workers} workers, {about}: {_name(chosen)}"
        found.append(Finding(case, None, ratio(*times), reason))
    return found


def _name(row: dict[str, Any]) -> str:
    return f"({row['fan_in']}, {row['depth']})"


def growth(kept: Kept, method: str) -> list[Finding]:
    """Find the power of the number of workers with which simulated steps grow."""
    rows = kept.rows(measure="order", method=method)
    powers = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        some = [(row["workers"], row["value"]) for row in rows if row["seed"] == seed]
        workers, seconds = np.log(some).T
        powers.append(float(np.polyfit(workers, seconds, 1)[0]))
    return [Finding("", None, mean(powers))] if powers else []


# ------------------------------------------------------------------------------------------ tables


def sweeps(kept: Kept) -> Iterator[str]:
    if not kept.rows(measure="delayed"):
        return
    yield "## Delays from short to long\n"
    yield (
        "Simulated: the package's state machines in virtual time. Milliseconds of a step, medians "
        f"and ranges of {SEEDS} seeds of {STEPS} steps; links of 500 Mbit/s, a latency of 0.3 ms. "
        f"{SHARE:.0%} of the workers, drawn in every step, are delayed by an exponential time; "
        "*delay* is its mean over the time in which a worker computes its even share. The least "
        "is bold. Gradient coding tolerates as large a share of late workers as the tree. A ring "
        "is not simulated: it waits for the last worker, then its messages follow. To `Squeeze` a "
        "delay is a step at lower speed. With more workers its messages are too many to simulate."
    )
    for name, setting in SETTINGS.items():
        rows = kept.rows(measure="delayed", setting=name)
        if not rows:
            continue
        names = list(dict.fromkeys(row["method"] for row in rows))
        yield f"\n### {setting}\n"
        lines = []
        for times in dict.fromkeys(row["times"] for row in rows):
            found = [
                1e3 * _values(kept, "delayed", setting=name, times=times, method=way)
                for way in names
            ]
            lines.append([f"{times:g}", *spans(found)])
        yield from table(["delay", *names], lines)


def expectations(kept: Kept) -> Iterator[str]:
    if not kept.rows(measure="expected"):
        return
    yield "## Expected time of a step\n"
    yield (
        "Computing takes a worker its load times a constant plus an exponential time of the same "
        "mean. The bounds are those of "
        "{func}`dask_coded.aggregation.expectation.expected_step`, with one late child per parent; "
        "simulated is the mean of "
        f"{SEEDS * DRAWS} single steps; the intervals hold for all trees together with "
        "95 %. Milliseconds; the least is bold."
    )
    lines = []
    for workers, about, some in trees(kept):
        chosen = min(some, key=lambda row: row["least"] + row["most"])
        fastest = min(some, key=lambda row: row["simulated"].value)
        for row in some:
            bounds = f"{1e3 * row['least']:.1f} to {1e3 * row['most']:.1f}"
            value, low, high = (1e3 * end for end in row["simulated"])
            simulated = f"{value:.1f} ({low:.1f} to {high:.1f})"
            lines.append(
                [
                    f"{workers} workers, {about}, {_name(row)}",
                    f"**{bounds}**" if row is chosen else bounds,
                    f"**{simulated}**" if row is fastest else simulated,
                ]
            )
    yield from table(["", "expected", "simulated"], lines)


def orders(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="order")
    if not rows:
        return
    yield "## How the time grows with the number of workers\n"
    yield (
        "Trees of two layers with one late child per parent, and gradient coding with one late "
        "worker, whose computing takes next to nothing. Milliseconds, medians and ranges of seeds."
    )
    lines = []
    for method, workers in dict.fromkeys((row["method"], row["workers"]) for row in rows):
        some = [row for row in rows if (row["method"], row["workers"]) == (method, workers)]
        bounds = f"{1e3 * some[0]['least']:.1f} to {1e3 * some[0]['most']:.1f}"
        lines.append(
            [f"{method}, {workers} workers", bounds, span([1e3 * row["value"] for row in some])]
        )
    yield from table(["", "expected", "simulated"], lines)


def plot(folder: Path, kept: Kept) -> None:
    """Draw the step of each aggregation by the delay, and expected times by the workers."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    for ax, (name, setting) in zip(axes, SETTINGS.items()):
        rows = kept.rows(measure="delayed", setting=name)
        for way in dict.fromkeys(row["method"] for row in rows):
            found = {
                times: 1e3 * _values(kept, "delayed", setting=name, times=times, method=way)
                for times in dict.fromkeys(row["times"] for row in rows)
            }
            ax.loglog(list(found), [np.median(each) for each in found.values()], label=way)
        ax.set(title=str(setting), xlabel="delay over computation", ylabel="ms a step")
        if rows:
            ax.legend()
    figure.savefig(folder / "coded-reduce-sweep.png")


_CITED = "Reisizadeh, Prakash, Pedarsani and Avestimehr, arXiv:1902.01981"

PAPER = Paper(
    name="coded-reduce",
    title="Evidence: CodedReduce",
    intro=(
        f"CodedReduce ({_CITED}) sums gradients up a tree with a gradient code at every parent. "
        "[CodedReduce](../coded-reduce.md) explains it, and how much the model of messages "
        "allows. The paper's clusters of 84 and 156 machines are simulated here, with the costs "
        "of messages that the tables name."
    ),
    claims=(
        *(
            Claim(
                f"Step, times as fast as with {versus}",
                Published(figure, figure, "times"),
                'abstract, "up to"',
                "sure, but not which tree",
                ("sweep-84", "sweep-156", "processes"),
                partial(faster, versus=versus),
            )
            for versus, figure in (("gradient coding", 27.2), ("ring", 7.0))
        ),
        Claim(
            "Trees whose simulated time is within the bounds of the formula",
            Published(100, 100, "level", "%"),
            "theorem on the expected time",
            "recalled; the bounds are ours",
            ("expected",),
            within,
        ),
        Claim(
            "Simulated time of the tree with the least expected time, over that of the fastest",
            Published(1, 1, "level", "times", at_most=True),
            "optimality",
            "inferred",
            ("expected",),
            best,
        ),
        Claim(
            "Growth of the time with N workers in trees of two layers, as a power of N",
            Published(0, 0.5, "level", "", at_most=True),
            "theorem on the expected time",
            "recalled, fairly sure",
            ("order",),
            partial(growth, method="CodedReduce"),
        ),
        Claim(
            "The same of gradient coding",
            Published(1, 1, "level", ""),
            "theorem on the expected time",
            "recalled, fairly sure",
            ("order",),
            partial(growth, method="gradient coding"),
        ),
    ),
    sections=SECTIONS,
    parts=(sweeps, one_slower, expectations, orders),
    plot=plot,
)
