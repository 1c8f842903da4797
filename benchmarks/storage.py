"""Measure what it costs to keep an array in files, and how soon another cluster uses it.

Encoding with a store takes turns with encoding without one, and with writing as many bytes to plain
files by the same workers at once. Opening the array and one product take turns with a plain read
of k of the pieces by the same workers at once, from the same disk. Each reads files that are in the
page cache in warm turns, and that were dropped from it in cold ones.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import dask.array as da
import numpy as np
from distributed import wait

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.report import Report, options, side_by_side

_COLUMNS = 1_000
_MIB = 2**20
_STEP = 2**24


def _write(folder: str, piece: int, size: int) -> None:
    """Write as many bytes as a piece has to a new file."""
    part = np.random.default_rng(0).bytes(_STEP)
    with (Path(folder) / f"plain-{piece}").open("wb") as file:
        for start in range(0, size, _STEP):
            file.write(part[: size - start])


def _read(folder: str, piece: int) -> int:
    """Read the chunks of a stored piece one after the other."""
    room, total = bytearray(_STEP + 64), 0
    for path in sorted(Path(folder).glob(f"matrix-*/piece-{piece}/c/**/*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while read := file.readinto(room):
                    total += read
    return total


def _drop(folder: str) -> None:
    """Write the files of a folder to the disk, and drop them from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report_storage(report: Report, folder: str, smoke: bool) -> None:
    """Add the time of encoding and of opening over those of writing and reading the bytes."""
    n, k, megabytes, repeats = (3, 2, 4, 1) if smoke else (6, 4, 1_024, 5)
    rows = megabytes * _MIB // (8 * _COLUMNS)
    store = f"{folder}/A"
    with local_workers(n) as (client, workers):
        A = client.persist(
            da.random.default_rng(0).random((rows, _COLUMNS), chunks=(-(-rows // (2 * k)), -1))
        )
        wait(A)
        x = np.random.default_rng(1).random(_COLUMNS)
        expected = (A @ x).compute()
        size = rows * _COLUMNS * 8 // k
        wrong = 0

        def at_once(function: Callable[..., Any], pieces: int, *more: Any) -> None:
            wait(
                [
                    client.submit(function, folder, i, *more, workers=[workers[i % n]], pure=False)
                    for i in range(pieces)
                ]
            )

        def encode(storage: str | None) -> None:
            if storage is not None:
                shutil.rmtree(storage, ignore_errors=True)
            coded.encode(A, coded.MDS(n, k), client, storage=storage)

        def use() -> None:
            nonlocal wrong
            C = coded.open(store, client)
            wrong += not np.allclose(client.compute(C @ x).result(), expected)

        timings = side_by_side(
            {
                "with": partial(encode, store),
                "without": partial(encode, None),
                "writing": partial(at_once, _write, n, size),
            },
            repeats,
        )
        whole = timings.seconds["without"] + timings.seconds["writing"]
        case = f"MDS({n}, {k}), pieces of {megabytes // k} MiB"
        goal = None if smoke else 1.3
        over = timings.seconds["with"] / whole
        report.add(case, "encoding_over_encoding_and_writing", float(np.median(over)), goal=goal)
        for name in timings.seconds:
            report.add(f"{case}: {name}", "seconds", timings.summary(name), "s")
        read = partial(at_once, lambda where, i: _read(f"{where}/A", i), k)
        ways: dict[str, Callable[[], object]] = {"reading": read, "opening": use}
        goal = None if smoke else 1.2
        for state, before in (("cold", partial(_drop, folder)), ("warm", lambda: None)):
            found = side_by_side(ways, repeats, before=before)
            ratio = found.ratio("opening", over="reading")
            report.add(f"{case}, {state}", "opening_over_reading", ratio, goal=goal)
            for name in found.seconds:
                report.add(f"{case}, {state}: {name}", "seconds", found.summary(name), "s")
        report.add(case, "wrong_results", wrong, "results", goal=0)


@click.command()
@click.option("--folder", help="Where to keep the array.  [default: a temporary folder]")
@options
def main(folder: str | None, json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure encoding to a store, and the first product of an array that is opened."""
    report = Report("storage")
    with tempfile.TemporaryDirectory(dir=folder, prefix="dask-coded-") as made:
        report_storage(report, made, smoke)
    report.finish(json_file)


if __name__ == "__main__":
    main()
