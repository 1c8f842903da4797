"""Trees of workers: the parent of each worker, and the parts of the data that it computes.

The root makes the sum and computes nothing. Every worker decodes what its children deliver with its
gradient code, adds its own gradients, and delivers the result to its parent. Let each parent have
``n`` children, any ``s`` of which may be late, on ``L`` layers, and let ``x = n / (s + 1)``, the
inverse of the code's load. The least possible load is [1]_

.. math:: r = 1 / (x + x^2 + … + x^L) .

A worker of layer ``l``, together with the workers below it, accounts for the fraction
``d_l = r (1 + x + … + x^{L-l})`` of the data. It computes ``r`` itself. The rest is coded for its
children, each of which accounts for ``d_{l+1}``.

With fractional repetition this has a simple form. Cut the data into as many parts as an *uncoded*
tree with ``x`` children per parent has workers. The positions in that tree are called *places*.
Every place of layer ``l`` is taken by ``(s + 1)^l`` workers, ``s + 1`` under each worker that takes
the place above. Each worker computes the one part of its place, and the first worker that delivers
the sum of a place counts::

                 root                         n = 4 children, s = 1, L = 2: 20 workers,
          ┌───┬───┴───┬───┐                   2 + 4 = 6 parts, load 1/6
        0   0     1   1                       places of layer 1, two workers each
       2244 2244 3355 3355                    places of layer 2, four workers each

References
----------
.. [1] Reisizadeh, Prakash, Pedarsani and Avestimehr, "CodedReduce: a fast and robust framework for
   gradient aggregation in distributed learning", IEEE/ACM Transactions on Networking 2021 (arXiv
   1902.01981). The formula was derived independently and tested, because the text of the paper
   was not available.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from dask_coded.codes import CyclicMDS, FractionalRepetition, GradientCode

#: The node that makes the sum, if there is one.
ROOT = -1

#: Parts of the data, each with the factor of its gradient.
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
        Number of equal parts of the data.
    """

    parents: tuple[int, ...]
    codes: Mapping[int, GradientCode]
    work: tuple[Work, ...]
    parts: int

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The children of every node that has any, in ascending order."""
        lists: dict[int, list[int]] = {}
        for worker, parent in enumerate(self.parents):
            lists.setdefault(parent, []).append(worker)
        return {node: tuple(found) for node, found in lists.items()}

    @property
    def load(self) -> float:
        """The largest fraction of the data that a worker computes."""
        return max(len(work) for work in self.work) / self.parts


def star(code: GradientCode) -> Allocation:
    """Return a tree of one layer; each worker computes the blocks in its row of the code."""
    return Allocation((ROOT,) * code.n, {ROOT: code}, rows(code), code.blocks)


def rows(code: GradientCode) -> tuple[Work, ...]:
    """Return the work of each row of a code."""
    return tuple(
        tuple((part, float(row[part])) for part in row.nonzero()[0].tolist()) for row in code.B
    )


def capacity(fan_in: int, depth: int) -> int:
    """Return the number of workers of a full tree.

    Examples
    --------
    >>> capacity(4, 3), capacity(12, 2)
    (84, 156)
    """
    return sum(fan_in**layer for layer in range(1, depth + 1))


def shape(
    workers: int, stragglers: int = 0, fan_in: int | None = None, depth: int | None = None
) -> tuple[int, int]:
    """Return the fan-in and depth of a tree that holds this many workers.

    Without either argument there are two layers, because a third one pays only for hundreds of
    workers, or one layer if there are too few workers for two groups with a layer below. The
    default fan-in is the smallest multiple of ``stragglers + 1`` with at least two groups that
    suffices; the depth for a given fan-in is the smallest that suffices.

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
            f"{workers}: pass a larger 'fan_in' or 'depth', or leave one of them out."
        )
    return fan_in, depth


def replicated(workers: int, fan_in: int, depth: int, stragglers: int = 0) -> Allocation:
    """Return a tree with fractional repetition at every parent; uncoded with ``stragglers=0``.

    The tree need not be full. Places are created layer by layer, spread evenly over the places
    above, while there are workers to take them. A worker that is left over also takes the place
    of a leaf, under the parent with the fewest children, where one more child may then be late.

    Parameters
    ----------
    workers : int
        At least ``stragglers + 1``, at most :func:`capacity`.
    fan_in : int
        Children per parent, at least ``stragglers + 1``; workers that are left over may exceed it.
    depth : int
    stragglers : int
        Number of children of every parent that may be late.

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
    # Only leaves count, because a worker that joins them needs no workers below it.
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
    """Return the place above each place, layer by layer; ROOT for places of the first layer."""
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
    """Return a regular tree with a cyclic code at every parent; some last leaves may be missing.

    A missing leaf permanently counts as one of its parent's stragglers. If more than ``stragglers``
    leaves per parent would be missing, the tree becomes narrower, and finally a star.

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
    """Return a full tree without some last leaves, with the same code at every parent."""
    mentioned = int((code.B != 0).sum(axis=1).max())
    gain = Fraction(code.blocks, mentioned)
    # The fewest parts for which every worker's own work and every block consist of whole parts.
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
    """Return the work that a child gets of the data that its parent does not compute itself."""
    size = len(rest) // code.blocks
    return tuple(
        (part, factor * float(code.B[row, block]))
        for block in code.B[row].nonzero()[0].tolist()
        for part, factor in rest[block * size : (block + 1) * size]
    )
