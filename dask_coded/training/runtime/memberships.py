"""The worker plugin of trainings: in which groups a worker takes part, and which it leads."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol import to_serialize
from distributed.protocol.pickle import dumps

from dask_coded.compat import WORKER_ANY_RUNNING
from dask_coded.runtime.messages import Failed
from dask_coded.training.runtime.messages import (
    BeginSteps,
    Enlist,
    Enlisted,
    HaltTraining,
    Join,
    Joined,
    NodeMessage,
    SendState,
    SkipNode,
    Unreachable,
)
from dask_coded.training.runtime.spec import Group, Replica
from dask_coded.training.runtime.trainer import Trainer, failure
from dask_coded.transport import Answer, Exchange
from dask_coded.transport.exceptions import logged
from dask_coded.transport.messages import Attempt, Message, Pong

if TYPE_CHECKING:
    from distributed.worker import Worker

#: Name under which the plugins of trainings register.
NAME = "dask-coded-training"


# -- messages that a leader's own worker hands over, by the leader's task; they never travel -------


@dataclass(frozen=True)
class Cancelled(Message, travels=False):
    """The leader's task is cancelled, or another worker has taken it over."""


@dataclass(frozen=True)
class Silent(Message, travels=False):
    """A worker that was asked to take part gives no sign of life."""

    address: str


@dataclass(frozen=True)
class Available(Message, travels=False):
    """A worker has joined the cluster, or a silent worker answers again."""

    address: str


@dataclass(frozen=True)
class StopRequested(Message, travels=False):
    """The client wants a training to end soon; leaders of other trainings do not care."""

    training: str


