"""Coded arrays on a cluster that changes: clients, workers, plugins and versions come and go."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from distributed import Client, Event, Worker, wait
from distributed.comm import CommClosedError
from distributed.core import Status
from distributed.security import Security
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_coded as coded
from dask_coded.membership import Timeouts
from dask_coded.preload import dask_setup
from dask_coded.rounds import Pace
from dask_coded.runtime.answers import Lost
from dask_coded.runtime.client.install import check_fit, install
from dask_coded.runtime.coordinator import live_round as live_round_module
from dask_coded.runtime.coordinator import rounds as coordinator_module
from dask_coded.runtime.coordinator.live_round import LiveRound
from dask_coded.runtime.messages import ChangeRound, PiecesAbsent, Share, StartRound
from dask_coded.runtime.operand import ChunksLacking
from dask_coded.runtime.scheduler import extension
from dask_coded.runtime.scheduler.extension import SchedulerExtension
from dask_coded.runtime.scheduler.plugin import CodedSchedulerPlugin
from dask_coded.runtime.worker import disk
from dask_coded.runtime.worker import plugin as worker_module
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin, worker_plugin
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.channels import Channel
from dask_coded.transport.messages import EndRun, Ping, Pong
from tests.clocks import set_timeouts

# What workers do with small jobs depends on their size.
pytestmark = pytest.mark.usefixtures("job_place")

FOUR = [("127.0.0.1", 1)] * 4
SIX = [("127.0.0.1", 1)] * 6

A = np.random.default_rng(0).standard_normal((23, 7))
x = np.random.default_rng(1).standard_normal(7)


def plugin_of(scheduler):
    return scheduler.extensions["dask-coded"]


async def check(client, *arrays):
    """Check products of coded arrays of ``A``, all computed at once."""
    for result in await asyncio.gather(*(client.compute(C @ x) for C in arrays)):
        np.testing.assert_allclose(result, A @ x)


def plugin_at(workers, address):
    return worker_plugin(next(w for w in workers if w.address == address))


def holders(scheduler, C):
    """Return the addresses of the workers that hold each piece."""
    tasks = [scheduler.tasks[key] for key in C.encoded.spec.keys]
    return [{ws.address for ws in ts.who_has or ()} for ts in tasks]


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_stop_is_answered_even_if_its_round_is_gone(c, s, *workers):
    """Without the answer, the coordinator would assume that the worker is stopped."""
    await coded.encode(A, coded.MDS(4, 3), c)
    answers = []
    worker_plugin(workers[0])._handle(EndRun("gone", answer=True), answers.append)
    assert answers == [Pong("gone")]


@gen_cluster(client=True, nthreads=FOUR)
async def test_only_dense_products_with_several_columns_have_a_least_batch(c, s, *workers):
    found = []
    dense = np.random.default_rng(0).standard_normal((300, 40))
    wide = np.ones((40, 3))
    with dask.config.set({"coded.round.stripes": 10, "coded.round.stripe-work": 1}):
        C = await coded.encode(dense, coded.MDS(4, 3), c)
        S = await coded.encode(scipy.sparse.csr_array(dense), coded.MDS(4, 3), c)
    for worker in workers:
        handlers = worker_plugin(worker).exchange._handlers

        def spy(message, answer, handle=handlers[StartRound]):
            found.append(message.least_batch)
            handle(message, answer)

        handlers[StartRound] = spy
    for array, operand, least in (
        (C, wide, 7),
        (C, wide[:, :1], 1),
        (C, wide[:, 0], 1),
        (S, wide, 1),
    ):
        found.clear()
        np.testing.assert_allclose(await c.compute(array @ operand), dense @ operand)
        assert set(found) == {least}


# -- many at once ------------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=FOUR)
async def test_several_encodings_at_once(c, s, *workers):
    arrays = await asyncio.gather(*(coded.encode(A, coded.MDS(4, k), c) for k in (1, 2, 3, 4)))
    await check(c, *arrays)


@gen_cluster(client=True, nthreads=FOUR)
async def test_several_arrays(c, s, *workers):
    codes = [coded.MDS(4, 3), coded.MDS(4, 2), coded.Repetition(4, 2), coded.MDS(2, 1)]
    arrays = [await coded.encode(A, code, c) for code in codes]
    assert set(plugin_of(s).arrays) == {C.encoded.spec.id for C in arrays}
    await check(c, *arrays, *arrays)


@gen_cluster(client=True, nthreads=FOUR)
async def test_several_arrays_in_one_algorithm(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    D = await coded.encode(A.T.copy(), coded.Repetition(4, 2), c)

    def algorithm(C, D, x):
        for _ in range(5):
            x = D @ (C @ x)
            x /= np.linalg.norm(x)
        return x

    np.testing.assert_allclose(await coded.submit(algorithm, C, D, x, client=c), _power(A.T @ A))


def _power(matrix):
    vector = np.linalg.matrix_power(matrix, 5) @ x
    return vector / np.linalg.norm(vector)


@gen_cluster(client=True, nthreads=FOUR)
async def test_several_clients(c, s, *workers):
    async with Client(s.address, asynchronous=True, set_as_default=False) as d:
        C = await coded.encode(A, coded.MDS(4, 3), c)
        D = await coded.encode(A, coded.MDS(4, 2), d)
        await asyncio.gather(check(c, C, C), check(d, D, D))
        del D
        await async_poll_for(lambda: set(plugin_of(s).arrays) == {C.encoded.spec.id})
    await check(c, C)


@gen_cluster(client=True, nthreads=FOUR)
async def test_arrays_of_a_client_that_closes_are_released(c, s, *workers):
    async with Client(s.address, asynchronous=True, set_as_default=False) as d:
        D = await coded.encode(A, coded.MDS(4, 2), d)
        await check(d, D)
    await async_poll_for(lambda: not plugin_of(s).arrays)


@pytest.mark.parametrize("where", ["blocks.Blocks.load", "encoding.settled"])
def test_array_of_a_client_that_leaves_while_it_encodes_is_forgotten(where, monkeypatch):
    @gen_cluster(client=True, nthreads=FOUR)
    async def test(c, s, *workers):
        await install(c)
        reached, never = asyncio.Event(), asyncio.Event()

        async def wait_there(*args):
            reached.set()
            await never.wait()

        monkeypatch.setattr(f"dask_coded.runtime.client.{where}", wait_there)
        async with Client(s.address, asynchronous=True, set_as_default=False) as d:
            encoding = asyncio.ensure_future(coded.encode(A, coded.MDS(4, 2), d, verify=True))
            await reached.wait()
            assert plugin_of(s).arrays
        await async_poll_for(lambda: forgotten(s), timeout=60)
        encoding.cancel()

    test()


@gen_cluster(client=True, nthreads=FOUR)
async def test_more_loops_than_threads(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)

    def loop(operator):
        return [operator @ x for _ in range(5)][-1]

    for result in await c.gather([coded.submit(loop, C, client=c) for _ in range(12)]):
        np.testing.assert_allclose(result, A @ x)


# -- released ----------------------------------------------------------------------------------


def forgotten(scheduler):
    """Return whether the scheduler plugin has forgotten all arrays."""
    plugin = plugin_of(scheduler)
    arrays, homes = plugin.arrays, plugin.homes
    state = (arrays, homes._arrays, homes._pins, plugin._holding)
    return not any(state) and not scheduler.tasks


@gen_cluster(client=True, nthreads=FOUR)
async def test_released_array_is_forgotten(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    del C
    await async_poll_for(lambda: forgotten(s))
    await async_poll_for(lambda: not any(w.data for w in workers))


@gen_cluster(client=True, nthreads=FOUR)
async def test_array_with_transpose_is_forgotten(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c, transpose=True)
    assert len(plugin_of(s).arrays) == 2
    transposed = C.T
    del C
    np.testing.assert_allclose(await c.compute(transposed @ np.ones(23)), A.sum(0))
    del transposed
    await async_poll_for(lambda: forgotten(s))


@gen_cluster(client=True, nthreads=FOUR)
async def test_source_is_released_after_encoding(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    await async_poll_for(lambda: set(s.tasks) == set(C.encoded.spec.keys))
    assert set(plugin_of(s).homes._pins) == set(C.encoded.spec.keys)


@gen_cluster(client=True, nthreads=FOUR)
async def test_array_released_after_its_rounds(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    result = c.compute(C @ x)
    np.testing.assert_allclose(await result, A @ x)
    await async_poll_for(lambda: not plugin_of(s)._holding)
    del C, result
    await async_poll_for(lambda: forgotten(s))


@gen_cluster(client=True, nthreads=FOUR)
async def test_pieces_are_wanted_once_for_all_products_of_an_array(c, s, *workers, monkeypatch):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    wanted, desire = [], s.client_desires_keys

    def noted(keys, client):
        wanted.extend(set(keys).intersection(C.encoded.spec.keys))
        desire(keys, client)

    monkeypatch.setattr(s, "client_desires_keys", noted)
    found = await c.gather(c.compute([C @ (i * x) for i in range(20)]))
    np.testing.assert_allclose(found, [i * (A @ x) for i in range(20)], atol=1e-12)
    assert sorted(wanted) == sorted(C.encoded.spec.keys)
    await async_poll_for(lambda: not any(name.startswith("coded-holds") for name in s.clients))


@gen_cluster(client=True, nthreads=FOUR)
async def test_array_released_before_the_products_that_other_functions_take(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    norm = dask.delayed(np.linalg.norm)(C @ x)
    shifted = da.ones(4, chunks=2).map_blocks(lambda block, by: block + by, by=(C @ x).sum())
    futures = c.compute([norm, shifted])
    del C, norm, shifted
    found, more = await c.gather(futures)
    np.testing.assert_allclose(found, np.linalg.norm(A @ x))
    np.testing.assert_allclose(more, np.ones(4) + (A @ x).sum())
    await async_poll_for(lambda: not plugin_of(s)._holding)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_result_that_is_asked_for_again_does_not_hold_the_pieces(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    product = C @ x
    kept = c.persist(product)
    await wait(kept)
    np.testing.assert_allclose(await c.compute(product), A @ x)
    del C, product
    await async_poll_for(lambda: not plugin_of(s).arrays, timeout=60)
    np.testing.assert_allclose(await c.compute(kept), A @ x)


@gen_cluster(client=True, nthreads=FOUR)
async def test_nothing_holds_the_pieces_of_a_released_array(c, s, *workers, monkeypatch):
    set_timeouts(monkeypatch, 0.02, worker_module)
    C = await coded.encode(A, coded.MDS(4, 3), c)
    await check(c, C)
    pieces = [weakref.ref(piece) for w in workers for piece in w.data.values()]
    assert len(pieces) >= 4

    def gone():
        gc.collect()
        return not any(ref() is not None for ref in pieces)

    del C
    await async_poll_for(gone, timeout=60)


@gen_cluster(client=True, nthreads=FOUR)
async def test_nothing_holds_the_pieces_after_a_round_that_failed(c, s, *workers, monkeypatch):
    set_timeouts(monkeypatch, 0.02, worker_module)
    monkeypatch.setattr(worker_module, "streamed", Mock(side_effect=ValueError("no product")))
    C = await coded.encode(A, coded.MDS(4, 3), c)
    with pytest.raises(ValueError, match="no product"):
        await c.compute(C @ x)
    await async_poll_for(lambda: not any(worker_plugin(w)._jobs for w in workers), timeout=60)


@gen_cluster(client=True, nthreads=FOUR)
async def test_kernel_that_no_worker_has_ends_the_round(c, s, *workers, monkeypatch):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    monkeypatch.setattr(disk, "KERNELS", {})
    with pytest.raises(KeyError, match="matvec") as caught:
        await c.compute(C @ x)
    notes = "".join(caught.value.__notes__)
    assert "Raised on worker" in notes and "Too few workers can compute the product" in notes


@gen_cluster(client=True, nthreads=FOUR)
async def test_worker_that_is_stopped_when_plugins_are_installed(c, s, *workers, monkeypatch):
    set_timeouts(monkeypatch, 0.04, extension)
    monkeypatch.setattr(extension, "heartbeat_interval", lambda workers: 0.01)
    stopped, answer, goes_on = workers[0], workers[0].handlers["plugin-add"], asyncio.Event()

    async def wait_and_answer(**kwargs):
        await goes_on.wait()
        return await answer(**kwargs)

    stopped.handlers["plugin-add"] = wait_and_answer
    stopped.periodic_callbacks["heartbeat"].stop()
    C = await coded.encode(A, coded.MDS(3, 2), c)
    assert stopped.address not in C.encoded.workers
    await check(c, C)
    # A code that needs the worker waits for it, if there is a chance.
    with pytest.raises(coded.ClusterUnfitError, match="needs 5 workers, the cluster has 3"):
        await coded.encode(A, coded.MDS(5, 3), c)
    all_workers = asyncio.ensure_future(coded.encode(A, coded.MDS(4, 3), c))
    await check(c, await coded.encode(A, coded.MDS(3, 2), c))
    assert not all_workers.done()
    goes_on.set()
    await check(c, await all_workers)


@gen_cluster(client=True, nthreads=FOUR)
async def test_connection_that_breaks_while_plugins_are_installed(c, s, *workers):
    answer, broken = workers[0].handlers["plugin-add"], []

    async def break_once(**kwargs):
        if not broken:
            broken.append(True)
            raise CommClosedError
        return await answer(**kwargs)

    workers[0].handlers["plugin-add"] = break_once
    C = await coded.encode(A, coded.MDS(4, 3), c)
    assert broken
    await check(c, C)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_that_the_scheduler_cannot_connect_to_is_not_waited_for(
    c, s, *workers, monkeypatch
):
    """Its heartbeats come, on a connection that it has opened itself."""
    set_timeouts(monkeypatch, 0.04, extension)
    address, connect, reachable = workers[0].address, s.rpc.connect, asyncio.Event()

    async def refused(addr, **options):
        if addr == address and not reachable.is_set():
            raise OSError("refused")
        return await connect(addr, **options)

    monkeypatch.setattr(s.rpc, "connect", refused)
    C = await coded.encode(A, coded.MDS(3, 2), c)
    assert address not in C.encoded.workers
    await check(c, C)
    with pytest.raises(coded.ClusterUnfitError, match="needs 4 workers, the cluster has 3"):
        await coded.encode(A, coded.MDS(4, 3), c)
    reachable.set()
    await async_poll_for(lambda: len(plugin_of(s).versions) == 4)
    await check(c, await coded.encode(A, coded.MDS(4, 3), c))


@gen_cluster(client=True, nthreads=FOUR)
async def test_product_computed_outside_of_the_cluster(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    product = C @ x
    with pytest.raises(RuntimeError, match="computed by the cluster that holds its pieces"):
        await asyncio.to_thread(product.compute, scheduler="sync")


def gated(operator, name):
    """Run a round, wait for the test, and run another round."""
    first = operator @ x
    Event(f"{name}-started").set()
    Event(f"{name}-go").wait()
    return first, operator @ x


@gen_cluster(client=True, nthreads=FOUR)
async def test_array_released_during_a_loop(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(gated, C, "release", client=c)
    await Event("release-started").wait()
    keys = C.encoded.spec.keys
    del C
    await async_poll_for(lambda: c.id not in {cs.client_key for cs in s.tasks[keys[0]].who_wants})
    assert set(keys) <= set(s.tasks)
    await Event("release-go").set()
    np.testing.assert_allclose(await future, [A @ x] * 2)
    del future
    await async_poll_for(lambda: not plugin_of(s).arrays)


@gen_cluster(client=True, nthreads=FOUR)
async def test_failed_loop_holds_nothing(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)

    def fail(operator):
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await coded.submit(fail, C, client=c)
    del C
    await async_poll_for(lambda: not plugin_of(s).arrays)


@gen_cluster(client=True, nthreads=FOUR)
async def test_failed_encoding_leaves_nothing(c, s, *workers):
    bad = A.copy()
    bad[20, 1] = np.nan
    with pytest.raises(ValueError, match="check_finite=False"):
        await coded.encode(bad, coded.MDS(4, 3), c)
    await async_poll_for(lambda: forgotten(s), timeout=60)


@gen_cluster(client=True, nthreads=FOUR)
async def test_cancelled_loop_ends(c, s, *workers, tmp_path):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    over = tmp_path / "over"

    def endless(operator, path):
        try:
            Event("endless-started").set()
            while True:
                operator @ x
        finally:
            Path(path).touch()

    future = coded.submit(endless, C, str(over), client=c)
    await Event("endless-started").wait()
    await future.cancel()
    await async_poll_for(over.exists, timeout=60)
    await check(c, C)


# -- workers come and go -----------------------------------------------------------------------


@gen_cluster(client=True, nthreads=SIX)
async def test_workers_of_a_running_round_are_not_scaled_away(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    all_workers = list(s.workers.values())
    plugin = plugin_of(s)
    assert plugin.valid_workers_downscaling(s, all_workers) == all_workers
    future = coded.submit(gated, C, "scale", client=c)
    await Event("scale-started").wait()
    free = {ws.address for ws in plugin.valid_workers_downscaling(s, all_workers)}
    assert free == set(s.workers) - set(C.encoded.workers)
    assert not set(s.workers_to_close(n=6)) & set(C.encoded.workers)
    await Event("scale-go").set()
    await future
    await async_poll_for(lambda: plugin.valid_workers_downscaling(s, all_workers) == all_workers)


@gen_cluster(client=True, nthreads=FOUR)
async def test_retired_workers_hand_their_pieces_on(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    for gone in C.encoded.workers[:2]:
        await c.retire_workers([gone])
        assert gone not in s.workers
        assert all(holders(s, C))
        await check(c, C, C)


@gen_cluster(client=True, nthreads=FOUR)
async def test_worker_retired_during_a_loop(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    coordinator = C.encoded.workers[0]
    future = coded.submit(gated, C, "retire", client=c, workers=coordinator)
    await Event("retire-started").wait()
    await c.retire_workers([C.encoded.workers[1]])
    await Event("retire-go").set()
    np.testing.assert_allclose(await future, [A @ x] * 2)


@gen_cluster(client=True, nthreads=FOUR)
async def test_pieces_of_a_closed_worker_are_rebuilt_from_the_others(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    await async_poll_for(lambda: set(s.tasks) == set(C.encoded.spec.keys))  # the source is gone
    for _ in range(2):
        # After the first loss one worker holds two pieces, and the code would not survive its loss.
        gone = min(s.workers, key=lambda address: len(s.workers[address].has_what))
        await next(w for w in workers if w.address == gone).close()
        await check(c, C, C)
        await async_poll_for(lambda: all(holders(s, C)))
        np.testing.assert_allclose(await c.compute(C), A)


@gen_cluster(client=True, nthreads=FOUR)
async def test_pieces_of_a_closed_worker_are_rebuilt_only_on_the_named_workers(c, s, *workers):
    *named, other = s.workers
    C = await coded.encode(A, coded.MDS(3, 2), c, workers=named)
    for _ in range(2):
        gone = min(named, key=lambda address: len(s.workers[address].has_what))
        named.remove(gone)
        await next(w for w in workers if w.address == gone).close()
        await async_poll_for(lambda: all(holders(s, C)))
        assert not s.workers[other].has_what


@gen_cluster(client=True, nthreads=FOUR)
async def test_copies_of_a_closed_worker_are_rebuilt_exactly(c, s, *workers):
    whole = np.arange(40).reshape(10, 4)
    C = await coded.encode(whole, coded.Repetition(4, 2), c)
    await workers[1].close()
    await async_poll_for(lambda: all(holders(s, C)))
    np.testing.assert_array_equal(await c.compute(C), whole)
    np.testing.assert_array_equal(await c.compute(C @ np.arange(4)), whole @ np.arange(4))


@gen_cluster(client=True, nthreads=FOUR)
async def test_worker_closed_during_a_loop(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(gated, C, "close", client=c, workers=C.encoded.workers[0])
    await Event("close-started").wait()
    await next(w for w in workers if w.address == C.encoded.workers[1]).close()
    await Event("close-go").set()
    np.testing.assert_allclose(await future, [A @ x] * 2)


@gen_cluster(client=True, nthreads=FOUR)
async def test_greeting_of_a_worker_that_has_left(c, s, *workers):
    await install(c)
    plugin_of(s).hello("tcp://127.0.0.1:1", "another version", 0.01)
    C = await coded.encode(A, coded.MDS(4, 3), c)
    await check(c, C)


@gen_cluster(client=True, nthreads=FOUR)
async def test_piece_that_its_worker_cannot_read(c, s, *workers):
    """The coordinator may be on that worker, to which there is no connection that could break."""

    def unreadable(key):
        raise OSError("on purpose")

    C = await coded.encode(A, coded.MDS(4, 3), c)
    first = C.encoded.workers[0]
    plugin = worker_plugin(next(w for w in workers if w.address == first))
    plugin.piece = unreadable
    with captured_logger("distributed.dask_coded") as log:
        result = await coded.submit(lambda operator: operator @ x, C, client=c, workers=first)
    np.testing.assert_allclose(result, A @ x)
    assert "cannot read the piece" in log.getvalue()


@gen_cluster(client=True, nthreads=FOUR, timeout=60)
async def test_a_piece_is_rebuilt_without_one_that_its_worker_cannot_read(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    first, *_, last = (next(w for w in workers if w.address == a) for a in C.encoded.workers)
    key, held = C.encoded.futures[0].key, worker_plugin(first).disk.held

    def unreadable(wanted):
        return None if wanted == key else held(wanted)

    worker_plugin(first).disk.held = unreadable
    lost = C.encoded.futures[3].key
    await last.close()
    await async_poll_for(lambda: s.tasks[lost].state == "memory", timeout=60)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_out_of_reach_of_the_coordinator_alone(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    first, *others = C.encoded.workers
    unreachable = [w for w in workers if w.address in others[:2]]
    asked, waited, plan = [], [], s.handlers["coded_plan"]

    async def counted(**arguments):
        asked.append(arguments)
        return await plan(**arguments)

    async def broken(comm, protocol):
        raise OSError

    class Counted(Backoff):
        async def wait(self):
            waited.append(self.attempts)
            await super().wait()

    s.handlers["coded_plan"] = counted
    for worker in unreachable:
        worker.handlers["coded_channel"] = broken
    with (
        patch.object(coordinator_module, "Backoff", Counted),
        patch.object(live_round_module, "timeouts", lambda: Timeouts(1e6)),
    ):
        future = coded.submit(lambda operator: operator @ x, C, client=c, workers=first)
        await async_poll_for(lambda: len(asked) >= 6, timeout=60)
        # It asks a second time at once, and waits ever longer before each further time.
        assert waited == list(range(len(asked) - 2)) or waited == list(range(len(asked) - 1))
        for worker in unreachable:
            worker.handlers["coded_channel"] = worker_plugin(worker).exchange._serve
        np.testing.assert_allclose(await future, A @ x)


@gen_cluster(client=True, nthreads=FOUR)
async def test_no_round_uses_the_plan_of_an_unusually_long_one(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    asked, plan = [], s.handlers["coded_plan"]

    async def counted(**arguments):
        asked.append(arguments)
        return await plan(**arguments)

    def rounds(operator):
        for _ in range(5):
            operator @ x

    s.handlers["coded_plan"] = counted
    with (
        patch.object(Timeouts, "PLANS", 1e6),
        patch.object(live_round_module, "timeouts", lambda: Timeouts(1e6)),
    ):
        for factor, plans in ((float("inf"), 1), (0.0, 6)):
            with patch.object(Pace, "SLOWED", factor):
                await coded.submit(rounds, C, client=c)
            await async_poll_for(lambda n=plans: len(asked) == n, timeout=60)
            asked.clear()


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_task_tells_at_its_end_what_it_has_measured(c, s, *workers):
    """Else only products that take long would be told, and all speeds be those of bad moments."""
    C = await coded.encode(A, coded.MDS(4, 3), c)
    speeds = s.extensions["dask-coded"].speeds
    with patch.object(Timeouts, "PLANS", 1e6), patch.object(Pace, "SLOWED", float("inf")):
        await c.compute(C @ x)
        await async_poll_for(lambda: speeds.rounds == 1, timeout=60)
        await coded.submit(lambda operator: operator @ x, C, client=c)
        await async_poll_for(lambda: speeds.rounds == 2, timeout=60)


@gen_cluster(client=True, nthreads=FOUR[:3])
async def test_loss_of_more_than_the_code_survives_while_rounds_hold_all_threads(c, s, *workers):
    """The tasks that find out that pieces are lost need the threads of the rounds."""
    C = await coded.encode(A, coded.MDS(3, 3), c)
    plan, asked, go = s.handlers["coded_plan"], [], asyncio.Event()

    async def gated(**arguments):
        asked.append(arguments)
        await go.wait()
        return await plan(**arguments)

    s.handlers["coded_plan"] = gated
    lost, *left = workers
    futures = [c.compute(C @ (i * x), workers=[w.address]) for i, w in enumerate(left)]
    await async_poll_for(lambda: len(asked) == 2, timeout=60)
    with patch.object(coordinator_module, "timeouts", lambda: Timeouts(0.02)):
        await lost.close()
        go.set()
        for future in futures:
            with pytest.raises(coded.CodedDataLostError):
                await future


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_lazy_round_that_is_cancelled_ends(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    started = asyncio.Event()
    for worker in workers:
        handlers = worker_plugin(worker).exchange._handlers
        handlers[StartRound] = lambda message, answer: started.set()
    one = workers[0]
    future = c.compute(C @ x, workers=[one.address])
    await started.wait()
    assert worker_plugin(one)._rounds
    await future.cancel()
    # It has a single thread.
    assert await c.submit(lambda: 1, workers=[one.address]) == 1
    assert not worker_plugin(one)._rounds


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_that_answer_while_a_round_is_planned_again_go_on_with_it(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    first, *late, _ = C.encoded.workers
    there = plugin_at(workers, first).exchange
    channels = {address: there.channel(address) for address in late}
    plan, asked, go = s.handlers["coded_plan"], [], asyncio.Event()
    held, end = [], LiveRound._end_if_possible_elsewhere

    async def gated(**arguments):
        asked.append(arguments)
        if len(asked) == 2:  # during the round
            for channel in channels.values():
                channel.receive(Pong("earlier"))
        return await plan(**arguments)

    async def ended(live):
        await end(live)
        go.set()

    def hold(address, handle):
        def start(message, answer):
            there.membership.suspect(address)  # as if it had owed an answer for a long time
            held.append(partial(handle, message, answer))

        return start

    s.handlers["coded_plan"] = gated
    for address in late:
        handlers = plugin_at(workers, address).exchange._handlers
        handlers[StartRound] = hold(address, handlers[StartRound])
    with (
        patch.object(live_round_module, "timeouts", lambda: Timeouts(0.1)),
        patch.object(LiveRound, "_end_if_possible_elsewhere", ended),
    ):
        future = coded.submit(lambda operator: operator @ x, C, client=c, workers=first)
        await go.wait()
        assert len(held) == 2
        for start in held:
            start()
        np.testing.assert_allclose(await future, A @ x)
    assert len(held) == 2  # there was no other round


@gen_cluster(client=True, nthreads=FOUR[:3])
async def test_loss_of_more_than_the_code_survives(c, s, *workers):
    C = await coded.encode(A, coded.MDS(3, 3), c)
    await workers[0].close()
    with pytest.raises(
        coded.CodedDataLostError, match=r"MDS\(n=3, k=3\) can lose 0 of its workers; 2 of"
    ):
        await c.compute(C @ x)


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_worker_that_joins_later_is_used(c, s, *workers):
    with pytest.raises(coded.ClusterUnfitError, match="needs 3 workers, the cluster has 2"):
        await coded.encode(A, coded.MDS(3, 2), c)
    async with Worker(s.address, nthreads=1) as late:
        assert isinstance(late.extensions["dask-coded"], CodedWorkerPlugin)
        C = await coded.encode(A, coded.MDS(3, 2), c)
        assert late.address in C.encoded.workers
        await check(c, C)
        del C
        await async_poll_for(lambda: not plugin_of(s).arrays)


@gen_cluster(client=True, nthreads=SIX)
async def test_worker_that_joins_when_parity_was_released(c, s, *workers):
    C = await coded.encode(A, coded.MDS(6, 4), c)
    blocks, parity = C.encoded.futures[:4], C.encoded.spec.keys[4:]
    del C
    await async_poll_for(lambda: not any(key in s.tasks for key in parity), timeout=60)
    with captured_logger("distributed.worker") as log:
        async with Worker(s.address, nthreads=1) as late:
            assert late.address in plugin_of(s).versions
    assert "failed to setup" not in log.getvalue()
    np.testing.assert_array_equal(np.concatenate(await c.gather(list(blocks))), A)


@gen_cluster(client=True, nthreads=FOUR)
async def test_replicas_do_not_move_the_work(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    s.extensions["amm"].stop()  # it would keep any one copy, until the piece comes home
    await c.replicate(C.encoded.futures)
    await check(c, C)
    answer = await plugin_of(s).plan(
        C.encoded.spec.id, {}, "continuous", "adaptive", silent=[], known=4
    )
    plan = answer["answer"].data
    assert [plan.addresses[i] for i in plan.host] == list(C.encoded.workers)


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_that_have_left_are_not_remembered_as_silent(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    silent = ["tcp://127.0.0.1:1", workers[0].address]
    await plugin_of(s).plan(C.encoded.spec.id, {}, "continuous", "adaptive", silent=silent, known=4)
    assert plugin_of(s).standings.suspects <= {workers[0].address}


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_plan_for_an_array_all_of_whose_workers_have_left(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    measured = dict.fromkeys(C.encoded.workers, 1.0)
    for w in workers:
        await w.close()
    await async_poll_for(lambda: not s.workers)
    answer = await plugin_of(s).plan(
        C.encoded.spec.id, {}, "continuous", "adaptive", silent=[], known=4, measured=measured
    )
    assert isinstance(answer["answer"].data, Lost)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_remembers_the_specs_of_the_latest_arrays_only(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    plugin = worker_plugin(workers[0])
    for i in range(1000):
        plugin.remember(f"array-{i}", C.encoded.spec)
    assert len(plugin._specs) <= 64
    assert plugin.spec("array-999") is C.encoded.spec


@gen_cluster(client=True, nthreads=FOUR)
async def test_restart_clears_the_plugin(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    await check(c, C)
    plugin = plugin_of(s)
    await s.restart(stimulus_id="test", wait_for_workers=False)
    assert plugin_of(s) is plugin
    arrays, homes = plugin.arrays, plugin.homes
    assert not any((arrays, homes._arrays, homes._pins, plugin._holding))
    # `coded.Adaptive` asks for it before it asks the plugin.
    assert await c.scheduler.get_metadata(keys=["dask-coded"], default=None) == coded.__version__
    await async_poll_for(lambda: all(f.status == "cancelled" for f in C.encoded.futures))
    async with Worker(s.address), Worker(s.address):
        D = await coded.encode(A, coded.MDS(2, 1), c)
        await check(c, D)


# -- installing the plugins --------------------------------------------------------------------


@gen_cluster(client=True, nthreads=FOUR[:2], scheduler_kwargs={"preload": ["dask_coded.preload"]})
async def test_preload_of_the_scheduler(c, s, *workers):
    plugin = plugin_of(s)
    assert isinstance(plugin, CodedSchedulerPlugin)
    assert all(worker_plugin(w) for w in workers)
    C = await coded.encode(A, coded.MDS(2, 1), c)
    assert plugin_of(s) is plugin
    await check(c, C)


@gen_cluster(nthreads=FOUR[:2], worker_kwargs={"preload": ["dask_coded.preload"]})
async def test_preload_of_workers_alone(s, *workers):
    assert "dask-coded" not in s.extensions
    for worker in workers:
        with pytest.raises(RuntimeError, match="is not prepared for coded rounds"):
            worker_plugin(worker)


@gen_cluster(client=True, nthreads=FOUR)
async def test_worker_lost_while_the_plugins_are_installed(c, s, *workers):
    async def lost(**message):
        raise OSError("on purpose")

    workers[0].handlers["plugin-add"] = lost
    C = await coded.encode(A, coded.MDS(3, 2), c)
    await install(c)
    assert s.plugins["dask-coded"] is plugin_of(s)
    assert workers[0].address not in C.encoded.workers
    await check(c, C)


def test_a_plugin_that_could_not_be_set_up_is_set_up_again():
    class Plugin(SchedulerExtension):
        name = "plugin"

        def __init__(self, fails: bool) -> None:
            self.fails = fails
            self.set = False

        async def set_up(self, scheduler) -> None:
            await all_started.wait()
            if self.fails:
                raise OSError("on purpose")
            self.set = True

    async def let_go() -> None:
        all_started.set()

    async def start():
        # Tasks begin in the order in which they were made.
        starts = [p.start(scheduler) for p in plugins]
        return await asyncio.gather(*starts, let_go(), return_exceptions=True)

    all_started = asyncio.Event()
    scheduler = SimpleNamespace(extensions={})
    plugins = [Plugin(True), Plugin(False), Plugin(False)]
    failed, *others = asyncio.run(start())
    assert isinstance(failed, OSError)
    assert others == [None, None, None]
    assert [p.set for p in plugins] == [False, True, False]
    assert scheduler.extensions["plugin"] is plugins[1]


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_installing_again_keeps_the_arrays(c, s, *workers):
    await install(c)
    first = plugin_of(s), [worker_plugin(w) for w in workers]
    C = await coded.encode(A, coded.MDS(2, 1), c)
    await install(c)
    await dask_setup(s)
    assert (plugin_of(s), [worker_plugin(w) for w in workers]) == first
    await check(c, C)


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_scheduler_without_the_package(c, s, *workers, monkeypatch):
    async def register_plugin(plugin):
        raise ModuleNotFoundError("No module named 'dask_coded'")

    monkeypatch.setattr(c, "register_plugin", register_plugin)
    with pytest.raises(coded.ClusterUnfitError, match=r"scheduler at .* lacks .* the workers\."):
        await coded.encode(A, coded.MDS(2, 1), c)
    s.handlers["versions"] = lambda: {"host": {"python": "3.1.4.final.0"}}
    with pytest.raises(coded.ClusterUnfitError, match=r"with Python .* as here: there it is 3\.1"):
        await coded.encode(A, coded.MDS(2, 1), c)


@gen_cluster(client=True, nthreads=FOUR)
async def test_worker_without_the_package(c, s, *workers):
    await install(c)
    del plugin_of(s).versions[workers[0].address]
    C = await coded.encode(A, coded.MDS(3, 2), c)
    assert workers[0].address not in C.encoded.workers
    await check(c, C)
    lacking = rf"has 3: .* Worker {workers[0].address} has no dask_coded\. Install .* there"
    with pytest.raises(coded.ClusterUnfitError, match=lacking):
        await coded.encode(A, coded.MDS(4, 2), c)


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_that_lack_the_package_or_have_other_versions_are_all_named(c, s, *workers):
    def refuse(**message):
        raise ModuleNotFoundError("No module named 'dask_coded'")

    first, second, third, fourth = (w.address for w in workers)
    workers[0].handlers["plugin-add"] = refuse
    s.workers[first].versions["host"] = {"python": "3.1.4.final.0"}
    await install(c)
    with pytest.raises(coded.ClusterUnfitError) as few:
        await coded.encode(A, coded.MDS(4, 2), c)
    cause = (
        "no dask_coded (ModuleNotFoundError(\"No module named 'dask_coded'\")), "
        "and Python 3.1.4 instead of 3."
    )
    assert "the cluster has 3: pass a smaller code" in str(few.value)
    assert f"Worker {first} has {cause}" in str(few.value)
    with captured_logger("distributed.dask_coded") as log:
        for address in (second, third):
            plugin_of(s).hello(address, "0.0.7", 0.008)
            assert f"Worker {address} has dask_coded 0.0.7 and the scheduler" in log.getvalue()
    with pytest.raises(coded.ClusterUnfitError) as other:
        await coded.encode(A, coded.MDS(2, 1), c)
    assert f"Worker {first} has {cause}" in str(other.value)
    assert f"{', '.join(sorted([second, third]))} have dask_coded 0.0.7." in str(other.value)
    assert str(other.value).endswith(f"Install dask_coded {coded.__version__} there.")
    assert fourth not in str(other.value)


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_worker_of_another_version(c, s, *workers):
    await install(c)
    plugin_of(s).hello(workers[0].address, "0.0.7", 0.008)
    with pytest.raises(coded.ClusterUnfitError, match=r"Worker tcp:.* has dask_coded 0\.0\.7\."):
        await coded.encode(A, coded.MDS(2, 1), c)
    C = await coded.encode(A, coded.MDS(1, 1), c)
    assert C.encoded.workers == (workers[1].address,)
    await check(c, C)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_of_another_version_that_joins_takes_no_part(c, s, *workers):
    """As while the image of the workers is updated: it would refuse all channels."""
    C = await coded.encode(A, coded.MDS(4, 2), c)
    plugin = plugin_of(s)
    async with Worker(s.address, nthreads=1) as new:
        await async_poll_for(lambda: new.address in plugin.versions)
        plugin.hello(new.address, "0.0.7", 0.0001)
        assert plugin.others == {new.address: "0.0.7"}
        gone = next(w for w in workers if w.address == C.encoded.workers[0])
        await gone.close()
        await async_poll_for(lambda: all(s.tasks[key].who_has for key in C.encoded.spec.keys))
        assert not s.workers[new.address].has_what
        assert new.address not in plugin.placing._fast_workers()
        await check(c, C)
    await async_poll_for(lambda: not plugin.others)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_that_leaves_while_plugins_are_installed_is_forgotten(
    c, s, *workers, monkeypatch
):
    """Until a plugin is registered, Dask does not tell it of workers that leave."""
    give = CodedSchedulerPlugin.give

    async def given(self, scheduler, name, kind):
        await give(self, scheduler, name, kind)
        self.versions["tcp://127.0.0.1:1"] = coded.__version__
        self.standings.joined("tcp://127.0.0.1:1")

    monkeypatch.setattr(CodedSchedulerPlugin, "give", given)
    await install(c)
    assert plugin_of(s).versions.keys() == s.workers.keys()


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_result_that_is_lost_is_computed_again_and_keeps_its_pieces(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 2), c)
    future = c.compute(C @ x)
    await wait(future)
    plugin, (holder,) = plugin_of(s), s.tasks[future.key].who_has
    await async_poll_for(lambda: not plugin._holding)
    held, hold = [], plugin._hold
    plugin._hold = lambda ts, task: held.append(ts.key) or hold(ts, task)
    await next(w for w in workers if w.address == holder.address).close()
    np.testing.assert_allclose(await future, A @ x)
    assert held
    await async_poll_for(lambda: not plugin._holding)


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_client_of_another_version(c, s, *workers, monkeypatch):
    monkeypatch.setattr("dask_coded.runtime.client.encoding.__version__", "0.0.7")
    monkeypatch.setattr("dask_coded.runtime.client.install.__version__", "0.0.7")
    with pytest.raises(coded.ClusterUnfitError, match=r"The client has dask_coded 0\.0\.7\."):
        await coded.encode(A, coded.MDS(2, 1), c)
    with pytest.raises(coded.ClusterUnfitError, match=r"The client has dask_coded 0\.0\.7\."):
        await check_fit(c)


@gen_cluster(client=True, nthreads=FOUR[:3])
async def test_a_training_for_which_no_worker_has_the_package_is_refused(c, s, first, second, last):
    """It would wait for ever, because workers may get the package later."""
    await install(c)
    await check_fit(c)
    plugin = plugin_of(s)
    plugin.hello(first.address, "0.0.7", 0.008)
    del plugin.versions[second.address]
    await check_fit(c)
    with pytest.raises(coded.ClusterUnfitError, match=r"^No worker can take part\. Worker .* has "):
        await check_fit(c, [first.address])
    del plugin.versions[last.address]
    with pytest.raises(coded.ClusterUnfitError, match=f"Install dask_coded {coded.__version__}"):
        await check_fit(c)
    for worker in (first, second, last):
        await worker.close()
    await check_fit(c)  # others may come


@gen_cluster(client=True, nthreads=FOUR)
async def test_paused_and_retiring_workers_get_no_pieces_and_are_named(c, s, *workers):
    await install(c)
    resting = s.workers[workers[0].address]
    resting.status = Status.paused
    s.running.remove(resting)
    C = await coded.encode(A, client=c)
    assert C.code.n == 3 and workers[0].address not in C.encoded.workers
    with pytest.raises(coded.ClusterUnfitError, match=f"Worker {workers[0].address} is paused"):
        await coded.encode(A, coded.MDS(4, 3), c)
    resting.status = Status.closing_gracefully
    with pytest.raises(coded.ClusterUnfitError, match=f"Worker {workers[0].address} is retiring"):
        await coded.encode(A, coded.MDS(4, 3), c)
    resting.status = Status.running
    s.running.add(resting)


@gen_cluster(client=True, nthreads=FOUR)
async def test_an_array_that_was_just_encoded_has_lost_no_worker(c, s, *workers):
    """Who waits for workers does not hear at once how many there are."""
    c._scheduler_identity = {"workers": {}, "n_workers": 1}
    C = await coded.encode(A, coded.MDS(4, 3), c)
    assert "left" not in repr(C)


@gen_cluster(client=True, nthreads=[])
async def test_cluster_without_workers(c, s):
    with pytest.raises(ValueError, match="wait_for_workers"):
        await coded.encode(A, client=c)
    with pytest.raises(coded.ClusterUnfitError, match="the cluster has 0"):
        await coded.encode(A, coded.MDS(2, 1), c)


# -- messages ----------------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=FOUR)
async def test_worker_that_answers_again_takes_the_place_of_another_that_is_silent(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    first, back, stopped, _ = C.encoded.workers
    exchanges = {w.address: worker_plugin(w).exchange for w in workers}
    channel, started = exchanges[first].channel(back), asyncio.Event()
    exchanges[first].membership.suspect(back)  # as if it had owed an answer for a long time
    exchanges[stopped]._handlers[StartRound] = lambda message, answer: started.set()
    future = coded.submit(lambda operator: operator @ x, C, client=c, workers=first)
    await started.wait()
    channel.receive(Pong("earlier"))
    np.testing.assert_allclose(await future, A @ x)


@pytest.mark.parametrize("last_word", [[], [ChunksLacking("operand", (0,))]], ids=len)
@gen_cluster(client=True, nthreads=FOUR)
async def test_piece_moved_while_a_round_waits_for_a_silent_worker(c, s, *workers, last_word):
    C = await coded.encode(A, coded.MDS(3, 2), c)
    silent, leaving, _ = C.encoded.workers
    (spare,) = set(s.workers) - set(C.encoded.workers)
    asked = set()

    def stop(message, answer, address):
        asked.add(address)
        for word in last_word:
            answer(replace(word, run_id=message.run_id))

    for worker in workers:
        if worker.address in (silent, leaving):
            handlers = worker_plugin(worker).exchange._handlers
            handlers[StartRound] = partial(stop, address=worker.address)
            handlers[Ping] = lambda message, answer: None
    future = coded.submit(lambda operator: operator @ x, C, client=c, workers=spare)
    await async_poll_for(lambda: asked == {silent, leaving})
    await c.retire_workers([leaving])
    np.testing.assert_allclose(await future, A @ x)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_whose_channel_has_closed_serves_a_round_that_waits_for_a_silent_one(
    c, s, *workers
):
    C = await coded.encode(A, coded.MDS(3, 2), c)
    silent, lost, _ = C.encoded.workers
    (spare,) = set(s.workers) - set(C.encoded.workers)
    there = {worker.address: worker_plugin(worker).exchange for worker in workers}
    usual, asked = there[lost]._handlers[StartRound], []
    there[silent]._handlers[StartRound] = lambda message, answer: asked.append(silent)
    there[silent]._handlers[Ping] = lambda message, answer: None
    there[lost]._handlers[StartRound] = lambda message, answer: asked.append(lost)
    future = coded.submit(lambda operator: operator @ x, C, client=c, workers=spare)
    await async_poll_for(lambda: {silent, lost} <= set(asked), timeout=60)
    there[lost]._handlers[StartRound] = usual
    there[spare].channel(lost).abort()
    np.testing.assert_allclose(await future, A @ x)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_round_notices_that_participants_answer_calls(c, s, *workers, monkeypatch):
    noticed, receive = [], Channel.receive

    def spy(channel, message):
        called = channel._called is not None
        receive(channel, message)
        if isinstance(message, Pong):
            noticed.append(called and channel._called is None)

    monkeypatch.setattr(Channel, "receive", spy)
    C = await coded.encode(A, coded.MDS(3, 2), c)
    (spare,) = set(s.workers) - set(C.encoded.workers)

    def late(handlers):
        """Let a participant start only once it has been called."""
        start, waiting = handlers[StartRound], []
        handlers[StartRound] = lambda *found: waiting.append(found)

        def called(message, answer):
            answer(Pong(message.run_id))
            while waiting:
                start(*waiting.pop())

        handlers[Ping] = called

    for worker in workers:
        late(worker_plugin(worker).exchange._handlers)
    future = coded.submit(lambda operator: operator @ x, C, client=c, workers=spare)
    np.testing.assert_allclose(await future, A @ x)
    assert any(noticed)


@gen_cluster(client=True, nthreads=FOUR)
async def test_messages_of_an_older_run_are_ignored(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    future = coded.submit(gated, C, "old", client=c)
    await Event("old-started").wait()
    rows = (np.full(1, 1e9),)
    for worker in workers:
        plugin = worker_plugin(worker)
        # The participant's side: nothing is computed, and only a stop is answered.
        answers = []
        for message in (
            ChangeRound("older", ((0, 0, 1),), ()),
            ChangeRound("older", (), ((0, 0, 1),)),
            EndRun("older"),
            EndRun("older", answer=True),
        ):
            plugin._handle(message, answers.append)
        assert answers == [Pong("older")]
        # The coordinator's side: nothing is decoded.
        for channel in plugin.exchange._channels.values():
            channel.receive(Share("older", ((0, 0, 1),), rows, 0.0))
            channel.receive(PiecesAbsent("older", (0, 1, 2, 3)))
            channel.receive(Pong("older"))
    await Event("old-go").set()
    np.testing.assert_allclose(await future, [A @ x] * 2)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_piece_that_came_unaligned_is_copied_beside_the_event_loop(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    key, plugin = C.encoded.spec.keys[0], plugin_at(workers, C.encoded.workers[0])
    data = plugin.worker.data
    before = data[key]
    moved = np.ndarray(before.shape, float, np.zeros(before.nbytes + 1, "u1"), offset=1)
    moved[...] = before
    assert not moved.flags.aligned
    data[key] = moved
    assert plugin.piece(key) is moved  # rounds use it as it is until then
    await check(c, C)
    await async_poll_for(lambda: data[key].flags.aligned, timeout=60)
    assert plugin.piece(key) is data[key]
    assert data[key].tobytes() == before.tobytes()
    await check(c, C)


@gen_cluster(client=True, nthreads=FOUR)
async def test_channels_close_with_their_worker(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 4), c)
    coordinator, other = C.encoded.workers[:2]
    await coded.submit(lambda C: C @ x, C, client=c, workers=coordinator)
    plugin = next(worker_plugin(w) for w in workers if w.address == coordinator)
    channels = plugin.exchange._channels
    assert set(channels) == set(s.workers)
    await next(w for w in workers if w.address == other).close()
    await async_poll_for(lambda: channels[other].closed)
    assert not any(channels[a].closed for a in s.workers)


@gen_cluster(client=True, nthreads=FOUR)
async def test_speeds_are_learnt(c, s, *workers):
    big = np.ones((4000, 100))
    C = await coded.encode(big, coded.MDS(4, 3), c)

    def loop(operator):
        for _ in range(5):
            operator @ np.ones(100)

    # Measurements travel with the question for a new plan.
    with patch.object(Timeouts, "PLANS", 0.0):
        await c.gather([coded.submit(loop, C, client=c), coded.submit(loop, C, client=c)])
    history = plugin_of(s).speeds
    assert history.rounds > 0
    speeds = history.predict(list(s.workers), "adaptive")
    assert np.isfinite(speeds).all()
    assert (speeds > 0).all()
    assert len(set(speeds)) > 1  # unknown workers are all predicted 1


# -- security ----------------------------------------------------------------------------------


def test_tls():
    pytest.importorskip("cryptography")

    @gen_cluster(
        client=True,
        scheduler="tls://127.0.0.1",
        nthreads=[("tls://127.0.0.1", 1)] * 4,
        security=Security.temporary(),
    )
    async def test(c, s, *workers):
        assert all(w.address.startswith("tls://") for w in workers)
        C = await coded.encode(A, coded.MDS(4, 3), c)
        await check(c, C, C)
        plugins = [worker_plugin(w) for w in workers]
        assert all(a.startswith("tls://") for p in plugins for a in p.exchange._channels)
        await workers[0].close()
        await check(c, C)

    test()


@gen_cluster(client=True, nthreads=FOUR)
async def test_rounds_of_an_array_on_other_workers_make_no_speed_older(c, s, *workers):
    addresses = [worker.address for worker in workers]
    ours, others = addresses[:2], addresses[2:]
    C = await coded.encode(A, coded.MDS(2, 1), c, workers=ours)
    D = await coded.encode(A, coded.MDS(2, 1), c, workers=others)
    await check(c, C, D)  # rounds of both are planned
    plugin = plugin_of(s)
    plugin.learn(C.encoded.spec.id, dict.fromkeys(ours, 1.0))
    for _ in range(100):
        plugin.learn(D.encoded.spec.id, dict.fromkeys(others, 1.0))
    assert plugin.speeds._records.idle(plugin.speeds._find(ours)).max() < 32
