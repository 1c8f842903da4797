"""Products whose digits, or whose infinities, depend on which worker is late."""

from __future__ import annotations

import gc
import warnings
from functools import partial

import numpy as np
import pytest
import scipy.sparse
from distributed import Client
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.graph import filters
from dask_coded.rounds import Assembler
from dask_coded.runtime.messages import StartRound
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.submission import run
from dask_coded.transport.messages import Ping, Pong

FOUR = [("127.0.0.1", 1)] * 4


def miss_a_round(workers, address: str) -> list[str]:
    """Have a worker miss one round, and compute from the next one on; return the missed one."""
    handlers = worker_plugin(next(w for w in workers if w.address == address)).exchange._handlers
    start, call, missed = handlers[StartRound], handlers[Ping], list[str]()

    def started(message, answer):
        if missed:
            start(message, answer)
        else:
            missed.append(message.run_id)

    def called(message, answer):
        if message.run_id in missed:
            answer(Pong(message.run_id))
        else:
            call(message, answer)

    handlers[StartRound], handlers[Ping] = started, called
    return missed


def heavy(rows: int) -> np.ndarray:
    """Return numbers in single precision; the first column has a long tail."""
    rng = np.random.default_rng(0)
    A = rng.standard_normal((rows, 20))
    A[:, 0] = 1e3 * np.exp(6 * rng.standard_normal(rows))
    return A.astype(np.float32)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_late_block_beside_a_heavy_column(c, s, *workers):
    A, x = heavy(600), np.random.default_rng(1).standard_normal(20).astype(np.float32)
    x[0] = 0  # in single precision, sums of rows have lost the other columns

    def loop(operator):
        return operator @ x, operator.last_round.doubtful

    C = await coded.encode(A, coded.MDS(4, 3), c)
    missed = miss_a_round(workers, C.encoded.workers[0])
    with pytest.warns(coded.AccuracyWarning, match=r"of 600 rows .*MDS\(n=4, k=3\)"):
        result, doubtful = await coded.submit(loop, C, client=c)
    assert missed
    wrong = np.abs(result - A @ x) > 100 * 1e-7 * (np.abs(A) @ np.abs(x))
    assert 0 < np.count_nonzero(wrong) <= doubtful


# Algorithms of the package are tolerant if they correct errors in later rounds.
RUNS = {
    "a user's": lambda *args, client: coded.submit(
        *args, loop=coded.Loop(), client=client
    ).result(),
    "tolerant": run,
    "tolerant, watched": partial(run, callback=len),
    "exact": partial(run, tolerant=False),
    "exact, watched": partial(run, tolerant=False, callback=len),
}


def one_round(operator, x, loop):
    operator @ x
    return operator.last_round.doubtful


@pytest.mark.parametrize("whose", RUNS)
def test_tolerant_algorithms_warn_only_if_half_of_the_digits_are_lost(whose):
    rng = np.random.default_rng(0)
    A, x = rng.standard_normal((600, 20)), rng.standard_normal(20)
    A[:, 0] = 1e3 * np.exp(2 * rng.standard_normal(600))
    x[0] = 0
    options = {"n_workers": 4, "threads_per_worker": 1, "processes": False}
    with (
        Client(**options, dashboard_address=None, set_as_default=False) as client,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", coded.AccuracyWarning)
        C = coded.encode(A, coded.MDS(4, 3), client)
        missed = miss_a_round(client.cluster.workers.values(), C.encoded.workers[0])
        assert RUNS[whose](one_round, C, x, client=client)
        assert missed
        assert bool(client.get_events("warn")) == (not whose.startswith("tolerant"))


def test_a_graph_filter_warns_of_all_lost_digits(client, monkeypatch):
    """Nothing corrects its last product."""
    seen, path = [], scipy.sparse.csr_array(np.eye(3, k=1) + np.eye(3, k=-1))
    monkeypatch.setattr(filters, "run", lambda *args, tolerant, **kw: seen.append(tolerant))
    for kernel in (coded.graph.Hops(1), coded.graph.Heat(1.0)):
        coded.graph.filter(path, np.ones(3), kernel, lmax=2.0, client=client)
    assert seen == [False, False]


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize(
    "case",
    ["operand", "overflow", "half precision", "too small"],
    ids=lambda case: case.replace(" ", "-"),
)
def test_what_no_dtype_holds_is_the_same_whichever_worker_is_late(block, case):
    A = np.random.default_rng(2).standard_normal((12, 8))
    x = np.ones(8)
    if case == "operand":
        A[5, 3], x[3] = 0.0, np.inf
    elif case == "overflow":
        A[5], x = 1e308, x * 10
    elif case == "too small":
        A[5] *= 1e-25
        A, x = A.astype(np.float32), (x * 1e-20).astype(np.float32)
    else:
        A[5], x = 6e4, x * 2
        A, x = A.astype(np.float16), x.astype(np.float16)

    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(4, 3), c)
        missed = miss_a_round(workers, C.encoded.workers[block])
        result = await c.compute(C @ x)
        assert missed
        wide = np.result_type(A, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = (A.astype(wide) @ x.astype(wide)).astype(A.dtype)
        assert result.dtype == expected.dtype
        rtol = {"half precision": 1e-2, "too small": 1e-4}.get(case, 1e-9)
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=1e-40)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of infinite products
        test()


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_block_that_is_rebuilt_with_fewer_digits(c, s, *workers):
    C = await coded.encode(heavy(60), coded.MDS(4, 3), c)
    with pytest.warns(coded.AccuracyWarning, match="rebuilt from pieces with much larger rows"):
        await next(w for w in workers if w.address == C.encoded.workers[0]).close()
        x = np.ones(20, np.float32)
        np.testing.assert_allclose(await c.compute(C @ x), heavy(60) @ x, rtol=1e-3)
        key = C.encoded.spec.keys[0]  # the product may come before it is rebuilt
        await async_poll_for(lambda: key in s.tasks and s.tasks[key].who_has, timeout=60)


