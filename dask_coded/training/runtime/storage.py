"""Checkpoints of trainings, as files."""

from __future__ import annotations

import os
import pickle
import uuid
from pathlib import Path


def check_folder(path: str, address: str) -> None:
    """Check that the folder of a file exists, before hours are spent on its content.

    Raises
    ------
    FileNotFoundError
        If it does not exist.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"The checkpoint's folder {str(folder)!r} must exist on the workers, it does not on "
            f"{address}, which leads the training: create it first."
        )


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
        data = Path(path).read_bytes()
        state = pickle.loads(data)
        return (state["version"], data) if state["training"] == training else None
    except FileNotFoundError:
        return None
    except (OSError, MemoryError):
        raise
    except Exception:  # a pickle of something else may fail in any way
        return None


def write(path: str, data: bytes) -> None:
    """Write a file atomically: a reader finds all of it, or the previous content."""
    whole = Path(path).absolute()
    # Not by `tempfile`, whose files only their owner can read.
    part = whole.with_name(f".coded-{uuid.uuid4().hex}")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(whole)
    except OSError:
        part.unlink(missing_ok=True)  # the disk may be full
        raise
