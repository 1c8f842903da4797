"""Interfaces of gradient compression.

There are two kinds. A *linear* compressor acts once, on each worker's own gradient. The sum of the
compressed gradients is the compressed sum, so linear compression commutes with every aggregation,
including coded ones. A *codec* acts on every message: the receiver unpacks it, adds to it, and
packs the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating[Any]]


def sum_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the dtype in which gradients of a dtype are summed and sent: at least float32.

    Half precision ends at 65504, which a sum over some thousand samples passes although their mean
    is small. It keeps 11 bits, so a sum of 2,000 equal gradients would not grow any more.

    Examples
    --------
    >>> sum_dtype(np.float16), sum_dtype(np.float64)
    (dtype('float32'), dtype('float64'))
    """
    return np.result_type(dtype, np.float32)


@dataclass
class Partial:
    """A partial sum of a step.

    Parameters
    ----------
    vector : ndarray
        A gradient, or a segment or chunk of one, possibly compressed. It is converted to
        :func:`sum_dtype`.
    loss : float
        The loss that belongs to it if this chunk or segment carries the loss, else 0.
    """

    vector: Vector
    loss: float = 0.0

    def __post_init__(self) -> None:
        self.vector = self.vector.astype(sum_dtype(self.vector.dtype), copy=False)

    def read_only(self) -> Partial:
        """Return a read-only view, without a copy."""
        vector = self.vector.view()
        vector.flags.writeable = False
        return Partial(vector, self.loss)

    def add(self, other: Partial, coefficient: float = 1.0) -> None:
        """Add another partial sum times ``coefficient``, in place."""
        if coefficient == 1.0:
            self.vector += other.vector
        else:
            self.vector += self.vector.dtype.type(coefficient) * other.vector
        self.loss += coefficient * other.loss


class Codec:
    """Packs partial sums into messages; the base class leaves them unchanged.

    A packed object may be sent to several nodes, and nodes in one process all receive the same
    object. It is therefore read-only for sender and receivers, and so is the partial sum unpacked
    from it. To change a vector, copy it or add it to a vector that you own.

    Attributes
    ----------
    lossy : bool
        Whether packing loses digits. If so, the codec must not be used with codes that subtract.
    """

    lossy: ClassVar[bool] = False

    def pack(self, partial: Partial) -> Any:
        """Return the packed form, a tuple of arrays and numbers.

        Any other object would be pickled, which costs more than a small message itself.
        """
        return partial.read_only().vector, float(partial.loss)

    def unpack(self, packed: Any) -> Partial:
        """Return the partial sum, which the receiver must not change in place."""
        return Partial(*packed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def nbytes(self, packed: Any) -> int:
        """Return the number of bytes of the vectors in a packed object."""
        vector, _ = packed
        return int(vector.nbytes)


#: The codec that leaves partial sums unchanged.
EXACT = Codec()


class Compressor:
    """One node's linear compressor in one training; the base class leaves gradients unchanged.

    Every node has one and passes it the same sums in the same order. What it learns from them is
    therefore the same on all nodes, bit for bit, without a broadcast.
    """

    def compress(self, step: int, segment: int, vector: Vector) -> Vector:
        """Return the vector that this node contributes to the sum of a step."""
        return vector

    def expand(self, step: int, segment: int, total: Vector) -> Vector:
        """Return the gradient from the compressed sum; called once per step and segment."""
        return total

    def state(self) -> Any:
        """Return the state that a replica needs to join or to resume."""
        return None

    def restore(self, state: Any) -> None:
        """Continue from the state of another replica."""


class Compression:
    """A user's choice of gradient compression; the base class leaves gradients unchanged."""

    @property
    def codec(self) -> Codec:
        """The codec that packs vectors into messages."""
        return self if isinstance(self, Codec) else EXACT

    @property
    def remembers(self) -> bool:
        """Whether a node keeps part of its own gradients from one step to another.

        If so, the compression must not be used with codes that subtract: nodes that missed
        different steps keep different parts, which would not cancel.
        """
        return False

    def compressor(
        self, layers: Sequence[tuple[int, ...]], segments: int, width: int = 1
    ) -> Compressor:
        """Return one node's compressor.

        Parameters
        ----------
        layers : sequence of tuple of int
            Shapes of the layers, in the order in which the gradient concatenates them.
        segments : int
            Number of equal runs (as by ``numpy.array_split``) of the gradient that are compressed
            separately.
        width : int
            Width of the schedule: when step ``t`` is compressed, sums up to step ``t - width`` have
            been expanded, and some nodes may have expanded later ones.
        """
        return Compressor()
