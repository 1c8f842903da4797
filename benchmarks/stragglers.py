"""Compare rounds with some slow workers: every policy, plain dask.array and NumPy, side by side.

Eight one-thread workers share two cores under CPU quotas; some of them are slowed five times. The
yardstick is the fluid bound: the time of a round in which all workers are busy to the end and no
work is wasted, at the speeds measured with nothing else running. Speeds are measured before and
after every round, because speeds on a shared machine change. Nothing is known about the workers in
advance unless a row says so.

Finally one worker is killed. The bound of the rounds after that is the bound of the other workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import dask
import dask.array as da
import numpy as np
from distributed import wait

import dask_coded as coded
from benchmarks.cluster import Lab, PlainRounds, Rounds
from benchmarks.report import Report, Summary, options, picture
from dask_coded.rounds import fluid_time

#: Runs one round and returns its seconds.
RunRound = Callable[[], float]
#: A method to compare, ready to run rounds within the block.
Way = Callable[[], AbstractContextManager[RunRound]]

# (policy, predictor): the last is the default, which learns from round to round.
POLICIES = [
    ("static", "uniform"),
    ("s2c2", "uniform"),
    ("s2c2", "adaptive"),
    ("continuous", "uniform"),
    ("continuous", "adaptive"),
]


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    # Wide, so that a round sends and decodes little compared with what it computes.
    rows: int = 50_000
    columns: int = 10_000
    right: int = 20
    # Leaves one core for the coordinator, which receives and decodes while the workers go on.
    share: float = 0.12
    rounds: int = 7
    plain_rounds: int = 3
    # About as long as a round: workers are 5 to 10 % faster in their first quarter second here.
    measure: float = 2.0
    codes: tuple[tuple[int, int], ...] = ((8, 6), (8, 4))
    slowed: tuple[int, ...] = (0, 1, 2)


SMOKE = Size(
    rows=240,
    columns=100,
    right=2,
    rounds=2,
    plain_rounds=2,
    measure=0.01,
    codes=((4, 3),),
    slowed=(1,),
)


@dataclass
class Result:
    """Rounds over the fluid bound, by policy, and the bound of each round in seconds."""

    ratios: dict[str, list[float]] = field(default_factory=dict)
    bounds: list[float] = field(default_factory=list)


class Bench:
    """A matrix in a lab, encoded and as a plain dask array."""

    def __init__(self, lab: Lab, k: int, size: Size) -> None:
        n = len(lab.workers)
        lab.set_speeds(math.inf)
        A = da.random.default_rng(0).standard_normal(
            (size.rows, size.columns), chunks=(-(-size.rows // n), -1)
        )
        self.x = np.random.default_rng(1).standard_normal((size.columns, size.right))
        self.coded = coded.encode(A, coded.MDS(n, k), workers=lab.workers)
        self.plain: Any = lab.client.persist(A, workers=lab.workers)
        wait(self.plain)
        self._lab = lab
        self._k = k
        self._size = size

    def bound(self) -> float:
        """Return the least seconds of a round at the current speeds of the workers."""
        speeds = self._lab.measure_speeds(self.coded, self.x, self._size.measure)
        return fluid_time(speeds, self._k, -(-self._size.rows // self._k))

    @contextmanager
    def coded_rounds(self, policy: str, predictor: str) -> Iterator[RunRound]:
        """Provide rounds of one loop in the cluster."""
        with (
            dask.config.set({"coded.policy": policy, "coded.predictor": predictor}),
            Rounds(self._lab.client, self.coded, self.x, self._lab.free) as rounds,
        ):
            yield rounds.run_round

    @contextmanager
    def dask_products(self) -> Iterator[RunRound]:
        """Provide the same product by dask.array."""

        lab = self._lab
        yield PlainRounds(lab.client, self.plain, self.x, lab.workers, lab.free).run_round

    def compare(self, ours: dict[str, Way], plain: dict[str, Way]) -> Result:
        """Run rounds of all methods, and measure the bound before and after each."""
        result = Result()
        self.bound()  # the first access to a new piece is slower
        before = self.bound()
        for name, way in (ours | plain).items():
            with way() as run_round:
                for _ in range(self._size.plain_rounds if name in plain else self._size.rounds):
                    seconds = run_round()
                    after = self.bound()
                    result.bounds.append((before + after) / 2)
                    result.ratios.setdefault(name, []).append(seconds / result.bounds[-1])
                    before = after
        return result


def coded_ways(bench: Bench, policies: list[tuple[str, str]]) -> dict[str, Way]:
    return {
        f"{policy}, {'nothing known' if predictor == 'uniform' else 'learning'}": partial(
            bench.coded_rounds, policy, predictor
        )
        for policy, predictor in policies
    }


def run_slowed(lab: Lab, bench: Bench, slowed: int) -> Result:
    """Compare all policies, dask.array and NumPy with some of the workers slowed."""
    lab.set_speeds([1 / 5] * slowed + [1] * (len(lab.workers) - slowed))
    plain: dict[str, Way] = {
        "dask.array": bench.dask_products,
        "NumPy, one process": partial(numpy_products, bench.plain.shape, bench.x),
    }
    return bench.compare(coded_ways(bench, POLICIES), plain)


def run_loss(lab: Lab, bench: Bench) -> Result:
    """Compare policies after one of the workers has been killed."""
    lab.set_speeds(1)
    bench.plain = None  # otherwise dask would recompute its lost chunks during the rounds
    lab.kill(lab.workers[0])
    return bench.compare(coded_ways(bench, POLICIES[-2:]), {})


@contextmanager
def numpy_products(shape: tuple[int, int], x: np.ndarray) -> Iterator[RunRound]:
    """Provide the same product by NumPy in this process, unthrottled."""
    A = np.ones(shape)

    def product() -> float:
        began = perf_counter()
        A @ x
        return perf_counter() - began

    yield product


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure rounds over the fluid bound with 0, 1, 2 of 8 workers slowed 5x and 1 killed."""
    size = SMOKE if smoke else Size()
    report = Report("stragglers")
    results: dict[tuple[int, int, str], Result] = {}
    kinds: set[str] = set()
    for n, k in size.codes:
        with Lab(n, size.share) as lab:
            kinds.add(lab.kind)
            bench = Bench(lab, k, size)
            for slowed in size.slowed:
                results[n, k, f"{slowed} slowed"] = run_slowed(lab, bench, slowed)
            results[n, k, "1 killed"] = run_loss(lab, bench)
    for (n, k, what), result in results.items():
        number, fault = what.split()
        for name, ratios in result.ratios.items():
            report.add(
                f"({n},{k}), {what}{' 5x' * (fault == 'slowed')}: {name}",
                "round_over_fluid",
                Summary.of(ratios),
                goal=1.2 if name == "continuous, nothing known" else None,
                policy=name.split(",")[0],
                known="nothing" if "nothing" in name else "earlier rounds",
                n=n,
                k=k,
                slowed=int(number) if fault == "slowed" else 0,
                killed=int(number) if fault == "killed" else 0,
                fluid_bound_seconds=float(np.median(result.bounds)),
            )
    report.machine["throttle"] = ", ".join(sorted(kinds))
    if png_file:
        draw(png_file, results)
    report.finish(json_file)


def draw(file: Path, results: dict[tuple[int, int, str], Result]) -> None:
    """Plot medians as bars, one group per case."""
    with picture(file, figsize=(11, 5)) as figure:
        axes = figure.subplots()
        names = list(next(iter(results.values())).ratios)
        for i, name in enumerate(names):
            medians = [np.median(r.ratios.get(name, np.nan)) for r in results.values()]
            places = np.arange(len(results)) + (i - len(names) / 2) * 0.8 / len(names)
            axes.bar(places, medians, width=0.8 / len(names), label=name)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(results)))
        axes.set_xticklabels([f"({n},{k})\n{what}" for n, k, what in results])
        axes.set_ylabel("median round over the fluid bound")
        axes.set_ylim(0, 4)
        axes.legend(fontsize="small", ncols=3, loc="upper left")


if __name__ == "__main__":
    main()
