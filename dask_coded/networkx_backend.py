"""The networkx backend ``dask_coded``: ``nx.pagerank(G, backend="dask_coded")``.

networkx converts a graph by :func:`convert_from_nx`, keeps the result with the graph until that is
changed, and calls the function of its own name here, with its own arguments, defaults and
exceptions. What the functions do is in :mod:`dask_coded.graph`.

Every public name in this module that networkx knows is taken for an implementation: there are no
others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import networkx as nx
import numpy as np
import scipy.sparse as sp
from distributed import Client, default_client

from dask_coded import graph as coded

NAME = "dask_coded"


class CodedGraph:
    """A networkx graph, converted: its nodes, and an adjacency matrix for each attribute of edges.

    Parameters
    ----------
    nodes : ndarray of object, shape (n,)
    adjacency : dict
        From the name of an attribute, or None for no weights, to a
        :class:`scipy.sparse.csr_array` of shape (n, n). Weights of parallel edges are added up.
    directed, multigraph : bool
    """

    __networkx_backend__ = NAME

    def __init__(
        self,
        nodes: np.ndarray[Any, Any],
        adjacency: Mapping[str | None, sp.csr_array],
        directed: bool,
        multigraph: bool,
    ) -> None:
        self.nodes = nodes
        self.adjacency = adjacency
        self._directed = directed
        self._multigraph = multigraph

    def is_directed(self) -> bool:
        """Whether edges have a direction. networkx asks for it, as for the following."""
        return self._directed

    def is_multigraph(self) -> bool:
        """Whether there may be parallel edges."""
        return self._multigraph

    def __len__(self) -> int:
        return len(self.nodes)

    def by(self, weight: str | None) -> coded.Graph:
        """What the algorithms take, with the weights that are wanted."""
        if weight not in self.adjacency:
            raise ValueError(
                f"This graph was converted without the edge attribute {weight!r}: "
                f"convert it with `edge_attrs={{{weight!r}: 1}}`."
            )
        return coded.Graph(self.nodes, self.adjacency[weight])


# -- what networkx asks a backend --------------------------------------------------------------


def convert_from_nx(
    graph: nx.Graph, edge_attrs: Mapping[str, Any] | None = None, **_: Any
) -> CodedGraph:
    """Convert a networkx graph.

    Parameters
    ----------
    graph : networkx.Graph
        Of any kind.
    edge_attrs : mapping, optional
        The attributes of edges to convert, with the values for edges that lack them.

    Raises
    ------
    NotImplementedError
        If a weight is negative or not finite: networkx then goes on with another backend, or with
        none, unless this one was asked for.
    """
    nodes = np.fromiter(graph, dtype=object, count=len(graph))
    adjacency: dict[str | None, sp.csr_array] = {}
    for name, default in (edge_attrs or {}).items():
        adjacency[name] = _adjacency(graph, name, default)
    if adjacency and not graph.is_multigraph():
        first = next(iter(adjacency.values()))
        ones = np.ones(first.nnz)
        adjacency[None] = sp.csr_array((ones, first.indices, first.indptr), shape=first.shape)
    else:
        adjacency[None] = _adjacency(graph, None, 1)
    return CodedGraph(nodes, adjacency, graph.is_directed(), graph.is_multigraph())


def _adjacency(graph: nx.Graph, name: str | None, default: Any) -> sp.csr_array:
    if len(graph) == 0:
        return sp.csr_array((0, 0))
    if name is not None and default != 1:
        raise NotImplementedError(f"Edges that lack {name!r} count 1 here, not {default}.")
    # Whatever backend is configured, this is networkx's own to do.
    matrix = nx.to_scipy_sparse_array(graph, weight=name, dtype=np.float64, backend="networkx")
    if not (np.isfinite(matrix.data) & (matrix.data >= 0)).all():
        raise NotImplementedError(
            f"Weights must be finite and not negative here, an edge's {name!r} is not."
        )
    return matrix


def convert_to_nx(result: Any, **_: Any) -> Any:
    """Convert a graph back; everything else is as networkx has it already.

    Raises
    ------
    NotImplementedError
        For a multigraph, whose parallel edges have been added up.
    """
    if not isinstance(result, CodedGraph):
        return result
    if result.is_multigraph():
        raise NotImplementedError("Parallel edges have been added up and cannot be told apart.")
    graph = nx.DiGraph() if result.is_directed() else nx.Graph()
    nodes = result.nodes.tolist()
    graph.add_nodes_from(nodes)
    for name, matrix in result.adjacency.items():
        entries = matrix.tocoo()
        graph.add_edges_from(
            (nodes[i], nodes[j], {} if name is None else {name: weight})
            for i, j, weight in zip(entries.row, entries.col, entries.data.tolist())
        )
    return graph


def can_run(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | str:
    """Tell whether a function works with these arguments, or why it does not."""
    given = inspect.signature(globals()[name]).bind(*args, **kwargs).arguments
    if name == "katz_centrality":
        return True
    for argument in ("personalization", "dangling", "nstart"):
        if any(value < 0 for value in (given.get(argument) or {}).values()):
            return f"'{argument}' has a negative value"
    return True


def should_run(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | str:
    """Tell whether a function is worth a cluster, or why it is not.

    A round costs some milliseconds, in which one process multiplies with millions of edges; and it
    sends a vector of all nodes to every worker, which takes as long as many edges to a node.
    networkx does not ask if the backend was named in the call.
    """
    if kwargs.get("client") is None:
        try:
            default_client()
        except ValueError:
            return "there is no Dask client: create a `dask.distributed.Client()` first"
    graph = args[0] if args else kwargs["G"]
    edges, limits = graph.number_of_edges(), nx.config.backends[NAME]
    if edges < max(limits.minimum_edges, limits.minimum_edges_per_node * len(graph)):
        return (
            f"with {edges:,} edges and {len(graph):,} nodes one process is faster; it may not be "
            f"from {limits.minimum_edges:,} edges and {limits.minimum_edges_per_node:,} to a node "
            f"on (`nx.config.backends.{NAME}`)"
        )
    return True


def on_start_tests(items: Sequence[Any]) -> None:
    """Start the cluster on which networkx's own tests run (``NETWORKX_TEST_BACKEND``)."""
    Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)


