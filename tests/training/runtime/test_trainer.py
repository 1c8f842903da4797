"""The parts of a worker and of the leader in a group, event by event, without a cluster."""

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
from distributed.core import Status
from distributed.protocol.pickle import dumps
from distributed.utils_test import captured_logger

from dask_coded.aggregation import (
    ROOT,
    CodedReduce,
    Finished,
    GradientCoding,
    Ring,
    Squeeze,
    Star,
)
from dask_coded.aggregation.steps import KEPT
from dask_coded.compression import EXACT, Partial
from dask_coded.loop import Loop
from dask_coded.runtime.messages import Failed
from dask_coded.training import SGD, Pipelined, Synchronous
from dask_coded.training.replica import Model as ReplicaModel
from dask_coded.training.runtime import leader as leader_module
from dask_coded.training.runtime import trainer as trainer_module
from dask_coded.training.runtime.group import GroupOverError, LiveGroup
from dask_coded.training.runtime.leader import History, Leader
from dask_coded.training.runtime.link import Event, Link
from dask_coded.training.runtime.memberships import (
    Available,
    Cancelled,
    Silent,
    TrainingWorkerPlugin,
)
from dask_coded.training.runtime.messages import (
    BeginSteps,
    Enlist,
    Enlisted,
    HaltTraining,
    Join,
    Joined,
    NodeMessage,
    ReplicaState,
    SendState,
    SkipNode,
    StepProgress,
    StepsFinished,
    Unreachable,
)
from dask_coded.training.runtime.spec import Blocks, Group, Step
from dask_coded.training.runtime.storage import saved
from dask_coded.training.runtime.trainer import READ_EVERY, Trainer
from dask_coded.transport.attempts import RunOverError
from dask_coded.transport.messages import Closed, Message, Pong
from tests.clocks import set_timeouts


class Counter:
    """A replica that counts its updates."""

    def __init__(self, *shape: int, during: Any = lambda: None) -> None:
        self.version = self.compressed = 0
        self._during = during

    def apply(self, totals: Any, beside: bool = False) -> None:
        self._during()
        self.version += 1

    def compress(self, step: int, segment: int, vector: Any) -> Any:
        self.compressed += 1
        return vector

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "where": "here"}

    def restore(self, state: dict[str, Any]) -> None:
        self.version, self.where = state["version"], state["where"]


class Model:
    def replica(self, parts: int, segments: int) -> Counter:
        return Counter()


def group(plan, version=0, sources=(), schedule=Synchronous()):  # noqa: B008
    training = SimpleNamespace(
        id="training",
        model=dumps(Model()),
        steps=100,
        schedule=schedule,
        codec=EXACT,
        checkpoint=None,
        setup={},
        averages=0,
        scoring=None,
        wants_state=lambda version: False,
        batches=lambda parts: None,
        samples=Blocks(("samples",), (60,)),
        targets=Blocks(("targets",), (60,)),
    )
    addresses = tuple("abcdefgh"[: plan.workers])
    return Group("run", training, plan, addresses, version, sources)


def trainer(plan, replica, busy=False, answer=lambda message: None, node=0, **options):
    loop = SimpleNamespace(add_callback=lambda callback, *args: None)
    worker = SimpleNamespace(address="a", loop=loop, status=Status.running)
    found = Trainer(worker, None, group(plan, **options), node, replica, answer=answer)
    found._busy = busy
    return found


@pytest.mark.parametrize("status, reported", [(Status.running, 1), (Status.closing, 0)])
def test_an_error_is_reported_unless_its_worker_closes(status, reported):
    answers = []
    found = trainer(Star(2).plan(2), Counter(), answer=answers.append)
    found._worker.status = status

    def fail():
        raise RuntimeError("ConnectionPool is closed")

    found._guarded(fail)
    assert [type(a) for a in answers] == [Failed] * reported


def message(step, sender, tag=("sum", 0, 0)):
    return NodeMessage("run", step, sender, tag, EXACT.pack(Partial(np.ones(1))), None)


def test_messages_that_arrive_while_the_update_of_their_step_is_applied_are_dropped():
    plan = CodedReduce(fan_in=2, depth=2, stragglers=1).plan(6)
    child = plan.allocation.parents.index(0)

    def late():
        inner._received(message(0, child, ("part", 0, 0)))

    inner = trainer(plan, Counter(during=late))
    inner._received(message(0, ROOT))
    inner._apply(1)
    assert inner._over(0)
    assert not inner._machines
    assert not inner._totals


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (3, 4, 5, 0, 1, 2)])
def test_sums_are_kept_while_the_leader_may_have_them_fetched_in_whatever_order_they_come(order):
    worker = trainer(Squeeze(units=4).plan(2), Counter())
    for step in order:
        worker._machine(step)
        worker._have(step, [])
    assert sorted(worker._kept) == list(range(6))[-KEPT:]


def test_a_retired_worker_applies_no_sum_beyond_the_version_that_it_reported():
    worker = trainer(Star().plan(2), Counter())
    reported: list[int] = []
    worker._received(message(0, ROOT))
    worker._retire(reported.append)
    worker._received(message(1, ROOT))
    worker._changed.wait = worker.stop  # a wait would never end
    assert worker._next() is None
    assert reported == [worker.replica.version] == [1]


