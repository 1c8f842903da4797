"""Long-lived two-way channels between the workers of a cluster.

One channel per pair of workers serves all runs and all arrays. A dead peer closes its channel at
once, long before the scheduler misses a heartbeat. Messages from a worker to itself are handed over
in the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.comm import connect
from distributed.core import Status

from dask_coded.transport.messages import (
    PROTOCOL,
    Closed,
    DropRound,
    Message,
    StopRound,
)
from dask_coded.transport.wire import pack, unpack

if TYPE_CHECKING:
    from distributed.comm import Comm
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

#: Sends a message back through the channel that another came by. May be called from any thread.
Answer = Callable[[Message], None]
#: Acts on a message at the participant's end.
Handler = Callable[[Message, Answer], None]
#: Hears the messages of a run at the coordinator's end.
Listener = Callable[[Message], None]

#: A worker whose event loop runs answers a question within this many seconds.
ANSWER_SECONDS = 2.0
# It answers `StopRound` at once; a throttled one may stall for this long.
_SILENCE = 1.0


class _Outbox:
    """Writes messages in order, in batches of those that came while the last batch was written.

    distributed's ``BatchedSend`` remembers its last thousand messages for debugging, which here
    hold arrays.
    """

    def __init__(self) -> None:
        self._comm: Comm | None = None
        self._waiting: list[Message] = []
        self._task: asyncio.Task[None] | None = None

    def open(self, comm: Comm) -> None:
        self._comm = comm
        self._wake()

    def send(self, message: Message) -> None:
        self._waiting.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._comm is not None and self._waiting and self._task is None:
            self._task = asyncio.create_task(self._write(self._comm))

    async def _write(self, comm: Comm) -> None:
        try:
            while self._waiting:
                messages, self._waiting = self._waiting, []
                await comm.write(pack(messages))
        except OSError:
            comm.abort()  # the reader at this end then finds that the peer is gone
        except BaseException:
            comm.abort()  # the peer must not wait for messages that never arrive
            raise
        finally:
            self._task = None

    def close(self) -> None:
        self._waiting = []
        if self._task is not None:
            self._task.cancel()
        if self._comm is not None:
            self._comm.abort()


class Channel:
    """The end of a channel at the worker that opened it.

    Parameters
    ----------
    worker : Worker
    address : str
        Of the peer.
    local : callable(Message), optional
        Takes the messages, if the peer is this worker.

    Attributes
    ----------
    asked : float or None
        Since when an answer has been due, on the monotonic clock; None if none is. A stopped worker
        owes it until it runs again, whichever run it answers.
    closed : bool
    """

    def __init__(
        self, worker: Worker, address: str, local: Callable[[Message], None] | None = None
    ) -> None:
        self.address = address
        self.asked: float | None = None
        self.closed = False
        self._worker = worker
        self._listeners: dict[Key, Listener] = {}
        # Runs of which the peer has been sent something that it is to drop when they are over.
        self._sent: set[Key] = set()
        self._over: list[Message] = []
        self._loop = asyncio.get_running_loop()
        self._local = local
        self._outbox = _Outbox()
        self._task = None if local else asyncio.create_task(self._connect_and_read())

    def listen(self, run_id: Key, listener: Listener) -> None:
        """Hand the messages of a run to ``listener`` from now on."""
        self._listeners[run_id] = listener

    def unlisten(self, run_id: Key) -> None:
        """Drop the messages of a run from now on, without telling the peer."""
        self._listeners.pop(run_id, None)
        self._sent.discard(run_id)

    def send(self, message: Message) -> None:
        """Send a message that the peer answers. Messages keep their order."""
        for over in self._over:
            self.post(over)
        self._over.clear()
        if message.run_id in self._listeners:
            self._sent.add(message.run_id)
        if self.asked is None:
            self.asked = monotonic()
        self.post(message)

    def post(self, message: Message) -> None:
        """Send a message that needs no answer."""
        if self._local is not None:
            self._loop.call_soon(self._local, message)
        elif not self.closed:
            self._outbox.send(message)

    def abort(self) -> None:
        """Break the connection. Listeners hear what they would if the peer were gone."""
        self._outbox.close()

    @property
    def silent(self) -> bool:
        """Whether the peer has owed an answer for longer than an event loop may be busy."""
        return self.asked is not None and monotonic() - self.asked > _SILENCE

    def end(self, run_id: Key, began: float) -> None:
        """Stop listening to a run that began at ``began``, and have the peer drop its part.

        A peer that owes nothing is told with the next message. Another one is asked to stop, and
        owes the answer to that from now on, unless it has owed one since before the run.
        """
        self._listeners.pop(run_id, None)
        if run_id not in self._sent:
            return
        self._sent.discard(run_id)
        if self.closed:
            return
        if self.asked is None:
            self._over.append(DropRound(run_id))
        else:
            if self.asked >= began:
                self.asked = None
            self.send(StopRound(run_id))

    def receive(self, message: Message) -> None:
        """Hand a message from the peer to the listener of its run."""
        self.asked = None
        if listener := self._listeners.get(message.run_id):
            listener(message)

    async def _connect_and_read(self) -> None:
        comm = None
        try:
            comm = await connect(self.address, **self._worker.connection_args)
            comm.name = "coded channel"
            await comm.write({"op": "coded_channel", "protocol": PROTOCOL, "reply": False})
            self._outbox.open(comm)
            while True:
                packed = await comm.read()
                if isinstance(packed, dict):
                    logger.error("%s", packed["refused"])
                    break
                for message in unpack(packed):
                    self.receive(message)
        except OSError:
            pass
        finally:
            self.closed = True
            self._outbox.close()
            for run_id, listener in list(self._listeners.items()):
                listener(Closed(run_id))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.closed = True


class Exchange:
    """The channels of a worker, and the parts of the package that handle messages on it.

    Each part registers the messages that it handles; this class knows none of them.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._channels: dict[str, Channel] = {}
        self._handlers: dict[type[Message], Handler] = {}
        self._on_closed: list[Callable[[Answer], None]] = []
        worker.handlers["coded_channel"] = self._serve

    @classmethod
    def of(cls, worker: Any) -> Exchange:
        """Return the exchange of a worker; the first caller makes it."""
        found = worker.extensions.get("coded-exchange")
        if found is None:
            found = worker.extensions["coded-exchange"] = cls(worker)
        assert isinstance(found, Exchange)
        return found

    def register(
        self,
        handler: Handler,
        kinds: Iterable[type[Message]],
        on_closed: Callable[[Answer], None] | None = None,
    ) -> None:
        """Hand messages of some kinds to ``handler`` from now on.

        Parameters
        ----------
        handler : callable(Message, Answer)
            Runs on the event loop.
        kinds : iterable of type
        on_closed : callable(Answer), optional
            Called when a channel has closed, with what its messages were answered by.
        """
        for kind in kinds:
            self._handlers[kind] = handler
        if on_closed is not None:
            self._on_closed.append(on_closed)

    def channel(self, address: str) -> Channel:
        """Return the channel to another worker, or to this one; open it if need be."""
        channel = self._channels.get(address)
        if channel is None or channel.closed:
            local = self._receive_own if address == self._worker.address else None
            channel = self._channels[address] = Channel(self._worker, address, local)
        return channel

    @property
    def silent(self) -> list[str]:
        """Addresses of the peers that owe an answer for too long."""
        return [address for address, channel in self._channels.items() if channel.silent]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _receive_own(self, message: Message) -> None:
        self._handle(message, self._answer_self)

    def _answer_self(self, message: Message) -> None:
        if channel := self._channels.get(self._worker.address):
            self._worker.loop.add_callback(channel.receive, message)

    def _handle(self, message: Message, answer: Answer) -> None:
        if handler := self._handlers.get(type(message)):
            handler(message, answer)

    async def _serve(self, comm: Comm, protocol: int = 0) -> Status:
        if protocol != PROTOCOL:
            refused = (
                f"Worker {self._worker.address} has version {PROTOCOL} of dask-coded's protocol, "
                f"{comm.peer_address} version {protocol}: install the same dask-coded on both."
            )
            logger.error("%s", refused)
            await comm.write({"refused": refused})
            return Status.dont_reply

        def closed(answer: Answer) -> None:
            for told in self._on_closed:
                told(answer)

        return await serve(comm, self._handle, closed)


async def serve(comm: Comm, handle: Handler, closed: Callable[[Answer], None]) -> Status:
    """Hand the messages of a channel, and a way to answer, to ``handle`` until the peer goes."""
    loop = asyncio.get_running_loop()
    outbox = _Outbox()
    outbox.open(comm)

    def answer(message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the answer has no use
            loop.call_soon_threadsafe(outbox.send, message)

    try:
        while True:
            for message in unpack(await comm.read()):
                handle(message, answer)
    except OSError:
        pass
    finally:
        closed(answer)
        outbox.close()
    return Status.dont_reply
