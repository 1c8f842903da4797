"""Stop and continue processes, in a duty cycle or on request.

Benchmarks use `benchmarks.lab.Throttle`, which is built on this.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

import psutil

# Reads process ids until the pipe closes, however its owner ends, and then continues them.
_GUARD = """
import psutil, sys
for pid in sys.stdin.read().split():
    try:
        psutil.Process(int(pid)).resume()
    except psutil.Error:
        pass
"""


class Signals:
    """Stops and continues processes; none stays stopped when this process ends, even if killed.

    A stopped process cannot notice that its owner is gone, and cannot exit by itself. So a guard
    process waits for the end of this one, and then continues all that were ever stopped.
    """

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    def stop(self, pid: int) -> None:
        """Stop a process; do nothing if it has ended."""
        with suppress(psutil.NoSuchProcess):
            if pid not in self._processes:
                # psutil remembers the start time: a later process of the same id is never touched.
                self._processes[pid] = psutil.Process(pid)
                self._warn_guard(pid)
            self._processes[pid].suspend()

    def resume(self, pid: int) -> None:
        """Continue a process if it was ever stopped."""
        if pid in self._processes:
            with suppress(psutil.NoSuchProcess):
                self._processes[pid].resume()

    def close(self) -> None:
        """Continue all processes, and end the guard."""
        for pid in self._processes:
            self.resume(pid)
        if self._guard is not None:
            with self._guard as guard:
                guard.kill()

    def _warn_guard(self, pid: int) -> None:
        if self._guard is None:
            # In a separate session, so that Ctrl-C does not reach it.
            command = [sys.executable, "-c", _GUARD]
            self._guard = subprocess.Popen(
                command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"%d\n" % pid)


Action = Literal["stop", "continue"]


def duty_cycle(shares: Mapping[int, float]) -> list[tuple[float, Action, int]]:
    """Plan one period: when to stop and when to continue each process.

    Parameters
    ----------
    shares
        Part of the period for which each process id may run.

    Returns
    -------
    list of (float, str, int)
        Moment in [0, 1) as a part of the period, ``"stop"`` or ``"continue"``, process id; in
        order of time. Turns are spread over the period, so that slowed processes do not all run at
        once. A process with a share of 1 or more is left alone; one with 0 is never continued.

    Examples
    --------
    >>> duty_cycle({7: 0.25, 8: 0.75, 9: 1.0})
    [(0.0, 'continue', 7), (0.25, 'stop', 7), (0.25, 'stop', 8), (0.5, 'continue', 8)]
    """
    slow = {pid: share for pid, share in shares.items() if share < 1}
    plan: list[tuple[float, Action, int]] = []
    for i, (pid, share) in enumerate(slow.items()):
        start = i / len(slow)
        if share > 0:
            plan.append((start, "continue", pid))
        plan.append(((start + share) % 1, "stop", pid))
    return sorted(plan, key=lambda event: event[0])


class DutyCycle:
    """A thread that stops and continues processes in turn.

    Parameters
    ----------
    period
        Seconds.
    clock
        Seconds since some fixed moment.
    """

    def __init__(self, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period = period
        self._clock = clock
        self._lock = threading.Lock()
        self._shares: dict[int, float] = {}
        self._signals = Signals()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def set_share(self, pid: int, share: float) -> None:
        with self._lock:
            self._shares[pid] = share
            if share >= 1:
                self._signals.resume(pid)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="duty cycle", daemon=True)
            self._thread.start()

    def release(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self._signals.close()

    def _run(self) -> None:
        while not self._end.is_set():
            begin = self._clock()
            with self._lock:
                plan = duty_cycle(self._shares)
            for part, action, pid in plan:
                self._wait_until(begin + part * self._period)
                with self._lock:
                    # The cycle may have ended, or the share become 1, since the plan was made.
                    if not self._end.is_set() and self._shares[pid] < 1:
                        (self._signals.stop if action == "stop" else self._signals.resume)(pid)
            self._wait_until(begin + self._period)

    def _wait_until(self, moment: float) -> None:
        self._end.wait(max(moment - self._clock(), 0))
