"""What is watched from commit to commit: times over those of the same work without the package.

A ratio of two things that take turns hardly depends on the machine, so a slower commit is seen on a
shared one, too. `asv continuous --config benchmarks/asv.conf.json main HEAD` compares two commits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import scipy.sparse as sp
from distributed import Client, LocalCluster

import dask_coded as coded
from dask_coded.graph.pagerank import pagerank_rounds, transition_matrix
from dask_coded.uncoded import uncoded_product


def _median_ratio(ours: Callable[[], object], theirs: Callable[[], object], turns: int) -> float:
    """Return the median over turns of the time of ours over that of theirs."""
    ratios = []
    for turn in range(turns + 1):
        seconds = []
        for way in (ours, theirs):
            began = perf_counter()
            way()
            seconds.append(perf_counter() - began)
        if turn:  # the first one connects workers
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def _loop(operator: Any, x: np.ndarray, rounds: int) -> float:
    """Return the median seconds of a product; runs in the cluster."""
    seconds = []
    for _ in range(rounds):
        began = perf_counter()
        operator @ x
        seconds.append(perf_counter() - began)
    return statistics.median(seconds[rounds // 2 :])


class Ratios:
    """A cluster of two worker processes."""

    timeout = 300
    unit = "ratio"

    def setup(self) -> None:
        options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
        self.cluster = LocalCluster(processes=True, **options)
        self.client = Client(self.cluster)

    def teardown(self) -> None:
        self.client.close()
        self.cluster.close()

    def track_lazy_product_over_dask(self) -> float:
        """A dense product of 64 MB, computed by the client, over dask.array's."""
        import dask.array as da

        A = da.random.random((8_000, 1_000), chunks=(4_000, -1))
        A = self.client.persist(A)
        C, x = coded.encode(A, client=self.client), np.ones(1_000)
        return _median_ratio(
            lambda: (C @ x).compute(), lambda: uncoded_product(A, x).compute(), turns=15
        )

    def track_empty_round_over_task(self) -> float:
        """A round in which there is nearly nothing to compute, over a task of Dask."""
        import dask

        with dask.config.set({"coded.round.alone": False}):
            C = coded.encode(np.ones((800, 400)), client=self.client)
            rounds = [
                coded.submit(_loop, C, np.ones(400), 100, client=self.client).result()
                for _ in range(5)
            ]
        tasks = []
        for number in range(50):
            began = perf_counter()
            self.client.submit(abs, number, pure=False).result()
            tasks.append(perf_counter() - began)
        return statistics.median(rounds) / statistics.median(tasks)

    def track_pagerank_over_scipy(self) -> float:
        """PageRank of a random graph of a million edges, encoding included, over SciPy's."""
        n = 100_000
        ends = np.random.default_rng(0).integers(n, size=(2, 10 * n))
        graph = sp.csr_array((np.ones(10 * n), ends), shape=(n, n))
        return _median_ratio(
            lambda: coded.graph.pagerank(graph, tol=1e-9, client=self.client),
            lambda: pagerank_rounds(*transition_matrix(graph), tol=1e-9),
            turns=5,
        )
