"""Clusters of worker processes on this machine: plain ones, and the straggler lab.

In the lab the speed of every worker is given, and may follow a trace of real machines::

    with Lab(workers=10, share=0.15) as lab:
        C = coded.encode(A, workers=lab.workers)  # as yet the workers run at full speed
        lab.set_speeds([1.0] * 8 + [0.2] * 2)
        speeds = lab.measure_speeds(C, x)
        with lab.following(trace, seconds=2.0):
            coded.submit(play_rounds, C, x, 100, workers=[lab.free]).result()

Scheduler and coordinator are never slowed: the scheduler lives in this process, and `Lab.free` is
the address of one more worker, for the coordinator. The slow ones are slow by `benchmarks.lab`'s
means, event loop and communication included.

Nothing outlives the block, however it ends. Where this process is killed before it can tidy up, its
workers notice that it is gone and end, stopped ones are continued so that they do, and the control
groups, empty then, are removed by the next lab.
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
import numpy as np
from distributed import Client, LocalCluster, Queue
from numpy.typing import ArrayLike

import dask_coded as coded
from benchmarks.lab import Kind, Throttle


@contextmanager
def local_workers(count: int) -> Iterator[tuple[Client, list[str]]]:
    """Start a scheduler in this process, and one-thread worker processes.

    No worker has a memory limit: nothing is spilled or paused behind a benchmark's back.

    Yields
    ------
    client : Client
    addresses : list of str
        Of the workers.
    """
    with (
        LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client, sorted(client.scheduler_info(n_workers=-1)["workers"])


def play_rounds(operator: Any, x: np.ndarray, rounds: int) -> list[float]:
    """In the cluster: seconds of each of some rounds."""
    seconds = []
    for _ in range(rounds):
        operator @ x
        seconds.append(operator.last_round.seconds)
    return seconds


class Rounds:
    """Rounds of one loop in the cluster, each played when it is asked for.

    Parameters
    ----------
    client
        Of the cluster.
    operator
        A coded array.
    x
        Its operand.
    worker
        Where the loop runs.
    """

    def __init__(self, client: Client, operator: Any, x: np.ndarray, worker: str) -> None:
        name = uuid.uuid4().hex
        self._asked = Queue(f"asked-{name}", client=client)
        self._played = Queue(f"played-{name}", client=client)
        self._future = coded.submit(
            _play_when_asked, operator, x, name, client=client, workers=[worker]
        )

    def play(self) -> float:
        """Seconds of one round."""
        self._asked.put(True)
        return self._played.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.put(False)
        if error[0] is None:
            self._future.result()


def _play_when_asked(operator: Any, x: np.ndarray, name: str) -> None:
    asked, played = Queue(f"asked-{name}"), Queue(f"played-{name}")
    while asked.get():
        operator @ x
        played.put(operator.last_round.seconds)


class Lab:
    """A cluster whose workers have given speeds, for as long as a ``with`` block lasts.

    Parameters
    ----------
    workers
        How many are slowed; there is one more.
    share
        Share of one core that a worker of speed 1 has. All shares together should leave some of
        the machine free, or the workers slow down each other.
    floor
        Least share of a worker that is not stopped. With less than a few thousandths of a core the
        event loop no longer answers, which is another fault than being slow.
    kind
        How to slow down; see `Throttle`.

    Attributes
    ----------
    client
        Of the cluster.
    workers
        Addresses of the workers that are slowed, in the order of their speeds.
    free
        Address of the one that is not.
    speeds
        Those in force, one for each of ``workers``; at first infinite.
    kind
        The way that is in use; see `Throttle`.
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
                "A lab wants at least 1 worker, and a share and a floor above 0, not "
                f"workers={workers}, share={share}, floor={floor}."
            )
        self._count = workers
        self._share = share
        self._floor = floor
        self._kind = kind

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.client, addresses = stack.enter_context(local_workers(self._count + 1))
            *self.workers, self.free = addresses
            pids = self.client.run(os.getpid, workers=self.workers)
            self._pids = [pids[worker] for worker in self.workers]
            self._dead: set[int] = set()
            # Left before the cluster is closed: slow workers would be slow to end, stopped ones
            # would not end at all.
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
            Worker i gets ``share * speeds[i]`` of a core, or ``floor`` where that is more. A worker
            of speed 0 is stopped: it answers nobody. One of speed ``math.inf`` is not limited.
        """
        speeds = np.broadcast_to(np.asarray(speeds, dtype=float), self._count).copy()
        for i, (pid, speed) in enumerate(zip(self._pids, _check(speeds).tolist(), strict=True)):
            share = 0.0 if speed == 0 else max(self._share * speed, self._floor)
            if i not in self._dead:
                self._throttle.set_share(pid, share)
        self.speeds = speeds

    @contextmanager
    def following(self, trace: ArrayLike, seconds: float | None = None) -> Iterator[Follower]:
        """Let the speeds follow a trace; after the block they are what they were before it.

        Parameters
        ----------
        trace : array_like, shape (rows, workers)
            Relative speeds. The first row holds from the beginning; after the last comes the first.
        seconds
            How long a row holds, by a thread; leave the speeds to it. If not given, rows change by
            `Follower.next_row` alone.

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
        """Measure how fast the workers are on their pieces, all at once, with nothing else to do.

        In products of one stripe, as rounds compute them: an eighth of a piece at a time is up to
        7 % slower, and no bound. At once, because they share caches and memory with each other in a
        round as well. For other tenants of the machine the speed of all may change by tens of
        percent within seconds: measure beside what is to be compared, before and after.

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
            Rows per second; 0 where a worker has died.
        """
        encoded = operator.encoded
        keys = {w: piece.key for w, piece in zip(encoded.workers, encoded.futures, strict=True)}
        alive = [w for i, w in enumerate(self.workers) if i not in self._dead]
        speeds = self.client.run(_measure_speed, keys, x, seconds, workers=alive)
        return np.array([speeds.get(worker, 0.0) for worker in self.workers])

    def kill(self, worker: str) -> None:
        """Kill a worker for good (SIGKILL), and wait until the scheduler knows."""
        index = self.workers.index(worker)
        cluster: Any = self.client.cluster
        for nanny in cluster.workers.values():
            if nanny.worker_address == worker:
                nanny.close_gracefully()  # it is not to start another one
        os.kill(self._pids[index], signal.SIGKILL)
        self._dead.add(index)
        while worker in cluster.scheduler.workers:
            time.sleep(0.01)


