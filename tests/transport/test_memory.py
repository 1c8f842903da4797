"""Arrays in memory that several processes read."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import suppress
from itertools import dropwhile, islice

import dask
import numpy as np
import pytest
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_coded.transport import Exchange, memory
from dask_coded.transport.memory import Mappings, Memory, Segment, SharedArray, aligned
from dask_coded.transport.messages import EndRun

DTYPES = st.sampled_from(["f4", "f8", ">f8", "c16", "i8", "u1", "?"])
ARRAYS = DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(max_dims=3, min_side=0)))

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this platform has no anonymous files in memory"
)


@given(st.lists(ARRAYS, min_size=1, max_size=4))
def test_a_reader_finds_what_was_shared(arrays):
    shared, mappings = Memory(), Mappings(most=2)
    for array in arrays:
        segment, place = shared.share(array)
        # As it arrives from the wire.
        found = mappings.view(SharedArray.received(tuple(place)))
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.aligned and not found.flags.writeable
        shared.reuse(segment)


def test_a_result_is_shared_as_it_is():
    shared, mappings = Memory(), Mappings(most=2)
    for shape in ((10_000,), (100, 100)):
        result = shared.empty(shape, np.dtype(float))
        result[...] = np.arange(10_000.0).reshape(shape)
        for operand in (result, result[:50], result.view("c16")):
            segment, place = shared.share(operand)
            assert segment is None
            np.testing.assert_array_equal(mappings.view(place), operand)
            if operand.ndim == 2 and operand.dtype == float:
                segment, place = shared.share(operand.T)  # begins where the result does
                np.testing.assert_array_equal(mappings.view(place), operand.T)
        segment, place = shared.share(result[1:].copy())
        assert segment is not None
        np.testing.assert_array_equal(mappings.view(place), result[1:])


def test_segments_that_are_used_in_turns_are_mapped_once(monkeypatch):
    shared, mappings, mapped = Memory(), Mappings(most=2), []
    mapping = memory._mapping
    monkeypatch.setattr(memory, "_mapping", lambda *key: mapped.append(key) or mapping(*key))
    segments = [shared.share(np.full(100, float(i))) for i in range(5)]
    mappings.keep(len(segments))
    for _ in range(3):
        for i, (_, place) in enumerate(segments):
            np.testing.assert_array_equal(mappings.view(place), float(i))
        mappings.trim(len(segments))
    assert len(mapped) == len(segments)
    mappings.keep(1)
    assert len(mappings._mapped) == len(segments)


def test_memory_of_a_result_is_used_again_once_nothing_refers_to_it():
    shared, dtype = Memory(), np.dtype(float)
    result = shared.empty((10_000,), dtype)
    address = result.ctypes.data
    view = result.reshape(100, 100)[3:].T
    view[...] = 7.0
    del result
    other = shared.empty((10_000,), dtype)
    assert other.ctypes.data != address  # a part of the first one is in use
    assert (view == 7.0).all()
    del view
    assert shared.empty((10_000,), dtype).ctypes.data == address
    assert other.ctypes.data != address
    # Unless there was no use for memory any more when it was released.
    shared.close()
    del other
    assert not shared._spare


def descriptors() -> int:
    """Count the descriptors of segments, after what other tests have left is collected."""
    gc.collect()
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found += "dask-coded" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_few_results_take_file_descriptors():
    shared, dtype = Memory(), np.dtype(float)
    before = descriptors()
    results = [shared.empty((10_000,), dtype) for _ in range(20)]
    # Python's mmap has a descriptor of its own.
    assert descriptors() == before + 2 * memory.RESULTS
    assert shared.share(results[-1])[0] is not None
    del results
    shared.close()
    assert descriptors() == before
    small, objects = shared.empty((10,), dtype), shared.empty((100_000,), np.dtype(object))
    assert small.flags.owndata and objects.flags.owndata


def test_another_process_reads_it():
    segment, place = Memory().share(np.arange(100_000.0))
    program = (
        "import sys; from dask_coded.transport.memory import Mappings, SharedArray;"
        "print(Mappings(1).view(SharedArray.received(eval(sys.argv[1]))).sum())"
    )
    command = [sys.executable, "-c", program, repr(tuple(place))]
    assert float(subprocess.check_output(command, text=True)) == np.arange(100_000.0).sum()
    segment.close()
    with pytest.raises(OSError):
        Mappings(1).view(place)


def test_a_view_outlives_its_owner_and_its_mapping():
    segment = Segment(800)
    array = segment.array(np.dtype(float), (100,))
    array[:] = 7.0
    mappings = Mappings(most=1)
    view = mappings.view(segment.place(array))
    del array
    segment.close()
    mappings.clear()
    np.testing.assert_array_equal(view, 7.0)


def test_another_segment_under_the_same_descriptor_is_refused():
    segment = Segment(8)
    place = segment.place(segment.array(np.dtype(float), (1,)))
    with pytest.raises(OSError, match="is not the segment"):
        Mappings(1).view(place._replace(nonce=bytes(16)))


def test_segments_are_used_again_if_they_fit():
    shared = Memory()
    first, _ = shared.share(np.zeros(100_000))
    shared.reuse(first)
    second, _ = shared.share(np.ones(90_000))
    assert second is first
    shared.reuse(second)
    third, _ = shared.share(np.ones(9_000))  # would keep far too much
    assert third is not first


def test_segments_of_two_sizes_in_turns_are_used_again():
    """As with a tall matrix and its transpose, whose operands are each other's results."""
    shared, small, large = Memory(), np.zeros(10_000), np.zeros(1_000_000)
    found = []
    for array in (small, large) * 3:
        segment, _ = shared.share(array)
        found.append(segment)
        shared.reuse(segment)
    assert len(set(map(id, found))) == 2
    for _ in range(10):
        shared.reuse(shared.share(small)[0])
    assert [segment for _, segment in shared._spare] == [found[0]]


