"""Measure what verified rounds cost.

First the arithmetic alone, in this process: the processor time of preparing a round's verifier and
of checking all its shares, over that of the products of all pieces that a round needs. Then worker
processes on this machine run loops of rounds in turns, with and without ``verify``; the ratios of
processor time and of median rounds include messages, and are noisier.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import process_time

import click
import numpy as np
from distributed import Client

import dask_coded as coded
from benchmarks.cluster import local_workers, run_rounds
from benchmarks.report import Report, Summary, options
from dask_coded.rounds import Geometry, StripeRange
from dask_coded.rounds.scaling import exponents_of, scaled
from dask_coded.rounds.verification import Verification, add_rows, empty_check, random_weights

CODE = coded.MDS(4, 3)
COLUMNS, STRIPES = 1_000, 40
#: Stripes of one range of a share, as rounds of this size report them.
REPORTED = 8
#: Columns of the operand, and the goal for the processor time of checking over that of the round.
OPERANDS = {1: 0.10, 32: 0.03}


def verification(blocks: np.ndarray) -> Verification:
    """Return what checks the shares of the array of these blocks."""
    rows = blocks.shape[1]
    geometry = Geometry((rows,) * CODE.k, STRIPES, mixed=True)
    weights = random_weights("benchmark", rows)
    exponents = [exponents_of(block) for block in blocks]
    checks = [empty_check(STRIPES, COLUMNS, blocks.dtype) for _ in blocks]
    for check, block, found in zip(checks, blocks, exponents, strict=True):
        add_rows(check, weights, geometry.edges(0), 0, scaled(block, found))
    return Verification(CODE, geometry, exponents, weights, checks, blocks.dtype)


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of some calls."""
    times = []
    for _ in range(repeats):
        began = process_time()
        run()
        times.append(process_time() - began)
    return min(times)


def arithmetic(report: Report, rows: int, repeats: int) -> None:
    """Compare checking with computing, without messages."""
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((CODE.k, rows, COLUMNS))
    array = verification(blocks)
    edges = np.arange(STRIPES + 1) * rows // STRIPES
    for columns, goal in OPERANDS.items():
        x = rng.standard_normal((COLUMNS, columns) if columns > 1 else COLUMNS)
        products = [block @ x for block in blocks]
        computing = CODE.k * seconds(lambda x=x: blocks[0] @ x, repeats)  # type: ignore[misc]

        def check(x: np.ndarray = x, products: list[np.ndarray] = products) -> None:
            verifier = array.verifier(x, [0.0] * CODE.pieces)
            for piece, product in enumerate(products):
                for start in range(0, STRIPES, REPORTED):
                    part = StripeRange(piece, start, start + REPORTED)
                    share = product[edges[part.start] : edges[part.stop]]
                    assert verifier.accepts(part, share)

        report.add(
            f"{columns} column" + "s" * (columns > 1),
            "checking_over_computing",
            seconds(check, repeats) / computing,
            goal=goal,
            columns=columns,
            rows=rows,
        )


def _spent(client: Client) -> float:
    """Return the processor time that all workers have used so far."""
    return sum(client.run(process_time).values())


def in_cluster(report: Report, rows: int, turns: int, rounds: int) -> None:
    """Compare rounds with verified shares with rounds without."""
    rng = np.random.default_rng(0)
    with local_workers(CODE.n) as (client, addresses):
        A = rng.standard_normal((CODE.k * rows, COLUMNS))
        arrays = {verify: coded.encode(A, CODE, verify=verify) for verify in (True, False)}
        del A
        for columns in OPERANDS:
            x = rng.standard_normal((COLUMNS, columns) if columns > 1 else COLUMNS)
            measured: dict[str, list[float]] = {"processor": [], "round": []}
            for turn in range(-1, turns):
                processor, median = {}, {}
                for verify, C in arrays.items():
                    before = _spent(client)
                    future = coded.submit(run_rounds, C, x, rounds, workers=addresses[0])
                    median[verify] = float(np.median(future.result()))
                    processor[verify] = _spent(client) - before
                if turn >= 0:
                    measured["processor"].append(processor[True] / processor[False])
                    measured["round"].append(median[True] / median[False])
            for name, ratios in measured.items():
                report.add(
                    f"{columns} column" + "s" * (columns > 1),
                    f"verified_{name}_over_unverified",
                    Summary.of(np.array(ratios)),
                    columns=columns,
                    rows=rows,
                )


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Compare rounds with verified shares with rounds without."""
    report = Report("verification")
    arithmetic(report, rows=80 if smoke else 8_000, repeats=1 if smoke else 30)
    in_cluster(report, rows=40 if smoke else 8_000, turns=1 if smoke else 10, rounds=10)
    report.finish(json_file)


if __name__ == "__main__":
    main()
