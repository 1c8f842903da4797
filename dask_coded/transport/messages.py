"""The messages that workers send each other: one frozen dataclass each.

A message belongs to a run: a round, a loop, or a group of a training. Its run id comes first. A
message of a run that is over finds no listener and is dropped.

The worker that opens a channel, and sends requests through it, is the *coordinator* of a round or
the *leader* of a training. The worker at the other end is a *participant*; it answers through the
same channel. Arrays travel as they are, and arrive read-only. Sequences arrive as tuples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dask.typing import Key

#: Changes whenever a message does. Both ends of a channel must have the same version.
PROTOCOL = 7

#: A run of a Dask task: the key of the task, and the scheduler's number of the run.
Attempt = tuple[Key, int]

#: Ranges of stripes: (piece, first stripe, stripe after the last).
Ranges = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Message:
    """What all messages have: the id of the run that they belong to."""

    run_id: Key


# -- of channels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Closed(Message):
    """The channel has closed. A channel hands it to its own listeners; it never travels."""


@dataclass(frozen=True)
class ProbeMemory(Message):
    """Can you read this segment? The worker that opened a channel sends it first.

    Parameters
    ----------
    segment : SharedArray
    """

    segment: tuple[Any, ...]


@dataclass(frozen=True)
class MemoryProbed(Message):
    """The answer to :class:`ProbeMemory`.

    Parameters
    ----------
    segment : SharedArray or None
        One of the answering worker, to be read in turn; None if it could not read the other.
    """

    segment: tuple[Any, ...] | None


# -- of operands: coordinator to host, and host to host --------------------------------------------


class Part(NamedTuple):
    """Some entries of an operand, or all of them, that come in chunks.

    Parameters
    ----------
    first, chunks : int
        Number of the first chunk, and how many. Chunks of all parts are numbered together.
    chunk_bytes : int
        Size of each but the last.
    dtype, shape : str and tuple of int
        Of the part.
    length : int
        Of the operand.
    """

    first: int
    chunks: int
    chunk_bytes: int
    dtype: str
    shape: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class OperandChunk(Message):
    """A chunk of an operand, for the receiver of a host: it answers :class:`ChunkConfirmed`.

    Parameters
    ----------
    part : Part
    number : int
    data : ndarray of uint8
    below : Route
        Addresses that it passes the chunk on to, each with what this one does.
    """

    part: tuple[Any, ...]
    number: int
    data: Any
    below: tuple[Any, ...]


@dataclass(frozen=True)
class OperandShared(Message):
    """Where the operand lies. The receiver of a host sends this to others on the same host."""

    operand: tuple[Any, ...]


@dataclass(frozen=True)
class LendOperand(Message):
    """Send a part of the operand to a worker that is called in late: the coordinator to a receiver.

    Parameters
    ----------
    address : str
        Of that worker.
    first : int
        Number of the part's first chunk.
    """

    address: str
    first: int


@dataclass(frozen=True)
class ChunkConfirmed(Message):
    """The answer to :class:`OperandChunk`: the chunk is here, and at most hosts below."""

    number: int


@dataclass(frozen=True)
class ChunksLacking(Message):
    """Chunks have not come for a while. A receiver sends this to the coordinator."""

    numbers: tuple[int, ...]


# -- of rounds: coordinator to participant ---------------------------------------------------------


@dataclass(frozen=True)
class StartRound(Message):
    """The first stripes of a round, with its operand. The coordinator sends this once per worker.

    Parameters
    ----------
    kernel : str
        A key of ``KERNELS``.
    operand : ndarray, SharedArray or None
    parts : tuple of (Part, bytes or None)
        What is on its way to this participant, or to its host, if the operand is large: each part
        with its entries, see :mod:`dask_coded.rounds.footprint`, or None for all of them. Next to a
        SharedArray they come only if that cannot be read.
    shared : bool
        Whether large shares are to be left in shared memory.
    stripes : int
        Stripes of each piece.
    pieces : tuple of (int, Key, int)
        The pieces on this participant: number, Dask key, and rows of its product.
    neighbours : tuple of str
        Addresses on the same host, to which this participant gives the operand once it is here.
    ranges : Ranges
        What to compute.
    interval, growth : float
        As in :class:`dask_coded.rounds.Reporting`.
    lead : float
        Seconds before running dry at which a report is due.
    series : str
        Rounds of an array that run one after another: the coordinator does not read the rows of
        earlier ones any more, so this one may use their memory.
    attempt : Attempt or None
        The run of the coordinator's task.
    """

    kernel: str
    operand: Any
    parts: tuple[Any, ...]
    shared: bool
    stripes: int
    pieces: tuple[tuple[int, Key, int], ...]
    neighbours: tuple[str, ...]
    ranges: Ranges
    interval: float
    growth: float
    lead: float
    series: str
    attempt: Attempt | None = None


@dataclass(frozen=True)
class AddStripes(Message):
    """More stripes of a round. The coordinator sends this when work moves to the participant."""

    ranges: Ranges


@dataclass(frozen=True)
class WithdrawStripes(Message):
    """Stripes not to compute any more. The coordinator sends this when work moves elsewhere."""

    ranges: Ranges


@dataclass(frozen=True)
class DropRound(Message):
    """A round is over. The coordinator sends this to a participant that owes no answer."""


@dataclass(frozen=True)
class StopRound(Message):
    """A round is over. The coordinator sends this to a participant that owes an answer.

    The participant answers with :class:`RoundStopped`, which proves that it still runs.
    """


# -- of rounds: participant to coordinator ---------------------------------------------------------


@dataclass(frozen=True)
class Share(Message):
    """Computed stripes. A participant sends this whenever a report is due.

    Parameters
    ----------
    ranges : Ranges
    rows : tuple of ndarray or SharedArray
        The rows of each range.
    seconds : float
        How long the participant has computed since its last share.
    """

    ranges: Ranges
    rows: tuple[Any, ...]
    seconds: float


@dataclass(frozen=True)
class PiecesAbsent(Message):
    """The participant no longer holds these pieces. It sends this when a round starts."""

    pieces: tuple[int, ...]


@dataclass(frozen=True)
class MemoryLost(Message):
    """The participant cannot read the operand in shared memory. It sends it when a round starts."""


@dataclass(frozen=True)
class ShareFailed(Message):
    """A kernel has raised an exception at the participant, which computes nothing more.

    Parameters
    ----------
    error : str
        Type and text of the exception.
    """

    error: str


@dataclass(frozen=True)
class RoundStopped(Message):
    """The answer to :class:`StopRound`."""


# -- of loops --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepState(Message):
    """The state of a loop after a round. The worker of the loop sends it to the loop's keepers.

    The run id is the key of the loop's task.

    Parameters
    ----------
    round : int
    state : bytes
        A pickle.
    attempt : Attempt or None
        The run of the loop's task.
    """

    round: int
    state: bytes
    attempt: Attempt | None = None


@dataclass(frozen=True)
class StateKept(Message):
    """The answer of a keeper to :class:`KeepState`."""


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

    It answers at once with :class:`Joining`, then with :class:`Joined`, or with
    :class:`Unreachable` or :class:`TrainingFailed`.

    Parameters
    ----------
    task : Key
        Of the leader.
    node : int
        The number of this worker in the group's plan.
    group : Group
    attempt : Attempt or None
        The run of the leader's task.
    """

    task: Key
    node: int
    group: Any
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
    """Send nothing more to a node that does not read. The leader sends this to all workers."""

    node: int


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
class Joining(Message):
    """The first answer to :class:`Join`: the worker is alive and is creating its replica."""


