"""Tables of the page of S2C2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.evidence.s2c2.algorithms import COPIES
from benchmarks.evidence.s2c2.cases import CLOUDS
from benchmarks.evidence.s2c2.claims import RUNS_DIFFER
from benchmarks.evidence.s2c2.processes import DISTURBED
from benchmarks.evidence.s2c2.results import Results
from benchmarks.evidence.tables import table

#: Policies that a table of the controlled cluster shows.
_SHOWN = ("MDS", "S2C2", "continuous")
#: Storage over that of the data that the table of storage shows.
_STORED = (1.0, 1.2, 4 / 3, 2.0, 3.0)


def words(results: Results) -> Iterator[str]:
    """Yield what the tables' words mean."""
    clouds = " and ".join(f"*{level} misprediction* is {trace}" for level, trace in CLOUDS.items())
    yield (
        "## Words of the tables\n\n"
        "(n,k): n workers with an MDS code, any k of whose pieces suffice. *MDS*, *S2C2 basic*, "
        "*S2C2*, *continuous*: [policies](../how-it-works.md#policies) with this code. *Uncoded*: "
        "each block once. *Replication*: three copies, late blocks computed twice. "
        "*Over-decomposition*: small blocks, some of them twice, assigned by predicted speed and "
        f"moved. Speeds are those of recorded machines; {clouds}. The *fluid bound* is the time of "
        "the (n,k) code if no work is wasted; methods that store other data can be below 1. "
        "Simulations drive the same round engine in virtual time; on processes, CPU quotas hold "
        "workers to the speeds.\n"
    )


def algorithms(results: Results) -> Iterator[str]:
    rows = results.rows(section="algorithms")
    if not rows:
        return
    yield "## Whole algorithms on processes\n"
    repetitions = {row["repetitions"] for row in rows}
    yield (
        "Time over that of `continuous` (in seconds), median of "
        f"{min(repetitions)} to {max(repetitions)} runs in turns. The client drives Dask's column, "
        f"a coordinator in the cluster the others. `{COPIES.name}` is the default for sparse "
        "matrices, whose parity is dense. A star: runs differ by a factor of more than "
        f"{RUNS_DIFFER:g}."
    )
    names = list(dict.fromkeys(row["policy"] for row in rows))
    lines = []
    for algorithm, level in dict.fromkeys((r["algorithm"], r["misprediction"]) for r in rows):
        wanted = {"section": "algorithms", "algorithm": algorithm, "misprediction": level}
        found = {row["policy"]: row for row in results.rows(**wanted)}
        cells = [_time(found[name]) if name in found else "–" for name in names]
        cells[names.index("continuous")] = f"{found['continuous']['seconds']:.1f} s"
        lines.append([f"{algorithm}, {level}", *cells])
    yield from table(["", *("Dask" if n == "over-decomposition" else n for n in names)], lines)


