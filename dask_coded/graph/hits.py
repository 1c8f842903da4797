r"""HITS: hubs that point to good authorities, and authorities that good hubs point to.

``A`` holds the weights of the edges (row = source). The authority scores ``a`` and the hub scores
``h`` are the singular vectors of ``A`` for its largest singular value:

.. math:: a \propto A^T h, \qquad h \propto A a

The authorities are found by power iteration with :math:`A^T A`. Each step takes two products: on a
cluster, one coded round with ``A`` and one with its transpose. A step multiplies the error by
:math:`(\sigma_2 / \sigma_1)^2`.

References
----------
.. [1] J. Kleinberg, "Authoritative sources in a hyperlinked environment", Journal of the ACM 46(5),
       1999.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_stopping
from dask_coded.graph.conversion import as_graph
from dask_coded.graph.iteration import Vector, iterate, product
from dask_coded.graph.values import PerNode, distribution, named, vector
from dask_coded.loop import QUIET, Loop, Progress
from dask_coded.submission import as_coded, run


def hits_rounds(
    operator: Any,
    *,
    start: npt.ArrayLike | None = None,
    tol: float = 1e-10,
    max_iter: int = 200,
    loop: Loop = QUIET,
) -> tuple[Vector, Vector]:
    """Compute HITS scores over an operator, in this thread.

    Parameters
    ----------
    operator : anything with ``operator @ x`` and ``operator.T @ x``
        The adjacency matrix ``A`` of shape (n, n), row = source.
    start : array_like, shape (n,), optional
        Initial authorities, not necessarily normalised. Default: uniform.
    tol : float
        Stop when the absolute changes of the authorities, scaled to a sum of 1, add up to less than
        this in a round. With 0, run exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds, of two products each.
    loop : Loop
        Receives a report of each round.

    Returns
    -------
    hubs, authorities : ndarray, shape (n,)
        ``authorities`` has Euclidean norm 1, and ``hubs = A @ authorities``.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds.
    ValueError
        If an argument is out of range, or no edge points to a node with a positive score in
        ``start``.

    Examples
    --------
    >>> import numpy as np
    >>> hubs, authorities = hits_rounds(np.array([[0, 1, 1], [0, 0, 1], [0, 0, 0]]))
    >>> hubs.round(4), authorities.round(4)
    (array([1.3764, 0.8507, 0.    ]), array([0.    , 0.5257, 0.8507]))
    """
    check_stopping(tol, max_iter)

    def step(authorities: Vector) -> Vector:
        found = product(operator.T, operator @ authorities)
        total = found.sum()
        if not total > 0:
            raise ValueError(
                "HITS expects an edge of positive weight to a node with a positive 'start' score, "
                "there is none: pass a graph with edges, or another 'start'."
            )
        found /= total
        return found

    found = iterate(
        "HITS",
        step,
        distribution("start", start, operator.shape[0]),
        operator=operator,
        tol=tol,
        max_iter=max_iter,
        loop=loop,
    ).scores
    authorities = found / np.linalg.norm(found)
    return np.asarray(operator @ authorities), authorities


def hits(
    graph: Any,
    tol: float = 1e-10,
    max_iter: int = 200,
    *,
    start: PerNode | None = None,
    normalized: bool = True,
    weight: str | None = "weight",
    code: Any = None,
    client: Any = None,
    callback: Callable[[Progress], object] | None = None,
) -> tuple[dict[Any, float] | Vector, dict[Any, float] | Vector]:
    """Compute the hubs and authorities of a graph (HITS), on a Dask cluster in coded rounds.

    Parameters
    ----------
    graph : networkx graph, SciPy sparse adjacency, edge list, or Graph
        As for :func:`pagerank`.
    tol : float
        Stop when the absolute changes of the authorities, scaled to a sum of 1, add up to less than
        this in a round. With 0, run exactly ``max_iter`` rounds.
    max_iter : int
        Maximum number of rounds, of two products each.
    start : mapping node -> weight, or array_like of shape (n,), optional
        Initial authorities, normalised before use. Default: uniform.
    normalized : bool
        Scale hubs and authorities to a sum of 1 each. Otherwise the authorities have Euclidean norm
        1, and a hub's score is the weighted sum of the authorities that it points to.
    weight, code, client, callback
        As for :func:`pagerank`. Both the adjacency matrix and its transpose are encoded, which
        takes twice the memory.

    Returns
    -------
    hubs, authorities : dict node -> float, or ndarray of shape (n,)
        Arrays in row order if ``graph`` is a SciPy sparse matrix, otherwise dictionaries.

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` rounds.
    ValueError
        If an argument is out of range, the graph has no edges, or there is no client.

    See Also
    --------
    networkx.hits : the same in one process, by a Lanczos iteration, which needs fewer products
        where the two largest singular values are close.

    Notes
    -----
    If the largest singular value is repeated (for example, in a graph with two identical
    components), the result depends on ``start``: it is the projection of ``start`` onto the
    singular vectors of that value.

    Examples
    --------
    >>> from dask.distributed import Client
    >>> client = Client(
    ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
    ... )
    >>> hubs, authorities = hits([("ada", "bob"), ("ada", "cy"), ("bob", "cy")])
    >>> {name: round(score, 4) for name, score in authorities.items()}
    {'ada': 0.0, 'bob': 0.382, 'cy': 0.618}
    >>> {name: round(score, 4) for name, score in hubs.items()}
    {'ada': 0.618, 'bob': 0.382, 'cy': 0.0}
    >>> client.shutdown()
    """
    check_stopping(tol, max_iter)
    if isinstance(graph, nx.Graph) and len(graph) == 0:
        return {}, {}
    found = as_graph(graph, weight=weight)
    begin = None if start is None else vector("start", start, found)
    distribution("start", begin, len(found.nodes))
    if not found.adjacency.data.any():
        raise ValueError("HITS expects a graph with edges of positive weight, this one has none.")
    scaled, unit = found.scaled()
    coded = as_coded(scaled.adjacency.astype(np.float64), code, client, transpose=True)
    hubs, authorities = run(
        hits_rounds,
        coded,
        start=begin,
        tol=tol,
        max_iter=max_iter,
        client=client,
        callback=callback,
        tolerant=False,  # nothing corrects the last product
    )
    if normalized:
        hubs, authorities = hubs / hubs.sum(), authorities / authorities.sum()
    else:
        hubs = hubs * unit
    return named(hubs, found, graph), named(authorities, found, graph)
