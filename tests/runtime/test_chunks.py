"""Dask arrays whose chunks have another type or dtype than the array declares."""

from __future__ import annotations

import operator

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from distributed.utils_test import gen_cluster

import dask_coded as coded
from dask_coded.linalg import randomized_svd
from dask_coded.transport import rows

FOUR = [("127.0.0.1", 1)] * 4

N, P = 24, 6
rng = np.random.default_rng(0)
REAL = np.where(rng.random((N, P)) < 0.5, rng.standard_normal((N, P)), 0.0)
WHOLE = np.rint(4 * REAL).astype(int)
x = np.arange(1.0, P + 1)

# Aligned with the three blocks of the codes, several to a block, across the blocks.
LAYOUTS = [((8, 8, 8), (P,)), ((4,) * 6, (4, 2)), ((7, 10, 7), (P,))]
CODES = [coded.MDS(4, 3), coded.Repetition(4, 2)]


def lying(values, meta, layout, make=lambda chunk: chunk):
    """Return a dask array that declares what ``meta`` is; its chunks are what ``make`` returns."""
    heights, widths = layout
    parts = [
        [
            da.from_delayed(dask.delayed(make)(part), part.shape, meta=meta)
            for part in np.split(band, np.cumsum(widths)[:-1], axis=1)
        ]
        for band in np.split(values, np.cumsum(heights)[:-1])
    ]
    return da.block(parts) if len(widths) > 1 else da.concatenate([row[0] for row in parts])


def with_duplicates(kind):
    """Return a function that makes a COO matrix whose every element is the sum of two entries."""

    def make(chunk):
        i, j = np.nonzero(chunk)
        half = chunk[i, j] // 2
        values = np.concatenate([half, chunk[i, j] - half])
        return kind((values, (np.tile(i, 2), np.tile(j, 2))), shape=chunk.shape)

    return make


def frame(chunk):
    pandas = pytest.importorskip("pandas")
    # Labels by which no row may be selected.
    return pandas.DataFrame(chunk, index=np.arange(len(chunk))[::-1] + 0.5)


def dense(dtype):
    return np.empty((0, 0), dtype)


def csr(dtype, kind=sp.csr_array):
    return kind((0, 0), dtype=dtype)


LONG = pytest.mark.long  # others are alike
LOSES_NOTHING = {
    "integers as floats": (WHOLE, dense(float), np.asarray),
    "booleans as integers": (WHOLE > 0, dense(int), np.asarray),
    "int8 as int64": pytest.param(
        WHOLE.astype("i1"), dense(int), np.asarray, marks=pytest.mark.long
    ),
    "float32 as float64": (REAL.astype("f4"), dense(float), np.asarray),
    "real as complex": pytest.param(REAL, dense(complex), np.asarray, marks=LONG),
    "another byte order": (REAL.astype(">f8"), dense(float), np.asarray),
    "np.matrix": pytest.param(REAL, dense(float), np.asmatrix, marks=LONG),
    "CSR as dense": (REAL, dense(float), sp.csr_array),
    "CSR matrix as dense": pytest.param(REAL, dense(float), sp.csr_matrix, marks=LONG),
    "CSR of integers as dense": pytest.param(
        WHOLE, dense(int), sp.csr_array, marks=pytest.mark.long
    ),
    "COO as dense": pytest.param(REAL, dense(float), sp.coo_matrix, marks=LONG),
    "BSR as dense": pytest.param(REAL, dense(float), sp.bsr_array, marks=LONG),
    "DIA of integers as dense floats": pytest.param(WHOLE, dense(float), sp.dia_array, marks=LONG),
    "dense as CSR": (REAL, csr(float), np.asarray),
    "dense as CSR matrix": pytest.param(
        REAL, csr(float, sp.csr_matrix), np.asarray, marks=pytest.mark.long
    ),
    "COO as CSR": pytest.param(REAL, csr(float), sp.coo_array, marks=LONG),
    "BSR as CSR matrix": pytest.param(
        REAL, csr(float, sp.csr_matrix), sp.bsr_matrix, marks=pytest.mark.long
    ),
    "CSC of integers as CSR of floats": pytest.param(WHOLE, csr(float), sp.csc_array, marks=LONG),
    "float32 CSR as float64 CSR": pytest.param(
        REAL.astype("f4"), csr(float), sp.csr_matrix, marks=pytest.mark.long
    ),
    "COO with duplicates as dense": pytest.param(
        WHOLE, dense(float), with_duplicates(sp.coo_array), marks=LONG
    ),
    "COO with duplicates as CSR": (WHOLE, csr(int), with_duplicates(sp.coo_matrix)),
    "data frame": pytest.param(REAL, dense(float), frame, marks=pytest.mark.extras),
    "data frame of integers": pytest.param(WHOLE, dense(float), frame, marks=pytest.mark.extras),
    "data frame as CSR": pytest.param(REAL, csr(float), frame, marks=pytest.mark.extras),
}


