"""Decoding: copy systematic shares into the result, and solve for the missing blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.rounds.accuracy import Accuracy, NotSolvableError
from dask_coded.rounds.layout import StripeRange
from dask_coded.rounds.scaling import Scales
from dask_coded.typing import Bools, Floats

#: Makes an array of a shape and a dtype, as ``numpy.empty`` does.
Empty = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]

# Numbers stacked up for one solve: half a MiB of float64.
_STACKED = 1 << 16


@dataclass(frozen=True)
class Geometry:
    """How many rows each block has, and how many stripes each piece is cut into.

    Parameters
    ----------
    rows : tuple of int, length k
        Rows of each block.
    stripes : int
        Stripes of every piece.
    mixed : bool
        Whether pieces combine blocks. Then every piece has as many rows as the longest block.
    """

    rows: tuple[int, ...]
    stripes: int
    mixed: bool

    def edges(self, group: int) -> npt.NDArray[np.intp]:
        """Return the first row of each stripe of a group's pieces, and the end: (stripes + 1,)."""
        rows = max(self.rows) if self.mixed else self.rows[group]
        return np.arange(self.stripes + 1) * rows // self.stripes


class Assembler:
    """Assembles the result of a round while its shares arrive.

    Shares of systematic pieces are copied at once. The missing blocks of a stripe are recovered as
    soon as enough of its pieces have arrived, so little is left to do after the last share.

    Parameters
    ----------
    code : Code
    geometry : Geometry
    dtype : dtype
        Of the result.
    columns : tuple of int
        Shape of one row of the result.
    scales : Scales, optional
        How rows were scaled before pieces combined them; by default they were not.
    empty : callable(shape, dtype) -> ndarray
        Makes the array of the result.
    accuracy : Accuracy, optional
        Finds rows that have lost digits; by default nothing is found.
    errors : sequence of float
        For each piece, how much it has lost since it was encoded, see
        :meth:`~dask_coded.rounds.rebuilding.RoundingErrors.usual`; empty if no piece has.

    Attributes
    ----------
    rows : ndarray, shape (sum of rows, *columns)
        The result, as far as it is known. Half precision is kept in single precision, because a
        row of one block that overflows must not spoil those of others.
    doubtful : int
        Rows that have lost digits so far.
    worst : float
        The largest error of these, in units of the rounding error of a plain sum.
    spreads : bool
        Whether rows that are recovered may become infinite or NaN because a share is, or lose
        digits because shares are too small. By default both are errors, unless the blocks cannot be
        computed themselves.
    """

    def __init__(
        self,
        code: Code,
        geometry: Geometry,
        dtype: npt.DTypeLike,
        columns: tuple[int, ...] = (),
        scales: Scales | None = None,
        empty: Empty = np.empty,
        accuracy: Accuracy | None = None,
        errors: Sequence[float] = (),
    ) -> None:
        self._code = code
        self._scales = scales
        self._accuracy = accuracy
        self._errors = errors
        self.doubtful, self.worst = 0, 0.0
        self.spreads = not code.systematic
        self._geometry = geometry
        self._offsets = np.concatenate([[0], np.cumsum(geometry.rows)])
        # The shares of each parity piece, not copied, each with its first row.
        self._parity: dict[int, list[tuple[int, npt.NDArray[Any]]]] = {}
        self._open = np.full(geometry.stripes, not code.exact)
        self._dtype = np.dtype(dtype)
        kept = np.dtype(np.float32) if self._dtype == np.float16 else self._dtype
        self.rows = empty((int(self._offsets[-1]), *columns), kept)
        self._wide = np.result_type(self.rows.dtype, np.float64)
        self._scratch: npt.NDArray[Any] = np.empty(0, self._wide)

    @property
    def result(self) -> npt.NDArray[Any]:
        """The rows in the type of the result."""
        with np.errstate(over="ignore"):
            return self.rows.astype(self._dtype, copy=False)

    def block(self, piece: int) -> npt.NDArray[Any]:
        """Return where the rows of a piece belong that equals a block, to compute them there."""
        block = int(self._code.block_of[piece])
        assert block >= 0
        return self.rows[self._offsets[block] : self._offsets[block + 1]]

    def add(
        self, shares: Iterable[tuple[StripeRange, npt.NDArray[Any]]], computed: Bools, ready: Bools
    ) -> None:
        """Add the shares that have arrived since the last call.

        Parameters
        ----------
        shares : iterable of (StripeRange, ndarray of shape (rows of the range, *columns))
            A share has fewer rows if its block ends within the range.
        computed : ndarray of bool, shape (pieces, stripes)
            Stripes of each piece that have come back, including these shares.
        ready : ndarray of bool, shape (stripes,)
            Stripes of which enough pieces to decode have come back.

        Raises
        ------
        NotSolvableError
            If missing blocks cannot be recovered because shares of others are not finite or too
            small, unless these may spread.
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
            growth = self._errors[part.piece] if self._errors else 0.0
            if growth and self._accuracy is not None and self._scales:
                own = np.empty(rows[:room].shape, self._wide)
                self._scales.down(block, start, rows[:room], out=own)
                eps = float(np.finfo(self._dtype).eps)
                self._note(*self._accuracy.shaken(block, start, own, growth, eps))
        else:
            self._parity.setdefault(part.piece, []).append((start, rows))

    def _solve(self, pieces: list[int], begin: int, end: int) -> None:
        """Solve for the missing blocks of stripes ``begin … end - 1``."""
        geometry, offsets, out = self._geometry, self._offsets, self.rows
        missing, weights = self._code.recovery(pieces)
        edges = geometry.edges(0)
        first, last = int(edges[begin]), int(edges[end])
        if not missing or first == last:
            return
        used = np.flatnonzero(weights.any(axis=0)).tolist()
        weights = weights[:, used]
        # Solve for a few rows at a time, so that the stacked rows stay in the cache.
        step = max(1, _STACKED // max(1, len(used) * math.prod(out.shape[1:])))
        for start in range(first, last, step):
            stop = min(start + step, last)
            room = self._room(len(used) + len(missing), stop - start)
            stack, solved = room[: len(used)], room[len(used) :]
            for row, i in zip(stack, used, strict=True):
                self._stack(pieces[i], start, stop, row)
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(
                    weights, stack.reshape(len(used), -1), out=solved.reshape(len(missing), -1)
                )
            self._examine(missing, weights, start, stack, solved, [pieces[i] for i in used])
            for block, rows in zip(missing, solved, strict=True):
                known = min(stop, geometry.rows[block])
                if known <= start:
                    continue
                rows = rows[: known - start]
                place = out[offsets[block] + start : offsets[block] + known]
                if self._scales:
                    rows = self._scales.up(block, start, rows)
                    place = place[:, : rows.shape[1]] if rows.ndim > 1 else place
                place[...] = rows

    @cached_property
    def _growth(self) -> Floats:
        """What pieces have lost in all, of which parity was rounded when it was encoded."""
        rounded = np.where(self._code.block_of < 0, np.linalg.norm(self._code.G, axis=1), 0.0)
        return rounded + (self._errors or 0.0)

    def _examine(
        self,
        missing: list[int],
        weights: Floats,
        start: int,
        stack: npt.NDArray[Any],
        solved: npt.NDArray[Any],
        used: list[int],
    ) -> None:
        """Count the rows, from row ``start`` of their blocks on, that have lost digits."""
        if self._accuracy is None:
            return
        try:
            found = self._accuracy.doubtful(
                missing,
                weights,
                start,
                stack,
                solved,
                self._growth[used],
                self._code.block_of[used],
                self.spreads,
            )
        except NotSolvableError:
            if not self.spreads:
                raise
            # There is no other way to compute it.
            found = self._accuracy.spoilt(missing, start, solved), math.inf
        self._note(*found)

    def _note(self, count: int, worst: float) -> None:
        self.doubtful, self.worst = self.doubtful + count, max(self.worst, worst)

    def _room(self, count: int, rows: int) -> npt.NDArray[Any]:
        """Return an array of shape ``(count, rows, *columns)`` in memory that all calls share.

        On workers, Dask has freed memory returned to the system at once, and the first access to
        new memory takes longer than solving. For a result of 15 MB, decoding takes 6 ms, and took
        20 ms with new arrays in each call.
        """
        shape = (count, rows, *self.rows.shape[1:])
        size = math.prod(shape)
        if self._scratch.size < size:
            self._scratch = np.empty(size, self._wide)
        return self._scratch[:size].reshape(shape)

    def _stack(self, piece: int, start: int, stop: int, row: npt.NDArray[Any]) -> None:
        """Write rows ``start … stop - 1`` of a piece, scaled like those of parity pieces."""
        block = int(self._code.block_of[piece])
        if block < 0:
            for first, rows in self._parity[piece]:
                begin, end = max(start, first), min(stop, first + len(rows))
                if begin < end:
                    row[begin - start : end - start] = rows[begin - first : end - first]
            return
        known = max(min(stop, self._geometry.rows[block]), start)
        rows = self.rows[self._offsets[block] + start : self._offsets[block] + known]
        if self._scales:
            self._scales.down(block, start, rows, out=row[: len(rows)])
        else:
            row[: len(rows)] = rows
        row[len(rows) :] = 0
