"""Measure the error of decoded rows: worst subset of pieces, blocks of different magnitude.

For each code the worst of many subsets of k pieces decodes ``A @ x``. The error of each row is
relative to ``|A| @ |x|``, that is, to the size of this row alone; the largest one is reported. Rows
are of equal size, or of random sizes (up to 1e12 and down to 1e-12 in double precision, 1e6 and
1e-6 in single precision, mixed within each block). Each case is decoded as rounds do it, with rows
scaled by powers of two, and without scaling. This needs no cluster.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from benchmarks.report import Report, options
from dask_coded.codes import MDS
from dask_coded.codes._subsets import k_subsets, smallest_of_minors
from dask_coded.rounds import Assembler, Geometry, Scales, StripeRange
from dask_coded.rounds.scaling import Exponents, exponents_of, scaled

CODES = ((12, 10), (12, 9), (20, 16), (50, 40), (100, 90), (200, 180))
ROWS, COLUMNS = 40, 64
#: Decimal exponents of the sizes of uneven rows.
REACH = {"float64": 12, "float32": 6}


def worst_subset(code: MDS, limit: int) -> list[int]:
    """Return the worst conditioned of many subsets of k pieces that need decoding."""
    subsets = [s for s in k_subsets(code.n, code.k, limit) if s[-1] >= code.k]
    return list(subsets[int(np.argmin(smallest_of_minors(code.G[code.k :], subsets)))])


def worst_row(code: MDS, have: list[int], blocks: np.ndarray, x: np.ndarray, scale: bool) -> float:
    """Return the largest error of a row of ``A @ x``, relative to the size of the row."""
    exponents: tuple[Exponents, ...] = tuple(map(exponents_of, blocks))
    parts = [scaled(*part) for part in zip(blocks, exponents, strict=True)] if scale else blocks
    parity = np.tensordot(code.G[code.k :], np.asarray(parts, dtype=np.float64), axes=1)
    pieces = [*blocks, *parity.astype(blocks.dtype)]
    computed = np.zeros((code.pieces, 1), dtype=bool)
    computed[have] = True
    geometry = Geometry((blocks.shape[1],) * code.k, stripes=1, mixed=True)
    scales = Scales(exponents) if scale else None
    assembler = Assembler(code, geometry, blocks.dtype, (), scales)
    shares = [(StripeRange(i, 0, 1), pieces[i] @ x) for i in have]
    assembler.add(shares, computed, np.ones(1, dtype=bool))
    exact = blocks.astype(np.longdouble) @ x.astype(np.longdouble)
    size = np.abs(blocks).astype(np.longdouble) @ np.abs(x)
    return float((np.abs(assembler.rows.reshape(exact.shape) - exact) / size).max())


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure the error of decoded rows, with and without scaling."""
    report = Report("numerics")
    rng = np.random.default_rng(0)
    for n, k in CODES[: 1 if smoke else None]:
        code = MDS(n, k)
        have = worst_subset(code, 50 if smoke else 3_000)
        for dtype, reach in REACH.items():
            for rows in ("equal", "uneven"):
                sizes = 10.0 ** rng.uniform(-reach, reach, (k, ROWS, 1))
                blocks = rng.standard_normal((k, ROWS, COLUMNS))
                blocks = (blocks * sizes if rows == "uneven" else blocks).astype(dtype)
                x = rng.standard_normal(COLUMNS).astype(dtype)
                for scale in (True, False):
                    report.add(
                        f"({n},{k}), {dtype}, rows of {rows} size" + ", unscaled" * (not scale),
                        "row_error",
                        worst_row(code, have, blocks, x, scale),
                        unit="relative",
                        n=n,
                        k=k,
                        dtype=dtype,
                        rows=rows,
                        scaled=scale,
                    )
    report.finish(json_file)


if __name__ == "__main__":
    main()