def suits(code, meta):
    return code.exact or meta.dtype.kind in "fc"


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize(("values", "meta", "make"), LOSES_NOTHING.values(), ids=LOSES_NOTHING)
def test_chunks_that_can_be_what_is_declared_are_converted(values, meta, make):
    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        # Each layout once, with another code if that suits.
        for code, layout, persisted in zip(CODES, LAYOUTS[1:], (False, True), strict=True):
            code = code if suits(code, meta) else CODES[1]
            A = lying(values, meta, layout, make)
            if persisted:
                A = c.persist(A, workers=workers[0].address)
            C = await coded.encode(A, code, c)
            assert C.dtype == meta.dtype
            lazy = c.compute(C @ da.from_array(x, chunks=2))
            loop = coded.submit(operator.matmul, C, x, client=c)
            plain = c.compute(C)
            for found in await c.gather([lazy, loop]):
                np.testing.assert_allclose(found, values @ x, atol=1e-12)
            plain = await plain
            plain = plain.toarray() if sp.issparse(plain) else plain
            np.testing.assert_allclose(plain, values, atol=1e-12)

    test()


@gen_cluster(client=True, nthreads=FOUR)
async def test_small_integers_at_one_place_are_added_as_the_product_adds_them(c, s, *workers):
    def make(chunk):
        twice = ([200, 100], ([0, 0], [0, 0]))
        return sp.coo_array(twice, shape=chunk.shape, dtype=np.uint8)

    for layout in LAYOUTS[::2]:
        source = lying(np.zeros((N, P)), csr(np.uint8), layout, make)
        C = await coded.encode(source, coded.Repetition(4, 2), c)
        found = await c.compute(C @ x)
        starts = np.cumsum([0, *layout[0][:-1]])
        np.testing.assert_array_equal(found, np.where(np.isin(np.arange(N), starts), 300, 0))


class Unknown:
    """Looks like a sparse array of another package."""

    def __init__(self, chunk):
        self.chunk, self.shape, self.dtype, self.ndim = chunk, chunk.shape, chunk.dtype, 2

    def __getitem__(self, index):
        return Unknown(self.chunk[index])

    def todense(self):
        return self.chunk


HUGE = np.where(REAL > 0, 1e300, REAL)
REFUSED = {
    "floats as integers": (REAL, dense(int), np.asarray, "float64, .* int64, .* declare float64"),
    "float64 as float32": (HUGE, dense("f4"), np.asarray, r"float64, .* float32, .*\.astype"),
    "complex as real": (REAL + 1j, dense(float), np.asarray, "complex128, .* float64, "),
    "uint64 as int64": (WHOLE.astype("u8"), dense(int), np.asarray, "uint64, .* int64"),
    "objects as floats": (REAL.astype(object), dense(float), np.asarray, "object, .* float64"),
    "texts as floats": (REAL.astype(str), dense(float), np.asarray, "U32, .* float64"),
    "CSR of floats as integers": (REAL, csr(int), sp.csr_array, "float64, .* int64"),
    "CSR of floats as dense integers": (REAL, dense(int), sp.csr_array, "float64, .* int64"),
    "lists": (REAL, dense(float), np.ndarray.tolist, r"builtins.list.*map_blocks\(np.asarray"),
    "masked": (REAL, dense(float), np.ma.masked_invalid, "must not be masked"),
    "masked as CSR": (REAL, csr(float), np.ma.masked_invalid, "must not be masked"),
    "of another package": (REAL, dense(float), Unknown, r"tests.Unknown.*todense\(\)"),
}


