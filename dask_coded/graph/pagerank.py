r"""PageRank by power iteration, in one process and on a cluster.

``W`` holds the weights of the edges (row = source), and ``D`` is the diagonal of its row sums. A
random surfer follows an edge with probability ``d`` (damping) and otherwise jumps to a page drawn
from ``p`` (personalization). A dangling page has no edges to follow, so the surfer moves from it to
a page drawn from ``q`` instead, which is ``p`` by default:

.. math:: x' = d \, (M x + q \, \delta^T x) + (1 - d) \, p, \qquad M = (D^{-1} W)^T

``M`` (n x n, sparse) has a zero column for every dangling page, and :math:`\delta` is 1 for these.
Dangling mass and teleportation are terms of rank one, so nearly all the work is the product
``M @ x``, which the cluster computes in coded rounds. The rest is a few vector operations.

:func:`pagerank_rounds` runs the iteration over anything with ``@``. :func:`pagerank` encodes ``M``
on a Dask cluster and runs the iteration there as one task.

References
----------
.. [1] A. Langville, C. Meyer, "A survey of eigenvector methods for web information retrieval",
       SIAM Review 47(1), 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from dask_coded.arguments import check_fraction, check_stopping
from dask_coded.graph.conversion import as_graph
from dask_coded.graph.iteration import Ranks, Vector, iterate, product
from dask_coded.graph.values import PerNode, distribution, named, vector
from dask_coded.loop import QUIET, Loop, Progress
from dask_coded.submission import as_coded, run


def pagerank_rounds(
    operator: Any,
    dangling: npt.ArrayLike,
    *,
    damping: float = 0.85,
    personalization: npt.ArrayLike | None = None,
    from_dangling: npt.ArrayLike | None = None,
    start: npt.ArrayLike | None = None,
    tol: float = 1e-10,
    max_iter: int = 200,
    loop: Loop = QUIET,
) -> Ranks:
    """Compute PageRank over an operator, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x``
        The transition matrix ``M`` of shape (n, n), see :func:`transition_matrix`: a NumPy array, a
        SciPy sparse matrix, or a coded operator inside the cluster.
    dangling : array_like of bool, shape (n,)
        Which nodes have no outgoing edge.
    damping : float
        Probability of following an edge, between 0 and 1.
    personalization : array_like, shape (n,), optional
        Weights of the targets of jumps, not necessarily normalised. Default: uniform.
    from_dangling : array_like, shape (n,), optional
        Weights of the nodes that follow a dangling node, not necessarily normalised. Default:
        ``personalization``.
    start : array_like, shape (n,), optional
        Initial vector, not necessarily normalised. Default: ``1 / n``.
    tol : float
        Stop when the absolute changes of the scores in a round sum to less than this. With 0, run
        exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds.
    loop : Loop
        Receives a report of each round.

    Returns
    -------
    Ranks
        Scores, number of rounds and last change.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds.
    ValueError
        If an argument is out of range.

    Examples
    --------
    Two pages link to a third, which links nowhere:

    >>> import numpy as np
    >>> M = np.array([[0, 0, 0], [0, 0, 0], [1, 1, 0]])
    >>> pagerank_rounds(M, [False, False, True]).scores.round(4)
    array([0.2128, 0.2128, 0.5745])
    """
    _check_numbers(damping, tol, max_iter)
    lost = np.asarray(dangling, dtype=np.float64)
    n = len(lost)
    jump = distribution("personalization", personalization, n)
    landing = None if from_dangling is None else distribution("dangling", from_dangling, n)
    added = np.empty(n)  # memory for both terms, see `iterate`

    def step(x: Vector) -> Vector:
        found = product(operator, x)
        found *= damping
        jumping, landed = 1 - damping, damping * float(lost @ x)
        if landing is None:
            jumping += landed
        else:
            found += np.multiply(landing, landed, out=added)
        found += np.multiply(jump, jumping, out=added)
        return found

    return iterate(
        "PageRank",
        step,
        distribution("start", start, n),
        operator=operator,
        tol=tol,
        max_iter=max_iter,
        loop=loop,
    )


def transition_matrix(adjacency: Any) -> tuple[sp.csr_array, npt.NDArray[np.bool_]]:
    """Return the probabilities of following each edge, and the dangling nodes.

    Parameters
    ----------
    adjacency : scipy.sparse.csr_array, shape (n, n)
        Weights of the edges, row = source, not negative.

    Returns
    -------
    matrix : scipy.sparse.csr_array, shape (n, n)
        ``matrix[i, j]`` is the probability of going from ``j`` to ``i``; columns sum to 1 or, for
        dangling nodes, to 0.
    dangling : ndarray of bool, shape (n,)
        Which nodes have no outgoing edge of positive weight.

    Examples
    --------
    >>> from scipy.sparse import csr_array
    >>> matrix, dangling = transition_matrix(csr_array([[0, 3, 1], [0, 0, 2], [0, 0, 0]]))
    >>> matrix.toarray()
    array([[0.  , 0.  , 0.  ],
           [0.75, 0.  , 0.  ],
           [0.25, 1.  , 0.  ]])
    >>> dangling
    array([False, False,  True])
    """
    weights = adjacency.data.astype(np.float64)
    rows = np.repeat(np.arange(adjacency.shape[0]), np.diff(adjacency.indptr))
    out = np.bincount(rows, weights, minlength=adjacency.shape[0])
    dangling = out == 0
    # Dangling rows can have entries: explicit zeros, which stay zero.
    weights /= np.where(dangling, 1, out)[rows]
    scaled = sp.csr_array((weights, adjacency.indices, adjacency.indptr), shape=adjacency.shape)
    return sp.csr_array(scaled.T), dangling


def pagerank(
    graph: Any,
    damping: float = 0.85,
    personalization: PerNode | None = None,
    tol: float = 1e-10,
    max_iter: int = 200,
    *,
    dangling: PerNode | None = None,
    start: PerNode | None = None,
    weight: str | None = "weight",
    code: Any = None,
    client: Any = None,
    callback: Callable[[Progress], object] | None = None,
) -> dict[Any, float] | Vector:
    """Compute the PageRank of a graph's nodes, on a Dask cluster in coded rounds.

    Parameters
    ----------
    graph : networkx graph, SciPy sparse adjacency, edge list, or Graph
        See :func:`~dask_coded.graph.as_graph`. In a sparse adjacency matrix, the row is the
        source of an edge. Edges of undirected networkx graphs count in both directions.
    damping : float
        Probability of following an edge, between 0 and 1.
    personalization : mapping node -> weight, or array_like of shape (n,), optional
        Weights of the targets of jumps, normalised before use; nodes that a mapping leaves out get
        zero. Default: uniform.
    tol : float
        Stop when the absolute changes of the scores in a round sum to less than this. With 0, run
        exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds.
    dangling : mapping node -> weight, or array_like of shape (n,), optional
        Weights of the nodes that follow a node without outgoing edges, normalised before use.
        Default: ``personalization``.
    start : mapping node -> weight, or array_like of shape (n,), optional
        Initial vector, normalised before use. Default: ``1 / n``.
    weight : str or None
        The edge attribute of a networkx graph that holds the weight; None for no weights.
    code : Code or str, optional
        The code of the matrix, see :func:`dask_coded.encode`, which chooses one by default.
    client : distributed.Client, optional
        The cluster. Default: the current client.
    callback : callable, optional
        Called with a :class:`~dask_coded.Progress` after the last round, and at most ten times a
        second before it. It runs in the client's event loop, so it should return quickly.

    Returns
    -------
    dict node -> float, or ndarray of shape (n,)
        An array in row order if ``graph`` is a SciPy sparse matrix, otherwise a dictionary.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds.
    ValueError
        If an argument is out of range, or there is no client.

    See Also
    --------
    networkx.pagerank : the same in one process. It stops at a change of ``n * tol``, so its
        default ``tol=1e-6`` leaves errors that are visible in the fourth digit on large graphs.

    Notes
    -----
    The absolute errors of the scores sum to at most ``tol * damping / (1 - damping)``, 6e-10 by
    default. Codes that mix rows decode with rounding errors that differ from round to round, so a
    ``tol`` much below 1e-12 may not be reached with them.

    Examples
    --------
    >>> from dask.distributed import Client
    >>> client = Client(
    ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
    ... )
    >>> scores = pagerank([("ada", "cy"), ("bob", "cy")])
    >>> {name: round(score, 4) for name, score in scores.items()}
    {'ada': 0.2128, 'bob': 0.2128, 'cy': 0.5745}
    >>> client.shutdown()
    """
    _check_numbers(damping, tol, max_iter)
    if isinstance(graph, nx.Graph) and len(graph) == 0:
        return {}
    found = as_graph(graph, weight=weight)
    matrix, without_edges = transition_matrix(found.adjacency)
    given = {"personalization": personalization, "dangling": dangling, "start": start}
    vectors: dict[str, Any] = {
        name: distribution(name, vector(name, value, found), len(without_edges))
        for name, value in given.items()
        if value is not None
    }
    coded = as_coded(matrix, code, client)
    ranks = run(
        pagerank_rounds,
        coded,
        without_edges,
        damping=damping,
        personalization=vectors.get("personalization"),
        from_dangling=vectors.get("dangling"),
        start=vectors.get("start"),
        tol=tol,
        max_iter=max_iter,
        client=client,
        callback=callback,
    )
    return named(ranks.scores, found, graph)


def _check_numbers(damping: float, tol: float, max_iter: int) -> None:
    check_fraction("damping", damping)
    check_stopping(tol, max_iter)
