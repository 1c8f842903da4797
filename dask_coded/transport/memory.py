"""Arrays that several processes of one host read without copying them.

A segment is an anonymous file in memory (``memfd_create``). Its owner maps it and writes arrays
into it. A peer opens it through the owner's ``/proc`` entry and maps it, too. The kernel frees it
when the last process has unmapped it, so nothing is left behind, whichever process is killed when.

Two workers share memory if the peer can open a segment and finds the owner's nonce in it. Host
names do not decide that, because containers and namespaces differ. Without ``memfd_create`` or
``/proc`` no two workers share memory, and arrays travel in messages.

Dask counts all pages that a process has mapped and touched as memory of its worker, also those of
other processes. So segments and mappings are kept for the next round only as long as they fit into
the memory of the worker, and a worker whose memory is short writes into files and not into mapped
pages.

A peer may send anything as the place of an array. Only a sealed segment is mapped, which cannot
shrink, and only the part of it that exists is read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

with contextlib.suppress(ImportError):  # Windows has none, and no segments either
    import fcntl

#: Smaller arrays travel in messages: opening and mapping a segment would cost more.
LEAST_BYTES = 1 << 16

# The nonce lies in the first page, so that arrays are aligned to pages.
_HEADER = mmap.PAGESIZE
_NONCE = 16
_NAME = "dask-coded"
# Arrays within a segment begin at multiples of this many bytes, the size of a cache line.
_ALIGNED = 64
# How many segments wait to be used again, at most, because each takes two file descriptors: the
# operands and results of two rounds. These run at once, or alternate because they are of a matrix
# and of its transpose. The first access to new memory is slow in each process. In gradient descent,
# where operands of 0.6 and 19 MB alternate, a coordinator copied its shares in 40 to 60 ms with new
# segments, and in 3 to 7 ms with used ones.
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

    @classmethod
    def received(cls, fields: Any) -> Self:
        """Return a place that a peer has sent.

        Raises
        ------
        OSError
            If it is none, so that nothing can be read there.
        """
        match fields:
            case (
                int(pid),
                int(fd),
                bytes(nonce),
                int(offset),
                str(dtype),
                tuple(shape),
            ) if (
                min(pid, fd) >= 0
                and offset >= _HEADER
                and len(nonce) == _NONCE
                and all(type(length) is int and length >= 0 for length in shape)
            ):
                return cls(pid, fd, nonce, offset, dtype, shape)
        raise OSError(errno.EINVAL, "A peer has sent something else as the place of an array")


#: Returns how many bytes a process may still use until its worker is short of memory.
Room = Callable[[], float]


def _unlimited() -> float:
    return math.inf


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
        self._fd: int | None = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Pages are allocated when they are written, and a worker writes only part of its rows.
            os.ftruncate(self._fd, _HEADER + size)
            # The system would kill a reader of pages that are gone.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
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

    def write(self, array: np.ndarray[Any, Any]) -> None:
        """Copy an array to the beginning, to pages that this process does not map.

        Raises
        ------
        OSError
            If there is no memory for it.
        """
        assert self._fd is not None, "the segment is closed"
        _write(self._fd, array, _HEADER)

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
    room : callable, optional
        None are kept in whose place this process has other uses for memory; by default it has
        enough.
    """

    def __init__(self, most: int, room: Room = _unlimited) -> None:
        self._most = most
        self._room = room
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
        if (found := self._mapped.pop(key, None)) is None:
            found = _mapping(*key)
            if self._mapped and self._room() < len(found):
                self._mapped.clear()
        self._mapped[key] = found
        self._keep_last(self._most)
        try:
            count = math.prod(shared.shape)
            return np.frombuffer(found, shared.dtype, count, shared.offset).reshape(shared.shape)
        except (TypeError, ValueError, OverflowError) as exc:
            raise OSError(errno.EINVAL, f"A peer's segment has no such array: {exc}") from exc

    def keep(self, most: int) -> None:
        """Keep at least so many mapped from now on.

        If one fewer is kept than are used in turns, each is mapped again whenever it is used.
        """
        self._most = max(self._most, most)

    def trim(self, most: int) -> None:
        """Keep only the last ones used, and none if memory is short.

        A mapping keeps the memory of a segment in use, and its pages count as this process's.
        """
        self._keep_last(most if self._mapped and self._room() > 0 else 0)

    def _keep_last(self, most: int) -> None:
        while len(self._mapped) > most:
            del self._mapped[next(iter(self._mapped))]

    def release(self) -> None:
        """Let go of all pages if memory is short. Arrays get theirs again when they are read."""
        if self._mapped and self._room() <= 0:
            for mapped in tuple(self._mapped.values()):
                mapped.madvise(mmap.MADV_DONTNEED)

    def clear(self) -> None:
        """Keep none of them mapped."""
        self._mapped.clear()


