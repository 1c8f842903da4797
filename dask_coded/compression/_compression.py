"""What a compression is: a change of the vectors that are added up, or of those on the wire.

There are two kinds. A *linear* compressor acts once, on each worker's own gradient: the sum of the
compressed gradients is the compressed sum, so that it commutes with every aggregation, coded ones
included. A *codec* acts on every hop: what comes in is unpacked, added to, and packed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating[Any]]


@dataclass
class Partial:
    """A part of the sum of a step.

    Parameters
    ----------
    vector : ndarray
        A (segment or chunk of a) gradient, perhaps compressed.
    loss : float
        The loss that belongs to it, in a chunk or segment that carries it; 0 in the others.
    """

    vector: Vector
    loss: float = 0.0

    def read_only(self) -> Partial:
        """The same, without a copy, for those who must not change it."""
        vector = self.vector.view()
        vector.flags.writeable = False
        return Partial(vector, self.loss)

    def add(self, other: Partial, coefficient: float = 1.0) -> None:
        """Add another one, in place."""
        if coefficient == 1.0:
            self.vector += other.vector
        else:
            self.vector += self.vector.dtype.type(coefficient) * other.vector
        self.loss += coefficient * other.loss


class Codec:
    """How a partial sum is packed for one hop; this one leaves it as it is.

    What has been packed may be sent to several nodes, which in one process all get the same object:
    it is read-only for sender and receivers, and so is what it is unpacked to. To own a vector, add
    it to one that is yours, or copy it.

    Attributes
    ----------
    lossy : bool
        Whether packing loses digits: then it must not be used with codes that subtract.
    """

    lossy: ClassVar[bool] = False

    def pack(self, partial: Partial) -> Any:
        """What goes on the wire: a :class:`Partial`, or a tuple of arrays and numbers."""
        return partial.read_only()

    def unpack(self, packed: Any) -> Partial:
        """A partial sum, which the receiver must not change in place."""
        partial: Partial = packed
        return partial

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def nbytes(self, packed: Any) -> int:
        """Bytes of vectors in it."""
        return int(packed.vector.nbytes)


#: Nothing is lost.
EXACT = Codec()


class Compressor:
    """One node's linear compressor in one training: this one leaves gradients as they are.

    All nodes have one each, and hand it the same sums in the same order: what it learns from them
    is the same everywhere, bit for bit, without a broadcast.
    """

    def compress(self, step: int, segment: int, vector: Vector) -> Vector:
        """What of this node's gradient is added up in a step."""
        return vector

    def expand(self, step: int, segment: int, total: Vector) -> Vector:
        """The gradient, from the sum of what was compressed; called once a step and segment."""
        return total

    def state(self) -> Any:
        """What a replica that joins or resumes needs."""
        return None

    def restore(self, state: Any) -> None:
        """Go on from the state of another replica."""


class Compression:
    """What a user chooses: how gradients become smaller; this one leaves them as they are."""

    @property
    def codec(self) -> Codec:
        """How vectors are packed for a hop."""
        return self if isinstance(self, Codec) else EXACT

    @property
    def remembers(self) -> bool:
        """Whether a node keeps something of its own gradients from one step to another.

        Then it must not be used with codes that subtract: nodes that missed different steps keep
        different things, which would not cancel.
        """
        return False

    def compressor(
        self, layers: Sequence[tuple[int, ...]], segments: int, width: int = 1
    ) -> Compressor:
        """One node's compressor.

        Parameters
        ----------
        layers : sequence of tuple of int
            Shapes of the layers that lie one after the other in the gradient.
        segments : int
            Equal runs (by ``numpy.array_split``) of the gradient that are compressed one by one.
        width : int
            Of the schedule: when step ``t`` is compressed, sums up to step ``t - width`` have been
            expanded, and perhaps more of them on some nodes than on others.
        """
        return Compressor()
