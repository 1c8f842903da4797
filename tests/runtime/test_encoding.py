"""Data moved to make pieces; pieces of workers that leave and of workers that join."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from dask.utils import format_bytes
from distributed import Event, Worker, wait
from distributed.utils import open_port
from distributed.utils_test import async_poll_for, gen_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_coded as coded
from dask_coded.rounds import Geometry
from dask_coded.rounds.scaling import exponents_of, scaled
from dask_coded.runtime.answers import Source
from dask_coded.runtime.client import blocks as blocks_module
from dask_coded.runtime.client.blocks import _filled
from dask_coded.runtime.client.encoding import extend
from dask_coded.runtime.client.source import block_rows
from dask_coded.runtime.messages import StartRound
from dask_coded.runtime.scheduler.homes import Homes
from dask_coded.runtime.spec import ArraySpec, CodedTask
from dask_coded.runtime.worker.pieces import _Mixer
from dask_coded.runtime.worker.plugin import worker_plugin

FIVE = [("127.0.0.1", 1)] * 5
SIX = [("127.0.0.1", 1)] * 6

# Blocks of 6 rows when cut in 4, of 8 when cut in 3.
A = np.random.default_rng(0).standard_normal((24, 7))
x = np.random.default_rng(1).standard_normal(7)


async def check(client, C) -> None:
    np.testing.assert_allclose(await client.compute(C @ x), A @ x)
    np.testing.assert_allclose(await client.compute(C), A, atol=1e-12)


def homes(scheduler, C) -> list[set[str]]:
    """Return the addresses of the workers that hold each piece."""
    tasks = [scheduler.tasks[key] for key in C.encoded.spec.keys]
    return [{ws.address for ws in ts.who_has or ()} for ts in tasks]


def made(scheduler) -> list[dict]:
    """Return the scheduler's events about pieces made after the array was encoded."""
    return [event for _, event in scheduler.get_events("dask-coded") if event["action"] == "made"]


async def close(workers, address: str) -> None:
    await next(w for w in workers if w.address == address).close()


# -- data moved --------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_blocks_are_filled_from_chunks_of_any_sizes(heights, widths, k, ahead):
    A = np.random.default_rng(0).random((sum(heights), sum(widths)))
    rows = block_rows(A, coded.MDS(k, k))
    source = da.from_array(A, chunks=(tuple(heights), tuple(widths)))
    if all(rows):
        filled, steps = _filled(source, rows, ahead)
        np.testing.assert_array_equal(filled.compute(scheduler="sync"), A)
        assert filled.chunks == (rows, (A.shape[1],))
        assert len(steps) == k


class Stored:
    """A file of numbers, for example."""

    shape, dtype, ndim = A.shape, A.dtype, 2

    def __getitem__(self, index):
        return A[index]


def chunks_that_wait(source: da.Array, k: int, ahead: int) -> list[int]:
    """Return how many chunks of each block wait until another one is copied."""
    filled, steps = _filled(source, block_rows(source, coded.MDS(k, k)), ahead)
    graph = dict(filled.dask)
    name = filled.name
    waiting = [sorted(key[2] for key in keys if key[0] != name) for keys in steps]
    for block, found in enumerate(waiting):
        for i in found:
            copied = (f"{name}-copied", block, i)
            left = len(steps[block]) - len(found) - i  # chunks of the block that come after it
            assert graph[copied].dependencies == {(name, block, left)}
            assert copied in graph[f"{name}-chunk", block, i + ahead].dependencies
            assert copied in graph[name, block, 0].dependencies  # a chunk may be lost till then
            assert graph[name, block, left - ahead].dependencies >= {
                (f"{name}-chunk", block, i + ahead)
            }
    np.testing.assert_array_equal(filled.compute(), source.compute())
    return [len(found) for found in waiting]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_only_a_few_chunks_are_computed_before_they_are_copied(ahead):
    numbers = da.random.default_rng(0).random((24, 5), chunks=(2, 5))
    # Each block has six chunks, which Dask makes by one task each.
    stored = da.from_array(Stored(), chunks=(2, 7))
    for source in (numbers, numbers + 1, stored, 2 * stored):
        assert chunks_that_wait(source, 2, ahead) == [6 - ahead] * 2
    # The last chunk of the first block is the first one of the second.
    uneven = da.random.default_rng(0).random((24, 5), chunks=(5, 5))
    assert sum(map(len, _filled(uneven, (12, 12), 1)[1])) == 2 + 1 + 2 + 2
    # Results of other tasks would pile up instead.
    assert chunks_that_wait(numbers.rechunk((3, 5)), 2, ahead) == [0, 0]
    assert chunks_that_wait(da.concatenate([numbers, numbers]), 2, ahead) == [0, 0]
    with dask.annotate(retries=3):
        annotated = numbers.map_blocks(np.negative)
    assert chunks_that_wait(annotated, 2, ahead) == [0, 0]


