"""Clusters for the tests: in this process, and of real processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import dask
import pytest
from distributed import Client, core, utils_test
from hypothesis import settings

import dask_coded  # noqa: F401  its defaults
from benchmarks import datasets
from dask_coded.runtime.scheduler import supervisor
from dask_coded.runtime.worker import jobs
from tests.processes import Processes

# The same examples in every run; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("dask-coded", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("dask-coded")


# Dask's profiler looks at all threads a hundred times a second. If the garbage is collected just
# then while another thread is started, CPython 3.11.7 deadlocks: see its issue gh-106883.
os.environ["DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"] = "False"  # in other processes
dask.config.set({"distributed.worker.profile.enabled": False})
# Nannies fork workers from a process that has imported everything, here and in the programs that
# tests run: otherwise much of the time of all tests would be spent on imports.
os.environ["DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD"] = "forkserver"
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
# On a busy machine even the start of a cluster takes seconds. These are upper limits: a test ends
# as soon as it is done.
for name in ("gen_cluster", "gen_test"):
    setattr(utils_test, name, partial(getattr(utils_test, name), timeout=120))
for name in ("poll_for", "async_poll_for"):
    setattr(utils_test, name, partial(getattr(utils_test, name), timeout=60))
# On a busy machine any worker is slow now and then. Tests of coordinators that move for that reason
# allow it, see `test_supervisor`.
supervisor._SLOW = 0.0
# Most tests are about rounds, which small matrices would end.
dask.config.set({"coded.round.alone": False})
# gen_cluster resets the configuration to what it was when its module was imported.
utils_test.original_config["coded"] = dask.config.get("coded")
utils_test.original_config["distributed"]["worker"]["profile"]["enabled"] = False
utils_test.original_config["distributed"]["worker"]["multiprocessing-method"] = "forkserver"


def pytest_collection_finish() -> None:
    """Have collections of garbage skip what is there all the time: a quarter of a second each."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """Let workers and schedulers in this process go.

    distributed caches for each handler, a bound method, how to call it. So no server was ever
    freed, and after 200 tests each collection of garbage took a second.
    """
    if cached := getattr(core, "_expects_comm", None):
        cached.cache_clear()


@pytest.fixture(params=["loop", pytest.param("threads", marks=pytest.mark.long)])
def job_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers compute small jobs, as most tests have, on the event loop, then in threads."""
    if request.param == "threads":
        monkeypatch.setattr(jobs, "_INLINE", 0)


@pytest.fixture(scope="module", autouse=True)
def own_default() -> Iterator[None]:
    """Keep what is Dask's default scheduler within a module.

    Tasks of workers in this process make clients, which become the default. If these are not
    closed in the opposite order, one of them stays it.
    """
    with dask.config.set(scheduler=None):
        yield


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


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Callable[[], Processes]]:
    """Start clusters, one after the other."""
    running: list[Processes] = []

    def start() -> Processes:
        folder = tmp_path / f"cluster-{len(running)}"
        folder.mkdir()
        running.append(Processes(folder))
        return running[-1]

    yield start
    for cluster in running:
        cluster.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have coordinators that are late on a busy machine go on; ask for it before `processes`."""
    monkeypatch.setenv("DASK_CODED__COORDINATOR__TIMEOUT", "60s")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real graphs and data sets; tests that need it are skipped without it."""
    folder = datasets.folder()
    if folder is None:
        pytest.skip("DASK_CODED_DATA names no folder")
    return folder
