"""Pieces that do not fit into the memory of their worker."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import os
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from dask.sizeof import sizeof
from distributed import Event, Nanny, Worker
from distributed.protocol import deserialize_bytes, serialize_bytes
from distributed.protocol.serialize import deserialize, serialize
from distributed.spill import SpillBuffer
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_coded as coded
from dask_coded.runtime.worker import disk as module
from dask_coded.runtime.worker.disk import Disk, MappedArray, streamed
from dask_coded.runtime.worker.plugin import _largest_batch, worker_plugin

pytestmark = pytest.mark.skipif(not module._ABLE, reason="needs files without a name")

A = np.random.default_rng(0).standard_normal((600, 50))
x = np.random.default_rng(1).standard_normal(50)

# A worker spills what is larger than 20 kB; a third of A has 80 kB. Nothing depends on the memory
# of this process, which is that of all tests.
FOUR = {
    "client": True,
    "nthreads": [("127.0.0.1", 1)] * 4,
    "worker_kwargs": {"memory_limit": 10**6},
    "config": {
        "distributed.worker.memory.target": 0.02,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "coded.encode.slice": "8 kiB",
    },
}


def mapped(tmp_path: Path, rows: int = 100, columns: int = 50) -> MappedArray:
    array = MappedArray.zeros((rows, columns), np.dtype(float), str(tmp_path))
    array[...] = np.random.default_rng(2).random(array.shape)
    return array


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_data_that_cannot_be_read_now_are_not_missing(c, s, worker):
    """A round whose worker said that it lacks the piece would be planned there again and again."""

    class Full(dict):
        def get(self, key, default=None):
            raise MemoryError

    disk, stand_in = Disk.of(worker), SimpleNamespace(data=Full(), address=worker.address)
    with (
        captured_logger("distributed.dask_coded") as log,
        patch.object(disk, "_worker", stand_in),
    ):
        with pytest.raises(MemoryError):
            disk.unspill("some")
        assert disk.held("some") is None
    assert "cannot read 'some'" in log.getvalue()


def resident(array: MappedArray) -> int:
    """Return how many bytes of an array are in the memory of this process."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= array.ctypes.data < int(found[2], 16)
        elif here and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def in_files(workers) -> list[MappedArray]:
    """Return the arrays in files that workers hold."""
    return [array for w in workers for array in Disk.of(w)._kept.values()]


# -- the array ---------------------------------------------------------------------------------


def test_its_file_has_no_name_and_is_freed_with_it(tmp_path):
    array = mapped(tmp_path)
    assert not list(tmp_path.iterdir())
    view, gone = array[10:20], weakref.ref(array)
    expected = view.copy()
    del array
    gc.collect()
    assert gone() is not None  # the view needs it
    np.testing.assert_array_equal(view, expected)
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("columns", [1, 50, 512, 700])
def test_pages_of_rows(tmp_path, columns):
    array, row = mapped(tmp_path, 100, columns), columns * 8
    for first, last in ((0, 1), (3, 50), (50, 100), (0, 100)):
        start, size = array.pages(first, last)
        assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        assert start <= first * row < start + mmap.PAGESIZE
        assert start + size - mmap.PAGESIZE < last * row <= start + size


def test_released_rows_are_still_there(tmp_path):
    array = mapped(tmp_path, 1000, 500)
    before = np.array(array)
    array.release()
    assert resident(array) == 0
    array.sum()
    assert resident(array) >= array.nbytes
    array.release(0, 1000)
    assert resident(array) == 0
    np.testing.assert_array_equal(array, before)
    np.testing.assert_array_equal(array.read(7, 70), before[7:70])
    assert not isinstance(array.read(7, 70).base, MappedArray)


def test_products_keep_one_range_of_rows_in_memory(tmp_path):
    array = mapped(tmp_path, 1000, 500)
    most = 0
    bound = streamed("matvec", array, 1000, np.ones(500))
    expected = [rows.sum() for rows in np.array(array)]
    array.release()
    for a in range(0, 1000, 100):
        np.testing.assert_allclose(bound(a, a + 100, None), expected[a : a + 100])
        most = max(most, resident(array))
    assert most <= 0.3 * array.nbytes  # the system maps some pages around those that are read


