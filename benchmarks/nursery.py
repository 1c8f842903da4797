"""A process that starts ``dask worker`` processes within milliseconds, however often they die.

It imports what workers need once, and forks a copy of itself for each of them::

    with nursery(folder / "workers.log") as workers:
        pid, = workers.start([["tcp://127.0.0.1:8786", "--nthreads", "1", "--no-nanny"]])

Starting Python and importing everything takes a worker two seconds of processor time. On a few
cores, with many workers that die one after another, most of the time would be spent on that.

The workers end with the nursery, and it ends with the process that started it, even by SIGKILL,
because its standard input is closed then. Under a nanny, workers start as always.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


class Nursery:
    """The other end of the process, see `nursery`.

    Attributes
    ----------
    pid : int
        The process id of the command that the nursery was started with.
    log : Path
        What it and its workers write.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path, nested: bool) -> None:
        self.pid = process.pid
        self.log = log
        self._process = process
        self._nested = nested
        # Which process is new is seen by comparison, so one thread at a time may start some.
        self._lock = threading.Lock()

    def start(self, workers: Sequence[Sequence[str]]) -> list[int]:
        """Start a worker with each of the lists of arguments.

        Returns
        -------
        list of int
            Their process ids outside of any namespace that the nursery may be in.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        forking = psutil.Process(self.pid)
        if self._nested:
            (forking,) = forking.children()
        with self._lock:
            before = {child.pid for child in forking.children()}
            self._process.stdin.write(json.dumps(workers) + "\n")
            self._process.stdin.flush()
            if not self._process.stdout.readline():
                raise OSError(f"No worker could be started: {self.log.read_text()[-1000:]}")
            return sorted(child.pid for child in forking.children() if child.pid not in before)


@contextmanager
def nursery(log: Path, inside: Sequence[str] = ()) -> Iterator[Nursery]:
    """Run a nursery.

    Parameters
    ----------
    log
        A file for what it and its workers write.
    inside
        A command that the nursery is started with, such as ``unshare``. It must wait for its only
        child.

    Raises
    ------
    OSError
        If it does not start.
    """
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*inside, sys.executable, "-m", "benchmarks.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=_environment(),
            # Ctrl-C reaches only this process, which ends the block and then the others in order.
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            if not process.stdout.readline():
                raise OSError(f"No process for workers could be started: {log.read_text().strip()}")
            yield Nursery(process, log, nested=bool(inside))
        finally:
            process.stdin.close()
            process.wait()


def _environment() -> dict[str, str]:
    """Return an environment with one thread per kernel, as under a nanny, and our modules."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    # The campaign of faults finds the worker of a nanny among its child processes.
    method = {"DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "spawn"}
    return {**os.environ, **threads, **method, "PYTHONPATH": path}


def main() -> None:
    """Start workers as the lines of standard input say, and kill them at its end."""
    print("ready", flush=True)
    for module in ("distributed.cli.dask_worker", "dask_coded"):
        importlib.import_module(module)
    running: list[int] = []
    try:
        for line in sys.stdin:
            running = [pid for pid in running if not os.waitpid(pid, os.WNOHANG)[0]]
            for arguments in json.loads(line):
                pid = os.fork()
                if not pid:
                    _worker(arguments)
                running.append(pid)
            print("started", flush=True)
    finally:
        for pid in running:
            # With what a nanny has started; a new worker may not have its group yet.
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)


def _worker(arguments: list[str]) -> None:
    """Become a worker."""
    from distributed.cli.dask_worker import main

    status = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        sys.argv = ["dask worker", *arguments]
        main(arguments, standalone_mode=False)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
