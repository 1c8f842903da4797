"""``dask-coded demo``: compare plain and coded products on uneven workers in under a minute.

A quarter of the workers of a local cluster run five times slower because their processes are
stopped and continued repeatedly. Rounds of ``A @ x`` are then computed in turn

- by ``dask.array`` with one chunk of ``A`` per worker: a round waits for the slowest worker;
- by ``dask.array`` with several chunks per worker: the scheduler can balance some of them;
- coded, lazily: a round ends when enough rows have arrived, from any workers;
- coded, in a loop that runs inside the cluster: the same without the way to the client and back.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any

import click
import dask
import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask import core
from dask.system import CPU_COUNT
from distributed import Client, Future, wait

from dask_coded.arguments import meta_of
from dask_coded.array import encode
from dask_coded.codes import MDS, Repetition
from dask_coded.display import Display
from dask_coded.graph import Graph
from dask_coded.graph.pagerank import transition_matrix
from dask_coded.local import local_client
from dask_coded.submission import submit
from dask_coded.uncoded import uncoded_product

_SIZE = 6_000  # rows and columns of A, unless it is a graph's
_COLUMNS = 32  # of x: enough for computing to outweigh messages
_OPERAND_BYTES = 2 << 20  # at most, which limits the columns of x for a large graph
CHUNKS = 4  # per worker, where there are several
_WARM_UP, _TURNS = 3, 6
_LOOP = 8  # rounds of a loop
_LANE = 0.8  # height of a worker's bars in the picture


@dataclass(frozen=True)
class Bar:
    """Work of one worker.

    Parameters
    ----------
    worker : str
        Its address.
    begin, end : float
        Seconds on the axis of the picture.
    rows : int
        Rows of the result that are done with it.
    place : float or None
        Where in its piece they are, from 0 to 1; None if it is one chunk.
    """

    worker: str
    begin: float
    end: float
    rows: int
    place: float | None = None


@dataclass(frozen=True)
class Panel:
    """What one way of computing did: bars, and when its rounds ended."""

    title: str
    bars: Sequence[Bar]
    ends: Sequence[float]


@dataclass(frozen=True)
class LoopRound:
    """One round of a loop in the cluster.

    Parameters
    ----------
    began, seconds : float
        The first since the loop began.
    timeline : list of (address, piece, start stripe, stop stripe, begin, end)
        In seconds since the round began.
    """

    began: float
    seconds: float
    timeline: list[tuple[str, int, int, int, float, float]]


def run_demo(
    workers: int,
    output: str | Path,
    *,
    slow: int | None = None,
    factor: float = 5.0,
    graph: Graph | None = None,
) -> None:
    """Compare plain and coded rounds on a local cluster with slow workers.

    Parameters
    ----------
    workers : int
        Worker processes to start, at least 2.
    output : str or Path
        PNG file to draw a plain round and coded rounds to.
    slow : int, optional
        How many of the workers are slowed down; by default a quarter, and at least one.
    factor : float
        How many times slower they are.
    graph : Graph, optional
        Multiply by its transition matrix, as PageRank does, instead of a random dense matrix.
    """
    slow = max(workers // 4, 1) if slow is None else slow
    with ExitStack() as stack:
        with Display() as display:
            display.say(f"Starting {workers} workers")
            client = stack.enter_context(local_client(workers))
            display.say("Making A")
            bench = _Bench(client, graph, slow, display)
        click.echo(f"{workers} workers on {CPU_COUNT} cores, {bench.describe()}")
        bench.compare("All workers at full speed", _WARM_UP)
        pids = client.run(os.getpid)
        slowed = sorted(pids)[:slow] if hasattr(signal, "SIGSTOP") else []
        if slowed:
            # Workers that share cores run only part of the time anyway.
            duty = factor * max(1, workers / CPU_COUNT)
            with slow_down([pids[worker] for worker in slowed], duty):
                bench.compare(f"{slow} of {workers} workers {factor:g} times slower", _TURNS)
        elif slow:
            click.echo("No worker was slowed down because this system cannot stop processes.")
        panels = bench.panels()
    _draw(panels, sorted(pids), slowed, Path(output))


class _Bench:
    """A matrix as dask arrays and as a coded array, and the times of its products."""

    def __init__(self, client: Client, graph: Graph | None, slow: int, display: Display) -> None:
        workers = sorted(client.nthreads())
        n = len(workers)
        matrix = None if graph is None else transition_matrix(graph.adjacency)[0]
        size = _SIZE if matrix is None else matrix.shape[0]
        self._client = client
        self._whole = blocks_on(client, matrix, (size, size), workers)
        self._parts = blocks_on(client, matrix, (size, size), np.repeat(workers, CHUNKS).tolist())
        # Parity would make a sparse matrix dense.
        spare = min(max(slow, 1), n - 1)
        code = MDS(n, n - spare) if matrix is None else Repetition(n, spare + 1)
        self._coded = encode(self._whole, code, client, callback=display)
        columns = min(_COLUMNS, max(_OPERAND_BYTES // (8 * size), 1))
        self._x = np.random.default_rng(1).standard_normal((size, columns))
        self._ways: dict[tuple[str, str], Callable[[], float]] = {
            ("dask.array", "1 chunk/worker"): partial(self._plain, self._whole),
            ("dask.array", f"{CHUNKS} chunks/worker"): partial(self._plain, self._parts),
            ("coded", "lazily"): self._lazily,
            ("coded", "in a loop"): self._in_a_loop,
        }
        self._round: list[tuple[float, Sequence[Bar]]] = []  # plain ones: seconds and bars
        self._loop: list[LoopRound] = []
        self._stripes = self._coded.encoded.spec.geometry.stripes

    def describe(self) -> str:
        """Return what is multiplied."""
        rows, columns = self._whole.shape
        width = self._x.shape[1]
        plural = "s" * (width != 1)
        return f"A: {rows} x {columns}, x: {width} column{plural}, {self._coded.code!r}."

    def compare(self, title: str, turns: int) -> None:
        """Time rounds of all ways in turn; print each time, the medians and their ratios."""
        click.echo(f"\n{title}, milliseconds per round:\n")
        for i in (0, 1):
            click.echo("         " + "".join(f"{name[i]:>17}" for name in self._ways))
        self._round.clear()
        times: list[list[float]] = [[] for _ in self._ways]
        for i in range(1, turns + 1):
            for way, column in zip(self._ways.values(), times, strict=True):
                column.append(way())
            click.echo(f"{i:>6}   " + "".join(f"{t[-1] * 1e3:>17.0f}" for t in times))
        medians = [statistics.median(t) for t in times]
        plain = min(medians[:2])
        click.echo("median   " + "".join(f"{m * 1e3:>17.0f}" for m in medians))
        click.echo("speed-up " + "".join(f"{plain / m:>16.1f}x" for m in medians))

    def panels(self) -> list[Panel]:
        """Return the median round of the first way, and what the loop does in the same time."""
        rounds = sorted(self._round, key=lambda found: found[0])
        seconds, bars = rounds[len(rounds) // 2]
        # In the first round of a loop the coordinator gets to know the workers.
        steady = self._loop[1:]
        shown = [r for r in steady if r.began + r.seconds - steady[0].began <= seconds]
        shown = shown or steady[:1]
        coded = [
            Bar(worker, at + begin, at + end, stop - start, (start + stop) / 2 / self._stripes)
            for r in shown
            for at in [r.began - steady[0].began]
            for worker, _, start, stop, begin, end in r.timeline
        ]
        ends = [r.began + r.seconds - steady[0].began for r in shown]
        count = f"{len(shown)} round{'s' * (len(shown) > 1)}"
        return [
            Panel(f"dask.array, one chunk per worker: 1 round in {seconds:.2f} s", bars, [seconds]),
            Panel(f"coded, in a loop: {count} in {ends[-1]:.2f} s", coded, ends),
        ]

    def _plain(self, matrix: da.Array) -> float:
        product = uncoded_product(matrix, self._x)
        drawn = matrix is self._whole
        if drawn:
            self._client.get_task_stream()  # records from now on
        began = time.time()
        product.compute()
        seconds = time.time() - began
        if drawn:
            rows = dict(zip(core.flatten(product.__dask_keys__()), product.chunks[0], strict=True))
            bars = [
                Bar(
                    task["worker"],
                    step["start"] - began,
                    step["stop"] - began,
                    rows.get(task["key"], 0),
                )
                for task in self._client.get_task_stream(start=began)
                for step in task["startstops"]
                if step["action"] == "compute"
            ]
            self._round.append((seconds, bars))
        return seconds

    def _lazily(self) -> float:
        began = time.perf_counter()
        (self._coded @ self._x).compute()
        return time.perf_counter() - began

    def _in_a_loop(self) -> float:
        # The demo is about rounds, which a graph of a few megabytes would not need.
        with dask.config.set({"coded.round.alone": False}):
            self._loop = submit(_loop, self._coded, self._x, _LOOP, client=self._client).result()
        return statistics.median(r.seconds for r in self._loop)


def blocks_on(
    client: Client, matrix: Any, shape: tuple[int, int], owners: Sequence[str]
) -> da.Array:
    """Return a dask array with one chunk of rows for each entry of ``owners``, on that worker.

    Parameters
    ----------
    client : distributed.Client
    matrix : ndarray, SciPy sparse array or None
        By default random numbers, made on the workers.
    shape : (int, int)
    owners : sequence of str
        Addresses of workers.
    """
    size, columns = shape
    rows = _even(size, len(owners))
    if matrix is None:
        blocks = [
            client.submit(_normal, start, stop - start, columns, workers=[owner], pure=False)
            for owner, (start, stop) in zip(owners, rows, strict=True)
        ]
    else:
        blocks = [
            client.scatter(matrix[start:stop], workers=[owner], hash=False)
            for owner, (start, stop) in zip(owners, rows, strict=True)
        ]
    return _array_of(blocks, rows, columns, sp.issparse(matrix))


def split(client: Client, matrix: da.Array, owners: Sequence[str], parts: int) -> da.Array:
    """Return an array from :func:`blocks_on` with each chunk split in so many, where it is.

    Parameters
    ----------
    client : distributed.Client
    matrix : dask array
    owners : sequence of str
        Addresses of the workers that have the chunks.
    parts : int
    """
    blocks, rows, first = [], [], 0
    for i, (owner, size) in enumerate(zip(owners, matrix.chunks[0], strict=True)):
        block = matrix.dask[(matrix.name, i, 0)]
        for start, stop in _even(size, min(parts, size)):
            part = slice(start, stop)
            blocks.append(client.submit(getitem, block, part, workers=[owner], pure=False))
            rows.append((first + start, first + stop))
        first += size
    return _array_of(blocks, rows, matrix.shape[1], sp.issparse(meta_of(matrix)))


def _even(size: int, parts: int) -> list[tuple[int, int]]:
    """Return the first row and the end of each of so many parts, which are equal up to a row."""
    return list(itertools.pairwise(i * size // parts for i in range(parts + 1)))


def _array_of(
    blocks: Sequence[Future[Any]], rows: Sequence[tuple[int, int]], columns: int, sparse: bool
) -> da.Array:
    wait(blocks)
    name = f"A-{uuid.uuid4().hex}"
    # To persist a concatenation would let Dask choose the workers again.
    graph: dict[Any, Any] = {(name, i, 0): block for i, block in enumerate(blocks)}
    chunks = (tuple(stop - start for start, stop in rows), (columns,))
    meta: Any = sp.csr_array((0, 0)) if sparse else np.empty((0, 0))
    return da.Array(graph, name, chunks, meta=meta)


def _normal(seed: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, columns))


def _loop(operator: Any, x: np.ndarray[Any, Any], rounds: int) -> list[LoopRound]:
    """Time rounds; runs in the cluster."""
    first, found = time.perf_counter(), []
    for _ in range(rounds):
        began = time.perf_counter()
        operator @ x
        seconds = time.perf_counter() - began
        found.append(LoopRound(began - first, seconds, operator.last_round.timeline))
    return found


@contextmanager
def slow_down(pids: Sequence[int], factor: float, period: float = 0.05) -> Iterator[None]:
    """Let processes run only part of the time.

    Parameters
    ----------
    pids : sequence of int
        Process ids; may be empty.
    factor : float
        The processes run for ``1 / factor`` of the time; above 1.
    period : float
        Seconds from one continuation to the next. On a busy machine this thread may be late to stop
        them; then they are stopped for longer.
    """
    done = threading.Event()

    def send(name: str) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))

    def cycle() -> None:
        began = time.monotonic()
        try:
            while not done.wait(period / factor):
                send("SIGSTOP")
                done.wait((factor - 1) * (time.monotonic() - began))
                send("SIGCONT")
                began = time.monotonic()
        finally:
            send("SIGCONT")

    thread = threading.Thread(target=cycle, name="slow-down")
    try:
        thread.start()
        yield
    finally:
        done.set()
        thread.join()


def _draw(
    panels: Sequence[Panel], workers: Sequence[str], slowed: Sequence[str], path: Path
) -> None:
    """Draw a lane for each worker, with its bars, and a line where each round ends."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        click.echo("Drawing the timelines needs matplotlib: pip install 'dask-coded[complete]'.")
        return
    colours = colormaps["viridis"]
    figure = Figure(figsize=(10, 2 + 0.6 * len(workers)), layout="constrained")
    last = max(end for panel in panels for end in panel.ends)
    for panel, axes in zip(panels, figure.subplots(len(panels), sharex=True), strict=True):
        for i, worker in enumerate(workers):
            if worker in slowed:
                axes.axhspan(i - 0.5, i + 0.5, color="mistyrose", zorder=0)
        for bar in panel.bars:
            axes.broken_barh(
                [(bar.begin * 1e3, (bar.end - bar.begin) * 1e3)],
                (workers.index(bar.worker) - _LANE / 2, _LANE),
                facecolor="grey" if bar.place is None else colours(bar.place),
                edgecolor="white",
                linewidth=0.5,
            )
        for end in panel.ends:
            axes.axvline(end * 1e3, color="black", linewidth=1.5)
        names = [f"worker {i}{', slow' * (w in slowed)}" for i, w in enumerate(workers)]
        axes.set_yticks(range(len(workers)), names)
        axes.set_xlim(0, last * 1e3 * 1.02)
        axes.set_title(panel.title, loc="left")
        shares = axes.twinx()
        total = sum(bar.rows for bar in panel.bars) or math.nan
        done = [sum(bar.rows for bar in panel.bars if bar.worker == w) for w in workers]
        shares.set_yticks(range(len(workers)), [f"{rows / total:.0%}" for rows in done])
        for lanes in (axes, shares):
            lanes.set_ylim(len(workers) - 0.5, -0.5)  # the first at the top
            lanes.tick_params(axis="y", length=0)
        shares.set_ylabel("share of the rows")
    axes.set_xlabel("milliseconds  (black line: a round ends; colour: which rows of the piece)")
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise click.ClickException(f"--output {path}: {error.strerror or error}.") from error
    click.echo(f"\nTimelines of plain and coded rounds: {path}")
