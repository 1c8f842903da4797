"""A worker's part in a training: one thread computes, one communicates.

The computation thread computes gradients and applies updates to its replica. The communication
thread runs the machines of :mod:`dask_coded.aggregation`, one for each step that is not over yet,
and does all their vector arithmetic. The worker's event loop only moves bytes.

A message of a step that is over is dropped. Between any two parts of the data the computation
thread checks whether the step has ended without it. If so, it gives up, applies all sums that have
come meanwhile, and goes on with the newest step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import dumps
from distributed.utils import sync

from dask_coded.aggregation import (
    ROOT,
    Command,
    Compute,
    ComputeUnit,
    Finished,
    Machine,
    Send,
    SqueezeMachine,
    Tag,
)
from dask_coded.aggregation.steps import KEPT
from dask_coded.compat import WORKER_ANY_RUNNING
from dask_coded.compression import Partial
from dask_coded.runtime.messages import Failed
from dask_coded.training.runtime.messages import (
    NodeMessage,
    ReplicaState,
    StepProgress,
    StepsFinished,
)
from dask_coded.training.runtime.norms import norm_of
from dask_coded.training.runtime.peers import Peers
from dask_coded.training.runtime.shards import KeptParts, fetch_parts, runs
from dask_coded.training.runtime.spec import Group, Replica
from dask_coded.transport import Answer, Exchange
from dask_coded.transport.exceptions import portable

if TYPE_CHECKING:
    from distributed.worker import Worker

#: Steps between two reports of a worker to the leader that it reads its messages.
READ_EVERY = 8


class Trainer:
    """A worker's part in one group.

    Parameters
    ----------
    worker : Worker
    exchange : Exchange
        Of the worker.
    group : Group
    node : int
        The number of this worker in the group's plan.
    replica : Replica
        In the state that the group starts with.
    answer : callable(Message)
        Sends a message to the leader; may be called from any thread.
    previous : Trainer or None
        This worker's stopped part in the previous group, which may still compute its last gradient.
    """

    def __init__(
        self,
        worker: Worker,
        exchange: Exchange,
        group: Group,
        node: int,
        replica: Replica,
        answer: Answer,
        previous: Trainer | None = None,
    ) -> None:
        self.group = group
        self.replica = replica
        self.answer = answer
        #: The error with which an update has failed, pickled. The replica may be half updated then.
        self.failure: bytes | None = None
        self._worker = worker
        self._node = node
        self._peers = Peers(worker, exchange, group, node, answer)
        training = group.training
        # What the worker has of the data: another group needs much of the same.
        self._parts = KeptParts(training.samples, training.targets)
        if previous is not None and previous._parts.serve(training.samples, training.targets):
            self._parts = previous._parts
        # A group that was never begun computes nothing, but the one before it may still compute.
        while previous is not None and previous._threads[0].ident is None:
            previous = previous._previous
        self._previous: Trainer | None = previous
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Used by the communication thread alone.
        self._machines: dict[int, Machine] = {}
        self._segments: dict[int, dict[int, Partial]] = {}
        # Machines of the last steps whose parts were dealt, for workers that miss the sum.
        self._kept: dict[int, SqueezeMachine] = {}
        self._choices = {group.version: group.choice}
        # Shared by both threads. Updates are applied under its lock and may take long, so the event
        # loop never takes it.
        self._changed = threading.Condition()
        self._works: deque[tuple[int, Compute | ComputeUnit]] = deque()
        self._totals: dict[int, list[Any]] = {}
        self._begun = group.version - 1
        # Whether the machine has yet to say what to compute in the step that was started.
        self._asked = False
        self._stopped = False
        # Whether the computation thread fetches data or computes a gradient.
        self._busy = True
        # The number of updates at which the training ends.
        self._end = group.training.steps
        self._threads: list[threading.Thread] = [
            threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
            for target, name in (
                (self._compute, "Coded-train-computation"),
                (self._communicate, "Coded-train-communication"),
            )
        ]

    # -- from the event loop -------------------------------------------------------------------

    def begin(self) -> None:
        """Start both threads, once all workers of the group have joined."""
        for thread in self._threads:
            thread.start()

    def receive(self, message: NodeMessage) -> None:
        """Take a message from another node's machine."""
        self._events.put(lambda: self._received(message))

    def skip(self, node: int, unread: bool) -> None:
        """Send nothing more to a node; if it does not read, break the channel to it."""
        if node == self._node and unread:  # its leader, on the same worker, closes no channel
            self.stop()
        self._peers.skip(node, unread)

    def halt(self, version: int) -> None:
        """End the training after ``version`` updates, or as soon as possible after."""
        self._events.put(lambda: self._halt(version))

    def send_state(self) -> None:
        """Send the state of the replica, which has seen its last update, to the leader."""
        self._events.put(self._send_state)

    def retire(self, tell: Callable[[int], None]) -> None:
        """End both threads soon, after all sums that have come in are applied.

        Parameters
        ----------
        tell : callable(int)
            Called, in a thread, with the number of updates that have been applied; there will be no
            more.
        """
        if self._stopped or not self._threads[1].is_alive():
            self.stop(tell)
        else:
            self._events.put(lambda: self._retire(tell))

    def stop(self, tell: Callable[[int], None] = lambda version: None) -> None:
        """End both threads soon, at the latest after the present update.

        Parameters
        ----------
        tell : callable(int), optional
            As in :meth:`retire`.
        """
        self._stopped = True
        settle = threading.Thread(
            target=self._settle, args=(tell,), name="Coded-train-end", daemon=True
        )
        settle.start()
        self._events.put(None)
        self._peers.leave()

    def forget(self) -> None:
        """Stop because the training is over, and drop its data."""
        self.stop()
        self._parts.close()

    def wait(self) -> None:
        """Wait until the computation thread of a stopped trainer has ended."""
        if self._threads[0].ident is not None:
            self._threads[0].join()

    # -- threads -------------------------------------------------------------------------------

    def _settle(self, tell: Callable[[int], None]) -> None:
        """Wake the computation thread of a stopped trainer once no update is being applied."""
        with self._changed:
            self._totals.clear()
            self._changed.notify_all()
        tell(self.replica.version)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:  # any exception would leave the other workers waiting forever
            # What fails on a worker that closes is no error: the worker is about to be lost.
            if not self._stopped and self._worker.status in WORKER_ANY_RUNNING:
                error = self.failure or failure(exc, self._worker.address)
                self.answer(Failed(self.group.run_id, error))

    def _over(self, step: int) -> bool:
        """Whether this node has the sum of a step, or does not need it any more."""
        return self._stopped or step < self.replica.version or step in self._totals

    # -- the computation thread ----------------------------------------------------------------

    def _compute(self) -> None:
        if self._previous is not None:
            self._previous.wait()
            self._previous = None
        # A finished training needs no data, and some of them may be lost.
        data = self._fetch() if self.replica.version < self._end else {}
        while (task := self._next()) is not None:
            step, work = task
            if isinstance(work, ComputeUnit):
                self._work_on_unit(step, work, data)
            else:
                self._work(step, work, data)
        if self.replica.version >= self._end:
            self._parts.only(())  # as soon as nothing is to be computed

    def _fetch(self) -> dict[int, tuple[Any, Any]]:
        training, worker = self.group.training, self._worker
        avoid: set[str] = set()
        edges = {part: self.replica.part(part) for part in self.group.plan.stored[self._node]}
        found = self._parts.only(edges.values())
        for run in runs([part for part, own in edges.items() if own not in found]):
            if self._stopped:
                break
            wanted = [edges[part] for part in run]
            rows = [
                sync(worker.loop, fetch_parts, worker, blocks, wanted, avoid)
                for blocks in (training.samples, training.targets)
            ]
            new = dict(zip(wanted, zip(*rows, strict=True), strict=True))
            self._parts.add(new)
            found |= new
        return {part: found[own] for part, own in edges.items() if own in found}

    def _next(self) -> tuple[int, Compute | ComputeUnit] | None:
        """Return what to compute next; apply updates while waiting for it."""
        with self._changed:
            self._busy = False
            while not self._stopped:
                while self._works:
                    step, work = self._works.popleft()
                    # Work of an earlier step is dropped: its parameters are gone.
                    if not self._over(step) and step == self._begun:
                        self._asked, self._busy = False, True
                        return step, work
                if self._advance():
                    # By the other thread, which may still be about to report the last step.
                    self._events.put(self._finish)
                    break
                self._changed.wait()
            return None

    def _advance(self) -> bool:
        """Apply the updates that the next step needs and start it; return whether all are done."""
        replica, group = self.replica, self.group
        if self._asked and not self._over(self._begun):
            return False
        ready = self._ready()
        step = max(self._begun + 1, ready)
        last = step >= self._end
        wanted = ready if last else group.begins_with(step)
        if wanted > ready:
            return False
        self._apply(wanted)
        if not last:
            self._begun, self._asked = step, True
            self._events.put(lambda: self._begin(step))
        return replica.version >= self._end

    def _ready(self) -> int:
        """Return the number of updates after applying all sums that have come in."""
        ready = self.replica.version
        while ready in self._totals:
            ready += 1
        return ready

    def _apply(self, version: int, beside: bool = False) -> None:
        """Apply sums; ``beside`` says that a gradient may be computed with the old parameters."""
        while self.replica.version < version and not self._stopped:
            step = self.replica.version
            totals = self._totals[step]
            try:
                gradient = self.replica.apply(totals, beside)
            except BaseException as exc:
                self.failure = failure(exc, self._worker.address)
                raise
            # Not earlier, because without its sum the other thread would consider the step open.
            del self._totals[step]
            if self.group.plan.dealt:
                # Any worker may be lost, so all of them say it.
                loss, norm = sum(total.loss for total in totals), norm_of([gradient])
                self.answer(StepProgress(self.group.run_id, step, None, loss, norm))
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Send the state to the leader every few updates, if this is the first worker left."""
        if self._peers.speaks and self.group.training.wants_state(self.replica.version):
            self._send_state()

    def _send_state(self) -> None:
        training = self.group.training
        state = {**self.replica.state(), "training": training.id, "setup": training.setup}
        self.answer(ReplicaState(self.group.run_id, state["version"], dumps(state)))

    def _finish(self) -> None:
        replica = self.replica
        self.answer(StepsFinished(self.group.run_id, replica.version, replica.digest()))

    def _work(self, step: int, work: Compute, data: dict[int, tuple[Any, Any]]) -> None:
        """Compute this worker's part of a step, unless the step ends without it."""
        began = perf_counter()
        total: Partial | None = None
        for part, coefficient in zip(work.parts, work.coefficients, strict=True):
            if self._over(step):
                return
            partial = Partial(*self.replica.gradient(step, part, *data[part]))
            if total is None:
                total = partial
                if coefficient != 1:
                    total.vector *= total.vector.dtype.type(coefficient)
                    total.loss *= coefficient
            else:
                total.add(partial, coefficient)
        assert total is not None
        seconds = perf_counter() - began
        self.answer(StepProgress(self.group.run_id, step, seconds))
        for segment, vector in enumerate(np.array_split(total.vector, self.group.plan.segments)):
            # The loss travels with the first segment.
            loss = 0.0 if segment else total.loss
            with self._changed:
                if self._over(step):
                    return
                vector = self.replica.compress(step, segment, vector)
            self._events.put(self._contribution(step, work, segment, Partial(vector, loss)))

    def _work_on_unit(self, step: int, work: ComputeUnit, data: dict[int, tuple[Any, Any]]) -> None:
        """Compute the gradient of a unit, and have the other thread add it."""
        began = perf_counter()
        found = self.replica.unit(step, work.unit, *data[work.unit], work.grid)
        seconds = perf_counter() - began

        def add() -> None:
            if not self._over(step):
                machine = self._machine(step)
                assert isinstance(machine, SqueezeMachine)
                self._carry_out(step, machine.computed_unit(work, found, seconds))

        self._events.put(add)

    def _contribution(
        self, step: int, work: Compute, segment: int, partial: Partial
    ) -> Callable[[], None]:
        def contribute() -> None:
            if not self._over(step):
                self._carry_out(step, self._machine(step).computed(work, segment, partial))

        return contribute

    # -- the communication thread --------------------------------------------------------------

    def _communicate(self) -> None:
        while (event := self._events.get()) is not None:
            event()
        self._machines.clear()
        self._kept.clear()

    def _halt(self, version: int) -> None:
        with self._changed:
            self._end = min(self._end, max(version, self._begun + 1))
            self._changed.notify_all()

    def _retire(self, tell: Callable[[int], None]) -> None:
        with self._changed:
            # A gradient that is being computed with these parameters is not needed any more.
            if self.failure is None:
                with suppress(Exception):  # the failure is kept, and `tell` reports it
                    self._apply(self._ready())
            # A sum that came in after this would make the state differ from the reported one.
            self._stopped = True
        self._worker.loop.add_callback(self.stop)
        tell(self.replica.version)

    def _machine(self, step: int) -> Machine:
        if step not in self._machines:
            choice = self._choices.get(self.group.begins_with(step), ())
            codec = self.group.training.codec
            self._machines[step] = self.group.plan.machine(self._node, choice, codec)
        return self._machines[step]

    def _begin(self, step: int) -> None:
        if not self._over(step):
            self._carry_out(step, self._machine(step).begin())

    def _received(self, message: NodeMessage) -> None:
        step, choice, tag = message.step, message.choice, Tag(*message.tag)
        if self._over(step):
            if (kept := self._kept.get(step)) is not None:
                self._carry_out(step, kept.received(message.sender, tag, message.payload))
            return
        if choice is not None:
            self._choices[step + 1] = tuple(choice)
        commands = self._machine(step).received(message.sender, tag, message.payload)
        self._carry_out(step, commands, choice)

    def _carry_out(self, step: int, commands: Iterable[Command], choice: Any = None) -> None:
        sends: list[Send] = []
        for command in commands:
            if isinstance(command, Send) and command.to != ROOT:
                sends.append(command)
                continue
            self._send(step, sends, choice)  # others wait for it
            sends = []
            if isinstance(command, Send):
                self.answer(self._message(step, command, choice))
            elif isinstance(command, Compute | ComputeUnit):
                with self._changed:
                    self._works.append((step, command))
                    self._changed.notify_all()
            elif isinstance(command, Finished):
                self._finished(step, command)
            else:
                self._have(step, [command.total])
        self._send(step, sends, choice)

    def _finished(self, step: int, command: Finished) -> None:
        segments = self._segments.setdefault(step, {})
        segments[command.segment] = command.total
        if len(segments) == self.group.plan.segments:
            self._have(step, [segments[i] for i in range(len(segments))])

    def _have(self, step: int, totals: list[Any]) -> None:
        """Take the sum of a step."""
        with self._changed:
            self._totals[step] = totals
            if self._busy and self._over(self._begun):
                # The gradient that is being computed, if any, is of no use any more. Do not let
                # sums pile up until it is done.
                self._apply(self.group.begins_with(self._ready()), beside=True)
            self._changed.notify_all()
        machine = self._machines.pop(step)
        self._segments.pop(step, None)
        if isinstance(machine, SqueezeMachine):
            self._kept[step] = machine
            # A worker that misses the sum may ask for it. Sums may come in any order.
            for old in [s for s in self._kept if s <= max(self._kept) - KEPT]:
                del self._kept[old]
            return
        if step % READ_EVERY == 0:
            self.answer(StepProgress(self.group.run_id, step))
        self._choices.pop(self.group.begins_with(step + 1) - 1, None)
        if self._node == 0 and not self.group.plan.rooted:
            loss = sum(total.loss for total in totals)
            norm = norm_of([total.vector for total in totals], self.group.training.averages)
            self.answer(StepProgress(self.group.run_id, step, None, loss, norm))

    def _send(self, step: int, commands: Sequence[Send], choice: Any) -> None:
        if commands:
            self._peers.send([(c.to, self._message(step, c, choice)) for c in commands])

    def _message(self, step: int, command: Send, choice: Any) -> NodeMessage:
        return node_message(self.group.run_id, step, self._node, command, choice)


def failure(exc: BaseException, address: str) -> bytes:
    """Pickle an exception that was raised on a worker, with a note that says where."""
    return portable(exc, f"in the training on worker {address}")


def node_message(
    run_id: str, step: int, sender: int, command: Send, choice: tuple[int, ...] | None
) -> NodeMessage:
    """Return the message that carries out a machine's command to send."""
    return NodeMessage(run_id, step, sender, command.tag, command.payload, choice)
