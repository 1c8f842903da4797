"""What a worker may be asked to compute on stripes of its piece.

A table, so that no function ever travels over the wire. A kernel is bound to one piece and one
operand, and then called with ranges of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

Rows = np.ndarray[Any, Any]
Kernel = Callable[[Any, Rows], Callable[[int, int], Rows]]


def matvec(piece: Any, x: Rows) -> Callable[[int, int], Rows]:
    """``piece[a:b] @ x`` for a NumPy or CSR piece and a vector or matrix ``x``."""
    if not scipy.sparse.issparse(piece):
        return lambda a, b: piece[a:b] @ x

    data, indices, indptr = piece.data, piece.indices, piece.indptr
    columns = piece.shape[1]

    def rows(a: int, b: int) -> Rows:
        # Slicing a CSR matrix copies its entries; a matrix over views of them does not.
        part = scipy.sparse.csr_array(
            (
                data[indptr[a] : indptr[b]],
                indices[indptr[a] : indptr[b]],
                indptr[a : b + 1] - indptr[a],
            ),
            shape=(b - a, columns),
            copy=False,
        )
        return part @ x

    return rows


#: Kernels by name.
KERNELS: dict[str, Kernel] = {"matvec": matvec}
