"""Conversion of values per node from the caller's form to vectors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from dask_coded.arguments import check_unmasked, unwrapped
from dask_coded.graph.adjacency import Graph
from dask_coded.graph.iteration import Vector
from dask_coded.labels import axes_of

#: One number per node, in the forms that public functions accept.
PerNode = Mapping[Any, float] | npt.ArrayLike


def by_node(name: str, values: Any) -> Any:
    """Return a Series as a mapping from its index, another labelled array as its array.

    An xarray object whose first dimension has labels is a Series or a data frame. A tensor is an
    array, and everything else is returned as it is.

    Raises
    ------
    TypeError
        If some values are masked.
    ValueError
        If an index has a node twice.
    """
    axes = axes_of(values)
    if len(axes) in (1, 2) and axes[0].index is not None and hasattr(values, "to_pandas"):
        values = values.to_pandas()
    values = check_unmasked(f"Argument {name!r}", unwrapped(values))
    if not is_pandas(values):
        return values
    if not values.index.is_unique:
        twice = values.index[values.index.duplicated()][0]
        raise ValueError(f"Argument {name!r} has the node {twice!r} twice.")
    return values.to_dict() if values.ndim == 1 else values


def is_pandas(values: Any) -> bool:
    """Return whether values are a Series or a DataFrame."""
    return hasattr(values, "reindex")


def in_order(name: str, frame: Any, graph: Graph) -> Any:
    """Return the rows of a DataFrame in the order of the nodes; those left out are zero.

    Raises
    ------
    ValueError
        If its index has a node that is not in the graph.
    """
    nodes = graph.nodes.tolist()
    known = set(nodes)
    for node in frame.index.tolist():
        if node not in known:
            raise ValueError(
                f"Argument {name!r} has the node {node!r} in its index, which is not in the graph: "
                "if its rows are in the order of the nodes, pass `values.to_numpy()`."
            )
    return frame.reindex(nodes, fill_value=0)


def vector(name: str, values: PerNode, graph: Graph) -> Vector:
    """Return values as a vector in the order of the nodes.

    Parameters
    ----------
    name : str
        Name of the argument, for the error message.
    values : mapping node -> number, or array_like of shape (n,)
        Nodes that a mapping leaves out get zero. A pandas Series is a mapping from its index.
    graph : Graph

    Returns
    -------
    ndarray of float, shape (n,)

    Raises
    ------
    ValueError
        If a mapping has a node that is not in the graph, there are too few or too many values, or
        one of them is not finite.
    TypeError
        If some values are masked.

    Examples
    --------
    >>> from dask_coded.graph.conversion import as_graph
    >>> vector("start", {"b": 2.0}, as_graph([("a", "b")]))
    array([0., 2.])
    """
    values = by_node(name, values)
    if not isinstance(values, Mapping):
        return _finite(name, _real(name, values), len(graph.nodes))
    place = {node: i for i, node in enumerate(graph.nodes.tolist())}
    found = np.zeros(len(place))
    for node, value in values.items():
        if node not in place:
            raise ValueError(f"Argument {name!r} has the node {node!r}, which is not in the graph.")
        found[place[node]] = value
    return _finite(name, found, len(place))


def distribution(name: str, values: npt.ArrayLike | None, n: int) -> Vector:
    """Return values scaled to a sum of 1.

    Parameters
    ----------
    name : str
        Name of the argument, for the error message.
    values : array_like, shape (n,), optional
        Default: uniform.
    n : int
        Number of nodes.

    Returns
    -------
    ndarray of float, shape (n,)

    Raises
    ------
    ValueError
        If there are too few or too many values, they are not finite, one is negative, or all are
        zero.
    TypeError
        If some values are masked.

    Examples
    --------
    >>> distribution("start", [3, 1], 2)
    array([0.75, 0.25])
    """
    if values is None:
        return np.full(n, 1 / n)
    values = check_unmasked(f"Argument {name!r}", unwrapped(values))
    found = _finite(name, _real(name, values), n)
    if not ((found >= 0).all() and found.any()):
        raise ValueError(
            f"Argument {name!r} must be finite and not negative, and not zero everywhere: "
            f"its smallest value is {found.min()}, its largest {found.max()}."
        )
    return np.asarray(found / found.sum())


def _real(name: str, values: npt.ArrayLike) -> Vector:
    if np.iscomplexobj(values := np.asarray(values)):
        raise ValueError(f"Argument {name!r} must hold real numbers, it has complex ones.")
    return values.astype(np.float64)


def _finite(name: str, found: Vector, n: int) -> Vector:
    if found.shape != (n,):
        raise ValueError(
            f"Argument {name!r} must have one value for each of the {n} nodes, "
            f"its shape is {found.shape}."
        )
    if not np.isfinite(found).all():
        raise ValueError(f"Argument {name!r} must be finite, it has NaN or infinity.")
    return found


def named(scores: Vector, graph: Graph, given: Any) -> dict[Any, float] | Vector:
    """Return scores in the form that matches the caller's graph.

    Parameters
    ----------
    scores : ndarray, shape (n,)
    graph : Graph
    given : object
        The graph as the caller passed it.

    Returns
    -------
    dict node -> float, or ndarray of shape (n,)
        The array itself if a SciPy sparse matrix was given, otherwise a dictionary.
    """
    return scores if sp.issparse(given) else dict(zip(graph.nodes.tolist(), scores.tolist()))
