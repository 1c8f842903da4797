"""Loops whose state is in files go on after the scheduler and all workers have died."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from pathlib import Path
from threading import Lock

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
from distributed import Event
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster, poll_for

import dask_coded as coded
from dask_coded.linear_model import Penalty
from dask_coded.runtime.coordinator.operators import sketch
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.sameness import owner_of
from dask_coded.storage import StateStore, StoreError
from dask_coded.storage.states import FILES, _same
from tests.processes import Processes

MATRIX = np.random.default_rng(5).standard_normal((40, 40)) / 6


def powers():
    """Return an algorithm; nested, because workers cannot import this module."""

    def powers(operator, rounds, until, log, loop):
        """Run rounds, but not beyond that in the file ``until``, and note each in a file."""
        first, x = loop.resume((1, np.ones(40)))
        for i in range(first, rounds + 1):
            if until.exists() and i > int(until.read_text()):
                Event("never").wait()
            x = operator @ x
            x /= np.abs(x).max()
            with open(log, "a") as file:
                file.write(f"{i}\n")
            loop.report(coded.Progress(i, residual=0.0), state=(i + 1, x), last=i == rounds)
        return x

    return powers


def noted(log) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_the_same_call_goes_on_and_then_has_the_same_result(c, s, *workers, tmp_path):
    def add(operator, step, notes, loop):
        first, total = loop.resume((1, np.zeros(4)))
        for i in np.arange(first, 7):
            total = total + operator @ np.full(4, step)
            loop._writer._began = float("-inf")
            loop.report(coded.Progress(i, residual=0.0), state=(i + 1, total), last=i == 6)
            loop._writer.finish()
            if notes.read_text() == str(i):
                raise ZeroDivisionError
        return first, total

    notes = tmp_path / "fails at"
    C = await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    loop, folder = coded.Loop(storage=tmp_path / "state"), tmp_path / "state"
    for fails in (3, 5):
        notes.write_text(str(fails))
        with pytest.raises(ZeroDivisionError):
            await coded.submit(add, C, 1.0, notes, loop, client=c)
        assert sorted(path.name for path in folder.iterdir()) == list(FILES)
    notes.write_text("")
    first, total = await coded.submit(add, C, 1.0, notes, loop, client=c)
    assert first == 6
    np.testing.assert_allclose(total, 6.0)
    # The result may be lost on its way.
    first, again = await coded.submit(add, C, 1.0, notes, loop, client=c)
    assert first == 7
    np.testing.assert_array_equal(again, total)
    other = await coded.encode(np.diag([1.0, 1.0, 1.0, 2.0]), coded.MDS(3, 2), client=c)
    with pytest.raises(StoreError, match="add of 4 x 4 float64 with other entries"):
        await coded.submit(add, other, 1.0, notes, loop, client=c)
    copies = await coded.encode(np.eye(4), coded.Repetition(3, 2), client=c)
    assert (await coded.submit(add, copies, 1.0, notes, loop, client=c))[0] == 7
    with pytest.raises(StoreError, match="add of 4 x 4 float64 with other arguments"):
        await coded.submit(add, C, 2.0, notes, loop, client=c)
    with pytest.raises(ValueError, match="Two loops have the storage"):
        coded.submit(add, C, loop, notes, loop, client=c)
    for path in folder.iterdir():
        path.unlink()
    assert (await coded.submit(add, C, 2.0, notes, loop, client=c))[0] == 1


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_a_loop_moves_to_a_worker_that_cannot_read_its_place(
    c, s, *workers, tmp_path, monkeypatch
):
    """Other workers keep the state, so the loop goes on without files."""

    def add(operator, loop):
        first, total = loop.resume((1, np.zeros(4)))
        for i in range(first, 5):
            total = total + operator @ np.ones(4)
            loop.report(coded.Progress(i, residual=0.0), state=(i + 1, total), last=i == 4)
            if first == 1:
                Event("reported").set()
                Event("never").wait()
        return first, total

    def refuse(store, *attempt):
        raise PermissionError("not mounted here")

    C = await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    loop = coded.Loop(storage=tmp_path)
    future = coded.submit(add, C, loop, client=c)
    await Event("reported", client=c).wait()
    plugins = [worker_plugin(w) for w in workers]
    await async_poll_for(lambda: any(p.keeper.kept for p in plugins), timeout=60)
    monkeypatch.setattr(StateStore, "open", refuse)
    running = s.tasks[future.key].processing_on.address
    with captured_logger("distributed.dask_coded") as log:
        await next(w for w in workers if w.address == running).close()
        first, total = await future
    assert first == 2
    np.testing.assert_allclose(total, 4.0)
    assert f"not written to {tmp_path}: not mounted here" in log.getvalue()
    with pytest.raises(PermissionError, match="not mounted here"):
        await coded.submit(add, C, loop, client=c)


def test_a_loop_that_is_not_submitted_says_that_it_keeps_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"only if `coded\.submit` gets the loop"):
        coded.Loop(storage=tmp_path).resume(1)


def test_functions_and_arguments_are_told_apart():
    def first(*args, **kwargs):
        pass

    def second(*args, **kwargs):
        pass

    def made(factor):
        def scaled(x, times=1):
            return factor * x if x else scaled(x)

        return scaled

    class Model:
        def __init__(self, factor):
            self.factor = factor

        def __dask_tokenize__(self):
            return type(self).__name__, self.factor

        def fit(self):
            pass

    class More(Penalty):  # is no dataclass itself
        def __init__(self, alpha):
            super().__init__(l2=1.0)
            object.__setattr__(self, "alpha", alpha)

    class Wrapped:
        def __init__(self, factor):
            update_wrapper(self, first)
            self.factor = factor

        def __call__(self):
            pass

    class Named(list):
        def __init__(self, name):
            self.name = name

    X = da.from_array(np.arange(3.0))
    calls = [
        (first, (1,), {}),
        (second, (1,), {}),
        (partial(first, 1), (), {}),
        (partial(first, 2), (), {}),
        (first, (), {"a": 1, "b": 2.0}),
        (first, (), {"b": 2.0, "a": 1}),
        (first, (), {"a": 2, "b": 1.0}),
        (first, ([np.arange(3)],), {}),
        (first, ([np.arange(3) + 1],), {}),
        (first, ([1, 2], [3]), {}),
        (first, ([1], [2, 3]), {}),
        (first, (), {"options": {"l1": 0.1}}),
        (first, (), {"options": {"l2": 0.1}}),
        *((first, (value,), {}) for value in ({3}, {4}, Path("a"), Path("b"))),
        *((first, (Penalty(l2=size),), {}) for size in (1.0, 100.0)),
        *((first, (kind(value),), {}) for kind in (More, Wrapped, Named) for value in (1, 2)),
        *((first, (cache(made(factor)),), {}) for factor in (1, 2)),
        *((first, (value,), {}) for value in ({1: 2}, {"1": 2}, 7, "7", True, [[], 1], [[1]])),
        *((first, (np.ma.array([1, 2], mask=[0, i]),), {}) for i in (0, 1)),
        *((first, (np.array([1, i], dtype=object),), {}) for i in ("a", "b")),
        *((first, (scipy.sparse.eye_array(3) * i,), {}) for i in (1, 2)),
        *((first, (value,), {}) for value in (X, X + 1, X[::-1], slice(1), range(2), dict, sum)),
        *((first, (made(factor),), {}) for factor in (1, 2)),
        *((made(factor), (), {}) for factor in (1, 2)),
        *((first, (partial(made(1), factor),), {}) for factor in (1, 2)),
        *((first, (Model(factor).fit,), {}) for factor in (1, 2)),
        *((first, (value,), {}) for value in (lambda x: x + 1, lambda x: x + 2, lambda x: x - 1)),
    ]
    owners = [str(owner_of(*call)) for call in calls]
    assert [owners.index(owner) for owner in owners] == [
        *(0, 1, 2, 3, 4, 4),
        *range(6, len(calls)),
    ]
    again = [str(owner_of(*call)) for call in calls]
    assert again == owners


def test_a_class_may_say_itself_what_counts():
    @dataclass
    class Options:
        size: int
        log: object

        def __dask_tokenize__(self):
            return self.size

    said = [owner_of(print, (Options(*each),), {}) for each in ((1, "a"), (1, "b"), (2, "a"))]
    assert said[0] == said[1] != said[2]


def test_what_cannot_be_told_apart_is_refused():
    with pytest.raises(TypeError, match="cannot tell if it is resumed with the same lock"):
        owner_of(print, (Lock(),), {})


SCRIPT = """
import collections, dataclasses, enum, functools, pathlib
import dask.array as da, numpy as np
from dask_coded.linear_model.families import Logistic
from dask_coded.sameness import owner_of

