"""What the package's scheduler plugins have in common: how they are installed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from distributed.diagnostics.plugin import SchedulerPlugin

if TYPE_CHECKING:
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
        first = scheduler.extensions.get(self.name)
        if isinstance(first, SchedulerExtension):
            await first._ready.wait()
            return
        self._ready = asyncio.Event()
        scheduler.extensions[self.name] = self
        try:
            await self.set_up(scheduler)
        finally:
            self._ready.set()

    @abstractmethod
    async def set_up(self, scheduler: Scheduler) -> None:
        """Install the plugin: handlers on the scheduler, and a plugin on the workers."""