@gen_cluster(client=True, nthreads=SIX)
async def test_a_coded_round_is_no_chunk_that_waits_within_another_task(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    products = [C @ np.full((A.shape[1], 2), float(i)) for i in range(6)]
    filled, steps = _filled(da.concatenate(products), (3 * len(A), 3 * len(A)), 1)
    assert {key[0] for keys in steps for key in keys} == {filled.name}


@pytest.mark.parametrize("block", range(3))
def test_the_home_of_a_block_leaves_before_the_round_that_makes_it_has_ended(block):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(6, 4), c)
        exchanges, held = [worker_plugin(w).exchange for w in workers], []
        for exchange in exchanges:
            exchange._handlers[StartRound] = lambda *m, exchange=exchange: held.append(
                (exchange, *m)
            )
        X = np.random.default_rng(0).standard_normal((A.shape[1], 3))
        encoding = asyncio.ensure_future(coded.encode(C @ X, coded.MDS(4, 3), c))
        await async_poll_for(lambda: held, timeout=60)
        homes = s.extensions["dask-coded"].homes
        (product,) = [ts for ts in s.tasks.values() if isinstance(ts.run_spec, CodedTask)]
        steps = [step for part in product.dependents for step in part.dependents]
        pinned = sorted(ts.key for ts in steps if homes.home(ts.key))
        assert len(pinned) == 3
        leaving = homes.home(pinned[block])
        for exchange in exchanges:
            exchange._handlers[StartRound] = worker_plugin(exchange._worker)._handle
        await close(workers, leaving)
        for exchange, message, answer in held:
            if exchange.address != leaving:
                exchange._handle(message, answer)
        D = await encoding
        np.testing.assert_allclose(await c.compute(D @ np.ones(3)), A @ X @ np.ones(3))

    test()


@pytest.mark.parametrize("source", [A, da.from_array(A, chunks=(5, -1))], ids=["array", "dask"])
def test_a_worker_without_the_resources_of_an_annotation_makes_its_piece(source):
    some = [("127.0.0.1", 1, {"resources": {"GPU": 1}})] * 2 + [("127.0.0.1", 1)] * 2

    @gen_cluster(client=True, nthreads=some)
    async def test(c, s, *workers):
        with dask.annotate(resources={"GPU": 1}):
            annotated = source + 0
            C = await coded.encode(annotated, coded.MDS(4, 3), c)
        assert len(set(C.encoded.workers)) == 4
        np.testing.assert_allclose(await c.compute(C @ x), A @ x)

    test()


@gen_cluster(client=True, nthreads=[])
async def test_workers_that_know_their_host_by_name(c, s):
    async with AsyncExitStack() as stack:
        for _ in range(3):
            port = open_port()
            options = {"host": "127.0.0.1", "port": port, "nthreads": 1}
            contact = f"tcp://localhost:{port}"
            await stack.enter_async_context(Worker(s.address, contact_address=contact, **options))
        C = await coded.encode(A, coded.MDS(3, 2), c)
        loop = coded.submit(lambda operator: operator @ x, C, client=c)
        np.testing.assert_allclose(await loop, A @ x)
        for worker in s.workers:
            np.testing.assert_allclose(await c.compute(C @ x, workers=[worker]), A @ x)


@pytest.mark.parametrize("chunks", [(40, -1), (25, 3)])
@pytest.mark.parametrize("kind", [np.array, scipy.sparse.csr_array])
@pytest.mark.parametrize("rows", [1, 80])
def test_an_array_whose_chunks_are_not_as_it_says_is_refused(chunks, kind, rows):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        said = da.ones((120, 6), chunks=chunks)
        wrong = said.map_blocks(lambda block: kind(np.ones((rows, block.shape[1]))), dtype=float)
        if kind is not np.array:
            wrong = da.Array(wrong.dask, wrong.name, wrong.chunks, meta=kind((0, 0), dtype=float))
        persisted = c.persist(wrong, workers=workers[-1].address)  # some blocks are far from there
        for source in (wrong, persisted):
            with pytest.raises(ValueError, match=r"has shape \(.*declares \(.*compute_chunk_sizes"):
                await coded.encode(source, coded.Repetition(3, 2), c)

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_chunks_that_are_in_memory_need_not_wait(c, s, *workers):
    for twice in (False, True):
        source = c.persist(da.from_array(A, chunks=(2, 7)))
        source = 2 * source if twice else source
        filled, steps = _filled(source, (12, 12), 2)
        del source  # and with it the futures, unless the blocks have them
        assert [len(keys) for keys in steps] == [5, 5]
        np.testing.assert_array_equal(await c.compute(filled), 2 * A if twice else A)


@pytest.mark.parametrize("transpose", [False, True])
def test_only_the_rows_of_a_block_leave_the_worker_of_a_chunk(transpose):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        # Blocks of six rows share some chunks; those of the transposed array share all.
        source = c.persist(da.from_array(A.T if transpose else A, chunks=(5, -1)))
        await wait(source)
        C = await coded.encode(source.T if transpose else source, coded.MDS(6, 4), c)
        moved = [log["keys"].values() for w in workers for log in w.transfer_incoming_log]
        assert 0 < sum(map(sum, moved)) <= A.nbytes
        await check(c, C)

    test()


