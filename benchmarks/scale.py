"""How planning, prediction and simulation grow with the number of workers.

The plan of a round is made on the scheduler's event loop, which it must not hold up for more than
a few milliseconds. Profiled at 1,000 workers and 64 stripes: a third of a plan is the loop that
lays the loads round the ring, a Run each; the rest is water filling and the layout.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter

import click
import numpy as np

from benchmarks.report import Report, Summary, options, side_by_side
from dask_coded.codes import Code, Repetition
from dask_coded.planning import PREDICTORS, Layout, Reporting, SpeedHistory, deal
from dask_coded.simulation import Network, Simulation, gilbert_elliott

#: Workers and rounds to simulate.
SIZES = ((10, 1000), (100, 100), (1000, 5), (10_000, 2))
SMOKE = ((10, 3),)


def mixing(n: int, k: int) -> Code:
    """A code of so many pieces; planning looks at nothing but the numbers."""
    return Code(np.vstack([np.eye(k), np.ones((n - k, k))]))


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Milliseconds to plan and to predict a round, and how fast rounds are simulated."""
    report = Report("scale")
    repeats = 3 if smoke else 30
    rng = np.random.default_rng(0)
    for workers in (20,) if smoke else (10, 100, 1000, 10_000):
        speeds = rng.uniform(0.5, 1.5, workers)
        # A generator matrix of 10,000 columns would only fill the memory.
        code = mixing(min(workers, 1000), min(workers, 1000) * 4 // 5)
        codes: dict[str, Code] = {"MDS": code} if workers == code.n else {}
        if workers <= 1000:
            codes["repetition"] = Repetition(workers, 3)
        for name, code in codes.items():
            place = code.place.tolist()

            def plan(code: Code = code, place: list[int] = place, u: np.ndarray = speeds) -> None:
                deal(Layout.of(code, place, np.ones((1, 64))), u)

            summary = side_by_side({"plan": plan}, repeats=repeats).summary("plan")
            report.add(
                f"{workers} workers, 64 stripes each: {name}",
                "plan_ms",
                in_ms(summary),
                "ms",
                workers=workers,
                code=name,
                goal=5.0 if workers == 1000 else None,
            )
        history = SpeedHistory()
        names = [f"tls://10.0.0.{worker}:40000" for worker in range(workers)]
        for _ in range(70):
            history.record(dict(zip(names, speeds * rng.uniform(0.8, 1.2, workers), strict=True)))
        cases = {name: partial(history.predict, names, name) for name in PREDICTORS}
        timings = side_by_side(cases, repeats=repeats)
        for name in cases:
            report.add(
                f"{workers} workers, 64 rounds of history: {name}",
                "predict_ms",
                in_ms(timings.summary(name)),
                "ms",
                workers=workers,
                predictor=name,
                goal=5.0 if workers == 1000 else None,
            )
    simulated(report, smoke)
    report.finish(json_file)


def large(n: int) -> Code:
    """A code for ``n`` workers that would be too large to write out: any 4 of 5 suffice."""
    code = mixing(5, 4)
    code.n = code.pieces = n
    code.k = n * 4 // 5
    code.place, code.group = np.arange(n), np.zeros(n, dtype=np.intp)
    code.need = np.array([code.k])
    return code


def simulated(report: Report, smoke: bool) -> None:
    """Rounds per second of the simulator."""
    for workers, rounds in (
        ((10, 3),) if smoke else ((10, 1000), (100, 100), (1000, 5), (10_000, 2))
    ):
        for policy in ("static", "s2c2", "continuous"):
            if policy == "continuous" and workers > 1000:
                continue  # it lives on reports
            simulation = Simulation(
                large(workers),
                gilbert_elliott(workers, rounds),
                policy=policy,
                network=Network(tick=1e-3),
                # In the largest, workers report once: a message is an event each.
                reporting=Reporting(interval=1e9) if workers > 1000 else None,
            )
            began = perf_counter()
            simulation.run(rounds)
            report.add(
                f"{workers} workers, {policy}",
                "simulated_rounds_per_second",
                rounds / (perf_counter() - began),
                "1/s",
                workers=workers,
                policy=policy,
            )


def in_ms(summary: Summary) -> Summary:
    """Seconds as milliseconds."""
    low, high = summary.spread
    return Summary(
        summary.value * 1e3, (low * 1e3, high * 1e3), summary.spread_of, summary.repetitions
    )


if __name__ == "__main__":
    main()
