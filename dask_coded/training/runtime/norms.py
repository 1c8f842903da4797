"""Norms of gradients, whose squares may overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import norm

Floats = npt.NDArray[np.floating[Any]]

# Entries that are added as one row.
_ROW = 1024


def norm_of(vectors: Sequence[Floats], averages: int = 0) -> float:
    """Return the norm of a gradient in segments.

    Parameters
    ----------
    vectors : sequence of ndarray
        The segments.
    averages : int
        How many entries at the end belong to running averages and do not count.
    """
    counted, left = [], sum(map(len, vectors)) - averages
    for vector in vectors:
        counted.append(vector[:left])
        left = max(left - len(vector), 0)
    # BLAS, which does without these squares, has no half precision.
    wide = (v.astype(np.float32) if v.itemsize < 4 else v for v in counted if v.size)
    return math.hypot(*(float(norm(v, check_finite=False)) for v in wide))


def same_norm(vector: Floats) -> float:
    """Return a norm that has the same bits with any BLAS, number of threads and processor.

    Parameters
    ----------
    vector : ndarray, shape (n,)
    """
    peak = float(np.abs(vector).max(initial=0))
    if not 0 < peak < math.inf:
        return peak
    power = math.frexp(peak)[1]
    squares = np.square(np.ldexp(vector.astype(np.float64), -power))
    # Rows are added one after the other, and the rest exactly.
    whole = squares.size // _ROW * _ROW
    total = math.fsum([*squares[:whole].reshape(-1, _ROW).sum(axis=0), *squares[whole:]])
    return math.ldexp(math.sqrt(total), power)
