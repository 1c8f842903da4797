"""Readers that turn files and objects into node names and a sparse adjacency matrix.

============================  =====================================================================
file                          what is read
============================  =====================================================================
``.mtx``                      Matrix Market; nodes are row numbers from 0, as SciPy counts them
``.npz``                      what :func:`scipy.sparse.save_npz` writes, or arrays ``indptr``,
                              ``indices`` and optionally ``data`` and ``shape`` or ``n``; nodes are
                              row numbers from 0
``.txt``, ``.tsv``, ``.csv``  an edge list: source, target and optionally a weight, one edge a line,
and anything else             separated by blanks, tabs or commas. Names in double quotes may hold
                              tabs or commas. Lines that begin with ``#`` or ``%`` are comments; a
                              first line of words above lines of numbers is a header and is skipped
============================  =====================================================================

All but ``.npz`` may be compressed (``.gz``, ``.bz2``). An edge that a text file lists several times
counts once, with its last weight, as in :class:`networkx.DiGraph`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import networkx as nx
import numpy as np
import numpy.typing as npt
import scipy.io
import scipy.sparse as sp
from dask.base import is_dask_collection

from dask_coded.arguments import unwrapped

Array = npt.NDArray[Any]

_COMMENTS = ("#", "%")
# Names that NumPy would read as other integers, such as 007 or +7. It may also be a weight.
_PADDED = re.compile(r"(?:^|[\s,])(?:\+|-?0\d|-0(?:[\s,]|$))")
_GRAPHS = "expected a networkx graph, a SciPy sparse matrix or a list of edges (source, target)"


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
        If the matrix is not square, does not fit the nodes, or has a weight that is complex,
        negative, infinite or NaN, or if two nodes have one name.

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
        object.__setattr__(self, "adjacency", sp.csr_array(self.adjacency))
        if not isinstance(self.nodes, np.ndarray):
            names = np.fromiter(self.nodes, dtype=object, count=len(self.nodes))
            object.__setattr__(self, "nodes", names)
        rows, columns = self.adjacency.shape
        if rows != columns:
            raise ValueError(f"expected a square adjacency matrix, this one is {rows} x {columns}.")
        if rows != len(self.nodes):
            raise ValueError(f"expected a name for each of {rows} nodes, not {len(self.nodes)}.")
        # Readers return names in ascending order.
        ascending = self.nodes.dtype.kind in "iuU" and (self.nodes[1:] > self.nodes[:-1]).all()
        counts = Counter() if ascending else Counter(self.nodes.tolist())
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"expected a different name for each node, {twice[0]!r} occurs twice.")
        weights = self.adjacency.data
        if weights.dtype.kind not in "biuf":
            raise ValueError(f"expected weights that are real numbers, not {weights.dtype}.")
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(bad):
            row = np.searchsorted(self.adjacency.indptr, bad[0], side="right") - 1
            source, target = self.nodes[row], self.nodes[self.adjacency.indices[bad[0]]]
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


# -- graphs from memory ------------------------------------------------------------------------


def as_graph(graph: Any, *, undirected: bool = False, weight: str | None = "weight") -> Graph:
    """Convert a graph from any of the usual forms.

    Parameters
    ----------
    graph : Graph, networkx graph, SciPy sparse adjacency, or edge list
        An edge list is a sequence of pairs ``(source, target)`` or of triples ``(source, target,
        weight)``, or an array of shape (m, 2) or (m, 3). Names are integers or strings. A list is
        never read as a matrix. A square array of numbers is refused, because it may be either.
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

    Examples
    --------
    >>> as_graph([("a", "b"), ("b", "c"), ("a", "b")]).adjacency.toarray()
    array([[0., 1., 0.],
           [0., 0., 1.],
           [0., 0., 0.]])
    """
    graph = unwrapped(graph)
    if isinstance(graph, Graph):
        found = graph
    elif isinstance(graph, nx.Graph):
        found = _from_networkx(graph, weight)
    elif sp.issparse(graph):
        found = _from_matrix(graph)
    elif isinstance(graph, (str, bytes, Path)):
        raise ValueError(f"{_GRAPHS}, not a file name: pass that to read_graph first.")
    elif is_dask_collection(graph):
        raise ValueError(f"{_GRAPHS}, not a dask collection: pass `graph.compute()`.")
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


def _from_matrix(matrix: Any) -> Graph:
    if matrix.ndim != 2 or matrix.shape[0] == 0:
        raise ValueError(f"expected a square matrix with at least one row, not {matrix.shape}.")
    return Graph(np.arange(matrix.shape[0]), sp.csr_array(matrix))


def _from_edge_list(edges: Iterable[Any]) -> Graph:
    if hasattr(edges, "to_numpy"):
        edges = edges.to_numpy()  # of a data frame
    if not isinstance(edges, np.ndarray):
        edges = list(edges)
    if len(edges) == 0:
        raise ValueError(f"{_GRAPHS}, this list is empty.")
    if isinstance(edges, np.ndarray):
        widths = {edges.shape[1] if edges.ndim == 2 else 0}
    else:
        # A string of two letters has two entries but is not an edge.
        widths = {len(e) if isinstance(e, (tuple, list, np.ndarray)) else 0 for e in edges}
    if widths not in ({2}, {3}):
        raise ValueError(
            f"{_GRAPHS}; edges must all have 2 entries, or 3 with a weight: convert a dense "
            "adjacency matrix with scipy.sparse.csr_array first."
        )
    if isinstance(edges, np.ndarray):
        if len(edges) == edges.shape[1] and edges.dtype.kind in "biuf":
            n = len(edges)
            raise ValueError(
                f"{_GRAPHS}; an array of {n} x {n} numbers may be {n} edges or an adjacency "
                "matrix: pass `edges.tolist()` or `scipy.sparse.csr_array(matrix)`."
            )
        source, target, *weights = edges.T
        ends = _names(np.concatenate([source, target]))
    else:
        source, target, *weights = zip(*edges, strict=True)
        ends = _names([*source, *target])
    try:
        numbers = np.asarray(weights[0], dtype=np.float64) if weights else None
    except (TypeError, ValueError):
        raise ValueError(f"{_GRAPHS}; a third entry must be a number, the weight.") from None
    return _from_ends(ends.reshape(2, -1), numbers)


def _names(given: Any) -> Array:
    if isinstance(given, np.ndarray) and given.dtype == object:
        given = given.tolist()  # from a data frame, whose strings are objects
    names = np.asarray(given)
    if names.dtype.kind == "f":
        integers = isinstance(given, list) and all(isinstance(n, int | np.integer) for n in given)
        if integers and min(given) >= 0:
            # Some do not fit into int64, and NumPy's compromise would round them.
            names = np.array(given, dtype=np.uint64)
        elif (names == np.trunc(names)).all() and (np.abs(names) <= 2**53).all():
            return names.astype(np.int64)  # from an array of floats, whose third column is weights
    mixed = names.dtype.kind == "U" and not all(isinstance(name, str) for name in given)
    if names.dtype.kind not in "iuU" or names.ndim != 1 or mixed:
        raise ValueError("expected node names that are all integers (of 64 bits) or all strings.")
    return names


def _from_ends(ends: Array, weights: npt.NDArray[np.float64] | None) -> Graph:
    """Return the graph of the edges ``ends[0, i] -> ends[1, i]``."""
    nodes, (source, target) = np.unique(ends, return_inverse=True)
    n = len(nodes)
    data = np.ones(len(source)) if weights is None else weights
    return Graph(nodes, _matrix_of(source, target, data, (n, n)))


def _matrix_of(row: Array, column: Array, data: Array, shape: tuple[int, int]) -> sp.csr_array:
    """Return the matrix of these entries; the last of those for one cell counts."""
    rows, columns = shape
    # Number the cells. np.unique keeps the first of duplicates, so reverse the order.
    cells = row.astype(np.int64) * columns + column
    cells, last = np.unique(cells[::-1], return_index=True)
    indptr = np.searchsorted(cells, np.arange(rows + 1) * columns)
    return sp.csr_array((data[::-1][last], cells % max(columns, 1), indptr), shape=shape)


# -- graphs from files -------------------------------------------------------------------------


def read_graph(path: str | Path) -> Graph:
    """Read a graph from an edge list, a Matrix Market file or an ``.npz`` file.

    Parameters
    ----------
    path : str or Path
        The file. Its suffix determines the format, see :mod:`dask_coded.graph.readers`.

    Returns
    -------
    Graph
        The nodes of an edge list are in ascending order. They are integers if every name in the
        file is an integer (of 64 bits), strings otherwise.

    Raises
    ------
    OSError
        If the file is missing or cannot be opened.
    ValueError
        If the file holds no valid graph; the message says where and why.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "votes.txt")
    >>> _ = path.write_text("# voter, candidate\\n30 1412\\n30 3352\\n3352 1412\\n")
    >>> graph = read_graph(path)
    >>> graph, graph.nodes
    (Graph(nodes=3, edges=3), array([  30, 1412, 3352]))
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"expected a graph file, {str(path)!r} does not exist.")
    if path.is_dir():
        raise IsADirectoryError(f"expected a graph file, {str(path)!r} is a folder.")
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".bz2")]
    reader = {".mtx": _read_matrix_market, ".npz": _read_npz}.get(
        suffixes[-1] if suffixes else "", _read_edges
    )
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, the file cannot be decoded.") from error
    except (EOFError, zlib.error, zipfile.BadZipFile, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # from the operating system: no permission, a broken disk
        raise ValueError(f"{path}: the compressed data are damaged ({error}).") from error
    except (ValueError, KeyError, OverflowError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from error


def _read_matrix_market(path: Path) -> Graph:
    entries = sp.coo_array(scipy.io.mmread(path))
    matrix = sp.csr_array(entries)
    if matrix.nnz < len(entries.data):  # it has added up equal entries
        matrix = _matrix_of(entries.row, entries.col, entries.data, entries.shape)
    return _from_matrix(matrix)


def _read_npz(path: Path) -> Graph:
    if not zipfile.is_zipfile(path):
        raise ValueError("expected an .npz archive, the file is not one.")
    with np.load(path, allow_pickle=False) as arrays:
        if "format" in arrays:
            return _from_matrix(sp.load_npz(path))
        if not {"indptr", "indices"} <= set(arrays):
            raise ValueError(
                "expected what scipy.sparse.save_npz writes, or arrays 'indptr' and 'indices', "
                f"the archive holds {sorted(arrays)}."
            )
        indptr, indices = arrays["indptr"], arrays["indices"]
        n = int(arrays["n"]) if "n" in arrays else len(indptr) - 1
        shape = tuple(arrays["shape"].tolist()) if "shape" in arrays else (n, n)
        data = arrays["data"] if "data" in arrays else np.ones(len(indices))
    matrix = sp.csr_array((data, indices, indptr), shape=shape)
    matrix.check_format(full_check=True)
    return _from_matrix(matrix)


def _read_edges(path: Path) -> Graph:
    with _open(path) as lines:
        number, line = next(_content(lines), (0, ""))
    if not line:
        raise ValueError("expected one edge a line, the file has none.")
    bare = re.sub('"[^"]*"', "", line)
    separator = next((mark for mark in ",\t" if mark in bare), None)
    width = len(_fields(line, separator))
    if width not in (2, 3):
        raise ValueError(
            "expected lines of 2 columns (source, target) or 3 (and a weight), "
            f"line {number} has {width}."
        )
    try:
        with _open(path) as lines, warnings.catch_warnings():
            # Older versions of NumPy only warn of integers that they have rounded.
            warnings.simplefilter("error", DeprecationWarning)
            table = np.loadtxt(
                _as_written(_content(lines)),
                dtype=[("source", np.int64), ("target", np.int64), ("weight", np.float64)][:width],
                comments=None,
                # Split at any white space, because files mix tabs and blanks.
                delimiter="," if separator == "," else None,
                ndmin=1,
            )
    except (ValueError, DeprecationWarning):
        # Names, a header or a bad line: parse line by line, which takes ten times as long.
        return _from_ends(*_parse_edges(path, separator, width))
    return _from_ends(
        np.stack([table["source"], table["target"]]), table["weight"] if width == 3 else None
    )


def _as_written(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Yield the lines of a file of integers.

    Raises
    ------
    ValueError
        If a line may hold a name such as 007, which NumPy would read as 7.
    """
    for _, line in lines:
        if _PADDED.search(line):
            raise ValueError("expected integers without leading zeros and signs.")
        yield line


def _parse_edges(
    path: Path, separator: str | None, width: int
) -> tuple[Array, npt.NDArray[np.float64] | None]:
    """Return ends, shape (2, m), and weights; every error gives the line number."""
    ends: list[list[str]] = []
    weights: list[float] = []
    header = False
    with _open(path) as lines:
        for number, line in _content(lines):
            row = _fields(line, separator)
            if len(row) != width:
                raise ValueError(
                    f"expected {width} columns as in the first line, line {number} has {len(row)}."
                )
            if width == 3:
                try:
                    weights.append(float(row[2]))
                except ValueError:
                    if not (ends or header or any(map(_is_number, row[:2]))):
                        header = True  # the first line may be one
                        continue
                    raise ValueError(
                        f"expected a number as weight, line {number} has {row[2]!r}."
                    ) from None
            ends.append(row[:2])
    if not ends:
        raise ValueError("expected one edge a line, the file has only a header.")
    names = np.array(ends)
    values = np.array(weights) if width == 3 else None
    # All lines, or all below a header, which has words only.
    may_be = width == 2 and not any(map(_is_number, ends[0]))
    for edges in (slice(None), slice(1, None)) if may_be else (slice(None),):
        try:
            numbers = names[edges].astype(np.int64)
        except (ValueError, OverflowError):
            continue
        # Python also reads 1_0 and 007 as integers, but these are names.
        if len(numbers) and (numbers.astype(names.dtype) == names[edges]).all():
            return numbers.T, None if values is None else values[edges]
    return names.T, values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fields(line: str, separator: str | None) -> list[str]:
    if separator is None:
        return [field.strip('"') for field in line.split()]
    (row,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
    return [field.strip() for field in row]


def _open(path: Path) -> TextIO:
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
    opener = openers.get(path.suffix.lower(), open)
    return cast(TextIO, opener(path, "rt", encoding="utf-8-sig"))


def _content(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank or comments, with their numbers from 1."""
    for number, line in enumerate(lines, 1):
        if (line := line.strip()) and not line.startswith(_COMMENTS):
            yield number, line
