"""Pieces in a store, each written as a whole before its mark says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import scipy.sparse

from dask_coded.storage.arrays import (
    Array,
    MissingChunkError,
    checksum,
    chunks_of,
    digest,
    open_array,
    read_array,
    read_into,
    strict_store,
    write_array,
)
from dask_coded.storage.location import Storage, StoreError, imported
from dask_coded.storage.root import is_named

_MARK = "dask_coded_piece"
_SPARSE = {"csr_array": scipy.sparse.csr_array, "csr_matrix": scipy.sparse.csr_matrix}
_PARTS = ("data", "indices", "indptr")
# What Zarr and NumPy say of metadata and chunks that are wrong. What goes wrong in a store is an
# OSError, see strict_store. All others, such as a thread that cannot be started, say nothing.
_WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class DamagedError(Exception):
    """A piece of a store is missing, half written or damaged."""


def write_piece(
    storage: Storage,
    piece: int,
    data: Any,
    growth: float = 0.0,
    written: Callable[[int, int], object] | None = None,
    replace: bool = False,
) -> None:
    """Write a piece, unless it is there as a whole.

    Two workers may make the same piece if one of them was taken for lost, and their non-zeros may
    differ. A sparse piece that has parts of both is found by a checksum of all its parts, which is
    in its mark.

    Parameters
    ----------
    storage : Storage
    piece : int
    data : ndarray or CSR array, shape (rows, columns)
    growth : float
        How many roundings it has taken part in since it was first made; 0 if never rebuilt.
    written : callable(first, last), optional
        Called after some rows of a dense piece, or some entries of a part of a sparse one.
    replace : bool
        Whether to write it even if its mark says that it is whole, because it is damaged.

    Raises
    ------
    StoreError
        If the place does not name this encoding, as where a shared folder is not mounted.
    OSError
        If it cannot be written.
    """
    path, location = storage.path(piece), storage.location
    if not is_named(storage):
        raise StoreError(
            f"Piece {piece} cannot be written to {location}, which holds no store of this encoding "
            "on this worker: pass a place that is the same for all workers, and use it once."
        )
    if not replace and marked(storage, piece):
        return
    if scipy.sparse.issparse(data):
        kind = next(name for name, known in _SPARSE.items() if isinstance(data, known))
        about = {"kind": kind, "shape": list(map(int, data.shape))}
        node = imported().create_group(
            location.store(), path=path, zarr_format=3, overwrite=True, attributes=about
        )
        parts = [getattr(data, part) for part in _PARTS]
        for name, part in zip(_PARTS, parts, strict=True):
            write_array(location, f"{path}/{name}", part, written)
        mark = _signed(storage.token, piece, growth, _joint(parts))
    else:
        node = write_array(location, path, data, written)
        mark = _signed(storage.token, piece, growth)
    node.update_attributes({_MARK: mark})


def read_piece(
    storage: Storage,
    piece: int,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    sparse: type | None,
    empty: Callable[[], Array],
    read: Callable[[int, int], object] | None = None,
) -> tuple[Any, float]:
    """Read a piece and check it; return it with its growth, see :func:`write_piece`.

    Parameters
    ----------
    storage : Storage
    piece : int
    shape : (int, int)
    dtype : numpy.dtype
    sparse : type or None
        ``scipy.sparse.csr_array`` or ``csr_matrix`` if the piece is of that type.
    empty : callable() -> ndarray
        Makes the array that a dense piece is read into.
    read : callable(first, last), optional
        Called after some rows of a dense piece, or some entries of a part of a sparse one.

    Raises
    ------
    DamagedError
        If it is missing, half written, of another encoding, or differs from its checksums.
    OSError
        If the store is away, or cannot be read.
    """
    path, location = storage.path(piece), storage.location
    try:
        if sparse is None:
            array = open_array(location, path)
            growth, _ = _marks(storage, piece, array.attrs.asdict())
            _expect(shape, tuple(array.shape))
            _expect(dtype.newbyteorder("="), array.dtype)
            out = empty()
            read_into(array, out, read)
            return out, growth
        group = imported().open_group(strict_store(location), path=path, mode="r", zarr_format=3)
        growth, joint = _marks(storage, piece, group.attrs.asdict())
        _expect(list(shape), group.attrs["shape"])
        parts = tuple(read_array(location, f"{path}/{part}", read) for part in _PARTS)
        _expect(dtype.newbyteorder("="), parts[0].dtype)
        _expect(shape[0] + 1, len(parts[2]))
        _check_parts(parts, parts, joint)
        found = sparse(parts, shape=shape)
        return found.astype(dtype, copy=False), growth
    except Exception as exc:
        raise _explained(storage, piece, exc) from exc


def marked(storage: Storage, piece: int) -> bool:
    """Return whether a piece is there and its mark says that it is whole."""
    try:
        store = strict_store(storage.location)
        node = imported().open(store, path=storage.path(piece), mode="r", zarr_format=3)
        _marks(storage, piece, node.attrs.asdict())
    except Exception as exc:
        if isinstance(found := _explained(storage, piece, exc), DamagedError):
            return False
        raise found from exc
    return True


def size_of(storage: Storage, piece: int) -> int:
    """Read a piece, without keeping it, whatever its shape; return its bytes.

    Raises
    ------
    DamagedError, OSError
        As for :func:`read_piece`.
    """
    path, location = storage.path(piece), storage.location
    try:
        node = imported().open(strict_store(location), path=path, mode="r", zarr_format=3)
        _, joint = _marks(storage, piece, node.attrs.asdict())
        if hasattr(node, "shape"):
            return sum(chunk.nbytes for chunk in chunks_of(open_array(location, path)))
        parts = [open_array(location, f"{path}/{part}") for part in _PARTS]
        _check_parts(parts, (chunk for part in parts for chunk in chunks_of(part)), joint)
        return sum(int(part.nbytes) for part in parts)
    except Exception as exc:
        raise _explained(storage, piece, exc) from exc


def _signed(token: str, piece: int, growth: float, joint: int | None = None) -> dict[str, Any]:
    mark = {"array": token, "piece": piece, "growth": float(growth)}
    if joint is not None:
        mark["crc32c"] = joint
    return mark | {"sha256": digest(mark)}


def _marks(storage: Storage, piece: int, attributes: Mapping[str, Any]) -> tuple[float, int | None]:
    """Return what the mark of a piece says: its growth, and the checksum of a sparse one.

    Older stores have no such checksum. Without a mark this is a LookupError.
    """
    mark = attributes.get(_MARK)
    if mark is None:
        raise LookupError("it is half written")
    growth, joint = float(mark["growth"]), mark.get("crc32c")
    if mark != _signed(storage.token, piece, growth, joint):
        raise LookupError("it is of another encoding, or its mark is damaged")
    return growth, joint


def _joint(chunks: Iterable[Array]) -> int:
    """Return the checksum of all parts of a sparse piece, given one after the other."""
    return reduce(lambda found, chunk: checksum(chunk, found), chunks, 0)


def _check_parts(parts: Sequence[Any], chunks: Iterable[Array], joint: int | None) -> None:
    """Check that parts of a sparse piece belong together; raise a LookupError if they do not."""
    data, indices, indptr = parts
    found = _joint(chunks)
    if not data.size == indices.size == indptr[-1] or joint not in (None, found):
        raise LookupError("its data, indices and indptr do not belong together")


def _expect(expected: Any, found: Any) -> None:
    if expected != found:
        raise LookupError(f"it has {found} instead of {expected}")


def _explained(storage: Storage, piece: int, exc: Exception) -> Exception:
    """Return the error that a piece cannot be read: damaged, or else what hinders this process."""
    # An error of Zarr if there is no such node; its class has changed its name.
    missing = isinstance(exc, FileNotFoundError)
    if missing or isinstance(exc, MissingChunkError):
        try:
            if not is_named(storage):  # it is all away, as where a folder is not mounted
                return OSError(f"there is no store of this array in {storage.location}")
        except OSError as away:
            return away
    elif not isinstance(exc, _WRONG):
        return exc
    reason = "it is missing" if missing else next(iter(str(exc).splitlines()), "it is damaged")
    return DamagedError(f"piece {piece} in {storage.location} cannot be used: {reason}")
