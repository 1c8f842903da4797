"""What of a store is whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask_coded.codes import Code
from dask_coded.storage.description import read_description
from dask_coded.storage.location import Location, Storage
from dask_coded.storage.pieces import DamagedError, size_of

# Pieces that are read at once.
_THREADS = 4


class PieceCondition(NamedTuple):
    """A piece of a store.

    Parameters
    ----------
    array : str
        ``matrix`` or ``transposed``.
    piece : int
    nbytes : int
        Of its data; 0 if it is not whole.
    problem : str
        Why it is not whole; empty if it is.
    """

    array: str
    piece: int
    nbytes: int
    problem: str


@dataclass(frozen=True)
class StoreCondition:
    """What of a store is whole, as :func:`dask_coded.check` finds it.

    Parameters
    ----------
    location : str
    code : Code
    shape : (int, int)
        Of the matrix.
    dtype : str
    version : str
        Of the package that has written the store.
    pieces : tuple of PieceCondition
    """

    location: str
    code: Code
    shape: tuple[int, int]
    dtype: str
    version: str
    pieces: tuple[PieceCondition, ...]

    @property
    def whole(self) -> bool:
        """Whether every piece is whole."""
        return not any(piece.problem for piece in self.pieces)

    @property
    def usable(self) -> bool:
        """Whether the pieces that are whole determine all others."""
        arrays = {piece.array for piece in self.pieces}
        return all(
            self.code.decodable([p.piece for p in self.pieces if p.array == a and not p.problem])
            for a in arrays
        )

    def as_json(self) -> dict[str, Any]:
        """Return all that is known, as JSON."""
        return {
            "location": self.location,
            "version": self.version,
            "code": repr(self.code),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "whole": self.whole,
            "usable": self.usable,
            "pieces": [dict(zip(piece._fields, piece)) for piece in self.pieces],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.location}: {self.shape[0]} x {self.shape[1]}, {self.dtype}, {self.code!r}, "
            f"written by dask_coded {self.version}"
        ]
        good = sum(not piece.problem for piece in self.pieces)
        lines.append(f"{good} of {len(self.pieces)} pieces are whole.")
        lines += [f"{p.array}: {p.problem}" for p in self.pieces if p.problem]
        if not self.whole:
            lines.append(
                "The others suffice: open the array, and damaged pieces are made again."
                if self.usable
                else "The others do not suffice: restore these pieces, or encode the array again."
            )
        return "\n".join(lines)


def condition_of(location: Location) -> StoreCondition:
    """Read all of a store and compare it with its checksums.

    Raises
    ------
    FileNotFoundError, StoreError
        As for :func:`~dask_coded.storage.description.read_description`.
    OSError
        If no piece can be read.
    """
    description = read_description(location)
    unread: list[OSError] = []

    def look(found: tuple[str, Storage, int]) -> PieceCondition:
        group, storage, piece = found
        try:
            return PieceCondition(group, piece, size_of(storage, piece), "")
        except DamagedError as exc:
            return PieceCondition(group, piece, 0, str(exc))
        except OSError as exc:
            unread.append(exc)
            return PieceCondition(group, piece, 0, f"piece {piece} cannot be read: {exc}")

    todo: list[tuple[str, Storage, int]] = [
        (group, description.storage(location, group), piece)
        for group in description.arrays
        for piece in range(description.code.pieces)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        pieces = tuple(pool.map(look, todo))
    if len(unread) == len(todo):
        raise unread[0]
    matrix = description.arrays["matrix"]
    return StoreCondition(
        str(location),
        description.code,
        matrix.shape,
        matrix.dtype,
        description.version,
        pieces,
    )