def test_on_the_disk_it_is_a_note_of_its_mapping(tmp_path):
    array = mapped(tmp_path)
    data = serialize_bytes(array, on_error="raise")
    assert len(data) < 1000
    assert sizeof(array) < 1000 < array.nbytes == sizeof(array[:])
    assert deserialize_bytes(data) is array
    del array
    gc.collect()
    with pytest.raises(KeyError):
        deserialize_bytes(data)


def test_in_messages_it_is_an_ordinary_array(tmp_path):
    array = mapped(tmp_path)
    found = deserialize(*serialize(array, context={"recipient": "tcp://elsewhere"}))
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, array)


def test_views_and_results_are_ordinary_on_the_disk(tmp_path):
    array = mapped(tmp_path)
    for part in (array[3:9], array + 1, array.T, array.copy()):
        np.testing.assert_array_equal(deserialize_bytes(serialize_bytes(part)), part)


def test_spilled_again_and_again_it_is_neither_copied_nor_lost(tmp_path):
    array = mapped(tmp_path)
    expected, kept = np.array(array), {"a": array}
    buffer = SpillBuffer(str(tmp_path), target=10_000)
    buffer["a"] = array
    for i in range(3):
        buffer[f"b{i}"] = np.ones(1240)
        assert "a" in buffer.slow
        assert buffer.spilled_total.disk < 1000 + 10_000 * i
        assert buffer["a"] is kept["a"]
        assert "a" in buffer.fast
    np.testing.assert_array_equal(array, expected)


# -- which arrays ------------------------------------------------------------------------------


def test_a_full_disk(monkeypatch, tmp_path):
    def full(*args):
        raise OSError("No space left on device")

    @gen_cluster(**FOUR)
    async def test(c, s, *workers):
        monkeypatch.setattr(os, "posix_fallocate", full)
        C = await coded.encode(A, coded.MDS(4, 3), c)
        assert not in_files(workers)
        np.testing.assert_allclose(await c.compute(C @ x), A @ x)

    test()


# Dask would pause the workers of this process, which has far more memory, if it looked.
PAUSING = FOUR["config"] | {
    "distributed.worker.memory.pause": 0.8,
    "distributed.worker.memory.monitor-interval": "1h",
}


def test_encoding_what_fits_neither_into_memory_nor_on_the_disk(monkeypatch):
    def no_room(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    @gen_cluster(**FOUR | {"config": PAUSING})
    async def test(c, s, *workers):
        source = da.from_array(A, chunks=(90, 50))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", no_room)
            with pytest.raises(OSError, match=r"no room for an array of 78\.12 kiB.* are free now"):
                await coded.encode(source, coded.MDS(4, 3), c)
        # Nothing is left, and there may be room later.
        await async_poll_for(lambda: not any(w.data for w in workers))
        assert not in_files(workers) and {w.status.name for w in workers} == {"running"}
        C = await coded.encode(source, coded.MDS(4, 3), c)
        np.testing.assert_allclose(await c.compute(C @ x), A @ x)

    test()


@gen_cluster(**FOUR | {"config": PAUSING | {"distributed.worker.memory.max-spill": 70_000}})
async def test_what_fits_neither_into_memory_nor_into_what_dask_may_spill(c, s, *workers):
    disk = Disk.of(workers[0])
    with pytest.raises(OSError, match=r"that Dask has spilled of 68\.36 kiB at most"):
        disk.zeros("key", (200, 50), np.dtype(float))
    assert isinstance(disk.zeros("other", (150, 50), np.dtype(float)), MappedArray)


def test_systems_without_such_files(monkeypatch):
    @gen_cluster(**FOUR)
    async def test(c, s, *workers):
        monkeypatch.setattr(module, "_ABLE", False)
        C = await coded.encode(A, coded.MDS(4, 3), c)
        assert not in_files(workers)
        np.testing.assert_allclose(await c.compute(C @ x), A @ x)

    test()


@gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 10**9}})
async def test_pieces_that_fit_are_in_memory(c, s, *workers):
    C = await coded.encode(da.from_array(A, chunks=(90, 50)), coded.MDS(4, 3), c)
    assert not in_files(workers)
    assert not any(Disk.of(w)._filling for w in workers)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(**FOUR | {"config": PAUSING | {"distributed.worker.memory.target": 0.6}})
