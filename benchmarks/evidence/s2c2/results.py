"""The results of the comparison: rows of the report, and every single round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.s2c2 import simulated
from benchmarks.evidence.s2c2.cases import CONTENDERS, Case, Contender
from benchmarks.evidence.s2c2.processes import SMOKE, Measured, Size
from benchmarks.report import Summary

#: Case, contender, and where it ran.
Name = tuple[str, str, str]


@dataclass
class Results(Kept):
    """The report, and every single round.

    Attributes
    ----------
    rounds : dict
        Rounds over the fluid bound by (case, contender, where).
    bounds : dict
        The fluid bound of each round by case, in seconds in which a worker of speed 1 does its even
        share of the work.
    disturbed : dict
        Which rounds are disturbed, for those on processes. Statistics leave them out.
    """

    rounds: dict[Name, np.ndarray] = field(default_factory=dict)
    bounds: dict[str, np.ndarray] = field(default_factory=dict)
    disturbed: dict[Name, np.ndarray] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        """Size of the matrices on processes."""
        return SMOKE if self.smoke else Size()

    def merge(self, other: Results, section: str = "") -> None:
        """Add the results of another piece or section.

        Raises
        ------
        ValueError
            If it has another size, or rounds of the same name.
        """
        super().merge(other, section)
        self._keep(other.rounds)
        self.bounds |= other.bounds
        self.disturbed |= other.disturbed

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

    def _more(self) -> dict[str, Any]:
        # No measurement is more exact than five digits.
        rounds = [[*key, _rounded(ratios)] for key, ratios in self.rounds.items()]
        bounds = {case: _rounded(seconds) for case, seconds in self.bounds.items()}
        disturbed = [[*key, some.tolist()] for key, some in self.disturbed.items()]
        return {"rounds": rounds, "bounds": bounds, "disturbed": disturbed}

    def _take(self, found: Mapping[str, Any]) -> None:
        self.rounds = {tuple(key): np.array(ratios) for *key, ratios in found["rounds"]}
        self.bounds = {case: np.array(seconds) for case, seconds in found.get("bounds", {}).items()}
        # Sections measured before rounds were marked have none.
        self.disturbed = {tuple(key): np.array(some) for *key, some in found.get("disturbed", [])}

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
        bounds = simulated.bounds(case)
        if len(bounds) >= len(self.bounds.get(case.name, ())):  # fewer rounds on processes
            self.bounds[case.name] = bounds
        bounds = bounds[: len(quiet)][quiet]
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


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
