r"""Polynomial codes: the product of two matrices from any ``k`` of ``n`` products of their pieces.

The columns of ``A`` are cut into ``a`` blocks, those of ``B`` into ``b``. Worker ``i`` holds two
combinations and multiplies them:

.. math::

   \Big(\sum_j L_{ij} A_j\Big)^T \Big(\sum_l R_{il} B_l\Big)
   = \sum_{j,l} L_{ij} R_{il} \, A_j^T B_l

This is a linear code over the ``k = a b`` blocks of ``A.T @ B``, with the generator
``G[i, (j, l)] = L[i, j] R[i, l]``. The same holds for ``A.T @ diag(d) @ B``.

With ``L[i, j] = x_i^j`` and ``R[i, l] = x_i^{a l}`` the generator is a Vandermonde matrix [1]_, any
``k`` rows of which are independent. With real nodes ``x_i`` it is too ill-conditioned for floating
point. With roots of unity it is much better conditioned, but complex. The code here is its real
form. Let ``t_i = 2 pi i / n``. The columns of ``L`` are the waves ``exp(i f t)``, sampled at
``t_i``, of the ``a`` frequencies

.. math:: f = -\tfrac{a-1}{2}, \; -\tfrac{a-1}{2} + 1, \; \dots, \; \tfrac{a-1}{2}

in their real form ``sqrt(2) cos(f t), sqrt(2) sin(f t)`` (and 1 for frequency 0). The columns of
``R`` are likewise the ``b`` waves of ``a`` times the frequencies ``-(b-1)/2 … (b-1)/2``. The sums
of one frequency of ``L`` and one of ``R`` are ``-(k-1)/2 … (k-1)/2`` in steps of 1, and each occurs
once. Therefore ``G = D V U``: ``V`` is the Vandermonde matrix of the ``n``-th roots of unity, ``D``
is diagonal with entries of modulus 1, and ``U``, the change from waves to their real form, is
unitary. So any ``k`` rows are independent, and their condition number is that of roots of unity.

The rotation embedding [2]_ has the same condition numbers, but it splits every block in two and
mixes the halves by rotations. The pieces here are plain combinations like those of any other code.

References
----------
.. [1] Q. Yu, M. Maddah-Ali, S. Avestimehr, "Polynomial codes: an optimal design for
   high-dimensional coded matrix multiplication", NeurIPS 2017, section 3.
.. [2] A. Ramamoorthy, L. Tang, "Numerically stable coded matrix computations via circulant and
   rotation matrix embeddings", IEEE Transactions on Information Theory 68 (4), 2022.
.. [3] M. Fahim, V. Cadambe, "Numerically stable polynomially coded computing", IEEE Transactions
   on Information Theory 67 (5), 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_redundancy, check_whole
from dask_coded.codes._linear import Code

Floats = npt.NDArray[np.float64]


# The condition number of the worst set of pieces, at most: four digits are lost then.
_CONDITION = 1e4
# Workers that a code may leave out so that it stores less. With four, none of the codes for 2 to
# 129 workers stores more of a square pair than that of `with_redundancy`.
_LEFT_OUT = 4


class Polynomial(Code):
    """Code for products ``A.T @ B``: any ``a * b`` of ``n`` workers give the whole product.

    Each worker stores ``1 / a`` of ``A`` and ``1 / b`` of ``B``. Even for a Gram matrix
    ``A.T @ A`` it stores two different combinations, because the product of a combination with
    itself is symmetric and cannot distinguish ``A_0.T @ A_1`` from its transpose.

    Parameters
    ----------
    n : int
        Number of workers, at least ``a * b``.
    a, b : int
        Numbers of column blocks of ``A`` and of ``B``, at least 1.
    points : {"circle", "chebyshev", "integers"}
        Where the polynomials are evaluated. ``"circle"`` is as well conditioned as roots of unity.
        The others are for comparison: ``"chebyshev"`` uses Chebyshev polynomials at Chebyshev
        nodes, ``"integers"`` powers of 1, 2, … n, as in the textbook polynomial code.

    Attributes
    ----------
    a, b : int
    points : str
    left, right : Code
        The codes of the blocks of ``A`` and of ``B``, with ``n`` pieces each. Any ``a * b`` pieces
        determine the blocks of both. Fewer may do so, but not always, because different pieces can
        be equal in one factor.

    Raises
    ------
    TypeError
        If ``n``, ``a`` or ``b`` is not an integer.
    ValueError
        If one of them is too small, or ``points`` is unknown.

    See Also
    --------
    dask_coded.encode_pair : encodes two matrices with this code.

    Examples
    --------
    >>> import numpy as np
    >>> code = Polynomial(n=6, a=2, b=2)
    >>> code.k, code.tolerance
    (4, 2)
    >>> A, B = np.arange(12.0).reshape(3, 4), np.ones((3, 2))
    >>> left = code.left.encode(np.split(A, 2, axis=1))
    >>> right = code.right.encode(np.split(B, 2, axis=1))
    >>> products = [left[i].T @ right[i] for i in (0, 2, 3, 5)]
    >>> blocks = code.decode(products, (0, 2, 3, 5)).reshape(2, 2, 2, 1)
    >>> np.allclose(np.block([list(row) for row in blocks]), A.T @ B)
    True
    """

    _proven = True

    def __init__(self, n: int, a: int, b: int, points: str = "circle") -> None:
        n, a, b = check_whole("n", n, None), check_whole("a", a, None), check_whole("b", b, None)
        for name, value in (("a", a), ("b", b)):
            if value < 1:
                raise ValueError(f"Argument {name!r} must be at least 1, it is {value}.")
        if n < a * b:
            raise ValueError(
                f"Argument 'n' must be at least 'a' times 'b', {n} is less than {a * b}."
            )
        if points not in POINTS:
            raise ValueError(
                f"Argument 'points' must be one of {sorted(POINTS)}, it is {points!r}."
            )
        self.a = a
        self.b = b
        self.points = points
        left, right = POINTS[points](n, a, b)
        self.left = Code(left)
        self.right = Code(right)
        super().__init__((left[:, :, None] * right[:, None, :]).reshape(n, a * b))

    @classmethod
    def with_redundancy(
        cls, n: int, redundancy: int, shape: tuple[int, int] = (1, 1)
    ) -> Polynomial:
        """Build the code that survives the loss of at least ``redundancy`` of ``n`` workers.

        Parameters
        ----------
        n : int
        redundancy : int
        shape : (int, int)
            Numbers of columns of ``A`` and of ``B``. Of all admissible codes, the one that stores
            the fewest columns per worker, ``shape[0] / a + shape[1] / b``, is chosen.

        Examples
        --------
        >>> Polynomial.with_redundancy(12, 3), Polynomial.with_redundancy(10, 2, (8000, 1000))
        (Polynomial(n=12, a=3, b=3), Polynomial(n=10, a=8, b=1))
        """
        redundancy = check_redundancy(redundancy, n)
        choices = [(a, (n - redundancy) // a) for a in range(1, n - redundancy + 1)]
        return cls(n, *min(choices, key=lambda c: (shape[0] / c[0] + shape[1] / c[1], c)))

    @classmethod
    def accurate(cls, n: int, redundancy: int, shape: tuple[int, int] = (1, 1)) -> Polynomial:
        """Build a code that loses at most four digits, with as much redundancy as that allows.

        This is the code of :meth:`with_redundancy` if that loses no more. Otherwise it survives
        fewer losses, and may leave out up to four workers.

        Parameters
        ----------
        n, redundancy, shape
            As for :meth:`with_redundancy`.

        Examples
        --------
        >>> [Polynomial.accurate(n, n // 4) for n in (12, 40, 100)]
        [Polynomial(n=12, a=3, b=3), Polynomial(n=40, a=6, b=6), Polynomial(n=99, a=8, b=12)]
        """
        code = cls.with_redundancy(n, redundancy, shape)
        safe = _safe_redundancy(n, n - code.k)
        if n - code.k <= safe:
            return code
        # A few workers may be left out: some numbers of blocks have no good factors. Fewer workers
        # are no worse conditioned.
        choices = [
            (shape[0] / a + shape[1] * a / k, -m, a, k // a)
            for m in range(n, n - _LEFT_OUT - 1, -1)
            for k in range(m - safe, m - safe // 2)
            for a in range(1, k + 1)
            if not k % a
        ]
        _, m, a, b = min(choices)
        return cls(-m, a, b)

    def __repr__(self) -> str:
        points = "" if self.points == "circle" else f", points={self.points!r}"
        return f"Polynomial(n={self.n}, a={self.a}, b={self.b}{points})"


@cache
def _safe_redundancy(n: int, most: int) -> int:
    """Return how many of ``n`` workers, up to ``most``, may be lost with few digits.

    The worst that can be lost are neighbours on the circle. All codes with so many blocks have the
    same condition number then.
    """
    for lost in range(1, most + 1):
        kept = n - lost
        if np.linalg.cond(_circle(n, kept, 1)[0][:kept]) > _CONDITION:
            return lost - 1
    return most


def _circle(n: int, a: int, b: int) -> tuple[Floats, Floats]:
    angles = 2 * np.pi * np.arange(n) / n
    return _waves(angles, a), _waves(a * angles, b)


def _waves(angles: Floats, count: int) -> Floats:
    """Return the real form of ``exp(i f t)``, ``f = -(count - 1) / 2 …``, shape (angles, count)."""
    frequencies = np.arange(1 - count, count, 2) / 2
    t = np.outer(angles, frequencies)
    # One of each pair of opposite frequencies becomes the cosine, the other the sine.
    waves = np.where(frequencies > 0, np.cos(t), np.sin(-t)) * np.sqrt(2)
    return np.where(frequencies == 0, 1.0, waves)


def _chebyshev(n: int, a: int, b: int) -> tuple[Floats, Floats]:
    angles = (2 * np.arange(n) + 1) * np.pi / (2 * n)
    # Orthonormal at these nodes; products of both factors span all degrees below a * b.
    scale = np.sqrt(np.where(np.arange(max(a, b)), 2.0, 1.0))
    left = np.cos(np.outer(angles, np.arange(a))) * scale[:a]
    return left, np.cos(np.outer(angles, a * np.arange(b))) * scale[:b]


def _integers(n: int, a: int, b: int) -> tuple[Floats, Floats]:
    nodes = np.arange(1.0, n + 1)
    return nodes[:, None] ** np.arange(a), nodes[:, None] ** (a * np.arange(b))


#: For each value of ``points``, the function ``(n, a, b)`` that returns the generators of the two
#: factors, shapes (n, a) and (n, b).
POINTS: dict[str, Callable[[int, int, int], tuple[Floats, Floats]]] = {
    "circle": _circle,
    "chebyshev": _chebyshev,
    "integers": _integers,
}
