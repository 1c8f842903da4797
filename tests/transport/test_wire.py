"""Messages arrive as they were sent."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import msgpack
import numpy as np
import pytest
from dask.typing import Key
from distributed.comm import connect, listen
from distributed.protocol import deserialize_bytes, serialize_bytes
from distributed.utils_test import gen_test
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_coded.runtime.messages import Share
from dask_coded.training.runtime.messages import NodeMessage, ReplicaState
from dask_coded.transport.messages import KINDS, Message
from dask_coded.transport.wire import OddMessageError, pack, unpack

SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5)
DTYPES = st.sampled_from(["f4", "f8", ">f8", "c16", "i8", "u1", "?"])
ARRAYS = DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(max_dims=3, min_side=0)))


def transported(sent: list[Message]) -> list[Message]:
    return unpack(deserialize_bytes(serialize_bytes(pack(sent))))


KEYS = st.recursive(st.text(max_size=5) | st.integers(-9, 9), lambda k: st.tuples(k, k))


def values_of(hint) -> st.SearchStrategy:
    """Draw what a field of a message may hold."""
    if hint is Any:
        return SCALARS
    if hint == Key:
        return KEYS
    if isinstance(hint, UnionType):
        return st.one_of([values_of(part) for part in get_args(hint)])
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return st.lists(values_of(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*map(values_of, get_args(hint)))
    whole = st.integers(-(2**60), 2**60)
    numbers = {int: whole, float: whole | st.floats(allow_nan=False)}
    if hint in numbers:
        return numbers[hint]
    return st.from_type(NoneType if hint is None else hint)


def fields_of(kind: type[Message]) -> dict[str, Any]:
    """Return the types of a message's fields."""
    hints = get_annotations(Message, eval_str=True) | get_annotations(kind, eval_str=True)
    return {field.name: hints[field.name] for field in fields(kind)}


@given(st.data())
def test_messages_of_every_kind(data):
    sent = []
    for kind in data.draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=3)):
        values = [data.draw(values_of(hint)) for hint in fields_of(KINDS[kind]).values()]
        sent.append(KINDS[kind](*values))
    assert transported(sent) == sent


@given(st.data())
def test_fields_of_other_types_are_refused(data):
    name = data.draw(st.sampled_from(sorted(KINDS)))
    hints = fields_of(KINDS[name])
    values = [data.draw(values_of(hint)) for hint in hints.values()]
    number = data.draw(st.integers(0, len(hints) - 1))
    hint = [*hints.values()][number]
    values[number] = data.draw(st.sampled_from([{1: 2}, [{}], ([], {}), b"\xff", None, 1.5, "x"]))
    packed = deserialize_bytes(serialize_bytes(pack([KINDS[name](*values)])))
    odd = not isinstance(values[number], (NoneType, float, str, bytes))
    if hint is Any or not odd:
        with suppress(OddMessageError):
            assert len(unpack(packed)) == 1
    elif get_origin(hint) is not tuple or get_args(hint) != (Any, ...):
        with pytest.raises(OddMessageError):
            unpack(packed)


PLAIN = st.recursive(
    SCALARS | st.binary(max_size=9) | st.floats() | st.sampled_from(sorted(KINDS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
)
EXTENSIONS = st.builds(
    lambda code, inner: msgpack.ExtType(code, msgpack.packb(inner)),
    st.integers(0, 3),
    PLAIN | st.tuples(st.sampled_from(["O", "<f8", "no", "V9"]), PLAIN, st.binary(max_size=9)),
)


@given(PLAIN | st.lists(st.tuples(st.sampled_from(sorted(KINDS)), PLAIN, EXTENSIONS), max_size=2))
def test_what_no_worker_sends_is_refused(odd):
    text = msgpack.packb(odd)
    for packed in ([text], [text[:-1]], odd, [odd], [text, *[odd] * 3]):
        try:
            found = unpack(packed)
        except OddMessageError:
            continue
        assert all(type(message) in KINDS.values() for message in found)


def test_numbers_of_numpy_are_numbers():
    sent = [Share("run", ((np.int64(1), 0, np.int32(3)),), (), np.float32(0.5))]
    assert transported(sent) == sent


def test_every_message_is_documented_and_frozen():
    for kind in KINDS.values():
        assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")
        assert kind.__dataclass_params__.frozen
        assert fields(kind)[0].name == "run_id"


@given(st.lists(ARRAYS, max_size=4))
def test_arrays_keep_dtype_shape_and_bytes(arrays):
    (message,) = transported([Share("run", (), tuple(arrays), 0.0)])
    for sent, received in zip(arrays, message.rows, strict=True):
        assert received.dtype == sent.dtype
        assert received.shape == sent.shape
        assert received.tobytes() == sent.tobytes()


def test_views_of_any_strides_arrive():
    x = np.arange(24.0).reshape(4, 6)
    (message,) = transported([Share("run", (), (x[::2, ::-1], x.T), 0.0)])
    np.testing.assert_array_equal(message.rows[0], x[::2, ::-1])
    np.testing.assert_array_equal(message.rows[1], x.T)


@pytest.mark.parametrize("size", [10, 100_000])
def test_small_objects_are_packed_in_the_text_and_large_ones_in_frames(size):
    sent = [Share("run", (), (np.ones(size),), 0.0), ReplicaState("run", 1, b"s" * size)]
    assert len(pack(sent)) == (1 if size == 10 else 4)
    share, checkpoint = transported(sent)
    assert bytes(checkpoint.state) == b"s" * size
    np.testing.assert_array_equal(share.rows[0], 1)


def test_sequences_become_tuples_and_other_objects_keep_their_type():
    payload = [(1, 2, 3), {1: 2}, {3}, np.array(["a", None], dtype=object)]
    (message,) = transported([NodeMessage("run", 1, 2, ("sum", 0, 0), payload, None)])
    ranges, mapping, others, objects = message.payload
    assert message.tag == ("sum", 0, 0)
    assert ranges == (1, 2, 3)
    assert mapping == {1: 2}
    assert others == {3}
    assert objects.tolist() == ["a", None]


def test_a_message_that_cannot_be_packed_leaves_nothing_in_the_next_one():
    large, small = np.ones(100_000), np.ones(3)
    with pytest.raises(UnicodeEncodeError):
        pack([Share("first", (), (large, small, "\ud800"), 0.0)])
    assert len(pack([Share("second", (), (small,), 0.0)])) == 1
    (message,) = transported([Share("second", (), (small,), 0.0)])
    assert message.run_id == "second"
    np.testing.assert_array_equal(message.rows[0], small)


@gen_test()
async def test_large_arrays_arrive_aligned_whatever_comes_before_them():
    received = []

    async def handle(comm):
        while True:
            received.append(unpack(await comm.read()))
            await comm.write("next")

    async with listen("tcp://127.0.0.1:0", handle) as listener:
        comm = await connect(listener.contact_address)
        for length in [*range(9), 5000]:
            await comm.write(pack([Share("o" * length, (), (np.ones(100_000),), 0.0)]))
            await comm.read()
        await comm.close()
    assert all(message.rows[0].flags.aligned for (message,) in received)
    assert len(received) == 10
