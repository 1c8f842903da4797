"""The scheduler plugin: what must be known in one place about all workers and rounds.

It plans each round so that the part of every worker fits its predicted speed, and prevents the
release of pieces that a running round needs.
:class:`~dask_coded.runtime.scheduler.standings.Standings` says which workers are there,
:class:`~dask_coded.runtime.scheduler.records.WorkerRecords` how fast they are,
:class:`~dask_coded.runtime.scheduler.arrays.ArrayDirectory` knows the arrays,
:class:`~dask_coded.runtime.scheduler.recipes.Recipes` from what their pieces are made,
:class:`~dask_coded.runtime.scheduler.homes.Homes` knows where pieces are, and
:class:`~dask_coded.runtime.scheduler.supervisor.Supervisor` looks after coordinators.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.typing import Key
from distributed.metrics import time

from dask_coded._version import __version__
from dask_coded.membership import Changed, Standing, Timeouts
from dask_coded.prediction import SpeedHistory, in_seconds
from dask_coded.rounds import POLICIES, InfeasibleError
from dask_coded.rounds.assignment import all_tried
from dask_coded.runtime.answers import Fit, Lost, Over, Reply, RoundPlan, Unfit, Waiting, reply
from dask_coded.runtime.scheduler.arrays import ArrayDirectory
from dask_coded.runtime.scheduler.extension import SchedulerExtension
from dask_coded.runtime.scheduler.held import Held
from dask_coded.runtime.scheduler.holding import Holding
from dask_coded.runtime.scheduler.homes import Homes
from dask_coded.runtime.scheduler.loops import LoopDirectory
from dask_coded.runtime.scheduler.observer import Observer
from dask_coded.runtime.scheduler.placing import Placing
from dask_coded.runtime.scheduler.recipes import Recipes
from dask_coded.runtime.scheduler.records import WorkerRecords
from dask_coded.runtime.scheduler.showing import show
from dask_coded.runtime.scheduler.standings import Standings
from dask_coded.runtime.scheduler.state import RELEASED
from dask_coded.runtime.scheduler.supervisor import Supervisor
from dask_coded.runtime.scheduler.versions import mismatch, unable
from dask_coded.runtime.spec import NAME, CodedSpec, CodedTask, as_key, coded_task
from dask_coded.runtime.worker.plugin import CodedWorkerPlugin
from dask_coded.transport.backoff import Backoff
from dask_coded.transport.exceptions import logged
from dask_coded.transport.messages import Attempt

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger("distributed.dask_coded")

# Events after which pieces may be elsewhere, or workers may take those that are theirs.
_MOVES = {"rebalance", "replicate", "retire-workers", "worker-status-change"}


class CodedSchedulerPlugin(SchedulerExtension):
    """Predicts worker speeds, plans rounds by them, and knows all coded arrays.

    Attributes
    ----------
    arrays : ArrayDirectory
    homes : Homes
    loops : LoopDirectory
    observer : Observer
    placing : Placing
    recipes : Recipes
    records : WorkerRecords
    standings : Standings
    supervisor : Supervisor
    speeds : SpeedHistory
    versions : dict of str to str
        Version of the package on every worker that can take part: that of the scheduler.
    others : dict of str to str
        The version on every worker that has another one.
    """

    name = NAME

    async def set_up(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.speeds = SpeedHistory()
        self.versions: dict[str, str] = {}
        self.others: dict[str, str] = {}
        # Until when to wait for the plugin of each worker that has joined.
        self._joining: dict[str, float] = {}
        # Workers that know that there is something to do.
        self._active: set[str] = set()
        self.standings = Standings(scheduler, self._changed)
        suspects = self.standings.suspects
        self.records = records = WorkerRecords(scheduler, self.speeds, suspects)
        self.homes = Homes(scheduler, self.versions, records.predict, records.lasting, suspects)
        self.arrays = ArrayDirectory(
            scheduler, self.versions, self.others, self.refused, records.predict, self.homes
        )
        self.recipes = Recipes(scheduler, self.arrays, self.homes)
        self.loops = LoopDirectory(scheduler, self.versions, records.best)
        self.placing = Placing(scheduler, self.versions, records.predict, suspects)
        self.supervisor = Supervisor(
            scheduler,
            self.versions,
            self.placing,
            self.standings,
            self.loops.keeps,
            self.replaceable,
        )
        self.observer = Observer(
            scheduler,
            self.versions,
            suspects,
            self.arrays,
            self.homes,
            self.loops.keeping,
        )
        self._holding = Holding(scheduler)
        scheduler.handlers.update(
            coded_hello=self.hello,
            coded_keepers=self.loops.keepers,
            coded_leads=self.leads,
            coded_learn=self.learn,
            coded_left=self.loops.left,
            coded_extend=self.extend,
            coded_fit=self.fit,
            coded_plan=self.plan,
            coded_register=self.register,
            coded_wanted=self.wanted,
        )
        scheduler.set_metadata(keys=[NAME], value=__version__)
        await self.give(scheduler, NAME, CodedWorkerPlugin)
        # Until a plugin is registered, Dask does not tell it of workers that leave.
        for worker in {*self.versions, *self.others, *self.refused}.difference(scheduler.workers):
            self.remove_worker(scheduler, worker, stimulus_id=f"coded-set-up-{time()}")
        show(scheduler, self.observer)  # last, because a page cannot be taken back

    def hello(self, worker: str, version: str, product: float) -> str:
        """Handler: a worker has the plugin, and a small product takes that many seconds on it.

        Answers the address by which other workers know it.
        """
        worker = self.scheduler.coerce_address(worker)  # the worker may know its host by name
        if worker not in self.scheduler.workers:
            return worker  # it has left meanwhile, and nothing would ever remove it from here
        self._joining.pop(worker, None)
        if version != __version__:
            logger.warning(
                "Worker %s has dask_coded %s and the scheduler has %s, so it takes no part: "
                "install the same version on both",
                worker,
                version,
                __version__,
            )
            self.versions.pop(worker, None)
            self.others[worker] = version
            return worker
        self.versions[worker] = version
        self.placing.measured(worker, product)
        self.standings.joined(worker)
        self.arrays.relieve(worker)
        return worker

    async def fit(self, version: str, allowed: Sequence[str] | None) -> Reply:
        """Handler: whether workers can take part; answers :class:`Fit` or :class:`Unfit`.

        Workers that have yet to get the plugin are waited for. If there are none, some may come.
        """
        if message := mismatch(version):
            return reply(Unfit(message))
        backoff = Backoff()
        while _named((*self.coming, *self._may_join()), allowed) and not self._able(allowed):
            await backoff.wait()
        causes = unable(self.scheduler, self.versions, self.others, self.refused, allowed)
        # The scheduler may not reach some just now.
        if causes and not self._able(allowed) and not _named(self.giving, allowed):
            advice = f"Install dask_coded {__version__} there."
            return reply(Unfit(f"No worker can take part.{causes} {advice}"))
        return reply(Fit())

    def _able(self, allowed: Sequence[str] | None) -> set[str]:
        """Return the workers that can take part, among those that the user named."""
        return _named(self.versions, allowed)

    async def register(
        self,
        spec: CodedSpec,
        allowed: Sequence[str] | None,
        oversubscribe: bool,
        client: str,
        **more: Any,
    ) -> Reply:
        """Handler: a new array is to be encoded; answers :class:`Placed` or :class:`Unfit`.

        Workers that have yet to get the plugin are waited for only if they are needed.
        """
        needed = 1 if oversubscribe else spec.code.n

        def waits() -> bool:
            there = self._able(allowed)
            coming = _named((*self.coming, *self._may_join()), allowed)
            return len(there) < needed <= len(there | coming)

        backoff = Backoff()
        while waits() and client in self.scheduler.clients:
            await backoff.wait()
        if client not in self.scheduler.clients:
            # No client would release the array.
            return reply(
                Unfit("The client that encodes the array has disconnected: connect again.")
            )
        return await self.arrays.register(
            spec, allowed=allowed, oversubscribe=oversubscribe, client=client, **more
        )

    async def extend(self, array: str, allowed: Sequence[str] | None) -> Reply:
        """Handler: workers without a piece of an array are to make new ones for themselves.

        Answers :class:`Extended`, :class:`Unfit` or :class:`Lost`.
        """
        backoff = Backoff()
        while _named(self._may_join(), allowed):
            await backoff.wait()
        return self.arrays.extend(array, allowed)

    def _may_join(self) -> list[str]:
        """Return the workers that have just joined, and may soon have the plugin."""
        now = self.standings.clock()
        return [address for address, until in self._joining.items() if now < until]

    # -- rounds --------------------------------------------------------------------------------

    def learn(
        self,
        array: str,
        measured: Mapping[str, float] = MappingProxyType({}),
        corrupt: Sequence[str] = (),
        failed: Mapping[str, str] = MappingProxyType({}),
        wrong_checks: Sequence[tuple[int, str, bool]] = (),
    ) -> None:
        """Handler: take what rounds have found out about workers.

        Parameters
        ----------
        array : str
        measured : mapping of str to float
            Work per second of workers.
        corrupt : sequence of str
            Workers that have sent wrong shares.
        failed : mapping of str to str
            Exceptions that workers have raised.
        wrong_checks : sequence of (int, str, bool)
            See :class:`dask_coded.runtime.coordinator.checks.WrongCheck`.
        """
        state = self.arrays.get(array)
        self.records.measured(measured, state.planned if state else ())
        self.records.corrupt(array, corrupt)
        for block, address, sound in wrong_checks:
            # Each worker that coordinates rounds finds it out for itself.
            if self.arrays.wrong_check(array, block, address, sound):
                self.records.corrupt_check(array, block, address)
        self.records.failed(array, failed)

    async def plan(
        self,
        array: str,
        lags: dict[str, float],
        policy: str,
        predictor: str,
        silent: Sequence[str],
        known: int,
        attempt: Attempt | None = None,
        measured: Mapping[str, float] = MappingProxyType({}),
        failing: float = 0.0,
        **findings: Any,
    ) -> Reply:
        """Handler: learn from earlier rounds, and answer with the plan of the next one.

        Answers :class:`RoundPlan`, :class:`Waiting`, :class:`Lost` or :class:`Over`. The plan has
        the array's spec if the asking worker knows a different number of pieces. ``attempt`` is the
        run of the coordinator's task; ``failing`` is for how many seconds its attempts have failed.
        """
        self.learn(array, measured, **findings)
        if attempt is not None and not self.leads(*attempt):
            return reply(Over())
        leaves = attempt is not None and self.supervisor.fails(as_key(attempt[0]), failing)
        if not leaves:  # a worker that is cut off calls all others silent
            self.standings.suspect(silent)
        # A new coordinator would have to find out by itself whose heartbeats have ceased.
        self.standings.expect_heartbeats()
        self.placing.changed()
        if (state := self.arrays.get(array)) is None:
            return reply(Lost(RELEASED))
        if attempt is not None:
            self.observer.coordinates(as_key(attempt[0]))
        state.used = time()
        spec = state.spec
        holders = [self.homes.holder_of(key) for key in spec.keys]
        if any(a and a != self.homes.home(key) for a, key in zip(holders, spec.keys, strict=True)):
            self.homes.bring_home()
        work = spec.uniform_work if state.work is None else state.work
        held = Held.by(holders, spec.code, work)
        addresses, layout = held.addresses, held.layout
        state.planned = addresses
        if measured and (total := sum(measured.values())) > 0:
            state.seconds = layout.needed / total
        speeds = self.records.predict(addresses, predictor)
        # If shares are verified, wrong ones may also turn out during the round: their workers are
        # predicted to do nothing.
        if not spec.check_keys:
            held = held.trusted(self.records.trusts, self.standings.suspects, spec.code, work)
            layout = held.layout
        if not held.suffices:
            kept = state.storage is not None and state.sources is None
            if not (addresses or kept) or not self.recipes.is_coming(state):
                return reply(Lost(self.recipes.lost_message(state)))

            def enough() -> bool:
                return held.suffices_with(
                    np.array([bool(self.homes.holder_of(key)) for key in spec.keys])
                )

            # If it were asked again and again, a product would begin up to half a second later.
            return reply(Waiting(waited=await state.arrived(enough)))
        if self.recipes.checks_come(state):
            waited = await state.arrived(lambda: not self.recipes.checks_come(state))
            return reply(Waiting(waited=waited))
        if leaves and attempt is not None and self.supervisor.leave(as_key(attempt[0]), failing):
            return reply(Over())
        if measured and attempt is not None:
            self.supervisor.reconsider(as_key(attempt[0]), addresses, speeds)
        speeds = self.speeds.with_trials(addresses, speeds, layout.even_share)
        speeds, delays = in_seconds(addresses, speeds, measured, lags)
        try:
            first = POLICIES[policy].first(layout, speeds, delays)
        except InfeasibleError:
            first, speeds = None, all_tried(speeds)
        return reply(
            RoundPlan(
                addresses=tuple(addresses),
                host=tuple(held.host),
                speeds=tuple(speeds.tolist()),
                lags=tuple(delays.tolist()),
                first=first,
                work=state.work,
                spec=None if known == len(state.spec.keys) else state.spec,
                checks=tuple(next(iter(self.homes.answering(k)), "") for k in spec.check_keys),
                growth=state.errors.of_shares(spec.code) if spec.check_keys else (),
                errors=state.errors.usual(spec.code),
            )
        )

    def leads(self, key: Key, run: int) -> bool:
        """Handler: whether a run of a task is the present one."""
        ts = self.scheduler.tasks.get(as_key(key))
        return ts is not None and ts.state == "processing" and ts.run_id == run

    def wanted(self) -> int:
        """Handler: how many workers running trainings, or arrays in use, can use.

        An array is in use while its rounds run, or if they ran lately.
        """
        tasks = (self.scheduler.tasks.get(key) for key in self._holding)
        found = [coded_task(ts.run_spec) for ts in tasks if ts is not None]
        used = {i for task in found if task is not None for i in task.array_ids}
        arrays = self.arrays.wanted(used, since=time() - Timeouts.USED)
        # Those of trainings, whose plugin this one does not know.
        plugins = [p for p in self.scheduler.extensions.values() if p is not self]
        busy = {a for p in plugins if isinstance(p, SchedulerExtension) for a in p.busy()}
        return max(arrays, len(busy.intersection(self.scheduler.workers)))

    def replaceable(self, ts: TaskState, silent: Collection[str]) -> bool:
        """Whether what a task makes can be made again without silent workers."""
        if (task := coded_task(ts.run_spec)) is not None:
            return all(self.arrays.get(array) for array in task.array_ids)
        return self.homes.replaceable(ts, silent)

    def _changed(self, change: Changed) -> None:
        """Act on the standing of a worker, which has changed."""
        self.placing.changed()
        if change.standing is Standing.ALIVE:
            self.supervisor.available(change.peer)
            self.homes.bring_home()

    @logged
    def heartbeat(self, ws: WorkerState, data: float) -> None:
        """Take what a worker's plugin adds to its heartbeat: the seconds of a small product."""
        self.standings.heard(ws.address)
        self.placing.measured(ws.address, data)
        active = not self._is_idle
        if active != (ws.address in self._active) and ws.address in self.scheduler.stream_comms:
            self._active ^= {ws.address}
            self.scheduler.worker_send(ws.address, {"op": "coded-active", "active": active})

    @property
    def _is_idle(self) -> bool:
        """Whether the cluster has no array, and runs no round and no training."""
        return not self.arrays and self.supervisor.is_idle

    # -- hooks of the scheduler ----------------------------------------------------------------

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: Any) -> None:
        for key in tasks:
            ts = scheduler.tasks.get(key)
            if ts is None or self.homes.pin(key):
                continue
            if (task := coded_task(ts.run_spec)) is not None:
                self.supervisor.add(ts)
                # A graph also names tasks whose results are there already: these need no pieces.
                if key not in self._holding and ts.state not in ("memory", "erred"):
                    self._hold(ts, task)

    def _hold(self, ts: TaskState, task: CodedTask) -> None:
        """Keep the pieces of a round while it runs."""
        found = [self.arrays.get(array) for array in task.array_ids]
        # Algorithms may also multiply with the transpose.
        backs = [getattr(state.spec, "transposed", None) or "" for state in found if state]
        found += map(self.arrays.get, backs)
        self._holding.hold(ts.key, [state for state in found if state])

    def transition(
        self, key: Key, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        if not self.arrays and self.supervisor.knows_none:
            return  # most transitions on a shared cluster are those of others
        self.supervisor.transition(key, start, finish)
        if self.arrays and (ts := self.scheduler.tasks.get(key)):
            self.homes.transition(ts, finish)
            again = finish == "waiting" and key not in self._holding
            if again and (task := coded_task(ts.run_spec)) is not None:
                self._hold(ts, task)  # its result was lost
        if finish in ("memory", "erred", "forgotten"):
            self._holding.release(key)
            self.loops.forget(key)
        if finish == "forgotten":
            self.arrays.forget(key)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._joining[worker] = self.standings.clock() + self.standings.membership.timeouts.joining

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        self._joining.pop(worker, None)
        self.observer.remove_worker(worker)
        self.versions.pop(worker, None)
        self.others.pop(worker, None)
        self.refused.pop(worker, None)
        self.records.forget(worker)
        self._active.discard(worker)
        self.standings.left(worker)
        self.placing.remove_worker(worker)
        self.homes.remove_worker(worker, stimulus_id)
        running = [ts for key in self._holding if (ts := scheduler.tasks.get(key))]
        self.arrays.remove_worker(running)
        self.arrays.left(worker)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.arrays.remove_client(client)

    def log_event(self, topic: str, msg: Any) -> None:
        """Release data that were scattered for a client which has left meanwhile.

        The scheduler makes a client of that name again, to hold the data. Nothing would ever
        release them, because no process is connected to it. Connected clients tell their versions.
        """
        # Users log events of their own, with any fields.
        if not isinstance(msg, dict) or not isinstance(action := msg.get("action"), str):
            return
        if topic == NAME:
            self.observer.logged(action)
        if topic == "all" and action == "remove-worker" and not msg.get("expected"):
            self.observer.lost(str(msg.get("worker")))
        if action == "worker-status-change" and msg.get("status") == "running":
            self.supervisor.available(topic)  # it was paused, perhaps since it joined
        if action in _MOVES:
            self.homes.bring_home()
        if action != "scatter":
            return
        client = self.scheduler.clients.get(str(msg.get("client")))
        if client is not None and not client.versions:
            self.scheduler.remove_client(client=client.client_key)

    def restart(self, scheduler: Scheduler) -> None:
        scheduler.set_metadata(keys=[NAME], value=__version__)  # Dask has deleted it
        self.arrays.clear()
        self._holding.clear()
        self.supervisor.clear()
        self.loops.clear()

    def busy(self) -> set[str]:
        """Return the workers that hold pieces of a running round."""
        return {ws.address for ts in self._holding.pieces() for ws in ts.who_has or ()}


def _named(addresses: Iterable[str], allowed: Sequence[str] | None) -> set[str]:
    """Return those of some addresses that the user named, or all if the user named none."""
    return {address for address in addresses if allowed is None or address in allowed}
