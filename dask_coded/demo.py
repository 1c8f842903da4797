"""``dask-coded demo``: compare plain and coded products on uneven workers in under a minute.

A quarter of the workers of a local cluster run five times slower because their processes are
stopped and continued repeatedly. Rounds of ``A @ x`` are then computed in turn

- by ``dask.array`` with one chunk of ``A`` per worker: a round waits for the slowest worker;
- by ``dask.array`` with many chunks per worker: the scheduler can balance some of them;
- coded: a round ends when enough rows have arrived, from any workers.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import dask.array as da
import numpy as np
from dask.system import CPU_COUNT
from distributed import wait

from dask_coded.array import encode
from dask_coded.codes import MDS
from dask_coded.local import local_client
from dask_coded.submission import submit

_SLOWDOWN = 5
_ROUNDS = 8
_SIZE = 6_000  # rows and columns of A
_COLUMNS = 32  # of x: enough for computing to outweigh messages
_MANY = 8  # chunks per worker

#: A range of stripes computed in one go: address of the worker, piece, first stripe, stripe after
#: the last, start and end in seconds since the round started.
Span = tuple[str, int, int, int, float, float]


def run_demo(workers: int, output: str | Path) -> None:
    """Compare plain and coded rounds on a local cluster with slow workers.

    Parameters
    ----------
    workers : int
        Worker processes to start, at least 4; a quarter of them are slowed down.
    output : str or Path
        PNG file to draw the timeline of a coded round to.
    """
    slow = workers // 4
    code = MDS(workers, workers - slow)
    rows = -(-_SIZE // workers)
    click.echo(
        f"{workers} workers on {CPU_COUNT} cores, A: {_SIZE} x {_SIZE}, x: {_COLUMNS} columns."
    )
    with local_client(workers) as client:
        matrix = da.random.default_rng(0).standard_normal((_SIZE, _SIZE), chunks=(rows, -1))
        whole = matrix.persist()
        parts = whole.rechunk((-(-rows // _MANY), -1)).persist()
        wait([whole, parts])
        coded = encode(whole, code, client=client)
        x = np.random.default_rng(1).standard_normal((_SIZE, _COLUMNS))
        ways = {
            "dask, 1 chunk per worker": lambda: (whole @ x).compute(),
            f"dask, {_MANY} chunks per worker": lambda: (parts @ x).compute(),
            repr(code): lambda: (coded @ x).compute(),
        }
        _compare("All workers at full speed", ways, rounds=3)
        pids = client.run(os.getpid)
        slowed = sorted(pids)[:slow] if hasattr(signal, "SIGSTOP") else []
        # Workers that share cores run only part of the time anyway.
        factor = _SLOWDOWN * max(1, workers / CPU_COUNT)
        with slow_down([pids[worker] for worker in slowed], factor):
            if slowed:
                _compare(f"{slow} of {workers} workers {_SLOWDOWN} times slower", ways, _ROUNDS)
            else:
                click.echo("No worker was slowed down because this system cannot stop processes.")
            seconds, timeline = submit(_loop, coded, x, _ROUNDS, client=client).result()
    click.echo(f"Coded, in a loop inside the cluster: {seconds * 1e3:.0f} ms per round")
    _draw(timeline, sorted(pids), slowed, Path(output))


@contextmanager
def slow_down(pids: Sequence[int], factor: float, period: float = 0.05) -> Iterator[None]:
    """Let processes run only part of the time.

    Parameters
    ----------
    pids : sequence of int
        Process ids; may be empty.
    factor : float
        The processes run for ``1 / factor`` of each period; above 1.
    period : float
        Seconds from one continuation to the next.
    """
    done = threading.Event()

    def send(name: str) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))

    def cycle() -> None:
        try:
            while not done.wait(period / factor):
                send("SIGSTOP")
                done.wait(period - period / factor)
                send("SIGCONT")
        finally:
            send("SIGCONT")

    if not pids:
        yield
        return
    thread = threading.Thread(target=cycle, name="slow-down")
    try:
        thread.start()
        yield
    finally:
        done.set()
        thread.join()


def _compare(title: str, ways: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Time rounds of all ways in turn, and print each time and the medians."""
    click.echo(f"\n{title}, milliseconds per round:\n")
    click.echo("         " + "".join(f"{name:>26}" for name in ways))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(1, rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
        click.echo(f"{i:>6}   " + "".join(f"{t[-1] * 1e3:>26.0f}" for t in times.values()))
    medians = [statistics.median(t) for t in times.values()]
    click.echo("median   " + "".join(f"{m * 1e3:>26.0f}" for m in medians))
    click.echo("vs coded " + "".join(f"{m / medians[-1]:>25.2f}x" for m in medians) + "\n")


def _loop(operator: Any, x: np.ndarray[Any, Any], rounds: int) -> tuple[float, list[Span]]:
    """Return the seconds and the timeline of the median round; runs in the cluster."""
    reports = []
    for _ in range(rounds):
        operator @ x
        reports.append(operator.last_round)
    reports.sort(key=lambda report: report.seconds)
    middle = reports[len(reports) // 2]
    return middle.seconds, middle.timeline


def _draw(
    timeline: Sequence[Span], workers: Sequence[str], slowed: Sequence[str], path: Path
) -> None:
    """Draw a bar for each range of stripes in its worker's row, coloured by place in the piece."""
    try:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError:
        click.echo("Drawing the timeline needs matplotlib: pip install 'dask-coded[complete]'.")
        return
    colours = ScalarMappable(Normalize(0, max(span[3] for span in timeline)), "viridis")
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(workers)), layout="constrained")
    axes = figure.add_subplot()
    for worker, _, start, stop, begin, end in timeline:
        axes.broken_barh(
            [(begin * 1e3, (end - begin) * 1e3)],
            (workers.index(worker) - 0.4, 0.8),
            facecolor=colours.to_rgba(np.array((start + stop) / 2)),
            edgecolor="white",
            linewidth=0.5,
        )
    names = [f"worker {i}{' (slow)' * (w in slowed)}" for i, w in enumerate(workers)]
    axes.set_yticks(range(len(workers)), names)
    axes.set_ylim(len(workers) - 0.4, -0.6)  # the first at the top
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds since the round started")
    axes.set_title("A coded round: the stripes that each worker computed")
    figure.colorbar(colours, ax=axes, label="stripe of the piece")
    figure.savefig(path, dpi=150)
    click.echo(f"Timeline of a coded round: {path}")
