"""How a coordinator gets and uses its plans, and how workers are measured."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.membership import Timeouts
from dask_coded.rounds import RoundOptions
from dask_coded.runtime.coordinator import live_round, rounds
from dask_coded.runtime.coordinator.rounds import Coordinator
from dask_coded.runtime.messages import ChangeRound, StartRound
from dask_coded.runtime.scheduler import recipes
from dask_coded.runtime.scheduler.recipes import Recipes
from dask_coded.runtime.spec import CodedDataLostError
from dask_coded.runtime.worker import probe
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport.attempts import RunOverError
from dask_coded.transport.messages import EndRun, Ping
from tests.clocks import set_timeouts


def coordinator(*answers):
    """Return a coordinator that is given these plans, one after the other."""
    plugin = SimpleNamespace(lacking=Counter())
    found, left = Coordinator(plugin, "array", RoundOptions(), ("task", 1)), list(answers)

    async def ask():
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    found._ask = ask
    return found


def test_rounds_that_threads_of_an_algorithm_start_at_once_share_a_plan():
    async def plans():
        return await asyncio.gather(*(found._plan(None) for _ in range(3)))

    found = coordinator("plan")
    assert asyncio.run(plans()) == ["plan"] * 3


def test_a_plan_is_asked_for_again_after_an_error():
    async def plans():
        with pytest.raises(CodedDataLostError):
            await found._plan(None)
        return await found._plan(None)

    found = coordinator(CodedDataLostError("for now"), "plan")
    assert asyncio.run(plans()) == "plan"


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_speeds_measured_with_another_width_are_in_no_known_unit(c, s, *workers, monkeypatch):
    def spy_on(module, name, position):
        original = getattr(module, name)

        def spy(*args):
            spy.seen.append(args[position])
            return original(*args)

        spy.seen = []
        monkeypatch.setattr(module, name, spy)
        return spy.seen

    def loop(C):
        # By way of the module, because the loop's own variables are copies.
        planned = live_round.Round.seen
        while not planned or not planned[-1].any():
            C @ np.ones(20)
        return C @ np.ones((20, 3))

    C = await coded.encode(np.ones((120, 20)), coded.MDS(4, 3), c)
    monkeypatch.setattr(Timeouts, "PLANS", 0.0)
    planned, delivered = spy_on(live_round, "Round", 5), spy_on(rounds, "Delivery", 1)
    np.testing.assert_allclose(await coded.submit(loop, C, client=c), np.full((120, 3), 20.0))
    assert planned[-2].any()
    assert planned[-1] is None
    # Where a large operand should not pass does not depend on its width.
    assert any(delivered[-1].plan.lags)


def test_no_measurements_pile_up_while_all_threads_of_a_worker_are_busy(monkeypatch):
    def submit(call):
        waiting.append(Future())
        return waiting[-1]

    monkeypatch.setattr(Timeouts, "PROBES", -1.0)
    waiting: list[Future[None]] = []
    found = probe.Probe(SimpleNamespace(submit=submit))
    for _ in range(3):
        found.refresh()
    assert len(waiting) == 1
    waiting[0].set_result(None)
    found.refresh()
    assert len(waiting) == 2


def test_a_round_ends_if_the_event_loop_of_its_worker_is_closed():
    closed = asyncio.new_event_loop()
    closed.close()
    # Tornado drops what is scheduled there.
    loop = SimpleNamespace(add_callback=lambda callback: None, asyncio_loop=closed)
    plugin = SimpleNamespace(worker=SimpleNamespace(loop=loop))
    coordinator = SimpleNamespace(_plugin=plugin, _task="task")
    with pytest.raises(RunOverError):
        Coordinator._drive(coordinator, lambda in_thread: None)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_product_begins_as_soon_as_enough_pieces_are_made(c, s, *workers):
    A, x = np.random.default_rng(0).standard_normal((12, 5)), np.ones(5)
    C = await coded.encode(A, coded.MDS(4, 3), c)
    plugin = s.extensions["dask-coded"]
    homes, state, keys = plugin.homes, plugin.arrays[C.encoded.spec.id], C.encoded.spec.keys
    lacking, waiting = set(keys[:2]), []
    holder_of, arrived = homes.holder_of, state.arrived

    async def waited(enough):
        def asked():
            waiting.append(enough())
            return waiting[-1]

        return await arrived(asked)

    state.arrived = waited
    homes.holder_of = lambda key: None if key in lacking else holder_of(key)
    plugin.recipes.is_coming = lambda state: True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timeouts, "LOOK", 3600.0)
        product = c.compute(C @ x)
        await async_poll_for(lambda: waiting)
        lacking.discard(keys[0])
        assert (waiting, state.waiting) == ([False], 1)
        plugin.recipes.is_coming = None  # it is not asked again until enough are there
        lacking.add(keys[2])
        homes.transition(s.tasks[keys[0]], "memory")
        await async_poll_for(lambda: len(waiting) == 2)
        assert state.waiting == 1
        lacking.clear()
        homes.transition(s.tasks[keys[1]], "memory")
        np.testing.assert_allclose(await product, A @ x)
    assert waiting == [False, False, True]
    assert not state.waiting


@pytest.mark.parametrize("answers", [True, False])
def test_products_wait_for_checks_of_blocks_that_answer_and_not_for_long(answers, monkeypatch):
    keys = ["piece-0", "piece-1", "check-0", "check-1"]
    tasks = {"check-0": SimpleNamespace(who_has={"a"}), "check-1": SimpleNamespace(who_has=None)}
    spec = SimpleNamespace(
        keys=keys[:2], check_keys=keys[2:], code=SimpleNamespace(systematic_pieces=[0, 1])
    )
    state = SimpleNamespace(spec=spec, checks_due=math.inf)
    asked = []
    made_by = SimpleNamespace(
        _scheduler=SimpleNamespace(tasks=tasks),
        _is_made_now=lambda ts: True,
        _homes=SimpleNamespace(answering=lambda key: asked.append(key) or ["b"] * answers),
    )
    now = 0.0
    monkeypatch.setattr(recipes, "monotonic", lambda: now)
    assert Recipes.checks_come(made_by, state) == answers
    assert asked == ["piece-1"]
    now = 4.9
    assert Recipes.checks_come(made_by, state) == answers
    now = 5.1
    assert not Recipes.checks_come(made_by, state)
    assert len(asked) == 1 + answers


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_few_requests_wait_at_the_scheduler(c, s, *workers):
    C = await coded.encode(np.eye(4), coded.MDS(2, 1), c)
    state = s.extensions["dask-coded"].arrays[C.encoded.spec.id]
    waiting = [asyncio.create_task(state.arrived(lambda: False)) for _ in range(16)]
    await async_poll_for(lambda: state.waiting == 16)
    assert not await state.arrived(lambda: False)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert await state.arrived(lambda: True)
    assert not state.waiting


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_round_ends_when_its_data_are_lost_with_a_worker_whose_socket_stays_open(
    c, s, *workers, monkeypatch
):
    """The system of a frozen process goes on acknowledging what others send to it."""
    C = await coded.encode(np.eye(8), coded.MDS(4, 4), c)
    frozen = next(w for w in workers if w.address == C.encoded.workers[-1])
    exchange = worker_plugin(frozen).exchange
    for kind in (StartRound, ChangeRound, Ping, EndRun):
        exchange._handlers[kind] = lambda message, answer: None

    async def lost(self, in_thread):
        raise CodedDataLostError("its holder has left")

    monkeypatch.setattr(Coordinator, "_replan", lost)
    set_timeouts(monkeypatch, 0.02, live_round)
    others = [w.address for w in workers if w is not frozen]
    with pytest.raises(CodedDataLostError, match="its holder has left"):
        await coded.submit(lambda C: C @ np.ones(8), C, client=c, workers=others)
