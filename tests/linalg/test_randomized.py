"""Randomized SVD against NumPy's, in one process and in a cluster."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import dask_coded as coded
from dask_coded.linalg import randomized_svd
from dask_coded.linalg.randomized import svd_rounds
from dask_coded.simulation import SimulatedOperator, Simulation, constant


def decaying(seed, shape, rate=0.5, kind="real"):
    """Return a matrix with singular values 1, rate, rate**2, ..."""
    rng = np.random.default_rng(seed)

    def basis(rows):
        block = rng.standard_normal((rows, min(shape)))
        if kind == "complex":
            block = block + 1j * rng.standard_normal(block.shape)
        return np.linalg.qr(block)[0]

    return (basis(shape[0]) * rate ** np.arange(min(shape))) @ basis(shape[1]).conj().T


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    kind=st.sampled_from(["real", "complex"]),
    data=st.data(),
)
def test_error_is_close_to_the_best_of_that_rank(seed, shape, kind, data):
    A = decaying(seed, shape, kind=kind)
    k = data.draw(st.integers(1, min(shape)))
    U, s, Vh = svd_rounds(A, k, seed=seed)
    assert (U.shape, s.shape, Vh.shape) == ((shape[0], k), (k,), (k, shape[1]))
    np.testing.assert_allclose(U.conj().T @ U, np.eye(k), atol=1e-12)
    np.testing.assert_allclose(Vh @ Vh.conj().T, np.eye(k), atol=1e-12)
    np.testing.assert_allclose(s, np.linalg.svd(A, compute_uv=False)[:k], rtol=1e-5, atol=1e-13)
    assert np.linalg.norm(A - (U * s) @ Vh, 2) <= 1.01 * 0.5**k + 1e-13


@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(0, 5))
def test_matrices_of_lower_rank_than_k(seed, rank):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((12, rank)) @ rng.standard_normal((rank, 9))
    U, s, Vh = svd_rounds(A, 6, seed=seed)
    np.testing.assert_allclose((U * s) @ Vh, A, atol=1e-10)
    np.testing.assert_allclose(U.T @ U, np.eye(6), atol=1e-12)
    assert (s[rank:] < 1e-10).all()


def test_more_passes_reduce_the_error():
    A = decaying(0, (60, 50), rate=0.9)
    exact = np.linalg.svd(A, compute_uv=False)[:5]
    errors = [
        np.abs(svd_rounds(A, 5, oversample=2, power_iterations=q, seed=0)[1] - exact).max()
        for q in (0, 1, 2, 4)
    ]
    assert errors == sorted(errors, reverse=True)


def test_sparse_and_simulated_operators():
    A = decaying(1, (20, 15))
    expected = svd_rounds(A, 3, seed=0)[1]
    simulated = SimulatedOperator(A, Simulation(coded.MDS(4, 3), constant([1, 1, 1, 0.5])))
    for operator in (sp.csr_array(A), simulated):
        np.testing.assert_allclose(svd_rounds(operator, 3, seed=0)[1], expected, rtol=1e-10)
    # Three passes, two products each.
    assert len(simulated.rounds) == 6


def test_a_resumed_computation_continues_from_the_saved_state():
    A = decaying(0, (20, 15))
    reported = []

    class Kept(coded.Loop):
        def resume(self, state):
            return reported[1] if reported else state

        def report(self, progress, state=None, last=False):
            reported.append(state)

    straight = svd_rounds(A, 4, power_iterations=3, seed=0, loop=Kept())
    again = svd_rounds(A, 4, power_iterations=3, seed=99, loop=Kept())
    for one, other in zip(straight, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(reported) == 4 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "Argument 'k' must be a whole number of at least 1, it is 0"),
        ({"k": 4}, r"Argument 'k' must be at most 3 for a matrix of shape \(3, 5\), it is 4"),
        ({"k": 1, "oversample": -1}, "Argument 'oversample' must be a whole number of at least 0"),
        ({"k": 1, "power_iterations": 0.5}, "Argument 'power_iterations' must be a whole number"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        svd_rounds(np.ones((3, 5)), **arguments)


def test_in_a_cluster(client):
    A = decaying(2, (40, 30), kind="complex")
    heard = []
    U, s, Vh = randomized_svd(A, 4, seed=0, client=client, callback=heard.append)
    np.testing.assert_allclose(s, 0.5 ** np.arange(4), rtol=1e-8)
    assert np.linalg.norm(A - (U * s) @ Vh, 2) <= 1.01 * 0.5**4
    assert heard[-1].round == 3


def test_a_dask_array_gives_left_vectors_as_a_dask_array(client):
    A = decaying(2, (40, 30))
    plain = da.from_array(A, chunks=(11, 13))
    C = coded.encode(plain, coded.MDS(4, 3), client=client, transpose=True)
    for array in (plain, C):
        U, s, Vh = randomized_svd(array, 4, seed=0, client=client)
        assert U.chunks == (array.chunks[0], (4,))
        assert isinstance(s, np.ndarray)
        # Dask cannot compute it again, so it must not be lost with one worker.
        (key,) = [key for key, on in client.who_has().items() if len(on) > 1 and "ndarray" in key]
        assert len(client.who_has()[key]) == 2
        U = client.compute(U).result()
        np.testing.assert_allclose(U.T @ U, np.eye(4), atol=1e-12)
        assert np.linalg.norm(A - (U * s) @ Vh, 2) <= 1.01 * 0.5**4


def test_a_coded_array_needs_its_transpose(client):
    C = coded.encode(np.eye(6), coded.MDS(4, 3), client=client)
    with pytest.raises(TypeError, match="encode it with `transpose=True`"):
        randomized_svd(C, 2, client=client)
