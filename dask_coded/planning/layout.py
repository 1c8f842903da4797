"""What a round is about, as plain arrays: pieces, the workers that hold them, the work in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]


class Run(NamedTuple):
    """Consecutive stripes ``start … stop - 1`` of one piece: what is dealt out and sent back."""

    piece: int
    start: int
    stop: int


def without(runs: Iterable[Run], gone: Run) -> list[Run]:
    """Runs, less the stripes of one.

    Examples
    --------
    >>> without([Run(0, 0, 4), Run(1, 2, 8)], Run(1, 4, 6))
    [Run(piece=0, start=0, stop=4), Run(piece=1, start=2, stop=4), Run(piece=1, start=6, stop=8)]
    """
    kept = []
    for run in runs:
        if run.piece != gone.piece or run.stop <= gone.start or gone.stop <= run.start:
            kept.append(run)
            continue
        if run.start < gone.start:
            kept.append(run._replace(stop=gone.start))
        if gone.stop < run.stop:
            kept.append(run._replace(start=gone.stop))
    return kept


def runs_of(piece: int, mask: Bools, offset: int = 0) -> list[Run]:
    """The runs of stripes where ``mask`` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.view(np.int8), [0]])))
    return [
        Run(piece, a + offset, b + offset)
        for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which worker holds which piece, and what each stripe of it costs.

    Parameters
    ----------
    host : array_like of int, shape (pieces,)
        Index of the worker that holds each piece, ``-1`` for a piece that nobody holds.
    work : array_like, shape (pieces, stripes)
        Cost of each stripe in any unit: rows of dense pieces, non-zeros of sparse ones.
    group, place : array_like of int, shape (pieces,)
        As in :class:`dask_coded.codes.Code`.
    need : array_like of int, shape (groups,)
        How many pieces of its group a stripe needs.
    workers : int
        Number of workers.
    code : Code or None
        The code, if counting the pieces of a stripe does not tell whether they suffice: then it is
        asked. None if it does, see :attr:`dask_coded.codes.Code.threshold`.
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
        """Lay out a code: ``host[piece]`` is a worker index, ``work`` broadcasts to the pieces."""
        hosts = np.asarray(host, dtype=np.intp)
        costs = np.asarray(work, dtype=np.float64)
        # Work of exactly zero would make everybody's speed at it undefined.
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

    @cached_property
    def before(self) -> Floats:
        """Work in the stripes before each stripe of a piece, shape (pieces, stripes + 1)."""
        out = np.zeros((self.pieces, self.stripes + 1))
        np.cumsum(self.work, axis=1, out=out[:, 1:])
        return out

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
        """How many workers suffice, whichever they are, when each holds one place of the code."""
        if self.code is not None:
            return self.code.n - self.code.tolerance
        holders = np.bincount(self.group, minlength=len(self.need))
        return len(np.unique(self.place)) - int((holders - self.need).min())

    def per_group(self, pieces: Bools) -> Ints:
        """How many pieces of each group are marked: (pieces, stripes) to (groups, stripes)."""
        if len(self.need) == 1:
            return np.asarray(pieces.sum(axis=0, keepdims=True))
        order, starts = self._by_group
        return np.asarray(np.add.reduceat(pieces[order], starts, axis=0, dtype=np.intp))

    def lacking(self, have: Bools) -> Ints:
        """How many more pieces each stripe needs at least beside those that are marked.

        None if they suffice. (pieces, stripes) to (groups, stripes).
        """
        if self.code is None:
            return np.asarray(np.maximum(self.need[:, None] - self.per_group(have), 0))
        sets = np.ascontiguousarray(have.T)
        return np.array([[self.code.k - self.code.span(pieces).rank for pieces in sets]])

    def adds(self, piece: int, have: Bools) -> Bools:
        """Where a piece would bring a stripe nearer to its end beside those that are marked.

        Where they suffice or hold the piece already, it need not be told. (pieces, stripes) to
        (stripes,).
        """
        if self.code is None:
            return np.ones(have.shape[1], dtype=bool)
        sets = np.ascontiguousarray(have.T)
        return np.array([self.code.span(pieces).adds[piece] for pieces in sets])

    @cached_property
    def _by_group(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.group, kind="stable")
        return order, np.searchsorted(self.group[order], np.arange(len(self.need)))

    def cost(self, run: Run) -> float:
        """Work in a run of stripes."""
        row = self.before[run.piece]
        return float(row[run.stop] - row[run.start])
