"""Codecs that pack the vector of every message in fewer bits.

Digits that a message rounds away are lost, and a sum that travels around a ring of ``p`` workers is
packed ``p`` times. Both codecs round to nearest, so errors have random signs and grow with the
square root of ``p``. Dropping the low bits instead, that is, rounding toward zero, makes every
partial sum smaller, so errors grow in proportion to ``p``. Relative error of the sum of Gaussian
gradients, as in the tests:

======================================  =====  =====  =====  =====
``p``                                   2      8      32     64
======================================  =====  =====  =====  =====
low bits dropped (not offered)          0.005  0.015  0.052  0.099
:class:`Truncation`                     0.002  0.004  0.007  0.009
:class:`Quantization`, one scale        0.011  0.020  0.035  0.050
:class:`Quantization`, blocks of 256    0.009  0.015  0.028  0.038
======================================  =====  =====  =====  =====

References
----------
.. [1] Y. Li, M. Yu, S. Li, S. Avestimehr, N. S. Kim, A. Schwing, "Pipe-SGD: A decentralized
       pipelined SGD framework for distributed deep net training", NeurIPS 2018, arXiv:1811.03619.
       Proposes both codecs, inside the ring; the figures above are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_whole
from dask_coded.compression._compression import Codec, Compression, Partial, Vector

_QUIET_NAN = np.uint16(0x7FC0)


@dataclass(frozen=True)
class Truncation(Codec, Compression):
    """Round to bfloat16: the upper 16 bits of float32, to nearest, ties to even.

    Vectors take half the bytes of float32. The range is that of float32, with 8 significant bits:
    one packing changes a number by at most 1 part in 256. Numbers that need no more bits, including
    zeros of either sign, are unchanged.

    Infinities and NaN are preserved. Numbers that are too large for the format become infinite, as
    in any rounding to nearest. Numbers below float32's normal range lose more digits.

    Examples
    --------
    >>> import numpy as np
    >>> codec = Truncation()
    >>> packed = codec.pack(Partial(np.array([1.0, -0.1, 3e-20], dtype=np.float32)))
    >>> codec.nbytes(packed), codec.unpack(packed).vector
    (6, array([ 1.00000000e+00, -1.00097656e-01,  3.00696696e-20], dtype=float32))
    """

    lossy: ClassVar[bool] = True

    def pack(self, partial: Partial) -> Any:
        """Return ``(bits, dtype, loss)``, bits of type uint16."""
        return _upper_half(partial.vector), partial.vector.dtype.str, partial.loss

    def unpack(self, packed: Any) -> Partial:
        """Return a partial sum of the dtype that was packed."""
        upper, dtype, loss = packed
        bits = upper.astype(np.uint32)
        bits <<= 16
        return Partial(bits.view(np.float32).astype(dtype, copy=False), loss)

    def nbytes(self, packed: Any) -> int:
        """Return the packed size in bytes: 2 per number."""
        return int(packed[0].nbytes)


def _upper_half(vector: Vector) -> npt.NDArray[np.uint16]:
    with np.errstate(over="ignore"):  # float64 beyond float32's range becomes infinite
        single = np.ascontiguousarray(vector, dtype=np.float32)
    bits = single.view(np.uint32)
    # Add half of the dropped range, less one if the last kept bit is 0, so that ties go to even. A
    # carry into the exponent correctly rounds up to the next power of 2.
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    upper = rounded.astype(np.uint16)
    if np.isnan(single).any():  # a carry would change NaN into another number
        upper[np.isnan(single)] = _QUIET_NAN
    return upper


@dataclass(frozen=True)
class Quantization(Codec, Compression):
    """Round to integers of 8 or 16 bits, evenly spaced up to the largest number of each block.

    A number ``x`` of a block becomes ``rint(x / scale)``, where ``scale`` is the largest magnitude
    of the block divided by 127 (32767 for 16 bits). One packing changes a number by at most half a
    scale, regardless of its size.

    A block that contains NaN or infinity is unpacked as NaN throughout, so that divergence of the
    training is noticed. A block whose largest magnitude is below 127 (32767) times the least normal
    number becomes zero.

    Parameters
    ----------
    bits : int
        8 or 16. With 16, the error of sums of Gaussian gradients is a sixtieth of that of
        :class:`Truncation`. For numbers far below the largest of their block, :class:`Truncation`
        is more accurate.
    block : int
        How many numbers share a scale, which costs 4 bytes (8 for float64). Smaller blocks adapt
        better to layers whose gradients differ in size.

    Raises
    ------
    ValueError
        If ``bits`` is neither 8 nor 16, or ``block`` is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> codec = Quantization()
    >>> packed = codec.pack(Partial(np.array([1.27, -0.5, 0.004], dtype=np.float32)))
    >>> codec.nbytes(packed), codec.unpack(packed).vector.round(4)
    (7, array([ 1.27, -0.5 ,  0.  ], dtype=float32))
    """

    bits: int = 8
    block: int = 256

    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if check_whole("bits", self.bits) not in (8, 16):
            raise ValueError(f"Argument 'bits' must be 8 or 16, it is {self.bits}.")
        check_whole("block", self.block)

    def pack(self, partial: Partial) -> Any:
        """Return ``(levels, scales, dtype, loss)``: integers, and a scale per block."""
        blocks = self._blocks(partial.vector)
        kind = blocks.dtype.type
        top = 2 ** (self.bits - 1) - 1
        # Slightly less than 1 / top, so that top * scale is finite if the largest number is.
        scales = np.abs(blocks).max(axis=1, initial=0) * np.nextafter(kind(1 / top), kind(0))
        scales[scales < np.finfo(kind).tiny] = 0  # a subnormal scale would lose digits
        scales[np.isinf(scales)] = np.nan
        inverse = np.zeros_like(scales)
        np.divide(1, scales, out=inverse, where=scales > 0)
        with np.errstate(invalid="ignore"):  # NaN has no level, but its block's scale is NaN
            scaled = blocks * inverse[:, None]
            np.rint(scaled, out=scaled)
            levels = scaled.astype(np.dtype(f"i{self.bits // 8}"))
        levels = levels.ravel()[: len(partial.vector)]
        return levels, scales, partial.vector.dtype.str, partial.loss

    def unpack(self, packed: Any) -> Partial:
        """Return a partial sum of the dtype that was packed."""
        levels, scales, dtype, loss = packed
        blocks = self._blocks(levels.astype(scales.dtype))
        blocks *= scales[:, None]
        return Partial(blocks.ravel()[: len(levels)].astype(dtype, copy=False), loss)

    def nbytes(self, packed: Any) -> int:
        """Return the packed size in bytes: 1 or 2 per number, plus the scales."""
        levels, scales, *_ = packed
        return int(levels.nbytes + scales.nbytes)

    def _blocks(self, vector: Vector) -> Vector:
        """Return the vector as rows of one block each, the last padded with zeros."""
        missing = -len(vector) % self.block
        filled = np.pad(vector, (0, missing)) if missing else vector
        return filled.reshape(-1, self.block)
