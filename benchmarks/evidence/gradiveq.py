"""GradiVeQ (Yu et al., NeurIPS 2018): its claims, and other compressions beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.evidence.compressions import SECTIONS, TRIALS, WORKERS, Trial
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.papers import Claim, Finding, Paper
from benchmarks.evidence.tables import span, table
from benchmarks.evidence.timeline import timelines
from benchmarks.evidence.trainings import TARGETS, replays, steps_to
from benchmarks.evidence.verdicts import Interval, Published, mean, ratio


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
            + (" These steps are not compared with replays." if trial.large else "")
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
    parts=(comparison, timelines, accuracies, kept_energy, lost_in_sums, replays),
)
