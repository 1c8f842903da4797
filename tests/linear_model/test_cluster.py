"""Fits in a cluster: every kind of input, and the loss of workers."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from distributed import Event
from distributed.utils_test import poll_for

import dask_coded as coded
from dask_coded.linear_model import Logistic, Penalty, minimize
from dask_coded.loop import Loop

N, P = 200, 5
rng = np.random.default_rng(0)
X = rng.standard_normal((N, P)) + np.arange(P)
Z = X @ rng.standard_normal(P) + rng.standard_normal(N)
THREE = np.digitize(Z, np.quantile(Z, [0.3, 0.7]))
TWO = np.where(Z.mean() < Z, "yes", "no")


@pytest.fixture
def models():
    pytest.importorskip("sklearn")
    return coded.linear_model


INPUTS = {
    "numpy": lambda: X,
    "integers": lambda: np.rint(4 * X).astype(int),
    "sparse": lambda: sp.csr_matrix(np.where(X > 0, X, 0)),
    "dask": lambda: da.from_array(X, chunks=(60, 3)),
    "dask of float32": lambda: da.from_array(X.astype(np.float32), chunks=(60, 3)),
    "dask of float16": lambda: da.from_array(X.astype(np.float16), chunks=(60, 3)),
    "dask of integers": lambda: da.from_array(np.rint(4 * X).astype(int), chunks=(60, 3)),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_a_fit_in_the_cluster_equals_one_in_this_process(client, models, kind):
    data = INPUTS[kind]()
    plain = data.compute() if isinstance(data, da.Array) else data
    # Products that are decoded from parity are as exact as the parity.
    single = data.dtype == np.float32
    model = models.LogisticRegression(tol=1e-6 if single else 1e-9, max_iter=1000)
    here = model.fit(plain, TWO).coef_
    heard = []
    weights = client.persist(da.ones(N, chunks=50))
    model.fit(data, da.from_array(TWO, chunks=50), weights, client=client, callback=heard.append)
    np.testing.assert_allclose(model.coef_, here, rtol=1e-4 if single else 1e-5, atol=1e-8)
    assert heard[-1].workers <= 4
    assert heard[-1].seconds is not None
    assert len(model.history_) == model.n_iter_[0]


def test_masked_data_are_refused(models):
    hidden = np.ma.masked_less(X, 0)
    for data in (
        {"X": hidden, "y": Z},
        {"X": X, "y": hidden[:, 0]},
        {"X": X, "y": Z, "sample_weight": hidden[:, 0]},
    ):
        with pytest.raises(TypeError, match="must not be masked"):
            models.Ridge().fit(**data)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_columns_in_very_different_units(client, models, dtype):
    units = np.array([1.0, 1e8, 1e-8, 1e3, 1e-4])
    data = (X * units).astype(dtype)
    centred = data / units - (data / units).mean(axis=0)
    expected = np.linalg.lstsq(centred, Z - Z.mean(), rcond=None)[0]
    lazy = da.from_array(data, chunks=(60, 3))
    model = models.LinearRegression(tol=1e-6).fit(lazy, Z, client=client)
    np.testing.assert_allclose(model.coef_ * units, expected, rtol=1e-4)
    assert model.n_iter_ < 50


def test_coded_data_are_not_encoded_again(client, models, monkeypatch):
    C = coded.encode(X, coded.MDS(4, 3), client=client, transpose=True)
    monkeypatch.delattr("dask_coded.submission.encode")
    for model, y in [
        (models.LogisticRegression(), TWO),
        (models.LogisticRegression(l1_ratio=0.5, max_iter=1000), THREE),
        (models.LinearSVC(), THREE),
        (models.LinearRegression(), Z),
        (models.Ridge(solver="newton"), np.stack([Z, -Z], axis=1)),
    ]:
        coefficients = model.fit(C, y, client=client).coef_
        np.testing.assert_allclose(model.fit(X, y).coef_, coefficients, atol=1e-4)


def test_the_error_for_coded_data_without_transpose_says_what_to_do(client, models):
    C = coded.encode(X, coded.MDS(4, 3), client=client)
    with pytest.raises(ValueError, match="encode it with `transpose=True`"):
        models.Ridge().fit(C, Z)


def in_the_cluster(model):
    return model.history_[-1].workers is not None


def test_a_model_tells_which_cluster_it_was_fitted_in(client, models):
    address = client.scheduler_info()["address"]
    coded_array = coded.encode(X, client=client, transpose=True)
    for model, y in ((models.Ridge(), Z), (models.LogisticRegression(), TWO)):
        assert model.fit(X, y).cluster_ is None
        with client.as_current():
            assert model.fit(X, y).cluster_ is None
            assert model.fit(da.from_array(X, chunks=50), y).cluster_ == address
        assert model.fit(X, y, client=client).cluster_ == address
        assert model.fit(coded_array, y).cluster_ == address


def test_the_current_client_is_used_unless_the_data_are_small(client, models, capsys):
    assert not in_the_cluster(models.Ridge().fit(X, Z))
    with client.as_current():
        assert not in_the_cluster(models.Ridge(verbose=1).fit(X, Z))
        assert in_the_cluster(models.Ridge().fit(da.from_array(X, chunks=50), Z))
        for data, size in ((X, X.size), (sp.csr_array(X), X.size), (X.tolist(), X.size)):
            for least, cluster in ((size, True), (size + 1, False)):
                with dask.config.set({"coded.linear-model.minimum-size": least}):
                    assert in_the_cluster(models.Ridge().fit(data, Z)) is cluster
    assert in_the_cluster(models.Ridge().fit(X, Z, client=client))
    assert "because 1,000 numbers are fewer than `coded.linear-model.minimum-size`, 10,000,000" in (
        capsys.readouterr().err
    )


class Numbers:
    """Numbers that NumPy can convert, and do nothing else with."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def __array_function__(self, function, *rest):
        raise TypeError(f"{function.__name__} of Numbers")


