"""The supervisor of coordinators: where they run, and what happens when the worker of one stops.

To Dask a coordinator is a task like any other: it may be placed on, or stolen by, a worker that is
known to be slow, and if its worker is stopped, it waits for `worker-ttl`, five minutes. Here

- a coordinator is restricted to workers that are not known to be slow, see
  :mod:`dask_coded.runtime.scheduler.placing`;
- a worker that runs one is asked several times a second for a sign of life, which its event loop
  gives, see :mod:`dask_coded.runtime.scheduler.standings`. If it is suspect, and has said nothing
  for `coded.coordinator.timeout`, the coordinator is taken over: its task goes from ``processing``
  to ``released`` in the scheduler, as after the loss of a worker, and from there to another worker.
  The worker itself, its data and the tasks of others stay, because it may only be busy, but no
  coordinator is placed there until it gives a sign of life;
- workers that a coordinator may be fetching its operands from are asked, too, and what it fetches
  from a silent one is ended;
- while a client waits for tasks and says so, the workers that compute these are asked, too. If one
  is silent, tasks that usually take less than two seconds run on another worker;
- a plugin may follow workers for a coordinator. They are asked if they say nothing, and the plugin
  learns which of them are silent or available again;
- the same happens to a coordinator that waits on a worker which pauses, because it has no memory;
- when such a task runs again, its earlier runs count for nothing: see
  :mod:`dask_coded.transport.attempts`. The scheduler itself drops their results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.typing import Key
from distributed.core import Status
from distributed.metrics import time
from tornado.ioloop import PeriodicCallback

from dask_coded.compat import makes_result
from dask_coded.runtime.scheduler import stuck
from dask_coded.runtime.scheduler.awaited import Awaited
from dask_coded.runtime.scheduler.placing import Limits, Placing
from dask_coded.runtime.scheduler.standings import Standings
from dask_coded.runtime.spec import NAME, CodedTask, PieceTask, as_key
from dask_coded.typing import Floats

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger("distributed.dask_coded")

#: Tells the worker of a task whether another worker is silent.
Tell = Callable[[str, Key, str, bool], None]

# A task that keeps no state loses all its work when it is taken over. Its worker may be silent for
# this fraction of the time that the task has been there, because its event loop may only be busy.
_STAKE = 0.05
# A worker may be silent for at most this fraction of the time since the first run of its task,
# unless that is less than the timeout.
_AGE = 0.25
# A coordinator on a worker below this fraction of the median speed, in that many plans one after
# another, is moved. Speeds from a few rounds of milliseconds are noise.
_SLOW = 0.25
_PLANS = 3


@dataclass
class _Run:
    """A task that coordinates."""

    limits: Limits
    #: When it was first there.
    born: float
    #: Where it is, and since when.
    worker: str = ""
    since: float = 0.0
    #: How often it was taken over.
    takeovers: int = 0
    #: How often it was taken over since it got further than before, and from which round it went
    #: on last.
    setbacks: int = 0
    round: int = 0
    #: The workers that a plugin follows for it; those reported as silent; how to report them.
    followed: frozenset[str] = frozenset()
    silent: set[str] = field(default_factory=set)
    tell: Tell | None = None
    #: In how many plans its worker has been slow, up to the last one.
    slow: int = 0
    #: From which silent workers its own was told to fetch nothing, and after how many seconds.
    hung_up: dict[str, float] = field(default_factory=dict)


class Supervisor:
    """Has the tasks that coordinate placed, watches them, and moves them.

    Parameters
    ----------
    scheduler : Scheduler
    able : collection of str
        Addresses of workers that have the plugin; it changes as workers come and go.
    placing : Placing
    standings : Standings
        Says which workers are there, and has the clock.
    resumes : callable(Key) -> bool
        Whether the state of a task is kept elsewhere.
    replaceable : callable(TaskState, silent) -> bool
        Whether what a task makes can be made again without silent workers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        able: Collection[str],
        placing: Placing,
        standings: Standings,
        resumes: Callable[[Key], bool],
        replaceable: stuck.Replaceable,
    ) -> None:
        self._scheduler = scheduler
        self._able = able
        self._placing = placing
        self._standings = standings
        self._resumes = resumes
        self._replaceable = replaceable
        self._membership, self._timeouts = standings.membership, standings.membership.timeouts
        self._suspects = standings.suspects
        self._runs: dict[Key, _Run] = {}
        self._processing: set[Key] = set()
        # When tasks have ended whose results a client is probably fetching. If their worker falls
        # silent meanwhile, they are computed again, after the same patience as with a coordinator.
        self._fresh: dict[Key, float] = {}
        self._awaited = Awaited(scheduler, standings.membership)
        # Since when workers of coordinators have been paused.
        self._paused: dict[str, float] = {}
        # What the user's limits of other tasks are, while these are kept away from silent workers.
        self._kept_away: dict[Key, Limits] = {}
        timer = PeriodicCallback(self.look, 1000 * self._timeouts.tick)
        self._timer = scheduler.periodic_callbacks[f"{NAME}-supervisor"] = timer
        scheduler.handlers["coded_resumed"] = self.resumed
        scheduler.stream_handlers["coded-alive"] = self.answered
        scheduler.stream_handlers["coded-awaited"] = self.expect

    @property
    def is_idle(self) -> bool:
        """Whether there is no task to place or to watch."""
        return not self._runs and not self._kept_away

    def add(self, ts: TaskState) -> None:
        """Place a new task when Dask is about to choose its worker, and watch it from then on.

        The same goes for a task that makes the client's result of it, as ``compute`` adds. Other
        tasks that need its result are the user's own, and may not bear to run twice.
        """
        for new in (ts, *(other for other in ts.dependents if makes_result(other))):
            limits = Limits(new.worker_restrictions, new.host_restrictions)
            self._runs.setdefault(new.key, _Run(limits, self._standings.clock()))

    def clear(self) -> None:
        """Forget all tasks."""
        self._runs.clear()
        self._kept_away.clear()
        self._processing.clear()
        self._fresh.clear()
        self._awaited.clear()

    def transition(self, key: Key, start: str, finish: str) -> None:
        """Follow a transition of any task; called by the scheduler plugin."""
        if self.is_idle or (ts := self._scheduler.tasks.get(key)) is None:
            return
        if finish == "memory":
            for dependent in ts.dependents:
                if dependent.state == "waiting" and not dependent.waiting_on:
                    self._place(dependent)
        elif finish == "waiting":
            self._place(ts)
        if finish in ("memory", "erred", "forgotten") and (
            limits := self._kept_away.pop(key, None)
        ):
            ts.worker_restrictions, ts.host_restrictions = limits.workers, limits.hosts
        if key not in self._runs:
            return
        self._processing.discard(key)
        self._fresh.pop(key, None)
        run, now = self._runs[key], self._standings.clock()
        match finish:
            case "processing":
                assert ts.processing_on is not None
                run.worker, run.since = ts.processing_on.address, now
                run.hung_up.clear()
                self._processing.add(key)
                self._watch()
            case "memory":
                self._fresh[key] = now
            case "forgotten":
                del self._runs[key]

    def _place(self, ts: TaskState) -> None:
        """Restrict a task that Dask is about to give to a worker."""
        if run := self._runs.get(ts.key):
            self._placing.place(ts, run.limits)
        elif limits := self._kept_away.get(ts.key):
            self._placing.keep_away(ts, limits)

    def reconsider(self, key: Key, addresses: Sequence[str], speeds: Floats) -> None:
        """Move a coordinator that turns out to be on a slow one of these workers, at most once.

        Only if less work is lost than moving it may take.
        """
        ts, run = self._scheduler.tasks.get(key), self._runs.get(key)
        if ts is None or run is None or ts.processing_on is None or run.takeovers:
            return
        if ts not in ts.processing_on.long_running or run.worker != ts.processing_on.address:
            return
        begun = self._standings.clock() - run.since
        if not self._resumes(key) and begun > self._timeouts.answer:
            return
        if run.worker in addresses:
            slow = speeds[addresses.index(run.worker)] < _SLOW * np.median(speeds)
            run.slow = run.slow + 1 if slow else 0
            if run.slow == _PLANS:
                self._take_over([ts], run.worker, "is slow")

    # -- watching ------------------------------------------------------------------------------

    def follow(self, key: Key, workers: Iterable[str], round: int, tell: Tell) -> None:
        """Watch workers for a task from that round on.

        ``tell(worker, key, address, silent)`` reports to the worker of the task that another
        worker is silent, or that it is available: it answers again, or has just joined.
        """
        self.resumed(key, round)
        if run := self._runs.get(key):
            run.followed, run.tell = frozenset(workers), tell
            run.silent.clear()

    def expect(self, keys: Collection[Key], client: str = "") -> None:
        """Stream handler: a client, whose name Dask adds, waits for tasks."""
        self._awaited.add(keys)
        self._watch()

    def _watch(self) -> None:
        if not self._timer.is_running():  # tornado would add one more
            self._timer.start()

    def look(self) -> None:
        """Ask workers for a sign of life; take over, or compute elsewhere, where none comes."""
        now, owes = self._standings.clock(), self._membership.owes
        self._fresh = {
            key: end
            for key, end in self._fresh.items()
            if now < end + self._timeouts.lease or owes(self._runs[key].worker)
        }
        awaited = [ts for ts in self._awaited.under_way() if ts.key not in self._runs]
        if not self._processing and not self._fresh and not self._awaited:
            self._timer.stop()
        watched: dict[str, list[TaskState]] = {}
        for key in (*self._processing, *self._fresh):
            ts = self._scheduler.tasks[key]
            if (ws := _place_of(ts)) and ws.address in self._able:
                run = self._runs[key]
                if run.worker != ws.address:  # another worker has stolen it
                    run.worker, run.since = ws.address, now
                watched.setdefault(ws.address, []).append(ts)
        coordinators = [self._scheduler.tasks[key] for key in self._processing]
        fetching = stuck.fetching([*coordinators, *awaited])
        computing = stuck.computing(awaited)
        watched = {a: [] for a in (*fetching, *computing) if a in self._able} | watched
        # There may be many, so they are asked less often.
        followed = {a for key in self._processing for a in self._runs[key].followed}
        quiet = dict.fromkeys(followed.intersection(self._able), self._timeouts.quiet())
        self._standings.look(quiet | dict.fromkeys(watched, 0.0))
        self._tell_followers()
        silent, again, stopped = [], [], []
        for address, tasks in watched.items():
            if address not in self._suspects:
                continue
            late = [
                ts for ts in tasks if owes(address, self._patience(ts)) and self._can_run_again(ts)
            ]
            helped = stuck.helped(fetching.get(address, ()))
            waiting = [ts for ts in helped if self._waits(ts, address)]
            moved = [
                ts
                for ts in computing.get(address, ())
                if self._awaited.give_up_here(ts, address, self._suspects)
            ]
            if late or waiting or moved:
                self._hang_up(address, waiting)
            again += moved
            stopped += [*moved, *waiting]
            if late:
                silent.append((late, address, f"silent for {self._membership.owed(address):.1f} s"))
        # Once all silent workers are known, so that nothing moves from one to another.
        self.run_again([*again, *stuck.stranded(stopped, self._suspects, self._replaceable)])
        for late, address, reason in (*silent, *self._paused_for_long(watched)):
            self._take_over(late, address, reason)

    def _can_run_again(self, ts: TaskState) -> bool:
        """Whether a task can run again; if it has ended, what it needs may be gone."""
        if ts.state != "memory":
            return True
        # A task of the user that has begun with the result would run again, too.
        holders = ts.who_has or set()
        if any(other.processing_on in holders for other in ts.dependents):
            return False
        silent = self._suspects.union(ws.address for ws in holders)
        return stuck.repeatable(ts, silent, self._replaceable)

    def _waits(self, ts: TaskState, address: str) -> bool:
        """Whether something is to be done for a task that may be fetching from a silent worker.

        Once, and again when the worker has been silent for twice as long: what its worker had not
        begun to fetch at first was not ended.
        """
        if (run := self._runs.get(ts.key)) is None:
            return self._awaited.give_up(ts, address)
        patience = max(self._patience(ts), 2 * run.hung_up.get(address, 0.0))
        if late := self._membership.owes(address, patience):
            run.hung_up[address] = self._membership.owed(address)
        return late

    def _paused_for_long(
        self, watched: Mapping[str, list[TaskState]]
    ) -> list[tuple[list[TaskState], str, str]]:
        """Return tasks that paused workers may not have begun, with workers and reasons.

        Dask leaves them there until the worker has memory again. Tasks that have left the worker's
        thread pool have begun, and go on.
        """
        now = self._membership.time
        self._paused = {
            address: self._paused.get(address, now)
            for address in watched
            if address not in self._suspects
            and self._scheduler.workers[address].status == Status.paused
        }
        found = []
        for address, since in self._paused.items():
            # Looks come a little early or late.
            seconds, slack = now - since, self._timeouts.tick / 2
            ws = self._scheduler.workers[address]
            late = [
                ts
                for ts in watched[address]
                if ts.processing_on is ws
                and ts not in ws.long_running
                and seconds >= self._patience(ts) - slack
            ]
            if late:
                found.append((late, address, f"paused for {seconds:.1f} s"))
        return found

    def _tell_followers(self) -> None:
        """Say which workers are silent, for each task as soon as its patience ends."""
        for key in self._processing:
            run, patience = self._runs[key], self._patience(self._scheduler.tasks[key])
            late = [
                address
                for address in run.followed.difference(run.silent, [run.worker])
                if address in self._suspects and self._membership.owes(address, patience)
            ]
            for address in late:
                assert run.tell is not None
                run.tell(run.worker, key, address, True)
            run.silent.update(late)
            run.setbacks += bool(late)

    def available(self, address: str) -> None:
        """Say that a worker has joined, answers, or runs again."""
        for key in self._processing:
            run = self._runs[key]
            if run.tell is not None:
                run.silent.discard(address)
                run.tell(run.worker, key, address, False)

    def _hang_up(self, address: str, tasks: Iterable[TaskState] = ()) -> None:
        """Have workers end what Dask fetches from a silent one for watched tasks.

        Dask would wait for the data, and would also begin no task on a worker that is still
        fetching an earlier result of the same task.
        """
        running = (self._scheduler.tasks[key] for key in self._processing)
        watched = (*running, *self._awaited.under_way(), *tasks)
        keys = stuck.needed_from(self._scheduler.workers[address], watched)
        others = [able for able in self._able if able != address]
        self._send(others, op="coded-hang-up", address=address, keys=keys)

    def answered(self, worker: str) -> None:
        """Stream handler: the event loop of a worker runs."""
        self._standings.heard(worker, answers=True)

    def _patience(self, ts: TaskState) -> float:
        """Return how many seconds the worker of a task may be silent.

        Twice as long after each takeover, but no longer than a fraction of the task's age. So a
        task that holds up its event loop for longer than the timeout ends all the same.
        """
        run, patience, now = self._runs[ts.key], self._timeouts.silence, self._standings.clock()
        if not self._resumes(ts.key):
            took = self._fresh.get(ts.key, now) - run.since
            patience = max(patience, _STAKE * took)
        return float(min(patience * 2**run.setbacks, max(patience, _AGE * (now - run.born))))

    def resumed(self, key: Key, round: int) -> None:
        """Handler: a task goes on from that round. If it has got further, it is as good as new."""
        run_key = as_key(key)
        if (run := self._runs.get(run_key)) and round > run.round:
            run.round, run.setbacks = round, 0
            if ts := self._scheduler.tasks.get(run_key):
                ts.suspicious = 0  # Dask gives up a task under which too many workers were lost

    def _take_over(self, tasks: Sequence[TaskState], address: str, reason: str) -> None:
        """Have tasks run again on another worker, where there is one."""
        self._placing.changed()
        moved: list[TaskState] = []
        for ts in tasks:
            run = self._runs[ts.key]
            before, run.limits.avoid = run.limits.avoid, address
            if self._placing.choice(ts, run.limits):
                run.takeovers += 1
                run.setbacks += 1
                moved.append(ts)
            else:
                run.limits.avoid = before
        ws = self._scheduler.workers[address]
        if any(ts.state == "memory" for ts in moved) and not stuck.serves_others(ws, moved):
            # A client may be waiting for a result that it has asked this worker for.
            self._scheduler.rpc.remove(address)
        if moved and address in self._suspects:
            self._hang_up(address, moved)
        self.run_again([*moved, *stuck.stranded(moved, self._suspects, self._replaceable)])
        for ts in moved:
            if not isinstance(ts.run_spec, CodedTask):
                continue
            taker = ts.processing_on.address if ts.processing_on else None
            logger.warning(
                "Coordinator of %r on %s %s, taken over by %s", ts.key, address, reason, taker
            )
            event = {"worker": address, "reason": reason, "taker": taker}
            self._scheduler.log_event(NAME, {"action": "take-over", "key": str(ts.key), **event})

    def run_again(self, tasks: Iterable[TaskState]) -> None:
        """Release tasks that run, or have their only result, on a worker that is not to be used.

        Until they have a result, they are kept away from silent workers. Pieces get other homes.
        """
        tasks = list(tasks)
        for ts in tasks:
            if ts.key not in self._runs and not isinstance(ts.run_spec, PieceTask):
                limits = Limits(ts.worker_restrictions, ts.host_restrictions)
                self._kept_away.setdefault(ts.key, limits)
        self._scheduler.transitions(
            {ts.key: "released" for ts in tasks}, stimulus_id=f"coded-run-again-{time()}"
        )

    def _send(self, addresses: Iterable[str], **message: Any) -> None:
        for address in addresses:
            if address in self._scheduler.stream_comms:
                self._scheduler.worker_send(address, message)


def _place_of(ts: TaskState) -> WorkerState | None:
    """Return the only worker that runs a task or has its result."""
    needed = ts.who_wants or ts.waiters
    if ts.processing_on is None and needed and ts.who_has and len(ts.who_has) == 1:
        return next(iter(ts.who_has))
    return ts.processing_on
