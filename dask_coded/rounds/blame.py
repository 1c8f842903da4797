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

**Checks.** A disputed check is made again, from the rows of several workers in turn, until two of
these *witnesses* agree. The check that a worker holds was made from the block, so the two are not
independent: if the block was wrong before, both are wrong alike. Others may be decoded from sets
that have pieces in common, as long as these pieces have other weights in each: then an error in one
would not be the same in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
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
    deviation : ndarray, shape (pieces, stripes)
        By how much shares contradict them, in a unit that all shares of the round have in common;
        zero where none does.
    limits : ndarray, shape (pieces,)
        What shares may deviate by, in the same unit. A smaller error of a check is not found.

    Examples
    --------
    >>> from dask_coded.codes import MDS
    >>> computed, deviation = np.zeros((4, 1), dtype=bool), np.zeros((4, 1))
    >>> computed[1] = True  # the check of block 1 is right
    >>> deviation[[0, 2]] = 1.0
    >>> found = Evidence(MDS(4, 2), computed, deviation, np.full(4, 1e-12))
    >>> found.disputed(), found.to_blame(), found.to_blame(right=[0])
    ({0}, [], [0, 2])
    """

    code: Code
    computed: Bools
    deviation: Floats
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
        most = np.zeros((self.code.k, self.computed.shape[1]))
        for piece in np.flatnonzero(self.computed.any(axis=1)).tolist():
            most = np.maximum(most, shown[piece, :, None] * self.computed[piece])
        for piece in np.flatnonzero(self.deviation.any(axis=1)).tolist():
            relies, size = weights[piece, :, None], self.deviation[piece]
            error = np.clip(size - self.limits[piece], 0, 1 / tiny)
            with np.errstate(over="ignore"):
                yield piece, (relies > 0) & (size > 0) & (most * error <= relies)


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
