"""Graphs from objects in memory: networkx graphs, sparse matrices and lists of edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import scipy.sparse as sp
from dask.base import is_dask_collection

from dask_coded.arguments import check_unmasked, unwrapped
from dask_coded.graph.adjacency import Array, Graph, from_matrix, from_names, from_numbers

_GRAPHS = "expected a networkx graph, a SciPy sparse matrix or a list of edges (source, target)"
_NAMES = "expected node names that are all integers (of 64 bits) or all strings"


def as_graph(graph: Any, *, undirected: bool = False, weight: str | None = "weight") -> Graph:
    """Convert a graph from any of the usual forms.

    Parameters
    ----------
    graph : Graph, networkx graph, SciPy sparse adjacency, or edge list
        An edge list is a sequence of pairs ``(source, target)`` or of triples ``(source, target,
        weight)``, an array of shape (m, 2) or (m, 3), a structured array or a data frame. Names are
        integers or strings. A list is never read as a matrix. A square array of numbers is refused,
        because it may be either. Several entries for a cell of a sparse matrix are added up.
    undirected : bool
        Add the reverse of every edge. Undirected networkx graphs always have both directions.
    weight : str or None
        The edge attribute of a networkx graph that holds the weight (1 where it is absent); None
        for no weights.

    Returns
    -------
    Graph
        Its nodes are in networkx's order, row numbers for a sparse matrix, or the distinct names
        in ascending order for an edge list.

    Raises
    ------
    ValueError
        If ``graph`` is none of these or may be two of them, has no nodes, or has invalid weights.
    TypeError
        If some entries are masked.

    Examples
    --------
    >>> as_graph([("a", "b"), ("b", "c"), ("a", "b")]).adjacency.toarray()
    array([[0., 1., 0.],
           [0., 0., 1.],
           [0., 0., 0.]])
    """
    graph = check_unmasked("The graph", unwrapped(graph))
    if isinstance(graph, Graph):
        found = graph
    elif isinstance(graph, nx.Graph):
        found = _from_networkx(graph, weight)
    elif sp.issparse(graph):
        found = from_matrix(graph)
    elif isinstance(graph, (str, bytes, Path)):
        raise ValueError(f"{_GRAPHS}, not a file name: pass that to read_graph first.")
    elif is_dask_collection(graph):
        raise ValueError(f"{_GRAPHS}, not a dask collection: pass `graph.compute()`.")
    elif isinstance(graph, Mapping):
        raise ValueError(f"{_GRAPHS}, not a dictionary: pass `nx.Graph(...)` of it, or triples.")
    elif isinstance(graph, Iterable):
        found = _from_edge_list(graph)
    else:
        raise ValueError(f"{_GRAPHS}, not {type(graph).__name__}.")
    return found.to_undirected() if undirected else found


def _from_networkx(graph: nx.Graph, weight: str | None) -> Graph:
    if len(graph) == 0:
        raise ValueError("expected a graph with at least one node, this one is empty.")
    # Element by element, because NumPy would turn a list of tuples into a two-dimensional array.
    nodes = np.fromiter(graph, dtype=object, count=len(graph))
    return Graph(nodes, nx.to_scipy_sparse_array(graph, dtype=np.float64, weight=weight))


def _from_edge_list(edges: Iterable[Any]) -> Graph:
    columns, named = _columns(edges)
    rows = len(columns[0])
    numeric = all(getattr(column, "dtype", np.dtype(object)).kind in "biuf" for column in columns)
    if rows == len(columns) and numeric and not named:
        raise ValueError(
            f"{_GRAPHS}; an array of {rows} x {rows} numbers may be {rows} edges or an adjacency "
            "matrix: pass a list of tuples or `scipy.sparse.csr_array(matrix)`."
        )
    source, target, *weights = columns
    first, second = _exact(source), _exact(target)
    try:
        numbers = np.asarray(weights[0], dtype=np.float64) if weights else None
    except (TypeError, ValueError):
        raise ValueError(f"{_GRAPHS}; a third entry must be a number, the weight.") from None
    if isinstance(first, list) and isinstance(second, list):
        index: dict[str, int] = {}
        ends = [[index.setdefault(name, len(index)) for name in end] for end in (first, second)]
        return from_names(index, np.array(ends), numbers)
    if isinstance(first, list) or isinstance(second, list):
        raise ValueError(f"{_NAMES}, not both.")
    return from_numbers(_together(first, second), numbers)


def _columns(edges: Any) -> tuple[list[Any], bool]:
    """Return the two or three columns of an edge list, and whether only an edge list has such.

    The columns of a data frame are converted one by one: in a common array, floating-point weights
    would round the integers beside them. Those that are named source and target are these wherever
    they are.
    """
    named = True
    names: list[Any] = []
    if hasattr(edges, "iloc") and hasattr(edges, "columns"):
        names = list(edges.columns)
        named = names != list(edges.index)  # they are equal in an adjacency matrix
        columns = [edges.iloc[:, i].to_numpy() for i in range(edges.shape[1])]
    elif hasattr(edges, "get_columns"):  # of polars
        names = list(edges.columns)
        columns = [column.to_numpy() for column in edges.get_columns()]
    elif getattr(getattr(edges, "dtype", None), "names", None):
        names = list(edges.dtype.names)
        columns = [edges[name] for name in names]
    else:
        named = False
        if hasattr(edges, "to_numpy"):
            edges = edges.to_numpy()
        array = isinstance(edges, np.ndarray)
        rows = edges if array else list(edges)
        if len(rows) == 0:
            raise ValueError(f"{_GRAPHS}, this list is empty.")
        if array:
            columns = list(edges.T) if edges.ndim == 2 else []
        else:
            # A string of two letters has two entries but is not an edge.
            widths = {len(e) if isinstance(e, (tuple, list, np.ndarray)) else 0 for e in rows}
            columns = list(zip(*rows, strict=True)) if len(widths) == 1 and any(widths) else []
    if names.count("source") == names.count("target") == 1:
        first = [names.index("source"), names.index("target")]
        columns = [columns[i] for i in (*first, *({*range(len(names))} - {*first}))]
    if len(columns) not in (2, 3):
        raise ValueError(
            f"{_GRAPHS}; edges must all have 2 entries, or 3 with a weight: convert a dense "
            "adjacency matrix with scipy.sparse.csr_array first."
        )
    if len(columns[0]) == 0:
        raise ValueError(f"{_GRAPHS}, this list is empty.")
    return columns, named


def _exact(names: Any) -> Array | list[str]:
    """Return the names of one column as an array of integers or as a list of strings.

    Raises
    ------
    ValueError
        If they are neither, or have been rounded to floating-point numbers.
    """
    if isinstance(names, np.ndarray) and names.dtype.kind in "mM":
        raise ValueError(f"{_NAMES}, these are of dtype {names.dtype}.")
    if isinstance(names, np.ndarray) and names.dtype.kind not in "iuf":
        names = names.tolist()
    if isinstance(names, np.ndarray):
        if names.dtype.kind != "f":
            return names
        # Integers beside weights in one array of floats, or beside missing values in a data frame.
        # The number after the largest that is exact may stand for the next one, too.
        digits = np.finfo(names.dtype).nmant + 1
        largest = 2**53 if digits >= 53 else 2**digits - 1
        exact = (names == np.trunc(names)).all() and (np.abs(names) <= largest).all()
    else:
        if all(isinstance(name, str) for name in names):
            return [str(name) for name in names]
        if names and all(isinstance(name, np.floating) for name in names):
            shortest = min((name.dtype for name in names), key=lambda dtype: dtype.itemsize)
            return _exact(np.array(names, dtype=shortest))
        if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in names):
            numbers = all(isinstance(n, Real) and not isinstance(n, bool) for n in names)
            exact = numbers and all(n == n // 1 and abs(n) <= 2**53 for n in names)
        else:
            whole = [int(name) for name in names]  # NumPy's own would wrap around
            for dtype in (np.int64, np.uint64):
                try:
                    return np.array(whole, dtype=dtype)
                except OverflowError:
                    pass
            raise ValueError(f"{_NAMES}, {max(names, key=abs)} does not fit beside the others.")
    if not exact:
        raise ValueError(
            f"{_NAMES}; a floating-point number is neither, unless it is a whole number of at most "
            "2**53: pass columns of integers. In single precision it must be less than 2**24, and "
            "in half precision less than 2**11."
        )
    return np.asarray(names, dtype=np.float64).astype(np.int64)


def _together(source: Array, target: Array) -> Array:
    """Return two columns of integers as one array, exactly."""
    ends = [source, target]
    if np.result_type(*ends).kind == "f":  # what NumPy makes of uint64 and int64
        for dtype in (np.int64, np.uint64):
            limits = np.iinfo(dtype)
            if all(limits.min <= int(end.min()) and int(end.max()) <= limits.max for end in ends):
                return np.stack([end.astype(dtype) for end in ends])
        raise ValueError(f"{_NAMES}: negative ones do not fit beside those from 2**63.")
    return np.stack(ends)
