"""Predict the time of a training step, and recommend aggregation, width and compression.

With ``n`` workers, gradients of ``B`` bytes, ``a`` seconds of latency per message, ``b`` seconds
per byte on a link and ``g`` seconds to add up a byte, all workers have the sum after [1]_

=====  ============================================================================================
ring   ``2 (n - 1) a + (n - 1) / n B (2 b + g)``
star   ``2 a + n B (2 b + g)``: only the root's link is busy
tree   ``2 L a + L f B (2 b + g)``, with ``f`` children per parent on ``L`` layers; if ``S``
       segments follow one another, ``L + S - 1`` gradients of ``B / S`` instead of ``L`` of ``B``
=====  ============================================================================================

If a parent need not wait for ``s`` of its children [2]_, it receives and adds up ``f - s`` vectors
instead of ``f``. A step is computation, then communication. If steps overlap (width 2), a step
takes the longer of the two. More than two steps at once gain nothing, because there is one
processor and one link [1]_. A compression makes ``B`` smaller and takes processor time.

If workers are late at random, a fraction ``p`` of them by an exponential time of mean ``m``, a step
that waits for all ``n`` is delayed on average by

.. math:: m \\sum_{j=1}^n \\frac{1 - (1 - p)^j}{j} .

If groups of ``s + 1`` workers compute the same, the first of each group counts. The step then waits
for ``n / (s + 1)`` groups, which are late with probability ``p^{s+1}`` and mean ``m / (s + 1)``.

References
----------
.. [1] Li, Yu, Li, Avestimehr, Kim and Schwing, "Pipe-SGD: a decentralized pipelined SGD framework
   for distributed deep net training", NeurIPS 2018.
.. [2] Reisizadeh, Prakash, Pedarsani and Avestimehr, "CodedReduce", arXiv 1902.01981. Its bound on
   the time of a step is asymptotic; :class:`dask_coded.simulation.TrainingSimulation` is exact for
   small clusters and other delays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from dask_coded.aggregation import trees
from dask_coded.arguments import check_fraction, check_positive, check_whole

Kind = Literal["Ring", "Star", "Tree", "GradientCoding", "CodedReduce"]


@dataclass(frozen=True)
class Costs:
    """What messages, sums and gradients cost on a cluster.

    :func:`dask_coded.training.measure_costs` measures them on a running cluster.

    Parameters
    ----------
    latency : float
        Seconds from one worker to another, for an empty message.
    bandwidth : float
        Bytes per second of a worker's link, in each direction.
    summation : float
        Seconds to add up one byte.
    computation : float
        Seconds in which one worker computes the gradient of the whole batch.

    Raises
    ------
    ValueError
        If a cost is negative or not finite, or the bandwidth is not positive.
    """

    latency: float
    bandwidth: float
    summation: float = 0.0
    computation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "summation", "computation"):
            check_positive(name, getattr(self, name), or_zero=True)
        check_positive("bandwidth", self.bandwidth, or_infinite=True)

    def __str__(self) -> str:
        return (
            f"latency {self.latency * 1e3:.3g} ms, {self.bandwidth / 1e6:.4g} MB/s a link, "
            f"summation {self.summation * 1e9:.3g} s/GB, gradient {self.computation:.3g} s"
        )


@dataclass(frozen=True)
class Straggling:
    """Random delays of workers, independent of what the workers compute.

    Parameters
    ----------
    share : float
        Probability that a worker is late in a step.
    mean : float
        Mean delay of a late worker in seconds; delays are exponentially distributed.

    Raises
    ------
    ValueError
        If the share is not between 0 and 1, or the mean is negative or not finite.
    """

    share: float = 0.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("share", self.share)
        check_positive("mean", self.mean, or_zero=True)

    def delay(self, waited_for: int, copies: int = 1) -> float:
        """Return the mean delay, in seconds, until every group has one member done.

        Parameters
        ----------
        waited_for : int
            Number of groups.
        copies : int
            Number of members of each group.

        Examples
        --------
        >>> straggling = Straggling(share=0.05, mean=1.0)
        >>> round(straggling.delay(12), 2), round(straggling.delay(6, copies=2), 3)
        (0.53, 0.007)
        """
        check_whole("waited_for", waited_for, least=0)
        check_whole("copies", copies)
        alike = self.share**copies
        total = sum((1 - (1 - alike) ** j) / j for j in range(1, waited_for + 1))
        return self.mean / copies * total


@dataclass(frozen=True)
class Packing:
    """The properties of a compression that the time of a step depends on.

    Parameters
    ----------
    name : str
    ratio : float
        Factor by which it makes messages smaller.
    seconds : float
        Seconds that it takes a worker in a step.

    Raises
    ------
    ValueError
        If the ratio is not positive, or the seconds are negative.
    """

    name: str = "none"
    ratio: float = 1.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_positive("ratio", self.ratio)
        check_positive("seconds", self.seconds, or_zero=True)


@dataclass(frozen=True)
class Shape:
    """The properties of an aggregation that the time of a step depends on.

    Parameters
    ----------
    kind : str
        The name of the class in :mod:`dask_coded.aggregation`.
    fan_in, depth : int
        Dimensions of a tree; unused for a ring and for stars.
    stragglers : int
        Number of children of each parent that may be late, with fractional repetition.
    segments : int
    """

    kind: Kind
    fan_in: int = 0
    depth: int = 1
    stragglers: int = 0
    segments: int = 1

    @property
    def parameters(self) -> dict[str, int]:
        """Keyword arguments of the class in :mod:`dask_coded.aggregation`."""
        found = {"segments": self.segments} if self.segments > 1 else {}
        if self.kind in ("Tree", "CodedReduce"):
            found |= {"fan_in": self.fan_in, "depth": self.depth}
        if self.stragglers:
            found |= {"stragglers": self.stragglers}
        return found

    def __str__(self) -> str:
        keywords = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.kind}({keywords})" if keywords else self.kind

    def load(self, workers: int) -> float:
        """Return the fraction of the data that each worker computes."""
        return 1 / workers if self.kind == "Ring" else _layers(self, workers)[0]

    def fans(self, workers: int) -> tuple[int, ...]:
        """Return the largest fan-in of each layer, from the root on; empty for a ring."""
        return () if self.kind == "Ring" else _layers(self, workers)[1]


@lru_cache
def _layers(shape: Shape, workers: int) -> tuple[float, tuple[int, ...]]:
    """Return the load of a tree, and the largest fan-in of each layer."""
    tree = shape.kind in ("Tree", "CodedReduce")
    fan_in, depth = (shape.fan_in, shape.depth) if tree else (workers, 1)
    allocation = trees.replicated(workers, fan_in, depth, shape.stragglers)
    fans, layer = [], [trees.ROOT]
    while layer := [node for node in layer if node in allocation.children]:
        fans.append(max(len(allocation.children[node]) for node in layer))
        layer = [child for node in layer for child in allocation.children[node]]
    return allocation.load, tuple(fans)


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a step for one combination of aggregation, width and compression.

    Parameters
    ----------
    shape : Shape
    width : int
    packing : Packing
    computation, communication : float
        Seconds.
    """

    shape: Shape
    width: int
    packing: Packing
    computation: float
    communication: float

    @property
    def seconds(self) -> float:
        """Predicted seconds per step."""
        if self.width == 1:
            return self.computation + self.communication
        return max(self.computation, self.communication)

    def __str__(self) -> str:
        packing = "" if self.packing.name == "none" else f", {self.packing.name}"
        return (
            f"{self.shape}, width {self.width}{packing}: "
            f"predicted {self.seconds * 1e3:.3g} ms a step"
        )


