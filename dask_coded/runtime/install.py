"""Getting the plugins onto a running cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_coded._version import __version__
from dask_coded.runtime.scheduler import S2C2SchedulerPlugin

if TYPE_CHECKING:
    from distributed import Client


class ClusterUnfitError(RuntimeError):
    """The cluster cannot hold this coded array: workers, packages or versions are lacking."""


async def install(client: Client) -> None:
    """Register the scheduler plugin, and through it the worker plugin, unless it is there.

    Raises
    ------
    ClusterUnfitError
        If the scheduler lacks this package.
    """
    try:
        await client.register_plugin(S2C2SchedulerPlugin())
    except (ImportError, AttributeError) as exc:
        scheduler: Any = client.scheduler
        raise ClusterUnfitError(
            f"The scheduler at {scheduler.address} lacks the package dask_coded ({exc}): "
            f"install version {__version__} there and on the workers."
        ) from exc
