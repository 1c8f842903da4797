"""What threads of a leader do with the states of its training: write them to a file."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dask_coded.storage import (
    Background,
    is_sealed,
    local_path,
    read_file,
    unsealed,
    write_file,
)


def check_folder(path: str, address: str) -> None:
    """Check that the folder of a file exists, before hours are spent on its content.

    Raises
    ------
    FileNotFoundError
        If it does not exist.
    """
    if (local := local_path(path)) is not None and not (folder := local.parent).is_dir():
        raise FileNotFoundError(
            f"The checkpoint's folder {str(folder)!r} must exist on the workers, it does not on "
            f"{address}, which leads the training: create it first."
        )


def check_not_there(path: str, training: str, address: str) -> None:
    """Raise an error if there is a file, which is not the training's own, to be replaced.

    Raises
    ------
    FileExistsError
        If there is one.
    """
    try:
        read_file(path, 1)
    except FileNotFoundError:
        return
    if saved(path, training) is None:
        raise FileExistsError(
            f"The checkpoint {path!r} exists on {address}, which leads the training, and this "
            f"process does not find it, so `resume=True` would start over and replace it: share "
            f"the folder with this process, or leave `resume` out."
        )


def opened(data: bytes) -> dict[str, Any]:
    """Return the state in a file; version 0.2 has written it without a checksum.

    Raises
    ------
    Exception
        If it is none, or damaged: a pickle may fail in any way.
    """
    state: dict[str, Any] = pickle.loads(unsealed(data) if is_sealed(data) else data)
    return state


def saved(path: str, training: str) -> tuple[int, bytes] | None:
    """Return how many updates a training's own checkpoint has seen, and its bytes.

    None if there is no such file, or another training or program wrote it.

    Raises
    ------
    OSError
        If the file cannot be read. It must not be taken for another one's and overwritten.
    MemoryError
        If it is too large.
    """
    try:
        data = read_file(path)
        state = opened(data)
        return (state["version"], data) if state["training"] == training else None
    except FileNotFoundError:
        return None
    except (OSError, MemoryError):
        raise
    except Exception:  # a pickle of something else, or damaged
        return None


class StateTaker(ABC):
    """Takes states one after the other, without holding up the training.

    Parameters
    ----------
    name : str
        Of the thread.
    every : int
        Number of updates between states.
    """

    def __init__(self, name: str, every: int) -> None:
        self.every = every
        self._background = Background(name)
        self._error: BaseException | None = None
        #: Ends the thread.
        self.close = self._background.close

    @abstractmethod
    def _taking(self, version: int) -> Callable[[bytes], None]:
        """Return what takes, in the thread, the pickled state after so many updates.

        The leader's thread calls this when the state comes; it may be taken much later.
        """

    def put(self, version: int, state: bytes) -> None:
        """Take a state. It replaces one that has not been written yet.

        Raises
        ------
        Exception
            If an earlier one has failed.
        """

        take = self._taking(version)

        def work() -> None:
            try:
                take(state)
            except BaseException as exc:  # whatever it is, the training is told
                self._error = exc

        self._check()
        self._background.do(work)

    def finish(self) -> None:
        """Wait until all is done.

        Raises
        ------
        Exception
            If it has failed.
        """
        self._background.wait()
        self._check()

    def _check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class CheckpointWriter(StateTaker):
    """Writes states to a file.

    Parameters
    ----------
    path : str
        A path or address.
    every : int
    confirm : callable
        Raises an exception if the training is cancelled, or has another leader.
    """

    def __init__(self, path: str, every: int, confirm: Callable[[], None]) -> None:
        super().__init__("dask-coded-checkpoint", every)
        self._path = path
        self._confirm = confirm

    def _taking(self, version: int) -> Callable[[bytes], None]:
        return self._write

    def _write(self, state: bytes) -> None:
        self._confirm()
        # Again before it takes the place of another one: this process may be stopped for long.
        write_file(self._path, state, self._confirm)
