"""Subsets of pieces: which ones to examine, and how many may be lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dask_coded.typing import Ints

#: If there are at most this many subsets, all are examined; of more, this many are drawn at random.
EXHAUSTIVE_SUBSETS = 3_000


class DecodeProbability(NamedTuple):
    """Fraction of all losses of one size that decode, and its uncertainty.

    Attributes
    ----------
    probability : float
    error : float
        Half the width of the 95 % confidence interval; zero if all losses were examined.
    """

    probability: float
    error: float

    @classmethod
    def of(cls, found: int, looked_at: int, of: int) -> Self:
        """Estimate the probability if ``found`` of ``looked_at`` losses, out of ``of``, decode."""
        share = found / looked_at
        if looked_at == of:
            return cls(share, 0.0)
        # Wilson's interval has a positive width even if all losses of a sample decode.
        z = 1.96
        spread = math.sqrt(share * (1 - share) / looked_at + (z / (2 * looked_at)) ** 2)
        return cls(share, z * spread / (1 + z**2 / looked_at))


def k_subsets(n: int, k: int, limit: int = EXHAUSTIVE_SUBSETS) -> list[tuple[int, ...]]:
    """Return all ``k``-subsets of ``range(n)`` if at most ``limit``, else a fixed sample."""
    if math.comb(n, k) <= limit:
        return list(itertools.combinations(range(n), k))
    rng = np.random.default_rng(0)
    draws = rng.permuted(np.tile(np.arange(n), (limit, 1)), axis=1)[:, :k]
    return [tuple(row) for row in np.sort(draws, axis=1).tolist()]


def smallest_of_minors(
    parity: npt.NDArray[np.float64], subsets: Sequence[tuple[int, ...]]
) -> npt.NDArray[np.float64]:
    """Return the smallest singular value of the matrix that decoding from each subset inverts.

    With a systematic code, decoding from ``k`` pieces inverts the parity rows among them,
    restricted to the blocks that are not among them. This matrix is at most (n - k) x (n - k) and
    far cheaper than the k x k matrix, which has the same worst direction.

    Parameters
    ----------
    parity : ndarray, shape (n - k, k)
    subsets : sequence of tuples of k integers
        Each has at least one parity piece.

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


def all_span(rows: npt.NDArray[np.float64], count: int, rank: int) -> bool:
    """Whether any ``count`` rows have a rank, judged by a sample if there are many sets."""
    sets = np.array(k_subsets(len(rows), count))
    return bool((np.linalg.matrix_rank(rows[sets]) == rank).all())


def most_lost(place: Ints, group: Ints, need: Ints) -> int:
    """Return how many places may be lost, whichever they are, if counts of pieces decide.

    Parameters
    ----------
    place, group : ndarray of int, shape (pieces,)
    need : ndarray of int, shape (groups,)

    Examples
    --------
    Two pieces in each of three places, any four of which are needed:

    >>> most_lost(np.array([0, 0, 1, 1, 2, 2]), np.zeros(6, int), np.array([4]))
    1
    """
    found = []
    for g, enough in enumerate(need.tolist()):
        # At worst those places are left that hold the fewest pieces.
        held = np.sort(np.unique(place[group == g], return_counts=True)[1])
        left = np.searchsorted(np.cumsum(held), enough) + 1
        found.append(len(held) - int(left))
    return min(found)
