"""What all messages have in common, and the messages that channels themselves send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask.typing import Key

#: Changes whenever a message does. Both ends of a channel must have the same version.
PROTOCOL = 13

#: A run of a Dask task: the key of the task, and the scheduler's number of the run.
Attempt = tuple[Key, int]


@dataclass(frozen=True)
class Message:
    """What all messages have: the id of the run that they belong to."""

    run_id: Key


# -- of channels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Closed(Message):
    """The channel has closed. A channel hands it to its own listeners; it never travels."""


@dataclass(frozen=True)
class Dropped(Message):
    """The answer to a message that counts for nothing, because its run of a task is over.

    Without it, the worker that has sent the message would take this one for stopped.
    """


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