class Follower:
    """Walks through the rows of a trace: by hand, or in a thread of its own.

    Parameters
    ----------
    rows
        Of the trace.
    apply
        Called with each row in turn.
    seconds
        How long a row holds; without it there is no thread.

    Attributes
    ----------
    row
        Number of the row in force.
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
        """Go on to the next row now."""
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
            raise RuntimeError("The workers ceased to follow the trace.") from self._error

    def _run(self) -> None:
        assert self._seconds is not None
        due = time.monotonic() + self._seconds
        while not self._end.wait(max(due - time.monotonic(), 0)):
            due += self._seconds
            try:
                self.next_row()
            except Exception as error:  # raised where the block ends
                self._error = error
                return


def _check(speeds: np.ndarray) -> np.ndarray:
    if not (speeds >= 0).all():
        raise ValueError("Speeds must be 0 or above: choose a stretch of the trace without NaN.")
    return speeds


async def _measure_speed(
    keys: Mapping[str, Any], x: np.ndarray, seconds: float, dask_worker: Any
) -> float:
    """On a worker: its rows per second with nothing else to do, beside its event loop."""
    piece = dask_worker.data[keys[dask_worker.address]]
    step = max(1, len(piece) // dask.config.get("coded.round.stripes"))

    def work() -> float:
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            start = done % (len(piece) - step + 1)
            piece[start : start + step] @ x
            done += step
        return done / (time.perf_counter() - began)

    return await asyncio.get_running_loop().run_in_executor(None, work)
