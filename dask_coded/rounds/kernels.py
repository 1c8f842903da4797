"""Kernels: what a worker can compute on stripes of its piece.

Messages name a kernel in a table, so no function is ever sent over the wire. A kernel is bound to
one piece, to the number of rows of its product and to the operand of a round. The bound function is
then called with ranges of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

Rows = np.ndarray[Any, Any]
Kernel = Callable[[Any, int, Any], Callable[[int, int], Rows]]


def matvec(piece: Any, rows: int, x: Rows) -> Callable[[int, int], Rows]:
    """Return ``(a, b) -> piece[a:b] @ x`` for a NumPy or CSR piece and a vector or matrix ``x``."""
    if not scipy.sparse.issparse(piece):
        return lambda a, b: piece[a:b] @ x

    data, indices, indptr = piece.data, piece.indices, piece.indptr
    columns = piece.shape[1]

    def product(a: int, b: int) -> Rows:
        # Slicing a CSR matrix copies its entries; building one from views does not.
        part = scipy.sparse.csr_array(
            (
                data[indptr[a] : indptr[b]],
                indices[indptr[a] : indptr[b]],
                indptr[a : b + 1] - indptr[a],
            ),
            shape=(b - a, columns),
            copy=False,
        )
        rows: Rows = part @ x
        return rows

    return product


def bilinear(piece: Rows, rows: int, d: Rows | None) -> Callable[[int, int], Rows]:
    """Return ``(a, b) -> L[a:b] @ diag(d) @ R.T`` for a piece of ``L`` (``rows`` rows) above ``R``.

    Without ``d`` the product is ``L[a:b] @ R.T``. The weights are applied only to the requested
    rows of ``L``, so no array of the size of a piece is made.
    """
    left, right = piece[:rows], piece[rows:].T
    if d is None:
        return lambda a, b: left[a:b] @ right
    return lambda a, b: (left[a:b] * d) @ right


#: Kernels by name.
KERNELS: dict[str, Kernel] = {"matvec": matvec, "bilinear": bilinear}
