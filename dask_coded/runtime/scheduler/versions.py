"""Why workers cannot take part: they lack the package, or have other versions."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from dask_coded._version import __version__

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

# An error names at most this many workers for each cause.
_NAMED = 5


def mismatch(
    scheduler: Scheduler, versions: Mapping[str, str], refused: Mapping[str, str], client: str
) -> str | None:
    """Name the workers with another version of the package than the scheduler; None if all agree.

    Parameters
    ----------
    scheduler : Scheduler
    versions : mapping of str to str
        Version of the package on every worker that has the plugin.
    refused : mapping of str to str
        Errors with which workers have refused the plugin.
    client : str
        Version of the client that asks.
    """
    if {client, *versions.values()} == {__version__}:
        return None
    other = f" The client has dask_coded {client}." * (client != __version__)
    return (
        f"The scheduler has dask_coded {__version__}.{other}{unable(scheduler, versions, refused)} "
        "Install the same version on all of them."
    )


def unable(
    scheduler: Scheduler,
    versions: Mapping[str, str],
    refused: Mapping[str, str],
    allowed: Container[str] | None = None,
) -> str:
    """Return a sentence for each cause that keeps workers from taking part; empty if none does."""
    causes: dict[str, list[str]] = defaultdict(list)
    for address, ws in scheduler.workers.items():
        version = versions.get(address)
        if version != __version__ and (allowed is None or address in allowed):
            causes[_cause(ws, version, refused.get(address))].append(address)
    return "".join(f" {_named(found)} {cause}." for cause, found in causes.items())


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
