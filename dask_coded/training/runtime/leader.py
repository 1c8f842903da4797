"""The leader of a training: forms its groups, and starts another one when a worker is lost.

It runs in a task. It has no parameters, because every worker of the group has a replica. A
:class:`~dask_coded.loop.Loop` keeps its recent history on other workers. If it is lost with its
worker, another leader asks all workers how far along they are, and goes on with the most advanced.

A worker whose channel closes is lost. If the code can do without it, the others first end the
steps in flight. Then a new group is formed, without the lost worker and with those that have joined
the cluster meanwhile. The lost worker is asked once more, because perhaps only a connection has
broken. A worker that is only slow, or stopped, stays in the group, because the sums wait for it
until it reads them. If the steps cannot end without a stopped worker, which the scheduler's
supervisor reports, a new group is formed without it, until it answers again.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from time import monotonic

import numpy as np
from distributed import get_worker

from dask_coded.aggregation.formation import check_memory, form, refusal
from dask_coded.compat import current_key
from dask_coded.config import timeouts
from dask_coded.loop import Loop, Progress
from dask_coded.prediction import SpeedHistory
from dask_coded.runtime.messages import Failed
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.training.runtime.group import GroupOverError, LiveGroup
from dask_coded.training.runtime.link import Link
from dask_coded.training.runtime.memberships import Silent, TrainingWorkerPlugin, training_plugin
from dask_coded.training.runtime.messages import Enlisted, Joined, Unreachable
from dask_coded.training.runtime.scores import Scores
from dask_coded.training.runtime.spec import RECENT, Group, Outcome, Step, Training
from dask_coded.training.runtime.storage import (
    CheckpointWriter,
    StateTaker,
    check_folder,
    check_not_there,
    saved,
)
from dask_coded.transport.exceptions import unpacked
from dask_coded.transport.messages import Attempt, Closed, Pong

logger = logging.getLogger("distributed.dask_coded")

# Bytes per second at which a worker gets a model at least, unless it is silent.
_SLOWEST = 2**20


def lead(training: Training, loop: Loop) -> Outcome:
    """Lead a training to its end, as a task."""
    plugin = training_plugin(get_worker())
    attempt = plugin.exchange.attempt(current_key())
    assert attempt is not None
    return Leader(plugin, training, attempt, loop).run()


class History:
    """What the leader has seen of each step.

    Of all but the last :data:`~dask_coded.training.runtime.spec.RECENT` steps it keeps no figures
    of single workers. If it is lost, nothing of earlier steps survives but losses and scores.

    Parameters
    ----------
    loop : Loop
        Reports the steps to the client, and has other workers keep the recent ones.
    steps : int
        The number of updates at which the training ends.
    """

    def __init__(self, loop: Loop, steps: int) -> None:
        self._loop = loop
        self._steps = steps
        # The recent steps, which other workers keep. A whole history would take longer and longer
        # to send, and as much memory as all gradients.
        self._seen: dict[int, Step] = {}
        # Of each step, from 0.
        self._seconds, self._moved = array("d"), array("q")
        # By step, and the last one.
        self._scores: dict[int, float] = {}
        self._score: float | None = None
        # The numbers of updates from which the groups have gone on.
        self._begun: list[int] = []
        self._lock = Lock()
        for step in loop.resume([*self._seen.values()]):
            self._remember(step)

    def ended(self, step: Step, norm: float) -> None:
        """Record a step that has ended, with the norm of its mean gradient."""
        self._remember(step)
        workers = len(step.computing) or None
        loss = None if math.isnan(step.loss) else step.loss
        progress = Progress(step.step + 1, norm, loss, step.seconds, workers, self._score)
        self._loop.report(progress, [*self._seen.values()], step.step + 1 == self._steps)

    def scorer(self, version: int) -> Callable[[float], None]:
        """Return what records the score of the present parameters, after so many updates.

        It may be called later, in any thread. If these parameters are lost by then, because the
        training has gone back to earlier ones, it does nothing.
        """
        groups = len(self._begun)

        def scored(score: float) -> None:
            with self._lock:
                if version <= min(self._begun[groups:], default=version):
                    self._scores[version - 1] = self._score = score
                    if step := self._seen.get(version - 1):
                        step.score = score

        return scored

    def of(self, losses: Sequence[float]) -> list[Step]:
        """Return what was seen of each step, or only its loss where nothing was seen."""
        values = np.asarray(losses).tolist()
        found = [self._seen.get(i) or self._old(i, loss) for i, loss in enumerate(values)]
        for i, score in self._scores.items():
            if i < len(found):  # otherwise it came late, of parameters that are lost
                found[i].score = score
        return found

    def go_back(self, version: int) -> None:
        """Forget scores of parameters that are lost: the training goes on after so many updates."""
        with self._lock:
            self._begun.append(version)
            self._scores = {i: score for i, score in self._scores.items() if i < version}
            self._score = next(reversed(self._scores.values()), None)
            # Another leader would take them from there.
            for step in self._seen.values():
                if step.step >= version:
                    step.score = None

    @property
    def steps(self) -> int:
        """The number of steps up to the last that was seen."""
        return max(self._seen, default=-1) + 1

    def _old(self, step: int, loss: float) -> Step:
        """Return a step of which only loss, seconds and moved units are kept."""
        if step >= len(self._seconds):
            return Step(step, loss)
        return Step(step, loss, seconds=self._seconds[step], moved=self._moved[step])

    def _remember(self, step: Step) -> None:
        missing = step.step + 1 - len(self._seconds)
        self._seconds.extend([math.nan] * missing)
        self._moved.extend([0] * missing)
        self._seconds[step.step], self._moved[step.step] = step.seconds, step.moved
        # A step may be done again, by another group.
        self._seen.pop(step.step, None)
        self._seen[step.step] = step
        if len(self._seen) > RECENT:
            del self._seen[next(iter(self._seen))]
        if step.score is not None:
            self._scores[step.step] = self._score = step.score


class Leader:
    """Leads one training, from the thread of its task."""

    def __init__(
        self, plugin: TrainingWorkerPlugin, training: Training, attempt: Attempt, loop: Loop
    ) -> None:
        self._training = training
        self._loop = loop
        # The version of the last group. That of an earlier leader's is unknown.
        self._reached = math.inf
        # Whether it was said that the plan has no place for some workers.
        self._said = False
        # Of the workers of all groups, to which parts were dealt.
        self._speeds = SpeedHistory()
        self._link = Link(plugin, training, attempt)
        self._plugin, self._task = plugin, attempt[0]
        self._writer: CheckpointWriter | None = None

    def run(self) -> Outcome:
        """Run the training to its end.

        Raises
        ------
        RunOverError
            If it is cancelled, or another worker has taken it over.
        Exception
            What a worker raises.
        """
        takers: list[StateTaker] = []
        with ExitStack() as stack:
            if checkpoint := self._training.checkpoint:
                check_folder(checkpoint[0], self._link.address)
                if self._training.expects_none:
                    check_not_there(checkpoint[0], self._training.id, self._link.address)
                warn = partial(self._plugin.worker.log_event, "warn")  # clients show what comes
                self._writer = CheckpointWriter(*checkpoint, self._link.confirm, warn)
                takers.append(self._writer)
                stack.callback(self._writer.close)
            stack.enter_context(self._link)
            history = History(self._loop, self._training.steps)
            if scoring := self._training.scoring:
                scores = Scores(self._plugin.worker, scoring, history.scorer)
                takers.append(scores)
                stack.callback(scores.close)
            activity = worker_plugin(self._plugin.worker).activity

            def ended(step: Step, norm: float) -> None:
                activity.stepped(
                    self._task,
                    step.step,
                    step.seconds,
                    step.computing,
                    sum(step.units.values()),
                    step.moved,
                )
                history.ended(step, norm)

            while True:
                asked = monotonic()
                group = self._form(history.steps)
                history.go_back(group.version)
                try:
                    outcome = LiveGroup(
                        self._link, group, asked, ended, history.of, self._speeds, takers
                    ).run()
                except GroupOverError:
                    continue
                if self._writer is not None:
                    self._writer.ended()
                return outcome

    def _form(self, steps: int) -> Group:
        training = self._training
        sufficed, waits = bool(steps), ""
        while True:
            candidates = self._link.invite(steps)
            found, late = self._enlisted(candidates)
            if not found:
                # All of them are late, the leader's own among them, or all are paused or lost: ask
                # again. Lost workers may be there after all.
                if not candidates:
                    self._link.ask_lost()
                    self._link.next_event(timeouts().answer)
                continue
            best = max((state for state in found.values() if state is not None), default=(0, ""))
            if late and best[0] < steps:
                continue  # those that have yet to answer may be further: they may be updating
            workers = [address for address in candidates if address in found]
            if known := [address for address in workers if address in self._speeds]:
                # The fastest first; those that are new are fast, as far as is known.
                speeds = dict(zip(known, self._speeds.predict(known).tolist(), strict=True))
                workers.sort(key=lambda address: -speeds.get(address, math.inf))
            if not sufficed:
                form(training.aggregation, candidates)  # raises if the cluster is too small
                sufficed = True
            try:
                plan, addresses = form(training.aggregation, workers)
            except ValueError as exc:
                if waits != (waits := str(exc)):
                    logger.warning("A training waits for more workers: %s", exc)
                self._link.ask_lost()
                self._link.next_event(timeouts().answer)
                continue
            self._say_idle(len(addresses), len(workers))
            if training.remembers:
                check_memory(plan)
            version, state = training.first, None
            sources: tuple[str, ...] = ()
            if best[0] > version:
                version, sources = best[0], tuple(a for a in found if found[a] == best)
            # The most advanced workers may all be lost, and the others far behind.
            if training.checkpoint and best[0] < max(steps, self._reached):
                if self._writer is not None:
                    self._writer.finish()
                kept = saved(training.checkpoint[0], training.id)
                if kept and kept[0] > version:
                    version, state, sources = *kept, ()
            self._reached = version
            group = Group(
                self._link.run_id, training, plan, addresses, version, sources, plan.choose(), state
            )
            self._link.call(group)
            nbytes = len(training.model) + len(state or b"")
            if self._all_joined(addresses, nbytes * len(addresses) / _SLOWEST):
                self._link.ask_lost()
                return group

    def _say_idle(self, taken: int, there: int) -> None:
        """Warn once if a plan for all workers that are there was refused."""
        if taken < there and not self._said:
            self._said = True
            why = refusal(self._training.aggregation, there)
            logger.warning("Only %d of %d workers take part in a training: %s", taken, there, why)

    def _enlisted(
        self, candidates: list[str]
    ) -> tuple[dict[str, tuple[int, str] | None], set[str]]:
        """Return which workers answer, and which have yet to do so.

        Of each worker that answers: the number of updates and the last group.
        """
        waiting = set(candidates)
        found: dict[str, tuple[int, str] | None] = {}
        deadline = monotonic() + timeouts().answer
        while waiting and (event := self._link.next_event(max(deadline - monotonic(), 0))):
            match event.message:
                case Failed(_, error):
                    raise unpacked(error)
                case Enlisted(_, state):
                    found[event.sender] = state
                    waiting.discard(event.sender)
                case Closed():
                    self._link.lose(event.sender)
                    waiting.discard(event.sender)
                    found.pop(event.sender, None)
                case Silent(_, address):
                    waiting.discard(address)
                    found.pop(address, None)
        return found, waiting

    def _all_joined(self, addresses: tuple[str, ...], sending: float = 0.0) -> bool:
        """Wait until all workers are ready; False if any is gone or silent.

        They have ``sending`` seconds more to answer, in which the model reaches them. The state
        that a worker starts with may be large, too, so once it has answered only its silence ends
        the wait. Any worker may be the source of that state.
        """
        silent = set(addresses)
        coming = set(addresses)
        deadline = monotonic() + timeouts().answer + sending
        while coming:
            event = self._link.next_event(max(deadline - monotonic(), 0) if silent else None)
            if event is None:
                return False
            match event.message:
                case Failed(_, error):
                    raise unpacked(error)
                case Closed() if event.sender in addresses:
                    self._link.lose(event.sender)
                    return False
                case Unreachable(_, address) | Silent(_, address):
                    self._link.lose(address)
                    return False
                case Pong():
                    silent.discard(event.sender)
                case Joined():
                    silent.discard(event.sender)
                    coming.discard(event.sender)
        return True
