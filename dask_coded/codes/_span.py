r"""Which blocks and other pieces a set of pieces determines, and how to compute them.

Blocks that are themselves among the pieces are known, so only a small system remains. With ``K``
the known blocks, ``M`` the missing blocks and ``P`` the parity pieces of the set,

.. math:: G_{PM} A_M = P - G_{PK} A_K .

Everything below follows from the matrix ``G[P, M]``, which has no more rows than there are parity
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.linalg

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

# Rows are independent if they are by more than rounding.
_ROUNDING = 1e-14
#: Sets of pieces with smaller singular values count as dependent, because decoding from them would
#: lose half of the digits. All rows of ``G`` have norm one here. Codes of which any ``k`` pieces
#: suffice have no such limit.
DEPENDENT = 1e-7
# Components of vectors below this count as zero. It lies between that limit and the error of null
# vectors, which is rounding divided by it. So if other pieces make a set independent, one of them
# adds to it.
_NEGLIGIBLE = 1e-8


class Span(NamedTuple):
    """The span of the rows of ``G`` of a set of pieces.

    Attributes
    ----------
    rank : int
        Dimension of the span; the set determines all blocks if it is ``k``.
    adds : ndarray of bool, shape (pieces,)
        Pieces that would each raise the rank.
    spare : ndarray of bool, shape (pieces,)
        Pieces of the set that can each be left out without lowering the rank.
    """

    rank: int
    adds: Bools
    spare: Bools


def span(G: Floats, block_of: Ints, have: Bools, limit: float | None = None) -> Span:
    """Return the span of the pieces that are marked in ``have``, shape (pieces,).

    Singular values below ``limit`` count as zero; by default those that are rounding errors.
    """
    at = np.flatnonzero(have)
    missing, parity = _split(G, block_of, at)
    parity = at[parity]
    size = np.linalg.norm(G, axis=1)
    G = G / np.where(size > 0, size, 1.0)[:, None]  # what the scale of a piece is does not matter
    left, values, right = _svd(G[np.ix_(parity, missing)])
    least = _ROUNDING * values.max(initial=0.0) if limit is None else limit
    rank = int((values > least).sum())
    # A row raises the rank if part of it is orthogonal to all rows of the set.
    adds = np.linalg.norm(G[:, missing] @ right[rank:].T, axis=1) > _NEGLIGIBLE
    # A parity piece can be left out if it is a combination of the others. A block can be left out
    # if the parity pieces of the set determine it, or if the set has another copy of it.
    spare = np.zeros(len(G), dtype=bool)
    free = left[:, rank:]
    spare[parity] = np.linalg.norm(free, axis=1) > _NEGLIGIBLE
    blocks = np.flatnonzero(have & (block_of >= 0))
    of = block_of[blocks]
    spare[blocks] = np.linalg.norm(free.T @ G[np.ix_(parity, of)], axis=0) > _NEGLIGIBLE
    spare[blocks] |= np.bincount(of, minlength=G.shape[1])[of] > 1
    return Span(G.shape[1] - len(missing) + rank, adds, spare)


def recovery(G: Floats, block_of: Ints, pieces: Sequence[int]) -> tuple[Ints, Floats]:
    """Return the missing blocks and the weights that recover them, shape (missing, pieces).

    The set must determine all blocks. If it has more parity pieces than are needed, the best
    conditioned are used.
    """
    at = np.asarray(pieces, dtype=np.intp)
    missing, parity = _split(G, block_of, at)
    weights = np.zeros((len(missing), len(at)))
    if not len(missing):
        return missing, weights
    rows = _independent(G[np.ix_(at[parity], missing)])[: len(missing)]
    parity = parity[rows]
    inverse = np.linalg.inv(G[np.ix_(at[parity], missing)])
    weights[:, parity] = inverse
    known = np.flatnonzero(block_of[at] >= 0)
    weights[:, known] = -inverse @ G[np.ix_(at[parity], block_of[at[known]])]
    # A second copy of a block is not needed.
    weights[:, _repeated(block_of, at)] = 0.0
    return missing, weights


def combination(G: Floats, block_of: Ints, row: Floats, pieces: Sequence[int]) -> Floats | None:
    """Return weights that combine the pieces' rows into ``row``, or None if there are none.

    Blocks of the set are used directly. Parity is used only for missing blocks that the row
    contains, and no more of it than necessary. Therefore few pieces have to be fetched, and if no
    block is missing, the result has no decoding error.
    """
    at = np.asarray(pieces, dtype=np.intp)
    weights = np.zeros(len(at))
    missing, parity = _split(G, block_of, at)
    if len(missing) and row[missing].any():
        small = G[np.ix_(at[parity], missing)]
        used = _independent(small)
        solved = np.linalg.lstsq(small[used].T, row[missing], rcond=None)[0]
        error = np.abs(small[used].T @ solved - row[missing]).max()
        if not error <= 1e-9 * np.abs(row).max():
            return None
        # What rebuilt pieces lose adds up, and solving loses up to 30 times as much as rounding.
        exact = G[at[parity[used]]].astype(np.longdouble)
        rest = row[missing] - solved @ exact[:, missing]
        solved += np.linalg.lstsq(small[used].T, rest.astype(np.float64), rcond=None)[0]
        weights[parity[used]] = solved
        row = (row - solved @ exact).astype(np.float64)
    known = np.flatnonzero(block_of[at] >= 0)
    weights[known] = row[block_of[at[known]]]
    weights[_repeated(block_of, at)] = 0.0
    return weights


def _split(G: Floats, block_of: Ints, pieces: Ints) -> tuple[Ints, Ints]:
    """Return the blocks that are not among the pieces, and the positions of parity pieces."""
    known = np.zeros(G.shape[1], dtype=bool)
    blocks = block_of[pieces]
    known[blocks[blocks >= 0]] = True
    parity = np.flatnonzero(blocks < 0)
    return np.flatnonzero(~known), parity


def _repeated(block_of: Ints, pieces: Ints) -> Ints:
    """Return the positions of pieces that repeat an earlier block."""
    blocks = block_of[pieces]
    first = np.zeros(len(pieces), dtype=bool)
    first[np.unique(blocks, return_index=True)[1]] = True
    return np.flatnonzero(~first & (blocks >= 0))


def _independent(rows: Floats) -> Ints:
    """Return the indices of a largest set of independent rows, the best conditioned first."""
    if not rows.size:
        return np.zeros(0, dtype=np.intp)
    _, triangle, order = scipy.linalg.qr(rows.T, mode="economic", pivoting=True)
    size = np.abs(np.diag(triangle))
    return np.asarray(order[: int((size > _ROUNDING * size[0]).sum())], dtype=np.intp)


def _svd(matrix: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the full singular value decomposition, also of an empty matrix."""
    if not matrix.size:
        return np.eye(matrix.shape[0]), np.zeros(0), np.eye(matrix.shape[1])
    return np.linalg.svd(matrix)
