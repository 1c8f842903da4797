"""Tables of rounds: the controlled cluster, the clouds and the traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.paper.algorithms import PARTS
from benchmarks.paper.cases import OVER
from benchmarks.paper.processes import Size
from benchmarks.paper.results import Results
from benchmarks.paper.sections import CODED


def _value(results: Results, **wanted: Any) -> str:
    rows = results.rows(**wanted)
    return f"{rows[0]['value']:.2f}" if rows else "–"


def measured(results: Results, **wanted: Any) -> tuple[str, str]:
    """Return median and quartiles."""
    rows = results.rows(quantile=0.5, **wanted)
    if not rows:
        return "–", "–"
    return f"{rows[0]['value']:.3f}", " to ".join(f"{end:.2f}" for end in rows[0]["spread"])


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["", *("| " + " | ".join(line) + " |" for line in lines), ""]


def grid(results: Results, wanted: dict[str, Any], columns: str, title: str) -> Iterator[str]:
    """Yield a table of medians: contenders down, the values of one field across."""
    rows = results.rows(measure="round_over_fluid", quantile=0.5, **wanted)
    if not rows:
        return
    names = list(dict.fromkeys(row["policy"] for row in rows))
    values = sorted({row[columns] for row in rows})
    yield f"\n{title}"
    lines = []
    for name in names:
        cells = {row[columns]: row["value"] for row in rows if row["policy"] == name}
        lines.append([name, *(f"{cells[v]:.2f}" if v in cells else "–" for v in values)])
    yield from table(["", *map(str, values)], lines)


def plain_dask(results: Results) -> str:
    """Say what over-decomposition is on processes, if it was measured there."""
    if not results.rows(section="cloud", policy="over-decomposition", where="processes"):
        return ""
    return (
        f"On processes, over-decomposition is Dask with {PARTS} tasks a worker, which steals tasks "
        "and knows no speeds. "
    )


def controlled(results: Results) -> Iterator[str]:
    rows = results.rows(section="controlled", measure="round_over_fluid")
    if not rows:
        return
    yield "## Controlled cluster\n"
    yield (
        "Median round over the fluid bound. Each column is a number of slowed workers among 12; "
        "the others differ by up to 20 %. Simulations have 15 rounds, the first without any "
        "knowledge of the speeds."
    )
    first, *others = dict.fromkeys(row["shape"] for row in rows)
    if others:
        yield (
            f"\nSimulated with the operands and results of {' and '.join(others)}, coded rounds "
            f"differ from these by at most {_farthest(rows, first):.3f}."
        )
    for shape in (first,):
        for factor in sorted({row["factor"] for row in rows}):
            for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows):
                for where in ("simulation", "processes"):
                    wanted = {
                        "section": "controlled",
                        "shape": shape,
                        "factor": factor,
                        "n": n,
                        "k": k,
                        "where": where,
                    }
                    title = f"**({n},{k}), {shape}, slowed {factor:g} times, {where}**"
                    yield from grid(results, wanted, "slowed", title)
    yield from _turns(results)


def _turns(results: Results) -> Iterator[str]:
    rows = results.rows(section="controlled", measure="time_in_turns")
    if not rows:
        return
    versus = rows[0]["versus"]
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if name != versus]
    counts = sorted({str(row["repetitions"]) for row in rows}, key=int)
    yield (
        f"\n**Time over that of `{versus}`, processes**\n\nOn processes the policies take turns on "
        f"the same pieces. Each cell compares times over the bound in the same turn: their median "
        f"of {' or '.join(counts)} rounds, and in parentheses the quartiles."
    )
    cases: dict[str, dict[str, str]] = {}
    for row in rows:
        case = cases.setdefault(f"({row['n']},{row['k']}), {row['slowed']} slowed", {})
        low, high = row["spread"]
        case[row["policy"]] = f"{row['value']:.3f} ({low:.2f} to {high:.2f})"
    lines = [[case, *(of.get(name, "–") for name in names)] for case, of in cases.items()]
    yield from table(["", *names], lines)


def _farthest(rows: list[dict[str, Any]], first: str) -> float:
    """Return by how much medians of coded rounds differ from those of one shape, at most."""
    fields = ("policy", "n", "k", "slowed", "factor", "where")
    found = {
        (*(row[name] for name in fields), row["shape"]): row["value"]
        for row in rows
        if row["quantile"] == 0.5 and row["where"] == "simulation" and row["policy"] in CODED
    }
    return max((abs(value - found[*key[:-1], first]) for key, value in found.items()), default=0.0)


def _order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return where a case of the cloud stands in its table: simulations first, then by trace."""
    where, level, _, over, n, _ = key
    return where == "processes", over == "machine", level == "high", n > 12, -n


