"""Rounding errors of pieces that were rebuilt from others, which had been rebuilt from others.

A rebuilt piece is a combination of others. It takes over their errors, and its own rounding comes
to them::

    e_i = sum_s w_s e_s + d

Bounds on the sizes of errors would grow tenfold with every few losses: after a hundred they would
be so far above the errors that no share could be called wrong. The errors themselves hardly grow,
because whatever error the sources of a piece have in common is that of a code word, and so is the
piece's. So their covariances are kept, in units of half a last place of entries of blocks. ``d`` is
independent of all others. Its variance is ``sum_s (4 w_s g_s) ** 2 + g_i ** 2``: the weights come
from a system of equations, each product and each sum is rounded, and so is the piece; ``g`` is the
norm of a piece's row of the generator, by which its entries are larger than those of blocks. Pieces
of less than double precision are summed in that, so only the second term counts. A copy is not
rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.typing import Floats, Ints

# Errors are below this many standard deviations. Every rounding counts as if it were the largest
# possible, so in 600 series of up to 25 losses in double precision none came to half of the bound.
_DEVIATIONS = 3


# How far bounds are above usual errors. Blocks of normal numbers that were rebuilt once, with codes
# of 4 to 12 pieces in single and double precision, had 14 to 20 times less than their bounds.
_BEYOND_USUAL = 15


class RoundingErrors:
    """The errors of one array's pieces.

    Parameters
    ----------
    code : Code
    dtype : dtype
        Of the pieces.

    Examples
    --------
    >>> from dask_coded.codes import MDS
    >>> errors = RoundingErrors(MDS(6, 4))
    >>> errors.made(0, {1: 1.0, 2: -1.0})
    >>> round(errors.of(0), 1), errors.of(1)
    (17.2, 0.0)

    The error of a piece that is half of the first one is half of that, and its own rounding:

    >>> errors.made(3, {0: 0.5})
    >>> round(errors.of(3), 1)
    10.9
    """

    def __init__(self, code: Code, dtype: npt.DTypeLike = np.float64) -> None:
        self._sizes = _sizes(code)
        double = np.result_type(dtype, np.float64) == np.dtype(dtype)
        self._sums = 4.0 if double else 0.0
        # Parity is rounded when it is encoded. Shares are verified with that in mind.
        self._parity = np.where(code.block_of < 0, 4 * self._sizes**2 + 1, 0.0)
        # Until a piece is rebuilt, it has no rows.
        self._covariance = np.zeros((0, 0))
        # The largest error that each piece has ever had.
        self._worst = np.zeros(0)

    def made(self, piece: int, weights: Mapping[int, float], growth: float = 0.0) -> None:
        """Record that a piece was made: from other pieces, from the data, or read from a store.

        Parameters
        ----------
        piece : int
        weights : mapping of int to float
            The weight of each piece that it was made from. Empty if it was made from the data or
            read from a store.
        growth : float
            The error of a piece that was read from a store, which is independent of all others.
        """
        if not weights and not growth and not self._worst.any():
            return
        self._reach()
        sources, w = _arrays(weights)
        row = w @ self._covariance[sources]
        variance = self._variance(piece, weights) if weights else (growth / _DEVIATIONS) ** 2
        if not variance and piece < len(self._parity):
            variance = self._parity[piece]
        self._covariance[piece] = self._covariance[:, piece] = row
        self._covariance[piece, piece] = variance
        self._worst[piece] = max(self._worst[piece], self.of(piece))

    def extend(self, code: Code) -> None:
        """Take a code that has more pieces."""
        self._sizes = _sizes(code)

    def of(self, piece: int) -> float:
        """Return the error of a piece, in units of half a last place."""
        if piece >= len(self._worst):
            return 0.0
        return float(_DEVIATIONS * np.sqrt(self._covariance[piece, piece]))

    def usual(self, code: Code) -> tuple[float, ...]:
        """Return the usual errors of all pieces, in units of half a last place; () if all are new.

        Unlike :meth:`of`, which no piece exceeds.
        """
        if not self._worst.any():
            return ()
        self._reach()
        bounds = _DEVIATIONS * np.sqrt(np.diag(self._covariance)[: code.pieces])
        return tuple((bounds / _BEYOND_USUAL).tolist())

    def combined(self, piece: int, weights: Mapping[int, float]) -> float:
        """Return the error that a piece, or a check of its rows, has if it is made so."""
        self._reach()
        return float(_DEVIATIONS * np.sqrt(self._variance(piece, weights)))

    def of_shares(self, code: Code) -> tuple[float, ...]:
        """Return how far rows of each piece may be from what the checks of all blocks say.

        A check of a block was made from the block at some time: it has at most the largest error
        that the block has ever had. What coordinators make from other pieces has an error of its
        own, see :class:`~dask_coded.rounds.blame.Witness`.
        """
        if not self._worst.any():
            return (0.0,) * int(code.pieces)
        self._reach()
        own, worst = map(self.of, range(code.pieces)), self._worst[: code.pieces]
        blocks, plain = np.zeros(code.k), code.block_of >= 0
        np.maximum.at(blocks, code.block_of[plain], worst[plain])
        return tuple((np.fromiter(own, float) + np.abs(code.G) @ blocks).tolist())

    def _variance(self, piece: int, weights: Mapping[int, float]) -> float:
        sources, w = _arrays(weights)
        inherited = float(w @ self._covariance[np.ix_(sources, sources)] @ w)
        if w.tolist() == [1.0]:
            return max(inherited, 0.0)
        added = self._sums * w * self._sizes[sources]
        return max(inherited, 0.0) + float(added @ added) + float(self._sizes[piece]) ** 2

    def _reach(self) -> None:
        if not len(self._worst):
            self._covariance, self._worst = np.diag(self._parity), np.zeros(len(self._parity))
        if (more := len(self._sizes) - len(self._worst)) > 0:
            self._covariance = np.pad(self._covariance, (0, more))
            self._worst = np.pad(self._worst, (0, more))


def _sizes(code: Code) -> Floats:
    sizes: Floats = np.linalg.norm(code.G, axis=1)
    return sizes


def _arrays(weights: Mapping[int, float]) -> tuple[Ints, Floats]:
    return (
        np.fromiter(weights, np.intp, len(weights)),
        np.fromiter(weights.values(), np.float64, len(weights)),
    )
