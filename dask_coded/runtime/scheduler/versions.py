"""Why workers cannot take part: they lack the package, or have other versions."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from distributed.core import Status

from dask_coded._version import __version__

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

# An error names at most this many workers for each cause.
_NAMED = 5
_RESTING = {Status.closing_gracefully: "retiring"}


def mismatch(client: str) -> str | None:
    """Say that the client has another version of the package than the scheduler; None if not."""
    if client == __version__:
        return None
    return (
        f"The scheduler has dask_coded {__version__}. The client has dask_coded {client}. Install "
        "the same version on both."
    )


def unable(
    scheduler: Scheduler,
    able: Container[str],
    others: Mapping[str, str],
    refused: Mapping[str, str],
    allowed: Container[str] | None = None,
) -> str:
    """Return a sentence for each cause that keeps workers from taking part; empty if none does.

    Parameters
    ----------
    scheduler : Scheduler
    able : collection of str
        The workers that can.
    others : mapping of str to str
        The version of the package on workers that have another one than the scheduler.
    refused : mapping of str to str
        Errors with which workers have refused the plugin.
    allowed : collection of str, optional
        The workers in question; all by default.
    """
    causes: dict[str, list[str]] = defaultdict(list)
    for address, ws in scheduler.workers.items():
        if address not in able and (allowed is None or address in allowed):
            causes[_cause(ws, others.get(address), refused.get(address))].append(address)
    return "".join(f" {_named(found)} {cause}." for cause, found in causes.items())


def resting(
    scheduler: Scheduler, able: Container[str], allowed: Container[str] | None = None
) -> str:
    """Return a sentence on able workers that take no new pieces now; empty if all do."""
    found = [
        f"worker {ws.address} is {_RESTING.get(ws.status, ws.status.name)}"
        for ws in scheduler.workers.values()
        if ws not in scheduler.running
        and ws.address in able
        and (allowed is None or ws.address in allowed)
    ]
    more = f" and {len(found) - _NAMED} more are resting" * (len(found) > _NAMED)
    listed = ", ".join(found[:_NAMED])
    return f" {listed[0].upper()}{listed[1:]}{more}." if found else ""


def _cause(ws: WorkerState, version: str | None, error: str | None) -> str:
    cause = "no dask_coded" if version is None else f"dask_coded {version}"
    if error is not None:
        cause += f" ({error})"
    own, python = platform.python_version(), ws.versions.get("host", {}).get("python", "")
    if python and python.split(".")[:2] != own.split(".")[:2]:
        cause += f", and Python {'.'.join(python.split('.')[:3])} instead of {own}"
    return cause


def _named(addresses: Sequence[str]) -> str:
    more = len(addresses) - _NAMED
    listed = ", ".join(addresses[:_NAMED]) + f" and {more} more" * (more > 0)
    return f"Worker {listed} has" if len(addresses) == 1 else f"Workers {listed} have"
