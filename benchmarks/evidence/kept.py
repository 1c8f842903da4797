"""What a section of a paper has measured, as it is kept in a file.

A section is measured piece by piece, and its file is written after every piece. So a section that
was interrupted goes on where it was, and a page can be made from whatever is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.report import Report

#: The name of the piece of files that know of none.
WHOLE = "whole"


@dataclass
class Kept:
    """Rows of a report, and where they come from.

    Parameters
    ----------
    report : Report
    smoke : bool
        Whether the run is a tiny one.
    processes : bool
        Whether to measure on processes; otherwise only simulations run.

    Attributes
    ----------
    pieces : dict of str to dict
        Date, seconds and command of each piece of the section that is here.
    origins : dict of str to Origin
        Of each section that was merged.
    known : list of dict
        Rows of the sections and pieces before this one, which it may need.
    """

    report: Report
    smoke: bool = False
    processes: bool = True
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    known: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return the rows of the report whose entries have these values."""
        return [
            row
            for row in self.report.rows
            if all(row.get(key) == value for key, value in wanted.items())
        ]

    def count(self, number: int) -> int:
        """Return a number of rounds, steps or runs, reduced to a few in a smoke run."""
        return min(number, 3) if self.smoke else number

    def has(self, piece: str) -> bool:
        """Return whether a piece has been measured."""
        return piece in self.pieces or WHOLE in self.pieces

    def merge(self, other: Self, section: str = "") -> None:
        """Add what another piece, or with its name another section, has found.

        Raises
        ------
        ValueError
            If one of the two is a smoke run.
        """
        if other.smoke != self.smoke:
            what = ("a tiny run", "a whole run")
            raise ValueError(
                f"All sections of a page must have the same size: the kept one is of "
                f"{what[not other.smoke]}, this is {what[not self.smoke]}. Measure it again."
            )
        self.report.rows += other.report.rows
        self.report.machine |= other.report.machine
        self.report.versions |= other.report.versions
        self.pieces |= other.pieces
        if section:
            self.origins[section] = Origin.of(other)

    def write(self, file: Path) -> None:
        """Write everything to a file for `read`."""
        found = {**self.report.as_dict(), "smoke": self.smoke, "pieces": self.pieces}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found | self._more()), encoding="utf-8")

    @classmethod
    def read(cls, file: Path, name: str) -> Self:
        """Read what `write` has written.

        Parameters
        ----------
        file : Path
        name : str
            Name of the paper.
        """
        found = json.loads(file.read_text(encoding="utf-8"))
        kept = cls(
            Report(name, found["rows"], found["machine"], found["versions"]),
            smoke=found["smoke"],
            # Sections that were measured before there were pieces have their dates only.
            pieces=found.get("pieces") or {WHOLE: {"date": max(found["dates"])}},
        )
        kept._take(found)
        return kept

    def _more(self) -> dict[str, Any]:
        """Return more entries of the file."""
        return {}

    def _take(self, found: Mapping[str, Any]) -> None:
        """Read these entries."""


@dataclass(frozen=True)
class Origin:
    """Where the figures of a section come from."""

    dates: tuple[str, ...]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    pieces: frozenset[str]

    @classmethod
    def of(cls, kept: Kept) -> Origin:
        """Return the origin of a section."""
        dates = sorted({piece["date"] for piece in kept.pieces.values()})
        return cls(tuple(dates), kept.report.machine, kept.report.versions, frozenset(kept.pieces))
