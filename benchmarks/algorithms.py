"""Compare whole algorithms with their peers: time to the same objective or residual.

Eight one-thread workers share two cores under CPU quotas; none, one or two of them are slowed five
times. Ours runs inside the cluster, over an array that was encoded beforehand. Its peers are

- the same algorithm as a plain loop over a dask array with two chunks per worker, in which the
  client computes each round;
- dask-glm and dask.array's own algorithms, which may use the unthrottled ninth worker too;
- SciPy, networkx and scikit-learn in this one process, unthrottled: the right choice as long as the
  data fit there. Workers have 0.18 of a core each, so this peer is as fast as five or six of them.

Every method must reach the same error, which is checked. A library with a different stopping rule
gets the least number of iterations that reaches this error, determined beforehand. Cases whose
peers are not installed, or whose data are missing (``DASK_CODED_DATA``), are skipped.
"""

from __future__ import annotations

import bisect
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import dask.array as da
import networkx as nx
import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from scipy.special import expit

import dask_coded as coded
from benchmarks.cluster import Lab
from benchmarks.datasets import data_file
from benchmarks.report import Report, options, side_by_side
from dask_coded.graph.pagerank import pagerank_rounds, transition_matrix
from dask_coded.linalg.power import power_rounds
from dask_coded.linalg.randomized import svd_rounds


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    rows: int = 32_000
    columns: int = 400
    square: int = 4_000
    grid: int = 300
    signals: int = 4
    iterations: int = 3
    share: float = 0.18
    code: tuple[int, int] = (8, 6)
    slowed: tuple[int, ...] = (0, 1, 2)
    repeats: int = 3
    warmup: int = 0
    graphs: tuple[str, ...] = ("graph_wiki-Vote.txt.gz", "graph_cnr-2000.npz")
    labelled: tuple[str, ...] = ("clf_a9a.libsvm.gz",)


SMOKE = Size(
    rows=120,
    columns=12,
    square=40,
    grid=5,
    signals=2,
    iterations=2,
    share=1.0,
    code=(4, 3),
    slowed=(1,),
    repeats=1,
    warmup=0,
    graphs=("graph_wiki-Vote.txt.gz",),
    labelled=(),
)


@dataclass(frozen=True)
class Contest:
    """Several methods for the same result.

    Parameters
    ----------
    algorithm, data : str
    ours : callable
    peers : dict
        Other methods, by name.
    error : callable
        Error of what a method returns.
    limit : float
        Error that every method must reach.
    """

    algorithm: str
    data: str
    ours: Callable[[], Any]
    peers: dict[str, Callable[[], Any]]
    error: Callable[[Any], float]
    limit: float


class PlainOperator:
    """A plain dask array as an operator; the client computes each product on the workers."""

    def __init__(self, lab: Lab, array: Any) -> None:
        self._lab = lab
        self._array = array
        self.shape = array.shape

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        # dask.array's own product does not support sparse chunks.
        shape: dict[str, Any] = {"drop_axis": 1}
        if x.ndim == 2:
            shape = {"chunks": (self._array.chunks[0], x.shape[1:])}
        meta = np.empty((0,) * x.ndim)
        y = self._array.map_blocks(_product, x=x, dtype=float, meta=meta, **shape)
        return compute(self._lab, y)[0]


def _product(block: Any, x: np.ndarray) -> np.ndarray:
    return block @ x


def compute(lab: Lab, *collections: Any) -> list[Any]:
    """Compute dask collections on all workers except the free one, and return their values."""
    return lab.client.gather(lab.client.compute(collections, workers=lab.workers))


def spread(lab: Lab, A: np.ndarray) -> Any:
    """Distribute a NumPy array as a dask array with two chunks per worker."""
    blocks = np.array_split(A, 2 * len(lab.workers))
    futures = lab.client.scatter(blocks, workers=lab.workers, hash=False)
    return da.concatenate(
        [
            da.from_delayed(future, block.shape, block.dtype)
            for future, block in zip(futures, blocks, strict=True)
        ]
    ).persist(workers=lab.workers)


def encode(lab: Lab, size: Size, A: Any, transpose: bool = False) -> coded.CodedArray:
    """Encode over all workers except the free one."""
    code = None if sp.issparse(A) else coded.MDS(*size.code)
    return coded.encode(A, code, workers=lab.workers, transpose=transpose)