@dataclasses.dataclass
class Options:
    size: object

class Kind(enum.Enum):
    A, B = 1, 2

class Model:
    def __init__(self, size):
        self.size, self.itself = size, self
    def fit(self): ...

class Own(Logistic): ...

def made(a):
    return lambda x: (lambda y: y + 1)(x) + a if x in {"a", "b", "c"} else a

def start(): ...

values = [
    Options({"x", "y", "z"}), Options(3), Kind.A, Kind.B, Model(1), Model(2), Model(1).fit,
    Model(2).fit, Own(), made(1), made(2), functools.partial(start, 1), {1: 2}.get, {1: 3}.get,
    np.random.default_rng(0), np.random.default_rng(1), pathlib.Path("a"), {"x", "y"}, da.ones(3),
    collections.Counter("ab"), np.sin, np.cos, range(3), object(),
    *(lambda x: (lambda y: y + 1), lambda x: (lambda y: y + 2)),
]
for value in values:
    print(owner_of(start, (value,), {})[0]["arguments"])
"""


def test_arguments_of_a_script_are_the_same_when_it_runs_again(tmp_path):
    """Not by `dask.tokenize`, which pickles what a script defines."""
    (tmp_path / "script.py").write_text(SCRIPT)
    said = [
        subprocess.run(
            [sys.executable, tmp_path / "script.py"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in "12"
    ]
    assert said[0] == said[1]
    assert len(set(said[0])) == len(said[0])


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_entries_beside_others_that_are_not_finite_are_told_apart(c, s, *workers):
    A = np.random.default_rng(1).standard_normal((60, 4))
    found = []
    for place, factor in ((0, 1), (0, 1), (1, 1), (0, 2), (0, 1e300)):
        matrix = A * factor
        matrix[place] = np.nan
        array = await coded.encode(matrix, coded.Repetition(3, 2), client=c, check_finite=False)
        found.append(await coded.submit(sketch, array, client=c))
    owners = [{"function": "f", "arrays": [], "sketches": [each]} for each in found]
    assert [_same(owners[0], owner) for owner in owners] == [True, True, False, False, False]


@pytest.mark.parametrize("kind", ["f4", "f8", "c16", "i8"])
@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_entries_of_a_matrix_are_told_apart(c, s, *workers, kind):
    """With other codes they are the same."""
    A = (np.random.default_rng(1).standard_normal((60, 40)) * 9).astype(kind)
    other, row = A.copy(), A.copy()
    other[3, 4] += 9
    row[7] = row[7][::-1]
    codes = [coded.Repetition(3, 2), coded.Repetition(3, 1)]
    if A.dtype.kind != "i":
        codes.append(coded.MDS(3, 2))
    pairs = [coded.Polynomial(3, 1, 2), coded.Polynomial(3, 2, 1)] if A.dtype.kind != "i" else []
    found = []
    for matrix in (A, other, row):
        arrays = [await coded.encode(matrix, code, client=c) for code in codes]
        arrays += [await coded.encode_pair(matrix, matrix, code, client=c) for code in pairs]
        found.append([await coded.submit(sketch, array, client=c) for array in arrays])

    def same(a, b):
        owner = {"function": "f", "arrays": [], "arguments": ""}
        return _same(owner | {"sketches": [a]}, owner | {"sketches": [b]})

    for i, j in itertools.product(range(len(codes)), repeat=2):
        assert same(found[0][i], found[0][j])
        assert not same(found[0][i], found[1][j])
        assert not same(found[0][i], found[2][j])
    for i, j in itertools.product(range(len(codes), len(codes) + len(pairs)), repeat=2):
        assert same(found[0][i], found[0][j])
        assert not same(found[0][i], found[1][j])


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_algorithms_of_one_task_do_not_resume_from_each_other(c, s, *workers, tmp_path):
    """Nor if the function fails, and is submitted again."""

    def count(loop):
        first = loop.resume(1)
        for i in range(first, 4):
            loop._writer._began = float("-inf")
            loop.report(coded.Progress(i, residual=0.0), state=i + 1)
            loop._writer.finish()
        return first

    def twice(loop, notes):
        found = [count(loop), count(loop)]
        if notes.exists():
            raise ZeroDivisionError
        return found

    C = await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    assert C.shape == (4, 4)
    loop, notes = coded.Loop(storage=tmp_path / "state"), tmp_path / "fails"
    notes.touch()
    with pytest.raises(ZeroDivisionError):
        await coded.submit(twice, loop, notes, client=c)
    notes.unlink()
    # The first algorithm starts over, and its states replace that of the second one.
    assert await coded.submit(twice, loop, notes, client=c) == [1, 4]


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_what_is_no_state_of_this_loop_is_refused(c, s, *workers, tmp_path):
    C = await coded.encode(np.eye(4), coded.MDS(3, 2), client=c)
    owner = {"function": "power", "arrays": ["4 x 4 float64"], "arguments": "", "sketches": []}
    store = StateStore(str(tmp_path), owner)
    store.open()
    store.write((0, 0), 1, b"state")

    def other(operator, loop):
        return loop.resume("first")

    with pytest.raises(StoreError, match=r"state of power of 4 x 4 float64, this is .*other of 4"):
        await coded.submit(other, C, coded.Loop(tmp_path), client=c)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / FILES[0]).write_text("my notes")
    with pytest.raises(FileExistsError, match="is no state of a loop"):
        await coded.submit(other, C, coded.Loop(tmp_path / "notes"), client=c)
    assert (tmp_path / "notes" / FILES[0]).read_text() == "my notes"
    with pytest.raises(TypeError, match="'storage' must be a path"):
        coded.Loop(storage=3)


def test_scheduler_and_all_workers_killed_in_a_loop(clusters, tmp_path):
    log, state, until = tmp_path / "log", tmp_path / "state", tmp_path / "until"
    log.touch()
    until.write_text("5")
    cluster: Processes = clusters()
    cluster.add(4)
    code, loop = coded.Repetition(4, 2), coded.Loop(storage=state)
    C = coded.encode(MATRIX, code, cluster.client)
    future = coded.submit(powers(), C, 12, until, log, loop, client=cluster.client)
    poll_for(lambda: len(noted(log)) == 5 and (state / FILES[0]).exists(), timeout=60)
    cluster.kill_scheduler()
    with pytest.raises(CancelledError):
        future.result(timeout=60)
    for process in cluster.workers.values():
        process.join(60)
        assert process.exitcode is not None
    kept = noted(log)
    until.unlink()

    cluster = clusters()
    cluster.add(3)
    client = cluster.client
    C = coded.encode(MATRIX, code, client, oversubscribe=True)
    found = coded.submit(powers(), C, 12, until, log, loop, client=client).result(timeout=60)
    again = noted(log)[len(kept) :]
    assert again == list(range(again[0], 13))
    assert again[0] > 1  # at least the first state is kept
    whole = coded.submit(powers(), C, 12, until, tmp_path / "other", coded.Loop(), client=client)
    np.testing.assert_array_equal(found, whole.result(timeout=60))
