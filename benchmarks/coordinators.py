"""Measure what a coordinator costs that is stopped, killed or beside slow workers.

The coordinator of a lazy round, of an algorithm that was submitted, and the leader of a training
run on a worker like any other. Here the process of that worker is stopped for 15 seconds, or
killed, while rounds or steps run, and the longest time without a finished one is measured. That
time includes `coded.coordinator.timeout`, a second by default. A lazy round is hit when its task
has been sent to the worker, and when its result waits there for the client.

Then two of eight workers are slowed 20 times before a matrix is encoded, and loops are run beside
them one after another: none should be placed on a slow worker, and all should take equally long.
How equal they are without slowed workers stands beside it.

These are seconds, not ratios, because the timeout is an absolute time.
"""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import click
import dask.array as da
import numpy as np
from distributed import Client, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.lab import Throttle
from benchmarks.report import Report, options
from benchmarks.stopping import Signals

_WORKERS = 6
_ROWS, _COLUMNS = 3000, 500
_ROUNDS = 40
# The matrix of loops beside slow workers, whose rounds should not be noise alone.
_LARGE = 12_000, 2_000
#: Seconds that a loop needs between two rounds.
_PAUSE = 0.05

#: Does something to the worker at an address.
Hitting = Callable[[str], None]


class Victims:
    """Stops or kills the processes of workers, inside a ``with`` block.

    Parameters
    ----------
    client
        Client of the cluster.
    seconds
        For how long a process is stopped; 0 if it is killed.
    """

    def __init__(self, client: Client, seconds: float) -> None:
        self._seconds = seconds
        self._signals = Signals()
        self._pids = client.run(os.getpid)
        self._cluster: Any = client.cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.close()

    def hit(self, address: str) -> None:
        """Stop a worker and continue it later, or kill it."""
        pid = self._pids[address]
        if self._seconds:
            self._signals.stop(pid)
            timer = threading.Timer(self._seconds, self._signals.resume, [pid])
            timer.daemon = True
            timer.start()
            return
        for nanny in self._cluster.workers.values():
            if nanny.worker_address == address:
                nanny.close_gracefully()  # so that it starts no other worker
        os.kill(pid, signal.SIGKILL)


def rounds(operator: Any, x: np.ndarray, log: str, loop: coded.Loop | None = None) -> int:
    """Run rounds, and write when each of them has ended; return how many ran here."""
    first = 0 if loop is None else loop.resume(0)
    for i in range(first, _ROUNDS):
        operator @ x
        with open(log, "a") as file:
            file.write(f"{time.time()}\n")
        if loop is not None:
            loop.report(coded.Progress(i + 1, 0.0), state=i + 1, last=i + 1 == _ROUNDS)
        time.sleep(_PAUSE)
    return _ROUNDS - first


def coordinating(client: Client, prefix: str) -> str:
    """Return the address of the worker that runs a task."""
    while True:
        for address, keys in client.processing().items():
            if any(str(key).startswith(prefix) for key in keys):
                return address
        time.sleep(0.01)


def longest_gap(times: list[float]) -> float:
    return float(np.diff(times).max())


