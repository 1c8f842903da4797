"""Measure rounds of a few milliseconds, and algorithms that consist of them, beside one process.

The parts, each of which ``--only`` chooses:

``loop``
    One product of a loop over the web graph cnr-2000 on two workers: with the last result, changed
    in place, and with a new operand; beside SciPy. Once always as a round, and once as it is by
    default, so that the coordinator may compute it alone.
``empty``
    Rounds in which there is nearly nothing to compute, on 2, 4 and 8 workers.
``simulated``
    Messages of a round of many workers whose speeds are known and do not change.
The name of an algorithm
    The algorithm on two workers, with the encoding and with an array that was encoded before,
    beside libraries in one process. All must reach the same error, which is checked.

Graphs and a9a are read from the folder ``DASK_CODED_DATA``; without it only parts that need no data
are run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import dask
import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from distributed import Client

import dask_coded as coded
from benchmarks.algorithms import Contest, installed, logistic_loss, stem
from benchmarks.cluster import local_workers, run_rounds
from benchmarks.datasets import data_file
from benchmarks.report import Report, Summary, options, side_by_side
from benchmarks.scale import large
from dask_coded.graph.centrality import katz_rounds
from dask_coded.graph.filters import chebyshev_rounds
from dask_coded.graph.hits import hits_rounds
from dask_coded.graph.kernels import Heat, chebyshev_coefficients
from dask_coded.graph.pagerank import pagerank_rounds, transition_matrix
from dask_coded.simulation import Network, Simulation, constant

GRAPHS = ("graph_cnr-2000.npz", "graph_wiki-Vote.txt.gz")
#: networkx takes minutes to build a graph of more edges.
NETWORKX = 200_000


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    repeats: int
    products: int = 50
    graphs: tuple[str, ...] = GRAPHS
    empty: tuple[int, ...] = (2, 4, 8)
    simulated: int = 1000
    grid: int = 300


def smoke_size() -> Size:
    return Size(1, products=4, graphs=GRAPHS[1:], empty=(2,), simulated=20, grid=5)


# ------------------------------------------------------------------------------------------- rounds


def timed_products(operator: Any, x: np.ndarray, count: int, new: bool) -> dict[str, list[float]]:
    """Multiply in a loop; return the seconds of each product, and whether it was computed alone."""
    seconds, alone = [], []
    for _ in range(count):
        began = perf_counter()
        y = operator @ x
        seconds.append(perf_counter() - began)
        report = getattr(operator, "last_round", None)
        alone.append(float(report is not None and report.alone))
        y /= max(float(y.max()), 1e-300)
        x = y.copy() if new else y
    return {"seconds": seconds, "alone": alone}


def loop(report: Report, size: Size) -> None:
    """Time products of a loop over a web graph."""
    if (file := data_file(size.graphs[0])) is None:
        return
    M, _ = transition_matrix(coded.graph.read_graph(file).adjacency)
    x = np.ones(M.shape[1])
    found: dict[tuple[str, bool, str], list[float]] = {}
    with local_workers(2) as (client, _addresses):
        C = coded.encode(M, client=client)

        def submitted(alone: bool, new: bool) -> None:
            with dask.config.set({"coded.round.alone": alone}):
                future = coded.submit(timed_products, C, x, size.products, new, client=client)
                keep(("by default" if alone else "round", new), future.result())

        def keep(way: tuple[str, bool], products: dict[str, list[float]]) -> None:
            # The first ones connect workers, fetch blocks, and find out what is quicker.
            half = size.products // 2
            for name, values in products.items():
                found.setdefault((*way, name), []).append(float(np.median(values[half:])))

        for _ in range(1 + size.repeats):
            for new in (False, True):
                keep(("SciPy", new), timed_products(M, x, size.products, new))
                submitted(False, new)
                submitted(True, new)
    goals = {("by default", False): 3.0, ("by default", True): 3.5}
    for way in ("SciPy", "round", "by default"):
        for new in (False, True):
            seconds, alone = (np.array(found[way, new, n][1:]) for n in ("seconds", "alone"))
            case = f"{stem(file)}, {'new operand' if new else 'in place'}: {way}"
            keys: dict[str, Any] = {"data": stem(file), "way": way, "new": new, "workers": 2}
            keys["alone"] = float(alone.mean())
            goal = goals.get((way, new))
            report.add(case, "product", Summary.of(seconds * 1e3), "ms", goal=goal, **keys)
            if way != "SciPy":
                over = Summary.of(seconds / np.array(found["SciPy", new, "seconds"][1:]))
                report.add(case, "product_over_scipy", over, **keys)


def empty(report: Report, size: Size) -> None:
    """Time rounds of a matrix of 800 rows and 400 columns."""
    goals = {2: 0.7, 4: 1.5, 8: 3.0}
    for workers in size.empty:
        seconds: list[list[float]] = []
        with local_workers(workers) as (client, _addresses):
            C = coded.encode(np.random.default_rng(0).random((800, 400)), client=client)
            for _ in range(size.repeats):
                future = coded.submit(run_rounds, C, np.ones(400), 4 * size.products, client=client)
                seconds.append(future.result()[size.products :])
        goal = goals.get(workers)
        case = f"800 x 400, {workers} workers"
        keys: dict[str, Any] = {"workers": workers}
        for measure, percent, factor in (("round", 50, 1), ("slowest_of_20", 95, 2)):
            each = Summary.of(1e3 * np.percentile(seconds, percent, axis=1))
            aim = None if goal is None else factor * goal
            report.add(case, measure, each, "ms", goal=aim, **keys)


def simulated(report: Report, size: Size) -> None:
    """Count messages of simulated rounds in which nothing has to move."""
    workers = size.simulated
    uneven = np.random.default_rng(0).uniform(0.5, 1.5, workers)
    for name, speeds in (("equal", np.ones(workers)), ("unequal", uneven)):
        simulation = Simulation(large(workers), constant(speeds), network=Network(tick=1e-3))
        simulation.run(4)  # speeds and errors of predictions are not known yet
        rounds = simulation.run(2)
        messages = np.array([found.messages / workers for found in rounds])
        case = f"{workers} workers of {name}, known speeds"
        keys: dict[str, Any] = {"workers": workers, "speeds": name}
        goal = 3.0 if name == "equal" else None
        report.add(case, "messages_per_worker", Summary.of(messages), "", goal=goal, **keys)
        over = Summary.of([found.seconds / found.bound for found in rounds])
        report.add(case, "round_over_fluid", over, **keys)


# --------------------------------------------------------------------------------------- algorithms


@dataclass(frozen=True)
class Race(Contest):
    """A contest in which ours also runs with an array that was encoded before.

    Parameters
    ----------
    encoded : callable
        Ours without the encoding, and without what a user prepares once.
    """

    encoded: Callable[[], Any]


class Both:
    """A sparse matrix with its transpose stored by rows, as fast as SciPy multiplies."""

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix
        self.T = sp.csr_array(matrix.T)
        self.shape = matrix.shape

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._matrix @ x
        return found


def submitted(client: Client, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return coded.submit(function, *args, client=client, **kwargs).result()


def graphs(size: Size) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, adjacency matrix and, if it is small, networkx graph of each file."""
    import networkx as nx

    for name in size.graphs:
        if (file := data_file(name)) is not None:
            adjacency = coded.graph.read_graph(file).adjacency.astype(float)
            small = adjacency.nnz < NETWORKX
            G = nx.from_scipy_sparse_array(adjacency, create_using=nx.DiGraph) if small else None
            yield stem(file), adjacency, G