@pytest.mark.parametrize("retires", [False, True])
def test_an_update_that_has_failed_is_not_tried_again_but_reported_again(retires):
    """The leader drops what comes from a group that it is about to leave."""
    tries, answers = [], SimpleQueue()

    def fail():
        tries.append(1)
        raise MemoryError("on purpose")

    worker = trainer(Star().plan(2), Counter(during=fail))
    worker._received(message(0, ROOT))
    if not retires:
        with pytest.raises(MemoryError):
            worker._apply(1)
    worker._retire(lambda version: None)
    plugin = plugin_of(SimpleNamespace(address="a", handlers={}, stream_handlers={}, extensions={}))
    plugin.trainers["training"] = worker
    plugin._enlist("next", "training", answers.put)
    answer = answers.get(timeout=60)
    assert (type(answer), answer.run_id) == (Failed, "next")
    assert tries == [1]
    found = leader(("a", Failed("run", answer.error)))
    with pytest.raises(MemoryError, match="on purpose"):
        found._enlisted(["a"])


def plugin_of(worker):
    plugin = TrainingWorkerPlugin()
    plugin.setup(worker)
    return plugin


def test_a_worker_that_can_start_no_more_threads_says_so():
    def fail():
        raise RuntimeError("can't start new thread")

    answers, _ = join(None, (), before=SimpleNamespace(stop=fail))
    assert [type(answer) for answer in answers] == [Failed]
    own = SimpleNamespace(address="a", handlers={}, stream_handlers={}, extensions={})
    plugin, answers = plugin_of(own), []
    member = SimpleNamespace(group=SimpleNamespace(run_id="run"), begin=fail)
    plugin.trainers["training"] = member
    plugin._handle(BeginSteps("run"), answers.append)
    assert [type(answer) for answer in answers] == [Failed]


def test_the_event_loop_does_not_wait_while_an_update_is_applied():
    worker, told = trainer(Star().plan(2), Counter()), SimpleQueue()
    event_loop = ThreadPoolExecutor(1)

    def during():
        for call, *args in ((worker.halt, 3), (worker.stop,), (worker.retire, told.put)):
            event_loop.submit(call, *args).result(timeout=60)
        assert told.empty()

    worker.replica._during = during
    worker._received(message(0, ROOT))
    worker._received(message(1, ROOT))
    with worker._changed:
        worker._apply(2)
    assert told.get() == worker.replica.version == 1
    worker._communicate()
    assert worker._end == 3


@pytest.mark.parametrize(("schedule", "behind"), [(Synchronous(), 0), (Pipelined(2), 1)])
def test_sums_do_not_accumulate_while_data_are_fetched(schedule, behind):
    worker = trainer(Star().plan(2), Counter(), busy=True, schedule=schedule)
    for step in range(5):
        worker._received(message(step, ROOT))
    assert worker.replica.version == 5 - behind
    assert len(worker._totals) == behind


@pytest.mark.parametrize(("schedule", "behind"), [(Synchronous(), 0), (Pipelined(2), 1)])
def test_sums_do_not_accumulate_while_a_gradient_is_computed_that_comes_too_late(schedule, behind):
    worker = trainer(Star().plan(2), Counter(), schedule=schedule)
    worker._advance()
    worker._events.get()()  # the machine says what to compute
    step, work = worker._next()
    for later in range(5):
        worker._received(message(later, ROOT))
    assert worker.replica.version == 5 - behind
    assert len(worker._totals) == behind
    worker.replica.gradient = lambda step, part, *data: (np.ones(1), 0.0)
    worker._work(step, work, {0: (None, None)})
    assert worker._events.empty()
    assert worker.replica.compressed == 0


def test_a_worker_waits_for_its_last_gradient_of_the_last_group_that_was_begun():
    def next_trainer(previous):
        worker = SimpleNamespace(address="a", loop=None)
        wanted = group(Star().plan(1))
        return Trainer(worker, None, wanted, 0, Counter(), lambda message: None, previous)

    first = next_trainer(None)
    release = threading.Event()
    first._threads[0] = threading.Thread(target=release.wait)
    first._threads[0].start()
    never_begun = next_trainer(first)
    never_begun.stop()
    last = next_trainer(never_begun)
    release.set()
    assert last._previous is first


def test_the_last_step_is_reported_before_the_end():
    answered: list[Message] = []
    worker = trainer(Ring().plan(2), Counter(), version=99)
    worker.replica.version = 99
    worker.replica.digest = lambda: "digest"
    worker.answer = answered.append
    worker._machine(99)
    # The computation thread may go on as soon as it can.
    worker._changed.notify_all = worker._next
    for segment in range(worker.group.plan.segments):
        worker._finished(99, Finished(segment, Partial(np.ones(1))))
    worker.stop()
    worker._communicate()
    assert [type(message) for message in answered] == [StepProgress, StepsFinished]


def test_other_workers_keep_the_recent_part_of_a_long_history():
    kept: list[Any] = []
    loop = SimpleNamespace(
        report=lambda progress, state, last: kept.append(state), resume=lambda state: state
    )
    history = History(loop, steps=10**6)
    seen = [Step(i, float(i), seconds=1.0) for i in range(1500)]
    for step in seen:
        history.ended(step, norm=1.0)
    assert kept[-1] == seen[-1000:]
    assert history.of([step.loss for step in seen]) == seen


