"""The sections of the comparison: each adds its rows to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import click
import dask
import numpy as np

from benchmarks import hessian, traces
from benchmarks.cluster import Lab
from benchmarks.evidence.kept import WHOLE
from benchmarks.evidence.papers import Section
from benchmarks.evidence.s2c2 import algorithms, cases, simulated, storage
from benchmarks.evidence.s2c2.cases import CONTENDERS, Case
from benchmarks.evidence.s2c2.overdecomposition import PARTS
from benchmarks.evidence.s2c2.predicting import SHOWN, register_published
from benchmarks.evidence.s2c2.processes import Bench, Measured, Size
from benchmarks.evidence.s2c2.results import Results
from benchmarks.report import Summary
from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.simulation import Speeds, changed, drifting, gilbert_elliott, shifted_exponential

CODED = ("MDS", "S2C2", "continuous")
#: Policies that can take turns on the same pieces.
_IN_TURNS = ("MDS", "S2C2 basic", "S2C2", "continuous")


def controlled(results: Results) -> None:
    """Measure 12 workers: 0 to 6 slowed 5 or 20 times, the others within 20 %."""
    codes = [(12, 6), (12, 9), (12, 10)]
    if results.smoke:
        some = cases.controlled(codes[:1], [1], [5], 3, ["PageRank"])
    else:
        some = cases.controlled(codes, range(7), [5], 15)
        some += cases.controlled(codes, [1, 3, 6], [20], 15, ["logistic regression"])
    names = [name for name in CONTENDERS if name != "over-decomposition"]
    for case in some:
        results.simulate(case, names)
        for ours in ("S2C2", "continuous"):
            results.gains(case, ours, "MDS", "simulation")
    if not results.processes:
        return
    shape = "logistic regression"
    rounds = results.count(13)
    real = cases.controlled(codes, [0, 3], [5], rounds, [shape])
    on_processes(results, real[:1] if results.smoke else real, _IN_TURNS, first=3)


def cloud(results: Results) -> None:
    """Compare with conventional MDS and over-decomposition at the speeds of real machines."""
    codes = [(10, 7), (9, 7), (8, 7), (50, 40)]
    some, rounds = codes[:1] if results.smoke else codes, results.count(100)
    for case in [case for over in cases.OVER for case in cases.cloud(some, rounds, over)]:
        names = CONTENDERS if case.n <= 12 else CODED
        results.simulate(case, names)
        results.report.add(
            f"{case.name}: workers slower than predicted by over 15 %",
            "mispredicted",
            100 * simulated.mispredicted(case),
            "%",
            predictor=simulated.PREDICTOR,
            **case.fields,
        )
        for ours in ("S2C2", "continuous"):
            for versus in ("MDS", "over-decomposition"):
                if versus in names:
                    results.gains(case, ours, versus, "simulation")
    if results.processes:
        real = cases.cloud([(10, 7), (50, 40)], results.count(15))
        on_processes(results, real[:1] if results.smoke else real, CODED, tasks=PARTS)


def over_decomposition(results: Results) -> None:
    """Compare with small partitions that are dealt out by predicted speed, on processes."""
    if not results.processes:
        return
    versus = CONTENDERS["over-decomposition"]
    for case in cases.cloud([(10, 7)], results.count(15))[: 1 if results.smoke else None]:
        case = _of_section(case, "over-decomposition")
        with Bench.open(case.n, results.size) as bench:
            for name in ("S2C2", "continuous"):
                [found] = bench.run_case(case, CONTENDERS[name])
                results.add(case, CONTENDERS[name], "processes", found)
            times, moved = bench.over_decomposed(case)
            results.add(case, versus, "processes", times, moved=moved)
        for name in ("S2C2", "continuous"):
            results.gains(case, name, versus.name, "processes")


def _of_section(case: Case, section: str) -> Case:
    """Return a case for another section, under a name of its own."""
    return replace(
        case, name=f"{case.name}, for {section}", fields={**case.fields, "section": section}
    )


def on_processes(
    results: Results,
    real: list[Case],
    names: Sequence[str],
    first: int = 0,
    size: Size | None = None,
    tasks: int = 0,
    **goals: Any,
) -> None:
    """Measure cases on worker processes; the ``first`` rounds are for learning and left out.

    Where speeds stay the same, contenders take turns: the rounds of one teach the others nothing.
    With ``tasks`` for each worker, products of dask.array are measured as well.
    """
    size = size or results.size
    for n in sorted({case.n for case in real}):
        with Bench.open(n, size) as bench:
            results.report.machine["throttle"] = bench.lab.kind
            for case in (case for case in real if case.n == n):
                steady = (case.speeds == case.speeds[0]).all()
                for some in [names] if steady else [[name] for name in names]:
                    measured = bench.run_case(case, *(CONTENDERS[name] for name in some))
                    for name, found in zip(some, measured, strict=True):
                        if len(case.speeds) > first:
                            found = Measured(found.ratios[first:], found.disturbed[first:])
                        results.add(case, CONTENDERS[name], "processes", found, **goals)
                        row = results.rows(case=f"{case.name}: {name}, processes", quantile=0.5)[0]
                        click.echo(f"  {row['case']}: {row['value']:.3f} of the bound", err=True)
                if steady:
                    results.in_turns(case, names, "continuous")
                    continue
                others = ["MDS"] if "MDS" in names else []
                if tasks and case.n <= 12:  # of more workers the paper says nothing
                    plain = cases.plain_dask(tasks)
                    results.add(case, plain, "processes", bench.dask_array(case, tasks))
                    others.append(plain.name)
                for ours, versus in product(names, others):
                    if ours != versus:
                        results.gains(case, ours, versus, "processes")


def prediction_error(results: Results) -> None:
    """Measure with predictions that have a random error of a given spread in every round."""
    rounds = results.count(40)
    speeds = np.tile(cases.stragglers(12, 1, 0, 5)[0], (rounds, 1))
    case = Case("(12,9), spread 20 %", 12, 9, speeds, fields={"section": "prediction-error"})
    bounds = simulated.bounds(case)
    for error in (0.0, 0.3) if results.smoke else (0.0, 0.05, 0.1, 0.2, 0.3, 0.5):
        for name in ("S2C2", "continuous"):
            rng = np.random.default_rng(0)

            def wrong(actual: np.ndarray, rng: Any = rng, error: float = error) -> np.ndarray:
                return actual * np.exp(error * rng.standard_normal(len(actual)))

            seconds = simulated.run_case(case, CONTENDERS[name], foresight=wrong)
            exact = Case(f"{case.name}, error {error:.0%}", 12, 9, speeds, fields=case.fields)
            results.add(exact, CONTENDERS[name], "simulation", seconds / bounds, error=error)


def every_trace(results: Results) -> None:
    """Measure the default policy and predictor on every trace, with the library's own goals."""
    codes = [(10, 7), (12, 10)]
    names = ("matrix-math", "google2011") if results.smoke else traces.NAMES
    real = []
    for trace, (n, k), over in product(names, codes, cases.OVER):
        fields = {"section": "traces", "trace": trace, "over": over}
        fields["predictor"] = simulated.PREDICTOR
        speeds = cases.replayed(trace, n, results.count(100), over=over)
        case = Case(f"({n},{k}), {trace}{cases.OVER[over]}", n, k, speeds, fields=fields)
        goals = {} if results.smoke else {0.5: 1.05, 0.99: 1.15}
        results.simulate(case, ["continuous"], goals=goals)
        if over == "trace":
            real.append(Case(case.name, n, k, speeds[: results.count(16)], fields=fields))
    if results.processes:
        goals = {} if results.smoke else {0.5: 1.10, 0.99: 1.4}
        on_processes(results, real[:1] if results.smoke else real, ["continuous"], goals=goals)


