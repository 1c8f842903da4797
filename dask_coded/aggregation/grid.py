r"""Sums of gradients with the same bits in any order and grouping: integers on a grid.

Floating-point sums depend on the order of their terms, so a training would depend on which worker
computes what. Here the gradient of each *unit* of a step is rounded to integers on a grid, and
integers are added. A grid belongs to a block of at most 4,096 entries of one layer and is a power
of two, so that scaling is exact. With ``U`` units in a step, ``L = ceil(log2 U)`` and the largest
entry ``M`` that any unit had in the block, rounded up to a power of two, it is

.. math:: g = M \, 2^{L + 3 - 31}.

The rounded entries of a unit are below :math:`2^{31 - L}` even if they are eight times as large as
``M``, so every partial sum of a step fits into 32 bits. The sum of a step is off by at most
``U g / 2``.

``M`` is predicted: it is the largest in the last 16 steps. A unit whose entries do not fit
*overflows*. Then the step is computed for its peaks only and done again on the grid of its own
peaks, on which it fits. Both decisions depend on the units alone. The first step of a training has
no history and is always computed twice.

Peaks are exponents and are combined by the maximum, which is as free of order as the sum. They are
part of what workers send beside their sums, and their history is part of a replica's state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_whole
from dask_coded.compression import sum_dtype
from dask_coded.typing import Ints

#: One exponent per block.
Exponents = npt.NDArray[np.int16]
#: What is summed.
Integers = npt.NDArray[np.int32]

#: Entries of a block. NumPy takes a third of a microsecond for each row of blocks in each of four
#: passes, so a unit of 1.3 million entries takes 1.4 times as long to round with 1,024.
BLOCK = 4096
#: Steps whose peaks predict the next one.
STEPS = 16
#: The peak of a block of zeros: the smallest, so that any other one counts.
NO_ENTRY = np.int16(np.iinfo(np.int16).min)
#: The peak of a block with NaN or infinity: the largest, so that it marks the sum.
NOT_FINITE = np.int16(np.iinfo(np.int16).max)

# A unit may be this many bits larger than any before.
_HEADROOM = 3
# Bits of a sum without its sign.
_BITS = 31
# Powers of two up to these are normal numbers, and so are their inverses.
_LARGEST = {np.dtype(np.float32): 126, np.dtype(np.float64): 1022}
# Blocks that are rounded at once, so that their entries stay in a processor's cache through all
# passes over them. With half as many it takes 1.1 times as long.
_AT_ONCE = 16


class _Slab(NamedTuple):
    """Blocks of equal length that lie one after the other in one layer."""

    entries: slice
    blocks: slice
    shape: tuple[int, int]


class GridBlocks:
    """How the layers of a gradient are cut into blocks.

    Parameters
    ----------
    layers : sequence of tuple of int
        Shapes of the layers that lie one after the other in the gradient.

    Attributes
    ----------
    entries : int
        Of all layers.
    lengths : ndarray of int, shape (blocks,)
        Number of entries of each block.

    Examples
    --------
    >>> blocks = GridBlocks([(300, 30), (30,)])
    >>> blocks.entries, blocks.lengths.tolist()
    (9030, [4096, 4096, 808, 30])
    """

    def __init__(self, layers: Sequence[tuple[int, ...]]) -> None:
        self.slabs: list[_Slab] = []
        firsts, entry, block = [], 0, 0
        for layer in layers:
            left = int(np.prod(layer, dtype=np.int64))
            if left:
                firsts.append(block)
            while left:
                rows = min(left // BLOCK, _AT_ONCE) or 1
                width = min(left, BLOCK)
                stop = entry + rows * width
                self.slabs.append(
                    _Slab(slice(entry, stop), slice(block, block + rows), (rows, width))
                )
                left -= rows * width
                entry, block = stop, block + rows
        self.entries = entry
        self.lengths: Ints = np.repeat(
            [slab.shape[1] for slab in self.slabs], [slab.shape[0] for slab in self.slabs]
        )
        self._firsts = np.array(firsts, dtype=np.intp)

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.lengths)

    def largest_of_layers(self, peaks: Exponents) -> Exponents:
        """Return the largest peak of each block's layer, shape (blocks,)."""
        if not len(self):
            return peaks
        largest = np.maximum.reduceat(peaks, self._firsts)
        return np.repeat(largest, np.diff(self._firsts, append=len(self)))