def test_what_single_workers_have_done_is_kept_of_recent_steps_only():
    history = History(Loop(), steps=10**6)
    for i in range(1500):
        done = {"late": ("b",), "computing": {"a": 0.1}, "units": {"a": 2}, "speeds": {"a": 20.0}}
        history.ended(Step(i, float(i), seconds=2.0, moved=i % 3, **done), norm=1.0)
    history.scorer(10)(0.5)
    assert len(history._seen) == 1000
    found = history.of(np.arange(1510.0))
    assert [step.loss for step in found] == [*range(1510)]
    assert all(type(step.loss) is float for step in found)
    assert [step.seconds for step in found[:1500]] == [2.0] * 1500
    assert [step.moved for step in found[:1500]] == [i % 3 for i in range(1500)]
    assert (found[9].score, found[10].score) == (0.5, None)
    assert [bool(step.computing) for step in found] == [False] * 500 + [True] * 1000 + [False] * 10


def test_a_group_keeps_recent_steps_only():
    live = live_group(GradientCoding(stragglers=1), 4)[1]
    live._batches = SimpleNamespace(count=lambda step: 1)
    live._report_ended = lambda step, norm: None
    live._group.training.steps = 10**6
    for i in range(1500):
        live._progressed("a", StepProgress("run", i, 0.1))
        live._end(live._step(i), 1.0)
        live._progressed("b", StepProgress("run", i, 0.2))
    live._progressed("c", StepProgress("run", 3, 90.0))  # far too late
    assert [*live._seen] == [*range(500, 1500)]
    assert all(step.computing == {"a": 0.1, "b": 0.2} for step in live._seen.values())


def test_a_state_has_losses_as_an_array_and_may_have_them_as_a_list():
    model = ReplicaModel(None, np.zeros(2), SGD(1.0), 4, None, 0, None, ((2,),))
    replica = model.replica(1, 1)
    replica.apply([Partial(np.ones(2), 2.0)])
    state = replica.state()
    assert state["losses"].dtype == np.float64
    for losses in (state["losses"], [0.5]):  # a list in checkpoints up to version 0.2
        other = model.replica(1, 1)
        other.restore({**state, "losses": losses})
        other.apply([Partial(np.ones(2), 4.0)])
        assert other.state()["losses"].tolist() == [0.5, 1.0]


class Peer:
    """A worker whose replica's state a joining worker asks for; just killed if that is None."""

    def __init__(self, state: dict[str, Any] | None) -> None:
        self._state = state

    async def coded_trained(self, training: str) -> dict[str, Any]:
        if self._state is None:
            raise OSError
        return {"state": pickle.dumps(self._state)}


def join(peer, sources, before=None, status=Status.running, state=None):
    """Return the answers of a worker that joins a group in version 3, and its trainer."""
    worker = SimpleNamespace(
        address="a",
        handlers={},
        stream_handlers={},
        extensions={},
        rpc=lambda _: peer,
        status=status,
    )
    plugin = TrainingWorkerPlugin()
    plugin.setup(worker)
    if before is not None:
        plugin.trainers["training"] = before
    answers: list[Message] = []
    wanted = replace(group(Star().plan(2), version=3, sources=sources), state=state)
    asyncio.run(plugin._join(Join("run", "t", 0, "training", dumps(wanted)), answers.append))
    return answers, plugin.trainers.get("training")


def test_the_end_of_an_earlier_run_of_a_leader_may_come_late():
    wanted, answers, told = group(Star().plan(2)), [], []
    task = SimpleNamespace(key="t", run_id=8)
    worker = SimpleNamespace(
        address="a",
        handlers={},
        stream_handlers={},
        extensions={},
        state=SimpleNamespace(tasks={"t": task}),
        status=Status.running,
    )
    plugin = TrainingWorkerPlugin()
    plugin.setup(worker)
    plugin.leaders["t", 8] = told.append
    asyncio.run(
        plugin._join(Join("run", "t", 0, "training", dumps(wanted), ("t", 8)), answers.append)
    )
    plugin._forget("t", 7)
    assert answers == [Joined("run")]
    assert plugin.trainers
    assert not told
    plugin._forget("t", 8)
    assert not plugin.trainers
    assert told == [Cancelled("t")]


@pytest.mark.parametrize("sources", [(), ("a",), ("b",)])
def test_worker_that_closes_while_it_joins_is_lost_and_not_an_error(sources):
    class Closed:
        @property
        def coded_trained(self):
            raise RuntimeError("ConnectionPool is closed")

    answers, joined = join(Closed(), sources, status=Status.closing)
    assert answers == [Unreachable("run", "a")]
    assert joined is None


def test_a_worker_that_closes_leaves_its_group_at_once():
    answers = []
    found = trainer(Star().plan(2), Counter(), answer=answers.append)
    plugin = TrainingWorkerPlugin()
    plugin.setup(SimpleNamespace(address="a", handlers={}, stream_handlers={}, extensions={}))
    plugin.trainers["training"] = found
    plugin.teardown(SimpleNamespace(address="a"))
    assert answers == [Unreachable("run", "a")]
    assert found._stopped


