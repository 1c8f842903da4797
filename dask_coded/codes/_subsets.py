"""Sets of pieces to look at: all of them where there are few, else a sample."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

#: Up to this many subsets are looked at one by one; beyond, this many are drawn.
EXHAUSTIVE_SUBSETS = 3_000


class DecodeProbability(NamedTuple):
    """A share of all losses of one size, and how far it may be off.

    Attributes
    ----------
    probability : float
    error : float
        Half the width of the 95 % interval; zero if no loss was left out.
    """

    probability: float
    error: float

    @classmethod
    def of(cls, found: int, looked_at: int, of: int) -> Self:
        """``found`` among those ``looked_at``, ``of`` so many that there are."""
        share = found / looked_at
        if looked_at == of:
            return cls(share, 0.0)
        # Wilson's interval: that all of a sample decode does not mean that all do.
        z = 1.96
        spread = math.sqrt(share * (1 - share) / looked_at + (z / (2 * looked_at)) ** 2)
        return cls(share, z * spread / (1 + z**2 / looked_at))


def k_subsets(n: int, k: int, limit: int = EXHAUSTIVE_SUBSETS) -> list[tuple[int, ...]]:
    """All ``k``-subsets of ``range(n)`` if at most ``limit``, else that many, repeatably."""
    if math.comb(n, k) <= limit:
        return list(itertools.combinations(range(n), k))
    rng = np.random.default_rng(0)
    draws = rng.permuted(np.tile(np.arange(n), (limit, 1)), axis=1)[:, :k]
    return [tuple(row) for row in np.sort(draws, axis=1).tolist()]


def smallest_of_minors(
    parity: npt.NDArray[np.float64], subsets: Sequence[tuple[int, ...]]
) -> npt.NDArray[np.float64]:
    """Smallest singular value of what decoding from each subset would invert.

    Of a systematic code with these parity rows, shape (n - k, k), decoding from ``k`` pieces
    inverts the parity rows among them, restricted to the blocks not among them: at most
    (n - k) x (n - k), far cheaper than the k x k matrix that has the same worst direction.

    Parameters
    ----------
    parity : ndarray, shape (n - k, k)
    subsets : sequence of tuples of k integers
        Each with one parity piece at least.

    Returns
    -------
    ndarray, shape (len(subsets),)
        Zero for a subset that does not decode.
    """
    k = parity.shape[1]
    by_size: dict[int, list[tuple[int, npt.NDArray[np.float64]]]] = {}
    for i, subset in enumerate(subsets):
        rows = [piece - k for piece in subset if piece >= k]
        lost = np.setdiff1d(np.arange(k), subset, assume_unique=True)
        by_size.setdefault(len(rows), []).append((i, parity[np.ix_(rows, lost)]))
    out = np.empty(len(subsets))
    for minors in by_size.values():
        at, stack = zip(*minors, strict=True)
        out[list(at)] = np.linalg.svd(np.stack(stack), compute_uv=False)[:, -1]
    return out
