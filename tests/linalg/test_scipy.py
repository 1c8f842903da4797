"""SciPy's solvers over coded rounds: on the client, and inside the cluster."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

import dask_coded as coded

N = 24
rng = np.random.default_rng(0)
TALL = rng.standard_normal((N, 7))
COMPLEX = rng.standard_normal((9, 6)) + 1j * rng.standard_normal((9, 6))
HALF = rng.standard_normal((N, N))
POSITIVE = HALF @ HALF.T / N + np.eye(N)
b = rng.standard_normal(N)


@pytest.fixture(scope="module", params=["client", "cluster"])
def solve(client, request):
    """Call a SciPy function on a coded array, from the client or inside the cluster."""

    def on_client(function, A, *args, **kwargs):
        return function(A.as_linear_operator(), *args, **kwargs)

    def in_cluster(function, A, *args, **kwargs):
        return coded.submit(function, A, *args, client=client, **kwargs).result()

    return on_client if request.param == "client" else in_cluster


@pytest.fixture(scope="module")
def arrays(client):
    def encode(A, transpose):
        code = coded.MDS(4, 3) if isinstance(A, np.ndarray) else None
        return coded.encode(A, code, client=client, transpose=transpose)

    return {
        "tall": encode(TALL, True),
        "complex": encode(COMPLEX, True),
        "positive": encode(POSITIVE, False),
        "sparse": encode(sp.csr_array(TALL * (TALL > 0)), True),
    }


@pytest.mark.parametrize("solver", [spla.lsqr, spla.lsmr])
def test_least_squares(solve, arrays, solver):
    x = solve(solver, arrays["tall"], b, atol=1e-12, btol=1e-12)[0]
    np.testing.assert_allclose(x, np.linalg.lstsq(TALL, b)[0], rtol=1e-8)


@pytest.mark.parametrize("solver", [spla.cg, spla.minres, spla.gmres, spla.bicgstab])
def test_linear_systems(solve, arrays, solver):
    x, status = solve(solver, arrays["positive"], b, rtol=1e-12)
    assert status == 0
    np.testing.assert_allclose(x, np.linalg.solve(POSITIVE, b), rtol=1e-8)


@pytest.mark.parametrize("solver", [spla.eigsh, spla.eigs])
def test_eigenvalues(solve, arrays, solver):
    values = solve(solver, arrays["positive"], k=3, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(values), np.linalg.eigvalsh(POSITIVE)[-3:])


@pytest.mark.parametrize("name", ["tall", "sparse"])
def test_singular_values(solve, arrays, name):
    A = TALL if name == "tall" else TALL * (TALL > 0)
    U, s, Vh = solve(spla.svds, arrays[name], k=2)
    np.testing.assert_allclose(np.sort(s)[::-1], np.linalg.svd(A, compute_uv=False)[:2])
    np.testing.assert_allclose(A @ Vh.T, U * s, atol=1e-10)


def test_complex_singular_values_need_the_adjoint_conjugated_once(solve, arrays):
    U, s, Vh = solve(spla.svds, arrays["complex"], k=3)
    expected = np.linalg.svd(COMPLEX)[1][:3]
    np.testing.assert_allclose(np.sort(s)[::-1], expected)
    np.testing.assert_allclose(COMPLEX @ Vh.conj().T, U * s, atol=1e-10)


def every_product(operator, x, y):
    return {
        "matvec": operator.matvec(x[:, 0]),
        "column": operator.matvec(x[:, :1]),
        "matmat": operator.matmat(x),
        "rmatvec": operator.rmatvec(y[:, 0]),
        "rmatmat": operator.rmatmat(y),
        "adjoint": operator.H @ y,
        "transpose": operator.T @ y,
        "there and back": operator.T.T @ x,
        "adjoint's adjoint": operator.H.H @ x,
        "left": y.T @ operator,
        "scaled": (2 * operator) @ x,
        "gram": (operator.H @ operator) @ x,
        "shifted": (operator + operator) @ x,
    }


def test_products_are_those_of_the_matrix(solve, arrays):
    x, y = np.ones((6, 2)) * [1, 1j], np.arange(18).reshape(9, 2) * (1 - 2j)
    found = solve(every_product, arrays["complex"], x, y)
    expected = every_product(spla.aslinearoperator(COMPLEX), x, y)
    for name, product in expected.items():
        assert found[name].shape == product.shape, name
        np.testing.assert_allclose(found[name], product, atol=1e-10, err_msg=name)


def describe(operator):
    return operator.shape, operator.dtype, spla.aslinearoperator(operator) is operator


def test_shape_and_dtype(solve, arrays):
    assert solve(describe, arrays["complex"]) == ((9, 6), np.dtype(complex), True)


def test_the_adjoint_without_the_transpose_is_refused(solve, arrays):
    with pytest.raises(TypeError, match="encode it with `transpose=True`"):
        solve(spla.lsqr, arrays["positive"], b)


def test_operands_that_do_not_fit_are_refused(solve, arrays):
    with pytest.raises(ValueError, match=r"Shapes \(24, 7\) and \(24,\) do not fit together"):
        solve(lambda operator: operator @ b, arrays["tall"])


@pytest.mark.parametrize(
    "product",
    [
        lambda operator, x: operator.matmat(x),
        lambda operator, x: (2 * operator) @ x,
        lambda operator, x: (operator + operator) @ x,
    ],
)
def test_sparse_operands_are_refused_in_every_product(solve, arrays, product):
    with pytest.raises(TypeError, match="sparse"):
        solve(product, arrays["tall"], sp.eye_array(7).tocsr())


def test_masked_operands_are_refused_by_methods_too(solve, arrays):
    with pytest.raises(TypeError, match="masked"):
        solve(
            lambda operator, x: operator.matvec(x), arrays["tall"], np.ma.masked_less(np.ones(7), 0)
        )