@pytest.mark.parametrize(
    "code", [coded.MDS(6, 4), coded.RandomLinear(6, 4), coded.RandomLinear(6, 4, 0.25)], ids=repr
)
@pytest.mark.parametrize("source", [A, da.from_array(A, chunks=(5, 3))], ids=["numpy", "dask"])
def test_one_block_is_moved_for_each_coefficient_of_parity(code, source):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(source, code, c)
        # Blocks that are pieces stay where they lie.
        assert C.encoded.bytes_moved == np.count_nonzero(code.G[4:]) * A.nbytes // 4
        assert f"{format_bytes(C.encoded.bytes_moved)} between workers" in C._repr_html_()
        await check(c, C)

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_one_copy_of_each_sparse_block_is_moved(c, s, *workers):
    sparse = scipy.sparse.csr_array(A * (A > 0.5))
    C = await coded.encode(sparse, coded.Repetition(6, 2), c)
    blocks = np.split(np.arange(24), np.cumsum(C.chunks[0])[:-1])
    parts = [sparse[rows] for rows in blocks]
    once = sum(p.data.nbytes + p.indices.nbytes + p.indptr.nbytes for p in parts)
    assert C.encoded.bytes_moved == once  # the second copy of each
    np.testing.assert_allclose(await c.compute(C @ x), sparse @ x)


@pytest.mark.parametrize("code", [coded.MDS(6, 4), coded.RandomLinear(6, 4)], ids=repr)
def test_sparse_matrices_with_unsorted_indices(code):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        rng = np.random.default_rng(0)
        left, right = scipy.sparse.random_array((24, 40), density=0.3, rng=rng), rng.random((40, 7))
        sparse = left.tocsr() @ scipy.sparse.csr_array(right * (right < 0.3))
        assert not sparse.has_sorted_indices
        dense = sparse.toarray()
        C = await coded.encode(sparse, code, c)
        np.testing.assert_allclose(await c.compute(C @ x), dense @ x)
        np.testing.assert_array_equal(sparse.toarray(), dense)

    test()


@gen_cluster(client=True, nthreads=FIVE)
async def test_nothing_is_moved_if_one_worker_holds_everything(c, s, *workers):
    C = await coded.encode(A, coded.MDS(1, 1), c)
    assert C.encoded.bytes_moved == 0


# -- workers that leave ------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=SIX)
async def test_sparse_parity_is_rebuilt_from_the_blocks_that_it_combines(c, s, *workers):
    code = coded.RandomLinear(6, 4)
    C = await coded.encode(A, code, c)
    await close(workers, C.encoded.workers[5])
    await async_poll_for(lambda: all(homes(s, C)))
    blocks = np.count_nonzero(code.G[5])
    (event,) = made(s)
    # One of the blocks may lie on the worker that makes the piece.
    assert event["piece"] == 5
    assert event["received"] in {(blocks - 1) * A.nbytes // 4, blocks * A.nbytes // 4}
    await check(c, C)


@pytest.mark.parametrize("code", [coded.MDS(6, 4), coded.RandomLinear(6, 4)], ids=repr)
def test_rebuilt_pieces_are_right_to_the_last_digits(code):
    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(A, code, c)
        before = await c.gather(list(C.encoded.futures))
        for _ in range(3):
            # After the first loss some workers hold two pieces.
            # Spare them, because the code may not survive losing one.
            await close(workers, min(s.workers, key=lambda w: len(s.workers[w].has_what)))
            await async_poll_for(lambda: all(homes(s, C)))
        for found, exact in zip(await c.gather(list(C.encoded.futures)), before, strict=True):
            np.testing.assert_allclose(found, exact, atol=1e-12)
        assert len(made(s)) >= 3

    test()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
@pytest.mark.parametrize("code", [coded.MDS(6, 4), coded.RandomLinear(6, 4)], ids=repr)
def test_small_rows_keep_their_digits_when_workers_are_lost(code, kind, dtype):
    reach = 5 if dtype == "f4" else 12
    scales = 10.0 ** np.random.default_rng(2).uniform(-reach, reach, (24, 1))
    uneven = (A * scales).astype(dtype)
    operand = x.astype(dtype)
    tolerance = 1e-4 if dtype == "f4" else 1e-12

    async def near(c, C) -> None:
        error = np.abs(await c.compute(C @ operand) - uneven @ operand)
        assert (error <= tolerance * (np.abs(uneven) @ np.abs(operand))).all()
        found = await c.compute(C)
        found = found.toarray() if scipy.sparse.issparse(found) else found
        assert (np.abs(found - uneven).max(1) <= tolerance * np.abs(uneven).max(1)).all()

    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(kind(uneven), code, c)
        for block in (0, 1):
            # Where the whole array was computed, there are copies for a while.
            await async_poll_for(lambda block=block: len(homes(s, C)[block]) == 1)
            (lost,) = homes(s, C)[block]
            if len(s.workers[lost].has_what) > 1:  # the code may not survive the loss of both
                continue
            await close(workers, lost)
            await near(c, C)
            await async_poll_for(lambda: all(homes(s, C)))
            await near(c, C)

    test()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
def test_largest_numbers_are_rebuilt_when_their_worker_is_lost(kind, dtype):
    """Rounding may not make them infinite."""
    if kind is scipy.sparse.csr_array and dtype == "f2":
        pytest.skip("SciPy has no sparse matrices of float16")
    largest = float(np.finfo(dtype).max)
    signs = np.sign(np.random.default_rng(2).standard_normal((400, 7)))
    extreme = (signs * (largest if dtype != "c16" else largest * (1 + 1j))).astype(dtype)

    @gen_cluster(client=True, nthreads=SIX)
    async def test(c, s, *workers):
        C = await coded.encode(kind(extreme), coded.MDS(6, 4), c)
        await close(workers, C.encoded.workers[0])
        await async_poll_for(lambda: made(s))
        block = await C.encoded.futures[0]
        block = block.toarray() if scipy.sparse.issparse(block) else block
        # Absolute values of such complex numbers would overflow.
        eps = 100 * np.finfo(dtype).eps
        np.testing.assert_allclose(block.real, extreme[:100].real, rtol=eps)
        np.testing.assert_allclose(block.imag, extreme[:100].imag, rtol=eps)

    test()


@gen_cluster(client=True, nthreads=SIX)
async def test_values_that_are_not_finite_stay_in_their_rows(c, s, *workers):
    holed = A.copy()
    holed[2, 1], holed[9, 3] = np.nan, np.inf
    C = await coded.encode(holed, coded.MDS(6, 4), c, check_finite=False)
    for lost in (3, 1):  # a block without them, and one with the infinity
        await close(workers, C.encoded.workers[lost])
        for result in (await c.compute(C @ x), (await c.compute(C)).sum(1)):
            assert np.flatnonzero(~np.isfinite(result)).tolist() == [2, 9]
        await async_poll_for(lambda: all(homes(s, C)))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 6)
