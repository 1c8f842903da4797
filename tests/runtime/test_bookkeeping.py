"""Thousands of rounds leave nothing behind: no container of plugins and coordinators grows.

``python -m tests.runtime.test_bookkeeping 1000000`` runs that many rounds of a participant and its
channel alone, which takes minutes, then as many of a whole cluster in one process: an hour or two.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import operator
import sys
from collections import Counter, deque
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Event, utils_test
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.runtime.coordinator.rounds import Coordinator
from dask_coded.runtime.messages import StartRound
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin, worker_plugin
from dask_coded.transport import Channel
from dask_coded.transport.messages import Message

pytestmark = pytest.mark.versions

FOUR = [("127.0.0.1", 1)] * 4
A = np.random.default_rng(0).standard_normal((24, 6))

#: What the current plan of an array holds; it is replaced as a whole by the next one.
REPLACED = {"RoundPlan", "Layout"}
#: What codes remember of sets of pieces: there are 16 sets here, and the caches are limited.
CACHES = ("._factors", "._spans", "Observer._tasks")  # the last one by worker


def sizes(*roots: Any) -> Counter[str]:
    """Return the sizes of all containers of this package that can be reached, by where they are."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    stack = [(root, type(root).__name__) for root in roots]
    while stack:
        value, name = stack.pop()
        if id(value) in seen or type(value).__name__ in REPLACED:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            found[name] += len(value)
            parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
            stack += [(part, name) for part in parts]
        elif isinstance(value, np.ndarray):
            found[name] += value.size
        elif type(value).__module__.startswith("dask_coded") and hasattr(value, "__dict__"):
            kind = type(value).__name__
            stack += [(part, f"{kind}.{attribute}") for attribute, part in vars(value).items()]
    return found


def batches(operator: Any, rounds: list[int]) -> None:
    """Run batches of rounds; after each one, wait until the test has counted."""
    for batch, count in enumerate(rounds):
        for i in range(count):
            operator @ np.full(operator.shape[1], float(i))
        Event(f"done-{batch}").set()
        Event(f"go-{batch}").wait()


def _once(operator: Any) -> None:
    operator @ np.ones(operator.shape[1])


async def count(scheduler: Any, workers: Any) -> Counter[str]:
    """Let all messages arrive that are due, then count."""
    plugins = [worker_plugin(worker) for worker in workers]

    def settled() -> bool:
        channels = [c for p in plugins for c in p.exchange._channels.values()]
        for channel in channels:
            channel.flush()
        plugin = scheduler.extensions["dask-coded"]
        return (
            len(plugin._holding) <= 1
            # Workers were asked a moment ago whether they live.
            and not any(plugin.standings.membership.owes(worker.address) for worker in workers)
            and not any(p._jobs for p in plugins)
            and not any(c._sent for c in channels)
        )

    await async_poll_for(settled, timeout=60)
    coordinators = [found for found in gc.get_objects() if issubclass(type(found), Coordinator)]
    found = sizes(scheduler.extensions["dask-coded"], *plugins, *coordinators)
    # What has been measured since the last plan, of some or all workers.
    assert found.pop("LoopHistory.speeds", 0) <= len(workers)
    return Counter({name: size for name, size in found.items() if not name.endswith(CACHES)})


@pytest.mark.slow
@gen_cluster(client=True, nthreads=FOUR, timeout=240)
async def test_no_container_grows_with_the_number_of_rounds(c, s, *workers):
    await _rounds(c, s, workers, [100, 300, 300], lazy=[10, 20, 20])


