"""How long a step of a training takes, and which aggregation, width and compression are best.

With ``n`` workers, gradients of ``B`` bytes, ``a`` seconds of latency per message, ``b`` seconds
per byte on a link and ``g`` seconds to add up a byte, a sum is everywhere after [1]_

=====  ============================================================================================
ring   ``2 (n - 1) a + (n - 1) / n B (2 b + g)``
star   ``2 a + n B (2 b + g)``: all links are idle but the root's
tree   ``2 L a + L f B (2 b + g)``, with ``f`` children per parent on ``L`` layers; ``L + S - 1``
       instead of ``L`` gradients of ``B / S`` where ``S`` segments follow each other
=====  ============================================================================================

Where a parent need not wait for ``s`` of its children [2]_, what it receives, and adds up, is
``f - s`` vectors instead of ``f``. A step is computation, then communication; where steps overlap
(width 2) it is the longer of the two, and more than two at once gain nothing, because there is one
processor and one link [1]_. A compression makes ``B`` smaller and takes the processor's time.

Workers that are late at random, a share ``p`` of them by an exponential time of mean ``m``, delay
those who wait for all ``n`` by

.. math:: m \\sum_{j=1}^n \\frac{1 - (1 - p)^j}{j}

on average. Of a group of ``s + 1`` that compute the same, the first counts: ``n / (s + 1)`` groups
are waited for, which are late with probability ``p^{s+1}`` and mean ``m / (s + 1)``.

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

Kind = Literal["Ring", "Star", "Tree", "GradientCoding", "CodedReduce"]


@dataclass(frozen=True)
class Costs:
    """What a cluster takes for what a step is made of.

    :func:`dask_coded.training.measure_costs` measures them on a running cluster.

    Parameters
    ----------
    latency : float
        Seconds from one worker to another, for a message of no length.
    bandwidth : float
        Bytes per second of a worker's link, in each direction.
    summation : float
        Seconds to add up one byte.
    computation : float
        Seconds in which one worker computes the gradient of the whole batch.

    Raises
    ------
    ValueError
        If one is negative, or there is no bandwidth.
    """

    latency: float
    bandwidth: float
    summation: float = 0.0
    computation: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or min(self.latency, self.summation, self.computation) < 0:
            raise ValueError(f"Costs must be 0 or above, and the bandwidth above 0: {self}.")

    def __str__(self) -> str:
        return (
            f"latency {self.latency * 1e3:.3g} ms, {self.bandwidth / 1e6:.4g} MB/s a link, "
            f"summation {self.summation * 1e9:.3g} s/GB, gradient {self.computation:.3g} s"
        )


@dataclass(frozen=True)
class Straggling:
    """Workers that are late at random, whatever they compute.

    Parameters
    ----------
    share : float
        The probability of a worker to be late in a step.
    mean : float
        Seconds by which it then is, exponentially distributed.
    """

    share: float = 0.0
    mean: float = 0.0

    def delay(self, waited_for: int, copies: int = 1) -> float:
        """Mean seconds until the last of some groups has one member done.

        Parameters
        ----------
        waited_for : int
            Groups.
        copies : int
            Members of each.

        Examples
        --------
        >>> straggling = Straggling(share=0.05, mean=1.0)
        >>> round(straggling.delay(12), 2), round(straggling.delay(6, copies=2), 3)
        (0.53, 0.007)
        """
        alike = self.share**copies
        total = sum((1 - (1 - alike) ** j) / j for j in range(1, waited_for + 1))
        return self.mean / copies * total


@dataclass(frozen=True)
class Packing:
    """A compression, as far as time is concerned.

    Parameters
    ----------
    name : str
    ratio : float
        How many times smaller it makes what travels.
    seconds : float
        What it takes a worker in a step.
    """

    name: str = "none"
    ratio: float = 1.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Shape:
    """An aggregation, as far as time is concerned.

    Parameters
    ----------
    kind : str
        The name of the class in :mod:`dask_coded.aggregation`.
    fan_in, depth : int
        Of a tree; a ring and stars have none.
    stragglers : int
        How many children of each parent may be late, with fractional repetition.
    segments : int
    """

    kind: Kind
    fan_in: int = 0
    depth: int = 1
    stragglers: int = 0
    segments: int = 1

    @property
    def parameters(self) -> dict[str, int]:
        """Keywords for the class in :mod:`dask_coded.aggregation`."""
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
        """The share of the data that each worker computes."""
        return 1 / workers if self.kind == "Ring" else _layers(self, workers)[0]

    def fans(self, workers: int) -> tuple[int, ...]:
        """The most children that a parent has, layer by layer from the root; none in a ring."""
        return () if self.kind == "Ring" else _layers(self, workers)[1]


@lru_cache
def _layers(shape: Shape, workers: int) -> tuple[float, tuple[int, ...]]:
    """The load of a tree, and its layers' largest fans."""
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
    """How long a step takes with some choices.

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
        """Of a step."""
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
    """What is best, and what the rest would take.

    Parameters
    ----------
    best : Prediction
    others : tuple of Prediction
        From the second best on.
    """

    best: Prediction
    others: tuple[Prediction, ...] = field(repr=False)

    def __str__(self) -> str:
        return str(self.best)


def communication(shape: Shape, costs: Costs, workers: int, nbytes: float) -> float:
    """Seconds from when all gradients are there until all workers have the sum.

    Parameters
    ----------
    shape : Shape
    costs : Costs
    workers : int
    nbytes : float
        Of a gradient, as it travels.

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
    a, b, g = costs.latency, 1 / costs.bandwidth, costs.summation
    if shape.kind == "Ring":
        return 2 * (workers - 1) * a + (workers - 1) / workers * nbytes * (2 * b + g)
    layers = [
        2 * a + nbytes / shape.segments * ((fan - shape.stragglers) * (b + g) + fan * b)
        for fan in shape.fans(workers)
    ]
    # One segment follows the other: the first takes all layers, and each more the slowest one.
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
    """How long a step takes.

    Parameters
    ----------
    shape : Shape
    costs : Costs
    workers : int
    nbytes : float
        Of a gradient, not compressed.
    width : int
        How many steps may be under way at once.
    packing : Packing, optional
    straggling : Straggling, optional

    Examples
    --------
    >>> costs = Costs(latency=1e-3, bandwidth=12.5e6, computation=0.24)
    >>> packing = Packing("GradiVeQ 8x", ratio=8)
    >>> print(predict(Shape("Ring"), costs, 12, 1e6, width=2, packing=packing))
    Ring, width 2, GradiVeQ 8x: predicted 40.3 ms a step
    """
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
    """The best combination of aggregation, width and compression.

    Parameters
    ----------
    costs : Costs
    workers : int
    nbytes : float
        Of a gradient, not compressed.
    widths : sequence of int
        Those to choose from. A width of 2 uses gradients that are one step old: it is for who asks.
    packings : sequence of Packing
        Compressions to choose from, besides none.
    stragglers : sequence of int
        Redundancies to choose from, besides none.
    straggling : Straggling, optional
        Without it nobody is late, and no code is worth its load.

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
    if workers < 1 or not nbytes > 0:
        raise ValueError(
            f"A recommendation needs 1 worker or more and gradients of some bytes, not "
            f"{workers} workers and {nbytes:g} bytes."
        )
    predictions = [
        predict(shape, costs, workers, nbytes, width=width, packing=packing, straggling=straggling)
        for shape in shapes(workers, stragglers)
        for width in widths
        for packing in (Packing(), *packings)
    ]
    # Sorting is stable: of those that take the same the simpler one, which comes first, is best.
    best, *others = sorted(predictions, key=lambda prediction: prediction.seconds)
    return Recommendation(best, tuple(others))


def shapes(workers: int, stragglers: Sequence[int] = (1,)) -> Iterator[Shape]:
    """The aggregations to choose from, the simplest first.

    Examples
    --------
    >>> [str(shape) for shape in shapes(12, stragglers=())]
    ['Ring', 'Star', 'Tree(fan_in=3, depth=2)']
    """
    yield Shape("Ring")
    yield Shape("Star")
    for late in (0, *stragglers):
        if late >= workers:
            continue
        if late:
            yield Shape("GradientCoding", stragglers=late)
        for fan_in, depth in _forms(workers, late):
            yield Shape("CodedReduce" if late else "Tree", fan_in, depth, late)


def _forms(workers: int, late: int) -> list[tuple[int, int]]:
    """Trees of two layers or more: the default one, and those that are full."""
    forms = [trees.shape(workers, late)]
    for fan_in in range(2, workers):
        depth = 1
        while trees.capacity(fan_in, depth) < workers:
            depth += 1
        if trees.capacity(fan_in, depth) == workers and fan_in % (late + 1) == 0:
            forms.append((fan_in, depth))
    return [form for form in dict.fromkeys(forms) if form[1] > 1]
