"""Whole algorithms on worker processes whose speeds follow machines of a trace.

The figure is the time of an algorithm from its first round to its last, by the clock. All
contenders start at the same moment of the trace, and run in turns. Each operand has several
columns: labels to learn, nodes to start from, or signals. So a round takes long enough for speeds
to matter, although all workers share the cores of one machine.

Over-decomposition is plain Dask with four tasks a worker: it fetches the blocks that it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import click
import dask
import numpy as np
import scipy.sparse
from scipy.special import expit

import dask_coded as coded
from benchmarks.cluster import Lab
from benchmarks.evidence.s2c2.cases import CONTENDERS, Contender
from benchmarks.evidence.s2c2.overdecomposition import PARTS
from benchmarks.graphs import random_matrix
from benchmarks.links import web_graph
from benchmarks.report import Timings, side_by_side
from dask_coded.codes import Repetition

#: Contenders whose times differ by less than these shares run more often. Two runs of the same
#: contender differ by 4 %, and some by 10 %, so three runs do not show which one is faster, and the
#: medians of nine still differ by 3 %.
CLOSE, LEVEL = 0.1, 0.03
#: How sparse matrices are stored by default, because parity of sparse blocks has more non-zeros.
COPIES = Contender("two copies, continuous", lambda n, k: Repetition(n, 2), "continuous")


@dataclass(frozen=True)
class Size:
    """How large the data are, and how the workers run.

    Parameters
    ----------
    rows, columns : int
        Of the matrix of samples.
    samples, features : int
        The same, for Newton's method.
    square : int
        Nodes of the dense graph.
    nodes : int
        Of the sparse graphs.
    labels, signals, many : int
        Columns of the operands; ``many`` of those of the web graph, which is smaller.
    rounds : int
        Rounds of each algorithm.
    cores : float
        Cores that the workers share evenly if all have speed 1.
    seconds : float
        How long a row of the trace holds.
    repeats : int
        Runs of each contender.
    more : int
        Further runs of contenders whose time is close to that of ``continuous``, and twice as many
        of those that are level with it.
    """

    rows: int = 60_000
    columns: int = 2_000
    samples: int = 20_000
    features: int = 900
    square: int = 13_000
    nodes: int = 1_000_000
    labels: int = 40
    signals: int = 4
    many: int = 8
    rounds: int = 20
    cores: float = 1.5
    seconds: float = 1.0
    repeats: int = 3
    more: int = 6


SMOKE = Size(60, 10, 60, 9, 40, 200, 2, 2, 2, rounds=4, seconds=0.2, repeats=1, more=1)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that needs only products with a matrix.

    Parameters
    ----------
    name : str
    matrix : callable() -> ndarray or sparse array
    run : callable(operator) -> ndarray
        For Newton's method callable(operator, hessian), where ``hessian.product(d)`` is
        ``A.T @ diag(d) @ A``.
    transpose : bool
        Whether it also needs products with the transposed matrix.
    hessian : bool
        Whether it needs Hessians. Their codes need 9 of 12 workers.
    sparse : bool
        Whether the matrix is sparse.
    rounds : int
        How many products it needs, each with the matrix or its transpose, or Hessians.
    """

    name: str
    matrix: Callable[[], Any]
    run: Callable[..., np.ndarray]
    rounds: int
    transpose: bool = False
    hessian: bool = False
    sparse: bool = False

    @property
    def contenders(self) -> dict[str, Contender]:
        """What can run it, by name."""
        found = dict(CONTENDERS)
        if self.hessian:
            del found["replication"]  # of a product of two factors there are no copies
        if self.sparse:
            found[COPIES.name] = COPIES
        return found


