"""A cluster of processes on this machine, for commands: it comes and goes without a word."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from distributed import Client, LocalCluster


@contextmanager
def local_client(workers: int) -> Iterator[Client]:
    """Start a cluster and connect to it; both are gone when the context ends, however it ends.

    Parameters
    ----------
    workers : int
        Number of worker processes, of one thread each.

    Yields
    ------
    distributed.Client
        Connected when all workers are there.
    """
    with _silent("asyncio"), _interrupts_held() as release:
        with (
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                dashboard_address=None,
                # The scheduler serves metrics all the same: not at the usual dashboard's port.
                scheduler_kwargs={"dashboard_address": ":0"},
                # What fails reaches the client as an exception; what a shutdown breaks is no news.
                silence_logs=logging.CRITICAL,
            ) as cluster,
            Client(cluster) as client,
        ):
            release()
            yield client


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Keep a logger from reporting the tasks that an interrupt leaves unfinished."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold interrupts back until released, and from processes started here for good.

    A terminal sends Ctrl-C to all of its processes. Workers would die of it, each with a traceback,
    while this process is still talking to them. The mask of blocked signals is inherited; an
    interrupt that comes meanwhile waits for its release.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield lambda: None
        return
    # Started later, it would unblock the signals of the thread that starts the first worker.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield release
    finally:
        release()