def loop_gap(client: Client, C: Any, x: np.ndarray, hit: Hitting, kept: bool) -> float:
    """Return the longest time between two rounds of a loop whose worker is hit."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "rounds"
        log.touch()
        loops = (coded.Loop(),) if kept else ()
        future = coded.submit(rounds, C, x, str(log), *loops, client=client)
        while len(log.read_text().splitlines()) < 10:
            time.sleep(0.01)
        hit(coordinating(client, str(future.key)))
        future.result(timeout=60)
        return longest_gap([float(line) for line in log.read_text().splitlines()])


def training_gap(client: Client, hit: Hitting, steps: int) -> float:
    """Return the longest time between two reports of a training whose leader is hit."""
    times: list[float] = []

    def record(progress: coded.Progress) -> None:
        times.append(time.time())
        if len(times) == 3:
            thread = threading.Thread(target=lambda: hit(coordinating(client, "coded-lead")))
            thread.start()

    samples = da.random.default_rng(0).standard_normal((600, 20), chunks=(50, -1))
    coded.training.train(
        squares,
        np.zeros(20),
        (samples, samples @ np.ones(20)),
        steps=steps,
        aggregation=coded.aggregation.GradientCoding(stragglers=1),
        callback=record,
        client=client,
    )
    return longest_gap(times)


def squares(w: np.ndarray, samples: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    time.sleep(0.002)
    error = samples @ w - targets
    return float(error @ error) / 2, samples.T @ error


class Hit(SchedulerPlugin):
    """Hits the worker of the first lazy round that comes into a state."""

    def __init__(self, client: Client, state: str, hit: Hitting) -> None:
        cluster: Any = client.cluster
        self._scheduler = cluster.scheduler
        self._state = state
        self._hit: Hitting | None = hit

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if self._hit is None or finish != self._state or "coded-round" not in str(key):
            return
        ts = self._scheduler.tasks[key]
        ws = ts.processing_on or next(iter(ts.who_has))
        self._hit(ws.address)
        self._hit = None


@contextmanager
def hitting(client: Client, state: str, hit: Hitting) -> Iterator[None]:
    """Hit the worker of a lazy round inside the block."""
    plugin = Hit(client, state, hit)
    cluster: Any = client.cluster
    cluster.scheduler.add_plugin(plugin, name="hit")
    try:
        yield
    finally:
        cluster.scheduler.remove_plugin("hit")


def lazy_gap(
    client: Client, C: Any, A: np.ndarray, state: str, hit: Hitting, seconds: float
) -> float:
    """Return the seconds of the slowest of many lazy rounds, one of which is hit."""
    times, end = [], time.time() + seconds
    rng = np.random.default_rng(2)
    with hitting(client, state, hit):
        while time.time() < end:
            x = rng.standard_normal(_COLUMNS)
            began = time.time()
            result = (C @ x).compute()
            times.append(time.time() - began)
            np.testing.assert_allclose(result, A @ x, rtol=1e-8, atol=1e-8)
    return max(times)


def timed(operator: Any, x: np.ndarray, count: int) -> tuple[str, float]:
    """Run rounds; return the worker that they ran on, and the median of their seconds."""
    seconds = []
    for _ in range(count):
        operator @ x
        seconds.append(operator.last_round.seconds)
    return get_worker().address, float(np.median(seconds))


def beside_slow_workers(report: Report, loops: int, count: int, slowed: int) -> None:
    """Run loops one after another beside workers of which some are slowed 20 times."""
    with local_workers(8) as (client, addresses):
        pids = client.run(os.getpid)
        slow = addresses[:slowed]
        A = np.random.default_rng(0).standard_normal(_LARGE)
        x = np.ones(A.shape[1])
        # A slowed worker would need most of a minute to import the library.
        client.run(importlib.import_module, "dask_coded")
        with Throttle({pids[address]: 0.05 for address in slow}) as throttle:
            report.machine["throttle"] = throttle.kind
            C = coded.encode(A, coded.MDS(8, 6), client)
            found = [coded.submit(timed, C, x, count, client=client).result() for _ in range(loops)]
    case = f"{loops} loops beside {slowed} of 8 workers slowed 20 times"
    if slowed:
        report.add(case, "loops_on_slow_workers", sum(a in slow for a, _ in found), "loops", goal=0)
    medians = [seconds for _, seconds in found]
    goal = 1.5 if slowed else None
    report.add(case, "slowest_over_fastest", max(medians) / min(medians), goal=goal)


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure the longest time without a round when a coordinator is stopped or killed."""
    report = Report("coordinators")
    stopped = 3.0 if smoke else 15.0
    A = np.random.default_rng(0).standard_normal((_ROWS, _COLUMNS))
    x = np.random.default_rng(1).standard_normal(_COLUMNS)
    cases: dict[str, Callable[[Client, Any, Hitting], float]] = {
        "loop": lambda client, C, hit: loop_gap(client, C, x, hit, kept=False),
        "loop with a Loop": lambda client, C, hit: loop_gap(client, C, x, hit, kept=True),
        "lazy rounds, hit while one runs": lambda client, C, hit: lazy_gap(
            client, C, A, "processing", hit, stopped + 2
        ),
        "lazy rounds, hit while a result is fetched": lambda client, C, hit: lazy_gap(
            client, C, A, "memory", hit, stopped + 2
        ),
        "training": lambda client, C, hit: training_gap(client, hit, 50 if smoke else 1000),
    }
    faults = {f"SIGSTOP for {stopped:.0f} s": (stopped, 3.0), "kill -9": (0.0, 1.0)}
    for fault, (seconds, goal) in faults.items():
        for case, gap in list(cases.items())[: 1 if smoke else None]:
            with local_workers(_WORKERS) as (client, _):
                C = coded.encode(A, coded.MDS(_WORKERS, _WORKERS - 2), client)
                (C @ x).compute()
                with Victims(client, seconds) as victims:
                    longest = gap(client, C, victims.hit)
                report.add(f"{case}, {fault}", "longest_gap", longest, "s", goal=goal)
                del C
    for slowed in (0, 2):
        beside_slow_workers(report, *((2, 3) if smoke else (20, 60)), slowed)
    report.finish(json_file)


if __name__ == "__main__":
    main()