async def test_arrays_that_are_being_filled_count_once(c, s, *workers):
    disk, size = Disk.of(workers[0]), 8 * 10**7
    process = workers[0].monitor.get_process_memory
    workers[0].memory_manager.memory_limit = 10 * (process() + 2.5 * size) / 8
    workers[0].data.fast.n = 10 * size
    first = disk.zeros("first", (size // 8,), np.dtype(float))
    assert type(first) is np.ndarray
    # There is room for as much again, but not for two, however much of it is written already.
    for half in (slice(0, 0), slice(0, size // 16), slice(size // 16, None)):
        first[half] = 1.0
        disk.filled("first", first[half].nbytes)
        assert disk._is_bearable(size)
        assert not disk._is_bearable(2 * size)
    assert process() > size


@gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 10**9}})
async def test_a_piece_whose_making_has_failed_does_not_count(c, s, *workers):
    disk = Disk.of(workers[0])
    rows = int(0.6 * workers[0].data.n) // 8
    for _ in range(2):
        assert type(disk.zeros("again", (rows, 1), np.dtype(float))) is np.ndarray


@gen_cluster(**FOUR | {"config": FOUR["config"] | {"distributed.worker.memory.max-spill": 100_000}})
async def test_no_more_than_dask_may_spill(c, s, *workers):
    disk = Disk.of(workers[0])
    first = disk.keep("first", disk.zeros("first", (100, 50), np.dtype(float)))
    assert isinstance(disk.keep("again", first), MappedArray)
    assert type(disk.zeros("second", (80, 100), np.dtype(float))) is np.ndarray
    disk.moved("first", "released")
    disk.moved("again", "released")
    assert isinstance(disk.zeros("third", (80, 100), np.dtype(float)), MappedArray)


# -- on a cluster ------------------------------------------------------------------------------


async def spoil(worker: Worker, wrong: str) -> None:
    """Have a worker spill its piece, and spoil the file."""
    await async_poll_for(lambda: len(worker.data) == 1)  # the blocks are released
    while worker.data.fast:
        worker.data.evict()
    folder = Path(worker.local_directory) / "storage"
    (file,) = folder.iterdir()
    if wrong == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    if wrong == "folder":
        folder.rmdir()


@pytest.mark.parametrize(
    ("source", "verify"),
    [
        # Each once.
        pytest.param(source, verify, marks=[pytest.mark.long] * (i % 2 == verify))
        for i, source in enumerate(["numpy", "chunks", "columns", "blocks"])
        for verify in (False, True)
    ],
)
def test_rounds_over_pieces_larger_than_memory(source, verify):
    chunks = {"chunks": (90, 50), "columns": (70, 17), "blocks": (200, 50)}

    @gen_cluster(**FOUR)
    async def test(c, s, *workers):
        matrix = A if source == "numpy" else da.from_array(A, chunks=chunks[source])
        C = await coded.encode(matrix, coded.MDS(4, 3), c, verify=verify)
        pieces = [Disk.of(w).held(f.key) for f in C.encoded.futures for w in workers]
        assert sum(isinstance(piece, MappedArray) for piece in pieces) == 4
        assert C.encoded.nbytes == 4 * A.nbytes // 3
        del matrix
        for w in workers:  # the blocks are released, and of pieces there are only notes
            await async_poll_for(lambda w=w: w.data.spilled_total.disk < 20_000)

        def loop(C):
            return [C @ x for _ in range(5)]

        for found in await coded.submit(loop, C, client=c):
            np.testing.assert_allclose(found, A @ x)
        np.testing.assert_allclose(await c.compute(C), A, atol=1e-12)  # is sent to the client
        np.testing.assert_allclose(await c.compute(C.sum(axis=0)), A.sum(axis=0))

    test()


@gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 5 * 10**6}})
async def test_pieces_that_dask_has_spilled(c, s, *workers):
    C = await coded.encode(da.from_array(A, chunks=(90, 50)), coded.MDS(4, 3), c)
    assert not in_files(workers)
    for w in workers:
        while w.data.fast:
            w.data.evict()
    while len(in_files(workers)) < 4:  # a worker that seems slow takes part only now and then
        np.testing.assert_allclose(await c.compute(C @ x), A @ x)
    assert not any(Disk.of(w)._in_memory for w in workers)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)
    assert all(w.data.spilled_total.disk < 1000 for w in workers)
    np.testing.assert_allclose(await c.compute(C), A, atol=1e-12)