class Grid:
    """The grid of one step.

    Parameters
    ----------
    blocks : GridBlocks
    largest : ndarray of int16, shape (blocks,)
        Exponent ``e`` of each block, so that entries of units are expected below ``2**e``.
    units : int
        Number of units of the step.
    dtype : dtype
        In which gradients are computed and their sums returned, at least float32.

    Attributes
    ----------
    exponents : ndarray of int16, shape (blocks,)
        The grid of each block is ``2**exponent``.

    Raises
    ------
    ValueError
        If there are too many units for sums of 32 bits.

    Examples
    --------
    >>> blocks = GridBlocks([(3,)])
    >>> units = np.float32([[0.25, 3.0, -1e-9], [0.5, -2.0, 1e9]])
    >>> grid = Grid(blocks, peaks_of(blocks, units[0]), units=2, dtype=np.float32)
    >>> total = grid.zeros()
    >>> peaks = grid.fold(units[0], total)
    >>> grid.fits(peaks), grid.restored(total)
    (True, array([0.25, 3.  , 0.  ], dtype=float32))
    >>> grid.fits(grid.fold(units[1], total))
    False
    """

    def __init__(
        self, blocks: GridBlocks, largest: Exponents, units: int, dtype: npt.DTypeLike
    ) -> None:
        check_whole("units", units)
        bits = (units - 1).bit_length()  # by which a sum can be larger than a unit
        if bits + _HEADROOM >= _BITS - 1:
            raise ValueError(
                f"Sums of 32 bits hold at most {1 << _BITS - _HEADROOM - 2} units, there are "
                f"{units}: make units larger."
            )
        self.blocks = blocks
        self.dtype = sum_dtype(dtype)
        limit = _LARGEST[self.dtype]
        self.exponents: Exponents = np.clip(
            largest.astype(np.int32) + (bits + _HEADROOM - _BITS), -limit, limit
        ).astype(np.int16)
        self._unit_bits = _BITS - bits
        # Entries from here on are rounded to more than a unit may have.
        self._bound = float(1 << self._unit_bits) - 0.5
        exponents = self.exponents.astype(np.int32)
        self._up = np.ldexp(self.dtype.type(1), -exponents)[:, None]
        self._down = np.ldexp(self.dtype.type(1), exponents)[:, None]
        self._scaled = np.empty(_AT_ONCE * BLOCK, self.dtype)

    def zeros(self) -> Integers:
        """Return a sum of no units."""
        return np.zeros(self.blocks.entries, np.int32)

    def rounded(
        self, gradient: npt.NDArray[Any], out: Integers | None = None
    ) -> tuple[Integers, Exponents]:
        """Return the gradient of a unit in integers, and its peaks.

        Parameters
        ----------
        gradient : ndarray, shape (entries,)
        out : ndarray of int32, shape (entries,), optional
            Where to write the integers.

        Returns
        -------
        integers : ndarray of int32, shape (entries,)
            Of no use if the unit does not fit, see :meth:`fits`.
        peaks : ndarray of int16, shape (blocks,)
        """
        integers = np.empty(self.blocks.entries, np.int32) if out is None else out
        peaks = np.empty(len(self.blocks), self.dtype)
        fits = True
        with np.errstate(over="ignore"):  # on a grid that is far too fine
            for entries, blocks, shape in self.blocks.slabs:
                size = shape[0] * shape[1]
                scaled = self._scaled[:size].reshape(shape)
                np.multiply(gradient[entries].reshape(shape), self._up[blocks], out=scaled)
                np.maximum(scaled.max(axis=1), -scaled.min(axis=1), out=peaks[blocks])
                # NaN is not below the bound, and neither is infinity.
                fits = fits and bool(peaks[blocks].max() < self._bound)
                if fits:
                    np.rint(scaled, out=scaled)
                    np.copyto(integers[entries], scaled.reshape(size), casting="unsafe")
        # A peak that was rounded up to the next power of two counts as that, see `_bound`.
        np.maximum(peaks, np.rint(peaks), out=peaks)
        return integers, _exponents(peaks, self.exponents)

    def fold(self, gradient: npt.NDArray[Any], total: Integers) -> Exponents:
        """Round the gradient of a unit and add it to a sum, in place; return its peaks.

        Parameters
        ----------
        gradient : ndarray, shape (entries,)
        total : ndarray of int32, shape (entries,)
            Not changed if the unit does not fit, see :meth:`fits`.

        Returns
        -------
        ndarray of int16, shape (blocks,)
        """
        integers, peaks = self.rounded(gradient)
        if self.fits(peaks):
            total += integers
        return peaks

    def fits(self, peaks: Exponents) -> bool:
        """Whether units of these peaks, or of lower ones in each block, have been rounded.

        Peaks of several units are combined by ``np.maximum``.
        """
        return bool((peaks <= self.exponents.astype(np.intp) + self._unit_bits).all())

    def restored(self, total: Integers, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return a sum in floating point, in the dtype of the gradients, shape (entries,)."""
        if out is None:
            out = np.empty(total.shape, self.dtype)
        # Each integer is rounded to the dtype first, because scaling is exact. In one pass, so that
        # the numbers are in a processor's cache for both.
        exact: Any = {"dtype": self.dtype, "casting": "unsafe"}
        for entries, blocks, shape in self.blocks.slabs:
            part = out[entries].reshape(shape)
            np.multiply(total[entries].reshape(shape), self._down[blocks], out=part, **exact)
        return out


def peaks_of(blocks: GridBlocks, gradient: npt.NDArray[Any]) -> Exponents:
    """Return for each block the exponent ``e`` with ``2**(e - 1) <= largest entry < 2**e``.

    Parameters
    ----------
    blocks : GridBlocks
    gradient : ndarray, shape (entries,)

    Returns
    -------
    ndarray of int16, shape (blocks,)
        :data:`NO_ENTRY` for zeros, :data:`NOT_FINITE` for a block with NaN or infinity.

    Examples
    --------
    >>> peaks_of(GridBlocks([(2,), (2,), (1,)]), np.array([1.0, -3.0, 0.0, 0.0, np.nan]))
    array([     2, -32768,  32767], dtype=int16)
    """
    peaks = np.empty(len(blocks), sum_dtype(gradient.dtype))
    for entries, at, shape in blocks.slabs:
        part = gradient[entries].reshape(shape)
        np.maximum(part.max(axis=1), -part.min(axis=1), out=peaks[at])
    return _exponents(peaks)


def _exponents(peaks: npt.NDArray[Any], grid: Exponents | None = None) -> Exponents:
    """Return the exponents of largest entries, given in units of a grid if there is one."""
    shift = 0 if grid is None else grid
    exponents: Exponents = (np.frexp(peaks)[1] + shift).astype(np.int16)
    exponents[peaks == 0] = NO_ENTRY
    exponents[~np.isfinite(peaks)] = NOT_FINITE
    return exponents


class PeakHistory:
    """The peaks of the last steps, from which the next grid is predicted.

    It is part of a replica's state: replicas whose histories differ would have different grids.

    Parameters
    ----------
    blocks : GridBlocks

    Examples
    --------
    >>> blocks = GridBlocks([(2,)])
    >>> history = PeakHistory(blocks)
    >>> history.predicted() is None
    True
    >>> history.record(peaks_of(blocks, np.array([1.0, 5.0])), step=0)
    >>> history.predicted()
    array([3], dtype=int16)
    """

    def __init__(self, blocks: GridBlocks) -> None:
        self._blocks = blocks
        self._steps: deque[Exponents] = deque(maxlen=STEPS)

    def predicted(self) -> Exponents | None:
        """Return the largest peak of each block, shape (blocks,), or None before the first step.

        A block that had no entry, such as a row of an embedding that no sample has used, counts as
        large as the largest block of its layer. Otherwise its first entry would overflow.
        """
        if not self._steps:
            return None
        largest: Exponents = np.maximum.reduce(list(self._steps))
        return np.where(largest == NO_ENTRY, self._blocks.largest_of_layers(largest), largest)

    def record(self, peaks: Exponents, step: int) -> None:
        """Record the largest peaks of all units of a step, once its sum is complete.

        Raises
        ------
        FloatingPointError
            If a unit had NaN or infinity. All replicas raise it, because they have the same peaks.
        """
        if (peaks == NOT_FINITE).any():
            raise FloatingPointError(
                f"The gradient of step {step} contains NaN or infinity: lower the learning rate, "
                f"or check the gradient function and the data."
            )
        self._steps.append(peaks)

    def state(self) -> Exponents:
        """Return what a joining replica needs, shape (steps, blocks)."""
        return np.array(self._steps, dtype=np.int16).reshape(-1, len(self._blocks))

    def restore(self, state: Exponents) -> None:
        """Continue from the state of another replica.

        That of a version of this package with other blocks is no history.
        """
        known = state.shape[1:] == (len(self._blocks),)
        self._steps = deque(state.astype(np.int16) if known else (), maxlen=STEPS)
