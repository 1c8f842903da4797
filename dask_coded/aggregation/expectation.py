"""The expected time of a step if workers straggle in proportion to their work.

A worker that would compute ``w`` seconds takes ``w (1 + E)``, with ``E`` exponential of a given
mean, as in :func:`dask_coded.simulation.proportional`: a shifted exponential whose shift and mean
are both proportional to the load [1]_. Redundant work then is as slow as any other, so a tree must
be chosen for its load, its messages and the stragglers that it tolerates at once.

Without messages, the expected time is an integral over the distribution of the root's time, which
follows from those of its children: of independent children, as many as the code needs. A parent
receives one message after the other, ``t`` seconds each. With ``C`` for the time without messages,
``c`` for the least time of any worker, and at every parent on the way up ``a`` seconds of latency
and from ``m`` to ``M`` messages until it decodes, the time on ``L`` layers is at least ``C + L (a +
t)`` and at least ``c + L (a + m t)``, and at most ``C + L (a + M t)``: messages that are early
enough cost nothing, those that come together queue. For few messages or little computation the two
ends meet. The text of the paper was not available; its bounds are asymptotic, these hold for any
number of workers.

References
----------
.. [1] Reisizadeh, Prakash, Pedarsani and Avestimehr, "CodedReduce: a fast and robust framework for
   gradient aggregation in distributed learning", IEEE/ACM Transactions on Networking 2021 (arXiv
   1902.01981).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    0.113 to 0.122 s
    0.164 to 0.168 s
    """
    check_whole("workers", workers)
    check_positive("nbytes", nbytes, or_zero=True)
    check_positive("straggling", straggling, or_zero=True)
    if getattr(aggregation, "segments", 1) != 1:
        raise ValueError("The expected time is known for gradients in one segment only.")
    if isinstance(aggregation, Ring):
        time = _Times(1 / workers * costs.computation, straggling, workers)
        slowest = time.mean(time.of(1 / workers * costs.computation) ** workers)
        whole = slowest + communication(Shape("Ring"), costs, workers, nbytes)
        return ExpectedStep(slowest, whole, whole)
    plan = aggregation.plan(workers)
    if not isinstance(aggregation, (Star, Tree, GradientCoding, CodedReduce)):
        raise ValueError(f"The expected time of {type(aggregation).__name__} is not known.")
    assert isinstance(plan, TreePlan)
    return _of_tree(plan.allocation, costs, nbytes, straggling)


class _Times:
    """Distributions of times, as their values at the points of a grid."""

    def __init__(self, work: float, straggling: float, workers: int) -> None:
        self._straggling = straggling
        end = work * (1 + straggling * (_TAIL + np.log(workers)))
        self.points: Floats = np.linspace(0.0, end, _POINTS)

    def of(self, work: float) -> Floats:
        """Return the probability that a worker with so much work is done, at every point."""
        if not work or not self._straggling:
            return np.asarray(self.points >= work, dtype=float)
        beyond = np.maximum(self.points - work, 0.0)
        return np.asarray(-np.expm1(-beyond / (work * self._straggling)))

    def mean(self, done: Floats) -> float:
        """Return the mean of the time with this distribution."""
        return float(np.trapezoid(1 - done, self.points))


def _of_tree(tree: Allocation, costs: Costs, nbytes: float, straggling: float) -> ExpectedStep:
    works = [len(work) / tree.parts * costs.computation for work in tree.work]
    times = _Times(max(works), straggling, len(works))
    own = {work: times.of(work) for work in set(works)}
    wire = nbytes / costs.bandwidth
    added = wire + nbytes * costs.summation

    def visit(node: int) -> tuple[Floats, float, float, float]:
        """Return when a node's sum is made without messages, and bounds on what these take."""
        done = own[works[node]] if node != ROOT else np.ones_like(times.points)
        if node not in tree.children:
            return done, 0.0, 0.0, 0.0
        below, single, fewest, most = zip(*map(visit, tree.children[node]), strict=True)
        code = tree.codes[node]
        return (
            done * _decoded(code, below),
            costs.latency + wire + min(single),
            costs.latency + code.fewest * wire + min(fewest),
            costs.latency + _most(code) * added + max(most),
        )

    done, single, fewest, most = visit(ROOT)
    # The mean on a grid is not exact where nothing is random.
    computation = times.mean(done) if straggling else max(works)
    least = max(computation + single, min(works) + fewest)
    return ExpectedStep(computation, least, computation + most)


def _decoded(code: GradientCode, below: Sequence[Floats]) -> Floats:
    """Return the probability that the children that are done suffice, at every point."""
    if isinstance(code, FractionalRepetition):
        found = np.ones_like(below[0])
        for group in range(code.blocks):
            members = np.array([below[row] for row in np.flatnonzero(code.group == group).tolist()])
            found = found * (1 - np.prod(1 - members, axis=0))
        return found
    # Any so many children suffice: count those that are done.
    counts = np.zeros((len(below) + 1, len(below[0])))
    counts[0] = 1
    for done in below:
        counts[1:] = counts[1:] * (1 - done) + counts[:-1] * done
        counts[0] *= 1 - done
    return np.asarray(counts[code.fewest :].sum(axis=0))


def _most(code: GradientCode) -> int:
    """Return the most messages that a parent receives before it decodes."""
    if isinstance(code, FractionalRepetition):
        return code.n - int(np.bincount(code.group).min()) + 1
    return code.fewest
