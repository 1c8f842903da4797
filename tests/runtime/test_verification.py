"""Verified rounds: workers that compute wrongly do no harm, and are found out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import scipy.sparse
from distributed import Event
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_coded as coded
from dask_coded.membership import Timeouts
from dask_coded.rounds.policies import POLICIES
from dask_coded.runtime.coordinator import checks
from dask_coded.runtime.coordinator.checks import Checks
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport import rows
from tests.clocks import clock_of, set_timeouts

SIX = [("127.0.0.1", 1)] * 6
CODES = [coded.MDS(6, 4), coded.RandomLinear(6, 4), coded.Repetition(6, 2)]

# Rows of very different size, because errors in the small ones are to be found as well.
A = np.random.default_rng(0).standard_normal((24, 7)) * 10.0 ** np.arange(-12, 12)[:, None]
x = np.random.default_rng(1).standard_normal(7)


def is_right(result: np.ndarray, operand: np.ndarray = x) -> bool:
    size = np.abs(A) @ np.abs(operand)
    return bool((np.abs(result - A @ operand) <= 1e-9 * size).all())


def forget_speeds(s) -> None:
    """Give work to all workers in the next round, also to those that were slow."""
    for address in s.workers:
        s.extensions["dask-coded"].speeds.forget(address)


def corrupt(workers, address: str) -> Callable[[], None]:
    """Have a worker compute everything with a relative error of 1e-3; return what ends that."""
    plugin = worker_plugin(next(w for w in workers if w.address == address))
    right = plugin.piece
    plugin.piece = lambda key: right(key) * 1.001
    return partial(setattr, plugin, "piece", right)


def events(scheduler, action: str) -> list[dict]:
    found = scheduler.get_events("dask-coded")
    return [event for _, event in found if event["action"] == action]


@pytest.mark.parametrize("code", CODES, ids=repr)
@pytest.mark.parametrize("verify", [True, False])
def test_a_worker_that_computes_wrongly(code, verify):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, code, c, verify=verify)
        wrong = C.encoded.workers[0]
        corrupt(workers, wrong)
        if not verify:
            # A round may be decoded from the other workers' shares alone, but not every round is.
            while is_right(await c.compute(C @ x), x):
                forget_speeds(s)
            return
        with captured_logger("distributed.dask_coded") as log:
            i = 0
            while i < 10 or not events(s, "corrupt"):
                i += 1
                forget_speeds(s)
                assert is_right(await c.compute(C @ (i * x)), i * x)
        assert {event["worker"] for event in events(s, "corrupt")} == {wrong}
        assert log.getvalue().count("has sent a wrong share") == 1

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_a_worker_that_computes_wrongly_again_and_again_gets_no_more_work(
    c, s, *workers, monkeypatch
):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    wrong = C.encoded.workers[1]
    corrupt(workers, wrong)

    def loop(operator, rounds):
        computed = set()
        for _ in range(rounds):
            np.testing.assert_allclose(operator @ np.ones(7), operator @ np.ones(7), rtol=1e-12)
            computed |= {address for address, *_ in operator.last_round.timeline}
        return computed

    plugin = s.extensions["dask-coded"]
    for _ in range(3):
        assert plugin.records.trusts(wrong)
        plugin.records.corrupt(C.encoded.spec.id, [wrong])
    # If others seem silent, it is asked all the same.
    with monkeypatch.context() as patch:
        for worker in workers:
            membership = worker_plugin(worker).exchange.membership
            patch.setattr(membership, "timeouts", Timeouts(60.0))
        computed = await coded.submit(loop, C, 20, client=c)
    assert len(computed) >= 4 and wrong not in computed
    assert len(events(s, "corrupt")) == 3  # no share of it has arrived since
    assert plugin.records.best([wrong, C.encoded.workers[2]])[-1] == wrong
    # If the others do not suffice, it is asked all the same, and checked.
    for address in C.encoded.workers[2:4]:
        await next(w for w in workers if w.address == address).close()
    assert is_right(await c.compute(C @ x))


@gen_cluster(client=True, nthreads=SIX)
async def test_a_worker_stops_beside_one_that_is_left_out(c, s, *workers):
    """Shares of this array are not verified, so the worker takes part only if it is needed."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    wrong, stopped, *_ = C.encoded.workers
    for _ in range(3):
        s.extensions["dask-coded"].records.corrupt(C.encoded.spec.id, [wrong])
    (worker,) = [w for w in workers if w.address == stopped]
    exchange = worker_plugin(worker).exchange
    before = dict(exchange._handlers)
    exchange._handlers.clear()  # it does not answer any more
    (free, *_) = set(s.workers) - set(C.encoded.workers)
    result = await coded.submit(lambda operator: operator @ np.ones(7), C, client=c, workers=free)
    np.testing.assert_allclose(result, A @ np.ones(7), rtol=1e-9)
    exchange._handlers.update(before)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_worker_stops_beside_workers_that_have_computed_wrongly(policy):
    @gen_cluster(client=True, nthreads=SIX, config={"coded.policy": policy})
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
        *wrong, stopped = C.encoded.workers[:3]
        corrupt(workers, wrong[0])  # the other one does not any more
        plugin = s.extensions["dask-coded"]
        for _ in range(3):
            plugin.records.corrupt(C.encoded.spec.id, wrong)
        (worker,) = [w for w in workers if w.address == stopped]
        free = C.encoded.workers[3]
        # The others suffice only together with the worker that was wrong once.
        worker_plugin(worker).exchange._handlers.clear()  # it does not answer any more
        for i in range(1, 4):
            assert is_right(await c.compute(C @ (i * x), workers=[free]), i * x)
        assert not any(plugin.records.trusts(address) for address in wrong)

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_too_many_workers_that_compute_wrongly(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    for address in C.encoded.workers[:3]:
        corrupt(workers, address)
    with pytest.raises(coded.CorruptSharesError, match=r"agree with their checks.*restart"):
        await c.compute(C @ x)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        # Each once.
        pytest.param(code, dtype, marks=[pytest.mark.long] * (i != j))
        for i, code in enumerate(CODES)
        for j, dtype in enumerate(["f4", "f8", "c16"])
    ],
    ids=repr,
)
def test_rebuilt_pieces_raise_no_false_alarm(code, dtype):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        matrix = np.random.default_rng(0).standard_normal((24, 7)).astype(dtype)
        C = await coded.encode(matrix, code, c, verify=True)
        keys = (*C.encoded.spec.keys, *C.encoded.spec.check_keys)
        assert len(C.encoded.spec.check_keys) == code.k
        for _ in range(3):
            held = [{ws.address for ws in s.tasks[key].who_has} for key in C.encoded.spec.keys]
            # Rebuilt pieces are where there is room, so the code may not survive every loss.
            lost = next(
                w for w in s.workers if code.decodable([i for i, h in enumerate(held) if h - {w}])
            )
            await next(w for w in workers if w.address == lost).close()
            np.testing.assert_allclose(await c.compute(C @ x), matrix @ x, atol=1e-4)
            await async_poll_for(lambda: all(s.tasks[key].who_has for key in keys))
            np.testing.assert_allclose(await c.compute(C @ x), matrix @ x, atol=1e-4)
        assert not events(s, "corrupt")

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_checks_are_on_other_workers_than_their_blocks_and_released_with_them(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True, transpose=True)
    np.testing.assert_allclose(await c.compute(C.T @ np.ones(24)), A.sum(0))
    spec = C.encoded.spec
    for block, check in zip(spec.keys[:4], spec.check_keys, strict=True):
        assert not s.tasks[block].who_has & s.tasks[check].who_has
    keys = (*spec.keys, *spec.check_keys)
    del C
    await async_poll_for(lambda: not any(key in s.tasks for key in keys))
    assert not s.extensions["dask-coded"].arrays


