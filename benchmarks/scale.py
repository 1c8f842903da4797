"""Measure how planning, prediction, the round engine and simulation scale with the workers.

A round is planned on the scheduler's event loop, which must not be blocked for more than a few
milliseconds. In a profile at 1,000 workers and 64 stripes, a third of the time went to the loop
that lays the loads around the ring, one `StripeRange` each; the rest went to water filling and the
layout.

The coordinator runs the engine in one process. The simulator drives the same engine, so the
processor time that it spends there is the coordinator's. Messages and the link are added by
calculation, because no machine here can run thousands of workers.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import click
import numpy as np

from benchmarks.report import Report, Summary, options, picture, side_by_side
from dask_coded.codes import Code, Repetition
from dask_coded.prediction import SpeedHistory
from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.rounds import POLICIES, Layout, Reporting, Round, deal
from dask_coded.simulation import Network, Simulation, gilbert_elliott

#: Workers and rounds to simulate.
SIZES = ((10, 1000), (100, 100), (1000, 5), (10_000, 2))
SMOKE = ((10, 3),)
#: Processor seconds of a message outside of the engine, with real processes: 64 workers take 0.4 to
#: 0.7 ms a message, of which the engine took 0.25 when that was measured.
MESSAGE = 2e-4
#: Bytes of the operand and bytes per second of the coordinator's link, 1 Gbit/s.
OPERAND, LINK = 80_000, 1.25e8


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure the processor time of plans, of predictions, and of simulated rounds."""
    report = Report("scale")
    repeats = 3 if smoke else 30
    rng = np.random.default_rng(0)
    for workers in (20,) if smoke else (10, 100, 1000, 10_000):
        speeds = rng.uniform(0.5, 1.5, workers)
        codes: dict[str, Code] = {"MDS": large(workers)}
        if workers <= 1000:
            codes["repetition"] = Repetition(workers, 3)
        for name, code in codes.items():
            place = code.place.tolist()

            def plan(code: Code = code, place: list[int] = place, u: np.ndarray = speeds) -> None:
                deal(Layout.of(code, place, np.ones((1, 64))), u)

            summary = side_by_side({"plan": plan}, repeats, clock=process_time).summary("plan")
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
        timings = side_by_side(cases, repeats, clock=process_time)
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
    growth = simulated(report, smoke)
    report.finish(json_file)
    if png_file is not None:
        draw(png_file, report, growth)


def large(n: int) -> Code:
    """Return a code for ``n`` workers, of which 4/5 suffice, without its large matrix."""
    code = Code(np.vstack([np.eye(4), np.ones((1, 4))]))
    code.n = code.pieces = n
    code.k = n * 4 // 5
    code.place, code.group = np.arange(n), np.zeros(n, dtype=np.intp)
    code.need = np.array([code.k])
    return code


class Metered(Round):
    """A round that measures the processor seconds spent in it, and counts the shares."""

    seconds = 0.0
    shares = 0

    def start(self, *args: Any) -> Any:
        return self._timed(super().start, *args)

    def record(self, *args: Any) -> Any:
        Metered.shares += 1
        return self._timed(super().record, *args)

    def react(self, *args: Any) -> Any:
        return self._timed(super().react, *args)

    @staticmethod
    def _timed(method: Callable[..., Any], *args: Any) -> Any:
        began = process_time()
        result = method(*args)
        Metered.seconds += process_time() - began
        return result


def simulated(report: Report, smoke: bool) -> dict[int, dict[str, float]]:
    """Add rounds in the simulator; return what a later round costs a coordinator, by workers."""
    growth = {}
    for workers, rounds in SMOKE if smoke else SIZES:
        for policy in ("static", "s2c2", "continuous"):
            simulation = Simulation(
                large(workers),
                gilbert_elliott(workers, rounds),
                policy=policy,
                network=Network(tick=1e-3),
                # The baselines are not made for thousands of reports at once.
                reporting=Reporting(interval=1e9)
                if workers > 1000 and policy != "continuous"
                else None,
            )
            simulation.step()  # speeds are not known yet
            Metered.seconds, Metered.shares, messages = 0.0, 0, 0.0
            began = process_time()
            with patch("dask_coded.simulation._simulation.Round", Metered):
                for round_ in simulation.run(rounds - 1):
                    messages += round_.messages
            spent = (process_time() - began) / (rounds - 1)
            about: dict[str, Any] = {"workers": workers, "policy": policy}
            name = f"{workers} workers, {policy}"
            report.add(name, "simulated_rounds_per_second", 1 / spent, "1/s", **about)
            if policy != "continuous":
                continue
            engine = Metered.seconds / (rounds - 1)
            messages /= rounds - 1
            growth[workers] = {
                "engine": engine,
                "messages": messages * MESSAGE,
                "link": workers * OPERAND / LINK,
            }
            goal = {1000: 0.25, 10_000: 3.0}.get(workers)
            report.add(name, "simulated_round", spent, "s", goal=goal, **about)
            report.add(name, "engine_per_round", engine * 1e3, "ms", **about)
            event = Metered.seconds / Metered.shares
            report.add(name, "engine_per_share", event * 1e6, "us", goal=50.0, **about)
            report.add(name, "messages_per_worker", messages / workers, "", goal=3.0, **about)
            report.add(name, "engine_memory", memory(workers) / 2**20, "MiB", **about)
            sustained = 1 / (engine + messages * MESSAGE)
            report.add(name, "coordinator_rounds_per_second", sustained, "1/s", **about)
    return growth


def memory(workers: int) -> int:
    """Return the bytes of the engine's state in a round that has started."""
    code, speeds = large(workers), np.ones(workers)
    tracemalloc.start()
    try:
        layout = Layout.of(code, range(workers), np.ones((1, 40)))
        round_ = Round(layout, POLICIES["continuous"](), speeds, 0.0)
        commands = round_.start()
        assert commands
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def draw(file: Path, report: Report, growth: dict[int, dict[str, float]]) -> None:
    """Draw what a round takes of the scheduler, of the coordinator and of its link."""
    plans = {
        row["workers"]: row["value"] / 1e3
        for row in report.as_dict()["rows"]
        if row["measure"] == "plan_ms" and row["code"] == "MDS"
    }
    with picture(file, figsize=(7, 4.5)) as figure:
        axes = figure.subplots()
        axes.loglog(list(plans), list(plans.values()), "o-", label="scheduler: plan")
        labels = {
            "engine": "coordinator: engine",
            "messages": f"coordinator: messages, {MESSAGE * 1e3:g} ms each (calculated)",
            "link": f"link: operand of {OPERAND // 1000} kB, 1 Gbit/s (calculated)",
        }
        for what, label in labels.items():
            axes.loglog(
                list(growth),
                [costs[what] for costs in growth.values()],
                "o-" if what == "engine" else "--",
                label=label,
            )
        axes.set(xlabel="workers", ylabel="seconds per round")
        axes.grid(alpha=0.3)
        axes.legend()


def in_ms(summary: Summary) -> Summary:
    """Convert a summary from seconds to milliseconds."""
    low, high = summary.spread
    return Summary(
        summary.value * 1e3, (low * 1e3, high * 1e3), summary.spread_of, summary.repetitions
    )


if __name__ == "__main__":
    main()
