"""Products with large graphs: a coded loop, the same loop by stock futures, and SciPy alone.

The matrix is random and sparse, with a few entries in each row, so each block of rows needs most of
the operand: the hardest case for communication. With stock futures every worker holds a block of
rows and a chunk of the operand, and fetches the other chunks in each round. ``--scales`` adds
R-MAT graphs, which are like those of the web, ``--slow`` slows workers, and ``--png`` draws the
time of a round over the size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import scipy.sparse
from distributed import Client, wait

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.lab import Throttle
from benchmarks.report import Report, options, picture, side_by_side

# PageRank needs some dozens. The first round of a loop costs a fifth more: its memory is new.
ROUNDS = 20
SLOWED = 5  # times


def random_matrix(rows: int, entries: int = 10, seed: int = 0) -> scipy.sparse.csr_array:
    """Return a square matrix with some entries in each row, at random places."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, rows, rows * entries, dtype=np.int32)
    indptr = np.arange(rows + 1, dtype=np.int32) * entries
    data = np.full(len(indices), 1 / entries)
    return scipy.sparse.csr_array((data, indices, indptr), shape=(rows, rows))


def products(operator: Any, x: np.ndarray, rounds: int) -> np.ndarray:
    """Multiply again and again."""
    for _ in range(rounds):
        x = operator @ x
    return x


def _product(block: Any, *chunks: np.ndarray) -> np.ndarray:
    result: np.ndarray = block @ np.concatenate(chunks)
    return result


def stock_loop(
    client: Client, addresses: list[str], A: Any, x: np.ndarray
) -> Callable[[int], np.ndarray]:
    """Bring blocks of ``A`` and chunks of ``x`` to the workers; return the loop over rounds."""
    cuts = np.linspace(0, A.shape[0], len(addresses) + 1).astype(int)
    blocks, start = [], []
    for address, a, b in zip(addresses, cuts, cuts[1:]):
        blocks.append(client.scatter(A[a:b], workers=[address], hash=False))
        start.append(client.scatter(x[a:b], workers=[address], hash=False))

    def loop(rounds: int) -> np.ndarray:
        chunks = start
        for _ in range(rounds):
            chunks = [
                client.submit(_product, block, *chunks, workers=[address], pure=False)
                for block, address in zip(blocks, addresses)
            ]
        wait(chunks)
        return np.concatenate(client.gather(chunks))

    return loop


def web_like(scale: int, seed: int = 0) -> scipy.sparse.csr_array:
    """Return the matrix of an R-MAT graph of ``2**scale`` nodes and eight times as many edges.

    .. [1] D. Chakrabarti, Y. Zhan, C. Faloutsos, "R-MAT: A Recursive Model for Graph Mining",
       SDM 2004; with the probabilities of Graph500.
    """
    rng = np.random.default_rng(seed)
    nodes, edges = 1 << scale, 8 << scale
    row, column = np.zeros(edges, np.int32), np.zeros(edges, np.int32)
    for bit in range(scale):
        quadrant = rng.choice(4, edges, p=[0.57, 0.19, 0.19, 0.05]).astype(np.int32)
        row |= (quadrant >> 1) << bit
        column |= (quadrant & 1) << bit
    shuffled = rng.permutation(nodes).astype(np.int32)
    entries = np.full(edges, 1 / 8)
    return scipy.sparse.csr_array((entries, (shuffled[row], shuffled[column])), (nodes, nodes))


