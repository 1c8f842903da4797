"""scikit-learn's defaults and names: accepted where they mean something, explained where not."""

from __future__ import annotations

import inspect

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp

import dask_coded as coded
from dask_coded.labels import axes_of
from dask_coded.products import UncodedArray

sklearn = pytest.importorskip("sklearn")
from sklearn import linear_model, svm  # noqa: E402
from sklearn.datasets import load_svmlight_file  # noqa: E402

rng = np.random.default_rng(0)
X = rng.standard_normal((300, 6))
Z = X @ rng.standard_normal(6) + rng.standard_normal(300)
TWO = Z > 0
PAIRS = [
    (linear_model.LogisticRegression, coded.linear_model.LogisticRegression, TWO),
    (svm.LinearSVC, coded.linear_model.LinearSVC, TWO),
    (linear_model.Ridge, coded.linear_model.Ridge, Z),
    (linear_model.Lasso, coded.linear_model.Lasso, Z),
    (linear_model.ElasticNet, coded.linear_model.ElasticNet, Z),
    (linear_model.LinearRegression, coded.linear_model.LinearRegression, Z),
]


@pytest.mark.parametrize(("theirs", "ours", "y"), PAIRS, ids=lambda p: getattr(p, "__name__", ""))
def test_names_without_a_meaning_change_nothing(theirs, ours, y):
    names = {"random_state", "n_jobs", "copy_X", "dual", "precompute", "selection"}
    names &= set(inspect.signature(theirs).parameters)
    names &= set(inspect.signature(ours).parameters)
    assert names
    expected = ours().fit(X, y).coef_
    for name in names:
        np.testing.assert_array_equal(ours(**{name: 1}).fit(X, y).coef_, expected)


@pytest.mark.parametrize(("theirs", "ours", "y"), PAIRS, ids=lambda p: getattr(p, "__name__", ""))
def test_defaults_of_scikit_learn_are_accepted(theirs, ours, y):
    model = ours(**theirs().get_params()).fit(X, y)
    np.testing.assert_allclose(model.coef_, theirs().fit(X, y).coef_, rtol=0.1, atol=0.01)


def test_no_ratio_is_no_l1_penalty():
    models = coded.linear_model
    expected = models.LogisticRegression().fit(X, TWO).coef_
    found = models.LogisticRegression(l1_ratio=None, penalty="deprecated").fit(X, TWO).coef_
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("model", ["LogisticRegression", "LinearSVC", "Lasso", "LinearRegression"])
def test_only_ridge_has_a_default_number_of_iterations(model):
    with pytest.raises(ValueError, match=r"'max_iter' must be a whole number .* it is None"):
        getattr(coded.linear_model, model)(max_iter=None).fit(X, TWO)


@pytest.mark.parametrize(
    ("model", "y", "solvers"),
    [
        (
            coded.linear_model.LogisticRegression,
            TWO,
            ["lbfgs", "newton-cg", "newton-cholesky", "sag", "saga"],
        ),
        (coded.linear_model.Ridge, Z, ["auto", "lsqr", "sparse_cg", "sag", "saga", "lbfgs"]),
    ],
)
def test_solvers_with_a_counterpart_find_the_same_minimum(model, y, solvers):
    expected = model(tol=1e-10, max_iter=1000).fit(X, y).coef_
    for solver in solvers:
        found = model(solver=solver, tol=1e-10, max_iter=1000).fit(X, y)
        np.testing.assert_allclose(found.coef_, expected, rtol=1e-6)
        assert found.get_params()["solver"] == solver


def test_saga_takes_an_l1_penalty():
    options = {"l1_ratio": 1.0, "C": 0.1, "max_iter": 1000}
    ours = coded.linear_model.LogisticRegression(solver="saga", **options).fit(X, TWO)
    theirs = linear_model.LogisticRegression(solver="saga", tol=1e-8, **options).fit(X, TWO)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-3)


@pytest.mark.extras
def test_targets_and_weights_are_aligned_with_the_rows_of_a_derived_array():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X, index=np.arange(1000, 1300), columns=list("abcdef"))

    def derived(frame):
        values = da.from_array(frame.to_numpy(), chunks=(100, -1))
        return UncodedArray(values, "for a test", labels=axes_of(frame))

    weights = pd.Series(np.linspace(1, 2, 300), index=frame.index)
    for kind, targets in ((coded.linear_model.Ridge, Z), (coded.linear_model.LinearSVC, TWO)):
        expected = kind().fit(X, targets, weights.to_numpy())
        shuffled = pd.Series(targets, index=frame.index).sample(frac=1, random_state=1)
        model = kind().fit(derived(frame), shuffled, weights[::-1])
        np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-6)
        score = model.score(derived(frame), shuffled, weights[::-1])
        assert score == pytest.approx(expected.score(X, targets, weights.to_numpy()))
        with pytest.raises(ValueError, match="Argument 'y' must have the labels"):
            model.fit(derived(frame), shuffled.reset_index(drop=True))
        model.fit(frame, targets)
        predicted = model.predict(derived(frame)).compute()
        np.testing.assert_allclose(predicted, model.predict(frame))
        with pytest.raises(ValueError, match=r"feature names should match .* same order"):
            model.predict(derived(frame[list("bacdef")]))


@pytest.mark.parametrize("solver", ["liblinear", "svd", "cholesky"])
def test_solvers_without_a_counterpart_are_explained(solver):
    with pytest.raises(
        ValueError, match=f"Solver '{solver}' (factorises|penalises) .*: use solver="
    ):
        coded.linear_model.Ridge(solver=solver).fit(X, Z)


def furthest(found, optimum) -> float:
    return np.abs(found.coef_ - optimum.coef_).max() / np.abs(optimum.coef_).max()


ROWS = 8000


@pytest.mark.slow
@pytest.mark.parametrize(
    # The others show the same, and take half a minute.
    ("theirs", "ours", "y"),
    [pytest.param(*pair, marks=[pytest.mark.long] * (i > 1)) for i, pair in enumerate(PAIRS)],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_defaults_are_as_close_to_the_optimum_as_those_of_scikit_learn(
    theirs, ours, y, data_folder
):
    data, y = load_svmlight_file(str(data_folder / "clf_a9a.libsvm.gz"))
    data = sp.csr_matrix(
        (data.data, data.indices.astype(np.int32), data.indptr.astype(np.int32)), data.shape
    )
    data, y = data[:ROWS], y[:ROWS]
    optimum = ours(tol=1e-10, max_iter=10_000).fit(data, y)
    reference = theirs().fit(data, y)
    assert furthest(ours().fit(data, y), optimum) <= furthest(reference, optimum)


@pytest.mark.parametrize("shape", [(300, 6), (40, 1100)])
def test_dense_ridge_is_exact_in_one_process(shape):
    data = np.random.default_rng(1).standard_normal(shape) + 3.0
    y = data[:, 0] + 10.0
    found = coded.linear_model.Ridge().fit(data, y)
    assert furthest(found, linear_model.Ridge().fit(data, y)) < 1e-7