def is_readable(place: tuple[Any, ...]) -> bool:
    """Return whether this process can read an array of another one, which says where it lies."""
    try:
        Mappings(most=0).view(SharedArray.received(place))
    except OSError:
        return False
    return True


class Memory:
    """The segments that a process shares. Its methods may be called from any thread.

    Parameters
    ----------
    room : callable, optional
        Segments wait to be used again only as long as there is room; by default there is enough.
    """

    def __init__(self, room: Room = _unlimited) -> None:
        self._room = room
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
        if self._keeps and self._room() > 0:
            # Without the lock, because the garbage collector may call this while it is held.
            self._spare.append((self._leases, segment))

    def share(self, array: np.ndarray[Any, Any]) -> tuple[Segment | None, SharedArray] | None:
        """Copy an array into a segment; None if there is no memory for it.

        Give the segment back by :meth:`reuse` when it no longer matters what its readers find. A
        result that lies in a segment is not copied, and there is none to give back.
        """
        result = self._results.get(_address(array))
        if result is not None and array.nbytes <= result.size and array.flags.c_contiguous:
            return None, result.place(array)
        if (segment := self.lease(array.nbytes)) is None:
            return None
        copy = segment.array(array.dtype, array.shape)
        if self._room() > array.nbytes:
            # Faster, because the pages of a segment that is used again are mapped.
            copy[...] = array
        else:
            try:
                segment.write(array)
            except OSError as exc:
                self._warn(exc)
                return None
        return segment, segment.place(copy)

    def new(self, size: int) -> Segment | None:
        """Return a new segment; None if the platform has none, or the system refuses."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return Segment(size)
        except OSError as exc:
            self._warn(exc)
            return None

    def _warn(self, exc: OSError) -> None:
        if not self._refused:
            self._refused = True
            logger.warning(
                "Workers on this host cannot share memory, so arrays are copied: %s", exc
            )

    def reuse(self, segment: Segment) -> None:
        """Let a segment be overwritten by the next array that is shared."""
        with self._lock:
            # The process may not have mapped its pages, so they may not count yet.
            if self._keeps and self._room() > segment.size:
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
            if found is None and kept and self._room() < size:
                kept = []
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
        file = _opened(there.pid, there.fd, there.nonce, os.O_RDWR)
        try:
            _write(file, array, there.offset)
        finally:
            os.close(file)
    except OSError:
        return False
    return True


def _write(file: int, array: np.ndarray[Any, Any], at: int) -> None:
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while left:
        written = os.pwrite(file, left, at)  # 2 GiB at most
        left, at = left[written:], at + written


def _mapping(pid: int, fd: int, nonce: bytes) -> mmap.mmap:
    """Map a segment of another process, to be read."""
    file = _opened(pid, fd, nonce, os.O_RDONLY)
    try:
        return mmap.mmap(file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(file)


def _opened(pid: int, fd: int, nonce: bytes, access: int) -> int:
    """Open a segment of another process; return a descriptor.

    A peer may name any of its descriptors. To open a file of another kind might take for ever, so
    what the descriptor stands for is looked up first, without opening it.
    """
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{found}") != f"/memfd:{_NAME} (deleted)":
            raise OSError(errno.EINVAL, f"Descriptor {fd} of process {pid} is not a segment")
        flags = access | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(f"/proc/self/fd/{found}", flags)
    finally:
        os.close(found)
    try:
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(errno.EINVAL, f"Segment {fd} of process {pid} may shrink")
        if os.pread(file, _NONCE, 0) != nonce:
            raise OSError(f"Descriptor {fd} of process {pid} is not the segment that was meant.")
    except BaseException:
        os.close(file)
        raise
    return file


def aligned(size: int) -> int:
    """Round a number of bytes up, so that the next array in a segment is aligned.

    Examples
    --------
    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-size // _ALIGNED) * _ALIGNED
