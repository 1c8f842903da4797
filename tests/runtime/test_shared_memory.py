"""Rounds whose operands and shares lie in shared memory, while workers die and stop."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
import scipy.sparse
from distributed.utils_test import async_poll_for, gen_cluster, poll_for

import dask_coded as coded
from dask_coded.runtime.messages import Share, StartRound
from dask_coded.runtime.worker import plugin as worker_module
from dask_coded.runtime.worker.plugin import worker_plugin
from tests.clocks import set_timeouts

from .loops import checked_loop, wait_for_rounds

ROWS, COLUMNS, WIDTH = 3000, 400, 30  # operands of 96 kB, results of 720 kB

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this platform has no anonymous files in memory"
)


def matrix() -> np.ndarray:
    return np.cos(np.add.outer(7.0 * np.arange(ROWS), np.arange(COLUMNS) ** 2))


class Shared(NamedTuple):
    """What a process has of segments."""

    handles: int  # descriptors and mappings
    largest: int  # bytes mapped at once


def segments(client) -> list[Shared]:
    """Return what each worker has of segments, its own and those of others."""

    def shared(dask_worker) -> tuple[int, int]:
        found, sizes = 0, [0]
        for fd in os.listdir("/proc/self/fd"):
            try:
                found += "dask-coded" in os.readlink(f"/proc/self/fd/{fd}")
            except OSError:  # closed meanwhile
                pass
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "memfd:dask-coded" in line:
                    start, end = (int(address, 16) for address in line.split()[0].split("-"))
                    sizes.append(end - start)
        return found + len(sizes) - 1, max(sizes)

    return [Shared(*found) for found in client.run(shared).values()]


async def check_rounds(client, C, A) -> None:
    """Run five rounds in one loop, and check the result of each."""

    def rounds(operator):
        x = np.ones((operator.shape[1], 30))
        return [operator @ x for _ in range(5)]

    for result in await coded.submit(rounds, C, client=client):
        np.testing.assert_allclose(result, A @ np.ones((COLUMNS, WIDTH)), rtol=1e-9, atol=1e-9)


def test_workers_killed_and_stopped_while_they_share_memory(processes, tmp_path):
    coordinator, stopped, killed, *_ = processes.add(5)
    client = processes.client
    log, over = tmp_path / "log", tmp_path / "over"
    log.touch()
    C = coded.encode(matrix(), coded.MDS(5, 3), client)
    whole = client.scatter(matrix())
    future = coded.submit(
        checked_loop(), C, whole, str(log), str(over), client=client, workers=coordinator
    )

    def progress(rounds: int) -> None:
        wait_for_rounds(future, log, rounds)

    progress(5)
    assert max(found.handles for found in segments(client)) > 3, "nothing is shared but the probe"
    with processes.stopped(stopped):
        progress(5)
    progress(5)
    processes.kill(killed)
    progress(20)

    # Rounds go on meanwhile. The killed worker's pieces were made again of rows that workers left
    # in the memory of others, in segments of 1.8 MB and more, which are let go of a few seconds
    # later. The largest segment of rounds is a result.
    poll_for(lambda: max(found.largest for found in segments(client)) < 1_000_000, timeout=60)
    # A coordinator may have two segments of each worker, with a descriptor and a mapping of each.
    # Of its own it has a probe, three results, four spare segments and the operand, with two
    # descriptors and a mapping of each.
    most = 2 * 2 * 5 + 3 * 9
    assert max(found.handles for found in segments(client)) <= most
    over.touch()
    assert future.result(timeout=60) > 30
    # Of its probe and of a spare operand a process has two descriptors and a mapping; of the
    # coordinator's last two operands one of each. Nothing is left of shares.
    poll_for(lambda: max(found.handles for found in segments(client)) <= 7, timeout=60)


def peaks(client, short: int) -> dict[str, int]:
    """Return the largest memory of each worker since the last call, in bytes more than before.

    Leave room for that many bytes until Dask thinks that memory is short.
    """

    def peak(dask_worker) -> int:
        worker_plugin(dask_worker)._forget()  # as a few seconds after the last round
        limits, largest = dask_worker.memory_manager, 0
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM"):
                    largest = 1024 * int(line.split()[1])
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
        now = dask_worker.monitor.get_process_memory()
        before, dask_worker.extensions["memory-before"] = (
            dask_worker.extensions.get("memory-before", now),
            now,
        )
        limits.memory_limit = int((now + short) / limits.memory_target_fraction)
        return largest - before

    return client.run(peak)


@pytest.mark.parametrize("feeds", [pytest.param(False, marks=pytest.mark.long), True])
def test_large_operands_when_memory_is_short(feeds, processes):
    """Dask counts memory of others as a worker's own, and its nanny would kill the worker."""
    client, size = processes.client, 2**25
    coordinator, *others = processes.add(4, options=("--memory-limit", "2GiB"))
    A = scipy.sparse.random_array((4096, 4096), density=1e-3, rng=np.random.default_rng(0)).tocsr()
    C = coded.encode(A if feeds else A[:256], coded.Repetition(4, 2), client)

    def loop(operator, rounds):
        x = np.ones((operator.shape[1], 1024))
        # Not a new array in each round, because the system may get back the last one late.
        other = None if feeds else np.empty_like(x)
        for _ in range(rounds):
            y = operator @ (x if feeds else np.add(x, 0, out=other))
            if feeds:
                x = y  # in the workers' memory already
        return float(y.sum())

    options = {"client": client, "workers": coordinator}
    coded.submit(loop, C, 2, **options).result()
    peaks(client, size)
    y = coded.submit(loop, C, 6, **options).result()
    x = np.ones(4096)
    for _ in range(6 if feeds else 1):
        x = A[: C.shape[0]] @ x
    assert y == pytest.approx(1024 * x.sum())
    found = peaks(client, size)
    assert max(found[address] for address in others) < 1.8 * size  # an operand, rows of results
    # As in messages: what the loop has made itself, and rows of others.
    assert found[coordinator] < (3.8 if feeds else 2.5) * size


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_large_arrays_do_not_travel_in_messages(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(4, 3), c)
    seen = []
    for worker in workers:
        exchange = worker_plugin(worker).exchange

        def spy(message, answer, handle=exchange._handlers[StartRound]):
            seen.append(message)
            handle(message, lambda m: (seen.append(m), answer(m)))

        exchange._handlers[StartRound] = spy

    # In the first round workers do not know yet, and the coordinator's own worker needs no sharing.
    # On a busy machine some workers get no work.
    operands = rows = 0
    while operands < 10 or rows < 10:
        await check_rounds(c, C, A)
        operands = sum(isinstance(m.ticket[0], tuple) for m in seen if isinstance(m, StartRound))
        rows = sum(isinstance(r, tuple) for m in seen if isinstance(m, Share) for r in m.rows)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_results_that_are_operands_next_stay_as_they_are(c, s, *workers):
    A = scipy.sparse.random_array((20_000, 20_000), density=2e-4, rng=np.random.default_rng(0))
    A = A.tocsr()
    C = await coded.encode(A, coded.Repetition(4, 2), c)

    def iterated(C, kept):
        x, found = np.ones(C.shape[1]), []
        for _ in range(12):
            x = C @ x
            x /= np.abs(x).max()  # in place, where other workers will read it
            found = [*found, x][-kept:]
        return found

    expected = iterated(A, 12)
    for kept in (1, 2, 12):
        found = await coded.submit(iterated, C, kept, client=c)
        np.testing.assert_allclose(found, expected[-kept:], rtol=1e-9)
    # Of the rounds' memory nothing is kept for long.
    for worker in workers:
        worker_plugin(worker)._forget()  # as a few seconds after the last round
    plugins = [worker_plugin(worker) for worker in workers]
    assert not any(p.exchange.memory._spare or p.operands._mappings._mapped for p in plugins)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_an_operand_that_cannot_be_opened_is_sent_in_messages(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(4, 3), c)
    refused = []
    for worker in workers:
        plugin = worker_plugin(worker)

        def view(shared):
            refused.append(shared)
            raise FileNotFoundError(2, "No such file or directory")

        plugin.operands._mappings.view = view

    await check_rounds(c, C, A)
    assert refused


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_a_coordinator_that_cannot_map_shares_gets_them_in_messages(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(4, 3), c)

    def rounds(operator):
        x = np.ones((operator.shape[1], 30))
        results = [operator @ x]  # the first round opens the channels
        refused = []

        def view(shared):
            refused.append(shared)
            raise OSError(24, "Too many open files")

        operator._coordinator._plugin.mappings.view = view
        results += [operator @ x for _ in range(3)]
        assert refused
        return results

    for result in await coded.submit(rounds, C, client=c):
        np.testing.assert_allclose(result, A @ np.ones((COLUMNS, WIDTH)), rtol=1e-9, atol=1e-9)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_shares_of_a_small_operand_are_not_kept_after_the_last_round(c, s, *workers):
    A = np.ones((100_000, 3))
    C = await coded.encode(A, coded.MDS(4, 3), c)

    def rounds(operator):
        return [operator @ np.ones(3) for _ in range(5)][-1]

    # Without the clock that drops what is idle.
    with pytest.MonkeyPatch.context() as patch:
        set_timeouts(patch, 1e6, worker_module)
        np.testing.assert_allclose(await coded.submit(rounds, C, client=c), 3.0)
        plugins = [worker_plugin(worker) for worker in workers]
        await async_poll_for(lambda: not any(plugin._jobs for plugin in plugins), timeout=60)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_rounds_of_a_loop_share_the_same_memory_and_results_stay(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(4, 3), c)
    rounds_of: dict[tuple[str, bytes], set[str]] = {}  # segment -> rounds whose rows lay there
    for worker in workers:
        exchange = worker_plugin(worker).exchange

        def spy(message, answer, handle=exchange._handlers[StartRound], at=worker.address):
            def see(m):
                if isinstance(m, Share):
                    for r in m.rows:
                        if isinstance(r, tuple):
                            rounds_of.setdefault((at, r.nonce), set()).add(m.run_id)
                answer(m)

            handle(message, see)

        exchange._handlers[StartRound] = spy

    def rounds(operator):
        results = []
        for number in range(20):
            results.append(operator @ np.full((operator.shape[1], 30), float(number)))
        return results

    results = await coded.submit(rounds, C, client=c)
    for number, result in enumerate(results):
        np.testing.assert_allclose(
            result, number * (A @ np.ones((COLUMNS, WIDTH))), rtol=1e-9, atol=1e-9
        )
    # A worker whose thread is still busy when a round ends needs new memory for the next one.
    assert max(map(len, rounds_of.values())) > 5
    await async_poll_for(lambda: not any(worker_plugin(w)._outputs for w in workers), timeout=60)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_rounds_that_run_at_once_are_of_different_series(c, s, a):
    await coded.encode(matrix(), coded.MDS(1, 1), c)
    plugin = worker_plugin(a)
    first, second = plugin.take_series("array"), plugin.take_series("array")
    assert first != second
    plugin.put_series("array", first)
    assert plugin.take_series("array") == first
    assert plugin.take_series("array") not in (first, second)