def test_a_worker_may_join_with_a_state_that_the_leader_sends():
    state = dumps({"version": 3, "where": "in the file"})
    answers, joined = join(None, (), state=state)
    assert answers == [Joined("run")]
    assert (joined.replica.version, joined.replica.where) == (3, "in the file")


def test_worker_killed_while_another_fetches_its_state_is_lost_and_not_an_error():
    (answer,), _ = join(Peer(None), sources=("b",))
    assert answer == Unreachable("run", "b")
    found = leader(("a", answer))
    assert not found._all_joined(("a", "b"))
    assert found._link._lost == {"b"}


class Unheard:
    """A channel to a worker that does not answer."""

    def listen(self, run_id, listener):
        pass

    def send(self, message):
        pass


def leader(*events):
    """Return a leader that has received these events, and waits for no others."""
    loop = SimpleNamespace(add_callback=lambda callback, *args: callback(*args))
    plugin = SimpleNamespace(worker=SimpleNamespace(loop=loop))
    plugin.exchange = SimpleNamespace(
        channel=lambda address: Unheard(),
    )
    found = Leader(plugin, training=None, attempt=("t", 1), loop=None)
    found._link.run_id = "run"
    for sender, event in events:
        found._link._hear(sender, event)
    return found


def leading(aggregation, count):
    """Return the leader of a training that has not begun."""
    found = leader()
    found._training = found._link._training = group(aggregation.plan(count)).training
    found._training.aggregation, found._training.remembers = aggregation, False
    found._training.first = 0
    return found


def test_worker_stopped_while_it_joins():
    events = [("a", Pong("run")), ("b", Pong("run")), ("a", Joined("run"))]
    found = leader(*events, ("a", Silent("t", "b")))
    assert not found._all_joined(("a", "b"))
    assert found._link._lost == {"b"}


def test_workers_have_as_much_longer_to_answer_as_a_model_takes_to_reach_them(monkeypatch):
    found, waited = leader(), []
    monkeypatch.setattr(found._link, "next_event", lambda timeout: waited.append(timeout))
    for sending in (0.0, 500.0):
        assert not found._all_joined(("a",), sending)
    assert waited[1] - waited[0] == pytest.approx(500, abs=1)


def test_a_training_that_has_ended_fetches_no_data_again():
    def fetch():
        raise AssertionError("the data may be lost")

    state = SimpleNamespace(_previous=None, _fetch=fetch, _next=lambda: None, _end=3)
    state._parts = SimpleNamespace(only=lambda parts: {})
    Trainer._compute(SimpleNamespace(**vars(state), replica=SimpleNamespace(version=3)))
    with pytest.raises(AssertionError):
        Trainer._compute(SimpleNamespace(**vars(state), replica=SimpleNamespace(version=2)))


def test_a_worker_fetches_only_parts_that_it_had_not_in_the_group_before(monkeypatch):
    asked, arrays = [], []

    def fetch(loop, call, worker, blocks, edges, avoid):
        asked.extend((blocks.keys[0], *own) for own in edges)
        found = [np.full(stop - start, start) for start, stop in edges]
        arrays.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(trainer_module, "sync", fetch)

    def member(workers, units, previous=None, samples="samples"):
        wanted = group(Squeeze(units=units).plan(workers))
        wanted.training.samples = Blocks((samples,), (60,))
        replica, size = Counter(), 60 // units
        replica.part = lambda part: (size * part, size * (part + 1))
        worker = SimpleNamespace(address="a", loop=None)
        made = Trainer(worker, None, wanted, 0, replica, print, previous)
        made._peers = SimpleNamespace(leave=lambda: None)
        return made

    def stored(workers, units):
        return Squeeze(units=units).plan(workers).stored[0]

    def fetched(trainer):
        asked.clear()
        data = trainer._fetch()
        assert sorted(data) == sorted(trainer.group.plan.stored[0])
        for part, (rows, targets) in data.items():
            assert rows[0] == targets[0] == trainer.replica.part(part)[0]
        return {(start, stop) for _, start, stop in asked}

    first = member(3, 6)
    assert fetched(first) == {(10 * unit, 10 * unit + 10) for unit in stored(3, 6)}
    kept, wanted = set(stored(3, 6)), set(stored(2, 6))
    assert kept & wanted and wanted - kept
    never_begun = member(3, 6, first)
    second = member(2, 6, never_begun)
    assert fetched(second) == {(10 * unit, 10 * unit + 10) for unit in wanted - kept}
    # Parts that are cut in another way have other rows.
    assert len(fetched(member(2, 12, second))) == len(stored(2, 12))
    # So have other data.
    third = member(3, 6, second, samples="others")
    assert len(fetched(third)) == len(stored(3, 6))
    assert {key for key, *_ in asked} == {"others", "targets"}
    # Those of another group are dropped when nothing needs them, all of them with the training.
    second.forget()
    third.forget()
    assert not any(array() is not None for array in arrays)
    again = member(3, 6, third, samples="others")
    assert len(fetched(again)) == len(stored(3, 6))


