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
    ReportLacking,
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


def test_a_host_that_joins_late_costs_the_coordinator_one_operand_at_most():
    size, rates = 20_000_000, np.full(9, 1e8)
    for time in (0.0, 0.1, 1.0):
        times, sent = broadcast_times(size, rates, joining={3: time})
        assert times[3] < time + 0.45  # 0.2 at best
        assert np.delete(times, 3).max() < 0.45
        assert sent[-1] <= 2 * size


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
    st.dictionaries(st.integers(0, 44), st.floats(0.0, 1.0), max_size=20),
    st.integers(0, 1 << 32),
)
def test_every_host_that_goes_on_gets_the_operand(hosts, size, happens, joining, seed):
    """Whichever hosts join late, die, are cut off or stop for a while."""
    rng = np.random.default_rng(seed)
    rates = 1e8 * rng.uniform(0.05, 1.0, hosts + 1)
    happens = {host: outage for host, outage in happens.items() if host < hosts}
    joining = {host: time for host, time in joining.items() if host < hosts}
    times, _ = broadcast_times(size, rates, outages=happens, limit=10_000.0, joining=joining)
    gone = {host for host, outage in happens.items() if np.isinf(outage.until)}
    assert np.isfinite(np.delete(times, list(gone))).all()


class Hosts:
    """Hosts that pass chunks on, while messages arrive in any order and some of them never."""

    def __init__(self, parts, count) -> None:
        self.chunks, first = [], 0
        for chunks, _ in parts:
            self.chunks.append(range(first, first + chunks))
            first += chunks
        self.now = 0.0
        self.broadcast = Broadcast(parts, np.zeros(count))
        self.relays = [Relay(0.0) for _ in range(count)]
        self.needs: list[set[int]] = [set() for _ in range(count)]
        self.here: list[set[int]] = [set() for _ in range(count)]
        self.dead: set[int] = set()
        self.noticed: set[int] = set()
        self.under_way: list[tuple] = []  # (method, receiver, sender, arguments)
        for part, (_, members) in enumerate(parts):
            for host in members:
                self.expect(host, part)
        self.send_out(self.broadcast.start(0.0))

    def expect(self, host, part) -> None:
        self.needs[host].update(self.chunks[part])
        self.relays[host].expect(self.chunks[part], self.now)

    def send_out(self, commands) -> None:
        for host, chunk, below in ((c.host, c.chunk, c.below) for c in commands):
            self.under_way.append((self.chunk, host, None, (chunk, below)))

    def obey(self, host, commands) -> None:
        for command in commands:
            match command:
                case PassOn(below, chunk, further):
                    self.under_way.append((self.chunk, below, host, (chunk, further)))
                case Confirm(sender, chunk):
                    self.under_way.append((self.confirmed, sender, host, (chunk,)))
                case ReportLacking(chunks):
                    self.under_way.append((self.lacking, None, host, (chunks,)))

    def chunk(self, host, sender, chunk, below) -> None:
        self.here[host].add(chunk)
        self.obey(host, self.relays[host].received(chunk, sender, below, self.now))

    def confirmed(self, to, host, chunk) -> None:
        if to is None:
            self.send_out(self.broadcast.passed(host, chunk, self.now))
        else:
            self.obey(to, self.relays[to].confirmed(host, chunk))

    def lacking(self, _, host, chunks) -> None:
        self.send_out(self.broadcast.lacking(host, chunks, self.now))

    def deliver(self, number) -> None:
        method, to, sender, arguments = self.under_way.pop(number % len(self.under_way))
        if to not in self.dead and sender not in self.dead:
            method(to, sender, *arguments)

    def notice(self, host) -> None:
        self.noticed.add(host)
        self.send_out(self.broadcast.lost([host], self.now))
        for other, relay in enumerate(self.relays):
            if other not in self.dead:
                self.obey(other, relay.lost(host))

    def act(self, kind, number) -> None:
        host, part = number % len(self.relays), number % len(self.chunks)
        if kind == "dies":
            self.dead.add(host)
        elif kind == "noticed" and host in self.dead:
            self.notice(host)
        elif kind == "joins" and host not in self.dead:
            self.expect(host, part)
            self.send_out(self.broadcast.join(host, part, self.now))
        elif kind == "arrives" and self.under_way:
            self.deliver(number)
        elif kind == "vanishes" and self.under_way:
            self.under_way.pop(number % len(self.under_way))
        elif kind == "passes":
            self.wait()

    def wait(self) -> None:
        """Let time pass until the next timer."""
        live = [h for h in range(len(self.relays)) if h not in self.dead]
        wakes = [self.broadcast.wake, *(self.relays[host].wake for host in live)]
        self.now = max(self.now, min((w for w in wakes if w is not None), default=self.now))
        if self.broadcast.wake is not None and self.broadcast.wake <= self.now:
            self.send_out(self.broadcast.react(self.now))
        for host in live:
            self.obey(host, self.relays[host].react(self.now))

    @property
    def lacks(self) -> bool:
        live = (host for host in range(len(self.relays)) if host not in self.dead)
        return any(not self.needs[host] <= self.here[host] for host in live)


