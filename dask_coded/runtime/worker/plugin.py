"""The worker plugin: holds pieces and computes stripes of them for the coordinators of rounds."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
from dask.typing import Key
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.system import MEMORY_LIMIT

from dask_coded._version import __version__
from dask_coded.chunks import some_rows
from dask_coded.compat import end_fetches
from dask_coded.config import timeouts
from dask_coded.rounds import StripeRange
from dask_coded.runtime.activity import Activity
from dask_coded.runtime.messages import ChangeRound, Failed, PiecesAbsent, StartRound
from dask_coded.runtime.operand import Ticket
from dask_coded.runtime.spec import NAME, CodedSpec, as_key, coded_task
from dask_coded.runtime.worker.disk import Disk, MappedArray, streamed
from dask_coded.runtime.worker.jobs import Held, Job, Place
from dask_coded.runtime.worker.keeper import StateKeeper
from dask_coded.runtime.worker.metrics import WorkerMetrics
from dask_coded.runtime.worker.operands import Operands
from dask_coded.runtime.worker.output import Output
from dask_coded.runtime.worker.probe import Probe
from dask_coded.runtime.worker.stored import Stores
from dask_coded.transport import Answer, Exchange
from dask_coded.transport.exceptions import logged, portable
from dask_coded.transport.memory import Mappings
from dask_coded.transport.messages import Attempt, EndRun, Message, Ping, Pong
from dask_coded.transport.rows import NO_ROWS, dense_rows, sent_rows

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

# Specs of arrays that a worker remembers for the rounds that it coordinates.
_SPECS = 64
# Of the tasks that wait for a thread, so many are looked at, which takes a millisecond.
_EXAMINED = 1000
# The products of all threads read at most this many entries of a piece, or one stripe each.
_BATCH_ENTRIES = 1 << 23
# Of how many rounds rows are kept: as many as usually run at once. Of how many participants.
_OUTPUTS = 4
_MAPPED = 64
# Bytes that a job has for each of its stripes, about.
_STRIPE = 1 << 10


class CodedWorkerPlugin(WorkerPlugin):
    """Computes a worker's part of coded rounds, in threads of its own.

    It has as many threads as the worker. A coordinator that runs as a task on a one-thread worker
    may wait for a share of that same worker, so shares cannot be computed in ordinary tasks.

    Attributes
    ----------
    worker : Worker
    exchange : Exchange
        The worker's channels.
    operands : Operands
        Those of rounds that this worker takes part in.
    disk : Disk
        Holds the pieces that do not fit into memory.
    keeper : StateKeeper
        Keeps states of loops that run elsewhere.
    checks : dict
        The :class:`~dask_coded.runtime.coordinator.checks.Checks` of arrays whose rounds it
        coordinates.
    mappings : Mappings
        Memory where participants of these rounds have left rows.
    closed : bool
        Whether the worker has closed.
    activity : Activity
        What these rounds have done.
    """

    name = NAME
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.exchange = Exchange.of(worker)
        self.disk = Disk.of(worker)
        self.stores = Stores(worker, self.disk)
        self.keeper = StateKeeper(worker, self.exchange)
        self._specs: dict[str, CodedSpec] = {}
        self.checks: dict[str, Any] = {}
        #: How many rounds here wait for pieces of each array.
        self.lacking: Counter[str] = Counter()
        self.activity = Activity()
        self._metrics = WorkerMetrics(worker)
        self._jobs: dict[Key, Job] = {}
        # More would not fit into the memory of the worker.
        self._most_stripes = (worker.memory_manager.memory_limit or MEMORY_LIMIT) // _STRIPE
        # By series: memory of the last round's rows, for the next round.
        self._outputs: dict[str, Output] = {}
        # By array: the series of rounds that this worker has coordinated, unless one is running.
        self._series: dict[str, str] = {}
        self.mappings = Mappings(most=_MAPPED, room=self.exchange.room)
        self.closed = False
        # Memory is kept for a while in case it is needed again.
        self._idle = _Idle(self._forget)
        self.operands = Operands(self.exchange)
        # The rounds that this worker coordinates, by task.
        self._rounds: dict[Key, set[asyncio.Task[Any]]] = {}
        self._executor = ThreadPoolExecutor(worker.state.nthreads, thread_name_prefix="Coded")
        self._probe = Probe(self._executor)
        self._active = False
        self._place = Place(
            self._executor,
            worker.state.nthreads,
            lambda: len(self._jobs) > 1,
            f"on worker {worker.address}, in its part of a coded product",
        )
        self.exchange.register(
            self._handle,
            [StartRound, ChangeRound, Ping, EndRun],
            on_closed=self._coordinator_gone,
        )
        self._metrics.show()
        worker.handlers["coded_rows"] = self._rows
        worker.handlers["coded_activity"] = self.activity.told
        worker.stream_handlers |= {
            "coded-active": logged(self._activate),
            "coded-hold": logged(self.disk.hold),
            "coded-put-back": logged(self.disk.put_back),
            "coded-fetch": logged(self.stores.fetch),
            "coded-ping": self._alive,
            "coded-hang-up": self._hang_up,
            "coded-released": logged(self._released),
        }
        worker.extensions[NAME] = self
        self.exchange.address = await worker.scheduler.coded_hello(
            worker=worker.address, version=__version__, product=await self._probe.start()
        )

    async def teardown(self, worker: Worker) -> None:
        self.closed = True
        self._idle.end()
        for job in self._jobs.values():
            job.stop()
        self._jobs.clear()
        for checks in self.checks.values():
            checks.close()
        for task in list(self._rounds):
            self._end_rounds(task)
        self.stores.close()
        await self.exchange.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        """Hook: a task of the worker has changed its state."""
        self.disk.moved(key, finish)
        if finish == "released":
            self._metrics.pieces.discard(key)
        if finish == "released" and self._rounds:
            self._end_rounds(key)  # it was cancelled

    # -- the coordinator's side ----------------------------------------------------------------

    def spec(self, array_id: str) -> CodedSpec | None:
        """Return the spec of an array that this worker last received, if any."""
        return self._specs.get(array_id)

    def remember(self, array_id: str, spec: CodedSpec) -> None:
        """Keep the spec of an array for the next rounds; the oldest ones are dropped."""
        self._specs.pop(array_id, None)
        self._specs[array_id] = spec
        _keep_last(self._specs, _SPECS)

    def _released(self, array: str) -> None:
        """Stream handler: there will be no more rounds of an array."""
        self._specs.pop(array, None)
        self._series.pop(array, None)
        self.activity.forget(array)
        # Until they hear of its end, participants hold the pieces of the last round.
        self.exchange.flush()
        if checks := self.checks.pop(array, None):
            checks.close()

    def take_series(self, array_id: str) -> str:
        """Return the series that a round of an array belongs to; no other gets it meanwhile."""
        return self._series.pop(array_id, None) or uuid.uuid4().hex

    def put_series(self, array_id: str, series: str) -> None:
        """Let the next round of an array continue a series, because all rows have been read."""
        self._series[array_id] = series
        _keep_last(self._series, _OUTPUTS)

    def round_over(self) -> None:
        """Let go of what rounds keep for the next one, unless that follows soon."""
        self._idle.begin()

    @contextmanager
    def coordinating(self, task: Key | None) -> Iterator[None]:
        """Cancel the present asyncio task if the run of a Dask task is given up meanwhile."""
        current = asyncio.current_task()
        if task is None or current is None:
            yield
            return
        running = self._rounds.setdefault(task, set())
        running.add(current)
        try:
            yield
        finally:
            running.discard(current)
            if not running and self._rounds.get(task) is running:
                del self._rounds[task]

    def is_in_the_way(self) -> bool:
        """Whether a round that waits for pieces is to leave its thread to another task.

        That task may make these pieces. It may also be a product that would wait for them as well,
        and leave its thread to the next one, all with their operands. So only as many rounds leave
        at any rate as there are threads, and more if a task of another kind waits for one.
        """
        state = self.worker.state
        if self.lacking.total() <= state.nthreads:
            return True
        for count, ts in enumerate(chain(state.ready, state.constrained)):
            coded = coded_task(ts.run_spec)
            if coded is None or not any(self.lacking[array_id] for array_id in coded.array_ids):
                return True
            if count > _EXAMINED:
                return True
        return False

    def _end_rounds(self, task: Key) -> None:
        """End the rounds that a task coordinates."""
        for running in self._rounds.get(task, ()):
            running.cancel()

    def heartbeat(self) -> float:
        """Return what the scheduler plugin gets with each heartbeat: how fast this worker is."""
        if self._active:
            self._probe.refresh()
        self.disk.let_spilled_go()
        return self._probe.seconds

    def _activate(self, active: bool) -> None:
        """Stream handler: there is an array or a training from now on, or none any more."""
        self._active = active
        if active:
            self._probe.refresh()
        else:  # beside other messages of the scheduler
            self.worker.loop.add_callback(self.exchange.close_idle)

    def _alive(self) -> None:
        """Stream handler: the scheduler asks whether this worker's event loop runs."""
        self.worker.batched_send({"op": "coded-alive"})

    async def _hang_up(self, address: str, keys: Collection[Key]) -> None:
        """Stream handler: a worker is silent, so end what Dask fetches from it.

        Unless none of these keys is among that: then it is fetched for others.
        """
        await asyncio.sleep(0)  # what Dask has just begun to fetch has reached the pool then
        found = (self.worker.state.tasks.get(as_key(key)) for key in keys)
        if not any(ts is not None and ts.coming_from == address for ts in found):
            return
        try:
            end_fetches(self.worker.rpc, address)
        except Exception:  # it uses private names of Dask
            logger.exception("What is fetched from %s cannot be ended", address)
        # To end a connection twice, before it has ended, is an error, and the next message may be
        # that the worker has left. Its task ends in the second turn of the event loop from here.
        for _ in range(2):
            await asyncio.sleep(0)

    # -- the participant's side ----------------------------------------------------------------

    def _handle(self, message: Message, answer: Answer) -> None:
        """Act on a message of a coordinator."""
        match message:
            case StartRound():
                self._start(message, answer)
            case ChangeRound(run_id, added, withdrawn):
                if job := self._jobs.get(run_id):
                    self._metrics.count(moved=sum(stop - start for _, start, stop in added))
                    job.withdraw(StripeRange(*part) for part in withdrawn)
                    job.assign(StripeRange(*part) for part in added)
            case Ping(run_id):
                # Otherwise it has none of the round's work, and must not seem to be at it.
                if run_id in self._jobs:
                    answer(Pong(run_id))
            case EndRun(run_id, owes):
                self._drop(run_id, over=True)
                if owes:
                    # Always answered, because without an answer the coordinator would assume that
                    # this worker is stopped.
                    answer(Pong(run_id))

    def _start(self, message: StartRound, answer: Answer) -> None:
        ticket = Ticket.received(message.ticket)
        if not 1 <= message.stripes <= self._most_stripes:
            raise ValueError(f"A round cannot have {message.stripes} stripes")
        self._drop_earlier(message.attempt)
        pieces, absent = {}, []
        for piece, key, rows in message.pieces:
            try:
                data = self.piece(as_key(key))
            except Exception as exc:  # there is no memory for it, or too many files are open
                logger.exception("Worker %s cannot read the piece %r", self.worker.address, key)
                answer(Failed(message.run_id, portable(exc, self._place.where), (piece,)))
                continue
            if data is None:
                absent.append(piece)
                continue
            self._metrics.pieces.add(as_key(key))
            pieces[piece] = Held(
                rows,
                data.shape[0],
                partial(streamed, message.kernel, data, rows),
                _largest_batch(data, message.stripes, self._place.threads),
                _entries(data),
            )
        if absent:
            answer(PiecesAbsent(message.run_id, tuple(absent)))
        memory = self.exchange.memory if message.shared else None
        previous = self._outputs.pop(message.series, None)
        job = self._jobs[message.run_id] = Job(
            message, pieces, answer, self._place, memory, previous
        )
        job.assign(StripeRange(*part) for part in message.ranges)
        self.operands.expect(message.run_id, ticket, job.begin, job.fail, answer)

    def _drop_earlier(self, attempt: Attempt | None) -> None:
        """Drop the rounds of earlier runs of a task, which may never hear that they are over."""
        for run_id, job in list(self._jobs.items()):
            its = job.start.attempt
            if attempt and its and its[0] == attempt[0] and its[1] < attempt[1]:
                self._drop(run_id)

    def _drop(self, run_id: Key, over: bool = False) -> None:
        """Drop a round; ``over`` says that it has ended for all workers."""
        job = self._jobs.pop(run_id, None)
        output = job.stop() if job else None
        self._metrics.count(computed=job.computed if job else 0)
        if over:
            if job and output and self.exchange.room() > 0:
                self._outputs[job.start.series] = output
                _keep_last(self._outputs, _OUTPUTS)
            self.round_over()
        self.operands.drop(run_id, over)
        del job  # it holds the operand
        self.operands.trim()

    def _coordinator_gone(self, answer: Answer) -> None:
        self.operands.release()
        for run_id in [run_id for run_id, job in self._jobs.items() if job.answer is answer]:
            self._drop(run_id)

    def piece(self, key: Key) -> Any:
        """Return a piece; None if this worker does not hold it any more."""
        data = self.disk.unspill(key)
        if isinstance(data, np.ndarray) and not (data.flags.aligned and data.flags.c_contiguous):
            # Arrays that came over a comm may be unaligned, which makes a product several times
            # slower. A copy replaces the original; until then this round is slower here.
            self.disk.align(key, data)
        return data

    def piece_in_memory(self, key: Key) -> Any:
        """Return a piece as :meth:`piece` does, unless it is on the disk."""
        found = None if self.disk.is_spilled(key) else self.piece(key)
        return None if isinstance(found, MappedArray) else found

    @property
    def threads(self) -> int:
        """How many threads may work on one job."""
        return self._place.threads

    async def _rows(self, key: Any, start: int, stop: int, room: Any = None) -> Any:
        """Handler: hand rows of an array on this worker to a worker that makes a piece."""
        data: Any = self.disk.held(as_key(key))
        if data is None or self.closed:
            return NO_ROWS
        # Not in the threads of rounds: these may be busy for as long as a round takes, and whoever
        # waits for an answer would believe that this worker is stopped.
        if scipy.sparse.issparse(data):
            answer = sent_rows(await asyncio.to_thread(some_rows, data, start, stop))
        else:
            read = data.read if isinstance(data, MappedArray) else partial(some_rows, data)
            answer = await asyncio.to_thread(lambda: dense_rows(read(start, stop), room))
        # A chunk that is no array has no shape; its reader refuses it.
        return answer | {"shape": getattr(data, "shape", None)}

    def _forget(self) -> None:
        # Until they hear of the end, participants hold the pieces of the last round of each array.
        self.exchange.flush()
        self._outputs.clear()
        self._series.clear()
        self.mappings.clear()
        self.operands.release()
        self.exchange.memory.close()


