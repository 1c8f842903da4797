r"""Families: the loss of one row of the data as a function of its linear prediction.

With predictions ``z = X @ w``, the loss of a model is :math:`\sum_i s_i \ell(z_i, y_i)`. A family
defines :math:`\ell`, its derivative with respect to ``z``, and its second derivative along a
direction. All are plain NumPy functions of ``z`` and ``y`` of shape (n,) or (n, k). The k columns
are models that are fitted together and share each product, except in :class:`Multinomial`, where
they are the classes of one model.

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
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import scipy.special

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Family(ABC):
    """The loss of a row and its derivatives."""

    #: Whether the gradient is measured in units of the targets and of the columns.
    has_units: ClassVar[bool] = False

    def check(self, y: Floats) -> None:
        """Check that ``y`` holds valid targets of this family.

        Raises
        ------
        ValueError
            If it does not.
        """
        if not np.isfinite(y).all():
            raise ValueError("Argument 'y' must hold finite numbers, it has NaN or infinity.")

    @abstractmethod
    def loss(self, z: Floats, y: Floats) -> Floats:
        """Return the loss of each row and column, shape of ``z``; (n, 1) if columns share it."""

    @abstractmethod
    def slope(self, z: Floats, y: Floats) -> Floats:
        """Return the derivative of the loss with respect to ``z``, shape of ``z``."""

    @abstractmethod
    def bend(self, z: Floats, y: Floats, direction: Floats) -> Floats:
        """Return the second derivative times a direction, shape of ``z``."""

    def scale(self, y: Floats, weights: Floats) -> Floats | float:
        """Return the unit of the gradient of each column, 1 if the targets have none."""
        return 1.0

    def center(self, y: Floats, weights: Floats) -> Floats | float:
        """Return what can be taken from each column of ``y`` and added to a free intercept."""
        return 0.0

    def exact(self) -> Family:
        """Return the family that this one approximates, or this one if it is exact."""
        return self

    def sharper(self) -> Family:
        """Return a closer approximation of :meth:`exact`, to start from the minimum of this one."""
        return self


def root_mean_square(values: Floats, weights: Floats) -> Floats:
    """Return the weighted root mean square of each column, shape (k,) or (); 1 where it is 0.

    Parameters
    ----------
    values : ndarray, shape (n,) or (n, k)
    weights : ndarray, shape (n,)
    """
    largest = np.abs(values).max(axis=0)
    largest = np.where(largest > 0, largest, 1.0)  # whose square may overflow
    size = largest * np.sqrt(weights @ np.square(values / largest) / weights.sum())
    return np.where(size > 0, size, 1.0)


@dataclass(frozen=True)
class SeparateFamily(Family):
    """A family that treats each column of the predictions independently."""

    @abstractmethod
    def curvature(self, z: Floats, y: Floats) -> Floats:
        """Return the second derivative with respect to ``z``, shape of ``z``."""

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

    has_units: ClassVar[bool] = True

    def loss(self, z: Floats, y: Floats) -> Floats:
        return np.square(z - y) / 2

    def slope(self, z: Floats, y: Floats) -> Floats:
        return z - y

    def curvature(self, z: Floats, y: Floats) -> Floats:
        return np.ones_like(z)

    def scale(self, y: Floats, weights: Floats) -> Floats | float:
        # So that convergence does not depend on the unit of any column of y.
        return root_mean_square(y, weights)

    def center(self, y: Floats, weights: Floats) -> Floats | float:
        # Relative to the first row that counts, so that a constant column becomes 0, without
        # rounding errors.
        first = y[np.argmax(weights > 0)]
        return np.asarray(first + weights / weights.sum() @ (y - first))


@dataclass(frozen=True)
class _TwoClasses(SeparateFamily):
    """A family whose targets are -1 and 1."""

    def check(self, y: Floats) -> None:
        wrong = y[np.abs(y) != 1]
        if wrong.size:
            raise ValueError(f"Argument 'y' must hold only -1 and 1, it has {wrong[0]}.")


@dataclass(frozen=True)
class Logistic(_TwoClasses):
    """Two classes, -1 and 1: the negative log-likelihood of logistic regression.

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
    """Two classes, -1 and 1: rows within the margin cost their squared distance from it.

    This is the default loss of ``LinearSVC``.

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

    The corner at the margin is smoothed over ``width``; the smooth loss is below the hinge, by at
    most ``width / 2``. The minimum of the smooth objective is therefore below that of the true one.
    At this minimum, the difference of the two objectives bounds how far the true one is from its
    own minimum. :func:`~dask_coded.linear_model.minimize` sharpens the corner until this bound
    meets the tolerance.

    Parameters
    ----------
    width : float
        Initial width; 0 for the hinge itself, which has a :meth:`loss` but no curvature.

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
    """Classes of one model: the negative log-likelihood of softmax regression.

    Examples
    --------
    >>> float(Multinomial().loss(np.zeros((1, 4)), np.eye(4)[:1]).sum().round(4))  # log(4)
    1.3863
    """

    def check(self, y: Floats) -> None:
        if y.ndim != 2 or not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise ValueError(
                "Argument 'y' must have a column for each class, with a single 1 in each row and 0 "
                "elsewhere."
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
