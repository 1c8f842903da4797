"""What threads of a leader do with the states of its training: write them to a file."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from dask_coded.storage import (
    Writer,
    is_sealed,
    local_path,
    read_file,
    remove_partials,
    unsealed,
    write_file,
)
from dask_coded.transport.attempts import RunOverError

# How long the end of a training waits for its checkpoint, which may have gigabytes.
_ENDING = 60.0

logger = logging.getLogger("distributed.dask_coded")


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


class StateTaker(Protocol):
    """Takes states of a training one after the other, without holding it up.

    Attributes
    ----------
    every : int
        Number of updates between states.
    """

    every: int

    def put(self, version: int, state: bytes) -> None:
        """Take the pickled state after ``version`` updates, instead of one that still waits."""

    def finish(self) -> None:
        """Wait until all is done."""


class CheckpointWriter(Writer):
    """Writes states to a file. If one cannot be written, the training goes on.

    Parameters
    ----------
    path : str
        A path or address.
    every : int
        Number of updates between states.
    confirm : callable
        Raises a RunOverError if the training is cancelled, or has another leader.
    warn : callable(str)
        Warns the client.
    """

    def __init__(
        self,
        path: str,
        every: int,
        confirm: Callable[[], None],
        warn: Callable[[str], object],
    ) -> None:
        super().__init__("dask-coded-checkpoint", self._not_written, _ENDING)
        remove_partials(path)
        self.every = every
        self._path = path
        self._confirm = confirm
        self._warn = warn
        # Why the last state is not in the file, and whether the client knows.
        self._reason = ""
        self._said = False

    def put(self, version: int, state: bytes) -> None:
        """Write a state, instead of one that still waits to be written."""
        if self._reason and not self._said:
            self._said = True
            self._warn(
                f"The checkpoint {self._path!r} of a training is not written: {self._reason}. The "
                "training goes on, and tries again with each state."
            )
        self.begin(partial(self._write, state))

    def _write(self, state: bytes) -> None:
        with suppress(RunOverError):
            self._confirm()
            # Again before it takes the place of another one: this process may be stopped for long.
            write_file(self._path, state, self._confirm)
            self._reason, self._said = "", False

    def _not_written(self, reason: BaseException) -> None:
        self._reason = str(reason) or repr(reason)
        logger.warning(
            "The checkpoint %s of a training is not written: %s", self._path, self._reason
        )

    def ended(self) -> None:
        """Warn the client if the last state of the training is not in the file."""
        if self._reason:
            self._warn(
                f"The last state of a training is not in its checkpoint {self._path!r}: "
                f"{self._reason}. Keep the parameters that `train` returns."
            )
