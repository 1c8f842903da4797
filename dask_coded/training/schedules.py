"""When a step may start: after the previous step, or while earlier sums are still under way.

A step starts with parameters to which a fixed number of updates has been applied, the same on all
workers. The schedule alone determines how stale gradients are; timing does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from dask_coded.arguments import check_whole


class Schedule(ABC):
    """Base class: decides how computation and communication overlap.

    Attributes
    ----------
    width : int
        How many steps may be in flight at once.
    """

    width: int = 1

    @abstractmethod
    def version(self, step: int) -> int:
        """Return how many updates have been applied to the parameters that a step uses.

        Parameters
        ----------
        step : int
            Counted from 0.

        Returns
        -------
        int
            At most ``step``, and never less than for the previous step.
        """


@dataclass(frozen=True)
class Synchronous(Schedule):
    """Start each step with the parameters that the previous step produced.

    Examples
    --------
    >>> [Synchronous().version(step) for step in range(4)]
    [0, 1, 2, 3]
    """

    def version(self, step: int) -> int:
        return step


@dataclass(frozen=True)
class Pipelined(Schedule):
    """Up to ``width`` steps in flight: computation overlaps with communication (Pipe-SGD).

    A step uses parameters that lack the last ``width - 1`` updates. A worker computes and
    communicates at the same time, so a step takes the longer of the two instead of their sum. More
    than two steps in flight gain nothing unless steps are uneven. Stale gradients need a smaller
    learning rate or less momentum.

    Parameters
    ----------
    width : int
        At least 2.
    warmup : int
        Number of synchronous steps at the start.

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