class TrainingWorkerPlugin(WorkerPlugin):
    """Takes part in the trainings that tasks on other workers lead.

    A group is formed in two rounds of messages. A worker that answers :class:`Enlist` ends its part
    in an earlier group and reports how far along it is. A worker that receives :class:`Join`
    creates its replica, in the most advanced state of all workers, and reports when that is done.
    Then all workers of the group receive :class:`BeginSteps`.

    Attributes
    ----------
    trainers : dict of str to Trainer
        This worker's part in each training.
    leaders : dict of Attempt to callable(Message)
        By the run of the leader's task, how to hand a message to a leader on this worker.
    """

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.exchange = Exchange.of(worker)
        self.trainers: dict[str, Trainer] = {}
        self.leaders: dict[Attempt, Callable[[Message], None]] = {}
        # By training, the run of its leader's task.
        self._led: dict[str, Attempt] = {}
        # What this worker does to join groups, and of which trainings they are.
        self._joining: dict[asyncio.Task[None], str] = {}
        self.exchange.register(
            self._handle,
            [Enlist, Join, BeginSteps, SkipNode, HaltTraining, SendState, NodeMessage],
            on_closed=self._leader_gone,
        )
        worker.handlers["coded_trained"] = self.state
        worker.stream_handlers["coded-enough"] = logged(self._enough)
        worker.stream_handlers["coded-standing"] = logged(self._standing)
        worker.stream_handlers["coded-training-over"] = logged(self._forget)
        worker.extensions[NAME] = self

    def teardown(self, worker: Worker) -> None:
        for (task, _), tell in list(self.leaders.items()):
            tell(Cancelled(task))
        for trainer in self.trainers.values():
            # The channel stays open until the worker's tasks have ended.
            trainer.answer(Unreachable(trainer.group.run_id, self.exchange.address))
            trainer.forget()
        self.trainers.clear()

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        """Hook: a task of the worker has changed its state."""
        if finish == "released":  # it was cancelled
            self._tell(key, Cancelled(key))

    def _tell(self, task: Key, message: Message, last: float = math.inf) -> None:
        """Hand a message to the leaders on this worker whose task it is, up to its ``last`` run."""
        for (led, run), tell in list(self.leaders.items()):
            if led == task and run <= last:
                tell(message)

    def _handle(self, message: Message, answer: Answer) -> None:
        """Act on a message of a leader, or of another worker of a group."""
        match message:
            case Enlist(run_id, training, _):
                self._enlist(run_id, training, answer)
            case Join():
                task = asyncio.create_task(self._join(message, answer))
                self._joining[task] = message.training
                task.add_done_callback(self._joining.pop)
                answer(Pong(message.run_id))
            case NodeMessage():
                for trainer in self._of(message.run_id):
                    trainer.receive(message)
            case BeginSteps(run_id):
                for trainer in self._of(run_id):
                    try:
                        trainer.begin()
                    except Exception as exc:  # there can be no more threads
                        answer(Failed(run_id, failure(exc, self.worker.address)))
            case SkipNode(run_id, node, unread):
                for trainer in self._of(run_id):
                    trainer.skip(node, unread)
            case HaltTraining(run_id, version):
                for trainer in self._of(run_id):
                    trainer.halt(version)
            case SendState(run_id):
                for trainer in self._of(run_id):
                    trainer.send_state()

    def _of(self, run_id: Key) -> list[Trainer]:
        return [trainer for trainer in self.trainers.values() if trainer.group.run_id == run_id]

    def _enlist(self, run_id: Key, training: str, answer: Answer) -> None:
        for joining, joined in self._joining.items():
            if joined == training:
                # It may wait for the state of a worker that is stopped. If it ended later, it would
                # take this worker out of the new group.
                joining.cancel()
        member = self.trainers.get(training)
        if member is None:
            answer(Enlisted(run_id, None))
            return
        last = member.group.run_id

        def retired(version: int) -> None:
            if member.failure is None:
                answer(Enlisted(run_id, (version, last)))
            else:  # the leader may have missed it, because it was about to form this group
                answer(Failed(run_id, member.failure))

        member.retire(retired)

    async def _join(self, message: Join, answer: Answer) -> None:
        run_id, own = message.run_id, self.exchange.address
        try:
            await self._take_part(message, answer)
        except Exception as exc:
            if self.worker.status in WORKER_ANY_RUNNING:
                answer(Failed(run_id, failure(exc, own)))
            else:  # what fails is that it closes
                answer(Unreachable(run_id, own))

    async def _take_part(self, message: Join, answer: Answer) -> None:
        run_id, training = message.run_id, message.training
        previous = self.trainers.get(training)
        own = self.exchange.address
        group: Group = await asyncio.to_thread(pickle.loads, message.group)
        state = group.state
        if own in group.sources:
            state = await self._packed(training)
        elif group.sources:
            source = group.sources[0]
            try:
                rpc = self.worker.rpc(source)
                state = (await rpc.coded_trained(training=training))["state"]
            except OSError:
                answer(Unreachable(run_id, source))
                return
        replica = await asyncio.to_thread(_replica, group, state)
        if self.worker.status not in WORKER_ANY_RUNNING:
            answer(Unreachable(run_id, own))
            return
        led = message.attempt or (message.task, -1)
        if not self.exchange.attempts.admits(led):
            return  # it is over meanwhile
        if previous is not None:
            previous.stop()
        self.trainers[training] = Trainer(
            self.worker, self.exchange, group, message.node, replica, answer, previous
        )
        self._led[training] = led
        answer(Joined(run_id))

    async def state(self, training: str) -> dict[str, Any]:
        """Handler: send the pickled state of this worker's replica, which must not change now."""
        # As a frame: plain bytes would be copied on the event loop, and may have 4 GiB at most.
        return {"state": to_serialize(await self._packed(training))}

    async def _packed(self, training: str) -> bytes:
        if training not in self.trainers:  # this worker closes
            raise OSError(f"There is no replica of training {training}.")
        replica = self.trainers[training].replica
        packed: bytes = await asyncio.to_thread(dumps, replica.state())
        return packed

    def _leader_gone(self, answer: Answer) -> None:
        """Stop the trainers of a leader whose channel has closed; they wait for another leader."""
        for trainer in self.trainers.values():
            if trainer.answer is answer:
                trainer.stop()

    def _forget(self, task: Key, run: int) -> None:
        """Stream handler: a run of a leader's task has ended, or is cancelled."""
        # A task whose result was lost runs again, and must find its workers.
        self.exchange.attempts.end((task, run))
        self._tell(task, Cancelled(task), run)
        # A later run may have come before this message, through another connection.
        for training, led in list(self._led.items()):
            if led[0] == task and led[1] <= run:
                del self._led[training]
                self.trainers.pop(training).forget()

    def _standing(self, task: Key, address: str, silent: bool) -> None:
        """Stream handler: a worker that may be in a leader's training is silent, or available."""
        self._tell(task, Silent(task, address) if silent else Available(task, address))

    def _enough(self, training: str) -> None:
        """Stream handler: the client wants a training to end soon."""
        # Not by way of the workers, whose answers count for nothing while a group is formed.
        for (task, _), tell in list(self.leaders.items()):
            tell(StopRequested(task, training))


def training_plugin(worker: Worker) -> TrainingWorkerPlugin:
    """Return the plugin of a worker."""
    plugin = worker.extensions[NAME]
    assert isinstance(plugin, TrainingWorkerPlugin)
    return plugin


def _replica(group: Group, state: bytes | None) -> Replica:
    replica: Replica = pickle.loads(group.training.model).replica(
        group.plan.parts, group.plan.segments
    )
    if state is not None:
        replica.restore(pickle.loads(state))
    return replica
