"""Squeezed steps give all workers the sum of all units, whoever computes them, fails, and when."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.aggregation import (
    ROOT,
    Command,
    ComputeUnit,
    FinishedUnits,
    Send,
    Squeeze,
    SqueezeMachine,
    SqueezePlan,
    Tag,
    UnitSum,
)
from dask_coded.aggregation.formation import form
from dask_coded.aggregation.steps import KEPT, SqueezedSteps
from dask_coded.prediction import SpeedHistory
from dask_coded.squeeze.grants import Close, Deal, Done, Fetch, Summed, pack, unpack

LENGTH, BLOCKS, END = 7, 3, 3


def overflows(step: int, unit: int) -> bool:
    return step == 0 or (step == 2 and unit == 1)


def gradient(step: int, work: ComputeUnit) -> UnitSum:
    rng = np.random.default_rng([step, work.unit])
    integers = rng.integers(-1000, 1000, LENGTH).astype(np.int32)
    peaks = rng.integers(-5, 5, BLOCKS).astype(np.int16)
    if work.turn == 0 and overflows(step, work.unit):
        return UnitSum(None, peaks, {work.unit: 0.1 * work.unit})
    assert (work.grid is not None) == (work.turn == 1)
    return UnitSum(integers, peaks, {work.unit: 0.1 * work.unit})


@dataclass
class Node:
    """A worker: what its trainer does."""

    machines: dict[int, SqueezeMachine] = field(default_factory=dict)
    works: deque[tuple[int, ComputeUnit]] = field(default_factory=deque)
    totals: list[UnitSum] = field(default_factory=list)
    alive: bool = True
    stopped: bool = False


class Group:
    """Workers and their leader; all that happens is chosen from outside."""

    def __init__(self, plan: SqueezePlan) -> None:
        self.plan = plan
        self.now = 0.0
        self.nodes = [Node() for _ in range(plan.workers)]
        self.channels: dict[tuple[int, int], deque[tuple[int, Tag, object]]] = {}
        names = [str(node) for node in range(plan.workers)]
        self.steps = SqueezedSteps(plan, names, SpeedHistory(), 0, END)
        self.units: list[dict[int, int]] = []
        self.orders(self.steps.start(0.0))
        for node in range(plan.workers):
            self.obey(node, 0, self.machine(node, 0).begin())

    def machine(self, node: int, step: int) -> SqueezeMachine:
        return self.nodes[node].machines.setdefault(step, self.plan.machine(node))

    def send(self, sender: int, step: int, send: Send) -> None:
        self.channels.setdefault((sender, send.to), deque()).append((step, send.tag, send.payload))

    def orders(self, orders: list[tuple[int, Send]]) -> None:
        for step, order in orders:
            self.send(ROOT, step, order)

    def obey(self, node: int, step: int, commands) -> None:
        own = self.nodes[node]
        for command in commands:
            if isinstance(command, Send):
                self.send(node, step, command)
            elif isinstance(command, ComputeUnit):
                own.works.append((step, command))
            else:
                assert isinstance(command, FinishedUnits) and step == len(own.totals)
                own.totals.append(command.total)
                if step + 1 < END:
                    self.obey(node, step + 1, self.machine(node, step + 1).begin())

    def deliver(self, sender: int, receiver: int) -> None:
        step, tag, payload = self.channels[sender, receiver].popleft()
        if receiver == ROOT:
            self.orders(self.steps.received(step, tag, payload, self.now))
        elif self.nodes[receiver].alive:
            commands: list[Command] = self.machine(receiver, step).received(sender, tag, payload)
            self.obey(receiver, step, commands)

    def compute(self, node: int) -> None:
        step, work = self.nodes[node].works.popleft()
        machine = self.machine(node, step)
        self.obey(node, step, machine.computed_unit(work, gradient(step, work), 1.0))

    def kill(self, node: int) -> None:
        self.nodes[node].alive = False
        self.orders(self.steps.lost([node], self.now))

    def possible(self) -> list[tuple]:
        nodes = [n for n, own in enumerate(self.nodes) if own.alive and not own.stopped]
        found: list[tuple] = [(self.compute, n) for n in nodes if self.nodes[n].works]
        for (sender, receiver), waiting in self.channels.items():
            if waiting and (receiver == ROOT or receiver in nodes):
                found.append((self.deliver, sender, receiver))
        return found

    def finish(self, rng: random.Random) -> None:
        """Let everything happen, in any order, until all workers that are left have all sums."""
        for _ in range(100_000):
            there = [own for own in self.nodes if own.alive and not own.stopped]
            if all(len(own.totals) == END for own in there):
                return
            if possible := self.possible():
                happens, *arguments = rng.choice(possible)
                happens(*arguments)
                self.now += 0.1
                self.orders(self.steps.react(self.now))
            else:
                assert self.steps.wake is not None, "nothing happens any more"
                self.now = max(self.now, self.steps.wake) + 1e-6
                self.orders(self.steps.react(self.now))
        raise AssertionError("the steps do not end")

    def check(self) -> None:
        for own in self.nodes:
            for step, total in enumerate(own.totals):
                work = [ComputeUnit(u, 1, total.peaks) for u in range(self.plan.parts)]
                units = [gradient(step, each) for each in work]
                np.testing.assert_array_equal(
                    total.integers, np.sum([unit.integers for unit in units], axis=0)
                )
                np.testing.assert_array_equal(
                    total.peaks, np.max([unit.peaks for unit in units], axis=0)
                )
                assert set(total.losses) == set(range(self.plan.parts))
                second = any(overflows(step, unit) for unit in range(self.plan.parts))
                assert (total.grid is not None) == second


@settings(max_examples=25)
@given(
    workers=st.integers(1, 5),
    copies=st.integers(1, 3),
    units=st.integers(5, 12),
    seed=st.integers(0, 2**32),
)
def test_all_workers_get_the_sum_of_all_units(workers, copies, units, seed):
    group = Group(Squeeze(copies, units).plan(workers))
    group.finish(random.Random(seed))
    group.check()
    for step in range(END):
        assert sum(group.steps.take(step).units.values()) == units


@settings(max_examples=50)
@given(
    workers=st.integers(3, 5),
    units=st.integers(5, 12),
    seed=st.integers(0, 2**32),
    before=st.integers(0, 120),
    stopped=st.booleans(),
)
def test_a_worker_dies_or_stops_at_any_moment(workers, units, seed, before, stopped):
    rng = random.Random(seed)
    group = Group(Squeeze(2, units).plan(workers))
    for _ in range(before):
        if possible := group.possible():
            happens, *arguments = rng.choice(possible)
            happens(*arguments)
            group.now += 0.1
    victim = rng.randrange(workers)
    if stopped:
        # Its leader says so in the end; until then only late answers show it.
        group.nodes[victim].stopped = True
        for _ in range(20):
            if possible := group.possible():
                happens, *arguments = rng.choice(possible)
                happens(*arguments)
            group.now = max(group.now + 0.1, group.steps.wake or 0.0)
            group.orders(group.steps.react(group.now))
    group.kill(victim)
    group.finish(rng)
    group.check()


@settings(max_examples=50)
@given(
    workers=st.integers(3, 5),
    units=st.integers(5, 12),
    seed=st.integers(0, 2**32),
    before=st.integers(0, 120),
)
def test_a_worker_that_is_stuck_for_ever_holds_up_no_other_though_it_is_not_lost(
    workers, units, seed, before
):
    rng = random.Random(seed)
    group = Group(Squeeze(2, units).plan(workers))
    for _ in range(before):
        if possible := group.possible():
            happens, *arguments = rng.choice(possible)
            happens(*arguments)
            group.now += 0.1
    group.nodes[rng.randrange(workers)].stopped = True
    group.finish(rng)
    group.check()


def test_a_slow_worker_gives_units_away():
    group = Group(Squeeze(2, 12).plan(3))
    slow = group.nodes[1]
    slow.stopped = True
    rng = random.Random(0)
    while len(group.nodes[0].totals) < END:
        if possible := group.possible():
            happens, *arguments = rng.choice(possible)
            happens(*arguments)
        else:
            group.now = max(group.now, group.steps.wake or 0.0) + 1e-6
        group.orders(group.steps.react(group.now))
    slow.stopped = False
    group.finish(rng)
    group.check()
    assert not slow.works
    seen = [group.steps.take(step) for step in range(END)]
    assert all(set(step.units) == {0, 2} for step in seen)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.1] * 10, 1.0),
        ([np.inf, 1.0, -np.inf], np.nan),
        ([np.nan, np.inf], np.nan),
        ([-np.inf, 1e308], -np.inf),
        ([1e308, 1e308, -1e308, -1e308, 5.0], 5.0),
        ([1.5e308, 1.5e308, -1.5e308], 1.5e308),
        ([1e308, 1e308], np.inf),
        ([1e308, 1e308, -np.inf], -np.inf),
    ],
)
def test_losses_of_any_size_add_up_in_any_order(losses, expected):
    for order in (losses, losses[::-1]):
        total = UnitSum(None, np.zeros(1, np.int16), dict(enumerate(order))).loss
        np.testing.assert_allclose(total, expected, rtol=1e-15)


def test_more_workers_than_units_are_left_out():
    plan, addresses = form(Squeeze(units=2), ["a", "b", "c"])
    assert (plan.workers, addresses) == (2, ("a", "b"))
    with pytest.raises(ValueError, match="pass more units"):
        Squeeze(units=2).plan(3)


def leader_of(workers, copies, steps=3):
    """Return the steps of a leader that has dealt the first one, and its messages."""
    plan = Squeeze(copies=copies, units=4).plan(workers)
    names = [f"w{i}" for i in range(workers)]
    leader = SqueezedSteps(plan, names, SpeedHistory(), 0, steps)
    return leader, [(send.to, unpack(send.payload)) for _, send in leader.start(0.0)]


def test_a_step_is_dealt_while_the_sum_of_the_one_before_is_on_its_way():
    leader, messages = leader_of(2, copies=2)

    def compute(step, messages, now):
        found = []
        for worker, deal in [(to, m) for to, m in messages if isinstance(m, Deal)]:
            answer = pack(Done(0, worker, 0, deal.units, 1.0))
            found += leader.received(step, Tag("answer", 0), answer, now)
        return [(step, send.to, unpack(send.payload)) for step, send in found]

    ahead = compute(0, messages, 1.0)
    deals = [(to, m) for step, to, m in ahead if step == 1 and isinstance(m, Deal)]
    assert sorted(unit for _, message in deals for unit in message.units) == [0, 1, 2, 3]
    closed = [to for step, to, message in ahead if step == 1 and isinstance(message, Close)]
    assert closed == [0, 1]
    # Nothing is repeated when the step begins.
    assert not leader.received(0, Tag("answer", 0), summed(0), 1.1)
    ahead = compute(1, deals, 2.0)
    assert {step for step, _, message in ahead if isinstance(message, Deal)} == {2}
    leader.received(1, Tag("answer", 0), summed(1), 2.1)
    assert leader.take(1).units == {to: len(message.units) for to, message in deals}


def test_a_worker_that_is_lost_after_its_deal_has_the_step_closed_once_more():
    """Contributions to the first `Close` must not be mixed with others."""
    leader, messages = leader_of(2, copies=2)
    for worker, deal in [(to, m) for to, m in messages if isinstance(m, Deal)]:
        leader.received(0, Tag("answer", 0), pack(Done(0, worker, 0, deal.units, 1.0)), 1.0)
    leader.lost([1], 1.0)
    begun = leader.received(0, Tag("answer", 0), summed(0), 1.1)
    closed = [unpack(send.payload) for step, send in begun if step == 1]
    closed = [message for message in closed if isinstance(message, Close)]
    assert closed == [Close(0, 0, 2, (0, 1, 2, 3), (0,))]


def summed(worker, overflow=False):
    return pack(Summed(0, worker, 0, overflow))


def test_the_only_worker_with_the_last_sum_dies():
    leader, _ = leader_of(2, copies=1, steps=1)
    leader.received(0, Tag("answer", 0), summed(0), 1.0)
    assert leader.failed is None
    leader.lost([0], 1.1)
    assert leader.failed is not None  # another group does the step again


def test_a_worker_that_was_sent_nothing_yet_says_that_it_has_the_sum():
    """One without units is sent `Close` alone, and all chunks of the total may come before it."""
    leader, _ = leader_of(3, copies=2)
    machine = SqueezeMachine(2, 3, 4)
    machine.begin()
    losses = dict.fromkeys(range(4), 0.1)
    total = UnitSum(np.ones(LENGTH, np.int32), np.zeros(BLOCKS, np.int16), losses)
    assert machine.received(0, Tag("sum", 0, 0), (1, 2, *total.chunk(0, 2))) == []
    said, finished = machine.received(1, Tag("sum", 0, 1), (1, 2, *total.chunk(1, 2)))
    assert isinstance(finished, FinishedUnits)
    leader.received(0, said.tag, said.payload, 1.0)
    orders = [(step, send.to, unpack(send.payload)) for step, send in leader.lost([0], 1.1)]
    assert [order for order in orders if isinstance(order[2], Fetch)] == [
        (0, 1, Fetch(0, 0, sources=(2,)))
    ]
    late = pack(Close(0, 0, 1, (), (0, 1)))
    assert machine.received(ROOT, Tag("grant", 0), late) == []


def test_what_a_lost_worker_still_says_does_not_count():
    leader, _ = leader_of(3, copies=2)
    leader.lost([0], 0.5)
    assert leader.received(0, Tag("answer", 0), summed(0), 0.6) == []
    assert leader._present == (0, 0)


def test_a_unit_that_is_not_in_the_sum_does_not_have_the_step_done_again():
    leader, messages = leader_of(2, copies=2)
    unit = next(m.units[0] for to, m in messages if to == 0 and isinstance(m, Deal))
    leader.received(0, Tag("answer", 0), pack(Done(0, 0, 0, (unit,), 0.1, True)), 0.1)
    leader.received(0, Tag("answer", 0), summed(1), 0.2)
    assert leader._present == (1, 0)


def test_the_leader_remembers_no_more_turns_than_workers_do():
    leader, _ = leader_of(2, copies=2, steps=2 * KEPT)
    for step in range(2 * KEPT - 1):
        leader.received(step, Tag("answer", 0), summed(0), 1.0 + step)
        assert leader._present == (step + 1, 0)
        assert len(leader._ledgers) == min(step + 2, KEPT)
