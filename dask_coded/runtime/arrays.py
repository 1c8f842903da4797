"""The coded arrays that the scheduler knows: where their pieces are, and where they go."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.typing import Key
from distributed.metrics import time
from distributed.utils import offload

from dask_coded._version import __version__
from dask_coded.codes import DecodeError
from dask_coded.rounds.footprint import Footprint, Footprints, worth_parts
from dask_coded.rounds.placement import WorkerInfo, not_slow, place, relief, spare
from dask_coded.rounds.scaling import Exponents
from dask_coded.runtime.answers import (
    Extended,
    Lost,
    Placed,
    Recipe,
    Reply,
    Source,
    Unfit,
    Waiting,
    reply,
)
from dask_coded.runtime.replicas import keep_home
from dask_coded.runtime.spec import NAME, ArraySpec, CodedSpec, as_key
from dask_coded.typing import Floats

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger("distributed.dask_coded")

# Relative error of a rebuilt row from which on verification is said to find little.
_VAGUE = 1e-3
RELEASED = "The coded array has been released."


@dataclass
class ArrayState:
    """What the scheduler knows of one coded array."""

    spec: CodedSpec
    #: While the array is being encoded, keys of the source blocks, then those of their steps.
    sources: tuple[Key, ...] | None
    #: The client that encodes it.
    client: str
    work: Floats | None = None
    #: Bytes that workers have fetched from each other to make pieces.
    received: int = 0
    #: Exponents of the rows of source blocks, as far as they have been reported.
    exponents: dict[int, Exponents] = field(default_factory=dict)
    #: Footprints of source blocks, as far as they have been reported.
    footprints: dict[int, Footprint] = field(default_factory=dict)
    #: For each rebuilt piece, see :attr:`RoundPlan.growth`.
    growth: dict[int, float] = field(default_factory=dict)
    #: Keys of pieces that a client or a task still wants.
    alive: set[Key] = field(default_factory=set)
    #: The workers that the user named for it; None for all.
    allowed: set[str] | None = None

    def lost_message(self, held: int) -> str:
        """Say that the pieces that are left do not suffice."""
        code = self.spec.code
        return (
            f"{code!r} can lose {code.tolerance} workers; {held} of its {code.pieces} pieces are "
            f"left, which do not suffice: encode the array again, with more redundancy if workers "
            f"come and go."
        )


class ArrayDirectory(Mapping[str, ArrayState]):
    """The coded arrays by id; places their pieces, and has lost pieces rebuilt.

    Each piece is pinned to a worker. The scheduler's own state says which workers hold it, so
    retirement and rebalancing need no bookkeeping here.

    Parameters
    ----------
    scheduler : Scheduler
    versions : mapping of str to str
        Version of the package on every worker that has the plugin; changes as workers come and go.
    predict : callable(addresses) -> ndarray
        Predicted speeds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        versions: Mapping[str, str],
        predict: Callable[[Sequence[str]], Floats],
    ) -> None:
        self.scheduler = scheduler
        self._arrays: dict[str, ArrayState] = {}
        self._versions = versions
        self._predict = predict
        self._piece_keys: dict[Key, str] = {}
        self._pins: dict[Key, str] = {}
        self._bring_home = keep_home(scheduler, self._rescue, self._homes, self._piece_keys)
        scheduler.handlers.update(
            coded_register=self.register,
            coded_sealed=self.sealed,
            coded_abandon=self.abandon,
            coded_extend=self.extend,
            coded_block=self.block,
            coded_made=self.made,
            coded_sources=self.sources,
        )

    def __getitem__(self, array: str) -> ArrayState:
        return self._arrays[array]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    # -- encoding ------------------------------------------------------------------------------

    async def register(
        self,
        spec: CodedSpec,
        sources: Sequence[Key],
        steps: Sequence[Sequence[Key]],
        allowed: Sequence[str] | None,
        version: str,
        oversubscribe: bool,
        client: str,
    ) -> Reply:
        """Handler: a new array is to be encoded; answers :class:`Placed` or :class:`Unfit`."""
        if message := self._unfit(version):
            return reply(Unfit(message))
        workers = [
            WorkerInfo(ws.address, ws.host, self._pieces_on(ws))
            for ws in self.scheduler.running
            if ws.address in self._versions and (allowed is None or ws.address in allowed)
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
            if unknown := set(allowed or ()) - set(self.scheduler.workers):
                extra += f" These addresses in 'workers' are not in the cluster: {sorted(unknown)}."
            return reply(Unfit(f"{exc}{extra}"))
        worker_of = [places[p] for p in spec.code.place.tolist()]
        sources = tuple(map(as_key, sources))
        filling = [tuple(map(as_key, keys)) for keys in steps]
        named = None if allowed is None else set(allowed)
        alive = {*spec.keys, *spec.check_keys}
        self._arrays[spec.id] = ArrayState(
            spec, (*sources, *chain(*filling)), client, alive=alive, allowed=named
        )
        self._piece_keys |= dict.fromkeys(alive, spec.id)
        self._pins |= dict(zip(spec.keys, worker_of, strict=True))
        for piece, key in zip(homes, spec.check_keys, strict=False):
            # On another worker than the block, the next one in the order of the pieces.
            others = (w for w in worker_of[piece:] + worker_of[:piece] if w != worker_of[piece])
            self._pins[key] = next(others, worker_of[piece])
        for piece, key, before in zip(homes, sources, filling, strict=True):
            if key not in self._piece_keys:  # it is no piece of an array that is encoded again
                self._pins |= dict.fromkeys([key, *before], worker_of[piece])
        self._log("register", array=spec.id, code=repr(spec.code), workers=worker_of)
        return reply(Placed(tuple(worker_of)))

    def _unfit(self, version: str) -> str | None:
        own = __version__
        if version != own:
            return (
                f"The client has dask_coded {version}, the scheduler {own}: "
                f"install the same version on both."
            )
        if other := {v for v in self._versions.values() if v != own}:
            return (
                f"Workers have dask_coded {', '.join(sorted(other))}, the scheduler {own}: "
                f"install the same version on all of them."
            )
        return None

    def _pieces_on(self, ws: WorkerState) -> int:
        return sum(ts.key in self._piece_keys for ts in ws.has_what)

    def sealed(self, array: str) -> int:
        """Handler: all pieces are made, so the source blocks are not needed any more.

        Answers how many bytes of rows workers have fetched from each other to make the pieces.
        """
        if (state := self._arrays.get(array)) is None:
            return 0
        self._drop_sources(state)
        blocks = range(len(state.spec.reporters))
        found, state.footprints = state.footprints, {}
        touched = [footprint.touched for footprint in found.values()]
        if len(found) == len(blocks) and worth_parts(touched, state.spec.columns):
            known = Footprints(found[j].packed for j in blocks)
            state.spec = replace(state.spec, footprints=known)
        if state.spec.scaled and state.spec.exponents is None:
            exponents = tuple(state.exponents.pop(j) for j in blocks)
            state.spec = replace(state.spec, exponents=exponents)
        return state.received

    def extend(self, array: str, allowed: Sequence[str] | None) -> Reply:
        """Handler: workers without a piece of an array are to make new ones for themselves.

        Answers :class:`Extended`, :class:`Unfit` or :class:`Lost`.
        """
        if (state := self._arrays.get(array)) is None:
            return reply(Lost(RELEASED))
        taken = {self._pins.get(key) for key in state.spec.keys}
        new = [
            address
            for address in self._versions
            if address in self.scheduler.workers
            and address not in taken
            and (allowed is None or address in allowed)
        ]
        if not new:
            which = "Every worker" if allowed is None else "Every named worker of the cluster"
            return reply(Unfit(f"{which} holds a piece already: scale the cluster, then extend."))
        if state.allowed is not None:
            state.allowed.update(new)
        assert isinstance(state.spec, ArraySpec)
        state.spec = spec = state.spec.extended(len(new))
        if state.work is not None:
            state.work = np.concatenate([state.work, spec.uniform_work[-len(new) :]])
        for key, worker in zip(spec.keys[-len(new) :], new, strict=True):
            state.alive.add(key)
            self._piece_keys[key] = array
            self._pins[key] = worker
        self._log("extend", array=array, code=repr(spec.code), workers=new)
        return reply(Extended(spec, tuple(new)))

    def abandon(self, array: str) -> None:
        """Handler: encoding has failed, so forget the array."""
        if state := self._arrays.pop(array, None):
            for key in (*state.spec.keys, *state.spec.check_keys):
                self._pins.pop(key, None)
                self._piece_keys.pop(key, None)
            self._drop_sources(state)

    def _drop_sources(self, state: ArrayState) -> None:
        for key in state.sources or ():
            if key not in self._piece_keys:
                self._pins.pop(key, None)
        state.sources = None

    def remove_client(self, client: str) -> None:
        """Forget the arrays that a client was encoding: some may have no task yet to forget."""
        for array, state in list(self._arrays.items()):
            if state.client == client and state.sources is not None:
                self.abandon(array)

    def made(
        self,
        array: str,
        piece: int,
        received: int,
        work: list[float] | None,
        exponents: dict[int, Exponents],
        footprint: Sequence[Any] | None,
        growth: float,
    ) -> None:
        """Handler: a piece is made, with ``received`` bytes from other workers.

        ``work`` is the work of each stripe of a sparse piece, and None for a dense one.
        ``exponents`` are those of source blocks, ``footprint`` is that of the block which the piece
        equals. ``growth`` is that of its recipe.
        """
        if state := self._arrays.get(array):
            state.received += received
            state.exponents |= exponents
            if footprint is not None and state.sources is not None:
                state.footprints[int(state.spec.code.block_of[piece])] = Footprint(*footprint)
            if growth:
                state.growth[piece] = growth
                if state.spec.check_keys and growth * np.finfo(state.spec.dtype).eps > _VAGUE:
                    logger.warning(
                        "Piece %d of a coded array was rebuilt from rebuilt pieces so often that "
                        "its shares are hardly verified any more: encode the array again.",
                        piece,
                    )
            if state.sources is None:
                self._log("made", array=array, piece=piece, received=received)
            if work is not None:
                if state.work is None:
                    state.work = state.spec.uniform_work
                state.work[piece] = work

    async def sources(self, array: str, piece: int, avoid: Sequence[str] = ()) -> Reply:
        """Handler: how to make a piece; answers :class:`Recipe`, :class:`Waiting` or :class:`Lost`.

        Workers in ``avoid`` do not answer and must not be asked. If the others do not suffice, the
        answer is :class:`Waiting`.
        """
        if (state := self._arrays.get(array)) is None:
            return reply(Lost(RELEASED))
        spec, keys = state.spec, state.sources
        if keys is not None:
            ingredients = spec.from_sources(piece)
        else:
            keys = spec.keys
            others = [i for i, key in enumerate(keys) if i != piece and self.holders(key, avoid)]
            slow = self._slow_holders(keys[i] for i in others)
            # Without slow holders, if the others suffice.
            for some in ([i for i in others if keys[i] not in slow], others):
                with contextlib.suppress(DecodeError, ValueError):
                    ingredients = await offload(spec.from_pieces, piece, some)
                    break
            else:
                # Those that do not answer may do so later.
                unknown = any(self.holders(key) for key in keys if not self.holders(key, avoid))
                return reply(Waiting() if unknown else Lost(self.lost_message(state)))
        found, growth = [], 0.0
        for source, weight, rows, start, at, block in ingredients:
            key = keys[source]
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state == "erred":
                return reply(Lost(self.lost_message(state)))
            if not (holders := self.holders(key, avoid)):
                return reply(Waiting())
            found.append(Source(key, tuple(holders), weight, rows, start, at, block))
            if spec.exponents is not None:
                # Every source is rounded twice, and as often as it was when it was rebuilt.
                growth += abs(weight) * (2 + state.growth.get(source, 0.0))
        return reply(Recipe(spec, tuple(found), growth))

    def block(self, array: str, block: int, avoid: Sequence[str] = ()) -> Reply:
        """Handler: where to read a block.

        Answers :class:`Recipe` with a single source, :class:`Waiting` or :class:`Lost`. Workers
        in ``avoid`` do not answer and must not be asked.
        """
        if (state := self._arrays.get(array)) is None:
            return reply(Lost(RELEASED))
        key = state.spec.keys[state.spec.code.systematic_pieces[block]]
        if not (holders := self.holders(key, avoid)):
            coming = self.holders(key) or self.is_coming(state)
            return reply(Waiting() if coming else Lost(self.lost_message(state)))
        rows = state.spec.geometry.rows[block]
        return reply(Recipe(state.spec, (Source(key, tuple(holders), 1.0, rows, 0, 0, block),)))

    # -- where pieces are ----------------------------------------------------------------------

    def holders(self, key: Key, avoid: Collection[str] = ()) -> list[str]:
        """Return the addresses of the workers that hold a key."""
        ts = self.scheduler.tasks.get(key)
        return [ws.address for ws in (ts and ts.who_has) or () if ws.address not in avoid]

    def holder_of(self, key: Key) -> str | None:
        """Return the worker that computes on a piece: its own, even if others have copies."""
        holders = self.holders(key)
        pin = self._pins.get(key)
        return pin if pin in holders else next(iter(holders), None)

    def _slow_holders(self, keys: Iterable[Key]) -> set[Key]:
        """Return those of some keys that only slow or silent workers hold."""
        holders = {key: self.holders(key) for key in keys}
        addresses = sorted(set().union(*holders.values()))
        fast = set(np.array(addresses)[not_slow(self._predict(addresses))].tolist())
        return {key for key, found in holders.items() if fast.isdisjoint(found)}

    def _homes(self) -> Iterator[tuple[TaskState, WorkerState]]:
        """Yield the pieces and checks in memory, each with the worker that it belongs to."""
        for key in self._piece_keys:
            ts = self.scheduler.tasks.get(key)
            home = self.scheduler.workers.get(self._pins.get(key, ""))
            if ts is not None and ts.who_has and home is not None:
                yield ts, home

    def _located(self, key: Key) -> str | None:
        return next(iter(self.holders(as_key(key))), None)

    def lost_message(self, state: ArrayState) -> str:
        """Say that the pieces that are left of an array do not suffice."""
        return state.lost_message(sum(bool(self.holders(key)) for key in state.spec.keys))

    def is_coming(self, state: ArrayState) -> bool:
        """Whether a piece of an array is being made, or will be."""
        return any(
            ts.state in ("processing", "waiting", "no-worker", "queued", "released")
            for key in state.spec.keys
            if (ts := self.scheduler.tasks.get(key))
        )

    # -- pieces that come and go ---------------------------------------------------------------

    def pin(self, key: Key) -> bool:
        """Restrict a task that makes a piece or a block to its worker; return whether it does."""
        if not (pin := self._pins.get(key)) or self.scheduler.tasks[key].who_has:
            return False
        there = pin in self.scheduler.workers
        self.scheduler.set_restrictions({key: {pin} if there else None})
        return True

    def forget(self, key: Key) -> None:
        """Forget a piece that no client or task wants any more."""
        if array := self._piece_keys.pop(key, None):
            self._pins.pop(key, None)
            if state := self._arrays.get(array):
                state.alive.discard(key)
                # The others may never have been made, because a client has left.
                if not any(other in self.scheduler.tasks for other in state.alive):
                    self._log("release", array=array)
                    self.abandon(array)

    def remove_worker(self, worker: str, stimulus_id: str) -> None:
        """Have lost pieces rebuilt elsewhere: tasks pinned to a lost worker would wait forever."""
        self._settle([key for key, pin in self._pins.items() if pin == worker], stimulus_id)

    def _settle(self, keys: Iterable[Key], stimulus_id: str) -> None:
        """Give data another worker, and have those that wait for one made there."""
        stranded: dict[Key, Any] = {}
        for key in keys:
            if (ts := self.scheduler.tasks.get(key)) is None:
                continue
            if array := self._piece_keys.get(key):
                self._pin(key, self._spare(self._arrays[array], key))
            else:  # a source block, or a step on the way to one: any worker will do
                del self._pins[key]
                self.scheduler.set_restrictions({key: None})
            if ts.state == "no-worker":
                stranded[key] = "processing"
        if stranded:
            self._log("repair", keys=list(map(str, stranded)))
            self.scheduler.transitions(stranded, stimulus_id=stimulus_id)

    def _rescue(self) -> None:
        """Have elsewhere made what a paused worker was to make: Dask would wait for it."""
        running = {ws.address for ws in self.scheduler.running} & self._versions.keys()
        waiting = [
            key
            for key, pin in self._pins.items()
            if pin not in running
            and (ts := self.scheduler.tasks.get(key))
            and ts.state == "no-worker"
        ]
        if running and waiting:
            self._settle(waiting, f"coded-rescue-{time()}")

    def _pin(self, key: Key, address: str) -> None:
        """Have a piece or a check belong to a worker: it is moved there, or rebuilt there."""
        self._pins[key] = address
        self.scheduler.set_restrictions({key: {address} if address else None})
        self._bring_home()

    def _spare(self, state: ArrayState, key: Key) -> str:
        """Choose where to rebuild a piece or a check."""
        known = self.scheduler.workers
        addresses = [a for a in self._versions if a in known]
        # A worker that is paused would make it only later.
        addresses = [a for a in addresses if known[a] in self.scheduler.running] or addresses
        # Among the workers that were named for it, unless none of them is left.
        addresses = [a for a in addresses if a in (state.allowed or addresses)] or addresses
        speeds = dict(zip(addresses, self._predict(addresses), strict=True))
        # A worker that has it already is as good as any with as few pieces.
        speeds |= dict.fromkeys(speeds.keys() & self.holders(key), math.inf)
        keys = state.spec.keys
        homes = [self._pins.get(key, "") for key in keys]
        return spare(state.spec.code, homes, speeds, keys.index(key) if key in keys else None)

    def relieve(self, newcomer: str) -> None:
        """Have a new worker take over pieces from workers that hold several of one array."""
        for state in self._arrays.values():
            self._relieve(state, newcomer)

    def _relieve(self, state: ArrayState, newcomer: str) -> None:
        if state.sources is not None or newcomer not in (state.allowed or {newcomer}):
            return
        keys, code = state.spec.keys, state.spec.code
        while True:
            homes = [self._pins.get(key, "") for key in keys]
            piece = relief(homes, code.pieces // code.n, newcomer)
            if piece is None:
                break
            self._pin(keys[piece], newcomer)
            self._log("relieve", array=state.spec.id, piece=piece, workers=[newcomer])

    def clear(self) -> None:
        """Forget all arrays."""
        self._arrays.clear()
        self._piece_keys.clear()
        self._pins.clear()

    def _log(self, action: str, **fields: Any) -> None:
        self.scheduler.log_event(NAME, {"action": action, **fields})
