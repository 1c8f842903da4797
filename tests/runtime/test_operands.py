"""Large operands that go from host to host, while workers die and stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.runtime.coordinator.delivery import Delivery, Offer
from dask_coded.runtime.operand import (
    ChunkConfirmed,
    ChunksLacking,
    OperandAt,
    OperandChunk,
    Part,
    Ticket,
)
from dask_coded.runtime.worker.operands import _Coming
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.transport.channels import Channel

# What workers do with small jobs depends on their size.
pytestmark = pytest.mark.usefixtures("job_place")

ROWS, COLUMNS, WIDTH = 12, 20_000, 30  # operands of 4.8 MB
APART = {"coded.shared-memory": False}
ROUNDS = 4


def matrix() -> np.ndarray:
    return np.cos(np.add.outer(7.0 * np.arange(ROWS), np.arange(COLUMNS) ** 2))


def spy(workers) -> list[tuple[str, object]]:
    """Record each message about operands, with the address of its receiver."""
    seen = []
    for worker in workers:
        handlers = worker_plugin(worker).exchange._handlers
        for kind in (OperandChunk, OperandAt):

            def handle(message, answer, handle=handlers[kind], address=worker.address):
                seen.append((address, message))
                handle(message, lambda m: (seen.append((address, m)), answer(m)))

            handlers[kind] = handle
    return seen


@contextmanager
def distant_coordinator():
    """Let no coordinator share memory with other workers, as if it were on another host."""
    with patch.object(Channel, "_probed", lambda *_: None):
        with patch.object(Channel, "may_share", False):
            yield


def refuse(workers) -> list[object]:
    """Have participants fail to read operands in the memory of others; return which they tried."""
    refused = []

    def view(shared):
        refused.append(shared)
        raise FileNotFoundError(2, "No such file or directory")

    for worker in workers:
        worker_plugin(worker).operands._mappings.view = view
    return refused


async def check_rounds(client, C, A, **where) -> None:
    """Run rounds in one loop, and check the result of each."""

    def rounds(operator, count):
        width = 30
        operands = [np.full((operator.shape[1], width), i + 1.0) for i in range(count)]
        return [operator @ x for x in operands]

    results = await coded.submit(rounds, C, ROUNDS, client=client, **where)
    for i, result in enumerate(results):
        expected = A @ np.full((COLUMNS, WIDTH), i + 1.0)
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-7)


async def nothing_is_left(workers) -> None:
    operands = [worker_plugin(worker).operands for worker in workers]
    await async_poll_for(lambda: not any(o._coming for o in operands), timeout=60)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5, config=APART)
async def test_the_coordinator_sends_each_chunk_about_once(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 5), c)  # every worker is needed
    seen = spy(workers)
    await check_rounds(c, C, A, workers=workers[0].address)
    chunks = [m for _, m in seen if isinstance(m, OperandChunk)]
    # The coordinator sends chunks with a list of those that they are passed on to.
    sent = Counter((m.run_id, m.number) for m in chunks if m.below)
    # Rounds have fewer chunks if a busy machine keeps a worker from taking part at first.
    count = {m.run_id: m.part[1] for m in chunks}
    assert len(count) == ROUNDS
    assert len(sent) == sum(count.values())
    # A busy machine may be late with some, which are then sent once more.
    assert max(sent.values()) <= 2
    assert len(chunks) >= 4 * len(sent)
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5)
async def test_neighbours_read_the_first_operand_in_the_coordinators_memory(c, s, *workers):
    """Nothing waits until each of them has tried whether it can."""
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 3), c)
    seen = spy(workers)
    with patch.object(Channel, "_probed", lambda *_: None):  # no answer ever comes
        await check_rounds(c, C, A, workers=workers[0].address)
    assert not seen
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5)
async def test_a_first_operand_that_cannot_be_read_is_sent(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 5), c)  # every worker is needed
    refused = refuse(workers)
    seen = spy(workers)
    with patch.object(Channel, "_probed", lambda *_: None):
        await check_rounds(c, C, A, workers=workers[0].address)
    # Each of the others once; then once more, but for one of them, in a receiver's memory.
    assert 4 <= len(refused) <= 4 + 3
    assert any(isinstance(m, OperandChunk) for _, m in seen)
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5)
async def test_an_operand_that_came_another_way_is_not_looked_for_any_more(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 5), c)  # every worker is needed
    refused = refuse(workers)
    late: list[object] = []
    for worker in workers:
        operands = worker_plugin(worker).operands
        handlers = worker_plugin(worker).exchange._handlers

        def handle(message, answer, operands=operands, usual=handlers[OperandAt]):
            """Wait until the coordinator has sent the operand, because its receiver is slow."""
            coming = operands._coming.get(message.run_id)
            if coming is not None and coming._operand is None:
                asyncio.get_running_loop().call_later(0.01, handle, message, answer)
            else:
                late.append(message)
                usual(message, answer)

        handlers[OperandAt] = handle
    with distant_coordinator():
        await check_rounds(c, C, A, workers=workers[0].address)
    await async_poll_for(lambda: late, timeout=60)
    assert not refused
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5)
async def test_workers_of_one_distant_host_get_one_copy(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 3), c)
    seen = spy(workers)
    with distant_coordinator():
        await check_rounds(c, C, A, workers=workers[0].address)
    assert any(isinstance(m, OperandAt) for _, m in seen)
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5)
async def test_workers_that_cannot_read_their_receivers_memory_get_copies(c, s, *workers):
    A = matrix()
    C = await coded.encode(
        A, coded.MDS(5, 5), c
    )  # every worker is needed, so each refusal is heard
    refused = refuse(workers)
    with distant_coordinator():
        await check_rounds(c, C, A, workers=workers[0].address)
    # The second refusal proves that it was no accident. If the receiver changes, it may be the
    # third one for all but one.
    assert 1 <= len(refused) <= 2 * 4 - 1
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5, config=APART)
async def test_chunks_that_a_relay_loses_come_another_way(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 5), c)  # every worker is needed
    seen = spy(workers)
    lossy = worker_plugin(workers[2])
    usual = Channel.post

    def post(self, message):
        if self._worker is not lossy.worker or not isinstance(message, OperandChunk):
            usual(self, message)

    Channel.post = post
    try:
        await check_rounds(c, C, A, workers=workers[0].address)
    finally:
        Channel.post = usual
    assert any(isinstance(m, ChunksLacking) for _, m in seen) or any(
        count > 1
        for count in Counter(
            (m.run_id, m.number) for _, m in seen if isinstance(m, OperandChunk) and m.below
        ).values()
    )
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 3, config=APART)
async def test_chunks_without_a_round_are_not_kept(c, s, *workers):
    await coded.encode(np.ones((6, 4)), coded.MDS(3, 2), c)
    plugin = worker_plugin(workers[0])
    answers = []
    for i in range(20):
        chunk = OperandChunk(
            f"run-{i}", (0, 2, 131072, "<f8", (32768,), 32768), 0, np.zeros(131072, "u1"), ()
        )
        plugin.operands._handle(chunk, answers.append)
    assert len(answers) == 20
    assert len(plugin.operands._coming) <= 8
    for i in range(20):
        plugin.operands.drop(f"run-{i}", over=True)
    assert not plugin.operands._coming
    plugin.operands._handle(chunk, answers.append)  # too late
    assert not plugin.operands._coming


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 3, config=APART)
async def test_a_round_may_begin_long_after_its_first_chunk(c, s, *workers):
    await coded.encode(np.ones((6, 4)), coded.MDS(3, 2), c)
    operands, x = worker_plugin(workers[0]).operands, np.arange(32768.0)
    part = (0, 1, x.nbytes, "<f8", x.shape, len(x))
    chunk, ready = OperandChunk("late", part, 0, x.view("u1"), ()), []
    operands._handle(chunk, lambda message: None)
    operands._expire("late")
    operands.expect("late", Ticket(None, ((Part(*part), None),)), ready.append, print, print)
    operands._handle(chunk, lambda message: None)
    await async_poll_for(lambda: ready)
    np.testing.assert_array_equal(ready[0], x)
    operands.drop("late", over=True)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 3)
async def test_memory_that_neighbours_may_read_is_not_used_again(c, s, *workers):
    """The coordinator's channel to a receiver breaks, but not those to its neighbours."""
    await coded.encode(np.ones((6, 4)), coded.MDS(3, 2), c)
    receiver, neighbour = (worker_plugin(worker).operands for worker in workers[:2])

    def chunk(run_id, value):
        data = np.full(16384, value).view(np.uint8)
        return OperandChunk(run_id, (0, 1, data.size, "<f8", (16384,), 16384), 0, data, ())

    ticket = Ticket(None, ((Part(0, 1, 131072, "<f8", (16384,), 16384), None),))
    found, told = [], []
    receiver.expect("live", ticket, found.append, print, told.append)
    receiver._handle(chunk("live", 1.0), lambda message: None)
    neighbour.expect("live", ticket, found.append, print, print)
    neighbour._handle(told[0], lambda message: None)
    receiver.drop("live", over=False)
    receiver._handle(chunk("next", -1.0), lambda message: None)
    assert len(found) == 2 and all((x == 1.0).all() for x in found)
    for run_id in ("live", "next"):
        receiver.drop(run_id, over=True)
        neighbour.drop(run_id, over=True)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 3)
