"""Columns in very different units, under several processors' BLAS kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from threadpoolctl import threadpool_info

sklearn = pytest.importorskip("sklearn")

from sklearn import linear_model as reference  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402

from dask_coded.linear_model import (  # noqa: E402
    Intercept,
    Lasso,
    LinearRegression,
    Logistic,
    Penalty,
    Ridge,
    SquaredError,
    SquaredHinge,
    minimize,
)
from dask_coded.linear_model._objective import Objective  # noqa: E402
from dask_coded.loop import Loop  # noqa: E402

N, P = 300, 9
SPANS = {"none": (0, 0), "tiny": (-8, -8), "huge": (8, 8), "mixed": (-8, 8), "small": (-12, 1)}


def data(span, dtype=np.float64, offset=0.0):
    """Return columns in units that span a range of exponents, the units, and targets."""
    rng = np.random.default_rng(0)
    units = rng.permutation(np.logspace(*SPANS[span], P))
    X = ((rng.standard_normal((N, P)) + offset) * units).astype(dtype)
    y = (X / units) @ rng.uniform(1, 3, P) + rng.standard_normal(N)
    return X, units, y


@pytest.fixture(autouse=True)
def _converges():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        yield


def centred(X, y, fit_intercept):
    return (X - X.mean(axis=0), y - y.mean()) if fit_intercept else (X, y)


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("span", SPANS)
def test_least_squares_of_columns_in_very_different_units(span, dtype, fit_intercept):
    X, units, y = data(span, dtype, offset=fit_intercept * 2.0)
    expected = np.linalg.lstsq(*centred(X / units, y, fit_intercept), rcond=None)[0]
    for convert in (np.asarray, sp.csr_array):
        model = LinearRegression(fit_intercept=fit_intercept).fit(convert(X), y)
        np.testing.assert_allclose(model.coef_ * units, expected, rtol=1e-7)
        assert model.n_iter_ < 200
    assert model.score(X, y) > 0.9


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("solver", ["auto", "lbfgs", "newton"])
@pytest.mark.parametrize("span", SPANS)
def test_ridge_of_columns_in_very_different_units(span, solver, fit_intercept):
    X, units, y = data(span)
    A, b = centred(X / units, y, fit_intercept)
    # In coefficients that are not far apart, whatever the data or the penalty determine.
    costs = 1 / units
    sizes = np.hypot(np.linalg.norm(A, axis=0), costs)
    stacked = np.concatenate([A / sizes, np.diag(costs / sizes)])
    expected = np.linalg.lstsq(stacked, np.append(b, np.zeros(P)), rcond=None)[0] / sizes
    model = Ridge(1.0, solver=solver, fit_intercept=fit_intercept).fit(X, y)
    np.testing.assert_allclose(
        model.coef_ * units, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize("span", ["none", "mixed"])
def test_lasso_of_columns_in_very_different_units(span):
    X, units, y = data(span)
    ours = Lasso(0.1).fit(X, y)
    theirs = reference.Lasso(0.1, tol=1e-8).fit(X, y)
    np.testing.assert_allclose(ours.coef_ * units, theirs.coef_ * units, atol=1e-5)


def lowest(X, y, family, l2, intercept):
    """Return the minimum of an objective by Newton's method in coefficients of equal curvature."""
    A, costs = X, np.full(X.shape[1], l2)
    if intercept.column:
        A = np.column_stack([X, np.full(len(X), intercept.column)])
        costs = np.append(costs, l2 * intercept.penalised)
    sizes = np.sqrt(np.square(A).mean(axis=0) + costs)
    A, costs = A / sizes, costs / sizes**2

    def value(v):
        return family.loss(A @ v, y).mean() + costs @ v**2 / 2

    v = np.zeros(A.shape[1])
    for _ in range(50):
        z = A @ v
        g = A.T @ family.slope(z, y) / len(y) + costs * v
        H = (A.T * family.curvature(z, y)) @ A / len(y) + np.diag(costs)
        step, t = np.linalg.solve(H, g), 1.0
        while value(v - t * step) > value(v) and t > 1e-9:
            t /= 2
        v = v - t * step
    return value(v)


