"""Coordinators are placed well, watched and taken over, and their earlier runs have no effect. The
clock of the watch is turned by hand, so nothing here depends on time.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import patch

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Event, Worker, futures_of, get_worker, wait
from distributed.comm import CommClosedError
from distributed.core import Status
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster
from hypothesis import given
from hypothesis import strategies as st

import dask_coded as coded
from dask_coded.loop import Progress
from dask_coded.rounds.placement import not_slow
from dask_coded.runtime.answers import Over, RoundPlan
from dask_coded.runtime.messages import KeepState, StartRound, StateKept
from dask_coded.runtime.scheduler import supervisor as supervisor_module
from dask_coded.runtime.scheduler.placing import Limits, Placing
from dask_coded.runtime.spec import CodedTask
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport.messages import EndRun
from tests.clocks import DAY, clock_of, look

FOUR = {
    "client": True,
    "nthreads": [("", 1)] * 4,
    "timeout": 120,
    # The supervisor does not look by itself.
    "config": {"coded.coordinator.timeout": "1 day"},
}

A = np.random.default_rng(0).standard_normal((23, 7))
x = np.random.default_rng(1).standard_normal(7)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Have coordinators leave slow workers, as they do outside of tests."""
    monkeypatch.setattr(supervisor_module, "_SLOW", 0.25)


def plugin_of(s):
    return s.extensions["dask-coded"]


def fall_silent(s):
    """Let the timeout pass without an answer of any worker that is watched now."""
    look(s, 6)


def first_does_not_answer(workers):
    """Have that of the workers that is first asked for data answer nothing until an event.

    Returns the addresses of those that are asked, and the event.
    """
    asked, over = [], asyncio.Event()
    for worker in workers:

        async def get_data(comm, worker=worker, get=worker.handlers["get_data"], **kwargs):
            asked.append(worker.address)
            if asked[0] == worker.address:
                worker.stream_handlers["coded-ping"] = lambda: None
                worker.periodic_callbacks["heartbeat"].stop()
                await over.wait()
                worker.periodic_callbacks["heartbeat"].start()
            return await get(comm, **kwargs)

        worker.handlers["get_data"] = get_data
    return asked, over


def place(operator, rounds):
    """Return where the task runs, once the test allows that worker to go on."""
    address = get_worker().address
    Event(f"started-{address}").set()
    Event(f"go-{address}").wait()
    for _ in range(rounds):
        operator @ x
    return address


def place_with(operator, data):
    return place(operator, 0)


async def started(c, s, future) -> str:
    """Return the address of the worker on which a loop has started."""

    def processing() -> bool:
        return future.key in s.tasks and s.tasks[future.key].state == "processing"

    await async_poll_for(processing, timeout=60)
    address = s.tasks[future.key].processing_on.address
    await Event(f"started-{address}", client=c).wait()
    # The scheduler has learnt that the task has left the pool of threads.
    ws = s.workers[address]
    await async_poll_for(lambda: s.tasks[future.key] in ws.long_running, timeout=60)
    return address


async def gone(worker, key) -> None:
    """Wait until a worker has nothing of a task any more."""
    await async_poll_for(lambda: key not in worker.state.tasks, timeout=60)


# -- watched and taken over --------------------------------------------------------------------


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_silent_coordinator_is_taken_over_and_ends_first_or_last(first):
    @gen_cluster(**FOUR)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(4, 3), c)
        future = coded.submit(place, C, 0, client=c)
        old = await started(c, s, future)
        fall_silent(s)
        new = await started(c, s, future)
        assert new != old
        by_address = {w.address: w for w in workers}
        if first == "old":
            # It was only late. What it returns is not the result.
            await Event(f"go-{old}", client=c).set()
            await gone(by_address[old], future.key)
            assert s.tasks[future.key].state == "processing"
            await Event(f"go-{new}", client=c).set()
            assert await future == new
        else:
            await Event(f"go-{new}", client=c).set()
            assert await future == new
            await Event(f"go-{old}", client=c).set()
            await gone(by_address[old], future.key)
            assert await future == new
        (event,) = [e for _, e in s.get_events("dask-coded") if e["action"] == "take-over"]
        assert (event["worker"], event["taker"]) == (old, new)
        assert event["reason"].startswith("silent for")

    test()


@gen_cluster(**FOUR)
async def test_a_loop_that_was_taken_over_ends_where_its_next_round_starts(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 3, client=c)
    old = await started(c, s, future)
    fall_silent(s)
    new = await started(c, s, future)
    rounds = s.extensions["dask-coded"].speeds.rounds
    await Event(f"go-{old}", client=c).set()
    (worker,) = [w for w in workers if w.address == old]
    await gone(worker, future.key)
    assert s.extensions["dask-coded"].speeds.rounds == rounds
    await Event(f"go-{new}", client=c).set()
    assert await future == new


EVENTS: list[tuple[str, str]] = []


def place_again(operator):
    """As :func:`place`, and record where the algorithm has begun and ended."""
    EVENTS.append(("begun", get_worker().address))
    address = place(operator, 1)
    EVENTS.append(("ended", address))
    return address


@gen_cluster(**FOUR)
async def test_a_loop_that_comes_back_to_its_first_worker_begins_again_at_once(c, s, *workers):
    """Dask takes the thread of the first run for the third, but does not take its result."""
    EVENTS.clear()
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place_again, C, client=c)
    first = await started(c, s, future)
    fall_silent(s)
    second = await started(c, s, future)
    await async_poll_for(lambda: not plugin_of(s).standings.suspects)
    plugin_of(s).placing._fast_workers = lambda: {first}
    plugin_of(s).supervisor._take_over({s.tasks[future.key]: "is slow"})
    assert await started(c, s, future) == first
    for address in (first, second):
        await Event(f"go-{address}", client=c).set()
    assert await future == first
    assert [where for what, where in EVENTS if what == "begun"] == [first, second, first]
    assert [where for what, where in EVENTS if what == "ended"] == [first]


