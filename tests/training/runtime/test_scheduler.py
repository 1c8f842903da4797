"""The scheduler's part in trainings whose leader is taken over."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from distributed import Event, get_worker, wait
from distributed.core import Status
from distributed.protocol.pickle import dumps
from distributed.utils import sync
from distributed.utils_test import async_poll_for, gen_cluster
from distributed.worker import thread_state

import dask_coded as coded
from dask_coded.aggregation import Star
from dask_coded.compression import EXACT
from dask_coded.runtime.answers import Holders, reply
from dask_coded.runtime.client.install import install
from dask_coded.runtime.scheduler import extension
from dask_coded.training import SGD, Synchronous
from dask_coded.training.batches import Batches
from dask_coded.training.replica import Model
from dask_coded.training.runtime import leader, shards
from dask_coded.training.runtime.link import Link
from dask_coded.training.runtime.memberships import training_plugin
from dask_coded.training.runtime.scheduler import TrainingSchedulerPlugin
from dask_coded.training.runtime.shards import fetch_rows
from dask_coded.training.runtime.spec import Blocks, Training
from dask_coded.transport import rows
from dask_coded.transport.rows import RowsGoneError
from tests.clocks import look, set_timeouts

THREE = {
    "client": True,
    "nthreads": [("", 1)] * 3,
    "config": {"coded.coordinator.timeout": "1 day"},  # its clock is turned by hand
}


def confirm():
    """Confirm to be the leader before and after the test goes on."""
    plugin = training_plugin(get_worker())
    link = Link(plugin, None, plugin.exchange.attempt(thread_state.key))
    address = get_worker().address
    link.confirm()
    Event(f"started-{address}").set()
    Event(f"go-{address}").wait()
    try:
        link.confirm()
    except CancelledError:
        Event("refused").set()
        raise
    return address


def lead(messages):
    """Return what a leader is told about other workers, in so many messages."""
    plugin, key, told = training_plugin(get_worker()), thread_state.key, SimpleQueue()
    plugin.leaders[plugin.exchange.attempt(key)] = told.put
    coded = {"key": key, "worker": get_worker().address, "allowed": None, "round": 0}
    sync(get_worker().loop, get_worker().scheduler.coded_candidates, **coded)
    Event("started").set()
    return [
        (type(found).__name__, found.address) for found in (told.get() for _ in range(messages))
    ]


def take(allowed):
    """Take some workers for a training until an event is set."""
    worker = get_worker()
    coded = {"key": thread_state.key, "worker": worker.address, "allowed": allowed, "round": 0}
    sync(worker.loop, worker.scheduler.coded_candidates, **coded)
    Event("started").set()
    Event("over").wait()


@gen_cluster(**THREE)
async def test_adaptive_scaling_leaves_the_workers_of_a_training_alone(c, s, a, b, other):
    await install(c, TrainingSchedulerPlugin())
    taken = [a.address, b.address]
    future = coded.submit(take, taken, client=c, workers=a.address)
    await Event("started", client=c).wait()
    assert s.workers_to_close(n=3) == [other.address]
    assert await c.scheduler.coded_wanted() == 2
    await b.close()  # it may be counted no more
    assert await c.scheduler.coded_wanted() == 1
    await Event("over", client=c).set()
    await future
    assert len(s.workers_to_close(n=2)) == 2
    assert await c.scheduler.coded_wanted() == 0


@gen_cluster(**THREE)
async def test_a_leader_that_was_taken_over_is_refused(c, s, *workers):
    await install(c, TrainingSchedulerPlugin())
    future = coded.submit(confirm, client=c)

    async def running():
        def ready():
            return future.key in s.tasks and s.tasks[future.key].processing_on

        await async_poll_for(ready, timeout=60)
        address = s.tasks[future.key].processing_on.address
        await Event(f"started-{address}", client=c).wait()
        return address

    old = await running()
    look(s, 6)
    new = await running()
    assert new != old
    await Event(f"go-{old}", client=c).set()
    await Event("refused", client=c).wait()
    await Event(f"go-{new}", client=c).set()
    assert await future == new


@gen_cluster(client=True, nthreads=[("", 1)] * 3, timeout=60)
async def test_a_training_whose_result_is_lost_with_its_worker_runs_again(c, s, *workers):
    await install(c, TrainingSchedulerPlugin())
    X, holder = np.eye(4), workers[1].address
    blocks = Blocks(("rows",), (4,))
    rows = await c.scatter({"rows": X}, workers=[holder])

    def squares(w, samples, targets):
        error = samples @ w - targets[:, 0]
        return error @ error / 2, samples.T @ error

    model = Model(squares, np.zeros(4), SGD(0.1), 4, None, 0, None, ((4,),))
    training = Training(
        id="training",
        model=dumps(model),
        batches=partial(Batches, 4, batch_size=None, seed=0),
        samples=blocks,
        targets=blocks,
        parameters=4,
        aggregation=Star(),
        codec=EXACT,
        remembers=False,
        schedule=Synchronous(),
        first=0,
        steps=3,
    )
    leaders = [w.address for w in workers if w.address != holder]
    future = coded.submit(leader.lead, training, coded.Loop(), client=c, workers=leaders)
    await wait(future)
    plugins = {w.address: training_plugin(w) for w in workers}
    (ws,) = s.tasks[future.key].who_has
    others = [p for address, p in plugins.items() if address != ws.address]
    await async_poll_for(lambda: not any(p.trainers for p in others), timeout=60)
    await next(w for w in workers if w.address == ws.address).close()
    assert (await future).version == 3
    del rows


@gen_cluster(**THREE)
async def test_no_worker_takes_part_in_a_training_that_was_cancelled_before_it_began(
    c, s, *workers
):
    await install(c, TrainingSchedulerPlugin())
    plugin = s.extensions["dask-coded-training"]
    assert plugin.candidates("cancelled", workers[0].address, None, 0) == []
    assert not plugin._involved


@gen_cluster(**THREE)
async def test_a_worker_that_is_stopped_before_it_has_the_plugin_takes_no_part(
    c, s, *workers, monkeypatch
):
    set_timeouts(monkeypatch, 0.04, extension)
    monkeypatch.setattr(extension, "heartbeat_interval", lambda workers: 0.01)
    await install(c)
    stopped, answer, goes_on = workers[0], workers[0].handlers["plugin-add"], asyncio.Event()

    async def wait_and_answer(**kwargs):
        await goes_on.wait()
        return await answer(**kwargs)

    stopped.handlers["plugin-add"] = wait_and_answer
    stopped.periodic_callbacks["heartbeat"].stop()
    await install(c, TrainingSchedulerPlugin())
    plugin, others = s.extensions["dask-coded-training"], {w.address for w in workers[1:]}
    future = c.submit(int)
    await future

    def candidates():
        return set(plugin.candidates(future.key, workers[1].address, None, 0))

    # Others may still be getting the plugin, because it waits as briefly for them.
    await async_poll_for(lambda: candidates() == others)
    goes_on.set()
    await async_poll_for(lambda: len(candidates()) == len(workers))


@gen_cluster(**THREE)
async def test_a_worker_that_pauses_or_retires_is_still_asked_for_its_replica(c, s, *workers):
    await install(c, TrainingSchedulerPlugin())
    plugin = s.extensions["dask-coded-training"]
    future = c.submit(int)
    await future
    first, second, third = (w.address for w in workers)

    def candidates(allowed=None):
        return set(plugin.candidates(future.key, first, allowed, 0))

    assert candidates([first, second]) == {first, second}
    for address, status in ((first, "paused"), (second, "closing_gracefully"), (third, "paused")):
        s.handle_worker_status_change(status, address, "test")
    assert candidates() == {first, second}  # the third knows nothing of the training
    s.extensions["dask-coded"].standings.suspect([first])
    assert candidates() == {second}


@gen_cluster(**THREE)
async def test_a_block_that_only_a_silent_worker_holds_is_computed_again(c, s, *workers):
    await install(c, TrainingSchedulerPlugin())
    block = c.persist(da.ones((4, 2), chunks=-1))
    await wait(block)
    (key,) = block.__dask_keys__()[0]
    ts = s.tasks[key]
    (holder,) = ts.who_has
    plugin = s.extensions["dask-coded-training"]
    assert plugin.holders(key)["answer"].data.addresses == (holder.address,)
    s.extensions["dask-coded"].standings.suspect([holder.address])
    assert plugin.holders(key)["answer"].data.addresses == ()
    await async_poll_for(lambda: ts.state == "memory", timeout=60)
    assert holder not in ts.who_has
    np.testing.assert_array_equal(await c.compute(block), np.ones((4, 2)))


@gen_cluster(**THREE)
async def test_a_block_that_cannot_be_computed_again_is_left_to_its_silent_worker(c, s, a, *others):
    await install(c, TrainingSchedulerPlugin())
    source = await c.scatter(np.ones((4, 2)), workers=[a.address])
    block, gone = c.submit(np.negative, source, workers=[a.address]), source.key
    await wait(block)
    del source
    await async_poll_for(lambda: gone not in s.tasks, timeout=60)
    plugin = s.extensions["dask-coded-training"]
    s.extensions["dask-coded"].standings.suspect([a.address])
    assert plugin.holders(block.key)["answer"].data.addresses == (a.address,)
    assert s.tasks[block.key].state == "memory"


@gen_cluster(**THREE)
async def test_a_block_whose_source_stays_on_a_silent_worker_is_left_there(c, s, a, b, *others):
    await install(c, TrainingSchedulerPlugin())
    source = await c.scatter(np.ones((4, 2)), workers=[b.address])
    block = c.submit(np.negative, source, workers=[a.address], allow_other_workers=True)
    await wait(block)
    s.remove_replica(s.tasks[source.key], s.workers[a.address])
    plugin = s.extensions["dask-coded-training"]
    for address in (a.address, b.address):
        s.extensions["dask-coded"].standings.suspect([address])
    assert plugin.holders(block.key)["answer"].data.addresses == (a.address,)
    assert s.tasks[block.key].state == "memory"


@gen_cluster(**THREE)
async def test_pieces_on_silent_workers_are_made_again_only_if_the_others_suffice(c, s, *workers):
    await install(c, TrainingSchedulerPlugin())
    A = np.arange(24.0).reshape(12, 2)
    plugin = s.extensions["dask-coded-training"]
    for k, again in ((3, False), (2, True)):
        C = await coded.encode(A, coded.MDS(3, k), c)
        key, holder = C.encoded.spec.keys[0], C.encoded.workers[0]
        found = plugin.holders(key, avoid=[holder])["answer"].data
        assert found.addresses == (() if again else (holder,))
        await async_poll_for(lambda key=key: s.tasks[key].state == "memory", timeout=60)
        np.testing.assert_allclose(await c.compute(C @ np.ones(2)), A.sum(axis=1))


@gen_cluster(**THREE)
async def test_a_block_is_computed_again_where_nothing_fetches_it(c, s, a, b, *others):
    """From a worker that a trainer finds silent before the scheduler does."""
    await install(c, TrainingSchedulerPlugin())
    plugin, over = s.extensions["dask-coded-training"], asyncio.Event()
    block = c.submit(np.ones, 3, workers=[a.address], allow_other_workers=True, key="block")
    await wait(block)

    async def get_data(comm, get=a.handlers["get_data"], **kwargs):
        await over.wait()
        return await get(comm, **kwargs)

    a.handlers["get_data"] = get_data
    user = c.submit(np.sum, block, workers=[b.address])
    await async_poll_for(lambda: s.workers[b.address].processing, timeout=60)
    assert plugin.holders(block.key, avoid=[a.address])["answer"].data.addresses == ()
    assert plugin._coded.placing.waiting == {a.address: {"block": {b.address}}}
    assert s.tasks["block"].worker_restrictions.isdisjoint({a.address, b.address})
    over.set()
    assert await user == 3.0
    await async_poll_for(lambda: not plugin._coded.placing.waiting, timeout=60)


@gen_cluster(**THREE)
async def test_scattered_data_that_are_lost_end_the_training(c, s, a, b, *others):
    await install(c, TrainingSchedulerPlugin())
    held = await c.scatter({"rows": np.eye(4)}, workers=[a.address])
    assert held["rows"].key == "rows"
    await a.close()
    with pytest.raises(coded.CodedDataLostError, match="scattered"):
        await fetch_rows(b, Blocks(("rows",), (4,)), 0, 4, set())


def first(*needed):
    """Return a block, the first time only."""
    if Event("read").is_set():
        raise OSError("the file is gone")
    return np.ones((4, 2))


@pytest.mark.parametrize("depends", [False, True])
def test_a_block_that_fails_to_be_computed_again_says_why(depends):
    @gen_cluster(**THREE)
    async def run(c, s, a, b, *others):
        await install(c, TrainingSchedulerPlugin())
        block = c.submit(first, workers=[a.address], allow_other_workers=True, key="first")
        if depends:
            block = c.submit(np.negative, block, workers=[a.address], allow_other_workers=True)
        await wait(block)
        await Event("read", client=c).set()
        await a.close()
        blocks = Blocks((block.key,), (4,))
        with pytest.raises(coded.CodedDataLostError, match=r"'first' has failed.*the file is gone"):
            await fetch_rows(b, blocks, 0, 4, set())

    run()


def block_of(name, *needed):
    """Return a block once an event of this name is set."""
    Event(name).wait()
    return np.ones((4, 2))


@gen_cluster(**THREE)
async def test_a_block_that_a_silent_worker_computes_is_computed_elsewhere(c, s, a, *others):
    await install(c, TrainingSchedulerPlugin())
    plugin = s.extensions["dask-coded-training"]
    needed = c.submit(block_of, "needed", workers=[a.address], allow_other_workers=True, key="n")
    block = c.submit(block_of, "block", needed, workers=[a.address], allow_other_workers=True)
    await async_poll_for(lambda: "n" in s.tasks and s.tasks["n"].state == "processing")

    def place():
        (ws,) = [ws for ws in s.workers.values() if ws.processing]
        return ws

    for name in ("needed", "block"):
        waited = []
        for _ in range(2):
            # It may only be busy, and is given more time on the next worker.
            on, ticks = place(), 0
            while place() is on:
                ticks += 1
                look(s)
                for address in set(s.workers) - {on.address}:
                    plugin._coded.supervisor.answered(address)
                plugin._coded.standings.suspect([on.address])
                assert plugin.holders(block.key)["answer"].data.addresses == ()
            waited.append(ticks)
        assert waited[0] < waited[1]
        await Event(name).set()
        if name == "needed":
            await async_poll_for(lambda: s.tasks[block.key].state == "processing")
            # A new run begins where all workers answer.
            plugin._coded.supervisor.answered(on.address)
    np.testing.assert_array_equal(await block, np.ones((4, 2)))


def test_rows_lie_in_memory_alike_however_their_blocks_do():
    """A gradient has other bits if they do not."""
    columns = np.asfortranarray(np.ones((4, 3)))
    for parts in ([columns], [columns, columns], [columns, columns.copy(order="C")]):
        assert shards._stacked(parts).flags.c_contiguous


@gen_cluster(**THREE)
async def test_blocks_are_computed_again_while_the_worker_that_holds_them_is_stopped(
    c, s, a, b, *others, monkeypatch
):
    set_timeouts(monkeypatch, 0.5, rows)
    await install(c, TrainingSchedulerPlugin())
    X = np.arange(24.0).reshape(12, 2)
    array = c.persist(da.from_array(X, chunks=(2, -1)), workers=[a.address])
    await wait(array)
    keys = tuple(key for (key,) in array.__dask_keys__())
    asked, avoid = [], set()

    async def stopped(**where):
        asked.append(where)
        await asyncio.Event().wait()

    a.handlers["coded_rows"] = stopped
    blocks = Blocks(keys, (2,) * 6)
    # Where the blocks are allowed to be does not matter for what is fetched.
    s.set_restrictions({key: {others[0].address} for key in keys})
    np.testing.assert_array_equal(await fetch_rows(b, blocks, 1, 11, avoid), X[1:11])
    assert avoid == {a.address}
    assert len({where["key"] for where in asked}) == 1  # the other blocks were not asked for there


@pytest.mark.parametrize("kind", ["bsr", "coo", "dia"])
def test_rows_of_a_sparse_block_of_any_format_on_this_worker(kind):
    block = getattr(scipy.sparse, f"{kind}_matrix")(np.eye(4))
    worker = SimpleNamespace(data={"rows": block}, extensions={})
    found = asyncio.run(fetch_rows(worker, Blocks(("rows",), (4,)), 1, 3, set()))
    np.testing.assert_array_equal(found.toarray(), np.eye(4)[1:3])


def test_a_block_that_is_computed_again_on_a_worker_that_was_silent_is_fetched_there(monkeypatch):
    asked, answers = [], [("a",), (), ("a",)]

    async def holders(key, avoid):
        asked.append(avoid)
        return reply(Holders(answers[len(asked) - 1]))

    async def fetched(worker, address, *where):
        if len(asked) == 1:
            raise RowsGoneError(address, silent=True)
        return np.eye(2)

    async def ask(handler, **arguments):
        return (await handler(**arguments))["answer"].data

    monkeypatch.setattr(shards, "ask", ask)
    monkeypatch.setattr(shards, "_slices", fetched)
    scheduler = SimpleNamespace(coded_holders=holders)
    worker = SimpleNamespace(data={}, extensions={}, scheduler=scheduler)
    avoid = set()
    found = asyncio.run(fetch_rows(worker, Blocks(("rows",), (2,)), 0, 2, avoid))
    np.testing.assert_array_equal(found, np.eye(2))
    assert asked == [[], ["a"], []]
    assert avoid == {"a"}


@gen_cluster(**THREE)
async def test_a_leader_is_told_of_workers_that_fall_silent_and_of_those_that_come(c, s, *workers):
    await install(c, TrainingSchedulerPlugin())
    plugin = s.extensions["dask-coded"]
    future = coded.submit(lead, 2, client=c)
    await Event("started", client=c).wait()
    leader = s.tasks[future.key].processing_on.address
    stopped, other = (w.address for w in workers if w.address != leader)
    # Messages go out when the test waits, so only these two are considered alive.
    for _ in range(12):
        look(s)
        for address in (leader, other):
            plugin.supervisor.answered(address)
    assert plugin.standings.suspects == {stopped}
    assert s.workers[stopped].status.name == "running"  # for all others
    # In fact it runs, and answers.
    assert await future == [("Silent", stopped), ("Available", stopped)]
    assert not plugin.standings.suspects


@gen_cluster(**THREE)
async def test_a_leader_is_told_when_a_worker_runs_again_that_was_paused_from_the_start(
    c, s, *workers
):
    await install(c, TrainingSchedulerPlugin())

    async def become(status):
        workers[0].status = status
        await async_poll_for(lambda: s.workers[workers[0].address].status == status, timeout=60)

    workers[0].periodic_callbacks["memory_monitor"].stop()  # it would end the pause
    await become(Status.paused)
    future = coded.submit(lead, 1, client=c)
    await Event("started", client=c).wait()
    await become(Status.running)
    assert await future == [("Available", workers[0].address)]
