"""Coded pairs against NumPy, on one cluster of threads; lost pieces, on real processes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from distributed import Client, utils_test
from distributed.utils_test import gen_cluster, poll_for
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_coded as coded
from dask_coded.rounds import Geometry, StripeRange
from dask_coded.rounds.kernels import bilinear
from dask_coded.rounds.scaling import exponents_of, scaled
from dask_coded.runtime.spec import PairSpec

# gen_cluster resets the configuration to what it was when its module was imported.
utils_test.original_config["coded"] = dask.config.get("coded")

N, P, Q = 40, 11, 7  # no a or b above 1 divides P or Q


@pytest.fixture(scope="module")
def client():
    with Client(
        n_workers=6,
        threads_per_worker=1,
        processes=False,
        dashboard_address=None,
        set_as_default=False,
    ) as client:
        yield client


def numbers(*shape, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    out = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        out = out + 1j * rng.standard_normal(shape)
    return out.astype(dtype)


@pytest.fixture(scope="module")
def A():
    return numbers(N, P)


@pytest.fixture(scope="module")
def B():
    return numbers(N, Q, seed=1)


@pytest.fixture(scope="module")
def d():
    return numbers(N, seed=2)


@pytest.fixture(scope="module")
def pair(A, B, client):
    return coded.encode_pair(A, B, coded.Polynomial(6, 2, 2), client)


def check(actual, expected, client, rtol=1e-11):
    """Check that a lazy product has the announced shape and dtype, and the right values."""
    assert type(actual) is da.Array
    result = client.compute(actual).result()
    assert result.shape == actual.shape == expected.shape
    assert result.dtype == actual.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, atol=rtol * np.abs(expected).max())


# -- without a cluster -------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=50)
def test_stripes_of_pieces_give_the_product(data):
    a, b = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    code = coded.Polynomial(a * b + data.draw(st.integers(0, 3)), a, b)
    left_rows = tuple(data.draw(st.integers(1, 4)) for _ in range(a))
    right_rows = tuple(data.draw(st.integers(1, 4)) for _ in range(b))
    stripes = data.draw(st.integers(1, max(left_rows)))
    spec = PairSpec(
        id="pair",
        code=code,
        geometry=Geometry(
            tuple(h for h in left_rows for _ in right_rows), stripes=stripes, mixed=True
        ),
        columns=5,
        dtype=np.dtype(float),
        keys=tuple(range(code.pieces)),
        right_rows=right_rows,
        right_source=a,
    )
    A, B = numbers(5, sum(left_rows)), numbers(5, sum(right_rows), seed=1)
    A, B = A * 10.0 ** (2 * np.arange(A.shape[1])), B * 10.0 ** (-2 * np.arange(B.shape[1]))
    d = data.draw(st.sampled_from([None, numbers(5, seed=2)]))
    sources = [
        part
        for whole, rows in ((A, left_rows), (B, right_rows))
        for part in np.split(whole.T, np.cumsum(rows)[:-1])
    ]

    if spec.combines:
        spec = replace(spec, exponents=tuple(map(exponents_of, sources)))

    def make(ingredients, sources, piece):
        out = np.zeros((spec.piece_rows(piece), 5))
        for source, weight, rows, start, at, block in ingredients:
            part = weight * sources[source][start : start + rows]
            if block >= 0 and spec.combines:
                part = scaled(part, spec.exponents[block])
            out[at : at + rows] += part
        return out

    pieces = [make(spec.from_sources(i), sources, i) for i in range(code.pieces)]
    if code.tolerance:
        lost, *others = data.draw(st.permutations(range(code.pieces)))
        again = make(spec.from_pieces(lost, others), pieces, lost)
        np.testing.assert_allclose(again, pieces[lost], rtol=1e-10, atol=1e-10)

    edges = spec.geometry.edges(0)
    computed = np.zeros((code.pieces, stripes), dtype=bool)
    shares = []
    for stripe in range(stripes):
        for i in data.draw(st.permutations(range(code.pieces)))[: code.k]:
            product = bilinear(pieces[i], int(edges[-1]), d)
            rows = product(edges[stripe], edges[stripe + 1], None)
            shares.append((StripeRange(i, stripe, stripe + 1), rows))
            computed[i, stripe] = True
    expected = A.T @ (B if d is None else d[:, None] * B)
    assembler = spec.assembler(d)
    assembler.add(shares, computed, computed.any(axis=0))
    size = np.abs(A.T) @ (np.abs(B) if d is None else np.abs(d[:, None] * B))
    error = np.abs(spec.result(assembler.rows) - expected) / size
    assert error.max() < 1e-9


# -- products ----------------------------------------------------------------------------------


def test_product_with_and_without_weights(pair, A, B, d, client):
    assert (pair.shape, pair.rows, pair.dtype) == ((P, Q), N, np.dtype(float))
    check(pair.product(), A.T @ B, client)
    check(pair.product(d), A.T @ (d[:, None] * B), client)
    check(pair.product(da.from_array(d, chunks=7)), A.T @ (d[:, None] * B), client)
    check(pair.product(np.arange(N)), A.T @ (np.arange(N)[:, None] * B), client)


@pytest.mark.parametrize("code", [(6, 1, 1), (6, 1, 4), (6, 5, 1), (6, 2, 3), (5, 2, 2)], ids=str)
def test_codes(code, A, B, d, client):
    pair = coded.encode_pair(A, B, coded.Polynomial(*code), client)
    check(pair.product(d), A.T @ (d[:, None] * B), client)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_fewer_columns_than_blocks(p, A, client):
    B = numbers(N, p)
    check(coded.encode_pair(A, B, coded.Polynomial(6, 2, 3), client).product(), A.T @ B, client)


@pytest.mark.parametrize("policy", ["static", "s2c2", "continuous"])
def test_policies_with_many_stripes(policy, client):
    A = numbers(300, 400)
    options = {"coded.policy": policy, "coded.round.stripe-work": 1}
    with dask.config.set(options):
        pair = coded.encode_pair(A, A, coded.Polynomial(6, 2, 2), client)
        assert pair.encoded.spec.geometry.stripes > 1
        check(pair.product(A[:, 0]), A.T @ (A[:, :1] * A), client)


@pytest.mark.parametrize(
    ("left", "right", "weights"),
    [
        ("f4", "f4", "f4"),
        ("f4", "f8", "f4"),
        ("f4", "f4", "f8"),
        ("f4", "f4", "i8"),
        ("f4", "f4", "?"),
        ("c16", "f8", "f8"),
        ("f8", "f8", "c16"),
    ],
)
def test_dtypes(left, right, weights, client):
    A, B, d = numbers(N, P, dtype=left), numbers(N, Q, dtype=right), numbers(N, dtype=weights)
    pair = coded.encode_pair(A, B, coded.Polynomial(6, 2, 2), client)
    assert pair.dtype == np.result_type(A, B)
    check(pair.product(d), A.T @ (d[:, None] * B), client, rtol=1e-5)


def test_products_of_half_precision_do_not_overflow_in_the_pieces(client):
    A, d = np.full((2000, P), 0.01, "f2"), np.full(2000, 100, "f2")
    pair = coded.encode_pair(A, A, coded.Polynomial(6, 2, 2), client)
    check(pair.product(d), A.T @ (d[:, None] * A), client, rtol=1e-2)
    check(coded.encode_pair(d[:, None], A, client=client).product(), d[None] @ A, client, rtol=1e-2)


@pytest.mark.parametrize("chunks", [(N, P), (7, 3), ((1, N - 1), (P - 1, 1))], ids=str)
def test_dask_arrays_of_any_chunks(chunks, A, B, d, client):
    source = da.from_array(A, chunks=chunks)
    pair = coded.encode_pair(source, da.from_array(B, chunks=9), client=client)
    check(pair.product(d), A.T @ (d[:, None] * B), client)


# -- Gram matrices -----------------------------------------------------------------------------


def test_a_lazy_product_keeps_the_weights_as_they_were(pair, A, B, d, client):
    weights = d.copy()
    product = pair.product(weights)
    weights *= 0
    check(product, A.T @ np.diag(d) @ B, client)


@pytest.mark.parametrize("code", [None, coded.Polynomial(6, 2, 3), coded.Polynomial(6, 2, 2)])
@pytest.mark.parametrize("lazy", [False, True])
def test_gram(code, lazy, A, d, client):
    source = da.from_array(A, chunks=(9, 4)) if lazy else A
    expected = A.T @ (d[:, None] * A)
    check(coded.gram(source, d, code, client), expected, client)
    check(coded.gram(source, None, code, client), A.T @ A, client)


def test_pieces_are_released_with_the_last_product(A, client):
    product = coded.gram(A, client=client)
    (task,) = product.dask.layers[product.name].values()
    keys = set(task.args[0].encoded[0].spec.keys)
    del task

    def there():
        return keys & set(client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.tasks]))

    assert there() == keys
    del product
    poll_for(lambda: not there(), timeout=60)


# -- inside the cluster ------------------------------------------------------------------------


def test_newton_inside_the_cluster(client):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 6))
    y = (rng.random(200) < 1 / (1 + np.exp(-X @ np.arange(-3.0, 3.0)))).astype(float)

    def newton(hessian, X, y):
        w = np.zeros(X.shape[1])
        for _ in range(12):
            p = 1 / (1 + np.exp(-X @ w))
            w = w - np.linalg.solve(hessian.product(p * (1 - p)), X.T @ (p - y))
        return w, hessian.last_round.workers

    pair = coded.encode_pair(X, X, coded.Polynomial(6, 2, 2), client)
    w, workers = coded.submit(newton, pair, X, y, client=client).result()
    assert workers >= 4
    np.testing.assert_allclose(X.T @ (1 / (1 + np.exp(-X @ w)) - y), 0, atol=1e-9)


def test_a_pair_and_an_array_in_one_algorithm(pair, A, B, d, client):
    C = coded.encode(A, coded.MDS(6, 4), client, transpose=True)

    def function(operator, pair, d):
        return operator.T @ (d * (operator @ np.ones(P))), pair.product(d) @ np.ones(Q)

    one, other = coded.submit(function, C, pair, d, client=client).result()
    np.testing.assert_allclose(one, A.T @ (d * A.sum(1)), rtol=1e-10)
    np.testing.assert_allclose(other, A.T @ (d * B.sum(1)), rtol=1e-10)


def test_wrong_weights_inside_the_cluster(pair, client):
    future = coded.submit(lambda pair: pair.product([1.0]), pair, client=client)
    with pytest.raises(ValueError, match=r"each of the 40 rows, its shape is \(1,\)"):
        future.result()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_asynchronous_client(c, s, *workers):
    A = numbers(N, P)
    pair = await coded.encode_pair(A, A, client=c)
    np.testing.assert_allclose(await c.compute(pair.product()), A.T @ A, atol=1e-10)
    product = await coded.gram(A, client=c)
    np.testing.assert_allclose(await c.compute(product), A.T @ A, atol=1e-10)


# -- choices and errors ------------------------------------------------------------------------


def test_default_code_fits_cluster_and_shapes(A, B, client):
    pair = coded.encode_pair(A, A, client=client)
    assert (pair.code.n, pair.code.a, pair.code.b) == (6, 2, 2)
    pair = coded.encode_pair(np.tile(A, 100), A, client=client, redundancy=1)
    assert (pair.code.a, pair.code.b) == (5, 1)
    check(
        coded.encode_pair(A, B, client=client, workers=pair.encoded.workers[:3]).product(),
        A.T @ B,
        client,
    )


def test_fewer_workers_than_pieces(A, client):
    code = coded.Polynomial(12, 3, 3)
    with pytest.raises(coded.ClusterUnfitError, match="needs 12 workers, the cluster has 6"):
        coded.encode_pair(A, A, code, client)
    check(coded.encode_pair(A, A, code, client, oversubscribe=True).product(), A.T @ A, client)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"B": np.ones((N + 1, 2))}, ValueError, "the same number of rows, they have 40 and 41"),
        (
            {"B": np.ones((N, 2), dtype=int)},
            TypeError,
            r"inexact: convert with `A.astype\(float\)`\.",
        ),
        ({"B": scipy.sparse.eye_array(N).tocsr()}, TypeError, "'B' must be dense"),
        ({"A": np.ones(N)}, TypeError, r"Only a matrix can be encoded, its shape is \(\d+,\)"),
        ({"A": np.full((N, 2), np.nan)}, ValueError, "NaN or infinity"),
        ({"code": coded.MDS(6, 4)}, TypeError, r"must be a `coded.Polynomial`, it is MDS"),
        ({"code": coded.Polynomial(6, 2, 2), "redundancy": 1}, TypeError, "either a code or"),
        ({"workers": "all"}, TypeError, "'workers' must be a list of the addresses"),
        ({"redundancy": 6}, ValueError, "a whole number from 0 to 5 with 6 workers, it is 6"),
    ],
)
def test_wrong_arguments(change, error, message, A, B, client):
    with pytest.raises(error, match=message):
        coded.encode_pair(**({"A": A, "B": B, "client": client} | change))


@pytest.mark.parametrize("weights", [np.ones(3), np.ones((N, 1)), 2.0, da.ones(N - 1)])
def test_wrong_weights(weights, pair, A, client):
    with pytest.raises(ValueError, match="one number for each of the 40 rows"):
        pair.product(weights)
    with pytest.raises(ValueError, match="one number for each of the 40 rows"):
        coded.gram(A, weights, client=client)


def test_weights_that_are_not_numbers(pair):
    with pytest.raises(TypeError, match="must hold numbers"):
        pair.product(["a"] * N)
    with pytest.raises(TypeError, match="weights of a coded product must be dense"):
        pair.product(scipy.sparse.eye_array(N))


def test_a_pair_has_no_operators(pair):
    for product in (lambda: pair @ np.ones(N), lambda: np.ones(N) @ pair):
        with pytest.raises(TypeError, match=r"unsupported operand|does not support"):
            product()


def test_equal_products_have_equal_names(pair, d):
    assert pair.product(d).name == pair.product(d.copy()).name != pair.product(2 * d).name
    assert isinstance(pickle.loads(pickle.dumps(pair.encoded.spec)), PairSpec)


# -- loss --------------------------------------------------------------------------------------


def test_pieces_of_killed_workers_are_rebuilt(processes, A, B, d):
    processes.add(6)
    client = processes.client
    pair = coded.encode_pair(A, B, coded.Polynomial(6, 2, 2), client)
    check(pair.product(d), A.T @ (d[:, None] * B), client)
    gone = pair.encoded.workers[:2]
    for address in gone:
        processes.kill(address)
    check(pair.product(2 * d), A.T @ (2 * d[:, None] * B), client)

    def rebuilt():
        holders = client.who_has(pair.encoded.futures)
        return all(set(held) - set(gone) for held in holders.values())

    poll_for(rebuilt, timeout=60)
    # Without the rebuilt pieces, too few would be left now.
    processes.kill(pair.encoded.workers[2])
    check(pair.product(3 * d), A.T @ (3 * d[:, None] * B), client)
