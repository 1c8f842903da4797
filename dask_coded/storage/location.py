"""Where a store is, as it travels from the client to all workers."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dask_coded.arguments import check_place

_EXTRA = 'Coded arrays are kept in files by zarr: pip install "dask-coded[storage]"'


class StoreError(ValueError):
    """A store does not hold what it should; the message says why and what to do."""


def local_path(place: str) -> Path | None:
    """Return the path of a place; None if it is no local one."""
    scheme, _, path = place.rpartition("://")
    return Path(path).absolute() if scheme in ("", "file", "local") else None


def imported() -> ModuleType:
    """Return zarr.

    Raises
    ------
    ImportError
        If it is not installed, or too old.
    """
    try:
        import zarr
        import zarr.storage
    except ImportError as exc:
        raise ImportError(f"{_EXTRA}.") from exc
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise ImportError(f"{_EXTRA}; version {zarr.__version__} is too old.")
    found: ModuleType = zarr  # Any, where it is not installed
    return found


@dataclass(frozen=True)
class Location:
    """A folder, an address that fsspec knows, or a Zarr store.

    Parameters
    ----------
    name : str
        An absolute path or an address such as ``s3://bucket/name``; for messages if there are
        ``stored`` bytes.
    stored : bytes or None
        A pickled Zarr store.
    """

    name: str
    stored: bytes | None = None

    @classmethod
    def of(cls, storage: Any) -> Location:
        """Return the location that a user means.

        Raises
        ------
        ImportError
            If zarr is not installed.
        TypeError
            If it is neither a path, an address nor a Zarr store that other processes can open.
        """
        zarr = imported()
        if isinstance(storage, cls):
            return storage
        if isinstance(storage, str | os.PathLike) and os.fspath(storage):
            return cls(check_place("storage", storage))
        elif isinstance(storage, zarr.storage.LocalStore):
            return cls(os.path.abspath(storage.root))
        elif isinstance(storage, zarr.storage.MemoryStore):
            raise TypeError(
                "Argument 'storage' must be a store that all workers can open, a MemoryStore is "
                "another one in each process: pass a path or an address."
            )
        elif isinstance(storage, zarr.abc.store.Store):
            try:
                return cls(str(storage), pickle.dumps(storage))
            except Exception as exc:
                raise TypeError(
                    f"Argument 'storage' must be a store that can be pickled, {storage} cannot "
                    f"({exc}): pass a path or an address."
                ) from exc
        raise TypeError(
            f"Argument 'storage' must be a path, an address such as 's3://bucket/name' or a Zarr "
            f"store, it is {storage!r}."
        )

    def __str__(self) -> str:
        return self.name

    def store(self) -> Any:
        """Open the Zarr store.

        Raises
        ------
        ImportError
            If zarr, or what fsspec needs for the address, is not installed.
        """
        storage: Any = imported().storage
        if self.stored is not None:
            return pickle.loads(self.stored)
        if (path := local_path(self.name)) is not None:
            return storage.LocalStore(path)
        return storage.FsspecStore.from_url(self.name)


@dataclass(frozen=True)
class Storage:
    """The pieces of one encoded array in a store.

    Parameters
    ----------
    location : Location
    group : str
        ``matrix``, or ``transposed`` for those of the transposed array.
    token : str
        Names the encoding. Pieces of another one, even if it is still being written to the same
        place, are elsewhere.
    pieces : int
        How many pieces are in the store: numbers 0, 1, … ``pieces - 1``.
    """

    location: Location
    group: str
    token: str
    pieces: int

    def path(self, name: int | str) -> str:
        """Return the place of a piece, or of something else that belongs to the array."""
        last = f"piece-{name}" if isinstance(name, int) else name
        return f"{self.group}-{self.token}/{last}"
