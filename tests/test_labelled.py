"""Labelled arrays, data frames and stored arrays: what is taken as a matrix, and how."""

from __future__ import annotations

import pickle

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_coded as coded

pytestmark = pytest.mark.extras
xarray = pytest.importorskip("xarray")
pd = pytest.importorskip("pandas")

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


def test_a_labelled_coded_array_is_an_operator_in_the_cluster(client):
    C = coded.encode(A, coded.MDS(3, 2))
    labels = xarray.DataArray(C, dims=("time", "place"))
    kind = coded.submit(lambda operator: type(operator).__name__, labels).result()
    assert kind == "Operator"


def test_estimators_fit_labelled_data(client, labelled):
    pytest.importorskip("sklearn")
    from dask_coded.linear_model import Ridge

    model = Ridge().fit(labelled, xarray.DataArray(A @ x, dims="time"))
    np.testing.assert_allclose(model.coef_, Ridge().fit(A, A @ x).coef_, rtol=1e-5)
    assert model.predict(labelled).shape == (12,)


def test_targets_and_weights_are_aligned_with_the_rows_of_a_coded_array(client, labelled):
    pytest.importorskip("sklearn")
    from dask_coded.linear_model import LogisticRegression, Ridge

    named = labelled.assign_coords(time=np.arange(100, 112))
    C = coded.encode(named, coded.MDS(3, 2), transpose=True)
    order = np.random.default_rng(1).permutation(12)
    weights = named[:, 0].copy(data=np.arange(1.0, 13.0))
    for model, targets in ((Ridge(), A @ x), (LogisticRegression(), A[:, 0] > 0)):
        y = named[:, 0].copy(data=targets)
        model.fit(C, y[order], sample_weight=weights[order[::-1]])
        plain = type(model)().fit(A, targets, sample_weight=weights.data)
        np.testing.assert_allclose(model.coef_, plain.coef_, rtol=1e-3)
        score = model.score(C, y[order], sample_weight=weights[order[::-1]])
        np.testing.assert_allclose(score, plain.score(A, targets, sample_weight=weights.data))
        with pytest.raises(ValueError, match="Argument 'y' must have the labels"):
            model.fit(C, y.assign_coords(time=np.arange(12)))


@pytest.mark.filterwarnings("ignore:An array that is derived from:dask_coded.UncodedWarning")
def test_targets_are_aligned_with_the_rows_of_a_multiple(client):
    pytest.importorskip("sklearn")
    from dask_coded.linear_model import Ridge

    frame = pd.DataFrame(A, index=np.arange(100, 112), columns=list("abcd"))
    targets = pd.Series(A @ x, index=frame.index)[::-1]
    C = coded.encode(frame, coded.MDS(3, 2))
    for derived, factor in ((2 * C, 2), (C + 1, 1), (C.rechunk((3, -1)), 1)):
        model = Ridge(solver="lbfgs", tol=1e-10).fit(derived, targets, client=client)
        expected = Ridge().fit(factor * A, A @ x)
        np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-6)
        assert list(model.feature_names_in_) == list("abcd")
        np.testing.assert_allclose(model.score(derived, targets), expected.score(factor * A, A @ x))


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


# -- labels in another order -------------------------------------------------------------------

PLACES, TIMES = list("abcd"), list(range(100, 112))
ORDER = [2, 0, 3, 1]
X = np.outer(x, [1.0, 2.0])
y = np.arange(12.0)


def products(operator, *operands):
    return [operator @ operand for operand in operands]


def from_the_left(operator, operand):
    return operator.T @ operand


def weighted(pair, weights):
    return pair.product(weights)


@pytest.fixture
def matrix():
    return xarray.DataArray(A, dims=("time", "place"), coords={"time": TIMES, "place": PLACES})


@pytest.fixture
def frame():
    return pytest.importorskip("pandas").DataFrame(A, index=TIMES, columns=PLACES)


@pytest.fixture
def operands():
    pandas = pytest.importorskip("pandas")
    vector = xarray.DataArray(x, dims="place", coords={"place": PLACES}).isel(place=ORDER)
    several = xarray.DataArray(X, dims=("place", "kind"), coords={"place": PLACES})
    return [
        (vector, A @ x),
        (vector.copy(data=da.from_array(vector.data, chunks=2)), A @ x),
        (several.isel(place=ORDER), A @ X),
        (several.isel(place=ORDER).T, A @ X),
        (pandas.Series(x, PLACES).iloc[ORDER], A @ x),
        (pandas.DataFrame(X, PLACES).iloc[ORDER], A @ X),
        (x, A @ x),  # without labels, in the order of the columns
        (xarray.DataArray(x, dims="place"), A @ x),
    ]