async def test_sparse_rows_that_are_not_finite_stay_so_when_their_block_is_rebuilt(c, s, *workers):
    diagonal = np.arange(1.0, 13.0)
    diagonal[3] = np.nan
    D = scipy.sparse.diags_array(diagonal).tocsr()
    C = await coded.encode(D, coded.MDS(6, 4), c, check_finite=False)
    await close(workers, C.encoded.workers[1])
    await async_poll_for(lambda: all(homes(s, C)))
    found = await c.compute(C @ np.ones(12))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(diagonal))


@gen_cluster(client=True, nthreads=FIVE)
async def test_loss_that_leaves_enough_pieces_but_too_few_independent_ones(c, s, *workers):
    code = coded.RandomLinear(5, 4, density=0.5)  # one parity piece, made of two blocks
    C = await coded.encode(A, code, c)
    (alone, _) = np.flatnonzero(code.G[4] == 0)
    await close(workers, C.encoded.workers[alone])
    with pytest.raises(
        coded.CodedDataLostError, match=r"can lose 0 of its workers; 4 of its 5 pieces are left"
    ):
        await c.compute(C @ x)


@gen_cluster(client=True, nthreads=FIVE)
async def test_loss_beyond_the_tolerance_that_leaves_enough_independent_pieces(c, s, *workers):
    code = coded.RandomLinear(5, 4, density=0.5)
    C = await coded.encode(A, code, c)
    covered = int(np.flatnonzero(code.G[4])[0])
    await close(workers, C.encoded.workers[covered])
    await check(c, C)


@pytest.mark.parametrize("transpose", [False, True])
def test_an_array_that_is_encoded_again_is_still_rebuilt(transpose):
    @gen_cluster(client=True, nthreads=FIVE)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(5, 3), c, transpose=transpose)
        D = await coded.encode(C, coded.MDS(5, 3), c, transpose=transpose)
        for i in range(2):
            await close(workers, C.encoded.workers[i])
            await check(c, C)
            await check(c, D)
            await async_poll_for(lambda: all(homes(s, C)) and all(homes(s, D)))

    test()


@gen_cluster(client=True, nthreads=FIVE)
async def test_an_array_that_cannot_be_encoded_again_is_unchanged(c, s, *workers):
    bad = A.copy()
    bad[3, 2] = np.nan
    C = await coded.encode(bad, coded.MDS(5, 3), c, check_finite=False, transpose=True)
    for again in (
        coded.encode(C, C.code, c),
        coded.encode_pair(C, C, coded.Polynomial(5, 3, 1), c),
    ):
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            await again
        np.testing.assert_allclose(await c.compute(C @ x), bad @ x)
    await close(workers, C.encoded.workers[4])
    await async_poll_for(lambda: all(homes(s, C)))


