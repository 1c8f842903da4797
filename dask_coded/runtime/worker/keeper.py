"""The states of loops that run on other workers, kept in memory until the loops have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.protocol import to_serialize

from dask_coded.runtime.messages import KeepState, StateKept
from dask_coded.transport import Answer, Exchange
from dask_coded.transport.exceptions import logged
from dask_coded.transport.messages import Message

if TYPE_CHECKING:
    from distributed.worker import Worker


class StateKeeper:
    """Keeps, on one worker, the states of loops that run on others.

    Attributes
    ----------
    kept : dict of Key to (int, bytes)
        By the key of the loop's task: the last round, and the pickled state after it.
    owing : dict of Key to set of Task
        By the key of a task on this worker: what waits for confirmations of the last state of one
        of its loops.
    """

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self.kept: dict[Key, tuple[int, bytes]] = {}
        self.owing: dict[Key, set[asyncio.Task[None]]] = {}
        self._attempts = exchange.attempts
        exchange.register(self._keep, [KeepState])
        worker.handlers["coded_kept"] = self._answer
        worker.stream_handlers["coded-forget"] = logged(self._forget)

    def owe(self, key: Key, confirmed: Coroutine[Any, Any, None]) -> None:
        """Await the confirmation of a state of a loop on this worker."""
        waiting = self.owing.setdefault(key, set())
        task = asyncio.create_task(confirmed)
        waiting.add(task)

        def done(task: asyncio.Task[None]) -> None:
            waiting.discard(task)
            if not waiting:
                del self.owing[key]

        task.add_done_callback(done)

    def _keep(self, message: Message, answer: Answer) -> None:
        assert isinstance(message, KeepState)
        self.kept[message.run_id] = message.round, message.state
        answer(StateKept(message.run_id))

    def _answer(self, key: Key, whole: bool = True) -> Any:
        """Handler: send the round and the state that are kept of a loop, or only the round."""
        if (found := self.kept.get(key)) is None:
            return None
        round, state = found
        # As a frame: plain bytes would be copied on the event loop, and may have 4 GiB at most. In
        # a dict: between workers of one process, Dask unwraps only what is in dicts and lists.
        return {"round": round, "state": to_serialize(state)} if whole else round

    def _forget(self, key: Key, run: int) -> None:
        """Stream handler: a run of the loop has ended, so refuse states that come late."""
        # A loop whose result was lost runs again, and its states are to be kept again.
        self.kept.pop(key, None)
        self._attempts.end((key, run))