@dataclass(frozen=True)
class Recommendation:
    """The fastest combination, and the predictions for the others.

    Parameters
    ----------
    best : Prediction
    others : tuple of Prediction
        Fastest first, from the second best on.
    """

    best: Prediction
    others: tuple[Prediction, ...] = field(repr=False)

    def __str__(self) -> str:
        return str(self.best)


def communication(shape: Shape, costs: Costs, workers: int, nbytes: float) -> float:
    """Return the seconds from the end of computing until all workers have the sum.

    Parameters
    ----------
    shape : Shape
    costs : Costs
    workers : int
    nbytes : float
        Size of a gradient as it is sent.

    Examples
    --------
    Large gradients are summed fastest in a ring, small ones in a tree:

    >>> costs = Costs(latency=1e-3, bandwidth=12.5e6)
    >>> ring, tree = Shape("Ring"), Shape("Tree", fan_in=3, depth=2)
    >>> [round(communication(shape, costs, 12, 8e6), 2) for shape in (ring, tree)]
    [1.2, 7.68]
    >>> [round(communication(shape, costs, 12, 4e3), 4) for shape in (ring, tree)]
    [0.0226, 0.0078]
    """
    check_whole("workers", workers)
    check_positive("nbytes", nbytes, or_zero=True)
    a, b, g = costs.latency, 1 / costs.bandwidth, costs.summation
    if shape.kind == "Ring":
        return 2 * (workers - 1) * a + (workers - 1) / workers * nbytes * (2 * b + g)
    layers = [
        2 * a + nbytes / shape.segments * ((fan - shape.stragglers) * (b + g) + fan * b)
        for fan in shape.fans(workers)
    ]
    # The first segment takes as long as all layers together, each later one as long as the slowest.
    return sum(layers) + (shape.segments - 1) * max(layers)


