"""Messages of rounds, and of the loops that rounds are part of.

A round is led by its *coordinator*; the workers that compute for it are *participants*. When it is
over, participants receive :class:`~dask_coded.transport.messages.EndRun`. The messages that bring
the operand are in :mod:`dask_coded.runtime.operand`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dask.typing import Key

from dask_coded.transport.messages import Attempt, Message

#: Ranges of stripes: (piece, first stripe, stripe after the last).
Ranges = tuple[tuple[int, int, int], ...]


# -- of rounds: coordinator to participant ---------------------------------------------------------


@dataclass(frozen=True)
class StartRound(Message):
    """The first stripes of a round, with its operand. The coordinator sends this once per worker.

    Parameters
    ----------
    kernel : str
        A key of ``KERNELS``.
    ticket : Ticket
        The operand, or what comes of it and how.
    shared : bool
        Whether large shares are to be left in shared memory.
    stripes : int
        Stripes of each piece.
    pieces : tuple of (int, Key, int)
        The pieces on this participant: number, Dask key, and rows of its product.
    ranges : Ranges
        What to compute.
    least_batch : int
        Stripes of one product, at least.
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
    ticket: tuple[Any, ...]
    shared: bool
    stripes: int
    pieces: tuple[tuple[int, Key, int], ...]
    ranges: Ranges
    least_batch: int
    interval: float
    growth: float
    lead: float
    series: str
    attempt: Attempt | None = None

    opens_run: ClassVar[bool] = True


@dataclass(frozen=True)
class ChangeRound(Message):
    """Stripes to compute as well, and not to compute any more.

    The coordinator sends this when work moves to the participant, or from it.
    """

    added: Ranges
    withdrawn: Ranges


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
class Failed(Message):
    """The participant has raised an exception, and computes nothing more.

    Parameters
    ----------
    error : bytes
        The exception, pickled.
    pieces : tuple of int
        If only of these.
    """

    error: bytes
    pieces: tuple[int, ...] = ()


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