def cloud(results: Results) -> Iterator[str]:
    rows = results.rows(section="cloud", measure="round_over_fluid")
    if not rows:
        return
    yield "## Speeds of real machines\n"
    yield (
        "Each cell is the median round over the fluid bound, then the 99th percentile where there "
        f"are 100 rounds. {plain_dask(results)}The last column is the share of workers that were "
        "more than 15 % slower than predicted."
    )
    names = list(dict.fromkeys(row["policy"] for row in rows))
    keys = ("where", "misprediction", "trace", "over", "n", "k")
    lines = []
    for key in sorted({tuple(row[name] for name in keys) for row in rows}, key=_order):
        about = dict(zip(keys, key, strict=True))
        cells: dict[str, list[tuple[float, float]]] = {}
        for row in results.rows(section="cloud", measure="round_over_fluid", **about):
            cells.setdefault(row["policy"], []).append((row["quantile"], row["value"]))
        where, level, trace, over, n, k = key
        case = f"({n},{k}), {level} misprediction ({trace}{OVER[over]}): "
        missed = [
            row for row in results.rows(measure="mispredicted") if row["case"].startswith(case)
        ]
        lines.append(
            [
                f"({n},{k}), {level} ({trace}{OVER[over]}), {where}",
                *(
                    " / ".join(f"{v:.2f}" for _, v in sorted(cells.get(name, []))) or "–"
                    for name in names
                ),
                f"{missed[0]['value']:.1f} %" if missed else "–",
            ]
        )
    yield from table(["", *names, "mispredicted"], lines)


def traces(results: Results) -> Iterator[str]:
    rows = results.rows(section="traces", measure="round_over_fluid", quantile=0.5)
    if not rows:
        return
    yield "## `continuous` with the default predictor on every trace\n"
    yield "Rounds over the fluid bound."
    lines = []
    for row in (row for row in rows if row["where"] == "simulation"):
        key = {name: row[name] for name in ("trace", "over", "n", "k", "section")}
        lines.append(
            [
                f"({row['n']},{row['k']}), {row['trace']}{OVER[row['over']]}",
                f"{row['value']:.3f}",
                _value(results, quantile=0.99, where="simulation", **key),
                *measured(results, where="processes", **key),
                _value(results, quantile=0.99, where="processes", **key),
            ]
        )
    header = ["", "median, simulated", "99 %, simulated"]
    header += ["median, processes", "quartiles", f"99 % of {_count(results)} rounds, processes"]
    yield from table(header, lines)
    yield (
        f"On processes, the workers share {Size().cores:g} core in proportion to their speeds. "
        "Some machines of nab are ten times slower than the others. Their workers have about a "
        "hundredth of a core, so a message takes them long, and this trace has the longest rounds."
    )


def _count(results: Results) -> str:
    """Return how many rounds a case of a trace has on processes, without disturbed ones."""
    rows = results.rows(
        section="traces", measure="round_over_fluid", quantile=0.5, where="processes"
    )
    counts = [row["repetitions"] for row in rows] or [0]
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"