@pytest.mark.parametrize(
    ("read", "over"), [([4, 4, 4], False), ([4, 4, 3], False), ([4, 4, 2], True)]
)
def test_a_worker_lost_while_another_is_far_behind_ends_the_group(read, over):
    """What it had yet to send to that one, no other worker keeps."""
    link, squeeze = leader()._link, Squeeze(copies=3, units=6)
    link.send = lambda messages: [*messages]
    live = LiveGroup(link, group(squeeze.plan(3)), 0.0, None, None)
    live._group.training.aggregation, live._group.training.workers = squeeze, None
    live._version, live._read = 5, dict(zip("abc", read, strict=True))
    live._dealt.lost = lambda nodes, now: []
    if over:
        with pytest.raises(GroupOverError):
            live._lose("b")
    else:
        live._lose("b")


def test_all_workers_are_asked_again_if_none_answers_in_time(monkeypatch):
    found, invited = leading(Star(), 1), []

    def invite(steps):
        invited.append(steps)
        if len(invited) > 1:
            for message in (Enlisted("run", None), Pong("run"), Joined("run")):
                found._link._hear("a", message)
        return ["a"]

    found._link.invite = invite
    found._link.call = lambda group: None
    set_timeouts(monkeypatch, 0.005, leader_module)
    assert found._form(0).addresses == ("a",)
    assert invited == [0, 0]


def test_workers_that_may_be_further_are_waited_for(monkeypatch):
    """They may be updating, while a worker that has just come answers at once."""
    found, invited = leading(Star(), 1), []

    def invite(steps):
        invited.append(steps)
        found._link._hear("new", Enlisted("run", None))
        if len(invited) > 1:
            found._link._hear("old", Enlisted("run", (7, "run")))
        return ["new", "old"]

    def call(group):
        for address in group.addresses:
            found._link._hear(address, Joined("run"))

    found._link.invite, found._link.call = invite, call
    set_timeouts(monkeypatch, 0.005, leader_module)
    formed = found._form(7)
    assert (formed.version, formed.sources) == (7, ("old",))
    assert invited == [7, 7]


@pytest.mark.parametrize("training", ["training", "another"])
def test_a_training_whose_workers_are_all_lost_goes_on_from_its_checkpoint(tmp_path, training):
    found, path = leading(Star(), 1), tmp_path / "state"
    found._training.checkpoint = str(path), 100
    state = dumps({"version": 300, "training": training})
    path.write_bytes(state)

    def invite(steps):
        for message in (Enlisted("run", None), Joined("run")):
            found._link._hear("a", message)
        return ["a"]

    found._link.invite = invite
    found._link.call = lambda group: None
    formed = found._form(0)
    own = training == "training"
    assert (formed.version, formed.state) == ((300, state) if own else (0, None))


@pytest.mark.parametrize("steps, kept, version", [(0, 300, 300), (320, 300, 300), (320, 40, 50)])
def test_a_checkpoint_counts_if_the_workers_that_are_left_are_far_behind(
    tmp_path, steps, kept, version
):
    """The leader's history may be lost, too."""
    found, path = leading(Star(), 1), tmp_path / "state"
    found._training.checkpoint = str(path), 100
    state = dumps({"version": kept, "training": "training"})
    path.write_bytes(state)

    def invite(steps):
        for message in (Enlisted("run", (50, "before")), Joined("run")):
            found._link._hear("a", message)
        return ["a"]

    found._link.invite = invite
    found._link.call = lambda group: None
    formed = found._form(steps)
    assert formed.version == version
    assert (formed.state, formed.sources) == ((state, ()) if version == kept else (None, ("a",)))


def test_a_checkpoint_counts_until_a_group_has_begun_with_it(tmp_path, monkeypatch):
    found, path, invited = leading(Star(), 1), tmp_path / "state", []
    found._training.checkpoint = str(path), 100
    path.write_bytes(dumps({"version": 300, "training": "training"}))

    def invite(steps):
        invited.append(steps)
        found._link._hear("a", Enlisted("run", None))  # it was still reading the state
        found._link._hear("a", Joined("run") if len(invited) > 1 else Closed("run"))
        return ["a"]

    found._link.invite = invite
    found._link.call = lambda group: None
    assert found._form(0).version == 300
    assert invited == [0, 0]


def test_a_checkpoint_that_cannot_be_read_is_not_overwritten(tmp_path):
    path = tmp_path / "state"
    assert saved(str(path), "training") is None
    path.write_bytes(b"of another program")
    assert saved(str(path), "training") is None
    with pytest.raises(IsADirectoryError):
        saved(str(tmp_path), "training")


def test_a_leader_without_any_worker_waits_for_one(monkeypatch):
    found, invited = leading(Star(), 1), []

    def invite(steps):
        invited.append(steps)
        if len(invited) == 1:
            return []
        assert not found._link._lost
        for message in (Enlisted("run", None), Pong("run"), Joined("run")):
            found._link._hear("a", message)
        return ["a"]

    found._link.lose("a")
    found._link.invite = invite
    found._link.call = lambda group: None
    set_timeouts(monkeypatch, 0.005, leader_module)
    assert found._form(0).addresses == ("a",)
    assert invited == [0, 0]