async def _rounds(client: Any, scheduler: Any, workers: Any, rounds: list[int], lazy: list[int]):
    C = await coded.encode(A, coded.MDS(4, 3), client, verify=True)
    for worker in workers:  # each of them has coordinated rounds before the first count
        await coded.submit(_once, C, client=client, workers=worker.address)
        for i in range(1000):  # a worker remembers the attempts of so many tasks
            worker_plugin(worker).exchange.attempts.end((("earlier", i), 0))
    future = coded.submit(batches, C, rounds, client=client)
    counts = []
    for batch, products in enumerate(lazy):
        for i in range(products):
            await client.compute(C @ np.full(A.shape[1], float(i)))
        await Event(f"done-{batch}").wait()
        gc.collect()
        counts.append(await count(scheduler, workers))
        await Event(f"go-{batch}").set()
    await future
    assert len(counts[0]) > 20
    # A leak grows in every batch. On a busy machine a worker may take part for the first time in
    # a later batch, so a container with an entry for each worker may still grow once.
    grown = [after - before for before, after in itertools.pairwise(counts)]
    always = functools.reduce(operator.and_, grown)
    assert not always, f"grown: {grown}"


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_forget_arrays_that_are_released(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c, verify=True)
    for worker in workers:
        await coded.submit(_once, C, client=c, workers=worker.address)
    plugins = [worker_plugin(worker) for worker in workers]
    assert all(plugin._specs and plugin.checks for plugin in plugins)
    del C
    await async_poll_for(
        lambda: not any(p._specs or p.checks or p._series for p in plugins), timeout=60
    )


# -- a participant and its channel alone -------------------------------------------------------


class Inline(Executor):
    """Computes at once, in the thread that asks."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def start(run_id: str, attempt: tuple[str, int], key: str) -> StartRound:
    return StartRound(
        run_id,
        kernel="matvec",
        ticket=(np.ones(6), ()),
        shared=False,
        stripes=4,
        pieces=((0, key, 24),),
        ranges=((0, 0, 4),),
        least_batch=1,
        interval=1.0,
        growth=1.0,
        lead=0.0,
        series="series",
        attempt=attempt,
    )


async def _alone(rounds: list[int]) -> None:
    async def hello(worker: str, **what: Any) -> str:
        return worker

    worker: Any = SimpleNamespace(
        address="a",
        data={"piece": A},
        handlers={},
        stream_handlers={},
        extensions={},
        memory_manager=SimpleNamespace(memory_limit=None),
        state=SimpleNamespace(nthreads=1, tasks={}),
        scheduler=SimpleNamespace(coded_hello=hello),
    )
    with dask.config.set({"coded.shared-memory": False}):
        plugin = CodedWorkerPlugin()
        await plugin.setup(worker)
    plugin._executor.shutdown()
    plugin._executor = Inline()
    exchange, loop = plugin.exchange, asyncio.get_running_loop()

    def answer(message: Message) -> None:
        loop.call_soon(channel.receive, message)

    channel = Channel(
        worker, "b", exchange.membership, local=lambda message: exchange._handle(message, answer)
    )

    async def run(number: int) -> None:
        """Run one round; it ends in one of the ways in which rounds end."""
        run_id, attempt = f"run-{number}", (f"task-{number // 10}", number)
        answered = asyncio.Event()
        channel.listen(run_id, lambda message: answered.set())
        channel.send(start(run_id, attempt, "gone" if number % 7 == 0 else "piece"))
        if number % 5:
            await answered.wait()
        if number % 11 == 0:
            exchange.attempts.end(attempt)
        if number % 13 == 0:
            plugin._coordinator_gone(answer)
        channel.end(run_id)

    counts = []
    numbers = itertools.count(1)
    for batch in rounds:
        for number in itertools.islice(numbers, batch):
            await run(number)
        channel.flush()
        await async_poll_for(lambda: not plugin._jobs, timeout=60)
        gc.collect()
        counts.append(sizes(plugin, channel))
    first, last = counts
    assert len(first) > 10
    assert last - first == Counter(), f"grown: {last - first}"


@pytest.mark.long
def test_no_container_of_a_participant_grows_with_the_number_of_rounds():
    # In the first ones, the memory of runs that are over fills up.
    asyncio.run(_alone([12_000, 3_000]))


if __name__ == "__main__":
    # As in conftest: gen_cluster resets the configuration.
    utils_test.original_config["coded"] = dask.config.get("coded")

    @gen_cluster(client=True, nthreads=FOUR, timeout=10**6)
    async def million(c, s, *workers):
        await _rounds(c, s, workers, [1000, int(sys.argv[1])], lazy=[20, 20])

    asyncio.run(_alone([12_000, int(sys.argv[1])]))
    million()