@gen_cluster(client=True, nthreads=FIVE)
async def test_a_second_encoding_that_fails_leaves_no_pieces_of_the_first(c, s, *workers):
    def fail(progress):
        if progress.made == 7:  # five pieces of the transposed matrix, two of the matrix
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough") as error:
        await coded.encode(A, coded.MDS(5, 3), c, transpose=True, callback=fail)
    await async_poll_for(lambda: not s.tasks)
    assert error.value.__traceback__ is not None  # it keeps the pieces' futures


# -- workers that join -------------------------------------------------------------------------


# By default, Dask drops copies as often as pieces are looked at without an event, and may be ahead.
@pytest.mark.parametrize("code", [coded.MDS(5, 3), coded.Repetition(5, 2)], ids=repr)
def test_a_worker_that_joins_takes_over_from_workers_with_several_pieces(code):
    interval = "distributed.scheduler.active-memory-manager.interval"

    @gen_cluster(client=True, nthreads=FIVE, config={interval: "1 hour"})
    async def test(c, s, *workers):
        C = await coded.encode(A, code, c)
        due = code.pieces // code.n
        await close(workers, C.encoded.workers[1])
        await async_poll_for(lambda: all(homes(s, C)))
        async with Worker(s.address, nthreads=1) as late:

            def even() -> bool:
                where = [min(h) for h in homes(s, C) if len(h) == 1]
                return sorted(map(where.count, set(where))) == [due] * 5

            await async_poll_for(even)
            assert late.address in set.union(*homes(s, C))
            await check(c, C)
            # The array survives the loss of any worker again.
            await close(workers, C.encoded.workers[0])
            await check(c, C)
            await async_poll_for(lambda: all(homes(s, C)))

    test()


@gen_cluster(client=True, nthreads=FIVE)
async def test_a_worker_that_joins_gets_a_new_piece(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(5, 3), c)
    async with Worker(s.address, nthreads=1) as late:
        D = await C.extend()
        assert D.code == C.code.extended()
        assert D.encoded.workers == (*C.encoded.workers, late.address)
        assert D.encoded.bytes_moved > C.encoded.bytes_moved
        assert len(D.encoded.futures) == 6
        blocks = [scaled(block, exponents_of(block)) for block in np.split(A, 3)]
        np.testing.assert_allclose(await D.encoded.futures[5], D.code.encode(blocks)[5], atol=1e-14)
        await check(c, C)
        await check(c, D)
        with pytest.raises(coded.ClusterUnfitError, match="scale the cluster, then extend"):
            await C.extend()
        # The new piece can replace lost ones like any other piece.
        await close(workers, C.encoded.workers[0])
        await check(c, D)
        await async_poll_for(lambda: all(homes(s, D)))


def paused(operator, name):
    Event(f"{name}-begun").set()
    Event("go on").wait()
    return operator @ x


@gen_cluster(client=True, nthreads=FIVE)
async def test_a_piece_that_is_added_during_a_round_is_kept_for_the_next_one(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(5, 3), c)
    holding = s.extensions["dask-coded"]._holding
    futures = [coded.submit(paused, C, "first", client=c)]
    await Event("first-begun").wait()
    assert {ts.key for ts in holding.pieces()} == set(C.encoded.spec.keys)
    async with Worker(s.address, nthreads=1):
        D = await C.extend()
        futures.append(coded.submit(paused, D, "second", client=c))
        await Event("second-begun").wait()
        assert {ts.key for ts in holding.pieces()} == set(D.encoded.spec.keys)
        await Event("go on").set()
        np.testing.assert_allclose(await c.gather(futures), [A @ x] * 2)
        await async_poll_for(lambda: not holding.pieces())


@gen_cluster(client=True, nthreads=FIVE)
async def test_only_the_transpose_has_a_piece_on_a_worker_that_joins(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(4, 3), c, transpose=True)
    back = await extend(C._back, None)
    assert back.spec.code.n == 5
    D = await C.extend()
    assert D.code.n == 5
    await check(c, D)
    with pytest.raises(coded.ClusterUnfitError, match="scale the cluster, then extend"):
        await D.extend()


@gen_cluster(client=True, nthreads=FIVE)
async def test_an_extension_that_fails_leaves_no_pieces(c, s, *workers, monkeypatch):
    C = await coded.encode(A, coded.RandomLinear(4, 3), c, transpose=True)
    before, extended = set(s.tasks), []

    async def failing(encoded, workers):
        if extended:
            raise ZeroDivisionError("of the test")
        extended.append(await extend(encoded, workers))
        return extended[0]

    monkeypatch.setattr("dask_coded.array.extend", failing)
    with pytest.raises(ZeroDivisionError, match="of the test"):
        await C.extend()
    assert len(extended[0].futures) == 5
    await async_poll_for(lambda: set(s.tasks) <= before, timeout=60)
    await check(c, C)


