"""The sections of the comparison: each adds its rows to the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import traces
from benchmarks.cluster import Lab
from benchmarks.paper import algorithms, cases, simulated, storage
from benchmarks.paper.cases import CONTENDERS, Case, Contender
from benchmarks.paper.processes import SMOKE, Bench, Measured, Size
from benchmarks.report import Report, Summary
from dask_coded.prediction.predictors import PREDICTORS
from dask_coded.simulation import Speeds, changed, drifting, gilbert_elliott, shifted_exponential

CODED = ("MDS", "S2C2", "continuous")
#: Policies that can take turns on the same pieces.
_IN_TURNS = ("MDS", "S2C2 basic", "S2C2", "continuous")

#: Case, contender, and where it ran.
Name = tuple[str, str, str]


@dataclass
class Results:
    """The report, and every single round for the plots.

    Attributes
    ----------
    rounds : dict
        Rounds over the fluid bound by (case, contender, where).
    disturbed : dict
        Which of them are disturbed, for those on processes. Statistics leave these rounds out.
    dates : set of str
        Dates of the measurements.
    days : dict
        The same by section, of results that were merged.
    """

    report: Report
    smoke: bool = False
    processes: bool = True
    rounds: dict[Name, np.ndarray] = field(default_factory=dict)
    disturbed: dict[Name, np.ndarray] = field(default_factory=dict)
    dates: set[str] = field(default_factory=lambda: {datetime.now(UTC).date().isoformat()})
    days: dict[str, set[str]] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        """Size of the matrices on processes."""
        return SMOKE if self.smoke else Size()

    def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return the rows of the report whose entries have these values."""
        return [
            row
            for row in self.report.rows
            if all(row.get(key) == value for key, value in wanted.items())
        ]

    def merge(self, other: Results, section: str) -> None:
        """Add the results of another run, of one section.

        Raises
        ------
        ValueError
            If it has another size or other versions, which a page states only once, or rounds of
            the same name.
        """
        for what, theirs, ours in (
            ("versions", other.report.versions, self.report.versions),
            ("size", other.size, self.size),
        ):
            if theirs != ours:
                raise ValueError(
                    f"All sections of a page must have the same {what}: the kept one has {theirs}, "
                    f"this run has {ours}. Run the kept section again."
                )
        self.report.rows += other.report.rows
        self.report.machine |= other.report.machine
        self._keep(other.rounds)
        self.disturbed |= other.disturbed
        self.days[section] = other.dates

    def _keep(self, rounds: dict[Name, np.ndarray]) -> None:
        if taken := self.rounds.keys() & rounds.keys():
            raise ValueError(
                f"There are rounds of {min(taken)} already: name the case differently."
            )
        self.rounds |= rounds

    def quiet(self, *names: Name) -> np.ndarray:
        """Return which rounds are disturbed under none of these names, shape (rounds,)."""
        count = min(len(self.rounds[name]) for name in names)
        found = np.ones(count, dtype=bool)
        for name in names:
            if name in self.disturbed:
                found &= ~self.disturbed[name][:count]
        return found

    def write(self, file: Path) -> None:
        """Write the results to a file for `read`."""
        # No measurement is more exact than five digits.
        rounds = [
            [*key, [float(f"{ratio:.5g}") for ratio in ratios]]
            for key, ratios in self.rounds.items()
        ]
        disturbed = [[*key, some.tolist()] for key, some in self.disturbed.items()]
        about = {"smoke": self.smoke, "dates": sorted(self.dates), "disturbed": disturbed}
        found = {**self.report.as_dict(), "rounds": rounds, **about}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Results:
        """Read the results of `write`."""
        found = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            Report("paper", found["rows"], found["machine"], found["versions"]),
            smoke=found["smoke"],
            rounds={tuple(key): np.array(ratios) for *key, ratios in found["rounds"]},
            # Sections measured before rounds were marked have none.
            disturbed={tuple(key): np.array(some) for *key, some in found.get("disturbed", [])},
            dates=set(found["dates"]),
        )

    def count(self, rounds: int) -> int:
        """Return the number of rounds, reduced to a few in a smoke run."""
        return min(rounds, 3) if self.smoke else rounds

    def add(
        self,
        case: Case,
        contender: Contender,
        where: str,
        found: np.ndarray | Measured,
        goals: dict[float, float] | None = None,
        **fields: Any,
    ) -> None:
        """Add rounds over their bounds: median with quartiles, and the 99th percentile.

        Raises
        ------
        ValueError
            If there are rounds of that name already.
        """
        key = (case.name, contender.name, where)
        self._keep({key: found.ratios if isinstance(found, Measured) else found})
        if isinstance(found, Measured):
            self.disturbed[key] = found.disturbed
        ratios = self.rounds[key][self.quiet(key)]
        common = {
            "policy": contender.name,
            "n": case.n,
            "k": case.k,
            "where": where,
            **case.fields,
            **fields,
        }
        goals = goals or {}
        name = f"{case.name}: {contender.name}, {where}"
        self.report.add(
            name,
            "round_over_fluid",
            Summary.of(ratios),
            goal=goals.get(0.5),
            quantile=0.5,
            **common,
        )
        if len(ratios) >= 100 or 0.99 in goals:
            worst = float(np.quantile(ratios, 0.99))
            self.report.add(
                name, "round_over_fluid", worst, goal=goals.get(0.99), quantile=0.99, **common
            )

    def simulate(self, case: Case, names: Iterable[str], **fields: Any) -> None:
        bounds = simulated.bounds(case)
        for name in names:
            seconds = simulated.run_case(case, CONTENDERS[name])
            self.add(case, CONTENDERS[name], "simulation", seconds / bounds, **fields)

    def in_turns(self, case: Case, names: Iterable[str], versus: str) -> None:
        """Add the time of each round over that of another contender in the same turn.

        Nothing is added for a contender if all turns are disturbed under one of the two.
        """
        base = (case.name, versus, "processes")
        for name in names:
            key = (case.name, name, "processes")
            quiet = self.quiet(key, base)
            if not quiet.any():
                continue
            self.report.add(
                f"{case.name}: {name} over {versus}, processes",
                "time_in_turns",
                Summary.of((self.rounds[key] / self.rounds[base])[quiet]),
                policy=name,
                versus=versus,
                n=case.n,
                k=case.k,
                where="processes",
                **case.fields,
            )

    def held(self, share: float, where: str, **fields: Any) -> None:
        """Add the share of uncoded data that a worker has come to hold."""
        case = "{n} workers, {rounds} rounds, {trace}".format_map(fields)
        self.report.add(f"{case}, {where}", "share_held", 100 * share, "%", where=where, **fields)

    def gains(self, case: Case, contender: str, versus: str, where: str, **fields: Any) -> None:
        """Add the time saved over another contender, relative to its time and to our own.

        Nothing is added if all rounds are disturbed under one of the two.
        """
        names = (case.name, contender, where), (case.name, versus, where)
        quiet = self.quiet(*names)
        if not quiet.any():
            return
        ours, theirs = (self.rounds[name][quiet] for name in names)
        # A ratio times its bound is the seconds of a round; both contenders have the same bounds.
        bounds = simulated.bounds(case)[: len(quiet)][quiet]
        ours_total, theirs_total = (ours * bounds).sum(), (theirs * bounds).sum()
        for measure, base in (("gain_over_theirs", theirs_total), ("gain_over_ours", ours_total)):
            self.report.add(
                f"{case.name}: {contender} against {versus}, {where}",
                measure,
                100 * (theirs_total - ours_total) / base,
                "%",
                policy=contender,
                versus=versus,
                n=case.n,
                k=case.k,
                where=where,
                **case.fields,
                **fields,
            )


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
        on_processes(results, real[:1] if results.smoke else real, CODED, tasks=algorithms.PARTS)


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
    With ``tasks`` for each worker, products of dask.array are measured as over-decomposition.
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
                    plain = CONTENDERS["over-decomposition"]
                    times, held = bench.dask_array(case, tasks)
                    results.add(case, plain, "processes", times)
                    rounds = 1 + len(case.speeds)
                    results.held(held, "processes", n=n, rounds=rounds, **case.fields)
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
            plain = Contender(f"dask.array, {chunks} tasks a worker", CONTENDERS["MDS"].code, "")
            times, _ = bench.dask_array(case, chunks)
            results.add(case, plain, "processes", times)


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


def whole_algorithm(results: Results, name: str) -> None:
    """Time an algorithm under all policies, with speeds of real machines."""
    if not results.processes:
        return
    size = algorithms.SMOKE if results.smoke else algorithms.Size()
    algorithm = algorithms.ALGORITHMS[name](size)
    n, k = (4, 3) if results.smoke else (10, 7)
    if algorithm.hessian:
        n, k = 12, 9
    for level, trace in {"low": "matrix-math"}.items() if results.smoke else cases.CLOUDS.items():
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
                section="algorithms",
                misprediction=level,
                trace=trace,
                where="processes",
                n=n,
                k=k,
            )


SECTIONS: dict[str, Callable[[Results], None]] = {
    "controlled": controlled,
    "cloud": cloud,
    "prediction-error": prediction_error,
    "traces": every_trace,
    "predictors": predictors,
    "regimes": regimes,
    "lengths": lengths,
    "storage": where_coding_pays,
    **{name: partial(whole_algorithm, name=name) for name in algorithms.ALGORITHMS},
}
