"""Cyclic repetition: uncoded copies of blocks, each of which can compute any row of its block.

::

    block     0   1   2   3   4
    place 0   x   x
    place 1       x   x
    place 2           x   x            n = 5 places, r = 2 copies
    place 3               x   x
    place 4   x               x

Neighbouring places share blocks, so work can move around the ring from slow places to fast ones
although no place holds more than ``r`` of the ``n`` blocks.
"""

from __future__ import annotations

import numpy as np

from dask_coded.arguments import check_redundancy, check_whole
from dask_coded.codes._linear import CODES, Code


@CODES.register("repetition")
class Repetition(Code):
    """Cyclic repetition code: ``r`` plain copies of each of ``n`` blocks on ``n`` places.

    Place ``i`` stores the blocks ``i, i + 1, … i + r - 1`` (modulo ``n``): ``r / n`` of the data.
    Blocks are not mixed, so integers, booleans, sparsity and non-finite values survive exactly.

    Parameters
    ----------
    n : int
        Number of places and of blocks.
    r : int
        Copies of each block, ``1 <= r <= n``; any ``r - 1`` places may be lost.

    Raises
    ------
    ValueError
        If not ``1 <= r <= n``.

    Examples
    --------
    >>> code = Repetition(n=5, r=2)
    >>> code.pieces, code.tolerance, code.exact
    (10, 1, True)
    >>> code.place.tolist(), code.group.tolist()
    ([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [0, 1, 1, 2, 2, 3, 3, 4, 4, 0])
    """

    exact = True

    _proven = True

    def __init__(self, n: int, r: int) -> None:
        n, r = check_whole("n", n, None), check_whole("r", r, None)
        if not 1 <= r <= n:
            raise ValueError(f"Argument 'r' must be between 1 and 'n' = {n}, it is {r}.")
        self.r = r
        place = np.repeat(np.arange(n), r)
        block = (place + np.tile(np.arange(r), n)) % n
        super().__init__(np.eye(n)[block], place=place, group=block, need=np.ones(n))

    @classmethod
    def with_redundancy(cls, n: int, redundancy: int) -> Repetition:
        """Return ``Repetition(n, redundancy + 1)``."""
        return cls(n, check_redundancy(redundancy, n) + 1)

    def __repr__(self) -> str:
        return f"Repetition(n={self.n}, r={self.r})"

    def worst_condition_number(self) -> float:
        """Return exactly 1, because decoding only copies."""
        return 1.0