def submit(lab: Lab, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one of our algorithms with its coordinator on the free worker."""
    return coded.submit(function, *args, workers=[lab.free], **kwargs).result()


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def stem(file: Path) -> str:
    """Return the name of a shared file without its kind and format: ``a9a``."""
    return file.name.split("_", 1)[1].split(".")[0]


# ------------------------------------------------------------------------------ logistic regression


def descend(operator: Any, y: np.ndarray, step: float, target: float, most: int) -> np.ndarray:
    """Minimise the logistic loss of labels 0 and 1 by gradient descent, down to the target."""
    w = np.zeros(operator.shape[1])
    for _ in range(most):
        z = operator @ w
        if logistic_loss(z, y) <= target:
            break
        w = w - step * (operator.T @ (expit(z) - y))
    return w


def descend_dask(lab: Lab, X: Any, y: Any, step: float, target: float, most: int) -> np.ndarray:
    """Do the same over a dask array, with one computation per iteration."""
    w = np.zeros(X.shape[1])
    for _ in range(most):
        z = X @ w
        loss = da.logaddexp(0, z).sum() - y @ z
        value, gradient = compute(lab, loss, X.T @ (1 / (1 + da.exp(-z)) - y))
        if value <= target:
            break
        w = w - step * gradient
    return w


def logistic_loss(z: np.ndarray, y: np.ndarray) -> float:
    return float(np.logaddexp(0, z).sum() - y @ z)


def logistic_data(size: Size) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield name, matrix and labels of each data set."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((size.rows, size.columns))
    truth = rng.standard_normal(size.columns) / math.sqrt(size.columns)
    y = rng.random(size.rows) < expit(X @ truth)
    yield f"normal {size.rows:,} x {size.columns}", X, y.astype(float)
    for name in size.labelled:
        file = data_file(name)
        if file and installed("sklearn"):
            from sklearn.datasets import load_svmlight_file

            sparse, labels = load_svmlight_file(str(file))
            y = labels > 0
            yield stem(file), sparse.toarray(), y.astype(float)


def logistic(lab: Lab, size: Size) -> Iterator[Contest]:
    """Yield gradient descent with a fixed step, to the loss after a few of its iterations."""
    for data, X, y in logistic_data(size):
        yield _logistic(lab, size, data, X, y)


def _logistic(lab: Lab, size: Size, data: str, X: np.ndarray, y: np.ndarray) -> Contest:
    def loss(w: np.ndarray) -> float:
        return logistic_loss(X @ w, y)

    step = float(4 / np.linalg.norm(X.T @ X, 2))
    # Leave room for rounding, which depends on the order of additions.
    target = loss(descend(X, y, step, -math.inf, size.iterations)) * (1 + 1e-9)
    goal = (step, target, 2 * size.iterations)
    C = encode(lab, size, X, transpose=True)
    plain = spread(lab, X)
    labels = da.from_array(y, chunks=plain.chunks[0])
    peers: dict[str, Callable[[], Any]] = {
        "dask.array loop": partial(descend_dask, lab, plain, labels, *goal),
        "NumPy, one process": partial(descend, X, y, *goal),
    }
    if installed("dask_glm"):
        from dask_glm.algorithms import gradient_descent

        count = least(lambda m: loss(gradient_descent(X, y, max_iter=m, normalize=False)), target)
        peers["dask-glm gradient_descent"] = partial(
            gradient_descent, plain, labels, max_iter=count, normalize=False
        )
    if installed("sklearn"):
        count = least(lambda m: loss(sklearn_fit(X, y, m)), target)
        peers["scikit-learn lbfgs, one process"] = partial(sklearn_fit, X, y, count)
    return Contest(
        "logistic regression, gradient descent",
        data,
        partial(submit, lab, descend, C, y, *goal),
        peers,
        lambda w: loss(w) / target - 1,
        1e-9,
    )


def least(loss: Callable[[int], float], target: float) -> int:
    """Return the least number of iterations that reaches a target."""
    counts = range(1, 128)
    return counts[bisect.bisect_left(counts, True, key=lambda m: loss(m) <= target)]


def sklearn_fit(X: np.ndarray, y: np.ndarray, count: int) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        # Stopping before convergence is intended.
        warnings.simplefilter("ignore")
        model = LogisticRegression(C=1e12, fit_intercept=False, tol=0.0, max_iter=count)
        return model.fit(X, y).coef_[0]


def estimators(lab: Lab, size: Size) -> Iterator[Contest]:
    """Yield our estimator and scikit-learn's, both at their default tolerance."""
    if not (installed("dask_coded.linear_model") and installed("sklearn")):
        return
    for data, X, y in logistic_data(size):
        yield _estimators(lab, size, data, X, y)


def _estimators(lab: Lab, size: Size, data: str, X: np.ndarray, y: np.ndarray) -> Contest:
    from sklearn.linear_model import LogisticRegression as Theirs

    from dask_coded.linear_model import LogisticRegression as Ours

    def objective(model: Any) -> float:
        w = model.coef_[0]
        return logistic_loss(X @ w + model.intercept_[0], y) + w @ w / 2

    C = encode(lab, size, X, transpose=True)
    best = objective(Theirs(tol=1e-8, max_iter=1000).fit(X, y))
    return Contest(
        "LogisticRegression",
        data,
        lambda: Ours(max_iter=1000).fit(C, y),
        {"scikit-learn, one process": lambda: Theirs(max_iter=1000).fit(X, y)},
        lambda model: objective(model) / best - 1,
        1e-3,
    )


# ------------------------------------------------------------------------------------------- graphs


def pagerank(lab: Lab, size: Size) -> Iterator[Contest]:
    """Yield PageRank to a change of 1e-3 per round."""
    for name in size.graphs:
        if file := data_file(name):
            yield _pagerank(lab, size, file)


def _pagerank(lab: Lab, size: Size, file: Path) -> Contest:
    graph = coded.graph.read_graph(file)
    M, dangling = transition_matrix(graph.adjacency)
    C = encode(lab, size, M)
    tol = 1e-3

    def scores(run: Callable[..., Any], operator: Any) -> np.ndarray:
        return run(operator, dangling, tol=tol).scores

    exact = pagerank_rounds(M, dangling, tol=1e-14).scores
    peers: dict[str, Callable[[], Any]] = {
        "dask.array loop": partial(scores, pagerank_rounds, PlainOperator(lab, C)),
        "SciPy, one process": partial(scores, pagerank_rounds, M),
    }
    if len(dangling) < 100_000:
        # A large graph would take networkx minutes to build.
        G = nx.from_scipy_sparse_array(graph.adjacency, create_using=nx.DiGraph)
        peers["networkx, one process"] = lambda: np.array(
            list(nx.pagerank(G, tol=tol / len(G)).values())
        )
    return Contest(
        "PageRank",
        stem(file),
        partial(scores, partial(submit, lab, pagerank_rounds), C),
        peers,
        lambda found: float(np.abs(found - exact).sum()),
        tol * 0.85 / (1 - 0.85),
    )


def heat(lab: Lab, size: Size) -> Iterator[Contest]:
    """Yield heat on a square grid at time 10, for several signals at once, to an error of 1e-8."""
    if not installed("dask_coded.graph.kernels"):
        return
    from dask_coded.graph.filters import chebyshev_rounds
    from dask_coded.graph.kernels import Heat, chebyshev_coefficients

    line = sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(size.grid, size.grid))
    adjacency = sp.csr_array(sp.kronsum(line, line))
    L = sp.csr_array(sp.diags_array(adjacency.sum(axis=1)) - adjacency)
    x = np.random.default_rng(0).standard_normal((L.shape[0], size.signals))
    lmax = 8.0  # twice the greatest degree
    coefficients = chebyshev_coefficients(Heat(10.0), lmax, tol=1e-9)
    C = encode(lab, size, L)
    exact = spla.expm_multiply(-10.0 * L, x)
    yield Contest(
        "heat filter",
        f"grid {size.grid} x {size.grid}, {size.signals} signals",
        lambda: submit(lab, chebyshev_rounds, C, x, coefficients, lmax),
        {
            "dask.array loop": lambda: chebyshev_rounds(
                PlainOperator(lab, C), x, coefficients, lmax
            ),
            "SciPy expm_multiply, one process": lambda: spla.expm_multiply(-10.0 * L, x),
        },
        lambda y: float(np.linalg.norm(y - exact) / np.linalg.norm(exact)),
        1e-8,
    )


