"""The trainings that a worker takes part in, and those that are led from it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.protocol.pickle import dumps

from dask_coded.runtime.channels import Handler, Message
from dask_coded.runtime.trainer import Trainer, portable
from dask_coded.runtime.training_spec import Group, Replica

if TYPE_CHECKING:
    from dask_coded.runtime.worker import CodedWorkerPlugin


class Memberships:
    """What the worker plugin has to do with trainings.

    A group is formed in two rounds of messages. Whoever answers to ``enlist`` ends its part in an
    earlier group and tells how far it is. Whoever is told to ``join`` makes itself a replica, in
    the most advanced state of all, and says when that is done. Then all are told to ``begin``.

    Attributes
    ----------
    trainers : dict of str to Trainer
        This worker's part in each training.
    leaders : dict of Key to callable
        What tells the leader of a task on this worker that it is cancelled.
    """

    #: What messages of trainings ask for.
    OPS = frozenset({"enlist", "join", "begin", "hop", "halt", "skip"})

    def __init__(self, plugin: CodedWorkerPlugin) -> None:
        self.trainers: dict[str, Trainer] = {}
        self.leaders: dict[Key, Callable[[Message], None]] = {}
        self._plugin = plugin
        self._tasks: dict[str, Key] = {}
        self._joining: set[asyncio.Task[None]] = set()
        plugin.worker.handlers["coded_trained"] = self.state
        plugin.worker.stream_handlers["coded-enough"] = self._enough

    def handle(self, message: Message, answer: Handler) -> None:
        """Act on a message of a leader, or of another worker of a group."""
        op, run = message["op"], message["run"]
        if op == "hop":
            for trainer in self.trainers.values():
                if trainer.group.run == run:
                    trainer.hop(message)
        elif op == "enlist":
            member = self.trainers.get(message["training"])

            def tell(version: int) -> None:
                # After as many updates replicas are the same if they were in the same group.
                state = member and (version, member.group.run)
                answer({"op": "enlisted", "run": run, "state": state})

            if member:
                member.retire(tell)
            else:
                tell(0)
        elif op == "join":
            task = asyncio.create_task(self._join(message, answer))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)
            answer({"op": "joining", "run": run})
        else:
            for trainer in self.trainers.values():
                if trainer.group.run != run:
                    continue
                if op == "begin":
                    trainer.begin()
                elif op == "skip":
                    trainer.skip(message["node"])
                else:
                    trainer.halt(message["version"])

    async def _join(self, message: Message, answer: Handler) -> None:
        group: Group = message["payload"]
        training, task = group.training, message["task"]
        previous = self.trainers.get(training.id)
        own = self._plugin.worker.address
        run = asyncio.get_running_loop().run_in_executor
        state = None
        try:
            if own in group.sources:
                state = (await self.state(training.id))["state"]
            elif group.sources:
                source = group.sources[0]
                try:
                    rpc = self._plugin.worker.rpc(source)
                    state = (await rpc.coded_trained(training=training.id))["state"]
                except OSError:
                    answer({"op": "unreachable", "run": group.run, "worker": source})
                    return
            replica = await run(None, _replica, group, state)
        except Exception as exc:
            answer({"op": "failed", "run": group.run, "error": portable(exc, own)})
            return
        if self._plugin.is_forgotten(task):
            return
        if previous is not None:
            previous.stop()
        self.trainers[training.id] = Trainer(
            self._plugin, group, message["node"], replica, answer, previous
        )
        self._tasks[training.id] = task
        answer({"op": "joined", "run": group.run})

    async def state(self, training: str) -> dict[str, Any]:
        """Handler: the pickled state of this worker's replica, which does not change just now."""
        replica = self.trainers[training].replica
        run = asyncio.get_running_loop().run_in_executor
        return {"state": await run(None, dumps, replica.state())}

    def leader_gone(self, answer: Handler) -> None:
        """A channel is closed: what its leader led waits for another one."""
        for trainer in self.trainers.values():
            if trainer.answer is answer:
                trainer.stop()

    def forget(self, task: Key) -> None:
        """The task of a leader is over, or cancelled: nothing of its training is wanted."""
        if tell := self.leaders.get(task):
            tell({"op": "cancelled"})
        for training in [t for t, of in self._tasks.items() if of == task]:
            del self._tasks[training]
            self.trainers.pop(training).stop()

    def _enough(self, training: str) -> None:
        """Stream handler: the client has seen enough of a training."""
        for trainer in self.trainers.values():
            if trainer.group.training.id == training:
                trainer.answer({"op": "enough", "run": trainer.group.run})

    def close(self) -> None:
        """The worker is closing."""
        for task in list(self.leaders):
            self.leaders[task]({"op": "cancelled"})
        for trainer in self.trainers.values():
            trainer.stop()
        self.trainers.clear()


def _replica(group: Group, state: bytes | None) -> Replica:
    replica: Replica = pickle.loads(group.training.model).replica(
        group.plan.parts, group.plan.segments
    )
    if state is not None:
        replica.restore(pickle.loads(state))
    return replica
