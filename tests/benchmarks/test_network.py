"""The network lab: limited links and their clean-up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import network
from benchmarks.network import NetworkLab, bits_per_second, unavailable

REPOSITORY = Path(network.__file__).parents[1]

reason = unavailable()
needs_namespaces = pytest.mark.skipif(reason is not None, reason=reason or "")


@pytest.mark.parametrize(("rate", "bits"), [("10kbit", 1e4), ("2.5mbit", 2.5e6), ("1gbit", 1e9)])
def test_rates_are_read_as_tc_writes_them(rate, bits):
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "100", "0mbit", "-1mbit", "100 mbit", "100mbps"])
def test_rates_are_checked(rate):
    with pytest.raises(ValueError, match="'100mbit'"):
        NetworkLab(1, rate)


def test_numbers_of_workers_are_checked():
    for workers in (0, 201):
        with pytest.raises(ValueError, match=f"not {workers}"):
            NetworkLab(workers)


@pytest.fixture
def checked_again() -> Iterator[None]:
    unavailable.cache_clear()
    yield
    unavailable.cache_clear()


@pytest.mark.usefixtures("checked_again")
def test_missing_programs_are_named_with_their_packages(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    assert unavailable() == "The network lab needs tc: install iproute2."
    with pytest.raises(OSError, match="install iproute2"):
        NetworkLab(1).__enter__()


@pytest.mark.usefixtures("checked_again")
def test_root_is_required(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    assert unavailable() == "The network lab needs root on Linux."


@needs_namespaces
@pytest.mark.filterwarnings("ignore:Removing worker:UserWarning")
def test_a_lab_moves_bytes_over_its_links_and_loses_workers():
    with NetworkLab(2, "50mbit") as lab:
        device = device_of(lab.client.scheduler.address)
        first, second = lab.workers
        x = lab.client.submit(np.ones, 100_000, workers=[first])
        traffic = lab.traffic()
        assert lab.client.submit(np.sum, x, workers=[second]).result() == 100_000
        sent, received = (after - then for after, then in zip(lab.traffic(), traffic))
        assert 800_000 < sent[0] < 1_000_000 and 800_000 < received[1] < 1_000_000
        assert sent[1] < 100_000 and sent[2] < 100_000

        lab.limit(0, None)
        lab.limit(-1, "10mbit")
        assert lab.client.submit(int, 7, workers=[lab.free]).result() == 7
        lab.set_shares([0.5, 1.0])
        lab.stop(0)
        while psutil.Process(lab.pids[0]).status() != psutil.STATUS_STOPPED:
            pass  # it stops only when its share lets it run
        lab.resume(0)
        assert lab.client.submit(int, 7, workers=[first], pure=False).result() == 7
        lab.kill(1)
        workers = lab.client.nthreads()
        assert set(workers) == {first, lab.free}
    wait_until_gone(device)
    assert not any(map(alive, lab.pids))


# A lab in a process that the test ends; a stopped worker could not notice that by itself.
# Processes in the background of a script ignore interrupts, and the tests may run there.
_PROGRAM = """
import signal, sys
from benchmarks.network import NetworkLab

signal.signal(signal.SIGINT, signal.default_int_handler)
if __name__ == "__main__":
    with NetworkLab(1) as lab:
        lab.stop(0)
        print(lab.client.scheduler.address, *lab.pids, flush=True)
        sys.stdin.readline()
"""


@needs_namespaces
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_nothing_is_left_of_a_lab_after_its_process_is_killed(number, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
        assert process.stdout is not None
        address, *pids = process.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        assert len(processes) == 2
        device = device_of(address)
        process.send_signal(number)
        process.wait()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left
    wait_until_gone(device)


def device_of(scheduler: str) -> str:
    """Return the name of a lab's link to this process; other labs may come and go meanwhile."""
    device = "dask-coded-" + scheduler.split(".")[2]
    assert device in os.listdir("/sys/class/net")
    return device


def wait_until_gone(device: str) -> None:
    while device in os.listdir("/sys/class/net"):
        pass  # the kernel removes namespaces in the background


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
