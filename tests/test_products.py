"""Every way to write a product with a coded array is coded, or says that it is not."""

from __future__ import annotations

import inspect
import operator
import pickle
import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_coded as coded
from dask_coded.dispatch import _ORIGINALS, _seeing

ROWS, COLUMNS = 12, 5
rng = np.random.default_rng(0)
A = rng.standard_normal((ROWS, COLUMNS))
B = rng.standard_normal((ROWS, COLUMNS))
x, X = rng.standard_normal(COLUMNS), rng.standard_normal((COLUMNS, 3))
CUBE = rng.standard_normal((2, COLUMNS, 3))
y, Y = rng.standard_normal(ROWS), rng.standard_normal((2, ROWS))


@pytest.fixture(scope="module")
def client():
    options = {"n_workers": 3, "threads_per_worker": 2, "processes": False}
    with Client(**options, dashboard_address=None, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def alone(client):
    """An array that was encoded without its transpose."""
    return coded.encode(A, coded.MDS(3, 2), client)


@pytest.fixture(scope="module")
def both(client):
    return coded.encode(A, coded.MDS(3, 2), client, transpose=True)


def is_round(result) -> bool:
    return any(str(layer).startswith("coded-round") for layer in result.dask.layers)


def same(result, expected, client, rtol=1e-9):
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    found = client.compute(result).result()
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * 10)


