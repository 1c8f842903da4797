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
- workers that a coordinator may be fetching its operands from are asked, too, and it is taken over
  from a worker that fetches from a silent one, for which Dask would wait. If no other worker could
  run it, that worker ends what it fetches from there;
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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from dask.typing import Key
from distributed.core import Status
from distributed.metrics import time
from tornado.ioloop import PeriodicCallback

from dask_coded.compat import end_fetches, makes_result
from dask_coded.runtime.scheduler import stuck
from dask_coded.runtime.scheduler.awaited import Awaited
from dask_coded.runtime.scheduler.followers import Followers, Tell
from dask_coded.runtime.scheduler.placing import Limits, Placing
from dask_coded.runtime.scheduler.standings import Standings
from dask_coded.runtime.spec import NAME, PieceTask, as_key, coded_task
from dask_coded.transport.exceptions import logged
from dask_coded.typing import Floats

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger("distributed.dask_coded")

# A task that keeps no state loses all its work when it is taken over. Its worker may be silent for
# this fraction of the time that the task has been there, because its event loop may only be busy.
_STAKE = 0.05
# A worker may be silent for at most this fraction of the time since the first run of its task,
# unless that is less than the timeout.
_AGE = 0.25
# A worker may be silent for this many times as long as a task usually takes that a client awaits,
# because the task may hold up the event loop.
_DURATIONS = 2
# A coordinator on a worker below this fraction of the median speed, in that many plans one after
# another, is moved. Speeds from a few rounds of milliseconds are noise.
_SLOW = 0.25
_PLANS = 3