@gen_cluster(client=True, nthreads=SIX)
async def test_worker_with_a_check_killed_during_rounds(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    (holder,) = s.tasks[C.encoded.spec.check_keys[0]].who_has

    def loop(operator):
        Event("started").set()
        Event("go").wait()
        return [operator @ x for _ in range(5)]

    where = next(w.address for w in workers if w.address != holder.address)
    future = coded.submit(loop, C, client=c, workers=where)
    await Event("started").wait()
    await next(w for w in workers if w.address == holder.address).close()
    await Event("go").set()
    assert all(map(is_right, await future))
    # Workers that have no checks yet find them, or make them.
    for address in list(s.workers):
        run = coded.submit(lambda operator: operator @ x, C, workers=address, client=c)
        assert is_right(await run)


@gen_cluster(client=True, nthreads=SIX)
async def test_what_cannot_be_verified(c, s, *workers):
    for matrix, what in ((scipy.sparse.eye_array(24), "sparse"), (np.eye(24, dtype=int), "int64")):
        with pytest.raises(TypeError, match=f"'verify' is for dense matrices.*{what}"):
            await coded.encode(matrix, None, c, verify=True)
        with dask.config.set({"coded.verify": True}):
            C = await coded.encode(matrix, None, c)
            assert not C.encoded.spec.check_keys
    with dask.config.set({"coded.verify": True}):
        C = await coded.encode(A, None, c)
        assert C.encoded.spec.check_keys
        assert not (await coded.encode(A, None, c, verify=False)).encoded.spec.check_keys


@gen_cluster(client=True, nthreads=SIX)
async def test_worker_with_a_block_and_worker_with_its_check_killed(c, s, *workers):
    """Both may be made again by one worker of one thread, and the check needs the block."""
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    spec = C.encoded.spec
    keys = (*spec.keys, *spec.check_keys)
    gone = {C.encoded.workers[0], next(iter(s.tasks[spec.check_keys[0]].who_has)).address}
    for address in gone:
        await next(w for w in workers if w.address == address).close()
    await async_poll_for(lambda: all(s.tasks[key].who_has for key in keys))
    assert is_right(await c.compute(C @ x))


@gen_cluster(client=True, nthreads=SIX)
async def test_a_piece_lost_again_and_again_is_verified_as_well_as_before(c, s, *workers):
    """Its sources were never rebuilt, so its errors do not add up; theirs would."""
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    state = s.extensions["dask-coded"].arrays[C.encoded.spec.id]
    state.errors.made(0, {}, 1e6)  # as if it had been lost before
    keys = C.encoded.spec.keys
    for piece in (0, 1):
        (holder,) = s.tasks[keys[piece]].who_has
        await next(w for w in workers if w.address == holder.address).close()
        await async_poll_for(lambda: all(s.tasks[key].who_has for key in keys))
        assert 2 < state.errors.of(piece) < 1000


@gen_cluster(client=True, nthreads=SIX)
async def test_pieces_made_from_inexact_ones_are_less_exact(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    plugin, array = s.extensions["dask-coded"], C.encoded.spec.id
    # Without this one all others are needed, the rebuilt one too, whoever is slow.
    avoid = [C.encoded.workers[5]]
    before = (await plugin.recipes.sources(array, 1, avoid))["answer"].data.growth
    home = C.encoded.workers[0]
    made = partial(plugin.arrays.made, array, 0, 0, None, {}, {}, None, stored=False, weights={})
    made(1e14, worker=home)  # its task is over: another worker has made it
    assert not plugin.arrays[array].errors.of(0)
    ts = s.tasks[C.encoded.spec.keys[0]]
    with captured_logger("distributed.dask_coded") as log:
        ts.processing_on = s.workers[home]
        made(1e6, worker=home)
        assert not log.getvalue()
        made(1e14, worker=home)
        ts.processing_on = None
    assert "more than half of its digits may be lost: encode the array again" in log.getvalue()
    assert (await plugin.recipes.sources(array, 1, avoid))["answer"].data.growth > 1e10 > before


@pytest.fixture
def impatient(monkeypatch):
    """Workers are silent sooner than usual."""
    set_timeouts(monkeypatch, 0.25, checks, rows)


@pytest.mark.usefixtures("impatient")
def test_the_workers_of_a_check_and_of_its_block_are_stopped():
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
        spec, go = C.encoded.spec, asyncio.Event()
        (holder,) = [ws.address for ws in s.tasks[spec.check_keys[0]].who_has]
        stopped = {holder, C.encoded.workers[0]}
        assert len(stopped) == 2
        for worker in workers:
            if worker.address in stopped:

                async def held(send=worker.handlers["coded_rows"], **where):
                    await go.wait()
                    return await send(**where)

                worker.handlers["coded_rows"] = held
        one = next(w for w in workers if w.address not in stopped)
        # What they hold is decoded from the other workers' pieces, so all rounds are verified.
        for i in range(1, 9):
            assert is_right(await c.compute(C @ (i * x), workers=[one.address]), i * x)
        assert not events(s, "corrupt")
        others = [w for w in C.encoded.workers if w not in {*stopped, one.address}]
        wrong, i = set(), 0
        while not events(s, "corrupt"):
            i += 1
            # The fastest one: in rounds as small as these, a slow one may get no work.
            (fastest, *_) = s.extensions["dask-coded"].records.best(others)
            wrong.add(fastest)
            restore = corrupt(workers, fastest)
            assert is_right(await c.compute(C @ (i * x), workers=[one.address]), i * x)
            restore()
        assert {event["worker"] for event in events(s, "corrupt")} <= wrong
        go.set()

    test()


@pytest.mark.parametrize("known_by", ["a round", "heartbeats"])
@gen_cluster(client=True, nthreads=SIX)
async def test_a_new_coordinator_asks_no_worker_for_checks_that_is_known_to_be_stopped(
    c, s, *workers, known_by
):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    stopped = {
        C.encoded.workers[0],
        next(iter(s.tasks[C.encoded.spec.check_keys[0]].who_has)).address,
    }
    asked = []
    for worker in workers:
        if worker.address in stopped:
            worker.handlers["coded_rows"] = lambda **request: asked.append(request)
            worker.periodic_callbacks["heartbeat"].stop()
            if known_by == "a round":
                s.extensions["dask-coded"].standings.suspect([worker.address])
    if known_by == "heartbeats":
        clock, standings = clock_of(s), s.extensions["dask-coded"].standings
        for _ in range(12):
            clock.now += 0.2
            for worker in workers:
                if worker.address not in stopped:
                    standings.heard(worker.address)
    one = next(w.address for w in workers if w.address not in stopped)
    assert is_right(await c.compute(C @ x, workers=[one]))
    assert not asked


@pytest.mark.usefixtures("impatient")
def test_a_new_coordinator_waits_once_for_workers_that_are_stopped():
    """What it has found out about a worker for one check holds for all of them."""

    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(6, 3), c, verify=True)
        spec, go, asked = C.encoded.spec, asyncio.Event(), []
        # One has the check of block 0 and block 1, the other the check of block 1.
        stopped = [next(iter(s.tasks[key].who_has)).address for key in spec.check_keys[:2]]
        assert C.encoded.workers[1] == stopped[0]
        for worker in workers:
            if worker.address in stopped:

                async def held(address=worker.address, **where):
                    if where["stop"]:
                        asked.append((address, where["key"]))
                    await go.wait()

                worker.handlers["coded_rows"] = held
        one = next(w.address for w in workers if w.address not in stopped)
        assert is_right(await c.compute(C @ x, workers=[one]))
        assert asked == list(zip(stopped, spec.check_keys, strict=False))
        go.set()

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_products_without_columns_are_verified(c, s, *workers):
    tall = np.random.default_rng(0).standard_normal((3000, 3))
    C = await coded.encode(tall, coded.MDS(6, 3), c, verify=True)
    assert (await c.compute(C @ np.ones((3, 0)))).shape == (3000, 0)


@gen_cluster(client=True, nthreads=SIX)
async def test_an_error_in_the_coordinator_ends_the_round(c, s, *workers, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("of the test")

    C = await coded.encode(A, coded.MDS(6, 3), c, verify=True)
    monkeypatch.setattr("dask_coded.rounds.verification.Verifier.deviation", fail)
    with pytest.raises(ZeroDivisionError, match="of the test"):
        await c.compute(C @ x)


def test_a_check_is_fetched_from_a_worker_whose_idle_channel_has_closed():
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
        key, asked = C.encoded.spec.check_keys[0], []
        (holder,) = [w for w in workers if w.address in {h.address for h in s.tasks[key].who_has}]
        one = next(w for w in workers if w is not holder)
        channel = worker_plugin(one).exchange.channel(holder.address)
        channel.abort()
        await async_poll_for(lambda: channel.closed, timeout=60)
        send = holder.handlers["coded_rows"]

        async def sent(**where):
            asked.append(where["key"])
            return await send(**where)

        holder.handlers["coded_rows"] = sent
        assert is_right(await c.compute(C @ x, workers=[one.address]))
        assert key in asked

    test()


def test_checks_that_are_being_fetched_are_kept():
    plugin, fetching, idle = SimpleNamespace(checks={}), Future(), Future()
    idle.set_result(None)
    for i in range(20):
        Checks.of(plugin, f"array-{i}")._fetching = {0: idle if i else fetching}
    assert list(plugin.checks) == ["array-0", *(f"array-{i}" for i in range(12, 20))]
    assert not fetching.cancelled()


@pytest.mark.usefixtures("impatient")
def test_a_piece_is_rebuilt_when_its_sources_are_stopped_for_a_while():
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(6, 4), c)
        stopped, go = set(C.encoded.workers[1:4]), asyncio.Event()
        for worker in workers:
            if worker.address in stopped:

                async def held(send=worker.handlers["coded_rows"], **where):
                    await go.wait()
                    return await send(**where)

                worker.handlers["coded_rows"] = held
        asked = []
        sources = s.handlers["coded_sources"]
        s.handlers["coded_sources"] = lambda **k: asked.append(k) or sources(**k)
        await next(w for w in workers if w.address == C.encoded.workers[0]).close()
        # The two others do not suffice.
        await async_poll_for(lambda: any(len(k["avoid"]) == 2 for k in asked))
        count = len(asked)
        await async_poll_for(lambda: len(asked) > count + 3)
        go.set()
        await async_poll_for(lambda: all(s.tasks[key].who_has for key in C.encoded.spec.keys))
        assert is_right(await c.compute(C @ x))

    test()


# -- wrong checks --------------------------------------------------------------------------------


def spoil(s, workers, spec, block: int, change: Callable[[np.ndarray], np.ndarray]) -> str:
    """Have a worker hold a wrong check; return its address."""
    key = spec.check_keys[block]
    (holder,) = s.tasks[key].who_has
    (worker,) = [w for w in workers if w.address == holder.address]
    worker.data[key] = change(np.array(worker.data[key]))
    return holder.address


def turned(check: np.ndarray) -> np.ndarray:
    half = check.shape[1] // 2
    return np.concatenate([-check[:, :half], check[:, half:]], axis=1)


def inflated(check: np.ndarray) -> np.ndarray:
    half = check.shape[1] // 2
    return np.concatenate([turned(check)[:, :half], 1e30 * check[:, half:]], axis=1)


def deflated(check: np.ndarray) -> np.ndarray:
    half = check.shape[1] // 2
    return np.concatenate([check[:, :half], 1e-40 * check[:, half:]], axis=1)


WRONG_CHECKS = {
    "other sign": turned,
    "one wrong number": lambda check: check + (np.arange(check.size) == 3).reshape(check.shape),
    "limit that any share keeps": inflated,
    "limit that no share keeps": deflated,
    "infinity": lambda check: check + np.inf,
    "not a number": lambda check: check * np.nan,
    "too few columns": lambda check: check[:, 1:],
    "no stripes": lambda check: check[:0],
}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        # Once for each kind, and once for each code.
        pytest.param(code, kind, marks=[pytest.mark.long] * ((i - j) % len(CODES) > 0))
        for i, code in enumerate(CODES)
        for j, kind in enumerate(WRONG_CHECKS)
    ],
    ids=repr,
)
def test_a_worker_with_a_wrong_check(code, kind):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, code, c, verify=True)
        spec = C.encoded.spec
        with captured_logger("distributed.dask_coded") as log:
            liar = spoil(s, workers, spec, 1, WRONG_CHECKS[kind])
            for i in range(1, 4):
                assert is_right(await c.compute(C @ (i * x)), i * x)
            assert not events(s, "corrupt")
            if kind == "limit that no share keeps":
                return  # shares without any rounding error keep it all the same
            await async_poll_for(lambda: events(s, "corrupt-check"))
            # It is made again elsewhere, for workers that have not fetched it yet.
            key = spec.check_keys[1]
            await async_poll_for(lambda: {ws.address for ws in s.tasks[key].who_has or ()} - {liar})
            for address in sorted(set(C.encoded.workers)):
                run = coded.submit(lambda operator: operator @ x, C, workers=address, client=c)
                assert is_right(await run)
        (event,) = events(s, "corrupt-check")
        assert event["worker"] == liar and event["block"] == 1
        assert not events(s, "corrupt")  # the honest are not blamed
        assert log.getvalue().count("has a wrong check of block 1") == 1

    test()


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_a_worker_with_a_wrong_check_beside_one_that_computes_wrongly(code):
    """They are neighbours: one has the block that the other one has the check of."""

    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, code, c, verify=True)
        spec = C.encoded.spec
        liar = spoil(s, workers, spec, 1, turned)
        wrong = C.encoded.workers[int(spec.code.systematic_pieces[1])]
        assert wrong != liar
        restore = corrupt(workers, wrong)
        i = 0
        while i < 5 or not events(s, "corrupt"):
            i += 1
            forget_speeds(s)
            assert is_right(await c.compute(C @ (i * x)), i * x)
        assert {event["worker"] for event in events(s, "corrupt")} == {wrong}
        assert {event["worker"] for event in events(s, "corrupt-check")} == {liar}
        restore()

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_two_workers_that_compute_wrongly_and_right_checks(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    wrong = set(C.encoded.workers[1:3])
    for address in wrong:
        corrupt(workers, address)
    i = 0
    while i < 5 or {event["worker"] for event in events(s, "corrupt")} != wrong:
        i += 1
        forget_speeds(s)
        assert is_right(await c.compute(C @ (i * x)), i * x)
    assert not events(s, "corrupt-check")


@gen_cluster(client=True, nthreads=SIX)
async def test_both_copies_of_a_block_are_multiplied_wrongly(c, s, *workers):
    C = await coded.encode(A, coded.Repetition(6, 2), c, verify=True)
    spec = C.encoded.spec
    copies = [C.encoded.workers[piece] for piece in np.flatnonzero(spec.code.G[:, 0]).tolist()]
    assert len(copies) == 2
    for address in copies:
        corrupt(workers, address)
    with pytest.raises(coded.CorruptSharesError, match="restart these workers") as caught:
        await c.compute(C @ x)
    assert all(address in str(caught.value) for address in copies)
    assert not events(s, "corrupt-check")


@gen_cluster(client=True, nthreads=SIX)
async def test_a_wrong_check_that_no_other_worker_can_refute(c, s, *workers):
    """Without redundancy, either the check or the share may be wrong; no worker is blamed."""
    C = await coded.encode(A, coded.MDS(6, 6), c, verify=True)
    spoil(s, workers, C.encoded.spec, 1, turned)
    with pytest.raises(coded.CorruptSharesError, match=r"too few other workers.*encode the array"):
        await c.compute(C @ x)
    assert not events(s, "corrupt") and not events(s, "corrupt-check")


@gen_cluster(client=True, nthreads=SIX)
async def test_a_piece_that_has_rotten(c, s, *workers):
    """Not its product is wrong, but what is stored, from which checks would be made again."""
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    spec = C.encoded.spec
    (worker,) = [w for w in workers if w.address == C.encoded.workers[1]]
    rotten = np.array(worker.data[spec.keys[1]])
    rotten[3, 2] *= 2
    worker.data[spec.keys[1]] = rotten
    liar = spoil(s, workers, spec, 1, turned)
    i = 0
    while i < 5 or not events(s, "corrupt"):
        i += 1
        forget_speeds(s)
        assert is_right(await c.compute(C @ (i * x)), i * x)
    assert {event["worker"] for event in events(s, "corrupt")} == {worker.address}
    assert {event["worker"] for event in events(s, "corrupt-check")} == {liar}


@gen_cluster(client=True, nthreads=[*SIX, ("127.0.0.1", 1)])
async def test_a_block_that_was_damaged_before_its_check_was_made(c, s, *workers):
    """Its own share agrees with the check; the shares of all parities contradict it."""
    C = await coded.encode(A, coded.MDS(7, 4), c, verify=True)
    spec = C.encoded.spec
    damaged, unable = (
        next(w for w in workers if w.address == C.encoded.workers[piece]) for piece in (1, 3)
    )
    damaged.data[spec.keys[1]] = 2 * np.array(damaged.data[spec.keys[1]])
    spoil(s, workers, spec, 1, lambda check: 2 * check)

    def fail(key):
        raise MemoryError("of the test")

    worker_plugin(unable).piece = fail  # so that no round ends without parity
    i = 0
    while i < 5 or not events(s, "corrupt"):
        i += 1
        forget_speeds(s)
        assert is_right(await c.compute(C @ (i * x)), i * x)
    assert {event["worker"] for event in events(s, "corrupt")} == {damaged.address}
    assert {event["block"] for event in events(s, "corrupt-check")} == {1}


@gen_cluster(client=True, nthreads=SIX)
async def test_a_worker_that_computes_wrongly_now_and_then(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    wrong = C.encoded.workers[2]
    for i in range(1, 13):
        restore = corrupt(workers, wrong) if i % 3 == 0 else lambda: None
        assert is_right(await c.compute(C @ (i * x)), i * x)
        restore()
    assert {event["worker"] for event in events(s, "corrupt")} <= {wrong}


@gen_cluster(client=True, nthreads=SIX)
async def test_the_coordinators_own_worker_computes_wrongly(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c, verify=True)
    wrong = C.encoded.workers[0]
    corrupt(workers, wrong)
    i = 0
    while i < 5 or not events(s, "corrupt"):
        i += 1
        assert is_right(await c.compute(C @ (i * x), workers=[wrong]), i * x)
    assert {event["worker"] for event in events(s, "corrupt")} == {wrong}
