"""The state of a loop in files, from which another cluster resumes.

There are two files, written in turn, so that the state before is there while one is written. Each
is a line that says whose it is, as JSON, a pickled state, and a checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dask_coded.storage.background import Background
from dask_coded.storage.files import (
    delete_file,
    is_sealed,
    make_folder,
    read_file,
    unsealed,
    write_file,
)
from dask_coded.storage.location import StoreError

#: How each file begins.
FIRST = b"dask-coded loop state 1\n"
FILES = ("loop-state-0", "loop-state-1")
# Writing may take at most this fraction of a loop's time, and begins at most once in these seconds.
_SHARE, _PAUSE = 0.05, 1.0


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


class StateStore:
    """The two files of one loop.

    Parameters
    ----------
    storage : str
        A folder or address.
    owner : dict
        What the loop is of, as JSON. States of others are refused.
    """

    def __init__(self, storage: str, owner: Mapping[str, Any]) -> None:
        self._storage = storage
        # As it is after it was read.
        self._owner = json.loads(json.dumps(owner))
        self._files = [f"{storage.rstrip('/')}/{name}" for name in FILES]
        self._next = 0
        self._sequence = 0

    def __str__(self) -> str:
        return self._storage

    def open(self) -> Stored | None:
        """Return the latest state that is whole, None if there is none, and be ready to write.

        Raises
        ------
        FileExistsError
            If a file is no state of a loop.
        StoreError
            If it is that of another loop.
        OSError
            If the place cannot be read, or made.
        """
        make_folder(self._storage)
        read = enumerate(map(self._read, self._files))
        found = [(stored.sequence, i, stored) for i, stored in read if stored is not None]
        if not found:
            return None
        _, latest, stored = max(found, key=lambda each: each[0])
        self._next, self._sequence = 1 - latest, stored.sequence + 1
        return stored

    def _read(self, file: str) -> Stored | None:
        try:
            data = read_file(file)
        except FileNotFoundError:
            return None
        if not _is_state(data):
            raise FileExistsError(
                f"The file {file} is no state of a loop: delete it, or pass another `storage`."
            )
        try:
            head, state = unsealed(data)[len(FIRST) :].split(b"\n", 1)
            said = json.loads(head)
            stored = Stored(said["sequence"], tuple(said["place"]), said["round"], state)
        except (ValueError, LookupError, TypeError):  # of which StoreError is one
            return None
        if said["owner"] != self._owner:
            raise StoreError(
                f"The store {self._storage} holds the state of {_named(said['owner'])}, this is "
                f"{_named(self._owner)}: pass another `storage`, or delete the state."
            )
        return stored

    def write(self, place: tuple[int, int], round: int, state: bytes) -> None:
        """Write a state in place of the last but one.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        said = {"sequence": self._sequence, "place": place, "round": round, "owner": self._owner}
        content = b"".join((FIRST, json.dumps(said).encode(), b"\n", state))
        write_file(self._files[self._next], content)
        self._next, self._sequence = 1 - self._next, self._sequence + 1

    def delete(self) -> None:
        """Delete the states; :meth:`open` has found nothing else in their places.

        Raises
        ------
        OSError
            If they cannot be deleted.
        """
        for file in self._files:
            delete_file(file)


def _is_state(data: bytes) -> bool:
    """Whether a file is a state, or what is left of one."""
    # One that was being written when its process was killed may have only a part of the first line.
    if data.startswith(FIRST) or FIRST.startswith(data):
        return True
    try:
        unsealed(data)
    except StoreError:
        return is_sealed(data)  # that line may be the damaged one
    return False  # such as a checkpoint of a training


class StateWriter:
    """Writes states of a loop beside its rounds.

    Parameters
    ----------
    store : StateStore
        It is open.
    failed : callable(exception)
        Is told in the thread that a state could not be written.
    present : callable() -> bool
        Is asked in the thread whether a state may still be written.
    """

    def __init__(
        self,
        store: StateStore,
        failed: Callable[[BaseException], object],
        present: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._failed = failed
        self._present = present
        self._background = Background("dask-coded-state")
        self._began = float("-inf")
        self._cost = 0.0
        #: Ends the thread.
        self.close = self._background.close

    def is_due(self) -> bool:
        """Whether nothing is being written, and the last state was long enough ago."""
        if self._background.is_busy:
            return False
        return monotonic() >= self._began + max(_PAUSE, self._cost / _SHARE)

    def write(self, began: float, place: tuple[int, int], round: int, state: bytes) -> None:
        """Begin to write a state, which has cost time since ``began``."""

        def work() -> None:
            try:
                if self._present():
                    self._store.write(place, round, state)
            except BaseException as exc:  # also those of libraries that fsspec uses
                self._failed(exc)
            self._cost = monotonic() - began

        self._began = began
        self._background.do(work)

    def finish(self) -> None:
        """Wait for what is being written."""
        self._background.wait()

    def delete(self, seconds: float) -> None:
        """Delete the states, once nothing is being written.

        Raises
        ------
        TimeoutError
            If it takes longer than some seconds.
        Exception
            If they cannot be deleted.
        """
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self._store.delete()
            except BaseException as exc:  # also those of libraries that fsspec uses
                failures.append(exc)

        self._wait(seconds)
        self._background.do(work)
        self._wait(seconds)
        if failures:
            raise failures[0]

    def _wait(self, seconds: float) -> None:
        if not self._background.wait(seconds):
            raise TimeoutError(f"the store has not answered for {seconds:g} seconds")


def _named(owner: Mapping[str, Any]) -> str:
    arrays = ", ".join(owner["arrays"])
    return f"{owner['function']} of {arrays}" if arrays else str(owner["function"])
