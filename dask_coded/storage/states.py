"""The state of a loop in files, from which another cluster resumes.

There are two files, written in turn, so that the state before is there while one is written. Each
is a line that says whose it is, as JSON, a pickled state, and a checksum. The last state stays when
the loop has ended: the result may be lost on its way to the client.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from dask_coded.storage.background import Writer
from dask_coded.storage.files import (
    is_sealed,
    make_folder,
    read_file,
    remove_partials,
    unsealed,
    write_file,
)
from dask_coded.storage.location import StoreError

logger = logging.getLogger("distributed.dask_coded")

#: How each file begins.
FIRST = b"dask-coded loop state 3\n"
_ANY = b"dask-coded loop state "
FILES = ("loop-state-0", "loop-state-1")
# Writing may take at most this fraction of a loop's time, and begins at most once in these seconds.
# A store that has once stalled is asked again after at most so many.
_SHARE, _PAUSE, _LONGEST = 0.05, 1.0, 60.0
# Bytes that are more than what a file says before the state.
_HEAD = 2**16


@dataclass(frozen=True)
class Stored:
    """A state as it was written.

    Parameters
    ----------
    sequence : int
        How many states were written before it.
    place : tuple of int
        Which loop of the task, and which algorithm of those that have used it in turn.
    round : int
    state : bytes
        Pickled.
    """

    sequence: int
    place: tuple[int, int]
    round: int
    state: bytes


class _Writing(NamedTuple):
    """Which state is in a file: its number, the run that has written it, and that run's task.

    A task whose worker is lost or stopped runs once more, as a later attempt.
    """

    sequence: int
    run: str
    task: str
    attempt: int

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> _Writing:
        # Older files name no task.
        return cls(said["sequence"], said["run"], said.get("task", ""), said.get("attempt", 0))


class StateStore:
    """The two files of one loop.

    Parameters
    ----------
    storage : str
        A folder or address.
    owner : dict
        What the loop is of, as JSON: its ``function``, ``arrays``, other ``arguments``, and the
        ``sketches`` of the arrays, which depend on their entries. States of others are refused.
    """

    def __init__(self, storage: str, owner: Mapping[str, Any]) -> None:
        self._storage = storage
        # As it is after it was read.
        self._owner = json.loads(json.dumps(owner))
        self._files = [f"{storage.rstrip('/')}/{name}" for name in FILES]
        self._next = 0
        self._sequence = 0
        # This run, and the state that it has found in each file.
        self._run = uuid.uuid4().hex
        self._task, self._attempt = "", 0
        self._found: list[_Writing | None] = [None, None]

    def __str__(self) -> str:
        return self._storage

    def open(self, task: str = "", attempt: int = 0) -> Stored | None:
        """Return the latest state that is whole, None if there is none, and be ready to write.

        Parameters
        ----------
        task : str
            Of which this run is an attempt. States of earlier attempts are overwritten, even if
            they come later: their worker may have been stopped while it wrote.
        attempt : int
            It is higher than those of earlier attempts.

        Raises
        ------
        FileExistsError
            If a file is no state of a loop.
        StoreError
            If it is that of another loop, or none of the files is whole.
        OSError
            If the place cannot be read, or made.
        """
        self._task, self._attempt = task, attempt
        make_folder(self._storage)
        found, damaged = [], []
        for i, file in enumerate(self._files):
            remove_partials(file)
            try:
                stored, self._found[i] = self._read(file)
            except FileNotFoundError:
                continue
            except _DamagedError:
                damaged.append(file)
                self._found[i] = self._there(file)
                continue
            found.append((stored.sequence, i, stored))
        if len(damaged) == len(self._files):
            raise StoreError(
                f"Both states of a loop in {self._storage} are damaged: delete them to start over."
            )
        for file in damaged:
            logger.warning(
                "The state of a loop in %s is damaged or was half written: %s.",
                file,
                f"that of round {found[0][2].round} is used" if found else "the loop starts over",
            )
            self._next = self._files.index(file)
        if not found:
            return None
        _, latest, newest = max(found, key=lambda each: each[0])
        self._next, self._sequence = 1 - latest, newest.sequence + 1
        return newest

    def _read(self, file: str) -> tuple[Stored, _Writing]:
        data = read_file(file)
        if data.startswith(_ANY) and not data.startswith(FIRST) and _is_whole(data):
            raise StoreError(
                f"The file {file} is of another version of dask-coded: use that one, or delete it."
            )
        if not _is_state(data):
            raise FileExistsError(
                f"The file {file} is no state of a loop: delete it, or pass another `storage`."
            )
        try:
            head, state = unsealed(data)[len(FIRST) :].split(b"\n", 1)
            said = json.loads(head)
            stored = Stored(said["sequence"], tuple(said["place"]), said["round"], state)
            owner, there = said["owner"], _Writing.of(said)
        except (ValueError, LookupError, TypeError) as exc:  # of which StoreError is one
            raise _DamagedError from exc
        if not _same(owner, self._owner):
            raise StoreError(
                f"The store {self._storage} holds the state of {_named(owner)}, this is "
                f"{_named(self._owner, owner)}: pass another `storage`, or delete the state."
            )
        return stored, there

    def write(self, place: tuple[int, int], round: int, state: bytes) -> None:
        """Write a state in place of the last but one.

        Raises
        ------
        StoreError
            If another run writes to the same place.
        OSError
            If it cannot be written.
        """
        if (there := self._there(self._files[self._next])) and not self._replaces(there):
            raise StoreError("another run of the loop writes to the same place")
        said = {
            "sequence": self._sequence,
            "run": self._run,
            "task": self._task,
            "attempt": self._attempt,
            "place": place,
            "round": int(round),
            "owner": self._owner,
        }
        content = b"".join((FIRST, json.dumps(said).encode(), b"\n", state))
        write_file(self._files[self._next], content)
        self._next, self._sequence = 1 - self._next, self._sequence + 1

    def _replaces(self, there: _Writing) -> bool:
        """Whether this run may replace a state in the file that is next."""
        if there.run == self._run or there == self._found[self._next]:
            return True
        return self._task != "" and there.task == self._task and there.attempt < self._attempt

    def _there(self, file: str) -> _Writing | None:
        """Return which state is in a file, also if the rest of it is lacking."""
        try:
            head, _ = read_file(file, _HEAD)[len(FIRST) :].split(b"\n", 1)
            return _Writing.of(json.loads(head))
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None


class _DamagedError(Exception):
    """A file is half written or damaged."""


def _is_whole(data: bytes) -> bool:
    try:
        unsealed(data)
    except StoreError:
        return False
    return True


def _is_state(data: bytes) -> bool:
    """Whether a file is a state, or what is left of one."""
    # One that was being written when its process was killed may have only a part of the first line.
    if data.startswith(FIRST) or FIRST.startswith(data):
        return True
    # That line may be the damaged one. A whole file is something else, such as a checkpoint.
    return is_sealed(data) and not _is_whole(data)


class StateWriter(Writer):
    """Writes states of a loop beside its rounds.

    Parameters
    ----------
    store : StateStore
        It is open.
    failed : callable(exception)
        As for :class:`~dask_coded.storage.background.Writer`.
    present : callable() -> bool
        Is asked in the thread whether a state may still be written.
    """

    def __init__(
        self,
        store: StateStore,
        failed: Callable[[BaseException], object],
        present: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__("dask-coded-state", failed)
        self._store = store
        self._present = present
        self._began = float("-inf")
        self._cost = 0.0

    def is_due(self) -> bool:
        """Whether nothing is being written, and the last state was long enough ago."""
        if self.is_busy:
            return False
        pause = min(max(_PAUSE, self._cost / _SHARE), _LONGEST)
        return monotonic() >= self._began + pause

    def write(self, began: float, place: tuple[int, int], round: int, state: bytes) -> None:
        """Begin to write a state, which has cost time since ``began``."""

        def work() -> None:
            try:
                if self._present():
                    self._store.write(place, round, state)
            finally:
                self._cost = monotonic() - began

        self._began = began
        self.begin(work)


def _same(owner: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two loops are of the same, up to the rounding of the sketches of their arrays."""
    if any(owner.get(name) != other.get(name) for name in ("function", "arrays", "arguments")):
        return False
    theirs, ours = owner.get("sketches", ()), other.get("sketches", ())
    # One of n entries is noticed if it changes by more than sqrt(n) times the rounding.
    return len(theirs) == len(ours) and all(
        a[0] == b[0] and np.allclose(a[2:], b[2:], rtol=0.0, atol=max(a[1], b[1]) * a[2])
        for a, b in zip(theirs, ours, strict=True)
    )


def _named(owner: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> str:
    """Name what a loop is of, and how it differs from another one."""
    arrays = ", ".join(owner["arrays"])
    named = f"{owner['function']} of {arrays}" if arrays else str(owner["function"])
    if other is None or any(owner[k] != other.get(k) for k in ("function", "arrays")):
        return named
    which = "arguments" if owner["arguments"] != other.get("arguments") else "entries"
    return f"{named} with other {which}"
