"""The table of the documentation: what survives what, by fault and by what the worker was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_TITLES = {
    "stopped": "stopped (SIGSTOP) for 0.5 to 30 s",
    "cut off": "cut off: all packets dropped for 0.5 to 15 s",
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


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the table of the faults in some rows of a report, as Markdown.

    For each fault: how often it hit which workers, and the median and the longest time without a
    result of any load around it, of the loads of this package and of stock Dask.
    """
    rows = list(rows)
    events = [event for row in rows for event in row.get("events", ())]
    lines = [
        f"| fault | {' | '.join(_ROLES)} | without a result: median | longest | Dask alone: median "
        "| longest |",
        "| --- " * (len(_ROLES) + 5) + "|",
    ]
    for kind, title in _TITLES.items():
        if not (found := [event for event in events if event["kind"] == kind]):
            continue
        counts = [sum(event["role"] == role for event in found) for role in _ROLES]
        ours = [max(g for load, g in e["gaps"].items() if load != _STOCK) for e in found]
        stock = [event["gaps"][_STOCK] for event in found]
        cells = [
            *map(str, counts),
            *(f"{s:.1f} s" for gaps in (ours, stock) for s in (_median(gaps), max(gaps))),
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    results = [row for row in rows if row["measure"] in ("results", "wrong") and row.get("load")]
    ours_only = [row for row in results if row["load"] != _STOCK]
    made = sum(row["value"] for row in ours_only if row["measure"] == "results")
    wrong = sum(row["value"] for row in ours_only if row["measure"] == "wrong")
    lines += ["", f"{len(events)} faults, {made} results, {wrong} of them wrong."]
    return "\n".join(lines) + "\n"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
