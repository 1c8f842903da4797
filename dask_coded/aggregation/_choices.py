"""Trees to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from dask_coded.aggregation._machine import Aggregation, check_segments, check_workers
from dask_coded.aggregation._tree import TreePlan
from dask_coded.codes import FractionalRepetition
from dask_coded.planning import trees


@dataclass(frozen=True)
class Star(Aggregation):
    """All workers send to the root, which waits for all: no code, and the shortest way.

    Parameters
    ----------
    segments : int
        How many segments the gradient is cut into, each summed as soon as it is computed.

    Examples
    --------
    >>> plan = Star().plan(4)
    >>> plan.stored, plan.rooted
    (((0,), (1,), (2,), (3,)), True)
    """

    segments: int = 1

    def __post_init__(self) -> None:
        check_segments(self.segments)

    def plan(self, workers: int) -> TreePlan:
        """The plan for so many workers."""
        check_workers(self, workers)
        return TreePlan(trees.star(FractionalRepetition(workers, 0)), self.segments)
