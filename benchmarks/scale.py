"""Measure how planning, prediction and simulation scale with the number of workers.

A round is planned on the scheduler's event loop, which must not be blocked for more than a few
milliseconds. In a profile at 1,000 workers and 64 stripes, a third of the time went to the loop
that lays the loads around the ring, one `StripeRange` each; the rest went to water filling and the
layout.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter

import click
import numpy as np

from benchmarks.report import Report, Summary, options, side_by_side
from dask_coded.codes import Code, Repetition
from dask_coded.prediction import SpeedHistory
from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.rounds import Layout, Reporting, deal
from dask_coded.simulation import Network, Simulation, gilbert_elliott

#: Workers and rounds to simulate.
SIZES = ((10, 1000), (100, 100), (1000, 5), (10_000, 2))
SMOKE = ((10, 3),)


def mixing(n: int, k: int) -> Code:
    """Return a code with n pieces, of which k suffice; planning uses only these numbers."""
    return Code(np.vstack([np.eye(k), np.ones((n - k, k))]))


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure the milliseconds to plan and predict a round, and the rate of simulation."""
    report = Report("scale")
    repeats = 3 if smoke else 30
    rng = np.random.default_rng(0)
    for workers in (20,) if smoke else (10, 100, 1000, 10_000):
        speeds = rng.uniform(0.5, 1.5, workers)
        # A generator matrix with 10,000 columns would only fill the memory.
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
    """Return a code for ``n`` workers, of which 4/5 suffice, without its large matrix."""
    code = mixing(5, 4)
    code.n = code.pieces = n
    code.k = n * 4 // 5
    code.place, code.group = np.arange(n), np.zeros(n, dtype=np.intp)
    code.need = np.array([code.k])
    return code


def simulated(report: Report, smoke: bool) -> None:
    """Add the rounds per second of the simulator."""
    for workers, rounds in SMOKE if smoke else SIZES:
        for policy in ("static", "s2c2", "continuous"):
            if policy == "continuous" and workers > 1000:
                continue  # it needs frequent reports
            simulation = Simulation(
                large(workers),
                gilbert_elliott(workers, rounds),
                policy=policy,
                network=Network(tick=1e-3),
                # In the largest cases workers report once, because each message is an event.
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
    """Convert a summary from seconds to milliseconds."""
    low, high = summary.spread
    return Summary(
        summary.value * 1e3, (low * 1e3, high * 1e3), summary.spread_of, summary.repetitions
    )


if __name__ == "__main__":
    main()
