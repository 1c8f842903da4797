"""Clusters whose workers can be stopped, killed, slowed down and cut off one by one.

Both kinds have the scheduler and the client in this process. In a `NetworkCluster` every worker is
on a host of its own behind a link, see `benchmarks.network`, so large operands go from host to
host. In a `LocalCluster` all workers are on this host and share memory; every third worker has a
nanny, which starts it again when it dies, and all have a memory limit, so that they can spill.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import distributed
import psutil
from distributed import Client

from benchmarks.lab import Throttle
from benchmarks.network import NetworkLab
from benchmarks.nursery import nursery
from benchmarks.stopping import Signals

RATE = "200mbit"
_MEMORY = "1GiB"


class Cluster(ABC):
    """Numbered workers; a worker that is started again keeps its number.

    Attributes
    ----------
    client : Client
    scheduler : Scheduler
        It runs in this process.
    workers : int
        How many there are when all are well.
    """

    client: Client
    scheduler: Any
    _signals: Signals
    _throttle: Throttle
    _undo: ExitStack

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @abstractmethod
    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def addresses(self) -> dict[int, str]:
        """Return the addresses of the workers that the scheduler knows, by number."""
        return {int(ws.name): ws.address for ws in list(self.scheduler.workers.values())}

    @abstractmethod
    def pid(self, i: int) -> int | None:
        """Return the process id of a worker, None if it is not running."""

    @abstractmethod
    def has_nanny(self, i: int) -> bool: ...

    @abstractmethod
    def start(self, i: int) -> None:
        """Start a worker again that has ended; do not wait for it."""

    def kill(self, i: int) -> None:
        """Send SIGKILL to a worker; its nanny, if there is one, starts it again."""
        if pid := self.pid(i):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self, i: int) -> None:
        """Stop a worker by SIGSTOP."""
        if pid := self.pid(i):
            self._signals.stop(pid)

    def resume(self, i: int) -> None:
        if pid := self.pid(i):
            self._signals.resume(pid)

    def slow(self, i: int, share: float) -> None:
        """Give a worker a share of a core; infinity does not limit it."""
        if pid := self.pid(i):
            with suppress(ProcessLookupError):
                self._throttle.set_share(pid, share)


class NetworkCluster(Cluster):
    """Workers on hosts of their own; needs root on Linux."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.lab = stack.enter_context(NetworkLab(self.workers - 1, RATE))
            self.client = self.lab.client
            cluster: Any = self.client.cluster
            self.scheduler = cluster.scheduler
            self._signals = Signals()
            stack.callback(self._signals.close)
            self._throttle = self.lab._throttle
            self._undo = stack.pop_all()
        return self

    def pid(self, i: int) -> int | None:
        pid = self.lab.pids[i]
        return pid if _runs(pid) else None

    def has_nanny(self, i: int) -> bool:
        return False

    def start(self, i: int) -> None:
        self.lab.start(i)


class LocalCluster(Cluster):
    """Workers on this host, every third one under a nanny."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
            cluster: Any = stack.enter_context(
                distributed.LocalCluster(n_workers=0, dashboard_address=None, processes=True)
            )
            self.client = stack.enter_context(Client(cluster))
            self.scheduler = cluster.scheduler
            self._signals = Signals()
            stack.callback(self._signals.close)
            self._throttle = stack.enter_context(Throttle({}))
            self._nursery = stack.enter_context(nursery(self._folder / "workers.log"))
            self._pids: dict[int, int] = {}
            for i in range(self.workers):
                self.start(i)
            self.client.wait_for_workers(self.workers, timeout=120)
            self._undo = stack.pop_all()
        return self

    def has_nanny(self, i: int) -> bool:
        return i % 3 == 0

    def start(self, i: int) -> None:
        while i in self._pids and _runs(self._pids[i]):
            time.sleep(0.01)
        nanny = "--nanny" if self.has_nanny(i) else "--no-nanny"
        options = f"--name {i} --nthreads 1 --memory-limit {_MEMORY} {nanny} --no-dashboard"
        arguments = [self.scheduler.address, *options.split()]
        (self._pids[i],) = self._nursery.start(
            [[*arguments, "--local-directory", str(self._folder)]]
        )

    def pid(self, i: int) -> int | None:
        pid = self._pids[i]
        if not _runs(pid):
            return None
        if not self.has_nanny(i):
            return pid
        with suppress(psutil.Error):
            for child in psutil.Process(pid).children():
                if any("spawn_main" in word for word in child.cmdline()):
                    return child.pid
        return None


def _runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
