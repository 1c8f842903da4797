r"""Whose fault it is if a share contradicts the checks of its stripes.

A share ``y`` of piece ``i`` and the checks of its stripes (:mod:`dask_coded.rounds.verification`)
are two statements about the same product. If they contradict each other, either may be wrong. The
fault lies with the worker that computed the share, or with a worker that made the check of a block
``j`` of the piece, which has ``G[i, j] != 0``.

**Shares.** Faults do not agree with each other: two wrong numbers from different workers are equal
only by design, which verification is not for. So a share that agrees with its checks proves them
right for its stripes, up to the error that it would have shown. In a round that ends, every block
has such a share for every stripe, because pieces that determine all blocks involve all of them.
Then the workers whose shares contradict are to blame. Checks that no share supports are *disputed*.

The share of a block itself agrees with a check that was made from it, even if the block was damaged
before. So it proves nothing if shares of two other pieces contradict the check as one error in it
would have them do: by amounts in the ratio of their weights.

**Checks.** A disputed check is made again, from the rows of several workers in turn, until two of
these *witnesses* agree. The check that a worker holds was made from the block, so the two are not
independent: if the block was wrong before, both are wrong alike. Others may be decoded from sets
that have pieces in common, as long as these pieces have other weights in each: then an error in one
would not be the same in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.rounds.layout import StripeRange
from dask_coded.rounds.verification import check_error, sizes_of, sums_of
from dask_coded.typing import Bools, Floats


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the shares of a round say about the checks.

    Parameters
    ----------
    code : Code
    computed : ndarray of bool, shape (pieces, stripes)
        Stripes of each piece whose shares agree with their checks.
    contradicted : sequence of (StripeRange, float)
        Shares that contradict them, and by how much, in a unit that all shares of the round have
        in common.
    limits : ndarray, shape (pieces,)
        What shares may deviate by, in the same unit. A smaller error of a check is not found.

    Examples
    --------
    >>> from dask_coded.codes import MDS
    >>> computed = np.zeros((4, 1), dtype=bool)
    >>> computed[1] = True  # the check of block 1 is right
    >>> wrong = [(StripeRange(0, 0, 1), 1.0), (StripeRange(2, 0, 1), 1.0)]
    >>> found = Evidence(MDS(4, 2), computed, wrong, np.full(4, 1e-12))
    >>> found.disputed(), found.to_blame(), found.to_blame(right=[0])
    ({0}, [], [0, 2])
    """

    code: Code
    computed: Bools
    contradicted: Sequence[tuple[StripeRange, float]]
    limits: Floats

    def disputed(self) -> set[int]:
        """Return the blocks whose checks may be the reason why shares contradict them."""
        doubtful = [open_.any(axis=1) for _, open_ in self._doubts()]
        return set(np.flatnonzero(np.any(doubtful, axis=0)).tolist()) if doubtful else set()

    def to_blame(self, right: Collection[int] = ()) -> list[int]:
        """Return the pieces whose shares are wrong beyond doubt, if these blocks' checks are right.

        Parameters
        ----------
        right : collection of int
            Blocks.
        """
        found = []
        for piece, open_ in self._doubts():
            open_[list(right)] = False
            # A share of several stripes contradicts the sum of their checks: any may be wrong.
            if not open_.any():
                found.append(piece)
        return found

    def _doubts(self) -> Iterator[tuple[int, Bools]]:
        """Yield pieces that contradict checks, and which checks may be wrong: (k, stripes)."""
        weights = np.abs(self.code.G)
        # What a share that agrees would have deviated by for an error of each check, in units of
        # what it may deviate by. Half of these, because rounding errors may hide as much.
        tiny = float(np.finfo(np.float64).tiny)
        shown = weights / (2 * np.maximum(self.limits, tiny))[:, None]
        deviation = self._deviation()
        vain = self._made_from_wrong_blocks(deviation)
        block_of = {int(piece): j for j, piece in enumerate(self.code.systematic_pieces)}
        most = np.zeros((self.code.k, self.computed.shape[1]))
        for piece in np.flatnonzero(self.computed.any(axis=1)).tolist():
            support = shown[piece, :, None] * self.computed[piece]
            if (block := block_of.get(piece)) is not None:
                support[block, vain[block]] = 0
            most = np.maximum(most, support)
        for piece in np.flatnonzero(deviation.any(axis=1)).tolist():
            relies, size = weights[piece, :, None], deviation[piece]
            error = np.clip(size - self.limits[piece], 0, 1 / tiny)
            with np.errstate(over="ignore"):
                yield piece, (relies > 0) & (size > 0) & (most * error <= relies)

    def _deviation(self) -> Floats:
        """Return by how much shares of each stripe contradict checks: (pieces, stripes)."""
        deviation = np.zeros(self.computed.shape)
        for (piece, start, stop), size in self.contradicted:
            deviation[piece, start:stop] = size
        return deviation

    def _made_from_wrong_blocks(self, deviation: Floats) -> Bools:
        """Return which checks two pieces contradict as one error in it would: (k, stripes).

        A share of several stripes contradicts the sum of their errors. So those of two pieces can
        be compared only if they have the same stripes; otherwise it may be one error.
        """
        weights, limits = np.abs(self.code.G), self.limits
        bounds = np.zeros((*deviation.shape, 2), dtype=int)
        for (piece, start, stop), _ in self.contradicted:
            bounds[piece, start:stop] = start, stop
        found = np.zeros((self.code.k, deviation.shape[1]), dtype=bool)
        for one, other in combinations(np.flatnonzero(deviation.any(axis=1)).tolist(), 2):
            both = (deviation[one] > 0) & (deviation[other] > 0)
            if not both.any():
                continue
            first, second = weights[one, :, None], weights[other, :, None]
            comparable = (bounds[one] == bounds[other]).all(axis=1)
            with np.errstate(over="ignore", invalid="ignore"):
                unlike = np.abs(second * deviation[one] - first * deviation[other])
                unlike = unlike > second * limits[one] + first * limits[other]
            found |= (first > 0) & (second > 0) & both & ~(comparable & unlike)
        return found


