"""Manners on a shared cluster: who uses no coded array notices nothing of the plugins."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from distributed import Client, Event, get_worker
from distributed.active_memory_manager import ActiveMemoryManagerPolicy, Suggestion
from distributed.utils_test import async_poll_for, gen_cluster, poll_for

import dask_coded as coded
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport import Exchange
from tests.processes import Processes

FOUR = {"client": True, "nthreads": [("127.0.0.1", 1, {"memory_limit": 2**36})] * 4}
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


@gen_cluster(**FOUR | {"config": {"coded.coordinator.timeout": "100ms"}})
async def test_a_result_that_is_kept_costs_nothing(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    found = c.compute(C @ np.ones(10))
    np.testing.assert_allclose(await found, A.sum(1))
    await async_poll_for(lambda: all(active(workers)))
    del C
    await async_poll_for(lambda: not s.extensions["dask-coded"].arrays)
    await async_poll_for(lambda: not any(active(workers)))
    await async_poll_for(lambda: not timers(s, *workers))
    np.testing.assert_allclose(await found, A.sum(1))


@gen_cluster(**FOUR)
async def test_tasks_of_others_cost_no_more_than_a_look(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    del C
    plugin = s.extensions["dask-coded"]
    await async_poll_for(lambda: not plugin.arrays and not s.tasks)
    with (
        patch.object(plugin.supervisor, "transition") as followed,
        patch.object(plugin.homes, "transition") as looked,
        patch.object(plugin.loops, "forget") as ended,
    ):
        assert await c.submit(sum, [1, 2]) == 3
        await async_poll_for(lambda: not s.tasks)
        assert not (followed.called or looked.called or ended.called)
        # With an array, transitions are followed.
        await coded.encode(A, coded.MDS(4, 3), c)
        assert followed.called
        assert looked.called


def add_policy(dask_scheduler):
    """Add a policy to Dask's memory manager that copies data whose keys begin with "own"."""

    class TwoCopies(ActiveMemoryManagerPolicy):
        def run(self):
            for ts in self.manager.scheduler.tasks.values():
                if str(ts.key).startswith("own") and len(ts.who_has or ()) == 1:
                    yield Suggestion("replicate", ts)

    dask_scheduler.extensions["amm"].add_policy(TwoCopies())


def take_policy(dask_scheduler):
    """Return the policies of Dask's memory manager, and remove the one that was added."""
    manager = dask_scheduler.extensions["amm"]
    found = sorted(type(policy).__name__ for policy in manager.policies)
    manager.policies = {p for p in manager.policies if type(p).__name__ != "TwoCopies"}
    return found


def managers(dask_scheduler):
    return sum(name.startswith("amm-") for name in dask_scheduler.periodic_callbacks)


def seen_by_others(address, workers, tasks):
    """What a client sees that uses no coded array."""
    seen = {}
    with Client(address, set_as_default=False) as client:

        def copies(futures):
            return [len(client.who_has([future])[future.key]) for future in futures]

        def holders(futures):
            return len({address for held in client.who_has(futures).values() for address in held})

        seen["managers"] = client.run_on_scheduler(managers)
        client.amm.stop()  # it runs when this says so
        squares = client.gather(client.map(lambda i: i * i, range(tasks), pure=False))
        seen["right"] = squares == [i * i for i in range(tasks)]
        total = client.submit(sum, client.map(abs, range(1000), pure=False))
        seen["total"] = total.result()
        seen["error"] = repr(client.submit(divmod, 1, 0).exception())
        blocks = [np.full(20_000, float(i)) for i in range(8)]
        data = client.scatter(blocks, workers=workers[:1])
        seen["gathered"] = [block.sum() for block in client.gather(data)]
        seen["scattered"] = holders(data)
        client.rebalance(data)
        seen["rebalanced"] = holders(data)
        client.replicate(data[:2], n=3)
        seen["replicated"] = copies(data[:2])
        client.amm.run_once()
        poll_for(lambda: copies(data[:2]) == [1, 1])
        own = client.submit(np.ones, 5, key=f"own-{uuid.uuid4()}")
        own.result()
        client.run_on_scheduler(add_policy)
        client.amm.run_once()
        poll_for(lambda: copies([own]) == [2])
        client.amm.run_once()  # Dask's policy drops the copy
        poll_for(lambda: copies([own]) == [1])
        seen["policies"] = client.run_on_scheduler(take_policy)
        client.amm.start()
    return seen


def running(dask_scheduler=None, dask_worker=None):
    return timers(dask_scheduler or dask_worker)


