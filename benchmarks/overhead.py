"""Measure the cost of a round with nothing to compute: twelve workers, a matrix of 1,200 rows.

One run compares a lazy coded product, the same product by dask.array, a coded round inside an
algorithm that runs in the cluster, and two floors: the cheapest computation of dask.array, and one
message to every worker and back without any of our code.
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
from benchmarks.cluster import local_workers, run_rounds
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


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Time a coded round over a dask.array product, with negligible arithmetic."""
    workers, repeats, rounds = (4, 1, 2) if smoke else (12, 30, ROUNDS)
    report = Report("overhead")
    with local_workers(workers) as (client, addresses):
        A = da.random.random((1_200, 64), chunks=(1_200 // workers, -1)).persist()
        x = np.random.default_rng(0).standard_normal(64)
        C = coded.encode(A, coded.MDS(workers, workers - 2))
        in_cluster: dict[str, list[float]] = {"loop": [], "messages": []}

        def loop() -> None:
            seconds = coded.submit(run_rounds, C, x, rounds).result()
            in_cluster["loop"].append(float(np.median(seconds)))

        def exchange() -> None:
            future = client.submit(bare_messages, addresses, x, rounds, pure=False)
            in_cluster["messages"].append(float(np.median(future.result())))

        timings = side_by_side(
            {
                "dask.array": lambda: (A @ x).compute(),
                "lazy": lambda: (C @ x).compute(),
                "one task": lambda: da.ones(1, chunks=1).compute(),
                "loop": loop,
                "messages": exchange,
            },
            repeats=repeats,
            warmup=1,
        )
    case = f"{workers} workers"
    keys: dict[str, Any] = {"workers": workers}
    report.add(
        case, "lazy_matmul_over_dask", timings.ratio("lazy", over="dask.array"), goal=0.5, **keys
    )
    report.add(case, "one_task_over_dask", timings.ratio("one task", over="dask.array"), **keys)
    dask_seconds = timings.seconds["dask.array"]
    for name, measure, goal in (
        ("loop", "loop_round_over_dask", 0.2),
        ("messages", "bare_messages_over_dask", None),
    ):
        # The median round of each turn, over that turn's dask.array product.
        medians = np.array(in_cluster[name][-len(dask_seconds) :])
        report.add(case, measure, Summary.of(medians / dask_seconds), goal=goal, **keys)
    report.add(case, "dask_product", Summary.of(dask_seconds * 1e3), unit="ms", **keys)
    report.finish(json_file)


if __name__ == "__main__":
    main()
