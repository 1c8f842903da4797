"""Reader of graph files. The content decides what is read, whatever the file is called.

================  =================================================================================
content           what is read
================  =================================================================================
Matrix Market     nodes are row numbers from 0, as SciPy counts them
archive ``.npz``  what :func:`scipy.sparse.save_npz` writes, or arrays ``indptr``, ``indices`` and
                  optionally ``data`` and ``shape`` or ``n``; nodes are row numbers from 0
other text        an edge list: source, target and optionally a weight, one edge a line, separated
                  by tabs, semicolons, commas, bars or blanks. Names in double quotes may hold these
                  marks. Lines that begin with ``#`` or ``%`` are comments. The first line is
                  skipped if it is a header: words above lines of numbers, or known words such as
                  ``source,target``
================  =================================================================================

All may be compressed by gzip or bzip2. An edge that a text file lists several times counts once,
with its last weight, as in :class:`networkx.DiGraph`. Other formats, such as GML, Pajek or JSON,
are refused with an error that names the format.
"""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from dask_coded.arguments import printable
from dask_coded.graph.adjacency import Graph
from dask_coded.graph.edge_lists import check_options, read_edges
from dask_coded.graph.formats import MATRIX_MARKET, NPZ, recognised
from dask_coded.graph.matrices import read_matrix_market, read_npz
from dask_coded.graph.sources import Source, opened, unpacked


def read_graph(
    path: str | Path | IO[Any],
    *,
    delimiter: str | None = None,
    comments: str | Sequence[str] | None = ("#", "%"),
    header: bool | None = None,
) -> Graph:
    """Read a graph from an edge list, a Matrix Market file or an ``.npz`` file.

    Parameters
    ----------
    path : str, Path, or open file
        The file, in any format of :mod:`dask_coded.graph.readers`. An open file, such as
        ``sys.stdin``, may be of text or bytes. It is read to its end and not closed.
    delimiter : str, optional
        The character that separates the columns of an edge list; ``" "`` for any white space. A
        weight may have a decimal comma if this is not a comma. Default: what the first line has.
    comments : str, sequence of str, or None
        The marks that begin comment lines in an edge list; None keeps all lines.
    header : bool, optional
        Whether the first line of an edge list is a header, which is skipped. Default: if it has
        words above lines of integers or numbers, or a pair such as ``source`` and ``target``.

    Returns
    -------
    Graph
        The nodes of an edge list are in ascending order. They are integers if every name in the
        file is an integer (of 64 bits), strings otherwise.

    Raises
    ------
    OSError
        If the file is missing, is a folder, a device or a pipe, or cannot be opened.
    ValueError
        If the file holds no valid graph, has a format that is not read, or its graph takes more
        memory than is available; the message says where and why. Also if an argument is invalid.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "votes.txt")
    >>> _ = path.write_text("# voter, candidate\\n30 1412\\n30 3352\\n3352 1412\\n")
    >>> graph = read_graph(path)
    >>> graph, graph.nodes
    (Graph(nodes=3, edges=3), array([  30, 1412, 3352]))
    """
    marks = check_options(delimiter, comments)
    with opened(path) as file:
        try:
            with unpacked(file) as source:
                return _read(source, delimiter, marks, header)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file.name}: expected text in UTF-8, the file cannot be decoded."
            ) from error
        except (EOFError, zlib.error, zipfile.BadZipFile, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # from the operating system: no permission, a broken disk
            raise ValueError(f"{file.name}: the compressed data are damaged ({error}).") from error
        except MemoryError as error:
            raise ValueError(f"{file.name}: the graph does not fit into memory.") from error
        except (ValueError, KeyError, OverflowError, csv.Error) as error:
            first_line = next(iter(str(error).splitlines()), "")
            raise ValueError(f"{file.name}: {printable(first_line)}") from error


def _read(source: Source, *options: Any) -> Graph:
    found = recognised(source.head, source.suffix)
    if found == MATRIX_MARKET:
        return read_matrix_market(source)
    if found == NPZ:
        return read_npz(source)
    with source.text() as file:
        return read_edges(file, *options)
