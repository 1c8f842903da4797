"""Codes chosen for clusters whose workers have not all joined yet."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client, Worker
from distributed.utils_test import gen_cluster

import dask_coded as coded

A = np.random.default_rng(0).standard_normal((12, 5))
ONE, TWO, THREE = ([("127.0.0.1", 1)] * n for n in (1, 2, 3))


@gen_cluster(client=True, nthreads=ONE)
async def test_one_worker_has_no_redundancy_and_it_is_said(c, s, *workers):
    with pytest.warns(
        UserWarning, match=r"MDS\(n=1, k=1\), survives the loss of no worker"
    ) as seen:
        C = await coded.encode(A, client=c)
    assert C.code == coded.MDS(1, 1)
    message = str(seen[0].message)
    assert "only 1 worker is running" in message
    assert "`client.wait_for_workers(n)` and encode again" in message
    assert "`minimum_workers=n`" in message
    assert message.endswith("if not, pass `redundancy=0` to it.")
    # Nothing to say of what is wanted.
    await coded.encode(A, client=c, redundancy=0)
    await coded.encode(A, coded.MDS(1, 1), c)
    await coded.encode(A, client=c, workers=[workers[0].address])
    with pytest.warns(UserWarning, match="survives the loss of no worker"):
        await coded.encode_pair(A, A, client=c)


@gen_cluster(client=True, nthreads=TWO)
async def test_two_workers_store_the_matrix_twice_and_it_is_said(c, s, *workers):
    with pytest.warns(UserWarning, match=r"MDS\(n=2, k=1\), stores the matrix twice, because only"):
        C = await coded.encode(A, client=c)
    assert C.code == coded.MDS(2, 1)
    await coded.encode(A, client=c, redundancy=1)
    await coded.encode(np.eye(3, dtype=int), client=c)  # a second copy is usual for integers


@gen_cluster(client=True, nthreads=THREE)
async def test_fewer_workers_than_planned_are_said(c, s, *workers):
    c.cluster = SimpleNamespace(plan=set(range(8)), status=None)
    try:
        with pytest.warns(UserWarning, match="is for the 3 of 8 workers that are running"):
            await coded.encode(A, client=c)
        c.cluster.plan = set(range(3))
        await coded.encode(A, client=c)
    finally:
        c.cluster = None


@gen_cluster(client=True, nthreads=ONE)
async def test_encoding_waits_for_the_minimum_of_workers(c, s, *workers):
    chosen = asyncio.create_task(coded.encode(A, client=c, minimum_workers=3))
    given = asyncio.create_task(
        coded.encode_pair(A, A, coded.Polynomial(3, 1, 2), c, minimum_workers=3)
    )
    async with Worker(s.address), Worker(s.address):
        C = await chosen
        assert C.code == coded.MDS(3, 2)
        np.testing.assert_allclose(await c.compute(C @ np.ones(5)), A @ np.ones(5))
        P = await given
        np.testing.assert_allclose(await c.compute(P.product()), A.T @ A, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"minimum_workers": 0}, ValueError, "'minimum_workers' must be a whole number"),
        ({"minimum_workers": 2, "workers": ["a"]}, TypeError, "either 'workers' or 'minimum_worke"),
    ],
)
def test_a_minimum_of_workers_is_checked(client, options, error, message):
    for function in (coded.encode, coded.gram):
        with pytest.raises(error, match=message):
            function(A, client=client, **options)


def test_the_warning_points_to_the_line_that_called():
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False}
    with Client(**options, dashboard_address=None, set_as_default=False) as client:
        for call in (
            lambda: coded.encode(A, client=client),
            lambda: coded.linalg.power_iteration(A[:5], client=client),
        ):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                call()
            assert [w.filename for w in seen] == [__file__]