def _time(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    return f"{row['value']:.2f}" + " *" * (high > RUNS_DIFFER * low)


def storage(results: Results) -> Iterator[str]:
    rows = [
        row
        for row in results.rows(section="storage")
        if any(abs(row["stored"] - stored) < 0.01 for stored in _STORED)
        and "4 parts" not in row["policy"]
        and row["policy"] != "S2C2"
    ]
    if not rows:
        return
    yield "## Where coding pays, simulated\n"
    yield (
        "Median round over the ideal time, the work on the data over the sum of all speeds, by "
        "storage in units of the data. The least of a column is bold."
    )
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    values = {(r["stored"], r["policy"], r["regime"]): r["value"] for r in rows}
    least = {regime: min(v for key, v in values.items() if key[2] == regime) for regime in regimes}
    lines = []
    for stored, policy in sorted({(row["stored"], row["policy"]) for row in rows}):
        line = [f"{stored:.2f}", policy]
        for regime in regimes:
            value = f"{values[stored, policy, regime]:.2f}"
            line.append(f"**{value}**" if value == f"{least[regime]:.2f}" else value)
        lines.append(line)
    yield from table(["stored", "", *regimes], lines)


def controlled(results: Results) -> Iterator[str]:
    rows = results.rows(section="controlled", measure="round_over_fluid", quantile=0.5)
    if not rows:
        return
    shape = rows[0]["shape"]
    yield "## Controlled cluster\n"
    yield (
        f"Median round over the fluid bound of {', '.join(_SHOWN)}, by the number of slowed "
        f"workers; {shape}. The other workers differ by up to 20 %."
    )
    slowed = sorted({row["slowed"] for row in rows if row["where"] == "processes"} | {0, 1, 3, 6})
    lines = []
    for where in ("processes", "simulation"):
        for factor, n, k in sorted({(row["factor"], row["n"], row["k"]) for row in rows}):
            wanted = {"shape": shape, "factor": factor, "n": n, "k": k, "where": where}
            wanted |= {"measure": "round_over_fluid", "quantile": 0.5, "section": "controlled"}
            cells = [_several(results, _SHOWN, slowed=count, **wanted) for count in slowed]
            if any(cells):
                name = f"({n},{k}), {factor:g} times slower, {where}"
                lines.append([name, *(cell or "–" for cell in cells)])
    yield from table(["", *(f"{count} slowed" for count in slowed)], lines)
    yield from _turns(results)


def _several(results: Results, names: tuple[str, ...], **wanted: Any) -> str:
    """Return the medians of several contenders in one cell; empty if there is none of the first."""
    found = [results.rows(policy=name, **wanted) for name in names]
    if not found[0]:
        return ""
    return " / ".join(f"{rows[0]['value']:.2f}" if rows else "–" for rows in found)


def _turns(results: Results) -> Iterator[str]:
    rows = results.rows(section="controlled", measure="time_in_turns")
    if not rows:
        return
    versus = rows[0]["versus"]
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if name != versus]
    yield f"Time over that of `{versus}` on processes, in turns: median and quartiles."
    cases: dict[str, dict[str, str]] = {}
    for row in rows:
        case = cases.setdefault(f"({row['n']},{row['k']}), {row['slowed']} slowed", {})
        low, high = row["spread"]
        case[row["policy"]] = f"{row['value']:.3f} ({low:.2f} to {high:.2f})"
    lines = [[case, *(of.get(name, "–") for name in names)] for case, of in cases.items()]
    yield from table(["", *names], lines)


def cloud(results: Results) -> Iterator[str]:
    rows = results.rows(section="cloud", measure="round_over_fluid", over="trace", quantile=0.5)
    if not rows:
        return
    yield "## Speeds of real machines\n"
    yield (
        "Median round over the fluid bound. The last column is the share of workers that were more "
        "than 15 % slower than predicted."
    )
    names = list(dict.fromkeys(row["policy"] for row in rows))
    keys = ("where", "misprediction", "n", "k")
    order = {"processes": 0, "simulation": 1, "low": 0, "high": 1}
    lines = []
    for key in sorted(
        {tuple(row[name] for name in keys) for row in rows},
        key=lambda key: (order[key[0]], order[key[1]], key[2]),
    ):
        about = dict(zip(keys, key, strict=True))
        cells = {
            row["policy"]: f"{row['value']:.2f}" for row in rows if about.items() <= row.items()
        }
        where, level, n, k = key
        missed = [
            row
            for row in results.rows(measure="mispredicted", misprediction=level, over="trace")
            if row["case"].startswith(f"({n},{k}),")
        ]
        lines.append(
            [
                f"({n},{k}), {level}, {where}",
                *(cells.get(name, "–") for name in names),
                f"{missed[0]['value']:.1f} %" if missed else "–",
            ]
        )
    yield from table(["", *names, "mispredicted"], lines)


