"""How a paper declares what it claims, and what measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.evidence.kept import Kept
from benchmarks.evidence.verdicts import Interval, Published


class Finding(NamedTuple):
    """What was measured of a claim.

    Attributes
    ----------
    case : str
        Which of several cases; empty if there is one.
    cluster, simulated : Interval or None
        The figure on processes and in simulation.
    reason : str
        Why it differs from the published one, for readers.
    disturbed : bool
        Whether runs of it differ by more than their usual spread.
    """

    case: str
    cluster: Interval | None
    simulated: Interval | None = None
    reason: str = ""
    disturbed: bool = False

    @property
    def best(self) -> Interval | None:
        """The figure that the verdict rests on: on processes if there is one."""
        return self.cluster or self.simulated


@dataclass(frozen=True)
class Claim:
    """Something that a paper says and that can be measured.

    Parameters
    ----------
    text : str
    published : Published
    place : str
        Where in the paper.
    sure : str
        How certain the figure is; papers were not available in full.
    sections : tuple of str
        The sections that measure it.
    find : callable(Kept) -> list of Finding
        Finds the figures in the saved results; an empty list if they lack them.
    """

    text: str
    published: Published
    place: str
    sure: str
    sections: tuple[str, ...]
    find: Callable[[Any], list[Finding]]


@dataclass(frozen=True)
class Section:
    """A measurement that is kept in one file.

    Parameters
    ----------
    pieces : mapping of str to callable(Kept)
        What to measure, in an order in which a piece may need those before it. Each adds rows.
    minutes : int
        How long all pieces take on a quiet machine, at most.
    """

    pieces: Mapping[str, Callable[[Any], None]]
    minutes: int


#: Adds a part of the page from the saved results; nothing if they lack it.
Part = Callable[[Any], Iterator[str]]


@dataclass(frozen=True)
class Paper:
    """A paper, its claims and the sections that measure them.

    Parameters
    ----------
    name : str
        For the command and for files.
    title : str
        Of its page.
    intro : str
        A paragraph on what the paper proposes, and on which page explains it.
    claims : tuple of Claim
    sections : mapping of str to Section
    parts : tuple of Part
        Tables of the page.
    kept : type
        What a section finds.
    plot : callable(folder, Kept), optional
        Draws plots.
    """

    name: str
    title: str
    intro: str
    claims: tuple[Claim, ...]
    sections: Mapping[str, Section]
    parts: tuple[Part, ...]
    kept: type[Kept] = Kept
    plot: Callable[[Path, Any], None] | None = None

    def command(self, *sections: str) -> str:
        """Return the command that measures sections."""
        names = "".join(f" --section {name}" for name in sections)
        return f"python -m benchmarks.evidence {self.name}{names}"
