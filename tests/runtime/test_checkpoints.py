"""The state of a loop outlives the worker that the loop runs on."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from distributed import Client, Event, LocalCluster
from distributed.utils_test import async_poll_for, gen_cluster, gen_test, poll_for

import dask_coded as coded
from dask_coded.loop import Progress
from dask_coded.membership import Timeouts
from dask_coded.runtime.coordinator import loop
from dask_coded.runtime.coordinator.loop import KeptLoop
from dask_coded.runtime.messages import KeepState, StateKept
from dask_coded.runtime.scheduler.loops import choose_keepers
from dask_coded.runtime.worker.keeper import StateKeeper
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport import rows
from dask_coded.transport.attempts import Attempts
from tests.clocks import set_timeouts

KILLED_AFTER = 5


def rounds(operator, started, go, loop):
    """Add up ``operator @ 1``; after some rounds, wait for the event ``go``."""
    first, total = loop.resume((1, np.zeros(4)))
    for i in range(first, 11):
        total = total + operator @ np.ones(4)
        loop.report(Progress(i, residual=0.0), state=(i + 1, total), last=i == 10)
        if i == KILLED_AFTER:
            Event(started).set()
            Event(go).wait()
    return first, total


def test_workers_that_kept_the_state_before_are_chosen_first():
    assert choose_keepers(["c"], ["a", "b", "c"], "b", copies=2) == ["c", "a"]


def test_the_worker_of_the_loop_is_not_chosen():
    assert choose_keepers(["a"], ["a"], "a", copies=3) == []


@gen_cluster(client=True, nthreads=[("", 1)] * 4)
async def test_states_are_dropped_when_the_loop_is_over(c, s, *workers):
    C = await coded.encode(np.eye(4), coded.MDS(4, 2), client=c)
    future = coded.submit(rounds, C, "started", "go", coded.Loop(), client=c)
    await Event("started", client=c).wait()
    plugins = [w.extensions["dask-coded"] for w in workers]
    await async_poll_for(lambda: sum(len(p.keeper.kept) for p in plugins) >= 3, timeout=60)
    await Event("go", client=c).set()
    first, total = await future
    assert first == 1
    np.testing.assert_allclose(total, 10.0)
    await async_poll_for(lambda: not any(p.keeper.kept for p in plugins), timeout=60)
    assert not s.extensions["dask-coded"].loops._keepers


@gen_cluster(client=True, nthreads=[("", 1)] * 4)
async def test_algorithms_of_one_task_do_not_resume_from_each_other(c, s, *workers):
    def algorithm(operator, loop, step):
        first, total = loop.resume((1, np.zeros(4)))
        for i in range(first, 4):
            total = total + operator @ np.full(4, step)
            loop.report(Progress(i, residual=0.0), state=(i + 1, total), last=i == 3)
        return float(total[0])

    def several(operator, one, other):
        return [algorithm(operator, loop, 10.0**i) for i, loop in enumerate((one, one, other, one))]

    C = await coded.encode(np.eye(4), coded.Repetition(4, 2), client=c)
    found = await coded.submit(several, C, coded.Loop(), coded.Loop(), client=c)
    assert found == [3.0, 30.0, 300.0, 3000.0]


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_states_of_a_loop_that_runs_again_are_kept_again(c, s, a, *others):
    """Its result was lost with a worker."""
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    plugin, answers = worker_plugin(a), []
    keeper, keep = plugin.keeper, plugin.exchange._handle
    keep(KeepState("loop", 1, b"old", ("loop", 7)), answers.append)
    keeper._forget("loop", 7)
    keep(KeepState("loop", 2, b"late", ("loop", 7)), answers.append)
    assert not keeper.kept
    keep(KeepState("loop", 1, b"new", ("loop", 8)), answers.append)
    assert keeper.kept == {"loop": (1, b"new")}
    assert len(answers) == 3


@gen_cluster(client=True, nthreads=[("", 1)] * 5)
async def test_a_keeper_that_is_stopped_is_replaced(c, s, *workers):
    def twice(operator, loop):
        for i in (1, 2, 3):
            loop.report(Progress(i, residual=0.0), state=operator @ np.ones(4))
            # States are kept again only when the last one has become cheap.
            loop._kept = float("-inf")
            Event(f"done-{i}").set()
            Event(f"go-{i}").wait()

    C = await coded.encode(np.eye(4), coded.MDS(5, 4), client=c)
    future = coded.submit(twice, C, coded.Loop(), client=c)
    await Event("done-1", client=c).wait()
    plugins = {w.address: worker_plugin(w) for w in workers}

    def keepers(round: int) -> set[str]:
        return {a for a, p in plugins.items() if round in {r for r, _ in p.keeper.kept.values()}}

    await async_poll_for(lambda: len(keepers(1)) == 2, timeout=60)
    stopped, other = sorted(keepers(1))
    received = []
    plugins[stopped].exchange._handlers[KeepState] = lambda *message: received.append(message)
    running = s.tasks[future.key].processing_on.address
    # As if it had owed an answer for a long time.
    plugins[running].exchange.channel(stopped)
    plugins[running].exchange.membership.suspect(stopped)
    await Event("go-1", client=c).set()
    await Event("done-2", client=c).wait()
    await async_poll_for(lambda: len(keepers(2)) == 2, timeout=60)
    assert other in keepers(2)
    assert not received
    for i in (2, 3):
        await Event(f"go-{i}", client=c).set()
    await future
    # The stopped one hears of the end as well.
    await async_poll_for(lambda: not any(p.keeper.kept for p in plugins.values()), timeout=60)


@gen_cluster(client=True, nthreads=[("", 1)] * 4)
async def test_states_are_dropped_when_the_loop_is_cancelled(c, s, *workers):
    C = await coded.encode(np.eye(4), coded.MDS(4, 2), client=c)
    future = coded.submit(rounds, C, "started", "go", coded.Loop(), client=c)
    await Event("started", client=c).wait()
    await future.cancel()
    await Event("go", client=c).set()
    plugins = [w.extensions["dask-coded"] for w in workers]
    await async_poll_for(lambda: not any(p.keeper.kept for p in plugins), timeout=60)


def wait_long_for_keepers(client, seconds=30):
    """Have loops that resume wait longer for states: keepers may be late on a busy machine."""

    def wait_long():
        dask.config.set({"coded.coordinator.timeout": seconds})

    client.run(wait_long)


def test_coordinator_and_as_many_workers_as_the_code_allows_killed_between_rounds(
    patient, processes
):
    *holders, one, other = processes.add(7)
    client = processes.client
    C = coded.encode(np.eye(4), coded.MDS(5, 3), client=client, workers=holders)
    future = coded.submit(
        rounds, C, "started", "go", coded.Loop(), client=client, workers=[one, other]
    )
    Event("started", client=client).wait()
    poll_for(lambda: len(kept(client)) >= 3, timeout=60)
    wait_long_for_keepers(client)
    running = next(a for a, tasks in client.processing().items() if future.key in tasks)
    for address in [running, *sorted(kept(client) & set(holders))[:2]]:
        processes.kill(address)
    Event("go", client=client).set()
    first, total = future.result(timeout=120)
    # With such short rounds not every state is kept, but the first one is.
    assert 1 < first <= KILLED_AFTER + 1
    np.testing.assert_allclose(total, 10.0)


def count_rounds(operator, loop):
    """Run rounds until the event ``go``; return how many."""
    i = loop.resume(1)
    while not Event("go").is_set():
        operator @ np.ones(4)
        loop.report(Progress(i, residual=0.0), state=i + 1)
        i += 1
    return i


@pytest.mark.long
def test_coordinator_killed_more_often_than_dask_forgives(processes):
    processes.add(4)
    client = processes.client
    C = coded.encode(np.eye(4), coded.MDS(3, 1), client=client)
    future = coded.submit(count_rounds, C, coded.Loop(), client=client)

    def newest() -> int:
        def newest_here(dask_worker):
            return dask_worker.extensions["dask-coded"].keeper.kept.get(future.key)

        states = client.run(newest_here, on_error="ignore").values()
        return max((state[0] for state in states if state), default=0)

    seen = 0
    for _ in range(dask.config.get("distributed.scheduler.allowed-failures") + 2):
        poll_for(lambda: newest() > seen, timeout=60)  # noqa: B023
        seen = newest()
        running = next(a for a, tasks in client.processing().items() if future.key in tasks)
        processes.kill(running)
        processes.add(1)
    poll_for(lambda: newest() > seen, timeout=60)
    Event("go", client=client).set()
    assert future.result(timeout=120) > seen


def test_coordinator_stopped_between_rounds(processes):
    *holders, one, other = processes.add(5)
    client = processes.client
    C = coded.encode(np.eye(4), coded.MDS(3, 2), client=client, workers=holders)
    future = coded.submit(
        rounds, C, "started", "go", coded.Loop(), client=client, workers=[one, other]
    )
    Event("started", client=client).wait()
    poll_for(lambda: len(kept(client)) >= 2, timeout=60)
    wait_long_for_keepers(client)
    running = next(a for a, tasks in client.processing().items() if future.key in tasks)
    with processes.stopped(running):
        Event("go", client=client).set()
        first, total = future.result(timeout=120)
    assert 1 < first <= KILLED_AFTER + 1
    np.testing.assert_allclose(total, 10.0)
    # The states that the stopped worker may still send are refused.
    poll_for(lambda: not kept(client), timeout=60)


def test_coordinator_killed_and_a_keeper_stopped(patient, processes):
    *holders, one, other = processes.add(5)
    client = processes.client
    C = coded.encode(np.eye(4), coded.MDS(3, 2), client=client, workers=holders)
    future = coded.submit(
        rounds, C, "started", "go", coded.Loop(), client=client, workers=[one, other]
    )
    Event("started", client=client).wait()
    poll_for(lambda: len(kept(client)) >= 2, timeout=60)
    wait_long_for_keepers(client, seconds=10)  # it waits as long for the stopped one
    running = next(a for a, tasks in client.processing().items() if future.key in tasks)
    keeper = next(a for a in sorted(kept(client)) if a in holders)
    with processes.stopped(keeper):
        processes.kill(running)
        Event("go", client=client).set()
        first, total = future.result(timeout=120)
    assert 1 < first <= KILLED_AFTER + 1
    np.testing.assert_allclose(total, 10.0)


@gen_test()
async def test_workers_of_one_process_resume_a_state():
    """Within a process a message is not packed, so the state must not stay wrapped."""
    async with LocalCluster(
        n_workers=3,
        processes=False,
        threads_per_worker=1,
        asynchronous=True,
        dashboard_address=":0",
    ) as cluster:
        async with Client(cluster, asynchronous=True) as client:
            await coded.encode(np.eye(4), coded.MDS(3, 2), client=client)
            a, *others = cluster.workers.values()
            task = client.submit(lambda: Event("over").wait(), workers=[a.address])
            await async_poll_for(lambda: a.state.executing, timeout=60)
            for worker in others:
                worker_plugin(worker).keeper.kept[task.key] = 7, b"state"
            mine = worker_plugin(a)
            kept = KeptLoop(a, mine.keeper, mine.exchange, mine.exchange.attempt(task.key), 2)
            assert await kept._resume() == (7, b"state")
            await Event("over", client=client).set()
            await task


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_a_state_may_take_long_to_travel(c, s, a, *others):
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    task = c.submit(lambda: Event("over").wait(), workers=[a.address])
    await async_poll_for(lambda: a.state.executing, timeout=60)
    questions, enough = [], asyncio.Event()

    def handler(number):
        async def state(key, whole=True):
            if not whole:
                questions.append(number)
                if len(questions) == 5:  # one to each keeper, and three meanwhile
                    enough.set()
                return number
            await enough.wait()
            return {"round": number, "state": b"state"}

        return state

    for number, worker in enumerate(others, 7):
        worker.handlers["coded_kept"] = handler(number)
    mine = worker_plugin(a)
    with pytest.MonkeyPatch.context() as patch:
        set_timeouts(patch, 0.02, rows)
        kept = KeptLoop(a, mine.keeper, mine.exchange, mine.exchange.attempt(task.key), 2)
        assert await kept._resume() == (8, b"state")
    assert set(questions[2:]) == {8}  # the worker with the latest state
    await Event("over", client=c).set()
    await task


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_no_state_is_sent_to_a_keeper_that_has_not_confirmed_the_last(c, s, a, *others):
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    plugins = [worker_plugin(w) for w in others]
    held, sent = [], []

    def hold(message, answer):
        sent.append(message.round)
        held.append(partial(answer, StateKept(message.run_id)))

    for plugin in plugins:
        plugin.exchange._handlers[KeepState] = hold
    mine = worker_plugin(a)
    task = c.submit(lambda: Event("over").wait(), workers=[a.address])
    await async_poll_for(lambda: a.state.executing, timeout=60)
    kept, other = (
        KeptLoop(a, mine.keeper, mine.exchange, mine.exchange.attempt(task.key), 2, number=i)
        for i in (0, 1)
    )
    for one in (kept, other):
        await one._find_keepers()
    for round in (1, 2, 3):
        kept._cost = 0.0
        await asyncio.to_thread(kept.report, Progress(round, residual=0.0), state=round)
    await async_poll_for(lambda: len(held) == 2, timeout=60)
    assert sent == [1, 1]
    for answer in held:
        answer()
    await async_poll_for(lambda: not mine.keeper.owing, timeout=60)
    # Two loops of one task, whose states go to the same keepers.
    for one, round in ((kept, 4), (other, 5), (kept, 6)):
        one._cost = 0.0
        await asyncio.to_thread(one.report, Progress(round, residual=0.0), state=round)
        await async_poll_for(lambda: len(held) == 2 * round - 4, timeout=60)  # noqa: B023
        for answer in held[-2:]:
            answer()
        await async_poll_for(lambda: not mine.keeper.owing, timeout=60)
    assert sent == [1, 1, 4, 4, 5, 5, 6, 6]
    await Event("over", client=c).set()
    await task


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_a_keeper_is_waited_for_while_it_answers_questions(c, s, a, *others, monkeypatch):
    """A large state travels long, and meanwhile its channel is silent."""
    monkeypatch.setattr(Timeouts, "answer", 5.0)
    set_timeouts(monkeypatch, 0.02, rows)
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    asked, stopped, over = [], [], asyncio.Event()
    for worker in others:
        worker_plugin(worker).exchange._handlers[KeepState] = lambda message, answer: None

        async def question(address=worker.address, **what):
            asked.append(address)
            if address in stopped:
                await over.wait()

        worker.handlers["coded_kept"] = question
    mine = worker_plugin(a)
    task = c.submit(lambda: Event("over").wait(), workers=[a.address])
    await async_poll_for(lambda: a.state.executing, timeout=60)
    kept = KeptLoop(a, mine.keeper, mine.exchange, mine.exchange.attempt(task.key), 2)
    await kept._find_keepers()
    await asyncio.to_thread(kept.report, Progress(1, residual=0.0), state=1)
    await async_poll_for(lambda: len(asked) > 20, timeout=60)
    assert len(mine.keeper.owing[task.key]) == 2
    monkeypatch.setattr(Timeouts, "answer", 0.1)
    stopped += [worker.address for worker in others]
    await async_poll_for(lambda: not mine.keeper.owing, timeout=60)
    over.set()
    await Event("over", client=c).set()
    await task


def test_sending_states_takes_a_twentieth_of_the_time_of_a_loop(monkeypatch):
    now, sent = [0.0], []

    def send(_loop, _keep, round, state):
        sent.append(round)
        now[0] += 1.0

    monkeypatch.setattr(loop, "monotonic", lambda: now[0])
    monkeypatch.setattr(loop, "sync", send)
    worker, keeper = SimpleNamespace(loop=None), SimpleNamespace(owing={})
    kept = KeptLoop(worker, keeper, SimpleNamespace(is_usable=None), ("key", 7), 1)
    for round in range(1, 61):
        kept.report(Progress(round, residual=0.0), state=round)
        now[0] += 1.0
    assert sent == [1, 21, 41]


def kept(client) -> set[str]:
    """Return the workers that keep a state."""
    held = client.run(lambda dask_worker: len(dask_worker.extensions["dask-coded"].keeper.kept))
    return {address for address, count in held.items() if count}


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_a_loop_that_was_cancelled_leaves_no_keepers_behind(c, s, *workers):
    """Its thread runs on until it looks, and may ask for keepers again."""
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    loops = s.extensions["dask-coded"].loops
    assert loops.keepers("cancelled", 0, workers[0].address, 2) == ([], [])
    assert not loops._keepers


@gen_cluster(client=True, nthreads=[("", 1)] * 4)
async def test_an_earlier_run_of_a_loop_replaces_no_keepers(c, s, *workers):
    """It was cut off from them, and asks for others once it is connected again."""
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    loops = s.extensions["dask-coded"].loops
    future = c.submit(lambda: Event("over").wait(), workers=[workers[0].address])
    await async_poll_for(lambda: future.key in s.tasks and s.tasks[future.key].processing_on)
    run = s.tasks[future.key].run_id
    first, earlier = loops.keepers(future.key, run, workers[0].address, 2)
    assert (len(first), earlier) == (2, [])
    assert loops.keepers(future.key, run - 1, workers[0].address, 2, avoid=first) == ([], [])
    assert loops._keepers[future.key] == first
    # The present run may replace them. Until the others have a state, these have the latest.
    others, earlier = loops.keepers(future.key, run, workers[0].address, 2, avoid=first)
    assert (set(others) & set(first), earlier) == (set(), first)
    await Event("over", client=c).set()
    await future


@gen_cluster(client=True, nthreads=[("", 1)] * 4)
async def test_a_loop_resumes_from_keepers_that_were_replaced_just_before(c, s, a, *others):
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    task = c.submit(lambda: Event("over").wait(), workers=[a.address])
    await async_poll_for(lambda: a.state.executing, timeout=60)
    mine, loops = worker_plugin(a), s.extensions["dask-coded"].loops
    run = s.tasks[task.key].run_id
    ((first,), _) = loops.keepers(task.key, run, a.address, 1)
    keeper = next(w for w in others if w.address == first)
    worker_plugin(keeper).keeper.kept[task.key] = 8, b"state"
    loops.keepers(task.key, run, a.address, 1, avoid=[first])
    kept = KeptLoop(a, mine.keeper, mine.exchange, mine.exchange.attempt(task.key), 1)
    assert await kept._resume() == (8, b"state")
    await Event("over", client=c).set()
    await task


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_keepers_that_have_left_are_not_remembered(c, s, *workers):
    await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    loops = s.extensions["dask-coded"].loops
    future = c.submit(lambda: Event("over").wait(), workers=[workers[0].address])
    await async_poll_for(lambda: future.key in s.tasks)
    await async_poll_for(lambda: s.tasks[future.key].state == "processing", timeout=60)
    run = s.tasks[future.key].run_id
    ((left,), _) = loops.keepers(future.key, run, workers[0].address, 1)
    await next(w for w in workers if w.address == left).close()
    ((keeper,), _) = loops.keepers(future.key, run, workers[0].address, 1)
    assert loops._keepers[future.key] == [keeper] != [left]
    await Event("over", client=c).set()
    await future


def test_a_keeper_whose_idle_channel_has_closed_is_used_again():
    sent = []
    channel = SimpleNamespace(
        address="keeper",
        send=sent.append,
        listen=lambda key, listener: listener(StateKept(key)),
        unlisten=lambda key: None,
    )
    exchange = SimpleNamespace(
        address="a",
        is_usable=lambda address: False,
        silent=[],
        channel=lambda address: channel,
        attempts=Attempts(),
        register=lambda handler, kinds: None,
    )

    async def named(**arguments):
        assert (arguments["run"], arguments["avoid"]) == (7, [])
        return ["keeper"], []

    worker = SimpleNamespace(scheduler=SimpleNamespace(coded_keepers=named))
    keeper = StateKeeper(SimpleNamespace(handlers={}, stream_handlers={}), exchange)
    loop = KeptLoop(worker, keeper, exchange, ("key", 7), copies=1)
    asyncio.run(loop._keep(1, b"state"))
    assert sent == [KeepState("key", 1, b"state", ("key", 7))]


def test_of_two_threads_that_report_at_once_one_sends_its_state():
    """A channel has one listener for a task, so the other one would wait for ever."""
    sent, listeners = [], []
    channel = SimpleNamespace(
        address="keeper",
        send=sent.append,
        listen=lambda key, listener: listeners.append(listener),
        unlisten=lambda key: None,
    )
    exchange = SimpleNamespace(
        address="a",
        is_usable=lambda address: False,
        silent=[],
        channel=lambda address: channel,
        attempts=Attempts(),
        register=lambda handler, kinds: None,
    )
    keeper = StateKeeper(SimpleNamespace(handlers={}, stream_handlers={}), exchange)

    async def both():
        asking = asyncio.Barrier(2)

        async def named(**arguments):
            await asking.wait()
            return ["keeper"], []

        worker = SimpleNamespace(scheduler=SimpleNamespace(coded_keepers=named))
        loop = KeptLoop(worker, keeper, exchange, ("key", 7), copies=1)
        await asyncio.gather(loop._keep(1, b"first"), loop._keep(2, b"second"))
        assert len(sent) == len(keeper.owing["key"]) == 1
        [listener] = listeners
        listener(StateKept("key"))
        await asyncio.gather(*keeper.owing["key"])

    asyncio.run(both())
    assert not keeper.owing


def test_a_keeper_that_answers_beside_a_large_state_is_not_silent():
    heard, answers = [], []

    async def kept(key, whole):
        answers.append(key)
        return 3

    loop = KeptLoop.__new__(KeptLoop)
    loop._worker = SimpleNamespace(rpc=lambda address: SimpleNamespace(coded_kept=kept))
    loop._exchange, loop._key = SimpleNamespace(heard=heard.append), "key"
    assert asyncio.run(loop._ask_round("keeper")) == 3
    assert (answers, heard) == (["key"], ["keeper"])
