"""Arrays that several processes of one host read without copying them.

A segment is an anonymous file in memory (``memfd_create``). Its owner maps it and writes arrays
into it. A peer opens it through the owner's ``/proc`` entry and maps it, too. The kernel frees it
when the last process has unmapped it, so nothing is left behind, whichever process is killed when.

Two workers share memory if the peer can open a segment and finds the owner's nonce in it. Host
names do not decide that, because containers and namespaces differ. Without ``memfd_create`` or
``/proc`` no two workers share memory, and arrays travel in messages.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import threading
import weakref
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

#: Smaller arrays travel in messages: opening and mapping a segment would cost more.
LEAST_BYTES = 1 << 16

# The nonce lies in the first page, so that arrays are aligned to pages.
_HEADER = mmap.PAGESIZE
_NONCE = 16
# Arrays within a segment begin at multiples of this many bytes, the size of a cache line.
_ALIGNED = 64
# How many segments wait to be used again, at most: the operands and results of two rounds. They run
# at once, or alternate because they are of a matrix and of its transpose. The first access to new
# memory is slow in each process. In gradient descent, where operands of 0.6 and 19 MB alternate, a
# coordinator copied its shares in 40 to 60 ms with new segments, and in 3 to 7 ms with used ones.
_SPARE = 4
# A segment is let go if the next leases, as many as this, take others.
_UNUSED = 8
# A segment is used again for an array of this fraction of its size or more.
_SLACK = 4
#: How many results lie in segments at once: an algorithm needs its last two and the next one. Each
#: takes two file descriptors as long as it lives, and an algorithm may collect thousands.
RESULTS = 3

logger = logging.getLogger("distributed.dask_coded")


class SharedArray(NamedTuple):
    """Where an array lies.

    Parameters
    ----------
    pid, fd : int
        Process and file descriptor of the owner.
    nonce : bytes
        What the segment begins with.
    offset : int
        Of the array, in bytes.
    dtype : str
    shape : tuple of int
    """

    pid: int
    fd: int
    nonce: bytes
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Segment:
    """Memory that this process owns and others may map.

    Parameters
    ----------
    size : int
        Bytes for arrays.

    Raises
    ------
    OSError
        If the system refuses.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.nonce = secrets.token_bytes(_NONCE)
        self._pid = os.getpid()
        self._fd: int | None = os.memfd_create("dask-coded", os.MFD_CLOEXEC)
        try:
            # Pages are allocated when they are written, and a worker writes only part of its rows.
            os.ftruncate(self._fd, _HEADER + size)
            self._map = mmap.mmap(self._fd, _HEADER + size)
        except BaseException:
            self.close()
            raise
        self._map[:_NONCE] = self.nonce

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the segment. Arrays in it live on where they are mapped."""
        fd, self._fd = getattr(self, "_fd", None), None
        if fd is not None and os.getpid() == self._pid:
            os.close(fd)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], at: int = 0) -> Any:
        """Return the part of the segment that begins at a byte, as an array."""
        count = math.prod(shape)
        found = np.frombuffer(self._map, dtype, count, _HEADER + at)
        return found.reshape(shape)

    def place(self, array: np.ndarray[Any, Any], at: int = 0) -> SharedArray:
        """Return how peers find an array of this segment that begins at a byte."""
        assert self._fd is not None, "the segment is closed"
        return SharedArray(
            self._pid, self._fd, self.nonce, _HEADER + at, array.dtype.str, array.shape
        )


class Mappings:
    """Segments of other processes, as this one has mapped them.

    Parameters
    ----------
    most : int
        How many to keep mapped for the next view. An array that is held keeps its own segment.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._mapped: dict[tuple[int, int, bytes], mmap.mmap] = {}

    def view(self, shared: SharedArray) -> np.ndarray[Any, Any]:
        """Return a peer's array, read-only. It stays valid as long as it is held.

        Raises
        ------
        OSError
            If the segment cannot be opened, or is another one.
        """
        key = shared.pid, shared.fd, shared.nonce
        # Entered again, so that the dict is in the order of use.
        found = self._mapped.pop(key) if key in self._mapped else _opened(*key)
        self._mapped[key] = found
        self.trim(self._most)
        count = math.prod(shared.shape)
        return np.frombuffer(found, shared.dtype, count, shared.offset).reshape(shared.shape)

    def trim(self, most: int) -> None:
        """Keep only the last ones used: a mapping keeps the memory of a segment in use."""
        while len(self._mapped) > most:
            del self._mapped[next(iter(self._mapped))]

    def clear(self) -> None:
        """Keep none of them mapped."""
        self._mapped.clear()


def is_readable(segment: SharedArray) -> bool:
    """Return whether this process can read an array of another one."""
    try:
        Mappings(most=0).view(segment)
    except OSError:
        return False
    return True


