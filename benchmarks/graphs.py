"""Products with large graphs: a coded loop, the same loop by stock futures, and SciPy alone.

The matrix is random and sparse, with ten entries in each row, so each block of rows needs most of
the operand: the hardest case for communication. With stock futures every worker holds a block of
rows and a chunk of the operand, and fetches the other chunks in each round.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import scipy.sparse
from distributed import Client, wait

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.report import Report, options, side_by_side

ENTRIES = 10
ROUNDS = 5


def random_matrix(rows: int, seed: int = 0) -> scipy.sparse.csr_array:
    """Return a square matrix with ``ENTRIES`` entries in each row, at random places."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, rows, rows * ENTRIES, dtype=np.int32)
    indptr = np.arange(rows + 1, dtype=np.int32) * ENTRIES
    data = np.full(len(indices), 1 / ENTRIES)
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


@click.command()
@click.option("--rows", default=4_000_000, show_default=True, help="Rows of the matrix.")
@click.option("--workers", default=8, show_default=True, help="One-thread workers.")
@options
def main(
    rows: int, workers: int, json_file: Path | None, png_file: Path | None, smoke: bool
) -> None:
    """Compare rounds with a large random sparse matrix."""
    rows, workers, repeats = (2_000, 3, 1) if smoke else (rows, workers, 3)
    report = Report("graphs")
    A = random_matrix(rows)
    x = np.random.default_rng(1).random(rows)
    with local_workers(workers) as (client, addresses):
        began = perf_counter()
        C = coded.encode(A, client=client)
        encoding = perf_counter() - began
        stock = stock_loop(client, addresses, A, x)
        whole = client.scatter(x, hash=False)

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
    found = {name: np.asarray(result) for name, result in timings.results.items()}
    for name in ("coded", "stock"):
        np.testing.assert_allclose(found[name], found["SciPy"], rtol=1e-9)
    case = f"{rows:,} rows, {workers} workers"
    keys: dict[str, Any] = {"rows": rows, "workers": workers}
    report.add(case, "coded_over_stock", timings.ratio("coded", over="stock"), goal=0.6, **keys)
    report.add(case, "coded_over_scipy", timings.ratio("coded", over="SciPy"), goal=1.2, **keys)
    report.add(case, "stock_over_scipy", timings.ratio("stock", over="SciPy"), **keys)
    for name in ("coded", "stock", "SciPy"):
        each = float(np.median(timings.seconds[name])) / ROUNDS * 1e3
        report.add(case, f"{name.lower()}_round", each, unit="ms", **keys)
    report.add(case, "encoding", encoding, unit="s", **keys)
    report.finish(json_file)


if __name__ == "__main__":
    main()
