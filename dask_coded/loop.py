"""What an algorithm tells of its rounds, and where it begins.

An algorithm is NumPy code over an operator with ``@``, and takes a :class:`Loop`. This one keeps
nothing and tells nobody, so that the algorithm runs anywhere; :func:`dask_coded.submit` hands over
one that reports to the client and keeps the state on other workers, so that the algorithm goes on
where it was when its own worker is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeVar

State = TypeVar("State")


class ConvergenceError(RuntimeError):
    """An iteration did not reach its tolerance within the rounds that it was given."""


@dataclass(frozen=True)
class Progress:
    """One round of a loop.

    Parameters
    ----------
    round : int
        Its number, from 1.
    residual : float
        What the loop wants to become small.
    objective : float or None
        What it minimises, where it minimises something.
    seconds : float or None
        How long the last product took; None where the operator does not say.
    workers : int or None
        How many workers' shares were used in it; None where the operator does not say.
    """

    round: int
    residual: float
    objective: float | None = None
    seconds: float | None = None
    workers: int | None = None

    @classmethod
    def of(cls, operator: Any, round: int, residual: float, objective: float | None = None) -> Self:
        """With what the operator says of its last product, if it says anything."""
        last = getattr(operator, "last_round", None)
        return cls(
            round,
            float(residual),
            None if objective is None else float(objective),
            getattr(last, "seconds", None),
            getattr(last, "workers", None),
        )


class Loop:
    """Nobody watches, nothing is kept.

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

    def resume(self, state: State) -> State:
        """The state that was reported last, if this loop has run before; else the one given."""
        return state

    def report(self, progress: Progress, state: Any = None, last: bool = False) -> None:
        """Tell of a round that is done.

        Parameters
        ----------
        progress : Progress
        state : picklable, optional
            With what the next round begins. It is not to be changed in place afterwards.
        last : bool
            Whether this was the last round.
        """


#: For algorithms that run by themselves.
QUIET = Loop()