@dataclass(frozen=True, eq=False)
class Witness:
    """The check of a block, as made from some pieces.

    Parameters
    ----------
    check : ndarray, shape (stripes, 2 * columns)
    parts : frozenset
        What it was made from, with weights: an error of a part that two witnesses have in common
        is the same in both.
    growth : float
        How many roundings it differs by from that of the block, as for
        :class:`~dask_coded.rounds.Verifier`.
    """

    check: npt.NDArray[Any]
    parts: frozenset[Any]
    growth: float = 0.0


def proven(
    witnesses: Sequence[Witness],
    code: Code,
    block: int,
    checks: Sequence[npt.NDArray[Any]],
    bounds: Floats,
    dtype: npt.DTypeLike,
) -> list[Witness]:
    """Return the witnesses with which another one agrees, the most exact first.

    They are compared column by column, because shares are verified as exactly as that.

    Parameters
    ----------
    witnesses : sequence of Witness
    code : Code
    block : int
        That the witnesses are about.
    checks : sequence of ndarray
        The checks of all blocks. That of the block itself does not matter.
    bounds : ndarray, shape (stripes,)
        From :func:`~dask_coded.rounds.verification.size_bounds`.
    dtype : dtype
        Of the pieces.
    """
    weights = np.abs(code.G)
    reach = weights[:, block].max()
    # In pieces that combine blocks, rounding errors are relative to the entries of all these.
    others = np.zeros(sizes_of(checks[block]).shape)
    for row in np.unique(weights, axis=0):
        used = [j for j in np.flatnonzero(row).tolist() if j != block]
        np.maximum(others, sum((row[j] * sizes_of(checks[j]) for j in used), 0.0), out=others)

    def agree(one: Witness, other: Witness) -> bool:
        first, second = sizes_of(one.check), sizes_of(other.check)
        # The smaller one: with too large sizes, a wrong check would agree with any.
        own = np.minimum(first, second)
        growth = one.growth + other.growth
        limit = check_error(growth, dtype, own, others + reach * own, bounds)
        sums = np.abs(sums_of(one.check) - sums_of(other.check))
        return bool((sums <= limit).all() and (np.abs(first - second) <= limit).all())

    agreeing = [
        one
        for one in witnesses
        if any(one.parts.isdisjoint(other.parts) and agree(one, other) for other in witnesses)
    ]
    return sorted(agreeing, key=lambda one: one.growth)
