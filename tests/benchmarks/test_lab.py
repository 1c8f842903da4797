"""Throttling: the files that it writes and its clean-up, but no speeds."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import lab
from benchmarks.lab import Controller, QuotaGroups, Throttle, quota
from benchmarks.stopping import DutyCycle, duty_cycle

REPOSITORY = Path(lab.__file__).parents[1]


def quotas_are_available() -> bool:
    try:
        QuotaGroups(0.01).release()
        return os.access(Controller.find().parent, os.W_OK)
    except OSError:
        return False


needs_quotas = pytest.mark.skipif(
    not quotas_are_available(), reason="cgroup quotas need root on Linux"
)
needs_signals = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs Unix signals")

KINDS = [
    pytest.param("cgroup quota", marks=needs_quotas),
    pytest.param("stop/continue duty cycle", marks=needs_signals),
]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that answers every line with the pid of a child that does nothing."""
    program = (
        "import subprocess, sys\n"
        "for line in sys.stdin:\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "    print(child.pid, flush=True)\n"
    )
    arguments = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(arguments, text=True, **pipes) as process:
        yield process
        process.kill()


# --------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("share", "period", "expected"),
    [
        (0.2, 0.01, (10_000, 2_000)),
        (1.0, 0.01, (10_000, 10_000)),
        (2.5, 0.1, (100_000, 250_000)),
        (0.01, 0.01, (100_000, 1_000)),  # no quota below 1 ms, so a longer period
        (0.0001, 0.01, (1_000_000, 1_000)),  # no period above 1 s, so a greater share
        (4.0, 1e-6, (1_000, 4_000)),  # no period below 1 ms
    ],
)
def test_quota_keeps_within_the_limits_of_the_kernel(share, period, expected):
    assert quota(share, period) == expected


def test_shares_and_period_are_checked():
    for share in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="0 or above"):
            Throttle({os.getpid(): share})
    with pytest.raises(ValueError, match="period"):
        Throttle({}, period=0.0)


def test_unknown_process_is_refused(process):
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        Throttle({process.pid: 0.5})


def test_throttle_works_only_inside_its_block():
    throttle = Throttle({})
    with pytest.raises(RuntimeError, match="enter it first"):
        throttle.set_share(os.getpid(), 0.5)
    with pytest.raises(RuntimeError, match="has a kind"):
        _ = throttle.kind
    with throttle, pytest.raises(RuntimeError, match="in use"):
        throttle.__enter__()


# ------------------------------------------------------------------------- quotas, with fake files


@pytest.fixture
def fake_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that look like /proc and a control group mount; a group's files go with the group."""

    def rmdir(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        os.rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path


def fake_process(root: Path, pid: int, cgroup: str) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)


def fake_mounts(root: Path, *lines: str) -> None:
    text = "".join(line.format(root=root) + "\n" for line in lines)
    (root / "proc" / "self" / "mountinfo").write_text(text)


def test_version_1_mount_is_found_among_others(fake_root: Path):
    (fake_root / "unified").mkdir()
    (fake_root / "unified" / "cgroup.controllers").write_text("")
    fake_mounts(
        fake_root,
        "30 23 0:27 / / rw - ext4 /dev/sda rw",
        "31 23 0:28 / {root}/unified rw shared:4 - cgroup2 cgroup2 rw",
        "32 31 0:29 / {root}/cpuset rw - cgroup cgroup rw,cpuset",
        "33 31 0:30 /docker/x {root}/cpu rw - cgroup cgroup rw,cpu,cpuacct",
    )
    found = Controller.find(fake_root / "proc")
    assert found == Controller(1, fake_root / "cpu", "/docker/x", fake_root / "proc")


def test_version_2_mount_is_found(fake_root: Path):
    (fake_root / "cgroup.controllers").write_text("cpuset cpu io\n")
    fake_mounts(fake_root, "31 23 0:28 / {root} rw - cgroup2 cgroup2 rw,nsdelegate")
    assert Controller.find(fake_root / "proc") == Controller(2, fake_root, "/", fake_root / "proc")


def test_no_controller_is_an_os_error(fake_root: Path):
    fake_mounts(fake_root, "30 23 0:27 / / rw - ext4 /dev/sda rw")
    with pytest.raises(OSError, match="No CPU controller"):
        Controller.find(fake_root / "proc")


@pytest.mark.parametrize(
    ("path", "subtree", "expected"),
    [
        ("/", "/", "."),
        ("/a/b", "/", "a/b"),
        ("/docker/x/b", "/docker/x", "b"),
        ("/docker/x", "/docker/x", "."),
        ("/docker/xyz", "/docker/x", "."),  # outside of what the mount shows
    ],
)
def test_group_of_a_process(fake_root: Path, path: str, subtree: str, expected: str):
    (fake_root / "cpu" / "a" / "b").mkdir(parents=True)
    (fake_root / "cpu" / "b").mkdir()
    fake_process(fake_root, 7, f"4:memory:/elsewhere\n3:cpu,cpuacct:{path}\n0::/unified\n")
    controller = Controller(1, fake_root / "cpu", subtree, fake_root / "proc")
    assert controller.group_of(7) == fake_root / "cpu" / expected


