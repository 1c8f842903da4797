"""Solvers on plain operators: they find the minimum with two products per iteration."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Repetition
from dask_coded.linear_model import (
    Hinge,
    Intercept,
    Logistic,
    Multinomial,
    Penalty,
    SquaredError,
    SquaredHinge,
    minimize,
)
from dask_coded.linear_model._objective import Objective
from dask_coded.linear_model.solvers import RULES
from dask_coded.loop import Loop
from dask_coded.simulation import SimulatedOperator, Simulation, constant
from tests.decoded import Decoded

SMOOTH = {"none": Penalty(), "l2": Penalty(l2=0.1)}
CORNERED = {"l1": Penalty(l1=0.05), "elastic net": Penalty(l1=0.03, l2=0.05)}
PENALTIES = SMOOTH | CORNERED
FAMILIES = {
    "squared": SquaredError(),
    "logistic": Logistic(),
    "squared hinge": SquaredHinge(),
    "multinomial": Multinomial(),
}


def data(family, seed=0, n=80, p=5):
    """Return data with columns far from centred and classes that overlap."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p)) + rng.uniform(-3, 3, p)
    z = X @ rng.standard_normal(p) + 1.5 * rng.standard_normal(n)
    z -= z.mean()
    if isinstance(family, SquaredError):
        return X, z
    if isinstance(family, Multinomial):
        return X, np.eye(3)[np.digitize(z, [-1, 1])]
    return X, np.where(z > 0, 1.0, -1.0)


def slow_minimum(X, y, family, penalty, weights=None, intercept=True):
    """Return the minimum of the objective, found by one of SciPy's solvers."""
    k = y.shape[1:]
    weights = np.full(len(y), 1 / len(y)) if weights is None else weights / weights.sum()
    p = X.shape[1]

    def objective(parts):
        # Positive and negative parts make the L1 norm smooth.
        u, v, b = np.split(parts.reshape(-1, *k), [p, 2 * p])
        z = X @ (u - v) + (b[0] if intercept else 0.0)
        value = (weights @ family.loss(z, y)).sum() + penalty.l2 / 2 * np.square(u - v).sum()
        value += penalty.l1 * (u + v).sum()
        pull = (weights * family.slope(z, y).T).T
        g = X.T @ pull + penalty.l2 * (u - v)
        tail = pull.sum(axis=0, keepdims=True) * intercept
        return value, np.concatenate([g + penalty.l1, penalty.l1 - g, tail]).ravel()

    shape = (2 * p + 1, *k)
    bounds = np.zeros((*shape, 2))
    bounds[..., 1] = np.inf
    bounds[2 * p :, ..., 0] = -np.inf
    found = scipy.optimize.minimize(
        objective,
        np.zeros(np.prod(shape)),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds.reshape(-1, 2),
        options={"maxiter": 5000, "maxfun": 50000, "ftol": 1e-15, "gtol": 1e-10},
    )
    return found.fun


@pytest.mark.parametrize("solver", RULES)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_solver_finds_the_minimum(family, penalty, solver):
    if penalty in CORNERED and solver not in ("nesterov", "proximal"):
        pytest.skip("needs a smooth penalty")
    family, penalty = FAMILIES[family], PENALTIES[penalty]
    X, y = data(family)
    found = minimize(X, y, family, penalty, solver=solver, tol=1e-7, max_iter=5000)
    assert found.converged
    assert found.objective == pytest.approx(slow_minimum(X, y, family, penalty), rel=1e-7)
    # The reported objective is that of the returned coefficients.
    z = X @ found.coefficients + found.intercept
    value = family.loss(z, y).sum() / len(y) + penalty.value(found.coefficients)
    assert value == pytest.approx(found.objective, rel=1e-10)


@settings(max_examples=20)
@given(
    st.integers(0, 10**6),
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(sorted(PENALTIES)),
    st.booleans(),
)
def test_minimum_with_weights_and_without_intercept(seed, family, penalty, intercept):
    family, penalty = FAMILIES[family], PENALTIES[penalty]
    X, y = data(family, seed, n=60, p=3)
    weights = np.random.default_rng(seed).uniform(0, 3, len(y))
    found = minimize(
        X,
        y,
        family,
        penalty,
        weights=weights,
        intercept=Intercept(float(intercept)),
        tol=1e-8,
        max_iter=5000,
    )
    expected = slow_minimum(X, y, family, penalty, weights, intercept)
    assert found.objective <= expected * (1 + 1e-6) + 1e-12
    if penalty.l1 or penalty.l2:  # else the classes may be separable
        assert found.objective == pytest.approx(expected, rel=1e-6)