@pytest.mark.parametrize("given", [True, False])
def test_data_are_converted_before_anything_else_looks_at_them(client, models, given):
    options = {"client": client} if given else {}
    weights = np.linspace(1, 2, N)
    for kind, y in ((models.Ridge, Z), (models.LogisticRegression, THREE), (models.LinearSVC, TWO)):
        expected = kind().fit(X, y, weights, **options)
        with client.as_current():
            model = kind().fit(Numbers(X), Numbers(y), Numbers(weights), **options)
        np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-6)


def test_predictions_for_dask_arrays_are_dask_arrays(client, models):
    D = da.from_array(X, chunks=(60, 3))
    sparse = D.map_blocks(sp.csr_matrix)
    C = coded.encode(X, client=client)
    for model, y in [
        (models.LogisticRegression(), TWO),
        (models.LogisticRegression(), THREE),
        (models.LinearSVC(), THREE),
        (models.Ridge(), Z),
        (models.Ridge(), np.stack([Z, -Z], axis=1)),
    ]:
        model.fit(X, y)
        for name in ("predict", "decision_function", "predict_proba", "predict_log_proba"):
            if not hasattr(model, name):
                continue
            expected = getattr(model, name)(X)
            for data in (D, sparse, C):
                lazy = getattr(model, name)(data)
                assert isinstance(lazy, da.Array)
                assert lazy.shape == expected.shape
                assert lazy.dtype == expected.dtype
                found = client.compute(lazy).result()
                assert type(found) is np.ndarray
                if expected.dtype.kind == "f":
                    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
                else:
                    np.testing.assert_array_equal(found, expected)
    with client.as_current():
        assert model.score(D, da.from_array(y, chunks=60)) == pytest.approx(model.score(X, y))


@pytest.mark.extras
def test_names_of_columns_are_those_of_the_last_fit(client, models):
    pandas = pytest.importorskip("pandas")
    model = models.Ridge().fit(pandas.DataFrame(X).rename(columns=str), Z)
    assert len(model.feature_names_in_) == P
    model.fit(da.from_array(X, chunks=(60, 3)), Z, client=client)
    assert not hasattr(model, "feature_names_in_")
    model.predict(X)  # warned that X has no names


