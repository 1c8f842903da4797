"""Thousands of rounds leave nothing behind: no container of plugins and coordinators grows.

``python -m tests.runtime.test_bookkeeping 1000000`` runs that many rounds, in one process.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Event, utils_test
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.runtime.coordinator import Coordinator
from dask_coded.runtime.worker import worker_plugin

FOUR = [("127.0.0.1", 1)] * 4
A = np.random.default_rng(0).standard_normal((24, 6))

#: What the current plan of an array holds; it is replaced as a whole by the next one.
REPLACED = {"RoundPlan", "Layout"}
#: What codes remember of sets of pieces: there are 16 sets here, and the caches are limited.
CACHES = ("._factors", "._spans")


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
            and not plugin.supervisor._watch._owed  # workers asked a moment ago whether they live
            and not any(p._jobs for p in plugins)
            and not any(c._sent for c in channels)
        )

    await async_poll_for(settled, timeout=60)
    coordinators = [found for found in gc.get_objects() if isinstance(found, Coordinator)]
    found = sizes(scheduler.extensions["dask-coded"], *plugins, *coordinators)
    # What has been measured since the last plan, of some or all workers.
    assert found.pop("LoopHistory.speeds", 0) <= len(workers)
    return Counter({name: size for name, size in found.items() if not name.endswith(CACHES)})


@pytest.mark.slow
@gen_cluster(client=True, nthreads=FOUR, timeout=240)
async def test_no_container_grows_with_the_number_of_rounds(c, s, *workers):
    await _rounds(c, s, workers, [200, 1500], lazy=[20, 60])


async def _rounds(client: Any, scheduler: Any, workers: Any, rounds: list[int], lazy: list[int]):
    C = await coded.encode(A, coded.MDS(4, 3), client, verify=True)
    for worker in workers:  # each of them has coordinated rounds before the first count
        await coded.submit(_once, C, client=client, workers=worker.address)
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
    first, last = counts
    assert len(first) > 20
    assert last - first == Counter(), f"grown: {last - first}"


if __name__ == "__main__":
    # As in conftest: gen_cluster resets the configuration.
    utils_test.original_config["coded"] = dask.config.get("coded")

    @gen_cluster(client=True, nthreads=FOUR, timeout=10**6)
    async def million(c, s, *workers):
        await _rounds(c, s, workers, [1000, int(sys.argv[1])], lazy=[20, 20])

    million()