@pytest.mark.parametrize("room", [0, 10**6])
def test_memory_is_kept_only_as_long_as_there_is_room(room):
    shared, size = Memory(lambda: room), 800_000
    segment, place = shared.share(np.ones(size // 8))
    result = shared.empty((size // 8,), np.dtype(float))
    mappings = Mappings(2, lambda: room)
    np.testing.assert_array_equal(mappings.view(place), 1.0)
    shared.reuse(segment)
    del result
    mappings.trim(2)
    assert (len(shared._spare), len(mappings._mapped)) == ((2, 1) if room else (0, 0))


def test_spare_memory_and_mappings_make_way_for_others():
    room = 10**6
    shared = Memory(lambda: room)
    mappings = Mappings(2, lambda: room)
    first, place = shared.share(np.ones(80_000))
    mappings.view(place)
    shared.reuse(first)
    room = 10**5
    second, place = shared.share(np.ones(100_000))
    assert second is not first and not shared._spare
    view = mappings.view(place)
    assert len(mappings._mapped) == 1
    room = 0
    mappings.release()  # the pages come back when they are read
    np.testing.assert_array_equal(view, 1.0)


def resident(segment: Segment) -> int:
    """Return the bytes of a segment that this process has mapped and touched."""
    address = np.frombuffer(segment._map, np.uint8).ctypes.data
    with open("/proc/self/smaps") as maps:
        mapping = dropwhile(lambda line: not line.startswith(f"{address:x}-"), maps)
        (found,) = islice((line for line in mapping if line.startswith("Rss:")), 1)
    return 1024 * int(found.split()[1])


def test_a_copy_does_not_count_as_memory_of_its_writer_if_memory_is_short():
    array, room = np.ones((1000, 1000)), 10**9
    shared = Memory(lambda: room)
    assert resident(shared.share(array)[0]) >= array.nbytes
    room = array.nbytes // 2
    segment, place = shared.share(array[::2])
    assert resident(segment) < 10**5
    np.testing.assert_array_equal(Mappings(1).view(place), 1.0)


def test_lack_of_memory_for_a_copy(monkeypatch):
    def full(fd, data, at):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "pwrite", full)
    assert Memory(lambda: 0).share(np.zeros(10)) is None


@pytest.fixture
def odd_descriptors(tmp_path):
    """Descriptors that a peer may have, but not of segments."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(bytes(10_000))
    found = [
        os.open(tmp_path / "fifo", os.O_RDWR),
        os.open(tmp_path / "file", os.O_RDONLY),
        os.open("/dev/zero", os.O_RDONLY),
        os.memfd_create("dask-coded"),  # may shrink
        os.memfd_create("another", os.MFD_ALLOW_SEALING),
        *os.pipe(),
    ]
    yield [*found, 10**6]
    for fd in found:
        os.close(fd)


def test_a_descriptor_of_anything_else_is_not_opened(odd_descriptors):
    for fd in odd_descriptors:
        place = SharedArray(os.getpid(), fd, bytes(16), 4096, "<f8", (1,))
        with pytest.raises(OSError):
            Mappings(1).view(place)
        assert not memory.is_readable(tuple(place))
        assert not memory.leave(np.zeros(1), place)


ODD = st.none() | st.integers() | st.text(max_size=9) | st.binary(max_size=20) | st.floats()
ODD |= st.lists(ODD, max_size=3).map(tuple)


@given(st.data())
def test_an_odd_place_of_an_array_is_not_read(data):
    segment, place = Memory().share(np.ones(1000))
    fields = list(place)
    for i in data.draw(st.sets(st.integers(0, 5), min_size=1)):
        fields[i] = data.draw(ODD)
    found = data.draw(st.just(fields) | st.just(fields[:4]) | st.just(fields * 2) | ODD)
    if isinstance(found, list):
        found = tuple(found)
    mappings = Mappings(1)
    with suppress(OSError):
        assert mappings.view(SharedArray.received(found)).nbytes <= 8000
    segment.close()


def test_a_place_beyond_the_end_is_not_read():
    segment, place = Memory().share(np.ones(1000))
    for odd in (
        place._replace(offset=2**62),
        place._replace(shape=(2**40, 2**40)),
        place._replace(shape=(1001,)),
        place._replace(shape=(-1,)),
        place._replace(dtype="O"),
        place._replace(dtype="no dtype"),
        place._replace(pid="../root"),
        place._replace(fd="../root/fifo"),
    ):
        with pytest.raises(OSError):
            Mappings(1).view(SharedArray.received(tuple(odd)))
    segment.close()


def test_a_segment_cannot_shrink():
    segment, place = Memory().share(np.ones(1000))
    for size in (0, 10**6):
        with pytest.raises(OSError):
            os.truncate(f"/proc/self/fd/{place.fd}", size)
    segment.close()


def test_parts_of_a_segment_do_not_overlap():
    segment = Segment(aligned(3) + 8)
    segment.array(np.dtype("u1"), (3,))[:] = 1
    segment.array(np.dtype(float), (1,), at=aligned(3))[:] = 2.0
    assert segment.array(np.dtype("u1"), (3,)).tolist() == [1, 1, 1]


def test_lack_of_memory_is_reported_once(monkeypatch):
    def full(fd, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "ftruncate", full)
    with captured_logger("distributed.dask_coded") as log:
        shared = Memory()
        before = descriptors()
        assert shared.share(np.zeros(10)) is None
        assert shared.new(10) is None
        assert descriptors() == before
    assert log.getvalue().count("cannot share memory") == 1


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_workers_find_out_whether_they_share_memory(s, a, b):
    here, there = Exchange.of(a), Exchange.of(b)
    assert here.shares_memory and there.shares_memory  # assumed until a peer has tried
    channel = here.channel(b.address)
    assert channel.shared is None
    assert channel.may_share
    channel._own = "tcp://10.0.0.1:1234"
    assert not channel.may_share
    assert not here.shares_memory
    channel._own = a.address
    await async_poll_for(lambda: channel.shared, timeout=60)
    assert here.shares_memory
    await here.close()
    assert not here.shares_memory


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_sharing_can_be_switched_off_on_either_side(s, a, b):
    for off in (a, b):
        for worker in (a, b):
            worker.extensions["coded-exchange"] = Exchange(worker)
        with dask.config.set({"coded.shared-memory": False}):
            off.extensions["coded-exchange"] = Exchange(off)
        channel = Exchange.of(a).channel(b.address)
        heard = []
        channel.listen("run", heard.append)
        Exchange.of(b).register(lambda message, answer: answer(message), [EndRun])
        channel.send(EndRun("run", answer=True))
        await async_poll_for(lambda heard=heard: heard, timeout=60)
        assert not channel.shared
        await Exchange.of(a).close()


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_workers_of_different_containers_do_not_share_memory(s, a, b, monkeypatch):
    def closed(path, flags):
        raise PermissionError(13, "Permission denied", path)

    asked = []
    Exchange.of(b)
    monkeypatch.setattr(memory.os, "open", closed)
    channel = Exchange.of(a).channel(b.address)
    probed = channel._probed
    channel.listen("memory", lambda message: (asked.append(message), probed(message)))
    await async_poll_for(lambda: asked, timeout=60)
    assert asked[0].segment is None
    assert not channel.shared
