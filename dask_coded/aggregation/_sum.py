"""Sums of gradients, made in place where that is allowed, with as few copies as possible."""

from __future__ import annotations

from dask_coded.compression import Partial


class Sum:
    """Running sum of partial sums.

    Partial sums that were received are only read (see :class:`~dask_coded.compression.Codec`). The
    first partial sum that may be changed becomes the running sum.
    """

    def __init__(self) -> None:
        self._partial: Partial | None = None
        self._owned = False

    def add(self, partial: Partial, owned: bool = False) -> None:
        """Add a partial sum, which may be changed if it is ``owned``."""
        if self._partial is None:
            self._partial, self._owned = partial, owned
        elif self._owned:
            self._partial.add(partial)
        elif owned:
            partial.add(self._partial)
            self._partial, self._owned = partial, True
        else:
            vector = self._partial.vector + partial.vector
            self._partial = Partial(vector, self._partial.loss + partial.loss)
            self._owned = True

    def take(self) -> Partial:
        """Return the sum without keeping it."""
        partial, self._partial = self._partial, None
        assert partial is not None
        return partial
