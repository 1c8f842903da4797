"""Coded arrays against NumPy, on one cluster of threads."""

from __future__ import annotations

import gc
import operator
import pickle
import re
from typing import ClassVar

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from dask.core import flatten
from distributed import Client, LocalCluster, Worker
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded

ROWS, COLUMNS = 23, 11  # no k above 1 divides the rows

CODES = [
    coded.MDS(5, 3),
    coded.MDS(5, 5),
    coded.MDS(3, 1),
    coded.Repetition(5, 2),
    coded.RandomLinear(5, 3),
]


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=5,
            threads_per_worker=2,
            processes=False,
            dashboard_address=None,
            scheduler_kwargs={"dashboard_address": ":0"},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def numbers(*shape, dtype=np.float64, seed=0):
    """Random numbers of a dtype; complex ones with both parts."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    out = rng.standard_normal(shape)
    if dtype.kind == "c":
        out = out + 1j * rng.standard_normal(shape)
    return out.astype(dtype)


@pytest.fixture(scope="module")
def A():
    return numbers(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def C(A, client):
    return coded.encode(A, coded.MDS(5, 3), client)


@pytest.fixture(scope="module")
def both(A, client):
    """A coded array with coded products from both sides."""
    return coded.encode(A, coded.MDS(5, 3), client, transpose=True)


def value(collection, client):
    return client.compute(collection).result()


def check(actual, expected, client, rtol=1e-10):
    """Check that a lazy product has the announced shape and dtype, and the right values."""
    assert type(actual) is da.Array
    assert actual.shape == expected.shape
    result = value(actual, client)
    assert type(result) is np.ndarray
    assert result.dtype == actual.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


# -- what can be encoded -----------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES, ids=repr)
@pytest.mark.parametrize("rows", [1, 2, 4, 23, 30])
def test_any_number_of_rows(code, rows, client):
    A = numbers(rows, COLUMNS)
    x = numbers(COLUMNS)
    C = coded.encode(A, code, client)
    assert C.code == code
    assert (C.shape, C.dtype) == (A.shape, A.dtype)
    check(C @ x, A @ x, client)
    np.testing.assert_array_equal(value(C, client), A)


@pytest.mark.parametrize("order", ["C", "F"])
def test_numpy_of_any_layout(order, client):
    A = np.asarray(numbers(2 * ROWS, 2 * COLUMNS)[::-2, ::2], order=order)
    check(coded.encode(A, coded.MDS(5, 3), client) @ np.ones(COLUMNS), A.sum(1), client)


@pytest.mark.parametrize("code", CODES, ids=repr)
@pytest.mark.parametrize("make", [np.array, scipy.sparse.csr_array, scipy.sparse.csr_matrix])
def test_the_source_may_be_changed_afterwards(make, code, A, client):
    source = make(A)
    C = coded.encode(source, code, client, transpose=True)
    (source if make is np.array else source.data)[...] = 0
    x, y = numbers(COLUMNS), numbers(ROWS)
    check(C @ x, A @ x, client)
    check(y @ C, y @ A, client)


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_the_source_of_a_dask_array_may_be_changed_afterwards(code, A, client):
    source = A.copy()
    blocks = coded.encode(A, code, client).chunks[0]
    C = coded.encode(da.from_array(source, chunks=(blocks, -1)), code, client)
    source[...] = 0
    check(C @ numbers(COLUMNS), A @ numbers(COLUMNS), client)


def test_multiples_in_single_precision_whose_factors_are_large(client):
    C = coded.encode(np.full((6, 2), 1e30, np.float32), coded.MDS(3, 2), client)
    for factor, entry in [(1e-30, 1e9), (1e-30, 1e-20), (-1e-25, 1e12)]:
        x = np.full(2, entry, np.float32)
        found = value((C * factor) @ x, client)
        np.testing.assert_allclose(found, np.full(6, 2e30 * entry * factor), rtol=1e-5)
        assert found.dtype == np.float32


@pytest.mark.parametrize(
    "chunks",
    [(ROWS, COLUMNS), (5, COLUMNS), (ROWS, 4), (4, 3), ((20, 1, 2), (1, 10)), (1, 1)],
    ids=str,
)
@pytest.mark.parametrize("code", CODES[::3], ids=repr)
def test_dask_array_of_any_chunks(chunks, code, A, client):
    C = coded.encode(da.from_array(A, chunks=chunks), code, client)
    x = numbers(COLUMNS)
    check(C @ x, A @ x, client)
    np.testing.assert_array_equal(value(C, client), A)


def test_persisted_dask_array(A, client):
    source = client.persist(da.from_array(A, chunks=(6, 5)) * 2)
    C = coded.encode(source, coded.MDS(5, 4), client)
    del source
    check(C @ np.ones(COLUMNS), (2 * A).sum(1), client)


def sparse(kind, rows=40, columns=17, dtype=np.float64):
    A = scipy.sparse.random_array(
        (rows, columns), density=0.2, rng=np.random.default_rng(3), dtype=np.float64
    )
    if np.dtype(dtype).kind != "f":
        A = A * 100
    return kind(A.astype(dtype))


SPARSE = [
    scipy.sparse.csr_array,
    scipy.sparse.csr_matrix,
    scipy.sparse.coo_array,
    scipy.sparse.coo_matrix,
    scipy.sparse.csc_array,
]


@pytest.mark.parametrize("kind", SPARSE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("code", [None, coded.MDS(5, 3), coded.Repetition(4, 2)], ids=repr)
def test_sparse(kind, code, client):
    A = sparse(kind)
    C = coded.encode(A, code, client)
    rows = scipy.sparse.csr_array if isinstance(A, scipy.sparse.sparray) else None
    assert type(value(C, client)) is (rows or scipy.sparse.csr_matrix)
    for x in (numbers(17), numbers(17, 3)):
        check(C @ x, A.toarray() @ x, client)


@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.csr_matrix])
@pytest.mark.parametrize("code", [None, coded.MDS(5, 3)], ids=repr)
def test_dask_array_with_sparse_chunks(kind, code, client):
    A = sparse(scipy.sparse.csr_array)
    source = da.from_array(A.toarray(), chunks=(9, 17)).map_blocks(
        kind, meta=kind((0, 0), dtype=float)
    )
    C = coded.encode(source, code, client)
    x = numbers(17, 2)
    check(C @ x, A @ x, client)
    assert type(value(C.blocks[0], client)) is kind


def test_dask_array_with_sparse_column_chunks(client):
    A = sparse(scipy.sparse.csr_array)
    source = da.from_array(A.toarray(), chunks=(9, 5)).map_blocks(
        scipy.sparse.csr_matrix, meta=scipy.sparse.csr_matrix((0, 0), dtype=float)
    )
    x = numbers(17)
    check(coded.encode(source, None, client) @ x, A @ x, client)


@pytest.mark.parametrize("kind", [scipy.sparse.coo_array, scipy.sparse.coo_matrix])
@pytest.mark.parametrize(
    ("dtype", "entries"),
    [("u1", [200, 100]), ("i1", [100, 100]), ("?", [True, True]), ("f4", [3e38, 3e38])],
)
def test_entries_of_one_cell_are_added_up_in_the_dtype_of_the_product(kind, dtype, entries, client):
    A = kind((np.array([1, *entries], dtype), ([2, 0, 0], [0, 1, 1])), shape=(4, 3))
    x = numbers(3)
    C = coded.encode(A, coded.Repetition(4, 2), client, transpose=True)
    assert C.dtype == A.dtype
    for matrix in (C, coded.encode(scipy.sparse.csr_array(value(C, client)), None, client)):
        check(matrix @ x, A @ x, client)
    check(C.T @ numbers(4), A.T @ numbers(4), client)


def test_sparse_with_empty_rows(client):
    A = scipy.sparse.csr_array((30, 4))
    check(coded.encode(A, coded.Repetition(5, 2), client) @ np.ones(4), np.zeros(30), client)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(np.float32, 1e-5), (np.float64, 1e-12), (np.complex64, 1e-5), (np.complex128, 1e-12)],
)
@pytest.mark.parametrize("code", CODES[::3], ids=repr)
def test_inexact_dtypes(dtype, rtol, code, client):
    A, x = numbers(ROWS, COLUMNS, dtype=dtype), numbers(COLUMNS, 2, dtype=dtype)
    check(coded.encode(A, code, client) @ x, A @ x, client, rtol)


def test_dtype_of_a_product_is_that_of_numpy(C, A, client):
    for dtype in (np.float32, np.complex64, np.int64, np.bool_):
        x = numbers(COLUMNS, dtype=dtype)
        check(C @ x, A @ x, client)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16, np.bool_])
def test_integers_and_booleans_are_exact_when_repeated(dtype, client):
    A, x = numbers(ROWS, COLUMNS, dtype=dtype), numbers(COLUMNS, dtype=dtype)
    C = coded.encode(A, coded.Repetition(5, 2), client)
    product = C @ x
    assert product.dtype == (A @ x).dtype
    np.testing.assert_array_equal(value(product, client), A @ x)
    np.testing.assert_array_equal(value(C, client), A)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
def test_integers_and_booleans_are_refused_by_mds(dtype, client):
    with pytest.raises(TypeError, match=r"astype\(float\).*Repetition"):
        coded.encode(numbers(ROWS, COLUMNS, dtype=dtype), coded.MDS(5, 3), client)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("make", [np.asarray, da.asarray, scipy.sparse.csr_array])
def test_values_that_are_not_finite_are_refused(bad, make, A, client):
    A = A.copy()
    A[17, 3] = bad
    with pytest.raises(ValueError, match="check_finite=False"):
        coded.encode(make(A), coded.MDS(5, 3), client)


def test_values_that_are_not_finite_are_accepted_on_request(A, client):
    A = A.copy()
    A[17, 3] = np.nan
    C = coded.encode(A, coded.Repetition(5, 2), client, check_finite=False)
    result = value(C @ np.ones(COLUMNS), client)
    np.testing.assert_allclose(result, A.sum(1))
    assert np.flatnonzero(np.isnan(result)).tolist() == [17]


def test_only_matrices_of_numbers_are_encoded(client):
    for A in (np.ones(3), np.ones((2, 3, 4)), da.ones((2, 3, 4)), da.ones(3).sum(), 5.0):
        with pytest.raises(TypeError, match="Only a matrix can be encoded"):
            coded.encode(A, None, client)
    for A, name in (("matrix.npy", "str"), (None, "NoneType")):
        with pytest.raises(
            TypeError, match=f"Only a matrix can be encoded, not a {name}: pass an array"
        ):
            coded.encode(A, None, client)
    with pytest.raises(TypeError, match="numbers and booleans"):
        coded.encode(np.array([["a", "b"]]), None, client)
    for shape in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="empty array"):
            coded.encode(np.ones(shape), None, client)
    unknown = da.ones((6, 6), chunks=3)
    unknown = unknown[unknown[:, 0] > 0]
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        coded.encode(unknown, None, client)


def test_source_that_fails(client):
    def fail(block):
        raise ZeroDivisionError("from the source")

    source = da.ones((8, 4), chunks=2).map_blocks(fail, meta=np.empty((0, 0)))
    with pytest.raises(ZeroDivisionError, match="from the source"):
        coded.encode(source, coded.MDS(5, 3), client)


@pytest.mark.extras
def test_sparse_matrices_of_other_packages_are_refused(A, client):
    foreign = pytest.importorskip("sparse")
    chunked = da.from_array(A, chunks=(5, -1)).map_blocks(foreign.COO)
    for matrix, each in ((foreign.COO.from_numpy(A), "it"), (chunked, "each chunk")):
        with pytest.raises(TypeError, match=rf"sparse.COO: convert {each} with `to_scipy_sparse"):
            coded.encode(matrix, None, client)


def sparse_operands():
    yield scipy.sparse.eye_array(COLUMNS, format="csr")
    yield da.ones((COLUMNS, 2), chunks=-1).map_blocks(scipy.sparse.csr_array)
    try:
        import sparse
    except ImportError:
        return
    yield sparse.COO.from_numpy(np.ones((COLUMNS, 2)))


def test_sparse_operands_are_refused(C, both, client):
    for x in sparse_operands():
        for product in (lambda x=x: C @ x, lambda x=x: C.dot(x), lambda x=x: both.T.T @ x):
            with pytest.raises(TypeError, match="operand of a coded product must be dense"):
                product()
    x = next(sparse_operands())
    with pytest.raises(TypeError, match="operand of a coded product must be dense"):
        coded.submit(lambda operator, x: operator @ x, C, x, client=client).result()


# -- choice of code and workers ----------------------------------------------------------------


def test_default_codes(A, client):
    assert coded.encode(A, client=client).code == coded.MDS(5, 4)
    assert coded.encode(sparse(scipy.sparse.csr_array), client=client).code == coded.Repetition(
        5, 2
    )
    assert coded.encode(A > 0, client=client).code == coded.Repetition(5, 2)
    assert coded.encode(A.astype("c8"), client=client).code == coded.MDS(5, 4)


def test_code_by_name(A, client):
    assert coded.encode(A, "mds", client, redundancy=2).code == coded.MDS(5, 3)
    assert coded.encode(A, "repetition", client, redundancy=2).code == coded.Repetition(5, 3)
    with dask.config.set({"coded.redundancy": 0.9}):  # four of five
        assert coded.encode(A, "repetition", client).code == coded.Repetition(5, 2)
        assert coded.encode(A, "mds", client).code == coded.MDS(5, 1)
    assert coded.encode(A, client=client, redundancy=3).code == coded.MDS(5, 2)
    with pytest.raises(ValueError, match=r"\['mds', .*'parity'"):
        coded.encode(A, "parity", client)
    with pytest.raises(TypeError, match="either a code or a redundancy"):
        coded.encode(A, coded.MDS(5, 3), client, redundancy=2)


@pytest.mark.parametrize("code", ["mds", "random", "repetition", None])
@pytest.mark.parametrize("wrong", [-1, 5, 1.5, "2", True])
def test_redundancy_out_of_range(wrong, code, A, client):
    message = rf"'redundancy' must be a whole number from 0 to \d with 5 workers, it is {wrong!r}"
    with pytest.raises(ValueError, match=message):
        coded.encode(A, code, client, redundancy=wrong)


def test_codes_that_are_none(A, client):
    for wrong in (np.eye(3), coded.MDS, ("mds",)):
        with pytest.raises(ValueError, match="'code' must be a Code or one of"):
            coded.encode(A, wrong, client)
    with pytest.raises(TypeError, match=r"must be systematic.*use `coded.encode_pair`"):
        coded.encode(A, coded.Polynomial(5, 2, 2), client)


def test_redundancy_from_the_configuration(A, client):
    with dask.config.set({"coded.redundancy": 0.6}):
        assert coded.encode(A, client=client).code == coded.MDS(5, 2)
    for wrong in (-0.5, 1, "a"):
        with (
            dask.config.set({"coded.redundancy": wrong}),
            pytest.raises(ValueError, match=f"a fraction of the workers.*it is {wrong!r}"),
        ):
            coded.encode(A, client=client)


def test_workers_that_are_none(A, client):
    for wrong in ("tcp://127.0.0.1:1", [], [1], 3):
        for code in (None, coded.MDS(2, 1)):
            with pytest.raises(TypeError, match="'workers' must be a list of the addresses"):
                coded.encode(A, code, client, workers=wrong)
    with pytest.raises(coded.ClusterUnfitError, match=r"not in the cluster: \['tcp://nowhere:1'\]"):
        coded.encode(A, None, client, workers=["tcp://nowhere:1"])


def test_a_client_that_is_none(A, client):
    for wrong in ("tcp://127.0.0.1:8786", client.cluster):
        with pytest.raises(TypeError, match=r"'client' must be a `distributed\.Client`"):
            coded.encode(A, client=wrong)


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_places_are_distinct_workers(code, A, client):
    C = coded.encode(A, code, client)
    workers = {}
    for worker, place in zip(C.encoded.workers, code.place.tolist(), strict=True):
        workers.setdefault(place, set()).add(worker)
    assert all(len(w) == 1 for w in workers.values())
    assert len(set(C.encoded.workers)) == code.n
    held = client.who_has(C.encoded.futures)
    for key, worker in zip(C.encoded.spec.keys, C.encoded.workers, strict=True):
        assert list(held[key]) == [worker]


def test_selected_workers(A, client):
    workers = sorted(client.nthreads())[1:4]
    C = coded.encode(A, coded.MDS(3, 2), client, workers=workers)
    assert sorted(C.encoded.workers) == workers
    assert coded.encode(A, client=client, workers=workers).code.n == 3
    with pytest.raises(coded.ClusterUnfitError, match="needs 5 workers"):
        coded.encode(A, coded.MDS(5, 3), client, workers=workers)


def test_fewer_workers_than_places(A, client):
    code = coded.MDS(8, 6)
    with pytest.raises(
        coded.ClusterUnfitError,
        match=r"MDS\(n=8, k=6\) needs 8 workers, the cluster has 5: .*oversubscribe=True",
    ):
        coded.encode(A, code, client)
    C = coded.encode(A, code, client, oversubscribe=True)
    counts = [C.encoded.workers.count(w) for w in set(C.encoded.workers)]
    assert sorted(counts) == [1, 1, 2, 2, 2]
    check(C @ np.ones(COLUMNS), A.sum(1), client)


def test_no_client(A):
    with pytest.raises(ValueError, match=r"dask.distributed.Client\(\)"):
        coded.encode(A)
    with pytest.raises(ValueError, match=r"dask.distributed.Client\(\)"):
        coded.submit(len, [])


def test_current_client(A, client):
    with client.as_current():
        C = coded.encode(A)
        np.testing.assert_allclose((C @ np.ones(COLUMNS)).compute(), A.sum(1))


# -- products ----------------------------------------------------------------------------------

PRODUCTS = [operator.matmul, np.matmul, np.dot, lambda C, x: C.dot(x)]


@pytest.mark.parametrize("product", PRODUCTS, ids=["@", "np.matmul", "np.dot", ".dot"])
@pytest.mark.parametrize("shape", [(COLUMNS,), (COLUMNS, 1), (COLUMNS, 4), (COLUMNS, 0)], ids=str)
def test_numpy_operand(product, shape, C, A, client):
    x = numbers(*shape)
    result = product(C, x)
    assert type(result) is da.Array
    assert result.shape == (A @ x).shape
    np.testing.assert_allclose(value(result, client), A @ x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("product", PRODUCTS, ids=["@", "np.matmul", "np.dot", ".dot"])
@pytest.mark.parametrize("chunks", [COLUMNS, 4, 1])
def test_dask_vector(product, chunks, C, A, client):
    x = numbers(COLUMNS)
    check(product(C, da.from_array(x, chunks=chunks)), A @ x, client)


@pytest.mark.parametrize("product", PRODUCTS, ids=["@", "np.matmul", "np.dot", ".dot"])
@pytest.mark.parametrize("chunks", [(COLUMNS, 7), (4, 7), (COLUMNS, 3), (2, (1, 5, 1))], ids=str)
def test_dask_matrix_is_one_round_per_column_chunk(product, chunks, C, A, client):
    x = numbers(COLUMNS, 7)
    operand = da.from_array(x, chunks=chunks)
    result = product(C, operand)
    assert result.chunks[1] == operand.chunks[1]
    (layer,) = (v for k, v in result.dask.layers.items() if k.startswith("coded-round"))
    assert len(layer) == result.numblocks[1]
    check(result, A @ x, client)


class Target:
    """What `da.store` writes to; notes how many results of rounds are in memory at each write."""

    out: ClassVar[np.ndarray] = np.zeros(())
    keys: ClassVar[set[tuple]] = set()
    workers: ClassVar[list[Worker]] = []
    results: ClassVar[list[int]] = []

    def __setitem__(self, index, chunk):
        self.out[index] = chunk
        self.results.append(sum(key in worker.data for worker in self.workers for key in self.keys))


def test_a_result_is_stored_chunk_by_chunk(C, A, client):
    x = numbers(COLUMNS, 200)
    product = C @ da.from_array(x, chunks=(-1, 2))
    Target.out, Target.results = np.zeros(product.shape), []
    Target.keys = set(flatten(product.__dask_keys__()))
    Target.workers = list(client.cluster.workers.values())
    with dask.config.set(scheduler=client):
        da.store(product, Target(), lock=False)
    np.testing.assert_allclose(Target.out, A @ x)
    assert len(Target.results) == 100
    # One or two for each of the ten threads.
    assert 0 < max(Target.results) < 40


def test_list_operand(C, A, client):
    for ones in ([1.0] * COLUMNS, (1.0,) * COLUMNS, [[1.0, 1.0]] * COLUMNS):
        check(C @ ones, A @ np.asarray(ones), client)


def test_operand_that_is_a_stack_of_matrices(C, A, client):
    stack = numbers(2 * 3 * COLUMNS, 4).reshape(2, 3, COLUMNS, 4)
    check(C @ stack, A @ stack, client)
    check(C @ da.from_array(stack, chunks=2), A @ stack, client)


def test_operand_that_is_a_product(client):
    A = numbers(12, 12)
    C = coded.encode(A, coded.MDS(5, 3), client)
    check(C @ (C @ np.ones(12)) + 1, A @ (A @ np.ones(12)) + 1, client)


def test_operand_of_any_layout(C, A, client):
    x = numbers(2 * COLUMNS, 6)
    check(C @ x[::2, ::-2], A @ x[::2, ::-2], client)
    check(C @ np.asfortranarray(x[:COLUMNS]), A @ x[:COLUMNS], client)


def test_operands_that_do_not_fit(C, both):
    for x in (np.ones(COLUMNS + 1), da.ones(COLUMNS + 1), np.ones((ROWS, COLUMNS))):
        with pytest.raises(ValueError, match=r"Shapes \(23, 11\) and"):
            C @ x
    with pytest.raises(ValueError, match=r"Shapes \(23, 11\) and \(11, 1, 1\)"):
        C @ np.ones((COLUMNS, 1, 1))
    with pytest.raises(ValueError, match="0 dimensions"):
        C @ 2.0
    unknown = da.ones(COLUMNS, chunks=3)
    with pytest.raises(ValueError, match=r"compute_chunk_sizes\(\)"):
        C @ unknown[unknown > 0]
    with pytest.raises(TypeError):
        C @ {}
    with pytest.raises(ValueError, match=r"Shapes \(11, 23\) and"):
        np.ones(COLUMNS) @ both


def test_equal_products_are_one_task(C):
    x = numbers(COLUMNS)
    assert (C @ x).name == (C @ x.copy()).name
    assert (C @ x).name != (C @ (x + 1)).name


@pytest.mark.parametrize("policy", ["continuous", "s2c2", "s2c2-basic", "static"])
def test_policies(policy, C, A, client):
    x = numbers(COLUMNS)
    with dask.config.set({"coded.policy": policy}):
        check(C @ x, A @ x, client)


def test_unknown_policy(C):
    with dask.config.set({"coded.policy": "wish"}):
        with pytest.raises(ValueError, match=r"coded.policy.*'wish'"):
            C @ np.ones(COLUMNS)


# -- from the left -----------------------------------------------------------------------------


def rounds(array):
    """Names of the coded rounds in a graph."""
    return [name for name in array.dask.layers if name.startswith("coded-round")]


@pytest.mark.parametrize("shape", [(ROWS,), (3, ROWS)], ids=str)
@pytest.mark.parametrize("make", [np.asarray, da.asarray, lambda x: da.from_array(x, chunks=2)])
@pytest.mark.parametrize("product", [operator.matmul, np.matmul, np.dot])
def test_product_from_the_left(shape, make, product, both, A, client):
    x = numbers(*shape)
    result = product(make(x), both)
    assert rounds(result)
    check(result, x @ A, client)


@pytest.mark.parametrize("make", [np.asarray, da.asarray])
def test_transposed_product(make, both, A, client):
    y = numbers(ROWS, 2)
    for transposed in (both.T, both.transpose(), both.transpose(1, 0), both.transpose((1, 0))):
        assert isinstance(transposed, coded.CodedArray)
        result = transposed @ make(y)
        assert rounds(result)
        check(result, A.T @ y, client)
    assert isinstance(both.T.T, coded.CodedArray)
    assert both.T.T.name == both.name
    check(both.T.T @ np.ones(COLUMNS), A.sum(1), client)


def test_identity_transpose(both, A, client):
    np.testing.assert_array_equal(value(both.transpose(0, 1), client), A)


def test_plain_product_from_the_left(C, A, client):
    x = numbers(2, ROWS)
    with pytest.warns(coded.UncodedWarning, match="encode it with `transpose=True`"):
        result = x @ C
    assert not rounds(result)
    np.testing.assert_allclose(value(result, client), x @ A)


@pytest.mark.filterwarnings("ignore::dask_coded.UncodedWarning")
@pytest.mark.parametrize("kind", SPARSE[:2], ids=lambda kind: kind.__name__)
def test_plain_products_of_sparse(kind, client):
    A = sparse(kind)
    C = coded.encode(A, None, client)
    x, y = numbers(17), numbers(40)
    Y = da.from_array(numbers(40, 3), chunks=(11, 2))
    for actual, expected in [
        (y @ C, y @ A),
        (numbers(3, 40) @ C, numbers(3, 40) @ A),
        (C.T @ y, A.T @ y),
        (C.T @ Y, A.T @ numbers(40, 3)),
        (da.tensordot(C.T, Y, axes=1), A.T @ numbers(40, 3)),
        (C[:, :3] @ x[:3], A.tocsc()[:, :3] @ x[:3]),
        ((C + C) @ x, 2 * (A @ x)),
    ]:
        assert not rounds(actual)
        np.testing.assert_allclose(value(actual, client), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", SPARSE[:2], ids=lambda kind: kind.__name__)
def test_transpose_of_sparse(kind, client):
    A = sparse(kind)
    C = coded.encode(A, None, client, transpose=True)
    x, y = numbers(17), numbers(40)
    check(C @ x, A @ x, client)
    check(y @ C, y @ A, client)
    check(C.T @ y, A.T @ y, client)


def test_transpose_of_dask_array(A, client):
    C = coded.encode(da.from_array(A, chunks=(5, 4)), None, client, transpose=True)
    check(np.ones(ROWS) @ C, A.sum(0), client)


# -- other operations of a dask array ----------------------------------------------------------


def test_other_operations_are_those_of_a_dask_array(C, A, client):
    for actual, expected in [
        (C, A),
        (C.sum(), A.sum()),
        (C.mean(axis=0), A.mean(axis=0)),
        (C + 1, A + 1),
        (2 * C - C, A),
        (-C, -A),
        (np.exp(C), np.exp(A)),
        (C[3:20:2, ::-1], A[3:20:2, ::-1]),
        (C[5], A[5]),
        (C[C[:, 0] > 0], A[A[:, 0] > 0]),
        (C.T, A.T),
        (C.rechunk((4, 4)), A),
        (C.reshape(-1), A.reshape(-1)),
        (C.astype("f4"), A.astype("f4")),
        (C.map_blocks(abs), abs(A)),
        (da.concatenate([C, C]), np.concatenate([A, A])),
        (C.blocks[0], A[: C.chunks[0][0]]),
    ]:
        np.testing.assert_allclose(value(actual, client), expected)


def test_derived_arrays_are_not_coded(C):
    for derived in (C + 1, C[:3], C.T, C.rechunk((4, 4)), C.astype("f4")):
        assert not isinstance(derived, coded.CodedArray), derived


def test_compute_and_persist(C, A, client):
    with client.as_current():
        np.testing.assert_array_equal(C.compute(), A)
        (again,) = dask.persist(C)
        for persisted in (C.persist(), again, client.persist(C)):
            assert isinstance(persisted, coded.CodedArray)
            assert persisted.name == C.name
            check(persisted @ np.ones(COLUMNS), A.sum(1), client)
        product = (C @ np.ones(COLUMNS)).persist()
        np.testing.assert_allclose(product.compute(), A.sum(1))
        optimized = dask.optimize(C @ np.ones(COLUMNS) + 1)[0]
        np.testing.assert_allclose(optimized.compute(), A.sum(1) + 1)


def test_several_products_at_once(C, A, client):
    with client.as_current():
        x = [numbers(COLUMNS, seed=i) for i in range(8)]
        for actual, v in zip(dask.compute(*(C @ v for v in x)), x, strict=True):
            np.testing.assert_allclose(actual, A @ v)


def test_pickle(both, A, client):
    with client.as_current():
        again = pickle.loads(pickle.dumps(both))
    assert (again.name, again.code, again.shape) == (both.name, both.code, both.shape)
    check(again @ np.ones(COLUMNS), A.sum(1), client)
    check(np.ones(ROWS) @ again, A.sum(0), client)


def test_coded_array_inside_a_task(A, client):
    C = coded.encode(A, coded.MDS(5, 3), client)

    def inside(C):
        import distributed

        with distributed.worker_client():
            return type(C).__name__, (C @ np.ones(C.shape[1])).compute()

    name, result = client.submit(inside, C).result()
    assert name == "CodedArray"
    np.testing.assert_allclose(result, A.sum(1))


def test_repr(both, C):
    for text in (repr(both), both._repr_html_()):
        assert "MDS(n=5, k=3)" in text
        assert "1 on each of 5 workers" in text
        assert re.search(r"5 of \d+ B, [\d.]+ kiB in total", text)
    assert "<table>" in both._repr_html_()
    assert "not coded" in C._repr_html_()
    assert C.encoded.nbytes >= 5 * 8 * COLUMNS * (ROWS // 3)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_repr_says_that_workers_have_left(c, s, *workers):
    C = await coded.encode(np.eye(8), coded.MDS(4, 3), client=c)
    assert "placement=1 on each of 4 workers>" in repr(C)
    await c.retire_workers([w.address for w in workers[1:]])
    await async_poll_for(lambda: "when encoded" in repr(C), timeout=60)
    assert "placement=1 on each of 4 workers when encoded, now on the 1 that is left>" in repr(C)
    assert "the loss of any 1 of its workers, once there are 4 again" in C._repr_html_()
    homes = await c.who_has(list(C.encoded.futures))
    assert set(homes.values()) == {(workers[0].address,)}
    await c.close()
    assert "placement=1 on each of 4 workers>" in repr(C)


def test_repr_of_repetition(client):
    C = coded.encode(sparse(scipy.sparse.csr_array), coded.Repetition(5, 2), client)
    assert "Repetition(n=5, r=2)" in repr(C)
    assert "2 on each of 5 workers" in repr(C)


# -- lifetime ----------------------------------------------------------------------------------


def masked(array):
    return np.ma.masked_greater(array, 0.5)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_masked_operand_is_refused(A, client, lazy):
    C = coded.encode(A, coded.MDS(5, 3), client, transpose=True)
    x, y = masked(numbers(COLUMNS)), masked(numbers(ROWS))
    if lazy:
        x, y = da.from_array(x), da.from_array(y)
    for product in (lambda: C @ x, lambda: C.T @ y, lambda: y @ C):
        with pytest.raises(TypeError, match="must not be masked"):
            product()


def test_a_masked_operand_inside_the_cluster_is_refused(A, client):
    C = coded.encode(A, coded.MDS(5, 3), client)
    x = masked(numbers(COLUMNS))
    with pytest.raises(TypeError, match="must not be masked"):
        coded.submit(lambda C: C @ x, C, client=client).result()


def test_a_masked_matrix_is_refused(A, client):
    hidden = da.from_array(A, chunks=(5, -1)).map_blocks(masked, meta=np.empty((0, 0)))
    for matrix in (masked(A), da.from_array(masked(A)), hidden):
        with pytest.raises(TypeError, match="must not be masked"):
            coded.encode(matrix, coded.MDS(5, 3), client)


def test_redundancy_applies_to_sparse_matrices(client):
    A = scipy.sparse.eye_array(20, format="csr")
    assert coded.encode(A, client=client).code == coded.Repetition(5, 2)
    assert coded.encode(A, client=client, redundancy=2).code == coded.Repetition(5, 3)


def test_a_lazy_product_keeps_the_operand_as_it_was(A, client):
    x = numbers(COLUMNS)
    C = coded.encode(A, coded.MDS(5, 3), client)
    expected = A @ x
    y = C @ x
    x *= 0
    np.testing.assert_allclose(client.compute(y).result(), expected)


def test_lazy_result_outlives_its_array(A, client):
    C = coded.encode(A, coded.MDS(5, 3), client)
    result = C @ np.ones(COLUMNS)
    derived = (C @ np.ones(COLUMNS))[:4] + C.sum()
    del C
    check(result, A.sum(1), client)
    np.testing.assert_allclose(value(derived, client), A.sum(1)[:4] + A.sum())


def test_running_result_outlives_its_array(A, client):
    C = coded.encode(A, coded.MDS(5, 3), client)
    future = client.compute(C @ np.ones(COLUMNS))
    loop = coded.submit(lambda C: [C @ np.ones(COLUMNS) for _ in range(20)][-1], C, client=client)
    del C
    np.testing.assert_allclose(future.result(), A.sum(1))
    np.testing.assert_allclose(loop.result(), A.sum(1))


def test_an_algorithm_outlives_its_array_and_the_transpose(A, client):
    def alternate(C):
        for _ in range(20):
            y = C @ np.ones(COLUMNS)
        return C.T @ y

    loop = coded.submit(
        alternate, coded.encode(A, coded.MDS(5, 3), client, transpose=True), client=client
    )
    np.testing.assert_allclose(loop.result(), A.T @ A.sum(1))


# -- submit ------------------------------------------------------------------------------------


def test_submit_runs_an_algorithm(client):
    A = numbers(20, 20)
    A = A @ A.T
    C = coded.encode(A, coded.MDS(5, 3), client)

    def power(operator, rounds):
        x = np.ones(operator.shape[1])
        for _ in range(rounds):
            x = operator @ x
            x /= np.linalg.norm(x)
        return x @ operator.dot(x)

    future = coded.submit(power, C, rounds=200, client=client)
    assert future.key.startswith("coded-power-")
    np.testing.assert_allclose(future.result(), np.linalg.eigvalsh(A)[-1], rtol=1e-6)


def test_submit_fills_every_argument(C, both, A, client):
    def use_all_arguments(first, x, second, *, shift, scale, plain):
        assert (first.shape, first.ndim, first.dtype) == (x.shape[::-1], 2, np.float64)
        assert type(x) is type(shift) is np.ndarray
        return scale * (second @ (x @ np.ones(x.shape[1]))) + first @ shift + plain

    x = numbers(COLUMNS, ROWS)
    shift = numbers(COLUMNS)
    result = coded.submit(
        use_all_arguments,
        C,
        da.from_array(x, chunks=4),
        both,
        shift=da.from_array(shift, chunks=3),
        scale=client.submit(lambda: 3.0),
        plain=0.5,
        client=client,
    ).result()
    np.testing.assert_allclose(result, 3 * (A @ x.sum(1)) + A @ shift + 0.5)


def test_operator_from_the_left(both, C, A, client):
    def left(operator):
        x = np.ones(operator.shape[0])
        assert operator.T.T is operator
        return x @ operator, operator.T @ x, np.stack([x, x]) @ operator

    first, second, third = coded.submit(left, both, client=client).result()
    np.testing.assert_allclose([first, second, *third], [A.sum(0)] * 4)
    with pytest.raises(TypeError, match="transpose=True"):
        coded.submit(left, C, client=client).result()


def test_functions_of_numpy_take_an_operator_or_say_that_they_do_not(both, A, client):
    def products(operator):
        x, y = np.ones(operator.shape[1]), np.ones(operator.shape[0])
        assert np.shape(operator) == operator.shape
        assert (np.ndim(operator), np.size(operator)) == (2, A.size)
        assert np.transpose(operator) is operator.T
        assert np.isrealobj(operator)
        assert np.result_type(operator, np.complex64(1)) == np.complex128
        assert np.common_type(operator, x) == np.float64
        for function in (np.inner, np.outer, np.sum, np.linalg.norm):
            try:
                function(operator, x)
            except TypeError as error:
                assert f"`np.{function.__name__}` does not take a coded operator" in str(error)
            else:
                raise AssertionError(f"{function} takes an operator")
        return np.dot(operator, x), np.dot(y, operator)

    right, left = coded.submit(products, both, client=client).result()
    np.testing.assert_allclose(right, A.sum(axis=1))
    np.testing.assert_allclose(left, A.sum(axis=0))


def test_round_reports(A, client):
    C = coded.encode(A, coded.MDS(5, 3), client)

    def report(operator):
        assert operator.last_round is None
        operator @ np.ones(operator.shape[1])
        return operator.last_round

    found = coded.submit(report, C, client=client).result()
    assert found.seconds > 0
    assert 3 <= found.workers <= 5
    assert found.messages >= 2 * found.workers
    assert {entry[0] for entry in found.timeline} <= set(C.encoded.workers)


def test_submit_of_a_failing_algorithm(C, client):
    def fail(operator):
        operator @ np.ones(3)

    with pytest.raises(ValueError, match=r"Shapes \(23, 11\) and \(3,\)"):
        coded.submit(fail, C, client=client).result()


def test_submit_to_a_worker(C, client):
    def where(operator):
        from distributed import get_worker

        return get_worker().address

    address = sorted(client.nthreads())[2]
    assert coded.submit(where, C, client=client, workers=address).result() == address


def test_submit_without_arrays(client):
    assert coded.submit(lambda x: x + 1, 2, client=client).result() == 3


# -- published ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
def test_a_published_array_keeps_all_pieces(A, verify):
    options = {"threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(n_workers=5, **options) as cluster:
        with Client(cluster, set_as_default=False) as client:
            C = coded.encode(A, coded.MDS(5, 3), client, transpose=True, verify=verify)
            client.publish_dataset(C=C)
            keys = {f.key for e in (C.encoded, C._back) for f in (*e.futures, *e.checks)}
            del C
        with Client(cluster, set_as_default=False) as client:
            C = client.get_dataset("C")
            states = cluster.scheduler.tasks
            assert {states[key].state for key in keys} == {"memory"}
            np.testing.assert_allclose(
                client.compute(C.T @ numbers(ROWS)).result(), A.T @ numbers(ROWS)
            )
            for worker in list(cluster.workers.values())[:2]:
                cluster.sync(worker.close)
            np.testing.assert_allclose(
                client.compute(C @ numbers(COLUMNS)).result(), A @ numbers(COLUMNS)
            )


def test_a_coded_array_that_was_unpickled_shows_itself(client, A):
    C = coded.encode(A, coded.MDS(5, 3), client)
    assert repr(pickle.loads(pickle.dumps(C))) == repr(C)
    assert client.submit(lambda array: "MDS" in repr(array), C).result()


def test_a_lazy_result_keeps_the_pieces_that_can_replace_lost_ones(client, A):
    C = coded.encode(A, coded.MDS(5, 3), client)
    keys = {future.key for future in C.encoded.futures}
    total = C.sum(axis=0)
    del C
    gc.collect()
    assert keys <= set(client.futures)
    np.testing.assert_allclose(client.compute(total).result(), A.sum(axis=0))
