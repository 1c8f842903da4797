"""The worker's half: holds pieces, computes stripes of them, carries the coordinator's channels."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
from dask.typing import Key
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol import to_serialize

from dask_coded._version import __version__
from dask_coded.planning import Reporting, Run
from dask_coded.runtime.channels import CLOSED, Channel, Handler, Message, serve
from dask_coded.runtime.jobs import Job
from dask_coded.runtime.kernels import KERNELS
from dask_coded.runtime.memberships import Memberships
from dask_coded.runtime.spec import NAME, ArraySpec, as_key

if TYPE_CHECKING:
    from distributed.comm import Comm
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")


class CodedWorkerPlugin(WorkerPlugin):
    """Computes a worker's part of coded rounds, in threads of its own.

    As many threads as the worker has: a coordinator that runs as a task on a one-thread worker
    waits for a share from this very worker, which therefore cannot be an ordinary task there.
    """

    name = NAME
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.channels: dict[str, Channel] = {}
        self.specs: dict[str, ArraySpec] = {}
        #: States of loops that run elsewhere: the round after which, and the pickled state.
        self.kept: dict[Key, tuple[int, bytes]] = {}
        self._forgotten: deque[Key] = deque(maxlen=1000)
        self._jobs: dict[str, Job] = {}
        self._jobs_of: dict[Handler, set[str]] = {}
        self._executor = ThreadPoolExecutor(worker.state.nthreads, thread_name_prefix="Coded")
        self.memberships = Memberships(self)
        worker.handlers["coded_channel"] = self._serve
        worker.handlers["coded_rows"] = self._rows
        worker.handlers["coded_kept"] = self.kept_state
        worker.stream_handlers["coded-forget"] = self._forget
        worker.extensions["coded"] = self
        await worker.scheduler.coded_hello(worker=worker.address, version=__version__)

    async def teardown(self, worker: Worker) -> None:
        for job in self._jobs.values():
            job.stop()
        self._jobs.clear()
        self.memberships.close()
        await asyncio.gather(*(c.close() for c in self.channels.values()))
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- the coordinator's side ----------------------------------------------------------------

    def channel(self, address: str) -> Channel:
        """The channel to another worker, or to this one."""
        channel = self.channels.get(address)
        if channel is None or channel.closed:
            local = self._local if address == self.worker.address else None
            channel = self.channels[address] = Channel(self.worker, address, local)
        return channel

    def _local(self, message: Message) -> None:
        self._handle(message, self._answer_self)

    def _answer_self(self, message: Message) -> None:
        if channel := self.channels.get(self.worker.address):
            self.worker.loop.add_callback(channel.receive, message)

    # -- the participant's side ----------------------------------------------------------------

    async def _serve(self, comm: Comm) -> Status:
        return await serve(comm, self._handle)

    def _handle(self, message: Message, answer: Handler) -> None:
        """Act on one message of a coordinator."""
        if message is CLOSED:
            for run in self._jobs_of.pop(answer, set()):
                self._drop(run)
            self.memberships.leader_gone(answer)
            return
        for run in message.get("over", ()):
            self._drop(run)
        op, run = message["op"], message["run"]
        if op == "start":
            self._start(message, answer)
        elif op in Memberships.OPS:
            self.memberships.handle(message, answer)
        elif op == "stop":
            # Answered in any case: a coordinator that waits in vain takes this worker for stopped.
            self._drop(run)
            answer({"op": "stopped", "run": run})
        elif op == "keep":
            if run not in self._forgotten:
                self.kept[run] = message["round"], message["state"]
            answer({"op": "kept", "run": run})
        elif job := self._jobs.get(run):
            runs = [Run(*r) for r in message["runs"]]
            if op == "assign":
                job.assign(runs)
            elif op == "withdraw":
                job.withdraw(runs)

    def _start(self, message: Message, answer: Handler) -> None:
        run, x = message["run"], message["x"]
        x = None if x is None else np.require(x, requirements=["C", "A"])
        kernel = KERNELS[message["kernel"]]
        kernels, edges, lengths, absent = {}, {}, {}, []
        for piece, key, rows in message["pieces"]:
            key = as_key(key)
            if (data := self.piece(key)) is None:
                absent.append(piece)
                continue
            kernels[piece] = kernel(data, rows, x)
            stripes = message["stripes"]
            edges[piece] = np.arange(stripes + 1) * rows // stripes
            lengths[piece] = data.shape[0]
        if absent:
            answer({"op": "absent", "run": run, "pieces": absent})
        interval, growth, lead = message["reporting"]
        job = Job(
            run,
            kernels,
            edges,
            lengths,
            answer,
            self._executor,
            self.worker.state.nthreads,
            Reporting(interval, growth),
            lead,
        )
        self._jobs[run] = job
        self._jobs_of.setdefault(answer, set()).add(run)
        job.assign([Run(*r) for r in message["runs"]])

    def _drop(self, run: str) -> None:
        if job := self._jobs.pop(run, None):
            job.stop()

    def kept_state(self, key: Key) -> tuple[int, bytes] | None:
        """Handler: the state that is kept of a loop."""
        return self.kept.get(key)

    def _forget(self, key: Key) -> None:
        """The loop is over; a state that comes in late is not wanted either."""
        self.kept.pop(key, None)
        self._forgotten.append(key)
        self.memberships.forget(key)

    def is_forgotten(self, key: Key) -> bool:
        """Whether a loop is over."""
        return key in self._forgotten

    def is_cancelled(self, task: Key) -> bool:
        """Whether a task that runs here is cancelled: its thread runs on until it looks."""
        ts = self.worker.state.tasks.get(task)
        return ts is not None and ts.state == "cancelled"

    def piece(self, key: Any) -> Any:
        """A piece that this worker holds, aligned; None if it holds it no more."""
        data = self.worker.data.get(key)
        if isinstance(data, np.ndarray) and not (data.flags.aligned and data.flags.c_contiguous):
            # Arrays that came over a comm may lie anywhere; a product with an unaligned one is
            # several times slower. Copied once, kept in the place of the original.
            data = self.worker.data[key] = np.require(data, requirements=["C", "A"])
        return data

    async def _rows(self, key: Any, start: int, stop: int) -> Any:
        """Handler: rows of something that this worker holds, for a worker that makes a piece."""
        key = as_key(key)
        data: Any = self.worker.data.get(key)
        if data is None:
            return {"rows": None}
        if scipy.sparse.issparse(data):
            loop = asyncio.get_running_loop()
            part = await loop.run_in_executor(self._executor, lambda: data.tocsr()[start:stop])
            return {"rows": to_serialize(part)}
        return {"rows": to_serialize(data[start:stop])}


def worker_plugin(worker: Worker) -> CodedWorkerPlugin:
    """The plugin of a worker.

    Raises
    ------
    RuntimeError
        If the worker does not have it.
    """
    plugin = worker.extensions.get("coded")
    if not isinstance(plugin, CodedWorkerPlugin):
        raise RuntimeError(
            f"Worker {worker.address} lacks the dask-coded plugin: install the package there, "
            f"version {__version__}."
        )
    return plugin
