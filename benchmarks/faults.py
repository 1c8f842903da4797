"""A campaign of random faults while a loop runs whose operand goes from host to host.

Every worker is a process on a host of its own, see `benchmarks.network`. A loop multiplies a sparse
matrix by large vectors and checks each product. Meanwhile one worker after another is stopped
(SIGSTOP), killed (SIGKILL) and started again, cut off (all its packets are dropped) or put behind a
thin link, whatever it is at that moment: a relay or receiver of the operand, or the coordinator.
The loop keeps its state on other workers, so that it resumes elsewhere when its worker is lost.

The report has the number of faults, rounds and wrong results, the longest time without a round, and
what is left behind at the end: descriptors of shared memory, operands and jobs on the workers.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import dask
import numpy as np
import psutil
from distributed import Client

import dask_coded as coded
from benchmarks.graphs import random_matrix
from benchmarks.network import NetworkLab
from benchmarks.report import Report, options

_RATE = "200mbit"
_KINDS = ("stop", "kill", "cut off", "thin link")


def checked_rounds(
    operator: Any,
    left: np.ndarray,
    product: np.ndarray,
    log: str,
    over: str,
    loop: coded.Loop,
) -> int:
    """Run rounds until a file is there, and check each; return how many there were.

    ``product`` is ``left @ A``, so that ``left @ (A @ x)`` must be ``product @ x``.
    """
    first = loop.resume(0)
    i = first
    while True:
        x = np.sin(i + np.arange(operator.shape[1]))
        y = operator @ x
        scale = float(np.abs(left) @ np.abs(y))
        wrong = not abs(float(left @ y) - float(product @ x)) <= 1e-10 * scale
        i += 1
        with open(log, "a") as file:
            file.write(f"{time.time()} {int(wrong)}\n")
        last = os.path.exists(over)
        loop.report(coded.Progress(i, 0.0), state=i, last=last)
        if last:
            return i


class Campaign:
    """Causes faults, and ends each of them after a while."""

    def __init__(self, lab: NetworkLab, array: coded.CodedArray, seed: int) -> None:
        self._lab = lab
        self._array = array
        self._rng = np.random.default_rng(seed)
        self.count: Counter[str] = Counter()

    def fault(self, coordinator: int | None) -> None:
        """Cause a fault at a random worker, every third time at the coordinator, and end it."""
        lab, rng = self._lab, self._rng
        kind = str(rng.choice(_KINDS))
        if kind == "kill" and not self._repaired():
            kind = "stop"  # the code tolerates the loss of two workers, not of all one by one
        victim = int(rng.integers(len(lab.workers)))
        if coordinator is not None and rng.random() < 1 / 3:
            victim = coordinator
        self.count[f"{kind}, {'coordinator' if victim == coordinator else 'other'}"] += 1
        seconds = float(rng.uniform(0.3, 3.0))
        match kind:
            case "stop":
                os.kill(lab.pids[victim], signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(lab.pids[victim], signal.SIGCONT)
            case "kill":
                os.kill(lab.pids[victim], signal.SIGKILL)
                time.sleep(min(seconds, 1.0))
                lab.start(victim)
            case "cut off":
                lab.cut_off(victim)
                time.sleep(seconds)
                lab.reconnect(victim)
            case _:
                lab.limit(victim, "20mbit")
                time.sleep(seconds)
                lab.limit(victim, _RATE)
        time.sleep(float(rng.uniform(0.0, 1.0)))

    def _repaired(self) -> bool:
        """Whether all workers are there, and all pieces on them."""
        lab = self._lab
        there = lab.client.scheduler_info(n_workers=-1)["workers"]
        futures = self._array.encoded.futures
        return len(there) == len(lab.pids) and all(f.status == "finished" for f in futures)


def coordinator_of(client: Client, key: str) -> int | None:
    """Return the number of the worker that runs a task, None if none does at the moment."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    for address, keys in client.processing().items():
        if key in map(str, keys) and address in workers:
            return int(workers[address]["name"])
    return None


def descriptors(pids: list[int]) -> int:
    """Count the descriptors of shared memory that some processes have open."""
    found = 0
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found += "memfd:dask-coded" in os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                pass  # closed meanwhile
    return found


def left_behind(dask_worker: Any) -> int:
    """Count the operands and jobs on a worker."""
    plugin = dask_worker.extensions["dask-coded"]
    return len(plugin.operands._coming) + len(plugin._jobs)


def run(report: Report, workers: int, rows: int, faults: int, seed: int) -> None:
    """Run one campaign."""
    A = random_matrix(rows)
    left = np.random.default_rng(seed).random(rows)
    with (
        # Dask gives up a task after the loss of three workers that ran it.
        dask.config.set({"distributed.scheduler.allowed-failures": 10 * faults}),
        NetworkLab(workers, _RATE) as lab,
        tempfile.TemporaryDirectory() as folder,
    ):
        client = lab.client
        C = coded.encode(A, redundancy=2, workers=None, client=client)
        log, over = Path(folder) / "log", Path(folder) / "over"
        log.touch()
        future = coded.submit(
            checked_rounds, C, left, left @ A, str(log), str(over), coded.Loop(), client=client
        )
        campaign = Campaign(lab, C, seed)
        while len(log.read_text().splitlines()) < 5:
            time.sleep(0.05)
        for _ in range(faults):
            if future.done():
                break
            campaign.fault(coordinator_of(client, str(future.key)))
        over.touch()
        future.result(timeout=120)
        pids = [pid for pid in lab.pids if psutil.pid_exists(pid)]
        # The last messages are under way.
        for _ in range(100):
            behind = sum(client.run(left_behind).values())
            if not behind:
                break
            time.sleep(0.1)
        open_ = descriptors(pids)
        lines = [line.split() for line in log.read_text().splitlines()]
    times = [float(at) for at, _ in lines]
    case = f"{workers} workers, {sum(campaign.count.values())} faults, seed {seed}"
    keys: dict[str, Any] = {"workers": workers, "rows": rows, "seed": seed}
    report.add(case, "wrong", sum(int(w) for _, w in lines), unit="rounds", goal=0, **keys)
    report.add(case, "rounds", len(lines), unit="rounds", **keys)
    report.add(case, "longest_gap", float(np.diff(times).max()), unit="s", goal=10.0, **keys)
    report.add(case, "left_behind", behind, unit="objects", goal=0, **keys)
    report.add(case, "descriptors", open_ / len(pids), unit="per worker", goal=6, **keys)
    for kind, count in sorted(campaign.count.items()):
        report.add(case, kind, count, unit="faults", **keys)


@click.command()
@click.option("--workers", default=6, show_default=True)
@click.option("--rows", default=60_000, show_default=True)
@click.option("--faults", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True)
@options
def main(
    workers: int,
    rows: int,
    faults: int,
    seed: int,
    json_file: Path | None,
    png_file: Path | None,
    smoke: bool,
) -> None:
    """Cause random faults while rounds run. Needs root on Linux, see benchmarks.network."""
    report = Report("faults")
    run(report, workers, rows, 3 if smoke else faults, seed)
    report.finish(json_file)


if __name__ == "__main__":
    main()
