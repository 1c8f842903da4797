"""Products that the coordinator of a loop computes alone."""

from __future__ import annotations

import asyncio
import gc
import math
import threading

import dask
import numpy as np
import pytest
import scipy.sparse as sp
from distributed import get_worker
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.runtime.coordinator import alone
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin
from dask_coded.transport import Exchange

# Alone takes 0.05 ms, and a round a millisecond or more, on a busy machine, too.
SHAPE = (400, 120)
ALONE = {"coded.round.alone": True}
COURSE: Course


def until_alone(operator, x, products=5000):
    """Multiply until a product is computed alone; return it with the rounds before."""
    for before in range(products):
        found = operator @ x
        if operator.last_round.alone:
            return found, before
    raise AssertionError("always in rounds")


def matrix(kind):
    random = np.random.default_rng(1)
    if kind == "sparse":
        return sp.random_array(SHAPE, density=0.1, format="csr", random_state=1)
    if kind == "whole":
        return random.integers(-9, 9, SHAPE)
    return random.standard_normal(SHAPE).astype(kind)


@pytest.mark.parametrize(
    ("kind", "code", "columns"),
    [
        ("float64", coded.MDS(4, 3), ()),
        ("float32", coded.MDS(4, 2), (3,)),
        ("float16", coded.MDS(4, 3), ()),
        ("sparse", coded.Repetition(4, 2), ()),
        ("whole", coded.Repetition(4, 4), (2,)),
    ],
)
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4, config=ALONE)
async def test_the_product_is_that_of_a_round(c, s, *workers, kind, code, columns):
    A = matrix(kind)
    x = np.random.default_rng(2).standard_normal((SHAPE[1], *columns))
    x = x.astype(np.float16) if kind == "float16" else x
    C = await coded.encode(A, code, client=c)
    found, before = await coded.submit(until_alone, C, x, client=c)
    assert before >= 3
    assert found.dtype == np.result_type(A, x)
    np.testing.assert_allclose(found, A @ x, rtol=2e-3 if kind == "float16" else 1e-5, atol=0.02)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=ALONE)
async def test_what_is_not_finite_is_as_in_numpy(c, s, *workers):
    def algorithm(operator, x):
        until_alone(operator, x)
        x[3], x[5] = np.inf, np.nan
        return operator @ x, operator.last_round.alone

    A = np.abs(matrix("float64"))
    A[:, [3, 5]] = np.arange(SHAPE[0])[:, None] % 2  # every other row touches neither
    C = await coded.encode(sp.csr_array(A), client=c)
    found, alone = await coded.submit(algorithm, C, np.ones(SHAPE[1]), client=c)
    assert alone
    assert np.isnan(found[1::2]).all()
    assert np.isfinite(found[::2]).all()


class Course:
    """What a test and its algorithm, which runs in a thread of this process, tell each other."""

    def __init__(self):
        self.alone, self.go_on, self.ended = (threading.Event() for _ in range(3))
        self.worker = None
        self.room = math.inf


@pytest.fixture
def course():
    global COURSE
    COURSE = Course()
    yield COURSE
    COURSE.go_on.set()


def wait_alone(operator, x):
    until_alone(operator, x)
    COURSE.worker = get_worker()
    COURSE.alone.set()
    COURSE.go_on.wait()
    return operator @ x, operator.last_round.alone


def go_on_alone(operator, x):
    try:
        until_alone(operator, x)
        COURSE.worker = get_worker()
        COURSE.alone.set()
        while True:
            operator @ x
    finally:
        COURSE.ended.set()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4, config=ALONE)
async def test_all_other_workers_die_while_the_coordinator_is_alone(c, s, *workers, course):
    A, x = matrix("float64"), np.ones(SHAPE[1])
    C = await coded.encode(A, coded.MDS(4, 3), client=c)
    future = coded.submit(wait_alone, C, x, client=c)
    await async_poll_for(course.alone.is_set)
    for worker in workers:
        if worker is not course.worker:
            await worker.close()
    course.go_on.set()
    found, alone = await future
    assert alone
    np.testing.assert_allclose(found, A @ x)


def go_on_until_a_round(operator, x):
    until_alone(operator, x)
    COURSE.worker = get_worker()
    COURSE.alone.set()
    while operator.last_round.alone:
        found = operator @ x
    return found


