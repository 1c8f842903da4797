"""Real clusters for the tests: processes started by `dask scheduler` and `dask worker`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client, utils_test
from hypothesis import settings

import dask_coded  # noqa: F401  its defaults

# The same examples in every run; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("dask-coded", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("dask-coded")


# gen_cluster resets the configuration to what it was when its module was imported.
utils_test.original_config["coded"] = dask.config.get("coded")


class Processes:
    """A scheduler and workers in separate processes, which tests can stop and kill."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "scheduler.json"
        self._log = (folder / "log").open("w")
        self._all: list[subprocess.Popen] = []
        self.workers: dict[str, subprocess.Popen] = {}
        self._dask("scheduler", "--port", "0", "--no-dashboard", "--no-show")
        self.client = Client(scheduler_file=str(self._file), set_as_default=False)

    def _dask(self, *command: str) -> subprocess.Popen:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]",
            # A lost connection is noticed at once anyway; do not wait for a stopped process.
            "DASK_DISTRIBUTED__COMM__RETRY__COUNT": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *command, "--scheduler-file", str(self._file)],
            env=environment,
            stdout=self._log,
            stderr=self._log,
        )
        self._all.append(process)
        return process

    def add(self, count: int, threads: int = 1) -> list[str]:
        """Start workers, and return their addresses."""
        names = [f"w{len(self.workers) + i}" for i in range(count)]
        for name in names:
            options = ("--nthreads", str(threads), "--name", name, "--no-nanny", "--no-dashboard")
            self.workers[name] = self._dask("worker", *options)
        self.client.wait_for_workers(
            sum(process.poll() is None for process in self.workers.values()), timeout=120
        )
        return [self.address(name) for name in names]

    def address(self, name: str) -> str:
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        return next(a for a, info in workers.items() if info["name"] == name)

    def process(self, address: str) -> subprocess.Popen:
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        return self.workers[workers[address]["name"]]

    def kill(self, address: str) -> None:
        """kill -9, and wait until the process is gone."""
        process = self.process(address)
        process.kill()
        process.wait()

    @contextlib.contextmanager
    def stopped(self, *addresses: str) -> Iterator[None]:
        """Stop workers by SIGSTOP for the duration of a ``with`` block."""
        processes = [self.process(address) for address in addresses]
        try:
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.close(timeout=5)
        for process in reversed(self._all):
            process.kill()
        for process in self._all:
            process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of four workers in this process."""
    options = {"n_workers": 4, "threads_per_worker": 1, "processes": False}
    with Client(**options, dashboard_address=None, set_as_default=False) as client:
        yield client


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    cluster = Processes(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real graphs and data sets; tests that need it are skipped without it."""
    folder = os.environ.get("DASK_CODED_DATA")
    if not folder:
        pytest.skip("DASK_CODED_DATA is not set")
    return Path(folder)
