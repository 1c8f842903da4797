"""From which size, and on how many cores, does coding pay?

For 16, 8, 4, 2 and 1 workers, as far as this machine has cores, each worker has a core of its own.
Beside them one process, NumPy's or SciPy's, has as many threads and the same cores; and plain
dask.array has the same workers. All of them take turns, first with all cores at full speed and then
with one of the cores slowed five times, by four processes that do nothing else but use it.

The parts are products of a dense matrix of several sizes, PageRank of a random graph of several
sizes to a change of 1e-6, and 20 steps of gradient descent of a logistic regression. All ways of a
part return the same, which is checked. Encoding is not in the times, but stands beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import dask.array as da
import numpy as np
import scipy.sparse as sp
from distributed import Client
from threadpoolctl import threadpool_limits

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.report import Report, options, side_by_side
from dask_coded.demo import blocks_on
from dask_coded.graph.pagerank import pagerank_rounds, transition_matrix
from dask_coded.uncoded import uncoded_product

COUNTS = (16, 8, 4, 2, 1)
#: Processes that share a core with a worker: it has a fifth of it.
SLOW = 4
SPIN = "while True: pass"


@dataclass(frozen=True)
class Size:
    """How large a run is.

    Parameters
    ----------
    repeats : int
        Timed turns.
    dense : tuple of int
        Rows of square matrices.
    nodes : tuple of int
        Of graphs with ten edges a node.
    samples : tuple of int
        Of a logistic regression with 500 features.
    """

    repeats: int = 3
    dense: tuple[int, ...] = (1_000, 8_000)
    nodes: tuple[int, ...] = (50_000, 500_000)
    samples: tuple[int, ...] = (20_000, 100_000)


SMOKE = Size(1, (100,), (100,), (200,))


class Plain:
    """A dask array as an operator; the client computes each product on the workers."""

    def __init__(self, array: da.Array, client: Client) -> None:
        self._array = array
        self._client = client
        self.shape = array.shape

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        product = uncoded_product(self._array, x)
        found: np.ndarray = self._client.compute(product, sync=True)
        return found


# ------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class Part:
    """A matrix and a computation over it.

    Parameters
    ----------
    name : str
    matrix : ndarray or SciPy sparse array
    compute : callable(operator) -> ndarray
    transpose : bool
        Whether it multiplies by the transpose, too.
    """

    name: str
    matrix: Any
    compute: Callable[[Any], np.ndarray]
    transpose: bool = False


def ten_products(operator: Any) -> np.ndarray:
    x = np.ones(operator.shape[1])
    for _ in range(10):
        y = operator @ x
        x = y / np.abs(y).max()
    return np.asarray(x)


def parts(size: Size) -> Iterator[Part]:
    """Yield all parts; each is dropped before the next is made."""
    rng = np.random.default_rng(0)
    for n in size.dense:
        yield Part(f"10 products, dense {n:,} x {n:,}", rng.standard_normal((n, n)), ten_products)
    for n in size.nodes:
        ends = rng.integers(n, size=(2, 10 * n))
        graph = sp.csr_array((np.ones(10 * n), ends), shape=(n, n))
        matrix, dangling = transition_matrix(graph)
        yield Part(f"PageRank, {n:,} nodes", matrix, _Ranks(dangling))
    for n in size.samples:
        X = rng.standard_normal((n, 500))
        y = (X @ rng.standard_normal(500) > 0).astype(float)
        yield Part(f"20 steps of logistic regression, {n:,} x 500", X, _Descent(y), transpose=True)


@dataclass(frozen=True)
class _Ranks:
    dangling: np.ndarray

    def __call__(self, operator: Any) -> np.ndarray:
        return pagerank_rounds(operator, self.dangling, tol=1e-6).scores


@dataclass(frozen=True)
class _Descent:
    targets: np.ndarray

    def __call__(self, operator: Any) -> np.ndarray:
        w = np.zeros(operator.shape[1])
        for _ in range(20):
            p = 1 / (1 + np.exp(-(operator @ w)))
            w -= operator.T @ (p - self.targets) / len(self.targets)
        return w


class _Both:
    """Two operators: one for products and one for those of the transpose."""

    def __init__(self, operator: Any, transposed: Any) -> None:
        self._operator = operator
        self.T = transposed
        self.shape = operator.shape

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._operator @ x
        return found


# ------------------------------------------------------------------------------------------- cores


def _pin(core: int) -> None:
    """Keep this worker, all threads of it, on a core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


