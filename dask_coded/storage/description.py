"""What a store says about the whole array, in the attributes of its root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded._version import __version__
from dask_coded.codes import Code
from dask_coded.rounds.scaling import Exponents
from dask_coded.storage import generators
from dask_coded.storage.arrays import digest, read_array, write_array
from dask_coded.storage.location import Location, Storage, StoreError, imported
from dask_coded.storage.root import FORMAT, NAME, check_begun, said

_FILE = "zarr.json"


@dataclass(frozen=True)
class ArrayDescription:
    """One encoded array: the matrix, or its transpose.

    Parameters
    ----------
    token : str
        Names the encoding, as in :class:`~dask_coded.storage.location.Storage`.
    rows : tuple of int, length k
        Rows of each block.
    stripes : int
        Stripes of every piece.
    mixed : bool
        Whether pieces combine blocks, and have as many rows as the longest block.
    columns : int
    dtype : str
    sparse : str or None
        ``csr_array`` or ``csr_matrix`` if pieces are sparse.
    check_finite : bool
        Whether NaN and infinity were refused.
    verify : bool
        Whether shares are verified.
    nbytes : int
        Bytes of all pieces together.
    exponents, typical : tuple of ndarray of int16, length k; or empty
        Powers of two by which the rows of each block are scaled, and those of their typical
        entries.
    footprints : tuple of bytes, length k; or empty
        The columns that each block touches: one bit each, compressed by zlib.
    sizes : ndarray of float32, shape (k, columns) or (1, columns), or None
        Root mean square of the entries of the scaled rows in each column, of each block or of all.
    """

    token: str
    rows: tuple[int, ...]
    stripes: int
    mixed: bool
    columns: int
    dtype: str
    sparse: str | None
    check_finite: bool
    verify: bool
    nbytes: int
    exponents: tuple[Exponents, ...] = ()
    typical: tuple[Exponents, ...] = ()
    footprints: tuple[bytes, ...] = ()
    sizes: npt.NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return sum(self.rows), self.columns


@dataclass(frozen=True)
class Description:
    """A coded array in a store.

    Parameters
    ----------
    code : Code
    arrays : dict of str to ArrayDescription
        ``matrix`` and, if it was encoded with its transpose, ``transposed``.
    names : (str or None, str or None)
        Of the dimensions, if the matrix was an xarray object.
    version : str
        Of the package that has written the store.
    """

    code: Code
    arrays: Mapping[str, ArrayDescription]
    names: tuple[str | None, str | None] = (None, None)
    version: str = __version__

    def storage(self, location: Location, group: str) -> Storage:
        """Return where the pieces of one of the arrays are."""
        return Storage(location, group, self.arrays[group].token, self.code.pieces)


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Check that a dtype can be stored.

    Raises
    ------
    TypeError
        If it has more than 64 bits for a real number, which Zarr does not know.
    """
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise TypeError(
            f"A store cannot hold numbers of dtype {dtype}: convert with `A.astype(float)`."
        )


def write_description(location: Location, description: Description) -> None:
    """Write the description, which makes the store complete.

    Raises
    ------
    StoreError
        If another encoding has begun at the same place.
    """
    check_begun(location, {group: array.token for group, array in description.arrays.items()})
    arrays = {}
    for group, array in description.arrays.items():
        storage = description.storage(location, group)
        content = asdict(array)
        names = ("exponents", "typical", "footprints", "sizes")
        parts = {name: content.pop(name) for name in names}
        content["scaled"] = bool(parts["exponents"])
        if parts["sizes"] is not None:
            write_array(location, storage.path("sizes"), parts["sizes"].ravel())
        content["footprints"] = list(map(len, parts["footprints"]))
        if content["scaled"]:
            for name in ("exponents", "typical"):
                values = np.concatenate(parts[name]).astype(np.int16)
                write_array(location, storage.path(name), values)
        if parts["footprints"]:
            packed = np.frombuffer(b"".join(parts["footprints"]), np.uint8)
            write_array(location, storage.path("footprints"), packed)
        arrays[group] = content | {"rows": list(array.rows)}
    content = {
        "complete": True,
        "format": FORMAT,
        "version": description.version,
        "code": generators.to_json(description.code),
        "arrays": arrays,
        "names": list(description.names),
    }
    # Writing took a while: an encoding that was started again has deleted these pieces.
    check_begun(location, {group: array.token for group, array in description.arrays.items()})
    root = imported().open_group(location.store(), mode="r+", zarr_format=3)
    root.update_attributes({NAME: content | {"sha256": digest(content)}})


def read_description(location: Location) -> Description:
    """Read the description of a store.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    StoreError
        If the store is half written, damaged, of another format, or holds something else.
    """
    try:
        content = said(location)
        complete, checksum = content["complete"], content.pop("sha256", "")
    except FileNotFoundError as exc:
        raise FileNotFoundError(
            f"There is no coded array in {location}: check the place, and that this process can "
            "read it."
        ) from exc
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise StoreError(
            f"The store {location} holds no coded array, or its description is damaged: restore "
            f"{_FILE}, or encode the array again."
        ) from exc
    if complete is False:
        raise StoreError(
            f"The store {location} is half written, because its encoding has not ended: encode "
            "the array again with the same `storage`."
        )
    if checksum != digest(content):
        raise StoreError(
            f"The description of the store {location} differs from its checksum: restore {_FILE}, "
            "or encode the array again."
        )
    if content["format"] != FORMAT:
        raise StoreError(
            f"The store {location} has format {content['format']}, this version of dask_coded, "
            f"{__version__}, reads {FORMAT}: install dask_coded {content['version']}."
        )
    try:
        arrays = {
            group: _array(location, group, array) for group, array in content["arrays"].items()
        }
        code = generators.from_json(content["code"])
    except OSError as exc:
        if not isinstance(exc, FileNotFoundError):
            raise
        raise _damaged(location, exc) from exc
    except (ImportError, MemoryError):
        raise
    except Exception as exc:
        raise _damaged(location, exc) from exc
    first, second = content["names"]
    return Description(code, arrays, (first, second), content["version"])


def _damaged(location: Location, exc: Exception) -> StoreError:
    return StoreError(
        f"The exponents or footprints in the store {location} are damaged, without which its "
        f"pieces are of no use ({next(iter(str(exc).splitlines()), '')}): restore them, or encode "
        "the array again."
    )


def _array(location: Location, group: str, content: dict[str, Any]) -> ArrayDescription:
    rows = tuple(content.pop("rows"))
    sizes = content.pop("footprints")
    storage = Storage(location, group, content["token"], 0)
    scales: dict[str, Any] = {}
    if content.pop("scaled"):
        for name in ("exponents", "typical"):
            values = read_array(location, storage.path(name))
            scales[name] = tuple(_cut(values, rows))
        with suppress(Exception):  # it serves warnings alone, and older stores have none
            values = read_array(location, storage.path("sizes"))
            found = values.reshape(-1, content["columns"])
            scales["sizes"] = found if len(found) in (1, len(rows)) else None
    footprints: tuple[bytes, ...] = ()
    if sizes:
        packed = read_array(location, storage.path("footprints"))
        footprints = tuple(part.tobytes() for part in _cut(packed, sizes))
    return ArrayDescription(rows=rows, footprints=footprints, **scales, **content)


def _cut(values: Any, sizes: Sequence[int]) -> list[Any]:
    if len(values) != sum(sizes):
        raise ValueError(f"there are {len(values)} entries instead of {sum(sizes)}")
    return np.split(values, np.cumsum(sizes)[:-1])
