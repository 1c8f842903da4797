"""Messages of exclusive grants: who sends them to whom, and when.

A leader grants each unit of a step to one worker. Messages from one end to the other arrive in the
order in which they were sent; otherwise they may be late. Each names the *term* of its leader,
which is higher for each later leader. Those to a worker also name the *epoch* of the worker: the
leader ends an epoch when the worker is lost, and what was granted in it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Grant:
    """What messages of a leader to a worker have in common."""

    term: int
    step: int
    epoch: int


@dataclass(frozen=True)
class Deal(Grant):
    """Leader to worker: compute these units, after those granted before."""

    units: tuple[int, ...]


@dataclass(frozen=True)
class Recall(Grant):
    """Leader to worker: give back those of these units that you have not begun."""

    units: tuple[int, ...]


@dataclass(frozen=True)
class Copy(Grant):
    """Leader to worker: compute a unit of another worker as well, and keep it apart."""

    unit: int


@dataclass(frozen=True)
class Close(Grant):
    """Leader to worker: contribute the sum of exactly these units; every worker gets the same sets.

    Attributes
    ----------
    closing : int
        Number of the leader's attempt to end the step, from 1.
    sets : mapping of int to tuple of int
        The units of each worker that has any; together all units, each of them once.
    """

    closing: int
    sets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fetch(Grant):
    """Leader to worker: compute no more, and fetch the sum from one of these workers."""

    sources: tuple[int, ...]


@dataclass(frozen=True)
class Collect(Grant):
    """A new leader to worker: say what you have of this step. The epoch is not known yet: 0."""


@dataclass(frozen=True)
class Answer:
    """What messages of a worker to its leader have in common."""

    term: int
    step: int
    worker: int
    epoch: int


@dataclass(frozen=True)
class Done(Answer):
    """Worker to leader: these units are computed, in so many seconds.

    ``overflow`` says that one of them did not fit its grid.
    """

    units: tuple[int, ...]
    seconds: float = 0.0
    overflow: bool = False


@dataclass(frozen=True)
class Released(Answer):
    """Worker to leader, for each `Recall`: of the units ``asked`` for, these were not begun."""

    asked: tuple[int, ...]
    units: tuple[int, ...]


@dataclass(frozen=True)
class Refused(Answer):
    """Worker to leader: the sum already has units that are not in the set of this `Close`."""

    closing: int


@dataclass(frozen=True)
class Summed(Answer):
    """Worker to leader: the worker has the sum of the step over all units.

    ``overflow`` says that it is of no use, because a unit did not fit its grid.
    """

    overflow: bool = False


@dataclass(frozen=True)
class Holdings(Answer):
    """Worker to a new leader, for its `Collect`: finished units, granted ones, and the sum or not.

    Copies are not in it, because a new leader does not need them.
    """

    finished: tuple[int, ...]
    owed: tuple[int, ...]
    summed: bool


_KINDS: dict[str, type[Grant | Answer]] = {
    kind.__name__: kind
    for kind in (
        Deal,
        Recall,
        Copy,
        Close,
        Fetch,
        Collect,
        Done,
        Released,
        Refused,
        Summed,
        Holdings,
    )
}


def pack(message: Grant | Answer) -> tuple[Any, ...]:
    """Return a message as plain values, the name of its kind first, to be sent in another one.

    Examples
    --------
    >>> pack(Deal(term=1, step=0, epoch=0, units=(4, 5)))
    ('Deal', 1, 0, 0, (4, 5))
    """
    return type(message).__name__, *vars(message).values()


def unpack(packed: tuple[Any, ...]) -> Grant | Answer:
    """Return the message that was packed."""
    name, *values = packed
    return _KINDS[name](*values)


def disjoint(holdings: Mapping[int, Holdings]) -> dict[int, Holdings]:
    """Return the holdings of workers no two of which hold the same unit.

    Two workers may hold one because an earlier leader has ended the epoch of one of them. Those
    that have finished most are kept.

    Examples
    --------
    >>> one = Holdings(2, 0, worker=0, epoch=0, finished=(1,), owed=(2,), summed=False)
    >>> two = Holdings(2, 0, worker=1, epoch=0, finished=(2, 3), owed=(), summed=False)
    >>> sorted(disjoint({0: one, 1: two}))
    [1]
    """
    kept: dict[int, Holdings] = {}
    taken: set[int] = set()
    for worker in sorted(holdings, key=lambda worker: (-len(holdings[worker].finished), worker)):
        units = {*holdings[worker].finished, *holdings[worker].owed}
        if taken.isdisjoint(units):
            kept[worker] = holdings[worker]
            taken |= units
    return kept
