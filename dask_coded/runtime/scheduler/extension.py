"""What the package's scheduler plugins have in common: how they are installed."""

from __future__ import annotations

import asyncio
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time

from dask_coded.compat import heartbeat_interval
from dask_coded.config import timeouts
from dask_coded.transport.backoff import Backoff

if TYPE_CHECKING:
    from distributed.diagnostics.plugin import WorkerPlugin
    from distributed.scheduler import Scheduler, WorkerState


class SchedulerExtension(SchedulerPlugin, ABC):
    """A scheduler plugin that is installed once, however many clients ask for it at the same time.

    The scheduler registers a plugin's name only after its ``start`` has returned. Until then, a
    second client must neither install another one nor go on.
    """

    name: str
    idempotent = True
    _ready: asyncio.Event
    #: By the address of each worker that has not answered yet, what installs the plugin there.
    giving: dict[str, asyncio.Task[None]]
    #: By the address of each worker that has refused it, the error.
    refused: dict[str, str]
    # By the address of each worker that the scheduler cannot connect to, since when.
    _unreachable: dict[str, float]

    async def start(self, scheduler: Scheduler) -> None:
        while isinstance(first := scheduler.extensions.get(self.name), SchedulerExtension):
            await first._ready.wait()
            if scheduler.extensions.get(self.name) is first:
                return
        self._ready, self.giving, self.refused = asyncio.Event(), {}, {}
        self._unreachable = {}
        scheduler.extensions[self.name] = self
        try:
            await self.set_up(scheduler)
        except BaseException:
            # Otherwise the scheduler would register the next one, which has not been set up.
            del scheduler.extensions[self.name]
            await self.close()
            raise
        finally:
            self._ready.set()

    @abstractmethod
    async def set_up(self, scheduler: Scheduler) -> None:
        """Install the plugin: handlers on the scheduler, and a plugin on the workers."""

    def busy(self) -> set[str]:
        """Return the workers that adaptive scaling must leave alone now, by address.

        Those that are gone may be among them.
        """
        return set()

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Hook: adaptive scaling chooses among these workers which ones to close."""
        busy = self.busy()
        return [ws for ws in workers if ws.address not in busy]

    async def give(self, scheduler: Scheduler, name: str, kind: type[WorkerPlugin]) -> None:
        """Install a plugin on all workers, also on those that join later.

        A worker that is silent, or that the scheduler cannot connect to, gets it when that changes;
        this does not wait for it. ``Scheduler.register_worker_plugin`` would wait, and fail if any
        worker is lost meanwhile.
        """
        scheduler.worker_plugins[name] = packed = packed_for_all(kind)
        message = {"op": "plugin-add", "plugin": packed, "name": name}
        began, times = time(), timeouts()
        beats = times.beats(heartbeat_interval(len(scheduler.workers)))

        def answers(address: str) -> bool:
            ws = scheduler.workers.get(address)
            silence = time() - max(ws.last_seen, began) if ws else inf
            return silence < max(times.longest, beats)

        async def install(address: str) -> None:
            backoff = Backoff()
            try:
                while address in scheduler.workers:
                    try:
                        scheduler.rpc.reuse(address, await scheduler.rpc.connect(address))
                    except OSError:
                        self._unreachable.setdefault(address, time())
                        await backoff.wait()
                        continue
                    self._unreachable.pop(address, None)
                    found = await scheduler.broadcast(
                        msg=message, workers=[address], on_error="return"
                    )
                    if not isinstance(answer := found[address], OSError):
                        if isinstance(answer, Exception):
                            # Dask wraps most errors of the worker in one that shows them.
                            wrapped = type(answer) is Exception
                            self.refused[address] = str(answer) if wrapped else repr(answer)
                        elif answer.get("status") != "OK":
                            self.refused[address] = answer["exception_text"]
                        break
                    await backoff.wait()  # a connection broke
            finally:
                del self.giving[address]
                self._unreachable.pop(address, None)

        self.giving = {a: asyncio.create_task(install(a)) for a in scheduler.workers}
        while any(map(answers, self.coming)):
            await asyncio.wait(self.giving.values(), timeout=times.silence)

    @property
    def coming(self) -> set[str]:
        """The workers that will have the plugin soon.

        Heartbeats of a worker that the scheduler cannot connect to come all the same, on a
        connection that the worker has opened.
        """
        least = time() - timeouts().longest
        return {a for a in self.giving if self._unreachable.get(a, inf) > least}

    async def close(self) -> None:
        for task in self.giving.values():
            task.cancel()


# A worker unpickles the plugins of the scheduler when it joins, and ends if it cannot. So what it
# unpickles is text, which workers without this package, or with another version of it or of Python,
# run as well.
_TEXT = """
from distributed.diagnostics.plugin import WorkerPlugin
try:
    from {module} import {name} as Plugin
except Exception as error:
    missing = error
    class Plugin(WorkerPlugin):
        def setup(self, worker):
            raise missing
plugin = Plugin()
"""


class _Text:
    """Text that is run when it is unpickled; then it is the value of its name ``plugin``."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return eval, (f"(lambda names: (exec({self._text!r}, names), names['plugin'])[1])({{}})",)


def packed_for_all(kind: type[WorkerPlugin]) -> bytes:
    """Pickle a new plugin of a class of this package, so that every worker can unpickle it.

    Where the class cannot be imported, the plugin's ``setup`` raises the error, which Dask logs.

    Examples
    --------
    >>> import pickle
    >>> from distributed.diagnostics.plugin import WorkerPlugin
    >>> type(pickle.loads(packed_for_all(WorkerPlugin))).__name__
    'WorkerPlugin'
    """
    return pickle.dumps(_Text(_TEXT.format(module=kind.__module__, name=kind.__name__)))
