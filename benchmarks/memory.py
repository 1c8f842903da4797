"""Measure the peak memory of a worker while an array is encoded.

The bound is the worker's piece, plus two blocks, plus a constant. The peak is the high-water mark
of resident memory that the operating system reports, minus the memory in use before.
"""

from __future__ import annotations

from pathlib import Path

import click
import dask.array as da

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.report import Report, options


def _memory_mib(field: str) -> float:
    """Return ``VmRSS`` or ``VmHWM`` of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError("This benchmark reads /proc/self/status, which only Linux has.")


def _reset_peak() -> float:
    """Reset the high-water mark, and return the current resident memory in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_mib("VmRSS")


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure the peak memory per worker while encoding, over the size of its piece."""
    n, k, megabytes = (3, 2, 4) if smoke else (6, 4, 800)
    report = Report("memory")
    with local_workers(n) as (client, _):
        columns = 1_000
        rows = megabytes * 2**20 // (8 * columns)
        small = coded.encode(da.ones((100, 10), chunks=10), coded.MDS(n, k))
        before = client.run(_reset_peak)
        A = da.random.random((rows, columns), chunks=(-(-rows // (2 * k)), columns))
        C = coded.encode(A, coded.MDS(n, k))
        peak = client.run(_memory_mib, "VmHWM")
        piece = C.encoded.nbytes / C.code.pieces / 2**20
        for worker in before:
            report.add(
                f"MDS({n}, {k}), pieces of {piece:.0f} MiB",
                "peak_over_piece",
                (peak[worker] - before[worker]) / piece,
                unit="pieces",
                goal=3.0 if not smoke else None,
                constant_mib=peak[worker] - before[worker] - 3 * piece,
            )
        del small
    report.finish(json_file)


if __name__ == "__main__":
    main()