class Memory:
    """The segments that a process shares. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which they were given back, each with the number of leases until then.
        self._spare: list[tuple[int, Segment]] = []
        self._leases = 0
        self._keeps = False  # whether a segment may be used again soon
        self._refused = False
        # By the address of their first byte.
        self._results: dict[int, Segment] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array for a result, which can be shared as it is if it is an operand next.

        An ordinary one if it is small or has Python objects, or if there is no memory for it.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_BYTES or dtype.hasobject or len(self._results) >= RESULTS:
            return np.empty(shape, dtype)
        if (segment := self.lease(size)) is None:
            return np.empty(shape, dtype)
        array: np.ndarray[Any, Any] = segment.array(dtype, shape)
        address = _address(array)
        self._results[address] = segment
        # All views of the array have the same base, and keep that alive.
        weakref.finalize(array.base, self._released, address).atexit = False
        return array

    def _released(self, address: int) -> None:
        segment = self._results.pop(address)
        if self._keeps:
            # Without the lock, because the garbage collector may call this while it is held.
            self._spare.append((self._leases, segment))

    def share(self, array: np.ndarray[Any, Any]) -> tuple[Segment | None, SharedArray] | None:
        """Copy an array into a segment; None if there is no memory for it.

        Give the segment back by :meth:`reuse` when it no longer matters what its readers find. A
        result that lies in a segment is not copied, and there is none to give back.
        """
        result = self._results.get(_address(array))
        if result is not None and array.nbytes <= result.size:
            return None, result.place(array)
        if (segment := self.lease(array.nbytes)) is None:
            return None
        copy = segment.array(array.dtype, array.shape)
        copy[...] = array
        return segment, segment.place(copy)

    def new(self, size: int) -> Segment | None:
        """Return a new segment; None if the platform has none, or the system refuses."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return Segment(size)
        except OSError as exc:
            if not self._refused:
                self._refused = True
                logger.warning(
                    "Workers on this host cannot share memory, so arrays are copied: %s", exc
                )
            return None

    def reuse(self, segment: Segment) -> None:
        """Let a segment be overwritten by the next array that is shared."""
        with self._lock:
            if self._keeps:
                self._spare.append((self._leases, segment))

    def close(self) -> None:
        """Let go of the segments that wait to be used again, and keep none until the next lease."""
        with self._lock:
            self._keeps = False
            self._spare.clear()

    def lease(self, size: int) -> Segment | None:
        """Return a segment that was given back, or a new one; None if there is no memory for it."""
        with self._lock:
            self._keeps = True
            self._leases += 1
            spare, self._spare = self._spare, []
            oldest = self._leases - _UNUSED
            kept = [(since, segment) for since, segment in spare[-_SPARE:] if since >= oldest]
            most = _SLACK * max(size, LEAST_BYTES)
            fits = [segment for _, segment in reversed(kept) if size <= segment.size <= most]
            # Of those of one size the last one used, because other processes have mapped it.
            found = min(fits, key=lambda segment: segment.size, default=None)
            self._spare = [entry for entry in kept if entry[1] is not found] + self._spare
        return self.new(size) if found is None else found


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def leave(array: np.ndarray[Any, Any], there: SharedArray) -> bool:
    """Write an array at the beginning of a peer's array; return whether that is possible."""
    room = math.prod(there.shape) * np.dtype(there.dtype).itemsize
    if array.nbytes > room or array.dtype.hasobject:
        return False
    try:
        mapped = _writable(there.pid, there.fd, there.nonce)
    except OSError:
        return False
    found = np.frombuffer(mapped, array.dtype, array.size, there.offset)
    found.reshape(array.shape)[...] = array
    return True


def _opened(pid: int, fd: int, nonce: bytes, access: int = mmap.PROT_READ) -> mmap.mmap:
    """Map a segment of another process."""
    flags = os.O_RDWR if access & mmap.PROT_WRITE else os.O_RDONLY
    handle = os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
    try:
        if os.pread(handle, _NONCE, 0) != nonce:
            raise OSError(f"Descriptor {fd} of process {pid} is not the segment that was meant.")
        return mmap.mmap(handle, 0, prot=access)
    finally:
        os.close(handle)


# To map a segment again for each slice of an array would take longer than to send the slice. As
# many are kept as pieces are usually made at once.
_writable = lru_cache(maxsize=16)(partial(_opened, access=mmap.PROT_READ | mmap.PROT_WRITE))


def forget() -> None:
    """Let go of the memory of peers that arrays were left in."""
    _writable.cache_clear()


def aligned(size: int) -> int:
    """Round a number of bytes up, so that the next array in a segment is aligned.

    Examples
    --------
    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-size // _ALIGNED) * _ALIGNED