# ----------------------------------------------------------------------------------- linear algebra


def power(lab: Lab, size: Size) -> Iterator[Contest]:
    """Yield the dominant eigenpair of a symmetric matrix, to a residual of 1e-3."""
    n = size.square
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((n, n))
    v = rng.standard_normal(n)
    # The spectrum of the first part ends at 2; the second adds one eigenvalue at 3 + 1/3.
    A = (noise + noise.T) / math.sqrt(2 * n) + 3 * np.outer(v, v) / (v @ v)
    C = encode(lab, size, A)
    plain = PlainOperator(lab, spread(lab, A))
    goal = {"tol": 1e-3, "seed": 0}

    def scipy() -> tuple[float, np.ndarray]:
        value, vector = spla.eigsh(A, k=1, tol=goal["tol"], rng=np.random.default_rng(0))
        return value[0], vector[:, 0]

    def iterate(run: Callable[..., Any], *args: Any) -> tuple[float, np.ndarray]:
        pair = run(*args, **goal)
        return pair.value, pair.vector

    yield Contest(
        "power iteration",
        f"symmetric {n:,} x {n:,}",
        lambda: iterate(submit, lab, power_rounds, C),
        {
            "dask.array loop": lambda: iterate(power_rounds, plain),
            "NumPy, one process": lambda: iterate(power_rounds, A),
            "SciPy eigsh, one process": scipy,
        },
        lambda pair: float(np.linalg.norm(A @ pair[1] - pair[0] * pair[1]) / abs(pair[0])),
        1.1e-3,
    )


