"""Messages between workers: what all have in common, and those of channels themselves.

Each message is a frozen dataclass. It belongs to a run, such as a round or a loop, whose id comes
first. A message of a run that is over finds no listener and is dropped. A part of the package
defines its own messages, as subclasses of :class:`Message`, and registers what handles them with
the worker's :class:`~dask_coded.transport.Exchange`.

The worker that opens a channel sends requests through it; the worker at the other end, a
*participant*, answers through the same channel. Arrays travel as they are, and arrive read-only.
Sequences arrive as tuples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dask.typing import Key

#: Changes whenever a message does. Both ends of a channel must have the same version.
PROTOCOL = 23

#: A run of a Dask task: the key of the task, and the scheduler's number of the run.
Attempt = tuple[Key, int]

#: The messages that travel, by the name under which they do.
KINDS: dict[str, type[Message]] = {}


@dataclass(frozen=True)
class Message:
    """What all messages have: the id of the run that they belong to.

    Subclasses are found by their names when they arrive, unless they are declared with
    ``travels=False``.

    Attributes
    ----------
    opens_run : bool
        Whether it is the first one of its run, without which the others mean nothing.
    is_bulky : bool
        Whether it is written by itself, so that those behind it can still be discarded.
    """

    run_id: Key

    opens_run: ClassVar[bool] = False
    is_bulky: ClassVar[bool] = False

    def __init_subclass__(cls, travels: bool = True) -> None:
        if travels:
            KINDS[cls.__name__] = cls


# -- of channels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Closed(Message, travels=False):
    """The channel has closed. A channel hands it to its own listeners; it never travels."""


@dataclass(frozen=True)
class ProbeMemory(Message):
    """Can you read this segment? The worker that opened a channel sends it first.

    The answer is the same message.

    Parameters
    ----------
    segment : SharedArray or None
        In the answer, one of the answering worker, to be read in turn; None if it could not read
        the other.
    """

    segment: tuple[Any, ...] | None


@dataclass(frozen=True)
class Ping(Message):
    """The peer owes an answer and may have stopped: if it works for this run, it answers Pong."""


@dataclass(frozen=True)
class Pong(Message):
    """The worker runs: the answer to :class:`Ping`, to :class:`EndRun`, and whenever it is due."""


@dataclass(frozen=True)
class EndRun(Message):
    """A run is over.

    It is also the answer to a message of a run that is over because there is a later run of its
    task. Without it, the worker that has sent the message would take this one for stopped.

    Parameters
    ----------
    answer : bool
        Whether the peer owes an answer. Then it answers :class:`Pong`, which proves that it runs.
    """

    answer: bool = False
