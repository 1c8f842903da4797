"""Power iteration against NumPy's eigenvalues, in one process and in a cluster."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import dask_coded as coded
from dask_coded.linalg import ConvergenceError, power_iteration
from dask_coded.linalg.power import power_rounds
from dask_coded.simulation import SimulatedOperator, Simulation, constant
from tests.decoded import Decoded


def matrix(seed, n, kind="real", gap=0.5):
    """Return a normal matrix with one dominant eigenvalue, which may be negative."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(-gap, gap, n)
    values[rng.integers(n)] = rng.choice([-1.0, 1.0])
    basis = rng.standard_normal((n, n))
    if kind == "complex":
        basis = basis + 1j * rng.standard_normal((n, n))
    q, _ = np.linalg.qr(basis)
    return (q * values) @ q.conj().T


def corners(dtype):
    """Return some numbers of a dtype, among them the smallest integer."""
    least = [np.iinfo(dtype).min] if np.dtype(dtype).kind in "iu" else []
    return [*map(int, least), 0, 1]


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 12),
    kind=st.sampled_from(["real", "complex"]),
    scale=st.floats(1e-6, 1e6),
)
def test_dominant_pair_of_hermitian_matrices(seed, n, kind, scale):
    A = scale * matrix(seed, n, kind)
    pair = power_rounds(A, tol=1e-10, seed=seed)
    values, vectors = np.linalg.eigh(A)
    best = np.abs(values).argmax()
    assert abs(pair.value - values[best]) <= 1e-10 * scale
    assert abs(abs(np.vdot(vectors[:, best], pair.vector)) - 1) < 1e-10
    assert np.linalg.norm(A @ pair.vector - pair.value * pair.vector) == pytest.approx(
        pair.residual, abs=1e-13 * scale
    )


@given(exponent=st.integers(-1000, 1020), start=st.integers(-1000, 1020))
def test_squares_of_numbers_may_overflow_or_underflow(exponent, start):
    A = np.array([[2.0, 1.0], [1.0, 2.0]])
    pair = power_rounds(np.ldexp(A, exponent), start=np.ldexp([1.0, 0.5], start))
    assert np.ldexp(pair.value, -exponent) == pytest.approx(3)
    np.testing.assert_allclose(pair.vector, [0.5**0.5] * 2, rtol=1e-6)


@given(
    start=st.sampled_from([np.int8, np.int16, np.uint8, bool, np.float32, np.complex64]).flatmap(
        lambda dtype: arrays(dtype, 2, elements=st.sampled_from(corners(dtype)))
    )
)
def test_starts_of_narrow_dtypes_are_starts(start):
    assume(start.any())
    A = np.array([[2.0, 1.0], [1.0, 2.0]])
    pair = power_rounds(A, start=start)
    expected = power_rounds(A, start=start.astype(np.result_type(start, np.float64)))
    assert pair.value == expected.value == pytest.approx(3)
    np.testing.assert_array_equal(pair.vector, expected.vector)


@pytest.mark.parametrize("tol", [0, 1e-8])
def test_products_that_are_not_finite_end_the_iteration(tol):
    with pytest.raises(ConvergenceError, match="in 1 of max_iter=1000 rounds"):
        power_rounds(np.array([[np.nan, 1.0], [1.0, 2.0]]), tol=tol)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 10))
def test_matrices_need_not_be_symmetric(seed, n):
    # In a positive matrix one real eigenvalue is larger than all others (Perron-Frobenius).
    A = np.random.default_rng(seed).uniform(1, 2, (n, n))
    pair = power_rounds(A, start=np.ones(n))
    assert pair.value == pytest.approx(np.abs(np.linalg.eigvals(A)).max(), rel=1e-7)
    assert (pair.vector > 0).all()