def test_least_squares_is_exact():
    X, y = data(SquaredError())
    found = minimize(X, y, SquaredError(), tol=1e-12)
    exact = np.linalg.lstsq(np.column_stack([X, np.ones(len(X))]), y, rcond=None)[0]
    np.testing.assert_allclose(found.coefficients, exact[:-1], rtol=1e-9)
    assert found.intercept == pytest.approx(exact[-1], rel=1e-9)
    # Like conjugate gradients, it needs as many iterations as there are columns.
    assert found.rounds <= X.shape[1] + 1


def test_least_squares_with_more_columns_than_rows_has_the_smallest_coefficients():
    X, y = data(SquaredError(), n=6, p=15)
    found = minimize(X, y, SquaredError(), tol=1e-12)
    centred = np.linalg.lstsq(X - X.mean(axis=0), y - y.mean(), rcond=None)[0]
    np.testing.assert_allclose(found.coefficients, centred, rtol=1e-7)


@pytest.mark.parametrize("solver", ["lbfgs", "newton"])
def test_hinge_is_within_tol_of_its_minimum(solver):
    X, y = data(Hinge())
    penalty = Penalty(l2=0.05)
    found = minimize(X, y, Hinge(), penalty, solver=solver, tol=1e-5, max_iter=3000)
    assert found.converged
    w = np.concatenate([found.coefficients, [found.intercept]])

    # The dual: a quadratic over a box, with one equation.
    K = (y[:, np.newaxis] * X) @ (y[:, np.newaxis] * X).T / penalty.l2

    def dual(a):
        return 0.5 * a @ K @ a - a.sum(), K @ a - 1

    best = scipy.optimize.minimize(
        dual,
        np.zeros(len(y)),
        jac=True,
        method="SLSQP",
        bounds=[(0, 1 / len(y))] * len(y),
        constraints={"type": "eq", "fun": lambda a: a @ y, "jac": lambda a: y},
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    assert len(w) == X.shape[1] + 1
    assert -best.fun * (1 - 1e-7) <= found.objective <= -best.fun * (1 + 3e-5)


def test_a_penalised_intercept_is_a_coefficient_of_a_constant_column():
    X, y = data(SquaredHinge())
    penalty = Penalty(l2=0.2)
    found = minimize(X, y, SquaredHinge(), penalty, intercept=Intercept(3.0, True), tol=1e-9)
    wide = np.column_stack([X, np.full(len(X), 3.0)])
    other = minimize(wide, y, SquaredHinge(), penalty, intercept=Intercept(0.0), tol=1e-9)
    np.testing.assert_allclose(found.coefficients, other.coefficients[:-1], rtol=1e-6)
    assert found.intercept == pytest.approx(3 * other.coefficients[-1], rel=1e-6)


# -- operators and rounds ----------------------------------------------------------------------


class Counted:
    """A matrix that counts its products."""

    def __init__(self, matrix, counts=None):
        self.matrix = matrix
        self.shape = matrix.shape
        self.counts = [0] if counts is None else counts

    def __matmul__(self, other):
        self.counts[0] += 1
        return self.matrix @ other

    @property
    def T(self):
        return Counted(self.matrix.T, self.counts)


@pytest.mark.parametrize("solver", ["gradient", "lbfgs", "proximal"])
def test_an_iteration_takes_two_products(solver):
    X, y = data(Logistic())

    def products(rounds):
        operator = Counted(X)
        minimize(operator, y, Logistic(), Penalty(l2=0.1), solver=solver, tol=0, max_iter=rounds)
        return operator.counts[0]

    assert products(9) - products(4) == 10


def test_all_kinds_of_operators_give_the_same_fit():
    X, y = data(Logistic())
    X[np.abs(X) < 1] = 0
    simulated = SimulatedOperator(X, Simulation(MDS(4, 3), constant([1, 1, 1, 0.2])))
    expected = minimize(X, y, Logistic(), Penalty(l2=0.1), tol=1e-9).coefficients
    for operator in (sp.csr_array(X), sp.csr_matrix(X), simulated):
        found = minimize(operator, y, Logistic(), Penalty(l2=0.1), tol=1e-9)
        np.testing.assert_allclose(found.coefficients, expected, rtol=1e-7)
    assert len(simulated.rounds) >= 2 * found.rounds


class Pair:
    """Stands for a coded pair of X and X."""

    def __init__(self, matrix):
        self.matrix = matrix

    def product(self, d):
        return self.matrix.T @ (d[:, np.newaxis] * self.matrix)


@pytest.mark.parametrize("intercept", [Intercept(), Intercept(0.0), Intercept(2.0, True)], ids=repr)
def test_newton_uses_the_hessian_of_a_pair(intercept):
    X, y = data(Logistic())
    options = {"tol": 1e-9, "intercept": intercept}
    by_product = minimize(X, y, Logistic(), Penalty(l2=0.1), pair=Pair(X), **options)
    by_gradients = minimize(X, y, Logistic(), Penalty(l2=0.1), solver="newton", **options)
    np.testing.assert_allclose(by_product.coefficients, by_gradients.coefficients, rtol=1e-7)
    assert by_product.rounds <= 8
    objective = Objective.of(
        X, y, np.full(len(y), 1 / len(y)), Logistic(), Penalty(l2=0.1), intercept, Pair(X)
    )
    z = np.linspace(-1, 1, len(y))
    H = objective.hessian(z)
    columns = [objective.bend(z)(e)[0] for e in np.eye(len(H))]
    np.testing.assert_allclose(H, np.stack(columns), atol=1e-12)


# -- products with errors ----------------------------------------------------------------------


class Inexact(Counted):
    """A matrix some of whose products from the left have random relative errors."""

    def __init__(self, matrix, error, products=range(10**6)):
        super().__init__(matrix)
        self.error = error
        self.products = products
        self.random = np.random.default_rng(0)

    def __matmul__(self, other):
        found = super().__matmul__(other)
        if self.counts[0] in self.products:
            found *= 1 + self.error * self.random.standard_normal(found.shape)
        return found


def true_residual(X, y, found):
    objective = Objective.of(
        X, y - y.mean(), np.full(len(y), 1 / len(y)), SquaredError(), Penalty(), Intercept()
    )
    inside = objective.inside(found.coefficients, found.intercept - y.mean())
    return objective.residual(objective.point(inside))


@pytest.mark.parametrize("error", [1e-8, 3e-4])
@pytest.mark.parametrize("solver", RULES)
def test_a_product_with_errors_does_not_hide_the_gradient(solver, error):
    X, y = data(SquaredError(), n=300, p=20)
    operator = Inexact(X, error, products=range(4, 9))
    found = minimize(operator, y, SquaredError(), solver=solver, tol=1e-10)
    assert found.converged
    assert true_residual(X, y, found) == pytest.approx(found.residual, rel=1e-2)


@pytest.mark.parametrize("solver", RULES)
def test_a_fit_ends_if_products_are_not_accurate_enough(solver):
    X, y = data(SquaredError(), n=300, p=20)
    found = minimize(Inexact(X, 1e-8), y, SquaredError(), solver=solver, tol=1e-11)
    assert not found.converged
    assert found.rounds < 200
    assert found.residual == pytest.approx(true_residual(X, y, found), rel=1)


@pytest.mark.parametrize("code", [MDS(12, 10), MDS(50, 40), Repetition(4, 2)], ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tolerance_that_parity_of_single_precision_cannot_reach_is_raised(dtype, code):
    X, y = data(SquaredError(), n=400, p=10)
    X = X.astype(dtype)
    found = minimize(Decoded(X, code), y, SquaredError(), tol=1e-10)
    assert found.converged
    assert found.rounds < 20
    coarse = dtype == np.float32 and isinstance(code, MDS)
    assert (found.residual > 1e-10) == coarse
    exact = np.linalg.lstsq(np.column_stack([X, np.ones(len(X))]), y, rcond=None)[0]
    np.testing.assert_allclose(found.coefficients, exact[:-1], rtol=1e-4 if coarse else 1e-8)


# -- the loop ----------------------------------------------------------------------------------


class Heard(Loop):
    """A loop that records its reports and can resume from a state."""

    def __init__(self, state=None):
        self.state = state
        self.reports = []

    def resume(self, state):
        return state if self.state is None else self.state

    def report(self, progress, state=None, last=False):
        self.state = state
        self.reports.append((progress, last))


@pytest.mark.parametrize("solver", RULES)
def test_a_resumed_fit_continues_where_it_stopped(solver):
    X, y = data(Logistic())

    def fit(loop, max_iter):
        options = {"solver": solver, "tol": 0, "max_iter": max_iter, "loop": loop}
        return minimize(X, y, Logistic(), Penalty(l2=0.01), **options)

    whole, part = Heard(), Heard()
    expected = fit(whole, 9)
    fit(part, 4)
    rest = Heard(part.state)
    found = fit(rest, 9)
    assert [progress.round for progress, _ in rest.reports] == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(found.coefficients, expected.coefficients)
    assert found.history == expected.history
    assert [last for _, last in whole.reports] == [False] * 8 + [True]


@pytest.mark.parametrize("tol", [0, 1e-3], ids=["stopped", "converged"])
def test_a_fit_that_has_ended_has_the_same_result_at_once(tol):
    X, y = data(Logistic())
    ended = Heard()
    options = {"penalty": Penalty(l2=0.01), "tol": tol, "max_iter": 30}
    expected = minimize(X, y, Logistic(), loop=ended, **options)
    assert expected.converged == bool(tol)
    again = Heard(ended.state)
    found = minimize(X, y, Logistic(), loop=again, **options)
    assert not again.reports
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value)


def test_data_without_rows_are_refused():
    with pytest.raises(ValueError, match="at least one row and one target, they have none"):
        minimize(np.zeros((0, 2)), [], SquaredError())


@pytest.mark.parametrize("solver", RULES)
def test_a_fit_that_overflows_ends_at_once(solver):
    X, y = data(Logistic())
    operator = Counted(1e160 * X)
    with pytest.raises(ValueError, match="fit overflows in iteration 1: scale the data"):
        minimize(operator, y, Logistic(), solver=solver)
    assert operator.counts[0] < 10


def test_history_has_each_iteration():
    X, y = data(Logistic())
    found = minimize(X, y, Logistic(), Penalty(l2=0.01), tol=1e-8)
    assert [progress.round for progress in found.history] == list(range(1, found.rounds + 1))
    objectives = [progress.objective for progress in found.history]
    assert objectives == sorted(objectives, reverse=True)
    assert found.history[-1].residual == found.residual <= 1e-8


def test_a_start_at_the_minimum_takes_one_iteration():
    X, y = data(Logistic())
    first = minimize(X, y, Logistic(), Penalty(l2=0.01), tol=1e-8)
    start = first.coefficients, first.intercept
    assert minimize(X, y, Logistic(), Penalty(l2=0.01), tol=1e-8, start=start).rounds == 1


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ({"solver": "magic"}, "'solver' must be 'auto' or one of .*, it is 'magic'"),
        ({"solver": "lbfgs", "penalty": Penalty(l1=1.0)}, "needs a smooth penalty"),
        ({"y": np.ones(3)}, "'y' must have one value or one row for each of the 80 rows"),
        ({"y": np.arange(80)}, "'y' must hold only -1 and 1, it has 0.0"),
        ({"y": np.full(80, np.nan), "family": SquaredError()}, "'y' must hold finite numbers"),
        ({"y": np.ones(80), "family": Multinomial()}, "'y' must have a column for each class"),
        ({"operator": np.full((80, 5), np.nan)}, "data must hold finite numbers"),
        ({"tol": -1}, "'tol' must be 0 or a positive number, it is -1"),
        ({"max_iter": 0}, "'max_iter' must be a whole number of at least 1, it is 0"),
        ({"weights": [1.0]}, "'weights' must have one value for each of the 80 rows"),
        ({"weights": -np.ones(80)}, "'weights' must be finite, not negative"),
        ({"start": (np.zeros(4), 0.0)}, r"'start' must have coefficients of shape \(5,\)"),
    ],
)
def test_arguments_out_of_range(argument, complaint):
    X, y = data(Logistic())
    with pytest.raises(ValueError, match=complaint):
        minimize(**{"operator": X, "y": y, "family": Logistic(), **argument})
