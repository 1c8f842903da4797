"""Checkpoints as files."""

from __future__ import annotations

import os

import pytest

from dask_coded.training.runtime.storage import write


def test_a_checkpoint_that_cannot_be_written_leaves_the_previous_one_alone(tmp_path, monkeypatch):
    def full(file):
        raise OSError("No space left on device")

    path = tmp_path / "state"
    write(str(path), b"first")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(str(path), b"second")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"first"


def test_a_checkpoint_has_the_permissions_of_any_new_file(tmp_path):
    write(str(tmp_path / "state"), b"state")
    (tmp_path / "other").touch()
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "other").stat().st_mode
