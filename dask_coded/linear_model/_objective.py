r"""The objective of a fit, with the intercept kept outside the matrix.

With weights :math:`s_i` that sum to 1, the objective is

.. math:: F(w, b) = \sum_i s_i \, \ell(x_i^T w + b, y_i) + r(w).

The matrix is encoded once and stays unchanged: a column of ones and the subtraction of column means
are rank-one terms that are added to its products. Centring the columns removes a badly scaled
direction for the solvers, and changes only ``b`` if ``b`` is not penalised. If the intercept is
penalised (liblinear's convention, which ``LinearSVC`` follows), it is the coefficient of a constant
column instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.linear_model.families import Family, Floats, root_mean_square
from dask_coded.linear_model.penalties import Penalty

# Random sums of each column from which its spread is estimated, within about a third.
_PROBES = 4


@dataclass(frozen=True)
class Intercept:
    """The constant term of the predictions.

    Parameters
    ----------
    column : float
        Value of the constant column; 0 for no intercept.
    penalised : bool
        Whether its coefficient is penalised like the others.
    """

    column: float = 1.0
    penalised: bool = False


@dataclass(frozen=True)
class Point:
    """Coefficients with their predictions and gradient, which take two rounds.

    Parameters
    ----------
    w : ndarray, shape (m,) or (m, k)
        Coefficients, that of the constant column last if there is one.
    z : ndarray, shape (n,) or (n, k)
        Predictions.
    gradient : ndarray, shape of ``w``
        Of the smooth part of the objective.
    """

    w: Floats
    z: Floats
    gradient: Floats


@dataclass(frozen=True)
class Objective:
    """A function of coefficients: one product gives its value, a second one its gradient.

    Parameters
    ----------
    operator : anything with ``@`` and ``.T``, shape (n, p)
    y : ndarray, shape (n,) or (n, k)
    weights : ndarray, shape (n,)
        Not negative, of sum 1.
    family : Family
    penalty : Penalty
    intercept : Intercept
    means : ndarray, shape (p,)
        Subtracted from each row of the matrix.
    spread : ndarray, shape (p,)
        An estimate of the standard deviation of each column of the matrix, or of its root mean
        square if the intercept is not free. Ones if the family has no units.
    pair : anything with ``product(d)``, or None
        Computes ``X.T @ diag(d) @ X`` in one round.
    """

    operator: Any
    y: Floats
    weights: Floats
    family: Family
    penalty: Penalty
    intercept: Intercept
    means: Floats
    spread: Floats
    pair: Any = None

    @classmethod
    def of(
        cls,
        operator: Any,
        y: Floats,
        weights: Floats,
        family: Family,
        penalty: Penalty,
        intercept: Intercept,
        pair: Any = None,
    ) -> Objective:
        """Build the objective; takes one round for the columns' means and spreads, if needed."""
        rows, columns = operator.shape
        free = bool(intercept.column) and not intercept.penalised
        means, spread = np.zeros(columns), np.ones(columns)
        # A sum of a column's entries times random factors is about as large as the column's root
        # mean square. For the exact one, the entries themselves would be needed.
        probes = np.zeros((rows, 0))
        if family.has_units:
            probes = np.random.default_rng(0).standard_normal((rows, _PROBES))
            probes *= np.sqrt(weights)[:, np.newaxis]
        if free or probes.size:
            factors = np.column_stack([weights, probes]) if free else probes
            sums = np.asarray(operator.T @ factors, dtype=np.float64)
            if free:
                means, sums = sums[:, 0], sums[:, 1:] - np.outer(sums[:, 0], probes.sum(axis=0))
            if probes.size:
                spread = root_mean_square(sums.T, np.ones(_PROBES))
                # Of a constant column the mean leaves rounding errors, which are no unit, and which
                # decoding may make a thousand times larger. The spread is 1, not 0, if it leaves
                # none.
                size, noise = np.abs(means), _rounding(operator) ** 0.75
                spread = np.where(spread > noise * size, spread, size)
        return cls(operator, y, weights, family, penalty, intercept, means, spread, pair)

    # -- conversion of coefficients ------------------------------------------------------------

    def inside(self, coefficients: Floats, shift: Floats) -> Floats:
        """Return coefficients and intercept as one array, shape (m,) or (m, k)."""
        if not self.intercept.column:
            return coefficients
        last = (shift + self.means @ coefficients) / self.intercept.column
        return np.concatenate([coefficients, np.reshape(last, (1, *coefficients.shape[1:]))])

    def outside(self, w: Floats) -> tuple[Floats, Floats]:
        """Return coefficients (p,) or (p, k) and intercept () or (k,) for the uncentred matrix."""
        if not self.intercept.column:
            return w, np.zeros(w.shape[1:])
        return w[:-1], np.asarray(self.intercept.column * w[-1] - self.means @ w[:-1])

    # -- the two products ----------------------------------------------------------------------

    def predict(self, w: Floats) -> Floats:
        """Return the predictions, linear in ``w``, shape (n,) or (n, k); takes one round."""
        coefficients, shift = self.outside(w)
        return np.asarray((self.operator @ coefficients) + shift)

    def gather(self, residuals: Floats) -> Floats:
        """Apply the transpose of :meth:`predict`; takes one round."""
        total = residuals.sum(axis=0)
        found = self.operator.T @ residuals - np.multiply.outer(self.means, total)
        if not self.intercept.column:
            return np.asarray(found)
        return np.concatenate(
            [found, np.reshape(self.intercept.column * total, (1, *np.shape(total)))]
        )

    def weighed(self, rows: Floats) -> Floats:
        """Return rows times their weights."""
        return (self.weights * rows.T).T

    # -- values --------------------------------------------------------------------------------

    def point(self, w: Floats, z: Floats | None = None) -> Point:
        """Return the point at ``w``; takes one round, or two if the predictions are not given."""
        z = self.predict(w) if z is None else z
        pull = self.gather(self.weighed(self.family.slope(z, self.y)))
        return Point(w, z, pull + self._padded(self.penalty.gradient(self._costly(w)), w))

    def smooth(self, w: Floats, z: Floats) -> float:
        """Return the loss plus the smooth part of the penalty."""
        return self.value(w, z) - self.corner(w)

    def corner(self, w: Floats) -> float:
        """Return the part of the penalty that is not smooth."""
        return self.penalty.corner(self._costly(w))

    def value(self, w: Floats, z: Floats, family: Family | None = None) -> float:
        """Return the objective, with this family or another one."""
        losses = (family or self.family).loss(z, self.y)
        return float((self.weights @ losses).sum()) + self.penalty.value(self._costly(w))

    def slope(self, w: Floats, z: Floats, d: Floats, q: Floats) -> float:
        """Differentiate the smooth part at ``w`` along ``d``, where ``q = predict(d)``."""
        loss = np.vdot(self.weighed(self.family.slope(z, self.y)), q)
        return float(loss + self.penalty.l2 * np.vdot(self._costly(w), self._costly(d)))

    def residual(self, point: Point) -> float:
        """Return the largest absolute entry of the least subgradient.

        If the family has units, it is in units of the columns of y and of the matrix.
        """
        g = point.gradient
        if self.penalty.l1:
            w, g = self._costly(point.w), g.copy()
            costly = g[: len(w)]
            costly[...] = np.where(
                w != 0,
                costly + self.penalty.l1 * np.sign(w),
                np.sign(costly) * np.maximum(np.abs(costly) - self.penalty.l1, 0),
            )
        spread = self.spread
        if self.intercept.column:
            constant = self.intercept.column if self.family.has_units else 1.0
            spread = np.append(spread, constant)
        found = (np.abs(g).T / spread).T / self.family.scale(self.y, self.weights)
        return float(found.max())

    def shrink(self, w: Floats, step: float) -> Floats:
        """Apply the proximal map of the penalty's corner; free coefficients stay unchanged."""
        costly = self._costly(w)
        return np.concatenate([self.penalty.shrink(costly, step), w[len(costly) :]])

    # -- curvature -----------------------------------------------------------------------------

    def bend(self, z: Floats) -> Callable[[Floats], tuple[Floats, Floats]]:
        """Return the function ``v -> (H @ v, predict(v))`` for the Hessian ``H`` at ``z``.

        Each call takes two rounds.
        """

        def times(v: Floats) -> tuple[Floats, Floats]:
            q = self.predict(v)
            pull = self.gather(self.weighed(self.family.bend(z, self.y, q)))
            return pull + self._padded(self.penalty.gradient(self._costly(v)), v), q

        return times

    def hessian(self, z: Floats) -> Floats | None:
        """Return the Hessian at ``z``, shape (m, m), in two rounds; None for k > 1 or no pair."""
        if self.pair is None or z.ndim > 1:
            return None
        d = self.weights * self.family.bend(z, self.y, np.ones_like(z))
        total, column, means = d.sum(), self.intercept.column, self.means
        H = np.asarray(self.pair.product(d), dtype=np.float64)
        if column:
            pull = self.operator.T @ d
            H = H - np.outer(pull, means) - np.outer(means, pull) + total * np.outer(means, means)
            edge = column * (pull - total * means)[:, np.newaxis]
            H = np.block([[H, edge], [edge.T, np.array([[column**2 * total]])]])
        costs = np.zeros(len(H))
        self._costly(costs)[...] = self.penalty.l2
        return np.asarray(H + np.diag(costs))

    def _costly(self, w: Floats) -> Floats:
        """Return the penalised coefficients."""
        return w[:-1] if self.intercept.column and not self.intercept.penalised else w

    def _padded(self, part: Floats, w: Floats) -> Floats:
        return part if len(part) == len(w) else np.concatenate([part, np.zeros_like(w[-1:])])


def check_weights(name: str, weights: npt.ArrayLike, rows: int) -> Floats:
    """Return the weights of rows as an array, shape (rows,); one number is that of all rows.

    Raises
    ------
    ValueError
        If there is not one for each row, or they are negative, not finite or all zero.
    """
    found = np.asarray(weights, dtype=np.float64)
    if not found.ndim:
        found = np.full(rows, found)
    if found.shape != (rows,):
        raise ValueError(
            f"Argument {name!r} must have one value for each of the {rows} rows, "
            f"its shape is {found.shape}."
        )
    if not (np.isfinite(found).all() and (found >= 0).all() and found.any()):
        raise ValueError(
            f"Argument {name!r} must be finite, not negative and not all zero, "
            f"the smallest weight is {found.min()}, the largest {found.max()}."
        )
    return found


def _rounding(operator: Any) -> float:
    """Return the relative rounding error of the numbers in a matrix, also of its coded pieces."""
    dtype = np.dtype(getattr(operator, "dtype", np.float64))
    stored = dtype if dtype.kind == "f" else np.dtype(np.float64)
    return float(max(np.finfo(stored).eps, np.finfo(np.float64).eps))