def rebalance_by_data(dask_scheduler):
    """Have the scheduler balance what it knows of, not the memory of the processes."""
    dask_scheduler.MEMORY_REBALANCE_MEASURE = "managed"


def arrays(dask_scheduler):
    return len(dask_scheduler.extensions["dask-coded"].arrays)


@pytest.mark.parametrize("tasks", [400, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)  # thousands of tasks
def test_others_see_the_same_with_and_without_our_plugins(processes, tasks):
    workers, client = processes.add(4, options=("--memory-limit", "0")), processes.client
    address = client.scheduler.address
    client.run_on_scheduler(rebalance_by_data)
    before = seen_by_others(address, workers, tasks)
    assert (before["scattered"], before["rebalanced"], before["managers"]) == (1, 4, 1)
    assert before["policies"] == ["ReduceReplicas", "TwoCopies"]
    C = coded.encode(A, coded.MDS(4, 3), client)
    assert seen_by_others(address, workers, tasks) == before
    np.testing.assert_allclose(client.compute(C @ np.ones(10)).result(), A.sum(1))
    C.encoded.release()
    del C
    poll_for(lambda: not client.run_on_scheduler(arrays))
    assert seen_by_others(address, workers, tasks) == before
    poll_for(lambda: not client.run_on_scheduler(running))
    poll_for(lambda: not any(client.run(running).values()))


def loop(operator):
    """Return where the loop runs, once it may end."""
    Event("begun").set()
    Event("end").wait()
    return get_worker().address


def status_of(address, dask_scheduler):
    return dask_scheduler.workers[address].status.name


def place_of(client, key):
    """Where a task runs; None if it runs nowhere."""

    def find(dask_scheduler):
        ts = dask_scheduler.tasks.get(key)
        return ts.processing_on.address if ts and ts.processing_on else None

    return client.run_on_scheduler(find)


def seen_of_a_silent_worker(
    processes: Processes, silent: str, until: Callable[[], object]
) -> dict[str, object]:
    """What a client sees that uses no coded array while a worker with its results is stopped."""
    seen: dict[str, object] = {}
    busy = next(a for a in processes.client.ncores() if a != silent)
    address = processes.client.scheduler.address
    with (
        Client(address, set_as_default=False) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        data = client.submit(os.urandom, 1000, workers=[silent], pure=False)
        before = data.result()
        with processes.stopped(silent):
            gather = threads.submit(client.gather, data, direct=False)
            used = client.submit(len, data, workers=[busy])
            late = client.submit(abs, -7, workers=[silent], pure=False)
            poll_for(lambda: place_of(client, late.key))
            until()
            seen["status"] = client.run_on_scheduler(partial(status_of, silent))
            seen["place"] = place_of(client, late.key) == silent
            seen["done"] = [used.done(), gather.done()]
        seen["same"] = gather.result() == before  # it was not computed again
        seen["used"], seen["late"] = used.result(), late.result()
    return seen


def test_others_see_a_silent_worker_as_without_our_plugins(processes):
    """A coordinator runs there, which is taken over."""
    workers, client = processes.add(4), processes.client
    before = seen_of_a_silent_worker(processes, workers[0], lambda: None)
    assert (before["status"], before["done"]) == ("running", [False, False])
    C = coded.encode(A, coded.MDS(4, 3), client)
    future = coded.submit(loop, C, client=client)
    Event("begun", client=client).wait()
    silent = place_of(client, future.key)

    def taken_over() -> bool:
        return place_of(client, future.key) not in (None, silent)

    assert seen_of_a_silent_worker(processes, silent, lambda: poll_for(taken_over)) == before
    Event("end", client=client).set()
    assert future.result() != silent


WITHOUT = """
import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "dask_coded"]:
    del sys.modules[name]
sys.modules["dask_coded"] = None
"""


def test_a_worker_without_the_package_joins_a_cluster_in_which_others_use_it(processes, tmp_path):
    """Workers unpickle the scheduler's plugins before they do anything else."""
    processes.add(3)
    client = processes.client
    C = coded.encode(A, coded.MDS(3, 2), client)
    preload = tmp_path / "without.py"
    preload.write_text(WITHOUT)
    (address,) = processes.add(1, options=("--preload", str(preload)))
    assert client.submit(abs, -1, workers=[address], pure=False).result() == 1
    np.testing.assert_allclose(client.compute(C @ np.ones(10)).result(), A.sum(axis=1))
    with pytest.raises(coded.ClusterUnfitError, match=f"Worker {address} has no dask_coded"):
        coded.encode(A, coded.MDS(4, 3), client)
