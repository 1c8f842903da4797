r"""Penalties: what large coefficients cost.

All four of the common ones are corners of one,

.. math:: r(w) = \lambda_1 \|w\|_1 + \tfrac{1}{2} \lambda_2 \|w\|_2^2,

the elastic net: both zero is no penalty, one zero is ridge or lasso. Gradient methods need the
smooth part alone; proximal ones treat the corner of :math:`|w|` at zero exactly.

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
    """What coefficients cost.

    Parameters
    ----------
    l1, l2 : float
        Weights of the sum of absolute values and of half the sum of squares; not negative.

    Raises
    ------
    ValueError
        If one of them is negative or not finite.

    Examples
    --------
    >>> Penalty(l2=2.0).value(np.array([3.0, -1.0]))
    10.0
    >>> Penalty(l1=1.0).shrink(np.array([3.0, -0.5]), 1.0)
    array([ 2., -0.])
    """

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        for name in ("l1", "l2"):
            check_positive(name, getattr(self, name), or_zero=True)

    def value(self, w: Floats) -> float:
        """The cost of coefficients of any shape."""
        return self.corner(w) + self.l2 / 2 * float(np.vdot(w, w))

    def corner(self, w: Floats) -> float:
        """The part that is not smooth."""
        return self.l1 * float(np.abs(w).sum()) if self.l1 else 0.0

    def gradient(self, w: Floats) -> Floats:
        """Gradient of the smooth part, shape of ``w``."""
        return self.l2 * w

    def shrink(self, w: Floats, step: float) -> Floats:
        """Proximal map of the corner: the ``v`` of least ``step * corner(v) + |v - w|² / 2``."""
        if not self.l1:
            return w
        return np.sign(w) * np.maximum(np.abs(w) - step * self.l1, 0)
