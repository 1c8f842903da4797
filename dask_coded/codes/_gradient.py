r"""Gradient codes: which sums of gradients workers compute, so that some need not be waited for.

The data are cut into blocks, of which block ``j`` has the gradient ``g_j``. Worker ``i`` computes
those that its row of ``B`` mentions and delivers one vector, as long as a gradient is,

.. math:: m_i = \sum_j B_{ij} g_j .

From those that have delivered, the sum over *all* blocks follows with decoding weights ``a``:

.. math:: \sum_i a_i m_i = \sum_j g_j \quad\text{if}\quad a^T B = 1^T .

To be without any ``s`` of ``n`` workers, each block must be on ``s + 1`` of them: some worker
computes at least ``(s + 1) / n`` of the data [1]_. What is bought with it is that the slowest ``s``
are not waited for.

References
----------
.. [1] Tandon, Lei, Dimakis and Karampatziakis, "Gradient coding: avoiding stragglers in
   distributed learning", ICML 2017 (arXiv 1612.03301).
.. [2] Raviv, Tamo, Tandon and Dimakis, "Gradient coding from cyclic MDS codes and expander
   graphs", arXiv 1707.03858.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dask_coded.codes._linear import DecodeError
from dask_coded.codes._mds import _whole


class GradientCode:
    """A gradient code given by its matrix.

    Parameters
    ----------
    B : array_like, shape (n, blocks)
        Worker ``i`` delivers ``sum_j B[i, j] * g_j``.
    stragglers : int
        Without how many workers, whichever they are, the sum can be had.

    Attributes
    ----------
    n : int
        Number of workers.
    blocks : int
        Number of equal blocks of the data.
    load : float
        The largest share of the data that a worker computes.
    plain : bool
        Whether all coefficients and decoding weights are 0 or 1: then decoding only chooses and
        adds, so that it loses no digits and does not amplify errors of what was delivered.

    Examples
    --------
    >>> code = GradientCode([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]], stragglers=1)
    >>> code.decodable([0]), code.decodable([0, 2])
    (False, True)
    >>> code.weights([0, 1]).round(6)
    array([ 2., -1.])
    """

    plain: ClassVar[bool] = False

    def __init__(self, B: npt.ArrayLike, stragglers: int) -> None:
        matrix = np.array(B, dtype=np.float64)
        if matrix.ndim != 2 or min(matrix.shape) == 0:
            raise ValueError(
                f"Argument 'B' must be a matrix (workers, blocks), its shape is {matrix.shape}."
            )
        matrix.flags.writeable = False
        self.B: npt.NDArray[np.float64] = matrix
        self.n: int = matrix.shape[0]
        self.blocks: int = matrix.shape[1]
        self.stragglers = _tolerable(stragglers, self.n)

    @property
    def load(self) -> float:
        """The largest share of the data that a worker computes."""
        return float(np.count_nonzero(self.B, axis=1).max() / self.blocks)

    def adds(self, have: Sequence[int], worker: int) -> bool:
        """Whether a worker brings something that those at hand have not brought."""
        return worker not in have

    def decodable(self, have: Sequence[int]) -> bool:
        """Whether the sum follows from what these workers have delivered."""
        try:
            self.weights(have)
        except DecodeError:
            return False
        return True

    def weights(self, have: Sequence[int]) -> npt.NDArray[np.float64]:
        """The decoding weights of workers that have delivered.

        Parameters
        ----------
        have : sequence of int
            Distinct workers, in the order in which they delivered.

        Returns
        -------
        ndarray of float64, shape (len(have),)

        Raises
        ------
        DecodeError
            If the sum does not follow.
        """
        rows = self.B[list(have)]
        weights = np.linalg.lstsq(rows.T, np.ones(self.blocks), rcond=None)[0]
        if not np.allclose(weights @ rows, 1.0, rtol=0, atol=1e-6):
            raise self._undetermined(have)
        return np.asarray(weights)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={self.n}, stragglers={self.stragglers})"

    def _undetermined(self, have: Sequence[int]) -> DecodeError:
        return DecodeError(
            f"The workers {sorted(have)} of {self!r} do not determine the sum: any "
            f"{self.n - self.stragglers} of its workers do."
        )


class FractionalRepetition(GradientCode):
    """Groups of at least ``stragglers + 1`` workers, all of which compute the same block.

    The sum is that of the first of every group: nothing is multiplied, so that no digits are lost,
    and what comes second may be dropped on arrival. More than ``stragglers`` workers may be late
    as long as one of every group is not.

    Parameters
    ----------
    n : int
        Number of workers. Where it is no multiple of ``stragglers + 1``, some groups are larger by
        one: the load is ``1 / (n // (stragglers + 1))``, that of the next smaller multiple.
    stragglers : int
        ``0 <= stragglers < n``.

    Attributes
    ----------
    group : ndarray of int, shape (n,)
        The group, that is the block, of each worker.

    Raises
    ------
    ValueError
        If not ``0 <= stragglers < n``.

    Examples
    --------
    >>> code = FractionalRepetition(n=7, stragglers=1)
    >>> code.group.tolist(), code.load
    ([0, 0, 0, 1, 1, 2, 2], 0.3333333333333333)
    >>> code.weights([6, 5, 0, 3])
    array([1., 0., 1., 1.])
    """

    plain = True

    def __init__(self, n: int, stragglers: int) -> None:
        n = _whole("n", n)
        groups = n // (_tolerable(stragglers, n) + 1)
        self._found(np.repeat(np.arange(groups), _shares(n, groups)))

    @classmethod
    def of(cls, group: npt.ArrayLike) -> FractionalRepetition:
        """The code of given groups, which may differ in size.

        Parameters
        ----------
        group : array_like of int, shape (n,)
            The group of each worker; every one of ``0 … max(group)`` has a member.
        """
        code = cls.__new__(cls)
        code._found(np.asarray(group, dtype=np.intp))
        return code

    def _found(self, group: npt.NDArray[np.intp]) -> None:
        sizes = np.bincount(group)
        if sizes.min() == 0:
            raise ValueError(f"Every group must have a member, group {sizes.argmin()} has none.")
        super().__init__(np.eye(len(sizes))[group], int(sizes.min()) - 1)
        self.group = group

    def adds(self, have: Sequence[int], worker: int) -> bool:
        """Whether nobody of the worker's group is among those at hand."""
        return bool((self.group[list(have)] != self.group[worker]).all())

    def decodable(self, have: Sequence[int]) -> bool:
        """Whether one of every group has delivered."""
        return np.unique(self.group[list(have)]).size == self.blocks

    def weights(self, have: Sequence[int]) -> npt.NDArray[np.float64]:
        """One for the first of every group, zero for the others."""
        first = np.unique(self.group[list(have)], return_index=True)[1]
        if len(first) < self.blocks:
            raise self._undetermined(have)
        weights = np.zeros(len(have))
        weights[first] = 1.0
        return weights


def _shares(whole: int, among: int) -> npt.NDArray[np.intp]:
    """Whole numbers that add up to a whole, as equal as they can be, the larger ones first."""
    return np.asarray(whole // among + (np.arange(among) < whole % among))


def _tolerable(stragglers: int, n: int) -> int:
    stragglers = _whole("stragglers", stragglers)
    if not 0 <= stragglers < n:
        raise ValueError(
            f"Argument 'stragglers' must be at least 0 and less than the number of workers, {n}, "
            f"it is {stragglers}."
        )
    return stragglers
