"""The table of the documentation: what survives what, by fault and by what the worker was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.faults.loads import SqueezedTrainings, Trainings

_TITLES = {
    "stopped": "stopped (SIGSTOP) for 0.5 to 30 s",
    "cut off": "network lost: all packets dropped for 0.5 to 15 s",
    "killed": "killed (SIGKILL), another one starts",
    "killed, with a nanny": "killed, its nanny starts it again",
    "retired": "retired, another one starts",
    "slowed": "slowed to 3 to 30 % of a core",
    "thin link": "link ten times thinner",
    "paused": "paused, as for lack of memory",
    "spilled": "all its data written to disk",
    "corrupt": "multiplies wrongly by 1/1000",
}
_ROLES = ("coordinator", "leader", "keeper", "other")
_STOCK = "Dask alone"
_ANY = "slowest of our loads"
# By load, the titles of columns. The first two loads are products with the same matrix.
_COLUMNS = {"lazy rounds": "lazy rounds", _STOCK: "stock Dask", _ANY: _ANY}


def table(rows: Iterable[dict[str, Any]], timed: int = 0) -> str:
    """Return the table of the faults in some rows of a report, as Markdown.

    For each fault: how often it hit which workers, and the median and the longest time around it
    without a result: of lazy rounds, of the same products with stock Dask, and of whichever load of
    this package waited longest. The counts are of all rows, the times of seeds from ``timed`` on.
    """
    rows = list(rows)
    events = [
        event
        | {
            "gaps": dict(zip(row["loads"], event["gaps"], strict=True))
            if row["seed"] >= timed
            else {}
        }
        for row in rows
        for event in row.get("events", ())
    ]
    headings = [f"{name}: {what}" for name in _COLUMNS.values() for what in ("median", "longest")]
    lines = [
        f"| fault | {' | '.join((*_ROLES, *headings))} |",
        "| --- " * (1 + len(_ROLES) + len(headings)) + "|",
    ]
    for kind, title in _TITLES.items():
        if not (found := [event for event in events if event["kind"] == kind]):
            continue
        counts = [sum(event["role"] == role for event in found) for role in _ROLES]
        cells = list(map(str, counts))
        for column in _COLUMNS:
            gaps = [_gap(event["gaps"], column) for event in found]
            known = sorted(gap for gap in gaps if gap is not None)
            ends = (known[len(known) // 2], known[-1]) if known else ()
            cells += [f"{seconds:.1f} s" for seconds in ends] or ["–", "–"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    results = [row for row in rows if row["measure"] in ("results", "wrong") and row.get("load")]
    ours_only = [row for row in results if row["load"] != _STOCK]
    made = sum(row["value"] for row in ours_only if row["measure"] == "results")
    wrong = sum(row["value"] for row in ours_only if row["measure"] == "wrong")
    # Of trainings only the parameters at the end are checked.
    steps = sum(
        row["value"]
        for row in ours_only
        if row["measure"] == "results" and row["load"] in (Trainings.name, SqueezedTrainings.name)
    )
    lines += [
        "",
        f"{len(events)} faults, {made - steps:.0f} results and {steps:.0f} steps of trainings, "
        f"{wrong:.0f} of them wrong.",
    ]
    return "\n".join(lines) + "\n"


def _gap(gaps: dict[str, float], column: str) -> float | None:
    """Return the longest time without a result of what a column shows, if that ran."""
    if column != _ANY:
        return gaps.get(column)
    return max((gap for load, gap in gaps.items() if load != _STOCK), default=None)
