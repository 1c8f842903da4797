r"""The objective of a fit, with the intercept kept outside the matrix.

With weights :math:`s_i` that sum to 1, the objective is

.. math:: F(w, b) = \sum_i s_i \, \ell(x_i^T w + b, y_i) + r(w).

The matrix is encoded once and stays unchanged: a column of ones and the subtraction of column means
are rank-one terms that are added to its products. Centring the columns removes a badly scaled
direction for the solvers, and changes only ``b`` if ``b`` is not penalised. If the intercept is
penalised (liblinear's convention, which ``LinearSVC`` follows), it is the coefficient of a constant
column instead.

The solvers work with coefficients :math:`v = w / d`. If the columns of the matrix are in units that
differ by many orders of magnitude, the scale :math:`d` makes up for that. Otherwise the curvature
along a column of small numbers would be less than the rounding errors of that along a column of
large ones, and the result would depend on how a processor rounds. Scaling by powers of two adds no
rounding errors.

The size of a column's entries decides, that is, the sum of their squares over the sum of their
absolute values. The spread does not: a column of zeros with a few ones has a small spread, but the
same unit as a column with as many ones as zeros. Both sums are estimated by products with random
vectors [1]_.

References
----------
.. [1] P. Indyk, "Stable distributions, pseudorandom generators, embeddings, and data stream
       computation", Journal of the ACM 53(3), 2006.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_unmasked
from dask_coded.linear_model.families import Family, Floats, root_mean_square
from dask_coded.linear_model.penalties import Penalty

# Numbers of random sums of each column: for its spread, and, if spreads are very different, with
# normal and with Cauchy factors for the size of its entries.
_PROBES, _NORMAL, _CAUCHY = 4, 8, 8
# The standard error of the logarithm of this size.
_ERROR = math.sqrt(2 / (_PROBES + _NORMAL) + (math.pi / 2) ** 2 / _CAUCHY)
# By chance, only one size in 100,000 differs from the median by more than this factor, 32.
_APART = math.exp(5 * _ERROR)
# Exponents of two whose squares neither overflow nor underflow.
_EXPONENTS = -500, 500


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
        Coefficients over their scale, that of the constant column last if there is one.
    z : ndarray, shape (n,) or (n, k)
        Predictions.
    gradient : ndarray, shape of ``w``
        Of the smooth part of the objective, with respect to ``w``.
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
    scale : ndarray, shape (m,) or (m, k)
        What the coefficients inside the solvers are multiplied by, powers of two.
    pair : anything with ``product(d)``, or None
        Computes ``X.T @ diag(d) @ X`` in one round.
    hidden : int
        Number of columns that vary, but so little beside their means that they count as constant.
    """

    operator: Any
    y: Floats
    weights: Floats
    family: Family
    penalty: Penalty
    intercept: Intercept
    means: Floats
    spread: Floats
    scale: Floats
    pair: Any = None
    hidden: int = 0

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
        """Build the objective; takes one round for the columns' means and spreads.

        If the spreads differ by more than ``_APART``, it takes another one for the sizes of the
        entries, and a third one if these differ as well.
        """
        rows, columns = operator.shape
        free = bool(intercept.column) and not intercept.penalised
        # A sum of a column's entries times random factors is about as large as the column's root
        # mean square. For the exact one, the entries themselves would be needed.
        probes = np.random.default_rng(0).standard_normal((rows, _PROBES))
        probes *= np.sqrt(weights)[:, np.newaxis]
        factors = np.column_stack([weights, probes]) if free else probes
        sums = np.asarray(operator.T @ factors, dtype=np.float64)
        means = sums[:, 0] if free else np.zeros(columns)
        # NaN and infinity in the data are reported when the gradient has them.
        with np.errstate(invalid="ignore", over="ignore"):
            if free:
                sums = sums[:, 1:] - np.outer(means, probes.sum(axis=0))
            spread = root_mean_square(sums.T, np.ones(_PROBES))
            # Of a constant column the mean leaves rounding errors, which are no unit, and which
            # decoding may make a thousand times larger. The spread is 1, not 0, if it leaves none.
            rounding = _rounding(operator)
            noise = rounding**0.75 * np.abs(means)
            varies = sums.any(axis=1) & (spread > noise)
            # Of a column that is constant, sums of many rows leave their rounding errors, and
            # those of the mean, which are the same in all sums: a third of this at most, of 300
            # to a million rows.
            few = math.sqrt(rows) * rounding * np.abs(means)
            varied = sums.any(axis=1) & (_beside(sums, probes.sum(axis=0)) > few)
            hidden = int(np.count_nonzero(varied & (spread <= noise)))
            spread = np.where(spread > noise, spread, np.abs(means))
            found = spread[varies]
            if found.size and found.max() > _APART * found.min():
                sizes = _sizes(operator, weights, means, spread)
            else:
                sizes = spread
            form = penalty, intercept, y.shape[1:]
            scale = _scale(np.where(varies, sizes, np.nan), *form)
            if (scale != 1).any() and sizes is not spread:
                # The first estimate is wrong for one column in 100,000, and data may have as many.
                sizes = np.sqrt(sizes) * np.sqrt(_sizes(operator, weights, means, spread, seed=2))
                scale = _scale(np.where(varies, sizes, np.nan), *form)
        if not family.has_units:
            spread, hidden = np.ones(columns), 0
        return cls(
            operator, y, weights, family, penalty, intercept, means, spread, scale, pair, hidden
        )

    # -- conversion of coefficients ------------------------------------------------------------

    def inside(self, coefficients: Floats, shift: Floats) -> Floats:
        """Return coefficients and intercept as one array over its scale, (m,) or (m, k)."""
        if self.intercept.column:
            last = (shift + self.means @ coefficients) / self.intercept.column
            last = np.reshape(last, (1, *coefficients.shape[1:]))
            coefficients = np.concatenate([coefficients, last])
        return coefficients / self.scale

    def outside(self, w: Floats) -> tuple[Floats, Floats]:
        """Return coefficients (p,) or (p, k) and intercept () or (k,) for the uncentred matrix."""
        w = self.scale * w
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
        if self.intercept.column:
            last = np.reshape(self.intercept.column * total, (1, *np.shape(total)))
            found = np.concatenate([found, last])
        return np.asarray(self.scale * found)

    def weighed(self, rows: Floats) -> Floats:
        """Return rows times their weights."""
        return (self.weights * rows.T).T

    # -- values --------------------------------------------------------------------------------

    def point(self, w: Floats, z: Floats | None = None) -> Point:
        """Return the point at ``w``; takes one round, or two if the predictions are not given."""
        z = self.predict(w) if z is None else z
        pull = self.gather(self.weighed(self.family.slope(z, self.y)))
        return Point(w, z, pull + self._penalty_gradient(w))

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
        return float(loss + np.vdot(self._penalty_gradient(w), d))

    def residual(self, point: Point) -> float:
        """Return the largest absolute entry of the least subgradient.

        If the family has units, it is in units of the columns of y and of the matrix.
        """
        g = point.gradient / self.scale
        if not self.penalty.smooth:
            w, l1 = self._costly(point.w), np.asarray(self.penalty.l1)
            costly = g[: len(w)]
            costly[...] = np.where(
                w != 0,
                costly + l1 * np.sign(w),
                np.sign(costly) * np.maximum(np.abs(costly) - l1, 0),
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
        scale = self.scale[: len(costly)]
        # A step in the units of the solver is a step times the square of the scale in the user's.
        shrunk = self.penalty.shrink(costly, step * np.square(scale)) / scale
        return np.concatenate([shrunk, w[len(costly) :]])

    # -- curvature -----------------------------------------------------------------------------

    def bend(self, z: Floats) -> Callable[[Floats], tuple[Floats, Floats]]:
        """Return the function ``v -> (H @ v, predict(v))`` for the Hessian ``H`` at ``z``.

        Each call takes two rounds.
        """

        def times(v: Floats) -> tuple[Floats, Floats]:
            q = self.predict(v)
            pull = self.gather(self.weighed(self.family.bend(z, self.y, q)))
            return pull + self._penalty_gradient(v), q

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
        H = H * np.outer(self.scale, self.scale)
        return np.asarray(H + np.diag(self._penalty_gradient(np.ones(len(H)))))

    def curvature(self, z: Floats, d: Floats, q: Floats) -> float:
        """Return the second derivative at ``z`` along ``d``, where ``q = predict(d)``."""
        loss = np.vdot(q, self.weighed(self.family.bend(z, self.y, q)))
        return float(loss + np.vdot(d, self._penalty_gradient(d)))

    def _costly(self, w: Floats) -> Floats:
        """Return the penalised coefficients, in the units of the user."""
        w = self.scale * w
        return w[:-1] if self.intercept.column and not self.intercept.penalised else w

    def _penalty_gradient(self, w: Floats) -> Floats:
        """Return the gradient of the smooth part of the penalty, shape of ``w``."""
        pull = self.penalty.gradient(self._costly(w))
        if len(pull) < len(w):
            pull = np.concatenate([pull, np.zeros_like(w[-1:])])
        return self.scale * pull


def check_weights(name: str, weights: npt.ArrayLike, rows: int) -> Floats:
    """Return the weights of rows as an array, shape (rows,); one number is that of all rows.

    Raises
    ------
    ValueError
        If there is not one for each row, or they are negative, not finite or all zero.
    TypeError
        If they are masked.
    """
    found = np.asarray(check_unmasked(f"Argument {name!r}", weights), dtype=np.float64)
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


def powers_of_two(values: npt.ArrayLike) -> Floats:
    """Return the power of two that is closest to each positive number."""
    return np.exp2(np.clip(np.rint(np.log2(values)), *_EXPONENTS))


def _sizes(operator: Any, weights: Floats, means: Floats, spread: Floats, seed: int = 1) -> Floats:
    """Estimate the size of the entries of each centred column, within a factor of 2; one round."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal((len(weights), _NORMAL)) * np.sqrt(weights)[:, np.newaxis]
    cauchy = random.standard_cauchy((len(weights), _CAUCHY)) * weights[:, np.newaxis]
    factors = np.column_stack([normal, cauchy])
    sums = np.asarray(operator.T @ factors, dtype=np.float64)
    # In units of the spread, so that squares do not overflow.
    sums = np.abs(sums - np.outer(means, factors.sum(axis=0))) / spread[:, np.newaxis]
    square = (_PROBES + np.square(sums[:, :_NORMAL]).sum(axis=1)) / (_PROBES + _NORMAL)
    # A sum with Cauchy factors is distributed as a single factor times the sum of absolute values,
    # and the mean logarithm of a factor's absolute value is 0.
    with np.errstate(divide="ignore"):
        return np.asarray(spread * square / np.exp(np.log(sums[:, _NORMAL:]).mean(axis=1)))


def _scale(sizes: Floats, penalty: Penalty, intercept: Intercept, targets: Any) -> Floats:
    """Return what brings columns to the median size of all, if theirs is very different.

    The others stay in the user's units. In these, a solver finds the smallest among coefficients
    that fit equally well, and columns that are mostly zero matter less.

    Parameters
    ----------
    sizes : ndarray, shape (p,)
        Of the entries of each column; NaN for columns to leave as they are.
    """
    # The curvature along a column is about its square, plus the L2 penalty.
    own = np.sqrt(np.broadcast_to(penalty.l2, targets))
    sizes = np.hypot(sizes.reshape(-1, *(1 for _ in targets)), own)
    known = ~np.isnan(sizes)
    median = np.ones(targets)
    if known.any():
        median = np.nanmedian(sizes, axis=0)
    ratios = np.where(known, sizes / median, 1.0)
    if intercept.column:
        # Together, the columns have a direction of much more curvature than a single one.
        last = np.hypot(intercept.column, own if intercept.penalised else np.zeros(targets))
        most = np.maximum(median, np.sqrt(np.nansum(np.square(sizes), axis=0)))
        ratios = np.concatenate([ratios, (last / np.clip(last, median, most))[np.newaxis]])
    apart = (ratios > _APART) | (ratios < 1 / _APART)
    return np.where(apart, 1 / powers_of_two(ratios), 1.0)


def _beside(sums: Floats, common: Floats) -> Floats:
    """Return the root mean square of each row, but for its part along a vector."""
    along = np.outer(sums @ common / max(float(common @ common), 1e-300), common)
    return root_mean_square((sums - along).T, np.ones(len(common)))


def _rounding(operator: Any) -> float:
    """Return the relative rounding error of the numbers in a matrix, also of its coded pieces."""
    dtype = np.dtype(getattr(operator, "dtype", np.float64))
    stored = dtype if dtype.kind == "f" else np.dtype(np.float64)
    return float(max(np.finfo(stored).eps, np.finfo(np.float64).eps))
