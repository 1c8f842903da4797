r"""Five solvers that take two rounds per iteration, ``X @ d`` and ``X.T @ r``, or a few more.

Predictions are linear in the coefficients, so one product :math:`q = X d` with a direction gives
the objective everywhere along it. Line searches are therefore exact and cost no further round. The
second product gives the gradient at the end of the search.

============= =========================================== ========== ==========================
solver        direction                                   penalties  rounds per iteration
============= =========================================== ========== ==========================
``gradient``  steepest descent                            smooth     2
``lbfgs``     limited-memory BFGS [1]_                    smooth     2
``newton``    truncated Newton [1]_ by conjugate          smooth     2 per step of conjugate
              gradients, or with a coded pair                        gradients; 4 with a pair
``nesterov``  accelerated proximal gradient [2]_ with     all        2, seldom 3
              restarts [3]_
``proximal``  proximal gradient with Barzilai-Borwein     all        2
              steps [4]_
============= =========================================== ========== ==========================

On a quadratic, L-BFGS with exact line searches takes the same steps as conjugate gradients.

Before the first iteration there are one to three rounds for the means, spreads and sizes of the
columns. Columns in units that differ by orders of magnitude are scaled inside the solver.

Predictions are the sum of the products of all iterations, and so are their errors. Once the
gradient is small enough, two more rounds compute both again from the coefficients. If it is not
small then, the solver starts again from there.

References
----------
.. [1] J. Nocedal, S. Wright, "Numerical optimization", 2006, sections 7.1 and 7.2.
.. [2] A. Beck, M. Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear inverse
       problems", SIAM J. Imaging Sciences 2(1), 2009.
.. [3] B. O'Donoghue, E. Candès, "Adaptive restart for accelerated gradient schemes", Foundations of
       Computational Mathematics 15, 2015.
.. [4] S. Wright, R. Nowak, M. Figueiredo, "Sparse reconstruction by separable approximation", IEEE
       Trans. Signal Processing 57(7), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_stopping, reachable
from dask_coded.linear_model._objective import Intercept, Objective, check_weights
from dask_coded.linear_model._rules import RULES, Rule
from dask_coded.linear_model.families import Family, Floats
from dask_coded.linear_model.penalties import Penalty
from dask_coded.loop import QUIET, Loop, Progress
from dask_coded.summary import Summary

NO_PENALTY = Penalty()
FREE_INTERCEPT = Intercept()

# The products are not accurate enough for the tolerance if so many new starts do not halve the
# residual. One alone may fail to by chance.
_RESTARTS = 3


@dataclass(frozen=True, repr=False)
class Solution(Summary):
    """The result of a solver.

    Parameters
    ----------
    coefficients : ndarray, shape (p,) or (p, k)
    intercept : ndarray, shape () or (k,)
    rounds : int
        Number of iterations.
    residual : float
        Largest absolute entry of the gradient (or least subgradient) of the mean loss plus penalty,
        in the units of ``tol``.
    objective : float
        Mean loss plus penalty.
    converged : bool
        Whether the tolerance was reached. If not, and there are fewer rounds than ``max_iter``, the
        products are not accurate enough for it.
    history : tuple of Progress
        One entry per iteration.
    hidden : int
        Number of columns that vary so little beside their means that they are taken as constant.
    """

    coefficients: Floats
    intercept: Floats
    rounds: int
    residual: float
    objective: float
    converged: bool
    history: tuple[Progress, ...]
    hidden: int = 0


def minimize(
    operator: Any,
    y: npt.ArrayLike,
    family: Family,
    penalty: Penalty = NO_PENALTY,
    *,
    solver: str = "auto",
    weights: npt.ArrayLike | None = None,
    intercept: Intercept = FREE_INTERCEPT,
    start: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    pair: Any = None,
    tol: float = 1e-6,
    max_iter: int = 1000,
    loop: Loop = QUIET,
) -> Solution:
    r"""Minimise mean loss plus penalty over the coefficients of a linear model, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ w`` and ``operator.T @ r``, shape (n, p)
        The data: a NumPy array, a SciPy sparse matrix, or a coded operator inside the cluster.
    y : array_like, shape (n,) or (n, k)
        Targets, in the form that the family expects.
    family : Family
    penalty : Penalty
    solver : {"auto", "gradient", "lbfgs", "newton", "nesterov", "proximal"}
        "auto" leaves the choice to :func:`solver_for`.
    weights : array_like, shape (n,), optional
        Of the rows, not negative; they are divided by their sum. Default: all equal.
    intercept : Intercept
        The constant term of the predictions.
    start : (coefficients, intercept), optional
        Where to start; by default zero coefficients, and for least squares the mean of ``y``.
    pair : anything with ``pair.product(d)``, optional
        The same data as a coded pair of ``X`` and ``X``. If ``y`` has one dimension, solver
        "newton" then computes ``X.T @ diag(d) @ X`` in one round, and "auto" is "newton" if the
        penalty is smooth.
    tol : float
        Stop when the largest absolute entry of the gradient (or least subgradient) of the mean loss
        plus penalty is at most this. For least squares the unit is the standard deviation of the
        column of ``y``, times that of the column of the data, which is estimated within about a
        third. They are root mean squares if the intercept is not free. For the hinge loss,
        the objective must also be within a relative ``tol`` of its minimum. If the operator is
        coded in single precision, and its code has parity, this is at least 1.2e-6 unless it is 0.
    max_iter : int
        Maximum number of iterations.
    loop : Loop
        Receives a report of each iteration.

    Returns
    -------
    Solution

    Raises
    ------
    ValueError
        If an argument is out of range, the solver does not support the penalty, the data contain
        NaN or infinity, or the numbers in a fit become too large.

    Examples
    --------
    A line through three points, by least squares:

    >>> from dask_coded.linear_model.families import SquaredError
    >>> X = np.array([[0.0], [1.0], [2.0]])
    >>> found = minimize(X, [1.0, 3.0, 5.0], SquaredError(), tol=1e-10)
    >>> found.coefficients.round(6), float(found.intercept.round(6))
    (array([2.]), 1.0)
    """
    check_options(penalty, solver, tol, max_iter)
    tol = reachable(tol, operator)
    y = np.asarray(y, dtype=np.float64)
    if y.ndim not in (1, 2) or len(y) != operator.shape[0]:
        raise ValueError(
            f"Argument 'y' must have one value or one row for each of the {operator.shape[0]} rows "
            f"of the data, its shape is {y.shape}."
        )
    if not y.size:
        raise ValueError("The data must have at least one row and one target, they have none.")
    family.check(y)
    penalty.check(y.shape[1:])
    shares = np.ones(len(y)) if weights is None else check_weights("weights", weights, len(y))
    # A large mean would be the unit of the gradient, and hide how far the coefficients are off.
    free = intercept.column and not intercept.penalised
    center = family.center(y, shares) if free else 0.0
    objective = Objective.of(
        operator, y - center, shares / shares.sum(), family, penalty, intercept, pair
    )
    if solver == "auto":
        with_hessian = pair is not None and y.ndim == 1 and penalty.smooth
        solver = "newton" if with_hessian else solver_for(family, penalty)
    rule: Rule = RULES[solver]()
    width = operator.shape[1], *y.shape[1:]
    if start is None:
        start = np.zeros(width), np.zeros(width[1:]) + center
    coefficients, shift = (np.asarray(part, dtype=np.float64) for part in start)
    if coefficients.shape != width or shift.shape != width[1:]:
        raise ValueError(
            f"Argument 'start' must have coefficients of shape {width} and intercepts of shape "
            f"{width[1:]}, the shapes are {coefficients.shape} and {shift.shape}."
        )
    history: tuple[Progress, ...] = ()
    missed: tuple[float, ...] = ()
    # What the point and the rule are relative to, which another worker may estimate differently.
    columns = {name: getattr(objective, name) for name in ("means", "spread", "scale", "hidden")}
    first, columns, point, rule, family, history, converged, missed = loop.resume(
        (1, columns, None, rule, family, history, False, missed)
    )
    objective = replace(objective, family=family, **columns)
    if point is None:
        point = objective.point(objective.inside(coefficients, shift - center))
        if not np.isfinite(point.gradient).all():
            raise ValueError("The data must hold finite numbers, they have NaN or infinity.")
        with np.errstate(over="ignore"):
            if not np.isfinite(objective.value(point.w, point.z)):
                raise ValueError("The loss overflows: scale the targets, or the start.")
    for i in range(first, max_iter + 1):
        if converged or _stalls(missed):  # a loop that has ended is resumed
            break
        # A warm start may be at the minimum already.
        with np.errstate(over="ignore", invalid="ignore"):
            if moved := i > 1 or objective.residual(point) > tol:
                point, rule = rule.advance(objective, point)
            residual, exact = objective.residual(point), family.exact()
        if not np.isfinite(residual):
            raise ValueError(
                f"The fit overflows in iteration {i}: scale the data, as scikit-learn's "
                "`MaxAbsScaler` does, and the targets."
            )
        if moved and residual <= tol:
            point = objective.point(point.w)
            residual = objective.residual(point)
            if residual > tol:
                missed, rule = (*missed, residual), type(rule)()
        value = objective.value(point.w, point.z, exact)
        converged = residual <= tol
        if converged and value - objective.value(point.w, point.z) > tol * value:
            # This is the minimum of an approximation that is not close enough yet.
            converged, missed, family = False, (), family.sharper()
            objective = replace(objective, family=family)
            point, rule = objective.point(point.w, point.z), type(rule)()
        progress = Progress.of(operator, i, residual, value)
        history = (*history, progress)
        last = converged or i == max_iter or _stalls(missed)
        state = (i + 1, columns, point, rule, family, history, converged, missed)
        loop.report(progress, state=state, last=last)
    coefficients, shift = objective.outside(point.w)
    end = history[-1]
    assert end.objective is not None
    return Solution(
        coefficients,
        shift + center,
        end.round,
        end.residual,
        end.objective,
        converged,
        history,
        objective.hidden,
    )


def _stalls(missed: tuple[float, ...]) -> bool:
    """Return whether the last residuals from which the solver started again are no smaller."""
    before, since = missed[:-_RESTARTS], missed[-_RESTARTS:]
    return bool(before) and min(since) > min(before) / 2


def solver_for(family: Family, penalty: Penalty) -> str:
    """Return the solver that usually takes the fewest rounds for a family and a penalty.

    Examples
    --------
    >>> from dask_coded.linear_model.families import Hinge, Logistic
    >>> solver_for(Logistic(), Penalty(l2=1.0)), solver_for(Logistic(), Penalty(l1=1.0))
    ('lbfgs', 'nesterov')
    >>> solver_for(Hinge(), Penalty(l2=1.0))
    'newton'
    """
    if not penalty.smooth:
        return "nesterov"
    # L-BFGS uses only gradients, which reveal little of a sharp corner.
    return "lbfgs" if family.exact() is family else "newton"


# -- checks ------------------------------------------------------------------------------------


def check_options(penalty: Penalty, solver: str, tol: float, max_iter: int) -> None:
    """Check what can be checked before the data are there.

    Raises
    ------
    ValueError
        If an argument is out of range, or the solver does not support the penalty.
    """
    if solver != "auto" and solver not in RULES:
        raise ValueError(
            f"Argument 'solver' must be 'auto' or one of {sorted(RULES)}, it is {solver!r}."
        )
    if not penalty.smooth and solver not in ("auto", "nesterov", "proximal"):
        raise ValueError(
            f"Solver {solver!r} needs a smooth penalty, this one has an L1 part: use 'nesterov' or "
            "'proximal'."
        )
    check_stopping(tol, max_iter)
