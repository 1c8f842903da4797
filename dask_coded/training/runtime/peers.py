"""A worker's channels to the others of its group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dask_coded.compat import WORKER_ANY_RUNNING
from dask_coded.training.runtime.messages import Unreachable
from dask_coded.training.runtime.spec import Group
from dask_coded.transport import Answer, Channel, Exchange
from dask_coded.transport.messages import Closed, Message

if TYPE_CHECKING:
    from distributed.worker import Worker


class Peers:
    """The other nodes of a group. Methods run on the event loop unless they say otherwise.

    Parameters
    ----------
    worker : Worker
    exchange : Exchange
        Of the worker.
    group : Group
    node : int
        The number of this worker in the group's plan.
    answer : callable(Message)
        Sends a message to the leader.
    """

    def __init__(
        self, worker: Worker, exchange: Exchange, group: Group, node: int, answer: Answer
    ) -> None:
        self._worker = worker
        self._exchange = exchange
        self._group = group
        self._node = node
        self._answer = answer
        self._left = False
        self._skipped: set[int] = set()
        self._channels: dict[int, Channel] = {}
        # Not the group's run id, because a leader on this worker listens to that on this channel.
        self._listener = f"{group.run_id}-closed"

    @property
    def speaks(self) -> bool:
        """Whether this is the first node left, which sends states. Any thread may ask."""
        return self._skipped.issuperset(range(self._node))

    def send(self, letters: Iterable[tuple[int, Message]]) -> None:
        """Send messages to nodes from another thread."""
        # Once for all of them, because that wakes the event loop.
        self._worker.loop.add_callback(self.post, letters)

    def post(self, letters: Iterable[tuple[int, Message]]) -> None:
        """Send messages to nodes."""
        for node, message in letters:
            if channel := self._channel(node):
                channel.post(message)

    def skip(self, node: int, unread: bool) -> None:
        """Send nothing more to a node; if it does not read, break the channel to it."""
        self._skipped.add(node)
        if channel := self._channels.pop(node, None):
            channel.unlisten(self._listener)
            if unread:
                channel.abort()

    def leave(self) -> None:
        """Open no more channels, and stop reporting lost nodes to the leader."""
        self._left = True
        for channel in self._channels.values():
            channel.unlisten(self._listener)

    def _channel(self, node: int) -> Channel | None:
        if node not in self._channels:
            if self._left or node in self._skipped:
                return None
            channel = self._exchange.channel(self._group.addresses[node])
            self._channels[node] = channel
            channel.listen(self._listener, lambda message: self._heard(node, message))
        return self._channels[node]

    def _heard(self, node: int, message: Message) -> None:
        # A worker that closes ends its own channels first, and then says nothing of the others.
        if isinstance(message, Closed) and self._worker.status in WORKER_ANY_RUNNING:
            self._answer(Unreachable(self._group.run_id, self._group.addresses[node]))