FORWARD = {
    "@": lambda m, C: C @ x,
    "@ of a list": lambda m, C: C @ x.tolist(),
    "@ of a dask vector": lambda m, C: C @ m.asarray(x),
    "dot method": lambda m, C: C.dot(X),
    "dot": lambda m, C: m.dot(C, x),
    "matmul": lambda m, C: m.matmul(C, X),
    "tensordot": lambda m, C: m.tensordot(C, x, axes=1),
    "tensordot of axes": lambda m, C: m.tensordot(C, X, axes=((1,), (0,))),
    "tensordot of negative axes": lambda m, C: m.tensordot(C, X.T, axes=(-1, [1])),
    "tensordot from the left": lambda m, C: m.tensordot(X, C, axes=(0, 1)),
    "einsum": lambda m, C: m.einsum("ij,j->i", C, x),
    "einsum without output": lambda m, C: m.einsum("ij,jk", C, X),
    "einsum transposed": lambda m, C: m.einsum("ij,jk->ki", C, X),
    "einsum from the left": lambda m, C: m.einsum("j,ij->i", x, C),
    "einsum of lists": lambda m, C: m.einsum(C, [0, 1], x, [1], [0]),
    "multiple": lambda m, C: (2 * C) @ x,
    "negative": lambda m, C: -C @ x,
    "positive": lambda m, C: +C @ x,
    "quotient": lambda m, C: (C / np.float32(3)) @ X,
    "multiple of a multiple": lambda m, C: m.multiply(C * 2, -0.5) @ x,
    "complex multiple": lambda m, C: (1j * C) @ x,
    "ufunc": lambda m, C: m.negative(m.divide(C, 4)) @ x,
    "astype": lambda m, C: C.astype("f4") @ x,
    "astype with single precision": lambda m, C: C.astype("f4") @ x.astype("f4"),
    "astype to complex": lambda m, C: C.astype("c16") @ x,
    "conjugate": lambda m, C: C.conj() @ x,
    "slice of rows": lambda m, C: C[2:9:2] @ x,
    "slice of rows and all columns": lambda m, C: C[::-1, :] @ X,
    "list of rows": lambda m, C: C[[3, 1]] @ x,
    "mask of rows": lambda m, C: C[A[:, 0] > 0] @ X,
    "rows of a multiple of rows": lambda m, C: (2 * C[2:])[1:4] @ x,
    "axis exchanged with itself": lambda m, C: m.swapaxes(C, 0, -2) @ x,
    "transpose of the transpose": lambda m, C: C.T.T @ x,
    "transposed twice": lambda m, C: (x @ C.T).T,
    "@ of a stack": lambda m, C: C @ m.asarray(CUBE),
    "matmul of a stack from the left": lambda m, C: m.matmul(CUBE.transpose(2, 0, 1), C.T),
    "dot of three dimensions from the left": lambda m, C: m.dot(CUBE.transpose(2, 0, 1), C.T),
}
BACKWARD = {
    "transpose": lambda m, C: C.T @ y,
    "transposed by a function": lambda m, C: m.transpose(C) @ y,
    "axes exchanged": lambda m, C: C.swapaxes(0, -1) @ y,
    "axes exchanged by a function": lambda m, C: m.swapaxes(C, 0, 1) @ y,
    "from the left": lambda m, C: y @ C,
    "from the left, a matrix": lambda m, C: Y @ C,
    "from the left, a dask vector": lambda m, C: m.asarray(y) @ C,
    "dot from the left": lambda m, C: m.dot(y, C),
    "dot of a dask vector": lambda m, C: (da.asarray(y) if isinstance(C, da.Array) else y).dot(C),
    "matmul from the left": lambda m, C: m.matmul(Y, C),
    "tensordot": lambda m, C: m.tensordot(C, y, axes=(0, 0)),
    "tensordot from the left": lambda m, C: m.tensordot(Y, C, axes=1),
    "einsum": lambda m, C: m.einsum("ij,i->j", C, y),
    "einsum from the left": lambda m, C: m.einsum("ki,ij", Y, C),
    "transpose of a multiple": lambda m, C: (2 * C).T @ y,
    "multiple from the left": lambda m, C: y @ (C / 2),
    "single precision from the left": lambda m, C: y @ C.astype("f4"),
}
# Only NumPy has these functions.
NUMPY_FORWARD = {
    "inner": lambda C: np.inner(C, x),
    "inner from the left": lambda C: np.inner(X.T, C),
    "linalg.matmul": lambda C: np.linalg.matmul(C, X),
    "linalg.tensordot": lambda C: np.linalg.tensordot(C, X, axes=1),
    "linalg.multi_dot": lambda C: np.linalg.multi_dot([C, X, X[0]]),
    "linalg.vecdot": lambda C: np.linalg.vecdot(C, x),
    "matvec": lambda C: np.matvec(C, x),
    "vecdot": lambda C: np.vecdot(C, x),
    "vecdot from the left": lambda C: np.vecdot(x, C),
}
NUMPY_BACKWARD = {
    "vecmat": lambda C: np.vecmat(y, C),
    "matrix_transpose": lambda C: np.matrix_transpose(C) @ y,
    "linalg.matrix_transpose": lambda C: np.linalg.matrix_transpose(C) @ y,
}
UNCODED = {
    "sum": lambda m, C: (C + B) @ x,
    "shift": lambda m, C: (C - 1) @ x,
    "reflected": lambda m, C: (1 / C) @ x,
    "multiple of each column": lambda m, C: (C * x) @ x,
    "power": lambda m, C: (C**2) @ x,
    "ufunc": lambda m, C: m.exp(C) @ x,
    "absolute value": lambda m, C: abs(C) @ x,
    "truncated": lambda m, C: C.astype("i8") @ x,
    "clipped": lambda m, C: np.clip(C, -1, 1) @ x,
    "columns": lambda m, C: C[:, 1:] @ x[1:],
    "rows and columns": lambda m, C: C[2:5, [0, 2]] @ x[[0, 2]],
    "rows from the left": lambda m, C: y[2:5] @ C[2:5],
    "multiple of a sum": lambda m, C: (2 * (C + 1)) @ x,
    "rows of a sum": lambda m, C: (C + 1)[2:4] @ x,
    "copy": lambda m, C: C.copy() @ x,
    "three factors": lambda m, C: m.einsum("ij,j,i->i", C, x, y),
    "three dimensions": lambda m, C: m.tensordot(C, np.ones((COLUMNS, 2, 2)), axes=1),
    "dot of three dimensions": lambda m, C: m.dot(C, CUBE),
    "dot of a sum and three dimensions": lambda m, C: (C + 1).dot(CUBE),
}
# No product with a matrix: reductions, single rows, shapes.
WITHOUT_A_CODE = {
    "element": lambda m, C: C[3, 2],
    "row": lambda m, C: C[3] @ x,
    "column": lambda m, C: C[:, 2] @ y,
    "reduction": lambda m, C: C.sum(axis=0),
    "tensordot of both axes": lambda m, C: m.tensordot(C, B, axes=2),
    "outer product": lambda m, C: m.tensordot(C, x, axes=0),
    "einsum of one array": lambda m, C: m.einsum("ij->j", C),
    "einsum to a number": lambda m, C: m.einsum("ij,ij->", C, B),
    "scalar dot": lambda m, C: np.dot(C, 2.0),
    "concatenation": lambda m, C: m.concatenate([C, C]),
    "chunks": lambda m, C: C + 1,
}