@pytest.mark.parametrize("kind", ["matrix", "frame"])
def test_an_operand_with_the_same_labels_in_another_order_is_aligned(
    client, operands, kind, request
):
    source = request.getfixturevalue(kind)
    np.testing.assert_allclose(source @ operands[0 if kind == "matrix" else 4][0], A @ x)
    C = coded.encode(source, coded.MDS(3, 2), transpose=True)
    for operand, expected in operands:
        if kind == "frame" and getattr(operand, "dims", ())[:1] == ("kind",):
            continue  # pandas knows no dimensions by name
        for product in (C @ operand, C.dot(operand), da.dot(C, operand), np.dot(C, operand)):
            np.testing.assert_allclose(product.compute(), expected)
        for D, result in [((2 * C)[3:], 2 * expected[3:]), (C.T.T, expected), (-C, -expected)]:
            np.testing.assert_allclose((D @ operand).compute(), result)
        with pytest.warns(coded.UncodedWarning):
            product = (C + 0) @ operand
        np.testing.assert_allclose(product.compute(), expected)
        (found,) = coded.submit(products, C, operand).result()
        np.testing.assert_allclose(found, expected)
    found = C.as_linear_operator() @ operands[0][0]
    np.testing.assert_allclose(found, A @ x)


def test_sums_over_an_index_by_name_are_aligned_or_refused(client, matrix, operands):
    C = coded.encode(matrix, coded.MDS(3, 2), transpose=True)
    vector = operands[0][0]
    for einsum in (np.einsum, da.einsum):
        np.testing.assert_allclose(einsum("ij,j->i", C, vector).compute(), A @ x)
    with pytest.raises(ValueError, match="would ignore the labels"):
        np.einsum("ij,j,j->i", C, vector, x)


def test_a_model_of_a_labelled_coded_array_knows_its_columns(client):
    pandas = pytest.importorskip("pandas")
    models = pytest.importorskip("dask_coded.linear_model")
    frame = pandas.DataFrame(A, columns=[f"c{i}" for i in range(A.shape[1])])
    model = models.Ridge().fit(coded.encode(frame, coded.MDS(3, 2), transpose=True), y)
    np.testing.assert_allclose(model.predict(frame), model.predict(frame.copy()))
    with pytest.raises(ValueError, match="same order"):
        model.predict(frame.iloc[:, ::-1])


def test_a_model_refuses_a_coded_array_with_its_columns_in_another_order(client):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    frame = pandas.DataFrame(A, columns=list("abcd"))
    model = coded.linear_model.Ridge().fit(frame, A @ x)
    found = model.predict(coded.encode(frame)).compute()
    np.testing.assert_allclose(found, model.predict(frame), rtol=1e-9)
    with pytest.raises(ValueError, match=r"feature names should match .* same order"):
        model.predict(coded.encode(frame[list("bacd")]))


@pytest.mark.filterwarnings("ignore:A product with the result of:dask_coded.UncodedWarning")
def test_labels_are_unknown_where_columns_have_moved(client):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(A, columns=list("abcd"))
    C, D = coded.encode(frame), coded.encode(frame[list("bacd")])
    operand = pandas.Series(x, index=list("abcd"))
    np.testing.assert_allclose(((C + C) @ operand[::-1]).compute(), 2 * A @ x)
    np.testing.assert_allclose((np.abs(C) @ operand[::-1]).compute(), np.abs(A) @ x)
    for moved in (C + D, np.roll(C, 1, axis=1), C.map_blocks(lambda block: block[:, ::-1])):
        with pytest.raises(ValueError, match=r"labels of .* not known|labels, those of this"):
            moved @ operand


def test_sums_over_all_elements_do_not_ignore_labels(client, labelled):
    matrix = labelled.assign_coords(place=list("abcd"))
    C = coded.encode(matrix)
    total = (A * A).sum()
    np.testing.assert_allclose(np.einsum("ij,ij->", C, matrix.data).compute(), total)
    for sums in (
        lambda: np.einsum("ij,ij->", C, matrix[:, ::-1]),
        lambda: np.tensordot(C, matrix[:, ::-1], axes=2),
    ):
        with pytest.raises(ValueError, match="would ignore the labels of its operands"):
            sums()


@pytest.mark.parametrize("kind", ["matrix", "frame"])
def test_an_operand_from_the_left_is_aligned_with_the_rows(client, kind, request):
    C = coded.encode(request.getfixturevalue(kind), coded.MDS(3, 2), transpose=True)
    times = xarray.DataArray(y, dims="time", coords={"time": TIMES})[::-1]
    for operand in (times, times.to_pandas()):
        for product in (np.dot(operand, C), da.dot(operand, C), C.T @ operand):
            np.testing.assert_allclose(product.compute(), y @ A)
        np.testing.assert_allclose(coded.submit(from_the_left, C, operand).result(), y @ A)


