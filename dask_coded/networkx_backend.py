"""The networkx backend ``dask_coded``: ``nx.pagerank(G, backend="dask_coded")``.

networkx converts a graph with :func:`convert_from_nx` and caches the result until the graph
changes. It then calls the function of the same name in this module, which has networkx's arguments,
defaults and exceptions. The algorithms are in :mod:`dask_coded.graph`.

networkx takes a public name in this module for an implementation if it has a function of that name.
The module therefore defines no other public name that matches one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import networkx as nx
import numpy as np
import scipy.sparse as sp
from distributed import Client, default_client

from dask_coded import graph as coded
from dask_coded.caller import warner
from dask_coded.runtime.client.waiting import current_client

NAME = "dask_coded"

# The smallest tolerance that power iterations reach in double precision.
_PRECISION = 1e-14
# The client of the call that networkx dispatches now: networkx asks whether it can run, and only
# then has its graph converted.
_CLIENT: ContextVar[Any] = ContextVar("client", default=None)


class CodedGraph:
    """A converted networkx graph: its nodes, and an adjacency matrix for each edge attribute.

    Parameters
    ----------
    nodes : ndarray of object, shape (n,)
    adjacency : dict
        Maps the name of an edge attribute, or None for no weights, to a
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
        """Return whether edges have a direction. networkx calls this and the next method."""
        return self._directed

    def is_multigraph(self) -> bool:
        """Return whether there may be parallel edges."""
        return self._multigraph

    def __len__(self) -> int:
        return len(self.nodes)

    def by(self, weight: str | None) -> coded.Graph:
        """Return the graph that the algorithms take, with the given edge attribute as weight."""
        if weight not in self.adjacency:
            raise ValueError(
                f"This graph was converted without the edge attribute {weight!r}: "
                f"convert it with `edge_attrs={{{weight!r}: 1}}`."
            )
        return coded.Graph(self.nodes, self.adjacency[weight])


# -- the interface of a networkx backend -------------------------------------------------------


def convert_from_nx(
    graph: nx.Graph, edge_attrs: Mapping[str, Any] | None = None, name: str | None = None, **_: Any
) -> CodedGraph:
    """Convert a networkx graph.

    Parameters
    ----------
    graph : networkx.Graph
        Of any kind.
    edge_attrs : mapping, optional
        The edge attributes to convert, with the values for edges that lack them.
    name : str, optional
        The function for which networkx converts the graph.

    Raises
    ------
    ValueError
        If it is converted for a function, and there is no client that could run this.
    NotImplementedError
        If a weight is negative or not finite, or the value for edges without the attribute is not
        1. networkx then uses another backend or none, unless the call named this one.
    """
    if name is not None:
        current_client(_CLIENT.get())  # a conversion takes long
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
        raise NotImplementedError(f"Edges without {name!r} must count 1, not {default}.")
    # Always networkx's own implementation, whichever backend is configured.
    matrix = nx.to_scipy_sparse_array(graph, weight=name, dtype=np.float64, backend="networkx")
    if not (np.isfinite(matrix.data) & (matrix.data >= 0)).all():
        raise NotImplementedError(
            f"Weights must be finite and not negative, {name!r} of an edge is not."
        )
    return matrix


def convert_to_nx(result: Any, **_: Any) -> Any:
    """Convert a graph back to networkx; return any other result unchanged.

    Raises
    ------
    NotImplementedError
        For a multigraph, because the weights of its parallel edges have been added up.
    """
    if not isinstance(result, CodedGraph):
        return result
    if result.is_multigraph():
        raise NotImplementedError("Parallel edges have been added up and cannot be separated.")
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
    """Return True if a function can run with these arguments, else the reason why not."""
    _CLIENT.set(kwargs.get("client"))
    # networkx remembers that a conversion has failed, although there may be a client now.
    kept = getattr(args[0] if args else kwargs["G"], "__networkx_cache__", None) or {}
    failed = kept.get("backends", {}).get(NAME, {})
    for key in [key for key, found in failed.items() if not isinstance(found, CodedGraph)]:
        del failed[key]
    given = inspect.signature(globals()[name]).bind(*args, **kwargs).arguments
    if name == "katz_centrality":
        return True
    if given.get("alpha", 0) < 0:
        return "'alpha' is negative"
    for argument in ("personalization", "dangling", "nstart"):
        values = given.get(argument)
        if values is not None and any(value < 0 for value in dict(values).values()):
            return f"'{argument}' has a negative value"
    return True


