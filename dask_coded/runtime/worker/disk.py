"""Arrays in files: rounds over pieces that do not fit into the memory of their worker.

Dask spills data as a whole and reads it back as a whole, on the worker's event loop, and writes
other data to the disk to make room for it. But a round needs a piece once, stripe after stripe. A
piece that does not fit is therefore made in a file that is mapped into memory. The system reads
its pages when they are used, as fast as it reads any file, and the worker releases them after each
stripe. Dask's monitor counts the pages in use as memory of the process; they are one stripe.

The file has no name: the system frees it with the last mapping, also when the worker is killed. To
Dask the array is a small object, because Dask refuses tasks whose data are larger than the memory.
What Dask spills of it is a note that names the mapping. The worker keeps the mapping until Dask
releases the key.

Pieces are in memory as long as they alone fit there, because other data are not used in each
round. A piece that Dask has spilled nevertheless is copied to a file when a round needs it. If what
Dask has spilled is lost, Dask notices nothing, so the worker gives up its copy.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import mmap
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

import numpy as np
from dask.sizeof import sizeof
from dask.typing import Key
from dask.utils import format_bytes
from distributed import get_worker
from distributed.protocol.serialize import dask_deserialize, dask_serialize
from tornado.ioloop import PeriodicCallback

from dask_coded.compat import (
    SpillBuffer,
    deserialize_numpy_ndarray,
    forget_file,
    serialize_numpy_ndarray,
)
from dask_coded.rounds.kernels import KERNELS, Product, Rows
from dask_coded.runtime.spec import as_key

if TYPE_CHECKING:
    from distributed.worker import Worker

# Files that may be removed while they are open, and whose pages a process can let go.
_ABLE = all([hasattr(os, "posix_fallocate"), hasattr(mmap, "MADV_DONTNEED")])
# Of tasks for which a worker takes their data to be there: without these its state would be wrong.
_NEEDS_DATA = {"waiting", "ready", "constrained", "executing", "long-running", "resumed"}
# How often pages are let go if the process needs more memory than Dask's target. The nanny looks
# every 100 ms, in which a sum over an array may read half a gigabyte.
_TRIM_SECONDS = 0.02
_TRIMMING = "dask-coded-trim"
# What Dask counts for an array in a file.
_SIZE = 200
# What is wrong with a file that will never be read. With too many open files, for example, it may.
_LOST = {errno.ENOENT, errno.EIO, errno.ESTALE}
# What is wrong if there is no room for a file.
FULL = {errno.ENOSPC, errno.EDQUOT}
# Bytes that are copied at once.
_SLICE = 2**24
_numbers = itertools.count()

logger = logging.getLogger("distributed.dask_coded")


class MappedArray(np.ndarray):
    """An array in a file without a name, mapped into memory.

    Make one by :meth:`zeros`. Views and results of it are ordinary arrays, of which nothing is
    released.
    """

    _map: mmap.mmap | None = None
    _note: tuple[int, int] | None = None

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.dtype[Any], folder: str) -> Self:
        """Make an array of zeros in a folder.

        Raises
        ------
        OSError
            If the disk is full.
        """
        size = max(int(np.prod(shape)) * dtype.itemsize, 1)
        with tempfile.TemporaryFile(dir=folder, prefix="dask-coded-") as file:
            # Without space for a page that is written later, the system would kill the process.
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        array = cls(shape, dtype, mapped)
        array._map, array._note = mapped, (os.getpid(), next(_numbers))
        _arrays[array._note] = array
        return array

    def release(self, first: int = 0, last: int | None = None) -> None:
        """Let go of the memory of rows ``first … last - 1``. They remain in the file."""
        start, size = self.pages(first, len(self) if last is None else last)
        if self._map is not None and size:
            self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def pages(self, first: int, last: int) -> tuple[int, int]:
        """Return first byte and number of bytes of the pages that hold any of some rows."""
        row = self.strides[0]
        start = first * row // mmap.PAGESIZE * mmap.PAGESIZE
        return start, -(-(last * row - start) // mmap.PAGESIZE) * mmap.PAGESIZE

    def read(self, first: int, last: int) -> Rows:
        """Return a copy of rows ``first … last - 1``, the only memory that they use."""
        rows = np.array(self[first:last])
        self.release(first, last)
        return rows


# All arrays of this process that are in use, by their notes.
_arrays: WeakValueDictionary[tuple[int, int], MappedArray] = WeakValueDictionary()


@sizeof.register(MappedArray)
def _size(array: MappedArray) -> int:
    return array.nbytes if array._map is None else _SIZE


@dask_serialize.register(MappedArray)
def _dump(array: MappedArray, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
    # Messages have a context, spilled data do not.
    if array._note is None or context is not None:
        return serialize_numpy_ndarray(np.asarray(array), context)
    array.release()  # memory is short
    return {"note": array._note}, []


@dask_deserialize.register(MappedArray)
def _load(header: dict[str, Any], frames: list[Any]) -> Any:
    if "note" not in header:
        return deserialize_numpy_ndarray(header, frames)
    return _arrays[tuple(header["note"])]


@dataclass
class _Filling:
    """An array in memory that is being filled."""

    #: Its bytes, and how many of them are not written yet.
    size: int
    ahead: int


class Disk:
    """Decides which arrays of a worker are made in files, and keeps them.

    Parameters
    ----------
    worker : Worker
        Without a memory limit, or if it spills nothing, no array is made in a file.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._kept: dict[Key, MappedArray] = {}
        # Bytes of arrays in memory, by task: those that are being filled, and results with the
        # identity of the array, because a block may be a piece as well.
        self._filling: dict[Key, _Filling] = {}
        self._in_memory: dict[Key, tuple[int, int]] = {}
        self._copying: dict[Key, asyncio.Task[None]] = {}
        # Pieces that tasks use, whatever Dask does with them meanwhile. None for what Dask has
        # spilled, because memory is short.
        self._held: dict[Key, Any] = {}
        self._trimming = PeriodicCallback(self._trim, _TRIM_SECONDS * 1000)

    @classmethod
    def of(cls, worker: Worker) -> Disk:
        """Return the disk of a worker; the first call creates it."""
        found = worker.extensions.get("coded-disk")
        if found is None:
            found = worker.extensions["coded-disk"] = cls(worker)
        assert isinstance(found, Disk)
        return found

    def zeros(self, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
        """Make an array for the result of a task, in a file if it does not fit into memory.

        Raises
        ------
        OSError
            If it fits nowhere: the worker would pause for ever, or be killed.
        """
        size = int(np.prod(shape)) * dtype.itemsize
        with self._lock:
            self._filling.pop(key, None)  # of an attempt that has failed
            if self._fits(size):
                return self._begin(key, shape, dtype)
            failure = None if self._may_spill(size) else OSError(errno.EDQUOT, "max-spill")
        try:
            if failure is None:
                return MappedArray.zeros(shape, dtype, self._worker.local_directory)
        except OSError as exc:
            logger.warning("An array that does not fit into memory is not made in a file: %s", exc)
            failure = exc if exc.errno in FULL else None
        with self._lock:
            if failure is not None and not self._is_bearable(size):
                raise OSError(failure.errno, self._where_space_went(size)) from failure
            return self._begin(key, shape, dtype)

    def _begin(self, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
        array = np.zeros(shape, dtype)
        self._filling[key] = _Filling(array.nbytes, array.nbytes)
        return array

    def filled(self, key: Key, size: int) -> None:
        """Learn that so many more bytes of an array of :meth:`zeros` are written.

        The process did not use them before, so they must be counted in addition to what it uses.
        """
        with self._lock:
            if found := self._filling.get(key):
                found.ahead = max(found.ahead - size, 0)

    def _ahead(self) -> int:
        """Return the bytes that arrays will take once they are filled."""
        return sum(found.ahead for found in tuple(self._filling.values()))

    def _is_bearable(self, size: int) -> bool:
        """Whether the worker is not paused because of an array in memory that Dask cannot spill."""
        limits: Any = self._worker.memory_manager
        if not limits.memory_limit or not limits.memory_pause_fraction:
            return True
        used = self._worker.monitor.get_process_memory() + self._ahead()
        return bool(used + size <= limits.memory_pause_fraction * limits.memory_limit)

    def _where_space_went(self, size: int) -> str:
        """Say why there is no room for an array, and what to do."""
        worker, data = self._worker, self._worker.data
        limits: Any = worker.memory_manager
        disk = shutil.disk_usage(worker.local_directory)
        spilled = data.spilled_total.disk if isinstance(data, SpillBuffer) else 0
        most = "" if limits.max_spill is False else f" of {format_bytes(limits.max_spill)} at most"
        return (
            f"Worker {worker.address} has no room for an array of {format_bytes(size)}. "
            f"Its process uses {format_bytes(worker.monitor.get_process_memory())} of its memory "
            f"limit of {format_bytes(limits.memory_limit)}. On its disk, {worker.local_directory}, "
            f"{format_bytes(disk.free)} of {format_bytes(disk.total)} are free now, for all that "
            f"use it; this worker has {format_bytes(self._in_files())} there in coded pieces, and "
            f"{format_bytes(spilled)} that Dask has spilled{most}. Use more workers, a larger disk "
            f"for `local_directory`, or a code with less redundancy."
        )

    def _in_files(self) -> int:
        """Return the bytes of all arrays in files that are kept."""
        return sum({id(array): array.nbytes for array in tuple(self._kept.values())}.values())

    def _fits(self, size: int) -> bool:
        """Whether an array and those that are here stay in memory if other data are spilled."""
        data: Any = self._worker.data
        limits: Any = self._worker.memory_manager
        if not _ABLE or not isinstance(data, SpillBuffer):
            return True
        filling = sum(found.size for found in tuple(self._filling.values()))
        size += filling + sum(dict(tuple(self._in_memory.values())).values())
        if size > data.n:
            return False
        if not limits.memory_spill_fraction:
            return True
        # What Dask cannot spill, such as the modules of the process.
        used = self._worker.monitor.get_process_memory() + self._ahead()
        other = max(used - data.fast.total_weight - filling, 0)
        return other + size <= limits.memory_spill_fraction * limits.memory_limit

    def _may_spill(self, size: int) -> bool:
        data: Any = self._worker.data
        most = self._worker.memory_manager.max_spill
        if most is False:
            return True
        return bool(self._in_files() + data.spilled_total.disk + size <= most)

    def not_filled(self, key: Key) -> None:
        """Learn that the array of :meth:`zeros` is given up, as it could not be filled."""
        with self._lock:
            self._filling.pop(key, None)

    def keep(self, key: Key, array: Any) -> Any:
        """Keep the result of a task until Dask releases its key, if it is in a file; return it."""
        if isinstance(array, MappedArray):
            array.release()
            self._kept[key] = array
            self._worker.loop.add_callback(self._trim_while_needed)
        elif isinstance(array, np.ndarray):
            self._in_memory[key] = id(array), array.nbytes
        if key in self._held:
            self._held[key] = array
        return array

    def hold(self, key: Key, hold: bool) -> None:
        """Stream handler: keep a piece even if Dask drops it, or do so no longer."""
        key = as_key(key)
        if hold:
            self._held[key] = None if self.is_spilled(key) else self.held(key)
        else:
            self._held.pop(key, None)

    def let_spilled_go(self) -> None:
        """Hold no piece that Dask has spilled: the memory is needed."""
        for key in self._held:
            if self.is_spilled(key):
                self._held[key] = None

    def align(self, key: Key, array: Rows) -> None:
        """Have an aligned copy take the place of an array that this worker holds."""
        if key not in self._copying:
            self._copying[key] = asyncio.create_task(self._align(key, array))

    async def _align(self, key: Key, array: Rows) -> None:
        data = self._worker.data
        try:
            copy = await asyncio.to_thread(lambda: np.require(array, requirements=["C", "A"]))
            # It may be another one by now, or on the disk.
            if self._held.get(key) is array:
                self._held[key] = copy
            if key in data and not self.is_spilled(key) and data[key] is array:
                data[key] = copy
        except MemoryError:
            pass  # the next round tries again
        finally:
            del self._copying[key]

    def put_back(self, key: Key) -> None:
        """Stream handler: put a piece that Dask has dropped back among Dask's data."""
        key = as_key(key)
        found, task = self._held.get(key), self._worker.state.tasks.get(key)
        # Otherwise it is on its way; if it is made again, its task returns what is held.
        if found is not None and (task is None or task.state == "released"):
            self._worker.update_data({key: self.keep(key, found)})
            self._worker.batched_send({"op": "add-keys", "keys": [key]})

    def still_held(self, key: Key) -> Any:
        """Return a piece that Dask has dropped and this worker holds; None if there is none."""
        return self._held.get(key)

    def held(self, key: Key, must: bool = False) -> Any:
        """Return an array that this worker holds, in memory or on the disk.

        None if it holds none, or cannot read it. If what Dask has spilled is lost, this worker soon
        does not hold it any more. If it is there but cannot be read now, for lack of memory for
        example, that is raised if it ``must`` be. Arrays in files are not looked up in
        ``worker.data``, which would read their notes.
        """
        for kept in (self._kept, self._held):
            if (found := kept.get(key)) is not None:
                return found
        try:
            return self._worker.data.get(key)
        except Exception as exc:
            data: Any = self._worker.data
            if isinstance(data, SpillBuffer) and key in data.fast:
                # It was in use, and so in memory, but its file could not be deleted.
                forget_file(self._worker.data, key)
                return data.fast[key]
            if must and not _is_lost(exc):
                raise
            logger.exception("Worker %s cannot read %r", self._worker.address, key)
            if _is_lost(exc):
                self._worker.loop.add_callback(self._give_up, key)
            return None

    def _give_up(self, key: Key) -> None:
        """Tell the scheduler that data are gone; it has them made again if they are wanted."""
        task = self._worker.state.tasks.get(key)
        if task is None or task.state != "memory" or not self.is_spilled(key):
            return
        if any(other.state in _NEEDS_DATA for other in task.dependents):
            return  # these will fail, and whoever needs the data next comes here again
        try:
            del self._worker.data[key]
        except OSError:  # the worker would close if this happened to Dask
            forget_file(self._worker.data, key)
        self._worker.batched_send({"op": "coded-lost", "key": key})

    def unspill(self, key: Key) -> Any:
        """Return what must be held; what Dask has to read for that, it does not read again."""
        spilled = self.is_spilled(key)
        found = self.held(key, must=True)
        if spilled and isinstance(found, np.ndarray) and key not in self._copying:
            self._copying[key] = asyncio.create_task(self._copy(key, found))
        return found

    async def _copy(self, key: Key, array: Rows) -> None:
        def copied() -> MappedArray:
            copy = MappedArray.zeros(array.shape, array.dtype, self._worker.local_directory)
            step = max(1, _SLICE // max(array[:1].nbytes, 1))
            for first in range(0, len(array), step):
                copy[first : first + step] = array[first : first + step]
                copy.release(first, min(first + step, len(array)))
            return copy

        try:
            if _ABLE and self._may_spill(array.nbytes):
                copy = await asyncio.get_running_loop().run_in_executor(None, copied)
                if key in self._worker.data:
                    self._in_memory.pop(key, None)
                    self._worker.data[key] = self.keep(key, copy)
        except OSError as exc:
            logger.warning("A piece that Dask has spilled is not copied to a file: %s", exc)
        finally:
            del self._copying[key]

    def is_spilled(self, key: Key) -> bool:
        """Whether data are on the disk in Dask's way, to be read as a whole."""
        data = self._worker.data
        return key not in self._kept and isinstance(data, SpillBuffer) and key in data.slow

    def moved(self, key: Key, state: str) -> None:
        """Take note that a task of the worker is in another state."""
        if not (self._kept or self._in_memory or self._filling or self._held):
            return  # as long as others use the worker
        if state in ("memory", "error", "released", "forgotten"):
            self._filling.pop(key, None)
            if state == "memory" and key in self._held:
                self._held[key] = None if self.is_spilled(key) else self.held(key)
                self._worker.loop.add_callback(self._report, key)
            if state == "released" and any(
                key in d for d in (self._held, self._kept, self._in_memory)
            ):
                # Once Dask has told the scheduler.
                self._worker.loop.add_callback(self._report, key)
            if state != "memory":
                self._in_memory.pop(key, None)
                if self._kept.pop(key, None) is not None:
                    self._trim_while_needed()

    def _report(self, key: Key) -> None:
        held = self._held.get(key) is not None
        self._worker.batched_send({"op": "coded-moved", "key": key, "held": held})

    def close(self) -> None:
        """Keep nothing. The worker calls this when it closes."""
        for task in tuple(self._copying.values()):
            task.cancel()
        self._kept.clear()
        self._held.clear()
        self._trim_while_needed()

    def _trim_while_needed(self) -> None:
        # Other tasks may read any part of an array, and Dask may send it as a whole.
        if not self._kept:
            self._trimming.stop()
            self._worker.periodic_callbacks.pop(_TRIMMING, None)
        elif not self._trimming.is_running():
            self._worker.periodic_callbacks[_TRIMMING] = self._trimming
            self._trimming.start()

    def _trim(self) -> None:
        limits: Any = self._worker.memory_manager
        target = limits.memory_target_fraction or limits.memory_spill_fraction
        if target and self._worker.monitor.get_process_memory() > target * limits.memory_limit:
            for array in tuple(self._kept.values()):
                array.release()


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
    """Make an array for the result of the task that runs here, as :meth:`Disk.zeros` does."""
    try:
        worker = get_worker()
    except ValueError:  # not a task of a worker
        return np.zeros(shape, dtype)
    disk, key = Disk.of(worker), worker.get_current_task()
    array = disk.zeros(key, shape, dtype)
    disk.filled(key, array.nbytes)  # at once
    return array


def keep(array: Any) -> Any:
    """Keep the result of the task that runs here, as :meth:`Disk.keep` does."""
    try:
        worker = get_worker()
    except ValueError:  # not a task of a worker
        return array
    return Disk.of(worker).keep(worker.get_current_task(), array)


def _is_lost(exc: Exception) -> bool:
    """Whether data that could not be read never will be."""
    if isinstance(exc, OSError):
        return exc.errno in _LOST
    return not isinstance(exc, MemoryError)  # what the file holds is wrong


def streamed(kernel: str, piece: Any, rows: int, operand: Any) -> Product:
    """Bind a kernel; of a piece in a file, the rows of one product at a time are in memory."""
    if not isinstance(piece, MappedArray):
        return KERNELS[kernel](piece, rows, operand)
    product = KERNELS[kernel](np.asarray(piece), rows, operand)

    def computed(a: int, b: int, out: Rows | None) -> Rows:
        found = product(a, b, out)
        piece.release(a, b)
        return found

    return computed
