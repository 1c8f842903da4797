"""Peers that send messages which no coordinator, participant or worker would send."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from distributed.comm import connect
from distributed.protocol import to_serialize
from distributed.utils_test import captured_logger, gen_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_coded as coded
from dask_coded.runtime.messages import ChangeRound, Share, StartRound
from dask_coded.runtime.operand import ChunksLacking, OperandChunk
from dask_coded.transport import Exchange
from dask_coded.transport.messages import KINDS, PROTOCOL, EndRun, Pong, ProbeMemory
from dask_coded.transport.wire import pack, unpack
from tests.transport.test_wire import fields_of, values_of

A = np.random.default_rng(0).standard_normal((60, 8))
x = np.arange(8.0)
PART = (0, 1, 64, "<f8", (8,), 8)
START = {
    "kernel": "matvec",
    "ticket": (x, ()),
    "shared": False,
    "stripes": 4,
    "pieces": (),
    "ranges": ((0, 0, 4),),
    "least_batch": 1,
    "interval": 0.0,
    "growth": 1.0,
    "lead": 0.0,
    "series": "",
    "attempt": None,
}
NUMBERS = st.integers(-3, 9) | st.sampled_from([-(2**62), 2**31, 2**40, 2**63])
PLACES = st.tuples(
    st.just(os.getpid()) | NUMBERS | st.just("../root"),
    st.integers(0, 60) | NUMBERS | st.just("../root/fifo"),
    st.just(bytes(16)),
    st.just(4096) | NUMBERS,
    st.sampled_from(["<f8", "O", "no dtype"]),
    st.just((8,)) | st.tuples(NUMBERS),
)
PARTS = st.tuples(
    NUMBERS,
    NUMBERS,
    st.just(64) | NUMBERS,
    st.sampled_from(["<f8", "O", "no dtype", "V8"]),
    st.just((8,)) | st.lists(NUMBERS, max_size=2).map(tuple),
    st.just(8) | NUMBERS,
)
ODD = {
    "kernel": st.sampled_from(["matvec", "bilinear", "no kernel"]),
    "ticket": st.tuples(
        PLACES | st.none() | st.text(max_size=3) | st.just(np.ones(3)) | st.just(x > 2),
        st.lists(
            st.tuples(st.just(PART) | PARTS, st.none() | st.binary(max_size=9)), max_size=2
        ).map(tuple),
    )
    | st.lists(NUMBERS, max_size=3).map(tuple),
    "part": st.just(PART) | PARTS,
    "stripes": NUMBERS,
    "number": NUMBERS,
    "first": NUMBERS,
    "data": st.just(np.zeros(64, np.uint8))
    | st.none()
    | st.just(np.zeros(7))
    | st.text(max_size=3),
    "below": st.recursive(
        st.sampled_from([(), 3, None, "x"]), lambda r: st.tuples(st.tuples(st.text(max_size=9), r))
    ).filter(lambda r: isinstance(r, tuple)),
    "address": st.sampled_from(["", "nonsense", "tcp://", "tcp://127.0.0.1:1", "inproc://x"]),
    "place": PLACES | st.none(),
    "unreadable": st.booleans(),
    "ranges": st.lists(st.tuples(st.integers(-1, 4), NUMBERS, NUMBERS), max_size=2).map(tuple),
    "segment": PLACES,
    "attempt": st.none() | st.tuples(st.text(max_size=2), st.integers(-1, 3)),
    "interval": st.floats(),
    "growth": st.floats(),
    "lead": st.floats(),
}


@pytest.fixture(scope="module")
def C(client):
    return coded.encode(A, coded.MDS(4, 3), client)


def odd_message(data: st.DataObject, keys: list[Any]) -> Any:
    """Draw a message whose fields have the right types, mostly, and odd values."""
    often = [StartRound, StartRound, OperandChunk, ChangeRound]
    kind = data.draw(st.sampled_from([*often, *KINDS.values()]))
    fields = {}
    pieces = st.tuples(st.integers(-1, 4), st.sampled_from(keys) | st.text(max_size=2), NUMBERS)
    odd = ODD | {"pieces": st.lists(pieces, max_size=3).map(tuple)}
    changed = data.draw(st.sets(st.sampled_from([*START]), max_size=3))
    for name, hint in fields_of(kind).items():
        if kind is StartRound and name in START and name not in changed:
            fields[name] = START[name]
            if name == "pieces":
                fields[name] = tuple((i, key, 20) for i, key in enumerate(keys))
        elif name == "run_id":
            fields[name] = data.draw(st.sampled_from(["run", "other"]))
        else:
            fields[name] = data.draw(odd.get(name, values_of(hint)))
    return kind(**fields)


async def sent(address: str, messages: list[Any]) -> None:
    """Send messages through a channel of their own, and wait until they are handled."""
    comm = await connect(address)
    await comm.write({"op": "coded_channel", "protocol": PROTOCOL, "reply": False})
    with suppress(OSError):  # the worker has hung up
        for message in messages:
            await comm.write(pack([message]))
        await comm.write(
            pack(
                [
                    EndRun("run", answer=True),
                    EndRun("other", answer=True),
                    EndRun("last", answer=True),
                ]
            )
        )
        while Pong("last") not in unpack(await comm.read()):
            pass
    comm.abort()


@settings(max_examples=60)
@given(st.data())
def test_a_worker_lives_on_whatever_comes_through_a_channel(client, C, data):
    keys = list(C.encoded.spec.keys)
    messages = [odd_message(data, keys) for _ in range(data.draw(st.integers(1, 4)))]
    worker = data.draw(st.sampled_from(C.encoded.workers))
    with captured_logger("distributed.dask_coded"):
        client.sync(sent, worker, messages)
    np.testing.assert_allclose(client.compute(C @ x).result(timeout=60), A @ x)


async def answers(address: str, message: Any) -> list[Any]:
    """Return what a worker answers to one message, until it hangs up or says that it runs."""
    comm = await connect(address)
    await comm.write({"op": "coded_channel", "protocol": PROTOCOL, "reply": False})
    found: list[Any] = []
    with suppress(OSError):
        await comm.write(pack([message]))
        await comm.write(pack([EndRun("last", answer=True)]))
        while Pong("last") not in found:
            found += unpack(await comm.read())
    comm.abort()
    return found


def start(**changed: Any) -> StartRound:
    return StartRound("run", **(START | changed))


def test_the_path_of_a_pipe_in_place_of_a_descriptor(client, C, tmp_path):
    """Nobody writes to the pipe: to open it would block the event loop for ever."""
    os.mkfifo(tmp_path / "pipe")
    place = (os.getpid(), f"../root{tmp_path}/pipe", bytes(16), 4096, "<f8", (8,))
    worker = C.encoded.workers[0]
    probed = client.sync(answers, worker, ProbeMemory("memory", place))
    assert ProbeMemory("memory", None) in probed
    found = client.sync(answers, worker, start(ticket=(place, ())))
    assert ChunksLacking("run", (), True) in found


@pytest.mark.parametrize(
    "changed",
    [
        {"stripes": 2**31},
        {"stripes": 0},
        {"ranges": ((0, -1, 4),)},
        {"ranges": ((0, 0, 5),)},
        {"ranges": ((0, 3, 2),)},
        {"ticket": (None, (((0, 2**40, 1, "<f8", (2**37,), 2**37), None),))},
        {"ticket": (None, (((0, 2**27, 1, "<u1", (2**27,), 2**27), None),))},
        {"ticket": (None, ((PART[:5], None),))},
        {"ticket": (None, (((0, 1, 64, "O", (8,), 8), None),))},
        {"ticket": (None, (((0, 1, 64, "<f8", (-8,), 8), None),))},
    ],
    ids=str,
)
def test_a_round_that_cannot_be_is_refused_at_once(changed, client, C):
    key = C.encoded.spec.keys[0]
    with captured_logger("distributed.dask_coded") as log:
        message = start(pieces=((0, key, 20),), **changed)
        found = client.sync(answers, C.encoded.workers[0], message)
    assert not found and "cannot be handled" in log.getvalue()
    np.testing.assert_allclose(client.compute(C @ x).result(timeout=60), A @ x)


def test_an_operand_that_is_too_short_is_not_read_beyond_its_end(client):
    S = coded.encode(scipy.sparse.csr_array(A), coded.Repetition(4, 2), client)
    message = start(pieces=((0, S.encoded.spec.keys[0], 20),), ticket=(x[:3], ()))
    for answer in client.sync(answers, S.encoded.workers[0], message):
        assert not isinstance(answer, Share)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
async def test_channels_of_others_stay_open(c, s, *workers):
    C = await coded.encode(A, coded.MDS(4, 3), c)
    options = {"client": c, "workers": workers[0].address}
    np.testing.assert_allclose(await coded.submit(lambda C: C @ x, C, **options), A @ x)
    before = dict(Exchange.of(workers[0])._channels)
    assert len(before) == 4
    with captured_logger("distributed.dask_coded"):
        for worker in workers:
            await answers(worker.address, start(stripes=-1))
            comm = await connect(worker.address)
            await comm.write({"op": "coded_channel", "protocol": PROTOCOL, "reply": False})
            await comm.write(["no message", to_serialize(x)])
            with pytest.raises(OSError):
                await comm.read()
    np.testing.assert_allclose(await coded.submit(lambda C: C @ x, C, **options), A @ x)
    assert Exchange.of(workers[0])._channels == before
    assert not any(channel.closed for channel in before.values())


@pytest.mark.parametrize(
    "changed",
    [
        {"ranges": ((7, 0, 1),)},
        {"ranges": ((0, -1, 1),)},
        {"ranges": ((0, 0, 2**40),)},
        {"rows": ("text",)},
        {"rows": ()},
        {"rows": ((os.getpid(), "../root/pipe", bytes(16), 4096, "<f8", (8,)),)},
    ],
    ids=["another piece", "before the first stripe", "many stripes", "text", "no rows", "a path"],
)
def test_a_participant_that_sends_odd_shares_is_done_without(changed):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4)
    async def test(c, s, *workers):
        C = await coded.encode(A, coded.MDS(4, 3), c)
        odd = next(w for w in workers if w.address == C.encoded.workers[1])
        exchange, sent = Exchange.of(odd), []

        def answer_oddly(message, answer):
            fields = {"ranges": message.ranges, "rows": (np.zeros(1),) * len(message.ranges)}
            sent.append(Share(message.run_id, **(fields | changed), seconds=0.1))
            answer(sent[-1])

        exchange.register(answer_oddly, [StartRound])
        options = {"client": c, "workers": C.encoded.workers[0]}
        with captured_logger("distributed.dask_coded"):
            while not sent:
                found = await coded.submit(lambda C: C @ x, C, **options)
                np.testing.assert_allclose(found, A @ x)

    test()


ANY = st.none() | st.text(max_size=3) | NUMBERS | st.floats() | st.binary(max_size=3)
ANY |= st.lists(ANY, max_size=2) | st.dictionaries(st.text(max_size=2), ANY, max_size=2)
CALLS = {
    "coded_hello": ("worker", "version", "product"),
    "coded_keepers": ("key", "run", "worker", "copies", "avoid"),
    "coded_learn": ["array", "measured", "corrupt", "failed", "wrong_checks"],
    "coded_plan": [
        "array",
        "measured",
        "lags",
        "policy",
        "predictor",
        "silent",
        "known",
        "corrupt",
        "attempt",
    ],
    "coded_register": (
        "spec",
        "allowed",
        "oversubscribe",
        "client",
        "sources",
        "steps",
        "version",
        "storage",
    ),
    "coded_extend": ("array", "allowed"),
    "coded_sources": ("array", "piece", "avoid", "unread", "reason"),
    "coded_stored": ("array",),
    "coded_made": [
        "array",
        "piece",
        "received",
        "work",
        "exponents",
        "squares",
        "footprint",
        "growth",
        "stored",
        "weights",
        "worker",
    ],
    "coded_sealed": ("array",),
    "coded_resumed": ("key", "round"),
}


@settings(max_examples=60)
@given(st.data())
def test_the_scheduler_lives_on_whatever_it_is_asked(client, C, data):
    name = data.draw(st.sampled_from(sorted(CALLS)))
    good = {
        "array": C.encoded.spec.id,
        "worker": C.encoded.workers[0],
        "measured": {C.encoded.workers[0]: 1.0},
        "lags": {},
        "policy": "continuous",
        "predictor": "last",
        "version": coded.__version__,
        "silent": [],
        "known": 4,
    }
    fields = {
        field: data.draw(st.just(good[field]) | ANY if field in good else ANY)
        for field in CALLS[name]
    }

    async def ask():
        with suppress(Exception):  # whoever asks gets it
            await getattr(client.scheduler, name)(**fields)

    with captured_logger("distributed"):
        client.sync(ask)
    np.testing.assert_allclose(client.compute(C @ x).result(timeout=60), A @ x)
