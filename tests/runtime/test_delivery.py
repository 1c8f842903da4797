"""Which worker of each host is sent the operand, while receivers die, stop and refuse."""

from __future__ import annotations

import asyncio
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.utils_test import gen_test

from dask_coded.rounds.footprint import Footprints
from dask_coded.runtime.coordinator.delivery import Delivery, Offer
from dask_coded.runtime.operand import (
    ChunkConfirmed,
    ChunksLacking,
    OperandAt,
    OperandChunk,
    Ticket,
)
from dask_coded.transport.messages import Message

PLACE = (1, 2, bytes(16), 4096, "<f8", (100_000,))


class Peer:
    """A channel to a worker that other workers of its host share memory with."""

    def __init__(self, host: int, number: int) -> None:
        self.address = f"tcp://10.0.0.{host}:{number}"
        self.near = self.may_share = self.closed = self.silent = False
        self.shared: bool | None = None
        self.unreadable = 0
        self.messages: list[Message] = []

    def post(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def chunks(self) -> list[int]:
        return [m.number for m in self.messages if isinstance(m, OperandChunk)]

    @property
    def places(self) -> list[Any]:
        return [m.place for m in self.messages if isinstance(m, OperandAt)]


def delivery(peers: list[Peer], x: Any = None, place: Any = None, **options: Any) -> Delivery:
    by_address = {peer.address: peer for peer in peers}
    exchange: Any = SimpleNamespace(has_memory=True, channel=by_address.get)
    plan = SimpleNamespace(
        addresses=[*by_address],
        lags=np.arange(float(len(peers))),  # the first one of each host reports first
        speed=np.ones(len(peers)),
    )
    layout = SimpleNamespace(pieces_of=[[worker] for worker in range(len(peers))])
    spec = SimpleNamespace(**({"footprints": None} | options))
    run_spec: Any = SimpleNamespace(run_id="run", plan=plan, spec=spec, layout=layout)
    x = np.arange(100_000.0) if x is None else x
    return Delivery(exchange, run_spec, Offer(x, place))


def begun(peers: list[Peer], workers: Any, **options: Any) -> tuple[Delivery, list[Ticket]]:
    found = delivery(peers, **options)
    found.plan(workers)
    tickets = [found.ticket(worker) for worker in workers]
    found.begin()
    return found, tickets


async def one_turn() -> None:
    """Let the event loop do what it is to do soon."""
    loop = asyncio.get_running_loop()
    turn = loop.create_future()
    loop.call_soon(turn.set_result, None)
    await turn


def confirm(found: Delivery, peers: list[Peer], worker: int) -> None:
    """Let a worker confirm all chunks that it is sent, until none comes."""
    done = 0
    while len(chunks := peers[worker].chunks) > done:
        found.heard(worker, ChunkConfirmed("run", chunks[done]))
        done += 1


@gen_test()
async def test_one_worker_of_a_host_gets_the_operand_and_the_others_its_place():
    peers = [Peer(1, i) for i in range(3)] + [Peer(2, 3)]
    found, tickets = begun(peers, range(4))
    assert all(ticket.operand is None and ticket.parts for ticket in tickets)
    confirm(found, peers, 0)
    confirm(found, peers, 3)
    assert peers[0].chunks and peers[3].chunks
    assert not peers[1].messages and not peers[2].messages
    found.heard(0, OperandAt("run", PLACE))
    assert peers[1].places == peers[2].places == [PLACE]
    assert not peers[0].places and not peers[3].places
    found.end()


@gen_test()
async def test_a_late_worker_is_told_where_the_operand_lies_or_waits_for_it():
    peers = [Peer(1, i) for i in range(3)] + [Peer(2, 3)]
    found, tickets = begun(peers, [0, 3])
    assert found.ticket(1) == tickets[0]
    found.heard(0, OperandAt("run", PLACE))
    assert peers[1].places == [PLACE]
    assert found.ticket(2) == Ticket(PLACE)
    await one_turn()
    assert not peers[1].chunks and not peers[2].messages
    # It cannot read there, and its first message said nothing of parts: the whole operand comes.
    found.heard(2, ChunksLacking("run", (), True))
    confirm(found, peers, 2)
    assert set(peers[2].chunks) == set(range(tickets[0].parts[0][0].chunks))
    found.end()


@gen_test()
async def test_a_late_worker_of_another_host_joins_after_its_first_message():
    peers = [Peer(1, 0), Peer(1, 1), Peer(2, 2)]
    found, _ = begun(peers, [0, 1])
    assert found.ticket(2).parts
    assert not peers[2].messages
    await one_turn()
    confirm(found, peers, 0)
    confirm(found, peers, 2)
    assert len(set(peers[2].chunks)) > 1
    found.end()


@pytest.mark.parametrize("how", ["closed", "silent"])
@gen_test()
async def test_one_neighbour_joins_if_the_receiver_is_lost_or_silent(how):
    peers = [Peer(1, i) for i in range(4)]
    found, _ = begun(peers, range(4))
    setattr(peers[0], how, True)
    if how == "closed":
        peers[1].silent = True  # it gets its turn if nothing better is left
        found.lost(0)
        assert not peers[1].messages
        joined = 2
    else:
        joined = 3  # the first one that waits for long
        found.heard(3, ChunksLacking("run", (0, 1)))
        found.heard(1, ChunksLacking("run", (0, 1)))  # another one is at it
    confirm(found, peers, joined)
    assert sorted(peers[joined].chunks)[:2] == [0, 1]
    assert [bool(p.chunks) for p in peers[1:]] == [i == joined for i in (1, 2, 3)]
    found.heard(joined, OperandAt("run", PLACE))
    others = {1, 2, 3} - {joined}
    assert all(peers[other].places == [PLACE] for other in others)
    found.end()


@gen_test()
async def test_neighbours_of_a_receiver_without_memory_to_share_join():
    peers = [Peer(1, i) for i in range(3)]
    found, _ = begun(peers, [0, 1])
    found.heard(0, OperandAt("run", None))
    assert peers[1].chunks
    found.ticket(2)
    await one_turn()
    assert peers[2].chunks  # nothing is to be waited for
    found.end()


@gen_test()
async def test_a_worker_that_cannot_read_the_coordinators_memory_joins():
    peers = [Peer(1, 0), Peer(1, 1)]
    for peer in peers:
        peer.may_share = True
    found, tickets = begun(peers, range(2), place=PLACE)
    assert tickets == [Ticket(PLACE), Ticket(PLACE)]
    found.heard(1, ChunksLacking("run", (), True))
    confirm(found, peers, 1)
    assert peers[1].shared is False and peers[1].unreadable == 1
    assert peers[1].messages[0].part[4] == (100_000,)
    assert not peers[0].messages
    found.end()


@gen_test()
async def test_a_neighbour_that_needs_other_entries_joins_on_its_own():
    columns = [np.arange(0, 50_000), np.arange(50_000, 100_000)]
    packed = []
    for some in columns:
        bits = np.zeros(100_000, dtype=bool)
        bits[some] = True
        packed.append(zlib.compress(np.packbits(bits).tobytes()))
    peers = [Peer(1, 0), Peer(1, 1), Peer(1, 2)]
    options = {"footprints": Footprints(packed), "blocks_of": lambda pieces: {pieces[0] // 2}}
    found, _ = begun(peers, [0], **options, x=np.arange(200_000.0).reshape(100_000, 2))
    found.heard(0, OperandAt("run", PLACE))
    assert found.ticket(1) == Ticket(PLACE)
    part, its = found.ticket(2).parts[0]
    assert part.shape == (50_000, 2) and its == packed[1]
    await one_turn()
    confirm(found, peers, 2)
    chunks = [m for m in peers[2].messages if isinstance(m, OperandChunk)]
    rows = np.concatenate([m.data for m in sorted(chunks, key=lambda m: m.number)])
    np.testing.assert_array_equal(rows.view(float), np.arange(100_000.0, 200_000.0))
    found.end()


@gen_test()
async def test_a_small_operand_rides_in_the_first_message():
    peers = [Peer(1, 0), Peer(2, 1)]
    found = delivery(peers, x=np.arange(5.0))
    found.plan([0])
    for worker in range(2):
        np.testing.assert_array_equal(found.ticket(worker).operand, np.arange(5.0))
    found.begin()
    found.lost(0)
    found.end()
    assert not peers[0].messages and not peers[1].messages


@gen_test()
async def test_the_first_worker_of_another_host_that_is_called_in_late_gets_chunks_at_once():
    peers = [Peer(1, 0), Peer(2, 1)]
    peers[0].near = True
    found, _ = begun(peers, [0], x=np.arange(200_000.0))
    assert found.ticket(1).parts
    await one_turn()
    confirm(found, peers, 1)
    assert sum(len(m.data) for m in peers[1].messages) == 8 * 200_000
    found.end()


@gen_test()
async def test_a_silent_worker_does_not_receive_for_its_neighbours():
    peers = [Peer(1, i) for i in range(2)]
    peers[0].silent = True
    found, _ = begun(peers, range(2))
    assert peers[1].chunks and not peers[0].messages
    found.end()