def _entries(piece: Any) -> float:
    """Return how many numbers a product with a piece touches; infinity if they may be slow."""
    if isinstance(piece, MappedArray) or piece.dtype.hasobject:
        return math.inf
    return float(piece.size + sum(piece.shape))


def _largest_batch(piece: Any, stripes: int, threads: int) -> int:
    """Return how many stripes of a piece one product may take.

    Of a piece in a file, only the rows of the present products are in memory. Of others, NumPy and
    SciPy copy these rows if their type is not that of the result.
    """
    if isinstance(piece, MappedArray) or piece.dtype.hasobject:
        return 1
    return max(_BATCH_ENTRIES * stripes // (max(piece.size, 1) * threads), 1)


class _Idle:
    """Calls a function a few seconds after the last time it was asked to."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to wait, from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(timeouts().lease, self._function)

    def end(self) -> None:
        """Call the function now, if it has ever been asked for."""
        if self._timer is not None:
            self._timer.cancel()
            self._function()


def _keep_last(found: dict[Any, Any], most: int) -> None:
    """Delete the oldest entries of a dict until it has at most that many."""
    while len(found) > most:
        del found[next(iter(found))]


def worker_plugin(worker: Worker) -> CodedWorkerPlugin:
    """Return the plugin of a worker.

    Raises
    ------
    RuntimeError
        If the worker does not have it.
    """
    plugin = worker.extensions.get(NAME)
    if not isinstance(plugin, CodedWorkerPlugin):
        raise RuntimeError(
            f"Worker {worker.address} is not prepared for coded rounds: nothing has been encoded "
            "in its cluster since the scheduler started. Encode the array there, again if the "
            "scheduler was restarted; if that was done, the worker's log says why dask_coded "
            f"{__version__} does not start on it."
        )
    return plugin
