"""Measure the cost of a round with nothing to compute: a few rows for each of twelve workers.

One run compares a lazy coded product, the same product by dask.array, a coded round inside an
algorithm that runs in the cluster, and three floors: the cheapest computation of dask.array, one
trivial task for every worker, and one message to every worker and back without any of our code.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import dask.array as da
import numpy as np
from distributed import get_worker
from distributed.utils import sync

import dask_coded as coded
from benchmarks.cluster import local_workers
from benchmarks.report import Report, Summary, options, side_by_side

ROUNDS = 25


def bare_messages(addresses: list[str], x: np.ndarray, rounds: int) -> list[float]:
    """Send ``x`` to every worker and back inside the cluster; return the seconds of each round."""
    worker = get_worker()

    async def exchange() -> None:
        await asyncio.gather(*(worker.rpc(address).echo(data=x.tobytes()) for address in addresses))

    seconds = []
    for _ in range(rounds):
        began = perf_counter()
        sync(worker.loop, exchange)
        seconds.append(perf_counter() - began)
    return seconds


def run_rounds(operator: Any, x: np.ndarray, rounds: int) -> list[tuple[float, int]]:
    """Run rounds inside the cluster; return the seconds and the messages of each."""
    found = []
    for _ in range(rounds):
        operator @ x
        found.append((operator.last_round.seconds, operator.last_round.messages))
    return found


@click.command()
@click.option("--workers", default=12, show_default=True, help="Worker processes.")
@options
def main(workers: int, json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Time a coded round over a dask.array product, with negligible arithmetic."""
    workers, repeats, rounds = (4, 1, 2) if smoke else (workers, 30, ROUNDS)
    report = Report("overhead")
    with local_workers(workers) as (client, addresses):
        A = da.random.random((100 * workers, 64), chunks=(100, -1)).persist()
        x = np.random.default_rng(0).standard_normal(64)
        C = coded.encode(A, coded.MDS(workers, workers - 2))
        in_cluster: dict[str, list[float]] = {"loop": [], "sent": [], "messages": []}

        def loop() -> None:
            found = np.median(coded.submit(run_rounds, C, x, rounds).result(), axis=0)
            for name, value in zip(("loop", "sent"), found.tolist(), strict=True):
                in_cluster[name].append(value)

        def tasks() -> None:
            futures = [
                client.submit(abs, i, workers=[address], pure=False)
                for i, address in enumerate(addresses)
            ]
            client.gather(futures)

        def exchange() -> None:
            future = client.submit(bare_messages, addresses, x, rounds, pure=False)
            in_cluster["messages"].append(float(np.median(future.result())))

        timings = side_by_side(
            {
                "dask.array": lambda: (A @ x).compute(),
                "lazy": lambda: (C @ x).compute(),
                "one task": lambda: da.ones(1, chunks=1).compute(),
                "tasks": tasks,
                "loop": loop,
                "messages": exchange,
            },
            repeats=repeats,
            warmup=1,
        )
    case = f"{workers} workers"
    keys: dict[str, Any] = {"workers": workers}
    report.add(
        case, "lazy_matmul_over_dask", timings.ratio("lazy", over="dask.array"), goal=0.35, **keys
    )
    report.add(case, "one_task_over_dask", timings.ratio("one task", over="dask.array"), **keys)
    dask_seconds = timings.seconds["dask.array"]
    for name, measure, over, goal in (
        ("loop", "loop_round_over_dask", "dask.array", 0.12),
        ("loop", "loop_round_over_tasks", "tasks", 0.3),
        ("messages", "bare_messages_over_dask", "dask.array", None),
    ):
        # The median round of each turn, over the product or the tasks of that turn.
        medians = np.array(in_cluster[name][-repeats:])
        report.add(case, measure, Summary.of(medians / timings.seconds[over]), goal=goal, **keys)
    sent = Summary.of(np.array(in_cluster["sent"][-repeats:]) / workers)
    report.add(case, "messages_per_worker", sent, unit="", **keys)
    report.add(case, "dask_product", Summary.of(dask_seconds * 1e3), unit="ms", **keys)
    report.finish(json_file)


if __name__ == "__main__":
    main()
