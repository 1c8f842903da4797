"""A sum that is made in place where that is allowed, and never copies more than it must."""

from __future__ import annotations

from dask_coded.compression import Partial


class Sum:
    """What has been added up so far.

    A partial sum that came from elsewhere is only read (see
    :class:`~dask_coded.compression.Codec`); the first that may be changed becomes the sum.
    """

    def __init__(self) -> None:
        self._partial: Partial | None = None
        self._owned = False

    def add(self, partial: Partial, owned: bool = False) -> None:
        """Add a partial sum; one that is owned may be changed."""
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
        """The sum, which is given away."""
        partial, self._partial = self._partial, None
        assert partial is not None
        return partial