@pytest.mark.parametrize("wrong", ["folder", "file", "truncated"])
@pytest.mark.parametrize("source", [A, scipy.sparse.random_array((600, 50), density=0.4)])
def test_pieces_that_dask_has_spilled_and_that_are_lost_are_made_again(source, wrong):
    @gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 5 * 10**6}})
    async def test(c, s, *workers):
        C = await coded.encode(source, coded.MDS(4, 3), c)
        first = next(w for w in workers if w.address == C.encoded.workers[0])
        await spoil(first, wrong)
        key = C.encoded.futures[0].key
        for _ in range(2):
            found = await coded.submit(lambda C: C @ x, C, client=c, workers=first.address)
            np.testing.assert_allclose(found, source @ x)
        await async_poll_for(lambda: s.tasks[key].state == "memory" and not first.data.slow)
        assert Disk.of(first).held(key) is not None
        (Path(first.local_directory) / "storage").mkdir(exist_ok=True)
        while first.data.fast:  # Dask can spill it once more
            first.data.evict()
        np.testing.assert_allclose(await c.compute(C @ x), source @ x)

    test()


@gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 5 * 10**6}})
async def test_a_round_ends_if_too_many_spilled_pieces_are_lost(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    for w in workers[:2]:
        await spoil(w, "file")
    with pytest.raises(coded.CodedDataLostError, match="2 of its 4 pieces"):
        await c.compute(C @ x)
    assert all(w.status.name == "running" for w in workers)


@gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 5 * 10**6}})
async def test_a_lost_piece_is_given_up_once_no_task_takes_it_to_be_there(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    first = next(w for w in workers if w.address == C.encoded.workers[0])
    future, disk = C.encoded.futures[0], Disk.of(first)
    busy = c.submit(lambda: Event("go").wait(), workers=[first.address])
    user = c.submit(np.shape, future, workers=[first.address])
    tasks = first.state.tasks
    await async_poll_for(lambda: user.key in tasks and tasks[user.key].state == "ready")
    await spoil(first, "file")
    assert disk.held(future.key) is None
    assert await c.run(lambda: 1, workers=[first.address])
    assert disk.is_spilled(future.key)
    await Event("go", client=c).set()
    await busy
    assert await user.exception() is not None
    user.release()
    await async_poll_for(lambda: disk.held(future.key) is not None)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 5 * 10**6}})
async def test_spilled_pieces_that_cannot_be_read_for_the_moment_are_kept(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    key = C.encoded.futures[0].key
    first = next(w for w in workers if w.address == C.encoded.workers[0])
    while first.data.fast:
        first.data.evict()
    for error in (OSError(errno.EMFILE, "on purpose"), MemoryError()):
        with patch.object(SpillBuffer, "__getitem__", side_effect=error):
            assert Disk.of(first).held(key) is None
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)
    assert s.tasks[key].who_has == {s.workers[first.address]}


@gen_cluster(**FOUR | {"worker_kwargs": {"memory_limit": 5 * 10**6}})
async def test_other_data_make_room_for_pieces(c, s, *workers):
    others = c.map(np.ones, [(1, 10_000 + i) for i in range(4)], workers=[workers[0].address])
    await c.gather(others)
    C = await coded.encode(da.from_array(A, chunks=(90, 50)), coded.MDS(4, 3), c)
    assert not in_files(workers)
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(**FOUR)
async def test_released_pieces_free_the_disk(c, s, *workers):
    C = await coded.encode(da.from_array(A, chunks=(90, 50)), coded.MDS(4, 3), c)
    arrays = [weakref.ref(array) for array in in_files(workers)]
    await c.compute(C @ x)
    del C
    await async_poll_for(lambda: not in_files(workers))
    assert not any(Disk.of(w)._trimming.is_running() for w in workers)
    for w in workers:
        worker_plugin(w)._forget()  # as a few seconds after the last round
    await async_poll_for(lambda: gc.collect() >= 0 and all(array() is None for array in arrays))


