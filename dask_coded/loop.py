"""How an algorithm reports its rounds and resumes.

An algorithm is NumPy code over an operator with ``@`` that takes a :class:`Loop`. The base class
keeps and reports nothing, so the algorithm runs anywhere. :func:`dask_coded.submit` passes a loop
that reports to the client and keeps the state on other workers, so that the algorithm resumes where
it was if its own worker is lost; also in files, if it should outlive the cluster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from dask_coded.arguments import check_place
from dask_coded.summary import Summary

State = TypeVar("State")

#: How the topics begin by which loops report to clients.
TOPIC = "coded-progress-"


class ConvergenceError(RuntimeError):
    """An iteration did not reach its tolerance within the maximum number of rounds."""


@dataclass(frozen=True)
class PiecesMade:
    """How far an encoding is.

    Parameters
    ----------
    made, pieces : int
        Number of pieces that are stored, and of all.
    nbytes : int
        Bytes of those that are stored.
    """

    made: int
    pieces: int
    nbytes: int


@dataclass(frozen=True, repr=False)
class Progress(Summary):
    """One round of a loop.

    Parameters
    ----------
    round : int
        Its number, from 1.
    residual : float
        The quantity that the loop makes small, in the unit of its tolerance.
    objective : float or None
        The value that the loop minimises; None if it minimises nothing.
    seconds : float or None
        Duration of the last product; None if the operator does not report it.
    workers : int or None
        Number of workers whose shares it used; None if the operator does not report it.
    score : float or None
        The last one of a training's :class:`~dask_coded.training.Validation`.
    """

    round: int
    residual: float
    objective: float | None = None
    seconds: float | None = None
    workers: int | None = None
    score: float | None = None

    @classmethod
    def of(cls, operator: Any, round: int, residual: float, objective: float | None = None) -> Self:
        """Create one, with seconds and workers of the operator's last product, if known."""
        last = getattr(operator, "last_round", None)
        return cls(
            round,
            float(residual),
            None if objective is None else float(objective),
            getattr(last, "seconds", None),
            getattr(last, "workers", None),
        )


class Loop:
    """How an algorithm reports its rounds and resumes; this base class does neither.

    :func:`dask_coded.submit` replaces it by one whose state is kept by other workers.

    Parameters
    ----------
    storage : str or path, optional
        A folder that all workers share, or an address that fsspec knows, of this run alone. The
        state is also kept there, so that the same call of :func:`dask_coded.submit` resumes on
        another cluster. It is a pickle: resume only from places that you trust. The last state
        stays: delete it to start over.

    Examples
    --------
    >>> def halve(x, rounds, loop=Loop()):
    ...     first, x = loop.resume((1, x))
    ...     for i in range(first, rounds + 1):
    ...         x = x / 2
    ...         loop.report(Progress(i, residual=x), state=(i + 1, x), last=(i == rounds))
    ...     return x
    >>> halve(8.0, rounds=3)
    1.0
    """

    #: Where the state is kept; None if only by other workers.
    storage: str | None = None

    def __init__(self, storage: str | os.PathLike[str] | None = None) -> None:
        if storage is not None:
            self.storage = check_place("storage", storage)

    def resume(self, state: State) -> State:
        """Return the state that was kept last if this loop has run before, else ``state``.

        Raises
        ------
        ValueError
            If it has a ``storage``, and is not an argument of :func:`dask_coded.submit`.
        """
        if self.storage is not None:
            raise ValueError(
                f"The state of Loop(storage={self.storage!r}) is kept only if `coded.submit` gets "
                f"the loop as an argument of the function."
            )
        return state

    def report(self, progress: Progress, state: Any = None, last: bool = False) -> None:
        """Report a finished round.

        Parameters
        ----------
        progress : Progress
        state : picklable, optional
            What the next round starts from. A copy is kept, so that its arrays may be changed in
            place afterwards.
        last : bool
            Whether this was the last round.
        """


#: The default loop of algorithms.
QUIET = Loop()
