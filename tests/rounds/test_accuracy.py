"""Rows that lose digits when they are recovered are noticed, and no others."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code
from dask_coded.rounds import Assembler, Geometry, Scales, StripeRange
from dask_coded.rounds.accuracy import LIMIT, Accuracy, NotSolvableError, doubtful_when_rebuilt
from dask_coded.rounds.kernels import matvec
from dask_coded.rounds.rebuilding import RoundingErrors
from dask_coded.rounds.scaling import (
    LARGEST,
    NO_ENTRY,
    exponents_of,
    restored,
    scaled,
    squares_of,
    typical_of,
)


class Encoded:
    """Blocks and their pieces, as workers store them."""

    def __init__(self, code: Code, blocks: np.ndarray, least: int | None = None) -> None:
        self.code, self.blocks = code, blocks
        self.exponents = tuple(exponents_of(block, least) for block in blocks)
        self.typical = tuple(map(typical_of, blocks, self.exponents))
        self.scaled = [scaled(b, e) for b, e in zip(blocks, self.exponents, strict=True)]
        squares = np.array(list(map(squares_of, blocks, self.exponents)))
        self.sizes = np.sqrt(squares / blocks.shape[1]).astype("f4")
        #: What each piece has lost since.
        self.lost: tuple[float, ...] = ()
        self.pieces = [
            blocks[block] if block >= 0 else np.tensordot(row, self.scaled, 1).astype(blocks.dtype)
            for block, row in zip(code.block_of, code.G, strict=True)
        ]

    def rebuild(self, piece: int, others: list[int]) -> None:
        """Make a piece that equals a block from others."""
        weights = dict(zip(others, self.code.combination(piece, others).tolist(), strict=True))
        known = RoundingErrors(self.code, self.blocks.dtype)
        known.made(piece, weights)
        self.lost = known.usual(self.code)
        parts = [
            scaled(self.pieces[i], self.exponents[i]) if i < self.code.k else self.pieces[i]
            for i in others
        ]
        total = np.tensordot(list(weights.values()), parts, 1)
        self.pieces[piece] = restored(total, self.exponents[piece]).astype(self.blocks.dtype)

    def product(self, x: np.ndarray, have: list[int], spreads: bool = False) -> Assembler:
        """Return what is decoded from the shares of some pieces."""
        rows = self.blocks.shape[1]
        geometry = Geometry((rows,) * self.code.k, stripes=1, mixed=True)
        scales = Scales(self.exponents, typical=self.typical, sizes=self.sizes)
        dtype = np.result_type(self.blocks, x)
        coarser = max(1.0, np.finfo(self.blocks.dtype).eps / np.finfo(dtype).eps)
        assembler = Assembler(
            self.code,
            geometry,
            dtype,
            x.shape[1:],
            scales,
            accuracy=Accuracy(x, scales, coarser, dtype),
            errors=self.lost,
        )
        assembler.spreads |= spreads
        computed = np.zeros((self.code.pieces, 1), dtype=bool)
        computed[have] = True
        shares = [
            (StripeRange(i, 0, 1), matvec(self.pieces[i], rows, x)(0, rows, None)) for i in have
        ]
        assembler.add(shares, computed, np.ones(1, dtype=bool))
        return assembler


def errors(found: np.ndarray, A: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the error of each row of ``A @ x``, relative to ``|A| @ |x|`` of that row."""
    wide = np.longdouble
    exact, size = A.astype(wide) @ x.astype(wide), np.abs(A).astype(wide) @ np.abs(x).astype(wide)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(found - exact) / size
    return np.where(found == exact, 0, error).astype(float)


def heavy(rng: np.random.Generator, shape: tuple[int, ...], sigma: float, which: str) -> np.ndarray:
    """Return normal numbers; the size of the first column, or of all, is lognormal."""
    A = rng.standard_normal(shape)
    columns = slice(1) if which == "first" else slice(None)
    A[..., columns] *= 1e3 * np.exp(sigma * rng.standard_normal(A[..., columns].shape))
    return A