@dataclass(frozen=True)
class Joined(Message):
    """The last answer to :class:`Join`: the worker's replica is ready."""


@dataclass(frozen=True)
class Unreachable(Message):
    """A participant cannot reach another worker of the group."""

    address: str


@dataclass(frozen=True)
class TrainingFailed(Message):
    """A participant cannot go on; ``error`` is the pickled exception."""

    error: bytes


@dataclass(frozen=True)
class GradientComputed(Message):
    """A participant has computed its part of a step, which took ``seconds``."""

    step: int
    seconds: float


@dataclass(frozen=True)
class SumsRead(Message):
    """A participant has read all sums up to a step. It sends this every few steps."""

    step: int


@dataclass(frozen=True)
class StepSummed(Message):
    """A sum is made, in a plan without a root. The participant at node 0 sends this.

    Parameters
    ----------
    step : int
    loss : float
        The sum over the samples.
    norm : float
        Of the summed gradient.
    """

    step: int
    loss: float
    norm: float


@dataclass(frozen=True)
class ReplicaState(Message):
    """The pickled state of a replica: for the checkpoint, from node 0, or on :class:`SendState`."""

    state: bytes


@dataclass(frozen=True)
class StepsFinished(Message):
    """A participant has applied update ``version``, the last; ``digest`` is of its parameters."""

    version: int
    digest: str


@dataclass(frozen=True)
class StopRequested(Message):
    """The client wants the training to end soon. A participant passes it on to the leader."""


# -- of trainings: between nodes -------------------------------------------------------------------


@dataclass(frozen=True)
class NodeMessage(Message):
    """From the machine of one node of the plan to that of another, for one step.

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


#: Messages by the name under which they travel.
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}
