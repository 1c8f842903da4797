"""Small files that outlive a cluster: written as a whole, and read only if they are whole.

A place is a path, or an address that fsspec knows. Each file ends with the SHA-256 of what is
before, which readers of pickles do not notice.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from time import time
from typing import Any

from dask_coded.storage.location import StoreError, local_path

#: Before the checksum, at the end of a file.
SEAL = b"\ndask-coded sha256 "
_LENGTH = len(SEAL) + 64
_PARTIAL = ".partial"
# Seconds after which nothing writes a partial file any more, even if clocks differ a little.
_DEAD = 3600.0


def sealed(content: bytes) -> bytes:
    """Return a content with its checksum.

    Examples
    --------
    >>> unsealed(sealed(b"state"))
    b'state'
    """
    return content + SEAL + sha256(content).hexdigest().encode()


def is_sealed(data: bytes) -> bool:
    """Whether a file ends as one that was written here."""
    return data[-_LENGTH:].startswith(SEAL)


def unsealed(data: bytes) -> bytes:
    """Return a content without its checksum.

    Raises
    ------
    StoreError
        If it has none, or another one.
    """
    content = data[:-_LENGTH]
    if not is_sealed(data) or sealed(content) != data:
        raise StoreError("The file is damaged: its checksum differs.")
    return content


def _remote(place: str) -> tuple[Any, str]:
    import fsspec

    files, path = fsspec.core.url_to_fs(place)
    files.invalidate_cache()
    return files, path


def write_file(place: str, content: bytes, confirm: Callable[[], None] = lambda: None) -> None:
    """Write a file with its checksum.

    A local reader finds all of it, or the previous content. So does one of an object store. The
    file takes the place of the previous one if ``confirm`` raises no exception. At an address it is
    sent after that, so that a process which is stopped while it sends replaces a newer file.

    Raises
    ------
    OSError
        If it cannot be written. The previous content of a local file is still there.
    """
    packed = sealed(content)
    if (whole := local_path(place)) is None:
        files, path = _remote(place)
        confirm()
        files.pipe_file(path, packed)
        return
    # Not by `tempfile`, whose files only their owner can read.
    part = whole.with_name(f".{whole.name}.{uuid.uuid4().hex}{_PARTIAL}")
    try:
        with part.open("xb") as file:
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())
        confirm()
        part.replace(whole)
    except BaseException:  # the disk may be full, or the user may have pressed Ctrl-C
        part.unlink(missing_ok=True)
        raise


def remove_partials(place: str) -> None:
    """Remove what processes that were killed have left half written of a local file.

    What a process may still write is younger.
    """
    if (whole := local_path(place)) is None:
        return
    name = re.compile(rf"\.{re.escape(whole.name)}\.[0-9a-f]{{32}}{re.escape(_PARTIAL)}")
    with suppress(OSError):  # they only take room
        for path in whole.parent.iterdir():
            if name.fullmatch(path.name) and path.stat().st_mtime < time() - _DEAD:
                path.unlink()


def read_file(place: str, end: int | None = None) -> bytes:
    """Return all bytes of a file, with its checksum, or the first ones.

    Raises
    ------
    FileNotFoundError
        If there is none.
    OSError
        If it cannot be read.
    """
    if (path := local_path(place)) is not None:
        with path.open("rb") as file:
            return file.read(end)
    files, name = _remote(place)
    return bytes(files.cat_file(name, end=end))


def make_folder(place: str) -> None:
    """Make a folder, unless it is there.

    Those of object stores need not be made, and some stores refuse to. If an address has a folder
    that is needed and cannot be made, files cannot be written there.
    """
    if (path := local_path(place)) is not None:
        path.mkdir(parents=True, exist_ok=True)
        return
    files, name = _remote(place)
    with suppress(OSError):
        files.makedirs(name, exist_ok=True)
