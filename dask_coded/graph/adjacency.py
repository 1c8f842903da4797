"""Graphs as algorithms take them: names of nodes, and a sparse adjacency matrix."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from dask_coded.arguments import printable

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A directed graph with weights, which readers return and algorithms take.

    Parameters
    ----------
    nodes : ndarray, shape (n,)
        The names of the nodes: integers, strings, or any objects (networkx).
    adjacency : scipy.sparse.csr_array, shape (n, n)
        ``adjacency[i, j]`` is the weight of the edge from ``nodes[i]`` to ``nodes[j]``.

    Raises
    ------
    ValueError
        If the matrix is not square, has indices out of range, does not fit the nodes, or has a
        weight that is complex, negative, infinite or NaN, or if two nodes have one name.

    Notes
    -----
    Several entries for one cell of a sparse matrix stand for their sum, here as everywhere in
    SciPy. They are added up in float64 and stored as one.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> Graph(np.array(["a", "b"]), scipy.sparse.csr_array([[0.0, 2.0], [1.0, 0.0]]))
    Graph(nodes=2, edges=2)
    """

    nodes: Array
    adjacency: sp.csr_array

    def __post_init__(self) -> None:
        if not sp.issparse(self.adjacency):
            raise ValueError(
                f"expected a SciPy sparse adjacency matrix, not a {type(self.adjacency).__name__}: "
                "pass `scipy.sparse.csr_array(matrix)`."
            )
        rows = check_square(self.adjacency)
        object.__setattr__(self, "adjacency", summed(self.adjacency))
        if not isinstance(self.nodes, np.ndarray):
            names = np.fromiter(self.nodes, dtype=object, count=len(self.nodes))
            object.__setattr__(self, "nodes", names)
        if rows != len(self.nodes):
            raise ValueError(f"expected a name for each of {rows} nodes, not {len(self.nodes)}.")
        # Readers return names in ascending order.
        ascending = self.nodes.dtype.kind in "iuU" and (self.nodes[1:] > self.nodes[:-1]).all()
        names = [] if ascending else self.nodes.tolist()
        if len(set(names)) < len(names):
            twice, _ = Counter(names).most_common(1)[0]
            raise ValueError(f"expected a different name for each node, {twice!r} occurs twice.")
        weights = self.adjacency.data
        if weights.dtype.kind not in "biuf":
            raise ValueError(f"expected weights that are real numbers, not {weights.dtype}.")
        # NaN is passed on by both.
        if not (weights.min(initial=0) >= 0 and np.isfinite(weights.max(initial=0))):
            bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
            row = np.searchsorted(self.adjacency.indptr, bad[0], side="right") - 1
            ends = self.nodes[row], self.nodes[self.adjacency.indices[bad[0]]]
            source, target = (printable(str(name)) for name in ends)
            raise ValueError(
                "expected weights that are finite and not negative, "
                f"edge {source} -> {target} has {weights[bad[0]]}."
            )

    def __repr__(self) -> str:
        return f"Graph(nodes={len(self.nodes)}, edges={self.adjacency.nnz})"

    def to_undirected(self) -> Graph:
        """Return the graph with every edge in both directions, with the larger of two weights."""
        both = self.adjacency.maximum(self.adjacency.T)
        return Graph(self.nodes, sp.csr_array(both))

    def scaled(self) -> tuple[Graph, float]:
        """Return the graph with all weights divided by a unit, and the unit.

        The unit is the geometric mean of the weights, which a few unusual weights change little.
        It is 1 if the mean is between 0.1 and 10.
        """
        positive = self.adjacency.data[self.adjacency.data > 0]
        unit = float(np.exp(np.log(positive).mean())) if positive.size else 1.0
        if 0.1 <= unit <= 10:
            return self, 1.0
        return Graph(self.nodes, self.adjacency / unit), unit