@pytest.mark.parametrize("solver", ["lbfgs", "newton"])
@pytest.mark.parametrize(
    ("family", "intercept"),
    [
        (Logistic(), Intercept()),
        (Logistic(), Intercept(0.0)),
        (SquaredHinge(), Intercept(1.0, penalised=True)),
        (SquaredHinge(), Intercept(1e4, penalised=True)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("span", SPANS)
def test_classes_of_columns_in_very_different_units(span, family, intercept, solver):
    X, _, y = data(span)
    y = np.where(y > 0, 1.0, -1.0)
    found = minimize(X, y, family, Penalty(l2=1 / N), intercept=intercept, solver=solver, tol=1e-7)
    assert found.converged
    assert found.objective == pytest.approx(lowest(X, y, family, 1 / N, intercept), rel=1e-5)


# -- data in one unit ---------------------------------------------------------------------------


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


def scale(X, penalty=Penalty()):  # noqa: B008
    """Return the scale of each coefficient, that of the intercept last, and the products."""
    operator, rows = Counted(X), X.shape[0]
    weights = np.full(rows, 1 / rows)
    found = Objective.of(operator, np.zeros(rows), weights, SquaredError(), penalty, Intercept())
    return found.scale, operator.counts[0]


def test_columns_that_are_rarely_used_are_in_the_unit_of_the_others():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((2000, 30))
    factors, products = scale(normal)
    np.testing.assert_array_equal(factors, np.ones(31))
    assert products == 1
    # The most frequent column is 1 in half of the rows, the rarest in three.
    often = np.logspace(np.log10(3 / 2000), np.log10(0.5), 300)
    often_used = (rng.uniform(size=(2000, 300)) < often).astype(float)
    factors, products = scale(sp.csr_array(often_used))
    np.testing.assert_array_equal(factors, np.ones(301))
    assert products <= 3
    # In grams and in tons.
    factors, products = scale(normal * np.where(np.arange(30) % 3, 1.0, 1e6))
    assert (factors[::3][:10] < 1e-5).all()
    assert products == 3


def test_the_penalty_limits_how_much_a_column_is_scaled():
    X = np.random.default_rng(0).standard_normal((500, 3)) * [1.0, 1.0, 1e-9]
    factors, _ = scale(X, Penalty(l2=0.01))
    np.testing.assert_array_equal(factors, np.ones(4))


def test_rare_columns_that_are_redundant_have_the_smallest_coefficients():
    rng = np.random.default_rng(0)
    groups = rng.choice(5, p=[0.5, 0.3, 0.15, 0.045, 0.005], size=(1000, 2))
    X = np.concatenate([np.eye(5)[groups[:, 0]], np.eye(5)[groups[:, 1]]], axis=1)
    y = X @ rng.standard_normal(10) + 0.1 * rng.standard_normal(1000)
    model = LinearRegression().fit(X, y)
    expected = np.linalg.lstsq(X - X.mean(axis=0), y - y.mean(), rcond=1e-10)[0]
    np.testing.assert_allclose(model.coef_, expected, atol=1e-6)


class Kept(Loop):
    """A loop that keeps the last state and can resume from one."""

    def __init__(self, state=None):
        self.state = state

    def resume(self, state):
        return state if self.state is None else self.state

    def report(self, progress, state=None, last=False):
        self.state = state


class Misjudged(Counted):
    """A matrix whose columns seem to have other means and sizes: their random sums are wrong."""

    def __matmul__(self, other):
        found = super().__matmul__(other)
        if found.ndim == 2:
            found[:, :8] *= np.logspace(-0.5, 0.5, len(found))[:, np.newaxis]
        return found

    @property
    def T(self):
        return Misjudged(self.matrix.T, self.counts)


def test_a_fit_that_resumes_where_rounding_differs_keeps_what_its_state_is_relative_to():
    X, _, y = data("mixed")
    kept = Kept()
    minimize(X, y, SquaredError(), tol=0, max_iter=4, loop=kept)
    expected = minimize(X, y, SquaredError(), tol=1e-10)
    found = minimize(Misjudged(X), y, SquaredError(), tol=1e-10, loop=Kept(kept.state))
    np.testing.assert_allclose(found.coefficients, expected.coefficients, rtol=1e-12)
    assert found.history == expected.history
    # Else this test shows nothing.
    assert minimize(Misjudged(X), y, SquaredError(), tol=1e-10).history != expected.history


# -- processors ---------------------------------------------------------------------------------

# What a processor must have to run each of OpenBLAS's kernels: NumPy's names, old and new.
KERNELS = {
    "Sandybridge": {"AVX", "X86_V3"},
    "Haswell": {"AVX2", "X86_V3"},
    "Zen": {"AVX2", "X86_V3"},
    "SkylakeX": {"AVX512_SKX", "X86_V4"},
}

FIT = """
import warnings
import numpy as np
from threadpoolctl import threadpool_info
from dask_coded.linear_model import LinearRegression, LogisticRegression, Ridge

warnings.simplefilter("error")
rng = np.random.default_rng(0)
for units in ([1.0, 1e-12, 1e6], [1e-8, 1.0, 1e8], [1.0, 1.0, 1.0]):
    for offset in (0.0, 3.0):
        X = (rng.standard_normal((100, 3)) + offset) * units
        y = X @ ([1.0, 2.0, 3.0] / np.array(units))
        for model in (LinearRegression(), Ridge(0.0, solver="lbfgs"), Ridge(0.0, solver="newton")):
            np.testing.assert_allclose(model.fit(X, y).coef_ * units, [1.0, 2.0, 3.0], rtol=1e-6)
print({found["architecture"] for found in threadpool_info() if "architecture" in found})
"""


@pytest.mark.parametrize(
    "kernels",
    # Others are tested elsewhere, or have the same arithmetic.
    [pytest.param(k, marks=[pytest.mark.long] * (k in ("Zen", "SkylakeX"))) for k in KERNELS],
)
def test_a_fit_does_not_depend_on_the_kernels_of_the_processor(kernels):
    if not any(found["internal_api"] == "openblas" for found in threadpool_info()):
        pytest.skip("NumPy does not use OpenBLAS")
    simd = np.show_config(mode="dicts")["SIMD Extensions"]
    if not KERNELS[kernels] & {*simd.get("baseline", []), *simd.get("found", [])}:
        pytest.skip("this processor does not have the instructions")
    done = subprocess.run(
        [sys.executable, "-c", FIT],
        env=os.environ | {"OPENBLAS_CORETYPE": kernels},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # Most builds of OpenBLAS use Haswell's kernels for Zen.
    assert kernels in done.stdout or (kernels == "Zen" and "Haswell" in done.stdout)