def lost_subsets(code: Code, rng: np.random.Generator) -> list[list[int]]:
    """Return what is left after all losses, or after some of many."""
    tolerance = code.n - code.k
    if code.n <= 12:
        lost = list(combinations(range(code.n), tolerance))
    else:
        lost = [tuple(rng.choice(code.n, tolerance, replace=False)) for _ in range(12)]
    return [[i for i in range(code.n) if i not in gone] for gone in lost if min(gone) < code.k]


@pytest.mark.parametrize("sigma", [0, 1, 2, 4, 6, 8])
@pytest.mark.parametrize("which", ["first", "all"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("code", [MDS(4, 3), MDS(12, 10), MDS(40, 30)], ids=repr)
def test_no_row_loses_digits_without_a_word(code: Code, dtype: str, which: str, sigma: int) -> None:
    rng = np.random.default_rng([code.n, sigma])
    columns = 20
    A = heavy(rng, (code.k, 60, columns), sigma, which).astype(dtype)
    encoded, whole = Encoded(code, A), A.reshape(-1, columns)
    wrong = said = 0
    for have in lost_subsets(code, rng):
        x = rng.standard_normal(columns).astype(dtype)
        x[: rng.choice([0, 1, columns // 2])] = 0  # it may not touch the heavy column at all
        result = encoded.product(x, have)
        numpy = errors(whole @ x, whole, x).max()
        beyond = np.count_nonzero(errors(result.rows, whole, x) > LIMIT * numpy)
        assert result.doubtful or not beyond
        wrong += beyond
        said += result.doubtful
    assert said >= wrong


@pytest.mark.parametrize("code", [MDS(4, 3), MDS(8, 6), MDS(10, 7), MDS(12, 10)], ids=repr)
@pytest.mark.parametrize("zeros", [0.0, 0.7])
@pytest.mark.parametrize("reach", [0, 3])
def test_ordinary_data_lose_no_digits(code: Code, zeros: float, reach: int) -> None:
    """Columns may be in different units, if the operand is, as coefficients of features are."""
    rng = np.random.default_rng(0)
    for have in lost_subsets(code, rng)[::3]:
        units = 10 ** rng.uniform(-reach, reach, 300)
        A = rng.standard_normal((code.k, 40, 300)) * (rng.random((code.k, 40, 300)) >= zeros)
        A, x = A * units, rng.standard_normal(300) / units
        result = Encoded(code, A).product(x, have)
        error = errors(result.rows, A.reshape(-1, 300), x)
        # The worst losses of (10, 7) amplify errors 80 times.
        assert result.doubtful <= np.count_nonzero(error > LIMIT / 50 * np.finfo(float).eps)


def test_a_heavy_column_that_the_operand_does_not_touch() -> None:
    """Which digits are left depends on the worker that is late, and the round says so."""
    rng = np.random.default_rng(1)
    A = heavy(rng, (3, 200, 20), 6, "first").astype("f4")
    x = rng.standard_normal(20).astype("f4")
    x[0] = 0
    encoded, whole = Encoded(MDS(4, 3), A), A.reshape(-1, 20)
    all_here = encoded.product(x, [0, 1, 2])
    assert all_here.doubtful == 0
    np.testing.assert_array_equal(all_here.rows, whole @ x)
    late = encoded.product(x, [1, 2, 3])
    assert errors(late.rows, whole, x).max() > 1e-2
    assert late.worst * 6e-8 > 1e-2
    assert late.doubtful >= np.count_nonzero(errors(late.rows, whole, x) > 1e-5)


@pytest.mark.parametrize(("dtype", "size"), [("f8", 1e6), ("f8", 1e12), ("f8", 1e15), ("f4", 1e6)])
@pytest.mark.parametrize("columns", [(), (3,)])
def test_heavy_terms_that_cancel_in_the_other_block(dtype: str, size: float, columns) -> None:
    """Parity was rounded when it was stored, however small its product is."""
    rng = np.random.default_rng(9)
    A = np.zeros((2, 30, 40))
    A[0, :, 0] = rng.standard_normal(30)
    A[0, :, 1] = A[0, :, 0] / 3
    A[1, :, 2:] = rng.standard_normal((30, 38))
    x = rng.standard_normal((40, *columns))
    x[0], x[1] = size, -3 * size
    A, x = A.astype(dtype), x.astype(dtype)
    encoded, whole = Encoded(MDS(3, 2), A), A.reshape(60, 40)
    result = encoded.product(x, [0, 2])
    error = errors(result.rows[30:], whole[30:], x).reshape(30, -1).max(axis=1)
    wrong = np.count_nonzero(error > LIMIT * np.finfo(dtype).eps)
    assert wrong > 10
    assert result.doubtful >= wrong
    assert encoded.product(x, [0, 1]).doubtful == 0


@pytest.mark.parametrize(("dtype", "size"), [("f8", 1e10), ("f8", 1e14), ("f4", 1e6), ("f4", 1e7)])
@pytest.mark.parametrize("code", [MDS(3, 2), MDS(4, 2)], ids=repr)
def test_a_product_of_a_rebuilt_block_that_has_lost_digits(code: Code, dtype: str, size) -> None:
    """Its rows come back themselves, and are those of another matrix."""
    rng = np.random.default_rng(10)
    A = rng.standard_normal((2, 30, 40))
    A[1, :, 0] = 0
    A = A.astype(dtype)
    encoded, whole = Encoded(code, A), A.reshape(60, 40)
    x = rng.standard_normal(40).astype(dtype)
    encoded.rebuild(1, [0, 2])
    assert encoded.product(x, [0, 1]).doubtful == 0
    x[0] = size
    result = encoded.product(x, [0, 1])
    wrong = np.count_nonzero(errors(result.rows, whole, x) > np.finfo(dtype).eps ** 0.5)
    assert wrong > 2
    assert result.doubtful >= wrong
    if code.n > 3:  # it also spoils what is recovered from it
        A0 = encoded.product(x, [1, 3])
        assert A0.doubtful >= wrong


@pytest.mark.parametrize("code", [MDS(4, 3), MDS(8, 6), MDS(12, 10)], ids=repr)
def test_ordinary_blocks_that_were_rebuilt_lose_no_digits(code: Code) -> None:
    rng = np.random.default_rng(11)
    for piece in range(3):
        A = rng.standard_normal((code.k, 40, 100)) * (rng.random((code.k, 40, 100)) < 0.5)
        encoded = Encoded(code, A)
        encoded.rebuild(piece, [i for i in range(code.n) if i != piece][: code.k])
        for have in (range(code.k), range(code.n - code.k, code.n)):
            assert encoded.product(rng.standard_normal(100), list(have)).doubtful == 0


def test_zeros_of_rebuilt_blocks_are_no_lost_digits() -> None:
    """Features are zero or one, and few of them have a coefficient."""
    rng = np.random.default_rng(12)
    A = (rng.random((3, 50, 60)) < 0.1).astype(float)
    encoded = Encoded(MDS(4, 3), A)
    encoded.rebuild(0, [1, 2, 3])
    for _ in range(20):
        x = np.zeros(60)
        x[rng.choice(60, 3, replace=False)] = 10 ** rng.uniform(-3, 1, 3)
        result = encoded.product(x, [0, 1, 2])
        assert np.count_nonzero(A[0] @ x == 0) > 10
        assert result.doubtful == 0


def test_a_rebuilt_block_of_zeros_has_no_digits_to_lose() -> None:
    A = np.random.default_rng(13).standard_normal((3, 5, 8))
    A[0] = 0
    encoded = Encoded(MDS(4, 3), A)
    encoded.rebuild(0, [1, 2, 3])
    found = encoded.product(np.ones(8), [0, 1, 2])
    assert found.doubtful == 0


def test_rows_of_zeros_stay_zero() -> None:
    A = np.random.default_rng(2).standard_normal((3, 5, 8))
    A[0, 2] = 0
    found = Encoded(MDS(4, 3), A).product(np.ones(8), [1, 2, 3])
    assert found.rows[2] == 0
    assert found.doubtful == 0


def test_stored_zeros_are_no_entries() -> None:
    """Most of what such a row stores is zero, and the row is not."""
    rng = np.random.default_rng(7)
    A = rng.standard_normal((4, 30)) * (rng.random((4, 30)) < 0.2)
    A[0] = 0
    stored = scipy.sparse.csr_array(np.ones_like(A))
    stored.data[:] = A.ravel()
    exponents = exponents_of(stored)
    expected = typical_of(scipy.sparse.csr_array(A), exponents)
    np.testing.assert_array_equal(typical_of(stored, exponents), expected)
    assert (expected == NO_ENTRY).tolist() == [True, False, False, False]
    assert stored.nnz == A.size  # it is left as it was


@pytest.mark.parametrize("by_block", [True, False])
def test_rows_without_entries_where_the_operand_is_large(by_block: bool) -> None:
    rng = np.random.default_rng(0)
    A = np.zeros((2, 30, 40))
    A[0, :, :20], A[1, :, 20:] = rng.standard_normal((2, 30, 20))
    whole, encoded = A.reshape(-1, 40), Encoded(MDS(3, 2), A)
    if not by_block:  # as if there were too many columns
        encoded.sizes = np.sqrt(np.square(encoded.sizes).mean(axis=0, keepdims=True))
    x = rng.standard_normal((40, 2))
    x[:20, 1] *= 1e12
    for columns, wrong in ((x[:, 0], 0), (x[:, 1], 30), (x, 30)):
        found = encoded.product(columns, [0, 2])
        beyond = errors(found.rows, whole, columns) > LIMIT * 2.0**-52
        assert np.count_nonzero(beyond.reshape(60, -1).any(axis=1)) == wrong
        assert found.doubtful == (wrong if by_block else 0)
    assert not encoded.product(x, [0, 1]).doubtful


def test_recovered_rows_of_single_precision_beside_an_operand_of_double_precision() -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((2, 30, 20)).astype("f4")
    encoded, whole = Encoded(MDS(3, 2), A), A.reshape(-1, 20)
    x = rng.standard_normal(20)
    found = encoded.product(x, [0, 2])
    assert found.rows.dtype == np.float64
    assert np.count_nonzero(errors(found.rows, whole, x) > LIMIT * 2.0**-52) > 20
    assert found.doubtful == 30
    encoded.sizes = None  # as of very wide matrices
    assert encoded.product(x, [0, 2]).doubtful == 30
    assert not encoded.product(x, [0, 1]).doubtful  # these are as accurate as NumPy's
    assert not encoded.product(x.astype("f4"), [0, 2]).doubtful


def test_an_operand_with_nan_where_no_row_is() -> None:
    A = np.random.default_rng(8).standard_normal((3, 5, 40))
    A[:, :, :4] = 0
    encoded = Encoded(MDS(4, 3), A)
    encoded.pieces = [scipy.sparse.csr_array(piece) for piece in encoded.pieces]
    x = np.ones(40)
    x[:4] = np.nan
    found = encoded.product(x, [1, 2, 3])
    np.testing.assert_allclose(found.rows, A[..., 4:].sum(axis=2).ravel(), atol=1e-12)


def test_a_share_that_is_not_finite_spoils_no_other_block() -> None:
    A = np.random.default_rng(3).standard_normal((3, 4, 6))
    A[1, 2] = 1e308
    x = np.full(6, 10.0)
    with np.errstate(over="ignore"):
        with pytest.raises(NotSolvableError):
            Encoded(MDS(4, 3), A).product(x, [1, 2, 3])
        with pytest.raises(NotSolvableError):
            Encoded(MDS(4, 3), A).product(np.where(np.arange(6), x, np.inf), [0, 1, 3])
        mixed = Code([[1.0, 1.0], [1.0, -1.0], [1.0, 2.0]])
        # Blocks of this code cannot be computed themselves.
        assert not np.isfinite(Encoded(mixed, A[:2]).product(x, [0, 1]).rows).all()


def test_half_precision_overflows_only_where_its_own_row_does() -> None:
    A = np.random.default_rng(4).standard_normal((3, 4, 8)).astype("f2")
    A[1, 2] = 6e4
    x = np.full(8, 2, dtype="f2")
    encoded = Encoded(MDS(4, 3), A)
    with np.errstate(over="ignore"):
        expected = (A.reshape(12, 8).astype("f4") @ x.astype("f4")).astype("f2")
    for have in combinations(range(4), 3):
        found = encoded.product(x, list(have)).result
        assert found.dtype == np.float16
        assert (
            np.flatnonzero(np.isinf(found)).tolist() == np.flatnonzero(np.isinf(expected)).tolist()
        )
        finite = np.isfinite(expected)
        np.testing.assert_allclose(found[finite], expected[finite], atol=0.1)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["f2", "f4", "f8"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([None, -LARGEST]),  # which older stores have
)
def test_shares_that_vanish_spoil_no_row_without_a_word(
    seed: int, dtype: str, rows: float, operand: float, one: bool, least: int | None
) -> None:
    """Rows of one block, or a single one, may be of any size, and so may columns of the operand."""
    rng = np.random.default_rng(seed)
    reach = np.log10(float(np.finfo(dtype).smallest_subnormal))
    A = rng.standard_normal((2, 20, 30))
    A[0, : 1 if one else 20] *= 10 ** (rows * reach)
    x = rng.standard_normal((30, 2)) * [1, 10 ** (operand * reach)]
    A, x = A.astype(dtype), x.astype(dtype)
    encoded, whole = Encoded(MDS(3, 2), A, least), A.reshape(40, 30)
    kept = np.result_type(np.dtype(dtype), np.float32)
    plain = whole.astype(kept) @ x.astype(kept)
    for have in ([0, 2], [1, 2]):
        result = encoded.product(x, have, spreads=True)
        # Only what its own block has can vanish from a plain sum.
        usual = np.maximum(errors(plain, whole, x).reshape(2, -1, 2).max(axis=1), 2.0**-52)
        usual = np.maximum(usual, np.finfo(dtype).eps)
        wrong = errors(result.rows, whole, x).reshape(2, -1, 2) > LIMIT * usual[:, None]
        assert np.count_nonzero(wrong.any(axis=2)) <= result.doubtful
        if result.doubtful == 0:
            encoded.product(x, have)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("code", [MDS(3, 2), MDS(12, 10)], ids=repr)
def test_products_that_are_zero_do_not_vanish(code: Code, dtype: str, size: float) -> None:
    """A start of zeros, a column of them, and an entry where the matrix has none."""
    A = (size * np.random.default_rng(16).standard_normal((code.k, 20, 30))).astype(dtype)
    A[:, :, 7] = 0
    encoded, ones, zeros, one = Encoded(code, A), np.ones(30), np.zeros(30), np.eye(30)[7]
    for x in (zeros, one, np.stack([ones, zeros], axis=1), np.stack([ones, one], axis=1)):
        found = encoded.product(x.astype(dtype), list(range(1, code.k + 1)))
        assert found.doubtful == 0
        assert found.rows.any() == (A.reshape(-1, 30) @ x).any()


@pytest.mark.parametrize(
    ("dtype", "small", "size"),
    [("f4", 1e-43, 1), ("f4", 1e-35, 1e-3), ("f8", 1e-310, 1), ("f8", 1e-290, 1e-15)],
)
def test_tiny_rows_lose_only_their_own_digits(dtype: str, small: float, size: float) -> None:
    rng = np.random.default_rng(14)
    A = rng.standard_normal((2, 50, 40))
    A[0] *= small
    A, x = A.astype(dtype), (size * rng.standard_normal(40)).astype(dtype)
    result = Encoded(MDS(3, 2), A).product(x, [0, 2])
    assert errors(result.rows[50:], A[1], x).max() < 10 * np.finfo(dtype).eps
    assert result.doubtful == 0


@pytest.mark.parametrize(
    ("dtype", "small", "size"), [("f4", 1e-25, 1e-20), ("f8", 1e-200, 1e-125), ("f8", 1, 5e-324)]
)
def test_rows_are_not_recovered_from_shares_that_vanish(dtype: str, small, size) -> None:
    """Then all rows are computed; only if their worker does not answer, they are recovered."""
    rng = np.random.default_rng(15)
    A = rng.standard_normal((2, 50, 40))
    A[0] *= small
    A[1, 0] *= 1e100 if dtype == "f8" else 1e15
    A, x = A.astype(dtype), (size * rng.standard_normal(40)).astype(dtype)
    x = np.stack([np.ones_like(x), x], axis=1)
    encoded = Encoded(MDS(3, 2), A)
    with pytest.raises(NotSolvableError):
        encoded.product(x, [0, 2])
    assert encoded.product(x, [0, 2], spreads=True).doubtful
    assert encoded.product(x, [0, 1]).doubtful == 0


@given(st.integers(0, 2**32 - 1), st.sampled_from(["f4", "f8", "c16"]), st.booleans())
def test_typical_entries(seed: int, dtype: str, sparse: bool) -> None:
    """The median of the entries that are not zero, times their share of all."""
    rng = np.random.default_rng(seed)
    rows = (10 ** rng.uniform(-5, 5, (4, 20)) * (rng.random((4, 20)) < 0.6)).astype(dtype)
    exponents = exponents_of(rows)
    found = typical_of(scipy.sparse.csr_array(rows) if sparse else rows, exponents)
    for row, exponent in zip(np.abs(scaled(rows, exponents)), found.tolist(), strict=True):
        sizes = np.sort(row[row > 0])
        if len(sizes) == 0:
            assert exponent == NO_ENTRY
            continue
        median = np.log2(sizes[len(sizes) // 2] * len(sizes) / 20)
        assert abs(median - exponent) <= (1.01 if sparse else 0.51)


@pytest.mark.parametrize("dtype", ["f2", ">f2", ">f4", ">f8", ">c16"])
def test_rows_with_few_entries_of_dtypes_without_sparse_matrices(dtype: str) -> None:
    """Half precision, and the other byte order."""
    rows = np.zeros((3, 200))
    rows[0, 7], rows[1, ::2] = 3, 1
    found = rows.astype(dtype)
    np.testing.assert_array_equal(exponents_of(found), exponents_of(rows))
    expected = typical_of(rows, exponents_of(rows))
    np.testing.assert_array_equal(typical_of(found, exponents_of(found)), expected)


def test_typical_entries_of_wide_rows_are_sampled() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((50, 5000))
    rows[:, :100] = 1e12
    rows[1] = 0
    rows[2, np.arange(5000) != 4321] = 0  # no sample finds it
    rows[3, 7] = np.inf
    exponents = exponents_of(rows)
    found = typical_of(rows, exponents)
    assert found[1] == found[3] == NO_ENTRY
    others = np.delete(found + exponents, [1, 2, 3])
    assert ((others >= -4) & (others <= 0)).all()
    assert abs(found[2] + exponents[2] - np.log2(abs(rows[2, 4321]) / 5000)) <= 1


def test_a_rebuilt_block_says_which_rows_have_lost_digits() -> None:
    rng = np.random.default_rng(6)
    A = rng.standard_normal((3, 100, 20))
    A[0, :30, 0] = 1e12  # scaled, the others of these rows are tiny
    encoded = Encoded(MDS(4, 3), A)
    weights = list(zip([1, 2, 3], encoded.code.combination(0, [1, 2, 3]), strict=True))
    eps = np.finfo(float).eps
    doubtful = doubtful_when_rebuilt(encoded.code, weights, encoded.typical, block=0, eps=eps)
    assert np.flatnonzero(doubtful).tolist() == list(range(30))
    parts = [encoded.scaled[1], encoded.scaled[2], encoded.pieces[3]]
    rebuilt = restored(
        sum(w * p for (_, w), p in zip(weights, parts, strict=True)), encoded.exponents[0]
    )
    x = rng.standard_normal(20)
    x[0] = 0
    assert (errors(rebuilt @ x, A[0], x) > eps**0.5).tolist() == doubtful.tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_an_operand_of_the_smallest_integers(dtype: type) -> None:
    x = np.full((32, 2), np.iinfo(dtype).min, dtype=dtype)
    scales = Scales(())
    found = Accuracy(x, scales)._sizes
    for one, other in zip(found, Accuracy(x.astype(float), scales)._sizes, strict=True):
        np.testing.assert_array_equal(one, other)
