"""Workers whose kernels raise exceptions: others compute their stripes, as long as they suffice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import Event
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_coded as coded
from dask_coded.rounds.policies import POLICIES
from dask_coded.runtime.messages import Failed, StartRound
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport.channels import Channel

SIX = [("127.0.0.1", 1)] * 6
CODES = [coded.MDS(6, 4), coded.RandomLinear(6, 4), coded.Repetition(6, 2)]

A = np.random.default_rng(0).standard_normal((240, 7))
x = np.random.default_rng(1).standard_normal(7)


class NoMemory(np.ndarray):
    """A piece of which no product can be computed."""

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise MemoryError("of the test")


def break_kernels(workers: Any, address: str) -> Callable[[], None]:
    """Have each product on a worker raise a MemoryError; return what ends that."""
    plugin = worker_plugin(next(w for w in workers if w.address == address))
    right = plugin.piece
    plugin.piece = lambda key: right(key).view(NoMemory)
    return lambda: setattr(plugin, "piece", right)


def have_it_raise_first(workers: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the other workers back until the coordinator knows that this one has raised."""
    held: list[Callable[[], None]] | None = []
    receive = Channel.receive

    def hold(handlers: dict[type, Any]) -> None:
        start = handlers[StartRound]
        handlers[StartRound] = lambda *found: (
            start(*found) if held is None else held.append(partial(start, *found))
        )

    def received(channel: Channel, message: Any) -> None:
        nonlocal held
        receive(channel, message)
        if isinstance(message, Failed) and held is not None:
            waiting, held = held, None
            for begin in waiting:
                begin()

    monkeypatch.setattr(Channel, "receive", received)
    for worker in workers:
        if worker.address != address:
            hold(worker_plugin(worker).exchange._handlers)


def events(scheduler: Any, action: str) -> list[dict[str, Any]]:
    found = scheduler.get_events("dask-coded")
    return [event for _, event in found if event["action"] == action]


def loop(operator: Any, rounds: int = 20) -> tuple[list[np.ndarray], list[dict[str, str]]]:
    results, failed = [], []
    for i in range(rounds):
        results.append(operator @ (i * np.ones(7)))
        failed.append(operator.last_round.failed)
    return results, failed


@pytest.mark.parametrize(
    ("code", "policy"),
    [
        # Once for each policy, and once for each code.
        pytest.param(code, policy, marks=[pytest.mark.long] * ((i - j) % len(CODES) > 0))
        for i, code in enumerate(CODES)
        for j, policy in enumerate(sorted(POLICIES))
    ],
    ids=repr,
)
def test_a_worker_without_memory_for_its_products(code, policy, monkeypatch):
    @gen_cluster(client=True, nthreads=SIX, config={"coded.policy": policy})
    async def test(c, s, *workers):
        C = await coded.encode(A, code, c)
        broken = C.encoded.workers[0]
        break_kernels(workers, broken)
        have_it_raise_first(workers, broken, monkeypatch)
        where = C.encoded.workers[1]
        with captured_logger("distributed.dask_coded") as log:
            results, failed = await coded.submit(loop, C, client=c, workers=where)
            for i, result in enumerate(results):
                np.testing.assert_allclose(result, A @ (i * np.ones(7)), atol=1e-9)
            assert set(failed[0]) == set().union(*failed) == {broken}
            if policy not in ("static", "replication"):  # these assign work to all workers
                assert sum(map(bool, failed)) <= 5  # it rests for 1, 2, 4, 8 and 16 rounds
            await async_poll_for(lambda: events(s, "failed"), timeout=60)
        (event, *_) = events(s, "failed")
        assert event["worker"] == broken and event["error"] == "MemoryError: of the test"
        assert log.getvalue().count("has raised an exception in its part of a product") == 1

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_the_coordinators_own_kernels_raise_exceptions(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c)
    broken = C.encoded.workers[0]
    break_kernels(workers, broken)
    results, _ = await coded.submit(loop, C, client=c, workers=broken)
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, A @ (i * np.ones(7)), atol=1e-9)


@gen_cluster(client=True, nthreads=SIX)
async def test_a_worker_that_lacked_memory_once_computes_again(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 6), c)
    broken = C.encoded.workers[0]
    restore = break_kernels(workers, broken)
    # Without redundancy, no other worker can compute what is lacking.
    with pytest.raises(MemoryError, match="of the test") as caught:
        await c.compute(C @ x)
    notes = "".join(caught.value.__notes__)
    assert f"Raised on worker {broken}" in notes
    assert "Too few workers can compute the product" in notes
    restore()
    np.testing.assert_allclose(await c.compute(C @ -x), A @ -x)


@gen_cluster(client=True, nthreads=SIX)
async def test_more_workers_without_memory_than_the_code_tolerates(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c)
    for address in C.encoded.workers[:3]:
        break_kernels(workers, address)
    with pytest.raises(MemoryError, match="of the test"):
        await c.compute(C @ x)


@gen_cluster(client=True, nthreads=SIX)
async def test_a_worker_that_rests_is_asked_if_another_one_is_killed(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 5), c)
    broken, killed, where = C.encoded.workers[:3]
    restore = break_kernels(workers, broken)

    def rounds(operator):
        while not operator.last_round or not operator.last_round.failed:
            operator @ x
        Event("failed").set()
        Event("go").wait()
        return operator @ x

    future = coded.submit(rounds, C, client=c, workers=where)
    await Event("failed").wait()
    restore()
    await next(w for w in workers if w.address == killed).close()
    await Event("go").set()
    np.testing.assert_allclose(await future, A @ x)


@gen_cluster(client=True, nthreads=SIX)
async def test_a_worker_is_killed_beside_one_without_memory(c, s, *workers):
    """What the killed one held is rebuilt, and the round is finished then."""
    C = await coded.encode(A, coded.MDS(5, 4), c)
    broken, killed, where = C.encoded.workers[:3]
    break_kernels(workers, broken)
    await next(w for w in workers if w.address == killed).close()
    keys = C.encoded.spec.keys
    await async_poll_for(lambda: all(s.tasks[key].who_has for key in keys))
    result = await coded.submit(lambda operator: operator @ x, C, client=c, workers=where)
    np.testing.assert_allclose(result, A @ x)


@gen_cluster(client=True, nthreads=SIX)
async def test_pieces_that_cannot_be_read_end_the_round_if_the_others_do_not_suffice(
    c, s, *workers
):
    """Otherwise it would be tried again and again."""

    def unreadable(key):
        raise OSError("of the test")

    C = await coded.encode(A, coded.MDS(6, 6), c)
    broken = C.encoded.workers[0]
    worker_plugin(next(w for w in workers if w.address == broken)).piece = unreadable
    with captured_logger("distributed.dask_coded"), pytest.raises(OSError, match="of the test"):
        await c.compute(C @ x)


@gen_cluster(client=True, nthreads=SIX)
async def test_a_pair_with_a_worker_without_memory(c, s, *workers):
    B = np.random.default_rng(2).standard_normal((240, 5))
    pair = await coded.encode_pair(A, B, coded.Polynomial(6, 2, 2), c)
    break_kernels(workers, pair.encoded.workers[0])
    np.testing.assert_allclose(await c.compute(pair.product()), A.T @ B, atol=1e-9)
