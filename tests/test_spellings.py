"""Every function that multiplies matrices, with an array that needs no cluster for its products."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.products import CodedView, ProductArray, UncodedArray
from dask_coded.spellings import adopted, as_plain
from dask_coded.uncoded import UncodedWarning, uncoded_product

pytestmark = pytest.mark.filterwarnings("error")


class Counting(ProductArray):
    """Counts its products, which dask.array computes in this process."""

    products: list[Any]

    def __new__(cls, plain: da.Array) -> Self:
        self = adopted(cls, plain)
        self.products = []
        return self

    def _times(self, x: Any) -> Any:
        self.products.append(x)
        return uncoded_product(as_plain(self), as_plain(x))

    def _scaled(self, plain: da.Array, factor: Any) -> ProductArray:
        return CodedView(plain, self, factor)

    def _selected(self, plain: da.Array, rows: Any) -> ProductArray:
        return CodedView(plain, self, selections=(rows,))

    def _transposed(self, plain: da.Array) -> ProductArray:
        return UncodedArray(plain, "Not the transpose", self)

    def _persisted(self, dsk: Any, rebuild: Any, args: Any, *, rename: Any = None) -> da.Array:
        raise NotImplementedError


def counting(values: np.ndarray) -> Counting:
    return Counting(da.from_array(values, chunks=(max(1, len(values) // 3), -1)))


def same(found: Any, expected: Any) -> None:
    with dask.config.set(scheduler="sync"):
        (found,) = dask.compute(found)
    assert np.shape(found) == np.shape(expected)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, atol=1e-9)


rng = np.random.default_rng(0)
A, B = rng.standard_normal((2, 6, 6))
x, X = rng.standard_normal(6), rng.standard_normal((6, 2))
CUBE = rng.standard_normal((2, 4, 6))

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "linalg.vecdot": lambda C: np.linalg.vecdot(C, x),
    "linalg.vecdot from the left": lambda C: np.linalg.vecdot(x, C, axis=-1),
    "linalg.vecdot of a complex vector": lambda C: np.linalg.vecdot(1j * x, C),
    "linalg.vecdot over columns": lambda C: np.linalg.vecdot(C.T, x, axis=0),
    "linalg.matrix_transpose": lambda C: np.linalg.matrix_transpose(C.T) @ x,
    "linalg.multi_dot": lambda C: np.linalg.multi_dot([C, B, x]),
    "linalg.multi_dot of matrices": lambda C: np.linalg.multi_dot([B, C, X]),
    "linalg.multi_dot of lists": lambda C: np.linalg.multi_dot([C, X.tolist()]),
    "linalg.matrix_power": lambda C: np.linalg.matrix_power(C, 3),
}
NEWER = {
    "matvec of a matrix": lambda C: np.matvec(C, X.T),
    "matvec from the left": lambda C: np.matvec(B, C),
    "vecmat": lambda C: np.vecmat(C, X),
}
if hasattr(np, "matvec"):  # NumPy 2.2
    FUNCTIONS |= NEWER


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_are_coded(name: str) -> None:
    C = counting(A)
    found = FUNCTIONS[name](C)
    assert C.products
    same(found, FUNCTIONS[name](A))


def test_matvec_of_vectors_in_three_dimensions() -> None:
    if not hasattr(np, "matvec"):
        pytest.skip("NumPy is older than 2.2")
    C = counting(A)
    same(np.matvec(C, CUBE), np.matvec(A, CUBE))
    assert C.products


def test_a_chain_begins_where_the_result_is_narrow() -> None:
    C = counting(A)
    same(np.linalg.multi_dot([X.T, C.T, B]), np.linalg.multi_dot([X.T, A.T, B]))
    assert [product.shape for product in C.products] == [(6, 2)]


@given(st.lists(st.integers(1, 4), min_size=3, max_size=5), st.data())
def test_a_chain_is_that_of_numpy(sizes: list[int], data: st.DataObject) -> None:
    factors = [rng.standard_normal(shape) for shape in pairwise(sizes)]
    if data.draw(st.booleans()):
        factors[0] = factors[0][0]
    if data.draw(st.booleans()):
        factors[-1] = factors[-1][:, 0]
    matrices = [i for i, factor in enumerate(factors) if factor.ndim == 2]
    if not matrices:
        return
    which = data.draw(st.sampled_from(matrices))
    expected = np.asarray(np.linalg.multi_dot(factors))
    factors[which] = counting(factors[which])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncodedWarning)  # it may be the last one
        same(np.linalg.multi_dot(factors), expected)


def test_chains_that_do_not_exist() -> None:
    C = counting(A)
    for arrays in ([C], [C, x, C], [C, CUBE, C]):
        with pytest.raises(ValueError, match=r"must hold at least two matrices, .* are \[\(6, 6\)"):
            np.linalg.multi_dot(arrays)
    with pytest.raises(TypeError, match="Argument 'out' must be None"):
        np.linalg.multi_dot([C, x], out=np.empty(6))


@pytest.mark.parametrize(
    "function",
    [
        lambda C: np.kron(C, np.eye(2)),
        lambda C: np.cross(C[:, :3], B[:, :3]),
        lambda C: np.linalg.cross(B[:, :3], C[:, :3]),
        lambda C: np.linalg.matrix_power(C, -1),
        lambda C: np.vecdot(C, x, axis=-1),
    ],
)
def test_products_that_are_not_coded_say_so(function: Callable[[Any], Any]) -> None:
    if not hasattr(np, "vecdot"):
        pytest.skip("NumPy is older than 2.2")
    C = counting(A)
    with dask.config.set({"coded.on-uncoded": "error"}):
        with pytest.raises(UncodedWarning, match="not coded"):
            function(C)
    with pytest.warns(UncodedWarning, match="not coded"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # dask.array's
        same(function(C), function(A))
    assert not C.products


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_rows_are_multiplied_one_by_one_without_a_code(axis: int) -> None:
    with dask.config.set({"coded.on-uncoded": "error"}):
        same(np.linalg.vecdot(counting(A), B, axis=axis), np.linalg.vecdot(A, B, axis=axis))
        if hasattr(np, "vecdot"):
            same(np.vecdot(1j * B, counting(A)), np.vecdot(1j * B, A))
        with pytest.raises(ValueError, match=r"\(6, 6\) and \(6, 1\) do not fit together"):
            np.linalg.vecdot(counting(A), B[:, :1])


def test_sums_over_all_elements_need_no_code() -> None:
    with dask.config.set({"coded.on-uncoded": "error"}):
        same(np.vdot(counting(A), B), np.vdot(A, B))
        same(np.outer(counting(A), x), np.outer(A, x))
        same(np.linalg.norm(counting(A)), np.linalg.norm(A))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=2), st.integers(1, 4), st.booleans())
def test_stacks_of_matrices(stack: list[int], columns: int, lazy: bool) -> None:
    C, right = counting(A), rng.standard_normal((*stack, 6, columns))
    left = rng.standard_normal((*stack, columns, 6))
    as_array = da.asarray if lazy else np.asarray
    same(C @ as_array(right), A @ right)
    same(np.matmul(2 * C, as_array(right)), (2 * A) @ right)
    same(as_array(left) @ C.T, left @ A.T)
    assert len(C.products) == 3
    with pytest.warns(UncodedWarning, match="Not the transpose"):
        same(as_array(left) @ C, left @ A)
    with pytest.warns(UncodedWarning, match="add"):
        same((C + 1) @ as_array(right), (A + 1) @ right)


def test_stacks_beside_a_sparse_matrix() -> None:
    """Which dask.array cannot multiply."""
    kind = scipy.sparse.csr_array
    blocks = da.from_array(A, chunks=(2, 6)).map_blocks(
        kind, chunks=((2, 2, 2), (6,)), dtype=A.dtype, meta=kind((0, 0))
    )
    C, right = Counting(blocks), np.moveaxis(CUBE, 1, 2)
    same(C @ right, A @ right)
    same(CUBE @ C.T, CUBE @ A.T)


@pytest.mark.parametrize("product", [operator.matmul, np.matmul, np.linalg.matmul])
def test_stacks_that_do_not_fit(product: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"\(6, 6\) and \(6, 1, 1\) do not fit together"):
        product(counting(A), np.ones((6, 1, 1)))
    with pytest.raises(ValueError, match=r"\(2, 6, 4\) and \(6, 6\) do not fit together"):
        product(np.moveaxis(CUBE, 1, 2), counting(A))
