"""Processes of `dask scheduler` and `dask worker`, which tests can stop and kill.

They are forked by a server process that has imported everything already: otherwise most of the
time of these tests would be spent on imports.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import dask.cli
import pytest
from distributed import Client
from distributed.utils_test import poll_for

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess  # which Windows lacks

_CONFIG = {
    "distributed.worker.http.routes": [],
    # A lost connection is noticed at once anyway; do not wait for a stopped process.
    "distributed.comm.retry.count": 0,
}


def start_server() -> None:
    """Start the process that forks others, unless it runs already."""
    commands = ["distributed.cli.dask_scheduler", "distributed.cli.dask_worker"]
    multiprocessing.forkserver.set_forkserver_preload(["dask_coded.runtime", *commands])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # is read when NumPy is imported
        multiprocessing.forkserver.ensure_running()


def run(command: tuple[str, ...], log: str, environment: dict[str, str]) -> None:
    """Be the process of `dask COMMAND`, as if started in this environment."""
    # The server may have been started by a test with variables of its own.
    os.environ.clear()
    os.environ.update(environment)
    dask.config.refresh()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    dask.config.set(_CONFIG)
    sys.argv = ["dask", *command]
    dask.cli.run_cli()


def running(dask_scheduler: Any) -> dict[str, str]:
    """Return the addresses of the workers that run, by their names; called in the scheduler."""
    workers = dask_scheduler.workers.values()
    return {ws.name: ws.address for ws in workers if ws.status.name == "running"}


class Processes:
    """A scheduler and workers in separate processes, which tests can stop and kill."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "scheduler.json"
        self._log = folder / "log"
        self._log.touch()
        start_server()
        self._context = multiprocessing.get_context("forkserver")
        self._all: list[ForkServerProcess] = []
        self.workers: dict[str, ForkServerProcess] = {}
        self._names: dict[str, str] = {}
        self._scheduler_process = self._dask(
            "scheduler", "--port", "0", "--no-dashboard", "--no-show"
        )
        # The file is there before it is written.
        poll_for(lambda: self._scheduler() is not None, timeout=120)
        self.client = Client(self._scheduler(), set_as_default=False)

    def _scheduler(self) -> str | None:
        try:
            address: str = json.loads(self._file.read_text())["address"]
        except (OSError, ValueError):
            return None
        return address

    def _dask(self, *command: str) -> ForkServerProcess:
        command = (*command, "--scheduler-file", str(self._file))
        arguments = (command, str(self._log), dict(os.environ))
        process = self._context.Process(target=run, args=arguments)
        process.start()
        self._all.append(process)
        return process

    def add(self, count: int, threads: int = 1, options: tuple[str, ...] = ()) -> list[str]:
        """Start workers, with more options of ``dask worker``, and return their addresses."""
        names = [f"w{len(self.workers) + i}" for i in range(count)]
        for name in names:
            usual = ("--nthreads", str(threads), "--name", name, "--no-nanny", "--no-dashboard")
            self.workers[name] = self._dask("worker", *usual, *options)
        poll_for(lambda: self._running().keys() >= set(names), timeout=120)
        addresses = self._running()
        self._names |= {addresses[name]: name for name in names}
        return [addresses[name] for name in names]

    def _running(self) -> dict[str, str]:
        """Return the addresses of the workers by their names."""
        found: dict[str, str] = self.client.run_on_scheduler(running)
        return found

    def process(self, address: str) -> ForkServerProcess:
        return self.workers[self._names[address]]

    def kill(self, address: str) -> None:
        """kill -9, and wait until the process is gone."""
        process = self.process(address)
        process.kill()
        process.join()

    def kill_scheduler(self) -> None:
        """kill -9, and wait until the process is gone."""
        self._scheduler_process.kill()
        self._scheduler_process.join()

    def restart_scheduler(self) -> None:
        """Start another scheduler at the address of the one that was killed; no worker is left."""
        for process in self.workers.values():
            process.kill()
            process.join()
        self.workers.clear()
        port = self.client.scheduler.address.rpartition(":")[2]
        self._dask("scheduler", "--port", port, "--no-dashboard", "--no-show")
        poll_for(lambda: self.client.status == "running", timeout=120)

    @contextlib.contextmanager
    def stopped(self, *addresses: str) -> Iterator[None]:
        """Stop workers by SIGSTOP for the duration of a ``with`` block."""
        processes = [self.process(address) for address in addresses]
        try:
            for process in processes:
                os.kill(process.pid, signal.SIGSTOP)
            yield
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.close(timeout=5)
        for process in reversed(self._all):
            process.kill()
        for process in self._all:
            process.join()
