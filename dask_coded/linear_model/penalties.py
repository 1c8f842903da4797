r"""Penalties on large coefficients.

The four common ones are special cases of the elastic net,

.. math:: r(w) = \lambda_1 \|w\|_1 + \tfrac{1}{2} \lambda_2 \|w\|_2^2.

If both weights are zero, there is no penalty; if only one is, it is ridge or lasso. Gradient
methods handle only the smooth part; proximal methods treat the corner of :math:`|w|` at zero
exactly.

References
----------
.. [1] H. Zou, T. Hastie, "Regularization and variable selection via the elastic net",
       J. Royal Statistical Society B 67(2), 2005.
.. [2] N. Parikh, S. Boyd, "Proximal algorithms", Foundations and Trends in Optimization 1(3), 2014,
       6.5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dask_coded.arguments import check_positive
from dask_coded.linear_model.families import Floats


@dataclass(frozen=True)
class Penalty:
    """A penalty on coefficients.

    Parameters
    ----------
    l1, l2 : float, or tuple of float with one for each target
        Weights of the sum of absolute values and of half the sum of squares; not negative.

    Raises
    ------
    ValueError
        If one of them is negative or not finite.

    Examples
    --------
    >>> Penalty(l2=2.0).value(np.array([3.0, -1.0]))
    10.0
    >>> Penalty(l2=(2.0, 4.0)).gradient(np.array([[3.0, 3.0], [-1.0, 0.0]]))
    array([[ 6., 12.],
           [-2.,  0.]])
    >>> Penalty(l1=1.0).shrink(np.array([3.0, -0.5]), 1.0)
    array([ 2., -0.])
    """

    l1: float | tuple[float, ...] = 0.0
    l2: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for name in ("l1", "l2"):
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                check_positive(name, one, or_zero=True)

    @property
    def smooth(self) -> bool:
        """Whether there is no L1 part."""
        return not np.any(self.l1)

    def check(self, targets: tuple[int, ...]) -> None:
        """Check that there is one weight for each target, or one for all.

        Parameters
        ----------
        targets : tuple of int
            () for a single target, else their number.

        Raises
        ------
        ValueError
            If there is not.
        """
        for name in ("l1", "l2"):
            value = getattr(self, name)
            if isinstance(value, tuple) and (len(value),) != targets:
                raise ValueError(
                    f"Argument {name!r} must be one number or one for each target, it has "
                    f"{len(value)} numbers for {targets[0] if targets else 1} targets."
                )

    def value(self, w: Floats) -> float:
        """Return the penalty of coefficients, shape (p,) or (p, targets)."""
        return self.corner(w) + float(np.vdot(w, self.gradient(w))) / 2

    def corner(self, w: Floats) -> float:
        """Return the part that is not smooth."""
        return float((np.asarray(self.l1) * np.abs(w)).sum()) if not self.smooth else 0.0

    def gradient(self, w: Floats) -> Floats:
        """Return the gradient of the smooth part, shape of ``w``."""
        return np.asarray(self.l2) * w

    def shrink(self, w: Floats, step: float | Floats) -> Floats:
        """Return the proximal map: the ``v`` that minimises ``step * corner(v) + |v - w|² / 2``."""
        if self.smooth:
            return w
        return np.sign(w) * np.maximum(np.abs(w) - step * np.asarray(self.l1), 0)