def descend(operator: Any, labels: np.ndarray, slope: Any, step: float, rounds: int) -> np.ndarray:
    """Run gradient descent on a loss of linear predictions; an iteration is two rounds."""
    w = np.zeros((operator.shape[1], labels.shape[1]))
    for _ in range(rounds // 2):
        w -= step * (operator.T @ slope(operator @ w, labels))
    return w


def logistic_slope(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Derivative of the logistic loss, for labels -1 and 1."""
    return -labels * expit(-labels * z)


def hinge_slope(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Derivative of the hinge loss, for labels -1 and 1."""
    return -labels * (labels * z < 1)


def newton(operator: Any, hessian: Any, labels: np.ndarray, steps: int) -> np.ndarray:
    """Run Newton's method for logistic regression; a step is two products and a Hessian."""
    ridge = 1.0
    w = np.zeros(operator.shape[1])
    for _ in range(steps):
        wrong = expit(-labels * (operator @ w))
        gradient = operator.T @ (-labels * wrong) + ridge * w
        curvature = hessian.product(wrong * (1 - wrong)) + ridge * np.eye(len(w))
        w = w - np.linalg.solve(curvature, gradient)
    return w


def rank(operator: Any, start: np.ndarray, damping: float, rounds: int) -> np.ndarray:
    """Run personalised PageRank, for several sets of nodes to start from at once."""
    scores = start
    for _ in range(rounds):
        scores = damping * (operator @ scores) + (1 - damping) * start
    return scores


def hops(operator: Any, signals: np.ndarray, rounds: int) -> np.ndarray:
    """Add up signals over all nodes up to some hops away, weighted by 1 / 2**hops."""
    total = signals.copy()
    for hop in range(1, rounds + 1):
        signals = operator @ signals
        total += signals / 2**hop
    return total


def logistic_regression(size: Size) -> Algorithm:
    return _classifier("logistic regression", logistic_slope, size)


def support_vector_machine(size: Size) -> Algorithm:
    return _classifier("support vector machine", hinge_slope, size)


def newtons_method(size: Size) -> Algorithm:
    rng = np.random.default_rng(0)
    labels = np.sign(rng.standard_normal(size.samples))
    run = partial(newton, labels=labels, steps=size.rounds // 2)
    matrix = partial(_normal, size.samples, size.features)
    rounds = 3 * (size.rounds // 2)
    return Algorithm("Newton's method", matrix, run, rounds, transpose=True, hessian=True)


def _classifier(name: str, slope: Any, size: Size) -> Algorithm:
    labels = np.sign(np.random.default_rng(0).standard_normal((size.rows, size.labels)))
    step = 1 / (np.sqrt(size.rows) + np.sqrt(size.columns)) ** 2
    run = partial(descend, labels=labels, slope=slope, step=step, rounds=size.rounds)
    matrix = partial(_normal, size.rows, size.columns)
    return Algorithm(name, matrix, run, size.rounds, transpose=True)


def dense_pagerank(size: Size) -> Algorithm:
    start = np.random.default_rng(0).random((size.square, size.labels))
    run = partial(rank, start=start, damping=0.85, rounds=size.rounds)
    return Algorithm("PageRank, dense", partial(_links, size.square), run, size.rounds)


def sparse_pagerank(size: Size) -> Algorithm:
    start = np.random.default_rng(0).random((size.nodes, size.signals))
    run = partial(rank, start=start, damping=0.85, rounds=size.rounds)
    matrix = partial(random_matrix, size.nodes)
    return Algorithm("PageRank, sparse", matrix, run, size.rounds, sparse=True)


def graph_filter(size: Size) -> Algorithm:
    signals = np.random.default_rng(0).random((size.nodes, size.signals))
    run = partial(hops, signals=signals, rounds=size.rounds)
    matrix = partial(_symmetric, size.nodes)
    return Algorithm("graph filter, sparse", matrix, run, size.rounds, sparse=True)


def dense_graph_filter(size: Size) -> Algorithm:
    """Filter signals of a dense graph, over half as many hops: it takes 20 minutes then."""
    hops_away = size.rounds // 2
    signals = np.random.default_rng(0).random((size.square, size.labels))
    run = partial(hops, signals=signals, rounds=hops_away)
    matrix = partial(_mutual, size.square)
    return Algorithm("graph filter, dense", matrix, run, hops_away)


def web_graph_filter(size: Size) -> Algorithm:
    """Filter signals on cnr-2000; a smoke run has its first nodes only."""
    graph = web_graph()
    if graph is None:
        raise click.UsageError("The web graph needs DASK_CODED_DATA, the folder that holds it.")
    graph = graph[: size.nodes, : size.nodes]
    signals = np.random.default_rng(0).random((graph.shape[0], size.many))
    run = partial(hops, signals=signals, rounds=size.rounds)
    matrix = partial(_normalised, graph)
    return Algorithm("graph filter, cnr-2000", matrix, run, size.rounds, sparse=True)


#: The algorithms of the paper.
ALGORITHMS = {
    make.__name__.replace("_", "-"): make
    for make in (
        logistic_regression,
        support_vector_machine,
        newtons_method,
        dense_pagerank,
        sparse_pagerank,
        graph_filter,
        dense_graph_filter,
        web_graph_filter,
    )
}


def _normal(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, columns))


def _links(nodes: int) -> np.ndarray:
    weights = np.random.default_rng(1).random((nodes, nodes))
    weights /= weights.sum(axis=0)
    return weights


def _mutual(nodes: int) -> np.ndarray:
    weights = np.random.default_rng(1).random((nodes, nodes))
    weights += weights.T
    return weights / weights[0].sum()


def _normalised(graph: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Return ``D^-1/2 A D^-1/2`` of the undirected graph."""
    both = scipy.sparse.csr_array(((graph + graph.T) > 0).astype(float))
    roots = scipy.sparse.dia_array(
        (1 / np.sqrt(np.maximum(both.sum(axis=1), 1))[None], [0]), shape=both.shape
    )
    return scipy.sparse.csr_array(roots @ both @ roots)


def _symmetric(nodes: int) -> scipy.sparse.csr_array:
    half = random_matrix(nodes, seed=1) / 2
    return scipy.sparse.csr_array(half + half.T)


class OverDecomposed:
    """Row blocks on the workers, several on each, as an operator; the client starts each round.

    Parameters
    ----------
    lab : Lab
    matrix : ndarray or sparse array
    """

    def __init__(self, lab: Lab, matrix: Any) -> None:
        self._lab = lab
        self.shape = matrix.shape
        ends = np.linspace(0, matrix.shape[0], PARTS * len(lab.workers) + 1).astype(int)
        self._cuts = list(pairwise(ends.tolist()))
        self._blocks = [
            lab.client.scatter(matrix[a:b], workers=[lab.workers[i // PARTS]], hash=False)
            for i, (a, b) in enumerate(self._cuts)
        ]

    @property
    def T(self) -> _Transposed:
        """The operator of the transposed matrix."""
        return _Transposed(self)

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate(self.each(_product, x))

    def product(self, d: np.ndarray) -> np.ndarray:
        """Return ``A.T @ diag(d) @ A``."""
        total: np.ndarray = sum(self.each(_hessian, d, together=True))  # type: ignore[assignment]
        return total

    def each(
        self, function: Callable[..., np.ndarray], x: np.ndarray, together: bool = False
    ) -> list[np.ndarray]:
        """Apply a function to each block, its rows, and the operand.

        Parameters
        ----------
        function : callable(block, start, stop, operand) -> ndarray
        x : ndarray
            The operand.
        together : bool
            Whether to add up the results of each worker's blocks before they are fetched.
        """
        client, workers = self._lab.client, self._lab.workers
        operand = client.scatter(x, workers=workers, broadcast=True, hash=False)
        parts = [
            client.submit(function, block, a, b, operand, workers=workers, pure=False)
            for block, (a, b) in zip(self._blocks, self._cuts, strict=True)
        ]
        if together:
            groups = [parts[i : i + PARTS] for i in range(0, len(parts), PARTS)]
            parts = [client.submit(sum, group, workers=workers, pure=False) for group in groups]
        found: list[np.ndarray] = client.gather(parts)
        return found


class _Transposed:
    def __init__(self, blocks: OverDecomposed) -> None:
        self._blocks = blocks

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        total: np.ndarray = sum(self._blocks.each(_adjoint, x))  # type: ignore[assignment]
        return total


def _product(block: Any, a: int, b: int, x: np.ndarray) -> np.ndarray:
    rows: np.ndarray = block @ x
    return rows


def _adjoint(block: Any, a: int, b: int, x: np.ndarray) -> np.ndarray:
    part: np.ndarray = block.T @ x[a:b]
    return part


def _hessian(block: Any, a: int, b: int, d: np.ndarray) -> np.ndarray:
    part: np.ndarray = (block.T * d[a:b]) @ block
    return part


class Hessian:
    """Hessians of a local matrix."""

    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix = matrix

    def product(self, d: np.ndarray) -> np.ndarray:
        """Return ``A.T @ diag(d) @ A``."""
        return _hessian(self._matrix, 0, len(d), d)


def hessian_code(name: str, n: int) -> coded.Polynomial:
    """The code of a contender's Hessians: three by three blocks, or as many as there are workers.

    Raises
    ------
    ValueError
        If there are fewer than 9 workers and the contender is coded.
    """
    if name != "uncoded":
        return coded.Polynomial(n, 3, 3)
    columns = next(i for i in range(int(n**0.5), 0, -1) if not n % i)
    return coded.Polynomial(n, n // columns, columns)


def compare(
    lab: Lab,
    algorithm: Algorithm,
    k: int,
    size: Size,
    speeds: np.ndarray,
    names: Collection[str] = (),
) -> Timings:
    """Time an algorithm under its contenders, in turns, and close ones more often.

    Parameters
    ----------
    lab : Lab
    algorithm : Algorithm
    k : int
        Pieces that suffice, of contenders with an MDS code.
    size : Size
    speeds : ndarray, shape (rows, workers)
    names : collection of str
        Contenders; all by default.

    Raises
    ------
    AssertionError
        If a contender's result is wrong.
    """
    matrix = algorithm.matrix()
    arrays: dict[str, Any] = {}
    ways: dict[str, Callable[[], np.ndarray]] = {}
    lab.set_speeds(np.inf)
    for name, contender in algorithm.contenders.items():
        if names and name not in names:
            continue
        if name == "over-decomposition":
            blocks = OverDecomposed(lab, matrix)
            ways[name] = partial(algorithm.run, *[blocks] * (1 + algorithm.hessian))
            continue
        code = contender.code(len(lab.workers), k)
        if repr(code) not in arrays:
            arrays[repr(code)] = coded.encode(
                matrix, code, lab.client, workers=lab.workers, transpose=algorithm.transpose
            )
        operators = [arrays[repr(code)]]
        if algorithm.hessian:
            pair_code = hessian_code(name, len(lab.workers))
            if repr(pair_code) not in arrays:
                arrays[repr(pair_code)] = coded.encode_pair(
                    matrix, matrix, pair_code, lab.client, workers=lab.workers
                )
            operators.append(arrays[repr(pair_code)])
        ways[name] = partial(_submit, lab, contender, algorithm.run, operators)

    def replayed(way: Callable[[], np.ndarray]) -> np.ndarray:
        with lab.following(speeds, size.seconds):
            return way()

    timed = {name: partial(replayed, way) for name, way in ways.items()}
    timings = side_by_side(timed, size.repeats)
    for within, more in ((CLOSE, size.more), (LEVEL, 2 * size.more)) if size.more else ():
        ratios = {name: timings.ratio(name, over="continuous").value for name in timed}
        close = {name: timed[name] for name, ratio in ratios.items() if abs(ratio - 1) < within}
        if len(close) > 1:  # others than `continuous` itself
            timings = timings.extended(side_by_side(close, more, warmup=0))
    expected = algorithm.run(matrix, *[Hessian(matrix)] * algorithm.hessian)
    for found in timings.results.values():
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-9)
    return timings


def _submit(
    lab: Lab, contender: Contender, run: Callable[..., np.ndarray], operators: list[Any]
) -> np.ndarray:
    with dask.config.set({"coded.policy": contender.policy}):
        future = coded.submit(run, *operators, client=lab.client, workers=[lab.free])
    found: np.ndarray = future.result()
    return found
