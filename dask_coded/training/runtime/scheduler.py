"""The scheduler's part in trainings: which workers can take part, and when a training is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.core import Status

from dask_coded.runtime.answers import Holders, Lost, Reply, reply
from dask_coded.runtime.scheduler.extension import SchedulerExtension
from dask_coded.runtime.scheduler.plugin import CodedSchedulerPlugin
from dask_coded.runtime.scheduler.stuck import blocked, is_cheap, is_repeatable
from dask_coded.runtime.spec import as_key
from dask_coded.training.runtime.memberships import NAME, TrainingWorkerPlugin

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

# States of a worker that gets no new tasks, but still answers.
_CONTINUING = (Status.paused, Status.closing_gracefully)


class TrainingSchedulerPlugin(SchedulerExtension):
    """Names the workers for each training, and tells them when its leader's task has ended.

    It builds on :class:`~dask_coded.runtime.scheduler.plugin.CodedSchedulerPlugin`, which is
    registered before it.
    """

    name = NAME

    async def set_up(self, scheduler: Scheduler) -> None:
        coded = scheduler.extensions[CodedSchedulerPlugin.name]
        assert isinstance(coded, CodedSchedulerPlugin)
        self.scheduler = scheduler
        self._coded = coded
        #: By the key of the leader's task, the workers that may know of its training, and whether
        #: they may have a replica.
        self._involved: dict[Key, dict[str, bool]] = {}
        scheduler.handlers.update(
            coded_candidates=self.candidates,
            coded_enough=self.enough,
            coded_holders=self.holders,
        )
        await self.give(scheduler, NAME, TrainingWorkerPlugin)

    def candidates(
        self, key: Key, worker: str, allowed: Sequence[str] | None, round: int
    ) -> list[str]:
        """Handler: name the workers that can take part in a training from that step on."""
        if key not in self.scheduler.tasks:
            # It was cancelled just now. No worker would hear of its end, so none may take part.
            return []
        self._coded.observer.coordinates(key)
        involved = self._involved.setdefault(key, {})
        named = None if allowed is None else set(allowed)
        able = [
            ws.address
            for ws in self.scheduler.workers.values()
            if self._can_take_part(ws, involved.get(ws.address, False))
            and (named is None or ws.address in named)
        ]
        involved.setdefault(worker, False)
        involved.update(dict.fromkeys(able, True))
        self._coded.supervisor.follow(as_key(key), able, round, self._standing)
        return self._coded.records.best(able)

    def _can_take_part(self, ws: WorkerState, member: bool) -> bool:
        """Whether a worker can take part in a training; members may have a replica already."""
        # A paused or retiring worker continues its trainings. If it were left out, and all other
        # workers were new, the state of the training would be lost.
        status = ws.status == Status.running or (member and ws.status in _CONTINUING)
        return (
            status
            and ws.address not in self._coded.standings.suspects
            and ws.address in self._coded.versions
            and ws.address not in self.giving  # it has the first plugin, but not this one's
        )

    def _standing(self, worker: str, task: Key, address: str, silent: bool) -> None:
        """Tell a leader that another worker is silent, or available."""
        self._send(worker, "coded-standing", task=task, address=address, silent=silent)

    def enough(self, training: str) -> None:
        """Handler: the client wants a training to end soon; its leader is told."""
        for address in self._coded.versions:
            self._send(address, "coded-enough", training=training)

    def holders(self, key: Key, avoid: Sequence[str] = ()) -> Reply:
        """Handler: which workers hold a block; answers :class:`Holders` or :class:`Lost`.

        Workers in ``avoid`` do not answer. A block that only they hold is computed again, if it can
        be.
        """
        key = as_key(key)
        ts = self.scheduler.tasks.get(key)
        if ts is not None and ts.state == "erred":
            failed = ts.exception_blame or ts  # it may be what the block is computed from
            # Dask has no text if a task has ended the processes of all workers that ran it.
            reason = failed.exception_text or "the workers that computed it have died"
            return reply(
                Lost(
                    f"A block of the training's data, {key!r}, cannot be computed: task "
                    f"{failed.key!r} has failed, {reason}."
                )
            )
        if ts is None or ts.state == "forgotten":
            return reply(
                Lost(
                    f"A block of the training's data, {key!r}, is lost with the worker that held "
                    "it: train on dask arrays that can be computed again, such as those of "
                    "`da.from_zarr`, not on scattered data."
                )
            )
        silent = self._coded.standings.suspects.union(avoid)
        homes = self._coded.homes
        found = homes.holders(key, silent)
        if not found:

            def may_run(ts: TaskState) -> bool:
                # Other suspects may only be busy, with the block itself for example.
                if all(ws.address in avoid for ws in ts.who_has or (ts.processing_on,) if ws):
                    return is_repeatable(ts)
                return is_cheap(ts) if ts.who_has else self._coded.supervisor.is_late(ts)

            again = blocked([ts], silent, self._coded.replaceable, may_run)
            # So that it is computed where nothing waits for them.
            there = {ws.address for ts in again for ws in ts.who_has or (ts.processing_on,) if ws}
            self._coded.standings.suspect(there.intersection(avoid))
            self._coded.supervisor.run_again(again)  # whoever asks will ask again
            if ts not in again:
                found = homes.holders(key)  # they may answer later
        return reply(Holders(tuple(found)))

    def transition(
        self, key: Key, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        if finish in ("memory", "erred", "forgotten"):
            for address in self._involved.pop(key, ()):
                run = self.scheduler.tasks[key].run_id
                self._send(address, "coded-training-over", task=key, run=run)

    def busy(self) -> set[str]:
        """Return the workers that may take part in a training."""
        return {address for involved in self._involved.values() for address in involved}

    def restart(self, scheduler: Scheduler) -> None:
        self._involved.clear()

    def _send(self, worker: str, op: str, **fields: Any) -> None:
        if worker in self.scheduler.stream_comms:
            self.scheduler.worker_send(worker, {"op": op, **fields})
