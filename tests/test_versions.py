"""A way through the package that `.ci/run` also takes on older versions of Dask.

Some tests of `tests/runtime` have the same mark, among them those of workers that are killed.
"""

from __future__ import annotations

import dask.array as da
import networkx
import numpy as np
import pytest
import scipy.sparse

import dask_coded as coded
from dask_coded.linear_model import LogisticRegression

pytestmark = pytest.mark.versions

rng = np.random.default_rng(0)
A = rng.standard_normal((240, 20))
x = rng.standard_normal(20)
y = A @ x > 0


def encoded(processes):
    processes.add(4)
    return coded.encode(da.from_array(A, chunks=(50, 7)), coded.MDS(4, 2), processes.client)


def test_encode_and_lazy_products(processes):
    C = encoded(processes)
    products = processes.client.compute([C @ x, (2 * C)[3:] @ da.from_array(x, chunks=6)])
    first, second = processes.client.gather(products)
    np.testing.assert_allclose(first, A @ x)
    np.testing.assert_allclose(second, 2 * A[3:] @ x)


def test_pagerank(client):
    links = scipy.sparse.coo_array(rng.random((30, 30)) < 0.2).astype(float)
    graph = networkx.from_scipy_sparse_array(links, create_using=networkx.DiGraph)
    expected = networkx.pagerank(graph, tol=1e-9, max_iter=1000)
    ranks = coded.graph.pagerank(links, client=client, tol=1e-9)
    np.testing.assert_allclose(ranks, list(expected.values()), atol=1e-5)


def test_fit(client):
    with client.as_current():
        model = LogisticRegression().fit(da.from_array(A, chunks=(60, 20)), y)
    assert model.score(A, y) > 0.9


def squares(w, X, y):
    error = X @ w - y
    return error @ error / 2, X.T @ error


def test_train(client):
    data = da.from_array(A, chunks=(60, 20)), da.from_array(A @ x, chunks=60)
    found = coded.training.train(
        squares, np.zeros(20), data, steps=100, optimizer=coded.training.SGD(1.0), client=client
    )
    np.testing.assert_allclose(found.parameters, x, atol=1e-2)


def test_functions_of_dask_array(client):
    C = coded.encode(A, coded.MDS(4, 2), client)
    for lazy, expected in (
        (C.sum(axis=0), A.sum(axis=0)),
        (da.exp(C)[:, 2], np.exp(A)[:, 2]),
        (da.concatenate([C, C], axis=1), np.hstack([A, A])),
        (C.map_blocks(np.abs), np.abs(A)),
        (da.linalg.norm(C), np.linalg.norm(A)),
        (C, A),
    ):
        np.testing.assert_allclose(client.compute(lazy).result(), expected)


def test_persist_and_replicate(client):
    C = coded.encode(A, coded.MDS(4, 2), client)
    kept = client.persist(C + 1)
    client.replicate(C.encoded.futures[0])
    np.testing.assert_allclose(client.compute(kept).result(), A + 1)
    np.testing.assert_allclose(client.compute(client.persist(C) @ x).result(), A @ x)