def svd(lab: Lab, size: Size) -> Iterator[Contest]:
    """Yield the ten largest singular values of a matrix whose columns decrease in norm."""
    k = min(10, size.columns // 2)
    A = np.random.default_rng(0).standard_normal((size.rows, size.columns))
    A /= np.arange(1, size.columns + 1)
    exact = np.linalg.svd(np.linalg.qr(A, mode="r"), compute_uv=False)[:k]
    C = encode(lab, size, A, transpose=True)
    plain = spread(lab, A)

    def compressed() -> np.ndarray:
        s = da.linalg.svd_compressed(plain, k, n_power_iter=2, n_oversamples=10, seed=0)
        return compute(lab, *s)[1]

    peers: dict[str, Callable[[], Any]] = {
        "dask.array svd_compressed": compressed,
        "NumPy, one process": lambda: svd_rounds(A, k, seed=0)[1],
        "SciPy svds, one process": lambda: spla.svds(A, k, rng=np.random.default_rng(0))[1],
    }
    if installed("sklearn"):
        from sklearn.utils.extmath import randomized_svd

        peers["scikit-learn, one process"] = lambda: randomized_svd(
            A, k, n_iter=2, power_iteration_normalizer="QR", random_state=0
        )[1]
    yield Contest(
        "randomized SVD",
        f"decaying {size.rows:,} x {size.columns}",
        lambda: submit(lab, svd_rounds, C, k, seed=0)[1],
        peers,
        lambda s: float(np.abs(np.sort(s)[::-1] / exact - 1).max()),
        1e-3,
    )


CONTESTS = {f.__name__: f for f in (logistic, estimators, pagerank, heat, power, svd)}


@click.command()
@options
@click.option("--only", multiple=True, type=click.Choice(list(CONTESTS)), help="Run only this one.")
def main(json_file: Path | None, png_file: Path | None, smoke: bool, only: tuple[str, ...]) -> None:
    """Time whole algorithms over their peers, with 0, 1 and 2 of 8 workers slowed 5x."""
    size = SMOKE if smoke else Size()
    report = Report("algorithms")
    with Lab(size.code[0], size.share) as lab:
        report.machine["throttle"] = lab.kind
        for name in only or CONTESTS:
            lab.set_speeds(math.inf)
            for contest in CONTESTS[name](lab, size):
                run(lab, contest, size, report)
                # The next contest encodes at full speed.
                lab.set_speeds(math.inf)
    report.finish(json_file)


def run(lab: Lab, contest: Contest, size: Size, report: Report) -> None:
    """Time all methods in turn, with some workers slowed."""
    ways = {"ours": contest.ours, **contest.peers}
    for slowed in size.slowed:
        lab.set_speeds([1 / 5] * slowed + [1] * (len(lab.workers) - slowed))
        timings = side_by_side(ways, size.repeats, warmup=0 if slowed else size.warmup)
        errors = {name: contest.error(result) for name, result in timings.results.items()}
        for name, error in errors.items():
            if not error <= contest.limit:
                raise RuntimeError(
                    f"{contest.algorithm} on {contest.data}: every method must reach an error of "
                    f"{contest.limit:g}, but {name} ended at {error:.3g}."
                )
        for peer in contest.peers:
            report.add(
                f"{contest.algorithm}, {contest.data}, {slowed} slowed 5x: {peer}",
                "time_over_peer",
                timings.ratio("ours", over=peer, spread_of="range"),
                algorithm=contest.algorithm,
                data=contest.data,
                peer=peer,
                slowed=slowed,
                seconds=timings.summary("ours").value,
                peer_seconds=timings.summary(peer).value,
                error=errors["ours"],
                peer_error=errors[peer],
            )


if __name__ == "__main__":
    main()
