"""Copies of pieces come and go as Dask moves data, but each piece stays on its own worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from distributed import Event, Worker
from distributed.active_memory_manager import ReduceReplicas
from distributed.core import Status
from distributed.utils_test import async_poll_for, gen_cluster, poll_for

import dask_coded as coded
from dask_coded.runtime.answers import Waiting
from dask_coded.runtime.scheduler import recipes
from dask_coded.runtime.worker.disk import Disk

pytestmark = pytest.mark.versions

A = np.random.default_rng(0).standard_normal((120, 10))


def holders(s, C):
    """The addresses of the workers that hold each piece."""
    return [{ws.address for ws in s.tasks[key].who_has or ()} for key in C.encoded.spec.keys]


@pytest.mark.parametrize("fullest", [0, 1])
def test_the_memory_manager_drops_copies_but_leaves_pieces_where_they_belong(fullest):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(4, 3), c)
        s.extensions["amm"].stop()  # it runs when the test says so
        home = C.encoded.workers
        for piece in (0, 1):
            (future,) = [f for f in C.encoded.futures if f.key == C.encoded.spec.keys[piece]]
            await c.replicate([future], workers=list(home))
        # It drops copies on the worker with the most memory in use first.
        for ws in s.workers.values():
            ws.metrics["memory"] = 2**30 * (1 + (ws.address == home[fullest]))
        s.extensions["amm"].run_once()
        await async_poll_for(lambda: holders(s, C) == [{a} for a in home], timeout=60)
        # Dask's own policy is left alone.
        other = await c.scatter(np.ones(5), broadcast=True)
        s.extensions["amm"].run_once()
        await async_poll_for(lambda: len(s.tasks[other.key].who_has) == 1, timeout=60)
        assert [type(p) for p in s.extensions["amm"].policies] == [ReduceReplicas]

    test()


def held_up(*blocks):
    """Use pieces until an event is set."""
    Event("go").wait()
    return sum(block.shape[0] for block in blocks)


def copies_at(s, C, address):
    """Whether a worker has copies of all pieces."""
    return all(address in found for found in holders(s, C))


@pytest.mark.parametrize("mapped", [False, True])
def test_pieces_stay_at_home_while_a_task_uses_them_elsewhere(mapped, monkeypatch):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1, {"memory_limit": 2**36})] * 4)
    async def test(c, s, *workers):
        if mapped:
            monkeypatch.setattr("dask_coded.runtime.worker.disk.Disk._fits", lambda *_: False)
        C = await coded.encode(A, coded.MDS(4, 2), c)
        manager, home, keys = s.extensions["amm"], C.encoded.workers, C.encoded.spec.keys
        manager.stop()  # it runs when the test says so
        at = {w.address: w for w in workers}
        task = c.submit(held_up, *C.encoded.futures, workers=[home[3]])
        await async_poll_for(lambda: copies_at(s, C, home[3]), timeout=60)
        for _ in range(3):
            before = [at[address].data[key] for address, key in zip(home, keys, strict=True)]
            manager.run_once()  # it keeps the copies where the task runs
            assert holders(s, C) == [{home[3]}] * 4
            await async_poll_for(lambda: holders(s, C) == [{a, home[3]} for a in home], timeout=60)
            for address, key, array in zip(home, keys, before, strict=True):
                assert at[address].data[key] is array
        await Event("go", client=c).set()
        assert await task == 4 * 60
        del task
        await async_poll_for(lambda: holders(s, C) == [{a} for a in home], timeout=60)
        await async_poll_for(lambda: not any(Disk.of(w)._held for w in workers), timeout=60)
        # No home holds a piece for longer than its array lives.
        assert await c.submit(held_up, *C.encoded.futures, key="again") == 4 * 60
        C.encoded.release()
        await async_poll_for(
            lambda: not any(Disk.of(w)._held or w.data for w in workers), timeout=60
        )

    test()


def memory_manager(dask_scheduler):
    return dask_scheduler.extensions["amm"].run_once()


@pytest.mark.parametrize(
    "when", ["while it uses them", pytest.param("afterwards", marks=pytest.mark.long)]
)
def test_a_worker_that_has_used_all_pieces_is_killed(processes, when):
    processes.add(4)
    client, x = processes.client, np.arange(10.0)
    C = coded.encode(A, coded.MDS(4, 3), client)
    used = C.encoded.workers[3]
    task = client.submit(held_up, *C.encoded.futures, workers=[used], allow_other_workers=True)
    poll_for(lambda: all(used in a for a in client.who_has(C.encoded.futures).values()))
    for _ in range(3):
        client.run_on_scheduler(memory_manager)
    if when == "afterwards":
        Event("go", client=client).set()
        assert task.result() == 160
    processes.kill(used)
    np.testing.assert_allclose(client.compute(C @ x).result(), A @ x)
    Event("go", client=client).set()
    assert task.result() == 160
    # Only the piece that was at home there is made again.
    poll_for(lambda: all(client.who_has(C.encoded.futures).values()))
    events = [event for _, event in client.get_events("dask-coded")]
    made = [event["piece"] for event in events if event["action"] == "made"]
    assert made == [C.encoded.workers.index(used)]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 6)
async def test_pieces_of_a_retired_worker_go_to_workers_without_one(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    used = set(C.encoded.workers)
    # Dask moves its data to the worker that uses the least memory, which has a piece already.
    for _ in range(2):
        gone, least = sorted(used & set(s.workers))[:2]
        for ws in s.workers.values():
            ws.metrics["memory"] = 0 if ws.address == least else 2**30
        await c.retire_workers([gone])
        await async_poll_for(lambda: len(set().union(*holders(s, C))) == 4, timeout=60)
        assert gone not in set().union(*holders(s, C))
    # The code tolerates the loss of any two workers again.
    for address in sorted(set().union(*holders(s, C)))[:2]:
        await next(w for w in workers if w.address == address).close()
    x = np.arange(10.0)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 6)
async def test_copies_of_pieces_of_a_worker_that_will_close_are_kept(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    gone = C.encoded.workers[:2]
    await c.retire_workers(list(gone), close_workers=False, remove=False)
    s.extensions["dask-coded"].homes._homecoming._look()
    await c.run(lambda: None)  # workers have dropped what they were told to drop
    for worker in workers:
        if worker.address in gone:
            await worker.close()
    x = np.arange(10.0)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_paused_worker_keeps_its_pieces_and_computes_on_them(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 4), c)  # every piece is needed
    paused = next(w for w in workers if w.address == C.encoded.workers[0])
    paused.periodic_callbacks["memory_monitor"].stop()
    paused.status = Status.paused
    await async_poll_for(lambda: s.workers[paused.address].status == Status.paused, timeout=60)
    before, x = holders(s, C), np.arange(10.0)
    product = await c.compute(C @ x, workers=[C.encoded.workers[1]])
    np.testing.assert_allclose(product, A @ x)
    assert holders(s, C) == before


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_piece_that_cannot_come_home_is_looked_for_until_the_array_is_gone(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    plugin = s.extensions["dask-coded"]
    # A piece that cannot come home is looked at again and again.
    paused = next(w for w in workers if w.address == C.encoded.workers[1])
    paused.periodic_callbacks["memory_monitor"].stop()
    paused.status = Status.paused
    await async_poll_for(lambda: s.workers[paused.address].status == Status.paused, timeout=60)
    plugin.homes._pin(C.encoded.spec.keys[0], paused.address)
    await async_poll_for(lambda: plugin.homes._homecoming._timer is not None, timeout=60)
    C.encoded.release()
    del C
    await async_poll_for(lambda: not plugin.arrays, timeout=60)
    assert plugin.homes._homecoming._timer is None
    assert not plugin.homes._homecoming._due


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_pieces_that_dask_moves_come_home(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    s.extensions["amm"].stop()
    at_home = [{a} for a in C.encoded.workers]
    await c.replicate(list(C.encoded.futures))
    await async_poll_for(lambda: holders(s, C) == at_home, timeout=60)
    # A task leaves copies on its worker; Dask's policy then drops the originals.
    await c.compute(C, workers=[C.encoded.workers[3]])
    s.extensions["amm"].run_once()
    await c.compute(C @ np.ones(10))
    await async_poll_for(lambda: holders(s, C) == at_home, timeout=60)
    for ws in s.workers.values():
        ws.metrics["memory"] = 2**20 * (1 + 50 * (ws.address == C.encoded.workers[0]))
    await c.rebalance()
    await async_poll_for(lambda: holders(s, C) == at_home, timeout=60)


def hold_rows(workers):
    """Let no worker send rows of its pieces until the event that is returned is set."""
    go = asyncio.Event()
    for worker in workers:

        async def rows(send=worker.handlers["coded_rows"], **where):
            await go.wait()
            return await send(**where)

        worker.handlers["coded_rows"] = rows
    return go


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 5)
async def test_a_worker_that_joins_before_a_lost_piece_is_rebuilt_takes_over_later(c, s, *workers):
    C = await coded.encode(A, coded.MDS(5, 3), c)
    go = hold_rows(workers)
    await next(w for w in workers if w.address == C.encoded.workers[4]).close()
    async with Worker(s.address, nthreads=1) as late:
        await async_poll_for(
            lambda: late.address in s.extensions["dask-coded"].versions, timeout=60
        )
        go.set()
        await async_poll_for(lambda: len(set().union(*holders(s, C))) == 5, timeout=60)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_tasks_run_on_a_worker_while_it_waits_for_the_sources_of_a_piece(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    go = hold_rows(workers)
    await workers[1].close()
    lost = [ts for ts in s.tasks.values() if not ts.who_has]
    await async_poll_for(lambda: all(ts.processing_on for ts in lost), timeout=60)
    (ts,) = lost
    x = np.arange(10.0)
    product = c.compute(C @ x, workers=[ts.processing_on.address])
    np.testing.assert_allclose(await product, A @ x)
    go.set()
    # Dask 2024.12 may not end a worker that is about to make something.
    await async_poll_for(lambda: ts.who_has, timeout=60)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 5)
async def test_a_lost_piece_is_rebuilt_from_pieces_of_workers_that_are_not_slow(c, s, *workers):
    C = await coded.encode(A, coded.MDS(5, 3), c)
    plugin, slow = s.extensions["dask-coded"], C.encoded.workers[0]
    plugin.speeds.record({a: 0.01 if a == slow else 1.0 for a in s.workers})
    recipe = (await plugin.recipes.sources(C.encoded.spec.id, 1))["answer"].data
    assert {key for key, *_ in recipe.sources} == {C.encoded.spec.keys[i] for i in (2, 3, 4)}
    # It is asked if the others do not suffice.
    recipe = (await plugin.recipes.sources(C.encoded.spec.id, 1, avoid=C.encoded.workers[2:3]))[
        "answer"
    ].data
    assert {key for key, *_ in recipe.sources} == {C.encoded.spec.keys[i] for i in (0, 3, 4)}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_no_piece_waits_for_a_worker_that_is_paused(when):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 5)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(4, 3), c)
        gone = C.encoded.workers[0]
        # The lost piece would go to the worker without one.
        (free,) = [w for w in workers if w.address not in C.encoded.workers]
        free.periodic_callbacks["memory_monitor"].stop()  # it would end the pause
        if when == "before":
            free.status = Status.paused
            await async_poll_for(
                lambda: s.workers[free.address].status == Status.paused, timeout=60
            )
        go = hold_rows(workers)
        await next(w for w in workers if w.address == gone).close()
        (ts,) = [s.tasks[key] for key in C.encoded.spec.keys if not s.tasks[key].who_has]
        await async_poll_for(lambda: ts.processing_on is not None, timeout=60)
        assert (ts.processing_on.address == free.address) is (when == "meanwhile")
        if when == "meanwhile":
            free.status = Status.paused
            await async_poll_for(
                lambda: s.workers[free.address].status == Status.paused, timeout=60
            )
            s.transitions({ts.key: "released"}, stimulus_id="test")
            assert ts.state == "no-worker"
        go.set()
        await async_poll_for(lambda: all(holders(s, C)), timeout=60)
        assert free.address not in set().union(*holders(s, C))

    test()


@pytest.mark.parametrize("silent", ["the one without a piece", "the one that has it"])
def test_no_piece_is_made_by_a_worker_that_is_silent(silent):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 5)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(4, 3), c)
        home, key = C.encoded.workers[0], C.encoded.spec.keys[0]
        (free,) = [w.address for w in workers if w.address not in C.encoded.workers]
        address = free if silent == "the one without a piece" else home
        (worker,) = [w for w in workers if w.address == address]
        worker.periodic_callbacks["heartbeat"].stop()  # it would end the silence
        s.extensions["dask-coded"].standings.suspect([address])
        if address == free:
            await next(w for w in workers if w.address == home).close()
        else:
            s.transitions({key: "released"}, stimulus_id="test")
        await async_poll_for(lambda: all(holders(s, C)), timeout=60)
        assert address not in holders(s, C)[0]

    test()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_no_block_to_encode_waits_for_a_worker_that_is_paused(c, s, *workers):
    def gated(block):
        Event("go").wait()
        return block

    source = da.from_array(A, chunks=-1).map_blocks(gated, meta=A[:0, :0])
    encoding = asyncio.ensure_future(coded.encode(source, coded.MDS(4, 3), c))
    await async_poll_for(lambda: any(ts.processing_on for ts in s.tasks.values()), timeout=60)
    busy = {ts.processing_on.address for ts in s.tasks.values() if ts.processing_on}
    plugin = s.extensions["dask-coded"]
    (state,) = plugin.arrays.values()
    pin = next(pin for key in state.sources if (pin := plugin.homes.home(key)) not in busy)
    paused = next(w for w in workers if w.address == pin)
    paused.periodic_callbacks["memory_monitor"].stop()  # it would end the pause
    paused.status = Status.paused
    await async_poll_for(lambda: s.workers[pin].status == Status.paused, timeout=60)
    await Event("go", client=c).set()
    C = await encoding
    np.testing.assert_allclose(await c.compute(C @ np.ones(10)), A.sum(1))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_copies_of_a_piece_stay_while_its_home_is_silent(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    plugin, home = s.extensions["dask-coded"], C.encoded.workers[0]
    (silent,) = [w for w in workers if w.address == home]
    silent.periodic_callbacks["heartbeat"].stop()  # it would end the silence
    plugin.standings.suspect([home])
    s.request_acquire_replicas(C.encoded.workers[1], [C.encoded.spec.keys[0]], stimulus_id="test")
    await async_poll_for(lambda: len(holders(s, C)[0]) == 2, timeout=60)
    plugin.homes._homecoming._look()
    assert await c.submit(lambda: 1, workers=C.encoded.workers[1]) == 1
    assert len(holders(s, C)[0]) == 2
    plugin.standings.heard(home)
    await async_poll_for(lambda: holders(s, C)[0] == {home}, timeout=60)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_piece_that_comes_back_while_the_others_are_weighed_is_not_lost(
    c, s, *workers, monkeypatch
):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    found = s.extensions["dask-coded"].recipes
    spec = C.encoded.spec
    away, holders = {spec.keys[0]}, found._homes.holders
    monkeypatch.setattr(
        found._homes, "holders", lambda key, avoid=(): [] if key in away else holders(key, avoid)
    )

    async def offload(function, *args):
        away.clear()
        return function(*args)

    monkeypatch.setattr(recipes, "offload", offload)
    answer = await found.sources(spec.id, 3)
    assert isinstance(answer["answer"].data, Waiting)


SHORT_OF_MEMORY = {
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
}


@pytest.mark.parametrize("limit", [2**36, 10**5])
def test_a_worker_that_joins_takes_pieces_in_files_only_if_it_has_memory_for_them(
    limit, monkeypatch
):
    """Dask takes them to be small: it would send one as a whole, and the nanny end the worker."""

    @gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 1, {"memory_limit": 2**36})] * 4,
        config=SHORT_OF_MEMORY,
    )
    async def test(c, s, *workers):
        monkeypatch.setattr("dask_coded.runtime.worker.disk.Disk._fits", lambda *_: False)
        B = np.random.default_rng(1).standard_normal((1200, 50))
        C = await coded.encode(B, coded.MDS(4, 2), c)
        await workers[0].close()
        await async_poll_for(lambda: all(holders(s, C)), timeout=60)
        plugin, keys = s.extensions["dask-coded"], C.encoded.spec.keys
        async with Worker(s.address, nthreads=1, memory_limit=limit) as new:
            await async_poll_for(lambda: new.address in plugin.versions, timeout=60)
            homes = [plugin.homes.home(key) for key in keys]
            assert homes.count(new.address) == (limit == 2**36)
            await async_poll_for(lambda: holders(s, C) == [{a} for a in homes], timeout=60)
            np.testing.assert_allclose(await c.compute(C @ np.ones(50)), B @ np.ones(50))

    test()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_piece_that_is_too_large_for_its_worker_stays_where_it_is(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    homes, keys = s.extensions["dask-coded"].homes, C.encoded.spec.keys
    home, other = C.encoded.workers[:2]
    s.workers[other].memory_limit = 1000
    homes._pin(keys[0], other)
    await async_poll_for(lambda: homes.home(keys[0]) == home, timeout=60)
    assert holders(s, C)[0] == {home}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_piece_waits_while_its_worker_uses_its_memory(c, s, *workers, monkeypatch):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    homes, keys = s.extensions["dask-coded"].homes, C.encoded.spec.keys
    home, other = C.encoded.workers[:2]
    full = SimpleNamespace(optimistic=0.9 * s.workers[other].memory_limit)
    looked = []
    can_come = homes._homecoming._fits
    homes._homecoming._fits = lambda *args: looked.append(can_come(*args)) or looked[-1]
    with monkeypatch.context() as patch:
        patch.setattr(type(s.workers[other]), "memory", full)
        homes._pin(keys[0], other)
        await async_poll_for(lambda: looked, timeout=60)
        assert not any(looked)
        assert holders(s, C)[0] == {home}
    await async_poll_for(lambda: holders(s, C)[0] == {other}, timeout=60)
    assert homes.home(keys[0]) == other
