"""A loop in the cluster that checks its results while workers die and stop."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from distributed.utils_test import poll_for

import dask_coded as coded


def checked_loop():
    """Return an algorithm; nested, because workers cannot import this module."""

    def loop(operator, A, log: str, over: str) -> int:
        """Run rounds until a file is there; keep each result over the next round, then check it."""
        rounds, kept = 0, None
        while rounds < 10 or not os.path.exists(over):
            x = np.sin(np.add.outer(np.arange(operator.shape[1]) + rounds, np.arange(30)))
            expected = A @ x
            result = operator @ x
            x *= 0  # the operand is the algorithm's own
            if kept is not None:
                np.testing.assert_allclose(*kept, rtol=1e-9, atol=1e-9)
            kept = result, expected
            rounds += 1
            with open(log, "a") as file:
                file.write(f"{rounds}\n")
        np.testing.assert_allclose(*kept, rtol=1e-9, atol=1e-9)
        return rounds

    return loop


def wait_for_rounds(future, log: Path, rounds: int) -> None:
    """Wait until the loop has run some more rounds."""
    goal = len(log.read_text().splitlines()) + rounds

    def there() -> bool:
        if future.done():
            future.result()  # an error of the loop
        return len(log.read_text().splitlines()) >= goal

    poll_for(there, timeout=60)


def check_rounds_through_faults(processes, matrix, code, folder: Path) -> None:
    """Run a loop while one of its workers is stopped again and again, and another is killed."""
    coordinator, stopped, killed, *_ = processes.add(6)
    client = processes.client
    log, over = folder / "log", folder / "over"
    log.touch()
    C = coded.encode(matrix, code, client)
    whole = client.scatter(matrix)
    future = coded.submit(
        checked_loop(), C, whole, str(log), str(over), client=client, workers=coordinator
    )
    wait_for_rounds(future, log, 3)
    for _ in range(3):
        with processes.stopped(stopped):
            wait_for_rounds(future, log, 3)
        wait_for_rounds(future, log, 2)
    processes.kill(killed)
    wait_for_rounds(future, log, 10)
    over.touch()
    assert future.result(timeout=60) > 20