def distance(exact: np.ndarray) -> Callable[[Any], float]:
    """Return the sum of the absolute errors of scores, both scaled to a sum of 1."""
    scaled = exact / exact.sum()
    return lambda found: float(np.abs(found / found.sum() - scaled).sum())


def pagerank(client: Client, name: str, adjacency: Any, G: Any) -> Race:
    """Return PageRank to a change of 1e-9."""
    M, dangling = transition_matrix(adjacency)
    C, tol = coded.encode(M, client=client), 1e-9
    peers: dict[str, Callable[[], Any]] = {
        "SciPy": lambda: pagerank_rounds(*transition_matrix(adjacency), tol=tol).scores
    }
    if G is not None:
        import networkx as nx

        peers["networkx"] = lambda: of_nodes(nx.pagerank(G, tol=tol / len(G)))
    return Race(
        "PageRank",
        name,
        lambda: coded.graph.pagerank(adjacency, tol=tol, client=client),
        peers,
        distance(pagerank_rounds(M, dangling, tol=1e-13).scores),
        1e-8,
        lambda: submitted(client, pagerank_rounds, C, dangling, tol=tol).scores,
    )


def hits(client: Client, name: str, adjacency: Any, G: Any) -> Race:
    """Return the authorities to a change of 1e-9."""
    C = coded.encode(adjacency, transpose=True, client=client)
    stop: dict[str, Any] = {"tol": 1e-9, "max_iter": 1000}
    peers: dict[str, Callable[[], Any]] = {
        "SciPy": lambda: hits_rounds(Both(adjacency), **stop)[1],
        "SciPy svds": lambda: np.abs(
            spla.svds(adjacency, k=1, tol=1e-9, rng=np.random.default_rng(0))[2][0]
        ),
    }
    if G is not None:
        import networkx as nx

        peers["networkx"] = lambda: of_nodes(nx.hits(G, tol=1e-9)[1])
    return Race(
        "HITS",
        name,
        lambda: coded.graph.hits(adjacency, client=client, **stop)[1],
        peers,
        distance(hits_rounds(Both(adjacency), tol=1e-12, max_iter=5000)[1]),
        1e-6,
        lambda: submitted(client, hits_rounds, C, **stop)[1],
    )


