"""Slow processes down on purpose, each to a given share of one core.

A `Throttle` holds every process to its share while its block lasts::

    pids = client.run(os.getpid)
    with Throttle({pid: share for pid, share in zip(pids.values(), [1.0, 1.0, 0.2])}) as lab:
        print(lab.kind)
        ...
        lab.set_share(pid, 0.5)  # speeds may drift

`benchmarks.cluster.Lab` is a whole cluster with workers slowed like this.

Sleeping inside a task, the usual way to fake a straggler, frees the core for the other workers, and
the worker's own event loop stays at full speed. Here the process itself is slow, communication
included, as on a busy virtual machine. There are two methods:

cgroup quota
    As root on Linux each process gets its own control group with the CPU controller's bandwidth
    limit: ``share * period`` of run time per period, all threads together. Processes without a
    group run first. Version 1 and version 2 of control groups are supported.
stop/continue duty cycle
    Elsewhere a thread stops and continues the processes (``SIGSTOP`` and ``SIGCONT`` on Unix), so
    that each may run for ``share`` of every period. It is a share of time, not of a core: a
    process with several busy threads gets correspondingly more.

With both methods a share of 0 stops a process. No process stays stopped after the process that
stopped it is gone.

Measured on Linux 6.18 (250 Hz): with a period of 10 ms a quota of 0.2 gives 0.203 of a core, in
runs of a millisecond or two (see `benchmarks.ticks`); with the kernel's default period of 100 ms
the process stands still for 80 ms at a time, which is longer than many tasks.
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

import psutil

from benchmarks.stopping import DutyCycle, Signals
from benchmarks.ticks import Ticks

Kind = Literal["cgroup quota", "stop/continue duty cycle"]

#: Control groups are called PREFIX-<owner's pid>-<owner's start, ticks after boot>-<process's pid>.
PREFIX = "dask-coded-lab"

#: Seconds per period. Signals from a Python thread cost more than the kernel's own accounting,
#: so duty cycles have a longer one.
DEFAULT_PERIOD: Mapping[Kind, float] = {"cgroup quota": 0.01, "stop/continue duty cycle": 0.05}

#: The kernel accepts no quota below 1 ms and no period above 1 s.
_LEAST_QUOTA_US = 1_000
_GREATEST_PERIOD_US = 1_000_000


class _Brake(Protocol):
    """A method to slow processes down."""

    def set_share(self, pid: int, share: float) -> None: ...

    def release(self) -> None: ...


class Throttle:
    """Hold processes to shares of one core for as long as a ``with`` block lasts.

    Everything is undone when the block is left, also by an exception, and when the interpreter
    exits. If the interpreter is killed, stopped processes are continued at once, and the next run
    removes the control groups that are left.

    Parameters
    ----------
    shares
        Share of one core for each process id. A one-thread worker at full speed has 1.0. A share
        of 0 stops a process; infinity does not limit it, until a later `set_share` does.
    period
        Seconds over which a share is counted: 10 ms for quotas, 50 ms for a duty cycle by default.
        Shorter is smoother. Where a quota would be less than 1 ms, the period is lengthened.
    kind
        How to slow down; by default a cgroup quota where available, otherwise a duty cycle.

    Attributes
    ----------
    kind
        The method in use: ``"cgroup quota"`` or ``"stop/continue duty cycle"``.
    shares
        The current shares.

    Raises
    ------
    ValueError
        If a share is below 0, or the period is not above 0.
    ProcessLookupError
        If there is no such process.
    OSError
        If cgroup quotas were requested but are not available: they need root on Linux.
    """

    def __init__(
        self,
        shares: Mapping[int, float],
        *,
        period: float | None = None,
        kind: Kind | None = None,
    ) -> None:
        if period is not None and not period > 0:
            raise ValueError(f"Argument 'period' must be above 0 seconds, it is {period}.")
        for pid, share in shares.items():
            _check(pid, share)
        self.shares = dict(shares)
        self._period = period
        self._wanted = kind
        self._kind: Kind | None = None
        self._brake: _Brake | None = None
        self._owner = os.getpid()

    @property
    def kind(self) -> Kind:
        if self._kind is None:
            raise RuntimeError("A throttle has a kind only in its 'with' block: enter it first.")
        return self._kind

    def set_share(self, pid: int, share: float) -> None:
        """Change the share of a process, or start to slow another one."""
        if self._brake is None:
            raise RuntimeError("A throttle works only inside its 'with' block: enter it first.")
        _check(pid, share)
        if self.shares.get(pid) == share:
            return
        self._brake.set_share(pid, share)
        self.shares[pid] = share

    def __enter__(self) -> Self:
        if self._brake is not None:
            raise RuntimeError("This throttle is already in use: create another one.")
        if self._wanted != "stop/continue duty cycle":
            try:
                self._engage("cgroup quota")
                return self
            except OSError:
                # A missing process is the caller's error with either method.
                if self._wanted is not None or not all(map(psutil.pid_exists, self.shares)):
                    raise
        self._engage("stop/continue duty cycle")
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def _engage(self, kind: Kind) -> None:
        period = DEFAULT_PERIOD[kind] if self._period is None else self._period
        atexit.register(self._release)
        try:
            self._brake = QuotaGroups(period) if kind == "cgroup quota" else DutyCycle(period)
            for pid, share in self.shares.items():
                self._brake.set_share(pid, share)
        except BaseException:
            self._release()
            raise
        self._kind = kind

    def _release(self) -> None:
        atexit.unregister(self._release)
        if self._brake is not None and os.getpid() == self._owner:  # not in a forked child
            brake, self._brake = self._brake, None
            brake.release()


def _check(pid: int, share: float) -> None:
    if not share >= 0:
        raise ValueError(f"The share of process {pid} must be 0 or above, it is {share}.")
    if not psutil.pid_exists(pid):
        raise ProcessLookupError(f"There is no process {pid} to slow down.")


# ------------------------------------------------------------------------------------------ quotas


@dataclass(frozen=True)
class Controller:
    """The CPU controller of control groups: its version, its mount point, its files.

    Attributes
    ----------
    version
        1 or 2.
    mount
        Where its hierarchy is mounted.
    subtree
        The group that the mount shows as its root; inside a container not always ``/``.
    proc
        Where the process file system is mounted.
    """

    version: Literal[1, 2]
    mount: Path
    subtree: str = "/"
    proc: Path = Path("/proc")

    @classmethod
    def find(cls, proc: Path = Path("/proc")) -> Controller:
        """Find the controller among the mounts of this process.

        Raises
        ------
        OSError
            If there is none.
        """
        second = None
        for line in (proc / "self" / "mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _, rest = line.partition(" - ")
            subtree, mount = fields.split(" ")[3:5]
            filesystem, _, options = rest.split(" ", 2)
            if filesystem == "cgroup" and "cpu" in options.split(","):
                return cls(1, Path(mount), subtree, proc)
            controllers = Path(mount) / "cgroup.controllers"
            if filesystem == "cgroup2" and "cpu" in controllers.read_text().split():
                second = cls(2, Path(mount), subtree, proc)
        if second is None:
            raise OSError("No CPU controller of control groups is mounted.")
        return second

    @property
    def parent(self) -> Path:
        """The group in which groups are created.

        In version 1 it is this process's own group, so that limits on that group, such as those of
        a container, still apply. In version 2 a group that has processes cannot limit its children,
        so the parent is the root.
        """
        return self.group_of(os.getpid()) if self.version == 1 else self.mount

    def group_of(self, pid: int) -> Path:
        """Return the current group of a process, or the root if the mount does not show it."""
        path = "/"
        for line in (self.proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
            hierarchy, controllers, group = line.split(":", 2)
            if (hierarchy == "0") if self.version == 2 else ("cpu" in controllers.split(",")):
                path = group
        if self.subtree != "/" and (path + "/").startswith(self.subtree + "/"):
            path = path[len(self.subtree) :]
        group_folder = self.mount / path.strip("/")
        return group_folder if group_folder.is_dir() else self.mount

    def enable(self) -> None:
        """Allow quotas for the children of the parent."""
        if self.version == 2:
            switch = self.parent / "cgroup.subtree_control"
            if "cpu" not in switch.read_text().split():
                switch.write_text("+cpu")

    def yield_to_others(self, group: Path) -> None:
        """Let processes without a quota run first, as if they had machines of their own."""
        file, weight = ("cpu.shares", "51") if self.version == 1 else ("cpu.weight", "5")
        (group / file).write_text(weight)

    def limit(self, group: Path, share: float, period: float) -> None:
        """Set the quota of a group to a share of one core, counted over a period in seconds."""
        if math.isinf(share):
            file, none = ("cpu.cfs_quota_us", "-1") if self.version == 1 else ("cpu.max", "max")
            (group / file).write_text(none)
            return
        period_us, quota_us = quota(share, period)
        if self.version == 1:
            (group / "cpu.cfs_quota_us").write_text("-1")  # without a quota any period is valid
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")


class QuotaGroups:
    """Control groups with a CPU quota, one for each process.

    Parameters
    ----------
    period
        Seconds.
    controller
        Found among this process's mounts by default.
    """

    def __init__(self, period: float, controller: Controller | None = None) -> None:
        self._period = period
        self._controller = controller or Controller.find()
        self._groups: dict[int, Path] = {}
        self._signals = Signals()
        self._ticks: Ticks | None = None
        self._undo = ExitStack()
        self._undo.callback(self._signals.close)
        remove_stale_groups(self._controller.parent)
        self._controller.enable()

    def set_share(self, pid: int, share: float) -> None:
        if pid not in self._groups:
            self._enclose(pid)
        if share == 0:  # a quota cannot be 0
            self._signals.stop(pid)
            return
        if self._ticks is None and math.isfinite(share):
            self._ticks = Ticks()
            self._undo.callback(self._ticks.close)
        self._controller.limit(self._groups[pid], share, self._period)
        self._signals.resume(pid)

    def _enclose(self, pid: int) -> None:
        """Make a group for a process and move it there."""
        origin = self._controller.group_of(pid)
        if origin.name.startswith(PREFIX):
            raise ValueError(f"Process {pid} is already slowed by control group {origin}.")
        group = self._controller.parent / group_name(pid)
        group.mkdir()
        self._undo.callback(_dissolve, group, origin)
        self._controller.yield_to_others(group)
        _move(pid, group)
        self._groups[pid] = group

    def release(self) -> None:
        self._groups.clear()
        self._undo.close()  # every group, even if removing one of them fails


def quota(share: float, period: float) -> tuple[int, int]:
    """Return period and quota in the kernel's whole microseconds and within its limits.

    Parameters
    ----------
    share
        Share of one core.
    period
        Seconds; lengthened where the quota would be below the kernel's minimum.

    Examples
    --------
    >>> quota(0.2, 0.01)
    (10000, 2000)
    >>> quota(0.02, 0.01)
    (50000, 1000)
    """
    period_us = round(max(period * 1e6, _LEAST_QUOTA_US / share, _LEAST_QUOTA_US))
    period_us = min(period_us, _GREATEST_PERIOD_US)
    return period_us, max(round(share * period_us), _LEAST_QUOTA_US)


def group_name(pid: int) -> str:
    """Return the name of the control group that this process creates for another one."""
    return f"{PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}-{pid}"


def remove_stale_groups(parent: Path) -> list[Path]:
    """Remove the groups whose owner is gone, and return them."""
    stale = []
    for group in parent.glob(f"{PREFIX}-*"):
        owner, start = group.name.removeprefix(f"{PREFIX}-").split("-")[:2]
        if _start_ticks(int(owner)) != int(start):
            _dissolve(group, parent)
            stale.append(group)
    return stale


def _move(pid: int, group: Path) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def _dissolve(group: Path, origin: Path) -> None:
    """Remove a group after moving its processes, including children forked meanwhile."""
    for attempts_left in reversed(range(100)):
        try:
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    _move(int(pid), origin)
            group.rmdir()
            return
        except OSError as error:
            if not group.exists():  # another run may have removed it
                return
            if error.errno != errno.EBUSY or not attempts_left:
                raise
            time.sleep(0.01)  # a process in it was starting or ending


def _start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks after boot, since process ids are reused."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
