"""Long-lived two-way channels between a coordinator's worker and the workers of its rounds.

One channel per pair of workers serves all rounds and all arrays. A message is a dict with an ``op``
and the run id of its round; a message of a round that is over finds no listener and is dropped. A
dead peer closes its channel at once, long before the scheduler misses a heartbeat. Messages to
oneself take the short way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from distributed.comm import connect
from distributed.core import Status

from dask_coded.runtime.wire import Message, pack, unpack

if TYPE_CHECKING:
    from distributed.comm import Comm
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

Handler = Callable[[Message], None]

# Answers to `stop` come from the event loop at once; one that is throttled may stall this long.
_SILENCE = 1.0

#: Sent to the listener of every running round when the peer is gone.
CLOSED: Message = {"op": "closed"}


class _Outbox:
    """Writes messages in order, as many at a time as have come up while the last were written.

    distributed's ``BatchedSend`` would do, were it not that it remembers its last thousand messages
    for debugging: here those hold arrays.
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
            comm.abort()  # whoever reads from it learns that the peer is gone
        except BaseException:
            comm.abort()  # nor will what was to be sent ever arrive
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
    """The coordinator's end of a channel.

    Attributes
    ----------
    asked : float or None
        Since when an answer has been due, on the monotonic clock; None if none is. A stopped worker
        owes it until it runs again, whatever the round that it answers.
    """

    def __init__(self, worker: Worker, address: str, local: Handler | None = None) -> None:
        self.address = address
        self.asked: float | None = None
        self.closed = False
        self._worker = worker
        self._listeners: dict[str, Handler] = {}
        self._over: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._local = local
        self._outbox = _Outbox()
        self._task = None if local else asyncio.create_task(self._connect_and_read())

    def listen(self, run: str, handler: Handler) -> None:
        """Hand the messages of a round to ``handler`` from now on."""
        self._listeners[run] = handler

    def send(self, message: Message) -> None:
        """Send soon; messages keep their order."""
        if self._over:
            message = {**message, "over": self._over}
            self._over = []
        if self.asked is None:
            self.asked = monotonic()
        self.post(message)

    def post(self, message: Message) -> None:
        """Send soon what is not answered: the peer owes nothing for it."""
        if self._local is not None:
            self._loop.call_soon(self._local, message)
        elif not self.closed:
            self._outbox.send(message)

    def abort(self) -> None:
        """Break the connection; listeners are told as if the peer were gone."""
        self._outbox.close()

    def unlisten(self, run: str) -> None:
        """Drop the messages of a run from now on; the peer is not told."""
        self._listeners.pop(run, None)

    @property
    def silent(self) -> bool:
        """Whether the peer has owed an answer for longer than an event loop may be busy."""
        return self.asked is not None and monotonic() - self.asked > _SILENCE

    def end(self, run: str, began: float) -> None:
        """Stop listening to a round that began at ``began``; the peer is told to drop its part.

        A peer that owes nothing is told with the next message. One that is asked to stop owes the
        answer to this from now on, unless it has owed one since before the round.
        """
        self._listeners.pop(run, None)
        self._over.append(run)
        if self.asked is not None and not self.closed:
            if self.asked >= began:
                self.asked = None
            self.send({"op": "stop", "run": run})

    def receive(self, message: Message) -> None:
        """A message came in from the peer."""
        self.asked = None
        if handler := self._listeners.get(message.get("run", "")):
            handler(message)

    async def _connect_and_read(self) -> None:
        comm = None
        try:
            comm = await connect(self.address, **self._worker.connection_args)
            comm.name = "coded channel"
            await comm.write({"op": "coded_channel", "reply": False})
            self._outbox.open(comm)
            while True:
                for message in unpack(await comm.read()):
                    self.receive(message)
        except OSError:
            pass
        finally:
            self.closed = True
            self._outbox.close()
            for handler in list(self._listeners.values()):
                handler(CLOSED)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.closed = True


async def serve(comm: Comm, handle: Callable[[Message, Handler], None]) -> Status:
    """The other end: hand messages, and a way to answer, to ``handle`` until the peer goes."""
    loop = asyncio.get_running_loop()
    outbox = _Outbox()
    outbox.open(comm)

    def answer(message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this share
            loop.call_soon_threadsafe(outbox.send, message)

    try:
        while True:
            for message in unpack(await comm.read()):
                handle(message, answer)
    except OSError:
        pass
    finally:
        handle(CLOSED, answer)
        outbox.close()
    return Status.dont_reply
