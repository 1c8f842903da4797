"""What is no longer used leaves the cluster at once, not when the garbage is collected."""

from __future__ import annotations

import asyncio
import gc
import weakref

import dask
import dask.array as da
import numpy as np
import pytest
from dask import graph_manipulation
from distributed import Client, scheduler
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.linalg import power_iteration, randomized_svd

pytestmark = pytest.mark.versions

FOUR = [("127.0.0.1", 1)] * 4
A = np.random.default_rng(0).standard_normal((24, 7))
x = np.arange(7.0)

# What algorithms have got, on workers of this process.
seen: list[weakref.ref] = []


@pytest.fixture(autouse=True)
def no_collection():
    """Have nothing but reference counts free objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        seen.clear()
        gc.enable()


def times(operator):
    seen.append(weakref.ref(operator))
    return operator @ x


def times_both(operator):
    seen.extend([weakref.ref(operator), weakref.ref(operator.T)])
    assert operator.T.T is operator
    return operator.T @ (operator @ x)


def product(pair):
    seen.append(weakref.ref(pair))
    return pair.product()


def fails(operator):
    raise ArithmeticError


async def encoded(c, **options):
    return await coded.encode(A, coded.MDS(3, 2), c, **options)


async def a_lazy_product(c):
    await c.compute(await encoded(c) @ x)


async def a_product_that_is_optimized(c):
    (lazy,) = dask.optimize(await encoded(c) @ x)
    np.testing.assert_allclose(await c.compute(lazy), A @ x)


async def a_product_within_delayed(c):
    lazy = dask.delayed(np.negative)(await encoded(c) @ x)
    np.testing.assert_allclose(await c.compute(lazy), -A @ x)


async def a_product_beside_another_array(c):
    ones = da.ones(24, chunks=24)
    lazy = ones.map_blocks(lambda one, other: one + other, other=await encoded(c) @ x, dtype=float)
    np.testing.assert_allclose(await c.compute(lazy), 1 + A @ x)


async def a_cloned_product(c):
    lazy = graph_manipulation.clone(await encoded(c) @ x)
    np.testing.assert_allclose(await c.compute(lazy), A @ x)


async def a_derived_array(c):
    await c.compute((2 * await encoded(c))[3:] @ x)


async def a_transposed_array(c):
    await c.compute((await encoded(c, transpose=True)).T @ np.ones(24))


async def a_loop(c):
    await coded.submit(times, await encoded(c), client=c)


async def a_loop_without_client(c):
    await coded.submit(times, await encoded(c))


async def a_loop_in_a_dict(c):
    await coded.submit(len, {"operators": [await encoded(c)]}, client=c)


async def a_loop_with_the_transpose(c):
    await coded.submit(times_both, await encoded(c, transpose=True), client=c)


async def a_loop_that_fails(c):
    future = coded.submit(fails, await encoded(c), client=c)
    await future.exception()
    future.release()


async def a_pair(c):
    await coded.submit(product, await coded.encode_pair(A, A, client=c), client=c)


async def a_gram_matrix(c):
    await c.compute(await coded.gram(A, client=c))


async def an_extended_array(c):
    C = await coded.encode(A, coded.RandomLinear(3, 2), c)
    await c.compute(await C.extend() @ x)


async def an_array_that_is_encoded_again(c):
    await coded.encode(await encoded(c), coded.MDS(3, 2), c)


async def an_array_that_is_refused(c):
    holed = np.where(A > 2, np.nan, A)
    with pytest.raises(ValueError, match="NaN"):
        await coded.encode(da.from_array(holed, chunks=5), coded.MDS(3, 2), c)


USES = [
    encoded,
    a_lazy_product,
    a_product_that_is_optimized,
    a_product_within_delayed,
    a_product_beside_another_array,
    a_cloned_product,
    a_derived_array,
    a_transposed_array,
    a_loop,
    a_loop_without_client,
    a_loop_in_a_dict,
    a_loop_with_the_transpose,
    a_loop_that_fails,
    a_pair,
    a_gram_matrix,
    an_extended_array,
    an_array_that_is_encoded_again,
    an_array_that_is_refused,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_an_array_is_released_at_once_after(use):
    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        await use(c)
        await async_poll_for(lambda: not s.tasks, timeout=10)

    test()


@pytest.mark.parametrize(
    "use", [a_loop, a_loop_with_the_transpose, a_pair], ids=lambda use: use.__name__
)
def test_operators_are_released_at_once_after(use):
    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        await use(c)
        await async_poll_for(lambda: seen and not any(ref() for ref in seen), timeout=10)

    test()


@pytest.mark.parametrize("source", [A, da.from_array(A, chunks=5)], ids=["numpy", "dask"])
def test_an_algorithm_leaves_nothing_in_the_cluster(client, source):
    randomized_svd(source, 2, client=client)
    power_iteration(source.T @ source, client=client, callback=lambda progress: None)

    async def gone(dask_scheduler):
        await async_poll_for(lambda: not dask_scheduler.tasks, timeout=10)

    client.run_on_scheduler(gone)


@pytest.mark.parametrize("source", [A, da.from_array(A, chunks=5)], ids=["numpy", "dask"])
def test_a_client_that_exits_while_it_encodes_leaves_nothing(source, monkeypatch):
    begun, left = asyncio.Event(), asyncio.Event()
    scatter = scheduler.scatter_to_workers

    async def late(*args, **kwargs):
        begun.set()
        await left.wait()
        return await scatter(*args, **kwargs)

    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        await encoded(c)  # the plugins are there
        monkeypatch.setattr(scheduler, "scatter_to_workers", late)
        async with Client(s.address, asynchronous=True, set_as_default=False) as other:
            encoding = asyncio.ensure_future(coded.encode(source, coded.MDS(3, 2), other))
            if source is A:
                await begun.wait()
            else:
                await async_poll_for(lambda: s.clients[other.id].wants_what)
            encoding.cancel()  # as Ctrl-C does
        await async_poll_for(lambda: other.id not in s.clients)
        left.set()
        if source is A:
            await async_poll_for(
                lambda: any(
                    event["action"] == "scatter" and event["client"] == other.id
                    for _, event in s.get_events("all")
                )
            )
        await async_poll_for(lambda: not s.tasks)
        assert other.id not in s.clients
        assert not s.extensions["dask-coded"].arrays

    test()


@pytest.mark.parametrize("source", [A, da.from_array(A, chunks=5)], ids=["numpy", "dask"])
def test_the_scheduler_keeps_nothing_of_arrays_that_are_released(source):
    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        def kept() -> dict[str, int]:
            """Return how many objects there are that Dask and the plugin keep for ever."""
            spans, plugin = s.extensions["spans"], s.extensions["dask-coded"]
            (own,) = spans.spans_search_by_name["dask-coded",]
            found = {"spans": len(spans.spans), "groups": len(own.groups)}
            found["prefixes"], found["task groups"] = len(s.task_prefixes), len(s.task_groups)
            found["clients"], found["arrays"] = len(s.clients), len(plugin.arrays)
            measured = [key for w in workers for key in w.digests_total if type(key) is tuple]
            found["measured spans"] = len(
                {part for key in measured for part in key} & {*spans.spans}
            )
            for part in (plugin, plugin.homes, plugin.arrays, plugin.supervisor, plugin.placing):
                for name, value in vars(part).items():
                    # Workers that know of something to do are told with heartbeats.
                    if isinstance(value, dict | set | list) and name != "_active":
                        found[f"{type(part).__name__}.{name}"] = len(value)
            return found

        async def arrays(count: int) -> dict[str, int]:
            for _ in range(count):
                await coded.encode(source, coded.MDS(4, 3), c, verify=True)
                await async_poll_for(lambda: not s.tasks)
            return kept()

        before = await arrays(3)
        assert await arrays(6) == before

    test()