def compare(
    report: Report, name: str, A: scipy.sparse.csr_array, workers: int, slow: int, repeats: int
) -> None:
    """Time rounds with a matrix; some workers are slowed five times once it is encoded."""
    rows = A.shape[0]
    x = np.random.default_rng(1).random(rows)
    with ExitStack() as stack:
        client, addresses = stack.enter_context(local_workers(workers, alone=True))
        began = perf_counter()
        C = coded.encode(A, client=client)
        encoding = perf_counter() - began
        stock = stock_loop(client, addresses, A, x)
        whole = client.scatter(x, hash=False, workers=addresses[slow : slow + 1])
        if slow:
            # Each worker has a share of the cores; a slowed one a fifth of that.
            share = len(os.sched_getaffinity(0)) / workers / SLOWED
            pids = client.run(os.getpid, workers=addresses[:slow])
            stack.enter_context(Throttle(dict.fromkeys(pids.values(), share)))

        def coded_loop() -> np.ndarray:
            found: np.ndarray = coded.submit(products, C, whole, ROUNDS, client=client).result()
            return found

        timings = side_by_side(
            {
                "coded": coded_loop,
                "stock": lambda: stock(ROUNDS),
                "SciPy": lambda: products(A, x, ROUNDS),
            },
            repeats=repeats,
            warmup=1,
        )
    found = {way: np.asarray(result) for way, result in timings.results.items()}
    for way in ("coded", "stock"):
        np.testing.assert_allclose(found[way], found["SciPy"], rtol=1e-9)
    case = f"{name}, {rows:,} rows, {workers} workers" + (f", {slow} slow" if slow else "")
    keys: dict[str, Any] = {"rows": rows, "workers": workers, "slow": slow}
    goals = {(8, 0): (0.6, 1.2), (2, 0): (0.8, 0.8), (8, 2): (0.35, None)}
    over_stock, over_scipy = None, None
    if name == "random" and (rows, A.nnz) == (4_000_000, 40_000_000):
        over_stock, over_scipy = goals.get((workers, slow), (None, None))
    elif name == "random" and (rows, A.nnz) == (100_000, 8_000_000) and (workers, slow) == (8, 0):
        over_stock = 0.8
    for way, goal in (("stock", over_stock), ("SciPy", over_scipy)):
        ratio = timings.ratio("coded", over=way)
        report.add(case, f"coded_over_{way.lower()}", ratio, goal=goal, **keys)
    report.add(case, "stock_over_scipy", timings.ratio("stock", over="SciPy"), **keys)
    for way in ("coded", "stock", "SciPy"):
        each = float(np.median(timings.seconds[way])) / ROUNDS * 1e3
        report.add(case, f"{way.lower()}_round", each, unit="ms", **keys)
    report.add(case, "encoding", encoding, unit="s", **keys)


def plot(report: Report, file: Path) -> None:
    """Plot the time of a round over the number of rows."""
    with picture(file, figsize=(7, 4)) as drawing:
        axes = drawing.subplots()
        for name in ("coded", "stock", "scipy"):
            points = [
                (row["rows"], row["value"])
                for row in report.rows
                if row["measure"] == f"{name}_round" and not row["slow"]
            ]
            label = {"coded": "coded loop", "stock": "stock Dask futures", "scipy": "SciPy"}[name]
            axes.loglog(*zip(*sorted(points)), marker="o", label=label)
        axes.set(xlabel="rows and columns of the matrix", ylabel="ms a round")
        axes.legend()


@click.command()
@click.option("--rows", default=4_000_000, show_default=True, help="Rows of the random matrix.")
@click.option("--entries", default=10, show_default=True, help="Of each of its rows.")
@click.option("--workers", default=8, show_default=True, help="One-thread workers.")
@click.option("--slow", default=0, show_default=True, help="Workers that are slowed five times.")
@click.option("--scales", default="", help="Also R-MAT graphs of 2**N nodes: N, separated by ','.")
@options
def main(
    rows: int,
    entries: int,
    workers: int,
    slow: int,
    scales: str,
    json_file: Path | None,
    png_file: Path | None,
    smoke: bool,
) -> None:
    """Compare rounds with large sparse matrices: coded, stock Dask futures, SciPy."""
    rows, workers, repeats = (2_000, 3, 1) if smoke else (rows, workers, 5)
    report = Report("graphs")
    if rows:
        compare(report, "random", random_matrix(rows, entries), workers, slow, repeats)
    for scale in map(int, filter(None, scales.split(","))):
        compare(report, "R-MAT", web_like(scale), workers, slow, repeats)
    if png_file is not None:
        plot(report, png_file)
    report.finish(json_file)


if __name__ == "__main__":
    main()
