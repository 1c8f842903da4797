"""The results of the comparison: rows of the report, and every single round."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import simulated
from benchmarks.paper.cases import CONTENDERS, Case, Contender
from benchmarks.paper.processes import SMOKE, Measured, Size
from benchmarks.report import Report, Summary

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
