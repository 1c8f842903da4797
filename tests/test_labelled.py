"""Labelled arrays, data frames and stored arrays: what is taken as a matrix, and how."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_coded as coded

pytestmark = pytest.mark.extras
xarray = pytest.importorskip("xarray")

A = np.random.default_rng(0).standard_normal((12, 4))
x = np.arange(4.0)


@pytest.fixture(scope="module")
def client():
    options = {"n_workers": 3, "threads_per_worker": 1, "processes": False}
    with Client(**options, dashboard_address=None) as client:
        yield client


@pytest.fixture
def labelled():
    return xarray.DataArray(da.from_array(A, chunks=(4, -1)), dims=("time", "place"))


def test_a_labelled_matrix_is_encoded_where_its_chunks_are(client, labelled, monkeypatch):
    def load(self, *args, **kwargs):
        pytest.fail("the matrix is loaded")

    monkeypatch.setattr(xarray.DataArray, "__array__", load)
    C = coded.encode(labelled, coded.MDS(3, 2))
    np.testing.assert_allclose((C @ x).compute(), A @ x)
    pair = coded.encode_pair(labelled, labelled)
    np.testing.assert_allclose(pair.product(np.ones(12)).compute(), A.T @ A, atol=1e-12)


def test_a_labelled_vector_is_an_operand(client):
    C = coded.encode(A, coded.MDS(3, 2))
    for vector in (x, da.from_array(x)):
        product = C @ xarray.DataArray(vector, dims="place")
        np.testing.assert_allclose(product.compute(), A @ x)


def test_a_labelled_vector_is_an_operand_of_a_product_that_is_not_coded(client):
    C = coded.encode(A, coded.MDS(3, 2))
    with pytest.warns(coded.UncodedWarning):
        product = C[:, 1:] @ xarray.DataArray(x[1:], dims="place")
    np.testing.assert_allclose(product.compute(), A[:, 1:] @ x[1:])


def test_a_data_frame_is_an_operand(client):
    pandas = pytest.importorskip("pandas")
    C = coded.encode(A, coded.MDS(3, 2))
    for operand in (pandas.Series(x), pandas.DataFrame({"a": x, "b": x})):
        for product in (C @ operand, C.dot(operand), da.dot(C, operand), np.dot(C, operand)):
            assert any(layer.startswith("coded-round") for layer in product.dask.layers)
            np.testing.assert_allclose(product.compute(), A @ operand.to_numpy())


def test_products_of_a_labelled_coded_array_are_coded(client):
    C = coded.encode(A, coded.MDS(3, 2))
    labels = xarray.DataArray(C, dims=("time", "place"))
    product = labels @ xarray.DataArray(x, dims="place")
    assert product.dims == ("time",)
    assert any(layer.startswith("coded-round") for layer in product.data.dask.layers)
    np.testing.assert_allclose(product.compute(), A @ x)


def test_estimators_fit_labelled_data(client, labelled):
    pytest.importorskip("sklearn")
    from dask_coded.linear_model import Ridge

    model = Ridge().fit(labelled, xarray.DataArray(A @ x, dims="time"))
    np.testing.assert_allclose(model.coef_, Ridge().fit(A, A @ x).coef_, rtol=1e-5)
    assert model.predict(labelled).shape == (12,)


def test_a_stored_array_is_read_by_the_workers(client, tmp_path):
    pytest.importorskip("zarr")
    da.from_array(A, chunks=(4, -1)).to_zarr(tmp_path / "array.zarr")
    C = coded.encode(da.from_zarr(tmp_path / "array.zarr"), coded.MDS(3, 2))
    np.testing.assert_allclose((C @ x).compute(), A @ x)


@pytest.mark.filterwarnings("default:The inplace keyword")  # used by dask itself
def test_a_stored_data_frame_is_read_by_the_workers(client, tmp_path):
    pandas = pytest.importorskip("pandas")
    frames = pytest.importorskip("dask.dataframe")
    frame = pandas.DataFrame(A, columns=list("abcd"))
    frames.from_pandas(frame, npartitions=3).to_parquet(tmp_path / "frame")
    stored = frames.read_parquet(tmp_path / "frame").to_dask_array(lengths=True)
    C = coded.encode(stored, coded.MDS(3, 2))
    np.testing.assert_allclose((C @ x).compute(), A @ x)


def test_data_frames_of_dask_are_refused_with_a_way_out(client):
    pandas = pytest.importorskip("pandas")
    frames = pytest.importorskip("dask.dataframe")
    frame = frames.from_pandas(pandas.DataFrame(A), npartitions=3)
    with pytest.raises(TypeError, match=r"it is a DataFrame: pass .A.to_dask_array\(lengths=True"):
        coded.encode(frame)
    C = coded.encode(frame.to_dask_array(lengths=True), coded.MDS(3, 2))
    np.testing.assert_allclose((C @ x).compute(), A @ x)
