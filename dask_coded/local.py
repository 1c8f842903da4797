"""A silent cluster of processes on this machine, for the command line."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from distributed import Client, LocalCluster


@contextmanager
def local_client(workers: int) -> Iterator[Client]:
    """Start a cluster and connect to it; close both when the context ends.

    Parameters
    ----------
    workers : int
        Number of worker processes, of one thread each.

    Yields
    ------
    distributed.Client
        Yielded once all workers have joined.
    """
    with _silent("asyncio"), _interrupts_held() as release:
        with (
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                dashboard_address=None,
                # The scheduler serves metrics anyway: keep them off the dashboard's usual port.
                scheduler_kwargs={"dashboard_address": ":0"},
                # Failures reach the client as exceptions; errors during shutdown are noise.
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
    """Block interrupts until released, and permanently in processes started meanwhile.

    A terminal sends Ctrl-C to all of its processes. It would kill the workers, each with a
    traceback, while this process still communicates with them. Processes inherit the mask of
    blocked signals. An interrupt that arrives while signals are blocked is delivered on release.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield lambda: None
        return
    # Starting the tracker later would unblock the signals of the thread that starts workers.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield release
    finally:
        release()
