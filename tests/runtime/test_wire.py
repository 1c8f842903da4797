"""What goes onto the wire comes off it again."""

from __future__ import annotations

import numpy as np
import pytest
from distributed.comm import connect, listen
from distributed.protocol import deserialize_bytes, serialize_bytes
from distributed.utils_test import gen_test
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_coded.runtime.wire import Message, pack, unpack

SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5)
DTYPES = st.sampled_from(["f4", "f8", ">f8", "c16", "i8", "u1", "?"])
ARRAYS = DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(max_dims=3, min_side=0)))


def transported(messages: list[Message]) -> list[Message]:
    return unpack(deserialize_bytes(serialize_bytes(pack(messages))))


@given(st.lists(st.dictionaries(st.text(max_size=3), SCALARS, max_size=4), max_size=3))
def test_messages_of_scalars(messages):
    assert transported(messages) == tuple(messages)


@given(st.lists(ARRAYS, max_size=4))
def test_arrays_keep_dtype_shape_and_bytes(arrays):
    (message,) = transported([{"rows": arrays}])
    for sent, received in zip(arrays, message["rows"], strict=True):
        assert received.dtype == sent.dtype
        assert received.shape == sent.shape
        assert received.tobytes() == sent.tobytes()


def test_views_of_any_strides_arrive():
    x = np.arange(24.0).reshape(4, 6)
    (message,) = transported([{"x": x[::2, ::-1], "t": x.T}])
    np.testing.assert_array_equal(message["x"], x[::2, ::-1])
    np.testing.assert_array_equal(message["t"], x.T)


@pytest.mark.parametrize("size", [10, 100_000])
def test_small_things_lie_in_the_text_and_large_ones_in_frames(size):
    packed = pack([{"x": np.ones(size), "state": b"s" * size, "op": "keep"}])
    assert len(packed) == (1 if size == 10 else 4)
    (message,) = transported([{"x": np.ones(size), "state": b"s" * size, "op": "keep"}])
    assert message["op"] == "keep"
    assert bytes(message["state"]) == b"s" * size
    np.testing.assert_array_equal(message["x"], 1)


def test_sequences_are_tuples_and_other_objects_are_themselves():
    objects = np.array(["a", None], dtype=object)
    (message,) = transported([{"runs": [(1, 2, 3)], "d": {1: 2}, "what": {3}, "objects": objects}])
    assert message["runs"] == ((1, 2, 3),)
    assert message["d"] == {1: 2}
    assert message["what"] == {3}
    assert message["objects"].tolist() == ["a", None]


@gen_test()
async def test_large_arrays_arrive_aligned_whatever_is_before_them():
    received = []

    async def handle(comm):
        while True:
            received.append(unpack(await comm.read()))
            await comm.write("next")

    async with listen("tcp://127.0.0.1:0", handle) as listener:
        comm = await connect(listener.contact_address)
        for length in [*range(9), 5000]:
            await comm.write(pack([{"op": "o" * length, "x": np.ones(100_000)}]))
            await comm.read()
        await comm.close()
    assert all(message["x"].flags.aligned for (message,) in received)
    assert len(received) == 10