@pytest.mark.parametrize("module", [da, np], ids=["dask.array", "numpy"])
@pytest.mark.parametrize("name", FORWARD)
def test_products_from_the_right_are_coded(alone, client, module, name):
    result = FORWARD[name](module, alone)
    assert is_round(result)
    single = "single" in name or "astype" in name
    same(result, FORWARD[name](np, A), client, 1e-5 if single else 1e-9)


@pytest.mark.parametrize("module", [da, np], ids=["dask.array", "numpy"])
@pytest.mark.parametrize("name", BACKWARD)
def test_products_from_the_left_are_coded_or_say_that_they_are_not(
    alone, both, client, module, name
):
    expected = BACKWARD[name](np, A)
    coded_one = BACKWARD[name](module, both)
    assert is_round(coded_one)
    same(coded_one, expected, client, 1e-5 if "single" in name else 1e-9)
    with pytest.warns(coded.UncodedWarning, match="encode it with `transpose=True`") as record:
        plain = BACKWARD[name](module, alone)
    assert [warning.filename for warning in record] == [__file__]
    assert not is_round(plain)
    same(plain, expected, client, 1e-5 if "single" in name else 1e-9)


@pytest.mark.parametrize("name", NUMPY_FORWARD)
def test_products_that_only_numpy_has(alone, client, name):
    if name.partition(" ")[0] in ("matvec", "vecdot") and not hasattr(np, "matvec"):
        pytest.skip("NumPy is older than 2.2")
    result = NUMPY_FORWARD[name](alone)
    assert is_round(result)
    same(result, NUMPY_FORWARD[name](A), client)


@pytest.mark.parametrize("name", NUMPY_BACKWARD)
def test_products_from_the_left_that_only_numpy_has(alone, both, client, name):
    if name == "vecmat" and not hasattr(np, "vecmat"):
        pytest.skip("NumPy is older than 2.2")
    assert is_round(NUMPY_BACKWARD[name](both))
    same(NUMPY_BACKWARD[name](both), NUMPY_BACKWARD[name](A), client)
    with pytest.warns(coded.UncodedWarning):
        same(NUMPY_BACKWARD[name](alone), NUMPY_BACKWARD[name](A), client)


@pytest.mark.parametrize("module", [da, np], ids=["dask.array", "numpy"])
@pytest.mark.parametrize("name", UNCODED)
def test_products_that_cannot_be_coded_say_so(both, client, module, name):
    with pytest.warns(coded.UncodedWarning, match="not coded"):
        result = UNCODED[name](module, both)
    assert not is_round(result)
    same(result, UNCODED[name](np, A), client)


@pytest.mark.parametrize("module", [da, np], ids=["dask.array", "numpy"])
@pytest.mark.parametrize("name", WITHOUT_A_CODE)
def test_what_needs_no_code_says_nothing(alone, client, module, name):
    same(WITHOUT_A_CODE[name](module, alone), WITHOUT_A_CODE[name](np, A), client)


def test_factors_may_be_given_by_name(alone, client):
    C, x = alone, np.ones(alone.shape[1])
    for product in (
        da.matmul(a=C, b=x),
        da.tensordot(lhs=C, rhs=x, axes=1),
        da.tensordot(C, rhs=x, axes=1),
    ):
        assert is_round(product)
        same(product, A @ x, client)


def test_what_is_no_array_is_no_operand(alone):
    with pytest.raises(TypeError, match="must be an array, it is of type range"):
        alone.dot(range(5))


