"""Which entries of the operand a worker needs.

The rows of a sparse block have entries in some columns only, its *footprint*. A block of an eighth
of the rows of a web graph touches some 13 % of its columns. So a worker can do with these entries
of the operand. Blocks do not change, therefore footprints are found when the array is encoded; that
of a piece, rebuilt or new, follows from the blocks that it combines.

Footprints travel as compressed bits. Those of a web graph take less than a hundredth of the bytes
of the entries that they stand for.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dask_coded.typing import Ints

# The operand travels in parts, one for each block, if these are this many operands together. To
# pass on a whole operand takes about as long as that, because its last chunks have further to go,
# and it fills the links of all hosts.
_PARTS = 1.25


class Footprint(NamedTuple):
    """The columns in which a block has entries.

    Parameters
    ----------
    packed : bytes
        One bit for each column, compressed.
    touched : int
        How many columns.
    """

    packed: bytes
    touched: int


def footprint_of(rows: Any) -> Footprint:
    """Return the footprint of CSR rows.

    Examples
    --------
    >>> import scipy.sparse
    >>> footprint = footprint_of(scipy.sparse.csr_array([[0, 0, 1, 0], [1, 0, 2, 0]]))
    >>> footprint.touched, indices_of(footprint.packed)
    (2, array([0, 2]))
    """
    touched = np.zeros(rows.shape[1], dtype=bool)
    touched[rows.indices] = True
    packed = zlib.compress(np.packbits(touched).tobytes(), 1)
    return Footprint(packed, int(touched.sum()))


def worth_parts(touched: Iterable[int], columns: int) -> bool:
    """Return whether the operand is to travel in parts, if blocks touch so many columns each."""
    return sum(touched) <= _PARTS * columns


def indices_of(packed: bytes) -> Ints:
    """Return the columns of a footprint, in order."""
    bits = np.frombuffer(zlib.decompress(packed), np.uint8)
    found: Ints = np.flatnonzero(np.unpackbits(bits))
    return found


class Footprints:
    """The footprints of all source blocks of an array.

    Parameters
    ----------
    packed : iterable of bytes
        :attr:`Footprint.packed` of each block.

    Examples
    --------
    >>> import scipy.sparse
    >>> A = scipy.sparse.csr_array([[0, 0, 0, 1], [0, 2, 0, 0]])
    >>> footprints = Footprints([footprint_of(A[:1]).packed, footprint_of(A[1:]).packed])
    >>> footprints.indices
    (array([3]), array([1]))
    """

    def __init__(self, packed: Iterable[bytes]) -> None:
        self.packed = tuple(packed)

    def __reduce__(self) -> tuple[Any, ...]:
        return Footprints, (self.packed,)

    @cached_property
    def indices(self) -> tuple[Ints, ...]:
        """The columns of each block, in order."""
        return tuple(map(indices_of, self.packed))

    def within(self, rows: Any, blocks: Iterable[int]) -> Any:
        """Return CSR rows without entries in columns that none of the blocks touches.

        A rebuilt piece has such entries where other blocks do not cancel to the last digit.
        """
        touched = np.zeros(rows.shape[1], dtype=bool)
        for block in blocks:
            touched[self.indices[block]] = True
        inside = touched[rows.indices]
        if inside.all():
            return rows
        rows = rows.copy()
        rows.data[~inside] = 0
        rows.eliminate_zeros()
        return rows
