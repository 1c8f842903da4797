"""Where a worker computes its rows of a round, in memory that the next round uses again."""

from __future__ import annotations

import math

import numpy as np

from dask_coded.rounds.kernels import Rows
from dask_coded.transport.memory import LEAST_BYTES, Memory, Segment, SharedArray, aligned


class Output:
    """The rows of a round's pieces, piece after piece.

    The first use of new memory costs the system 15 ms for 16 MB, as much as a tenth of a product of
    that many rows with a sparse matrix. A loop therefore uses the same memory in each round.

    Parameters
    ----------
    lengths : dict of int to int
        Rows of each piece.
    row : ndarray, shape (0, *columns)
        It has the type and the width of rows.
    segment : Segment, optional
        Memory that the coordinator can read; by default rows travel in messages.
    """

    def __init__(self, lengths: dict[int, int], row: Rows, segment: Segment | None = None) -> None:
        self._lengths = lengths
        self._row = row
        self._width = _width(row)
        self._segment = segment
        self._offsets, size = _offsets(lengths, self._width)
        self._bytes = np.empty(size, np.uint8) if segment is None else None

    @classmethod
    def of(
        cls, lengths: dict[int, int], row: Rows, memory: Memory | None, previous: Output | None
    ) -> Output | None:
        """Make room for rows, in the memory of the previous round if they are like its rows.

        None if that is little, if there is no memory for it, or if rows are Python objects.
        """
        size = _offsets(lengths, _width(row))[1]
        if size < LEAST_BYTES or row.dtype.hasobject:
            return None
        if previous is not None and previous._fits(lengths, row, memory is not None):
            return previous
        if memory is None:
            return cls(lengths, row)
        segment = memory.new(size)
        return None if segment is None else cls(lengths, row, segment)

    def rows(self, piece: int, first: int, count: int) -> Rows:
        """Return the memory of some rows of a piece."""
        shape, start = (count, *self._row.shape[1:]), self._start(piece, first)
        if self._segment is not None:
            found: Rows = self._segment.array(self._row.dtype, shape, start)
            return found
        assert self._bytes is not None
        part = self._bytes[start : start + count * self._width]
        return part.view(self._row.dtype).reshape(shape)

    def place(self, piece: int, first: int, count: int) -> SharedArray | Rows:
        """Return neighbouring rows as a share holds them: where they lie, or as they are."""
        rows = self.rows(piece, first, count)
        if self._segment is None:
            return rows
        return self._segment.place(rows, self._start(piece, first))

    def _start(self, piece: int, first: int) -> int:
        return self._offsets[piece] + first * self._width

    def _fits(self, lengths: dict[int, int], row: Rows, shared: bool) -> bool:
        alike = self._row.dtype == row.dtype and self._row.shape == row.shape
        return alike and self._lengths == lengths and (self._segment is not None) == shared


def _width(row: Rows) -> int:
    return row.dtype.itemsize * math.prod(row.shape[1:])


def _offsets(lengths: dict[int, int], width: int) -> tuple[dict[int, int], int]:
    """Return where each piece begins, and where the last one ends, in bytes."""
    offsets, size = {}, 0
    for piece, length in lengths.items():
        offsets[piece] = size
        size = aligned(size + length * width)
    return offsets, size