def test_version_1_files(fake_root: Path):
    own = fake_root / "cpu" / "container"
    own.mkdir(parents=True)
    (own / "cgroup.procs").touch()
    fake_process(fake_root, os.getpid(), "3:cpu:/container\n")
    fake_process(fake_root, 7, "3:cpu:/container\n")
    groups = QuotaGroups(0.01, Controller(1, fake_root / "cpu", "/", fake_root / "proc"))
    groups.set_share(7, 0.2)
    group = own / lab.group_name(7)
    assert {file.name: file.read_text() for file in group.iterdir()} == {
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "2000",
        "cpu.shares": "51",
        "cgroup.procs": "7",
    }
    groups.set_share(7, 0.5)
    assert (group / "cpu.cfs_quota_us").read_text() == "5000"
    groups.set_share(7, math.inf)
    assert (group / "cpu.cfs_quota_us").read_text() == "-1"
    (group / "cgroup.procs").write_text("7\n")
    groups.release()
    assert not group.exists()
    assert (own / "cgroup.procs").read_text() == "7"


def test_version_2_files(fake_root: Path):
    (fake_root / "cgroup.subtree_control").write_text("memory\n")
    (fake_root / "user").mkdir()
    fake_process(fake_root, 7, "0::/user\n")
    groups = QuotaGroups(0.01, Controller(2, fake_root, "/", fake_root / "proc"))
    assert (fake_root / "cgroup.subtree_control").read_text() == "+cpu"
    groups.set_share(7, 0.2)
    group = fake_root / lab.group_name(7)
    assert (group / "cpu.max").read_text() == "2000 10000"
    assert (group / "cpu.weight").read_text() == "5"
    groups.set_share(7, math.inf)
    assert (group / "cpu.max").read_text() == "max"
    assert (group / "cgroup.procs").read_text() == "7"
    groups.release()
    assert not group.exists()
    assert (fake_root / "user" / "cgroup.procs").read_text() == "7"


def test_groups_of_owners_that_are_gone_are_removed(fake_root: Path, process):
    process.kill()
    process.wait()
    names = {
        "gone": f"{lab.PREFIX}-{process.pid}-123-7",
        "number taken by another process": f"{lab.PREFIX}-{os.getpid()}-1-7",
        "mine": lab.group_name(7),
        "another owner's": "user.slice",
    }
    for name in names.values():
        (fake_root / name).mkdir()
        (fake_root / name / "cgroup.procs").touch()
    lab.remove_stale_groups(fake_root)
    left = {file.name for file in fake_root.iterdir()} - {"proc"}
    assert left == {names["mine"], names["another owner's"]}


# ------------------------------------------------------------------------- quotas, with the kernel


def group_of(pid: int) -> Path:
    return Controller.find().group_of(pid)


@needs_quotas
def test_process_gets_its_own_group_and_leaves_it(process):
    origin = group_of(process.pid)
    with Throttle({process.pid: 0.2}) as throttle:
        assert throttle.kind == "cgroup quota"
        group = group_of(process.pid)
        assert group.name == lab.group_name(process.pid)
        assert (group / "cgroup.procs").read_text().split() == [str(process.pid)]
        throttle.set_share(process.pid, 0.7)
        assert throttle.shares == {process.pid: 0.7}
        with pytest.raises(ValueError, match="already slowed"):
            Throttle({process.pid: 0.5}).__enter__()
        assert group_of(process.pid) == group
    assert not group.exists()
    assert group_of(process.pid) == origin


@needs_quotas
def test_ticks_end_with_the_block(process):
    before = set(psutil.Process().children())
    with Throttle({process.pid: 0.5}, kind="cgroup quota"):
        ticks = set(psutil.Process().children()) - before
        assert len(ticks) == len(os.sched_getaffinity(0))
    assert not any(p.is_running() for p in ticks)


@needs_quotas
def test_children_leave_with_the_process(process):
    with Throttle({process.pid: 0.9}):
        group = group_of(process.pid)
        print(file=process.stdin, flush=True)
        child = int(process.stdout.readline())
        assert group_of(child) == group
    assert not group.exists()
    assert group_of(child) == group_of(process.pid)
    psutil.Process(child).kill()


@needs_quotas
@pytest.mark.parametrize("how", ["error in the block", "process killed in the block"])
def test_group_is_removed_however_the_block_ends(process, how):
    with pytest.raises(ZeroDivisionError), Throttle({process.pid: 0.2}):
        group = group_of(process.pid)
        if how == "process killed in the block":
            process.kill()
            process.wait()
        _ = 1 / 0
    assert not group.exists()


