"""Rounds on workers of which some are slow: every policy, plain dask.array and NumPy, side by side.

Eight one-thread workers share two cores under CPU quotas; some of them are slowed five times. The
yardstick is the fluid bound: the time in which workers of the speeds measured with nothing else
running, before and after, all busy to the end and nothing computed in vain, can do a round.
Nothing is known of the workers beforehand unless a row says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import dask
import dask.array as da
import numpy as np
from distributed import wait

import dask_coded as coded
from benchmarks.cluster import Lab, play_rounds
from benchmarks.report import Report, Summary, options, picture
from dask_coded.planning import fluid_time

# (policy, predictor): the last is the default, which learns from round to round.
POLICIES = [
    ("static", "uniform"),
    ("s2c2", "uniform"),
    ("s2c2", "exponential"),
    ("continuous", "uniform"),
    ("continuous", "exponential"),
]


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    rows: int = 48_000
    columns: int = 8_000
    right: int = 16
    share: float = 0.18
    turns: int = 2
    rounds: int = 5
    codes: tuple[tuple[int, int], ...] = ((8, 6), (8, 4))
    slowed: tuple[int, ...] = (0, 1, 2)


SMOKE = Size(rows=240, columns=100, right=2, turns=1, rounds=2, codes=((4, 3),), slowed=(1,))


@dataclass
class Result:
    """Seconds of every round of one code with so many workers slowed, by policy."""

    bound: float = 0.0
    rounds: dict[str, list[float]] = field(default_factory=dict)


def run_case(lab: Lab, k: int, slowed: int, size: Size) -> Result:
    """All policies in turn, then dask.array, on workers of which some are slowed."""
    n = len(lab.workers)
    lab.set_speeds(math.inf)
    A = da.random.default_rng(0).standard_normal(
        (size.rows, size.columns), chunks=(-(-size.rows // n), -1)
    )
    x = np.random.default_rng(1).standard_normal((size.columns, size.right))
    C = coded.encode(A, coded.MDS(n, k), workers=lab.workers)
    local = lab.client.persist(A, workers=lab.workers)
    wait(local)
    lab.set_speeds([1 / 5] * slowed + [1] * (n - slowed))
    seconds = 1.0 if size.turns > 1 else 0.01
    lab.measure_speeds(C, x, seconds)  # the first touch of a new piece is slower
    before = lab.measure_speeds(C, x, seconds)
    result = Result()
    for _ in range(size.turns):
        for policy, predictor in POLICIES:
            with dask.config.set({"coded.policy": policy, "coded.predictor": predictor}):
                future = coded.submit(play_rounds, C, x, size.rounds, workers=[lab.free])
                name = f"{policy}, {'nothing known' if predictor == 'uniform' else 'learning'}"
                result.rounds.setdefault(name, []).extend(future.result())
        for name, compute in (
            ("dask.array", lambda: lab.client.compute(local @ x).result()),
            ("NumPy, one process", numpy_product(A.shape, x)),
        ):
            began = perf_counter()
            compute()
            result.rounds.setdefault(name, []).append(perf_counter() - began)
    speeds = (before + lab.measure_speeds(C, x, seconds)) / 2
    result.bound = fluid_time(speeds, k, -(-size.rows // k))
    return result


def numpy_product(shape: tuple[int, int], x: np.ndarray) -> Any:
    """The same product by NumPy in this process, unthrottled."""
    A = np.ones(shape)
    return lambda: A @ x


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Rounds over the fluid bound with 0, 1 and 2 of 8 workers slowed 5x."""
    size = SMOKE if smoke else Size()
    report = Report("stragglers")
    results: dict[tuple[int, int, int], Result] = {}
    kinds: set[str] = set()
    for n, k in size.codes:
        with Lab(n, size.share) as lab:
            kinds.add(lab.kind)
            for slowed in size.slowed:
                result = run_case(lab, k, slowed, size)
                results[n, k, slowed] = result
                for name, seconds in result.rounds.items():
                    policy = name.split(",")[0]
                    report.add(
                        f"({n},{k}), {slowed} slowed 5x: {name}",
                        "round_over_fluid",
                        Summary.of(np.array(seconds) / result.bound),
                        goal=1.2 if name == "continuous, nothing known" else None,
                        policy=policy,
                        known="nothing" if "nothing" in name else "earlier rounds",
                        n=n,
                        k=k,
                        slowed=slowed,
                        fluid_bound_seconds=result.bound,
                    )
    report.machine["throttle"] = ", ".join(sorted(kinds))
    if png_file:
        draw(png_file, results)
    report.finish(json_file)


def draw(file: Path, results: dict[tuple[int, int, int], Result]) -> None:
    """Medians as bars, one group per case."""
    with picture(file, figsize=(11, 5)) as figure:
        axes = figure.subplots()
        names = list(next(iter(results.values())).rounds)
        for i, name in enumerate(names):
            medians = [np.median(r.rounds[name]) / r.bound for r in results.values()]
            places = np.arange(len(results)) + (i - len(names) / 2) * 0.8 / len(names)
            axes.bar(places, medians, width=0.8 / len(names), label=name)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(results)))
        axes.set_xticklabels([f"({n},{k})\n{s} slowed" for n, k, s in results])
        axes.set_ylabel("median round over the fluid bound")
        axes.set_ylim(0, 4)
        axes.legend(fontsize="small", ncols=3, loc="upper left")


if __name__ == "__main__":
    main()
