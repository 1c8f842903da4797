"""What an aggregation is: a plan for some workers, and for each step a machine on each of them.

The sum of a step's gradients is made by machines that know no cluster and no clock. A machine is
one node's part of *one* step: it is told what has been computed and what has come in, and answers
with commands. The cluster's threads and the simulator's virtual time drive the same machines, each
of which is dropped when its node has the sum.

The nodes are the workers ``0 … n-1`` and, where the sum is made in one place, the root, which
computes nothing: it lives beside the leader of the training. A node that gets the sum may pass it
on before it goes to the next step.

What travels is a :class:`~dask_coded.compression.Partial`: a part of the sum, perhaps compressed.
On the wire it is packed (see :class:`~dask_coded.compression.Codec`); who passes a sum on forwards
the packed form, so that all replicas receive the same bits.

Who owns what: a vector that a node computed is given to its machine, which may change it. All that
has been sent, received or finished is read-only for everybody from then on, because in one process
sender and receivers may share its memory; the machines see to it that nothing that is still to be
read is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_coded.aggregation.trees import ROOT
from dask_coded.compression import EXACT, Codec, Partial
from dask_coded.registry import Registry

__all__ = [
    "AGGREGATIONS",
    "ROOT",
    "Aggregation",
    "Command",
    "Compute",
    "Finished",
    "Machine",
    "Plan",
    "Send",
    "Tag",
    "check_workers",
]


class Tag(NamedTuple):
    """What a message of a step is about.

    Parameters
    ----------
    kind : str
        ``"part"`` for a part of the sum on its way up or round, ``"sum"`` for the sum on its way
        down or round, ``"redo"`` for parts that another worker is asked to compute as well, and
        for their gradient.
    segment : int
        Of the gradient vector.
    chunk : int
        Of the segment, in a ring; 0 elsewhere.
    """

    kind: str
    segment: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class Compute:
    """Compute gradients of some of this node's parts of the data and add them up.

    Parameters
    ----------
    parts : tuple of int
    coefficients : tuple of float
        One per part: what its gradient is multiplied with in the sum.
    """

    parts: tuple[int, ...]
    coefficients: tuple[float, ...]


@dataclass(frozen=True)
class Send:
    """Send something to another node.

    Parameters
    ----------
    to : int
    tag : Tag
    payload : object
        As the codec packed it; for ``"redo"`` from the root a tuple of parts. The same object may
        go to several nodes.
    """

    to: int
    tag: Tag
    payload: Any


@dataclass(frozen=True)
class Finished:
    """A segment of the sum over all parts, as this node has it.

    Parameters
    ----------
    segment : int
    total : Partial
        Read-only: others may hold the same memory.
    """

    segment: int
    total: Partial


Command = Compute | Send | Finished


class Machine(ABC):
    """One node's part of one step.

    Messages may come in any order, twice, and before this node has begun the step; a machine whose
    node has all segments of the sum need not be asked any more. Vectors that were computed belong
    to the machine, which may change them in place; what was received it only reads.
    """

    @abstractmethod
    def begin(self) -> list[Command]:
        """The node begins the step: what it is to compute."""

    @abstractmethod
    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        """One segment of what was to be computed is there."""

    @abstractmethod
    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        """A message has come in."""


class Plan(ABC):
    """An aggregation for a given number of workers.

    Attributes
    ----------
    workers : int
    parts : int
        How many parts, equal up to one sample, the data are cut into.
    stored : tuple of tuple of int
        The parts that each worker stores: all that it may ever be asked to compute.
    rooted : bool
        Whether the root makes the sum.
    segments : int
        How many segments the gradient is cut into, each of which is summed by itself.
    load : float
        The largest share of the data that a worker computes in a step.
    plain : bool
        Whether gradients are added as they are, or multiplied in between, so that errors, and all
        else in which the gradients of one part differ from node to node, may grow.
    """

    workers: int
    parts: int
    stored: tuple[tuple[int, ...], ...]
    rooted: bool
    segments: int = 1
    plain: bool = True

    @property
    @abstractmethod
    def load(self) -> float:
        """The largest share of the data that a worker computes in a step."""

    @abstractmethod
    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        """A node's machine for one step.

        Parameters
        ----------
        node : int
        choice : sequence of int
            What :meth:`choose` returned for this step; the same on all nodes.
        codec : Codec
            How vectors are packed for a hop.

        Raises
        ------
        ValueError
            If the codec loses digits and the plan's code would amplify that.
        """

    def choose(self, late: npt.NDArray[np.bool_] | None = None) -> tuple[int, ...]:
        """What is to be different in the next step; called by the root alone.

        Parameters
        ----------
        late : ndarray of bool, shape (workers,), optional
            Who had not computed what it was to compute when the last step ended.
        """
        return ()


class Aggregation(ABC):
    """What a user chooses: how the gradients of a step become their sum."""

    @abstractmethod
    def plan(self, workers: int) -> Plan:
        """The plan for so many workers.

        Raises
        ------
        ValueError
            If it cannot be done with so many.
        """


#: Aggregations by name: the kinds that :mod:`dask_coded.aggregation.timing` predicts times for.
AGGREGATIONS: Registry[type[Aggregation]] = Registry("aggregation")


def check_workers(aggregation: Aggregation, workers: int, least: int = 1) -> None:
    """Raise a ValueError if there are too few workers."""
    if workers < least:
        raise ValueError(f"{aggregation!r} needs at least {least} workers, there are {workers}.")
