"""Which workers hold the pieces of an array, and which of them a round may use."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.rounds import Layout
from dask_coded.typing import Bools


class Held(NamedTuple):
    """Workers with pieces, and the layout of a round over them.

    Attributes
    ----------
    addresses : list of str
        Workers with pieces, sorted.
    host : list of int
        For each piece the position of its worker, -1 without one.
    layout : Layout
    """

    addresses: list[str]
    host: list[int]
    layout: Layout

    @classmethod
    def by(cls, holders: Sequence[str | None], code: Code, work: npt.ArrayLike) -> Self:
        """Create one from the holder of each piece, None without one.

        Examples
        --------
        >>> from dask_coded.codes import MDS
        >>> held = Held.by(["b", None, "a"], MDS(3, 2), [1.0, 1.0])
        >>> held.addresses, held.host, held.suffices
        (['a', 'b'], [1, -1, 0], True)
        """
        addresses = sorted({address for address in holders if address})
        number = {address: i for i, address in enumerate(addresses)}
        host = [number.get(address or "", -1) for address in holders]
        return cls(addresses, host, Layout.of(code, host, work))

    @property
    def suffices(self) -> bool:
        """Whether the pieces that workers hold determine all products."""
        return self.suffices_with(self.layout.host >= 0)

    def suffices_with(self, usable: Bools) -> bool:
        """Whether these pieces determine all products."""
        return not self.layout.lacking(usable[:, None]).any()

    def trusted(
        self,
        trusts: Callable[[str], bool],
        suspects: Container[str],
        code: Code,
        work: npt.ArrayLike,
    ) -> Self:
        """Leave out workers that have computed wrongly, if those that answer suffice without."""
        host = [w if w < 0 or trusts(self.addresses[w]) else -1 for w in self.host]
        if host == self.host:
            return self
        without = type(self)(self.addresses, host, Layout.of(code, host, work, len(self.addresses)))
        answers = np.array([w >= 0 and self.addresses[w] not in suspects for w in host])
        return without if without.suffices_with(answers) else self
