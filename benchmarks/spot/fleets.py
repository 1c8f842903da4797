"""Workers that come and go as spot machines did that were recorded."""

from __future__ import annotations

import csv
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import dask
import distributed
from distributed import Client

from benchmarks import datasets
from benchmarks.nursery import nursery

TRACE = "trace_spot_g4dn_us-east-1d.csv"


def recorded(begin: float, seconds: float, speedup: float) -> list[tuple[float, int]]:
    """Return when the recorded fleet has how many machines: seconds of the replay, and numbers."""
    where = datasets.folder()
    if where is None:
        raise click.ClickException(
            "This needs the recorded fleets: set DASK_CODED_DATA to the folder of the data."
        )
    with (where / TRACE).open() as file:
        rows = [(float(at), int(count)) for at, count in csv.reader(file)]
    before = [count for at, count in rows if at <= begin]
    inside = [(at, count) for at, count in rows if begin < at <= begin + seconds]
    return [(0.0, before[-1]), *(((at - begin) / speedup, count) for at, count in inside)]


class Fleet:
    """Workers that come and go as recorded.

    Attributes
    ----------
    client : Client
    counts : list of (float, int)
        When the scheduler had how many workers, by ``time.time``.
    """

    def __init__(self, client: Client, scheduler: Any, workers: Any, local: Path) -> None:
        self.client = client
        self.counts: list[tuple[float, int]] = []
        self._scheduler = scheduler
        self._nursery = workers
        self._local = local
        self._rng = random.Random(0)
        self._pids: list[int] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def resize(self, count: int) -> None:
        """Kill or start workers at once."""
        while len(self._pids) > count:
            pid = self._pids.pop(self._rng.randrange(len(self._pids)))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if lacking := count - len(self._pids):
            limits = ["--nthreads", "1", "--memory-limit", "0", "--no-nanny", "--no-dashboard"]
            command = [self._scheduler.address, *limits, "--local-directory", str(self._local)]
            self._pids += self._nursery.start([command] * lacking)

    @contextmanager
    def following(self, record: Sequence[tuple[float, int]]) -> Iterator[None]:
        """Follow a record inside the block."""
        self._over.clear()
        self.counts = [(time.time(), len(self._scheduler.workers))]
        self._threads = [
            threading.Thread(target=self._follow, args=(record,), daemon=True),
            threading.Thread(target=self._count, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _follow(self, record: Sequence[tuple[float, int]]) -> None:
        began = time.monotonic()
        for at, count in record:
            if self._over.wait(max(0.0, began + at - time.monotonic())):
                return
            self.resize(count)

    def _count(self) -> None:
        while not self._over.wait(0.02):
            if (count := len(self._scheduler.workers)) != self.counts[-1][1]:
                self.counts.append((time.time(), count))


@contextmanager
def fleet(count: int, where: Path) -> Iterator[Fleet]:
    """Start a scheduler in this process and workers beside it.

    Every product of a loop is a round, although the coordinator alone would be quicker with arrays
    as small as two cores need.
    """
    with (
        dask.config.set({"coded.round.alone": False}),
        distributed.LocalCluster(n_workers=0, dashboard_address=None, processes=True) as cluster,
        Client(cluster) as client,
        nursery(where / "workers.log") as workers,
    ):
        found = Fleet(client, cluster.scheduler, workers, where)
        found.resize(count)
        client.wait_for_workers(count, timeout=120)
        yield found