@gen_cluster(client=True, nthreads=FIVE)
async def test_an_array_without_parity_grows_to_have_some(c, s, *workers):
    B = A * 10.0 ** np.repeat([-9, 0, 9], 8)[:, None]
    C = await coded.encode(B, coded.RandomLinear(3, 3), c)
    D = await C.extend()
    assert D.code.n == 5
    await close(workers, C.encoded.workers[0])
    for operator in (C, D):
        np.testing.assert_allclose(await c.compute(operator @ x), B @ x, rtol=1e-9)


@gen_cluster(client=True, nthreads=FIVE)
async def test_a_running_algorithm_goes_on_while_a_worker_joins(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(5, 3, density=0.8), c, transpose=True)

    def algorithm(operator):
        first = operator @ x
        Event("started").set()
        Event("go").wait()
        rounds = [operator @ x for _ in range(20)]
        return first, rounds, operator.last_round.timeline, operator.T @ first

    future = coded.submit(algorithm, C, client=c, workers=C.encoded.workers[0])
    await Event("started").wait()
    async with Worker(s.address, nthreads=1):
        D = await C.extend()
        await Event("go").set()
        first, rounds, _, back = await future
        for y in (first, *rounds):
            np.testing.assert_allclose(y, A @ x)
        np.testing.assert_allclose(back, A.T @ (A @ x))
        np.testing.assert_allclose(await c.compute(D.T @ np.ones(24)), A.sum(0))
        del C, D, future
        await async_poll_for(lambda: not s.extensions["dask-coded"].arrays)


@gen_cluster(client=True, nthreads=FIVE)
async def test_the_new_piece_is_released_with_its_array(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(4, 3), c)
    D = await C.extend()
    key = D.encoded.spec.keys[-1]
    del D
    await async_poll_for(lambda: key not in s.tasks)
    await asyncio.gather(check(c, C), check(c, C))


@gen_cluster(client=True, nthreads=FIVE)
async def test_an_array_is_extended_by_the_pieces_that_were_released(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(3, 2), c)
    D = await C.extend()
    assert D.code.n == 5
    key = D.encoded.spec.keys[-1]
    del D
    await async_poll_for(lambda: key not in s.tasks)
    D = await C.extend([address for address in s.workers if address not in C.encoded.workers][:1])
    assert (D.code.n, len(D.encoded.futures), len(D.encoded.workers)) == (5, 4, 4)
    E = await D.extend()
    assert (E.code.n, len({*E.encoded.futures})) == (5, 5)
    await close(workers, C.encoded.workers[0])
    for operator in (C, D, E):
        await check(c, operator)


@gen_cluster(client=True, nthreads=FIVE)
async def test_an_array_is_extended_after_a_client_was_interrupted(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(3, 2), c)
    # The client was interrupted before it had the answer, and asked for no piece.
    array = C.encoded.spec.id
    await c.scheduler.coded_extend(array=array, allowed=None)
    with pytest.raises(coded.ClusterUnfitError, match="Every worker holds a piece"):
        await C.extend()  # it may still ask
    promised = s.extensions["dask-coded"].arrays[array].promised
    promised.update(dict.fromkeys(promised, 0.0))  # it was long ago
    D = await C.extend()
    assert (D.code.n, len(D.encoded.futures)) == (5, 5)
    await close(workers, C.encoded.workers[0])
    await check(c, D)


@gen_cluster(client=True, nthreads=FIVE)
async def test_nothing_is_left_of_an_encoding_that_is_interrupted_while_it_waits(c, s, *workers):
    await coded.encode(A, coded.MDS(4, 2), c)  # installs the plugins
    plugin = s.extensions["dask-coded"]
    await async_poll_for(lambda: not plugin.arrays and len(plugin.versions) == 5)
    newcomer = workers[0].address
    version = plugin.versions.pop(newcomer)
    plugin.add_worker(s, newcomer)
    asked, register = [], s.handlers["coded_register"]
    s.handlers["coded_register"] = lambda **what: asked.append(what) or register(**what)
    encoding = asyncio.ensure_future(coded.encode(A, coded.MDS(5, 2), c))
    await async_poll_for(lambda: asked)
    encoding.cancel()
    await asyncio.wait([encoding])
    plugin.hello(newcomer, version, 0.1)
    await check(c, await coded.encode(A, coded.MDS(5, 2), c))
    await async_poll_for(lambda: not plugin.arrays)


@gen_cluster(client=True, nthreads=FIVE)
async def test_no_block_is_left_of_an_encoding_that_is_interrupted_while_it_sends(c, s, *workers):
    scatter, sent, go = c.scatter, [], asyncio.Event()

    async def slow(data, **options):
        found = await scatter(data, **options)
        sent.extend(found)
        await go.wait()
        return found

    c.scatter = slow
    encoding = asyncio.ensure_future(coded.encode(A, coded.MDS(5, 2), c))
    await async_poll_for(lambda: sent)
    encoding.cancel()
    await asyncio.wait([encoding])
    go.set()
    await async_poll_for(lambda: not s.tasks)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="it is double here")
