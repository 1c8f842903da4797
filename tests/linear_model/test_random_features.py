"""Random features of a Gaussian kernel, and the kernel machines that they make."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp

sklearn = pytest.importorskip("sklearn")

from sklearn import kernel_approximation, kernel_ridge, linear_model, svm  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402

from dask_coded.linear_model import LinearSVC, RBFSampler, Ridge  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.standard_normal((300, 3))
SPARSE = np.where(X > 0.5, X, 0)
DISTANCE = np.linalg.norm(X, axis=1)


@pytest.mark.parametrize("gamma", [0.3, "scale"])
@pytest.mark.parametrize(
    ("lazy", "plain"),
    [
        (da.from_array(X, chunks=(70, 2)), X),
        (da.from_array(X.astype("f4"), chunks=(70, 3)), X.astype("f4")),
        (da.from_array(SPARSE, chunks=(70, 3)).map_blocks(sp.csr_array), sp.csr_array(SPARSE)),
        (da.from_array(np.rint(9 * X).astype(int)), np.rint(9 * X).astype(int)),
        (da.from_array(np.rint(9 * X).astype("i2")), np.rint(9 * X).astype("i2")),
        (da.from_array(X, chunks=((300, 0), 3)), X),
        (
            da.from_array(SPARSE, chunks=((200, 0, 100), 3)).map_blocks(sp.csr_array),
            sp.csr_array(SPARSE),
        ),
    ],
    ids=["dense", "single", "sparse", "integers", "short integers", "empty", "empty sparse"],
)
def test_features_of_dask_arrays_are_those_of_scikit_learn(lazy, plain, gamma):
    options = {"gamma": gamma, "n_components": 20, "random_state": 1}
    expected = kernel_approximation.RBFSampler(**options).fit_transform(plain)
    found = RBFSampler(**options).fit_transform(lazy)
    assert isinstance(found, da.Array)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    values = found.compute(scheduler="sync")
    assert values.dtype == expected.dtype
    np.testing.assert_allclose(values, expected, atol=1e-4 if plain.dtype == "f4" else 1e-9)
    np.testing.assert_array_equal(RBFSampler(**options).fit_transform(plain), expected)


@pytest.mark.extras
@pytest.mark.parametrize("sparse", [False, True])
def test_features_of_dask_arrays_stay_lazy_if_data_frames_are_asked_for(sparse):
    pandas = pytest.importorskip("pandas")

    def fail(block):
        raise AssertionError("computed")

    sampler = RBFSampler(n_components=5, random_state=0).set_output(transform="pandas")
    expected = sampler.fit_transform(X)
    assert isinstance(expected, pandas.DataFrame)
    assert isinstance(sampler.transform(X), pandas.DataFrame)
    lazy = da.from_array(X, chunks=(70, 2))
    lazy = lazy.map_blocks(sp.csr_array) if sparse else lazy
    unread = lazy.map_blocks(fail, meta=np.empty((0, 0)))
    for found in (sampler.fit_transform(unread), sampler.transform(unread)):
        assert isinstance(found, da.Array)
    for found in (sampler.fit_transform(lazy), sampler.transform(lazy)):
        values = found.compute(scheduler="sync")
        assert type(values) is np.ndarray
        np.testing.assert_allclose(values, expected)


def test_a_scale_of_narrow_integers_does_not_overflow():
    plain = np.rint(60 * SPARSE).astype("i1")
    lazy = da.from_array(plain, chunks=(70, 3)).map_blocks(sp.csr_array)
    options = {"gamma": "scale", "n_components": 20, "random_state": 1}
    expected = kernel_approximation.RBFSampler(**options).fit(plain.astype(float))
    found = RBFSampler(**options).fit(lazy)
    np.testing.assert_allclose(found.random_weights_, expected.random_weights_)


def test_other_columns_are_refused():
    sampler = RBFSampler().fit(da.ones((4, 3)))
    with pytest.raises(ValueError, match="X has 2 features, but RBFSampler is expecting 3"):
        sampler.transform(da.ones((4, 2)))


@pytest.mark.parametrize(
    ("ours", "theirs", "y"),
    [
        (Ridge(1e-2, tol=1e-10), linear_model.Ridge(1e-2), DISTANCE),
        (
            LinearSVC(loss="squared_hinge", tol=1e-9, max_iter=10_000),
            svm.LinearSVC(tol=1e-9, max_iter=100_000, intercept_scaling=1e3),
            DISTANCE < 1.5,
        ),
    ],
    ids=["ridge", "svm"],
)
@pytest.mark.long
def test_kernel_machines_agree_with_those_of_scikit_learn(client, ours, theirs, y):
    options = {"gamma": 0.5, "n_components": 60, "random_state": 2}
    reference = make_pipeline(kernel_approximation.RBFSampler(**options), theirs).fit(X, y)
    machine = make_pipeline(RBFSampler(**options), ours)
    lazy = da.from_array(X, chunks=(80, 3))
    machine.fit(lazy, y, **{f"{machine.steps[1][0]}__client": client})
    found = machine.predict(lazy).compute(scheduler="sync")
    if y.dtype == bool:
        assert (found == reference.predict(X)).mean() > 0.99
        assert (found == y).mean() > 0.95
    else:
        np.testing.assert_allclose(found, reference.predict(X), atol=1e-5)


def test_many_features_come_close_to_the_exact_kernel():
    exact = kernel_ridge.KernelRidge(alpha=1.0, kernel="rbf", gamma=0.5).fit(X, DISTANCE)
    errors = []
    for n in (50, 3_200):
        features = RBFSampler(gamma=0.5, n_components=n, random_state=0)
        machine = make_pipeline(features, Ridge(1.0, fit_intercept=False, tol=1e-8))
        errors.append(np.abs(machine.fit(X, DISTANCE).predict(X) - exact.predict(X)).mean())
    assert errors[1] < 0.3 * errors[0]