def katz(client: Client, name: str, adjacency: Any, G: Any) -> Race:
    """Return Katz centrality to a change of 1e-9, with half of the largest ``alpha``."""
    M = sp.csr_array(adjacency.T)
    C, tol, beta = coded.encode(M, client=client), 1e-9, np.ones(M.shape[0])
    alpha = 0.5 / float(np.abs(spla.eigs(M, k=1, return_eigenvectors=False, tol=1e-3)[0]))
    peers: dict[str, Callable[[], Any]] = {
        "SciPy": lambda: katz_rounds(sp.csr_array(adjacency.T), beta, alpha=alpha, tol=tol)
    }
    if G is not None:
        import networkx as nx

        peers["networkx"] = lambda: of_nodes(nx.katz_centrality(G, alpha=alpha, tol=tol))
    return Race(
        "Katz centrality",
        name,
        lambda: coded.graph.katz_centrality(adjacency, alpha=alpha, tol=tol, client=client),
        peers,
        distance(katz_rounds(M, beta, alpha=alpha, tol=1e-13)),
        1e-6,
        lambda: submitted(client, katz_rounds, C, beta, alpha=alpha, tol=tol),
    )


def of_nodes(scores: dict[Any, float]) -> np.ndarray:
    return np.array(list(scores.values()))


def of_graphs(
    race: Callable[[Client, str, Any, Any], Race],
) -> Callable[[Client, Size], Iterator[Race]]:
    """Return the same algorithm for each graph."""

    def races(client: Client, size: Size) -> Iterator[Race]:
        for found in graphs(size):
            yield race(client, *found)

    return races


def grid(size: Size) -> sp.csr_array:
    """Return the Laplacian of a square grid."""
    line = sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(size.grid, size.grid))
    adjacency = sp.csr_array(sp.kronsum(line, line))
    return sp.csr_array(sp.diags_array(adjacency.sum(axis=1)) - adjacency)


def heat(client: Client, size: Size) -> Iterator[Race]:
    """Yield heat on a square grid at time 10 for four signals, to an error of 1e-8."""
    L, lmax = grid(size), 8.0  # twice the greatest degree
    x = np.random.default_rng(0).standard_normal((L.shape[0], 4))
    coefficients = chebyshev_coefficients(Heat(10.0), lmax, tol=1e-9)
    C = coded.encode(L, client=client)
    exact = spla.expm_multiply(-10.0 * L, x)
    yield Race(
        "heat filter",
        f"grid {size.grid} x {size.grid}, 4 signals",
        lambda: coded.graph.filter(L, x, Heat(10.0), tol=1e-9, lmax=lmax, client=client),
        {
            "SciPy": lambda: chebyshev_rounds(L, x, coefficients, lmax),
            "SciPy expm_multiply": lambda: spla.expm_multiply(-10.0 * L, x),
        },
        lambda y: float(np.linalg.norm(y - exact) / np.linalg.norm(exact)),
        1e-8,
        lambda: submitted(client, chebyshev_rounds, C, x, coefficients, lmax),
    )


def solved(operator: Any, b: np.ndarray) -> np.ndarray:
    """Solve by conjugate gradients."""
    found: np.ndarray = spla.cg(operator, b, rtol=1e-8)[0]
    return found