@gen_cluster(client=True, nthreads=FIVE)
async def test_long_doubles_are_copied_and_not_combined(c, s, *workers):
    B = A.astype(np.longdouble)
    with pytest.raises(TypeError, match=r"decodes in double precision.*A.astype\(float\)"):
        await coded.encode(B, coded.MDS(5, 3), c)
    C = await coded.encode(B, client=c)
    assert C.code == coded.Repetition(5, 2)
    assert (await c.compute(C @ x)).dtype == np.longdouble


@gen_cluster(client=True, nthreads=FIVE)
async def test_other_codes_cannot_grow(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    with pytest.raises(TypeError, match=r"MDS\(n=4, k=3\) cannot grow: encode with `coded.Random"):
        await C.extend()


def test_sparse_blocks_hold_equally_many_entries():
    degrees = np.repeat([90, 5], [10, 90])
    columns = np.concatenate([np.arange(degree) for degree in degrees])
    ends = np.append(0, np.cumsum(degrees))
    graph = scipy.sparse.csr_array((np.ones(len(columns)), columns, ends), shape=(100, 90))
    rows = block_rows(graph, coded.Repetition(4, 2))
    entries = [part.sum() for part in np.split(degrees + 1, np.cumsum(rows)[:-1])]
    assert np.ptp(entries) <= 2 * (degrees.max() + 1)  # over 800 with equally many rows


# -- workers that come and go while an array is encoded ----------------------------------------


def held_back(block):
    """Return a block once an event is set."""
    Event("go").wait()
    return block


def pending(client, heights) -> da.Array:
    """Return chunks that are not computed before the event "go" is set."""
    return client.persist(da.from_array(A, chunks=(heights, 7)).map_blocks(held_back, dtype=float))


async def being_encoded(client, scheduler, source, code, **options):
    """Return an encoding that waits for its source, once it is registered."""
    encoding = asyncio.ensure_future(coded.encode(source, code, client, **options))
    (first, *_) = source.__dask_keys__()[0]
    homes = lambda: scheduler.extensions["dask-coded"].homes  # noqa: E731
    await async_poll_for(
        lambda: "dask-coded" in scheduler.extensions and homes().home(first), timeout=60
    )
    return encoding


@pytest.mark.parametrize("restricted", [False, True])
def test_tasks_of_a_source_may_run_where_they_could_before(restricted):
    """Otherwise they would wait for ever if their worker left later."""

    @gen_cluster(client=True, nthreads=FIVE)
    async def test(c, s, *workers):
        source = pending(c, 12)
        (keys,) = zip(*source.__dask_keys__(), strict=True)
        allowed = {w.address for w in workers[:4]} if restricted else None
        await async_poll_for(lambda: all(key in s.tasks for key in keys), timeout=60)
        s.set_restrictions(dict.fromkeys(keys, allowed))
        encoding = await being_encoded(c, s, source, coded.MDS(4, 2))
        await async_poll_for(
            lambda: all(len(s.tasks[key].worker_restrictions or ()) == 1 for key in keys),
            timeout=60,
        )
        await Event("go", client=c).set()
        await check(c, await encoding)
        assert [s.tasks[key].worker_restrictions for key in keys] == [allowed] * 2

    test()


@gen_cluster(client=True, nthreads=FIVE)
async def test_a_source_that_is_encoded_twice_keeps_its_places_until_both_are_done(c, s, *workers):
    source = pending(c, 12)
    key = source.__dask_keys__()[0][0]
    encodings = [await being_encoded(c, s, source, coded.MDS(4, 2)) for _ in range(2)]
    plugin = s.extensions["dask-coded"]
    await async_poll_for(lambda: len(plugin.arrays) == 2, timeout=60)
    first, second = list(plugin.arrays)
    plugin.arrays._drop_sources(plugin.arrays[first])
    assert plugin.homes.home(key)
    plugin.arrays._drop_sources(plugin.arrays[second])
    assert plugin.homes.home(key) is None
    for encoding in encodings:
        encoding.cancel()
    await Event("go", client=c).set()


@pytest.mark.parametrize("place", [0, 3])
def test_a_worker_that_leaves_before_its_piece_is_begun(place):
    @gen_cluster(client=True, nthreads=FIVE)
    async def test(c, s, *workers):
        encoding = await being_encoded(c, s, pending(c, 12), coded.MDS(4, 2))
        plugin = s.extensions["dask-coded"]
        (state,) = plugin.arrays.values()
        leaving = plugin.homes.home(state.spec.keys[place])
        # Its thread waits for the event.
        await next(w for w in workers if w.address == leaving).close(executor_wait=False)
        await Event("go", client=c).set()
        C = await encoding
        assert len(set().union(*homes(s, C))) == 4
        assert all(plugin.homes.home(key) in s.workers for key in C.encoded.spec.keys)
        await check(c, C)

    test()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_joins_while_an_array_is_encoded_relieves_others(c, s, *workers):
    encoding = await being_encoded(c, s, pending(c, 12), coded.MDS(3, 2), oversubscribe=True)
    async with Worker(s.address) as newcomer:
        await Event("go", client=c).set()
        C = await encoding
        await async_poll_for(lambda: newcomer.address in set().union(*homes(s, C)), timeout=60)
        await async_poll_for(lambda: len(set().union(*homes(s, C))) == 3, timeout=60)
        await check(c, C)


@gen_cluster(client=True, nthreads=FIVE)
async def test_a_worker_that_leaves_before_it_gets_its_block(c, s, *workers):
    scatter, left = c.scatter, []

    async def leaving(data, **options):
        if (named := options.get("workers")) and not left:
            left.append(named[0])
            await close(workers, named[0])
        return await scatter(data, **options)

    c.scatter = leaving
    C = await coded.encode(A, coded.MDS(4, 2), c)
    assert left and left[0] not in set().union(*homes(s, C))
    await check(c, C)


@gen_cluster(client=True, nthreads=FIVE)
async def test_a_worker_that_has_joined_and_has_yet_to_get_the_plugin_is_waited_for(c, s, *workers):
    C = await coded.encode(A, coded.RandomLinear(4, 2), c)
    plugin = s.extensions["dask-coded"]
    newcomer = next(w for w in workers if w.address not in C.encoded.workers)
    version = plugin.versions.pop(newcomer.address)
    plugin.add_worker(s, newcomer.address)
    asked, register = [], s.handlers["coded_register"]
    s.handlers["coded_register"] = lambda **what: asked.append(what) or register(**what)
    encoding = asyncio.ensure_future(coded.encode(A, coded.MDS(5, 2), c))
    extending = asyncio.ensure_future(plugin.extend(C.encoded.spec.id, None))
    await async_poll_for(lambda: asked, timeout=60)
    plugin.hello(newcomer.address, version, 0.1)
    await check(c, await encoding)
    assert (await extending)["answer"].data.workers == (newcomer.address,)
    async with Worker(s.address):
        assert not plugin._joining


@gen_cluster(client=True, nthreads=FIVE)
async def test_what_may_take_long_while_encoding_is_done_beside_the_event_loop(
    c, s, *workers, monkeypatch
):
    here, seen = threading.get_ident(), []

    def noted(function):
        def call(*args, **kwargs):
            found = function(*args, **kwargs)
            if not scipy.sparse.issparse(found) or found.nnz:  # a part without rows is only a type
                seen.append((function.__name__, threading.get_ident() == here))
            return found

        return call

    monkeypatch.setattr(coded.MDS, "with_redundancy", noted(coded.MDS.with_redundancy))
    monkeypatch.setattr(blocks_module, "_filled", noted(_filled))
    rows = scipy.sparse.csr_array.__getitem__
    monkeypatch.setattr(scipy.sparse.csr_array, "__getitem__", noted(rows))
    await check(c, await coded.encode(da.from_array(A, chunks=(5, 7)), client=c))
    await coded.encode(scipy.sparse.csr_array(A), coded.MDS(5, 4), c)
    assert {name for name, _ in seen} == {"with_redundancy", "_filled", "__getitem__"}
    assert not [name for name, inline in seen if inline]


@gen_cluster(client=True, nthreads=SIX)
async def test_one_of_the_workers_without_a_piece_is_asked_whether_it_relieves_others(
    c, s, *workers, monkeypatch
):
    asked, relieve = [], Homes.relieve

    def noted(self, state, newcomer, *slow):
        asked.append(newcomer)
        return relieve(self, state, newcomer, *slow)

    monkeypatch.setattr(Homes, "relieve", noted)
    await coded.encode(A, coded.MDS(3, 2), c)
    assert len(asked) == 1


def test_the_pieces_whose_makers_report_are_found_once_for_each_piece(monkeypatch):
    """Those of a pair are searched for in the whole code."""
    asked, reporters = [], ArraySpec.reporters.fget
    counted = property(lambda self: asked.append(self) or reporters(self))
    monkeypatch.setattr(ArraySpec, "reporters", counted)
    geometry = Geometry((6,) * 4, 2, mixed=True)
    keys = tuple(("A", piece) for piece in range(5))
    spec = ArraySpec("A", coded.MDS(5, 4), geometry, 7, np.dtype(float), keys)
    _Mixer(spec, 4, [Source(("x", j), ("a",), 1.0, 6, 0, 0, j) for j in range(4)])
    assert len(asked) == 1


class Copies(coded.Code):
    """Each block once, and all pieces in one group."""

    exact = True

    def __init__(self, k):
        super().__init__(np.eye(k))


@gen_cluster(client=True, nthreads=FIVE)
async def test_an_exact_code_whose_pieces_are_of_one_group(c, s, *workers):
    for rows in (7, 10, 24):
        C = await coded.encode(A[:rows], Copies(3), c)
        np.testing.assert_allclose(await c.compute(C @ x), A[:rows] @ x)
