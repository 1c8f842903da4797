"""Clusters of worker processes on this machine: plain ones, and the straggler lab.

In the lab every worker has a given speed, which may follow a trace of real machines::

    with Lab(workers=10, share=0.15) as lab:
        C = coded.encode(A, workers=lab.workers)  # workers still run at full speed
        lab.set_speeds([1.0] * 8 + [0.2] * 2)
        speeds = lab.measure_speeds(C, x)
        with lab.following(trace, seconds=2.0):
            coded.submit(run_rounds, C, x, 100, workers=[lab.free]).result()

Scheduler and coordinator are never slowed: the scheduler runs in this process, and `Lab.free` is
the address of one more worker, for the coordinator. `benchmarks.lab` slows the other workers as
whole processes, including their event loop and communication.

Nothing outlives the block, however it ends. If this process is killed before it can clean up, its
workers notice that it is gone and exit; stopped workers are continued so that they can. The next
lab removes the control groups, which are empty by then.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import dask
import dask.array as da
import numpy as np
from dask.core import flatten
from distributed import Client, LocalCluster, Queue, futures_of, wait
from numpy.typing import ArrayLike

import dask_coded as coded
from benchmarks.lab import Kind, Throttle

# Every process of Dask ticks 50 times a second, to see whether its event loop is late, looks a
# hundred times a second at what its threads do, and reads counters of the system twice a second. In
# profiles the ticks were half of the work of event loops. Once ticks were rare, the counters were a
# quarter. At a tenth of a core each takes several percent of a worker, whatever it does.
_QUIET = {
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.profile.enabled": False,
}


@contextmanager
def local_workers(
    count: int, memory_limit: int = 0, alone: bool = False
) -> Iterator[tuple[Client, list[str]]]:
    """Start a scheduler in this process, and one-thread worker processes, each under a nanny.

    By default no worker has a memory limit, so nothing is spilled or paused during a benchmark, and
    every product of a loop is a round, because most benchmarks are about rounds.

    Yields
    ------
    client : Client
    addresses : list of str
        Addresses of the workers.
    """
    with (
        dask.config.set({"coded.round.alone": alone}),
        LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit=memory_limit,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client, sorted(client.nthreads())


def run_rounds(operator: Any, x: np.ndarray, rounds: int) -> list[float]:
    """Run rounds inside the cluster and return the seconds of each."""
    seconds = []
    for _ in range(rounds):
        operator @ x
        seconds.append(operator.last_round.seconds)
    return seconds


class Rounds:
    """A loop in the cluster whose rounds run one by one on request.

    Parameters
    ----------
    client
        Client of the cluster.
    operator
        A coded array.
    x
        Its operand.
    worker
        Address of the worker that runs the loop.
    """

    def __init__(self, client: Client, operator: Any, x: np.ndarray, worker: str) -> None:
        name = uuid.uuid4().hex
        self._asked = Queue(f"asked-{name}", client=client)
        self._seconds = Queue(f"seconds-{name}", client=client)
        self._future = coded.submit(
            _run_on_request, operator, x, name, client=client, workers=[worker]
        )

    def run_round(self) -> float:
        """Run one round and return its seconds."""
        self._asked.put(True)
        return self._seconds.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.put(False)
        if error[0] is None:
            self._future.result()


class PlainRounds:
    """Products of dask.array, with the operand and the result where :class:`Rounds` has them.

    Parameters
    ----------
    client
        Client of the cluster.
    data : dask.array.Array
        A matrix whose chunks are on the workers.
    x
        Its operand.
    workers
        Addresses of the workers that multiply.
    worker
        Address of the worker that has the operand and gets the result.
    """

    def __init__(
        self, client: Client, data: da.Array, x: np.ndarray, workers: list[str], worker: str
    ) -> None:
        self._client, self._data, self._x = client, data, x
        self._workers, self._worker = workers, worker

    def run_round(self) -> float:
        """Run one product and return its seconds."""
        # Under a new name in every round, so that no result of an earlier one is found.
        name = f"operand-{uuid.uuid4().hex}"
        here = self._client.scatter(self._x, workers=[self._worker], hash=False)
        chunks = tuple((length,) for length in self._x.shape)
        x = da.Array({(name, 0, 0): here}, name, chunks, dtype=self._x.dtype)
        began = time.perf_counter()
        product = self._client.persist(self._data @ x, workers=self._workers)
        parts = {future.key: future for future in futures_of(product)}
        ordered = [parts[key] for key in flatten(product.__dask_keys__())]
        wait(self._client.submit(np.concatenate, ordered, workers=[self._worker], pure=False))
        return time.perf_counter() - began


def _run_on_request(operator: Any, x: np.ndarray, name: str) -> None:
    asked, seconds = Queue(f"asked-{name}"), Queue(f"seconds-{name}")
    while asked.get():
        operator @ x
        seconds.put(operator.last_round.seconds)


class Lab:
    """A cluster whose workers have given speeds, for as long as a ``with`` block lasts.

    Parameters
    ----------
    workers
        Number of workers with given speeds; the lab has one more.
    share
        Share of one core that a worker of speed 1 has. All shares together should leave some of
        the machine free; otherwise the workers slow each other down.
    floor
        Least share of a worker that is not stopped. With less than a few thousandths of a core the
        event loop no longer answers, which is a different fault from being slow.
    kind
        How workers are slowed; see `Throttle`.

    Attributes
    ----------
    client
        Client of the cluster.
    workers
        Addresses of the workers with given speeds, in the order of these speeds.
    free
        Address of the additional worker, which is never slowed.
    speeds
        Current speeds, one for each of ``workers``; initially infinite.
    kind
        The method in use; see `Throttle`.
    """

    client: Client
    workers: list[str]
    free: str
    speeds: np.ndarray
    kind: Kind

    def __init__(
        self,
        workers: int,
        share: float = 1.0,
        *,
        floor: float = 0.005,
        kind: Kind | None = None,
    ) -> None:
        if workers < 1 or not share > 0 or not floor > 0:
            raise ValueError(
                "A lab needs at least 1 worker, and a share and a floor above 0, not "
                f"workers={workers}, share={share}, floor={floor}."
            )
        self._count = workers
        self._share = share
        self._floor = floor
        self._kind = kind

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(dask.config.set(_QUIET))
            self.client, addresses = stack.enter_context(local_workers(self._count + 1))
            *self.workers, self.free = addresses
            pids = self.client.run(os.getpid, workers=self.workers)
            self._pids = [pids[worker] for worker in self.workers]
            self._dead: set[int] = set()
            # This ends before the cluster closes, because slow workers would close slowly and
            # stopped ones never.
            unlimited = dict.fromkeys(self._pids, math.inf)
            self._throttle = stack.enter_context(Throttle(unlimited, kind=self._kind))
            self.kind = self._throttle.kind
            self.speeds = np.full(self._count, math.inf)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)

    def set_speeds(self, speeds: ArrayLike) -> None:
        """Change the speeds of all workers.

        Parameters
        ----------
        speeds : array_like, broadcast to shape (workers,)
            Worker i gets ``share * speeds[i]`` of a core, or ``floor`` if that is more. A worker of
            speed 0 is stopped and answers no messages. A worker of speed ``math.inf`` is not
            limited.
        """
        speeds = np.broadcast_to(np.asarray(speeds, dtype=float), self._count).copy()
        for i, (pid, speed) in enumerate(zip(self._pids, _check(speeds).tolist(), strict=True)):
            share = 0.0 if speed == 0 else max(self._share * speed, self._floor)
            if i not in self._dead:
                self._throttle.set_share(pid, share)
        self.speeds = speeds

    @contextmanager
    def following(self, trace: ArrayLike, seconds: float | None = None) -> Iterator[Follower]:
        """Let the speeds follow a trace inside the block, and restore them after it.

        Parameters
        ----------
        trace : array_like, shape (rows, workers)
            Relative speeds. The first row holds from the start; after the last row the trace starts
            again.
        seconds
            How long a row holds. A thread changes the rows, so do not call `set_speeds` meanwhile.
            If not given, only `Follower.next_row` changes rows.

        Yields
        ------
        Follower
        """
        rows = _check(np.asarray(trace, dtype=float))
        if rows.ndim != 2 or rows.shape[1] != self._count or not len(rows):
            raise ValueError(
                f"Argument 'trace' must have one or more rows of {self._count} speeds, one for "
                f"each worker; its shape is {rows.shape}."
            )
        before = self.speeds
        try:
            with Follower(rows, self.set_speeds, seconds) as follower:
                yield follower
        finally:
            self.set_speeds(before)

    def measure_speeds(self, operator: Any, x: np.ndarray, seconds: float = 1.0) -> np.ndarray:
        """Measure how fast all workers process their pieces at once, with nothing else to do.

        The products are of three stripes. This is the largest batch of rounds in which each of ten
        or twelve workers has some 28 of 40 stripes. Products of one stripe are 2 % slower, and
        those of an eighth of a piece up to 7 %, so they would give no lower bound. The workers run
        at once because they also share caches and memory in a round. Other tenants of the machine
        may change all speeds by tens of percent within seconds, so measure immediately before and
        after what is to be compared.

        Parameters
        ----------
        operator
            A coded array, of which each of ``workers`` holds a piece.
        x
            Its operand.
        seconds
            How long to measure.

        Returns
        -------
        ndarray, shape (workers,)
            Rows per second; 0 for a worker that has died.
        """
        encoded = operator.encoded
        keys = {w: piece.key for w, piece in zip(encoded.workers, encoded.futures, strict=True)}
        alive = [w for i, w in enumerate(self.workers) if i not in self._dead]
        speeds = self.client.run(_measure_speed, keys, x, seconds, workers=alive)
        return np.array([speeds.get(worker, 0.0) for worker in self.workers])

    def kill(self, worker: str) -> None:
        """Kill a worker permanently (SIGKILL), and wait until the scheduler has removed it."""
        index = self.workers.index(worker)
        cluster: Any = self.client.cluster
        for nanny in cluster.workers.values():
            if nanny.worker_address == worker:
                nanny.close_gracefully()  # so that it starts no other worker
        os.kill(self._pids[index], signal.SIGKILL)
        self._dead.add(index)
        while worker in cluster.scheduler.workers:
            time.sleep(0.01)


class Follower:
    """Steps through the rows of a trace, by calls or in a thread.

    Parameters
    ----------
    rows
        Rows of the trace.
    apply
        Called with each row in turn.
    seconds
        How long a row holds; if not given, there is no thread.

    Attributes
    ----------
    row
        Number of the current row.
    """

    def __init__(
        self, rows: np.ndarray, apply: Callable[[np.ndarray], None], seconds: float | None = None
    ) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"Argument 'seconds' must be above 0, it is {seconds}.")
        self.row = 0
        self._rows = rows
        self._apply = apply
        self._seconds = seconds
        self._end = threading.Event()
        self._error: BaseException | None = None
        # A daemon, so that it never keeps an interpreter alive.
        self._thread = threading.Thread(target=self._run, name="trace follower", daemon=True)

    def next_row(self) -> None:
        """Apply the next row now."""
        self.row = (self.row + 1) % len(self._rows)
        self._apply(self._rows[self.row])

    def __enter__(self) -> Self:
        self._apply(self._rows[0])
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._seconds is not None:
            self._thread.join()
        if self._error is not None:
            raise RuntimeError("The workers no longer follow the trace.") from self._error

    def _run(self) -> None:
        assert self._seconds is not None
        due = time.monotonic() + self._seconds
        while not self._end.wait(max(due - time.monotonic(), 0)):
            due += self._seconds
            try:
                self.next_row()
            except Exception as error:  # raised at the end of the block
                self._error = error
                return


def _check(speeds: np.ndarray) -> np.ndarray:
    if not (speeds >= 0).all():
        raise ValueError("Speeds must be 0 or above: choose a stretch of the trace without NaN.")
    return speeds


async def _measure_speed(
    keys: Mapping[str, Any], x: np.ndarray, seconds: float, dask_worker: Any
) -> float:
    """Return this worker's rows per second, computed in a thread next to its event loop."""
    piece = dask_worker.data[keys[dask_worker.address]]
    step = max(1, min(3 * len(piece) // dask.config.get("coded.round.stripes"), len(piece)))

    def work() -> float:
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            start = done % (len(piece) - step + 1)
            piece[start : start + step] @ x
            done += step
        return done / (time.perf_counter() - began)

    return await asyncio.get_running_loop().run_in_executor(None, work)