def test_a_training_that_has_begun_waits_for_enough_workers(monkeypatch):
    found, invited = leading(GradientCoding(stragglers=1), 2), []

    def invite(steps):
        invited.append("ab"[: len(invited) + 1])
        messages = [Enlisted("run", None)]
        if len(invited) == 2:
            messages += Pong("run"), Joined("run")
        for message in messages:
            for address in invited[-1]:
                found._link._hear(address, message)
        return list(invited[-1])

    found._link.invite = invite
    found._link.call = lambda group: None
    set_timeouts(monkeypatch, 0.005, leader_module)
    with captured_logger("distributed.dask_coded") as log:
        assert found._form(1).addresses == ("a", "b")
    assert invited == ["a", "ab"]
    assert "waits for more workers: GradientCoding" in log.getvalue()
    invited.clear()
    with pytest.raises(ValueError, match="needs at least 2 workers, there are 1"):
        found._form(0)


def test_workers_that_a_plan_has_no_place_for_are_named_once_in_the_log():
    found = leading(Squeeze(units=2), 2)

    def invite(steps):
        for address in "abc":
            found._link._hear(address, Enlisted("run", None))
        return ["a", "b", "c"]

    def call(group):
        for address in group.addresses:
            found._link._hear(address, Joined("run"))

    found._link.invite, found._link.call = invite, call
    with captured_logger("distributed.dask_coded") as log:
        for _ in range(2):
            assert len(found._form(0).addresses) == 2
    assert log.getvalue().count("\n") == 1
    assert "Only 2 of 3 workers take part in a training: Squeeze" in log.getvalue()
    assert "there are 3: pass more units." in log.getvalue()


def test_a_training_begins_although_a_worker_is_late_at_first(monkeypatch):
    found, invited = leading(GradientCoding(stragglers=1), 2), []

    def invite(steps):
        invited.append(steps)
        found._link._hear("a", Enlisted("run", None))
        if len(invited) == 2:
            found._link._hear("b", Enlisted("run", None))
            for address in "ab":
                found._link._hear(address, Pong("run"))
                found._link._hear(address, Joined("run"))
        return ["a", "b"]

    found._link.invite = invite
    found._link.call = lambda group: None
    set_timeouts(monkeypatch, 0.005, leader_module)
    assert found._form(0).addresses == ("a", "b")
    assert invited == [0, 0]


def test_a_lost_worker_that_answers_can_join_the_next_group():
    asked = {}

    class Sent:
        def __init__(self, address):
            self._address = address

        def listen(self, run_id, listener):
            asked[self._address] = listener

        def send(self, message):
            assert message == Enlist("run", "training", ("t", 1))

    found = leader(("c", Closed("run")), ("a", Enlisted("run", None)))
    link = found._link
    link._training = group(Star().plan(1)).training
    link._plugin.exchange = SimpleNamespace(channel=Sent)
    assert set(found._enlisted(["a", "c"])[0]) == {"a"}
    link.lose("b")
    link.ask_lost()
    assert asked.keys() == {"b", "c"}
    live = LiveGroup(link, group(Star().plan(1)), 0.0, None, None)
    asked["b"](Enlisted("run", (3, "old")))
    asked["c"](Closed("run"))
    for _ in range(2):
        live._react(link.next_event())
    assert live._joinable == {"b"}


def test_a_stop_that_is_requested_while_a_group_is_formed_is_not_lost():
    worker = SimpleNamespace(address="a", handlers={}, stream_handlers={}, extensions={})
    plugin = TrainingWorkerPlugin()
    plugin.setup(worker)
    found = leader()
    link, sent = found._link, []
    link._training = group(Star().plan(1)).training
    plugin.leaders["t", 1] = lambda message: link._hear("a", message)
    plugin._enough("another")
    assert link.next_event(0) is None
    assert not link.enough
    plugin._enough("training")
    for message in (Pong("run"), Joined("run")):
        link._hear("a", message)
    assert found._all_joined(("a",))
    assert link.enough
    link.send = lambda messages: sent.extend(messages)
    link._hear("a", Closed("run"))
    with pytest.raises(GroupOverError):
        LiveGroup(link, group(Star().plan(1)), 0.0, None, None).run()
    assert HaltTraining("run", 1) in [message for _, message in sent]


def test_the_end_of_an_earlier_leader_leaves_the_present_one(monkeypatch):
    monkeypatch.setattr("dask_coded.training.runtime.link.sync", lambda loop, call: None)
    worker = SimpleNamespace(address="a", handlers={}, stream_handlers={}, extensions={}, loop=None)
    plugin = TrainingWorkerPlugin()
    plugin.setup(worker)
    with Link(plugin, None, ("t", 2)) as present:
        with Link(plugin, None, ("t", 1)):
            pass
        plugin._forget("t", 1)
        assert present.next_event(0) is None
        plugin._standing("t", "b", silent=True)
        assert present.next_event(0).message == Silent("t", "b")
    assert not plugin.leaders


def test_a_leader_asks_until_it_knows_whether_it_leads_or_its_worker_has_closed(monkeypatch):
    answers = []

    def asked(loop, call, callback_timeout):
        status, answer = answers.pop(0)
        link._plugin.worker.status = status
        if answer is None:  # as if the scheduler, or the event loop of the worker, hung
            raise TimeoutError
        return answer

    monkeypatch.setattr("dask_coded.training.runtime.link.sync", asked)
    link = leader()._link
    running = Status.running
    for last, error in (((running, True), None), ((running, False), RunOverError),
                        ((Status.closed, None), TimeoutError)):  # fmt: skip
        answers += [(running, None), (running, None), last]
        with nullcontext() if error is None else pytest.raises(error):
            link.confirm()
        assert not answers


