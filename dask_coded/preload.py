"""Start a cluster with coded rounds ready: ``dask scheduler --preload dask_coded.preload``.

The scheduler sends the worker plugin to every worker, so ``dask worker`` needs the package
installed but no preload. Preloading it in workers too checks at startup that it is installed.
"""

from __future__ import annotations

from typing import Any

from distributed.scheduler import Scheduler

from dask_coded.runtime.scheduler.plugin import CodedSchedulerPlugin
from dask_coded.runtime.spec import NAME


async def dask_setup(server: Any) -> None:
    """Install the plugin; Dask calls this when a scheduler or a worker starts."""
    if isinstance(server, Scheduler):
        await server.register_scheduler_plugin(CodedSchedulerPlugin(), name=NAME, idempotent=True)