KINDS = ["dies", "noticed", "joins", "arrives", "arrives", "arrives", "vanishes", "passes"]


@given(
    st.integers(1, 20).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.lists(
                st.tuples(st.integers(0, 12), st.sets(st.integers(0, count - 1))),
                min_size=1,
                max_size=4,
            ),
        )
    ),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10_000)), max_size=80),
)
def test_every_live_host_gets_what_it_needs_whatever_joins_dies_and_vanishes(network, events):
    count, parts = network
    hosts = Hosts([(chunks, sorted(members)) for chunks, members in parts], count)
    for kind, number in events:
        hosts.act(kind, number)
    turns = 0
    while hosts.lacks:
        while hosts.under_way:
            hosts.deliver(0)
        hosts.wait()
        turns += 1
        assert turns < 1000, "some host never gets what it lacks"
    for host in sorted(hosts.dead - hosts.noticed):
        hosts.notice(host)
    while hosts.under_way or hosts.broadcast.wake is not None:
        while hosts.under_way:
            hosts.deliver(0)
        hosts.wait()
        turns += 1
        assert turns < 2000, "the broadcast never ends"
    assert hosts.broadcast.finished


def test_hosts_that_join_before_a_chunk_has_left_share_it():
    broadcast = Broadcast([(1, [0]), (1, [])], np.zeros(3))
    assert [c.chunk for c in broadcast.start(0.0)] == [0]
    (first,) = broadcast.join(1, part=1, now=0.1)
    assert (first.host, first.chunk) == (1, 1)
    # The chunk has left: the next one gets it alone.
    (second,) = broadcast.join(2, part=1, now=0.1)
    assert (second.host, second.chunk, second.below) == (2, 1, ())
    assert not broadcast.join(2, part=1, now=0.2)
    for command in (first, second):
        broadcast.passed(command.host, command.chunk, 0.3)
    broadcast.passed(0, 0, 0.3)
    assert broadcast.finished


def test_hosts_that_join_later_share_what_has_left():
    broadcast = Broadcast([(20, [0])], np.zeros(4))
    chunks = broadcast.start(0.0)
    while chunks:
        chunks = broadcast.passed(0, chunks[0].chunk, 0.0) + chunks[1:]
    sent = [command for host in (1, 2, 3) for command in broadcast.join(host, 0, 1.0)]
    got = {host: set() for host in (1, 2, 3)}
    times = 0
    while sent:
        command, times = sent.pop(0), times + 1
        for host in (command.host, *flat(command.below)):
            got[host].add(command.chunk)
        sent += broadcast.passed(command.host, command.chunk, 1.0)
    assert all(chunks == set(range(20)) for chunks in got.values())
    assert times < 40  # twice: each of the first ones left again before the others joined


def test_what_hosts_that_joined_together_have_not_passed_on_comes_again():
    broadcast = Broadcast([(20, [0])], np.zeros(4))
    chunks = broadcast.start(0.0)
    while chunks:
        chunks = broadcast.passed(0, chunks[0].chunk, 0.0) + chunks[1:]
    sent = [command for host in (1, 2, 3) for command in broadcast.join(host, 0, 1.0)]
    (shared,) = broadcast.passed(2, next(c.chunk for c in sent if c.host == 2), 1.0)
    assert shared.host == 2 and sorted(flat(shared.below)) == [1, 3]
    sent = [command for command in sent if command.host == 1]
    sent += broadcast.lost([3], 1.1) + broadcast.lost([2], 1.2)
    arrived = set()
    while sent:
        assert sent[0].host == 1
        arrived.add(sent[0].chunk)
        sent = sent[1:] + broadcast.passed(1, sent[0].chunk, 2.0)
    assert arrived == set(range(20))


def test_chunks_for_one_host_follow_one_another():
    """Those that it does not need any more can be taken back, and they do not fill its link."""
    broadcast = Broadcast([(20, [0])], np.zeros(2))
    chunks = broadcast.start(0.0)
    while chunks:  # all of them leave for the first host
        chunks = broadcast.passed(0, chunks[0].chunk, 0.0) + chunks[1:]
    sent = broadcast.join(1, part=0, now=1.0)
    assert 1 < len(sent) < 20
    arrived = []
    while sent:
        arrived.append(sent[0].chunk)
        sent = sent[1:] + broadcast.passed(1, sent[0].chunk, 1.0)
    assert arrived == list(range(20))


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


def test_a_late_host_is_sent_no_more_and_holds_up_none_that_joins():
    broadcast = Broadcast([(12, [0])], np.zeros(3))
    chunks = broadcast.start(0.0)
    while chunks:
        chunks = broadcast.passed(0, chunks[0].chunk, 0.0) + chunks[1:]
    assert broadcast.join(1, 0, 1.0)  # it confirms nothing
    assert not broadcast.react(11.0)
    sent, arrived = broadcast.join(2, 0, 12.0), set()
    while sent:
        assert sent[0].host == 2
        arrived.add(sent[0].chunk)
        sent = sent[1:] + broadcast.passed(2, sent[0].chunk, 12.0)
    assert arrived == set(range(12))
