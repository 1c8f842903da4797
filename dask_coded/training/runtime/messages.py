"""Messages of trainings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask.typing import Key

from dask_coded.transport.messages import Attempt, Message

# -- of trainings: leader to participant -----------------------------------------------------------


@dataclass(frozen=True)
class Enlist(Message):
    """A group is being formed. The leader asks all candidates how far along they are.

    A worker that takes part in an earlier group of the training leaves it, then answers with
    :class:`Enlisted`.

    Parameters
    ----------
    training : str
    attempt : Attempt or None
        The run of the leader's task.
    """

    training: str
    attempt: Attempt | None = None


@dataclass(frozen=True)
class Join(Message):
    """The worker is in the group. It creates its replica, in the most advanced state.

    It answers at once with :class:`~dask_coded.transport.messages.Pong`, because a replica may
    take long, then with :class:`Joined`, or with :class:`Unreachable` or
    :class:`~dask_coded.runtime.messages.Failed`.

    Parameters
    ----------
    task : Key
        Of the leader.
    node : int
        The number of this worker in the group's plan.
    training : str
    group : bytes
        The pickled :class:`~dask_coded.training.runtime.spec.Group`.
    attempt : Attempt or None
        The run of the leader's task.
    """

    task: Key
    node: int
    training: str
    group: bytes
    attempt: Attempt | None = None


@dataclass(frozen=True)
class BeginSteps(Message):
    """All workers of the group have joined. The leader sends this to all of them."""


@dataclass(frozen=True)
class SendState(Message):
    """The participant, which has finished, answers with :class:`ReplicaState`."""


@dataclass(frozen=True)
class HaltTraining(Message):
    """End the training after ``version`` updates. The leader sends this to all workers."""

    version: int


@dataclass(frozen=True)
class SkipNode(Message):
    """Send nothing more to a node. The leader sends this to all workers.

    Parameters
    ----------
    node : int
    unread : bool
        Whether the node does not read. Then the channel to it is broken, to drop what waits there,
        and the node itself stops.
        Otherwise the node seems to be lost. If it is, its channels close by themselves. If it is
        not, other rounds and trainings go on using them.
    """

    node: int
    unread: bool


# -- of trainings: participant to leader -----------------------------------------------------------


@dataclass(frozen=True)
class Enlisted(Message):
    """The answer to :class:`Enlist`.

    Parameters
    ----------
    state : (int, str) or None
        How many updates the worker's replica has seen, and the run id of its last group. Replicas
        with the same pair are the same, bit for bit. None for a worker without a replica.
    """

    state: tuple[int, str] | None


@dataclass(frozen=True)
class Joined(Message):
    """The last answer to :class:`Join`: the worker's replica is ready."""


@dataclass(frozen=True)
class Unreachable(Message):
    """A participant cannot reach another worker of the group."""

    address: str


@dataclass(frozen=True)
class StepProgress(Message):
    """What a participant has done for a step.

    It has computed its part, which took ``seconds``. Otherwise it has read all sums up to this
    step, which it says every few steps, or, at node 0 of a plan without a root, in each. If the
    parts are dealt out, all workers say it of each step.

    Parameters
    ----------
    step : int
    seconds : float or None
    loss, norm : float or None
        Of the sum of the step: the sum over the samples, and the norm of the summed gradient. Only
        node 0 says it, and only in a plan without a root; if parts are dealt out, all workers do.
    """

    step: int
    seconds: float | None = None
    loss: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class ReplicaState(Message):
    """The pickled state of a replica after so many updates.

    For checkpoint and validation, from node 0, or on :class:`SendState`.
    """

    version: int
    state: bytes


@dataclass(frozen=True)
class StepsFinished(Message):
    """A participant has applied update ``version``, the last; ``digest`` is of its parameters."""

    version: int
    digest: str


# -- of trainings: between nodes -------------------------------------------------------------------


@dataclass(frozen=True)
class NodeMessage(Message):
    """From the machine of one node of the plan to that of another, for one step.

    If the parts of a step are dealt out, also from the leader to a worker, and back: a grant or an
    answer of :mod:`dask_coded.squeeze.grants`, packed, under the tags ``"grant"`` and ``"answer"``.

    Parameters
    ----------
    step : int
    sender : int
        The node.
    tag : (str, int, int)
        As in :class:`dask_coded.aggregation.Tag`.
    payload : object
        As the codec packed it.
    choice : tuple of int or None
        What the root chose for the steps that start from this step's update. It travels with
        the sum.
    """

    step: int
    sender: int
    tag: tuple[str, int, int]
    payload: Any
    choice: tuple[int, ...] | None
