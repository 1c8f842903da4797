"""The states of loops that run on other workers, kept in memory until the loops have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask.typing import Key

from dask_coded.transport import Answer, Exchange
from dask_coded.transport.fences import Fences
from dask_coded.transport.messages.message import Message
from dask_coded.transport.messages.rounds import KeepState, StateKept

if TYPE_CHECKING:
    from distributed.worker import Worker


class StateKeeper:
    """Keeps, on one worker, the states of loops that run on others.

    Attributes
    ----------
    kept : dict of Key to (int, bytes)
        By the key of the loop's task: the last round, and the pickled state after it.
    owing : dict of Key to set of str
        By the key of a task on this worker: which keepers have not confirmed the last state of one
        of its loops.
    """

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self.kept: dict[Key, tuple[int, bytes]] = {}
        self.owing: dict[Key, set[str]] = {}
        # Runs of loops that have ended, to refuse states that come late. A loop whose result was
        # lost runs again, and its states are to be kept again.
        self._ended = Fences()
        exchange.register(self._keep, [KeepState])
        worker.handlers["coded_kept"] = self.state
        worker.stream_handlers["coded-forget"] = self._forget

    def _keep(self, message: Message, answer: Answer) -> None:
        assert isinstance(message, KeepState)
        if self._ended.admits(message.attempt):
            self.kept[message.run_id] = message.round, message.state
        answer(StateKept(message.run_id))

    def state(self, key: Key, whole: bool = True) -> Any:
        """Handler: send the round and the state that are kept of a loop, or only the round."""
        found = self.kept.get(key)
        return found if whole or found is None else found[0]

    def _forget(self, key: Key, run: int) -> None:
        """Stream handler: a run of the loop has ended."""
        self.kept.pop(key, None)
        self._ended.put((key, run))
