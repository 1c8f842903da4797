"""What the package's scheduler plugins have in common: how they are installed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

if TYPE_CHECKING:
    from distributed.diagnostics.plugin import WorkerPlugin
    from distributed.scheduler import Scheduler


class SchedulerExtension(SchedulerPlugin, ABC):
    """A scheduler plugin that is installed once, however many clients ask for it at the same time.

    The scheduler registers a plugin's name only after its ``start`` has returned. Until then, a
    second client must neither install another one nor go on.
    """

    name: str
    idempotent = True
    _ready: asyncio.Event

    async def start(self, scheduler: Scheduler) -> None:
        while isinstance(first := scheduler.extensions.get(self.name), SchedulerExtension):
            await first._ready.wait()
            if scheduler.extensions.get(self.name) is first:
                return
        self._ready = asyncio.Event()
        scheduler.extensions[self.name] = self
        try:
            await self.set_up(scheduler)
        except BaseException:
            # Otherwise the scheduler would register the next one, which has not been set up.
            del scheduler.extensions[self.name]
            raise
        finally:
            self._ready.set()

    @abstractmethod
    async def set_up(self, scheduler: Scheduler) -> None:
        """Install the plugin: handlers on the scheduler, and a plugin on the workers."""

    @staticmethod
    async def give(scheduler: Scheduler, name: str, plugin: WorkerPlugin) -> None:
        """Install a plugin on all workers, also on those that join later.

        ``Scheduler.register_worker_plugin`` fails if any worker is lost meanwhile.
        """
        scheduler.worker_plugins[name] = packed = dumps(plugin)
        message = {"op": "plugin-add", "plugin": packed, "name": name}
        await scheduler.broadcast(msg=message, on_error="return")
