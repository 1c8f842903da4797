"""An operand on its way: what workers say about it, and the chunks that it travels in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from distributed.system import MEMORY_LIMIT

from dask_coded.rounds.broadcast import LEAST_CHUNK, chunk_bytes
from dask_coded.transport.messages import Message
from dask_coded.typing import Ints


class Part(NamedTuple):
    """Some entries of an operand, or all of them, that come in chunks.

    Parameters
    ----------
    first, chunks : int
        Number of the first chunk, and how many. Chunks of all parts are numbered together.
    chunk_bytes : int
        Size of each but the last.
    dtype, shape : str and tuple of int
        Of the part.
    length : int
        Of the operand.
    """

    first: int
    chunks: int
    chunk_bytes: int
    dtype: str
    shape: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class OperandChunk(Message):
    """A chunk of an operand, for the receiver of a host: it answers :class:`ChunkConfirmed`.

    Parameters
    ----------
    part : Part
    number : int
    data : ndarray of uint8
    below : Route
        Addresses that it passes the chunk on to, each with what this one does.
    """

    part: tuple[Any, ...]
    number: int
    data: Any
    below: tuple[Any, ...]

    is_bulky: ClassVar[bool] = True


@dataclass(frozen=True)
class OperandAt(Message):
    """The operand is here. The receiver of a host sends this to the coordinator.

    The coordinator sends it on to others of the host.

    Parameters
    ----------
    place : SharedArray or None
        Where it lies; None if others cannot read it.
    """

    place: tuple[Any, ...] | None


@dataclass(frozen=True)
class ChunkConfirmed(Message):
    """The answer to :class:`OperandChunk`: the chunk is here, and at most hosts below."""

    number: int


@dataclass(frozen=True)
class ChunksLacking(Message):
    """A participant sends this to the coordinator if it waits for the operand.

    Parameters
    ----------
    numbers : tuple of int
        Of chunks that have not come for a while.
    unreadable : bool
        Whether it cannot read the memory where the operand lies.
    """

    numbers: tuple[int, ...]
    unreadable: bool = False


class Ticket(NamedTuple):
    """What a worker's first message says about the operand.

    Parameters
    ----------
    operand : ndarray, SharedArray or None
        The operand, or where it lies. None if there is none, or it comes later.
    parts : tuple of (Part, bytes or None)
        What comes to this worker, or to another one on its host, whose memory it then reads: each
        part with its entries, see :mod:`dask_coded.rounds.footprint`, or None for all of them.
    """

    operand: Any
    parts: tuple[tuple[Part, bytes | None], ...] = ()

    @classmethod
    def received(cls, fields: Sequence[Any]) -> Self:
        """Return a ticket that a peer has sent.

        Raises
        ------
        ValueError
            If there can be no such parts.
        """
        operand, parts = fields
        return cls(operand, tuple((checked_part(part), packed) for part, packed in parts))


class Entries:
    """An operand, or some entries of it, in chunks.

    Parameters
    ----------
    part : Part
    array : ndarray
        Contiguous; these entries, or the operand that has them at ``indices``.
    indices : ndarray of int, optional
    """

    def __init__(
        self, part: Part, array: np.ndarray[Any, Any], indices: Ints | None = None
    ) -> None:
        self.part = part
        self.array = array
        self._indices = indices
        self._bytes = array.reshape(-1).view(np.uint8)

    @property
    def numbers(self) -> range:
        """The numbers of the chunks."""
        return numbers_of(self.part)

    def chunk(self, number: int) -> np.ndarray[Any, Any]:
        """Return the bytes of a chunk; a view, unless they are gathered."""
        begin = (number - self.part.first) * self.part.chunk_bytes
        end = begin + self.part.chunk_bytes
        if self._indices is None:
            return self._bytes[begin:end]
        entry = self._bytes.size // len(self.array)
        return self.array[self._indices[begin // entry : end // entry]].reshape(-1).view(np.uint8)


def entries_of(
    operand: np.ndarray[Any, Any], columns: Sequence[Ints], hosts: Sequence[int]
) -> list[Entries]:
    """Return the parts of an operand: some entries each, and the whole of it as the last one.

    Parameters
    ----------
    operand : ndarray
        Contiguous.
    columns : sequence of ndarray of int
        The entries of each part but the last.
    hosts : sequence of int
        To how many hosts each part goes at first.
    """
    entry = operand.nbytes // len(operand)
    found: list[Entries] = []
    first = 0
    for indices, count in zip([*columns, None], hosts, strict=True):
        length = len(operand) if indices is None else len(indices)
        size = length * entry
        each = chunk_bytes(size, max(count, 1))
        if indices is not None:
            # Each chunk is gathered when it is sent, so it holds whole entries.
            each = max(each // entry, 1) * entry
        shape = (length, *operand.shape[1:])
        part = Part(first, -(-size // each), each, operand.dtype.str, shape, len(operand))
        found.append(Entries(part, operand, indices))
        first += part.chunks
    return found


def numbers_of(part: Part) -> range:
    """Return the numbers of the chunks of a part."""
    return range(part.first, part.first + part.chunks)


def checked_part(fields: Sequence[Any]) -> Part:
    """Return a part as a peer has described it.

    Raises
    ------
    ValueError
        If there can be no such part.
    """
    part = Part(*fields) if len(fields) == len(Part._fields) else None
    if part is None or not _is_possible(part):
        raise ValueError(f"A peer has described a part of an operand as {fields!r:.200}")
    return part


def _is_possible(part: Part) -> bool:
    first, chunks, chunk_bytes, dtype, shape, length = part
    if type(shape) is not tuple or not shape or type(dtype) is not str:
        return False
    if any(type(n) is not int or n < 0 for n in (first, chunks, chunk_bytes, length, *shape)):
        return False
    try:
        found = np.dtype(dtype)
    except TypeError:
        return False
    row = math.prod(shape[1:]) * found.itemsize
    size = shape[0] * row
    return (
        found.kind in "biufc"
        and shape[0] <= length
        and length * row <= MEMORY_LIMIT
        # Chunks of whole entries may be somewhat smaller than the least size.
        and (chunks <= 1 or 2 * chunk_bytes >= LEAST_CHUNK)
        and chunks == (-(-size // chunk_bytes) if chunk_bytes else 0)
    )
