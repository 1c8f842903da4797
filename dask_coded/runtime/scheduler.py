"""The scheduler's half of S2C2: what must be known of all workers, arrays and rounds in one place.

It places pieces, remembers how fast every worker has been, and answers each round's question with
an assignment that sizes every worker's part by its predicted speed. Where a piece is, is asked of
the scheduler's own state each time, so that retirement, rebalancing and repair need no bookkeeping.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.typing import Key
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time
from distributed.protocol import to_serialize
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import ToPickle
from distributed.utils import offload

from dask_coded._version import __version__
from dask_coded.codes import DecodeError
from dask_coded.planning import POLICIES, InfeasibleError, Layout, SpeedHistory, in_seconds
from dask_coded.planning.layout import Floats
from dask_coded.runtime.directory import LoopDirectory
from dask_coded.runtime.placement import WorkerInfo, place, relief
from dask_coded.runtime.spec import NAME, ArraySpec, CodedTask, as_key
from dask_coded.runtime.worker import CodedWorkerPlugin

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger("distributed.dask_coded")


@dataclass
class ArrayState:
    """What the scheduler knows of one coded array."""

    spec: ArraySpec
    #: Keys of the source blocks while the array is being encoded.
    sources: tuple[Key, ...] | None
    work: Floats | None = None
    #: Bytes that workers have fetched from each other to make pieces.
    received: int = 0
    #: Keys of pieces that somebody still wants.
    alive: set[Key] = field(default_factory=set)
    #: The workers that were named for it; None: all that there are.
    allowed: set[str] | None = None


class S2C2SchedulerPlugin(SchedulerPlugin):
    """Places coded pieces, predicts worker speeds, and deals out the rounds' work by them."""

    name = NAME
    idempotent = True
    _ready: asyncio.Event

    async def start(self, scheduler: Scheduler) -> None:
        # Two clients may install at once: the scheduler sees the name only when the first is done.
        first = scheduler.extensions.get("coded")
        if isinstance(first, S2C2SchedulerPlugin):
            await first._ready.wait()
            return
        self._ready = asyncio.Event()
        scheduler.extensions["coded"] = self
        try:
            await self._set_up(scheduler)
        finally:
            self._ready.set()

    async def _set_up(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.arrays: dict[str, ArrayState] = {}
        self.speeds = SpeedHistory()
        #: Version of the package on every worker that has the plugin.
        self.versions: dict[str, str] = {}
        self._piece_keys: dict[Key, str] = {}
        self._pins: dict[Key, str] = {}
        self._holding: dict[Key, str] = {}
        self._silent: dict[str, float] = {}
        self.loops = LoopDirectory(scheduler, self.versions, self._best)
        scheduler.handlers.update(
            coded_hello=self.hello,
            coded_keepers=self.loops.keepers,
            coded_candidates=self.loops.candidates,
            coded_enough=self.loops.enough,
            coded_holders=self.holders,
            coded_register=self.register,
            coded_sealed=self.sealed,
            coded_abandon=self.abandon,
            coded_extend=self.extend,
            coded_made=self.made,
            coded_sources=self.sources,
            coded_plan=self.plan,
        )
        await scheduler.register_worker_plugin(
            None, dumps(CodedWorkerPlugin()), name=NAME, idempotent=True
        )

    # -- encoding ------------------------------------------------------------------------------

    def hello(self, worker: str, version: str) -> None:
        """Handler: a worker has the plugin."""
        self.versions[worker] = version
        self.scheduler.loop.add_callback(self._relieve, worker)

    async def register(
        self,
        spec: ArraySpec,
        sources: Sequence[Key],
        allowed: Sequence[str] | None,
        version: str,
        oversubscribe: bool,
    ) -> dict[str, Any]:
        """Handler: a new array is going to be encoded; answers where its pieces go."""
        if message := self._unfit(version):
            return {"status": "unfit", "message": message}
        workers = [
            WorkerInfo(ws.address, ws.host, self._pieces_on(ws))
            for ws in self.scheduler.running
            if ws.address in self.versions and (allowed is None or ws.address in allowed)
        ]
        speeds = self._predict([w.address for w in workers])
        homes = spec.homes
        known = [
            (int(spec.code.place[piece]), self._located(key))
            for piece, key in zip(homes, sources, strict=True)
        ]
        try:
            places = place(spec.code, workers, speeds, known, oversubscribe=oversubscribe)
        except ValueError as exc:
            lacking = len(self.scheduler.running) - len(workers) if allowed is None else 0
            extra = f" {lacking} more lack the package dask_coded." * (lacking > 0)
            return {"status": "unfit", "message": f"{exc}{extra}"}
        worker_of = [places[p] for p in spec.code.place.tolist()]
        sources = tuple(map(as_key, sources))
        named = None if allowed is None else set(allowed)
        self.arrays[spec.id] = ArrayState(spec, sources, alive=set(spec.keys), allowed=named)
        for key, worker in zip(spec.keys, worker_of, strict=True):
            self._piece_keys[key] = spec.id
            self._pins[key] = worker
        for piece, key in zip(homes, sources, strict=True):
            self._pins[key] = worker_of[piece]
        self._log("register", array=spec.id, code=repr(spec.code), workers=worker_of)
        return {"status": "OK", "workers": worker_of}

    def _unfit(self, version: str) -> str | None:
        own = __version__
        if version != own:
            return (
                f"The client has dask_coded {version}, the scheduler {own}: "
                f"install the same version on both."
            )
        if other := {v for v in self.versions.values() if v != own}:
            return (
                f"Workers have dask_coded {', '.join(sorted(other))}, the scheduler {own}: "
                f"install the same version on all of them."
            )
        return None

    def _pieces_on(self, ws: WorkerState) -> int:
        return sum(ts.key in self._piece_keys for ts in ws.has_what)

    def sealed(self, array: str) -> int:
        """Handler: all pieces are made; from now on they are their own source.

        Answers how many bytes of rows workers have fetched from each other to make them.
        """
        if (state := self.arrays.get(array)) is None:
            return 0
        for key in state.sources or ():
            self._pins.pop(key, None)
        state.sources = None
        return state.received

    def extend(self, array: str, allowed: Sequence[str] | None) -> dict[str, Any]:
        """Handler: workers without a piece of an array are to make themselves new ones."""
        if (state := self.arrays.get(array)) is None:
            return {"status": "lost", "message": "The coded array has been released."}
        taken = {self._pins.get(key) for key in state.spec.keys}
        new = [
            address
            for address in self.versions
            if address in self.scheduler.workers
            and address not in taken
            and (allowed is None or address in allowed)
        ]
        if not new:
            return {
                "status": "unfit",
                "message": "Every worker holds a piece already: scale the cluster, then extend.",
            }
        if state.allowed is not None:
            state.allowed.update(new)
        state.spec = spec = state.spec.extended(len(new))
        if state.work is not None:
            state.work = np.concatenate([state.work, spec.uniform_work[-len(new) :]])
        for key, worker in zip(spec.keys[-len(new) :], new, strict=True):
            state.alive.add(key)
            self._piece_keys[key] = array
            self._pins[key] = worker
        self._log("extend", array=array, code=repr(spec.code), workers=new)
        return {"status": "OK", "spec": ToPickle(spec), "workers": new}

    def abandon(self, array: str) -> None:
        """Handler: encoding has failed; forget the array."""
        if state := self.arrays.pop(array, None):
            for key in (*state.spec.keys, *(state.sources or ())):
                self._pins.pop(key, None)
                self._piece_keys.pop(key, None)

    def made(self, array: str, piece: int, received: int, work: list[float] | None) -> None:
        """Handler: a piece is made, of so many bytes from elsewhere.

        Of a sparse one the work per stripe is known now.
        """
        if state := self.arrays.get(array):
            state.received += received
            if state.sources is None:
                self._log("made", array=array, piece=piece, received=received)
            if work is not None:
                if state.work is None:
                    state.work = state.spec.uniform_work
                state.work[piece] = work

    async def sources(self, array: str, piece: int, avoid: Sequence[str] = ()) -> dict[str, Any]:
        """Handler: what to make a piece from, each as pieces.py wants it."""
        if (state := self.arrays.get(array)) is None:
            return {"status": "lost", "message": "The coded array has been released."}
        spec, keys = state.spec, state.sources
        if keys is not None:
            ingredients = spec.from_sources(piece)
        else:
            keys = spec.keys
            others = [i for i, key in enumerate(keys) if i != piece and self._holders(key, avoid)]
            try:
                ingredients = await offload(spec.from_pieces, piece, others)
            except (DecodeError, ValueError):
                return {"status": "lost", "message": self._lost_message(state)}
        found = []
        for source, weight, rows, start, at in ingredients:
            key = keys[source]
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state == "erred":
                return {"status": "lost", "message": self._lost_message(state)}
            if not (holders := self._holders(key, avoid)):
                return {"status": "waiting"}
            found.append((key, holders, weight, rows, start, at))
        return {"status": "OK", "sources": found, "spec": ToPickle(spec)}

    def _holders(self, key: Key, avoid: Sequence[str] = ()) -> list[str]:
        ts = self.scheduler.tasks.get(key)
        return [ws.address for ws in (ts and ts.who_has) or () if ws.address not in avoid]

    def _holder_of(self, key: Key) -> str | None:
        """The worker to compute on a piece: where it was made, even if others have copies."""
        holders = self._holders(key)
        pin = self._pins.get(key)
        return pin if pin in holders else next(iter(holders), None)

    def _located(self, key: Key) -> str | None:
        return next(iter(self._holders(as_key(key))), None)

    def _lost_message(self, state: ArrayState) -> str:
        left = sum(bool(self._holders(key)) for key in state.spec.keys)
        return (
            f"{state.spec.code!r} can lose {state.spec.code.tolerance} workers; "
            f"{left} of its {state.spec.code.pieces} pieces are left, which do not suffice: "
            f"encode the array again, with more redundancy if workers come and go."
        )

    # -- rounds --------------------------------------------------------------------------------

    async def plan(
        self,
        array: str,
        measured: dict[str, float],
        lags: dict[str, float],
        policy: str,
        predictor: str,
        silent: Sequence[str],
        known: int,
    ) -> dict[str, Any]:
        """Handler: measurements of the rounds before come in, the next assignment goes out.

        And the array's spec, if the one who asks knows another number of pieces.
        """
        self.speeds.record({w: s for w, s in measured.items() if w in self.scheduler.workers})
        now = time()
        self._silent.update((address, now) for address in silent)
        if (state := self.arrays.get(array)) is None:
            return {"status": "lost", "message": "The coded array has been released."}
        answer: dict[str, Any] = {"spec": None}
        if known != len(state.spec.keys):
            answer["spec"] = ToPickle(state.spec)
        holder = [self._holder_of(key) for key in state.spec.keys]
        addresses = sorted({address for address in holder if address})
        number = {address: i for i, address in enumerate(addresses)}
        host = [number.get(address or "", -1) for address in holder]
        layout = Layout.of(
            state.spec.code, host, state.spec.uniform_work if state.work is None else state.work
        )
        if layout.lacking((layout.host >= 0)[:, None]).any():
            coming = any(
                ts.state in ("processing", "waiting", "no-worker", "queued", "released")
                for key in state.spec.keys
                if (ts := self.scheduler.tasks.get(key))
            )
            if not coming or not addresses:
                return answer | {"status": "lost", "message": self._lost_message(state)}
            return answer | {"status": "waiting"}
        speeds = self._predict(addresses, predictor)
        speeds, delays = in_seconds(addresses, speeds, measured, lags)
        try:
            first = POLICIES[policy]().first(layout, speeds, delays)
        except InfeasibleError:
            # Those not heard of have to be tried as well.
            first, speeds = None, np.maximum(speeds, 1e-3 * speeds.max(initial=1e-3))
        return answer | {
            "status": "OK",
            "addresses": addresses,
            "host": host,
            "speeds": speeds.tolist(),
            "lags": delays.tolist(),
            "first": first,
            "work": None if state.work is None else to_serialize(state.work),
        }

    def _predict(self, addresses: Sequence[str], predictor: str = "exponential") -> Floats:
        """Predicted speeds; zero for a worker that was silent and has not been heard of since."""
        speeds = self.speeds.predict(addresses, predictor)
        for i, address in enumerate(addresses):
            since = self._silent.get(address)
            ws = self.scheduler.workers.get(address)
            if since is not None and ws is not None:
                if ws.last_seen > since:
                    del self._silent[address]
                else:
                    speeds[i] = 0.0
        return speeds

    def _best(self, addresses: Sequence[str]) -> list[str]:
        """The fastest first."""
        order = np.argsort(-self._predict(addresses), kind="stable")
        return [addresses[i] for i in order]

    # -- trainings -----------------------------------------------------------------------------

    def holders(self, key: Key) -> dict[str, Any]:
        """Handler: who holds a block of data."""
        key = as_key(key)
        ts = self.scheduler.tasks.get(key)
        if ts is None or ts.state in ("erred", "forgotten"):
            return {"status": "lost"}
        return {"status": "OK", "holders": self._holders(key)}

    # -- hooks of the scheduler ----------------------------------------------------------------

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: Any) -> None:
        if not self.arrays:
            return
        for key in tasks:
            ts = scheduler.tasks.get(key)
            if ts is None:
                continue
            if (pin := self._pins.get(key)) and not ts.who_has:
                scheduler.set_restrictions({key: {pin} if pin in scheduler.workers else None})
            elif isinstance(ts.run_spec, CodedTask) and key not in self._holding:
                self._hold(ts, ts.run_spec)

    def _hold(self, ts: TaskState, task: CodedTask) -> None:
        """Keep the pieces of a round while it runs, and have it run on a fast worker."""
        holder = f"coded-{ts.key}"
        for array in task.array_ids:
            if state := self.arrays.get(array):
                self.scheduler.client_desires_keys(list(state.alive), client=holder)
                self._holding[ts.key] = holder
        addresses = [a for a in self.scheduler.workers if a in self.versions]
        if not ts.worker_restrictions and addresses:
            speeds = self._predict(addresses)
            fast = speeds >= 0.8 * np.median(speeds)
            ts.worker_restrictions = {a for a, f in zip(addresses, fast, strict=True) if f}
            ts.loose_restrictions = True

    def transition(
        self, key: Key, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        if finish in ("memory", "erred", "forgotten"):
            if holder := self._holding.pop(key, None):
                # Transitions must not be started from within one.
                self.scheduler.loop.add_callback(self._release, holder)
            self.loops.forget(key)
        if finish == "forgotten" and (array := self._piece_keys.pop(key, None)):
            self._pins.pop(key, None)
            if state := self.arrays.get(array):
                state.alive.discard(key)
                if not state.alive:
                    self._log("release", array=array)
                    del self.arrays[array]

    def _release(self, holder: str) -> None:
        if client := self.scheduler.clients.get(holder):
            keys = [ts.key for ts in client.wants_what]
            self.scheduler.client_releases_keys(keys=keys, client=holder)
            self.scheduler.clients.pop(holder, None)

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Have lost pieces rebuilt elsewhere; tasks pinned to a lost worker would wait for ever."""
        self.versions.pop(worker, None)
        self.speeds.forget(worker)
        self._silent.pop(worker, None)
        lost = [key for key, pin in self._pins.items() if pin == worker]
        stranded: dict[Key, Any] = {}
        for key in lost:
            ts = scheduler.tasks.get(key)
            if ts is None:
                continue
            if key in self._piece_keys:
                self._pins[key] = pin = self._spare(self.arrays[self._piece_keys[key]])
                scheduler.set_restrictions({key: {pin} if pin else None})
            else:
                del self._pins[key]
                scheduler.set_restrictions({key: None})
            if ts.state == "no-worker":
                stranded[key] = "processing"
        if stranded:
            self._log("repair", keys=list(map(str, stranded)), worker=worker)
            scheduler.transitions(stranded, stimulus_id=stimulus_id)

    def _spare(self, state: ArrayState) -> str:
        """The worker on which to rebuild a piece: one with few pieces of the array, and fast."""
        addresses = [a for a in self.versions if a in self.scheduler.workers]
        # On those named for it, unless nobody is left of them.
        addresses = [a for a in addresses if a in (state.allowed or addresses)] or addresses
        pinned = [self._pins.get(key) for key in state.spec.keys]
        speeds = dict(zip(addresses, self._predict(addresses), strict=True))
        return min(addresses, key=lambda a: (pinned.count(a), -speeds[a]), default="")

    async def _relieve(self, newcomer: str) -> None:
        """Have a new worker take over pieces from those that hold several for want of others."""
        for state in list(self.arrays.values()):
            if state.sources is not None or newcomer not in (state.allowed or {newcomer}):
                continue
            keys, code = state.spec.keys, state.spec.code
            due = code.pieces // code.n
            while True:
                homes = [self._pins.get(key, "") for key in keys]
                piece = relief(homes, due, newcomer)
                if piece is None or not await self._take_over(keys[piece], newcomer):
                    break
                self._log("relieve", array=state.spec.id, piece=piece, workers=[newcomer])

    async def _take_over(self, key: Key, newcomer: str) -> bool:
        """Copy a piece to a worker, whose it is from now on; whether that went well."""
        if not (holders := self._holders(key)):
            return False
        # At once, so that another new worker looks for another piece.
        before, self._pins[key] = self._pins[key], newcomer
        failed = await self.scheduler.gather_on_worker(newcomer, {key: holders})
        if key not in self._pins:  # nobody wants it any more
            return False
        if failed or newcomer not in self._holders(key):
            self._pins[key] = before
            return False
        for address in set(self._holders(key)) - {newcomer}:
            await self.scheduler.delete_worker_data(address, [key], "coded-relieve")
        return True

    def restart(self, scheduler: Scheduler) -> None:
        self.arrays.clear()
        self._piece_keys.clear()
        self._pins.clear()
        self._holding.clear()
        self.loops.clear()

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Workers that take part in a running round stay."""
        busy = {
            ws
            for holder in self._holding.values()
            if (client := scheduler.clients.get(holder))
            for ts in client.wants_what
            for ws in ts.who_has or ()
        }
        return [ws for ws in workers if ws not in busy]

    def _log(self, action: str, **fields: Any) -> None:
        self.scheduler.log_event(NAME, {"action": action, **fields})
