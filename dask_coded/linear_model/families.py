r"""Families: what one row of the data costs, as a function of its linear prediction.

With ``z = X @ w`` the predictions, a model costs :math:`\sum_i s_i \ell(z_i, y_i)`. A family says
:math:`\ell`, its derivative by ``z``, and its second derivative along a direction. All are plain
NumPy functions of ``z`` and ``y`` of shape (n,) or (n, k): k columns are k models that are fitted
together and share each product, except in :class:`Multinomial`, where they are the classes of one.

============================ ==================================== ===========================
family                       loss of a row                        targets
============================ ==================================== ===========================
:class:`SquaredError`        :math:`(z - y)^2 / 2`                real numbers
:class:`Logistic`            :math:`\log(1 + e^{-yz})`            -1 and 1
:class:`SquaredHinge`        :math:`\max(0, 1 - yz)^2`            -1 and 1
:class:`Hinge`               :math:`\max(0, 1 - yz)`, smoothed    -1 and 1
:class:`Multinomial`         :math:`\log \sum_c e^{z_c} - y^T z`  rows of the identity matrix
============================ ==================================== ===========================

References
----------
.. [1] T. Hastie, R. Tibshirani, J. Friedman, "The elements of statistical learning", 2009, 4.4, 12.
.. [2] O. Chapelle, "Training a support vector machine in the primal", Neural Computation 19, 2007.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.special

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Family(ABC):
    """What a row costs."""

    def check(self, y: Floats) -> None:
        """Refuse what are no targets of this family.

        Raises
        ------
        ValueError
            If there is one.
        """
        if not np.isfinite(y).all():
            raise ValueError("Argument 'y' must hold finite numbers, it has NaN or infinity.")

    @abstractmethod
    def loss(self, z: Floats, y: Floats) -> Floats:
        """Loss of each row and column, shape of ``z``; rows may put it all in one column."""

    @abstractmethod
    def slope(self, z: Floats, y: Floats) -> Floats:
        """Derivative of the loss by ``z``, shape of ``z``."""

    @abstractmethod
    def bend(self, z: Floats, y: Floats, direction: Floats) -> Floats:
        """Second derivative times a direction, shape of ``z``."""

    def scale(self, y: Floats, weights: Floats) -> float:
        """The unit of the gradient: 1 where targets have none."""
        return 1.0

    def exact(self) -> Family:
        """What is to be minimised in truth, where this family only approximates it."""
        return self

    def sharper(self) -> Family:
        """A closer approximation of :meth:`exact`, to be minimised from the minimum of this one."""
        return self


@dataclass(frozen=True)
class SeparateFamily(Family):
    """A family in which no column of the predictions has to do with another."""

    @abstractmethod
    def curvature(self, z: Floats, y: Floats) -> Floats:
        """Second derivative by ``z``, shape of ``z``."""

    def bend(self, z: Floats, y: Floats, direction: Floats) -> Floats:
        return self.curvature(z, y) * direction


@dataclass(frozen=True)
class SquaredError(SeparateFamily):
    """Least squares: half the squared difference.

    Examples
    --------
    >>> SquaredError().loss(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    array([0., 2.])
    """

    def loss(self, z: Floats, y: Floats) -> Floats:
        return np.square(z - y) / 2

    def slope(self, z: Floats, y: Floats) -> Floats:
        return z - y

    def curvature(self, z: Floats, y: Floats) -> Floats:
        return np.ones_like(z)

    def scale(self, y: Floats, weights: Floats) -> float:
        # Root mean square, so that kilometres converge as metres do.
        square = float(np.average(np.square(y).reshape(len(y), -1).max(axis=1), weights=weights))
        return square**0.5 or 1.0


@dataclass(frozen=True)
class _TwoClasses(SeparateFamily):
    """Targets are signs."""

    def check(self, y: Floats) -> None:
        wrong = y[np.abs(y) != 1]
        if wrong.size:
            raise ValueError(f"Argument 'y' must hold -1 and 1 alone, it has {wrong[0]}.")


@dataclass(frozen=True)
class Logistic(_TwoClasses):
    """Two classes, -1 and 1: minus the log-likelihood of logistic regression.

    Examples
    --------
    >>> Logistic().loss(np.array([0.0, 800.0]), np.array([1.0, -1.0])).round(4)
    array([6.931e-01, 8.000e+02])
    """

    def loss(self, z: Floats, y: Floats) -> Floats:
        return np.logaddexp(0, -y * z)

    def slope(self, z: Floats, y: Floats) -> Floats:
        return np.asarray(-y * scipy.special.expit(-y * z))

    def curvature(self, z: Floats, y: Floats) -> Floats:
        return np.asarray(scipy.special.expit(z) * scipy.special.expit(-z))


@dataclass(frozen=True)
class SquaredHinge(_TwoClasses):
    """Two classes, -1 and 1: rows within the margin cost its square, as in ``LinearSVC``.

    Examples
    --------
    >>> SquaredHinge().loss(np.array([2.0, 0.0, -1.0]), np.ones(3))
    array([0., 1., 4.])
    """

    def loss(self, z: Floats, y: Floats) -> Floats:
        return np.square(np.maximum(1 - y * z, 0))

    def slope(self, z: Floats, y: Floats) -> Floats:
        return -2 * y * np.maximum(1 - y * z, 0)

    def curvature(self, z: Floats, y: Floats) -> Floats:
        return np.where(y * z < 1, 2.0, 0.0)


@dataclass(frozen=True)
class Hinge(_TwoClasses):
    """Two classes, -1 and 1: rows within the margin cost their distance from it.

    The corner at the margin is rounded off over ``width``, towards the smaller: the smooth loss is
    below the hinge, by at most ``width / 2``. The minimum of the smooth objective is therefore
    below that of the true one, so that the difference of the two at one point bounds how far that
    point is from the true minimum: :func:`~dask_coded.linear_model.minimize` makes the corner
    sharper until the bound is met.

    Parameters
    ----------
    width : float
        Where to begin; 0 for the hinge itself, which has a :meth:`loss` but no curvature.

    Examples
    --------
    >>> z = np.array([1.5, 0.95, 0.0])
    >>> Hinge(0).loss(z, np.ones(3)), Hinge(0.1).loss(z, np.ones(3))
    (array([0.  , 0.05, 1.  ]), array([0.    , 0.0125, 0.95  ]))
    """

    width: float = 1.0

    def exact(self) -> Family:
        return Hinge(0.0)

    def sharper(self) -> Family:
        return Hinge(self.width / 8)

    def loss(self, z: Floats, y: Floats) -> Floats:
        inside = np.maximum(1 - y * z, 0)
        if not self.width:
            return inside
        corner = np.minimum(inside, self.width)
        return np.square(corner) / (2 * self.width) + (inside - corner)

    def slope(self, z: Floats, y: Floats) -> Floats:
        return -y * np.clip((1 - y * z) / self.width, 0, 1)

    def curvature(self, z: Floats, y: Floats) -> Floats:
        inside = 1 - y * z
        return np.where((inside > 0) & (inside < self.width), 1 / self.width, 0.0)


@dataclass(frozen=True)
class Multinomial(Family):
    """Classes of one model: minus the log-likelihood of softmax regression.

    Examples
    --------
    >>> float(Multinomial().loss(np.zeros((1, 4)), np.eye(4)[:1]).sum().round(4))  # log(4)
    1.3863
    """

    def check(self, y: Floats) -> None:
        if y.ndim != 2 or not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise ValueError(
                "Argument 'y' must have a column for each class, and a single 1 in each row, the "
                "rest 0."
            )

    def loss(self, z: Floats, y: Floats) -> Floats:
        return np.asarray(
            scipy.special.logsumexp(z, axis=1, keepdims=True) - (y * z).sum(axis=1, keepdims=True)
        )

    def slope(self, z: Floats, y: Floats) -> Floats:
        return np.asarray(scipy.special.softmax(z, axis=1) - y)

    def bend(self, z: Floats, y: Floats, direction: Floats) -> Floats:
        p = scipy.special.softmax(z, axis=1)
        return np.asarray(p * (direction - (p * direction).sum(axis=1, keepdims=True)))