@pytest.mark.parametrize(("values", "meta", "make", "says"), REFUSED.values(), ids=REFUSED)
def test_other_chunks_are_refused_by_name(values, meta, make, says):
    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        for heights, _ in LAYOUTS:
            source = lying(values, meta, (heights, (P,)), make)
            persisted = c.persist(source, workers=workers[0].address)
            for code, A in zip(CODES, (persisted, source), strict=True):
                if not suits(code, meta):
                    continue
                with pytest.raises(TypeError, match=rf"A chunk of the matrix to encode.*{says}"):
                    await coded.encode(A, code, c)
        assert not s.extensions["dask-coded"].arrays

    test()


@pytest.mark.parametrize(
    "name",
    [
        "integers as floats",
        *(pytest.param(n, marks=LONG) for n in ("float32 as float64", "CSR as dense")),
    ],
)
def test_chunks_are_converted_on_the_way_through_shared_memory(name, monkeypatch):
    monkeypatch.setattr(rows, "LEAST_BYTES", 1)
    values, meta, make = LOSES_NOTHING[name]
    test_chunks_that_can_be_what_is_declared_are_converted(values, meta, make)


def test_wider_chunks_are_refused_on_the_way_through_shared_memory(monkeypatch):
    monkeypatch.setattr(rows, "LEAST_BYTES", 1)
    for name in ("float64 as float32", "floats as integers", "complex as real"):
        test_other_chunks_are_refused_by_name(*REFUSED[name])


@gen_cluster(client=True, nthreads=FOUR)
async def test_products_of_pairs_whose_chunks_are_not_as_declared(c, s, *workers):
    for layout in LAYOUTS:
        A = lying(WHOLE, dense(float), layout)
        B = lying(REAL.astype("f4"), dense(float), layout, sp.csr_array)
        expected = WHOLE.T @ REAL.astype("f4")
        for source in (A, c.persist(A)):
            P = await coded.encode_pair(source, B, client=c)
            np.testing.assert_allclose(await c.compute(P.product()), expected, atol=1e-10)
        with pytest.raises(TypeError, match="dtype complex128, its dask array declares float64"):
            await coded.encode_pair(A, lying(REAL + 1j, dense(float), layout), client=c)


@gen_cluster(client=True, nthreads=FOUR)
async def test_an_operand_whose_chunks_are_not_as_declared_is_used_as_it_is(c, s, *workers):
    C = await coded.encode(REAL, coded.MDS(4, 3), c)
    for values, declared in [(x / 2, int), (1e300 * x, "f4"), (1j * x, float), (x > 2, float)]:
        halves = [dask.delayed(part) for part in np.split(values, 2)]
        operand = da.concatenate([da.from_delayed(half, (3,), dtype=declared) for half in halves])
        found = await c.compute(C @ operand)
        atol = 1e-12 * np.abs(values).max()
        np.testing.assert_allclose(found, REAL @ values, rtol=1e-7, atol=atol)
    wrong = da.from_delayed(dask.delayed(sp.csr_array(np.ones((P, 2)))), (P, 2), dtype=float)
    with pytest.raises(TypeError, match="must be dense, it is sparse"):
        await c.compute(C @ wrong)


def test_algorithms_of_data_whose_chunks_are_not_as_declared(client):
    pytest.importorskip("sklearn")
    from dask_coded.linear_model import Ridge

    for layout in LAYOUTS[1:2]:
        good = lying(WHOLE, dense(float), layout)
        _, s, _ = randomized_svd(good, 3, seed=0, client=client)
        np.testing.assert_allclose(s, np.linalg.svd(WHOLE)[1][:3], rtol=1e-6)
        y = WHOLE @ x
        for X in (
            good,
            lying(WHOLE.astype("i1"), dense(int), layout),
            lying(WHOLE, dense(float), layout, sp.csr_array),
        ):
            model = Ridge(tol=1e-10).fit(X, y, client=client)
            np.testing.assert_allclose(model.coef_, Ridge().fit(WHOLE, y).coef_, rtol=1e-5)
        bad = lying(REAL, dense(int), layout)
        with pytest.raises(TypeError, match="dtype float64, its dask array declares int64"):
            randomized_svd(bad, 3, client=client)
        # Their products are floats, and so is what `fit` makes of the matrix.
        fitted = Ridge(tol=1e-10).fit(bad, REAL @ x, client=client).coef_
        np.testing.assert_allclose(fitted, Ridge().fit(REAL, REAL @ x).coef_, rtol=1e-5)
        with pytest.raises(TypeError, match="dtype float64, its dask array declares float32"):
            Ridge().fit(lying(HUGE, dense("f4"), layout), y, client=client)


