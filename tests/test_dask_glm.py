"""dask-glm's unmodified algorithms give the same results on a coded array as on a dask array.

With ``normalize=False`` they multiply by the array itself, so the products are coded rounds.
Otherwise they multiply by a standardised copy, which is a plain dask array over the coded one.
"""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_coded as coded

algorithms = pytest.importorskip("dask_glm.algorithms")
estimators = pytest.importorskip("dask_glm.estimators")
families = pytest.importorskip("dask_glm.families")

# dask-glm 0.4 uses the former name of a Dask option, and an option that SciPy has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Dask configuration key 'fuse_ave_width':FutureWarning"),
    pytest.mark.filterwarnings("ignore:scipy.optimize. The `disp`:DeprecationWarning"),
]

ROWS, COLUMNS = 120, 4
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, COLUMNS))
ETA = X @ [1.0, -0.5, 0.25, 0.0]
TARGETS = {
    "Logistic": (rng.random(ROWS) < 1 / (1 + np.exp(-ETA))).astype(float),
    "Normal": ETA + rng.standard_normal(ROWS),
    "Poisson": rng.poisson(np.exp(ETA)).astype(float),
}
ALGORITHMS = {
    "gradient_descent": {"max_iter": 3},
    "newton": {"max_iter": 2},
    "lbfgs": {"max_iter": 3},
    "admm": {"max_iter": 2},
    "proximal_grad": {"max_iter": 3},
}


@pytest.fixture(scope="module", autouse=True)
def _start(client):
    # Every fit of dask-glm scatters the same initial coefficients under the same key. They are kept
    # here because the scheduler forgets the key if the release after one fit comes late.
    start = client.scatter(np.zeros(COLUMNS))
    yield
    del start


@pytest.fixture(scope="module")
def encoded(client):
    return coded.encode(X, coded.MDS(4, 3), client=client, transpose=True)


@pytest.fixture
def rounds(monkeypatch):
    """Record the lazy rounds that are created."""
    made = []
    product = coded.CodedArray._product
    monkeypatch.setattr(
        coded.CodedArray, "_product", lambda self, x: made.append(x) or product(self, x)
    )
    return made


def compare(client, encoded, fit):
    """Compare fits of the coded array in its cluster and of an equal dask array in threads."""
    with client.as_current():
        found = np.asarray(fit(encoded))
    np.testing.assert_allclose(
        found, fit(da.from_array(X, chunks=encoded.chunks)), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.long] * (f == "Poisson")) for f in TARGETS]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_coefficients_from_coded_rounds(client, encoded, rounds, algorithm, family):
    solve = getattr(algorithms, algorithm)
    options = {**ALGORITHMS[algorithm], "family": getattr(families, family), "normalize": False}
    y = da.from_array(TARGETS[family], chunks=encoded.chunks[0])
    compare(client, encoded, lambda A: solve(A, y, **options))
    # ADMM works on one chunk at a time and never multiplies by the whole matrix.
    assert bool(rounds) == (algorithm != "admm")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_coefficients_of_a_standardised_copy(client, encoded, algorithm):
    solve = getattr(algorithms, algorithm)
    y = da.from_array(TARGETS["Logistic"], chunks=encoded.chunks[0])
    with dask.config.set({"coded.on-uncoded": "ignore"}):
        compare(client, encoded, lambda A: solve(A, y, **ALGORITHMS[algorithm]))


def test_same_estimates(client, encoded):
    y = da.from_array(TARGETS["Normal"], chunks=encoded.chunks[0])

    def fit(A):
        model = estimators.LinearRegression(solver="gradient_descent", max_iter=3).fit(A, y)
        return [*model.coef_, model.intercept_, *model.predict(A).compute()]

    compare(client, encoded, fit)
