"""Measure what encoding moves and how long it takes, with MDS codes and sparse random parity.

Worker processes on this machine encode an array whose blocks they already hold. Bytes count the
rows that workers receive from each other; `k (n - k)` blocks are the floor for a code of which any
k pieces suffice. Encoding is also compared with Dask's own way to move as many bytes between the
same workers. What codes that move fewer bytes survive is in `benchmarks.evidence.rlnc`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import dask.array as da
import numpy as np
from distributed import Client, wait
from distributed.worker import get_data_from_worker

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.report import Report, options, side_by_side
from dask_coded.codes import Code

CODES = ((10, 7), (12, 9), (12, 6))
DENSITIES = (0.25, 0.5, 0.75)


def encode(source: Any, code: Code, client: Client, workers: list[str]) -> tuple[int, int]:
    """Encode, and return the bytes moved and the bytes of one block."""
    encoded = coded.encode(source, code, client, workers=workers).encoded
    return encoded.bytes_moved, encoded.nbytes // code.pieces


def report_traffic(
    report: Report, n: int, k: int, client: Client, workers: list[str], smoke: bool
) -> None:
    """Add bytes and seconds of sparse parity over those of MDS, encoded in turns."""
    rows, columns = (8, 10) if smoke else (1_000, 500)
    source: Any = da.random.default_rng(0).standard_normal(
        (k * rows, columns), chunks=(rows, columns)
    )
    source = client.persist(source, workers=workers[:n])
    wait(source)
    codes: dict[str, Code] = {"MDS": coded.MDS(n, k)}
    codes |= {f"density {d}": coded.RandomLinear(n, k, d) for d in DENSITIES}
    ways = {
        name: partial(encode, source, code, client, workers[:n]) for name, code in codes.items()
    }
    timings = side_by_side(ways, repeats=1 if smoke else 5)
    moved: dict[str, Any] = dict(timings.results)
    for name, code in codes.items():
        received, block = moved[name]
        keys: dict[str, Any] = {
            "n": n,
            "k": k,
            "way": name,
            "density": getattr(code, "density", 1.0),
            "tolerance": code.tolerance,
            "seconds": timings.summary(name).value,
        }
        case = f"({n},{k}): {name}, any {code.tolerance} may be lost"
        report.add(case, "blocks_over_floor", received / block / (k * (n - k)), **keys)
        report.add(case, "repair_pieces", pieces_to_repair(code), "pieces", **keys)
        if name != "MDS":
            report.add(case, "bytes_over_mds", received / moved["MDS"][0], **keys)
            report.add(case, "time_over_mds", timings.ratio(name, over="MDS"), **keys)


def report_copying(report: Report, client: Client, workers: list[str], smoke: bool) -> None:
    """Add the time of MDS(8, 6) over the time in which Dask moves the same bytes."""
    n, k = (4, 2) if smoke else (8, 6)
    megabytes = 1 if smoke else 2_000
    columns = 1_000
    rows = k * (megabytes * 125 // k)
    source: Any = da.random.default_rng(0).standard_normal((rows, columns), chunks=(rows // k, -1))
    source = client.persist(source, workers=workers[:k])
    wait(source)
    holders = client.who_has(source)
    keys = {key: holders[key][0] for key in holders}

    def moved() -> None:
        client.run(_fetch, keys, workers=workers[k:n])

    ways: dict[str, Callable[[], object]] = {
        "encode": partial(encode, source, coded.MDS(n, k), client, workers[:n]),
        "copy": moved,
    }
    timings = side_by_side(ways, repeats=1 if smoke else 5)
    report.add(
        f"MDS({n},{k}), {megabytes:,} MB",
        "encoding_over_copying",
        timings.ratio("encode", over="copy"),
        goal=None if smoke else 1.5,
        seconds=timings.summary("encode").value,
        copying=timings.summary("copy").value,
    )


async def _fetch(keys: dict[Any, str], dask_worker: Any) -> None:
    """Fetch blocks from their workers at once, as Dask does for a task that needs them."""
    me = dask_worker.address
    answers = [
        get_data_from_worker(dask_worker.rpc, [key], holder, who=me) for key, holder in keys.items()
    ]
    await asyncio.gather(*answers)


def pieces_to_repair(code: Code) -> float:
    """Return the mean number of pieces that rebuild a lost one, if the others determine it."""
    counts = []
    for piece in range(code.pieces):
        if code.survives([piece]):
            others = [i for i in range(code.pieces) if i != piece]
            counts.append(np.count_nonzero(code.combination(piece, others)))
    return float(np.mean(counts))


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure bytes and time of encoding, MDS and sparse random parity."""
    if png_file:
        raise click.UsageError("This benchmark draws no picture: leave out --png.")
    report = Report("encoding")
    codes = ((4, 2),) if smoke else CODES
    with local_workers(max(n for n, _ in codes)) as (client, workers):
        for n, k in codes:
            report_traffic(report, n, k, client, workers, smoke)
        report_copying(report, client, workers, smoke)
    report.finish(json_file)


if __name__ == "__main__":
    main()
