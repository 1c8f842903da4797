r"""Random linear codes over the reals: sparse parity that is cheap to build and nearly as safe.

Every parity piece of an MDS code combines all blocks, so each of the ``n - k`` workers that build
one fetches all ``k`` blocks: ``k (n - k)`` blocks in all. MDS codes need that many: if a block were
in fewer than ``n - k`` parity pieces, losing the block and these pieces would lose its data. In a
random linear network code (RLNC) [1]_ a fraction ``density`` of the coefficients is drawn and the
others are zero, so about that fraction of the ``k (n - k)`` blocks is moved. The price is that some
sets of ``k`` pieces do not decode.

The zeros determine which sets decode. Let ``N(L)`` be the parity pieces that contain any of the
lost blocks ``L``. With coefficients drawn from a continuous distribution, the rank of a matrix is,
with probability 1, the size of the largest matching of rows to columns through its non-zeros. By
Hall's theorem, a loss therefore decodes if and only if

.. math:: |N(L') \setminus \text{lost}| \ge |L'| \quad \text{for every subset } L' \text{ of } L.

The smallest loss that does not decode is a block with all parity pieces that contain it. Therefore
**any** ``f`` **losses decode if and only if every block is in at least** ``f`` **parity pieces**.
Masks drawn at random leave some blocks in few parity pieces, or in none. The masks here are
balanced: every block is in ``density (n - k)`` parity pieces, rounded up or down. Of several draws,
the one that decodes the most sets of ``k`` pieces without losing digits is kept.

References
----------
.. [1] Lin, Narra, Yu, Avestimehr and Annavaram, arXiv 1910.10283 (only the abstract was
   available: half of the traffic of MDS codes).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_redundancy, check_whole
from dask_coded.codes._linear import CODES, Code
from dask_coded.codes._subsets import k_subsets, smallest_of_minors

Floats = npt.NDArray[np.float64]

# More draws hardly increase the number of sets that decode; these keep the search below a second.
_DRAWS = 24
_SUBSETS = 400
# Decoding from a set of pieces with a smaller singular value than this loses digits.
_SOUND = 1e-2


@CODES.register("random")
class RandomLinear(Code):
    """Systematic random linear network code: most of the safety of MDS for part of its traffic.

    The first ``k`` pieces are the blocks themselves. Each of the others is a sparse random
    combination of about ``density * k`` blocks, which its worker fetches from the workers that hold
    them. Coefficients are computed from a seed on every node, so none are sent. Like MDS codes,
    this code is for floating-point and complex data.

    Parameters
    ----------
    n : int
        Number of pieces.
    k : int
        Number of blocks, ``1 <= k <= n``. Fewer than ``k`` pieces never suffice.
    density : float
        Fraction of the parity coefficients that are not zero, above 0 and at most 1. With 1, any
        ``k`` pieces suffice, as with :class:`MDS`.
    seed : int
        Seed of the random coefficients, at least 0.

    Attributes
    ----------
    density : float
    seed : int
    tolerance : int
        Number of pieces that may be lost, whichever they are. It is the least number of parity
        pieces that a block is in, ``density * (n - k)`` rounded down. For larger losses,
        :meth:`decode_probability` returns the probability that a loss decodes, and
        :meth:`decodable` whether a given set of pieces does.

    Raises
    ------
    TypeError
        If ``n``, ``k`` or ``seed`` is not an integer.
    ValueError
        If not ``1 <= k <= n``, or ``density`` or ``seed`` is out of range.

    Notes
    -----
    Deterministic: the same arguments give the same generator on every machine.

    Examples
    --------
    >>> code = RandomLinear(n=20, k=16)
    >>> code.tolerance
    2
    >>> [round(code.decode_probability(f).probability, 2) for f in (2, 3, 4)]
    [1.0, 0.96, 0.7]
    >>> int((code.G[16:] != 0).sum()), 16 * 4  # blocks fetched here, and with MDS
    (32, 64)
    """

    threshold = False

    def __init__(self, n: int, k: int, density: float = 0.5, seed: int = 0) -> None:
        n, k = check_whole("n", n, None), check_whole("k", k)
        seed = check_whole("seed", seed, 0)
        if n < k:
            raise ValueError(f"Argument 'n' must be at least 'k', {n} is less than {k}.")
        if not 0 < density <= 1:
            raise ValueError(f"Argument 'density' must be above 0 and at most 1, it is {density}.")
        self.density = float(density)
        self.seed = seed
        super().__init__(_generator(n, k, self.density, seed))

    @classmethod
    def with_redundancy(cls, n: int, redundancy: int) -> RandomLinear:
        """Build the code of density 1/2 that survives the loss of any ``redundancy`` pieces.

        The code has ``2 * redundancy`` parity pieces, and moves as many blocks as an MDS code with
        ``redundancy`` parity pieces and the same ``k``.

        Raises
        ------
        ValueError
            If ``n`` is not more than ``2 * redundancy``, or ``redundancy`` is negative.
        """
        return cls(n, n - 2 * check_redundancy(redundancy, n, losses=2))

    def extended(self, count: int = 1) -> RandomLinear:
        """Return a code with more pieces, for workers that have joined; existing pieces are kept.

        Each new piece combines ``density * k`` blocks, preferring the blocks that are in the fewest
        pieces.

        Parameters
        ----------
        count : int
            Number of new pieces, at least 1.

        Returns
        -------
        RandomLinear
            With ``n + count`` pieces.

        Examples
        --------
        >>> code = RandomLinear(10, 7)
        >>> larger = code.extended(2)
        >>> larger, bool((larger.G[:10] == code.G).all())
        (RandomLinear(n=12, k=7, density=0.5), True)
        """
        count = check_whole("count", count)
        G = self.G
        for piece in range(self.n, self.n + count):
            rng = np.random.default_rng((self.seed, piece))
            times = np.count_nonzero(G, axis=0)
            lightest = np.lexsort((rng.random(self.k), times))
            mask = np.zeros((1, self.k), dtype=bool)
            mask[0, lightest[: max(1, round(self.density * self.k))]] = True
            G = np.vstack([G, _coefficients(mask, rng)])
        grown = type(self).__new__(type(self))
        grown.density, grown.seed = self.density, self.seed
        Code.__init__(grown, G)
        return grown

    @property
    def tolerance(self) -> int:
        """Number of pieces that may be lost, whichever they are."""
        return int(np.count_nonzero(self.G[self.k :], axis=0).min())

    def __repr__(self) -> str:
        seed = "" if self.seed == 0 else f", seed={self.seed}"
        return f"RandomLinear(n={self.n}, k={self.k}, density={self.density:g}{seed})"


@lru_cache(maxsize=64)
def _generator(n: int, k: int, density: float, seed: int) -> Floats:
    if n == k:
        return np.eye(k)
    subsets = [s for s in k_subsets(n, k, limit=_SUBSETS) if s[-1] >= k]

    def quality(parity: Floats) -> tuple[int, float]:
        smallest = smallest_of_minors(parity, subsets)
        sound = smallest[smallest > _SOUND]
        return len(sound), float(sound.min(initial=1.0))

    candidates = (_parity(n - k, k, density, seed, draw) for draw in range(_DRAWS))
    return np.vstack([np.eye(k), max(candidates, key=quality)])


def _parity(rows: int, k: int, density: float, seed: int, draw: int) -> Floats:
    """Return parity whose non-zeros are spread evenly over rows and over columns."""
    rng = np.random.default_rng((seed, draw))
    total = max(round(rows * k * density), rows)
    times = np.full(k, total // k)
    times[rng.permutation(k)[: total % k]] += 1
    mask = np.zeros((rows, k), dtype=bool)
    for block in rng.permutation(k).tolist():
        # Take the rows with the fewest blocks so far, ties in random order. Few blocks then share
        # the same rows, which matters because a loss of too many such blocks does not decode.
        lightest = np.lexsort((rng.random(rows), mask.sum(axis=1)))
        mask[lightest[: times[block]], block] = True
    return _coefficients(mask, rng)


def _coefficients(mask: npt.NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """Return random numbers where the mask is set, with rows of norm one.

    Before scaling, magnitudes are between 1/2 and 3/2; signs are random. Such numbers are as safe
    as Gaussian numbers and better conditioned, because some Gaussian numbers are nearly zero.
    Coefficients of one would often cancel.
    """
    values = rng.choice([-1.0, 1.0], mask.shape) * rng.uniform(0.5, 1.5, mask.shape) * mask
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True))