def test_sparse_and_simulated_operators():
    A = matrix(0, 9)
    expected = power_rounds(A, seed=1)
    simulated = SimulatedOperator(A, Simulation(coded.MDS(4, 3), constant([1, 1, 1, 0.5])))
    for operator in (sp.csr_array(A), simulated):
        pair = power_rounds(operator, seed=1)
        assert pair.value == pytest.approx(expected.value, rel=1e-12)
        assert pair.rounds == expected.rounds
    assert len(simulated.rounds) == expected.rounds


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tolerance_that_parity_of_single_precision_cannot_reach_is_raised(dtype):
    A = matrix(0, 60).astype(dtype)
    pair = power_rounds(Decoded(A, coded.MDS(12, 10)), seed=0, tol=1e-10)
    assert abs(pair.value) == pytest.approx(1)
    assert pair.residual < (2e-6 if dtype == np.float32 else 1e-10)


def test_zero_is_an_eigenvalue_like_any_other():
    assert power_rounds(np.zeros((3, 3))).value == 0
    assert power_rounds(np.array([[0.0, 1.0], [0.0, 0.0]]), start=[1, 1]).value == 0


def test_eigenvalues_of_equal_modulus_do_not_converge():
    rotation = np.array([[0.0, -1.0], [1.0, 0.0]])
    with pytest.raises(ConvergenceError, match=r"max_iter=20 rounds: the residual is 1, .* Raise"):
        power_rounds(rotation, max_iter=20, start=[1, 0])
    assert power_rounds(rotation, tol=0, max_iter=20, start=[1, 0]).rounds == 20


def test_a_resumed_iteration_continues_from_the_saved_state():
    A = matrix(0, 9)

    class Kept(coded.Loop):
        state = None

        def resume(self, state):
            return self.state or state

        def report(self, progress, state=None, last=False):
            self.state = state
            if progress.round == 5 and not self.lost:
                self.lost = True
                raise ConnectionError

        lost = False

    loop = Kept()
    with pytest.raises(ConnectionError):
        power_rounds(A, seed=0, loop=loop)
    pair = power_rounds(A, seed=99, loop=loop)
    straight = power_rounds(A, seed=0)
    assert (pair.value, pair.rounds) == (straight.value, straight.rounds)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((3,), {}, r"Only a square matrix has eigenvalues, the shape of this one is \(3,\)"),
        ((3, 2), {}, r"Only a square matrix has eigenvalues, the shape of this one is \(3, 2\)"),
        ((3, 3), {"tol": -1}, "Argument 'tol' must be 0 or a positive number, it is -1"),
        ((3, 3), {"max_iter": 0}, "'max_iter' must be a whole number of at least 1, it is 0"),
        ((3, 3), {"start": [1, 2]}, r"Argument 'start' must be 3 finite numbers, not all zero"),
        ((3, 3), {"start": [0, 0, 0]}, "not all zero"),
        ((3, 3), {"start": ["a", "b", "c"]}, "must be 3 finite numbers.* dtype <U1"),
    ],
)
def test_arguments_are_checked(shape, arguments, message):
    # There is no cluster, so the checks must come before the encoding.
    for function in (power_rounds, power_iteration):
        with pytest.raises(ValueError, match=message):
            function(np.ones(shape), **arguments)


def test_in_a_cluster(client):
    A = matrix(3, 40)
    heard = []
    pair = power_iteration(A, seed=0, client=client, callback=heard.append)
    expected = power_rounds(A, seed=0)
    assert pair.value == pytest.approx(expected.value, rel=1e-12)
    assert abs(np.vdot(pair.vector, expected.vector)) == pytest.approx(1)
    assert heard[-1].round == pair.rounds
    assert heard[-1].residual == pair.residual / abs(pair.value) < 1e-8


def test_of_a_coded_array_in_a_cluster(client):
    A = sp.csr_array(np.diag(2.0 ** np.arange(10)))
    C = coded.encode(A, client=client)
    assert power_iteration(C, start=np.ones(10), client=client).value == pytest.approx(512)
    with pytest.raises(TypeError, match="Argument 'code' is for an array that is not coded"):
        power_iteration(C, code="mds", client=client)