def gradients(client: Client, size: Size) -> Iterator[Race]:
    """Yield SciPy's conjugate gradients, of a grid's Laplacian with 0.01 on the diagonal."""
    L = sp.csr_array(grid(size) + 0.01 * sp.eye_array(size.grid**2))
    b = np.random.default_rng(0).standard_normal(L.shape[0])
    C = coded.encode(L, client=client)
    yield Race(
        "conjugate gradients",
        f"grid {size.grid} x {size.grid}",
        lambda: submitted(client, solved, coded.encode(L, client=client), b),
        {"SciPy": partial(solved, L, b)},
        lambda y: float(np.linalg.norm(L @ y - b) / np.linalg.norm(b)),
        1e-7,
        lambda: submitted(client, solved, C, b),
    )


def logistic(client: Client, size: Size) -> Iterator[Race]:
    """Yield our estimator and scikit-learn's, both at their default tolerance."""
    file = data_file("clf_a9a.libsvm.gz")
    if file is None or not installed("sklearn"):
        return
    from sklearn.datasets import load_svmlight_file
    from sklearn.linear_model import LogisticRegression as Theirs

    from dask_coded.linear_model import LogisticRegression as Ours

    X, labels = load_svmlight_file(str(file))
    X, y = sp.csr_array(X), (labels > 0).astype(float)

    def objective(model: Any) -> float:
        w = model.coef_[0]
        return logistic_loss(X @ w + model.intercept_[0], y) + float(w @ w) / 2

    C = coded.encode(X, transpose=True, client=client)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = objective(Theirs(tol=1e-8, max_iter=5000).fit(X, y))
    yield Race(
        "LogisticRegression",
        "a9a",
        lambda: Ours(max_iter=1000).fit(X, y, client=client),
        {
            "scikit-learn": lambda: Theirs(max_iter=1000).fit(X, y),
            "dask-coded, this process": lambda: _alone(Ours(max_iter=1000), X, y),
        },
        lambda model: objective(model) / best - 1,
        1e-3,
        lambda: Ours(max_iter=1000).fit(C, y),
    )


def _alone(model: Any, X: Any, y: Any) -> Any:
    """Fit in this process, as is the default for data of this size."""
    return model.fit(X, y)


def run(report: Report, race: Race, repeats: int) -> None:
    """Time all methods in turn, and check what they return."""
    ways = {"ours": race.ours, "encoded": race.encoded, **race.peers}
    timings = side_by_side(ways, repeats, warmup=min(1, repeats - 1))
    errors = {name: race.error(result) for name, result in timings.results.items()}
    for name, error in errors.items():
        if not error <= race.limit:
            raise RuntimeError(
                f"{race.algorithm} on {race.data}: every method must reach an error of "
                f"{race.limit:g}, but {name} ended at {error:.3g}."
            )
    others = [name for name in race.peers if not name.startswith("dask-coded")]
    best = min(others, key=lambda name: timings.summary(name).value)
    for name in ways:
        keys: dict[str, Any] = {"algorithm": race.algorithm, "data": race.data, "way": name}
        case = f"{race.algorithm}, {race.data}: {name}"
        seconds = timings.summary(name)
        report.add(case, "seconds", seconds, "s", error=errors[name], **keys)
        if name not in others:
            ratio = timings.ratio(name, over=best)
            goal = 1.5 if name == "ours" else None
            report.add(case, "time_over_best", ratio, goal=goal, best=best, **keys)


ALGORITHMS: dict[str, Callable[[Client, Size], Iterator[Race]]] = {
    **{race.__name__: of_graphs(race) for race in (pagerank, hits, katz)},
    **{races.__name__: races for races in (heat, gradients, logistic)},
}
ROUNDS = {f.__name__: f for f in (loop, empty, simulated)}


@click.command()
@options
@click.option("--only", multiple=True, type=click.Choice([*ROUNDS, *ALGORITHMS]), help="Parts.")
@click.option("--repeats", default=20, show_default=True, help="Turns of each part.")
def main(
    json_file: Path | None,
    png_file: Path | None,
    smoke: bool,
    only: tuple[str, ...],
    repeats: int,
) -> None:
    """Time rounds of milliseconds, and algorithms of them, beside one process."""
    size = smoke_size() if smoke else Size(repeats)
    report = Report("small")
    for name in only or ROUNDS:
        if name in ROUNDS:
            ROUNDS[name](report, size)
    if chosen := [name for name in only or ALGORITHMS if name in ALGORITHMS]:
        with local_workers(2, alone=True) as (client, _addresses):
            for name in chosen:
                for race in ALGORITHMS[name](client, size):
                    run(report, race, size.repeats)
    report.finish(json_file)


if __name__ == "__main__":
    main()
