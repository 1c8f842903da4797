"""Start a cluster with coded rounds ready: ``dask scheduler --preload dask_coded.preload``.

The scheduler hands the worker plugin to every worker, so that ``dask worker`` needs the package
installed but no preload; giving it one checks at the start that the package is there.
"""

from __future__ import annotations

from typing import Any

from distributed.scheduler import Scheduler

from dask_coded.runtime.scheduler import S2C2SchedulerPlugin
from dask_coded.runtime.spec import NAME


async def dask_setup(server: Any) -> None:
    """Called by Dask when a scheduler or a worker starts."""
    if isinstance(server, Scheduler):
        await server.register_scheduler_plugin(S2C2SchedulerPlugin(), name=NAME, idempotent=True)
