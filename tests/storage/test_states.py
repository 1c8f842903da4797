"""States of loops in files: half-written and damaged ones are not used, others' are not touched."""

from __future__ import annotations

import json
import os
import pickle
import time
import uuid
from threading import Event

import numpy as np
import pytest
from distributed.utils_test import captured_logger

from dask_coded.storage import StateStore, StateWriter, StoreError, states
from dask_coded.storage.files import read_file, sealed, unsealed, write_file

SKETCH = ["ff", 1e-8, 3.0, -2.0, 0.0]
OWNER = {
    "function": "power",
    "arrays": ["4 x 4 float64"],
    "arguments": "a",
    "sketches": [SKETCH],
}
PLACE = 0, 0


@pytest.fixture(params=["folder", "memory://states"])
def storage(request, tmp_path):
    if request.param == "folder":
        yield str(tmp_path / "folder" / "state")
        return
    import fsspec

    yield request.param
    fsspec.filesystem("memory").store.clear()


def opened(storage, *attempt) -> StateStore:
    store = StateStore(storage, OWNER)
    store.open(*attempt)
    return store


def found(storage) -> tuple[int, bytes] | None:
    stored = StateStore(storage, OWNER).open()
    return stored and (stored.round, stored.state)


@pytest.fixture
def start():
    """Return a function that makes writers, which must not fail unless they are told how."""
    writers, unexpected = [], []

    def start(store, failed=unexpected.append, **options) -> StateWriter:
        writers.append(StateWriter(store, failed, **options))
        return writers[-1]

    yield start
    for writer in writers:
        writer.close()
    assert not unexpected


def test_the_latest_state_is_found_by_another_process(storage):
    assert found(storage) is None
    for rounds in ((1, 2, 3), (4,), (5, 6)):
        store = opened(storage)
        for round in rounds:
            store.write(PLACE, round, b"state %d" % round)
        assert found(storage) == (rounds[-1], b"state %d" % rounds[-1])


def test_a_state_of_another_algorithm_of_the_task_is_told_apart(storage):
    opened(storage).write((1, 2), 7, b"state")
    assert StateStore(storage, OWNER).open().place == (1, 2)


def test_a_half_written_state_is_not_used_whatever_is_there_of_it(storage):
    store = opened(storage)
    for round in (1, 2, 3):
        store.write(PLACE, round, b"state %d" % round)
    third = f"{storage}/loop-state-0"
    whole = read_file(third)
    for length in range(0, len(whole), 3):
        put(third, whole[:length])
        assert found(storage) == (2, b"state 2")
        # The next state replaces it, and not the one that is whole.
        opened(storage).write(PLACE, 9, b"next")
        assert unsealed(read_file(f"{storage}/loop-state-1")).endswith(b"state 2")
        assert found(storage) == (9, b"next")


