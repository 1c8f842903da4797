"""The straggler lab: shares of the workers and clean-up, but no speeds."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import dask.array as da
import numpy as np
import psutil
import pytest
from distributed.utils_test import poll_for

import dask_coded as coded
from benchmarks import cluster
from benchmarks.cluster import Follower, Lab
from benchmarks.lab import PREFIX, Controller, Throttle
from tests.benchmarks.test_lab import KINDS

REPOSITORY = Path(cluster.__file__).parents[1]


# --------------------------------------------------------------------------------------- the trace


def test_trace_starts_again_after_its_last_row():
    seen = []
    with Follower(np.array([[1.0], [2.0], [3.0]]), lambda row: seen.append(row[0])) as follower:
        assert (follower.row, seen) == (0, [1])
        for _ in range(3):
            follower.next_row()
    assert (follower.row, seen) == (0, [1, 2, 3, 1])


def test_thread_steps_through_the_trace_and_ends_with_the_block():
    seen = []
    turned = threading.Event()

    def apply(row: np.ndarray) -> None:
        seen.append(row[0])
        if len(seen) == 4:
            turned.set()

    with pytest.raises(ZeroDivisionError):
        with Follower(np.array([[1.0], [2.0]]), apply, seconds=1e-6):
            assert turned.wait(60)
            _ = 1 / 0
    assert seen[:4] == [1, 2, 1, 2]
    assert "trace follower" not in {thread.name for thread in threading.enumerate()}


def test_error_of_the_thread_is_raised_at_the_end_of_the_block():
    failed = threading.Event()

    def apply(row: np.ndarray) -> None:
        if row[0] == 2:
            failed.set()
            raise ProcessLookupError("There is no process 7 to slow down.")

    with pytest.raises(RuntimeError, match="no longer follow") as caught:
        with Follower(np.array([[1.0], [2.0]]), apply, seconds=1e-6):
            assert failed.wait(60)
    assert isinstance(caught.value.__cause__, ProcessLookupError)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="at least 1 worker"):
        Lab(0)
    with pytest.raises(ValueError, match="share=0"):
        Lab(1, share=0)
    with pytest.raises(ValueError, match="above 0"):
        Follower(np.ones((1, 1)), print, seconds=0)


# ----------------------------------------------------------------------------------------- the lab


@pytest.fixture(scope="module", params=KINDS)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    before = set(psutil.Process().children(recursive=True))
    with Lab(2, share=0.5, floor=0.01, kind=request.param) as lab:
        yield lab
        workers = set(psutil.Process().children(recursive=True)) - before
        groups = groups_of(os.getpid())
    assert len(workers) >= 3
    assert not any(worker.is_running() for worker in workers)
    assert not any(group.exists() for group in groups)


def groups_of(owner: int) -> list[Path]:
    try:
        return list(Controller.find().parent.glob(f"{PREFIX}-{owner}-*"))
    except OSError:
        return []


def shares(lab: Lab) -> list[float]:
    """Return the current shares, in the order of the workers."""
    pids = lab.client.run(os.getpid, workers=lab.workers)
    return [lab._throttle.shares[pids[worker]] for worker in lab.workers]


def test_all_workers_but_one_are_throttled(lab: Lab):
    assert lab.kind == lab._throttle.kind
    assert len(lab.workers) == 2
    assert {*lab.workers, lab.free} == set(lab.client.nthreads())
    free = lab.client.run(os.getpid, workers=[lab.free])[lab.free]
    assert len(lab._throttle.shares) == 2
    assert free not in lab._throttle.shares


def test_workers_run_at_full_speed_until_speeds_are_set(lab: Lab):
    assert lab.speeds.tolist() == shares(lab) == [math.inf, math.inf]
    lab.set_speeds([1.0, 0.2])
    assert lab.speeds.tolist() == [1.0, 0.2]
    assert shares(lab) == [0.5, 0.1]
    lab.set_speeds([1.0, 1e-6])
    assert shares(lab) == [0.5, 0.01]
    lab.set_speeds(math.inf)
    assert shares(lab) == [math.inf, math.inf]


def test_worker_of_speed_0_is_stopped_and_continued(lab: Lab):
    pids = lab.client.run(os.getpid, workers=lab.workers)
    lab.set_speeds([1.0, 0.0])
    pid = pids[lab.workers[1]]
    assert lab._throttle.shares[pid] == 0
    poll_for(lambda: stopped(psutil.Process(pid)), timeout=120)
    lab.set_speeds(math.inf)
    assert shares(lab) == [math.inf, math.inf]


def test_workers_follow_a_trace_and_get_their_speeds_back(lab: Lab):
    lab.set_speeds(1.0)
    with lab.following([[1.0, 0.2], [0.4, math.inf]]) as follower:
        assert shares(lab) == [0.5, 0.1]
        follower.next_row()
        assert shares(lab) == [0.2, math.inf]
    assert lab.speeds.tolist() == [1.0, 1.0]
    with pytest.raises(ZeroDivisionError), lab.following([[0.2, 0.2]]):
        _ = 1 / 0
    assert lab.speeds.tolist() == [1.0, 1.0]
    lab.set_speeds(math.inf)


def test_trace_must_fit_the_workers(lab: Lab):
    for trace in ([1.0, 1.0], [[1.0]], np.ones((0, 2))):
        with pytest.raises(ValueError, match="2 speeds"), lab.following(trace):
            pass
    for speed in (-1.0, math.nan):
        with pytest.raises(ValueError, match="without NaN"), lab.following([[speed, 1.0]]):
            pass
        with pytest.raises(ValueError, match="without NaN"):
            lab.set_speeds(speed)
    with pytest.raises(ValueError):
        lab.set_speeds([1.0, 1.0, 1.0])
    assert lab.speeds.tolist() == [math.inf, math.inf]


def test_speeds_are_measured_on_the_pieces(lab: Lab):
    A = da.ones((40, 10), chunks=(20, -1))
    C = coded.encode(A, coded.MDS(2, 1), workers=lab.workers)
    speeds = lab.measure_speeds(C, np.ones((10, 2)), seconds=0.001)
    assert speeds.shape == (2,)
    assert (speeds > 0).all()


# ---------------------------------------------------------------------------------- how a lab ends


def stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # its parent may never reap it
    except psutil.NoSuchProcess:
        return True


# Processes in the background of a script ignore interrupts, and the tests may run there.
OWNER = """
import signal, sys
from benchmarks.cluster import Lab

