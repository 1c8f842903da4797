"""Sparse matrices in Matrix Market files and in archives of NumPy arrays.

Both begin with sizes, which may be wrong. They are checked against the file and the memory before
anything is allocated.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np
import scipy.io
import scipy.sparse as sp

from dask_coded.graph.adjacency import Graph, from_matrix, last_of_each
from dask_coded.graph.sources import Joined, Source, check_memory

# A row takes a name and a place in `indptr`, twice while the matrix is made; an entry takes two
# indices and a value.
_ROW, _ENTRY = 4 * 8, 3 * 8
_INDICES = {"indptr", "indices", "row", "col", "coords", "offsets", "shape", "n"}


# -- Matrix Market -----------------------------------------------------------------------------


def read_matrix_market(source: Source) -> Graph:
    """Read a Matrix Market file. Of entries that it lists several times, the last one counts."""
    with source.binary(_ENTRY) as file:
        header = _header(file)
        rows, columns, entries, kind, field, symmetry = scipy.io.mminfo(io.BytesIO(header))
        if rows != columns:
            raise ValueError(f"expected a square adjacency matrix, this one is {rows} x {columns}.")
        check_memory("The matrix", _ROW * rows + _ENTRY * entries)
        content: Any = _Content.buffered(header, file)
        triangle = content.raw.counts = kind == "array" and symmetry != "general"
        found = sp.coo_array(scipy.io.mmread(content))
    if triangle:
        # SciPy does not miss what is not there.
        wanted = rows * (rows + (-1 if symmetry == "skew-symmetric" else 1)) // 2
        there = (content.raw.words - len(header.split())) // (2 if field == "complex" else 1)
        if there < wanted:
            raise ValueError(f"the file is cut off: it has {there} of {wanted} values.")
    if found.shape[0] == 0:
        return from_matrix(found)
    matrix = sp.csr_array(found)
    if matrix.nnz < found.nnz:  # it has added up equal entries
        row, column = found.coords
        matrix = last_of_each(row, column, found.data, rows)
    return from_matrix(matrix)


class _Content(Joined):
    """The text of a matrix, whose words may be counted.

    It ends with a line break: SciPy would read on behind a number that ends the file.
    """

    counts = False

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__(head, rest)
        self.words = 0
        self._within = self._ended = False

    def readinto(self, buffer: Any) -> int:
        length = super().readinto(buffer)
        if not length and not self._ended:
            self._ended, length = True, 1
            buffer[:1] = b"\n"
        if self.counts and (block := bytes(buffer[:length])):
            self.words += len(block.split()) - (self._within and not block[:1].isspace())
            self._within = not block[-1:].isspace()
        return length


def _header(file: BinaryIO) -> bytes:
    """Read the banner, the comments and the line of sizes."""
    lines = [file.readline()]
    while (line := file.readline()) and (line.startswith(b"%") or not line.strip()):
        lines.append(line)
    return b"".join([*lines, line])


# -- archives ----------------------------------------------------------------------------------


def read_npz(source: Source) -> Graph:
    """Read what :func:`scipy.sparse.save_npz` writes, or arrays of a CSR matrix."""
    file = source.seekable()
    if not zipfile.is_zipfile(file):
        raise ValueError("expected an .npz archive, the file is not one.")
    try:
        names = _checked_members(file)
        file.seek(0)
        if "format" in names:
            matrix = sp.load_npz(file)
            if matrix.format == "dia":
                _check_offsets(file, matrix)
        else:
            matrix = _from_arrays(file, names)
    except (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:
        # NumPy and SciPy do not document what they raise for arrays of the wrong kind.
        raise ValueError(f"the archive holds no valid sparse matrix ({error}).") from error
    check_memory("The graph", _ROW * max(matrix.shape))
    return from_matrix(matrix)


def _checked_members(file: BinaryIO) -> set[str]:
    """Return the names of the arrays, all of which have the length that they claim."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if others := [m.filename for m in members if not m.filename.endswith(".npy")]:
            raise ValueError(
                "expected an .npz archive, this one of zip holds other files, "
                f"{others[0]!r} among them: unpack it first."
            )
        check_memory("The arrays of the archive", sum(m.file_size for m in members))
        for member in members:
            with archive.open(member) as array:
                shape, dtype, begin = _array_header(array)
            size = math.prod(shape)
            name = member.filename.removesuffix(".npy")
            if dtype.hasobject:
                raise ValueError(f"array {name!r} holds Python objects, which are not read.")
            if begin + size * dtype.itemsize != member.file_size:
                raise ValueError(f"array {name!r} is damaged: its length is not that of {shape}.")
            if name in _INDICES and size and dtype.kind not in "iu":
                raise ValueError(f"array {name!r} must hold integers, its dtype is {dtype}.")
    return {member.filename.removesuffix(".npy") for member in members}


def _array_header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape and dtype of an array in NumPy's format, and where its elements begin."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"expected arrays of numbers, one is in version {version} of .npy.")
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = readers[version](file)
    return shape, dtype, file.tell()


def _check_offsets(file: BinaryIO, matrix: Any) -> None:
    """Check the diagonals of a matrix, which SciPy converts to 32 bits without a word."""
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        if (np.abs(arrays["offsets"].astype(np.float64)) >= max(matrix.shape)).any():
            raise ValueError("expected diagonals within the matrix, an offset is out of range.")


def _from_arrays(file: BinaryIO, names: set[str]) -> sp.csr_array:
    if not {"indptr", "indices"} <= names:
        raise ValueError(
            "expected what scipy.sparse.save_npz writes, or arrays 'indptr' and 'indices', "
            f"the archive holds {sorted(names)}."
        )
    with np.load(file, allow_pickle=False) as arrays:
        indptr, indices = arrays["indptr"], arrays["indices"]
        n = int(arrays["n"]) if "n" in names else len(indptr) - 1
        shape = tuple(arrays["shape"].tolist()) if "shape" in names else (n, n)
        data = arrays["data"] if "data" in names else np.ones(len(indices))
    if data.dtype == np.float16:
        data = data.astype(np.float32)  # SciPy's functions are not made for less
    return sp.csr_array((data, indices, indptr), shape=shape)