def test_tensordot_refuses_axes_that_do_not_exist(alone):
    for axes in ((5, 0), (1, 3), (-3, 0)):
        with pytest.raises(IndexError):
            np.tensordot(A, X, axes=axes)
        with pytest.raises(IndexError):
            np.tensordot(alone, X, axes=axes)
    with pytest.raises(IndexError):
        np.tensordot(alone, 2.0, axes=1)


def test_on_uncoded(alone, client):
    with dask.config.set({"coded.on-uncoded": "error"}):
        with pytest.raises(coded.UncodedWarning, match="waits for the slowest worker"):
            alone.T @ y
    with dask.config.set({"coded.on-uncoded": "ignore"}):
        same(alone.T @ y, A.T @ y, client)
    with dask.config.set({"coded.on-uncoded": "shout"}), pytest.raises(ValueError, match="'shout'"):
        alone.T @ y


def test_integers_are_multiplied_after_they_overflowed(client):
    """A multiple of integers is not coded because it would overflow at another moment."""
    small = np.array([[100, 27], [1, 2]], dtype=np.int8)
    C = coded.encode(small, coded.Repetition(2, 2), client)
    big = np.array([1, 1])
    with pytest.warns(coded.UncodedWarning):
        same((C * np.int8(2)) @ big, (small * np.int8(2)) @ big, client)
    same((C * 0.5) @ big, (small * 0.5) @ big, client)
    same(C.astype(np.int64) @ big.astype(np.int8), small.astype(np.int64) @ big, client)
    narrow = (C * 0.5) @ np.array([100, 100], dtype=np.int8)
    same(narrow, (small * 0.5) @ np.array([100, 100], dtype=np.int8), client)


@pytest.mark.parametrize(
    "factors",
    [(np.int8(100),) * 2, (np.float32(1e30),) * 2, (np.uint8(3), -1), (np.uint8(3), np.array(-2))],
    ids=str,
)
def test_factors_do_not_overflow_in_their_own_type(alone, client, factors):
    result, expected = alone, A
    for factor in factors:
        result, expected = result * factor, expected * factor
    assert is_round(result @ x)
    same(result @ x, expected @ x, client)
    same(-result @ x, -expected @ x, client)


def test_factors_whose_product_is_no_normal_number_are_not_coded(alone, client):
    """Their product is applied before the matrix, whose values may balance them."""
    small = alone * 1e-200 * 1e-200 * 1e300
    with pytest.warns(coded.UncodedWarning, match="not coded"):
        same(small @ x, np.zeros(ROWS), client)
    assert is_round((alone * 0 * 1e-200) @ x)
    big = alone
    for _ in range(20):
        big = big * 2**62
    with pytest.warns(coded.UncodedWarning, match="not coded"):
        assert not is_round(big @ x)


@pytest.mark.parametrize("kind", [np.array, list])
def test_views_keep_their_indices(alone, client, kind):
    index = kind([3, 1])
    view = alone[index]
    index[:] = [7, 8]
    same(view, A[[3, 1]], client)
    same(view @ x, A[[3, 1]] @ x, client)


def test_operations_with_keywords_are_not_coded(alone, client):
    where, expected = A > 0, np.where(A > 0, 2 * A, 0)
    for module in (np, da):
        D = da.zeros(A.shape, chunks=A.shape)
        result = module.multiply(alone, 2.0, where=da.asarray(where), out=D)
        with pytest.warns(coded.UncodedWarning, match="not coded"):
            same(result @ x, expected @ x, client)
    halves = alone.map_blocks(np.divide, 2.0, where=False, out=np.zeros((6, COLUMNS)))
    with pytest.warns(coded.UncodedWarning, match="not coded"):
        same(halves @ x, np.zeros(ROWS), client)


def test_elements_of_coded_arrays_cannot_be_set(alone):
    for array in (alone, 2 * alone):
        with pytest.raises(TypeError, match=r"set those of `C\.copy\(\)`"):
            array[0] = 1.0
    with pytest.raises(TypeError, match="cannot be set"):
        np.add(da.asarray(A), 1, out=alone)


