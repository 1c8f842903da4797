"""The coded arrays that the scheduler knows, from their registration to their release."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.typing import Key
from distributed.metrics import time

from dask_coded._version import __version__
from dask_coded.rounds.accuracy import lose_half
from dask_coded.rounds.footprint import Footprint, Footprints, worth_parts
from dask_coded.rounds.placement import WorkerInfo, place
from dask_coded.rounds.scaling import Exponents
from dask_coded.runtime.answers import (
    Extended,
    Lost,
    Placed,
    Reply,
    Stored,
    Unfit,
    reply,
)
from dask_coded.runtime.scheduler.homes import Homes
from dask_coded.runtime.scheduler.state import RELEASED, ArrayState
from dask_coded.runtime.scheduler.versions import mismatch, resting, unable
from dask_coded.runtime.spec import NAME, ArraySpec, CodedSpec, as_key, coded_task
from dask_coded.storage import Storage
from dask_coded.transport.exceptions import logged
from dask_coded.typing import Floats

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

logger = logging.getLogger("distributed.dask_coded")

# Workers that may be lost in succession while they make one piece that is kept in a store: several
# times as many as leave a spot fleet of twelve at once.
_LOSSES = 30
# A piece of a slow worker is moved if rounds become shorter by this fraction; another machine is
# asked for if they do by twice as much, so that it still has something to take when it comes.
_WORTH_MOVING, _WORTH_A_WORKER = 0.025, 0.05
# Arrays that were given up before they were registered; more of them are not remembered.
_ABANDONED = 100
# Seconds after which a client that was told which pieces to make has asked for them.
_PROMISED = 10.0


class ArrayDirectory(Mapping[str, ArrayState]):
    """The coded arrays by id; says where to make their pieces.

    Parameters
    ----------
    scheduler : Scheduler
    versions, others : mapping of str to str
        Version of the package on every worker that can take part, and on those that have another
        one; they change as workers come and go.
    refused : mapping of str to str
        Errors with which workers have refused the plugin; changes, too.
    predict : callable(addresses) -> ndarray
        Predicted speeds.
    homes : Homes
    """

    def __init__(
        self,
        scheduler: Scheduler,
        versions: Mapping[str, str],
        others: Mapping[str, str],
        refused: Mapping[str, str],
        predict: Callable[[Sequence[str]], Floats],
        homes: Homes,
    ) -> None:
        self._scheduler = scheduler
        self._arrays: dict[str, ArrayState] = {}
        # Given up by clients before they were registered: the request may still wait for workers.
        self._abandoned: deque[str] = deque(maxlen=_ABANDONED)
        self._versions = versions
        self._others = others
        self._refused = refused
        self._predict = predict
        self._homes = homes
        scheduler.handlers.update(
            coded_sealed=self.sealed,
            coded_abandon=self.abandon,
            coded_made=self.made,
            coded_stored=self.stored,
        )
        scheduler.stream_handlers["coded-written"] = logged(self.written)

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
        sources: Sequence[Key] | None,
        steps: Sequence[Sequence[Key]],
        allowed: Sequence[str] | None,
        version: str,
        oversubscribe: bool,
        client: str,
        storage: Storage | None = None,
    ) -> Reply:
        """A new array is to be encoded: answer :class:`Placed` or :class:`Unfit`.

        Without ``sources`` it has been encoded before, and its pieces are read from ``storage``.
        """
        opened, sources = sources is None, sources or ()
        if message := mismatch(version):
            return reply(Unfit(message))
        if spec.id in self._abandoned:  # no client would ever release it
            return reply(Unfit("The encoding was interrupted: start it again."))
        pieces = self._homes.pieces()
        workers = [
            WorkerInfo(ws.address, ws.host, pieces[ws.address])
            for ws in self._scheduler.running
            if ws.address in self._versions and (allowed is None or ws.address in allowed)
        ]
        # What is to come to a silent worker would wait for it.
        answering = [w for w in workers if self._homes.answers(w.address)]
        if len(answering) >= (1 if oversubscribe else len(set(spec.code.place.tolist()))):
            workers = answering
        speeds = self._predict([w.address for w in workers])
        homes = spec.homes
        known = [
            (int(spec.code.place[piece]), next(iter(self._homes.holders(as_key(key))), None))
            for piece, key in zip(homes, sources, strict=not opened)
        ]
        try:
            places = place(spec.code, workers, speeds, known, oversubscribe=oversubscribe)
        except ValueError as exc:
            extra = unable(self._scheduler, self._versions, self._others, self._refused, allowed)
            extra += f" Install dask_coded {__version__} there." * bool(extra)
            extra += resting(self._scheduler, self._versions, allowed)
            if unknown := set(allowed or ()) - set(self._scheduler.workers):
                extra += f" These addresses in 'workers' are not in the cluster: {sorted(unknown)}."
            return reply(Unfit(f"{exc}{extra}"))
        worker_of = [places[p] for p in spec.code.place.tolist()]
        sources = tuple(map(as_key, sources))
        filling = [tuple(map(as_key, keys)) for keys in steps]
        named = None if allowed is None else set(allowed)
        alive = {*spec.keys, *spec.check_keys}
        self._arrays[spec.id] = state = ArrayState(
            spec,
            None if opened else (*sources, *chain(*filling)),
            client,
            alive=alive,
            allowed=named,
            storage=storage,
            opening=opened,
            checks_due=math.inf if opened and spec.check_keys else -math.inf,
        )
        self._homes.add(state, dict(zip(spec.keys, worker_of, strict=True)))
        for piece, key in zip(homes, spec.check_keys, strict=False):
            # On another worker than the block, the next one in the order of the pieces.
            others = (w for w in worker_of[piece:] + worker_of[:piece] if w != worker_of[piece])
            self._homes.add(state, {key: next(others, worker_of[piece])})
        for piece, key, before in zip(homes, sources, filling, strict=not opened):
            if self._homes.array_of(key) is None:  # no piece of an array that is encoded again
                self._homes.add_sources(dict.fromkeys([key, *before], worker_of[piece]))
        self._forget_groups()
        self._log("register", array=spec.id, code=repr(spec.code), workers=worker_of)
        return reply(Placed(tuple(worker_of)))

    def _forget_groups(self) -> None:
        """Forget the task groups of released arrays, which the span of the arrays would keep."""
        spans = self._scheduler.extensions.get("spans")
        known = self._scheduler.task_groups
        for span in spans.spans_search_by_name.get((NAME,), ()) if spans else ():
            span.groups -= {group for group in span.groups if group.name not in known}

    def sealed(self, array: str) -> int:
        """Handler: all pieces are made, so the source blocks are not needed any more.

        Answers how many bytes of rows workers have fetched from each other to make the pieces.
        """
        if (state := self._arrays.get(array)) is None:
            return 0
        self._drop_sources(state)
        state.used = time()
        held = Counter(self._homes.home(key) for key in state.spec.keys)
        due = len(state.spec.keys) // state.spec.code.n
        able = (a for a in self._versions if a in (state.allowed or {a}))
        lacking = [a for a in able if held[a] < due]  # a worker has joined meanwhile, for example
        for address in sorted(lacking, key=held.__getitem__, reverse=True):
            # Hundreds may hold nothing: if there is nothing for one, there is for none.
            if not self._homes.relieve(state, address) and not held[address]:
                break
        blocks = range(len(state.spec.reporters))
        found, state.footprints = state.footprints, {}
        touched = [footprint.touched for footprint in found.values()]
        if len(found) == len(blocks) and worth_parts(touched, state.spec.columns):
            known = Footprints(found[j].packed for j in blocks)
            state.spec = replace(state.spec, footprints=known)
        if state.spec.scaled and state.spec.exponents is None:
            exponents, typical = zip(*(state.exponents.pop(j) for j in blocks), strict=True)
            state.spec = replace(state.spec, exponents=exponents, typical=typical)
            if isinstance(state.spec, ArraySpec) and state.squares:
                rows = state.spec.geometry.rows
                counts = rows if state.spec.sized_by_block else [sum(rows)]
                means = [state.squares[b] / max(count, 1) for b, count in enumerate(counts)]
                state.spec = replace(state.spec, sizes=np.sqrt(means).astype(np.float32))
            state.squares.clear()
        return state.received

    def extend(self, array: str, allowed: Sequence[str] | None) -> Reply:
        """Have workers without a piece of an array make new ones for themselves.

        Answers :class:`Extended`, :class:`Unfit` or :class:`Lost`.
        """
        if (state := self._arrays.get(array)) is None:
            return reply(Lost(RELEASED))
        # Pieces that no client wants any more, for example after an interrupted extension, and
        # those that its client has not asked for in all this time, because it was interrupted.
        tasks, lapsed = self._scheduler.tasks, time() - _PROMISED
        free = [
            i
            for i, key in enumerate(state.spec.keys)
            if key not in tasks
            and (key not in state.alive or state.promised.get(key, math.inf) < lapsed)
        ]
        taken = {self._homes.home(key) for i, key in enumerate(state.spec.keys) if i not in free}
        new = [
            address
            for address in self._versions
            if address in self._scheduler.workers
            and address not in taken
            and (allowed is None or address in allowed)
        ]
        if not new:
            which = "Every worker" if allowed is None else "Every named worker of the cluster"
            return reply(Unfit(f"{which} holds a piece already: scale the cluster, then extend."))
        if state.allowed is not None:
            state.allowed.update(new)
        assert isinstance(state.spec, ArraySpec)
        spec, known = state.spec, len(state.spec.keys)
        pieces = (*free, *range(known, known + len(new)))[: len(new)]
        if more := sum(piece >= known for piece in pieces):
            state.spec = spec = spec.extended(more)
            state.errors.extend(spec.code)
            if state.work is not None:
                state.work = np.concatenate([state.work, spec.uniform_work[known:]])
        made = {spec.keys[piece]: address for piece, address in zip(pieces, new, strict=True)}
        state.alive.update(made)
        state.promised |= dict.fromkeys(made, time())
        self._homes.add(state, made)
        self._log("extend", array=array, code=repr(spec.code), workers=new)
        return reply(Extended(spec, pieces, tuple(new)))

    def abandon(self, array: str) -> None:
        """Handler: encoding has failed, so forget the array."""
        if array not in self._arrays:
            self._abandoned.append(array)
        if state := self._arrays.pop(array, None):
            self._homes.drop((*state.spec.keys, *state.spec.check_keys))
            self._drop_sources(state)
            for address in self._versions:
                if address in self._scheduler.stream_comms:
                    message = {"op": "coded-released", "array": array}
                    self._scheduler.worker_send(address, message)

    def _drop_sources(self, state: ArrayState) -> None:
        keys, state.sources = set(state.sources or ()), None
        # The same data may be encoded twice at once.
        keys.difference_update(*(other.sources or () for other in self._arrays.values()))
        self._homes.drop(key for key in keys if not self._homes.array_of(key))

    def remove_client(self, client: str) -> None:
        """Forget the arrays that a client was encoding or opening, whose tasks may not be there."""
        for array, state in list(self._arrays.items()):
            made = state.sources is None and any(k in self._scheduler.tasks for k in state.alive)
            if state.client == client and not made:
                self.abandon(array)

    def made(
        self,
        array: str,
        piece: int,
        received: int,
        work: list[float] | None,
        exponents: dict[int, Exponents],
        squares: dict[int, Floats],
        footprint: Sequence[Any] | None,
        growth: float,
        stored: bool,
        weights: Mapping[int, float],
        worker: str,
    ) -> None:
        """Handler: a piece is made, with ``received`` bytes from other workers.

        ``work`` is the work of each stripe of a sparse piece, and None for a dense one.
        ``exponents`` are those of the rows of source blocks, and of their typical entries, and
        ``squares`` the sums of squares of their columns.
        ``footprint`` is that of the block which the piece equals. ``growth`` is that of its recipe,
        and ``weights`` are those of the pieces that it was made from. ``stored`` says whether it is
        in its store now: it was read from there, or written. ``worker`` is where it was made.
        """
        if state := self._arrays.get(array):
            ts = self._scheduler.tasks.get(state.spec.keys[piece])
            if ts is not None:
                ts.suspicious = 0  # Dask gives up a task under which too many workers were lost
            state.losses.pop(piece, None)
            state.received += received
            if stored:
                self.written(worker, array, piece)
            state.exponents |= exponents
            for block, found in squares.items():
                if isinstance(state.spec, ArraySpec) and block not in state.squared:
                    state.squared.add(block)
                    row = block if state.spec.sized_by_block else 0
                    state.squares[row] = state.squares.get(row, 0.0) + found
            if footprint is not None and state.sources is not None:
                state.footprints[int(state.spec.code.block_of[piece])] = Footprint(*footprint)
            # Another worker may have taken over, whose piece is made from others.
            present = ts is not None and ts.processing_on and ts.processing_on.address == worker
            if present and isinstance(state.spec, ArraySpec):
                state.errors.made(piece, weights, growth)
                if state.spec.exponents is not None and not state.inexact:
                    self._warn_of(piece, state)
            if state.sources is None:
                self._log("made", array=array, piece=piece, received=received)
            if work is not None:
                if state.work is None:
                    state.work = state.spec.uniform_work
                state.work[piece] = work

    def _warn_of(self, piece: int, state: ArrayState) -> None:
        """Warn of a piece that has lost half of its digits."""
        eps = float(np.finfo(state.spec.dtype).eps)
        if lose_half(state.errors.of(piece) * eps / 2, eps):
            state.inexact = True
            logger.warning(
                "Piece %d of %r was rebuilt from rebuilt pieces so often that more than half of "
                "its digits may be lost: encode the array again.",
                piece,
                state.spec.code,
            )

    def stored(self, array: str) -> Reply:
        """Handler: where the pieces of an array are kept; answers :class:`Stored`.

        Or :class:`Lost`, if it is not kept, or not known any more.
        """
        state = self._arrays.get(array)
        if state is None or state.storage is None:
            return reply(Lost(RELEASED))
        return reply(Stored(state.spec, state.storage))

    def written(self, worker: str, array: str, piece: int) -> None:
        """Stream handler: a piece is in its store now, which may have been damaged there."""
        if state := self._arrays.get(array):
            state.damaged.discard(piece)
            state.refused.pop(piece, None)

    def wrong_check(self, array: str, block: int, address: str, sound: bool) -> bool:
        """Record that a worker holds a wrong check; return whether that is news.

        It is made again by another worker if the block, which it is made from, is ``sound``.
        """
        if (state := self.get(array)) is None or address not in self._scheduler.workers:
            return False
        if (block, address) in state.wrong_checks:
            return False
        state.wrong_checks.add((block, address))
        spec = state.spec
        key = spec.check_keys[block]
        holders = self._homes.holders(spec.keys[spec.code.systematic_pieces[block]])
        if sound and self._homes.holders(key) == [address]:
            self._homes.make_elsewhere(state, key, {address, *holders})
        return True

    # -- lost pieces ---------------------------------------------------------------------------

    def left(self, worker: str) -> None:
        """Forget the wrong checks of a worker: another process may get its address."""
        for state in self._arrays.values():
            if state.wrong_checks:
                state.wrong_checks = {found for found in state.wrong_checks if found[1] != worker}

    def remove_worker(self, running: Iterable[TaskState]) -> None:
        """Have losses not count as failures of tasks that read pieces from a store.

        Nor as those of the coded tasks that are running, as long as they have to wait for pieces.
        Dask gives up a task under which too many workers were lost. A piece that has taken very
        many workers with it is given up as well: it may be too large for them.
        """
        paused = set()
        for array, state in self._arrays.items():
            if state.storage is None:
                continue
            pieces = [self._scheduler.tasks.get(key) for key in state.spec.keys]
            for i, ts in enumerate(pieces):
                if ts is not None and ts.suspicious and state.losses[i] < _LOSSES:
                    state.losses[i] += 1
                    ts.suspicious = 0
            held = [i for i, ts in enumerate(pieces) if ts and ts.who_has]
            if not state.spec.code.decodable(held):
                paused.add(array)
        for ts in running:
            task = coded_task(ts.run_spec)
            if task is not None and not paused.isdisjoint(task.array_ids):
                ts.suspicious = 0

    def forget(self, key: Key) -> None:
        """Forget a piece that no client or task wants any more."""
        if state := self._homes.array_of(key):
            self._homes.drop([key])
            state.alive.discard(key)
            # The others may never have been made, because a client has left.
            if not any(other in self._scheduler.tasks for other in state.alive):
                self._log("release", array=state.spec.id)
                self.abandon(state.spec.id)

    def relieve(self, newcomer: str) -> None:
        """Have a new worker take over pieces of workers with several of an array, or slow ones."""
        if self._arrays:
            self._homes.bring_home()
        for state in self._arrays.values():
            self._homes.relieve(state, newcomer, self._homes.slow(state, _WORTH_MOVING))

    def wanted(self, used: Collection[str], since: float) -> int:
        """Return how many workers the arrays can use that are used, or were since some time.

        Those whose workers the user has named get no others.
        """
        found = [
            self._homes.wanted(state, _WORTH_A_WORKER)
            for array, state in self._arrays.items()
            if state.allowed is None and (array in used or state.used >= since)
        ]
        return max(found, default=0)

    def clear(self) -> None:
        """Forget all arrays."""
        self._arrays.clear()
        self._homes.clear()

    def _log(self, action: str, **fields: Any) -> None:
        self._scheduler.log_event(NAME, {"action": action, **fields})
