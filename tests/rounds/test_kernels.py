"""Products of stripes are those of the whole piece."""

from __future__ import annotations

import sys
from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.rounds.kernels import KERNELS, _compiled, matvec

TYPES = ["f4", "f8", "c8", "c16", "i4", "?"]


@st.composite
def factors(draw: st.DrawFn) -> tuple:
    """A piece, an operand and a range of rows."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    piece = rng.integers(-3, 4, (rows, columns)) * (rng.random((rows, columns)) < 0.5)
    piece = piece.astype(draw(st.sampled_from(TYPES)))
    shape = (columns, *draw(st.sampled_from([(), (1,), (3,)])))
    x = rng.integers(-3, 4, shape).astype(draw(st.sampled_from(TYPES)))
    kind = draw(st.sampled_from([np.asarray, scipy.sparse.csr_array, scipy.sparse.csr_matrix]))
    first = draw(st.integers(0, rows))
    return kind(piece), x, first, draw(st.integers(first, rows))


@given(factors(), st.booleans())
def test_rows_of_the_product(drawn: tuple, given_out: bool) -> None:
    piece, x, first, end = drawn
    expected = np.asarray(piece @ x)[first:end]
    product = matvec(piece, piece.shape[0], x)
    none = product(0, 0, None)
    assert (none.dtype, none.shape) == (expected.dtype, (0, *expected.shape[1:]))
    # What was there before does not count.
    out = np.full(expected.shape, 7, expected.dtype) if given_out else None
    found = product(first, end, out)
    assert found is out or not given_out
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_sparse_products_use_compiled_loops_where_types_agree() -> None:
    piece = scipy.sparse.random_array((5, 4), density=0.5, format="csr", rng=0)
    assert _compiled(piece, np.ones(4)) is not None
    assert _compiled(piece, np.ones((4, 2))) is not None
    assert _compiled(piece, np.ones(4, np.float32)) is None
    assert _compiled(piece, np.ones((2, 4)).T) is None


def test_without_compiled_loops_products_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = scipy.sparse.random_array((5, 4), density=0.5, format="csr", rng=0)
    monkeypatch.setitem(sys.modules, "scipy.sparse._sparsetools", None)
    assert _compiled(piece, np.ones(4)) is None
    rows = matvec(piece, 5, np.ones(4))(1, 4, None)
    np.testing.assert_array_equal(rows, (piece @ np.ones(4))[1:4])


def test_all_kernels_have_a_name() -> None:
    assert sorted(KERNELS) == ["bilinear", "matvec"]


def test_products_of_half_precision_do_not_overflow() -> None:
    """Parity is scaled to numbers of size one, also if the matrix is smaller."""
    product = KERNELS["matvec"](np.ones((3, 1000), "f2"), 3, np.full(1000, 200, "f2"))
    np.testing.assert_array_equal(product(0, 3, None), np.full(3, 200_000.0))


class Noted(np.ndarray):
    """An array that notes when it is converted, or copied."""

    converted: ClassVar[list[object]] = []

    def copy(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.converted.append("copied")
        return super().copy(*args, **kwargs)

    def astype(self, dtype, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.converted.append(dtype)
        return super().astype(dtype, *args, **kwargs)


def test_half_precision_is_converted_by_the_first_product_of_a_pair() -> None:
    """Not when the operand comes, on the event loop."""
    piece = np.full((5, 1000), 20, "f2").view(Noted)
    Noted.converted.clear()
    product = KERNELS["bilinear"](piece, 3, None)
    assert not Noted.converted
    for a, b in ((0, 2), (2, 3)):
        np.testing.assert_array_equal(product(a, b, None), np.full((b - a, 2), 400_000.0))
    assert Noted.converted == [np.float32]


def test_an_unaligned_factor_of_a_pair_is_copied_once() -> None:
    piece = Noted((5, 3), float, np.zeros(5 * 3 * 8 + 1, "u1"), offset=1)
    piece[...] = np.arange(15).reshape(5, 3)
    assert not piece.flags.aligned
    Noted.converted.clear()
    product = KERNELS["bilinear"](piece, 3, None)
    rows = [np.asarray(product(a, a + 1, None)) for a in range(3)]
    np.testing.assert_array_equal(np.concatenate(rows), np.array(piece[:3]) @ np.array(piece[3:]).T)
    assert Noted.converted == ["copied"]
