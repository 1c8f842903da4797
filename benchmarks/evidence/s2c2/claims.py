"""The figures that the S2C2 paper published, and what was measured of each."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.evidence.papers import Claim, Finding
from benchmarks.evidence.s2c2.cases import CLOUDS
from benchmarks.evidence.s2c2.results import Results
from benchmarks.evidence.verdicts import Interval, Published, Ranged, from_ranges, ratio

#: Runs of the same case that differ by this factor were disturbed.
RUNS_DIFFER = 1.3

#: Whole algorithms that the abstract's range is compared with, and their sections.
ALGORITHMS = {
    "logistic regression": "logistic-regression",
    "support vector machine": "support-vector-machine",
    "PageRank, dense": "dense-pagerank",
    "PageRank, sparse": "sparse-pagerank",
    "graph filter, sparse": "graph-filter",
    "graph filter, dense": "dense-graph-filter",
    "graph filter, cnr-2000": "web-graph-filter",
}


# ------------------------------------------------------------------------------------ single rounds


def rounds(
    results: Results, *, n: int, k: int, level: str, versus: str, published: Published
) -> list[Finding]:
    """Find how many times as long rounds of another method take as those of S2C2."""
    wanted = {"n": n, "k": k, "misprediction": level, "over": "trace"}
    cluster = _rounds(results, versus, "processes", wanted)
    simulated = _rounds(results, versus, "simulation", wanted)
    if cluster is None and simulated is None:
        return []
    best = (cluster or simulated or [None])[0]
    told = best is not None and not all(published.reached(best).values())
    if versus == "over-decomposition":
        reason = _of_over_decomposition(results, wanted)
        told = True
    else:
        reason = (
            f"For equal workers the most is {published.show(Interval(*[n / k] * 3))}, and wrong "
            "predictions cost time"
        )
    return [
        Finding(
            "",
            cluster and cluster[0],
            simulated and simulated[0],
            reason if told else "",
            bool(cluster and cluster[1]),
        )
    ]


def _rounds(
    results: Results, versus: str, where: str, wanted: dict[str, Any]
) -> tuple[Interval, bool] | None:
    """Return the ratio of all times, and whether disturbed rounds had to be left out."""
    names = []
    dealt = versus == "over-decomposition" and where == "processes"
    section = "over-decomposition" if dealt else "cloud"
    for policy in (versus, "S2C2"):
        rows = results.rows(
            section=section, policy=policy, where=where, measure="round_over_fluid", **wanted
        )
        if not rows:
            return None
        case = rows[0]["case"].removesuffix(f": {policy}, {where}")
        names.append((case, policy, where))
    quiet = results.quiet(*names)
    if not quiet.any():
        return None
    bounds = results.bounds[names[0][0]][: len(quiet)]
    theirs, ours = ((results.rounds[name][: len(quiet)] * bounds)[quiet] for name in names)
    return ratio(theirs, ours), not quiet.all()


def _of_over_decomposition(results: Results, wanted: dict[str, Any]) -> str:
    """Say how close over-decomposition comes to the fluid bound."""
    found = [
        f"{row['value']:.2f} ({where})"
        for section, where in (("over-decomposition", "processes"), ("cloud", "simulation"))
        for row in results.rows(
            section=section,
            where=where,
            measure="round_over_fluid",
            quantile=0.5,
            policy="over-decomposition",
            **wanted,
        )
    ]
    if len(found) < 2:
        return f"It takes only {found[0]} of the fluid bound here" if found else ""
    return (
        f"It takes {' and '.join(found)} of the fluid bound here; what it takes more on processes "
        "is for starting tasks and fetching partitions"
    )


# -------------------------------------------------------------------------------- whole algorithms


def algorithm(
    results: Results, *, names: tuple[str, ...], versus: str, published: Published
) -> list[Finding]:
    """Find how many times as long whole algorithms take with another method as with S2C2."""
    found = []
    for name in names:
        for level in CLOUDS:
            rows = results.rows(section="algorithms", algorithm=name, misprediction=level)
            times = {row["policy"]: row for row in rows}
            if times.keys() >= {versus, "S2C2"}:
                found.append(_algorithm(f"{name}, {level} misprediction", times, versus, published))
    return found


def _algorithm(
    case: str, times: dict[str, dict[str, Any]], versus: str, published: Published
) -> Finding:
    rows = [times[name] for name in (versus, "S2C2")]
    theirs, ours = map(_ranged, rows)
    disturbed = any(each.high > RUNS_DIFFER * each.low for each in (theirs, ours))
    if all("turns" in row for row in rows):
        count = min(len(row["turns"]) for row in rows)
        value = ratio(*(row["turns"][:count] for row in rows))
    else:  # sections measured before single runs were kept
        value = from_ranges(theirs, ours)
    reason = "" if all(published.reached(value).values()) else _reason(times)
    return Finding(case, value, None, reason, disturbed)


def _ranged(row: dict[str, Any]) -> Ranged:
    low, high = row["spread"]
    return Ranged(row["value"], low, high, row["repetitions"])


def _reason(times: dict[str, dict[str, Any]]) -> str:
    """Say what keeps a whole algorithm from a published gain; times are over that of S2C2."""
    ours = times["S2C2"]["value"]
    uncoded = times["uncoded"]["value"] / ours
    reasons = []
    if uncoded < 1:
        reasons.append(f"uncoded takes {uncoded:.2f}: the code costs what it saves")
    elif round(1 / ours, 2) >= 1:
        reasons.append(f"uncoded takes {uncoded:.2f}: these machines differ little")
    if round(1 / ours, 2) < 1:
        reasons.append(f"`continuous` takes {1 / ours:.2f}: predictions fail")
    return "; ".join(reasons)


# ---------------------------------------------------------------------------------------- storage


def held(results: Results) -> list[Finding]:
    """Find the share of the data that a worker would store if it kept what it fetches."""
    return [
        Finding(
            f"{row['misprediction']} misprediction, {row['rounds']} rounds",
            None,
            Interval(row["value"], float("nan"), float("nan")),
            f"an even share is {100 / row['n']:.0f} %; predicted speeds, which workers follow, "
            "change little",
        )
        for row in results.rows(measure="share_held", where="simulation")
    ]


def _rounds_claim(
    n: int, k: int, level: str, figure: float, sure: str, versus: str = "MDS"
) -> Claim:
    published = Published(figure, figure)
    return Claim(
        f"Rounds at ({n},{k}), {level} misprediction, against {versus}",
        published,
        "evaluation",
        sure,
        ("cloud", "over-decomposition") if versus == "over-decomposition" else ("cloud",),
        partial(rounds, n=n, k=k, level=level, versus=versus, published=published),
    )


def _newton(level: str, figure: float) -> Claim:
    published = Published(figure, figure)

    def find(results: Results) -> list[Finding]:
        found = algorithm(results, names=("Newton's method",), versus="MDS", published=published)
        return [each._replace(case="") for each in found if f", {level} " in each.case]

    return Claim(
        f"Newton's method with polynomial codes at (12,9), {level} misprediction, against MDS",
        published,
        "evaluation",
        "recalled, fairly sure",
        ("newtons-method",),
        find,
    )


def hessians(results: Results, *, level: str, published: Published) -> list[Finding]:
    """Find how many times as long Hessians alone take with conventional polynomial coding."""
    rows = {row["policy"]: row for row in results.rows(section="hessian", misprediction=level)}
    if not rows.keys() >= {"conventional", "s2c2"}:
        return []
    value = ratio(rows["conventional"]["turns"], rows["s2c2"]["turns"])
    n, k = rows["s2c2"]["n"], rows["s2c2"]["k"]
    most = published.show(Interval(*[n / k] * 3))
    reason = f"For equal workers the most is {most}, and wrong predictions cost time"
    return [
        Finding("", value, None, "" if all(published.reached(value).values()) else reason, False)
    ]


def _hessian(level: str, figure: float) -> Claim:
    published = Published(figure, figure)
    return Claim(
        f"Hessians alone with polynomial codes at (12,9), {level} misprediction, against MDS",
        published,
        "evaluation",
        "recalled, fairly sure",
        ("hessian",),
        partial(hessians, level=level, published=published),
    )


_ABSTRACT = Published(19, 39)

CLAIMS = (
    *(
        Claim(
            f"Whole algorithms at (10,7) against {versus}",
            _ABSTRACT,
            "abstract",
            "sure",
            tuple(ALGORITHMS.values()),
            partial(algorithm, names=tuple(ALGORITHMS), versus=versus, published=_ABSTRACT),
        )
        for versus in ("replication", "MDS")
    ),
    _rounds_claim(10, 7, "low", 39.3, "recalled, sure"),
    _rounds_claim(10, 7, "high", 17, "recalled, fairly sure"),
    _rounds_claim(10, 7, "low", 19, "recalled, fairly sure", "over-decomposition"),
    _rounds_claim(50, 40, "low", 25, "recalled, unsure"),
    _rounds_claim(50, 40, "high", 12, "recalled, unsure"),
    _hessian("low", 19),
    _hessian("high", 14),
    _newton("low", 19),
    _newton("high", 14),
    Claim(
        "What a worker without a code would store if it kept what it fetches, of all data",
        Published(67, 67, "level", "%"),
        "evaluation",
        "recalled, fairly sure",
        ("storage",),
        held,
    ),
)
