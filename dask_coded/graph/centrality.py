r"""Katz centrality and eigenvector centrality, which solve linear equations.

``A`` holds the weights of the edges (row = source). A node's centrality is computed from those of
the nodes that point to it:

.. math:: x = \alpha A^T x + \beta \quad \text{(Katz)}, \qquad \lambda x = A^T x
          \quad \text{(eigenvector, for the largest } \lambda \text{)}

Both are power iterations with one product with :math:`A^T` in each step. The iteration for the
eigenvector uses :math:`A^T + I`, which has the same eigenvectors and does not alternate on
bipartite graphs.

References
----------
.. [1] L. Katz, "A new status index derived from sociometric analysis", Psychometrika 18(1), 1953.
.. [2] M. Newman, "Networks: an introduction", Oxford University Press, 2010, sections 7.2 and 7.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from dask_coded.arguments import check_stopping
from dask_coded.graph.conversion import as_graph
from dask_coded.graph.iteration import Vector, iterate, product
from dask_coded.graph.values import PerNode, by_node, distribution, named, vector
from dask_coded.loop import QUIET, Loop, Progress
from dask_coded.submission import as_coded, run


def katz_rounds(
    operator: Any,
    beta: npt.ArrayLike,
    *,
    alpha: float = 0.1,
    start: npt.ArrayLike | None = None,
    tol: float = 1e-10,
    max_iter: int = 1000,
    loop: Loop = QUIET,
) -> Vector:
    """Compute Katz centrality over an operator, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x``
        The transposed adjacency matrix ``A.T`` of shape (n, n).
    beta : array_like, shape (n,)
        The score that each node has without any edges.
    alpha : float
        Attenuation factor: an edge of weight 1 adds ``alpha`` times its source's score to the score
        of its target.
    start : array_like, shape (n,), optional
        Initial vector. Default: zero.
    tol : float
        Stop when the absolute changes of the centralities in a round sum to less than ``tol`` times
        the sum of ``abs(beta)``. With 0, run exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds.
    loop : Loop
        Receives a report of each round.

    Returns
    -------
    ndarray, shape (n,)
        The centralities, not normalised.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds.
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> path = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    >>> katz_rounds(path, [1, 1, 1], alpha=0.5).round(4)
    array([3., 4., 3.])
    """
    check_stopping(tol, max_iter)
    own = np.asarray(beta, dtype=np.float64)
    # The equation is linear in beta: scaling beta to sum(abs(beta)) == 1 makes tol relative.
    scale = np.abs(own).sum() or 1.0
    own = own / scale

    def step(x: Vector) -> Vector:
        found = product(operator, x)
        found *= alpha
        found += own
        return found

    found = iterate(
        "Katz centrality",
        step,
        np.zeros(len(own)) if start is None else np.asarray(start, dtype=np.float64) / scale,
        operator=operator,
        tol=tol,
        max_iter=max_iter,
        loop=loop,
        advice=f"raise max_iter or tol, or lower alpha, which is {alpha:g} and must be less than 1 "
        "over the largest eigenvalue of the adjacency matrix",
    )
    return np.asarray(scale * found.scores)


def eigenvector_rounds(
    operator: Any,
    *,
    start: npt.ArrayLike | None = None,
    tol: float = 1e-10,
    max_iter: int = 1000,
    loop: Loop = QUIET,
) -> Vector:
    """Compute eigenvector centrality over an operator, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x``
        The transposed adjacency matrix ``A.T`` of shape (n, n).
    start : array_like, shape (n,), optional
        Initial vector, not negative. Default: uniform.
    tol : float
        Stop when the absolute changes of the centralities in a round sum to less than ``tol`` times
        the sum of the centralities. With 0, run exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds.
    loop : Loop
        Receives a report of each round.

    Returns
    -------
    ndarray, shape (n,)
        The centralities, of Euclidean norm 1.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds.
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> eigenvector_rounds(np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])).round(4)
    array([0.5   , 0.7071, 0.5   ])
    """
    check_stopping(tol, max_iter)

    def step(x: Vector) -> Vector:
        found = product(operator, x)
        found += x
        found /= found.sum()
        return found

    scores = iterate(
        "Eigenvector centrality",
        step,
        distribution("start", start, operator.shape[0]),
        operator=operator,
        tol=tol,
        max_iter=max_iter,
        loop=loop,
    ).scores
    return np.asarray(scores / np.linalg.norm(scores))


def katz_centrality(
    graph: Any,
    alpha: float = 0.1,
    beta: float | PerNode = 1.0,
    tol: float = 1e-10,
    max_iter: int = 1000,
    *,
    start: PerNode | None = None,
    normalized: bool = True,
    weight: str | None = None,
    code: Any = None,
    client: Any = None,
    callback: Callable[[Progress], object] | None = None,
) -> dict[Any, float] | Vector:
    """Compute the Katz centrality of a graph's nodes, on a Dask cluster in coded rounds.

    Parameters
    ----------
    graph : networkx graph, SciPy sparse adjacency, edge list, or Graph
        As for :func:`pagerank`.
    alpha : float
        Attenuation factor: an edge of weight 1 adds ``alpha`` times its source's score to the score
        of its target. It must be less than 1 over the largest eigenvalue of the adjacency matrix.
    beta : float, mapping node -> number, or array_like of shape (n,)
        The score that each node has without any edges; a mapping must have all nodes.
    tol : float
        Stop when the absolute changes of the centralities in a round sum to less than ``tol`` times
        the sum of ``abs(beta)``. With 0, run exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds.
    start : mapping node -> number, or array_like of shape (n,), optional
        Initial vector. Default: zero.
    normalized : bool
        Scale the result to Euclidean norm 1.
    weight : str or None
        The edge attribute of a networkx graph that holds the weight. Default, as in networkx: no
        weights.
    code, client, callback
        As for :func:`pagerank`.

    Returns
    -------
    dict node -> float, or ndarray of shape (n,)
        An array in row order if ``graph`` is a SciPy sparse matrix, otherwise a dictionary.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds. If ``alpha`` is
        too large, the iteration never converges.
    ValueError
        If an argument is out of range, or there is no client.

    See Also
    --------
    networkx.katz_centrality : the same in one process.

    Examples
    --------
    >>> from dask.distributed import Client
    >>> client = Client(
    ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
    ... )
    >>> scores = katz_centrality([("ada", "cy"), ("bob", "cy")], alpha=0.5, normalized=False)
    >>> {name: round(score, 4) for name, score in scores.items()}
    {'ada': 1.0, 'bob': 1.0, 'cy': 2.0}
    >>> client.shutdown()
    """
    check_stopping(tol, max_iter)
    if not np.isfinite(alpha):
        raise ValueError(f"Argument 'alpha' must be finite, it is {alpha}.")
    if isinstance(graph, nx.Graph) and len(graph) == 0:
        return {}
    found = as_graph(graph, weight=weight)
    own = np.full(len(found.nodes), beta) if np.isscalar(beta) else by_node("beta", beta)
    if isinstance(own, Mapping) and (missing := set(found.nodes.tolist()) - set(own)):
        raise ValueError(f"Argument 'beta' must have all nodes, {missing.pop()!r} is missing.")
    coded = as_coded(_transposed(found.adjacency), code, client)
    scores = run(
        katz_rounds,
        coded,
        vector("beta", own, found),
        alpha=alpha,
        start=None if start is None else vector("start", start, found),
        tol=tol,
        max_iter=max_iter,
        client=client,
        callback=callback,
    )
    if normalized and (largest := np.abs(scores).max()):
        scores = scores / largest  # whose squares may overflow
        scores /= np.linalg.norm(scores)
    return named(scores, found, graph)


def eigenvector_centrality(
    graph: Any,
    tol: float = 1e-10,
    max_iter: int = 1000,
    *,
    start: PerNode | None = None,
    weight: str | None = None,
    code: Any = None,
    client: Any = None,
    callback: Callable[[Progress], object] | None = None,
) -> dict[Any, float] | Vector:
    """Compute the eigenvector centrality of a graph's nodes, on a Dask cluster in coded rounds.

    Parameters
    ----------
    graph : networkx graph, SciPy sparse adjacency, edge list, or Graph
        As for :func:`pagerank`.
    tol : float
        Stop when the absolute changes of the centralities in a round sum to less than ``tol`` times
        the sum of the centralities. With 0, run exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds.
    start : mapping node -> weight, or array_like of shape (n,), optional
        Initial vector, not negative. Default: uniform.
    weight : str or None
        The edge attribute of a networkx graph that holds the weight. Default, as in networkx: no
        weights.
    code, client, callback
        As for :func:`pagerank`.

    Returns
    -------
    dict node -> float, or ndarray of shape (n,)
        An array in row order if ``graph`` is a SciPy sparse matrix, otherwise a dictionary.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds. In a graph without
        cycles all eigenvalues are zero, and the iteration takes about ``1 / tol`` rounds.
    ValueError
        If an argument is out of range, or there is no client.

    See Also
    --------
    networkx.eigenvector_centrality : the same in one process.

    Notes
    -----
    The eigenvector is unique only if every node can be reached from every other one; otherwise the
    result depends on ``start``.

    Examples
    --------
    >>> from dask.distributed import Client
    >>> client = Client(
    ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
    ... )
    >>> import networkx as nx
    >>> scores = eigenvector_centrality(nx.path_graph(["ada", "bob", "cy"]))
    >>> {name: round(score, 4) for name, score in scores.items()}
    {'ada': 0.5, 'bob': 0.7071, 'cy': 0.5}
    >>> client.shutdown()
    """
    check_stopping(tol, max_iter)
    if isinstance(graph, nx.Graph) and len(graph) == 0:
        return {}
    found = as_graph(graph, weight=weight)
    begin = distribution(
        "start", None if start is None else vector("start", start, found), len(found.nodes)
    )
    # The eigenvector does not depend on the unit of the weights, but how fast it is found does:
    # the iteration adds the vector itself to the product.
    scaled, _ = found.scaled()
    coded = as_coded(_transposed(scaled.adjacency), code, client)
    scores = run(
        eigenvector_rounds,
        coded,
        start=begin,
        tol=tol,
        max_iter=max_iter,
        client=client,
        callback=callback,
    )
    return named(scores, found, graph)


def _transposed(adjacency: Any) -> sp.csr_array:
    return sp.csr_array(adjacency.T).astype(np.float64)
