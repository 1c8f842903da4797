"""Interrupt every core each millisecond, so that the kernel counts CPU quotas finely.

The kernel checks a quota when it interrupts a process, which at 250 Hz is every 4 ms. A process
with 0.15 of a core and a period of 10 ms therefore runs for up to 4 ms, and then stands still for
17 ms on average, and for up to 50 ms if ten such processes share two cores. With the interrupts it
stands still for 7 ms on average, and for up to 18 ms. A machine of a seventh of the speed does not
stand still at all, so rounds come closer to those on such machines. The interrupts cost 2.5 % of
each core.
"""

from __future__ import annotations

import os
import subprocess
import sys

# As a real-time process it runs at once when its time has come. Nothing is left to clean up if its
# owner is killed: it notices within a tenth of a second.
_PROGRAM = """
import os, sys, time
core, owner = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while os.getppid() == owner:
    for _ in range(100):
        time.sleep(0.001)
"""


class Ticks:
    """One process per core that wakes up each millisecond, where the system permits it."""

    def __init__(self) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(core), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # real-time processes may be forbidden
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
            for core in sorted(os.sched_getaffinity(0))
        ]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            with process:
                process.kill()