def test_labels_stay_with_a_coded_array_that_is_encoded_again_or_extended(client, matrix):
    vector = xarray.DataArray(x, dims="place", coords={"place": PLACES}).isel(place=ORDER)
    C = coded.encode(matrix, coded.RandomLinear(2, 1))
    for D in (C.extend(), coded.encode(C, coded.MDS(3, 2)), pickle.loads(pickle.dumps(2 * C))):
        np.testing.assert_allclose((D @ vector).compute(), D.compute() @ x)


@pytest.mark.parametrize("kind", ["matrix", "frame"])
def test_the_factors_and_weights_of_a_pair_are_aligned(client, kind, request):
    source = request.getfixturevalue(kind)
    weights = xarray.DataArray(y, dims="time", coords={"time": TIMES})[::-1]
    pair = coded.encode_pair(source, source[::-1])
    for given in (weights, weights.to_pandas(), y):
        for found in (
            pair.product(given).compute(),
            coded.gram(source, given).compute(),
            coded.submit(weighted, pair, given).result(),
        ):
            np.testing.assert_allclose(found, A.T * y @ A, atol=1e-10)


def test_other_labels_are_refused(client, matrix, frame, operands):
    C, F = coded.encode(matrix, coded.MDS(3, 2)), coded.encode(frame, coded.MDS(3, 2))
    vector, series = operands[0][0], operands[4][0]
    for D, operand in [
        (C, vector.assign_coords(place=list("abcz"))),
        (C, vector.assign_coords(place=list("aabb"))),
        (F, series.set_axis(list("abcz"))),
        (F, series.reset_index(drop=True)),
    ]:
        with pytest.raises(ValueError, match=r"operand of a product must have the labels that"):
            D @ operand
        with pytest.raises(ValueError, match=r"pass it without labels, as .x.data. or .x.to_num"):
            coded.submit(products, D, operand).result()
    with pytest.raises(ValueError, match=r"must have the dimension 'place', .* are .'time',"):
        C @ vector.rename(place="time")
    with pytest.raises(ValueError, match="those of this selection of a labelled array are"):
        C[:, 1:] @ vector[1:]
    with pytest.raises(ValueError, match="Argument 'B' must have the labels"):
        coded.encode_pair(matrix, matrix.assign_coords(time=range(12)))


def test_operands_of_a_matrix_without_labels_are_in_order(client, operands):
    C = coded.encode(A, coded.MDS(3, 2))
    for operand in (operands[0][0], operands[4][0]):
        np.testing.assert_allclose((C @ operand).compute(), A @ np.asarray(operand))


def test_the_start_of_a_power_iteration_is_aligned(client):
    diagonal = xarray.DataArray(
        np.diag([4.0, 1.0, 2.0, 3.0]), dims=("place", "other"), coords={"other": PLACES}
    )
    start = xarray.DataArray([0.0, 0.0, 0.0, 1.0], dims="other", coords={"other": list("bcda")})
    pair = coded.linalg.power_iteration(diagonal, start=start)
    assert pair.value == pytest.approx(4)
    assert pair.rounds == 1


def test_signals_with_labels_are_mapped_to_the_nodes(client):
    networkx = pytest.importorskip("networkx")
    from dask_coded.graph import Hops, filter

    path = networkx.path_graph(list("abc"))
    signal = xarray.DataArray([0.0, 1.0], dims="node", coords={"node": ["c", "a"]})
    assert filter(path, signal, Hops(1)) == filter(path, {"a": 1.0}, Hops(1))
    both = xarray.DataArray(np.eye(3)[:, :2], dims=("node", "kind"), coords={"node": list("cba")})
    expected = filter(path, np.eye(3)[::-1, :2], Hops(1))
    np.testing.assert_allclose(filter(path, both, Hops(1)), expected)


@pytest.mark.parametrize(
    "names", [[2, 0, 1], ["c", "a", "b"], [pd.Timestamp(2026, 11, day) for day in (3, 1, 2)]]
)
def test_the_labels_of_a_coded_laplacian_are_its_nodes(client, names):
    matrix = np.array([[1.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 1.0]])
    L = coded.encode(pd.DataFrame(matrix, index=names, columns=names), None, client)
    for order in (names, sorted(names)):
        signal = pd.Series([float(name == names[0]) for name in order], index=order)
        for given in (signal, signal.to_dict()):
            found = coded.graph.filter(L, given, coded.graph.Hops(1), client=client)
            assert found == pytest.approx(dict(zip(names, [2.0, -1.0, 0.0])), abs=1e-12)


def test_a_coded_laplacian_whose_rows_and_columns_differ_is_refused(client):
    L = coded.encode(pd.DataFrame(np.eye(3), index=[2, 0, 1], columns=[0, 1, 2]), None, client)
    with pytest.raises(ValueError, match="the same labels"):
        coded.graph.filter(L, {0: 1.0}, coded.graph.Hops(1), client=client)
