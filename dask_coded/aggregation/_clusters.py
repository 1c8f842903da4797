"""Gradient coding in clusters of workers: :class:`StaticClusters` and :class:`DynamicClusters`.

The workers, all of them children of the root, are divided into clusters. Each cluster has its own
part of the data and its own code. Static clusters keep their workers. Dynamic clusters may exchange
workers before every step, so that workers that were late are spread over the clusters (see
:mod:`dask_coded.aggregation.spreading`).
"""

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

#: Number of past steps over which the correlation of being late is measured.
_HISTORY = 50

_SPREAD = {"exact": spreading.spread, "greedy": spreading.spread_greedily}


@AGGREGATIONS.register("StaticClusters")
@dataclass(frozen=True)
class StaticClusters(Aggregation):
    """Gradient coding in fixed clusters of workers (GC-SC).

    Each cluster has its own part of the data and its own code. In total, more workers may be late
    than with one code of the same load, if not too many of them are in one cluster. With the
    fractional code, if ``load`` divides the sizes of the clusters, it is the same as
    ``GradientCoding(load - 1)``, whose groups are the smallest possible clusters.

    Parameters
    ----------
    size : int
        Least number of workers per cluster, at least ``load``. The clusters are as equal as
        possible; fewer than ``size`` workers form one cluster.
    load : int
        Number of workers that compute each part of the data; ``load - 1`` workers of each cluster
        may be late.
    code : {"fractional", "cyclic"}
        As in :class:`GradientCoding`.
    segments : int
        Number of segments of the gradient.

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
        """Return the plan for this number of workers, at least ``load``."""
        check_workers(self, workers, self.load)
        sizes = _sizes(workers, self.size)
        return TreePlan(trees.star(_code(sizes, self.load, self.code)), self.segments)


@AGGREGATIONS.register("DynamicClusters")
@dataclass(frozen=True)
class DynamicClusters(Aggregation):
    """Gradient coding in clusters that exchange workers between steps (GC-DC).

    Workers that were late in the last step are spread over the clusters, so that no cluster has
    too many of them in the next step. This gains only if the same workers are late again; how much
    depends on how much slower they are. The clusters therefore stay as they are until repeated
    lateness has been measured (see ``memory``).

    Parameters
    ----------
    size : int
        Least number of workers per cluster, at least ``load``. The clusters are as equal as
        possible; fewer than ``size`` workers form one cluster.
    load : int
        Number of workers that compute each part of the data in a step.
    candidates : int
        Number of clusters in which a worker may work. It stores the data of all of them.
    placement : {"exact", "greedy"}
        ``"exact"`` finds the best placement, ``"greedy"`` a good one, faster for hundreds of
        workers.
    memory : float
        Workers are placed again if the correlation of being late in one step and in the next, over
        the last 50 steps, exceeds this by more than three standard errors, which rules out chance.
        ``-math.inf`` places them in every step.
    code : {"fractional", "cyclic"}
        As in :class:`GradientCoding`.
    segments : int
        Number of segments of the gradient.

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
    moves = True

    def __post_init__(self) -> None:
        _check(self.size, self.load, self.code, self.segments)
        check_whole("candidates", self.candidates)
        if self.placement not in _SPREAD:
            raise ValueError(
                f"Argument 'placement' must be one of {sorted(_SPREAD)}, it is {self.placement!r}."
            )

    def plan(self, workers: int) -> DynamicPlan:
        """Return the plan for this number of workers, at least ``load``."""
        check_workers(self, workers, self.load)
        return DynamicPlan(self, workers)


class DynamicPlan(TreePlan):
    """The plan of :class:`DynamicClusters`, in which a choice is each worker's row of the code.

    An instance remembers which workers were late, so it serves one training only, at its root.
    """

    def __init__(self, aggregation: DynamicClusters, workers: int) -> None:
        sizes = _sizes(workers, aggregation.size)
        code = _code(sizes, aggregation.load, aggregation.code)
        super().__init__(trees.star(code), aggregation.segments)
        self._aggregation = aggregation
        self._code = code
        cluster = np.repeat(np.arange(len(sizes)), sizes)
        #: The group of each row of the code: workers of which only a limited number may be late.
        self._group = code.group if isinstance(code, FractionalRepetition) else cluster
        self._room = np.bincount(self._group).tolist()
        count = min(aggregation.candidates, len(sizes))
        may = np.zeros((workers, len(sizes)), dtype=bool)
        for worker, found in enumerate(spreading.candidates(sizes, count)):
            may[worker, list(found)] = True
        cluster_of_group = cluster[np.unique(self._group, return_index=True)[1]]
        self._allowed = may[:, cluster_of_group]
        blocks = np.array([(code.B[cluster == c] != 0).any(axis=0) for c in range(len(sizes))])
        self.stored = tuple(tuple(np.flatnonzero(blocks[row].any(axis=0)).tolist()) for row in may)
        self._history: deque[npt.NDArray[np.bool_]] = deque(maxlen=_HISTORY)

    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        """Return a node's machine for a step in which each worker has its row of ``choice``."""
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
        """Return each worker's row in the next step; empty while straggling shows no memory."""
        if late is None:
            return ()
        self._history.append(np.asarray(late, dtype=bool))
        if not spreading.has_memory(self._history, self._aggregation.memory):
            return ()
        place = _SPREAD[self._aggregation.placement]
        return self._rows(place(self._history[-1], self._room, self._allowed))

    def _rows(self, group: npt.NDArray[np.intp]) -> tuple[int, ...]:
        """Return a row in each worker's group: its own if it is at home there, else a free one."""
        home = group == self._group
        taken = np.where(home, np.arange(self.workers), -1)
        for g in range(len(self._room)):
            taken[~home & (group == g)] = np.flatnonzero((self._group == g) & ~home)
        return tuple(taken.tolist())


def _check(size: int, load: int, code: str, segments: int) -> None:
    check_whole("size", size)
    check_whole("load", load)
    check_code(code)
    check_whole("segments", segments)
    if size < load:
        raise ValueError(f"Argument 'size' must be at least 'load' = {load}, it is {size}.")


def _sizes(workers: int, size: int) -> list[int]:
    """Return sizes of clusters: at least ``size`` if there are enough workers, nearly equal."""
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