def predict(
    shape: Shape,
    costs: Costs,
    workers: int,
    nbytes: float,
    *,
    width: int = 1,
    packing: Packing | None = None,
    straggling: Straggling | None = None,
) -> Prediction:
    """Predict the time of a step.

    Parameters
    ----------
    shape : Shape
    costs : Costs
    workers : int
    nbytes : float
        Size of an uncompressed gradient.
    width : int
        How many steps may be in flight at once.
    packing : Packing, optional
    straggling : Straggling, optional

    Examples
    --------
    >>> costs = Costs(latency=1e-3, bandwidth=12.5e6, computation=0.24)
    >>> packing = Packing("GradiVeQ 8x", ratio=8)
    >>> print(predict(Shape("Ring"), costs, 12, 1e6, width=2, packing=packing))
    Ring, width 2, GradiVeQ 8x: predicted 40.3 ms a step
    """
    check_whole("width", width)
    packing = packing or Packing()
    computation = shape.load(workers) * costs.computation + packing.seconds
    if straggling is not None:
        copies = shape.stragglers + 1
        computation += straggling.delay(max(workers // copies, 1), copies)
    travel = communication(shape, costs, workers, nbytes / packing.ratio)
    return Prediction(shape, width, packing, computation, travel)


def recommend(
    costs: Costs,
    workers: int,
    nbytes: float,
    *,
    widths: Sequence[int] = (1,),
    packings: Sequence[Packing] = (),
    stragglers: Sequence[int] = (1,),
    straggling: Straggling | None = None,
) -> Recommendation:
    """Return the fastest combination of aggregation, width and compression.

    Parameters
    ----------
    costs : Costs
    workers : int
    nbytes : float
        Size of an uncompressed gradient.
    widths : sequence of int
        Widths to choose from. A width of 2 uses gradients that are one step old, so it is not
        considered by default.
    packings : sequence of Packing
        Compressions to choose from, in addition to none.
    stragglers : sequence of int
        Numbers of tolerated stragglers to choose from, in addition to 0.
    straggling : Straggling, optional
        Without it no worker is late, and no code is worth its load.

    Returns
    -------
    Recommendation

    Examples
    --------
    >>> costs = Costs(latency=3e-4, bandwidth=125e6, computation=1.2)
    >>> print(recommend(costs, 12, 8e6))
    Ring, width 1: predicted 224 ms a step
    >>> late = Straggling(share=0.05, mean=1.0)
    >>> print(recommend(costs, 12, 40e3, straggling=late))
    GradientCoding(stragglers=1), width 1: predicted 215 ms a step
    """
    check_positive("nbytes", nbytes)
    if not widths:
        raise ValueError("Argument 'widths' must not be empty: pass (1,), which is the default.")
    predictions = [
        predict(shape, costs, workers, nbytes, width=width, packing=packing, straggling=straggling)
        for shape in shapes(workers, stragglers)
        for width in widths
        for packing in (Packing(), *packings)
    ]
    # Sorting is stable, so the simplest of equally fast combinations, which comes first, wins.
    best, *others = sorted(predictions, key=lambda prediction: prediction.seconds)
    return Recommendation(best, tuple(others))


def shapes(workers: int, stragglers: Sequence[int] = (1,)) -> Iterator[Shape]:
    """Yield the aggregations to choose from, simplest first.

    Examples
    --------
    >>> [str(shape) for shape in shapes(12, stragglers=())]
    ['Ring', 'Star', 'Tree(fan_in=3, depth=2)']
    """
    check_whole("workers", workers)
    yield Shape("Ring")
    yield Shape("Star")
    for late in (0, *stragglers):
        if check_whole("stragglers", late, least=0) >= workers:
            continue
        if late:
            yield Shape("GradientCoding", stragglers=late)
        for fan_in, depth in _forms(workers, late):
            yield Shape("CodedReduce" if late else "Tree", fan_in, depth, late)


def _forms(workers: int, late: int) -> list[tuple[int, int]]:
    """Return fan-in and depth of the default tree and of full trees, if at least two layers."""
    forms = [trees.shape(workers, late)]
    for fan_in in range(2, workers):
        depth = 1
        while trees.capacity(fan_in, depth) < workers:
            depth += 1
        if trees.capacity(fan_in, depth) == workers and fan_in % (late + 1) == 0:
            forms.append((fan_in, depth))
    return [form for form in dict.fromkeys(forms) if form[1] > 1]