def test_invalid_dask_data_are_rejected(client, models):
    D = da.from_array(X, chunks=(60, 3))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        models.Ridge().fit(D, Z[1:], client=client)
    with pytest.raises(ValueError, match="NaN"):
        models.Ridge().fit(da.where(D > 1, np.nan, D), Z, client=client)
    with pytest.raises(ValueError, match="has chunks of unknown size"):
        models.Ridge().fit(D[D[:, 0] > 0], Z, client=client)
    with client.as_current(), pytest.raises(ValueError, match="has chunks of unknown size"):
        models.Ridge().fit(D[D[:, 0] > 0], Z)
    with pytest.raises(ValueError, match="must be a matrix, it has 1 dimensions"):
        models.Ridge().fit(D[:, 0], Z, client=client)
    with pytest.raises(ValueError, match="must hold real numbers, its dtype is complex128"):
        models.Ridge().fit(D.astype(complex), Z, client=client)
    with pytest.raises(ValueError, match="has 4 features, but Ridge is expecting 5"):
        models.Ridge().fit(X, Z).predict(D[:, :4])


def test_parameters_are_checked_before_the_data_are_encoded(client, models):
    def fail(block):
        raise AssertionError("computed")

    lazy = da.from_array(X, chunks=(60, 3)).map_blocks(fail, dtype=float)
    with pytest.raises(ValueError, match="'tol' must be 0 or a positive number"):
        models.LinearRegression(tol=-1).fit(lazy, Z, client=client)


def test_newton_with_a_coded_pair(client):
    y = np.where(TWO == "yes", 1.0, -1.0)
    C = coded.encode(X, coded.MDS(4, 3), client=client, transpose=True)
    pair = coded.encode_pair(X, X, client=client)
    options = {"penalty": Penalty(l2=0.01), "tol": 1e-9}
    future = coded.submit(minimize, C, y, Logistic(), pair=pair, client=client, **options)
    found, expected = future.result(), minimize(X, y, Logistic(), **options)
    assert found.rounds < 10
    np.testing.assert_allclose(found.coefficients, expected.coefficients, rtol=1e-6)


def test_too_few_iterations_in_the_cluster_warn(client, models):
    from sklearn.exceptions import ConvergenceWarning

    with pytest.warns(ConvergenceWarning, match="max_iter=2"):
        models.LogisticRegression(max_iter=2).fit(X, TWO, client=client)


# -- losses ------------------------------------------------------------------------------------

ROUNDS, KILLED_AFTER = 200, 100


def fit_with_a_pause(operator, y, begun, go, loop):
    """A logistic regression that pauses half way until the event ``go`` is set."""

    class Paused(Loop):
        def resume(self, state):
            found = loop.resume(state)
            self.first = found[0]
            return found

        def report(self, progress, state=None, last=False):
            loop.report(progress, state, last)
            if progress.round == KILLED_AFTER:
                Event(begun).set()
                Event(go).wait()

    paused = Paused()
    options = {"solver": "nesterov", "tol": 0, "max_iter": ROUNDS}
    found = minimize(operator, y, Logistic(), Penalty(l2=1e-4), loop=paused, **options)
    return found, paused.first


@pytest.mark.slow
def test_a_logistic_regression_survives_its_coordinator_and_as_many_workers_as_the_code_allows(
    patient,
    processes,
):
    *holders, one, other = processes.add(7)
    client = processes.client
    y = np.where(TWO == "yes", 1.0, -1.0)
    C = coded.encode(X, coded.MDS(5, 3), client=client, workers=holders, transpose=True)
    future = coded.submit(
        fit_with_a_pause, C, y, "begun", "go", coded.Loop(), client=client, workers=[one, other]
    )
    Event("begun", client=client).wait()
    poll_for(lambda: len(kept(client)) >= 3, timeout=60)
    running = next(a for a, tasks in client.processing().items() if future.key in tasks)
    for address in [running, *sorted(kept(client) & set(holders))[:2]]:
        processes.kill(address)
    Event("go", client=client).set()
    found, first = future.result(timeout=120)
    assert 1 < first <= KILLED_AFTER + 1
    assert found.rounds == ROUNDS
    options = {"solver": "nesterov", "tol": 0, "max_iter": ROUNDS}
    whole = minimize(X, y, Logistic(), Penalty(l2=1e-4), **options)
    np.testing.assert_allclose(found.coefficients, whole.coefficients, rtol=1e-8)
    np.testing.assert_allclose(found.intercept, whole.intercept, rtol=1e-8)


def kept(client) -> set[str]:
    """Return the workers that keep a state."""
    held = client.run(lambda dask_worker: len(dask_worker.extensions["dask-coded"].keeper.kept))
    return {address for address, count in held.items() if count}
