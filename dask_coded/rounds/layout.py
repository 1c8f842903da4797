"""What a round works on, as plain arrays: pieces, the workers that hold them, and their work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.codes._subsets import most_lost
from dask_coded.typing import Bools, Floats, Ints


class StripeRange(NamedTuple):
    """Consecutive stripes ``start … stop - 1`` of one piece: the unit of assignments and shares."""

    piece: int
    start: int
    stop: int


def stripes_in(ranges: Iterable[StripeRange]) -> int:
    """Return the number of stripes of some ranges.

    Examples
    --------
    >>> stripes_in([StripeRange(0, 0, 4), StripeRange(1, 6, 8)])
    6
    """
    return sum(stop - start for _, start, stop in ranges)


def without(ranges: Iterable[StripeRange], gone: StripeRange) -> list[StripeRange]:
    """Return the ranges without the stripes of ``gone``.

    Examples
    --------
    >>> without([StripeRange(0, 0, 4), StripeRange(0, 6, 8)], StripeRange(0, 2, 7))
    [StripeRange(piece=0, start=0, stop=2), StripeRange(piece=0, start=7, stop=8)]
    """
    kept = []
    for part in ranges:
        piece, start, stop = part
        if piece != gone.piece or stop <= gone.start or gone.stop <= start:
            kept.append(part)
            continue
        if start < gone.start:
            kept.append(StripeRange(piece, start, gone.start))
        if gone.stop < stop:
            kept.append(StripeRange(piece, gone.stop, stop))
    return kept


def ranges_of(piece: int, mask: Bools, offset: int = 0) -> list[StripeRange]:
    """Return the ranges of stripes in which ``mask`` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.view(np.int8), [0]])))
    return [
        StripeRange(piece, a + offset, b + offset)
        for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which worker holds which piece, and how much work each of its stripes is.

    Parameters
    ----------
    host : array_like of int, shape (pieces,)
        Index of the worker that holds each piece, ``-1`` for a piece that no worker holds.
    work : array_like, shape (pieces, stripes)
        Work of each stripe in any unit: rows of dense pieces, non-zeros of sparse ones.
    group, place : array_like of int, shape (pieces,)
        As in :class:`dask_coded.codes.Code`.
    need : array_like of int, shape (groups,)
        How many pieces of its group a stripe needs.
    workers : int
        Number of workers.
    code : Code or None
        None if any ``need`` pieces of a group suffice, see
        :attr:`dask_coded.codes.Code.threshold`. Otherwise the code, to check each set of pieces.
    """

    host: Ints
    work: Floats
    group: Ints
    place: Ints
    need: Ints
    workers: int
    code: Code | None = None

    @classmethod
    def of(cls, code: Code, host: Sequence[int], work: npt.ArrayLike, workers: int = 0) -> Layout:
        """Lay out a code: ``host[piece]`` is a worker index, ``work`` broadcasts to all pieces."""
        hosts = np.asarray(host, dtype=np.intp)
        costs = np.asarray(work, dtype=np.float64)
        # Speeds are work over time: work of exactly zero would leave them undefined.
        costs = np.maximum(costs, costs.max() * 1e-9 or 1.0)
        costs = np.broadcast_to(costs, (len(hosts), costs.shape[-1]))
        return cls(
            host=hosts,
            work=costs,
            group=code.group,
            place=code.place,
            need=code.need,
            workers=max(workers, int(hosts.max(initial=-1)) + 1),
            code=None if code.threshold else code,
        )

    @property
    def pieces(self) -> int:
        return len(self.host)

    @property
    def stripes(self) -> int:
        return int(self.work.shape[1])

    @property
    def needed(self) -> float:
        """Work of the stripes, each as often as it is needed."""
        return int(self.need.sum()) * self.stripes * self.mean_stripe

    @property
    def even_share(self) -> float:
        """Number of stripes that each worker computes if all are equally fast."""
        return int(self.need.sum()) * self.stripes / self.workers

    @cached_property
    def before(self) -> Floats:
        """Work of all stripes before each stripe of a piece, shape (pieces, stripes + 1)."""
        out = np.zeros((self.pieces, self.stripes + 1))
        np.cumsum(self.work, axis=1, out=out[:, 1:])
        return out

    @cached_property
    def edges(self) -> list[list[float]]:
        """The rows of :attr:`before` as lists, which are faster for one number at a time."""
        if not self.work.strides[0]:  # all pieces have the same work
            return [self.before[0].tolist()] * self.pieces
        rows: list[list[float]] = self.before.tolist()
        return rows

    @cached_property
    def mean_stripe(self) -> float:
        """The mean work of a stripe."""
        return float(self.work.mean())

    @cached_property
    def stripe_of(self) -> list[float]:
        """The mean work of a stripe of each piece."""
        means: list[float] = self.work.mean(axis=1).tolist()
        return means

    @cached_property
    def least_stripe(self) -> list[float]:
        """The least work of a stripe of each piece."""
        least: list[float] = self.work.min(axis=1).tolist()
        return least

    @cached_property
    def pieces_of(self) -> list[list[int]]:
        """The pieces that each worker holds."""
        lists: list[list[int]] = [[] for _ in range(self.workers)]
        for piece, worker in enumerate(self.host.tolist()):
            if worker >= 0:
                lists[worker].append(piece)
        return lists

    @cached_property
    def sufficient(self) -> int:
        """How many workers suffice, whichever they are, if each holds one place of the code."""
        if self.code is not None:
            return self.code.n - self.code.tolerance
        return len(np.unique(self.place)) - most_lost(self.place, self.group, self.need)

    def per_group(self, pieces: Bools) -> Ints:
        """Count the marked pieces of each group: (pieces, stripes) to (groups, stripes)."""
        if len(self.need) == 1:
            # Counting trues is far faster than adding them up.
            return np.array([[np.count_nonzero(marks) for marks in pieces.T]], dtype=np.intp)
        order, starts = self._by_group
        return np.asarray(np.add.reduceat(pieces[order], starts, axis=0, dtype=np.intp))

    def lacking(self, have: Bools) -> Ints:
        """Count the pieces that each stripe needs at least in addition to the marked ones.

        Zero where those suffice. (pieces, stripes) to (groups, stripes).
        """
        if self.code is None:
            return np.asarray(np.maximum(self.need[:, None] - self.per_group(have), 0))
        # Only sets that could be large enough are worth a decomposition.
        lacking: Ints = self.code.k - np.count_nonzero(have, axis=0)
        for stripe in np.flatnonzero(lacking <= 0):
            pieces = np.ascontiguousarray(have[:, stripe])
            lacking[stripe] = self.code.k - self.code.span(pieces).rank
        return lacking[None]

    def adds(self, piece: int, have: Bools) -> Bools:
        """Find the stripes for which a piece is useful in addition to the marked ones.

        Unspecified where the stripe is already decodable or already includes this piece.
        (pieces, stripes) to (stripes,).
        """
        if self.code is None:
            return np.ones(have.shape[1], dtype=bool)
        sets = np.ascontiguousarray(have.T)
        return np.array([self.code.span(pieces).adds[piece] for pieces in sets])

    @cached_property
    def _by_group(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.group, kind="stable")
        return order, np.searchsorted(self.group[order], np.arange(len(self.need)))

    def cost(self, part: StripeRange) -> float:
        """Return the work in a range of stripes."""
        row = self.edges[part.piece]
        return row[part.stop] - row[part.start]
