"""Scales of rows: exact, and every decoded row is right in itself."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dask_coded.codes import MDS
from dask_coded.rounds import Assembler, Geometry, Scales, StripeRange
from dask_coded.rounds.scaling import (
    LARGEST,
    NOT_FINITE,
    exponents_of,
    least_exponent,
    restored,
    scaled,
)

numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)
matrices = arrays(np.float64, st.tuples(st.integers(0, 5), st.integers(1, 4)), elements=numbers)


@given(matrices, st.booleans())
def test_exponents_bound_the_rows(rows: np.ndarray, sparse: bool) -> None:
    exponents = exponents_of(scipy.sparse.csr_array(rows) if sparse else rows)
    finite = np.isfinite(rows).all(axis=1)
    assert ((exponents == NOT_FINITE) == ~finite).all()
    largest = np.abs(rows[finite]).max(axis=1)
    inside = (largest > 1e-290) & (largest < 1e300)
    size = np.ldexp(largest, -exponents[finite])[inside]
    assert ((size >= 0.5) & (size < 1)).all()
    assert (exponents[finite][largest == 0] == 0).all()


@given(matrices, st.booleans())
def test_scaling_is_undone_exactly(rows: np.ndarray, sparse: bool) -> None:
    # Entries that are more than 2**-900 below the largest one of their row lose digits.
    rows = np.where(np.abs(rows) < 1e-15, 0.0, rows)
    exponents = exponents_of(rows)
    part = scaled(scipy.sparse.csr_array(rows) if sparse else rows, exponents)
    back = restored(part, exponents)
    part, back = (m.toarray() if sparse else m for m in (part, back))
    finite = exponents != NOT_FINITE
    np.testing.assert_array_equal(back[finite], rows[finite])
    assert (part[~finite] == 0).all()
    assert np.isnan(back[~finite]).all()


def test_the_larger_part_of_complex_numbers_counts() -> None:
    rows = np.array([[1 + 100j, 2], [3 - 4j, 0], [np.nan * 1j, 0]])
    assert exponents_of(rows).tolist() == [7, 3, NOT_FINITE]
    assert exponents_of(scipy.sparse.csr_array(rows)).tolist() == [7, 3, NOT_FINITE]


@given(
    arrays(np.float64, st.integers(0, 20), elements=st.floats(-1e6, 1e6)),
    st.integers(0, 2**32 - 1),
)
def test_a_sparse_matrix_of_any_order_is_left_as_it_is(data: np.ndarray, seed: int) -> None:
    """Indices are unsorted and may be repeated: repeated entries are added up."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, 3, len(data))
    indptr = np.array([0, *np.sort(rng.integers(0, len(data) + 1, 3)), len(data)])
    rows = scipy.sparse.csr_array((data.copy(), indices.copy(), indptr.copy()), shape=(4, 3))
    exponents = exponents_of(rows)
    np.testing.assert_array_equal(rows.data, data)
    np.testing.assert_array_equal(rows.indices, indices)
    np.testing.assert_array_equal(rows.indptr, indptr)
    whole = rows.copy()
    whole.sum_duplicates()
    np.testing.assert_array_equal(exponents, exponents_of(whole.toarray()))


@given(st.integers(0, 2**32 - 1), st.sampled_from(["f4", "f8", "c16"]))
def test_every_decoded_row_is_right_in_itself(seed: int, dtype: str) -> None:
    """Rows of all blocks differ by 24 orders of magnitude in double precision, 12 in single."""
    rng = np.random.default_rng(seed)
    code = MDS(7, 4)
    geometry = Geometry((5, 4, 5, 4), stripes=2, mixed=True)
    reach = 6 if dtype == "f4" else 12
    blocks = [
        (rng.standard_normal((r, 8)) * 10 ** rng.uniform(-reach, reach, (r, 1))).astype(dtype)
        for r in geometry.rows
    ]
    blocks[1][2, 3] = np.nan
    exponents = tuple(map(exponents_of, blocks))
    padded = [
        np.pad(scaled(b, e), [(0, 5 - len(b)), (0, 0)])
        for b, e in zip(blocks, exponents, strict=True)
    ]
    pieces = [
        blocks[i] if i < 4 else piece.astype(dtype) for i, piece in enumerate(code.encode(padded))
    ]
    x = rng.standard_normal(8).astype(dtype)
    have = rng.permutation(7)[:4].tolist()
    computed = np.zeros((7, 2), dtype=bool)
    computed[have] = True
    assembler = Assembler(code, geometry, dtype, (), Scales(exponents))
    assembler.add([(StripeRange(i, 0, 2), pieces[i] @ x) for i in have], computed, computed.any(0))
    expected = np.concatenate(blocks) @ x
    size = np.concatenate([np.abs(b) @ np.abs(x) for b in blocks])
    error = np.abs(assembler.rows - expected) / size
    assert np.flatnonzero(np.isnan(error)).tolist() == [7]  # the row with NaN, and no other
    assert np.nanmax(error) < (1e-3 if dtype == "f4" else 1e-12)


@given(st.sampled_from(["f2", "f4", "f8", "c8", "c16"]), st.booleans())
def test_tiny_rows_are_scaled_by_the_least_exponent(dtype: str, sparse: bool) -> None:
    """Scaled by their own one, what vanishes from their products would be as large as others."""
    rows = np.array([[np.finfo(dtype).smallest_subnormal, 0], [0, 0], [1, 0]]).astype(dtype)
    found = exponents_of(scipy.sparse.csr_array(rows) if sparse and dtype != "f2" else rows)
    least = least_exponent(dtype)
    assert found.tolist() == [max(least, int(np.frexp(rows[0, 0].real)[1])), 0, 1]
    kept = np.finfo(np.result_type(np.dtype(dtype), np.float32))
    vanishing = np.ldexp(float(kept.smallest_normal) * float(kept.eps), -least)
    assert vanishing <= float(kept.eps) ** 2
    assert exponents_of(rows, -LARGEST)[0] <= found[0]


@pytest.mark.parametrize("size", [1e-300, 5e-324, 1.7e308])
def test_rows_at_the_ends_of_the_range(size: float) -> None:
    rows = np.array([[size, 0.0]])
    exponents = exponents_of(rows)
    np.testing.assert_array_equal(restored(scaled(rows, exponents), exponents), rows)
