"""Units of a training step on the workers that store them, as a layout of the round engine.

The units of a step never depend on the workers. Data are cut into as many blocks as there are
*seats*, a block is a run of units, and seat ``i`` stores the blocks ``i … i + copies - 1`` of a
ring, as in :class:`~dask_coded.codes.Repetition`. Every unit is computed by one of the workers that
store it, and neighbours can take over each other's units. The engine sees a block as a group that
needs one piece, and a unit as a stripe.

Neighbours should differ in speed. No third worker can compute the units between two of them::

    speeds of seats  1 1 1 1 1 1 ¼ ¼    the last two alone store a block, which takes them 2.0 times
                                        the time of a fast worker
                     1 1 1 ¼ 1 1 1 ¼    all blocks together take 8 / 6.5 = 1.23 times that time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dask_coded.arguments import check_whole
from dask_coded.codes import Repetition
from dask_coded.rounds.layout import Layout, StripeRange
from dask_coded.typing import Floats


class UnitLayout:
    """Which workers store which units.

    Parameters
    ----------
    units : int
        Of a step.
    seats : sequence of int
        The worker on each seat of the ring; ``-1`` if it is lost.
    copies : int
        Workers that store a block, at most one for each seat.
    workers : int
        Number of workers, if some have no seat.

    Attributes
    ----------
    layout : Layout
        Work is counted in units, so speeds are units per second.
    absent : list of StripeRange
        Stripes that are no units, because not all blocks are equally long.

    Examples
    --------
    >>> units = UnitLayout(units=8, seats=[2, 0, 1], copies=2)
    >>> units.stored[0], units.holders[4]
    ([2, 3, 4, 5, 6, 7], [2, 0])
    >>> units.units_in(units.ranges(0, [3, 4, 6]))
    [3, 4, 6]
    """

    def __init__(self, units: int, seats: Sequence[int], copies: int = 2, workers: int = 0) -> None:
        self.units = check_whole("units", units)
        blocks = check_whole("len(seats)", len(seats))
        self.copies = min(check_whole("copies", copies), blocks)
        # As the cells of parts in the batches of a training.
        self._edges = [block * units // blocks for block in range(blocks + 1)]
        stripes = max(b - a for a, b in zip(self._edges, self._edges[1:]))
        code = Repetition(blocks, self.copies)
        hosts = [seats[place] for place in code.place.tolist()]
        self.layout = Layout.of(code, hosts, np.ones((1, stripes)), workers)
        self._block = code.group.tolist()
        self._piece = {
            (host, block): piece for piece, (host, block) in enumerate(zip(hosts, self._block))
        }
        firsts = {block: piece for piece, block in reversed(list(enumerate(self._block)))}
        self.absent = [
            StripeRange(piece, size, stripes)
            for block, piece in firsts.items()
            if (size := self._edges[block + 1] - self._edges[block]) < stripes
        ]
        self.stored: list[list[int]] = [[] for _ in range(self.layout.workers)]
        self._hosts: list[list[int]] = [[] for _ in range(blocks)]
        for host, block in self._piece:
            if host >= 0:
                self.stored[host].extend(range(self._edges[block], self._edges[block + 1]))
                self._hosts[block].append(host)
        self._block_of = np.repeat(np.arange(blocks), np.diff(self._edges)).tolist()
        self.holders = [self._hosts[block] for block in self._block_of]

    def storing(self, units: Iterable[int]) -> set[int]:
        """Return the workers that store any of some units."""
        blocks = {self._block_of[unit] for unit in units}
        return {host for block in blocks for host in self._hosts[block]}

    def ranges(self, worker: int, units: Iterable[int]) -> list[StripeRange]:
        """Return units as stripes of the pieces of a worker that stores them."""
        ranges = []
        for unit in units:
            block = self._block_of[unit]
            stripe = unit - self._edges[block]
            ranges.append(StripeRange(self._piece[worker, block], stripe, stripe + 1))
        return ranges

    def units_in(self, ranges: Iterable[StripeRange]) -> list[int]:
        """Return the units of some stripes, in their order."""
        found: list[int] = []
        for piece, start, stop in ranges:
            block = self._block[piece]
            first = self._edges[block]
            found += range(first + start, min(first + stop, self._edges[block + 1]))
        return found


def seat(speeds: Floats) -> list[int]:
    """Return a worker for each seat of a ring, so that slow workers sit far from each other.

    The slower half takes every other seat: the slowest the first of these, the next one that
    opposite, the next two those halfway between, and so on. The faster half sits in between.

    Parameters
    ----------
    speeds : ndarray, shape (workers,)

    Examples
    --------
    >>> speeds = np.array([1, 1, 1, 1, 1, 1, 0.25, 0.25])
    >>> speeds[seat(speeds)].tolist()
    [0.25, 1.0, 1.0, 1.0, 0.25, 1.0, 1.0, 1.0]
    """
    count = len(speeds)
    places = [*range(0, count - 1, 2)]
    rest = [place for place in range(count) if place not in places]
    order = [*(places[i] for i in _spread(len(places))), *(rest[i] for i in _spread(len(rest)))]
    seats = [0] * count
    for place, worker in zip(order, np.argsort(speeds, kind="stable").tolist()):
        seats[place] = worker
    return seats


def _spread(count: int) -> list[int]:
    """Return ``0 … count - 1`` in an order in which each is far from those before it.

    That is the order of van der Corput's sequence, whose numbers have their bits mirrored.
    """
    bits = max(count - 1, 1).bit_length()
    mirrored = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    return list(dict.fromkeys(number * count >> bits for number in mirrored))[:count]


def ring_time(speeds: Floats, copies: int = 2) -> float:
    """Return the fluid bound of a ring of equal blocks, each stored by ``copies`` seats.

    Some neighbouring blocks take as long as the speeds of all seats that store any of them allow.

    Parameters
    ----------
    speeds : ndarray, shape (seats,)
        Blocks per unit of time of the worker on each seat, above zero.
    copies : int

    Examples
    --------
    >>> slow_together = np.array([1, 1, 1, 1, 1, 1, 0.25, 0.25])
    >>> ring_time(slow_together), round(ring_time(slow_together[seat(slow_together)]), 2)
    (2.0, 1.23)
    """
    count = len(speeds)
    reach = min(copies, count) - 1
    twice = np.concatenate([[0.0], np.cumsum(np.tile(speeds, 2))])
    worst = count / float(speeds.sum())
    for blocks in range(1, count - reach):
        # A block is stored by its own seat and by those before it.
        near = twice[blocks + reach : blocks + reach + count] - twice[:count]
        worst = max(worst, blocks / float(near.min()))
    return worst