@gen_cluster(**FOUR)
async def test_a_lazy_round_in_flight_is_taken_over(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    exchanges = [worker_plugin(w).exchange for w in workers]
    held = []
    handlers = [exchange._handlers[StartRound] for exchange in exchanges]
    for exchange in exchanges:
        exchange._handlers[StartRound] = lambda *m, exchange=exchange: held.append((exchange, *m))
    future = c.compute(C @ x)
    await async_poll_for(lambda: len(held) >= 3, timeout=60)
    old = {message.attempt for _, message, _ in held}
    fall_silent(s)
    await async_poll_for(
        lambda: len({message.attempt for _, message, _ in held} - old) == 1, timeout=60
    )
    # The participants begin only now, with the messages of both runs.
    for exchange, handler in zip(exchanges, handlers, strict=True):
        exchange._handlers[StartRound] = handler
    for exchange, message, answer in held:
        exchange._handle(message, answer)
    np.testing.assert_allclose(await future, A @ x)
    reached = {exchange for exchange, message, _ in held if message.attempt not in old}
    plugins = [worker_plugin(w) for w in workers if worker_plugin(w).exchange in reached]
    assert not old & {job.start.attempt for plugin in plugins for job in plugin._jobs.values()}
    await async_poll_for(lambda: not any(worker_plugin(w)._rounds for w in workers), timeout=60)


@gen_cluster(**FOUR)
async def test_the_result_of_a_lazy_round_on_a_silent_worker_is_computed_again(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = c.compute(C @ x)
    await wait(future)
    (old,) = s.tasks[future.key].who_has
    fall_silent(s)
    await async_poll_for(lambda: s.tasks[future.key].state == "memory", timeout=60)
    assert old not in s.tasks[future.key].who_has
    np.testing.assert_allclose(await future, A @ x)
    (worker,) = [w for w in workers if w.address == old.address]
    await gone(worker, future.key)


@gen_cluster(**FOUR)
async def test_the_gather_of_another_client_from_a_silent_worker_goes_on(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = c.compute(C @ x)
    await wait(future)
    (old,) = s.tasks[future.key].who_has
    (worker,) = [w for w in workers if w.address == old.address]
    asked, over = first_does_not_answer([worker])
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        data = await other.scatter(np.ones(3), workers=[old.address])
        gathering = asyncio.create_task(other.gather(data, direct=False))
        await async_poll_for(lambda: asked)
        fall_silent(s)
        await async_poll_for(lambda: s.tasks[future.key].state == "memory")
        assert old not in s.tasks[future.key].who_has
        np.testing.assert_allclose(await future, A @ x)
        over.set()
        np.testing.assert_array_equal(await gathering, np.ones(3))
    assert len(asked) == 1


async def held(dask_worker):
    await dask_worker.over.wait()
    return "over"


@gen_cluster(**FOUR)
async def test_what_a_user_runs_on_a_silent_worker_goes_on(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 0, client=c)
    address = await started(c, s, future)
    (worker,) = [w for w in workers if w.address == address]
    worker.over = asyncio.Event()
    running = asyncio.create_task(c.run(held, workers=[address]))
    await async_poll_for(lambda: s.rpc.occupied.get(address), timeout=60)
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    await wait(future)
    fall_silent(s)
    worker.over.set()
    assert await running == {address: "over"}
    assert address != await future


@gen_cluster(**FOUR)
async def test_a_result_that_cannot_be_computed_again_stays_on_a_silent_worker(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    operand = await c.scatter(x)
    of_operand = coded.submit(lambda operator, x: operator @ x, C, operand, client=c)
    await wait(of_operand)
    key = operand.key
    del operand
    await async_poll_for(lambda: key not in s.tasks, timeout=60)
    of_array = c.compute(C @ x)
    await wait(of_array)
    del C
    await async_poll_for(lambda: not plugin_of(s).arrays, timeout=60)
    fall_silent(s)
    for future in (of_operand, of_array):
        assert s.tasks[future.key].state == "memory"
        np.testing.assert_allclose(await future, A @ x)


@gen_cluster(**FOUR)
async def test_a_task_of_the_user_that_needs_a_round_runs_once(c, s, *workers):
    def work(product):
        Event("started").set()
        Event("go").wait()
        return get_worker().address

    C = await coded.encode(A, coded.MDS(4, 3), c)
    product = c.compute(C @ x)
    await wait(product)
    future = c.submit(work, product)
    await Event("started", client=c).wait()
    there = s.tasks[future.key].processing_on
    fall_silent(s)
    assert s.tasks[future.key].processing_on is there
    await Event("go", client=c).set()
    assert await future == there.address


@gen_cluster(**FOUR)
async def test_a_run_that_is_cancelled_ends_and_gets_no_more_plans(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    held = []
    for w in workers:
        worker_plugin(w).exchange._handlers[StartRound] = lambda *m: held.append(m)
    future = c.compute(C @ x)
    await async_poll_for(lambda: held, timeout=60)
    (attempt,) = {message.attempt for message, _ in held}

    async def planned():
        found = plugin_of(s).plan(
            C.encoded.spec.id, {}, "continuous", "adaptive", [], 4, attempt=attempt
        )
        return type((await found)["answer"].data)

    assert await planned() is RoundPlan
    await future.cancel()
    await async_poll_for(lambda: not any(worker_plugin(w)._rounds for w in workers), timeout=60)
    assert await planned() is Over


@gen_cluster(**FOUR)
async def test_a_silent_worker_gets_no_coordinators_until_it_answers(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 0, client=c)
    old = s.workers[await started(c, s, future)]
    fall_silent(s)
    placing, ts = plugin_of(s).placing, s.tasks[future.key]
    assert not placing.choice(ts, Limits({old.address}, None))
    assert old in s.running  # for all others
    # In fact it is alive, and answers the question at once.
    await async_poll_for(lambda: not plugin_of(s).standings.suspects)
    assert placing.choice(ts, Limits({old.address}, None)) == {old.address}
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    await future


@gen_cluster(**FOUR)
async def test_an_operand_that_only_a_silent_worker_holds_is_computed_again(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    exchanges = [worker_plugin(w).exchange for w in workers]
    held = []
    for exchange in exchanges:
        exchange._handlers[StartRound] = lambda *m, handle=exchange._handlers[StartRound]: (
            held.append((handle, *m))
        )
    # The coordinator runs where its operand is.
    plugin_of(s).placing._fast_workers = lambda: set(s.workers)
    operand = da.from_array(x, chunks=-1).map_blocks(np.sin)
    future = c.compute(C @ operand)
    await async_poll_for(lambda: len(held) >= 3, timeout=60)
    (ts,) = [ts for ts in s.tasks.values() if isinstance(ts.run_spec, CodedTask)]
    old, (source,) = ts.processing_on, ts.dependencies
    assert source.who_has == {old}
    fall_silent(s)
    assert not source.who_has
    runs = {message.attempt for _, message, _ in held}
    await async_poll_for(lambda: {m.attempt for _, m, _ in held} > runs, timeout=60)
    await async_poll_for(lambda: held[-1][1].attempt not in runs, timeout=60)
    for exchange in exchanges:
        exchange._handlers[StartRound] = worker_plugin(exchange._worker)._handle
    for handle, message, answer in held:
        handle(message, answer)
    np.testing.assert_allclose(await future, A @ np.sin(x))


@gen_cluster(
    **FOUR
    | {"config": FOUR["config"] | {"distributed.scheduler.active-memory-manager.start": False}}
)
async def test_a_coordinator_fetches_its_operand_from_a_worker_that_falls_silent(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    operand = c.persist(da.from_array(x, chunks=-1).map_blocks(np.sin))
    await wait(operand)
    await c.replicate(futures_of(operand), n=2)
    (ts,) = (s.tasks[future.key] for future in futures_of(operand))
    holders = [w for w in workers if s.workers[w.address] in ts.who_has]
    others = set(workers).difference(holders)
    placing = plugin_of(s).placing
    placing._fast_workers = lambda: {w.address for w in others}
    asked, over = first_does_not_answer(holders)
    future = c.compute(C @ operand)
    await async_poll_for(lambda: asked, timeout=60)
    (waiting,) = (ws for ws in s.workers.values() if ws.processing)
    del placing._fast_workers
    turn(s, 6, {asked[0]})
    assert placing.waiting == {asked[0]: {ts.key: {waiting.address}}}
    (event,) = [e for _, e in s.get_events("dask-coded") if e["action"] == "take-over"]
    assert event["worker"] == waiting.address
    assert event["taker"] not in (waiting.address, asked[0])
    np.testing.assert_allclose(await future, A @ np.sin(x))
    over.set()
    await async_poll_for(lambda: not placing.waiting, timeout=60)


@gen_cluster(**FOUR)
async def test_nothing_waits_for_a_worker_that_answers(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    source = c.submit(np.sin, x)
    await wait(source)
    plugin = plugin_of(s)
    plugin.supervisor.run_again([s.tasks[source.key]])
    assert not plugin.placing.waiting
    np.testing.assert_allclose(await c.compute(C @ (await source)), A @ np.sin(x))


@gen_cluster(**FOUR)
async def test_an_operand_is_computed_again_where_nothing_waits_for_it(c, s, *workers):
    """Dask would begin it only once a silent worker has sent the first one."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    operand = c.submit(np.sin, x, workers=[workers[0].address], allow_other_workers=True)
    await wait(operand)
    s.task_prefixes["sin"].duration_average = 0.01
    asked, over = first_does_not_answer(workers[:1])
    placing = plugin_of(s).placing
    placing._fast_workers = lambda: {workers[1].address}
    futures = [coded.submit(place_with, C, operand, client=c)]
    await async_poll_for(lambda: asked, timeout=60)
    del placing._fast_workers
    turn(s, 6, {workers[0].address})
    assert s.tasks[operand.key].processing_on.address not in [*asked, workers[1].address]
    # What needs it, too, goes where it does not wait.
    futures.append(coded.submit(place_with, C, operand, client=c))
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    there = {w.address for w in workers[2:]}
    assert {await future for future in futures} <= there
    over.set()


@gen_cluster(**FOUR | {"nthreads": [("", 1)] * 2})
async def test_a_coordinator_that_no_other_worker_could_run_fetches_its_operand_no_more(
    c, s, *workers
):
    C = await coded.encode(A, coded.MDS(2, 1), c)
    silent, other = (w.address for w in workers)
    operand = c.submit(np.sin, x, workers=[silent], allow_other_workers=True)
    await wait(operand)
    s.task_prefixes["sin"].duration_average = 0.01
    asked, over = first_does_not_answer(workers[:1])
    plugin_of(s).placing._fast_workers = lambda: {other}
    future = coded.submit(place_with, C, operand, client=c)
    await async_poll_for(lambda: asked, timeout=60)
    turn(s, 6, {silent})
    await Event(f"go-{other}", client=c).set()
    assert await future == other
    assert [ws.address for ws in s.tasks[operand.key].who_has] == [other]
    over.set()


@gen_cluster(**FOUR)
async def test_a_worker_without_the_plugin_is_not_told_to_end_its_fetches(c, s, *workers):
    """Dask closes a worker that gets a message which it does not know."""
    await coded.encode(A, coded.MDS(4, 3), c)
    silent, other = (w.address for w in workers[:2])
    operand = c.submit(np.sin, x, workers=[silent])
    await wait(operand)
    task = c.submit(held_up, "task", operand, workers=[other])
    await Event("begun-task", client=c).wait()
    plugin, ts = plugin_of(s), s.tasks[task.key]
    plugin.supervisor._record(ts)
    sent = []
    s.worker_send = lambda *message: sent.append(message)
    versions = dict(plugin.versions)
    for able in (False, True):
        plugin.placing.waiting[silent][operand.key].add(other)
        plugin.versions.update(versions) if able else plugin.versions.pop(other)
        assert plugin.supervisor._end_fetches([ts]) == ({other} if able else set())
    del s.worker_send
    assert [(to, message["op"]) for to, message in sent] == [(other, "coded-hang-up")]
    await Event("task", client=c).set()
    await task


@gen_cluster(**FOUR)
async def test_a_task_runs_again_where_its_first_result_is_not_being_fetched(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = c.compute(C @ x)
    await wait(future)
    (old,) = s.tasks[future.key].who_has
    asked, over = first_does_not_answer(w for w in workers if w.address == old.address)
    taker = next(w for w in workers if w.address != old.address)
    total = c.submit(np.sum, future, workers=[taker.address])
    await async_poll_for(lambda: asked, timeout=60)
    s.tasks[total.key].worker_restrictions = None  # otherwise it waits, as without us
    fall_silent(s)
    np.testing.assert_allclose(await total, (A @ x).sum())
    assert {old, s.workers[taker.address]}.isdisjoint(s.tasks[future.key].who_has)
    over.set()


@gen_cluster(**FOUR)
async def test_a_task_is_kept_from_where_it_would_wait_even_if_no_worker_answers(c, s, *workers):
    await coded.encode(A, coded.MDS(4, 3), c)
    future = c.submit(np.sin, x)
    await wait(future)
    ts, placing = s.tasks[future.key], plugin_of(s).placing
    old, waits, *others = (w.address for w in workers)
    placing.waiting[old][ts.key].add(waits)
    plugin_of(s).standings.suspect(s.workers)
    for coordinates in (True, False):
        placing.place(ts, Limits(None, None, coordinates, avoid=old))
        assert ts.worker_restrictions == set(others)
        placing.place(ts, Limits({old, waits}, None, coordinates, avoid=old))
        assert ts.worker_restrictions == {old}


def held_up(name, *needed):
    """Return where this runs, once an event of this name is set."""
    Event(f"begun-{name}").set()
    Event(name).wait()
    return get_worker().address


def turn(s, ticks, silent):
    """Let some ticks pass in which all workers but some answer."""
    for _ in range(ticks):
        look(s)
        for address in set(s.workers) - silent:
            plugin_of(s).supervisor.answered(address)


@gen_cluster(**FOUR)
async def test_what_a_client_waits_for_is_computed_elsewhere_if_its_worker_is_silent(
    c, s, *workers
):
    await coded.encode(A, coded.MDS(4, 3), c)
    supervisor = plugin_of(s).supervisor
    needed = c.submit(np.sin, 0.5)
    await wait(needed)
    s.task_prefixes["sin"].duration_average = 0.01
    block = c.submit(held_up, "block", needed)
    supervisor.expect([block.key], c.id)
    silent = set()
    for times in (1, 2):  # it is given more time on the next worker
        await Event("begun-block", client=c).wait()
        await Event("begun-block", client=c).clear()
        ts = s.tasks[block.key]
        old = ts.processing_on
        silent.add(old.address)
        for w in workers:
            if w.address == old.address:
                w.stream_handlers["coded-ping"] = lambda: None
        s.task_prefixes["held_up"].duration_average = 0.01
        turn(s, 5 * times, silent)
        assert ts.processing_on is old
        turn(s, 1, silent)
        assert old.address in plugin_of(s).standings.suspects
        assert old.status == Status.running  # for all others
        # What it needs was in memory only there.
        assert s.tasks[needed.key].who_has != {old}
    await Event("begun-block", client=c).wait()
    await Event("block", client=c).set()
    assert await block not in silent
    look(s)
    assert not supervisor._awaited
    assert supervisor.is_idle


@gen_cluster(**FOUR)
async def test_what_a_client_waits_for_stays_where_it_must(c, s, *workers):
    await coded.encode(A, coded.MDS(4, 3), c)
    supervisor = plugin_of(s).supervisor
    block = c.submit(held_up, "block", workers=[workers[0].address])
    supervisor.expect([block.key], c.id)
    await Event("begun-block", client=c).wait()
    ts = s.tasks[block.key]
    there, prefix = ts.processing_on, ts.prefix
    prefix.duration_average = 0.01
    fall_silent(s)  # it can be nowhere else
    assert ts.processing_on is there
    ts.worker_restrictions = None
    for seconds in (-1, 60 * DAY):  # unknown, and long
        prefix.duration_average = seconds
        fall_silent(s)
        assert ts.processing_on is there
    prefix.duration_average = 0.01
    there.long_running.add(ts)  # its worker says nothing of how long it takes
    fall_silent(s)
    assert ts.processing_on is there
    there.long_running.discard(ts)
    await Event("block", client=c).set()
    assert await block == there.address


@gen_cluster(**FOUR)
async def test_a_silent_worker_keeps_its_copy_of_an_operand(c, s, *workers):
    """Dask closes a worker that is to drop what a running task of it needs."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    operand = c.submit(np.sin, x, workers=[workers[0].address])
    future = coded.submit(
        place_with, C, operand, client=c, workers=[w.address for w in workers[1:]]
    )
    old = await started(c, s, future)
    fall_silent(s)
    assert s.workers[old] in s.tasks[operand.key].who_has
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    assert old != await future
    assert {w.address for w in workers} == set(s.workers)


@gen_cluster(**FOUR)
async def test_an_operand_on_a_worker_without_the_plugin(c, s, *workers):
    C = await coded.encode(A, coded.MDS(3, 2), c, workers=[w.address for w in workers[1:]])
    plugin_of(s).versions.pop(workers[0].address)
    del workers[0].stream_handlers["coded-ping"]
    operand = c.submit(np.sin, x, workers=[workers[0].address])
    await wait(operand)
    asked, over = first_does_not_answer(workers[:1])
    future = coded.submit(place_with, C, operand, client=c)
    await async_poll_for(lambda: asked, timeout=60)
    fall_silent(s)
    over.set()
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    await future
    assert {w.address for w in workers} == set(s.workers)


class Counter:
    """An actor, whose state only its worker has."""

    count = 0

    def add(self):
        self.count += 1
        return self.count


@gen_cluster(**FOUR)
async def test_an_actor_on_a_silent_worker_is_waited_for(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    operand = c.submit(Counter, actor=True, workers=[workers[0].address])
    counter = await operand
    assert await counter.add() == 1
    asked, over = first_does_not_answer(workers[:1])
    future = coded.submit(place_with, C, operand, client=c, workers=[workers[1].address])
    await async_poll_for(lambda: asked, timeout=60)
    fall_silent(s)
    assert s.tasks[operand.key].state == "memory"
    over.set()
    await Event(f"go-{workers[1].address}", client=c).set()
    assert await future == workers[1].address
    assert await counter.add() == 2


@gen_cluster(**FOUR)
async def test_an_operand_whose_source_is_lost_is_waited_for(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    source = await c.scatter(x, workers=[workers[0].address])
    operand = c.submit(np.sin, source, workers=[workers[0].address])
    await wait(operand)
    key = source.key
    del source
    await async_poll_for(lambda: key not in s.tasks, timeout=60)
    asked, over = first_does_not_answer(workers[:1])
    future = coded.submit(place_with, C, operand, client=c, workers=[workers[1].address])
    await async_poll_for(lambda: asked, timeout=60)
    fall_silent(s)
    assert s.tasks[operand.key].state == "memory"
    over.set()
    await Event(f"go-{workers[1].address}", client=c).set()
    assert await future == workers[1].address


@gen_cluster(**FOUR)
async def test_a_worker_hangs_up_twice_and_is_told_that_the_other_has_left(c, s, *workers):
    """It has not connected yet; Dask closes a worker that ends such a connection twice."""
    await coded.encode(A, coded.MDS(4, 3), c)
    worker, over = workers[0], asyncio.Event()

    async def serving(reader, writer):
        await over.wait()
        writer.close()

    async with await asyncio.start_server(serving, "127.0.0.1") as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        # As if Dask fetched the data of a task from there.
        data = await c.scatter(1, workers=[worker.address])
        worker.state.tasks[data.key].coming_from = address
        connecting = asyncio.create_task(worker.rpc.connect(address))
        await async_poll_for(lambda: worker.rpc._connecting, timeout=60)
        comm = s.stream_comms[worker.address].comm
        # What is fetched for others only goes on.
        await worker.stream_handlers["coded-hang-up"](address=address, keys=["another task"])
        assert not connecting.done()
        hang_up = {"op": "coded-hang-up", "address": address, "keys": [data.key]}
        left = {"op": "remove-worker", "worker": address, "stimulus_id": "test"}
        for message in (hang_up, hang_up, left):
            await comm.write([message])
        with pytest.raises(CommClosedError):
            await connecting
        over.set()
    assert await c.submit(int, 7, workers=[worker.address]) == 7


@gen_cluster(**FOUR)
async def test_the_result_of_a_long_loop_on_a_silent_worker_is_kept_for_longer(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 0, client=c)
    address = await started(c, s, future)
    clock_of(s).now += 100 * DAY
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    await wait(future)
    fall_silent(s)  # for a day
    assert {ws.address for ws in s.tasks[future.key].who_has} == {address}
    # The seconds in which clients fetch results are over, but the worker still owes an answer.
    clock_of(s).now += 5 * DAY
    for _ in range(5):
        fall_silent(s)
    assert address != await future


@gen_cluster(**FOUR)
async def test_a_worker_that_answers_late_keeps_its_coordinator(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 0, client=c)
    address = await started(c, s, future)
    membership = plugin_of(s).standings.membership
    for _ in range(20):
        look(s, 5)
        assert membership.owes(address)
        await async_poll_for(lambda: not membership.owes(address), timeout=60)
    await Event(f"go-{address}", client=c).set()
    assert await future == address


@gen_cluster(**FOUR)
async def test_a_loop_that_would_lose_much_is_given_more_time(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 0, client=c)
    address = await started(c, s, future)
    supervisor, ts = plugin_of(s).supervisor, s.tasks[future.key]
    assert supervisor._patience(ts) == DAY
    clock_of(s).now += 100 * DAY
    assert supervisor._patience(ts) == pytest.approx(5 * DAY, rel=1e-3)
    # It loses little once its state is kept.
    plugin_of(s).loops.keepers(future.key, ts.run_id, address, 2)
    assert supervisor._patience(ts) == DAY
    # A task that always holds up its event loop ends all the same.
    supervisor._runs[future.key].setbacks = 3
    assert supervisor._patience(ts) == 8 * DAY
    supervisor._runs[future.key].setbacks = 6
    assert supervisor._patience(ts) == pytest.approx(25 * DAY, rel=1e-3)
    await Event(f"go-{address}", client=c).set()
    await future


@gen_cluster(**FOUR)
async def test_a_coordinator_stays_where_its_user_wants_it(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    one, two, three, _ = (w.address for w in workers)
    pinned = coded.submit(place, C, 0, client=c, workers=three)
    assert await started(c, s, pinned) == three
    fall_silent(s)
    assert s.tasks[pinned.key].processing_on.address == three
    free = coded.submit(place, C, 1, client=c, workers=[one, two])
    old = await started(c, s, free)
    # Heartbeats, too, have ceased for days by the clock that was turned, until the next ones.
    await async_poll_for(lambda: not plugin_of(s).standings.suspects, timeout=60)
    fall_silent(s)
    new = await started(c, s, free)
    assert {old, new} == {one, two}
    for address in (one, two, three):
        await Event(f"go-{address}", client=c).set()
    assert await c.gather([pinned, free]) == [three, new]


def plan(plugin, future, array, silent=(), **more):
    """Ask for the plan of a round as the coordinator does."""
    attempt = future.key, plugin.scheduler.tasks[future.key].run_id
    return plugin.plan(array.encoded.spec.id, {}, "continuous", "last", silent, 0, attempt, **more)


@gen_cluster(**FOUR)
async def test_a_coordinator_that_cannot_finish_a_round_is_moved(c, s, *workers):
    """It may not reach workers that others reach, and calls all of them silent."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 0, client=c)
    old = await started(c, s, future)
    plugin = plugin_of(s)
    others = [w.address for w in workers if w.address != old]
    answer = await plan(plugin, future, C, failing=29 * DAY)
    assert isinstance(answer["answer"].data, RoundPlan)
    with captured_logger("distributed.dask_coded") as log:
        answer = await plan(plugin, future, C, others, failing=30 * DAY)
    assert isinstance(answer["answer"].data, Over)
    assert "has not finished a round for" in log.getvalue()
    assert not plugin.standings.suspects
    new = await started(c, s, future)
    assert new != old
    assert not plugin.supervisor.fails(future.key, 59 * DAY)
    assert plugin.supervisor.fails(future.key, 60 * DAY)
    # What has run for long without a state is given more time.
    plugin.supervisor._runs[future.key].since -= 2000 * DAY
    assert not plugin.supervisor.fails(future.key, 60 * DAY)
    for address in (old, new):
        await Event(f"go-{address}", client=c).set()
    assert await future == new
    assert not plugin.supervisor.fails(future.key, 999 * DAY)


@gen_cluster(**FOUR | {"nthreads": [("", 1)]})
async def test_a_coordinator_that_only_one_worker_can_run_stays_and_says_so_once(c, s, worker):
    C = await coded.encode(A, coded.MDS(1, 1), c)
    future = coded.submit(place, C, 0, client=c)
    await started(c, s, future)
    with captured_logger("distributed.dask_coded") as log:
        for days in (30, 60, 61):
            answer = await plan(plugin_of(s), future, C, failing=days * DAY)
            assert isinstance(answer["answer"].data, RoundPlan)
            assert log.getvalue().count("no other worker can run it") == (days > 30)
    await Event(f"go-{worker.address}", client=c).set()
    assert await future == worker.address


@gen_cluster(**FOUR | {"nthreads": [("", 1)] * 2})
async def test_a_coordinator_runs_on_a_worker_that_joins_after_all_were_lost(c, s, *workers):
    C = await coded.encode(A, coded.MDS(2, 1), c)
    future = coded.submit(place, C, 0, client=c)
    await started(c, s, future)
    for worker in workers:
        await worker.close()
    await async_poll_for(lambda: s.tasks[future.key].state == "no-worker", timeout=60)
    async with Worker(s.address, nthreads=1):
        with pytest.raises(coded.CodedDataLostError):
            await future


@gen_cluster(**FOUR)
async def test_a_coordinator_waits_for_workers_that_can_run_it(c, s, *workers):
    await coded.encode(A, coded.MDS(2, 1), c)
    future = c.submit(np.sin, x)
    await wait(future)
    ts, plugin = s.tasks[future.key], plugin_of(s)
    lacking = workers[0].address
    plugin.versions.pop(lacking)
    plugin.standings.suspect(plugin.versions)
    plugin.placing.place(ts, Limits(None, None))
    assert ts.worker_restrictions == set(s.workers) - {lacking}
    # What its user wants goes first.
    plugin.placing.place(ts, Limits({lacking}, None))
    assert ts.worker_restrictions == {lacking}


@gen_cluster(**FOUR | {"nthreads": [("", 1)] * 3})
async def test_a_coordinator_whose_workers_are_all_lost_runs_on_one_that_joins(c, s, *workers):
    """The worker that is left lacks the package, and must not run it."""
    C = await coded.encode(A, coded.MDS(3, 1), c)
    plugin, lacking = plugin_of(s), workers[0].address
    future = coded.submit(place, C, 0, client=c, workers=[w.address for w in workers[1:]])
    await started(c, s, future)
    plugin.supervisor._runs[future.key].limits.workers = None
    plugin.versions.pop(lacking)
    plugin.placing.changed()
    for worker in workers[1:]:
        await worker.close()
    await async_poll_for(lambda: s.tasks[future.key].state == "no-worker", timeout=60)
    plugin.placing.place(s.tasks[future.key], Limits(None, None))
    assert lacking not in s.tasks[future.key].worker_restrictions
    async with Worker(s.address, nthreads=1) as new:
        await async_poll_for(lambda: s.tasks[future.key].processing_on, timeout=60)
        assert s.tasks[future.key].processing_on.address == new.address
        await Event(f"go-{new.address}", client=c).set()
        assert await future == new.address


def keeping(operator, loop):
    (first,) = loop.resume((1,))
    for i in range(first, 6):
        operator @ x
        loop.report(Progress(i, residual=0.0), state=(i + 1,), last=i == 5)
        if i == 3:
            address = get_worker().address
            Event(f"started-{address}").set()
            Event(f"go-{address}").wait()
    return first


@gen_cluster(**FOUR)
async def test_a_silent_loop_resumes_elsewhere(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(keeping, C, coded.Loop(), client=c)
    old = await started(c, s, future)
    keepers = [worker_plugin(w).keeper.kept for w in workers]
    await async_poll_for(lambda: any(keepers), timeout=60)
    fall_silent(s)
    assert s.tasks[future.key].processing_on.address != old
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    # With such short rounds not every state is kept, but the first one is.
    assert 1 < await future <= 4


@gen_cluster(**FOUR)
async def test_a_round_that_waits_on_a_worker_which_pauses_is_taken_over(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    loop = coded.submit(place, C, 0, client=c)
    old = await started(c, s, loop)
    (worker,) = [w for w in workers if w.address == old]
    blocker = c.submit(lambda: Event("free").wait(), workers=[old])
    await async_poll_for(lambda: worker.state.executing_count, timeout=60)
    plugin_of(s).placing._fast_workers = lambda: {old}
    future = c.compute(C @ x)
    await async_poll_for(lambda: worker.state.ready, timeout=60)
    worker.periodic_callbacks["memory_monitor"].stop()  # it would end the pause
    worker.status = Status.paused
    del plugin_of(s).placing._fast_workers
    await async_poll_for(lambda: s.workers[old].status == Status.paused)
    await Event("free", client=c).set()
    for _ in range(6):
        look(s)
        await async_poll_for(lambda: not plugin_of(s).standings.membership.owes(old), timeout=60)
    np.testing.assert_allclose(await future, A @ x)
    # What has begun there goes on.
    assert s.tasks[loop.key].processing_on.address == old
    await Event(f"go-{old}", client=c).set()
    assert await loop == old
    worker.status = Status.running
    await blocker


@gen_cluster(**FOUR)
async def test_a_loop_that_gets_further_each_time_is_taken_over_soon_each_time(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    gates = [Event(f"round-{i}", client=c) for i in range(4)]

    def rounds(operator, loop):
        for i in range(loop.resume(0), 4):
            operator @ np.ones(operator.shape[1])
            # Not written down too often, but here each state counts.
            loop._cost = 0.0
            loop.report(Progress(i + 1, residual=0.0), state=i + 1, last=i == 3)
            Event(f"reported-{i}").set()
            Event(f"round-{i}").wait()

    future = coded.submit(rounds, C, coded.Loop(), client=c)
    supervisor = plugin_of(s).supervisor
    for i in range(3):
        await Event(f"reported-{i}", client=c).wait()
        kept = [worker_plugin(w).keeper.kept for w in workers]
        await async_poll_for(
            lambda kept=kept, i=i: i + 1 in [k[future.key][0] for k in kept if future.key in k],
            timeout=60,
        )
        old = s.tasks[future.key].processing_on
        assert supervisor._patience(s.tasks[future.key]) == DAY
        fall_silent(s)
        assert s.tasks[future.key].processing_on is not old
        await async_poll_for(lambda i=i: supervisor._runs[future.key].round == i + 1, timeout=60)
        await gates[i].set()
        # The old worker was not silent in fact, so it is soon one of those that may take over. Once
        # it has answered at once for some times, it is given no more time than others.
        await async_poll_for(lambda: not plugin_of(s).standings.suspects, timeout=60)
        turn(s, 6, set())
    await gates[3].set()
    await future


# -- of no effect any more ---------------------------------------------------------------------


@gen_cluster(**FOUR)
async def test_states_and_jobs_of_a_run_that_is_over_count_for_nothing(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    plugin = worker_plugin(workers[0])
    (piece,) = [i for i, a in enumerate(C.encoded.workers) if a == workers[0].address]
    key = C.encoded.spec.keys[piece]
    answers = []

    def start(run_id, run):
        ranges = ((piece, 0, 1),)
        message = StartRound(
            run_id,
            kernel="matvec",
            ticket=(x, ()),
            shared=False,
            stripes=4,
            pieces=((piece, key, 8),),
            ranges=ranges,
            least_batch=1,
            interval=1.0,
            growth=1.0,
            lead=0.0,
            series="series",
            attempt=("task", run),
        )
        plugin.exchange._handle(message, answers.append)

    def keep(round, run):
        message = KeepState("task", round, b"state", ("task", run))
        plugin.exchange._handle(message, answers.append)

    keep(7, run=3)
    start("first", run=3)
    start("second", run=3)
    assert set(plugin._jobs) == {"first", "second"}
    start("next", run=4)
    assert set(plugin._jobs) == {"next"}
    start("later", run=3)
    start("after", run=4)
    assert set(plugin._jobs) == {"next", "after"}
    keep(8, run=3)
    assert plugin.keeper.kept["task"] == (7, b"state")
    keep(5, run=4)
    assert plugin.keeper.kept["task"] == (5, b"state")
    plugin.keeper._forget("task", 4)
    keep(6, run=4)
    assert not plugin.keeper.kept
    assert answers.count(StateKept("task")) == 2
    assert [m.run_id for m in answers if isinstance(m, EndRun)] == ["later", "task", "task"]
    for run_id in ("next", "after"):
        plugin._drop(run_id)


@gen_cluster(**FOUR)
async def test_a_run_that_is_over_takes_no_worker_for_stopped(c, s, *workers):
    """It may have been stopped itself, and its worker coordinates other rounds afterwards."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    one, *others = (worker_plugin(w).exchange for w in workers)
    for exchange in others:
        exchange.attempts.end(("loop", 3))
        channel = one.channel(exchange._worker.address)
        channel.send(KeepState("loop", 1, b"state", ("loop", 3)))
        assert one.membership.owes(channel.address)
        await async_poll_for(
            lambda address=channel.address: not one.membership.owes(address), timeout=60
        )
    np.testing.assert_allclose(await c.compute(C @ x, workers=[workers[0].address]), A @ x)


@gen_cluster(**FOUR)
async def test_a_round_that_others_know_to_be_over_ends(c, s, *workers):
    """Its own worker may be cut off from the scheduler."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    attempts = []

    def admits(attempt):
        if attempt is not None:
            attempts.append(attempt)
        return attempt is None or attempt != attempts[0]

    for worker in workers[1:]:
        worker_plugin(worker).exchange.attempts.admits = admits
    result = await c.compute(C @ x, workers=[workers[0].address])
    np.testing.assert_allclose(result, A @ x)
    assert len(set(attempts)) == 2


# -- placed ------------------------------------------------------------------------------------


def crawl(s, address):
    """Have a worker measured at a twentieth of the others' speed."""
    speeds = {a: 0.05 if a == address else 1.0 for a in s.workers}
    for _ in range(5):
        plugin_of(s).speeds.record(speeds)
    plugin_of(s).placing.changed()


@gen_cluster(**FOUR)
async def test_no_coordinator_is_stolen_by_a_slow_worker(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    slow = workers[0].address
    crawl(s, slow)
    fast = [w.address for w in workers[1:]]
    # The fast workers are occupied for long, the slow one is idle.
    blocks = [
        c.submit(lambda i: Event("free").wait(), i, workers=[fast[i % 3]], pure=False)
        for i in range(6)
    ]
    await async_poll_for(lambda: all(s.workers[a].processing for a in fast), timeout=60)
    futures = [coded.submit(place, C, 0, client=c) for _ in range(12)]
    await async_poll_for(lambda: all(f.key in s.tasks for f in futures), timeout=60)
    for _ in range(5):
        s.extensions["stealing"].balance()
    for address in (slow, *fast):
        await Event(f"go-{address}", client=c).set()
    await Event("free", client=c).set()
    assert slow not in await c.gather(futures)
    await c.gather(blocks)


@gen_cluster(**FOUR)
async def test_no_loop_is_placed_on_a_worker_that_was_slow_when_last_measured(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    slow, *fast = (w.address for w in workers)
    speeds = plugin_of(s).speeds
    for _ in range(60):
        speeds.record(dict.fromkeys([slow, *fast], 1.0))
    speeds.record({slow: 0.4, **dict.fromkeys(fast, 1.0)})
    for _ in range(200):
        speeds.record(dict.fromkeys(fast, 1.0))
    plugin_of(s).placing.changed()
    futures = [coded.submit(place, C, 0, client=c) for _ in range(20)]
    for address in (slow, *fast):
        await Event(f"go-{address}", client=c).set()
    assert slow not in await c.gather(futures)


@gen_cluster(**FOUR)
async def test_a_loop_that_has_begun_on_a_slow_worker_moves(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(place, C, 0, client=c)
    slow = await started(c, s, future)
    crawl(s, slow)
    supervisor = plugin_of(s).supervisor
    clock = clock_of(s)
    # Not if much work would be lost.
    clock.now += 100 * DAY
    addresses = list(s.workers)
    speeds = plugin_of(s).records.predict(addresses)
    supervisor.reconsider(future.key, addresses, speeds)
    assert s.tasks[future.key].processing_on.address == slow
    clock.now -= 100 * DAY
    # Nor because of speeds that are slow only now and then.
    for seen in (speeds, speeds, np.ones(4), speeds, speeds):
        supervisor.reconsider(future.key, addresses, seen)
    assert s.tasks[future.key].processing_on.address == slow
    supervisor.reconsider(future.key, addresses, speeds)
    new = await started(c, s, future)
    assert new != slow
    for address in (slow, new):
        await Event(f"go-{address}", client=c).set()
    assert await future == new


@gen_cluster(**FOUR)
async def test_a_worker_that_measures_a_slow_product_runs_no_coordinator(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    for i, w in enumerate(workers):
        plugin = worker_plugin(w)
        plugin._probe = SimpleNamespace(seconds=0.1 if i == 2 else 0.004, refresh=lambda: None)
        await w.heartbeat()
        await Event(f"go-{w.address}", client=c).set()
    futures = [coded.submit(place, C, 0, client=c) for _ in range(8)]
    assert workers[2].address not in await c.gather(futures)


@gen_cluster(**FOUR)
async def test_a_coordinator_runs_on_a_slow_worker_if_no_other_is_left(c, s, *workers):
    C = await coded.encode(A, coded.Repetition(4, 4), c)
    crawl(s, workers[0].address)
    future = coded.submit(place, C, 1, client=c)
    await started(c, s, future)
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    for w in workers[1:]:
        await w.close()
    await future


@gen_cluster(**FOUR)
async def test_the_only_fast_worker_leaves(c, s, *workers):
    C = await coded.encode(A, coded.Repetition(4, 4), c)
    future = coded.submit(place, C, 1, client=c)
    old = await started(c, s, future)
    # The plugin still believes so when the scheduler moves the tasks of the lost worker.
    placing = plugin_of(s).placing
    placing._fast, placing._known = {old}, True
    (worker,) = [w for w in workers if w.address == old]
    for w in workers:
        await Event(f"go-{w.address}", client=c).set()
    s.handle_worker_status_change("paused", worker.address, "test")
    await s.remove_worker(worker.address, stimulus_id="test")
    assert await future != old


# -- the parts without a cluster ---------------------------------------------------------------


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20), st.data())
def test_some_worker_is_not_slow(speeds, data):
    delay = st.floats(0.001, 10.0) | st.just(float("nan"))
    size = len(speeds)
    delays = [data.draw(st.lists(delay, min_size=size, max_size=size)) for _ in range(2)]
    mask = not_slow(np.array(speeds), *map(np.array, delays))
    assert mask.any() == (max(speeds) > 0 and (np.array(speeds) >= 0.8 * np.median(speeds)).any())
    assert not mask[np.array(speeds) == 0].any()


@gen_cluster(**FOUR)
async def test_coordinators_avoid_workers_whose_event_loop_is_late(c, s, *workers):
    await coded.encode(A, coded.MDS(4, 3), c)
    placing, late = plugin_of(s).placing, workers[0].address
    # No `await` from here on, so that no heartbeat interferes.
    placing._products = dict.fromkeys(s.workers, 0.008)
    for ws in s.workers.values():
        ws.metrics["event_loop_interval"] = 0.5 if ws.address == late else 0.02
    placing.changed()
    assert placing._fast_workers() == set(s.workers) - {late}


@gen_cluster(**FOUR)
async def test_one_timer_runs_however_many_tasks_begin(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    timer, ran = plugin_of(s).supervisor._timer, []
    usual = timer.start

    def start():
        ran.append(timer.is_running())
        usual()

    with patch.object(timer, "start", start):
        for _ in range(5):
            np.testing.assert_allclose(await c.compute(C @ x), A @ x)
    assert not any(ran)


@gen_cluster(**FOUR)
async def test_coordinators_that_wait_are_kept_from_a_worker_that_has_fallen_silent(c, s, *workers):
    """Dask would have it steal them, because it has nothing to do."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    blocked = [c.submit(held_up, w.address, workers=[w.address], key=w.address) for w in workers]
    for worker in workers:
        await Event(f"begun-{worker.address}", client=c).wait()
    futures = c.compute([C @ np.full(7, float(i)) for i in range(12)])
    waiting = plugin_of(s).supervisor._processing
    await async_poll_for(lambda: len(waiting) == 12, timeout=60)
    tasks = [s.tasks[key] for key in waiting]
    silent = workers[0].address
    assert any(silent in ts.worker_restrictions for ts in tasks)
    plugin_of(s).standings.suspect([silent])
    look(s)
    assert not any(silent in ts.worker_restrictions for ts in tasks)
    plugin_of(s).standings.heard(silent, answers=True)
    look(s)
    assert any(silent in ts.worker_restrictions for ts in tasks)
    for worker in workers:
        await Event(worker.address, client=c).set()
    await c.gather([*futures, *blocked])


def test_what_waits_for_silent_workers_is_looked_up_by_what_is_needed():
    """With a thousand coordinators, placing one took a millisecond of the scheduler's loop."""
    scheduler = SimpleNamespace(running=set(), valid_workers=lambda ts: set())
    placing = Placing(scheduler, set(), lambda addresses: np.ones(len(addresses)), set())
    ts = SimpleNamespace(key="task", dependencies=[SimpleNamespace(key="data", who_has=None)])
    for key, there in (("data", "a"), ("task", "b"), ("other", "c")):
        placing.waiting["silent"][key].add(there)
    assert placing._usable(ts, {"a", "b", "c", "d"}) == {"c", "d"}
    assert set(placing.waiting["silent"]) == {"data", "task", "other"}  # none is made by looking
    placing.forget("data")
    assert placing._usable(ts, {"a", "b", "c", "d"}) == {"a", "c", "d"}


@gen_cluster(**FOUR)
async def test_no_silent_worker_steals_what_is_computed_again(c, s, *workers):
    """Dask lets any idle worker steal a task whose user allows other workers."""
    await coded.encode(A, coded.MDS(4, 3), c)
    plugin, first = plugin_of(s), workers[0].address
    future = c.submit(np.sin, x, workers=[first], allow_other_workers=True, key="operand")
    await wait(future)
    ts = s.tasks[future.key]
    assert ts.loose_restrictions
    plugin.standings.suspect([first])
    plugin.supervisor.run_again([ts])
    assert first not in ts.worker_restrictions and not ts.loose_restrictions
    await async_poll_for(lambda: ts.state == "memory", timeout=60)
    assert ts.worker_restrictions == {first} and ts.loose_restrictions
    assert first not in {ws.address for ws in ts.who_has}
