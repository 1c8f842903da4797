"""Checkpoints of trainings, as users name them and resume from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dask_coded.arguments import check_place, check_whole
from dask_coded.storage import read_file
from dask_coded.training.optimizers import Optimizer, Vector
from dask_coded.training.runtime.storage import opened


@dataclass(frozen=True)
class Checkpoint:
    """A file to resume from: parameters, state of optimizer and compressor, losses.

    The file is a pickle with a checksum: resume only from files that you trust. It is replaced as a
    whole, so it is always complete. A thread of its own writes it; the training does not wait,
    unless it has ended.

    Parameters
    ----------
    path : path or address
        A file as the workers see it, or an address that fsspec knows, such as ``s3://bucket/name``.
        To resume, the client must share it with them. Object stores replace files as a whole;
        where others may leave half a file, its checksum tells.
    every : int
        Number of updates between writes; if these take longer, some are left out. The file is also
        written after the last update.
    """

    path: str | os.PathLike[str]
    every: int = 100

    def __post_init__(self) -> None:
        check_whole("every", self.every)
        check_place("path", self.path)


def found_state(
    resume: str | os.PathLike[str] | bool | None,
    checkpoint: Checkpoint | None,
    start: Vector,
    optimizer: Optimizer,
) -> dict[str, Any] | None:
    """Return the state to resume from, or None."""
    if resume is None or resume is False:
        return None
    if resume is not True:
        return _resumed(resume, start, optimizer)
    if checkpoint is None:
        raise TypeError("`resume=True` goes on from a checkpoint: pass `checkpoint` as well.")
    try:
        return _resumed(checkpoint.path, start, optimizer)
    except FileNotFoundError:
        return None


def check_same(
    path: str | os.PathLike[str], state: dict[str, Any], setup: dict[str, Any], steps: int
) -> None:
    """Check that a checkpoint is of the same call, which may have been given more steps."""
    other = {k: v for k, v in state.get("setup", {}).items() if v != setup.get(k, v)}
    if other:
        found = ", ".join(f"{name} {value}" for name, value in other.items())
        wanted = ", ".join(f"{name} {setup[name]}" for name in other)
        raise ValueError(
            f"The checkpoint {str(path)!r} is of a training with {found}, this one has {wanted}: "
            f"pass another `checkpoint`, or the file itself as `resume` to go on with it all the "
            f"same."
        )
    if state["version"] > steps:
        raise ValueError(
            f"The checkpoint {str(path)!r} has seen {state['version']} updates, this training ends "
            f"after {steps}: pass another `checkpoint`."
        )


def without_addresses(value: Any) -> str:
    """Return how a value shows itself, or its class if that differs between processes."""
    return type(value).__qualname__ if has_address(value) else repr(value)


def has_address(value: Any) -> bool:
    """Return whether a value shows itself with an address, as functions do."""
    return " at 0x" in repr(value)


def _resumed(path: str | os.PathLike[str], start: Vector, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state that a checkpoint holds."""
    data = read_file(check_place("resume", path))
    try:
        state = opened(data)
        found, kept = state["parameters"], state["optimizer"].keys()
    except Exception as error:  # a pickle may fail in any way
        raise ValueError(
            f"The file {str(path)!r} must have been written by a `Checkpoint`, it cannot be read "
            f"as one: {type(error).__name__}: {error}."
        ) from error
    if (found.shape, found.dtype) != (start.shape, start.dtype):
        raise ValueError(
            f"The file {str(path)!r} holds {found.size} parameters of dtype {found.dtype}, the "
            f"training has {start.size} of dtype {start.dtype}: resume the training that wrote it."
        )
    # One of PyTorch that was used before keeps something for more parameters after an update.
    known = optimizer.start(start).keys()
    if kept != known and not (known and kept > known):
        raise ValueError(
            f"The file {str(path)!r} does not hold the state of {optimizer!r}: resume with the "
            f"optimizer that wrote it."
        )
    return state
