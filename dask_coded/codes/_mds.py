"""Systematic MDS codes over the reals with orthonormal parity: any k of n pieces suffice.

With two parity pieces, a loss of two blocks is decoded by inverting two columns of the parity, a
loss of one by dividing by an entry. The columns are directions in a plane, and an entry is small if
its column is near an axis. So the best parity has columns that divide the angles between the axes
evenly. Decoding from the worst pieces of (12, 10) then amplifies errors 12 times, with random rows
84 times.

More parity rows are random and orthonormal. If there are more rows than columns, the columns are
orthogonal and have the same norm instead. Several draws are compared by the condition of their
worst subset of k pieces, and the best is kept. Random orthonormal rows are orders of magnitude
better conditioned than Vandermonde or Cauchy parity, and stay usable at (n, k) = (200, 180).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_redundancy, check_whole
from dask_coded.codes._linear import CODES, Code
from dask_coded.codes._subsets import k_subsets, smallest_of_minors

# More draws hardly improve the worst subset; these keep the search near a tenth of a second.
_DRAWS = 24
_SUBSETS = 400


@CODES.register("mds")
class MDS(Code):
    """Systematic maximum-distance-separable code: any ``k`` of ``n`` pieces suffice.

    The first ``k`` pieces are the blocks themselves, the other ``n - k`` are parity. Each worker
    stores ``1 / k`` of the data. Parity mixes rows, so this code is for floating-point and complex
    data, and parity of sparse blocks is dense. For other data use :class:`Repetition`.

    Parameters
    ----------
    n : int
        Number of pieces.
    k : int
        Number of pieces that suffice, ``1 <= k <= n``.

    Raises
    ------
    ValueError
        If not ``1 <= k <= n``.

    Notes
    -----
    Deterministic: the same ``n`` and ``k`` give the same generator on every machine.

    Examples
    --------
    >>> code = MDS(n=10, k=7)
    >>> code.tolerance
    3
    >>> bool(code.worst_condition_number() < 500)
    True
    """

    _proven = True

    def __init__(self, n: int, k: int) -> None:
        n, k = check_whole("n", n, None), check_whole("k", k)
        if n < k:
            raise ValueError(f"Argument 'n' must be at least 'k', {n} is less than {k}.")
        super().__init__(_generator(n, k))

    @classmethod
    def with_redundancy(cls, n: int, redundancy: int) -> MDS:
        """Return ``MDS(n, n - redundancy)``."""
        return cls(n, n - check_redundancy(redundancy, n))


@lru_cache(maxsize=64)
def _generator(n: int, k: int) -> npt.NDArray[np.float64]:
    if n == k:
        return np.eye(k)
    if n == k + 2 and k > 1:
        return np.vstack([np.eye(k), _even_parity(k)])
    subsets = [s for s in k_subsets(n, k, limit=_SUBSETS) if s[-1] >= k]
    candidates = (_parity(n - k, k, seed) for seed in range(_DRAWS if k > 1 else 1))
    return np.vstack(
        [np.eye(k), max(candidates, key=lambda p: smallest_of_minors(p, subsets).min())]
    )


def _even_parity(k: int) -> npt.NDArray[np.float64]:
    """Return two rows of norm one, whose columns are evenly spread directions of a plane."""
    first = (k + 1) // 2
    quarters = [np.arange(1, count + 1) / (count + 1) for count in (first, k - first)]
    angles = np.pi / 2 * np.concatenate([quarters[0], 1 + quarters[1]])
    rows = np.array([np.cos(angles), np.sin(angles)])
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _parity(rows: int, k: int, seed: int) -> npt.NDArray[np.float64]:
    gaussian = np.random.default_rng(seed).standard_normal((max(rows, k), min(rows, k)))
    q, r = np.linalg.qr(gaussian)
    q = q * np.sign(np.diag(r))  # QR is unique only up to signs, which differ between LAPACKs
    if rows <= k:
        return np.asarray(q.T)
    return np.asarray(q * np.sqrt(rows / k))