# -- the functions, with networkx's arguments --------------------------------------------------


def pagerank(
    G: CodedGraph,
    alpha: float = 0.85,
    personalization: Mapping[Any, float] | None = None,
    max_iter: int = 100,
    tol: float = 1e-6,
    nstart: Mapping[Any, float] | None = None,
    weight: str | None = "weight",
    dangling: Mapping[Any, float] | None = None,
    **options: Any,
) -> Any:
    """:func:`networkx.pagerank` by :func:`dask_coded.graph.pagerank`."""
    if len(G) == 0:
        return {}
    jumps = _known(personalization, G)
    if jumps is not None and not any(jumps.values()):
        raise ZeroDivisionError("All values of 'personalization' are zero.")
    with _convergence(tol, max_iter):
        return coded.pagerank(
            G.by(weight),
            damping=alpha,
            personalization=jumps,
            dangling=_known(dangling, G),
            start=_known(nstart, G),
            tol=tol * len(G),
            max_iter=max_iter,
            **options,
        )


def hits(
    G: CodedGraph,
    max_iter: int = 100,
    tol: float = 1e-8,
    nstart: Mapping[Any, float] | None = None,
    normalized: bool = True,
    **options: Any,
) -> Any:
    """:func:`networkx.hits` by :func:`dask_coded.graph.hits`."""
    if len(G) == 0:
        return {}, {}
    with _convergence(tol, max_iter):
        return coded.hits(
            G.by("weight"),
            start=_known(nstart, G),
            normalized=normalized,
            tol=tol,
            max_iter=max_iter,
            **options,
        )


def katz_centrality(
    G: CodedGraph,
    alpha: float = 0.1,
    beta: float | Mapping[Any, float] = 1.0,
    max_iter: int = 1000,
    tol: float = 1e-6,
    nstart: Mapping[Any, float] | None = None,
    normalized: bool = True,
    weight: str | None = None,
    **options: Any,
) -> Any:
    """:func:`networkx.katz_centrality` by :func:`dask_coded.graph.katz_centrality`."""
    if len(G) == 0:
        return {}
    try:
        own = dict.fromkeys(G.nodes.tolist(), float(beta))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        if not isinstance(beta, Mapping) or set(beta) != set(G.nodes.tolist()):
            raise nx.NetworkXError("beta dictionary must have a value for every node") from None
        own = dict(beta)
    total = sum(map(abs, own.values())) or 1.0
    with _convergence(tol, max_iter):
        return coded.katz_centrality(
            G.by(weight),
            alpha=alpha,
            beta=own,
            start=_known(nstart, G),
            normalized=normalized,
            tol=tol * len(G) / total,
            max_iter=max_iter,
            **options,
        )


def eigenvector_centrality(
    G: CodedGraph,
    max_iter: int = 100,
    tol: float = 1e-6,
    nstart: Mapping[Any, float] | None = None,
    weight: str | None = None,
    **options: Any,
) -> Any:
    """:func:`networkx.eigenvector_centrality` by the function of that name here."""
    if len(G) == 0:
        raise nx.NetworkXPointlessConcept("cannot compute centrality for the null graph")
    if nstart is not None and not any(nstart.values()):
        raise nx.NetworkXError("initial vector cannot have all zero values")
    with _convergence(tol, max_iter):
        return coded.eigenvector_centrality(
            G.by(weight),
            start=_known(nstart, G),
            # There the vector has norm 1, here sum 1: the sum is at most the root of n.
            tol=tol * len(G) ** 0.5,
            max_iter=max_iter,
            **options,
        )


@contextmanager
def _convergence(tol: float, max_iter: int) -> Iterator[None]:
    """Have networkx's exception raised where an iteration does not converge."""
    if tol <= 0 or max_iter < 1:
        # There `tol=0` is out of reach, where here it asks for all of the rounds.
        raise nx.PowerIterationFailedConvergence(max_iter)
    try:
        yield
    except coded.ConvergenceError as error:
        raise nx.PowerIterationFailedConvergence(max_iter) from error


def _known(values: Mapping[Any, float] | None, G: CodedGraph) -> dict[Any, float] | None:
    """Without the nodes that the graph has not, which networkx passes over."""
    if values is None:
        return None
    nodes = set(G.nodes.tolist())
    return {node: value for node, value in values.items() if node in nodes}