@needs_quotas
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_group_of_an_owner_that_ends_inside_its_block_is_removed(process, end):
    origin = group_of(process.pid)
    program = (
        "import os, sys\n"
        "from benchmarks.lab import Controller, Throttle\n"
        f"Throttle({{{process.pid}: 0.2}}).__enter__()\n"
        f"print(Controller.find().group_of({process.pid}), flush=True)\n"
        "os.kill(os.getpid(), 9) if sys.argv[1] == 'kill' else sys.exit(3)\n"
    )
    arguments = [sys.executable, "-c", program, end]
    owner = subprocess.run(arguments, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert owner.returncode == (3 if end == "exit" else -9)
    group = Path(owner.stdout.strip())
    assert group.name.startswith(lab.PREFIX)
    assert group.exists() == (end == "kill")
    with Throttle({}):  # the next run cleans up
        assert not group.exists()
    assert group_of(process.pid) == origin


def test_duty_cycle_is_used_without_quotas(monkeypatch: pytest.MonkeyPatch, process):
    def nothing_mounted() -> Controller:
        raise OSError("No CPU controller of control groups is mounted.")

    monkeypatch.setattr(Controller, "find", nothing_mounted)
    with Throttle({process.pid: 1.0}) as throttle:
        assert throttle.kind == "stop/continue duty cycle"
    with pytest.raises(OSError, match="No CPU controller"):
        Throttle({process.pid: 1.0}, kind="cgroup quota").__enter__()


# -------------------------------------------------------------------------------------- duty cycle


@pytest.mark.parametrize(
    "shares", [{}, {1: 1.0, 2: math.inf}, {1: 0.2}, {1: 0.2, 2: 0.9, 3: 0.5, 4: 1.0}]
)
def test_duty_cycle_gives_each_process_its_share(shares):
    plan = duty_cycle(shares)
    assert plan == sorted(plan, key=lambda event: event[0])
    assert {pid for _, _, pid in plan} == {pid for pid, share in shares.items() if share < 1}
    for pid, share in shares.items():
        events = {action: moment for moment, action, which in plan if which == pid}
        if share < 1:
            assert (events["stop"] - events["continue"]) % 1 == pytest.approx(share)


class FakeProcess:
    def __init__(self) -> None:
        self.actions: list[str] = []
        self.stopped = threading.Event()

    def suspend(self) -> None:
        self.actions.append("stop")
        self.stopped.set()

    def resume(self) -> None:
        self.actions.append("continue")


def test_stopped_process_is_continued_at_the_end(monkeypatch: pytest.MonkeyPatch):
    processes = {7: FakeProcess(), 8: FakeProcess()}
    monkeypatch.setattr(psutil, "Process", processes.__getitem__)
    cycle = DutyCycle(period=0.001)
    cycle.set_share(7, 0.5)
    cycle.set_share(8, 1.0)
    assert processes[7].stopped.wait(60)
    cycle.release()
    assert processes[7].actions[-1] == "continue"
    assert "stop" not in processes[8].actions


@needs_signals
def test_no_process_stays_stopped(process):
    with Throttle({process.pid: 1e-9}, period=0.001, kind="stop/continue duty cycle"):
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED


@needs_signals
def test_process_may_end_while_it_is_slowed(process):
    with Throttle({process.pid: 0.5}, period=0.001, kind="stop/continue duty cycle"):
        process.kill()
        process.wait()


# -------------------------------------------------------------------------------------------- stop


def test_duty_cycle_never_continues_a_stopped_process():
    assert duty_cycle({7: 0.0}) == [(0.0, "stop", 7)]


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def answers(process: subprocess.Popen[str]) -> bool:
    """Wait for an answer, which a stopped process never sends."""
    print(file=process.stdin, flush=True)
    psutil.Process(int(process.stdout.readline())).kill()
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_share_0_stops_a_process_until_it_gets_another_share(process, kind):
    with Throttle({process.pid: 0.0}, kind=kind) as throttle:
        wait_until_stopped(process)
        throttle.set_share(process.pid, 1.0)
        assert answers(process)
        throttle.set_share(process.pid, 0.0)
        wait_until_stopped(process)
    assert answers(process)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_process_is_continued_when_its_owner_is_killed(process, kind):
    program = (
        "import os\n"
        "from benchmarks.lab import Throttle\n"
        f"Throttle({{{process.pid}: 0.0}}, kind={kind!r}).__enter__()\n"
        "input()\n"
    )
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, cwd=REPOSITORY) as owner:
        wait_until_stopped(process)
        owner.kill()
    assert answers(process)
    with Throttle({}):  # removes the control group
        pass
