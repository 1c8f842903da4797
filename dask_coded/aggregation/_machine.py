"""Interfaces of aggregations: a plan for the workers, and a state machine per node and step.

State machines that know no cluster and no clock sum the gradients of a step. A machine is one
node's part of *one* step: it is called when a gradient has been computed or a message has arrived,
and returns commands. The cluster's threads and the simulator's virtual time drive the same
machines. A node drops its machine when it has the sum.

The nodes are the workers ``0 … n-1`` and, if the sum is made in one place, the root. The root
computes nothing and runs with the leader of the training. A node that gets the sum may pass it on
before it goes to the next step.

Messages carry a :class:`~dask_coded.compression.Partial`, a partial sum that may be compressed,
packed by a :class:`~dask_coded.compression.Codec`. A node that passes a sum on forwards the packed
form, so that all replicas receive the same bits.

A machine owns the vectors that its node has computed and may change them. Whatever has been sent,
received or finished is read-only for all nodes from then on, because sender and receivers in one
process may share its memory. Machines never write to memory that is still to be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_coded.aggregation._units import ComputeUnit, FinishedUnits
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
    """Label of a message within a step.

    Parameters
    ----------
    kind : str
        ``"part"`` for a partial sum on its way up a tree or around a ring, ``"sum"`` for the total
        on its way down or around. Of a step that is dealt out also ``"grant"``, ``"answer"`` and
        ``"fetch"``.
    segment : int
        Index of the segment of the gradient vector; of a step that is dealt out, its turn.
    chunk : int
        Index of the chunk of the segment in a ring; 0 elsewhere.
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
        Factor of each part's gradient in the sum.
    """

    parts: tuple[int, ...]
    coefficients: tuple[float, ...]


@dataclass(frozen=True)
class Send:
    """Send a message to another node.

    Parameters
    ----------
    to : int
    tag : Tag
    payload : object
        Packed by the codec, except in a step that is dealt out. The same object may be sent to
        several nodes.
    """

    to: int
    tag: Tag
    payload: Any


@dataclass(frozen=True)
class Finished:
    """This node has a segment of the sum over all parts.

    Parameters
    ----------
    segment : int
    total : Partial
        Read-only, because other nodes may share its memory.
    """

    segment: int
    total: Partial


Command = Compute | ComputeUnit | Send | Finished | FinishedUnits


class Machine(ABC):
    """State machine of one node in one step.

    Messages may arrive in any order, twice, and before this node has started the step. A machine
    whose node has all segments of the sum need not be called any more. A machine may change the
    vectors that its node has computed in place; it only reads the vectors that it receives.
    """

    @abstractmethod
    def begin(self) -> list[Command]:
        """Start the step and return what this node has to compute."""

    @abstractmethod
    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        """Handle one segment of what this node has computed."""

    @abstractmethod
    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        """Handle a message."""


class Plan(ABC):
    """An aggregation for a given number of workers.

    Attributes
    ----------
    workers : int
    parts : int
        Number of parts of the data, of equal size up to one sample.
    stored : tuple of tuple of int
        The parts that each worker stores, which are all that it may be asked to compute.
    rooted : bool
        Whether the root makes the sum.
    dealt : bool
        Whether the leader deals the parts out in each step.
    segments : int
        Number of segments of the gradient, each of which is summed separately.
    load : float
        The largest fraction of the data that a worker computes in a step.
    plain : bool
        Whether gradients are added unchanged. If they are multiplied in between, errors and any
        other differences between nodes in the gradient of the same part may grow.
    """

    workers: int
    parts: int
    stored: tuple[tuple[int, ...], ...]
    rooted: bool
    dealt: bool = False
    segments: int = 1
    plain: bool = True

    @property
    @abstractmethod
    def load(self) -> float:
        """The largest fraction of the data that a worker computes in a step."""

    @abstractmethod
    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        """Return a node's machine for one step.

        Parameters
        ----------
        node : int
        choice : sequence of int
            What :meth:`choose` returned for this step; the same on all nodes.
        codec : Codec
            Packs the vector of every message.

        Raises
        ------
        ValueError
            If the codec loses digits and the plan's code would amplify the error.
        """

    def choose(self, late: npt.NDArray[np.bool_] | None = None) -> tuple[int, ...]:
        """Return how the next step differs from the plan, empty if it does not.

        Only the root calls this.

        Parameters
        ----------
        late : ndarray of bool, shape (workers,), optional
            True for workers that had not finished computing when the last step ended.
        """
        return ()


class Aggregation(ABC):
    """A user's choice of how the gradients of a step are summed.

    Attributes
    ----------
    moves : bool
        Whether a part may be computed by other workers than in the step before.
    """

    moves: ClassVar[bool] = False

    @abstractmethod
    def plan(self, workers: int) -> Plan:
        """Return the plan for this number of workers.

        Raises
        ------
        ValueError
            If the aggregation is not possible with this number of workers.
        """


#: Aggregations by name, among them the kinds that :mod:`dask_coded.aggregation.timing` knows.
AGGREGATIONS: Registry[type[Aggregation]] = Registry("aggregation")


def check_workers(aggregation: Aggregation, workers: int, least: int = 1) -> None:
    """Raise a ValueError if there are too few workers."""
    if workers < least:
        raise ValueError(f"{aggregation!r} needs at least {least} workers, there are {workers}.")
