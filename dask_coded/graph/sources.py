"""The bytes of a graph file: unpacked, and no more than memory can hold.

A file may come from anywhere. A compressed one may be a thousand times as long as it looks, and a
device never ends. All limits are derived from the memory that is available.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

import psutil
from dask.utils import format_bytes
from distributed.system import MEMORY_LIMIT

from dask_coded.arguments import printable

# Bytes that an edge takes at most while its graph is made: the columns, their copies, and what is
# sorted. With 400,000 edges `tracemalloc` finds 122 to 138.
_EDGE = 18 * 8
# Three columns of the greatest length that the csv module reads.
_LONGEST = 3 * csv.field_size_limit()
_BLOCK = 2**20
_PACKED: dict[str, tuple[Any, tuple[bytes, ...]]] = {
    ".gz": (gzip.open, (b"\x1f\x8b",)),
    ".bz2": (bz2.open, tuple(b"BZh%d" % level for level in range(1, 10))),
}


@dataclass(frozen=True)
class Source:
    """The content of a graph file.

    Parameters
    ----------
    suffix : str
        The last one before that of a compression, in lower case.
    head : bytes
        The beginning of the content.
    rest : binary file
        What follows. It need not be seekable.
    is_file : bool
        Whether ``rest`` is the whole file, which can be read from its beginning again.
    """

    suffix: str
    head: bytes
    rest: BinaryIO
    is_file: bool = False

    def binary(self, line: int) -> BinaryIO:
        """Return a text file from its beginning; a line takes so many bytes when it is read."""
        lines = _Lines(self.head.removeprefix(b"\xef\xbb\xbf"), self.rest, line)
        return io.BufferedReader(lines, _BLOCK)

    def text(self) -> TextIO:
        """Return the content of a text file, from its beginning."""
        return io.TextIOWrapper(self.binary(_EDGE), encoding="utf-8")

    def seekable(self) -> BinaryIO:
        """Return the content, from its beginning, as a file that allows seeking."""
        if self.is_file:
            self.rest.seek(0)
            return self.rest
        limit = available_memory()
        found = io.BytesIO(self.head)
        found.seek(len(self.head))
        while block := self.rest.read(_BLOCK):
            found.write(block)
            if found.tell() > limit:
                raise ValueError(
                    f"the file is longer than the {format_bytes(limit)} of memory that are "
                    "available."
                )
        found.seek(0)
        return found


def available_memory() -> int:
    """Return how many bytes of memory a graph may take."""
    return int(min(MEMORY_LIMIT, psutil.virtual_memory().available))


def check_memory(what: str, nbytes: int) -> None:
    """Check that arrays fit into memory, before they are made.

    Raises
    ------
    ValueError
        If they do not.
    """
    if nbytes > (limit := available_memory()):
        raise ValueError(
            f"{what} would take {format_bytes(nbytes)} of memory, {format_bytes(limit)} are "
            "available."
        )


@dataclass(frozen=True)
class Opened:
    """An open file before it is unpacked: a name for messages, its suffixes, and its content.

    ``is_file`` says whether the content can be read from its beginning again.
    """

    name: str
    suffixes: list[str]
    content: BinaryIO
    is_file: bool


@contextmanager
def opened(file: str | Path | IO[Any]) -> Iterator[Opened]:
    """Open a graph file.

    Parameters
    ----------
    file : str, Path, or open file
        An open file may be of text or bytes and need not be seekable. It is not closed.

    Raises
    ------
    OSError
        If the file is missing, is not a regular file, or cannot be opened.
    TypeError
        If it is none of these.
    """
    if hasattr(file, "read"):
        name = getattr(file, "name", None)
        shown = printable(name) if isinstance(name, str) else f"<{type(file).__name__}>"
        yield Opened(shown, [], io.BufferedReader(_Chunks(file), _BLOCK), is_file=False)
        return
    if not isinstance(file, str | Path):
        raise TypeError(f"expected a path or an open file, not {type(file).__name__}.")
    path = Path(file)
    shown = printable(str(path))
    if not path.exists():
        raise FileNotFoundError(f"expected a graph file, '{shown}' does not exist.")
    if path.is_dir():
        raise IsADirectoryError(f"expected a graph file, '{shown}' is a folder.")
    if not path.is_file():
        raise OSError(
            f"expected a graph file, '{shown}' is a device or a pipe, which may never end: pass "
            "an open file, or on the command line `-` for standard input."
        )
    with path.open("rb") as content:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        yield Opened(shown, suffixes, content, is_file=True)


@contextmanager
def unpacked(file: Opened) -> Iterator[Source]:
    """Read the beginning of a file, and unpack it if it is compressed, whatever it is called.

    Raises
    ------
    ValueError
        If the file is not compressed, but called so.
    """
    *before, last = ["", *file.suffixes]
    suffix = before[-1] if last in _PACKED else last
    head = _begin(file.content)
    for opener, magic in _PACKED.values():
        if head.startswith(magic):
            with opener(Joined.buffered(head, file.content)) as content:
                yield Source(suffix, _begin(content), content)
            return
    if last in _PACKED:
        raise ValueError(f"the compressed data are damaged (this is no {last} file).")
    yield Source(suffix, head, file.content, file.is_file)


def _begin(binary: BinaryIO) -> bytes:
    """Read the first bytes, from which the format is recognised."""
    head = b""
    while len(head) < io.DEFAULT_BUFFER_SIZE and (
        more := binary.read(io.DEFAULT_BUFFER_SIZE - len(head))
    ):
        head += more
    return head


class Joined(io.RawIOBase):
    """A file of the bytes that were read already and of those that follow."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = memoryview(head)
        self._rest = rest

    @classmethod
    def buffered(cls, head: bytes, rest: BinaryIO) -> BinaryIO:
        """Return such a file, which reads large blocks."""
        return io.BufferedReader(cls(head, rest), _BLOCK)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(block)] = block
        return len(block)


class _Lines(Joined):
    """A text file that is not longer than memory allows, and neither are its lines."""

    def __init__(self, head: bytes, rest: BinaryIO, line: int) -> None:
        super().__init__(head, rest)
        self._line = line
        self._limit = available_memory()
        self._taken = 0
        self._lines = 1
        self._unfinished = 0

    def readinto(self, buffer: Any) -> int:
        length = super().readinto(buffer)
        block = bytes(buffer[:length])
        ended = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        self._unfinished = length - ended + (0 if ended else self._unfinished)
        lines = block.count(b"\n")
        self._lines += lines
        self._taken += length + self._line * lines
        if self._unfinished > _LONGEST:
            raise ValueError(
                f"expected lines of text, line {self._lines} has more than {_LONGEST:,} bytes."
            )
        if self._taken > self._limit:
            raise ValueError(
                f"the file goes on after {self._lines:,} lines, whose edges would take more than "
                f"the {format_bytes(self._limit)} of memory that are available."
            )
        return length


class _Chunks(io.RawIOBase):
    """The bytes of an open file, which may be of text."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._ready:
            found = self._file.read(len(buffer))
            self._ready = found.encode() if isinstance(found, str) else found or b""
        block, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(block)] = block
        return len(block)
