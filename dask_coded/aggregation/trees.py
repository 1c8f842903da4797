"""Trees of workers: who is whose child, and which parts of the data everybody computes.

The root makes the sum and computes nothing. Every worker adds to its own gradients what its
children deliver, decoded by the gradient code of that parent, and delivers the result to its own
parent. With ``n`` children per parent, of which any ``s`` may be late, on ``L`` layers, and ``x``
the inverse of the code's load, ``n / (s + 1)``, the least load with which that is possible is [1]_

.. math:: r = 1 / (x + x^2 + … + x^L):

a worker of layer ``l`` and those below it stand for the share ``d_l = r (1 + x + … + x^{L-l})`` of
the data. It computes ``r`` itself, and the rest is coded for its children, ``d_{l+1}`` each.

With fractional repetition this has a simple form. Cut the data into as many parts as an *uncoded*
tree with ``x`` children per parent has nodes: its *places*. Every place of layer ``l`` is taken by
``(s + 1)^l`` workers, ``s + 1`` under each of those that take the place above. Each worker computes
the one part of its place, and the sum of a place is that of the first who delivers it::

                 root                         n = 4 children, s = 1, L = 2: 20 workers,
          ┌───┬───┴───┬───┐                   2 + 4 = 6 parts, load 1/6
        0   0     1   1                       places of layer 1, two workers each
       2244 2244 3355 3355                    places of layer 2, four workers each

References
----------
.. [1] Reisizadeh, Prakash, Pedarsani and Avestimehr, "CodedReduce: a fast and robust framework for
   gradient aggregation in distributed learning", IEEE/ACM Transactions on Networking 2021 (arXiv
   1902.01981). The formula was derived anew and tested; the text of the paper was not at hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from dask_coded.codes import CyclicMDS, FractionalRepetition, GradientCode

#: The node that makes the sum, where there is one.
ROOT = -1

#: Parts of the data, each with what its gradient is multiplied with.
Work = tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Allocation:
    """A tree of workers, the code of every parent, and the work of every worker.

    Parameters
    ----------
    parents : tuple of int
        The parent of each worker, :data:`ROOT` for the children of the root.
    codes : mapping of int to GradientCode
        The code of every node that has children: its rows are the children in the order of
        :attr:`children`.
    work : tuple of Work
        What each worker computes.
    parts : int
        How many equal parts the data are cut into.
    """

    parents: tuple[int, ...]
    codes: Mapping[int, GradientCode]
    work: tuple[Work, ...]
    parts: int

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The children of every node that has some, in the order of their numbers."""
        lists: dict[int, list[int]] = {}
        for worker, parent in enumerate(self.parents):
            lists.setdefault(parent, []).append(worker)
        return {node: tuple(found) for node, found in lists.items()}

    @property
    def load(self) -> float:
        """The largest share of the data that a worker computes."""
        return max(len(work) for work in self.work) / self.parts


def star(code: GradientCode) -> Allocation:
    """All workers are children of the root, each computes the blocks that its row mentions."""
    return Allocation((ROOT,) * code.n, {ROOT: code}, rows(code), code.blocks)


def rows(code: GradientCode) -> tuple[Work, ...]:
    """What each row of a code computes."""
    return tuple(
        tuple((part, float(row[part])) for part in row.nonzero()[0].tolist()) for row in code.B
    )


def capacity(fan_in: int, depth: int) -> int:
    """How many workers a full tree has.

    Examples
    --------
    >>> capacity(4, 3), capacity(12, 2)
    (84, 156)
    """
    return sum(fan_in**layer for layer in range(1, depth + 1))


def shape(
    workers: int, stragglers: int = 0, fan_in: int | None = None, depth: int | None = None
) -> tuple[int, int]:
    """The fan-in and depth of a tree that holds so many workers.

    What is not given is chosen: two layers with as few children per parent as will do (a multiple
    of ``stragglers + 1``), because a third layer pays only for hundreds of workers; and one layer
    where there are too few workers for two groups with a layer below.

    Raises
    ------
    ValueError
        If a tree of the given fan-in and depth is too small.

    Examples
    --------
    >>> shape(156), shape(20, stragglers=1), shape(5, stragglers=1), shape(84, fan_in=4)
    ((12, 2), (4, 2), (6, 1), (4, 3))
    """
    copies = stragglers + 1
    if fan_in is None:
        if depth is None:
            depth = 2 if workers >= 2 * copies * (1 + copies) or not stragglers else 1
        fan_in = 2 * copies
        while capacity(fan_in, depth) < workers:
            fan_in += copies
    elif depth is None:
        depth = 1
        while capacity(fan_in, depth) < workers:
            depth += 1
    if (most := capacity(fan_in, depth)) < workers:
        raise ValueError(
            f"A tree with fan_in={fan_in} and depth={depth} holds {most} workers, there are "
            f"{workers}: pass a larger one, or leave one of the two out."
        )
    return fan_in, depth