def test_a_group_is_pickled_once_for_all_its_workers(monkeypatch):
    run_now = "dask_coded.training.runtime.link.sync"
    monkeypatch.setattr(run_now, lambda loop, call, *args: asyncio.run(call(*args)))
    link, sent = leader()._link, []
    link._plugin.exchange.check = lambda attempt: None
    link._channels = dict.fromkeys("ab", SimpleNamespace(send=sent.append))
    link.call(group(Star().plan(2)))
    first, second = sent
    assert (first.node, second.node) == (0, 1)
    assert type(first.group) is bytes
    assert first.group is second.group
    assert pickle.loads(first.group).addresses == ("a", "b")


def test_worker_lost_after_it_was_enlisted_is_not_called():
    events = [("a", Enlisted("run", None)), ("a", Closed("run")), ("b", Enlisted("run", None))]
    assert set(leader(*events)._enlisted(["a", "b"])[0]) == {"b"}


def test_workers_that_come_while_a_group_is_formed_can_join_the_next_one():
    joined = [("a", Pong("run")), ("a", Joined("run"))]
    late = [("x", Available("t", "b")), ("c", Enlisted("run", None)), ("d", Enlisted("old", None))]
    found = leader(("a", Enlisted("run", None)), ("x", Available("t", "e")), *late, *joined)
    assert set(found._enlisted(["a"])[0]) == {"a"}
    assert found._all_joined(("a",))
    live = LiveGroup(found._link, group(Star().plan(1)), 0.0, None, None)
    assert live._joinable == {"b", "c", "e"}


def test_worker_stopped_while_another_fetches_its_state_and_joins_the_next_group():
    class Stopped:
        async def coded_trained(self, training: str) -> dict[str, Any]:
            asked.set()
            await asyncio.Event().wait()

    async def run():
        plugin.setup(worker)
        first, second = group(Star().plan(2), 3, sources=("b",)), group(Star().plan(1), 3)
        plugin._handle(Join("old", "t", 0, "training", dumps(first)), answer)
        await asked.wait()
        plugin._handle(Enlist("run", "training"), answer)
        assert answers[1:] == [Enlisted("run", None)]
        plugin._handle(Join("run", "t", 0, "training", dumps(second)), answer)
        await asyncio.gather(*plugin._joining, return_exceptions=True)
        assert answers[2:] == [Pong("run"), Joined("run")]
        assert not plugin._joining

    worker = SimpleNamespace(
        address="a",
        handlers={},
        stream_handlers={},
        extensions={},
        rpc=lambda _: Stopped(),
        status=Status.running,
    )
    plugin, answers, asked = TrainingWorkerPlugin(), [], asyncio.Event()
    answer = answers.append
    asyncio.run(run())


@pytest.mark.parametrize("event", [("x", Silent("t", "a")), ("a", Unreachable("run", "a"))])
@pytest.mark.parametrize("others", ["finish", "are lost"])
def test_worker_gone_after_the_last_step_before_it_sends_its_state(others, event):
    done = [("a", StepsFinished("run", 100, "same"))]
    events = [event]
    if others == "finish":
        events = [("b", StepsFinished("run", 100, "same")), *events]
        state = {"version": 100, "parameters": "b's", "optimizer": "large", "losses": [1.0]}
        events += [("b", ReplicaState("run", 100, pickle.dumps(state)))]
    else:
        events = [("b", Closed("run")), *events]
    link = leader(*events)._link
    asked = []
    link.send = lambda messages: asked.extend(messages)
    live = LiveGroup(link, group(Star().plan(2), 99), 0.0, None, lambda losses: losses)
    if others == "finish":
        outcome = live._outcome(*done[0])
        # The client needs no more of the state.
        assert vars(outcome) == {
            "parameters": "b's",
            "version": 100,
            "history": [1.0],
            "digests": dict.fromkeys("ab", "same"),
        }
        assert asked == [("a", SendState("run")), ("b", SendState("run"))]
    else:
        with pytest.raises(GroupOverError):
            live._outcome(*done[0])
        assert link._lost == {"a"}


def test_worker_that_cannot_send_the_final_state_ends_the_training():
    link = leader(("a", Failed("run", dumps(MemoryError("of a")))))._link
    link.send = lambda messages: None
    live = LiveGroup(link, group(Star().plan(1), 99), 0.0, None, lambda losses: losses)
    with pytest.raises(MemoryError, match="of a"):
        live._outcome("a", StepsFinished("run", 100, "same"))


def live_group(aggregation, count):
    """Return the link of a leader, and the group that it leads."""
    link, members = leader()._link, group(aggregation.plan(count))
    members.training.aggregation, members.training.workers = aggregation, None
    return link, LiveGroup(link, members, 0.0, None, None)


@pytest.mark.parametrize(
    ("aggregation", "count", "stopped", "left"),
    [
        (GradientCoding(stragglers=1), 4, "b", ""),
        (GradientCoding(stragglers=1), 4, "cd", "cd"),
        (Ring(), 4, "b", "b"),
        (GradientCoding(stragglers=1), 2, "ab", ""),  # no other group could go on
    ],
    ids=repr,
)
def test_workers_stopped_in_a_step(aggregation, count, stopped, left):
    link, live = live_group(aggregation, count)

    def fall_silent():
        for address in stopped:
            live._react(Event("x", Silent("t", address)))

    if left:
        with pytest.raises(GroupOverError):
            fall_silent()
    else:
        fall_silent()
    assert link._lost == set(left)