def test_coded_arrays_are_no_output(alone, client):
    """dask.array would replace their values, which the pieces would not follow."""
    plain = da.from_array(A, chunks=(5, 2))
    for array, expected in ((alone, A), (2 * alone, 2 * A), (alone[::-1], A[::-1])):
        for write in (
            lambda out: da.add(out, 1, out=out),
            lambda out: da.add(plain, 1, out=out),
            lambda out: da.cumsum(out, axis=0, out=out),
            lambda out: np.cumsum(plain, axis=0, out=out),
        ):
            with pytest.raises(TypeError, match=r"set those of `C\.copy\(\)`"):
                write(array)
        same(array, expected, client)
        same(array @ x, expected @ x, client)


@pytest.mark.parametrize("module", [da, np], ids=["dask.array", "numpy"])
def test_the_transpose_follows_an_array_that_is_an_output(alone, client, module):
    result = alone.T
    module.add(result, 1, out=result)
    with pytest.warns(coded.UncodedWarning, match="not coded"):
        same(result.T @ x, (A + 1) @ x, client)


def test_calls_that_dask_does_not_know_have_no_output_either(alone):
    copy = alone.copy()
    with pytest.raises(TypeError):
        np.add.reduce(alone, out=copy)
    with pytest.raises(TypeError, match="Argument 'out' must be None"):
        np.einsum("ij,j->i", alone, x, out=np.zeros(ROWS))


@pytest.mark.parametrize("module", [da, np], ids=["dask.array", "numpy"])
def test_copies_may_be_outputs(alone, client, module):
    result = alone.copy()
    module.multiply(alone, 3, out=result)
    same(result, 3 * A, client)


IDENTITIES = {
    "tuple": lambda m, C: m.transpose(C, (0, 1)),
    "list": lambda m, C: C.transpose([0, 1]),
    "mixed signs": lambda m, C: C.transpose(0, -1),
    "negative list": lambda m, C: m.transpose(C, [-2, 1]),
    "moved to its place": lambda m, C: m.moveaxis(C, 0, 0),
    "moved to its place from the end": lambda m, C: m.moveaxis(C, 1, -1),
}


@pytest.mark.parametrize("module", [da, np], ids=["dask.array", "numpy"])
@pytest.mark.parametrize("name", IDENTITIES)
def test_axes_that_stay_where_they_are(alone, both, client, module, name):
    for array, expected in ((alone, A), (both, A), (2 * both, 2 * A), (both.T, A.T)):
        result = IDENTITIES[name](module, array)
        same(result, expected, client)
        operand = np.ones(expected.shape[1])
        assert is_round(result @ operand)
        same(result @ operand, expected @ operand, client)


