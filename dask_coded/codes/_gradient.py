r"""Gradient codes: the sum of all gradients without waiting for the slowest workers.

The data are cut into blocks; block ``j`` has the gradient ``g_j``. Worker ``i`` computes the
gradients of the blocks for which row ``i`` of ``B`` is not zero, and delivers one vector of the
length of a gradient,

.. math:: m_i = \sum_j B_{ij} g_j .

Decoding weights ``a`` combine the delivered vectors into the sum over *all* blocks:

.. math:: \sum_i a_i m_i = \sum_j g_j \quad\text{if}\quad a^T B = 1^T .

To tolerate the loss of any ``s`` of ``n`` workers, each block must be on ``s + 1`` of them, so some
worker computes at least ``(s + 1) / n`` of the data [1]_. In return, no step waits for the slowest
``s`` workers.

References
----------
.. [1] Tandon, Lei, Dimakis and Karampatziakis, "Gradient coding: avoiding stragglers in
   distributed learning", ICML 2017 (arXiv 1612.03301).
.. [2] Raviv, Tamo, Tandon and Dimakis, "Gradient coding from cyclic MDS codes and expander
   graphs", arXiv 1707.03858.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.linalg import block_diag

from dask_coded.arguments import check_whole
from dask_coded.codes._linear import DecodeError
from dask_coded.codes._subsets import k_subsets

#: Cyclic codes with a larger amplification than this lose too many digits and are refused.
_MOST_AMPLIFICATION = 1e6

#: Number of random cyclic codes to choose from for even ``n - s``.
_DRAWS = 16


class GradientCode:
    """A gradient code given by its matrix.

    Parameters
    ----------
    B : array_like, shape (n, blocks)
        Worker ``i`` delivers ``sum_j B[i, j] * g_j``.
    stragglers : int
        Number of workers that may be missing, whichever they are.

    Attributes
    ----------
    n : int
        Number of workers.
    blocks : int
        Number of equal blocks of the data.
    load : float
        The largest fraction of the data that a worker computes.
    plain : bool
        Whether all coefficients and decoding weights are 0 or 1. Decoding then only selects and
        adds vectors, so it loses no digits and does not amplify errors in them.

    Examples
    --------
    >>> code = GradientCode([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]], stragglers=1)
    >>> code.decodable([0]), code.decodable([0, 2])
    (False, True)
    >>> code.weights([0, 1]).round(6)
    array([ 2., -1.])
    """

    plain: bool = False

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
    def fewest(self) -> int:
        """A lower bound: no fewer workers determine the sum, whichever they are."""
        return 1

    @property
    def load(self) -> float:
        """The largest fraction of the data that a worker computes."""
        return float(np.count_nonzero(self.B, axis=1).max() / self.blocks)

    def adds(self, have: Sequence[int], worker: int) -> bool:
        """Return whether a worker contributes something that those in ``have`` do not."""
        return worker not in have

    def deliveries(self) -> Deliveries:
        """Return a record of what is delivered, which has nothing yet."""
        return Deliveries(self)

    def decodable(self, have: Sequence[int]) -> bool:
        """Return whether the vectors of these workers determine the sum."""
        try:
            self.weights(have)
        except DecodeError:
            return False
        return True

    def weights(self, have: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the decoding weights of workers that have delivered.

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
            If these workers do not determine the sum.
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


class Deliveries:
    """Which workers have delivered something that counts.

    Parameters
    ----------
    code : GradientCode

    Attributes
    ----------
    have : list of int
        In the order in which they delivered.
    complete : bool
        Whether their vectors determine the sum.

    Examples
    --------
    >>> found = FractionalRepetition(n=4, stragglers=1).deliveries()
    >>> found.add(0), found.add(1), found.complete
    (True, False, False)
    >>> found.add(3), found.complete, found.have
    (True, True, [0, 3])
    """

    def __init__(self, code: GradientCode) -> None:
        self._code = code
        self.have: list[int] = []
        self.complete = False

    def add(self, worker: int) -> bool:
        """Record that a worker has delivered; return whether that counts."""
        if not self._code.adds(self.have, worker):
            return False
        self.have.append(worker)
        self.complete = self._code.decodable(self.have)
        return True


class _FirstOfGroups(Deliveries):
    """Of each group the first counts, so the others need not be looked at again each time."""

    def __init__(self, code: FractionalRepetition) -> None:
        super().__init__(code)
        self._group, self._groups = code.group, code.blocks
        self._known: set[int] = set()

    def add(self, worker: int) -> bool:
        group = int(self._group[worker])
        if group in self._known:
            return False
        self._known.add(group)
        self.have.append(worker)
        self.complete = len(self._known) == self._groups
        return True


class FractionalRepetition(GradientCode):
    """Groups of at least ``stragglers + 1`` workers; all workers of a group compute the same block.

    Decoding adds the first vector of every group. Nothing is multiplied, so no digits are lost, and
    later vectors of a group may be dropped on arrival. More than ``stragglers`` workers may be late
    as long as one worker of every group is not.

    Parameters
    ----------
    n : int
        Number of workers. If it is not a multiple of ``stragglers + 1``, the remaining workers
        enlarge the groups evenly, and the load is that of the next smaller multiple,
        ``1 / (n // (stragglers + 1))``.
    stragglers : int
        ``0 <= stragglers < n``.

    Attributes
    ----------
    group : ndarray of int, shape (n,)
        The group of each worker, which is also the block that it computes.

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
        n = check_whole("n", n, None)
        groups = n // (_tolerable(stragglers, n) + 1)
        self._found(np.repeat(np.arange(groups), _shares(n, groups)))

    @classmethod
    def of(cls, group: npt.ArrayLike) -> FractionalRepetition:
        """Return the code for given groups, which may differ in size.

        Parameters
        ----------
        group : array_like of int, shape (n,)
            The group of each worker; each of ``0 … max(group)`` must have a member.
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

    @property
    def fewest(self) -> int:
        return self.blocks

    def adds(self, have: Sequence[int], worker: int) -> bool:
        """Return whether no worker of the same group is in ``have``."""
        return bool((self.group[list(have)] != self.group[worker]).all())

    def deliveries(self) -> Deliveries:
        return _FirstOfGroups(self)

    def decodable(self, have: Sequence[int]) -> bool:
        """Return whether at least one worker of every group has delivered."""
        return len(have) >= self.fewest and np.unique(self.group[list(have)]).size == self.blocks

    def weights(self, have: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return one for the first worker of every group, zero for the others."""
        first = np.unique(self.group[list(have)], return_index=True)[1]
        if len(first) < self.blocks:
            raise self._undetermined(have)
        weights = np.zeros(len(have))
        weights[first] = 1.0
        return weights


class CyclicMDS(GradientCode):
    r"""Every worker computes ``stragglers + 1`` blocks, and any ``n - stragglers`` workers suffice.

    The load, ``(stragglers + 1) / n``, is the least possible for any ``n``. The price is precision,
    because coefficients and decoding weights have both signs and grow with ``n``. Up to ``n = 24``,
    sums of vectors in single precision keep about six digits with few stragglers and three with
    many; in double precision the loss does not matter. :class:`FractionalRepetition` loses no
    digits.

    Let ``s`` be the number of stragglers. Row ``i`` is, up to scale, the only vector on the blocks
    ``i, … i + s`` (modulo ``n``) that is orthogonal to ``s`` check vectors. The vector of ones is
    orthogonal to them, too. For odd ``n - s`` the check vectors are the trigonometric vectors with
    the frequencies nearest to ``n / 2``, and ``B`` is the circulant of [1]_ (up to its scale). For
    even ``n - s`` no real circulant exists. The check vectors are then ``s`` random directions in
    the span of the check vectors for ``s + 1`` stragglers; the best of several draws is kept.

    Parameters
    ----------
    n : int
        Number of workers and of blocks.
    stragglers : int
        ``0 <= stragglers < n``.

    Attributes
    ----------
    amplification : float
        How many times larger than the gradients the terms of the decoding sum can be: the largest
        ``sum_i |a_i B_ij|`` over blocks ``j`` and sets of stragglers. If there are more than 3,000
        sets, a fixed sample is taken that includes all runs of neighbouring workers. For odd
        ``n - s`` these runs are the worst sets; for even ``n - s`` rare sets outside the sample may
        lose one to three digits more.

    Raises
    ------
    ValueError
        If not ``0 <= stragglers < n``, or if decoding would lose more than six digits.

    References
    ----------
    .. [1] Raviv, Tamo, Tandon and Dimakis, "Gradient coding from cyclic MDS codes and expander
       graphs", arXiv 1707.03858.

    Examples
    --------
    >>> code = CyclicMDS(n=5, stragglers=2)
    >>> code.B[0].round(3), code.load
    (array([0.618, 1.   , 0.618, 0.   , 0.   ]), 0.6)
    >>> round(code.amplification, 1)
    3.0
    """

    def __init__(self, n: int, stragglers: int) -> None:
        n = check_whole("n", n, None)
        matrix, self.amplification = _cyclic(n, _tolerable(stragglers, n))
        super().__init__(matrix, stragglers)
        if self.amplification > _MOST_AMPLIFICATION:
            raise ValueError(
                f"{self!r} would lose more than six digits in decoding: use FractionalRepetition."
            )

    @property
    def fewest(self) -> int:
        return self.n - self.stragglers

    def adds(self, have: Sequence[int], worker: int) -> bool:
        """Return whether ``have`` does not suffice yet and does not include the worker."""
        return not self.decodable(have) and worker not in have

    def decodable(self, have: Sequence[int]) -> bool:
        """Return whether at least ``n - stragglers`` workers have delivered."""
        return len(have) >= self.fewest


class Clustered(GradientCode):
    """Independent codes side by side: each cluster of workers has its own data and its own code.

    Parameters
    ----------
    codes : sequence of GradientCode
        One code per cluster. Its workers and blocks are numbered after those of the previous
        cluster.

    Examples
    --------
    >>> code = Clustered([CyclicMDS(3, 1), CyclicMDS(4, 1)])
    >>> code.n, code.blocks, code.stragglers
    (7, 7, 1)
    >>> code.decodable([0, 1, 3, 4, 5]), code.decodable([0, 1, 2, 3, 4])
    (True, False)
    """

    def __init__(self, codes: Sequence[GradientCode]) -> None:
        self.codes = tuple(codes)
        super().__init__(
            block_diag(*(code.B for code in self.codes)),
            min(code.stragglers for code in self.codes),
        )
        self.plain = all(code.plain for code in self.codes)
        sizes = [code.n for code in self.codes]
        self._cluster = np.repeat(np.arange(len(sizes)), sizes)
        self._first: list[int] = np.cumsum([0, *sizes]).tolist()

    @property
    def fewest(self) -> int:
        return sum(code.fewest for code in self.codes)

    def adds(self, have: Sequence[int], worker: int) -> bool:
        """Return whether the worker contributes something to its cluster."""
        cluster = int(self._cluster[worker])
        return self.codes[cluster].adds(self._within(have, cluster), worker - self._first[cluster])

    def decodable(self, have: Sequence[int]) -> bool:
        """Return whether every cluster is decodable."""
        return len(have) >= self.fewest and all(
            code.decodable(self._within(have, cluster)) for cluster, code in enumerate(self.codes)
        )

    def weights(self, have: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the decoding weights, computed for each cluster by its code."""
        weights = np.zeros(len(have))
        for cluster, code in enumerate(self.codes):
            mine = self._cluster[list(have)] == cluster
            weights[mine] = code.weights(self._within(have, cluster))
        return weights

    def _within(self, have: Sequence[int], cluster: int) -> list[int]:
        first, last = self._first[cluster], self._first[cluster + 1]
        return [worker - first for worker in have if first <= worker < last]


@lru_cache(maxsize=64)
def _cyclic(n: int, s: int) -> tuple[npt.NDArray[np.float64], float]:
    """Return the matrix of a cyclic code and its amplification."""
    late = _straggler_sets(n, s)
    if (n - s) % 2:
        candidates = [_windows(_trigonometric(n, s))]
    else:
        candidates = [
            _windows(
                np.linalg.qr(np.random.default_rng(seed).standard_normal((s + 1, s)))[0].T
                @ _trigonometric(n, s + 1)
            )
            for seed in range(_DRAWS if s else 1)
        ]
    return min(((B, _amplification(B, late)) for B in candidates), key=lambda found: found[1])


def _trigonometric(n: int, s: int) -> npt.NDArray[np.float64]:
    """Return vectors with frequencies symmetric about ``n / 2``, shape (s, n); for odd n - s."""
    turn = 2 * np.pi * np.arange(n) / n
    rows = [np.cos(n // 2 * turn)] if n % 2 == 0 else []
    for frequency in range((n - s + 1) // 2, (n + 1) // 2):
        rows += [np.cos(frequency * turn), np.sin(frequency * turn)]
    return np.reshape(rows, (s, n))


def _windows(checks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the vectors on ``s + 1`` neighbouring blocks that are orthogonal to ``s`` checks."""
    s, n = checks.shape
    window = (np.arange(n)[:, None] + np.arange(s + 1)) % n
    left_out = np.linalg.svd(checks.T[window].transpose(0, 2, 1))[2][:, -1]
    scale = np.abs(left_out).max(axis=1) * np.sign(left_out[:, 0])
    matrix = np.zeros((n, n))
    np.put_along_axis(matrix, window, left_out / scale[:, None], axis=1)
    return matrix


def _straggler_sets(n: int, s: int) -> npt.NDArray[np.intp]:
    """Return all sets of late workers, or a fixed sample that includes all runs of neighbours."""
    sets = np.array(k_subsets(n, s), dtype=np.intp)
    runs = (np.arange(n)[:, None] + np.arange(s)) % n
    return np.concatenate([runs, sets])


def _amplification(B: npt.NDArray[np.float64], late: npt.NDArray[np.intp]) -> float:
    """Return the largest ``sum_i |a_i B_ij|`` over blocks ``j`` and sets of late workers."""
    n, s = len(B), late.shape[1]
    # Start with decoding weights of all workers. Adding a null vector of B.T does not change the
    # decoded sum, so add the one that makes the weights of the late workers zero.
    full = np.linalg.lstsq(B.T, np.ones(n), rcond=None)[0]
    idle = np.linalg.svd(B)[0][:, n - s :]
    try:
        moved = np.linalg.solve(idle[late], -full[late][:, :, None])[:, :, 0]
    except np.linalg.LinAlgError:
        return np.inf
    return float((np.abs(full + moved @ idle.T) @ np.abs(B)).max())


def _shares(whole: int, among: int) -> npt.NDArray[np.intp]:
    """Split a whole number into whole numbers that are as equal as possible, larger ones first."""
    return np.asarray(whole // among + (np.arange(among) < whole % among))


def _tolerable(stragglers: int, n: int) -> int:
    stragglers = check_whole("stragglers", stragglers, None)
    if not 0 <= stragglers < n:
        raise ValueError(
            f"Argument 'stragglers' must be at least 0 and less than the number of workers ({n}), "
            f"it is {stragglers}."
        )
    return stragglers
