"""From shares to the result: copy what is systematic, solve for what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.rounds.layout import StripeRange
from dask_coded.typing import Bools

# Numbers that are solved for at a time: half a MiB of them.
_STACKED = 1 << 16


@dataclass(frozen=True)
class Geometry:
    """Where rows lie: how many each block has, and how many stripes it is cut into.

    Parameters
    ----------
    rows : tuple of int, length k
        Rows of each block.
    stripes : int
        Stripes of every piece.
    mixed : bool
        Whether pieces mix blocks (then all have as many rows as the longest block).
    """

    rows: tuple[int, ...]
    stripes: int
    mixed: bool

    def edges(self, group: int) -> npt.NDArray[np.intp]:
        """First row of each stripe of the pieces of a group, and the end: shape (stripes + 1,)."""
        rows = max(self.rows) if self.mixed else self.rows[group]
        return np.arange(self.stripes + 1) * rows // self.stripes


class Assembler:
    """Puts the result of a round together while its shares come in.

    What is systematic is copied at once, and what is missing of a stripe is solved for as soon as
    enough of it is there: when the last share comes, hardly anything is left to do.

    Parameters
    ----------
    code : Code
    geometry : Geometry
    dtype : dtype
        Of the result.
    columns : tuple of int
        Shape of one row of the result.

    Attributes
    ----------
    rows : ndarray, shape (sum of rows, *columns)
        The result, as far as it is known.
    """

    def __init__(
        self,
        code: Code,
        geometry: Geometry,
        dtype: npt.DTypeLike,
        columns: tuple[int, ...] = (),
    ) -> None:
        self._code = code
        self._geometry = geometry
        self._offsets = np.concatenate([[0], np.cumsum(geometry.rows)])
        self._parity: dict[int, npt.NDArray[Any]] = {}
        self._open = np.full(geometry.stripes, not code.exact)
        self.rows = np.empty((int(self._offsets[-1]), *columns), dtype=dtype)

    def add(
        self, shares: Iterable[tuple[StripeRange, npt.NDArray[Any]]], computed: Bools, ready: Bools
    ) -> None:
        """Take in what has come since the last call.

        Parameters
        ----------
        shares : iterable of (StripeRange, ndarray of shape (rows of the range, *columns))
            A share may end early where its block does.
        computed : ndarray of bool, shape (pieces, stripes)
            Which stripes of which pieces have come back, with these.
        ready : ndarray of bool, shape (stripes,)
            Which of them are enough to decode from.
        """
        for part, rows in shares:
            self._store(part, rows)
        stripes = np.flatnonzero(ready & self._open)
        self._open[stripes] = False
        have = computed[:, stripes]
        # Solve for neighbouring stripes with the same pieces together.
        changes = (np.diff(stripes) != 1) | (have[:, 1:] != have[:, :-1]).any(axis=0)
        for alike in np.split(stripes, np.flatnonzero(changes) + 1):
            if len(alike):
                pieces = np.flatnonzero(computed[:, alike[0]]).tolist()
                self._solve(pieces, int(alike[0]), int(alike[-1]) + 1)

    def _store(self, part: StripeRange, rows: npt.NDArray[Any]) -> None:
        own = self._geometry.edges(int(self._code.group[part.piece]))
        start = int(own[part.start])
        if (block := int(self._code.block_of[part.piece])) >= 0:
            place, room = int(self._offsets[block]) + start, self._geometry.rows[block] - start
            self.rows[place : place + min(len(rows), room)] = rows[:room]
        else:
            if part.piece not in self._parity:
                shape = (int(own[-1]), *self.rows.shape[1:])
                self._parity[part.piece] = np.zeros(shape, dtype=self.rows.dtype)
            self._parity[part.piece][start : start + len(rows)] = rows

    def _solve(self, pieces: list[int], begin: int, end: int) -> None:
        """Fill the missing blocks of some stripes."""
        code, geometry, offsets, out = self._code, self._geometry, self._offsets, self.rows
        missing, weights = code.recovery(pieces)
        edges = geometry.edges(0)
        first, last = int(edges[begin]), int(edges[end])
        if not missing or first == last:
            return
        wide = np.result_type(out.dtype, np.float64)
        used = np.flatnonzero(weights.any(axis=0)).tolist()
        # A few rows at a time: what is stacked up for them stays in the cache.
        step = max(1, _STACKED // max(1, len(used) * math.prod(out.shape[1:])))
        for start in range(first, last, step):
            stop = min(start + step, last)
            stack = np.zeros((len(used), stop - start, *out.shape[1:]), dtype=wide)
            for row, i in zip(stack, used, strict=True):
                block = int(code.block_of[pieces[i]])
                if block >= 0:
                    known = min(stop, geometry.rows[block])
                    row[: max(known - start, 0)] = out[
                        offsets[block] + start : offsets[block] + known
                    ]
                else:
                    row[:] = self._parity[pieces[i]][start:stop]
            solved = np.tensordot(weights[:, used], stack, axes=1)
            for block, rows in zip(missing, solved, strict=True):
                known = min(stop, geometry.rows[block])
                if known > start:
                    out[offsets[block] + start : offsets[block] + known] = rows[: known - start]
