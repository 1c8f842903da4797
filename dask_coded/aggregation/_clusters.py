"""One layer of workers in clusters, each with a code of its own: the same ones, or new ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dask_coded.aggregation import spreading, trees
from dask_coded.aggregation._choices import CodeName, check_code
from dask_coded.aggregation._machine import (
    AGGREGATIONS,
    ROOT,
    Aggregation,
    Machine,
    check_workers,
)
from dask_coded.aggregation._tree import Place, TreeMachine, TreePlan, compute
from dask_coded.arguments import check_whole
from dask_coded.codes import Clustered, CyclicMDS, FractionalRepetition, GradientCode
from dask_coded.compression import EXACT, Codec

#: Steps that are looked back on.
_HISTORY = 50

_SPREAD = {"exact": spreading.spread, "greedy": spreading.spread_greedily}


@AGGREGATIONS.register("StaticClusters")
@dataclass(frozen=True)
class StaticClusters(Aggregation):
    """Gradient coding in clusters (GC-SC): each has a part of the data and a code of its own.

    More workers may be late in all than with one code of the same load, if not too many are in one
    cluster. With the fractional code it is the same as ``GradientCoding(load - 1)``, whose groups
    are the smallest clusters that there can be.

    Parameters
    ----------
    size : int
        Workers per cluster, at least ``load``; some have one more where they do not divide.
    load : int
        How many workers compute each part of the data; ``load - 1`` of each cluster may be late.
    code : {"fractional", "cyclic"}
        As in :class:`GradientCoding`.
    segments : int
        How many segments the gradient is cut into.

    References
    ----------
    .. [1] Ozfatura, Gündüz and Ulukus, "Gradient coding with clustering and multi-message
       communication", arXiv 1903.01974.

    Examples
    --------
    >>> plan = StaticClusters(size=4, load=2, code="cyclic").plan(8)
    >>> plan.stored[:4]
    ((0, 1), (1, 2), (2, 3), (0, 3))
    """

    size: int = 4
    load: int = 2
    code: CodeName = "fractional"
    segments: int = 1

    def __post_init__(self) -> None:
        _check(self.size, self.load, self.code, self.segments)

    def plan(self, workers: int) -> TreePlan:
        """The plan for so many workers, at least ``load``."""
        check_workers(self, workers, self.load)
        sizes = _sizes(workers, self.size)
        return TreePlan(trees.star(_code(sizes, self.load, self.code)), self.segments)


@AGGREGATIONS.register("DynamicClusters")
@dataclass(frozen=True)
class DynamicClusters(Aggregation):
    """Gradient coding in clusters that spread the last step's stragglers (GC-DC).

    It gains only where the same workers are late again, and then by how much slower they are. So
    the clusters stay as they are until that has been measured, see ``memory``.

    Parameters
    ----------
    size : int
        Workers per cluster, at least ``load``; some have one more where they do not divide.
    load : int
        How many workers compute each part of the data in a step.
    candidates : int
        In how many clusters a worker may work. It stores the data of all of them.
    placement : {"exact", "greedy"}
        The best placement, or a good one that is found faster for hundreds of workers.
    memory : float
        The least correlation of being late from one step to the next, over the last 50 steps, with
        which workers are placed anew (and three standard errors more, so that chance does not do
        it). ``-math.inf``: in every step.
    code : {"fractional", "cyclic"}
        As in :class:`GradientCoding`.
    segments : int
        How many segments the gradient is cut into.

    References
    ----------
    .. [1] Buyukates, Ozfatura, Ulukus and Gündüz, "Gradient coding with dynamic clustering for
       straggler-tolerant distributed learning", arXiv 2103.01206.

    Examples
    --------
    >>> plan = DynamicClusters(size=4, load=2).plan(12)
    >>> plan.parts, plan.stored[0], round(plan.load, 3)
    (6, (0, 1, 2, 3), 0.167)
    """

    size: int = 4
    load: int = 2
    candidates: int = 2
    placement: Literal["exact", "greedy"] = "exact"
    memory: float = 0.1
    code: CodeName = "fractional"
    segments: int = 1

    def __post_init__(self) -> None:
        _check(self.size, self.load, self.code, self.segments)
        check_whole("candidates", self.candidates)
        if self.placement not in _SPREAD:
            raise ValueError(
                f"Argument 'placement' must be one of {sorted(_SPREAD)}, it is {self.placement!r}."
            )

    def plan(self, workers: int) -> DynamicPlan:
        """The plan for so many workers, at least ``load``."""
        check_workers(self, workers, self.load)
        return DynamicPlan(self, workers)


class DynamicPlan(TreePlan):
    """The plan of :class:`DynamicClusters`: a choice is the row of the code of every worker.

    It remembers who was late: one instance serves one training, at its root.
    """

    def __init__(self, aggregation: DynamicClusters, workers: int) -> None:
        sizes = _sizes(workers, aggregation.size)
        code = _code(sizes, aggregation.load, aggregation.code)
        super().__init__(trees.star(code), aggregation.segments)
        self._aggregation = aggregation
        self._code = code
        cluster = np.repeat(np.arange(len(sizes)), sizes)
        #: The crew of each row: those of which too many may not be late.
        self._crew = code.group if isinstance(code, FractionalRepetition) else cluster
        self._room = np.bincount(self._crew).tolist()
        count = min(aggregation.candidates, len(sizes))
        may = np.zeros((workers, len(sizes)), dtype=bool)
        for worker, found in enumerate(spreading.candidates(sizes, count)):
            may[worker, list(found)] = True
        cluster_of_crew = cluster[np.unique(self._crew, return_index=True)[1]]
        self._allowed = may[:, cluster_of_crew]
        blocks = np.array([(code.B[cluster == c] != 0).any(axis=0) for c in range(len(sizes))])
        self.stored = tuple(tuple(np.flatnonzero(blocks[row].any(axis=0)).tolist()) for row in may)
        self._history: deque[npt.NDArray[np.bool_]] = deque(maxlen=_HISTORY)

    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        """A node's machine for a step in which each worker has its row of ``choice``."""
        self.check(codec)
        taken = choice or range(self.workers)
        root = node == ROOT
        return TreeMachine(
            Place(
                node=node,
                parent=None if root else ROOT,
                rows=dict(enumerate(taken)) if root else {},
                code=self._code if root else None,
                work=None if root else compute(self.allocation.work[taken[node]]),
                segments=self.segments,
            ),
            codec,
        )

    def choose(self, late: npt.NDArray[np.bool_] | None = None) -> tuple[int, ...]:
        """The row of each worker in the next step; empty while straggling shows no memory."""
        if late is None:
            return ()
        self._history.append(np.asarray(late, dtype=bool))
        if not spreading.has_memory(self._history, self._aggregation.memory):
            return ()
        place = _SPREAD[self._aggregation.placement]
        return self._rows(place(self._history[-1], self._room, self._allowed))

    def _rows(self, crew: npt.NDArray[np.intp]) -> tuple[int, ...]:
        """Rows of given crews: one's own where it is in the crew, else one that is free."""
        home = crew == self._crew
        taken = np.where(home, np.arange(self.workers), -1)
        for c in range(len(self._room)):
            taken[~home & (crew == c)] = np.flatnonzero((self._crew == c) & ~home)
        return tuple(taken.tolist())


def _check(size: int, load: int, code: str, segments: int) -> None:
    check_whole("load", load)
    check_code(code)
    check_whole("segments", segments)
    if size < load:
        raise ValueError(f"Argument 'size' must be at least 'load' = {load}, it is {size}.")


def _sizes(workers: int, size: int) -> list[int]:
    """Clusters of at least ``size`` workers, if there are so many, as equal as can be."""
    count = max(workers // size, 1)
    return [workers // count + (c < workers % count) for c in range(count)]


def _code(sizes: Sequence[int], load: int, code: CodeName) -> GradientCode:
    if code == "cyclic":
        return Clustered([CyclicMDS(size, load - 1) for size in sizes])
    group: list[int] = []
    for size in sizes:
        first = group[-1] + 1 if group else 0
        group += (FractionalRepetition(size, load - 1).group + first).tolist()
    return FractionalRepetition.of(group)
