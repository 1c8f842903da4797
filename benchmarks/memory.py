"""Measure the memory of workers: while an array is encoded, and in rounds larger than memory.

The array that is encoded is lazy. The peak of all workers is the largest sum of their resident
memory at one time, looked at every 20 ms; the peak of one worker is the high-water mark that the
operating system reports. Both are without the memory in use before.

In the second half the memory limit of each worker is half of its piece, and includes the process
itself, some 150 MiB. A lazy array that fits into no process is encoded. Then rounds take turns with
a plain read of as many bytes from files on the same disk, by the same workers at once, and with the
product of a stock dask array on a second cluster, whose chunks Dask spills. Stock Dask stores only
the blocks, k / n as much. Before each of them the files of all workers are dropped from the page
cache, except in warm rounds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import dask
import dask.array as da
import numpy as np
import psutil
from distributed import Client, wait

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.report import Report, options, side_by_side

#: Of rounds larger than memory: n and k of the code, and MiB of a piece.
SIZES = (4, 3, 1024)
_COLUMNS = 1_000
_MIB = 2**20


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


@contextmanager
def _largest_sum(processes: list[psutil.Process]) -> Iterator[list[float]]:
    """Yield a list to which the MiB of all processes together are added again and again."""
    sums: list[float] = []
    over = threading.Event()

    def look() -> None:
        while True:
            sums.append(sum(process.memory_info().rss for process in processes) / _MIB)
            if over.wait(0.02):
                break

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sums
    finally:
        over.set()
        thread.join()


def report_encoding(report: Report, smoke: bool) -> None:
    """Add the peak memory of workers while encoding, over the size of their pieces."""
    n, k, megabytes = (3, 2, 4) if smoke else (8, 6, 2_000)
    with local_workers(n) as (client, _):
        rows = megabytes * _MIB // (8 * _COLUMNS)
        small = coded.encode(da.ones((100, 10), chunks=10), coded.MDS(n, k))
        processes = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
        before = client.run(_reset_peak)
        A = da.random.random((rows, _COLUMNS), chunks=(-(-rows // (2 * k)), _COLUMNS))
        with _largest_sum(processes) as sums:
            C = coded.encode(A, coded.MDS(n, k))
        peak = client.run(_memory_mib, "VmHWM")
        del small
        stored = C.encoded.nbytes / _MIB
        piece = stored / C.code.pieces
        case, goal = f"MDS({n}, {k}), pieces of {piece:.0f} MiB", None if smoke else 1.5
        together = (max(sums) - sum(before.values())) / stored
        report.add(case, "peak_over_pieces", together, goal=goal)
        largest = max(peak[worker] - before[worker] for worker in before) / piece
        report.add(case, "largest_peak_over_piece", largest)


# ------------------------------------------------------------------------------ larger than memory


def _files(folder: str) -> Iterator[int]:
    """Yield a descriptor of each file in a folder, with or without a name."""
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:  # the descriptor with which the folder was read
            continue
        if target.startswith(folder) and target.endswith("(deleted)"):
            yield int(entry.name)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                yield file.fileno()


def _drop_cache(dask_worker: Any) -> None:
    """Write the files of a worker to the disk, and drop them from the page cache."""
    for file in _files(dask_worker.local_directory):
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _write(size: int, dask_worker: Any) -> None:
    """Write a file of some bytes, for :func:`_read`."""
    part = np.random.default_rng(0).bytes(_MIB)
    with (Path(dask_worker.local_directory) / "plain").open("wb") as file:
        for start in range(0, size, _MIB):
            file.write(part[: size - start])


def _read(size: int, dask_worker: Any) -> None:
    """Read some bytes of the file in order."""
    room = bytearray(4 * _MIB)
    with (Path(dask_worker.local_directory) / "plain").open("rb", buffering=0) as file:
        while size > 0 and (read := file.readinto(room)):
            size -= read


class Watch:
    """What happens to the workers of a cluster from one report to the next."""

    def __init__(self, client: Client, limit: int) -> None:
        self._client, self._limit = client, limit / _MIB
        self._paused = 0
        self._begin()

    def _begin(self) -> None:
        self._processes = self._client.run(os.getpid)
        self._client.run(_reset_peak)

    def report(self, report: Report, case: str, **keys: Any) -> None:
        """Add pauses, restarts by nannies, and the largest memory over the limit."""
        client = self._client
        processes = client.run(os.getpid)
        events = [event for w in processes for _, event in client.get_events(w)]
        paused = [e for e in events if isinstance(e, dict) and e.get("status") == "paused"]
        restarts = len(set(self._processes.values()) - set(processes.values()))
        scheduler: Any = client.scheduler
        info = client.sync(scheduler.identity, n_workers=-1)["workers"].values()
        peak = max(client.run(_memory_mib, "VmHWM").values())
        report.add(case, "pauses", len(paused) - self._paused, "pauses", **keys)
        self._paused = len(paused)
        still = sum(worker["status"] == "paused" for worker in info)
        report.add(case, "paused_at_the_end", still, "workers", **keys)
        report.add(case, "restarts", restarts, "restarts", **keys)
        report.add(case, "peak_over_limit", peak / self._limit, **keys)
        self._begin()


def report_rounds(report: Report, smoke: bool) -> None:
    """Add the time of rounds over pieces of twice the memory, over the time to read them."""
    n, k, megabytes = (3, 2, 4) if smoke else SIZES
    rows = k * megabytes * _MIB // (8 * _COLUMNS)
    limit = 1024 * _MIB if smoke else megabytes * _MIB // 2
    A: Any = da.random.default_rng(0).random((rows, _COLUMNS), chunks=(-(-rows // (32 * k)), -1))
    x = np.random.default_rng(1).random(_COLUMNS)
    expected = (A @ x).compute(scheduler="sync")
    computed = _MIB * megabytes * k // n
    wrong = 0

    def right(product: Any) -> None:
        nonlocal wrong
        wrong += not np.allclose(product, expected)

    # A smoke run's pieces are smaller than the process of a worker: it spills them early.
    target = {"distributed.worker.memory.target": 0.002} if smoke else {}
    with (
        dask.config.set(target),
        local_workers(n, limit) as (stock, _),
        local_workers(n, limit) as (client, workers),
    ):
        watches = {"coded": Watch(client, limit), "Dask": Watch(stock, limit)}
        C = coded.encode(A, coded.MDS(n, k), client, workers=workers)
        case = f"MDS({n}, {k}), pieces of {megabytes} MiB, memory limit {limit // _MIB} MiB"
        watches["coded"].report(report, f"{case}: encoding", way="coded", phase="encoding")
        B = stock.persist(A)
        wait(B)
        watches["Dask"].report(report, f"{case}: persist", way="Dask", phase="encoding")
        client.run(_write, megabytes * _MIB)

        def drop() -> None:
            client.run(_drop_cache)
            stock.run(_drop_cache)

        ways: dict[str, Callable[[], object]] = {
            "read": partial(client.run, _read, computed),
            "coded": lambda: right(client.compute(C @ x).result()),
            "Dask": lambda: right(stock.compute(B @ x).result()),
        }
        timings = side_by_side(ways, 1 if smoke else 5, before=drop)
        warm = side_by_side({name: ways[name] for name in ("read", "coded")}, 1 if smoke else 5)
        for name, watch in watches.items():
            watch.report(report, f"{case}: {name}", way=name, phase="rounds")
        report.add(case, "wrong_results", wrong, "results", goal=0)
        report.add(case, "round_over_reading", timings.ratio("coded", over="read"))
        report.add(f"{case}: Dask", "round_over_reading", timings.ratio("Dask", over="read"))
        report.add(case, "round_over_dask", timings.ratio("coded", over="Dask"))
        report.add(f"{case}, warm", "round_over_reading", warm.ratio("coded", over="read"))
        for name in timings.seconds:
            report.add(f"{case}: {name}", "seconds", timings.summary(name), "s")


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure the memory of workers while encoding, and rounds over pieces larger than it."""
    report = Report("memory")
    report_encoding(report, smoke)
    report_rounds(report, smoke)
    report.finish(json_file)


if __name__ == "__main__":
    main()