@gen_cluster(client=True, nthreads=FOUR[:3])
async def test_functions_of_dask_do_not_change_a_sparse_piece(c, s, *workers):
    """SciPy sorts indices and adds up entries of a cell in place, also while others multiply."""
    left, right = (sp.random_array((60, 60), density=0.1, rng=i).tocsr() for i in range(2))
    product = left @ right
    assert not product.has_sorted_indices
    ones = np.ones(60)
    for kind in (sp.csr_array, sp.csr_matrix):
        C = await coded.encode(kind(product), client=c)
        expected = await c.compute(C @ ones)
        for function in (abs, lambda C: C > 0, lambda C: C * 2):
            await c.compute(function(C).map_blocks(lambda b: b.toarray(), dtype=float))
        np.testing.assert_array_equal(await c.compute(C @ ones), expected)
        for future in C.encoded.futures:
            piece = await future
            assert piece.has_canonical_format
        for worker in workers:
            for piece in worker.data.values():
                if sp.issparse(piece):
                    assert not (piece.data.flags.writeable or piece.indices.flags.writeable)
    assert not product.has_sorted_indices  # the caller's matrix is as it was
    assert product.data.flags.writeable

    row = np.repeat(np.arange(6), 2)
    twice = sp.coo_array((np.tile([200, 100], 6).astype("u1"), (row, row % 3)), shape=(6, 3))
    C = await coded.encode(twice, client=c)
    bytes_ = (C > 0).map_blocks(lambda b: b.toarray(), dtype=bool)
    with pytest.raises(ValueError, match="read-only"):  # 300 does not fit into a byte
        await c.compute(bytes_)
    np.testing.assert_array_equal(await c.compute(C @ np.ones(3)), [300.0] * 6)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_matrix_of_few_rows_has_no_chunk_without_rows(c, s, *workers):
    matrices = (
        np.arange(1.0, 6)[None],
        np.arange(10).reshape(2, 5),
        np.ones((3, 7)),
        np.eye(1, 3) > 0,
    )
    for values in matrices:
        for code in (None, "repetition", coded.Repetition(4, 3)):
            C = await coded.encode(values, code, c)
            assert min(C.chunks[0]) > 0 and C.code.tolerance >= 1
            for function in (lambda A: 2 * A, lambda A: A.cumsum(0), lambda A: A.max(0), np.abs):
                found = await c.compute(function(C))
                np.testing.assert_array_equal(found, function(values), strict=True)
            ones = np.ones(values.shape[1])
            np.testing.assert_array_equal(await c.compute(C @ ones), values @ ones)
            np.testing.assert_array_equal(await c.compute(C[[0]] @ ones), values[[0]] @ ones)
            np.testing.assert_array_equal(await c.compute(C), values)
    tall = np.arange(16.0).reshape(8, 2)
    C = await coded.encode(tall, client=c, transpose=True)
    np.testing.assert_array_equal(await c.compute(2 * C.T), 2 * tall.T)
    heavy = sp.csr_array(np.vstack([np.ones((1, 200)), np.eye(9, 200)]))
    C = await coded.encode(heavy, client=c)
    assert min(C.chunks[0]) > 0


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_array, sp.csr_matrix])
@pytest.mark.parametrize("index", [10**8, 5, -1])
def test_indices_outside_of_a_sparse_matrix_are_refused(client, kind, index):
    A = kind((np.ones(3), [0, 1, index], [0, 1, 2, 3]), shape=(3, 3))
    with pytest.raises(ValueError, match="ind"):
        coded.encode(A, client=client)
