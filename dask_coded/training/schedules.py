"""When a step may begin: after the one before, or while sums of earlier ones are still made.

A step is begun with parameters to which a fixed number of updates has been applied, on all workers
the same: gradients are stale by as much as the schedule says, never by as much as it happens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from dask_coded.arguments import check_whole


class Schedule(ABC):
    """What a user chooses: how computation and communication follow each other.

    Attributes
    ----------
    width : int
        How many steps may be under way at a time.
    """

    width: int = 1

    @abstractmethod
    def version(self, step: int) -> int:
        """How many updates have been applied to the parameters that a step is computed with.

        Parameters
        ----------
        step : int
            From 0.

        Returns
        -------
        int
            At most ``step``, and never less than for the step before.
        """


@dataclass(frozen=True)
class Synchronous(Schedule):
    """Each step begins with the parameters that the one before has made.

    Examples
    --------
    >>> [Synchronous().version(step) for step in range(4)]
    [0, 1, 2, 3]
    """

    def version(self, step: int) -> int:
        return step


@dataclass(frozen=True)
class Pipelined(Schedule):
    """Up to ``width`` steps at a time: computation overlaps with communication (Pipe-SGD).

    A step is computed with parameters that lack the last ``width - 1`` updates. A worker computes
    and communicates at the same time, so that a step takes the longer of the two instead of their
    sum; more than two at a time gain nothing unless steps are uneven. Stale gradients want a
    smaller learning rate, or less momentum.

    Parameters
    ----------
    width : int
        From 2.
    warmup : int
        So many steps at the beginning are synchronous.

    References
    ----------
    .. [1] Y. Li, M. Yu, S. Li, S. Avestimehr, N. S. Kim, A. Schwing, "Pipe-SGD: A decentralized
           pipelined SGD framework for distributed deep net training", NeurIPS 2018,
           arXiv:1811.03619.

    Examples
    --------
    >>> [Pipelined(width=2).version(step) for step in range(5)]
    [0, 0, 1, 2, 3]
    >>> [Pipelined(width=2, warmup=3).version(step) for step in range(6)]
    [0, 1, 2, 2, 3, 4]
    """

    width: int = 2
    warmup: int = 0

    def __post_init__(self) -> None:
        check_whole("width", self.width, least=2)
        check_whole("warmup", self.warmup, least=0)

    def version(self, step: int) -> int:
        if step < self.warmup:
            return step
        return max(step - self.width + 1, self.warmup - 1, 0)