async def test_chunks_of_an_operand_that_is_here_already_are_confirmed(c, s, *workers):
    """The coordinator sends it too if the receiver of the host is late to pass it on."""
    await coded.encode(np.ones((6, 4)), coded.MDS(3, 2), c)
    lender, neighbour = (worker_plugin(worker) for worker in workers[:2])
    segment = lender.exchange.memory.lease(131072)
    array = segment.array(np.dtype(float), (16384,))
    array[:] = 1.0
    found, answers = [], []
    part = Part(0, 1, 131072, "<f8", (16384,), 16384)
    neighbour.operands.expect("run", Ticket(None, ((part, None),)), found.append, print, print)
    neighbour.operands._handle(OperandAt("run", segment.place(array)), answers.append)
    chunk = OperandChunk("run", part, 0, array.view(np.uint8), ())
    neighbour.operands._handle(chunk, answers.append)
    assert answers == [ChunkConfirmed("run", 0)]
    assert len(found) == 1 and (found[0] == 1.0).all()
    neighbour.operands.drop("run", over=True)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 3)
async def test_the_receiver_of_a_host_is_the_worker_that_reports_first(c, s, *workers):
    await coded.encode(np.ones((6, 4)), coded.MDS(3, 2), c)
    exchange = worker_plugin(workers[0]).exchange
    channels = {
        w.address: SimpleNamespace(
            address=w.address, near=False, may_share=False, unreadable=0, silent=False
        )
        for w in workers
    }
    for lags, speeds in [((0.5, 0.02, 0.01), (1, 1, 1)), ((0, 0, 0), (0.2, 0.9, 1))]:
        plan = SimpleNamespace(addresses=[*channels], lags=lags, speed=np.array(speeds))
        run_spec = SimpleNamespace(plan=plan, spec=SimpleNamespace(footprints=None))
        hub = SimpleNamespace(has_memory=exchange.has_memory, channel=channels.get)
        delivery = Delivery(hub, run_spec, Offer(np.ones(100_000)))
        delivery.plan(range(3))
        host = delivery._host_of[2]
        assert (host.receiver, host.waiting) == (2, [1, 0])


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5, config=APART)
async def test_an_operand_that_cannot_be_used_ends_the_round_with_an_error(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 5), c)

    def rounds(operator, later, columns):
        import dask_coded.rounds.kernels as module

        def fail(*args):
            raise MemoryError("no room")

        usual = module.KERNELS["matvec"]
        module.KERNELS["matvec"] = (lambda *args: fail) if later else fail
        try:
            operator @ np.ones((operator.shape[1], columns))
        finally:
            module.KERNELS["matvec"] = usual

    # As its kernel is bound, or in its products, of which those with one column are small enough
    # for the event loop.
    for later, columns in ((False, 30), (True, 30), (True, 1)):
        with pytest.raises(MemoryError, match="no room"):
            await coded.submit(rounds, C, later, columns, client=c)
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5, config=APART)
async def test_a_worker_without_room_for_the_operand_leaves_the_round_to_others(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.MDS(5, 3), c)
    full = worker_plugin(workers[1]).operands
    usual, asked = _Coming._room, []

    def room(self, part, length):
        if self._exchange is full._exchange:
            asked.append(part)
            raise MemoryError("no room for the operand")
        return usual(self, part, length)

    with patch.object(_Coming, "_room", room):
        await check_rounds(c, C, A, workers=workers[0].address)
    assert asked
    await nothing_is_left(workers)


@gen_cluster(
    client=True,
    timeout=120,
    nthreads=[("127.0.0.1", 1)] * 5,
    config={**APART, "coded.policy": "static"},  # it is called in for every round
)
async def test_a_worker_called_in_late_gets_the_operand(c, s, *workers):
    A = matrix()
    C = await coded.encode(A, coded.Repetition(5, 5), c)  # any worker can do any work
    seen = spy(workers)
    late = workers[4].address
    plan = Delivery.plan

    def without_late(self, starting):
        plan(self, [w for w in starting if self._channels[w].address != late])

    Delivery.plan = without_late
    try:
        await check_rounds(c, C, A, workers=workers[0].address)
    finally:
        Delivery.plan = plan
    assert any(at == late and isinstance(m, OperandChunk) for at, m in seen)
    await nothing_is_left(workers)