def test_the_worker_that_sends_states_for_checkpoints_is_replaced_when_it_is_silent():
    link, live = live_group(GradientCoding(stragglers=1), 4)
    live._react(Event("x", Silent("t", "a")))
    live._group.training.checkpoint = "file", 100
    with pytest.raises(GroupOverError):
        live._react(Event("x", Silent("t", "a")))
    assert link._lost == {"a"}


def test_after_the_last_step_no_other_group_is_formed():
    """It would only fetch data, some of which may be lost with a worker."""
    live = live_group(GradientCoding(stragglers=1), 4)[1]
    live._batches = SimpleNamespace(count=lambda step: 1)
    live._report_ended = lambda step, norm: None
    live._leaving = True
    live._version = 99
    live._end(Step(99, 1.0), 1.0)
    live._group.training.steps = 102
    with pytest.raises(GroupOverError):
        live._end(Step(100, 1.0), 1.0)


def test_the_next_worker_sends_states_for_checkpoints_when_the_first_is_lost():
    link, live = live_group(GradientCoding(stragglers=1), 2)
    live._group.training.checkpoint = "file", 1
    sent = []
    link.send = sent.extend
    live._react(Event("a", Closed("run")))
    assert ("b", SkipNode("run", 0, unread=False)) in sent
    answers = []
    second = trainer(Star().plan(2), Counter(), node=1, answer=answers.append)
    second.group.training.wants_state = lambda version: True
    second._checkpoint()
    assert not answers
    second.skip(0, unread=False)
    second._checkpoint()
    assert [type(answer) for answer in answers] == [ReplicaState]


def test_a_worker_that_has_too_many_sums_to_read_is_given_up():
    with dask.config.set({"coded.train.backlog": "1 kB"}):
        link, live = live_group(GradientCoding(stragglers=1), 4)
    given, sent = [], []
    link.give_up, link.send = given.append, sent.extend
    for address in "bcd":
        live._react(Event(address, StepProgress("run", 2 * READ_EVERY)))
    live._give_up(2 * READ_EVERY, 10**6)
    assert not given  # however large sums are, a worker may be so many behind
    live._give_up(2 * READ_EVERY + 1, 10**6)
    assert given == ["a"]
    assert ("b", SkipNode("run", 0, unread=True)) in sent


@pytest.mark.parametrize("unread", [False, True])
def test_the_channel_to_a_lost_worker_is_broken_only_if_that_does_not_read(unread):
    """Others may use it, too, and the worker may be well."""
    calls = []
    channel = SimpleNamespace(
        listen=lambda run, listener: calls.append("listen"),
        unlisten=lambda run: calls.append("unlisten"),
        abort=lambda: calls.append("abort"),
        post=lambda message: calls.append("post"),
    )
    found = trainer(Star().plan(2), Counter())
    found._peers._exchange = SimpleNamespace(channel=lambda address: channel)
    found._peers.post([(1, message(0, 0))])
    found.skip(1, unread)
    found._peers.post([(1, message(1, 0))])
    assert calls == ["listen", "post", "unlisten", *["abort"] * unread]


@pytest.mark.parametrize("status, told", [(Status.running, 1), (Status.closing, 0)])
def test_a_worker_that_closes_does_not_say_that_others_are_lost(status, told):
    """Its own end of their channels closes first."""
    answers = []
    found = trainer(Star().plan(2), Counter(), answer=answers.append)
    found._worker.status = status
    found._peers._heard(1, Closed("run"))
    assert answers == [Unreachable("run", "b")] * told


def test_a_worker_that_joins_replaces_one_that_is_silent():
    _, live = live_group(GradientCoding(stragglers=1), 4)
    live._react(Event("x", Silent("t", "d")))
    live._react(Event("x", Available("t", "e")))
    assert live._could_grow()
    # A member that answers again does so, too, once another one has come in its place.
    assert live._joinable == {"e"}


def test_new_workers_replace_those_that_a_step_waits_for():
    link, live = live_group(GradientCoding(stragglers=1), 2)
    for address in "ab":
        live._react(Event("x", Silent("t", address)))
    live._react(Event("x", Available("t", "c")))
    with pytest.raises(GroupOverError):
        live._react(Event("x", Available("t", "d")))
    assert link._lost == {"a", "b"}


def test_a_step_that_waits_for_workers_that_were_given_up_is_left():
    _, live = live_group(GradientCoding(stragglers=1), 4)
    live._absent = {0, 1}  # all that have one part
    with pytest.raises(GroupOverError):
        live._react(Event("x", Available("t", "e")))


def test_a_worker_with_the_same_version_but_other_sums_takes_the_state_of_a_source():
    peer = Peer({"version": 3, "where": "there"})
    before = trainer(Star().plan(2), Counter())
    before.replica.version = 3
    _, joined = join(peer, ("b",), before)
    assert joined.replica.where == "there"
    _, joined = join(peer, ("b", "a"), before)
    assert joined.replica.where == "here"