signal.signal(signal.SIGINT, signal.default_int_handler)
with Lab(2, share=0.5, kind=sys.argv[1]) as lab, lab.following([[1, 0], [0.5, 0]], seconds=0.01):
    print("ready", flush=True)
    sys.stdin.readline()
    raise ZeroDivisionError
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "end", [*(pytest.param(end, marks=pytest.mark.long) for end in ("error", "Ctrl-C")), "kill"]
)
def test_nothing_outlives_the_owner(kind: str, end: str):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        start_new_session=True,
    ) as owner:
        try:
            assert owner.stdout.readline() == b"ready\n"
            children = psutil.Process(owner.pid).children(recursive=True)
            assert len(children) >= 4  # three workers, and the guard of the stopped one
            poll_for(lambda: any(map(stopped, children)), timeout=120)
            assert len(groups_of(owner.pid)) == (2 if kind == "cgroup quota" else 0)
            if end == "kill":
                owner.kill()
            elif end == "Ctrl-C":
                os.killpg(owner.pid, signal.SIGINT)  # to the workers as well, like a terminal
            else:
                owner.stdin.write(b"\n")
                owner.stdin.flush()
            expected = {"error": 1, "Ctrl-C": -signal.SIGINT, "kill": -signal.SIGKILL}[end]
            assert owner.wait() == expected
        finally:
            owner.kill()
    poll_for(lambda: all(map(gone, children)), timeout=120)
    if end == "kill":
        with Throttle({}):  # the next run cleans up
            pass
    assert groups_of(owner.pid) == []