@contextmanager
def slowed(core: int) -> Iterator[None]:
    """Slow a core down five times."""
    spinning = [
        subprocess.Popen(["taskset", "--cpu-list", str(core), sys.executable, "-c", SPIN])
        for _ in range(SLOW)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Have this process compute on these cores only, with as many threads."""
    before = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
    try:
        with threadpool_limits(len(cores)):
            yield
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)


# ---------------------------------------------------------------------------------------- measured


def measure(
    report: Report, part: Part, client: Client, cores: dict[str, int], repeats: int
) -> None:
    """Time all ways to compute a part, with all cores and with one of them slowed."""
    workers = sorted(cores)
    plain = blocks_on(client, part.matrix, part.matrix.shape, workers)
    began = perf_counter()
    redundancy = 0 if len(workers) == 1 else None  # by default
    made = coded.encode(plain, client=client, redundancy=redundancy, transpose=part.transpose)
    encoding = perf_counter() - began
    stock: Any = Plain(plain, client)
    here: Any = part.matrix
    if part.transpose:
        back = blocks_on(client, part.matrix.T, part.matrix.T.shape, workers)
        stock, here = _Both(stock, Plain(back, client)), part.matrix

    def alone() -> np.ndarray:
        with on_cores(set(cores.values())):
            return part.compute(here)

    ways = {
        "one process": alone,
        "dask.array": lambda: part.compute(stock),
        "coded": lambda: coded.submit(part.compute, made, client=client).result(),
    }
    slow = cores[workers[-1]]
    for name in ("full speed", "one core slowed"):
        if name == "full speed":
            timings = side_by_side(ways, repeats)
        else:
            with slowed(slow):
                timings = side_by_side(ways, repeats)
        results: dict[str, Any] = dict(timings.results)
        for way, found in results.items():
            if not np.allclose(found, results["one process"], rtol=1e-6, atol=1e-9):
                raise RuntimeError(f"{part.name}: {way} computes something else.")
        for way in ways:
            keys: dict[str, Any] = {"part": part.name, "cores": len(cores), "speed": name}
            case = f"{part.name}, {len(cores)} cores, {name}: {way}"
            report.add(case, "seconds", timings.summary(way), "s", way=way, **keys)
            if way != "coded":
                over = timings.ratio("coded", over=way)
                report.add(f"{case}, coded over it", "coded_over", over, way=way, **keys)
    report.add(
        f"{part.name}, {len(cores)} cores",
        "encoding",
        encoding,
        "s",
        part=part.name,
        cores=len(cores),
    )


def verdict(report: Report) -> list[str]:
    """Return a sentence for each part and speed: from how many cores on coding is fastest."""
    lines = []
    rows = [row for row in report.rows if row["measure"] == "coded_over"]
    for part, speed in dict.fromkeys((row["part"], row["speed"]) for row in rows):
        worst: dict[int, float] = {}
        for row in rows:
            if (row["part"], row["speed"]) == (part, speed):
                worst[row["cores"]] = max(worst.get(row["cores"], 0), row["value"])
        wins = [cores for cores in sorted(worst) if worst[cores] < 1]
        least = min(worst.values())
        found = (
            f"coding is fastest on {', '.join(map(str, wins))} cores (at best {least:.2f} of the "
            "faster of the others)"
            if wins
            else f"coding is never fastest (at best {least:.2f} of the faster of the others)"
        )
        lines.append(f"{part}, {speed}: {found}.")
    return lines


@click.command()
@options
@click.option("--repeats", default=3, show_default=True, help="Timed turns.")
@click.option("--minutes", default=8.0, show_default=True, help="Begin no part after so many.")
def main(
    json_file: Path | None, png_file: Path | None, smoke: bool, repeats: int, minutes: float
) -> None:
    """Time products, PageRank and a fit on 1 to 16 cores, beside one process and dask.array."""
    size = SMOKE if smoke else Size(repeats)
    available = sorted(os.sched_getaffinity(0))
    report, until = Report("cores"), perf_counter() + 60 * minutes
    for count in [count for count in COUNTS if count <= len(available)]:
        with local_workers(count, alone=True) as (client, addresses):
            cores = dict(zip(addresses, available))
            for address, core in cores.items():
                client.run(_pin, core, workers=[address])
            for part in parts(size):
                if perf_counter() < until:
                    measure(report, part, client, cores, size.repeats)
    report.finish(json_file)
    for line in verdict(report):
        click.echo(line)


if __name__ == "__main__":
    main()
