"""Large sparse products behind thin links: coded loop and stock futures, side by side.

Every host is a network namespace with a link of its own, see `benchmarks.network`. The coordinator
of the coded loop runs on one of the workers that take part, so the operand has to get out of one
link and all results have to come in through it. With stock futures every worker fetches the chunks
of the operand that it lacks from the others.

The case ``simulated`` computes when an operand reaches each of up to 1,000 hosts. It needs no
network namespaces.

The cases are a random matrix of 10 entries a row, on equal links and with one link five times
thinner, and four hosts with four workers each. On the web graph cnr-2000, if ``DASK_CODED_DATA``
names the folder that holds it, the bytes that leave the coordinator are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse

import dask_coded as coded
from benchmarks.datasets import data_file
from benchmarks.graphs import products, random_matrix, stock_loop
from benchmarks.network import NetworkLab
from benchmarks.report import Report, options, side_by_side
from dask_coded.simulation import broadcast_times

ROUNDS = 5

#: Cases: workers, workers on each host, rate of each link, rate of the last link, goal.
CASES = {
    "8 hosts": (8, 1, "200mbit", "200mbit", 1.7),
    "8 hosts, one link thin": (8, 1, "200mbit", "40mbit", 0.5),
    "4 hosts of 4 workers": (16, 4, "200mbit", "200mbit", 0.7),
}


def compare(report: Report, case: str, rows: int, repeats: int) -> None:
    """Time rounds with a random matrix."""
    workers, per_host, rate, last, goal = CASES[case]
    A = random_matrix(rows)
    x = np.random.default_rng(1).random(rows)
    with NetworkLab(workers, None, per_host=per_host) as lab:
        C = coded.encode(A, workers=lab.workers, client=lab.client)
        stock = stock_loop(lab.client, lab.workers, A, x)
        whole = lab.client.scatter(x, workers=lab.workers[:1], hash=False)
        # Everything is in place; from now on links are thin.
        for host in range(workers // per_host):
            lab.limit(host, last if host == workers // per_host - 1 else rate)

        def coded_loop() -> np.ndarray:
            future = coded.submit(
                products, C, whole, ROUNDS, client=lab.client, workers=lab.workers[:1]
            )
            found: np.ndarray = future.result()
            return found

        timings = side_by_side(
            {"coded": coded_loop, "stock": lambda: stock(ROUNDS)}, repeats=repeats, warmup=1
        )
    expected = products(A, x, ROUNDS)
    for result in timings.results.values():
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-9)
    keys: dict[str, Any] = {"rows": rows, "workers": workers, "rate": rate, "thinnest": last}
    report.add(case, "coded_over_stock", timings.ratio("coded", over="stock"), goal=goal, **keys)
    for name in ("coded", "stock"):
        each = float(np.median(timings.seconds[name])) / ROUNDS * 1e3
        report.add(case, f"{name}_round", each, unit="ms", **keys)


def web_graph() -> scipy.sparse.csr_array | None:
    """Return the adjacency matrix of cnr-2000, None if it is not there."""
    file = data_file("graph_cnr-2000.npz")
    if file is None:
        return None
    with np.load(file) as data:
        indptr, indices = data["indptr"], data["indices"]
    size = len(indptr) - 1
    return scipy.sparse.csr_array((np.ones(len(indices)), indices, indptr), shape=(size, size))


def count_bytes(report: Report, A: scipy.sparse.csr_array, workers: int) -> None:
    """Count what leaves the coordinator in each round, in operands."""
    x = np.random.default_rng(1).random(A.shape[1])
    with NetworkLab(workers, None) as lab:
        C = coded.encode(A, workers=lab.workers, client=lab.client)
        whole = lab.client.scatter(x, workers=lab.workers[:1], hash=False)
        for host in range(workers):
            lab.limit(host, "50mbit")

        def loop(rounds: int) -> Any:
            future = coded.submit(
                _normalized, C, whole, rounds, client=lab.client, workers=lab.workers[:1]
            )
            return future.result()

        loop(2)
        before = lab.traffic()
        loop(ROUNDS)
        after = lab.traffic()
    operand = x.nbytes * ROUNDS
    case = f"cnr-2000, {workers} workers"
    keys: dict[str, Any] = {"rows": A.shape[0], "workers": workers, "rate": "50mbit"}
    for way, now, then in (
        ("out_of", after.sent, before.sent),
        ("into", after.received, before.received),
    ):
        vectors = float(now[0] - then[0]) / operand
        goal = 2.0 if way == "out_of" else None
        report.add(case, f"vectors_{way}_coordinator", vectors, unit="vectors", goal=goal, **keys)


def _normalized(operator: Any, x: np.ndarray, rounds: int) -> float:
    """Multiply again and again; the result is a number, so that it does not count as traffic."""
    for _ in range(rounds):
        x = operator @ x
        x /= np.abs(x).max()
    return float(x.sum())


def simulate(report: Report, hosts: int, size: int, slow: int) -> None:
    """Simulate operands on links of 10 Gbit/s, some of them five times thinner."""
    rate = 1.25e9
    rates = np.full(hosts + 1, rate)
    thin = np.random.default_rng(0).choice(hosts, slow, replace=False)
    rates[thin] /= 5
    for known in (False, True) if slow else (False,):
        delays = np.where(rates[:-1] < rate, 5.0, 1.0) * size / rate if known else None
        times, sent = broadcast_times(size, rates, delays=delays)
        others = np.delete(times, thin) * rate / size
        known_text = "" if not slow else ", known" if known else ", not known"
        case = f"{hosts} hosts, {size / 1e6:.0f} MB, {slow} slow{known_text}"
        keys: dict[str, Any] = {"hosts": hosts, "size": size, "slow": slow, "known": known}
        for share in (70, 90, 100):
            value = float(np.percentile(others, share))
            report.add(case, f"arrival_of_{share}_percent_over_bound", value, **keys)
        report.add(case, "operands_out_of_coordinator", float(sent[-1] / size), **keys)


@click.command()
@click.option("--rows", default=1_000_000, show_default=True, help="Rows of the random matrix.")
@click.option("--only", type=click.Choice([*CASES, "cnr-2000", "simulated"]), help="Run one case.")
@options
def main(
    rows: int, only: str | None, json_file: Path | None, png_file: Path | None, smoke: bool
) -> None:
    """Compare rounds behind thin links. Needs root on Linux, see benchmarks.network."""
    report = Report("links")
    if only in (None, "simulated"):
        simulate(report, 8, 80_000_000, 0)
        for hosts, slow in ((10, 1),) if smoke else ((100, 0), (100, 2), (1000, 0), (1000, 20)):
            simulate(report, hosts, hosts * 800_000, slow)
    for case in CASES:
        if only in (None, case) and not smoke:
            compare(report, case, rows, repeats=3)
    if only in (None, "cnr-2000") and (graph := web_graph()) is not None and not smoke:
        for workers in (4, 8, 16):
            count_bytes(report, graph, workers)
    report.finish(json_file)


if __name__ == "__main__":
    main()