def go_on_in_rounds(operator, x):
    """Go on until all products are rounds. One is once in a while, to see which way is quicker."""
    go_on_until_a_round(operator, x)
    rounds = 0
    while rounds < 10:
        found = operator @ x
        rounds = 0 if operator.last_round.alone else rounds + 1
    return found


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=ALONE)
async def test_a_product_of_which_a_piece_is_gone_is_a_round(c, s, *workers, course):
    A, x = matrix("float64"), np.ones(SHAPE[1])
    C = await coded.encode(A, coded.MDS(2, 1), client=c)
    future = coded.submit(go_on_until_a_round, C, x, client=c)
    await async_poll_for(course.alone.is_set)
    [key] = [key for key in C.encoded.spec.keys if key in course.worker.data]
    [other] = [worker for worker in workers if worker is not course.worker]
    s.request_acquire_replicas(other.address, [key], stimulus_id="test")
    # The scheduler learns of the copy later than the worker has it.
    await async_poll_for(lambda: len(s.tasks[key].who_has) == 2)
    s.request_remove_replicas(course.worker.address, [key], stimulus_id="test")
    np.testing.assert_allclose(await future, A @ x)


@pytest.mark.parametrize("closed", [False, True])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=ALONE)
async def test_a_loop_that_nobody_waits_for_ends(c, s, *workers, course, closed):
    C = await coded.encode(matrix("float64"), coded.MDS(2, 1), client=c)
    future = coded.submit(go_on_alone, C, np.ones(SHAPE[1]), client=c)
    await async_poll_for(course.alone.is_set)
    if closed:
        await course.worker.close()
        await async_poll_for(course.ended.is_set)
    await future.cancel()
    await async_poll_for(course.ended.is_set)


@pytest.mark.parametrize(("verify", "config"), [(True, True), (False, False)])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_verified_products_and_those_of_users_who_say_so_are_rounds(
    c, s, *workers, verify, config
):
    def algorithm(operator, x):
        return [operator.last_round.alone for _ in range(20) if (operator @ x).size]

    with dask.config.set({"coded.round.alone": config}):
        C = await coded.encode(matrix("float64"), coded.MDS(2, 1), c, verify=verify)
        assert not any(await coded.submit(algorithm, C, np.ones(SHAPE[1]), client=c))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, config=ALONE)
async def test_a_large_matrix_is_not_fetched(c, s, *workers, monkeypatch):
    def algorithm(operator, x):
        return [operator.last_round.alone for _ in range(200) if (operator @ x).size]

    monkeypatch.setattr(alone, "_MOST", 1000)
    C = await coded.encode(matrix("float64"), coded.MDS(3, 2), client=c)
    assert not any(await coded.submit(algorithm, C, np.ones(SHAPE[1]), client=c))


def rounds_only(operator, x):
    return [operator.last_round.alone for _ in range(200) if (operator @ x).size]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, config=ALONE)
async def test_blocks_that_cannot_be_fetched_leave_rounds(c, s, *workers, monkeypatch):
    asked, errors = [], []

    async def rows_of(worker, address, key, start, stop):
        asked.append(key)
        raise ValueError("This cannot be read.")

    monkeypatch.setattr(alone, "rows_of", rows_of)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    C = await coded.encode(matrix("float64"), coded.MDS(3, 2), client=c)
    assert not any(await coded.submit(rounds_only, C, np.ones(SHAPE[1]), client=c))
    gc.collect()  # only then does the event loop hear of errors that nothing has awaited
    assert asked and not errors


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, config=ALONE)
async def test_no_block_is_fetched_if_one_of_the_coordinator_is_on_the_disk(
    c, s, *workers, monkeypatch
):
    asked = []

    async def rows_of(worker, address, key, start, stop):
        asked.append(key)

    monkeypatch.setattr(alone, "rows_of", rows_of)
    monkeypatch.setattr(CodedWorkerPlugin, "piece_in_memory", lambda self, key: None)
    C = await coded.encode(matrix("float64"), coded.Repetition(3, 2), client=c)
    assert not any(await coded.submit(rounds_only, C, np.ones(SHAPE[1]), client=c))
    assert not asked


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, config=ALONE)
async def test_copies_of_blocks_go_when_memory_is_short(c, s, *workers, course, monkeypatch):
    monkeypatch.setattr(Exchange, "room", lambda self: course.room)
    A, x = matrix("float64"), np.ones(SHAPE[1])
    C = await coded.encode(A, coded.MDS(3, 3), client=c)
    future = coded.submit(go_on_in_rounds, C, x, client=c)
    await async_poll_for(course.alone.is_set)
    course.room = 0
    np.testing.assert_allclose(await future, A @ x)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=ALONE)
async def test_products_alone_are_counted_beside_rounds(c, s, *workers):
    def algorithm(operator, x):
        return [operator.last_round.alone for _ in range(200) if (operator @ x).size]

    C = await coded.encode(matrix("float64"), coded.MDS(2, 1), client=c)
    products = await coded.submit(algorithm, C, np.ones(SHAPE[1]), client=c)
    found = await coded.report(C, c)
    assert (found.alone, found.rounds) == (sum(products), 200 - sum(products))
    assert found.alone > 0 and found.alone_seconds > 0
    assert f"{found.alone} products alone" in repr(found)
    totals = s.extensions["dask-coded"].observer.totals()
    assert (totals["alone"], totals["rounds"]) == (found.alone, found.rounds)
