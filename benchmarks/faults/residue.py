"""Containers, tasks, threads, memory and shared segments that remain when nothing runs."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import traceback
from collections import Counter, deque
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
from distributed import Client

#: By the address of a process, which quantity is how large.
Counts = dict[str, dict[str, float]]

# Containers that are limited in size, and remember something on purpose: the last runs of tasks,
# specs and checks of the last arrays, workers that have computed wrongly, shared memory to be used
# again.
_LIMITED = (
    *("_ended", "_least", "_specs", "checks", "_factors", "_spans"),
    *("_corrupt", "_spare", "_mapped"),
)
# Shared segments that a process keeps: its probe, and some for the next operands and shares.
_SEGMENTS = 6
# What is kept of the last arrays on purpose; and what is told in reports, of these, of the workers
# that are there, and in total.
_LAST = ("ArraySpec", "PairSpec", "Checks", "Activity", "Observer")


def sizes(*roots: Any, skip: tuple[str, ...] = ()) -> Counter[str]:
    """Return the sizes of all containers of this package that can be reached, by where they are.

    Parameters
    ----------
    roots
        Where to begin.
    skip
        Names of types that are not entered.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    stack = [(root, type(root).__name__) for root in roots]
    while stack:
        value, name = stack.pop()
        if id(value) in seen or type(value).__name__ in skip or getattr(value, "closed", False):
            continue  # a channel that is closed counts for nothing but its place
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            found[name] += len(value)
            parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
            stack += [(part, name) for part in parts]
        elif isinstance(value, np.ndarray):
            found[name] += value.size
        elif type(value).__module__.startswith("dask_coded") and hasattr(value, "__dict__"):
            kind = type(value).__name__
            stack += [(part, f"{kind}.{attribute}") for attribute, part in vars(value).items()]
    return found


def of_worker(dask_worker: Any) -> dict[str, float]:
    """Count what is on a worker; it also lets its peers hear of rounds that are over."""
    # The threads of executors, whose number is limited, are named by numbers after an underscore.
    names = [thread.name.rpartition("_")[2] for thread in threading.enumerate()]
    found: dict[str, float] = {"threads": sum(not name.isdigit() for name in names)}
    exchange = dask_worker.extensions.get("coded-exchange")
    channels = list(exchange._channels.values()) if exchange else []
    for channel in channels:
        channel.flush()
    for name in ("dask-coded", "dask-coded-training"):
        if plugin := dask_worker.extensions.get(name):
            found |= {
                n: s for n, s in sizes(plugin, skip=_LAST).items() if not n.endswith(_LIMITED)
            }
    # A limited number of closed ones is remembered.
    found["Exchange._channels"] = sum(not channel.closed for channel in channels)
    found["tasks"] = len(dask_worker.state.tasks)
    found["data"] = len(dask_worker.data)
    # What the allocator keeps of memory that is free does not count.
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    found["MiB"] = psutil.Process().memory_info().rss / 2**20
    segments = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            segments += "memfd:dask-coded" in os.readlink(f"/proc/self/fd/{fd}")
    found["segments"] = max(segments, _SEGMENTS)
    return found


def of_scheduler(dask_scheduler: Any) -> dict[str, float]:
    """Count what is in the scheduler."""
    found: dict[str, float] = {"tasks": len(dask_scheduler.tasks)}
    for name in ("dask-coded", "dask-coded-training"):
        if plugin := dask_scheduler.extensions.get(name):
            found |= {
                n: s for n, s in sizes(plugin, skip=_LAST).items() if not n.endswith(_LIMITED)
            }
    found["clients"] = len(dask_scheduler.clients)
    return found


def residue(client: Client) -> Counts:
    """Return what is left in each process, by address; the scheduler's is ``"scheduler"``."""
    found: Counts = client.run(of_worker)
    found["scheduler"] = client.run_on_scheduler(of_scheduler)
    return found


def unsent(dask_worker: Any) -> list[str]:
    """Return what waits to be sent from a worker, and where."""
    exchange = dask_worker.extensions.get("coded-exchange")
    found = []
    for channel in list(exchange._channels.values()) if exchange else []:
        if not channel.closed and (waiting := channel._outbox._waiting):
            kinds = [type(message).__name__ for message in waiting]
            awaited: Any = channel._task and channel._task.get_coro()
            stack: list[str] = []
            while hasattr(awaited, "cr_frame") and awaited.cr_frame is not None:
                stack += traceback.format_stack(awaited.cr_frame, 1)
                awaited = awaited.cr_await
            found.append(f"{kinds} to {channel.address}:\n{''.join(stack)}{awaited!r}")
    return found


def grown(before: Counts, after: Counts) -> dict[str, float]:
    """Return by how much each quantity has grown, at most, in a process that was there before.

    Processes that were started meanwhile are compared with the largest of the others.
    """
    usual: dict[str, float] = {}
    for address, counts in before.items():
        if address != "scheduler":
            for name, count in counts.items():
                usual[name] = max(count, usual.get(name, 0))
    found: dict[str, float] = {}
    for address, counts in after.items():
        base = before["scheduler"] if address == "scheduler" else usual
        where = "scheduler: " * (address == "scheduler")
        for name, count in counts.items():
            if (more := count - base.get(name, 0)) > 0:
                found[where + name] = max(more, found.get(where + name, 0))
    return found