COMPARISONS = [operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
ALIKE = [pytest.param(op, marks=pytest.mark.long) for op in (*COMPARISONS, divmod)]


@pytest.mark.parametrize("op", [operator.eq, *ALIKE], ids=lambda op: op.__name__)
def test_arrays_of_different_kinds_are_compared_by_their_elements(alone, client, op):
    plain = da.from_array(A, chunks=(5, 2))
    arrays = [(alone, A), (alone.copy(), A), (2 * alone, 2 * A), (abs(alone), abs(A)), (plain, A)]
    for left, a in arrays:
        for right, b in [*arrays, (0.5, 0.5), (A, A)]:
            found, expected = op(left, right), op(a, b)
            if op is not divmod:
                found, expected = [found], [expected]
            for result, value in zip(found, expected, strict=True):
                same(result, value, client)


def test_integers_of_different_kinds_are_shifted_by_their_elements(client):
    whole = np.arange(12).reshape(4, 3)
    C = coded.encode(whole, coded.Repetition(3, 2), client)
    same(C << C.copy(), whole << whole, client)
    same((2 * C) >> C, (2 * whole) >> whole, client)
    same(1 << C, 1 << whole, client)
    for op in (operator.and_, operator.or_, operator.xor):
        for right, b in (
            (C.copy(), whole),
            (3 * C, 3 * whole),
            (C[[2, 1, 0, 3]], whole[[2, 1, 0, 3]]),
        ):
            same(op(C, right), op(whole, b), client)
        same(op(6, C), op(6, whole), client)
        with pytest.warns(coded.UncodedWarning, match="not coded"):
            same(op(C, 6) @ np.arange(3), op(whole, 6) @ np.arange(3), client)


def test_unknown_sizes_of_chunks_may_be_computed(alone, client):
    view = alone[alone[:, 0] > 0]
    with client.as_current():
        view.compute_chunk_sizes()
        alone.compute_chunk_sizes()
    expected = A[A[:, 0] > 0]
    assert view.shape == expected.shape
    np.testing.assert_allclose(client.compute(view @ x).result(), expected @ x)


def test_elements_of_a_copy_can_be_set(alone, client):
    copy, expected = alone.copy(), A.copy()
    copy[2] = expected[2] = 7.0
    same(copy, expected, client)
    same(alone @ x, A @ x, client)
    with pytest.warns(coded.UncodedWarning):
        same(copy @ x, expected @ x, client)


def test_derived_arrays_survive_pickle_persist_and_rechunk(both, client):
    for derived, expected in ((2 * both, 2 * A), (both[1:], A[1:]), (both.rechunk(2), A)):
        for again in (pickle.loads(pickle.dumps(derived)), client.persist(derived)):
            assert is_round(again @ x)
            same(again, expected, client)
            same(again @ x, expected @ x, client)
    with pytest.warns(coded.UncodedWarning):
        pickle.loads(pickle.dumps(both + 1)) @ x
    with pytest.warns(coded.UncodedWarning):
        client.persist(both + 1) @ x


def test_functions_of_dask_array_are_unchanged_for_other_arrays(alone):
    for name, original in _ORIGINALS.items():
        function = getattr(da, name)
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__doc__ == original.__doc__
        assert inspect.unwrap(function) is inspect.unwrap(original)
    D = da.asarray(A)
    assert type(da.dot(D, x)) is da.Array
    assert _seeing(len, max)([1, 2, 3]) == 3


# -- all functions -----------------------------------------------------------------------------


def dispatched():
    """Yield the NumPy functions that dask.array implements, with the first arguments that fit."""
    for name in sorted(set(dir(np)) & set(dir(da))):
        function = getattr(np, name)
        if isinstance(function, type) or name.startswith(("_", "empty")):
            continue
        if not (isinstance(function, np.ufunc) or hasattr(function, "_implementation")):
            continue
        found = 0
        for more in ((), (x,), (1,), (y,), (B,), (X,), (A > 0,), ([0, 1], 0), (0, 1)):
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                try:
                    expected = function(A, *more)
                except Exception:
                    continue
            if (found := found + 1) > 2:
                break
            yield pytest.param(
                function, more, expected, id=f"{name}-{len(more)}-{np.shape(more[:1])}"
            )


def test_a_multiple_in_half_precision_holds_what_numpy_holds(client):
    plain = np.full((6, 784), 100, np.float16)
    C = coded.encode(plain, coded.MDS(3, 2), client)
    ones = np.ones(784, np.float16)
    found = client.compute((C / 255) @ ones).result()
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, (plain / np.float16(255)) @ ones, rtol=3e-3)


# Functions that multiply matrices, in some cases in a way that is not coded.
CONTRACTIONS = {"corrcoef", "cov", "dot", "einsum", "matmul", "tensordot", "vdot"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("function", "more", "expected"), list(dispatched()))
def test_all_functions_that_dask_array_dispatches(alone, client, function, more, expected):
    def outcome(array):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                result = function(array, *more)
                if dask.is_dask_collection(result) or isinstance(result, list | tuple):
                    result = client.gather(client.compute(result))
                return result, {warning.category for warning in said}
            except Exception as error:
                return error, set()

    plain, _ = outcome(da.from_array(A, chunks=(6, COLUMNS)))
    result, said = outcome(alone)
    if isinstance(plain, Exception):
        # What dask.array cannot do on these arguments, a coded array may be able to.
        assert type(result) is type(plain) or not isinstance(result, Exception)
        return
    assert not isinstance(result, Exception), result
    if function.__name__ not in CONTRACTIONS:
        assert coded.UncodedWarning not in said
    plain_parts, parts = (r if isinstance(r, tuple | list) else [r] for r in (plain, result))
    for one, other in zip(plain_parts, parts, strict=True):
        if isinstance(one, np.dtype | str | bool):
            assert other == one
        else:
            np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-9, atol=1e-9)
