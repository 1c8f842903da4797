"""Where pieces are, and on which workers they belong.

Each piece belongs to one worker, and so does each check of a block. A task that makes one is
restricted to its worker. If that worker is lost, the piece gets another home and is made there. A
worker that joins becomes the home of pieces of workers that have several, or are slow for long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.typing import Key
from distributed import Status
from distributed.metrics import time

from dask_coded.codes import DecodeError
from dask_coded.membership import Timeouts
from dask_coded.rounds.capacity import worth_replacing
from dask_coded.rounds.placement import not_slow, relief, spare
from dask_coded.runtime.scheduler.replicas import Homecoming
from dask_coded.runtime.scheduler.state import ArrayState
from dask_coded.runtime.spec import NAME, as_key, coded_task
from dask_coded.transport.exceptions import logged
from dask_coded.typing import Floats

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

# A worker may fill at most this fraction of its memory limit when a piece comes, as one message. At
# 0.95, Dask's default, its nanny kills it.
_FULL = 0.9


class Homes:
    """The homes of all pieces and checks, and of source blocks while an array is encoded.

    Which workers hold a piece is known from the scheduler's own state, so retirement and
    rebalancing need no bookkeeping here.

    Parameters
    ----------
    scheduler : Scheduler
    able : collection of str
        Addresses of workers that have the plugin; it changes as workers come and go.
    predict : callable(addresses) -> ndarray
        Predicted speeds.
    lasting : callable(addresses) -> ndarray
        Speeds as they have been for many rounds.
    silent : collection of str
        Addresses of workers that are known not to answer at present; it changes, too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        able: Collection[str],
        predict: Callable[[Sequence[str]], Floats],
        lasting: Callable[[Sequence[str]], Floats],
        silent: Collection[str],
    ) -> None:
        self._scheduler = scheduler
        self._able = able
        self._predict = predict
        self._lasting = lasting
        self._silent = silent
        #: By the key of a piece or a check.
        self._arrays: dict[Key, ArrayState] = {}
        self._pins: dict[Key, str] = {}
        # The restrictions that source blocks had before. Some blocks are chunks of the user's.
        self._limits: dict[Key, set[str] | None] = {}
        self._homecoming = Homecoming(
            scheduler, self._rescue, self._homes, silent, self._stored, self._can_come
        )
        scheduler.stream_handlers["coded-moved"] = logged(self.moved)
        scheduler.stream_handlers["coded-lost"] = logged(self.lost)

    # -- what belongs where --------------------------------------------------------------------

    def add(self, state: ArrayState, homes: Mapping[Key, str]) -> None:
        """Record the homes of pieces and checks of an array, before there are tasks for them."""
        self._arrays |= dict.fromkeys(homes, state)
        self._pins |= homes
        state.even = False

    def add_sources(self, homes: Mapping[Key, str]) -> None:
        """Record where source blocks, and the steps on the way to them, are to be made."""
        self._pins |= homes

    def home(self, key: Key) -> str | None:
        """Return the worker that a piece or a block belongs to."""
        return self._pins.get(key)

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget the homes of pieces, checks and blocks; the restrictions of before hold again."""
        for key in keys:
            self._pins.pop(key, None)
            if state := self._arrays.pop(key, None):
                state.even = False
            self._homecoming.let_go(key)
            if key in self._limits:
                limit = self._limits.pop(key)
                if key in self._scheduler.tasks:
                    self._scheduler.set_restrictions({key: limit})
        if not self._arrays:
            self._homecoming.stop()

    def array_of(self, key: Key) -> ArrayState | None:
        """Return the array that a piece or a check is of."""
        return self._arrays.get(key)

    def pin(self, key: Key) -> bool:
        """Restrict a task that makes a piece or a block to its worker; return whether it does.

        An annotation of the user may ask for resources. Pieces ignore it, and blocks are made on
        workers that have the resources.
        """
        if not (pin := self._pins.get(key)) or (ts := self._scheduler.tasks[key]).who_has:
            return False
        if ts.resource_restrictions:
            # The worker may lack them, and the task may run nowhere else: it would wait for ever.
            if key not in self._arrays:
                self.drop([key])
                return False
            ts.resource_restrictions = None
        if key not in self._arrays:
            self._limits.setdefault(key, ts.worker_restrictions)
        there = pin in self._scheduler.workers
        self._scheduler.set_restrictions({key: {pin} if there else None})
        return True

    def clear(self) -> None:
        """Forget all homes."""
        self._arrays.clear()
        self._pins.clear()
        self._limits.clear()
        self._homecoming.stop()

    # -- where pieces are ----------------------------------------------------------------------

    def answers(self, address: str) -> bool:
        """Whether a worker is not silent, so that it makes or takes a piece soon."""
        return address not in self._silent

    def holders(self, key: Key, avoid: Collection[str] = ()) -> list[str]:
        """Return the addresses of the workers that hold a key."""
        ts = self._scheduler.tasks.get(key)
        return [ws.address for ws in (ts and ts.who_has) or () if ws.address not in avoid]

    def answering(self, key: Key, avoid: Collection[str] = ()) -> list[str]:
        """Return the workers that hold a key and are not known to be silent, its home first."""
        found = [a for a in self.holders(key, avoid) if a not in self._silent]
        return sorted(found, key=lambda address: address != self._pins.get(key))

    def holder_of(self, key: Key) -> str | None:
        """Return the worker that computes on a piece: its own, even if others have copies."""
        holders = self.holders(key)
        pin = self._pins.get(key)
        return pin if pin in holders else next(iter(holders), None)

    def replaceable(self, ts: TaskState, silent: Collection[str]) -> bool:
        """Whether a piece or a check can be made again without silent workers.

        True for all other data, and while the array is being encoded.
        """
        if (state := self.array_of(ts.key)) is None or state.sources is not None:
            return True
        spec = state.spec
        if self._stored(ts.key) is not None:
            return True
        if ts.key in spec.keys:
            piece = spec.keys.index(ts.key)
        else:
            piece = spec.code.systematic_pieces[spec.check_keys.index(ts.key)]
        there = [i for i, key in enumerate(spec.keys) if self.holders(key, silent)]
        if piece in there:
            return True
        try:
            spec.from_pieces(piece, there)
        except (DecodeError, ValueError):
            return False
        return True

    def slow_holders(self, keys: Iterable[Key]) -> set[Key]:
        """Return those of some keys that only slow or silent workers hold."""
        holders = {key: self.holders(key) for key in keys}
        addresses = sorted(set().union(*holders.values()))
        fast = set(np.array(addresses)[not_slow(self._predict(addresses))].tolist())
        return {key for key, found in holders.items() if fast.isdisjoint(found)}

    def pieces(self) -> Counter[str]:
        """Return how many pieces and checks each worker holds.

        A worker may also hold a hundred thousand data of others, which are not looked at.
        """
        tasks = (self._scheduler.tasks.get(key) for key in self._arrays)
        return Counter(ws.address for ts in tasks if ts for ws in ts.who_has or ())

    # -- data that is made elsewhere, or moved -------------------------------------------------

    def remove_worker(self, worker: str, stimulus_id: str) -> None:
        """Have lost pieces rebuilt elsewhere: tasks pinned to a lost worker would wait forever."""
        self._settle([key for key, pin in self._pins.items() if pin == worker], stimulus_id)

    def _settle(self, keys: Iterable[Key], stimulus_id: str) -> None:
        """Give data another worker, and have those that wait for one made there."""
        stranded: dict[Key, Any] = {}
        for key in keys:
            self._give_home(key)
            if (ts := self._scheduler.tasks.get(key)) and ts.state == "no-worker":
                stranded[key] = "processing"
        if stranded:
            self._log("repair", keys=list(map(str, stranded)))
            self._scheduler.transitions(stranded, stimulus_id=stimulus_id)

    def _give_home(self, key: Key) -> None:
        """Give data another worker."""
        if state := self._arrays.get(key):
            self._pin(key, self._spare(state, key))
        else:  # a source block, or a step on the way to one: any worker will do
            self.drop([key])

    def _homes(self) -> Iterator[tuple[TaskState, WorkerState]]:
        """Yield the pieces and checks in memory, each with the worker that it belongs to."""
        for key in self._arrays:
            ts = self._scheduler.tasks.get(key)
            home = self._scheduler.workers.get(self._pins.get(key, ""))
            if ts is not None and ts.who_has and home is not None:
                if home not in ts.who_has and not self._can_come(ts, home, used=0):
                    stays = [ws for ws in ts.who_has if ws in self._scheduler.running]
                    home = min(stays, key=lambda ws: ws.address, default=home)
                    self._pins[key], self._arrays[key].even = home.address, False
                    self._scheduler.set_restrictions({key: {home.address}})
                yield ts, home

    def _can_come(
        self, ts: TaskState, home: WorkerState, coming: int = 0, used: int | None = None
    ) -> bool:
        """Whether a worker can take a piece, and ``coming`` bytes of others, from another worker.

        What it uses just now counts, or ``used``.

        A piece comes as one message, and may have to be copied once to be aligned. On its holder it
        may lie in a file, so that Dask takes it to be small. If it was too large for the worker,
        the nanny would end that, which would join again and be sent the piece again.
        """
        limit = home.memory_limit
        if not limit or self._stored(ts.key) is not None or self._homecoming.is_held(ts.key):
            return True
        used = home.memory.optimistic if used is None else used
        return bool(used + coming + 2 * self._size(ts) <= _FULL * limit)

    def _size(self, ts: TaskState) -> int:
        """Return the bytes of a piece or a check in memory."""
        spec = self._arrays[ts.key].spec
        if spec.sparse_type or ts.key not in spec.keys:
            return int(ts.nbytes)
        rows = spec.piece_rows(spec.keys.index(ts.key))
        return max(int(ts.nbytes), rows * spec.columns * spec.dtype.itemsize)

    def _stored(self, key: Key) -> tuple[str, int] | None:
        """Return the array and the number of a piece that is in a store, None for other data."""
        state = self._arrays.get(key)
        if state is None or state.storage is None or key not in state.spec.keys:
            return None
        piece = state.spec.keys.index(key)
        return (state.spec.id, piece) if state.is_stored(piece) else None

    def bring_home(self) -> None:
        """Bring pieces back to their workers, as some may have been moved or copied."""
        if self._arrays:
            self._homecoming.soon()

    def transition(self, ts: TaskState, finish: str) -> None:
        """Follow a transition of any task, while there are arrays."""
        if finish == "memory" and (state := self._arrays.get(ts.key)):
            state.arrival.set()
        if ts.key in self._pins:
            if finish in ("memory", "no-worker"):
                self.bring_home()
            elif finish == "waiting" and self._pins[ts.key] in self._silent:
                self._give_home(ts.key)  # otherwise it would wait for that worker
        elif used := [needed.key for needed in ts.dependencies if needed.key in self._arrays]:
            if finish == "processing":  # its worker will fetch copies
                for key in used:
                    self._homecoming.hold(key, self._pins[key])
            elif finish in ("memory", "erred", "released", "forgotten"):
                self.bring_home()

    def moved(self, worker: str, key: Key, held: bool) -> None:
        """Stream handler: a worker has got a piece, or Dask has had it drop one.

        It may hold a dropped piece all the same. If the only other copy is lost meanwhile, the
        worker makes the piece from what it holds.
        """
        ts, ws = self._scheduler.tasks.get(key := as_key(key)), self._scheduler.workers.get(worker)
        if ts is None or ws is None or key not in self._arrays:
            return
        stays = ws.status in (Status.running, Status.paused) and self._pins[key] == worker
        if held and stays and ts.who_has and ws not in ts.who_has and self._homecoming.is_held(key):
            self._homecoming.put_back(key)
        else:
            self.bring_home()

    def is_held(self, key: Key) -> bool:
        """Whether its home still has a piece that Dask has dropped, as far as is known."""
        return self._homecoming.is_held(key)

    def not_held(self, key: Key) -> None:
        """Learn that the home of a piece does not have it."""
        self._homecoming.let_go(key)

    def _rescue(self) -> bool:
        """Have elsewhere made what a paused worker was to make: Dask would wait for it.

        Returns whether anything still waits.
        """
        running = {ws.address for ws in self._scheduler.running}.intersection(self._able)
        waiting = [
            key
            for key, pin in self._pins.items()
            if pin not in running
            and (ts := self._scheduler.tasks.get(key))
            and ts.state == "no-worker"
        ]
        if running and waiting:
            self._settle(waiting, f"coded-rescue-{time()}")
        return bool(waiting)

    def _pin(self, key: Key, address: str) -> None:
        """Have a piece or a check belong to a worker: it is moved there, or rebuilt there."""
        self._pins[key], self._arrays[key].even = address, False
        if key in self._scheduler.tasks:  # otherwise its task will come
            self._scheduler.set_restrictions({key: {address} if address else None})
            self.bring_home()

    def lost(self, worker: str, key: Key) -> None:
        """Stream handler: a worker cannot read what it has spilled, and never will."""
        ts = self._scheduler.tasks.get(key := as_key(key))
        holders = {ws.address: ws for ws in (ts and ts.who_has) or ()}
        if ts is None or worker not in holders:
            return
        stimulus = f"coded-lost-{time()}"
        if len(holders) == 1:
            self._scheduler.transitions({key: "released"}, stimulus_id=stimulus)
        elif not any(user.processing_on is holders[worker] for user in ts.waiters or ()):
            self._scheduler.request_remove_replicas(worker, [key], stimulus_id=stimulus)

    def make_elsewhere(self, state: ArrayState, key: Key, avoid: Collection[str]) -> None:
        """Have a check that is wrong made again by another worker than these, if possible."""
        self._pins[key] = home = self._spare(state, key, avoid)
        self._scheduler.set_restrictions({key: {home}})
        self._log("repair", keys=[str(key)])
        self._scheduler.transitions({key: "released"}, stimulus_id=f"coded-check-{time()}")

    def _spare(self, state: ArrayState, key: Key, avoid: Collection[str] = ()) -> str:
        """Choose where to rebuild a piece or a check."""
        known = self._scheduler.workers
        addresses = [a for a in self._able if a in known]
        addresses = [a for a in addresses if a not in avoid] or addresses
        # A worker that is paused or silent would make it only later.
        running = {ws.address for ws in self._scheduler.running}.difference(self._silent)
        addresses = [a for a in addresses if a in running] or addresses
        # Among the workers that were named for it, unless none of them is left.
        addresses = [a for a in addresses if a in (state.allowed or addresses)] or addresses
        speeds = dict(zip(addresses, self._predict(addresses), strict=True))
        # A worker that has it already is as good as any with as few pieces.
        speeds |= dict.fromkeys(speeds.keys() & self.holders(key, avoid), math.inf)
        keys = state.spec.keys
        homes = [self._pins.get(key, "") for key in keys]
        return spare(state.spec.code, homes, speeds, keys.index(key) if key in keys else None)

    def relieve(self, state: ArrayState, newcomer: str, slow: Sequence[str] = ()) -> int:
        """Have a new worker take over pieces of workers that hold several, or are slow.

        Returns how many it takes over.
        """
        if state.sources is not None or newcomer not in (state.allowed or {newcomer}):
            return 0
        if state.even and not slow:  # hundreds of workers may join, and there may be many arrays
            return 0
        keys, code, pins = state.spec.keys, state.spec.code, self._pins
        taken = coming = 0
        ws, fixed = self._scheduler.workers.get(newcomer), set[int]()
        while True:
            # Pieces that were released each count as a worker's only one.
            homes = [
                f"no worker, {key}" if (home := pins.get(key)) is None else home for key in keys
            ]
            piece = relief(code, homes, newcomer, slow, fixed)
            if piece is None:
                # Unless it is only this worker that takes none.
                state.even = not fixed and newcomer not in homes
                return taken
            # While it has no holder, it is made and not sent.
            ts = self._scheduler.tasks.get(keys[piece])
            if ws is not None and ts is not None and ts.who_has:
                if not self._can_come(ts, ws, coming):
                    fixed.add(piece)
                    continue
                coming += self._size(ts)
            self._pin(keys[piece], newcomer)
            self._log("relieve", array=state.spec.id, piece=piece, workers=[newcomer])
            taken += 1

    def wanted(self, state: ArrayState, gain: float) -> int:
        """Return how many workers an array can use.

        One for each place of its code, one more for each that is slow, and for each that is there
        without a piece because it is slow; at most twice the places, as all may be alike.
        """
        places = state.spec.code.n
        if not (slow := self.slow(state, gain)):
            return places
        homes = {self._pins.get(key) for key in state.spec.keys}
        empty = sorted(set(self._able).difference(homes))
        speeds = self._lasting([*slow, *empty])
        useless = int((speeds[len(slow) :] <= speeds[: len(slow)].max()).sum())
        return min(places + len(slow) + useless, 2 * places)

    def slow(self, state: ArrayState, gain: float) -> list[str]:
        """Return the workers, the slowest first, without which rounds would be shorter.

        In short rounds latency counts, and no speed can be told from it. A worker that coordinates
        rounds stays as it is.
        """
        if not state.seconds >= Timeouts.PLANS:
            return []
        homes = [self._pins.get(key, "") for key in state.spec.keys]
        known = self._scheduler.workers
        workers = [a for a in sorted(set(homes)) if a in known and not _coordinates(known[a])]
        speeds = dict(zip(workers, self._lasting(workers).tolist(), strict=True))
        return worth_replacing(state.spec.code, homes, speeds, gain)

    def _log(self, action: str, **fields: Any) -> None:
        self._scheduler.log_event(NAME, {"action": action, **fields})


def _coordinates(ws: WorkerState) -> bool:
    return any(coded_task(ts.run_spec) is not None for ts in ws.processing)