def predictors(results: Results) -> None:
    """Find the predictor with the shortest rounds, on data that it was not trained on."""
    rounds = results.count(40)
    models = {
        "two-state Markov": gilbert_elliott(10, rounds).values,
        "drifting": drifting(10, rounds).values,
        "shifted exponential": shifted_exponential(10, rounds).values,
    }
    for slow in (1,) if results.smoke else (0, 1, 3):
        models[f"{slow} slowed 5x"] = cases.stragglers(10, rounds, slow, 5)
    steady = Speeds(cases.stragglers(10, rounds, 0, 5))
    models["2 slowed 5x for 10 rounds"] = changed(steady, [0, 1], 12, 22, 0.2).values
    models["2 slowed 5x, one after the other"] = changed(
        changed(steady, [0], 8, rounds, 0.2), [1], 25, rounds, 0.2
    ).values
    for trace in ("matrix-math",) if results.smoke else traces.NAMES:
        # Each over its own mean: what can be predicted is how a machine changes.
        models[trace] = cases.replayed(trace, 10, rounds, seed=1, over="machine")
    for name in ("S2C2", "continuous"):
        ratios: dict[tuple[str, str], list[np.ndarray]] = {}
        for trace, speeds in models.items():
            kind = "traces" if trace in traces.NAMES else "models"
            kind = "controlled" if "slowed" in trace else kind
            case = Case(f"(10,7), {trace}", 10, 7, speeds)
            bounds = simulated.bounds(case)
            for key in [*sorted(PREDICTORS), "perfect"]:
                known: dict[str, Any] = {"predictor": key}
                if key == "perfect":
                    known = {"foresight": lambda actual: actual}
                seconds = simulated.run_case(case, CONTENDERS[name], **known)
                ratios.setdefault((key, kind), []).append(seconds / bounds)
                results.report.add(
                    f"{case.name}: {name}, {key}",
                    "round_over_fluid",
                    Summary.of(seconds / bounds),
                    policy=name,
                    predictor=key,
                    trace=trace,
                    n=10,
                    k=7,
                    where="simulation",
                    quantile=0.5,
                    section="predictors",
                )
        for (key, kind), collected in ratios.items():
            results.report.add(
                f"(10,7), all {kind}: {name}, {key}",
                "mean_round_over_fluid",
                float(np.mean(np.concatenate(collected))),
                policy=name,
                predictor=key,
                on=kind,
                section="predictors",
            )


