"""Installing the plugins on a running cluster."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dask_coded._version import __version__
from dask_coded.runtime.answers import Unfit, ask
from dask_coded.runtime.scheduler.plugin import CodedSchedulerPlugin

if TYPE_CHECKING:
    from distributed import Client
    from distributed.diagnostics.plugin import SchedulerPlugin


class ClusterUnfitError(RuntimeError):
    """Too few workers can take part, or the package is missing there or has another version."""


async def install(client: Client, *more: SchedulerPlugin) -> None:
    """Register the scheduler plugin, and with it the worker plugin, unless they are already there.

    Parameters
    ----------
    client : distributed.Client
    *more : SchedulerPlugin
        Plugins that build on it, registered after it.

    Raises
    ------
    ClusterUnfitError
        If the scheduler lacks this package.
    """
    try:
        for plugin in (CodedSchedulerPlugin(), *more):
            await client.register_plugin(plugin)
    except (ImportError, AttributeError) as exc:
        scheduler: Any = client.scheduler
        there = (await scheduler.versions())["host"]["python"]
        own = platform.python_version()
        python = ""
        if there.split(".")[:2] != own.split(".")[:2]:
            python = f", with Python {own} as here: there it is {'.'.join(there.split('.')[:3])}"
        raise ClusterUnfitError(
            f"The scheduler at {scheduler.address} lacks the package dask_coded ({exc}): "
            f"install version {__version__} there and on the workers{python}."
        ) from exc


async def check_fit(client: Client, workers: Sequence[str] | None = None) -> None:
    """Check that workers can take part, among those that are named, unless there are none yet.

    Without this check, a task for which no worker has the package would wait for ever.

    Raises
    ------
    ClusterUnfitError
        If all of them lack this package, or have another version than the scheduler, or this client
        has.
    """
    scheduler: Any = client.scheduler
    allowed = None if workers is None else list(workers)
    match await ask(scheduler.coded_fit, version=__version__, allowed=allowed):
        case Unfit(message):
            raise ClusterUnfitError(message)
