"""The operand's way: every host gets every chunk, whatever happens to the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.rounds.broadcast import (
    FANOUT,
    Broadcast,
    Confirm,
    PassOn,
    Relay,
    chunk_bytes,
    route,
)
from dask_coded.simulation import Outage, broadcast_times


def flat(below) -> list[int]:
    return [host for child, further in below for host in (child, *flat(further))]


@given(st.permutations(range(40)), st.integers(1, 40), st.integers(1, FANOUT))
def test_a_route_reaches_each_host_once(hosts, count, fanout):
    below = route(hosts[:count], fanout)
    assert sorted([hosts[0], *flat(below)]) == sorted(hosts[:count])
    assert len(below) <= fanout


@given(st.integers(1, 1 << 40), st.integers(1, 2000))
def test_chunks_are_neither_tiny_nor_huge(size, hosts):
    assert 1 << 17 <= chunk_bytes(size, hosts) <= 1 << 20
    assert chunk_bytes(size, hosts) % 64 == 0


@pytest.mark.parametrize("hosts", [1, 2, 8, 17, 40, 100])
def test_every_link_carries_about_one_operand(hosts):
    size = 20_000_000
    times, sent = broadcast_times(size, np.full(hosts + 1, 1e8))
    assert sent[-1] == size  # each chunk leaves the coordinator once
    assert sent.max() <= 1.3 * size
    assert times.max() <= 1.5 * size / 1e8 + 0.02


def test_a_thin_link_holds_up_only_its_own_host():
    rates = np.full(9, 1e8)
    rates[3] = 1e7
    times, sent = broadcast_times(20_000_000, rates)
    assert times[3] >= 2.0
    assert np.delete(times, 3).max() < 0.45  # 0.2 at best
    assert sent[3] < sent.max() / 2
    known = np.where(rates[:-1] < 1e8, 3.0, 0.3)
    times, _ = broadcast_times(20_000_000, rates, delays=known)
    assert np.delete(times, 3).max() < 0.3


@pytest.mark.parametrize("hosts", [2, 3, 9])
@pytest.mark.parametrize("stopped", [False, True])
def test_one_slow_or_stopped_host_does_not_hold_up_the_others(hosts, stopped):
    rates = np.full(hosts + 1, 1e9)
    rates[0] = 1e9 if stopped else 1e7
    outages = {0: Outage(0.005, until=100.0)} if stopped else {}
    times, _ = broadcast_times(100_000_000, rates, outages=outages)
    # 0.1 s at best; the rest is the patience with a chunk that has not been passed on.
    assert times[1:].max() < 2.5


def test_a_chunk_sent_to_one_host_does_not_come_to_another():
    broadcast = Broadcast([(1, range(3))], np.zeros(3))
    (first,) = broadcast.start(0.0)
    broadcast.passed(first.host, 0, 0.1)
    others = [host for host in range(3) if host != first.host]
    for host in others:
        (command,) = broadcast.lacking(host, [0], 1.0)
        assert command.host == host and command.below == ()
    assert not broadcast.lacking(others[0], [0], 1.01)  # it is under way


def outages() -> st.SearchStrategy[Outage]:
    time = st.floats(0.0, 0.5)
    dead = st.builds(lambda t, d: Outage(t, noticed=t + d), time, st.floats(0.001, 2.0))
    cut_off = st.builds(Outage, time)
    stopped = st.builds(lambda t, d: Outage(t, until=t + d), time, st.floats(0.001, 3.0))
    return st.one_of(dead, cut_off, stopped)


@given(
    st.integers(1, 45),
    st.integers(1, 20_000_000),
    st.dictionaries(st.integers(0, 44), outages(), max_size=20),
    st.integers(0, 1 << 32),
)
def test_every_host_that_goes_on_gets_the_operand(hosts, size, happens, seed):
    """Whichever hosts die, are cut off or stop for a while."""
    rng = np.random.default_rng(seed)
    rates = 1e8 * rng.uniform(0.05, 1.0, hosts + 1)
    happens = {host: outage for host, outage in happens.items() if host < hosts}
    times, _ = broadcast_times(size, rates, outages=happens, limit=10_000.0)
    gone = {host for host, outage in happens.items() if np.isinf(outage.until)}
    assert np.isfinite(np.delete(times, list(gone))).all()


def test_a_chunk_that_is_overdue_goes_to_another_relay_once():
    broadcast = Broadcast([(1, range(3))], np.zeros(3))
    (first,) = broadcast.start(0.0)
    assert broadcast.wake == 1.0
    (second,) = broadcast.react(1.0)
    assert first.chunk == second.chunk and first.host != second.host
    assert not broadcast.react(5.0)
    broadcast.passed(first.host, 0, 6.0)
    assert broadcast.finished and broadcast.wake is None


def test_chunks_of_many_parts_that_share_one_link_go_once():
    """The later ones arrive long after the first, because they wait for the link."""
    hosts, each = 8, 0.02
    parts = [(3, [host, (host + 1) % hosts]) for host in range(hosts)]
    broadcast = Broadcast(parts, np.zeros(hosts))
    sent = broadcast.start(0.0)
    now, arrived = 0.0, 0
    while arrived < len(sent):
        now += each
        if broadcast.wake is not None and broadcast.wake <= now:
            sent += broadcast.react(now)
        command = sent[arrived]
        sent += broadcast.passed(command.host, command.chunk, now)
        arrived += 1
    assert sorted(command.chunk for command in sent) == list(range(3 * hosts))
    assert broadcast.finished


def test_a_chunk_for_one_host_is_sent_once():
    broadcast = Broadcast([(1, [1])], np.zeros(2))
    (command,) = broadcast.start(0.0)
    assert command.host == 1
    assert not broadcast.react(broadcast.wake)


def test_a_host_lends_chunks_that_are_here_and_those_that_come():
    relay = Relay(now=0.0)
    relay.expect([0, 1], now=0.0)
    relay.received(0, "coordinator", (), 0.1)
    assert relay.lend("late", [0, 1]) == [PassOn("late", 0, ())]
    passed, confirmed = relay.received(1, "coordinator", (), 0.2)
    assert passed == PassOn("late", 1, ())
    assert confirmed == Confirm("coordinator", 1)


def test_what_a_lost_relay_held_goes_to_another():
    broadcast = Broadcast([(1, range(3))], np.zeros(3))
    (first,) = broadcast.start(0.0)
    (second,) = broadcast.lost([first.host], 0.1)
    assert second.chunk == first.chunk
    assert first.host not in [second.host, *flat(second.below)]
    assert not broadcast.lost([first.host], 0.2)
    assert not broadcast.lost(range(3), 0.3)  # all are gone: there is nothing to do


def test_a_relay_confirms_when_half_of_those_below_have():
    relay = Relay(now=0.0)
    relay.expect([0], now=0.0)
    below = tuple((host, ()) for host in "abcd")
    assert len(relay.received(0, "coordinator", below, 0.1)) == 4
    assert not relay.confirmed("a", 0)
    assert len(relay.lost("b")) == 1
    assert not relay.confirmed("c", 0)
    assert relay.wake is None and not relay.react(9.0)


def test_a_relay_above_one_host_confirms_at_once():
    relay = Relay(now=0.0)
    relay.expect([0], now=0.0)
    passed, confirmed = relay.received(0, "coordinator", (("b", ()),), 0.1)
    assert passed.host == "b" and confirmed.sender == "coordinator"