def predictors_on_processes(results: Results, level: str, predictor: str) -> None:
    """Run a predictor on processes: the published network, its like here, or a simpler one."""
    if not results.processes or (results.smoke and predictor != SHOWN[0]):
        return
    register_published()
    [case] = [
        case
        for case in cases.cloud([(10, 7)], results.count(10))
        if case.fields["misprediction"] == level
    ]
    about = _of_section(case, "predictors-on-processes")
    about = replace(about, name=f"{about.name}, {predictor}")
    with Bench.open(case.n, results.size) as bench:
        for name in ("S2C2", "continuous"):
            with dask.config.set({"coded.predictor": predictor}):
                [found] = bench.run_case(about, CONTENDERS[name])
            results.add(about, CONTENDERS[name], "processes", found, predictor=predictor)


def regimes(results: Results) -> None:
    """Measure plain dask.array, which steals work, with few large and many small tasks."""
    if not results.processes:
        return
    rounds = results.count(6)
    [case] = cases.controlled([(12, 9)], [3], [5], rounds, ["logistic regression"])
    fields = {**case.fields, "section": "regimes"}
    case = replace(case, name=f"{case.name}, next to dask.array", fields=fields)
    with Bench.open(12, results.size) as bench:
        for name in ("continuous",):
            [found] = bench.run_case(case, CONTENDERS[name])
            results.add(case, CONTENDERS[name], "processes", found)
        for chunks in (1, 16):
            plain = cases.plain_dask(chunks)
            results.add(case, plain, "processes", bench.dask_array(case, chunks))


def lengths(results: Results) -> None:
    """Measure shorter rounds: operands with fewer columns, at the same cost of a message."""
    if not results.processes:
        return
    speeds = cases.replayed("azure2017", 12, results.count(12))
    for right in (2,) if results.smoke else (5, 10, 20, 40, 80):
        size = replace(results.size, right=right)
        fields = {"section": "lengths", "trace": "azure2017", "right": right}
        case = Case(f"(12,10), azure2017, {right} columns", 12, 10, speeds, fields=fields)
        on_processes(results, [case], ["continuous"], size=size)


def where_coding_pays(results: Results) -> None:
    """Compare methods that store more or less, over the ideal of the data."""
    for regime in storage.regimes(results.count(storage.ROUNDS)):
        for name, stored, k, contender in storage.methods():
            ratios = storage.over_ideal(regime, k, contender)
            results.report.add(
                f"{regime.name}: {name}, {stored:.2f} stored",
                "round_over_ideal",
                Summary.of(ratios),
                policy=name,
                stored=stored,
                regime=regime.name,
                section="storage",
                where="simulation",
            )
    n, rounds = 12, results.count(270)
    for level, trace in cases.CLOUDS.items():
        speeds = cases.replayed(trace, n, rounds)
        held = float(storage.held(speeds).mean())
        about = {"misprediction": level, "trace": trace}
        results.held(held, "simulation", n=n, rounds=rounds, **about)


def whole_algorithm(results: Results, name: str, level: str) -> None:
    """Time an algorithm under all policies, with speeds of real machines."""
    if not results.processes:
        return
    size = algorithms.SMOKE if results.smoke else algorithms.Size()
    algorithm = algorithms.ALGORITHMS[name](size)
    n, k = (4, 3) if results.smoke else (10, 7)
    if algorithm.hessian:
        n, k = 12, 9
    trace = cases.CLOUDS[level]
    speeds = cases.replayed(trace, n, 10 if results.smoke else 200)
    speeds = speeds / speeds.mean()
    with Lab(n, size.cores / n) as lab:
        results.report.machine["throttle"] = lab.kind
        timings = algorithms.compare(lab, algorithm, k, size, speeds)
    for contender in algorithm.contenders:
        results.report.add(
            f"{algorithm.name}, {level} misprediction ({trace}): {contender}",
            "time_over_continuous",
            timings.ratio(contender, over="continuous", spread_of="range"),
            policy=contender,
            algorithm=algorithm.name,
            rounds=algorithm.rounds,
            seconds=timings.summary(contender).value,
            turns=timings.seconds[contender].tolist(),
            section="algorithms",
            misprediction=level,
            trace=trace,
            where="processes",
            n=n,
            k=k,
        )


