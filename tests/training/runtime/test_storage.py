"""Checkpoints as files, written beside the training."""

from __future__ import annotations

import os
import pickle
from threading import Event

import pytest
from distributed.utils_test import captured_logger

from dask_coded.storage import read_file, unsealed, write_file
from dask_coded.training.runtime.storage import CheckpointWriter, opened, saved
from dask_coded.transport.attempts import RunOverError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def start(path):
    """Return a function that makes writers of one file."""
    writers, unexpected = [], []

    def start(confirm=lambda: None, warn=unexpected.append) -> CheckpointWriter:
        writers.append(CheckpointWriter(str(path), 1, confirm, warn))
        return writers[-1]

    yield start
    for writer in writers:
        writer.ended()
        writer.close()
    assert not unexpected


def content(path) -> bytes:
    return unsealed(read_file(str(path)))


def test_a_checkpoint_that_cannot_be_written_leaves_the_previous_one_alone(
    path, start, monkeypatch
):
    def full(file):
        raise OSError("No space left on device")

    said = []
    writer = start(warn=said.append)
    writer.put(1, b"first")
    writer.finish()
    with monkeypatch.context() as patch, captured_logger("distributed.dask_coded") as log:
        patch.setattr(os, "fsync", full)
        for version in (2, 3, 4):
            writer.put(version, b"%d" % version)
            writer.finish()
    assert log.getvalue().count(f"{path} of a training is not written: No space left") == 3
    assert list(path.parent.iterdir()) == [path]
    assert content(path) == b"first"
    [once] = said
    assert once == (
        f"The checkpoint {str(path)!r} of a training is not written: No space left on device. The "
        "training goes on, and tries again with each state."
    )
    writer.ended()
    assert said[1:] == [
        f"The last state of a training is not in its checkpoint {str(path)!r}: No space left on "
        "device. Keep the parameters that `train` returns."
    ]
    writer.put(5, b"fifth")
    writer.finish()
    writer.ended()
    assert content(path) == b"fifth"
    assert len(said) == 2


def test_a_training_that_ends_waits_for_no_store_that_hangs(path, start):
    go, said = Event(), []
    writer = start(confirm=go.wait, warn=said.append)
    writer.put(1, b"state")
    with captured_logger("distributed.dask_coded"):
        writer.finish(0.0)
    writer.ended()
    assert "the store has not answered for 0 seconds" in said[0]
    go.set()
    writer.finish()
    assert content(path) == b"state"


def test_a_checkpoint_has_the_permissions_of_any_new_file(tmp_path):
    write_file(str(tmp_path / "state"), b"state")
    (tmp_path / "other").touch()
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_training_does_not_wait_for_its_checkpoints(path, start):
    begun, go, confirmed = Event(), Event(), []

    def confirm():
        confirmed.append(len(confirmed))
        begun.set()
        go.wait()

    writer = start(confirm)
    writer.put(0, b"0")
    begun.wait()
    for version in (1, 2, 3):
        writer.put(version, b"%d" % version)  # returns at once
    assert not path.exists()
    go.set()
    writer.finish()
    assert content(path) == b"3"
    # Those between were left out. A local file is confirmed again before it is replaced.
    assert confirmed == [0, 1, 2, 3]


def test_what_a_killed_leader_has_left_is_removed(path, start):
    left = path.with_name(f".state.{'0f' * 16}.partial")
    left.touch()
    os.utime(left, (0.0, 0.0))
    start()
    assert not left.exists()


def test_a_leader_that_was_replaced_while_it_wrote_leaves_the_newer_file(path, start):
    asked = []

    def confirm():
        asked.append(None)
        if len(asked) > 1:
            path.write_bytes(b"newer")
            raise RunOverError("replaced")

    writer = start(confirm)
    writer.put(1, b"older")
    writer.finish()
    assert path.read_bytes() == b"newer"
    assert [*path.parent.iterdir()] == [path]


def test_a_leader_that_was_replaced_leaves_the_newer_object():
    """It was stopped before it begins to send."""
    place, asked = "memory://replaced/state", []

    def confirm():
        asked.append(None)
        if len(asked) > 1:
            write_file(place, b"newer")
            raise RunOverError("replaced")

    writer = CheckpointWriter(place, 1, confirm, warn=pytest.fail)
    writer.put(1, b"older")
    writer.finish()
    writer.close()
    assert content(place) == b"newer"


def test_a_leader_that_was_replaced_writes_nothing(path, start):
    def confirm():
        raise RunOverError("replaced")

    writer = start(confirm)
    writer.put(1, b"state")
    writer.finish()
    assert list(path.parent.iterdir()) == []


def test_a_checkpoint_with_a_flipped_byte_is_not_taken_for_whole(path):
    state = {"version": 3, "training": "mine", "parameters": b"\0" * 8}
    write_file(str(path), pickle.dumps(state))
    whole = path.read_bytes()
    assert opened(whole) == state
    assert saved(str(path), "mine") == (3, whole)
    assert saved(str(path), "other") is None
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        # Without its seal it would be one of version 0.2, whose content is whole.
        found = saved(str(path), "mine")
        assert found is None or opened(found[1]) == state


def test_checkpoints_of_version_0_2_are_read():
    assert opened(pickle.dumps({"version": 3})) == {"version": 3}