def should_run(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | str:
    """Return True if a function should run on the cluster, else the reason why not.

    A round costs some milliseconds, in which one process multiplies with millions of edges. A round
    also sends a vector of all nodes to every worker, which takes as long as multiplying with many
    edges per node. A graph that has been converted before is worth it at any size, because
    networkx's own functions would convert it, too. networkx does not call this function if the call
    names the backend.

    Warns
    -----
    UserWarning
        If there is a client, but the graph is too small.
    """
    if kwargs.get("client") is None:
        try:
            default_client()
        except ValueError:
            return "there is no Dask client: create a `dask.distributed.Client()` first"
    graph = args[0] if args else kwargs["G"]
    edges, limits = graph.number_of_edges(), nx.config.backends[NAME]
    small = edges < max(limits.minimum_edges, limits.minimum_edges_per_node * len(graph))
    if not small or _is_converted(graph, name, args, kwargs):
        return True
    reason = (
        f"with {edges:,} edges and {len(graph):,} nodes one process is faster; this backend "
        f"expects at least {limits.minimum_edges:,} edges and "
        f"{limits.minimum_edges_per_node:,} edges per node (`nx.config.backends.{NAME}`)"
    )
    warner(UserWarning)(
        f"networkx does not run '{name}' on the cluster: {reason}. Pass `backend={NAME!r}` to run "
        "it there."
    )
    return reason


def _is_converted(
    graph: nx.Graph, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether networkx has kept a conversion of a graph that suits a call."""
    given = inspect.signature(globals()[name]).bind(*args, **kwargs)
    given.apply_defaults()
    weight = given.arguments.get("weight", "weight")
    cache = getattr(graph, "__networkx_cache__", None) or {}  # networkx turns it off by None
    kept = cache.get("backends", {}).get(NAME, {}).values()
    return any(isinstance(each, CodedGraph) and weight in each.adjacency for each in kept)


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
    """Compute :func:`networkx.pagerank` by :func:`dask_coded.graph.pagerank`."""
    if len(G) == 0:
        return {}
    jumps = _known(personalization, G)
    if jumps is not None and not any(jumps.values()):
        raise ZeroDivisionError("All values of 'personalization' are zero.")
    start, leaps = _known(nstart, G), _known(dangling, G)
    if any(values is not None and not sum(values.values()) for values in (start, leaps)):
        # networkx divides by the sum, and never converges.
        raise nx.PowerIterationFailedConvergence(max_iter)
    if alpha > 1:
        # The iteration amplifies what it should damp, unless it starts at a fixed point.
        raise nx.PowerIterationFailedConvergence(max_iter)
    with _convergence(tol, max_iter):
        return coded.pagerank(
            G.by(weight),
            damping=alpha,
            personalization=jumps,
            dangling=leaps,
            start=start,
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
    """Compute :func:`networkx.hits` by :func:`dask_coded.graph.hits`."""
    if len(G) == 0:
        return {}, {}
    # networkx passes it to ARPACK, to which 0 means machine precision.
    tol = tol or _PRECISION
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
    """Compute :func:`networkx.katz_centrality` by :func:`dask_coded.graph.katz_centrality`."""
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
    """Compute :func:`networkx.eigenvector_centrality` by its namesake in ``dask_coded.graph``."""
    if len(G) == 0:
        raise nx.NetworkXPointlessConcept("cannot compute centrality for the null graph")
    if nstart is not None and not any(nstart.values()):
        raise nx.NetworkXError("initial vector cannot have all zero values")
    with _convergence(tol, max_iter):
        return coded.eigenvector_centrality(
            G.by(weight),
            start=_known(nstart, G),
            # networkx stops at a change of n * tol in a vector of norm 1. The sum of that vector is
            # at most sqrt(n), and here the vector is scaled to a sum of 1.
            tol=tol * len(G) ** 0.5,
            max_iter=max_iter,
            **options,
        )


@contextmanager
def _convergence(tol: float, max_iter: int) -> Iterator[None]:
    """Raise networkx's exception if an iteration does not converge."""
    if tol <= 0 or max_iter < 1:
        # networkx never reaches `tol=0`; `dask_coded.graph` would run all rounds instead.
        raise nx.PowerIterationFailedConvergence(max_iter)
    try:
        yield
    except coded.ConvergenceError as error:
        raise nx.PowerIterationFailedConvergence(max_iter) from error


def _known(values: Mapping[Any, float] | None, G: CodedGraph) -> dict[Any, float] | None:
    """Return the values without nodes that are not in the graph, which networkx ignores."""
    if values is None:
        return None
    nodes = set(G.nodes.tolist())
    return {node: value for node, value in values.items() if node in nodes}
