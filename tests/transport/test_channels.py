"""Channels between workers: failures, other protocol versions, and dropped messages."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from distributed.comm import CommClosedError, connect, listen
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster, gen_test

from dask_coded.runtime.messages import ChangeRound, StartRound
from dask_coded.transport import Exchange, channels
from dask_coded.transport import exchange as exchange_module
from dask_coded.transport.messages import PROTOCOL, Closed, EndRun, Ping, Pong


@gen_test()
async def test_an_answer_that_cannot_be_packed_closes_the_channel(monkeypatch):
    def no_room(messages):
        raise MemoryError

    monkeypatch.setattr(channels, "pack", no_room)
    closed = []

    async def serving(comm):
        await channels.serve(comm, lambda message, answer: answer(Pong("run")), closed.append)

    async with listen("tcp://127.0.0.1:0", serving) as listener:
        comm = await connect(listener.contact_address)
        await comm.write([b"\x91\x92\xa9StopRound\xa3run"])
        with pytest.raises(CommClosedError):
            await comm.read()
    assert len(closed) == 1


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_is_lost_is_gone_until_a_channel_to_its_address_opens(s, a, b):
    """Another worker may get its address, and no message may ever go there."""
    exchange, lost = Exchange.of(a), []
    channel = exchange.channel(b.address)
    channel.listen("run", lost.append)
    channel.send(EndRun("run", answer=True))
    await b.close()
    await async_poll_for(lambda: lost, timeout=60)
    assert not exchange.is_usable(b.address)
    assert exchange.silent == []
    exchange.channel(b.address)
    assert exchange.is_usable(b.address)


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2, config={"coded.coordinator.timeout": "20ms"})
async def test_a_worker_that_owes_an_answer_is_silent_until_it_answers(s, a, b):
    exchange, other = Exchange.of(a), Exchange.of(b)
    held = []
    other.register(lambda *found: held.append(found), [EndRun])
    channel = exchange.channel(b.address)
    channel.listen("run", lambda message: None)
    channel.send(EndRun("run", answer=True))
    await async_poll_for(lambda: exchange.silent and held, timeout=60)
    assert channel.silent and not exchange.is_usable(b.address)
    await async_poll_for(lambda: exchange._next_look is None, timeout=60)  # nothing more is due
    message, answer = held[0]
    answer(Pong(message.run_id))
    await async_poll_for(lambda: not exchange.silent, timeout=60)
    assert exchange.is_usable(b.address) and not exchange.membership.owes(b.address)


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_only_the_answer_to_a_call_says_how_long_the_peer_needs(s, a, b, monkeypatch):
    channel = Exchange.of(a).channel(b.address)
    membership = Exchange.of(a).membership
    clock = 0.0
    monkeypatch.setattr(channels, "monotonic", lambda: clock)
    monkeypatch.setattr(channel, "post", lambda message: None)
    channel.listen("run", lambda message: None)
    channel.receive(Pong("run"))

    def answer(run_id):
        nonlocal clock
        clock += 0.3
        channel.receive(Pong(run_id))
        return membership.answer_time(b.address)

    channel.send(EndRun("other", answer=True))
    assert answer("other") == 0  # it may compute first
    channel.send(Ping("run"))
    assert answer("other") == 0
    assert answer("run") > 0.3
    channel.send(Ping("run"))
    channel.end("run")
    assert answer("run") < 0.3  # it does not answer calls of a run that it has dropped


def start_round(run_id: str) -> StartRound:
    return StartRound(
        run_id,
        kernel="matvec",
        ticket=(None, ()),
        shared=False,
        stripes=1,
        pieces=(),
        ranges=(),
        least_batch=1,
        interval=1.0,
        growth=1.0,
        lead=0.0,
        series="",
        attempt=None,
    )


@asynccontextmanager
async def saying_nothing():
    """Listen, and say nothing; yield the address, when one connects, and what each has sent."""
    connected, asked = asyncio.Event(), []

    async def serving(reader, writer):
        connected.set()
        asked.append(await reader.read())  # until the other end hangs up
        writer.close()

    async with await asyncio.start_server(serving, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        yield f"tcp://127.0.0.1:{port}", connected, asked


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_what_listens_at_the_address_of_a_lost_worker_says_nothing(s, a):
    exchange = Exchange.of(a)
    exchange.membership.timeouts = replace(exchange.membership.timeouts, handshake=3.0)
    lost = []
    async with saying_nothing() as (address, _, asked):
        channel = Exchange.of(a).channel(address)
        channel.listen("run", lost.append)
        channel.send(EndRun("run", answer=True))
        await async_poll_for(lambda: lost and asked, timeout=60)
    assert asked[0] and channel.closed and lost == [Closed("run")]


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_channel_that_is_broken_before_it_begins_is_closed(s, a, b):
    lost, exchange = [], Exchange.of(a)
    channel = exchange.channel(b.address)
    channel.listen("run", lost.append)
    channel.abort()
    await async_poll_for(lambda: lost, timeout=60)
    assert channel.closed and lost == [Closed("run")]
    assert exchange.channel(b.address) is not channel


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_channel_that_is_still_connecting_can_be_broken(s, a):
    """What waited for it is dropped, so listeners must hear of that."""
    lost = []
    async with saying_nothing() as (address, connected, _):
        channel = Exchange.of(a).channel(address)
        channel.listen("run", lost.append)
        channel.send(EndRun("run", answer=True))
        await connected.wait()
        channel.abort()
        await async_poll_for(lambda: lost, timeout=60)
    assert channel.closed and lost == [Closed("run")]


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_rounds_that_a_stopped_peer_never_hears_of_leave_nothing(s, a):
    """Their operands must not pile up, whatever the policy sends to it."""
    async with saying_nothing() as (address, connected, _):
        channel = Exchange.of(a).channel(address)
        await connected.wait()
        before = list(channel._outbox._waiting)
        for number in range(3):
            run = f"run-{number}"
            channel.listen(run, lambda message: None)
            channel.send(start_round(run))
            channel.send(ChangeRound(run, (), ()))
            channel.end(run)
        # Its answer will show that the peer runs. Until then it owes it, and counts as silent.
        assert channel._outbox._waiting == [*before, EndRun("run-0", answer=True)]
        assert Exchange.of(a).membership.owes(address)
        channel.abort()


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_another_version_of_the_protocol_is_refused(s, a, b, monkeypatch):
    received = []
    here, there = Exchange.of(a), Exchange.of(b)
    there.register(lambda message, answer: received.append(message), [EndRun])
    monkeypatch.setattr(channels, "PROTOCOL", PROTOCOL)
    serve = b.handlers["coded_channel"]

    async def newer(comm, protocol):
        return await serve(comm, protocol=protocol + 1)

    b.handlers["coded_channel"] = newer
    with captured_logger("distributed.dask_coded") as log:
        channel = here.channel(b.address)
        channel.listen("run", received.append)
        channel.send(EndRun("run", answer=True))
        await async_poll_for(lambda: received, timeout=60)
    assert received == [Closed("run")]
    assert channel.closed
    assert "install the same dask-coded on both" in log.getvalue()


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_the_end_of_a_round_is_sent_only_to_peers_that_took_part(s, a, b):
    received = []
    Exchange.of(b).register(lambda message, answer: received.append(message), [ChangeRound, EndRun])
    channel = Exchange.of(a).channel(b.address)
    for i in range(100):
        channel.listen(f"idle-{i}", received.append)
        channel.end(f"idle-{i}")
    channel.listen("run", received.append)
    channel.send(ChangeRound("run", (), ()))
    Exchange.of(a).membership.heard(b.address, channels.monotonic())
    channel.end("run")
    channel.listen("next", received.append)
    channel.send(ChangeRound("next", (), ()))
    await async_poll_for(lambda: len(received) == 3, timeout=60)
    assert received == [ChangeRound("run", (), ()), EndRun("run"), ChangeRound("next", (), ())]


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_message_of_no_registered_kind_is_dropped(s, a):
    exchange = Exchange.of(a)
    assert Exchange.of(a) is exchange
    exchange.channel(a.address).send(EndRun("run", answer=True))
    await exchange.close()


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_worker_forgets_most_of_the_peers_that_are_gone(s, a, monkeypatch):
    monkeypatch.setattr(exchange_module, "_GONE", 3)
    exchange = Exchange.of(a)
    for port in range(1, 9):
        await exchange.channel(f"tcp://127.0.0.1:{port}").close()
    assert len(exchange._channels) == 4
    assert not exchange.is_usable("tcp://127.0.0.1:8")


class Unread(dict):
    """Finds single channels, but not all of them."""

    def items(self):
        pytest.fail("all channels are looked at")

    __iter__ = keys = items


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_channel_is_opened_without_a_look_at_all_others(s, a, monkeypatch):
    monkeypatch.setattr(exchange_module, "_GONE", 3)
    exchange = Exchange.of(a)
    exchange._channels = Unread()
    for port in range(1, 9):
        await exchange.channel(f"tcp://127.0.0.1:{port}").close()
    assert len(exchange._channels) == 4
