"""Large operands of sparse arrays, of which each host gets only what it needs."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

import numpy as np
import pytest
import scipy.sparse
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.rounds import footprint
from dask_coded.runtime.coordinator.delivery import Delivery
from dask_coded.runtime.operand import OperandAt, OperandChunk, Part
from dask_coded.runtime.worker.operands import _Coming

from .loops import check_rounds_through_faults
from .test_operands import APART, distant_coordinator, matrix, nothing_is_left, refuse, spy

SIZE, WIDTH, ROUNDS = 20_000, 30, 3  # operands of 4.8 MB
# Every worker takes part in every round.
FAR = {"nthreads": [("127.0.0.1", 1)] * 5, "config": {**APART, "coded.policy": "static"}}


def banded() -> scipy.sparse.csr_array:
    """Return a matrix whose blocks touch few columns outside the diagonal block."""
    offsets = [-40, -3, 0, 1, 500]
    values = np.random.default_rng(0).random((len(offsets), SIZE))
    return scipy.sparse.dia_array((values, offsets), shape=(SIZE, SIZE)).tocsr()


def operand(seed: int) -> np.ndarray:
    return np.cos(np.add.outer(np.arange(SIZE) * seed, np.arange(WIDTH)))


async def check_rounds(client, C, A, exact=True, **where) -> None:
    def rounds(operator, xs):
        return [operator @ x for x in xs]

    xs = np.stack([operand(i) for i in range(ROUNDS)])
    results = await coded.submit(rounds, C, await client.scatter(xs), client=client, **where)
    for x, found in zip(xs, results, strict=True):
        if exact:
            np.testing.assert_array_equal(found, A @ x)
        else:
            np.testing.assert_allclose(found, A @ x, rtol=1e-9, atol=1e-9)


@pytest.fixture(autouse=True)
def other_entries_are_garbage(monkeypatch):
    """Fill what does not come with NaN, which would spread if any product read it."""
    room = _Coming._room

    def filled(self, *args):
        array = room(self, *args)
        array[...] = np.nan
        return array

    monkeypatch.setattr(_Coming, "_room", filled)


def blocks_at(worker, C) -> dict[int, scipy.sparse.csr_array]:
    """Return the blocks on a worker, by number."""
    spec = C.encoded.spec
    found = {p: worker.data[key] for p, key in enumerate(spec.keys) if key in worker.data}
    return {int(spec.code.block_of[piece]): rows for piece, rows in found.items()}


def chunks_of(seen) -> list[tuple[str, OperandChunk]]:
    return [(to, message) for to, message in seen if isinstance(message, OperandChunk)]


@gen_cluster(client=True, timeout=120, **FAR)
async def test_each_worker_gets_the_entries_that_its_blocks_need(c, s, *workers):
    A = banded()
    C = await coded.encode(A, coded.Repetition(5, 2), c)
    seen = spy(workers)
    await check_rounds(c, C, A, workers=workers[0].address)
    received = defaultdict(set)
    for to, message in chunks_of(seen):
        part = Part(*message.part)
        received[to].add((message.run_id, part.first, part.shape[0]))
    assert set(received) == {worker.address for worker in workers[1:]}
    for worker in workers[1:]:
        needed = [len(np.unique(rows.indices)) for rows in blocks_at(worker, C).values()]
        lengths = [length for _, _, length in received[worker.address]]
        assert sorted(lengths) == sorted(ROUNDS * needed)
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, **FAR)
async def test_workers_with_copies_of_a_block_pass_entries_on(c, s, *workers):
    A = banded()
    C = await coded.encode(A, coded.Repetition(5, 3), c)
    seen = spy(workers)
    await check_rounds(c, C, A, workers=workers[0].address)
    chunks = [message for _, message in chunks_of(seen)]
    # Chunks with a list of those that they are passed on to come from the coordinator.
    sent = Counter((m.run_id, m.number) for m in chunks if m.below)
    # Each block is on three workers, of which the coordinator may be one. A busy machine may be
    # late with a chunk, which is sent once more.
    assert len(chunks) >= 2 * len(sent)
    assert max(sent.values()) <= 2
    parts = {(m.run_id, Part(*m.part)) for m in chunks}
    assert sum(part.shape[0] for _, part in parts) <= 1.25 * SIZE * ROUNDS
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5)
async def test_workers_of_a_distant_host_share_what_they_need_together(c, s, *workers):
    A = banded()
    C = await coded.encode(A, coded.Repetition(5, 2), c)
    seen = spy(workers)
    with distant_coordinator():
        # The memory that the receiver shares has NaN where nothing came.
        await check_rounds(c, C, A, workers=workers[0].address)
    assert all(message.part[4][0] < SIZE / 2 for _, message in chunks_of(seen))
    assert any(isinstance(message, OperandAt) for _, message in seen)
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, nthreads=[("127.0.0.1", 1)] * 5)
async def test_workers_that_cannot_read_what_their_receiver_shares_get_entries(c, s, *workers):
    A = banded()
    C = await coded.encode(A, coded.Repetition(5, 2), c)
    refused = refuse(workers)
    with distant_coordinator():
        await check_rounds(c, C, A, workers=workers[0].address)
    assert refused
    await nothing_is_left(workers)


@gen_cluster(client=True, timeout=120, **FAR)
async def test_the_coordinator_unpacks_columns_in_a_thread(c, s, *workers):
    A = banded()
    C = await coded.encode(A, coded.Repetition(5, 2), c)
    unpacked, usual = [], footprint.indices_of

    def indices_of(packed):
        unpacked.append(threading.get_ident())
        return usual(packed)

    footprint.indices_of = indices_of
    try:
        await check_rounds(c, C, A, workers=workers[0].address)
    finally:
        footprint.indices_of = usual
    assert unpacked and threading.get_ident() not in unpacked


@gen_cluster(client=True, timeout=120, **FAR)
async def test_a_worker_called_in_late_gets_its_entries(c, s, *workers):
    A = banded()
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
    lengths = [message.part[4][0] for to, message in chunks_of(seen) if to == late]
    # None, if the machine is so busy that others take over all its stripes before its chunks come.
    assert all(length < SIZE / 2 for length in lengths)
    await nothing_is_left(workers)


@pytest.mark.parametrize("code", [coded.MDS(5, 3), coded.RandomLinear(5, 3)], ids=repr)
def test_rebuilt_pieces_touch_what_their_blocks_touch(code):
    @gen_cluster(client=True, timeout=120, **FAR)
    async def test(c, s, *workers):
        A = banded()
        C = await coded.encode(A, code, c)
        spec = s.extensions["dask-coded"].arrays[C.encoded.spec.id].spec
        assert spec.footprints is not None
        before = await c.gather(list(C.encoded.futures))
        await workers[1].close()
        await async_poll_for(lambda: all(s.tasks[key].who_has for key in spec.keys), timeout=60)
        for piece, rows in enumerate(await c.gather(list(C.encoded.futures))):
            touched = [spec.footprints.indices[block] for block in spec.blocks_of([piece])]
            assert np.isin(rows.indices, np.concatenate(touched)).all()
            # What cancels may leave entries of the size of a rounding error in these columns.
            assert abs(rows - before[piece]).max() < 1e-12
        await check_rounds(c, C, A, exact=False, workers=workers[0].address)

    test()


@pytest.mark.parametrize(
    "code",
    [coded.Repetition(6, 2), pytest.param(coded.Repetition(6, 3), marks=pytest.mark.long)],
    ids=repr,
)
def test_receivers_of_entries_killed_and_stopped(code, processes, tmp_path, monkeypatch):
    monkeypatch.setenv("DASK_CODED__SHARED_MEMORY", "false")
    check_rounds_through_faults(processes, banded(), code, tmp_path)


@pytest.mark.parametrize(
    "code",
    [coded.MDS(6, 3), pytest.param(coded.Repetition(6, 3), marks=pytest.mark.long)],
    ids=repr,
)
def test_relays_and_receivers_killed_and_stopped_while_chunks_travel(
    code, processes, tmp_path, monkeypatch
):
    monkeypatch.setenv("DASK_CODED__SHARED_MEMORY", "false")
    check_rounds_through_faults(processes, matrix(), code, tmp_path)
