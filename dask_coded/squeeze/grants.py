"""Messages of exclusive grants: who sends them to whom, and when.

A leader grants each unit of a step to one worker. Messages from one end to the other arrive in the
order in which they were sent; otherwise they may be late. Each names the *epoch* of the worker: the
leader ends an epoch when the worker is lost, and what was granted in it counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Grant:
    """What messages of a leader to a worker have in common."""

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
    """Leader to worker: contribute the sum of exactly these units; each worker gets its own.

    Attributes
    ----------
    closing : int
        Number of the leader's attempt to end the step, from 1.
    units : tuple of int
        The worker's own; those of all workers are together all units, each of them once.
    owners : tuple of int
        The workers that have any, in ascending order.
    """

    closing: int
    units: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fetch(Grant):
    """Leader to worker: compute no more, and fetch the sum from one of these workers."""

    sources: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What messages of a worker to its leader have in common."""

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


_KINDS: dict[str, type[Grant | Answer]] = {
    kind.__name__: kind
    for kind in (Deal, Recall, Copy, Close, Fetch, Done, Released, Refused, Summed)
}


def pack(message: Grant | Answer) -> tuple[Any, ...]:
    """Return a message as plain values, the name of its kind first, to be sent in another one.

    Examples
    --------
    >>> pack(Deal(step=0, epoch=0, units=(4, 5)))
    ('Deal', 0, 0, (4, 5))
    """
    return type(message).__name__, *vars(message).values()


def unpack(packed: tuple[Any, ...]) -> Grant | Answer:
    """Return the message that was packed."""
    name, *values = packed
    return _KINDS[name](*values)