def test_a_flipped_byte_is_found_wherever_it_is(storage):
    store = opened(storage)
    for round in (1, 2, 3):
        store.write(PLACE, round, b"state %d" % round)
    third = f"{storage}/loop-state-0"
    whole = read_file(third)
    for i in range(len(whole)):
        put(third, whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        assert found(storage) == (2, b"state 2")


def put(place: str, data: bytes) -> None:
    """Write a file as it would be after a crash or on a broken disk."""
    import fsspec

    with fsspec.open(place, "wb") as file:
        file.write(data)


def test_files_of_others_are_neither_read_nor_deleted(tmp_path):
    (tmp_path / "loop-state-1").write_bytes(b"my notes")
    with pytest.raises(FileExistsError, match="loop-state-1 is no state of a loop"):
        StateStore(str(tmp_path), OWNER).open()
    assert (tmp_path / "loop-state-1").read_bytes() == b"my notes"
    (tmp_path / "loop-state-1").rename(tmp_path / "notes")
    others = tmp_path / ".loop-state-0.partial", tmp_path / ".loop-state-0.my.partial"
    for other in others:
        other.touch()
    store = opened(str(tmp_path))
    store.write(PLACE, 1, b"state")
    assert sorted(tmp_path.iterdir()) == sorted(
        [tmp_path / "loop-state-0", tmp_path / "notes", *others]
    )


def partial(path, age: float):
    """Leave a file as a process does that is killed while it writes another one."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    part.write_bytes(b"half")
    then = time.time() - age
    os.utime(part, (then, then))
    return part


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    state = tmp_path / "loop-state-1"
    old, young = partial(state, age=4000.0), partial(state, age=3000.0)
    other, mine = (
        partial(tmp_path / "loop-state-10", age=4000.0),
        tmp_path / ".loop-state-1.partial",
    )
    mine.touch()
    os.utime(mine, (0.0, 0.0))
    opened(str(tmp_path))
    assert not old.exists()
    assert {*tmp_path.iterdir()} == {young, other, mine}


def test_a_bucket_need_not_be_made(monkeypatch):
    """That of others can be neither listed nor made."""
    from fsspec.implementations.memory import MemoryFileSystem

    def refused(self, *args, **kwargs):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "makedirs", refused)
    place = "memory://bucket/state"
    opened(place).write(PLACE, 1, b"state")
    assert found(place) == (1, b"state")


def test_sketches_may_differ_by_rounding(tmp_path):
    """Another cluster adds up in another order."""
    opened(str(tmp_path)).write(PLACE, 1, b"state")
    rounded = ["ff", 1e-8, 3.0, -2.0 + 1e-9, 1e-12]
    assert StateStore(str(tmp_path), OWNER | {"sketches": [rounded]}).open() is not None


@pytest.mark.parametrize(
    ("owner", "named"),
    [
        (OWNER | {"function": "pagerank"}, "of power of 4 x 4 float64, this is pagerank of 4"),
        (OWNER | {"arrays": ["5 x 5 float64"]}, "of 4 x 4 float64, this is power of 5 x 5 float64"),
        (OWNER | {"arrays": []}, "this is power: pass another"),
        (OWNER | {"arguments": "b"}, "this is power of 4 x 4 float64 with other arguments: pass"),
        (
            OWNER | {"sketches": [["ff", 1e-8, 3.0, -2.001, 0.0]]},
            "this is power of 4 x 4 float64 with other entries: pass",
        ),
        (
            OWNER | {"sketches": [["fe", *SKETCH[1:]]]},
            "this is power of 4 x 4 float64 with other entries: pass",
        ),
        (OWNER | {"sketches": []}, "this is power of 4 x 4 float64 with other entries: pass"),
    ],
)
def test_the_state_of_another_loop_is_refused(owner, named, tmp_path):
    opened(str(tmp_path)).write(PLACE, 1, b"state")
    with pytest.raises(StoreError, match=named):
        StateStore(str(tmp_path), owner).open()
    assert found(str(tmp_path)) == (1, b"state")


def test_a_state_says_in_json_what_it_is_of(tmp_path):
    opened(str(tmp_path), "power-1", 7).write(PLACE, 3, b"state")
    first, said, state = unsealed((tmp_path / "loop-state-0").read_bytes()).split(b"\n", 2)
    assert first == b"dask-coded loop state 3"
    said = json.loads(said)
    assert len(said.pop("run")) == 32
    assert said == {
        "sequence": 0,
        "task": "power-1",
        "attempt": 7,
        "place": [0, 0],
        "round": 3,
        "owner": OWNER,
    }
    assert state == b"state"


def test_a_disk_that_is_full_leaves_the_state_before_alone(tmp_path, monkeypatch, start):
    def full(file):
        raise OSError("No space left on device")

    store, failures = opened(str(tmp_path)), []
    writer = start(store, failures.append)
    store.write(PLACE, 1, b"first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer.write(0.0, PLACE, 2, b"second")
        writer.finish()
    assert [str(failure) for failure in failures] == ["No space left on device"]
    assert found(str(tmp_path)) == (1, b"first")
    assert [path.name for path in tmp_path.iterdir()] == ["loop-state-0"]
    writer.write(0.0, PLACE, 3, b"third")
    writer.finish()
    assert found(str(tmp_path)) == (3, b"third")


def test_writing_takes_a_twentieth_of_the_time_and_once_a_second(tmp_path, monkeypatch, start):
    now = [0.0]
    monkeypatch.setattr(states, "monotonic", lambda: now[0])
    store, seconds, begun = opened(str(tmp_path)), [0.01], []

    def write(place, round, state):
        now[0] += seconds[0]

    monkeypatch.setattr(store, "write", write)
    writer = start(store)
    for tick in range(60):
        now[0] = tick / 4
        if tick == 12:
            seconds[0] = 0.125
        if writer.is_due():
            begun.append(now[0])
            writer.write(now[0], PLACE, 1, b"state")
            writer.finish()
    assert begun == [0.0, 1.0, 2.0, 3.0, 5.5, 8.0, 10.5, 13.0]


def test_a_store_that_does_not_answer_holds_up_nobody(tmp_path, monkeypatch, start):
    store, go, failures = opened(str(tmp_path)), Event(), []
    monkeypatch.setattr(store, "write", lambda *state: go.wait())
    writer = start(store, failures.append)
    assert writer.is_due()
    writer.write(0.0, PLACE, 1, b"state")
    assert not writer.is_due()
    writer.finish(0.0)
    assert [str(failure) for failure in failures] == ["the store has not answered for 0 seconds"]
    go.set()
    writer.finish()
    assert len(failures) == 1


def test_a_store_that_has_stalled_is_asked_again_after_a_minute(tmp_path, monkeypatch, start):
    now = [0.0]
    monkeypatch.setattr(states, "monotonic", lambda: now[0])
    store = opened(str(tmp_path))
    monkeypatch.setattr(store, "write", lambda *state: now.__setitem__(0, 600.0))
    writer = start(store)
    writer.write(0.0, PLACE, 1, b"state")
    writer.finish()
    assert writer.is_due()


def test_a_second_run_at_one_place_is_noticed(storage):
    first, second = opened(storage), opened(storage)
    first.write(PLACE, 1, b"first")
    with pytest.raises(StoreError, match="another run"):
        second.write(PLACE, 1, b"second")
    first.write(PLACE, 2, b"first")
    third = opened(storage)
    third.write(PLACE, 3, b"third")
    with pytest.raises(StoreError, match="another run"):
        first.write(PLACE, 3, b"first")
    third.write(PLACE, 4, b"third")
    assert found(storage) == (4, b"third")


def test_a_state_that_comes_after_a_takeover_is_overwritten(storage):
    """A worker is stopped when it has asked whether it may write."""
    opened(storage, "power-1", 1).write(PLACE, 1, b"first")
    stopped = opened(storage, "power-1", 2)
    taker = opened(storage, "power-1", 3)
    stopped.write(PLACE, 2, b"late")
    for round in (2, 3):
        taker.write(PLACE, round, b"taker")
    assert found(storage) == (3, b"taker")
    with pytest.raises(StoreError, match="another run"):
        stopped.write(PLACE, 3, b"late")
    other = opened(storage, "power-2", 9)
    taker.write(PLACE, 4, b"taker")
    with pytest.raises(StoreError, match="another run"):
        other.write(PLACE, 5, b"other")


def test_damaged_states_are_not_passed_over_in_silence(tmp_path):
    store = opened(str(tmp_path))
    store.write(PLACE, np.int64(1), b"first")
    store.write(PLACE, 2, b"second")
    for file, said in [("loop-state-1", "that of round 1 is used"), ("loop-state-0", None)]:
        path = tmp_path / file
        path.write_bytes(path.read_bytes()[:-1])
        if said is None:
            with pytest.raises(StoreError, match=r"Both states of a loop in .* are damaged"):
                found(str(tmp_path))
        else:
            with captured_logger("distributed.dask_coded") as log:
                assert found(str(tmp_path)) == (1, b"first")
            assert f"{file} is damaged or was half written: {said}" in log.getvalue()


def test_a_state_of_a_later_version_is_named(tmp_path):
    write_file(str(tmp_path / "loop-state-0"), b"dask-coded loop state 9\nstate")
    with pytest.raises(StoreError, match="another version of dask-coded"):
        opened(str(tmp_path))


def test_a_run_that_was_taken_over_writes_nothing(tmp_path, start):
    store = opened(str(tmp_path))
    writer = start(store, present=lambda: False)
    writer.write(0.0, PLACE, 1, b"state")
    writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_a_training_is_no_state(tmp_path):
    write_file(str(tmp_path / "loop-state-0"), b"weights")
    with pytest.raises(FileExistsError, match="is no state"):
        opened(str(tmp_path))


def test_a_seal_is_not_noticed_by_pickle(tmp_path):
    file = str(tmp_path / "file")
    write_file(file, pickle.dumps([1, 2]))
    assert pickle.loads(read_file(file)) == [1, 2]
    with pytest.raises(StoreError, match="damaged"):
        unsealed(sealed(b"state")[:-1])
