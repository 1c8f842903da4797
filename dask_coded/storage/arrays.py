"""Zarr arrays whose chunks have checksums, and of which no chunk may be missing."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dask_coded.storage.location import Location, imported

# Bytes of a chunk, about. Workers read and write a piece chunk by chunk, so this is also the memory
# that they need in addition to the piece.
_CHUNK = 2**24

# Bytes that are read and then checked at once; from 2**18 to 2**21, more is a little faster.
_CACHED = 2**21

Array = np.ndarray[Any, Any]


class MissingChunkError(Exception):
    """A chunk of an array is missing."""


@cache
def _strict() -> type[Any]:
    """Return the class of stores that fail where a chunk is missing.

    Zarr takes missing chunks for zeros. To count them before or after is not safe, because another
    worker may be about to write them again.
    """
    imported()
    from zarr.storage import WrapperStore

    class Strict(WrapperStore):  # type: ignore[type-arg, misc, unused-ignore]
        async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
            try:
                found = await super().get(key, *args, **kwargs)
            except Exception as exc:
                raise _away(exc) from exc
            if found is None and not key.endswith("zarr.json"):
                raise MissingChunkError(f"{key} is missing")
            return found

    return Strict


def _away(exc: Exception) -> Exception:
    """Return an error of a store as one that Zarr does not take for a missing or a wrong file."""
    if isinstance(exc, OSError) and not isinstance(exc, FileNotFoundError):
        return exc
    return exc if isinstance(exc, MemoryError | ImportError) else OSError(f"{exc!r}")


def strict_store(location: Location) -> Any:
    """Open a store to read it.

    A missing chunk is a :class:`MissingChunkError`, and what goes wrong in the store an OSError.
    """
    try:
        store = location.store()
    except Exception as exc:
        raise _away(exc) from exc
    return _strict()(store)


def chunk_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return how many rows of an array are in a chunk."""
    row = int(np.prod(shape[1:])) * dtype.itemsize
    return max(1, min(_CHUNK // max(row, 1), shape[0]))


def write_array(
    location: Location,
    path: str,
    data: Array,
    written: Callable[[int, int], object] | None = None,
) -> Any:
    """Write an array, in place of what is there; return the Zarr array.

    ``written(first, last)`` is called after some rows.
    """
    zarr = imported()
    from zarr.codecs import Crc32cCodec

    dtype = data.dtype.newbyteorder("=")
    step = chunk_rows(data.shape, dtype)
    array = zarr.create_array(
        location.store(),
        name=path,
        shape=data.shape,
        chunks=(step, *(max(size, 1) for size in data.shape[1:])),
        dtype=dtype,
        filters=None,
        compressors=[Crc32cCodec()],
        fill_value=0,
        zarr_format=3,
        overwrite=True,
        config={"write_empty_chunks": True},
    )
    for first in range(0, len(data), step):
        last = min(first + step, len(data))
        array[first:last] = np.asarray(data[first:last])
        if written is not None:
            written(first, last)
    return array


def open_array(location: Location, path: str) -> Any:
    """Open an array to read it; a missing chunk is a :class:`MissingChunkError`."""
    return imported().open_array(strict_store(location), path=path, mode="r", zarr_format=3)


def chunks_of(array: Any) -> Iterator[Array]:
    """Read the chunks of a Zarr array one after the other."""
    for first in range(0, array.shape[0], step := array.chunks[0]):
        yield array[first : first + step]


def read_into(array: Any, out: Array, read: Callable[[int, int], object] | None = None) -> None:
    """Read a Zarr array into another one; ``read(first, last)`` follows some rows."""
    step, folder = array.chunks[0], _folder(array, out)
    for first in range(0, array.shape[0], step):
        last = min(first + step, array.shape[0])
        if folder is not None and last - first == step:
            key = array.metadata.encode_chunk_key((first // step, *(0,) * (array.ndim - 1)))
            _read_file(folder / key, out[first:last])
        else:
            out[first:last] = array[first:last]
        if read is not None:
            read(first, last)


def _folder(array: Any, out: Array) -> Path | None:
    """Return the folder of an array whose chunks can be read from files as they are."""
    from zarr.codecs import BytesCodec, Crc32cCodec
    from zarr.storage import LocalStore

    # Of a store that fails where a chunk is missing.
    store = getattr(array.store, "_store", None)
    as_is = (
        sys.byteorder == "little"
        and array.metadata.codecs == (BytesCodec(endian="little"), Crc32cCodec())
        and array.chunks[1:] == array.shape[1:]
        and out.flags.c_contiguous
        and out.dtype == array.dtype
    )
    return Path(store.root) / array.path if as_is and isinstance(store, LocalStore) else None


def _read_file(path: Path, out: Array) -> None:
    """Read a chunk that is followed by its checksum where it belongs, and check it.

    Zarr reads the file, and copies it twice: from the page cache, that takes 2.5 times as long.
    """
    import google_crc32c

    room = np.asarray(out).reshape(-1).view(np.uint8)
    seen = room.view()
    seen.flags.writeable = False  # nothing else is taken
    view, end, found, start = room.data, bytearray(5), 0, 0
    try:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(view[start : start + _CACHED]):
                found = google_crc32c.extend(found, seen[start : start + read])
                start += read
            rest = file.readinto(end)
    except FileNotFoundError as exc:
        raise MissingChunkError(f"{path} is missing") from exc
    if start < len(view) or rest != 4 or found.to_bytes(4, "little") != end[:4]:
        raise ValueError(f"stored and computed checksum do not match in {path}")


def read_array(
    location: Location, path: str, read: Callable[[int, int], object] | None = None
) -> Array:
    """Read a whole array; ``read(first, last)`` follows some rows."""
    array = open_array(location, path)
    out = np.empty(array.shape, array.dtype)
    read_into(array, out, read)
    return out


def checksum(data: Array, before: int = 0) -> int:
    """Return the CRC-32C of a vector, or of what has another one and the vector behind it."""
    import google_crc32c

    found = np.ascontiguousarray(data, data.dtype.newbyteorder("<")).view(np.uint8)
    found.flags.writeable = False  # nothing else is taken
    for first in range(0, len(found), _CACHED):
        before = google_crc32c.extend(before, found[first : first + _CACHED])
    return int(before)


def digest(content: Mapping[str, Any]) -> str:
    """Return a checksum of what JSON says."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
