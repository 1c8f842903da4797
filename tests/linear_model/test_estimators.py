"""Estimators in this process: scikit-learn's own checks, and the same optimum."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

sklearn = pytest.importorskip("sklearn")

from sklearn import linear_model as reference  # noqa: E402
from sklearn import svm  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from dask_coded.linear_model import (  # noqa: E402
    ElasticNet,
    Lasso,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    RBFSampler,
    Ridge,
    _base,
)

# Some checks compare fits to seven digits.
TIGHT = {"tol": 1e-10, "max_iter": 1000}


@parametrize_with_checks(
    [
        LogisticRegression(**TIGHT),
        LinearSVC(**TIGHT),
        LinearRegression(tol=1e-12),
        Ridge(**TIGHT),
        ElasticNet(**TIGHT),
    ]
)
def test_scikit_learn_checks(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@pytest.fixture
def fitted_there(estimator, client, monkeypatch):
    """Have an estimator fit on a cluster."""
    fit = type(estimator).fit

    @wraps(fit)
    def fit_there(self, X, y, sample_weight=None, **options):
        return fit(self, X, y, sample_weight, client=client, **options)

    monkeypatch.setattr(type(estimator), "fit", fit_there)


@parametrize_with_checks([Ridge(**TIGHT)])
def test_scikit_learn_checks_on_a_cluster(estimator, check, fitted_there):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@pytest.mark.long
@parametrize_with_checks(
    [
        LogisticRegression(**TIGHT),
        LinearSVC(**TIGHT),
        LinearRegression(tol=1e-12),
        ElasticNet(**TIGHT),
    ]
)
def test_scikit_learn_checks_of_others_on_a_cluster(estimator, check, fitted_there):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@parametrize_with_checks(
    [
        LogisticRegression(),
        LinearSVC(),
        LinearRegression(),
        Ridge(),
        ElasticNet(),
        Lasso(),
        RBFSampler(),
    ]
)
def test_scikit_learn_checks_of_defaults(estimator, check):
    name = getattr(check, "func", check).__name__
    if "equivalence" in name or "sparse_container" in name:
        pytest.skip("compares fits more closely than the default tolerance asks for")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


# -- the same optimum as scikit-learn's --------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 6)) + np.arange(6)
    z = X @ rng.standard_normal(6) + rng.standard_normal(300)
    return X, np.digitize(z, np.quantile(z, [0.3, 0.7])), z


WEIGHTS = np.random.default_rng(1).uniform(0, 2, 300)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("class_weight", [None, "balanced", {0: 3.0}])
@pytest.mark.parametrize("kind", ["binary", "multinomial"])
def test_logistic_regression(rows, kind, class_weight, weighted):
    X, y, _ = rows
    y = y if kind == "multinomial" else np.minimum(y, 1)
    weights = WEIGHTS if weighted else None
    options = {"C": 0.5, "class_weight": class_weight, "tol": 1e-9, "max_iter": 5000}
    ours = LogisticRegression(**options).fit(X, y, weights)
    theirs = reference.LogisticRegression(**options).fit(X, y, weights)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)
    if kind == "binary":
        np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-5)
    assert ours.coef_.shape == theirs.coef_.shape
    assert ours.intercept_.shape == theirs.intercept_.shape
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-5)
    np.testing.assert_allclose(
        ours.decision_function(X) - ours.decision_function(X).mean(),
        theirs.decision_function(X) - theirs.decision_function(X).mean(),
        atol=1e-4,
    )
    assert ours.score(X, y, weights) == theirs.score(X, y, weights)


@pytest.mark.parametrize(
    ("names", "old"),
    [
        ({"l1_ratio": 1.0}, {"penalty": "l1"}),
        ({"l1_ratio": 0.4}, {"penalty": "elasticnet", "l1_ratio": 0.4}),
        ({"C": np.inf}, {"penalty": None}),
        ({}, {"penalty": "l2"}),
    ],
)
# Of scikit-learn 1.8, although C is infinite.
@pytest.mark.filterwarnings("ignore:Setting penalty=None will ignore the C")
def test_current_and_former_names_of_penalties(rows, names, old):
    X, y, _ = rows
    y = np.minimum(y, 1)
    options = {"C": 0.05, "tol": 1e-8, "max_iter": 20000}
    new = LogisticRegression(**options | names).fit(X, y)
    before = LogisticRegression(**options | old).fit(X, y)
    np.testing.assert_array_equal(new.coef_, before.coef_)
    theirs = reference.LogisticRegression(solver="saga", **options | names).fit(X, y)
    np.testing.assert_allclose(new.coef_, theirs.coef_, atol=1e-4)


@pytest.mark.parametrize("class_weight", [None, "balanced"])
@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_linear_svc(rows, penalty, class_weight):
    X, y, _ = rows
    y = np.minimum(y, 1)
    options = {"C": 0.1, "tol": 1e-9, "max_iter": 10**6, "penalty": penalty}
    options |= {"class_weight": class_weight, "intercept_scaling": 2.0}
    ours = LinearSVC(**options).fit(X, y)
    theirs = svm.LinearSVC(dual=False, **options).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-5)


def test_linear_svc_of_three_classes(rows):
    X, y, _ = rows
    ours = LinearSVC(tol=1e-8).fit(X, y)
    theirs = svm.LinearSVC(dual=False, tol=1e-9, max_iter=10**6).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))


def test_linear_svc_with_the_hinge(rows):
    X, y, _ = rows
    y = np.minimum(y, 1)
    options = {"loss": "hinge", "C": 0.1, "tol": 1e-7, "max_iter": 10**6}
    ours = LinearSVC(**options).fit(X, y)
    theirs = svm.LinearSVC(dual=True, **options).fit(X, y)

    def objective(model):
        w = np.append(model.coef_, model.intercept_)
        margin = np.maximum(1 - (2 * y - 1) * model.decision_function(X), 0)
        return 0.1 * margin.sum() + w @ w / 2

    assert objective(ours) == pytest.approx(objective(theirs), rel=1e-5)


@pytest.mark.parametrize("l1_ratio", [0.0, 0.5, 1.0])
def test_intercepts_of_several_classes_are_those_of_scikit_learn(rows, l1_ratio):
    X, y, _ = rows
    X = X - X.mean(axis=0) + 1
    options = {"l1_ratio": l1_ratio, "C": 0.1}
    ours = LogisticRegression(**options, tol=1e-8, max_iter=5000).fit(X, y)
    options |= {"solver": "saga", "random_state": 0}
    theirs = reference.LogisticRegression(**options, tol=1e-6, max_iter=20_000)
    np.testing.assert_allclose(ours.intercept_, theirs.fit(X, y).intercept_, atol=1e-3)


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("targets", [1, 3])
def test_least_squares(rows, targets, fit_intercept):
    X, _, z = rows
    y = z if targets == 1 else np.stack([z, z**2, np.ones(300)], axis=1)
    for ours, theirs in [
        (LinearRegression(tol=1e-12), reference.LinearRegression()),
        (Ridge(alpha=5.0, tol=1e-12), reference.Ridge(alpha=5.0)),
    ]:
        ours.set_params(fit_intercept=fit_intercept).fit(X, y, WEIGHTS)
        theirs.set_params(fit_intercept=fit_intercept).fit(X, y, WEIGHTS)
        np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-8)
        np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-8)
        assert ours.predict(X).shape == theirs.predict(X).shape
        # A constant target is predicted without rounding errors, and then scores 1 instead of 0.
        assert ours.score(X, y) >= theirs.score(X, y) - 1e-9


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("solver", ["auto", "lbfgs", "newton", "nesterov"])
def test_ridge_with_a_penalty_for_each_target(rows, solver, fit_intercept):
    X, _, z = rows
    y = np.stack([z, z**2, -z], axis=1)
    options = {"alpha": [0.1, 10.0, 1e4], "fit_intercept": fit_intercept}
    ours = Ridge(**options, solver=solver, tol=1e-10).fit(X, y, WEIGHTS)
    options["alpha"] = np.array(options["alpha"])  # scikit-learn 1.8 takes no list
    theirs = reference.Ridge(**options).fit(X, y, WEIGHTS)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-7)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-6)
    one = {"alpha": np.array([10.0]), "fit_intercept": fit_intercept}
    for target in (z, z[:, np.newaxis], y):
        ours, theirs = (kind(**one).fit(X, target) for kind in (Ridge, reference.Ridge))
        np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-6)
        assert ours.coef_.shape == theirs.coef_.shape
        assert np.shape(ours.intercept_) == np.shape(theirs.intercept_)
    with pytest.raises(ValueError, match="it has 2 numbers for 3 targets"):
        Ridge([1.0, 2.0]).fit(X, y)


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LinearRegression(), reference.LinearRegression()),
        (Ridge(), reference.Ridge()),
        (Lasso(), reference.Lasso()),
        (ElasticNet(), reference.ElasticNet()),
    ],
    ids=lambda model: type(model).__name__,
)
def test_targets_of_one_column(rows, ours, theirs, warm_start):
    X, _, z = rows
    ours.set_params(warm_start=warm_start)
    for _ in range(2):
        ours.fit(X, z[:, None])
    theirs.fit(X, z[:, None])
    for name in ("coef_", "intercept_"):
        assert getattr(ours, name).shape == getattr(theirs, name).shape
    assert ours.predict(X).shape == theirs.predict(X).shape
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-3)


@pytest.mark.parametrize("model", [LinearRegression(), Ridge(), Lasso(0.01)], ids=repr)
@pytest.mark.parametrize("row", [0, 7])
def test_targets_without_weight_do_not_count(rows, model, row):
    X, _, z = rows
    weights, filled = np.ones(300), z.copy()
    weights[row], filled[row] = 0.0, 1e36
    expected = clone(model).fit(X, z, weights)
    model.fit(X, filled, weights)
    np.testing.assert_allclose(model.coef_, expected.coef_, atol=1e-9)
    np.testing.assert_allclose(model.intercept_, expected.intercept_, atol=1e-9)


@pytest.mark.parametrize("unit", [1e-5, 1e5])
@pytest.mark.parametrize("weights", [None, np.linspace(1, 2, 50)])
@pytest.mark.parametrize(
    "model",
    [LinearRegression(tol=1e-4), Ridge(1e-9, tol=1e-4), Lasso(1e-12, tol=1e-4)],
    ids=lambda model: type(model).__name__,
)
def test_targets_in_different_units(model, weights, unit):
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((50, 2)))
    X = q * [10.0, 1.0]
    # The first step fits the first target, and the second one not at all.
    model.set_params(fit_intercept=False).fit(X, X * [1.0, unit], weights)
    np.testing.assert_allclose(model.coef_ / [[1.0], [unit]], np.eye(2), atol=1e-3)


@pytest.mark.parametrize("model", [LinearRegression(), Ridge(0.0), Lasso(0.0)], ids=repr)
@pytest.mark.parametrize("units", [[1e-12, 1e-12], [1e10, 1e10], [1.0, 1e-2]])
def test_columns_in_different_units(model, units):
    X = np.random.default_rng(0).standard_normal((100, 2)) * units
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model.fit(X, X @ np.divide([1.0, 2.0], units))
    np.testing.assert_allclose(model.coef_ * units, [1.0, 2.0], rtol=1e-3)


@pytest.mark.parametrize("model", [LinearRegression(), Ridge(), Lasso(0.0)], ids=repr)
@pytest.mark.parametrize("constant", [1.0, 0.1, 1e6])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_constant_column_beside_an_intercept(model, constant, dtype):
    X = np.random.default_rng(0).standard_normal((50, 3)).astype(dtype)
    X[:, 2] = constant
    y = X[:, :2] @ [1.0, 2.0] + 3.0
    model = clone(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model.fit(X, y)
    assert np.max(model.n_iter_) < 20
    assert abs(model.coef_[2]) * constant < 0.01  # what it adds to predictions


def test_a_column_that_hardly_varies_beside_its_mean_is_a_warning():
    times = 1.7e18 + 256 * np.arange(1000.0)  # nanoseconds
    with pytest.warns(UserWarning, match=r"Columns of the data \(1\) vary so little"):
        LinearRegression().fit(times[:, np.newaxis], np.arange(1000.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = LinearRegression().fit(times[:, np.newaxis] - times[0], np.arange(1000.0))
    np.testing.assert_allclose(model.coef_, [1 / 256], rtol=1e-3)


@pytest.mark.parametrize("constant", [1.0, 0.1, 1e13])
@pytest.mark.parametrize("sparse", [False, True])
def test_constant_columns_of_many_rows_are_no_warning(constant, sparse):
    X = np.random.default_rng(0).standard_normal((10_000, 2))
    X[:, 1] = constant
    y = X[:, 0] + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        LinearRegression().fit(sp.csr_array(X) if sparse else X, y)


def test_a_target_that_disappears_beside_another_one_ends_the_fit():
    X = np.random.default_rng(0).standard_normal((50, 3))
    y = np.column_stack([X @ [1.0, 2.0, 3.0], 1e-20 * X[:, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the second one is not found
        model = LinearRegression(tol=1e-12, max_iter=200).fit(X, y)
    np.testing.assert_allclose(model.coef_[0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LinearRegression(), reference.LinearRegression()),
        (Ridge(), reference.Ridge()),
        (Lasso(0.01), reference.Lasso(0.01, tol=1e-10, max_iter=10**5)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_targets_with_a_large_mean(ours, theirs, targets, sparse):
    u, v, noise = np.random.default_rng(0).standard_normal((3, 500))
    X = np.column_stack([u, u + 0.1 * v])
    y = X @ [1.0, -1.0] + 0.1 * noise
    if targets == 2:
        y = np.column_stack([y, -3 * y])
    theirs.fit(X, y)
    ours.fit(sp.csr_array(X) if sparse else X, y + 1e8)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(ours.intercept_ - 1e8, theirs.intercept_, atol=1e-4)
    # A warm start begins where the fit before has ended.
    assert ours.set_params(warm_start=True).fit(X, y + 1e8).n_iter_ == 1
    ours.set_params(warm_start=False)


@pytest.mark.parametrize("model", [LinearRegression(), Ridge(), Lasso()], ids=repr)
def test_targets_whose_squares_overflow_are_rejected(rows, model):
    X, _, z = rows
    with pytest.raises(ValueError, match="loss overflows: scale the targets"):
        model.fit(X, 1e200 * z)


@pytest.mark.parametrize("size", [1e160, 1e307])
@pytest.mark.parametrize(
    "model", [LinearRegression(), Ridge(), Lasso(), LogisticRegression(), LinearSVC()], ids=repr
)
def test_data_whose_products_overflow_are_rejected(rows, model, size):
    X, y, _ = rows
    with pytest.raises(ValueError, match=r"fit overflows in iteration \d+: scale the data"):
        model.fit(size / 20 * X, y)


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (Lasso, reference.Lasso, {"alpha": 0.5}),
        (ElasticNet, reference.ElasticNet, {"alpha": 0.5, "l1_ratio": 0.7}),
        (ElasticNet, reference.ElasticNet, {"alpha": 0.1, "l1_ratio": 0.0}),
    ],
)
def test_least_squares_with_few_coefficients(
    rows, ours, theirs, options, targets, weighted, fit_intercept
):
    X, _, z = rows
    y = z if targets == 1 else np.stack([z, -2 * z], axis=1)
    # scikit-learn takes no weights with several targets.
    weights = WEIGHTS if weighted and targets == 1 else None
    options = options | {"fit_intercept": fit_intercept, "max_iter": 100_000}
    ours = ours(tol=1e-10, **options).fit(X, y, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # against the use without an L1 penalty
        theirs = theirs(tol=1e-12, **options).fit(X, y, weights)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-6)
    np.testing.assert_array_equal(ours.coef_ == 0, theirs.coef_ == 0)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-6)


def test_sparse_and_dense_data_give_the_same_fit(rows):
    X, y, _ = rows
    X = np.where(np.abs(X) < 1, 0, X)
    dense = LogisticRegression(tol=1e-9, max_iter=1000).fit(X, y)
    for convert in (sp.csr_array, sp.csc_matrix):
        sparse = LogisticRegression(tol=1e-9, max_iter=1000).fit(convert(X), y)
        np.testing.assert_allclose(sparse.coef_, dense.coef_, rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(sparse.predict(convert(X)), dense.predict(X))


@given(st.integers(0, 2**32 - 1), st.sampled_from([np.int8, np.uint8, np.int16, bool]))
def test_repeated_entries_of_narrow_sparse_data_are_added_up(seed, dtype):
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 8, 60), rng.integers(0, 3, 60)
    entries = rng.uniform(0, 120, 60).astype(dtype)
    data = sp.coo_array((entries, cells), shape=(8, 3))
    dense = np.zeros((8, 3))
    np.add.at(dense, cells, entries)
    y = rng.standard_normal(8)
    model, expected = Ridge(tol=1e-10).fit(data, y), Ridge(tol=1e-10).fit(dense, y)
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(expected.predict(data), expected.predict(dense))


# -- iterations and errors ---------------------------------------------------------------------


def test_too_few_iterations_warn(rows):
    X, y, _ = rows
    with pytest.warns(ConvergenceWarning, match=r"LogisticRegression .* max_iter=2 .* raise"):
        model = LogisticRegression(max_iter=2).fit(X, y)
    assert model.n_iter_ == [2]


def test_products_that_are_not_accurate_enough_warn(rows, monkeypatch):
    X, y, _ = rows
    fit = _base.fit
    monkeypatch.setattr(_base, "fit", lambda *a, **kw: replace(fit(*a, **kw), converged=False))
    with pytest.warns(ConvergenceWarning, match=r"in \d+ of max_iter=100 .* not accurate enough"):
        LogisticRegression().fit(X, y)


def test_a_warm_start_continues_the_fit(rows):
    X, y, z = rows
    for model, target in [
        (LogisticRegression(warm_start=True), y),
        (LogisticRegression(warm_start=True), np.minimum(y, 1)),
        (LinearSVC(warm_start=True), y),
        (Ridge(warm_start=True, solver="lbfgs"), z),
        (ElasticNet(warm_start=True), z),
        (LinearRegression(warm_start=True), np.stack([z, -z], axis=1)),
    ]:
        assert np.max(model.fit(X, target).n_iter_) > 1
        coefficients = model.coef_
        assert np.max(model.fit(X, target).n_iter_) == 1
        np.testing.assert_allclose(model.coef_, coefficients, atol=1e-3)


@pytest.mark.parametrize("model", [LogisticRegression(), LinearSVC(), Ridge()], ids=repr)
def test_a_warm_start_from_other_data_is_refused(rows, model):
    X, y, z = rows
    several = np.stack([z, -z], axis=1) if isinstance(model, Ridge) else y
    one = z if isinstance(model, Ridge) else np.minimum(y, 1)
    model = clone(model).set_params(warm_start=True).fit(X, several)
    count = len(model.coef_)
    with pytest.raises(ValueError, match=f"had 6 columns and {count} sets .* 6 and 1: set warm_st"):
        model.fit(X, one)
    with pytest.raises(ValueError, match=f"this one has 5 and {count}: set warm_start=False"):
        model.fit(X[:, :5], several)
    model.set_params(warm_start=False).fit(X, one)


def test_history_and_callback_get_each_iteration_and_verbose_prints_a_summary(rows, capsys):
    X, y, _ = rows
    heard = []
    model = LogisticRegression(verbose=1).fit(X, y, callback=heard.append)
    assert tuple(heard) == model.history_
    assert len(heard) == model.n_iter_[0]
    *_, summary = capsys.readouterr().err.splitlines()
    assert summary.startswith(f"Done. Round {len(heard)}: objective 0.")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (LogisticRegression(C=-1), "'C' must be a positive number, it is -1"),
        (LogisticRegression(penalty="l3"), "'penalty' must be None or one of .*, it is 'l3'"),
        (LogisticRegression(l1_ratio=2), "'l1_ratio' must be between 0 and 1, it is 2"),
        (LogisticRegression(penalty="l1", solver="newton"), "'newton' needs a smooth penalty"),
        (LogisticRegression(solver="magic"), "'solver' must be"),
        (LogisticRegression(max_iter=0), "'max_iter' must be a whole number of at least 1"),
        (LogisticRegression(class_weight={0: -1}), "'class_weight' must be finite, not negative"),
        (LinearSVC(class_weight=dict.fromkeys(range(3), 0)), "must be .* not all zero"),
        (LinearSVC(C=np.inf), "'C' must be a positive number, it is inf"),
        (LinearSVC(loss="square"), "'loss' must be one of .*, it is 'square'"),
        (LinearSVC(penalty=None), "'penalty' must be one of .*, it is None"),
        (LinearSVC(intercept_scaling=0), "'intercept_scaling' must be a positive number"),
        (Ridge(alpha=[1, 2]), "one for each target, it has 2 numbers for 1 target"),
        (Ridge(alpha=[1, -2]), "'alpha' must be 0 or a positive number, it is -2"),
        (Ridge(alpha="1"), "'alpha' must be 0 or a positive number, it is '1'"),
        (Ridge(alpha=-1), "'alpha' must be 0 or a positive number, it is -1"),
        (Lasso(alpha=-1), "'alpha' must be 0 or a positive number, it is -1"),
        (Lasso(positive=True), "'positive' must be False: the signs .* cannot be restricted"),
        (LinearRegression(positive=True), "'positive' must be False"),
        (Ridge(positive=True), "'positive' must be False"),
        (LinearSVC(multi_class="crammer_singer"), r"'multi_class' must be one of \['ovr'\]"),
        (Lasso(solver="lbfgs"), "Solver 'lbfgs' needs a smooth penalty"),
        (ElasticNet(l1_ratio=2), "'l1_ratio' must be between 0 and 1, it is 2"),
        (Ridge(tol=-1), "'tol' must be 0 or a positive number, it is -1"),
    ],
)
def test_parameters_out_of_range(rows, model, complaint):
    X, y, _ = rows
    with pytest.raises(ValueError, match=complaint):
        model.fit(X, y)


@pytest.mark.parametrize("kind", [Ridge, LogisticRegression])
def test_one_sample_weight_is_that_of_all_rows(kind):
    X = np.random.default_rng(0).standard_normal((50, 4))
    y = (X[:, 0] > 0).astype(int)
    one = kind().fit(X, y, sample_weight=2.0)
    np.testing.assert_array_equal(one.coef_, kind().fit(X, y, np.full(50, 2.0)).coef_)


def test_invalid_data_are_rejected(rows):
    X, y, z = rows
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        Ridge().fit(X, z[1:])
    with pytest.raises(ValueError, match="NaN"):
        Ridge().fit(np.where(X > 5, np.nan, X), z)
    with pytest.raises(ValueError, match="all of these have one class: 1"):
        LinearSVC().fit(X, np.ones(300, dtype=int))
    with pytest.raises(ValueError, match="'sample_weight' must have one value for each of the 300"):
        LogisticRegression().fit(X, y, np.ones(3))
    with pytest.raises(ValueError, match="'sample_weight' and 'class_weight' is zero for all rows"):
        LogisticRegression(class_weight={1: 0}).fit(X, y, y == 1)


def test_the_package_works_without_scikit_learn():
    code = """
import sys
sys.modules["sklearn"] = None
import dask_coded
dask_coded.linear_model.minimize
try:
    dask_coded.linear_model.Ridge
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Ridge needs scikit-learn: pip install 'dask-coded[linear-model]'.\n"


def test_balanced_classes_need_a_row_of_positive_weight():
    X, y = np.arange(6.0)[:, None], np.arange(6) % 3
    with pytest.raises(
        ValueError, match=r"each class needs a row of positive weight .* class 2 has"
    ):
        LogisticRegression(class_weight="balanced").fit(X, y, sample_weight=(y < 2).astype(float))