@gen_cluster(**FOUR)
async def test_pieces_larger_than_memory_are_rebuilt_and_extended(c, s, *workers):
    some = [w.address for w in workers[:3]]
    source = da.from_array(A, chunks=(90, 50))
    C = await coded.encode(source, coded.RandomLinear(3, 2), c, workers=some)
    C = await C.extend()
    assert len(C.encoded.spec.keys) == 4
    left = [w for w in workers if w.address != C.encoded.workers[0]]
    await next(w for w in workers if w not in left).close()
    tasks = [s.tasks[key] for key in C.encoded.spec.keys]
    await async_poll_for(lambda: all(ts.who_has for ts in tasks))
    held = [worker_plugin(w).piece(key) for w in left for key in C.encoded.spec.keys]
    assert sum(isinstance(piece, MappedArray) for piece in held) >= 4
    np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(**FOUR)
async def test_other_tasks_leave_nothing_in_memory(c, s, *workers):
    C = await coded.encode(da.from_array(A, chunks=(90, 50)), coded.MDS(4, 3), c)
    for array in in_files(workers):
        array.sum()
        assert resident(array) >= array.nbytes
    for w in workers:
        w.monitor.get_process_memory = lambda: 10**6
        Disk.of(w)._trim()
    assert not any(map(resident, in_files(workers)))
    np.testing.assert_allclose(await c.compute(C.sum(axis=1)), A.sum(axis=1))


@gen_cluster(**FOUR)
async def test_several_arrays_at_once(c, s, *workers):
    source = da.from_array(A, chunks=(90, 50))
    arrays = await asyncio.gather(*(coded.encode(source, coded.MDS(4, k), c) for k in (1, 2, 3)))
    for C in arrays:
        np.testing.assert_allclose(await c.compute(C @ x), A @ x)


@gen_cluster(**FOUR)
async def test_pairs_larger_than_memory(c, s, *workers):
    P = await coded.encode_pair(A, A, coded.Polynomial(4, 1, 2), c)
    np.testing.assert_allclose(await c.compute(P.product()), A.T @ A)


@pytest.mark.slow
@pytest.mark.timeout(500)
@gen_cluster(
    client=True,
    Worker=Nanny,
    nthreads=[("127.0.0.1", 1)] * 3,
    worker_kwargs={"memory_limit": 400 * 2**20},
    timeout=400,
)
async def test_workers_whose_piece_and_process_exceed_the_limit(c, s, *nannies):
    """A piece has 256 MiB and the process at least 150, so that its nanny would kill the worker."""
    processes = await c.run(os.getpid)
    source = da.random.default_rng(0).random((2**16, 1024), chunks=(2**11, 1024))
    operand = np.random.default_rng(1).random(1024)
    C = await coded.encode(source, coded.MDS(3, 2), c)
    expected = (source @ operand).compute(scheduler="sync")

    def loop(C):
        return [C @ operand for _ in range(3)]

    for found in await coded.submit(loop, C, client=c):
        np.testing.assert_allclose(found, expected)
    assert await c.run(os.getpid) == processes
    assert {ws.status.name for ws in s.workers.values()} == {"running"}


def test_batches_are_limited_where_products_need_memory(tmp_path):
    large = np.broadcast_to(1.0, (1 << 12, 1 << 12))  # two batches of 64 MiB
    assert _largest_batch(large, stripes=40, threads=1) == 20
    assert _largest_batch(large, stripes=40, threads=4) == 5
    # Products with integers need a copy of the rows as float64.
    assert _largest_batch(large.astype(np.int8), stripes=40, threads=1) == 20
    assert _largest_batch(large[:4], stripes=40, threads=1) >= 40
    assert _largest_batch(np.full((4, 4), None), stripes=4, threads=1) == 1
    mapped = MappedArray.zeros((4, 4), np.dtype(float), str(tmp_path))
    assert _largest_batch(mapped, stripes=4, threads=1) == 1
