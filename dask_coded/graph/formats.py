"""Recognition of a graph file's format by its beginning, whatever it is called."""

from __future__ import annotations

import re

MATRIX_MARKET = "Matrix Market"
NPZ = ".npz"
EDGES = "edge list"

_NETWORKX = "read it with networkx.{} and pass the graph to the function that you want"
# Lines that begin with #. No two parts of a pattern may match the same text, because the time that
# backtracking takes could grow exponentially then.
_COMMENTS = rb"(?:#[^\n]*\n\s*)*"
# Formats that are not read: what the content begins with after white space, the name, what to do.
_OTHERS = [
    (rb"<(?:!doctype\s+)?html", "a web page", "download the file itself"),
    (
        rb"<(?:\?xml|graphml|gexf)\b",
        "XML",
        _NETWORKX.format("read_graphml or networkx.read_gexf"),
    ),
    (
        rb"\{\s*[\"}]|\[\s*(?:[\[{\"\]]|[-\d.]+\s*,)",
        "JSON",
        _NETWORKX.format("node_link_graph(json.load(file)), if that is its layout,"),
    ),
    (
        rb"(?:%[^\n]*\n\s*)*\*(?:vertices|network|arcs|edges|arcslist|edgeslist|matrix)\b",
        "Pajek",
        _NETWORKX.format("read_pajek"),
    ),
    (
        rb"(?:(?:#|(?:creator|version|comment)\b)[^\n]*\n\s*)*graph\s*\[\s+[a-z_]",
        "GML",
        _NETWORKX.format("read_gml"),
    ),
    (
        rb"(?:c(?:[ \t\r][^\n]*)?\n)*p[ \t]+[a-z]+[ \t]+\d+[ \t]+\d+\s",
        "DIMACS",
        "keep only its lines of edges, without the letter that begins them",
    ),
    (
        rb"(?:(?://|#)[^\n]*\n\s*)*(?:strict\s+)?(?:di)?graph\b[^\n\[{]*\{",
        "Graphviz's DOT",
        _NETWORKX.format("nx_pydot.read_dot"),
    ),
    (
        _COMMENTS + rb"\S+[ \t]+\S+[ \t]+\{[^\n]*\}[ \t\r]*(?:\n|\Z)",
        "a list of edges with attributes",
        _NETWORKX.format("read_edgelist"),
    ),
    (
        _COMMENTS + rb"\S+[ \t]+\d+[ \t\r]*\n\S+[ \t]+\{[^\n]*\}[ \t\r]*(?:\n|\Z)",
        "a list of neighbours with attributes",
        _NETWORKX.format("read_multiline_adjlist"),
    ),
    (rb">>graph6<<", "graph6", _NETWORKX.format("read_graph6")),
    (rb">>sparse6<<", "sparse6", _NETWORKX.format("read_sparse6")),
    (rb"nodedef\s*>", "GDF", "keep only its lines of edges"),
    (rb"dl\s+n\s*=", "UCINET's DL", "keep only its lines of edges"),
    (rb"\x93NUMPY", "NumPy's .npy", "read it with numpy.load and pass the array to as_graph"),
    (rb"MATLAB 5.0 MAT-file", "MATLAB", "read it with scipy.io.loadmat and pass the matrix"),
    (rb"\x89HDF\r\n", "HDF5", "read the columns of its edges and pass them to as_graph"),
    (
        rb"PAR1[\x10-\x1f]",
        "Parquet",
        "pass pandas.read_parquet(path) to as_graph",
    ),
    (rb"\x80[\x02-\x05]", "a pickle", "write the graph as an edge list"),
    (rb"\xfd7zXZ\x00", "compressed by xz", "unpack it first"),
    (rb"\x28\xb5\x2f\xfd", "compressed by Zstandard", "unpack it first"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16", "save it in UTF-8"),
]
_PATTERNS = [
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), name, advice)
    for pattern, name, advice in _OTHERS
]


def recognised(head: bytes, suffix: str) -> str:
    """Return the format of a file: ``MATRIX_MARKET``, ``NPZ`` or ``EDGES``.

    Parameters
    ----------
    head : bytes
        The beginning of the content.
    suffix : str
        Of the file's name. A file that is called ``.mtx`` or ``.npz`` must have that format.

    Raises
    ------
    ValueError
        If the file has another format, which the message names.

    Examples
    --------
    >>> recognised(b"%%MatrixMarket matrix coordinate real general", ".txt")
    'Matrix Market'
    >>> recognised(b"*Vertices 3", ".txt")
    Traceback (most recent call last):
        ...
    ValueError: expected an edge list, Matrix Market or .npz, the file is Pajek: read it with ...
    """
    head = head.removeprefix(b"\xef\xbb\xbf")
    if head[:14].lower() == b"%%matrixmarket":
        return MATRIX_MARKET
    if suffix == ".mtx":
        raise ValueError(
            "Not a Matrix Market file: expected its first line to begin with '%%MatrixMarket'."
        )
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return NPZ
    if suffix == ".npz":
        raise ValueError("expected an .npz archive, the file is not one.")
    begin = head.lstrip()
    for pattern, name, advice in _PATTERNS:
        if pattern.match(begin):
            raise ValueError(
                f"expected an edge list, Matrix Market or .npz, the file is {name}: {advice}."
            )
    if b"\x00" in head:
        raise ValueError("expected text in UTF-8, the file is binary.")
    return EDGES
