r"""Kernels of graph filters: functions of eigenvalues, and their Chebyshev expansions.

A kernel ``g`` is any callable that maps an ndarray of eigenvalues to real numbers. On
:math:`[0, \lambda_{max}]` it is expanded in Chebyshev polynomials:

.. math:: g(\lambda) = \sum_k c_k \, T_k(2 \lambda / \lambda_{max} - 1)

The coefficients are those of the polynomial that interpolates ``g`` at Chebyshev points: a discrete
cosine transform of the values there [1]_. Because :math:`|T_k| \le 1` on the interval, leaving out
all terms beyond ``m`` changes ``g`` by at most :math:`\sum_{k>m} |c_k|`. This bound determines the
degree.

References
----------
.. [1] L. Trefethen, "Approximation theory and approximation practice", SIAM, 2013, chapters 3, 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
from numpy.polynomial.chebyshev import chebval

from dask_coded.arguments import check_positive, check_whole
from dask_coded.graph.iteration import Vector

Kernel = Callable[[Vector], Vector]

# A kernel that needs a higher degree than this is not smooth.
_HIGHEST_ORDER = 2**13
# Rounding errors of an expansion of that degree, over the kernel's largest value.
_ROUNDING = _HIGHEST_ORDER * np.finfo(np.float64).eps


@dataclass(frozen=True)
class PolynomialKernel:
    """The kernel ``g(λ) = c_0 + c_1 λ + … + c_m λ^m``, evaluated exactly.

    Parameters
    ----------
    coefficients : sequence of float
        ``c_0, …, c_m``.

    Examples
    --------
    >>> float(PolynomialKernel((0, 0, 1))(3.0))
    9.0
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        found = tuple(float(c) for c in self.coefficients)
        if not found or not np.isfinite(found).all():
            raise ValueError(
                "Argument 'coefficients' must be one or more finite numbers, "
                f"it is {self.coefficients!r}."
            )
        object.__setattr__(self, "coefficients", found)

    def __call__(self, eigenvalues: Any) -> Any:
        return np.polynomial.polynomial.polyval(eigenvalues, self.coefficients)


@dataclass(frozen=True)
class Hops:
    """The kernel ``g(λ) = 1 + λ + … + λ^n``, which combines signals within ``n`` hops.

    This is the n-hop filter of the S2C2 paper, as implemented in its authors' program. The highest
    power alone, ``L^n x``, is ``PolynomialKernel([0] * n + [1])``.

    Parameters
    ----------
    n : int
        Number of hops, and of products.

    Examples
    --------
    >>> float(Hops(2)(3.0))
    13.0
    """

    n: int

    def __post_init__(self) -> None:
        check_whole("n", self.n, least=0)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """A tuple of ``n + 1`` ones."""
        return (1.0,) * (int(self.n) + 1)

    def __call__(self, eigenvalues: Any) -> Any:
        return PolynomialKernel(self.coefficients)(eigenvalues)


@dataclass(frozen=True)
class Heat:
    """The kernel ``g(λ) = exp(-t λ)``, which lets a signal diffuse for the time ``t``.

    Parameters
    ----------
    t : float
        Time, 0 or positive, in units of 1 over an eigenvalue. (PyGSP's kernel of this name takes
        time in units of 1 over the largest eigenvalue.)

    Examples
    --------
    >>> round(float(Heat(2.0)(0.5)), 4)
    0.3679
    """

    t: float

    def __post_init__(self) -> None:
        check_positive("t", self.t, or_zero=True)

    def __call__(self, eigenvalues: Any) -> Any:
        return np.exp(-self.t * np.asarray(eigenvalues))


def chebyshev_coefficients(
    kernel: Kernel, lmax: float, *, tol: float = 1e-10, order: int | None = None
) -> Vector:
    """Expand a kernel in Chebyshev polynomials on ``[0, lmax]``.

    Parameters
    ----------
    kernel : callable
        Maps eigenvalues, an ndarray of shape (m,), to as many real numbers.
    lmax : float
        End of the interval, positive.
    tol : float
        Maximum sum of the absolute coefficients that are left out, relative to the kernel's largest
        absolute value.
    order : int, optional
        The degree. Default: the lowest that satisfies ``tol``.

    Returns
    -------
    ndarray, shape (order + 1,)
        ``c_0, c_1, …`` of ``g(λ) = sum c_k T_k(2 λ / lmax - 1)``.

    Raises
    ------
    ValueError
        If the kernel returns anything but finite real numbers, or is not smooth enough for ``tol``.

    Examples
    --------
    >>> chebyshev_coefficients(lambda x: x**2, lmax=2.0).round(12) + 0.0
    array([1.5, 2. , 0.5])
    """
    if order is not None:
        return _interpolate(kernel, lmax, max(2 * (order + 1), 64))[0][: order + 1]
    # No point is at an end of the interval. What happens there alone, as with a heat kernel for a
    # long time, would not be seen.
    with np.errstate(all="ignore"):
        values = _values(kernel, np.array([0.0, lmax]))
    there = np.isfinite(values)  # it need not be defined at the ends
    ends, values = np.array([-1.0, 1.0])[there], values[there]
    largest = np.abs(values).max(initial=0.0)
    points = 64
    while points <= 2 * _HIGHEST_ORDER:
        found, greatest = _interpolate(kernel, lmax, points)
        greatest = max(greatest, largest)
        left_out = np.cumsum(np.abs(found)[::-1])[::-1]
        # Keep only coefficients of the lower half. If those of the upper half are negligible, so
        # are the terms that were not computed.
        enough = np.flatnonzero(left_out[1 : points // 2] <= tol * greatest)
        if len(enough):
            kept = found[: enough[0] + 1]
            off = np.abs(chebval(ends, kept) - values)
            if (off <= 10 * max(tol, _ROUNDING) * greatest).all():
                return kept
        points *= 2
    raise ValueError(
        f"The kernel is not smooth enough for tol={tol:g} with a degree up to {_HIGHEST_ORDER}: "
        "raise tol, or choose the degree with 'order'."
    )


def _interpolate(kernel: Kernel, lmax: float, points: int) -> tuple[Vector, float]:
    """Interpolate at Chebyshev points; return coefficients and the largest absolute value."""
    where = lmax / 2 * (1 + np.cos(np.pi * (np.arange(points) + 0.5) / points))
    values = _values(kernel, where)
    if not np.isfinite(values).all():
        raise ValueError(
            f"A kernel must be finite from 0 to {lmax:.4g}, the largest eigenvalue: it gave "
            f"{values[~np.isfinite(values)][0]} at {where[~np.isfinite(values)][0]:.4g}."
        )
    found = scipy.fft.dct(values, type=2) / points
    found[0] /= 2
    return found, float(np.abs(values).max())


def _values(kernel: Kernel, where: Vector) -> Vector:
    """Return what a kernel gives for some eigenvalues."""
    values = np.asarray(kernel(where))
    if values.shape != where.shape or values.dtype.kind not in "fiub":
        raise ValueError(
            f"A kernel must give one real number for each eigenvalue: for shape {where.shape} it "
            f"gave shape {values.shape} and dtype {values.dtype}."
        )
    return values.astype(np.float64)