def replicated(workers: int, fan_in: int, depth: int, stragglers: int = 0) -> Allocation:
    """A tree with fractional repetition at every parent; uncoded without stragglers.

    Any number of workers will do. Places are made layer by layer, spread evenly over the places
    above, while there are workers to take them; a worker that is over takes a place of the last
    layer as well, under the parent with the fewest children: there, one more may be late.

    Parameters
    ----------
    workers : int
        At least ``stragglers + 1``, at most :func:`capacity`.
    fan_in : int
        Children per parent, at least ``stragglers + 1``; workers that are over may exceed it.
    depth : int
    stragglers : int
        How many children of every parent may be late.

    Examples
    --------
    >>> tree = replicated(20, fan_in=4, depth=2, stragglers=1)
    >>> tree.parts, [place for ((place, _),) in tree.work]
    (6, [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5])
    >>> tree.parents
    (-1, -1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3)
    """
    above = _places(workers, fan_in, depth, stragglers + 1)
    takers: dict[int, list[int]] = {ROOT: [ROOT]}
    parents: list[int] = []
    place_of: list[int] = []

    def seat(place: int, parent: int) -> None:
        takers[place].append(len(parents))
        parents.append(parent)
        place_of.append(place)

    for place, upper in enumerate(above):
        takers[place] = []
        for parent in takers[upper]:
            for _ in range(stragglers + 1):
                seat(place, parent)
    # Leaves by parent: only there can one more worker join without a tree below it.
    inner = set(parents)
    below = Counter(
        (parent, place)
        for worker, (parent, place) in enumerate(zip(parents, place_of))
        if worker not in inner
    )
    for _ in range(workers - len(parents)):
        parent, place = min(below, key=lambda key: (parents.count(key[0]), below[key], key))
        below[parent, place] += 1
        seat(place, parent)

    groups: dict[int, list[int]] = {}
    for place, parent in zip(place_of, parents):
        groups.setdefault(parent, []).append(place)
    codes = {
        parent: FractionalRepetition.of([sorted(set(places)).index(place) for place in places])
        for parent, places in groups.items()
    }
    return Allocation(
        tuple(parents), codes, tuple(((place, 1.0),) for place in place_of), len(above)
    )


def _places(workers: int, fan_in: int, depth: int, copies: int) -> list[int]:
    """The place above each place, layer by layer; ROOT above those of the first."""
    above: list[int] = []
    layer = [ROOT]
    for level in range(1, depth + 1):
        cost = copies**level
        fits = min(fan_in // copies * len(layer), workers // cost)
        workers -= fits * cost
        first = len(above)
        above += [layer[i % len(layer)] for i in range(fits)]
        layer = list(range(first, len(above)))
    return above


def cyclic(workers: int, fan_in: int, depth: int, stragglers: int) -> Allocation:
    """A regular tree with a cyclic code at every parent, in which some last leaves may be missing.

    A missing leaf is one of the stragglers that its parent puts up with, for good. Where more than
    ``stragglers`` per parent would be missing, the tree is made narrower, and at last a star.

    Parameters
    ----------
    workers : int
        At least ``stragglers + 1``, at most :func:`capacity`.
    fan_in, depth, stragglers : int

    Examples
    --------
    >>> tree = cyclic(12, fan_in=3, depth=2, stragglers=1)
    >>> tree.parts, tree.load == 4 / 15
    (15, True)
    """
    for levels in range(depth, 1, -1):
        for children in range(fan_in, stragglers, -1):
            missing = capacity(children, levels) - workers
            if 0 <= missing <= stragglers * children ** (levels - 1):
                return _regular(CyclicMDS(children, stragglers), levels, missing)
    return star(CyclicMDS(workers, stragglers))


def _regular(code: GradientCode, depth: int, missing: int) -> Allocation:
    """A full tree less some last leaves, with the same code at every parent."""
    mentioned = int((code.B != 0).sum(axis=1).max())
    gain = Fraction(code.blocks, mentioned)
    # As few parts as make every worker's own share and every block whole.
    own = mentioned * gain.denominator ** (depth - 1)
    parts = own * sum(gain**layer for layer in range(1, depth + 1))
    assert parts.denominator == 1
    parents: list[int] = []
    work: list[Work] = []
    codes: dict[int, GradientCode] = {}
    everything: Work = tuple((part, 1.0) for part in range(int(parts)))
    above: list[tuple[int, Work]] = [(ROOT, everything)]
    for level in range(1, depth + 1):
        layer: list[tuple[int, Work]] = []
        for turn, (parent, rest) in enumerate(above):
            lacking = (missing + turn) // len(above) if level == depth else 0
            codes[parent] = code
            for row in range(code.n - lacking):
                given = _coded(code, row, rest)
                layer.append((len(parents), given[own:]))
                parents.append(parent)
                work.append(given[:own])
        above = layer
    return Allocation(tuple(parents), codes, tuple(work), int(parts))


def _coded(code: GradientCode, row: int, rest: Sequence[tuple[int, float]]) -> Work:
    """What a child gets of the data that its parent does not compute itself."""
    size = len(rest) // code.blocks
    return tuple(
        (part, factor * float(code.B[row, block]))
        for block in code.B[row].nonzero()[0].tolist()
        for part, factor in rest[block * size : (block + 1) * size]
    )
