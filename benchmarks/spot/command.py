"""The command line, and what a way has done while the fleet changed."""

from __future__ import annotations

import importlib.util
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.report import Report, options
from benchmarks.spot.fleets import Fleet, fleet, recorded
from benchmarks.spot.loads import (
    SMOKE,
    Run,
    Size,
    Training,
    Workload,
    logistic_load,
    pagerank_load,
)

# The longest round that is no pause, in median rounds.
_PAUSE = 3.0
# A way may take this many times as long as the replay, or so many seconds.
_PATIENCE, _LEAST_PATIENCE = 2.0, 60.0


@dataclass
class Outcome:
    """What a way has done while the fleet changed.

    Attributes
    ----------
    times : list of (int, float)
        Which round ended when.
    error : str
        Why there is no result.
    """

    result: np.ndarray | None = None
    began: float = field(default_factory=time.time)
    ended: float = math.nan
    read: int = 0
    error: str = ""
    times: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """How many different rounds have ended."""
        return len({i for i, _ in self.times})

    def measures(self, counts: Sequence[tuple[float, int]], enough: int) -> dict[str, float]:
        """Return what is to be reported, given when there were how many workers."""
        ends = np.array([self.began, *(at for _, at in self.times)])
        gaps = np.diff(ends)
        if not len(gaps):
            return {}
        first: dict[int, int] = {}
        for turn, (i, _) in enumerate(self.times):
            first.setdefault(i, turn)
        again = np.ones(len(gaps), dtype=bool)
        again[list(first.values())] = False
        kept = np.where(again, 0.0, np.minimum(gaps, _PAUSE * np.median(gaps)))
        at = np.array([moment for moment, _ in counts])
        there = np.array([count for _, count in counts])

        def workers(moments: np.ndarray) -> np.ndarray:
            return there[np.maximum(np.searchsorted(at, moments, side="right") - 1, 0)]

        during = workers(ends[:-1])
        full = during >= enough
        returned = [
            moment
            for moment, before, count in zip(at[1:], there, there[1:])
            if before < enough <= count and moment < ends[-1]
        ]
        waits = [ends[np.searchsorted(ends, moment)] - moment for moment in returned]
        return {
            "useful_worker_seconds": float(
                (kept * during)[full].sum() / (gaps * during)[full].sum()
            ),
            "longest_gap": float(gaps.max()),
            "resumed_after": max(waits, default=0.0),
        }


def noted(log: Path) -> list[tuple[int, float]]:
    """Return which round ended when; a training notes some of its rounds only."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(i), float(at)) for i, at in lines]


def undisturbed(run: Run, where: Path, rounds: int) -> float:
    """Return the seconds of a round while no worker comes or goes."""
    log = where / "calibration.log"
    run(rounds, log)
    (first, began), *_, (last, ended) = noted(log)
    return (ended - began) / (last - first)


def replay(
    found: Fleet, load: Workload, run: Run, log: Path, rounds: int, record: Any, patience: float
) -> Outcome:
    """Run rounds while the fleet follows its record."""
    outcome = Outcome()
    read = load.files.bytes_read

    def target() -> None:
        try:
            outcome.result = run(rounds, log)
        except Exception as exc:
            outcome.error = f"{type(exc).__name__}: {exc}"
        outcome.ended = time.time()

    # It may never return, in which case the cluster ends before it does.
    thread = threading.Thread(target=target, daemon=True)
    log.touch()
    with found.following(record):
        thread.start()
        thread.join(patience)
        if thread.is_alive():
            # What the thread does to it once the cluster ends is not read.
            outcome = replace(outcome, error=f"not finished after {patience:.0f} s")
    outcome.read = load.files.bytes_read - read
    outcome.times = noted(log)
    return outcome


def compare(
    report: Report, load: Workload, where: Path, size: Size, record: Any, seconds: float
) -> None:
    """Run a workload in both ways beside the same record, and report it."""
    rounds, undisturbed_seconds = 0, 0.0
    for way in ("coded", "dask"):
        if load.name == "training" and way == "dask" and not importlib.util.find_spec("xgboost"):
            continue
        case = f"{load.name}, {way}"
        ours = way == "coded"
        folder = where / case.replace(" ", "-")
        folder.mkdir()
        with fleet(record[0][1], folder) as found, getattr(load, way)(found.client, folder) as run:
            if not rounds:
                undisturbed_seconds = undisturbed(run, folder, size.calibration)
                rounds = max(size.calibration, int(0.8 * seconds / undisturbed_seconds))
            log = folder / "rounds.log"
            patience = max(_PATIENCE * seconds, _LEAST_PATIENCE)
            outcome = replay(found, load, run, log, rounds, record, patience)
            measures = outcome.measures(found.counts, load.enough)
        report.add(case, "rounds", rounds, "rounds")
        if outcome.error:
            print(f"{case}: {outcome.error[:500]}")
            report.add(case, "rounds_done", outcome.rounds, "rounds", error=outcome.error[:200])
        elif outcome.result is not None:
            expected = load.expected(rounds)
            error = float(np.abs(outcome.result - expected).max() / np.abs(expected).max())
            report.add(case, "relative_error", error, "ratio", goal=1e-9)
        if not math.isnan(taken := outcome.ended - outcome.began):
            report.add(case, "time_to_result", taken, "s")
            if ours:
                over = taken / (rounds * undisturbed_seconds)
                report.add(case, "time_over_undisturbed", over)
        again = outcome.read / load.files.size
        report.add(case, "source_read_again", again, "times", goal=0.0 if ours else None)
        goals = {"useful_worker_seconds": 0.95, "resumed_after": 2.0} if ours else {}
        for name, value in measures.items():
            useful = name == "useful_worker_seconds"
            report.add(
                case,
                name,
                value,
                unit="ratio" if useful else "s",
                goal=goals.get(name),
                goal_sense="at least" if useful else "at most",
            )


LOADS: dict[str, Callable[[Size, Path], Workload]] = {
    "pagerank": pagerank_load,
    "logistic": logistic_load,
    "training": Training,
}


@click.command()
@click.option("--begin", default=37_678.0, show_default=True, help="Where in the record, in s.")
@click.option("--seconds", default=4_000.0, show_default=True, help="How much of the record.")
@click.option("--speedup", default=20.0, show_default=True, help="How much faster it is replayed.")
@click.option("--only", multiple=True, type=click.Choice(list(LOADS)), help="Some workloads only.")
@options
def main(
    begin: float,
    seconds: float,
    speedup: float,
    only: tuple[str, ...],
    json_file: Path | None,
    png_file: Path | None,
    smoke: bool,
) -> None:
    """Replay a recorded fleet of spot machines beside algorithms, coded and by stock Dask."""
    size, record = Size(), recorded(begin, seconds, speedup) if not smoke else [(0.0, 4), (1.0, 2)]
    if smoke:
        size, seconds, speedup = SMOKE, 2.0, 1.0
    report = Report("spot")
    with tempfile.TemporaryDirectory(prefix="dask-coded-") as made:
        for name in only or LOADS:
            where = Path(made) / name
            where.mkdir()
            compare(report, LOADS[name](size, where), where, size, record, seconds / speedup)
    report.finish(json_file)