def traces(results: Results) -> Iterator[str]:
    rows = results.rows(section="traces", measure="round_over_fluid", quantile=0.5, over="trace")
    if not rows:
        return
    yield "## `continuous` with the default predictor on every trace\n"
    yield "Median round over the fluid bound, with quartiles on processes."
    lines = []
    for trace, n, k in dict.fromkeys((row["trace"], row["n"], row["k"]) for row in rows):
        found = {
            row["where"]: row for row in rows if (row["trace"], row["n"], row["k"]) == (trace, n, k)
        }
        real = found.get("processes")
        cell = f"{real['value']:.3f} ({_quartiles(real)})" if real else "–"
        lines.append([f"{trace}, ({n},{k})", cell, f"{found['simulation']['value']:.3f}"])
    yield from table(["", "processes", "simulated"], lines)


def _quartiles(row: dict[str, Any]) -> str:
    return " to ".join(f"{end:.2f}" for end in row["spread"])


def predictors(results: Results) -> Iterator[str]:
    rows = results.rows(measure="mean_round_over_fluid")
    if not rows:
        return
    yield "## Which predictor gives the shortest rounds\n"
    yield (
        "Mean round over the fluid bound at (10,7) in simulation, on machines and times that no "
        "predictor was trained on."
    )
    columns = list(dict.fromkeys((r["policy"], r["on"]) for r in rows if r["on"] != "models"))
    lines = []
    for name in dict.fromkeys(row["predictor"] for row in rows):
        cells = {(r["policy"], r["on"]): r["value"] for r in rows if r["predictor"] == name}
        lines.append([name, *(f"{cells[c]:.4f}" if c in cells else "–" for c in columns)])
    yield from table(["", *(f"{policy}, {on}" for policy, on in columns)], lines)