def check_square(matrix: Any) -> int:
    """Return the number of rows of a sparse matrix that is square and whose indices are in range.

    Raises
    ------
    ValueError
        If it is not. SciPy does not look at all indices by itself, and reads memory that does not
        belong to the matrix where they are wrong.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        shape = " x ".join(map(str, matrix.shape))
        raise ValueError(f"expected a square adjacency matrix, this one is {shape}.")
    if hasattr(matrix, "check_format"):
        matrix.check_format(full_check=True)
    return int(matrix.shape[0])


def summed(matrix: Any) -> sp.csr_array:
    """Return a sparse matrix with one entry for each cell, in CSR format.

    Parameters
    ----------
    matrix : scipy.sparse array or matrix, shape (m, n)
        It is not changed.

    Returns
    -------
    scipy.sparse.csr_array, shape (m, n)
        If the matrix has several entries for a cell, they are added up in float64 or complex128,
        because a sum may not fit into the dtype of the entries. Otherwise the dtype is the same.

    Examples
    --------
    >>> twice = sp.coo_array(([200, 100], ([0, 0], [1, 1])), shape=(2, 2), dtype=np.uint8)
    >>> summed(twice).toarray()
    array([[  0., 300.],
           [  0.,   0.]])
    """
    found = sp.csr_array(matrix)
    if matrix.format == "coo":
        if found.nnz < matrix.nnz:  # the conversion has added up entries
            found = sp.csr_array(matrix.astype(np.result_type(matrix.dtype, np.float64)))
        return found
    if found.has_canonical_format:
        return found
    found = found.sorted_indices()
    if not found.has_canonical_format:
        found = found.astype(np.result_type(found.dtype, np.float64), copy=True)
        found.sum_duplicates()
    return found


def from_matrix(matrix: Any) -> Graph:
    """Return the graph of a sparse adjacency matrix, whose nodes are the row numbers from 0."""
    if matrix.ndim != 2 or matrix.shape[0] == 0:
        raise ValueError(f"expected a square matrix with at least one row, not {matrix.shape}.")
    return Graph(np.arange(matrix.shape[0]), matrix)


# -- from edges --------------------------------------------------------------------------------


def from_numbers(ends: Array, weights: npt.NDArray[np.float64] | None) -> Graph:
    """Return the graph of the edges ``ends[0, i] -> ends[1, i]``.

    Parameters
    ----------
    ends : ndarray, shape (2, m)
        Integers, or NumPy's strings.
    weights : ndarray, shape (m,), optional
        Of edges that occur several times, the last one counts.
    """
    nodes, (source, target) = np.unique(ends, return_inverse=True)
    return _from_places(nodes, source, target, weights)


def from_names(
    names: dict[str, int], ends: Array, weights: npt.NDArray[np.float64] | None
) -> Graph:
    """Return the graph of edges between strings.

    Parameters
    ----------
    names : dict
        Maps each name to a number from 0. The names stay Python's strings, because NumPy's take as
        much memory for each name as for the longest one.
    ends : ndarray of int, shape (2, m)
        The numbers of the names.
    weights : ndarray, shape (m,), optional
        As for :func:`from_numbers`.
    """
    nodes = np.fromiter(sorted(names), dtype=object, count=len(names))
    place = np.empty(len(names), dtype=np.int64)
    place[[names[name] for name in nodes.tolist()]] = np.arange(len(names))
    source, target = place[ends]
    return _from_places(nodes, source, target, weights)


def _from_places(
    nodes: Array, source: Array, target: Array, weights: npt.NDArray[np.float64] | None
) -> Graph:
    n = len(nodes)
    data = np.ones(len(source)) if weights is None else weights
    return Graph(nodes, last_of_each(source, target, data, n))


def last_of_each(row: Array, column: Array, data: Array, n: int) -> sp.csr_array:
    """Return the matrix of shape (n, n) of these entries; the last of those for one cell counts."""
    if n**2 > np.iinfo(np.int64).max:
        raise ValueError(f"expected at most {math.isqrt(2**63 - 1):,} nodes, not {n:,}.")
    # Number the cells. np.unique keeps the first of duplicates, so reverse the order.
    cells = row.astype(np.int64) * n + column
    cells, last = np.unique(cells[::-1], return_index=True)
    indptr = np.searchsorted(cells, np.arange(n + 1) * n)
    return sp.csr_array((data[::-1][last], cells % max(n, 1), indptr), shape=(n, n))