@dataclass
class _Run:
    """A task that coordinates, that a client waits for, or that is computed again."""

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
    #: In how many plans its worker has been slow, up to the last one.
    slow: int = 0
    #: Whether the log says that no other worker can run it.
    reported: bool = False


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
        # Those that were silent when queued coordinators were last placed.
        self._avoided = set[str]()
        self._runs: dict[Key, _Run] = {}
        self._processing: set[Key] = set()
        # When tasks have ended whose results a client is probably fetching. If their worker falls
        # silent meanwhile, they are computed again, after the same patience as with a coordinator.
        self._fresh: dict[Key, float] = {}
        self._awaited = Awaited(scheduler)
        self._followers = Followers(self._suspects, self._membership.owes)
        # Since when workers of coordinators have been paused.
        self._paused: dict[str, float] = {}
        timer = PeriodicCallback(self.look, 1000 * self._timeouts.tick)
        self._timer = scheduler.periodic_callbacks[f"{NAME}-supervisor"] = timer
        scheduler.handlers["coded_resumed"] = self.resumed
        scheduler.stream_handlers["coded-alive"] = logged(self.answered)
        scheduler.stream_handlers["coded-awaited"] = logged(self.expect)

    @property
    def knows_none(self) -> bool:
        """Whether there is no task to place or to watch."""
        return not self._runs

    @property
    def is_idle(self) -> bool:
        """Whether no task coordinates, and no client is fetching what one has found."""
        return not self._processing and not self._fresh

    def add(self, ts: TaskState) -> None:
        """Place a new task when Dask is about to choose its worker, and watch it from then on.

        The same goes for a task that makes the client's result of it, as ``compute`` adds. Other
        tasks that need its result are the user's own, and may not bear to run twice.
        """
        for new in (ts, *(other for other in ts.dependents if makes_result(other))):
            self._record(new, coordinates=True)

    def _record(self, ts: TaskState, coordinates: bool = False) -> _Run:
        if (run := self._runs.get(ts.key)) is None:
            loose = bool(ts.loose_restrictions)
            limits = Limits(ts.worker_restrictions, ts.host_restrictions, coordinates, loose=loose)
            run = self._runs[ts.key] = _Run(limits, self._standings.clock())
        return run

    def clear(self) -> None:
        """Forget all tasks."""
        self._runs.clear()
        self._processing.clear()
        self._fresh.clear()
        self._awaited.clear()
        self._followers.clear()

    def transition(self, key: Key, start: str, finish: str) -> None:
        """Follow a transition of any task; called by the scheduler plugin."""
        if finish == "forgotten":
            self._placing.forget(key)
            self._followers.forget(key)
        if self.knows_none or (ts := self._scheduler.tasks.get(key)) is None:
            return
        if finish == "memory":
            for dependent in ts.dependents:
                if dependent.state == "waiting" and not dependent.waiting_on:
                    self._place(dependent)
        elif finish == "waiting":
            self._place(ts)
        if (run := self._runs.get(key)) is None:
            return
        if not run.limits.coordinates:
            if finish in ("memory", "erred", "forgotten"):
                ts.worker_restrictions, ts.host_restrictions = run.limits.workers, run.limits.hosts
                ts.loose_restrictions = run.limits.loose
                del self._runs[key]
            return
        self._processing.discard(key)
        self._fresh.pop(key, None)
        now = self._standings.clock()
        match finish:
            case "processing":
                assert ts.processing_on is not None
                run.worker, run.since = ts.processing_on.address, now
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
                self._take_over({ts: "is slow"})

    def fails(self, key: Key, seconds: float) -> bool:
        """Whether attempts of a coordinator have failed for so long that another worker should try.

        Its worker may not reach those that others reach. The time doubles with each takeover.
        """
        ts, run = self._scheduler.tasks.get(key), self._runs.get(key)
        if not seconds or ts is None or run is None or ts.processing_on is None:
            return False
        patience = self._timeouts.unfinished * 2**run.takeovers
        if not self._resumes(key):
            patience = max(patience, _STAKE * (self._standings.clock() - run.since))
        return seconds >= patience

    def leave(self, key: Key, seconds: float) -> bool:
        """Move a coordinator that fails to another worker; return whether there is one."""
        ts, run = self._scheduler.tasks[key], self._runs[key]
        there, reason = ts.processing_on, f"has not finished a round for {seconds:.0f} s"
        assert there is not None
        self._take_over({ts: reason})
        if ts.processing_on is not there:
            return True
        # Workers that it called silent answer with their next heartbeats.
        if not run.reported and seconds >= 2 * self._timeouts.unfinished:
            run.reported = True
            logger.warning(
                "Coordinator of %r on %s reaches too few of the workers that hold pieces to finish "
                "a round, and no other worker can run it",
                key,
                there.address,
            )
        return False

    # -- watching ------------------------------------------------------------------------------

    def follow(self, key: Key, workers: Iterable[str], round: int, tell: Tell) -> None:
        """Watch workers for a task from that round on.

        ``tell(worker, key, address, silent)`` reports to the worker of the task that another
        worker is silent, or that it is available: it answers again, or has just joined.
        """
        self.resumed(key, round)
        if key in self._runs:
            self._followers.follow(key, workers, tell)

    def expect(self, keys: Collection[Key], client: str) -> None:
        """Stream handler: a client, whose name Dask adds, waits for tasks, unless they are many."""
        self._awaited.add(keys, client)
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
        awaited = self._awaited.under_way()
        if not self._processing and not self._fresh and not self._awaited:
            self._timer.stop()
        tasks = [self._scheduler.tasks[key] for key in self._processing]
        fetching = stuck.fetching({*tasks, *awaited})
        watched: dict[str, list[TaskState]] = {a: [] for a in fetching if a in self._able}
        for ts in {*tasks, *awaited, *(self._scheduler.tasks[key] for key in self._fresh)}:
            run = self._record(ts)
            if (ws := _place_of(ts)) and ws.address in self._able:
                if run.worker != ws.address:  # another worker has stolen it
                    run.worker, run.since = ws.address, now
                watched.setdefault(ws.address, []).append(ts)
        # There may be many, so they are asked less often.
        followed = self._followers.workers(self._processing)
        quiet = dict.fromkeys(followed.intersection(self._able), self._timeouts.quiet())
        self._standings.look(quiet | dict.fromkeys(watched, 0.0))
        self._place_queued()
        self._tell_followers()
        late: dict[TaskState, str] = {}
        for address in watched.keys() & self._suspects:
            reason = f"silent for {self._membership.owed(address):.1f} s"
            for ts in watched[address]:
                if owes(address, self._patience(ts)) and self._can_run_again(ts):
                    late[ts] = reason
            for ts, dts in fetching.get(address, ()):
                helps = len(dts.who_has or ()) > 1 or stuck.is_cheap(dts)
                if helps and owes(address, self._patience(ts)):
                    assert ts.processing_on is not None
                    late[ts] = f"waits for {dts.key!r} from {address}, {reason}"
                    self._placing.waiting[address][dts.key].add(ts.processing_on.address)
        # Once all silent workers are known, so that nothing moves from one to another.
        self._take_over(late | self._paused_for_long(watched))

    def _can_run_again(self, ts: TaskState) -> bool:
        """Whether a task can run again; if it has ended, what it needs may be gone."""
        if not self._runs[ts.key].limits.coordinates:
            # Nothing is known of how long a task takes that has left the pool of threads.
            begun = ts.processing_on is None or ts in ts.processing_on.long_running
            return not begun and stuck.is_cheap(ts)
        if ts.state != "memory":
            return True
        # A task of the user that has begun with the result would run again, too.
        holders = ts.who_has or set()
        if any(other.processing_on in holders for other in ts.dependents):
            return False
        silent = self._suspects.union(ws.address for ws in holders)
        return stuck.can_run_again(ts, silent, self._replaceable)

    def _paused_for_long(self, watched: Mapping[str, list[TaskState]]) -> dict[TaskState, str]:
        """Return tasks that paused workers may not have begun, with reasons.

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
        found = {}
        for address, since in self._paused.items():
            # Looks come a little early or late.
            seconds, slack = now - since, self._timeouts.tick / 2
            ws = self._scheduler.workers[address]
            for ts in watched[address]:
                begun = ts.processing_on is not ws or ts in ws.long_running
                late = seconds >= self._patience(ts) - slack
                if late and not begun and self._can_run_again(ts):
                    found[ts] = f"paused for {seconds:.1f} s"
        return found

    def _tell_followers(self) -> None:
        """Say which workers are silent, for each task as soon as its patience ends."""
        for key in filter(self._followers.__contains__, self._processing):
            run, patience = self._runs[key], self._patience(self._scheduler.tasks[key])
            run.setbacks += self._followers.say_silent(key, run.worker, patience)

    def available(self, address: str) -> None:
        """Say that a worker has joined, answers, or runs again."""
        self._placing.waiting.pop(address, None)  # its data come
        for key in filter(self._followers.__contains__, self._processing):
            self._followers.say_available(key, self._runs[key].worker, address)
        self._place_waiting()

    def _place_queued(self) -> None:
        """Choose again where coordinators may run that have yet to begin, if others are silent now.

        Dask has idle workers steal what waits on others, also a worker that is silent.
        """
        if self._suspects == self._avoided:
            return
        self._avoided = set(self._suspects)
        for key in self._processing:
            ts = self._scheduler.tasks[key]
            if ts.processing_on is not None and ts not in ts.processing_on.long_running:
                self._place(ts)

    def _place_waiting(self) -> None:
        """Offer a new choice of workers to coordinators whose workers may all be lost."""
        waiting = [
            ts
            for key, run in self._runs.items()
            if run.limits.coordinates
            and (ts := self._scheduler.tasks.get(key))
            and ts.state == "no-worker"
        ]
        for ts in waiting:
            self._place(ts)
        if waiting:
            self._scheduler.transitions(
                {ts.key: "processing" for ts in waiting}, stimulus_id=f"coded-available-{time()}"
            )

    def answered(self, worker: str) -> None:
        """Stream handler: the event loop of a worker runs."""
        self._standings.heard(worker, answers=True)

    def is_late(self, ts: TaskState) -> bool:
        """Whether a task that is not done can run again: its worker is silent for too long.

        The patience doubles, so a task that holds up the event loop of each of its workers ends.
        """
        self._record(ts)
        there = ts.processing_on
        late = there and self._membership.silent(there.address) >= self._patience(ts)
        return bool(late) and stuck.is_repeatable(ts)

    def _patience(self, ts: TaskState) -> float:
        """Return how many seconds the worker of a task may be silent.

        Twice as long after each takeover, but no longer than a fraction of the task's age. So a
        task that holds up its event loop for longer than the timeout ends all the same.
        """
        run, patience, now = self._runs[ts.key], self._timeouts.silence, self._standings.clock()
        if not run.limits.coordinates:
            usual = _DURATIONS * ts.prefix.duration_average
            return float(max(patience, usual) * 2**run.setbacks)
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

    def _take_over(self, tasks: Mapping[TaskState, str]) -> None:
        """Have tasks run again on another worker, where there is one, for these reasons."""
        self._placing.changed()
        moved: dict[TaskState, str] = {}
        stay, unread = [], set[str]()
        for ts in tasks:
            run, ws = self._runs[ts.key], _place_of(ts)
            assert ws is not None
            before, run.limits.avoid = run.limits.avoid, ws.address
            if self._placing.choice(ts, run.limits):
                run.takeovers += 1
                moved[ts] = ws.address
                if ts.state == "memory" and not stuck.serves_others(ws, [ts]):
                    unread.add(ws.address)
            else:
                run.limits.avoid = before
                stay.append(ts)
        ended = self._end_fetches(stay)
        needed = [dts for ts in (*moved, *stay) for dts in ts.dependencies]
        needed = stuck.blocked(needed, self._suspects, self._replaceable, stuck.is_cheap)
        self.run_again([*moved, *needed], ended)
        # A client may be waiting for a result that the scheduler has asked such a worker for. What
        # else it has asked for goes on, such as functions that users run on workers.
        for address in unread:
            end_fetches(self._scheduler.rpc, address)
        for ts, address in moved.items():
            if coded_task(ts.run_spec) is None:
                continue
            taker = ts.processing_on.address if ts.processing_on else None
            logger.warning(
                "Coordinator of %r on %s %s, taken over by %s", ts.key, address, tasks[ts], taker
            )
            event = {"worker": address, "reason": tasks[ts], "taker": taker}
            self._scheduler.log_event(NAME, {"action": "take-over", "key": str(ts.key), **event})

    def _end_fetches(self, tasks: Iterable[TaskState]) -> set[str]:
        """Have the workers of tasks end what they fetch for these from silent ones; return them."""
        ended = set()
        for ts in tasks:
            there = ts.processing_on.address if ts.processing_on else ""
            if there not in self._able:  # it would not understand
                continue
            for address, waiting in self._placing.waiting.items():
                keys = [d.key for d in ts.dependencies if there in waiting.get(d.key, ())]
                if keys:
                    for key in keys:
                        waiting[key].discard(there)
                    message = {"op": "coded-hang-up", "address": address, "keys": keys}
                    self._scheduler.worker_send(there, message)
                    self._runs[ts.key].setbacks += 1
                    ended.add(there)
        return ended

    def run_again(self, tasks: Iterable[TaskState], ended: Collection[str] = ()) -> None:
        """Release tasks that run, or have their only result, on a worker that is not to be used.

        Until they have a result, they are kept away from silent workers, and so is what they need
        that has none. Pieces get other homes. Workers in ``ended`` fetch nothing from silent ones.
        """
        tasks = dict.fromkeys(tasks)
        for ts in stuck.unfinished(tasks):
            if not isinstance(ts.run_spec, PieceTask):
                self._record(ts).setbacks += ts in tasks
            # It would not begin on a worker that is fetching its first result.
            there = {other.processing_on.address for other in ts.dependents if other.processing_on}
            for address in {ws.address for ws in ts.who_has or ()} & self._suspects:
                self._placing.waiting[address][ts.key] |= there.difference(ended)
        self._scheduler.transitions(
            {ts.key: "released" for ts in tasks}, stimulus_id=f"coded-run-again-{time()}"
        )


def _place_of(ts: TaskState) -> WorkerState | None:
    """Return the only worker that runs a task or has its result."""
    needed = ts.who_wants or ts.waiters
    if ts.processing_on is None and needed and ts.who_has and len(ts.who_has) == 1:
        return next(iter(ts.who_has))
    return ts.processing_on
