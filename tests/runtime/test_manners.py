"""Manners on a shared cluster: who uses no coded array notices nothing of the plugins."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport import Exchange

FOUR = {"client": True, "nthreads": [("127.0.0.1", 1, {"memory_limit": 2**30})] * 4}
A = np.random.default_rng(0).standard_normal((120, 10))


def timers(*servers):
    """The names of the package's periodic callbacks that run."""
    return {
        name
        for server in servers
        for name, callback in server.periodic_callbacks.items()
        if "coded" in name and callback.is_running()
    }


def tasks():
    """The package's coroutines that run on the event loop of this test."""
    return {
        coroutine.cr_frame.f_code.co_qualname
        for task in asyncio.all_tasks()
        if (coroutine := task.get_coro()).cr_frame is not None
        and "/dask_coded/" in coroutine.cr_frame.f_code.co_filename
    }


def active(workers):
    return [worker_plugin(worker)._active for worker in workers]


@pytest.mark.parametrize("mapped", [False, True])
def test_timers_end_with_the_last_array(mapped, monkeypatch):
    @gen_cluster(**FOUR)
    async def test(c, s, *workers):
        await coded.encode(A, coded.MDS(4, 3), c)
        if mapped:
            monkeypatch.setattr("dask_coded.runtime.worker.disk.Disk._fits", lambda *_: False)
        C = await coded.encode(A, coded.MDS(4, 3), c)
        D = await coded.encode(A, coded.MDS(4, 2), c)
        np.testing.assert_allclose(await c.compute(C @ np.ones(10)), A.sum(1))
        await async_poll_for(lambda: all(active(workers)))
        trim = {"dask-coded-trim"} if mapped else set()
        await async_poll_for(lambda: timers(*workers) == trim)
        del C
        await async_poll_for(lambda: len(s.extensions["dask-coded"].arrays) == 1)
        assert timers(*workers) == trim
        # Dask runs its own memory manager, and no other.
        assert sum(name.startswith("amm-") for name in s.periodic_callbacks) == 1
        del D
        await async_poll_for(lambda: not any(active(workers)))
        await async_poll_for(lambda: not timers(s, *workers))
        await async_poll_for(lambda: not tasks())
        # Channels that were closed because nobody needed them are no sign that a worker has left.
        assert all(Exchange.of(a).is_usable(b.address) for a in workers for b in workers)
        C = await coded.encode(A, coded.MDS(4, 3), c)
        np.testing.assert_allclose(await c.compute(C @ np.ones(10)), A.sum(1))

    test()