def errors(results: Results) -> Iterator[str]:
    rows = results.rows(section="prediction-error", measure="round_over_fluid", quantile=0.5)
    if not rows:
        return
    yield "## Sensitivity to prediction errors\n"
    yield (
        "Median round over the fluid bound at (12,9) in simulation, by the standard deviation of "
        "the logarithm of predicted over actual speed."
    )
    values = sorted({row["error"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        cells = {row["error"]: row["value"] for row in rows if row["policy"] == name}
        lines.append([name, *(f"{cells[value]:.2f}" for value in values)])
    yield from table(["", *map(str, values)], lines)


def dealt(results: Results) -> Iterator[str]:
    rows = results.rows(section="over-decomposition", measure="round_over_fluid", quantile=0.5)
    if not rows:
        return
    yield "## Over-decomposition on processes\n"
    yield (
        "Median round over the fluid bound at (10,7), with quartiles. Four partitions a worker, "
        "3 of 7 stored twice, are dealt out by predicted speed; the client starts the tasks, and "
        "Dask fetches what a worker lacks."
    )
    yield from _by_policy(rows, "misprediction")


def predictors_on_processes(results: Results) -> Iterator[str]:
    rows = results.rows(section="predictors-on-processes", measure="round_over_fluid", quantile=0.5)
    if not rows:
        return
    yield "## Predictors on processes\n"
    yield (
        "Median round over the fluid bound at (10,7), with quartiles. `lstm as published` is the "
        "paper's network of 4 units and one step, trained as its authors did, on machines and "
        "times that are not replayed here."
    )
    named = [row | {"name": f"{row['predictor']}, {row['misprediction']}"} for row in rows]
    yield from _by_policy(named, "name")


def _by_policy(rows: list[dict[str, Any]], name: str) -> Iterator[str]:
    """Yield a table with a line for each value of an entry, and a column for each policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells = {(row[name], row["policy"]): f"{row['value']:.3f} ({_quartiles(row)})" for row in rows}
    lines = [
        [value, *(cells.get((value, policy), "–") for policy in policies)]
        for value in dict.fromkeys(row[name] for row in rows)
    ]
    yield from table(["", *policies], lines)


def slowed(results: Results) -> Iterator[str]:
    rows = results.rows(section="slowed")
    if not rows:
        return
    yield "## Whole algorithms with some workers slowed throughout\n"
    yield (
        "Time over that of `S2C2` (in seconds) on 12 worker processes, any 9 of which suffice; "
        "median of runs in turns. The other workers differ by up to 20 %. A star: runs differ by a "
        f"factor of more than {RUNS_DIFFER:g}."
    )
    names = list(dict.fromkeys(row["policy"] for row in rows))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        many = f"{row['slowed']} slowed {row['factor']:g} times" if row["slowed"] else "none slowed"
        found.setdefault(f"{row['algorithm']}, {many}", {})[row["policy"]] = row
    lines = []
    for case, of in found.items():
        cells = [_time(of[name]) if name in of else "–" for name in names]
        cells[names.index("S2C2")] = f"{of['S2C2']['seconds']:.1f} s"
        lines.append([case, *cells])
    yield from table(["", *names], lines)


def hessians(results: Results) -> Iterator[str]:
    rows = results.rows(section="hessian")
    if not rows:
        return
    yield "## Hessians alone\n"
    yield (
        "Median round over the fluid bound, with quartiles: 6,000 x 6,000 on 12 worker processes, "
        "any 9 of which suffice. *Conventional* polynomial coding has every worker compute all of "
        "its product."
    )
    yield from _by_policy(rows, "misprediction")


def regimes(results: Results) -> Iterator[str]:
    rows = results.rows(section="regimes", measure="round_over_fluid", quantile=0.5)
    if not rows:
        return
    yield "## Plain dask.array with few or many tasks\n"
    yield (
        "Median round over the fluid bound on processes, with 3 of 12 workers slowed 5 times; "
        "dask.array's data are on the workers, and work stealing is on."
    )
    yield from table(["", "over bound"], [[r["policy"], f"{r['value']:.2f}"] for r in rows])


def lengths(results: Results) -> Iterator[str]:
    rows = results.rows(section="lengths", measure="round_over_fluid", quantile=0.5)
    if not rows:
        return
    yield "## Effect of the length of a round\n"
    yield (
        "Round over the fluid bound of `continuous` at (12,10) on processes, with the speeds of "
        "azure2017. Fewer columns of the operand mean less computation for as many messages."
    )
    lines = [[str(row["right"]), f"{row['value']:.3f}", _quartiles(row)] for row in rows]
    yield from table(["columns", "over bound", "quartiles"], lines)


def disturbed(results: Results) -> Iterator[str]:
    """Yield how many rounds all statistics leave out."""
    if not results.disturbed:
        return
    total = sum(map(len, results.disturbed.values()))
    count = sum(int(some.sum()) for some in results.disturbed.values())
    yield "## Disturbed rounds\n"
    yield (
        f"{count} of {total} rounds on processes are left out of all figures: just before or after "
        "them, the median worker was faster or slower than its quota says by a factor of more than "
        f"{DISTURBED:g}. How long a round took does not matter.\n"
    )


def agreement(results: Results) -> Iterator[str]:
    """Yield how simulated medians compare with measured ones of the same cases."""
    errors = []
    for (case, contender, where), ratios in results.rounds.items():
        if where == "processes" and (case, contender, "simulation") in results.rounds:
            virtual = results.rounds[case, contender, "simulation"]
            row = results.rows(case=f"{case}: {contender}, processes")[0]
            # Both have seen the same speeds; where these are constant, both have learned them.
            constant = row["section"] == "controlled"
            virtual = virtual[-len(ratios) :] if constant else virtual[: len(ratios)]
            quiet = results.quiet((case, contender, where))
            errors.append(float(np.median(virtual[quiet]) / np.median(ratios[quiet]) - 1))
    if not errors:
        return
    yield "## Simulation compared with processes\n"
    yield (
        f"In {len(errors)} cases, simulated medians are between {-min(errors):.1%} below and "
        f"{max(errors):.1%} above measured ones; the median difference is "
        f"{np.median(errors):+.1%}. "
        "Messages cost simulated workers no time here, and real ones most of a millisecond of "
        "CPU.\n"
    )


PARTS = (
    words,
    algorithms,
    storage,
    slowed,
    hessians,
    controlled,
    cloud,
    dealt,
    traces,
    predictors,
    predictors_on_processes,
    errors,
    regimes,
    lengths,
    disturbed,
    agreement,
)