@pytest.mark.parametrize("rows", [60, 20])
@gen_cluster(client=True, nthreads=FOUR)
async def test_a_product_of_a_block_that_was_rebuilt_beside_a_heavy_column(c, s, *workers, rows):
    """No row of the block has entries where the operand is large."""
    A = np.random.default_rng(3).standard_normal((rows, 40))
    A[rows // 2 :, 0] = 0
    x = np.random.default_rng(4).standard_normal(40)
    C = await coded.encode(A, coded.MDS(4, 2), c)
    key = C.encoded.spec.keys[1]
    await next(w for w in workers if w.address == C.encoded.workers[1]).close()
    await async_poll_for(lambda: key in s.tasks and s.tasks[key].who_has, timeout=60)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x, atol=1e-12)
    x[0] = 1e12
    with pytest.warns(coded.AccuracyWarning, match="rows of a product with .* have lost digits"):
        await c.compute(C @ x)
        await async_poll_for(lambda: s.get_events("warn"), timeout=60)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's
@gen_cluster(client=True, nthreads=FOUR)
async def test_a_product_that_is_not_finite_ends_without_the_worker_of_a_block(c, s, *workers):
    """Rows of that block may become NaN, and a warning says so."""
    A = np.random.default_rng(3).standard_normal((12, 8))
    A[5] = 1e308
    C = await coded.encode(A, coded.MDS(4, 3), c)
    handlers = worker_plugin(
        next(w for w in workers if w.address == C.encoded.workers[0])
    ).exchange._handlers
    for message in handlers:  # it does not answer
        handlers[message] = lambda *_: None
    options = {"client": c, "workers": C.encoded.workers[1]}
    with pytest.warns(coded.AccuracyWarning, match="have lost digits"):
        result = await coded.submit(lambda operator: operator @ np.full(8, 10.0), C, **options)
    expected = A @ np.full(8, 10.0)
    others = np.delete(np.arange(12), [1, 5])
    np.testing.assert_allclose(result[others], expected[others])
    assert np.isinf(result[5])
    assert not np.isfinite(result[1])


@gen_cluster(client=True, nthreads=FOUR)
async def test_rounds_that_are_not_finite_leave_nothing(c, s, *workers):
    A = np.random.default_rng(4).standard_normal((12, 8))

    def loop(operator):
        before = sum(type(found) is Assembler for found in gc.get_objects())
        gc.disable()
        try:
            for _ in range(10):
                operator @ np.full(8, np.nan)
        finally:
            gc.enable()
        return sum(type(found) is Assembler for found in gc.get_objects()) - before

    C = await coded.encode(A, coded.MDS(4, 3), c)
    miss_a_round(workers, C.encoded.workers[0])
    assert await coded.submit(loop, C, client=c) <= 2
