"""GC-DC: clusters chosen in each step, beside fixed clusters and one code for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import numpy as np

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.papers import Claim, Finding, Paper, Section
from benchmarks.evidence.tables import span, table
from benchmarks.evidence.verdicts import Published, mean, ratio
from benchmarks.traces import series
from dask_coded.aggregation import (
    Aggregation,
    DynamicClusters,
    GradientCoding,
    Plan,
    StaticClusters,
)
from dask_coded.aggregation.spreading import memory
from dask_coded.aggregation.timing import Costs
from dask_coded.simulation import Delays, TrainingSimulation, markov

WORKERS, SIZE = 20, 4
STEPS, SEEDS = 1000, 5
#: Links of 1 Gbit/s; one worker needs two seconds for the gradient of the whole batch.
COSTS = Costs(latency=3e-4, bandwidth=1.25e8, summation=1e-9, computation=2.0)
#: A gradient of 5,000 numbers, and 6,000 samples of as many features, as in the data set gisette.
NBYTES, DATA = 40_000, 240_000_000
#: What counts as significant, in per cent of the time of a step: the abstract has no figure.
SIGNIFICANT = 5

#: A fully used machine still does some work.
_SLOWEST = 0.02


@dataclass(frozen=True)
class Case:
    """Delays of all workers, the load of the codes, and the clusters that a worker may be in.

    Parameters
    ----------
    name : str
    delays : callable(steps, seed) -> Delays
    load, candidates : int
    """

    name: str
    delays: Callable[[int, int], Delays]
    load: int = 3
    candidates: int = 3

    def methods(self) -> dict[str, Aggregation]:
        """Return what is compared; all compute as much in a step."""
        return {
            "GC": GradientCoding(self.load - 1, "cyclic"),
            "GC-SC": StaticClusters(SIZE, self.load, code="cyclic"),
            "GC-DC": DynamicClusters(SIZE, self.load, self.candidates, code="cyclic"),
            "GC, fractional": GradientCoding(self.load - 1),
        }


def chain(
    steps: int, seed: int, *, share: float, keeps: float, slowdown: float = 10, rates: float = 1
) -> Delays:
    """Return times that follow a Markov chain, of workers whose mean speeds differ.

    Parameters
    ----------
    steps, seed : int
    share : float
        Long-run share of workers that are slow.
    keeps : float
        Memory: the correlation of being slow in one step and in the next.
    slowdown : float
        How many times as slow these are.
    rates : float
        Workers take once to so many times as long as the fastest, whether slow or not.
    """
    found = markov(WORKERS, steps, share=share, memory=keeps, slowdown=slowdown, seed=seed)
    own = np.random.default_rng([seed, WORKERS]).uniform(1, rates, WORKERS)
    return Delays(found.factor * own / own.mean(), found.extra)


def recorded(steps: int, seed: int, *, trace: str) -> Delays:
    """Return times of recorded machines, each from a random moment on, and again from its start."""
    machines = series(trace, "trace")
    rng = np.random.default_rng([seed, WORKERS])
    columns = []
    for machine in rng.choice(len(machines), WORKERS, replace=len(machines) < WORKERS):
        values = machines[machine]
        start = int(rng.integers(len(values)))
        columns.append(np.take(values, np.arange(start, start + steps), mode="wrap"))
    speeds = np.maximum(np.array(columns).T, _SLOWEST)
    return Delays(speeds.mean() / speeds, np.zeros_like(speeds))


_usual = partial(chain, share=0.2, keeps=0.94)

CASES = {
    "homogeneous": (
        Case("memory 0.94", _usual),
        Case("memory 0.94, load 2", _usual, load=2),
        Case("memory 0.94, slow is twice as slow", partial(_usual, slowdown=2)),
        Case("memory 0.99", partial(chain, share=0.25, keeps=0.99)),
        Case("no memory", partial(chain, share=0.25, keeps=0.0)),
    ),
    "heterogeneous": (
        Case("rates 1 to 3, memory 0.94", partial(_usual, rates=3)),
        Case("rates 1 to 3, no chain", partial(chain, share=0.0, keeps=0.0, rates=3)),
        Case("rates 1 to 10, no chain", partial(chain, share=0.0, keeps=0.0, rates=10)),
    ),
    "recorded": tuple(
        Case(trace, partial(recorded, trace=trace))
        for trace in ("stream-triad", "azure2017", "google2011")
    ),
}


# ---------------------------------------------------------------------------------------- sections


class Placements:
    """Counts the placements that a plan chooses, and their bytes."""

    def __init__(self, plan: Plan) -> None:
        self.count = self.nbytes = 0
        self._last: tuple[int, ...] = ()
        self._choose = plan.choose
        plan.choose = self._counted  # type: ignore[method-assign]

    def _counted(self, late: Any = None) -> tuple[int, ...]:
        found = self._choose(late)
        self.count += found != self._last
        self._last = found
        # The root sends it to every worker with the sum.
        self.nbytes += WORKERS * len(msgpack.packb(found))
        return found


def simulated(kept: Kept, section: str, seed: int) -> None:
    """Add the mean step of each method, and the bytes that it moves."""
    steps = 30 if kept.smoke else STEPS
    for case in CASES[section][: 1 if kept.smoke else None]:
        for name, aggregation in case.methods().items():
            plan = aggregation.plan(WORKERS)
            placements = Placements(plan) if aggregation.moves else None
            delays = case.delays(steps, seed)
            found = TrainingSimulation(plan, COSTS, NBYTES, delays).run(steps)
            kept.report.add(
                f"{section}, {case.name}, seed {seed}: {name}",
                "step",
                float(found.ended.max()) / steps,
                "s",
                section=section,
                of=case.name,
                method=name,
                seed=seed,
                steps=steps,
                gradients=float(found.received.sum()) / steps,
                placements=placements.nbytes / steps if placements else 0.0,
                placed=placements.count if placements else 0,
                fetched=DATA * sum(map(len, plan.stored)) / plan.parts,
                memory=memory(found.late),
            )


def lab(kept: Kept, seed: int) -> None:
    """Add the mean step on worker processes that sleep for the times of a chain with memory."""
    if not kept.processes:
        return
    from benchmarks.aggregation import measured
    from benchmarks.network import NetworkLab

    workers, steps = (4, 6) if kept.smoke else (12, 400)
    delays = chain(steps, seed, share=0.25, keeps=0.9)
    own = Delays(delays.factor[:, :workers], delays.extra[:, :workers])
    with NetworkLab(workers, "100mbit") as there:
        for name in ("GC-SC", "GC-DC"):
            seconds = measured(
                there,
                Case("", _usual, load=2).methods()[name],
                own,
                nbytes=NBYTES,
                computation=0.01 if kept.smoke else 0.5,
                steps=steps,
            )
            kept.report.add(
                f"processes, seed {seed}: {name}",
                "step_on_processes",
                # Both are the same until there is a history.
                float(np.mean(seconds[steps // 4 :])),
                "s",
                method=name,
                seed=seed,
                steps=steps,
            )


SECTIONS = {
    **{
        name: Section(
            {f"seed {i}": partial(simulated, section=name, seed=i) for i in range(SEEDS)}, 12
        )
        for name in CASES
    },
    "processes": Section({f"seed {i}": partial(lab, seed=i) for i in range(SEEDS)}, 20),
}


# ------------------------------------------------------------------------------- what was measured

_WORKERS = {
    "homogeneous": "homogeneous workers",
    "heterogeneous": "heterogeneous workers",
    "recorded": "recorded machines",
}


def _of(kept: Kept, section: str, case: str, method: str) -> list[dict[str, Any]]:
    rows = kept.rows(measure="step", section=section, of=case, method=method)
    return sorted(rows, key=lambda row: row["seed"])


def _seconds(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([row["value"] for row in rows])


def _on_processes(kept: Kept, method: str) -> np.ndarray:
    rows = kept.rows(measure="step_on_processes", method=method)
    return _seconds(sorted(rows, key=lambda row: row["seed"]))


def faster(kept: Kept, section: str, versus: str) -> list[Finding]:
    """Find how many times as long steps take with another method as with GC-DC."""
    found = []
    for case in CASES[section]:
        theirs, ours = (_of(kept, section, case.name, name) for name in (versus, "GC-DC"))
        if not ours:
            continue
        value = ratio(_seconds(theirs), _seconds(ours))
        reason = ""
        if value.value < 1 / (1 - SIGNIFICANT / 100):
            known = _of(kept, section, case.name, "GC-SC")
            remembered = np.mean([row["memory"] for row in known])
            reason = f"with fixed clusters, being late has a memory of {remembered:.2f}"
        found.append(Finding(case.name, None, value, reason))
    if section == "homogeneous" and versus == "GC-SC":
        times = [_on_processes(kept, name) for name in (versus, "GC-DC")]
        if len(times[1]):
            found.append(Finding("12 processes, memory 0.9, load 2", ratio(*times)))
    return found


def against_default(kept: Kept) -> list[Finding]:
    """Find how many times as long steps take with the fractional code as with GC-DC."""
    return [
        found._replace(case=f"{_WORKERS[section]}: {found.case}")
        for section in CASES
        for found in faster(kept, section, "GC, fractional")
    ]


def communication(kept: Kept) -> list[Finding]:
    """Find the bytes of GC-DC over those of GC: of gradients, with placements, with data."""
    found = []
    parts: dict[str, Callable[[dict[str, Any]], float]] = {
        "gradients": lambda row: row["gradients"],
        "gradients and placements": lambda row: row["gradients"] + row["placements"],
        f"these, and data fetched once, in {STEPS} steps": lambda row: (
            row["gradients"] + row["placements"] + row["fetched"] / row["steps"]
        ),
    }
    for what, count in parts.items():
        shares = [
            count(ours) / count(theirs)
            for section, cases in CASES.items()
            for case in cases
            for theirs, ours in zip(
                _of(kept, section, case.name, "GC"), _of(kept, section, case.name, "GC-DC")
            )
        ]
        if shares:
            reason = ""
            if np.mean(shares) > 1:
                reason = "a worker stores the data of all clusters in which it may be"
            found.append(Finding(what, None, mean(shares), reason))
    return found


# ------------------------------------------------------------------------------------------ tables


def steps(kept: Kept) -> Iterator[str]:
    if not kept.rows(measure="step"):
        return
    yield "## Seconds of a step\n"
    yield (
        f"Simulated: the package's state machines in virtual time, {WORKERS} workers, clusters of "
        f"{SIZE}, {STEPS} steps for each of {SEEDS} seeds; medians and ranges of seeds. Messages "
        f"take time on links of 1 Gbit/s, {NBYTES // 1000} KB a gradient; one worker needs "
        f"{COSTS.computation:g} s for the whole batch. A chain's slow workers, a fifth or a "
        "quarter of all, are ten times as slow unless it says otherwise. *GC, fractional* is the "
        "default code of `GradientCoding`. *Steps to tell apart*: how many the difference between "
        "GC-DC and GC-SC needs to exceed its 95 % interval, if errors fall with the square root."
    )
    lines = []
    for section, cases in CASES.items():
        for case in cases:
            rows = {name: _of(kept, section, case.name, name) for name in case.methods()}
            if not rows["GC-DC"]:
                continue
            cells = [span(_seconds(found), digits=3) for found in rows.values()]
            lines.append([f"{section}, {case.name}", *cells, apart(rows["GC-SC"], rows["GC-DC"])])
    names = CASES["homogeneous"][0].methods()
    yield from table(["", *names, "steps to tell apart"], lines)


def apart(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    """Return how many steps the difference of two methods needs to exceed its interval."""
    logs = np.log(_seconds(theirs) / _seconds(ours))
    if len(logs) < 2 or abs(logs.mean()) < 0.005:
        return "–"
    needed = ours[0]["steps"] * (1.96 * logs.std(ddof=1) / abs(logs.mean())) ** 2
    return f"{max(needed, 1):.0f}"


def traffic(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="step", section="homogeneous", of="memory 0.94")
    if not rows:
        return
    yield "## Bytes\n"
    yield (
        "Received by all workers and the root, homogeneous workers with memory 0.94. Every worker "
        f"fetches its data once, of {DATA / 1e6:.0f} MB in all. *New placements*: steps with "
        "another placement than the step before."
    )
    lines = []
    for name in CASES["homogeneous"][0].methods():
        found = [row for row in rows if row["method"] == name]
        gradients, placements, data, placed = (
            np.mean([row[key] for row in found])
            for key in ("gradients", "placements", "fetched", "placed")
        )
        lines.append(
            [
                name,
                f"{gradients / 1e6:.2f} MB",
                f"{placements:.0f} B",
                f"{data / 1e6:.0f} MB",
                f"{placed:.0f}",
            ]
        )
    header = ["", "gradients, a step", "placements, a step", "data, once", "new placements"]
    yield from table(header, lines)


def _claim(section: str, versus: str, text: str, sure: str) -> Claim:
    return Claim(
        f"Time of a step against {versus}, {text}",
        Published(SIGNIFICANT, float("inf")),
        f'abstract, "significant"; the limit of {SIGNIFICANT} % is ours',
        sure,
        (section,),
        partial(faster, section=section, versus=versus),
    )


PAPER = Paper(
    name="gc-dc",
    title="Evidence: GC-DC",
    intro=(
        "GC-DC (Buyukates, Ozfatura, Ulukus and Gündüz, arXiv:2011.01922 and 2103.01206) is "
        "gradient coding in clusters that exchange workers between steps, so that those that were "
        "late are spread. [Gradient coding](../gradient-coding.md#clusters) explains it, and "
        "GC-SC, whose clusters are fixed. GC is one code for all workers. In recorded speeds a "
        "step is a sample of a trace, which repeats where it is shorter than the steps."
    ),
    claims=(
        *(_claim(name, "GC", text, "sure, without figures") for name, text in _WORKERS.items()),
        *(_claim(name, "GC-SC", text, "recalled") for name, text in _WORKERS.items()),
        Claim(
            "Time of a step against GC with the fractional code, the package's default",
            Published(SIGNIFICANT, float("inf")),
            f"not in the paper; the limit of {SIGNIFICANT} % is ours",
            "sure",
            tuple(CASES),
            against_default,
        ),
        Claim(
            "Communication over that of GC",
            Published(0, 1, "level", "times", at_most=True),
            'abstract, "no increase"',
            "sure",
            tuple(CASES),
            communication,
        ),
    ),
    sections=SECTIONS,
    parts=(steps, traffic),
)
