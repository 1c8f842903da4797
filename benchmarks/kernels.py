"""What it costs to compute a product stripe by stripe, in the process of a worker.

The product of a piece with an operand is computed in one call and, in turns with that, by the
kernel of a round in forty stripes that write into one result. Memory of a worker behaves
differently from that of other processes, because Dask has freed memory returned to the system.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from benchmarks.cluster import local_workers
from benchmarks.graphs import random_matrix
from benchmarks.report import Report, Summary, options
from dask_coded.rounds.kernels import KERNELS

STRIPES = 40
#: Of sparse pieces: rows, columns, entries in a row. Each has four million entries.
SPARSE = ((50_000, 100_000, 80), (400_000, 400_000, 10))
#: Of dense pieces: rows, columns.
DENSE = (10_000, 1_000)
#: Columns of the operand.
OPERANDS = (1, 12)


def striped_over_whole(shape: tuple[int, ...], columns: int, repeats: int) -> list[float]:
    """Return the time of the stripes over that of the whole product, several times."""
    rng = np.random.default_rng(1)
    rows, width = shape[:2]
    sparse = len(shape) == 3
    piece: Any = random_matrix(width, shape[2])[:rows] if sparse else rng.random(shape)
    x = rng.random((width, columns) if columns > 1 else width)
    edges = [rows * stripe // STRIPES for stripe in range(STRIPES + 1)]
    out = np.empty((rows, *x.shape[1:]))

    def striped() -> Any:
        product = KERNELS["matvec"](piece, rows, x)
        for a, b in pairwise(edges):
            product(a, b, out[a:b])
        return out

    np.testing.assert_allclose(striped(), piece @ x)
    ratios = []
    for _ in range(repeats):
        began = perf_counter()
        striped()
        middle = perf_counter()
        piece @ x
        ratios.append((middle - began) / (perf_counter() - middle))
    return ratios


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure products that are computed stripe by stripe, in a worker."""
    repeats = 3 if smoke else 100
    report = Report("kernels")
    with local_workers(1) as (client, _):
        for shape in (*SPARSE, DENSE):
            scaled = tuple(n // 100 if smoke and n > 100 else n for n in shape)
            for columns in OPERANDS:
                ratios = client.submit(striped_over_whole, scaled, columns, repeats).result()
                kind = f"{shape[2]} entries a row" if len(shape) == 3 else "dense"
                report.add(
                    f"{shape[0]:,} rows, {kind}, {columns} column" + "s" * (columns > 1),
                    "striped_over_whole",
                    Summary.of(ratios),
                    goal=1.15 if len(shape) == 3 and columns == 1 else None,
                    columns=columns,
                )
    report.finish(json_file)


if __name__ == "__main__":
    main()
