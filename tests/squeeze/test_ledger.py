"""Exclusive grants: each unit counts exactly once and each step ends, whatever fails and when.

Workers and their leader exchange messages over channels that keep their order but may be late.
Workers compute at any pace, stop, resume, die, are taken for dead. Gradients are counters of units,
so that a sum shows what it has.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from dask_coded.rounds import Forecast
from dask_coded.rounds.policies import POLICIES, Continuous
from dask_coded.rounds.workers import Workers
from dask_coded.squeeze import (
    Contribute,
    Contribution,
    Drop,
    Fold,
    Ledger,
    Restart,
    UnitCount,
    UnitLayout,
)
from dask_coded.squeeze.grants import (
    Answer,
    Close,
    Copy,
    Deal,
    Done,
    Fetch,
    Grant,
    Recall,
    Refused,
    Released,
    Summed,
)
from dask_coded.squeeze.units import ring_time, seat

NAMES = sorted(POLICIES)


@dataclass
class Worker:
    """One end: a contribution, its gradients, and what it receives of the others."""

    own: Contribution
    units: int
    alive: bool = True
    stopped: bool = False
    sum: Counter[int] = field(default_factory=Counter)
    gradients: set[int] = field(default_factory=set)
    tally: UnitCount = field(init=False)
    received: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tally = UnitCount(self.units)


class Group:
    """Workers and the leader of one step, all of whose events are chosen from outside.

    A channel has a kind and two ends. Those to and from the leader have its worker at both ends.
    """

    def __init__(
        self,
        units: int,
        seats: list[int],
        copies: int,
        speeds: list[float],
        policy: str = "continuous",
        doubt: float = 0.0,
    ) -> None:
        self.layout = UnitLayout(units, seats, copies)
        self.now = 0.0
        self.workers = [Worker(Contribution(w, 0), units) for w in range(len(seats))]
        self.channels: dict[tuple[str, int, int], deque] = {}
        self.suspected: set[int] = set()
        forecast = Forecast(np.array(speeds), doubt=doubt)
        self.ledger = Ledger(self.layout, POLICIES[policy](), forecast, self.now)
        self.letters(self.ledger.start())

    # -- the ends ------------------------------------------------------------------------------

    def letters(self, letters: list[tuple[int, Grant]]) -> None:
        for worker, message in letters:
            self.channel("down", worker, worker).append(message)
        ledger = self.ledger
        assert ledger.over or ledger.failed or ledger.wake is None or ledger.wake >= 0

    def channel(self, kind: str, sender: int, receiver: int) -> deque:
        return self.channels.setdefault((kind, sender, receiver), deque())

    def obey(self, number: int, commands: list) -> None:
        worker = self.workers[number]
        for command in commands:
            match command:
                case Answer():
                    self.channel("up", number, number).append(command)
                case Fold(unit):
                    worker.gradients.remove(unit)
                    worker.sum[unit] += 1
                case Drop(unit):
                    worker.gradients.remove(unit)
                case Restart():
                    worker.sum.clear()
                    worker.gradients.clear()
                case Contribute(closing, units, _):
                    assert worker.sum == Counter(units), "the label is wrong"
                    for other in range(len(self.workers)):
                        self.channel("part", number, other).append((closing, units))
                case Fetch():
                    self.channel("fetch", number, number).append(command.sources)
        # Beside the sum: the unit in hand, the copy, and a Drop that is yet to come.
        assert len(worker.gradients) <= 2

    def total(self, number: int, total: Counter[int]) -> None:
        assert total == Counter(range(self.layout.units)), "a unit is missing or counts twice"
        self.obey(number, self.workers[number].own.have_sum())

    # -- events --------------------------------------------------------------------------------

    def pending(self) -> list[tuple[str, int, int]]:
        """Return the channels that have a message which can be delivered."""
        found = []
        for (kind, sender, receiver), queue in self.channels.items():
            listens = self.workers[receiver].alive and not self.workers[receiver].stopped
            if queue and (kind == "up" or listens):
                found.append((kind, sender, receiver))
        return sorted(found)

    def deliver(self, key: tuple[str, int, int]) -> None:
        kind, _, receiver = key
        message = self.channels[key].popleft()
        if kind == "up":
            self.letters(self.ledger.receive([message], self.now))
        elif kind == "down":
            self.obey(receiver, self.workers[receiver].own.receive(message))
            self.workers[receiver].own.begin()
        elif kind == "part":
            closing, units = message
            worker = self.workers[receiver]
            if worker.tally.begin(closing):
                worker.received.clear()
            if worker.tally.add(closing, units):
                worker.received.update(units)
                if worker.tally.complete:
                    self.total(receiver, worker.received)
        else:
            for source in message:
                if self.workers[source].alive:
                    self.total(receiver, Counter(range(self.layout.units)))
                    break

    def compute(self, number: int) -> None:
        """Finish the unit that a worker computes, and begin the next one."""
        worker = self.workers[number]
        if worker.own.running is not None:
            worker.gradients.add(worker.own.running)
            self.obey(number, worker.own.finished(seconds=1.0))
        worker.own.begin()

    def busy(self) -> list[int]:
        return [
            number
            for number, worker in enumerate(self.workers)
            if worker.alive
            and not worker.stopped
            and (worker.own.running is not None or (worker.own.queued and not worker.own.summed))
        ]

    def wake(self) -> bool:
        """Let the time come that the leader waits for; return whether it waits for one."""
        if self.ledger.wake is None:
            return False
        self.now = max(self.now + 1e-3, self.ledger.wake)
        self.letters(self.ledger.react(self.now))
        return True

    def lose(self, number: int) -> None:
        if not self.workers[number].alive:
            # Its channels are closed, and nothing comes after that.
            self.channel("up", number, number).clear()
        self.letters(self.ledger.lost([number], self.now))

    def suspect(self, number: int) -> None:
        """Take a worker for dead, for good; what it still says comes late."""
        self.suspected.add(number)
        self.lose(number)

    def finish(self) -> None:
        """Without any more faults the step ends on all workers that are left."""
        for number, worker in enumerate(self.workers):
            if not worker.alive:
                self.lose(number)
        left = {w for w, worker in enumerate(self.workers) if worker.alive} - self.suspected
        for _ in range(10_000):
            if all(self.workers[w].own.summed for w in left):
                return
            keys, busy = self.pending(), self.busy()
            for key in keys:
                while self.channels[key]:
                    self.deliver(key)
            for number in busy:
                self.compute(number)
            if self.ledger.failed and not self.pending():
                assert any(not left.intersection(h) for h in self.layout.holders)
                return
            if not keys and not busy and not self.wake():
                break
            self.now += 0.1
        raise AssertionError(f"the step does not end: {[w.own for w in self.workers]}")


@st.composite
def groups(draw, least: int = 1):
    workers = draw(st.integers(least, 6))
    return Group(
        units=draw(st.integers(1, 20)),
        seats=draw(st.permutations(range(workers))),
        copies=draw(st.integers(1, 3)),
        speeds=draw(
            st.lists(st.sampled_from([0.0, 0.3, 1.0, 3.0]), min_size=workers, max_size=workers)
        ),
        policy=draw(st.sampled_from([*NAMES, "continuous", "continuous"])),
        doubt=draw(st.sampled_from([0.0, 0.2, 1.0])),
    )


class Faults(RuleBasedStateMachine):
    """Any order of events, then a step without more faults ends."""

    group: Group

    @initialize(group=groups())
    def begin(self, group: Group) -> None:
        self.group = group

    @rule(data=st.data(), count=st.integers(1, 6))
    def deliver(self, data, count: int) -> None:
        for _ in range(count):
            if keys := self.group.pending():
                self.group.deliver(data.draw(st.sampled_from(keys)))

    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data, count: int) -> None:
        for _ in range(count):
            self.group.now += data.draw(st.sampled_from([0.0, 0.1, 1.0]))
            if busy := self.group.busy():
                self.group.compute(data.draw(st.sampled_from(busy)))

    @rule()
    def wake(self) -> None:
        self.group.wake()

    @rule(data=st.data())
    def stop_or_resume(self, data) -> None:
        worker = data.draw(st.sampled_from(self.group.workers))
        worker.stopped = not worker.stopped

    @rule(data=st.data(), noticed=st.booleans())
    def kill(self, data, noticed: bool) -> None:
        number = data.draw(st.sampled_from(range(len(self.group.workers))))
        self.group.workers[number].alive = False
        if noticed:
            self.group.lose(number)

    @rule(data=st.data())
    def suspect(self, data) -> None:
        number = data.draw(st.sampled_from(range(len(self.group.workers))))
        self.group.suspect(number)

    def teardown(self) -> None:
        if hasattr(self, "group"):
            for worker in self.group.workers:
                worker.stopped = False
            self.group.finish()


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def random_group(rng: random.Random) -> Group:
    workers = rng.randint(1, 6)
    return Group(
        units=rng.randint(1, 20),
        seats=rng.sample(range(workers), workers),
        copies=rng.randint(1, 3),
        speeds=rng.choices([0.0, 0.3, 1.0, 3.0], k=workers),
        policy=rng.choice([*NAMES, "continuous", "continuous", "continuous"]),
        doubt=rng.choice([0.0, 0.2, 1.0]),
    )


def random_fault(group: Group, rng: random.Random) -> None:
    number = rng.randrange(len(group.workers))
    worker = group.workers[number]
    kind = rng.choice(["stop", "stop", "kill", "suspect"])
    if kind == "stop":
        worker.stopped = not worker.stopped
    elif kind == "kill":
        worker.alive = False
        if rng.random() < 0.5:
            group.lose(number)
    else:
        group.suspect(number)


@pytest.mark.parametrize("faults", [0.0, 0.1, 0.3])
def test_random_faults(faults: float) -> None:
    for seed in range(300):
        rng = random.Random(f"{faults} {seed}")
        group = random_group(rng)
        for _ in range(rng.randint(0, 40)):
            if rng.random() < faults:
                random_fault(group, rng)
            elif rng.random() < 0.1:
                group.wake()
            for _ in range(rng.randint(0, 6)):
                if keys := group.pending():
                    group.deliver(rng.choice(keys))
            for _ in range(rng.randint(0, 3)):
                group.now += rng.choice([0.0, 0.1, 1.0])
                if busy := group.busy():
                    group.compute(rng.choice(busy))
        for worker in group.workers:
            worker.stopped = False
        group.finish()


# -- one rule at a time ----------------------------------------------------------------------------


def pair(units: int = 8, doubt: float = 1.0, speeds: tuple[float, ...] = (1.0, 1.0)) -> Ledger:
    """Return the ledger of two workers that both store all units."""
    layout = UnitLayout(units, [*range(len(speeds))], copies=2)
    return Ledger(layout, Continuous(lead=1.5), Forecast(np.array(speeds), doubt=doubt), 0.0)


def done(worker: int, *units: int, epoch: int = 0, seconds: float = 1.0) -> Done:
    return Done(0, worker, epoch, units, seconds)


def dealt(letters) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for worker, message in letters:
        if isinstance(message, Deal):
            found[worker] = found.get(worker, ()) + message.units
    return found


def recalls(letters) -> list[tuple[int, tuple[int, ...]]]:
    return [(worker, m.units) for worker, m in letters if isinstance(m, Recall)]


def closed(letters) -> dict[int, tuple[int, ...]]:
    """Return the units of each worker that a `Close` tells it, all with the same owners."""
    found = {worker: m for worker, m in letters if isinstance(m, Close)}
    owners = tuple(worker for worker, message in sorted(found.items()) if message.units)
    assert {message.owners for message in found.values()} == {owners}
    return {worker: message.units for worker, message in found.items()}


def test_a_step_closes_together_with_its_deal_if_predictions_are_trusted() -> None:
    letters = pair(doubt=0.0).start()
    assert [type(message) for _, message in letters] == [Deal, Deal, Close, Close]
    assert closed(letters) == {0: (4, 5, 6, 7), 1: (0, 1, 2, 3)}
    assert not any(isinstance(message, Close) for _, message in pair(doubt=0.5).start())


def test_a_unit_moves_only_once_it_is_released() -> None:
    ledger = pair(doubt=0.0, units=12)
    first = dealt(ledger.start())
    fast, slow = first[0], first[1]
    ledger.receive([done(1, slow[0], seconds=8.0)], 8.0)
    letters = []
    for second, unit in enumerate(fast):
        letters += ledger.receive([done(0, unit)], 8.0 + second / 10)
    [(worker, units), *_] = recalls(letters)
    assert worker == 1
    assert set(units) <= set(slow[2:])  # what it is believed to be computing stays
    assert not dealt(letters)
    letters = ledger.receive([Released(0, 1, 0, units, units[:1])], 9.0)
    assert dealt(letters) == {0: units[:1]}
    assert not ledger.closed and ledger.moved == 1


def test_units_of_a_lost_worker_are_computed_by_the_other_holder_even_if_done() -> None:
    ledger = pair(units=6, doubt=0.0)
    first = dealt(ledger.start())
    ledger.receive([done(1, *first[1])], 3.0)
    letters = ledger.lost([1], 3.1)
    assert dealt(letters) == {0: first[1]}
    # What it says after that counts for nothing.
    assert not ledger.receive([done(1, *first[1])], 3.2)
    letters += ledger.receive([done(0, *range(6))], 9.0)
    last = [message for worker, message in letters if isinstance(message, Close)][-1]
    assert (last.closing, last.units, last.owners) == (2, (0, 1, 2, 3, 4, 5), (0,))


def test_a_worker_that_does_not_answer_a_recall_loses_its_epoch_and_returns_in_the_next() -> None:
    ledger = pair(doubt=0.0, units=12)
    first = dealt(ledger.start())
    ledger.receive([done(1, first[1][0], seconds=8.0)], 8.0)
    now, letters = 8.0, []
    for unit in first[0]:
        letters += ledger.receive([done(0, unit)], now)
    assert recalls(letters)
    for _ in range(1000):
        if dealt(letters):
            break
        assert ledger.wake is not None
        now = max(now, ledger.wake) + 1e-6
        letters = ledger.react(now)
    assert set(dealt(letters)[0]) == set(first[1])
    # A sign of life brings it back, but what it has computed was of the epoch that has ended.
    ledger.receive([done(1, first[1][1])], now)
    letters = ledger.lost([0], now + 1)
    assert sorted(dealt(letters)[1]) == [*range(12)]
    assert {message.epoch for worker, message in letters if worker == 1} == {1}


def test_a_copy_is_of_the_last_unit_and_the_first_of_both_counts() -> None:
    ledger = pair(units=10, doubt=1.0, speeds=(1.0, 0.25))
    first = dealt(ledger.start())
    last = first[1][1:]
    ledger.receive([done(1, first[1][0], seconds=4.0)], 4.0)
    letters = ledger.receive([done(0, *first[0], seconds=4.4)], 4.4)
    [(maker, copy)] = [(w, m) for w, m in letters if isinstance(m, Copy)]
    assert (maker, (copy.unit,)) == (0, last)
    letters = ledger.receive([done(0, copy.unit, seconds=0.5)], 5.0)
    assert closed(letters) == {0: tuple(sorted(first[0] + last)), 1: first[1][:1]}


def test_a_copy_of_a_unit_that_is_late_after_the_close_reopens_the_step() -> None:
    ledger = pair(units=8, doubt=0.0)
    first = dealt(ledger.start())
    assert ledger.closed
    *begun, last = first[1]
    letters = []
    for now, units in enumerate(zip(first[0], begun), start=1):
        letters += ledger.receive([done(w, unit) for w, unit in enumerate(units)], now)
    letters += ledger.receive([done(0, first[0][-1])], now := 4.0)
    while not any(isinstance(message, Copy) for _, message in letters):
        for worker, units in recalls(letters):
            # It answers that it has begun, and never ends.
            letters = ledger.receive([Released(0, worker, 0, units, ())], now)
        assert ledger.wake is not None and now < 1000
        now = max(now, ledger.wake) + 1e-6
        letters = ledger.react(now)
    assert ledger.closed
    letters = ledger.receive([done(0, last)], now + 1)
    assert closed(letters)[1] == tuple(begun)
    assert ledger.closing == 2


@pytest.mark.parametrize("lag", [0.001, 0.027, 0.08])
@pytest.mark.parametrize("slow", [50.0, 241.0, 5000.0])
def test_a_worker_that_never_ends_a_unit_loses_all_others(slow: float, lag: float) -> None:
    """It answers meanwhile, so its epoch goes on. In the end the unit has a copy."""
    layout, lags = UnitLayout(16, [0, 1, 2], copies=2), np.array([lag, 3 * lag, 0.04])
    forecast = Forecast(np.array([11363.0, 13156.0, slow]), lags, doubt=0.05)
    ledger = Ledger(layout, Continuous(lead=0.004), forecast, 0.0)
    letters, now = ledger.start(), 0.0
    stuck = dealt(letters).get(2, (None,))[0]
    waiting: list[tuple[float, Answer]] = []
    while not {*range(16)} <= ledger._granted.done | ledger._granted.made:
        for worker, message in letters:
            back = now + lags[worker] / 2
            if isinstance(message, Recall):
                units = tuple(u for u in message.units if worker == 2 and u != stuck)
                answer = Released(0, worker, message.epoch, message.units, units)
                waiting.append((back, answer))
            elif worker != 2 and isinstance(message, Deal | Copy):
                units = message.units if isinstance(message, Deal) else (message.unit,)
                for count, unit in enumerate(units, start=1):
                    answer = done(worker, unit, epoch=message.epoch, seconds=1e-4)
                    waiting.append((back + count * 1e-4, answer))
        waiting.sort(key=lambda pair: pair[0])
        wake = np.inf if ledger.wake is None else ledger.wake
        assert waiting or wake < 30, "nothing happens any more"
        if waiting and waiting[0][0] <= wake:
            now, answer = max(now, waiting[0][0]), waiting.pop(0)[1]
            letters = ledger.receive([answer], now)
        else:
            now = max(now, wake) + 1e-9
            letters = ledger.react(now)


def fetches(letters) -> list[tuple[int, tuple[int, ...]]]:
    return [(worker, m.sources) for worker, m in letters if isinstance(m, Fetch)]


def test_the_sum_is_fetched_from_a_worker_that_has_it_if_another_one_dies() -> None:
    layout = UnitLayout(6, [0, 1, 2], copies=3)
    ledger = Ledger(layout, Continuous(), Forecast(np.ones(3)), 0.0)
    ledger.start()
    ledger.receive([Summed(0, 0, 0)], 1.0)
    assert fetches(ledger.lost([2], 1.1)) == [(1, (0,))]
    assert ledger.over
    # If that one dies as well, what is missing is computed.
    assert set(dealt(ledger.lost([0], 1.2))) == {1}
    assert not ledger.over and not ledger.failed
    ledger.lost([1], 1.3)
    assert ledger.failed and "too few are within reach" in ledger.failed


def test_a_worker_that_was_sent_nothing_yet_counts_as_having_the_sum() -> None:
    """One without units is sent `Close` alone, and all chunks of the total may come before it."""
    layout = UnitLayout(6, [0, 1, 2], copies=2)
    # Worker 2 is so slow that the others compute its units.
    ledger = Ledger(layout, Continuous(), Forecast(np.array([1.0, 1.0, 1e-3])), 0.0)
    letters = ledger.start()
    assert sorted(dealt(letters)) == [0, 1]
    assert [type(message) for worker, message in letters if worker == 2] == [Close]
    ledger.receive(Contribution(worker=2, step=0).have_sum(), 1.0)
    assert ledger.over
    assert fetches(ledger.lost([0], 1.1)) == [(1, (2,))]
    # The step has ended, though no worker is left for the units that only the others store.
    ledger.lost([1], 1.2)
    assert ledger.over and ledger.failed is None and ledger.wake is None


def trio() -> tuple[Ledger, list[tuple[int, Grant]]]:
    """Return a ledger whose units are all computed by three workers, and its last letters."""
    ledger = Ledger(UnitLayout(6, [0, 1, 2], copies=2), Continuous(), Forecast(np.ones(3)), 0.0)
    granted = dealt(ledger.start())
    for worker, units in granted.items():
        letters = ledger.receive([done(worker, *units)], 1.0)
    assert ledger.closed and sorted(granted) == [0, 1, 2]
    return ledger, letters


def until(ledger: Ledger, now: float, stuck: set[int], happens) -> tuple[float, list]:
    """Let time pass, with answers of all but some workers, until something is sent."""
    letters: list[tuple[int, Grant]] = []
    for _ in range(100):
        assert ledger.wake is not None, "the ledger waits for nothing"
        now = max(now, ledger.wake) + 1e-6
        letters = ledger.react(now)
        if any(happens(message) for _, message in letters):
            return now, letters
        for worker, units in recalls(letters):
            assert units == (), "all units are computed"
            if worker not in stuck:
                assert not ledger.receive([Released(0, worker, 0, (), ())], now)
    raise AssertionError("nothing is sent")


def test_a_worker_that_stops_before_it_adds_up_its_chunk_loses_its_epoch() -> None:
    ledger, _ = trio()
    now, letters = until(ledger, 1.0, {1}, lambda message: isinstance(message, Deal))
    granted = dealt(letters)
    assert 1 not in granted and sum(map(len, granted.values())) == 2
    assert now < 5  # seconds, of a step whose units take one
    [close, *_] = [message for _, message in letters if isinstance(message, Close)]
    assert (close.closing, close.owners) == (2, (0, 2))


def test_owners_that_answer_keep_their_epochs_however_long_the_sum_takes() -> None:
    ledger, _ = trio()
    now = 1.0
    for _ in range(20):
        now = max(now, ledger.wake) + 1e-6
        for worker, _ in recalls(ledger.react(now)):
            ledger.receive([Released(0, worker, 0, (), ())], now)
    assert ledger.closed and ledger.closing == 1
    assert now > 1000  # asked more and more rarely


def test_nothing_is_estimated_at_each_event_while_the_sum_is_awaited() -> None:
    ledger, _ = trio()
    with mock.patch.object(Workers, "estimate") as estimate:
        assert not ledger.react(1.1)
    assert ledger.wake is not None and not estimate.called


def test_a_worker_that_stops_before_all_have_its_chunk() -> None:
    ledger, _ = trio()
    ledger.receive([Summed(0, 0, 0)], 1.1)
    now, letters = until(ledger, 1.1, {1}, lambda message: isinstance(message, Fetch))
    assert {(w, m.sources) for w, m in letters} == {(1, (0,)), (2, (0,))}
    assert not ledger.receive([Summed(0, 2, 0)], now + 0.1)
    assert not ledger.receive([Summed(0, 1, 0)], now + 0.2)
    assert ledger.wake is None


def test_each_worker_fetches_a_sum_once_unless_its_source_is_lost() -> None:
    layout = UnitLayout(8, [0, 1, 2, 3], copies=2)
    ledger = Ledger(layout, Continuous(), Forecast(np.ones(4)), 0.0)
    ledger.start()
    ledger.lost([3], 0.5)
    assert fetches(ledger.receive([Summed(0, 0, 0)], 1.0)) == [(1, (0,)), (2, (0,))]
    assert not fetches(ledger.receive([Summed(0, 2, 0)], 1.1))
    assert fetches(ledger.lost([0], 1.2)) == [(1, (2,))]


def test_a_worker_whose_source_is_stuck_fetches_the_sum_from_the_next_one() -> None:
    ledger = Ledger(UnitLayout(8, [0, 1, 2, 3], copies=2), Continuous(), Forecast(np.ones(4)), 0.0)
    ledger.start()
    ledger.lost([3], 0.5)
    assert fetches(ledger.receive([Summed(0, 0, 0)], 1.0)) == [(1, (0,)), (2, (0,))]
    # There is no other source yet.
    assert ledger.wake == 2.0 and not ledger.react(2.0)
    assert not ledger.receive([Summed(0, 2, 0)], 2.1)
    assert ledger.wake == 4.0 and fetches(ledger.react(4.0)) == [(1, (2,))]
    # If that one is stuck as well, the first may not be any more.
    assert ledger.wake == 8.0 and fetches(ledger.react(8.0)) == [(1, (0,))]
    assert not ledger.receive([Summed(0, 1, 0)], 8.1)
    assert ledger.wake is None


def test_a_worker_whose_sum_has_other_units_refuses() -> None:
    own = Contribution(worker=0, step=0)
    own.receive(Deal(0, 0, (0, 1, 2)))
    for _ in range(3):
        own.begin()
        own.finished(1.0)
    assert own.folded == {0, 1} and own.in_hand == 2
    [answer] = own.receive(Close(0, 0, 1, (1, 2), (0, 1)))
    assert isinstance(answer, Refused)
    commands = own.receive(Close(0, 0, 2, (0, 1), (0, 1)))
    assert commands == [Drop(2), Contribute(2, frozenset({0, 1}), (0, 1))]


def test_a_contribution_drops_a_copy_that_lost_and_keeps_one_that_won() -> None:
    for units, kept in (((0, 5), True), ((0,), False)):
        own = Contribution(worker=0, step=0)
        own.receive(Deal(0, 0, (0,)))
        own.receive(Copy(0, 0, 5))
        for _ in range(2):
            own.begin()
            own.finished(1.0)
        assert own.apart and own.in_hand == 0
        commands = own.receive(Close(0, 0, 1, units, (0,)))
        expected = [Fold(0), Fold(5)] if kept else [Drop(5), Fold(0)]
        assert commands == [*expected, Contribute(1, frozenset(units), (0,))]


def test_other_steps_and_earlier_epochs_are_not_obeyed() -> None:
    own = Contribution(worker=0, step=0)
    own.receive(Deal(0, 1, (0,)))
    assert own.receive(Deal(0, 0, (1,))) == []
    assert own.receive(Deal(1, 1, (1,))) == []
    assert own.granted == {0}
    assert own.receive(Deal(0, 2, (3,))) == [Restart()]
    assert own.granted == {3}


@given(units=st.integers(1, 40), copies=st.integers(1, 4), data=st.data())
def test_units_lie_on_the_ring_like_the_cells_of_parts(units: int, copies: int, data) -> None:
    workers = data.draw(st.integers(1, 8))
    seats = data.draw(st.permutations(range(workers)))
    layout = UnitLayout(units, seats, copies)
    for unit, holders in enumerate(layout.holders):
        assert len(holders) == min(copies, workers)
        block = next(b for b in range(workers) if unit < (b + 1) * units // workers)
        assert set(holders) == {seats[(block - back) % workers] for back in range(len(holders))}
    for worker, stored in enumerate(layout.stored):
        assert layout.units_in(layout.ranges(worker, stored)) == stored
    assert sum(stop - start for _, start, stop in layout.absent) == (
        workers * layout.layout.stripes - units
    )


@given(st.integers(2, 20), st.data())
def test_slow_workers_do_not_sit_side_by_side(workers: int, data) -> None:
    slow = data.draw(st.integers(0, workers // 2))
    speeds = np.array(data.draw(st.permutations([0.25] * slow + [1.0] * (workers - slow))))
    seats = seat(speeds)
    assert sorted(seats) == [*range(workers)]
    around = speeds[seats]
    if slow < workers / 2:
        assert not ((around < 1) & (np.roll(around, 1) < 1)).any()
    assert ring_time(around) <= ring_time(np.sort(speeds)[::-1]) + 1e-12


def test_two_slow_of_eight_apart_and_side_by_side() -> None:
    speeds = np.array([1.0] * 6 + [0.25] * 2)
    assert ring_time(speeds) == 2.0
    assert ring_time(speeds[seat(speeds)]) == pytest.approx(8 / 6.5)  # 1.23
