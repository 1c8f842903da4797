"""The expected time of a step if workers straggle in proportion to their work.

A worker that would compute ``w`` seconds takes ``w (1 + E)``, with ``E`` exponential of a given
mean, as in :func:`dask_coded.simulation.proportional`: a shifted exponential whose shift and mean
are both proportional to the load [1]_. Redundant work then is as slow as any other, so a tree must
be chosen for its load, its messages and the stragglers that it tolerates at once.

A node's time is a random number whose distribution follows from those of its children: they are
independent, and as many are needed as the code says. Its mean is an integral. A parent receives one
message after the other, ``t`` seconds each after ``a`` seconds of latency. It decodes between ``a +
t`` after the last child that it needs, if all others were early, and ``a + M t``, if the ``M``
messages that it may receive come together. Both are distributions again, and their means at the
root bound the expected time. Neither is the root earlier than ``c + L (a + m t)``, with ``c`` for
the least time of any worker and ``m`` messages needed by each parent on ``L`` layers. The text of
the paper was not available; its bounds are asymptotic, these hold for any number of workers.

References
----------
.. [1] Reisizadeh, Prakash, Pedarsani and Avestimehr, "CodedReduce: a fast and robust framework for
   gradient aggregation in distributed learning", IEEE/ACM Transactions on Networking 2021 (arXiv
   1902.01981).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_coded.aggregation._choices import CodedReduce, GradientCoding, Star, Tree
from dask_coded.aggregation._ring import Ring
from dask_coded.aggregation._tree import TreePlan
from dask_coded.aggregation.timing import Costs, Shape, communication
from dask_coded.aggregation.trees import ROOT, Allocation
from dask_coded.arguments import check_positive, check_whole
from dask_coded.codes import FractionalRepetition, GradientCode
from dask_coded.typing import Floats

#: Points of the integral, and how many means beyond the last worker's expected delay it ends.
_POINTS, _TAIL = 8001, 30.0


@dataclass(frozen=True)
class ExpectedStep:
    """The expected time of a step, from its start at all workers until the sum is made.

    Attributes
    ----------
    computation : float
        Expected seconds if messages took no time.
    least, most : float
        Bounds on the expected seconds with messages.
    """

    computation: float
    least: float
    most: float


def expected_step(
    aggregation: Ring | Star | Tree | GradientCoding | CodedReduce,
    workers: int,
    costs: Costs,
    nbytes: float,
    *,
    straggling: float,
) -> ExpectedStep:
    """Return the expected time of a step if workers straggle in proportion to their work.

    Use it to choose a tree for many workers, see the example. For delays that do not depend on the
    work, pass ``straggling`` to :func:`dask_coded.aggregation.timing.recommend`.

    Parameters
    ----------
    aggregation : Ring, Star, Tree, GradientCoding or CodedReduce
        In one segment.
    workers : int
    costs : Costs
        ``costs.computation`` is the least time in which one worker computes the whole batch.
    nbytes : float
        Size of a gradient as it is sent.
    straggling : float
        Mean of the exponential part of a worker's time, over its constant part.

    Returns
    -------
    ExpectedStep
        Until the root has the sum; in a ring, until all workers have it.

    Raises
    ------
    ValueError
        If the aggregation is another one or in several segments, it has no plan for so many
        workers, or a number is out of range.

    Examples
    --------
    >>> from dask_coded.aggregation import CodedReduce, GradientCoding
    >>> costs = Costs(latency=3e-4, bandwidth=62.5e6, computation=1.0)
    >>> for choice in (GradientCoding(20), CodedReduce(10, 2), CodedReduce(4, 3)):
    ...     found = expected_step(choice, 84, costs, 40_000, straggling=1.0)
    ...     print(f"{found.least:.3f} to {found.most:.3f} s")
    0.276 to 0.316 s
    0.113 to 0.120 s
    0.164 to 0.166 s
    """
    check_whole("workers", workers)
    check_positive("nbytes", nbytes, or_zero=True)
    check_positive("straggling", straggling, or_zero=True)
    if getattr(aggregation, "segments", 1) != 1:
        raise ValueError("The expected time is known for gradients in one segment only.")
    if isinstance(aggregation, Ring):
        work = costs.computation / workers
        times = _times(work, straggling, workers, 0.0)
        slowest: float = times.mean(times.all([times.worker(work)] * workers))
        whole = slowest + communication(Shape("Ring"), costs, workers, nbytes)
        return ExpectedStep(slowest, whole, whole)
    plan = aggregation.plan(workers)
    if not isinstance(aggregation, (Star, Tree, GradientCoding, CodedReduce)):
        raise ValueError(f"The expected time of {type(aggregation).__name__} is not known.")
    assert isinstance(plan, TreePlan)
    return _of_tree(plan.allocation, costs, nbytes, straggling)


def _of_tree(tree: Allocation, costs: Costs, nbytes: float, straggling: float) -> ExpectedStep:
    works = [len(work) / tree.parts * costs.computation for work in tree.work]
    wire = nbytes / costs.bandwidth
    added = wire + nbytes * costs.summation

    def together(code: GradientCode) -> float:
        return costs.latency + _most(code) * added

    def longest(node: int) -> float:
        below = tree.children.get(node, ())
        return together(tree.codes[node]) + max(map(longest, below)) if below else 0.0

    def quickest(node: int) -> float:
        if node not in tree.children:
            return min(works)
        needed = costs.latency + tree.codes[node].fewest * wire
        return needed + min(map(quickest, tree.children[node]))

    times = _times(max(works), straggling, len(works), longest(ROOT))

    def mean(lag: Callable[[GradientCode], float]) -> float:
        """Return the mean time of the root if each parent decodes so long after its children."""

        def visit(node: int) -> Any:
            own = [times.worker(works[node])] if node != ROOT else []
            if node not in tree.children:
                return own[0]
            code = tree.codes[node]
            below = times.decoded(code, list(map(visit, tree.children[node])))
            return times.all([*own, times.later(below, lag(code))])

        return float(times.mean(visit(ROOT)))

    least = max(mean(lambda code: costs.latency + wire), quickest(ROOT))
    return ExpectedStep(mean(lambda code: 0.0), least, mean(together))


def _most(code: GradientCode) -> int:
    """Return the most messages that a parent receives before it decodes."""
    if isinstance(code, FractionalRepetition):
        return code.n - int(np.bincount(code.group).min()) + 1
    return code.fewest


# ------------------------------------------------------------------------------------------ times


def _times(work: float, straggling: float, workers: int, lag: float) -> Any:
    """Return how to calculate with times: up to those of the slowest worker, and a lag after it."""
    if not work or not straggling:
        return _Certain()
    return _Random(straggling, work * (1 + straggling * (_TAIL + np.log(workers))) + lag)


class _Certain:
    """Calculates with times of which nothing is random, in seconds."""

    def worker(self, work: float) -> float:
        """Return the time of a worker that computes ``work`` seconds."""
        return work

    def later(self, time: float, lag: float) -> float:
        """Return a time and a number of seconds after it."""
        return time + lag

    def all(self, times: Sequence[float]) -> float:
        """Return the last of independent times."""
        return max(times)

    def decoded(self, code: GradientCode, below: Sequence[float]) -> float:
        """Return when enough of the children are done."""
        if isinstance(code, FractionalRepetition):
            groups = code.group.tolist()
            return max(
                min(time for time, of in zip(below, groups, strict=True) if of == group)
                for group in range(code.blocks)
            )
        return sorted(below)[code.fewest - 1]

    def mean(self, time: float) -> float:
        return time


class _Random:
    """Calculates with random times, as the probabilities that they are over at points of a grid."""

    def __init__(self, straggling: float, end: float) -> None:
        self._straggling = straggling
        self._points: Floats = np.linspace(0.0, end, _POINTS)
        self._workers: dict[float, Floats] = {}

    def worker(self, work: float) -> Floats:
        if work not in self._workers:
            beyond = np.maximum(self._points - work, 0.0)
            self._workers[work] = -np.expm1(-beyond / (work * self._straggling))
        return self._workers[work]

    def later(self, time: Floats, lag: float) -> Floats:
        return np.interp(self._points - lag, self._points, time, left=0.0) if lag else time

    def all(self, times: Sequence[Floats]) -> Floats:
        return np.asarray(np.prod(times, axis=0))

    def decoded(self, code: GradientCode, below: Sequence[Floats]) -> Floats:
        if isinstance(code, FractionalRepetition):
            waiting = 1 - np.array(below)
            groups = [np.prod(waiting[code.group == g], axis=0) for g in range(code.blocks)]
            return np.asarray(np.prod(1 - np.array(groups), axis=0))
        # Any so many children suffice: count those that are done.
        counts = np.zeros((len(below) + 1, len(below[0])))
        counts[0] = 1
        for done in below:
            counts[1:] = counts[1:] * (1 - done) + counts[:-1] * done
            counts[0] *= 1 - done
        return np.asarray(counts[code.fewest :].sum(axis=0))

    def mean(self, time: Floats) -> float:
        return float(np.trapezoid(1 - time, self._points))