#: How many of 12 workers are slowed in whole algorithms, and how many times.
SLOWED = {"0": (0, 1), "1 5x": (1, 5), "1 20x": (1, 20), "3 5x": (3, 5), "3 20x": (3, 20)}
#: Newton's method is not among them: of a product of two factors there are no copies.
SLOWED_ALGORITHMS = (
    "logistic-regression",
    "support-vector-machine",
    "dense-pagerank",
    "graph-filter",
    "dense-graph-filter",
    "web-graph-filter",
)
#: All of a section takes 20 minutes: half as many rounds, and nodes of sparse graphs.
SLOWED_SIZE = replace(algorithms.Size(), more=0, rounds=10, nodes=500_000)


def slowed_algorithm(results: Results, name: str, slowed: int, factor: float) -> None:
    """Time an algorithm beside replication and MDS, with some workers slowed throughout."""
    if not results.processes:
        return
    size = algorithms.SMOKE if results.smoke else SLOWED_SIZE
    algorithm = algorithms.ALGORITHMS[name](size)
    n, k = (4, 3) if results.smoke else (12, 9)
    speeds = cases.stragglers(n, 1, slowed, factor)
    names = ("replication", "MDS", "S2C2", "continuous")
    with Lab(n, size.cores / n) as lab:
        results.report.machine["throttle"] = lab.kind
        timings = algorithms.compare(lab, algorithm, k, size, speeds, names)
    for contender in names:
        results.report.add(
            f"{algorithm.name}, {slowed} slowed {factor:g}x: {contender}",
            "time_over_s2c2",
            timings.ratio(contender, over="S2C2", spread_of="range"),
            policy=contender,
            algorithm=algorithm.name,
            seconds=timings.summary(contender).value,
            turns=timings.seconds[contender].tolist(),
            section="slowed",
            slowed=slowed,
            factor=factor,
            where="processes",
            n=n,
            k=k,
        )


def hessians(results: Results, level: str) -> None:
    """Time Hessians alone: 12 workers with polynomial codes, any 9 of which suffice."""
    if not results.processes:
        return
    size = hessian.SMOKE if results.smoke else hessian.Size()
    n, a, b = size.code
    trace = cases.CLOUDS[level]
    speeds = cases.replayed(trace, n, results.count(15))
    speeds = speeds / speeds.mean()
    with Lab(n, size.share) as lab:
        results.report.machine["throttle"] = lab.kind
        bench = hessian.Bench(lab, size)
        for name, policy, predictor in hessian.WAYS:
            lab.set_speeds(speeds[0])
            bench.run_round(policy, predictor)  # opens connections
            found = []
            for row in speeds:
                lab.set_speeds(row)
                before = bench.bound()
                seconds = bench.run_round(policy, predictor)
                found.append(seconds / ((before + bench.bound()) / 2))
            results.report.add(
                f"Hessian, {level} misprediction ({trace}): {name}",
                "round_over_fluid",
                Summary.of(np.array(found)),
                policy=name,
                turns=found,
                section="hessian",
                misprediction=level,
                trace=trace,
                where="processes",
                n=n,
                k=a * b,
            )


def _section(run: Callable[[Results], None], minutes: int = 20) -> Section:
    return Section({WHOLE: run}, minutes)


def _by_level(run: Callable[..., None], minutes: int = 20) -> Section:
    return Section({level: partial(run, level=level) for level in cases.CLOUDS}, minutes)


SECTIONS = {
    "controlled": _section(controlled),
    "cloud": _section(cloud),
    "over-decomposition": _section(over_decomposition),
    "prediction-error": _section(prediction_error, 1),
    "traces": _section(every_trace),
    "predictors": _section(predictors),
    **{
        f"predictors-on-processes-{level}": Section(
            {name: partial(predictors_on_processes, level=level, predictor=name) for name in SHOWN},
            20,
        )
        for level in cases.CLOUDS
    },
    "regimes": _section(regimes),
    "lengths": _section(lengths),
    "storage": _section(where_coding_pays),
    "hessian": _by_level(hessians),
    **{name: _by_level(partial(whole_algorithm, name=name)) for name in algorithms.ALGORITHMS},
    **{
        f"slowed-{name}": Section(
            {
                piece: partial(slowed_algorithm, name=name, slowed=slowed, factor=factor)
                for piece, (slowed, factor) in SLOWED.items()
            },
            20,
        )
        for name in SLOWED_ALGORITHMS
    },
}
