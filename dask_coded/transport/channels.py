"""Long-lived two-way channels between the workers of a cluster.

A worker opens one channel to each peer, for all runs and all arrays. When the peer dies, the
channel closes at once, long before the scheduler misses a heartbeat. Messages from a worker to
itself stay in the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from dask.typing import Key
from distributed.comm import connect
from distributed.core import Status

from dask_coded.transport.fences import Fences
from dask_coded.transport.memory import Mappings, Memory, SharedArray
from dask_coded.transport.messages import (
    PROTOCOL,
    Attempt,
    Closed,
    DropRound,
    MemoryProbed,
    Message,
    OperandChunk,
    ProbeMemory,
    StopRound,
)
from dask_coded.transport.wire import pack, unpack

if TYPE_CHECKING:
    from distributed.comm import Comm
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

#: Answers a message through the channel on which it came. May be called from any thread.
Answer = Callable[[Message], None]
#: Acts on a message at the participant's end.
Handler = Callable[[Message, Answer], None]
#: Receives the messages of a run at the coordinator's end.
Listener = Callable[[Message], None]

# The run id of messages about shared memory.
_PROBE = "memory"
# How many peers that are gone a worker remembers; workers may come and go for months.
_GONE = 100
# It answers `StopRound` at once, but a throttled worker may stall for this many seconds.
_SILENCE = 1.0
# A worker that cannot be connected to in this time is gone for a round. Dask tries for 30 seconds,
# even if the worker's process has ended; the scheduler knows earlier.
_CONNECT = 5.0


class _Outbox:
    """Writes messages in order; those that come while a batch is written form the next batch.

    distributed's ``BatchedSend`` is not used, because it keeps its last thousand messages for
    debugging, and messages here hold arrays.
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
                await comm.write(pack(self._take()))
                stream = getattr(comm, "stream", None)
                if stream is not None and stream.writing():
                    # `comm.write` returns once tornado has buffered the bytes. Without this wait a
                    # slow peer's buffer would grow, with chunks of rounds that are over.
                    await stream.write(b"")
        except OSError:
            comm.abort()  # the reader at this end then finds that the peer is gone
        except BaseException:
            comm.abort()  # the peer must not wait for messages that never arrive
            raise
        finally:
            self._task = None

    def _take(self) -> list[Message]:
        """Take the next batch. Large chunks go one by one, so that the rest can be discarded."""
        chunks = (i for i, m in enumerate(self._waiting) if isinstance(m, OperandChunk))
        end = next(chunks, len(self._waiting)) + 1
        batch, self._waiting = self._waiting[:end], self._waiting[end:]
        return batch

    def discard(self, run_id: Key) -> None:
        """Do not write the chunks of a run that are still waiting."""
        self._waiting = [
            m for m in self._waiting if m.run_id != run_id or not isinstance(m, OperandChunk)
        ]

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
    probe : SharedArray, optional
        Lets the peer find out whether it shares memory with this worker.

    Attributes
    ----------
    asked : float or None
        Monotonic time since which an answer has been due; None if none is due. A stopped worker
        owes it until it runs again; a message of any run counts as the answer.
    closed : bool
    near : bool
        Whether messages stay in this process.
    shared : bool
        Whether both ends can read each other's memory.
    unreadable : int
        How often the peer could not read the memory of another worker on its host.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        local: Callable[[Message], None] | None = None,
        probe: SharedArray | None = None,
    ) -> None:
        self.address = address
        self.shared = False
        self.unreadable = 0
        self.asked: float | None = None
        self.closed = False
        self._worker = worker
        self._listeners: dict[Key, Listener] = {}
        # Runs that the peer knows and must be told to drop when they are over.
        self._sent: set[Key] = set()
        self._over: list[Message] = []
        self._loop = asyncio.get_running_loop()
        self._local = local
        self.near = local is not None or address.startswith("inproc://")
        self._outbox = _Outbox()
        if probe is not None and not self.near:
            self.listen(_PROBE, self._probed)
            self.post(ProbeMemory(_PROBE, probe))
        self._task = None if local else asyncio.create_task(self._connect_and_read())

    def listen(self, run_id: Key, listener: Listener) -> None:
        """Hand the messages of a run to ``listener`` from now on."""
        self._listeners[run_id] = listener

    def unlisten(self, run_id: Key) -> None:
        """Drop the messages of a run from now on, without telling the peer."""
        self._listeners.pop(run_id, None)
        self._sent.discard(run_id)
        self._outbox.discard(run_id)

    def send(self, message: Message) -> None:
        """Send a message that the peer answers. Messages keep their order."""
        self.flush()
        if message.run_id in self._listeners:
            self._sent.add(message.run_id)
        if self.asked is None:
            self.asked = monotonic()
        self.post(message)

    def flush(self) -> None:
        """Tell the peer of all rounds that are over, instead of with the next message."""
        for over in self._over:
            self.post(over)
        self._over.clear()

    def post(self, message: Message) -> None:
        """Send a message that needs no answer."""
        if self._local is not None:
            self._loop.call_soon(self._local, message)
        elif not self.closed:
            self._outbox.send(message)

    def abort(self) -> None:
        """Break the connection, so that listeners receive :class:`Closed`."""
        self._outbox.close()

    @property
    def silent(self) -> bool:
        """Whether the peer has owed an answer for longer than an event loop may be busy."""
        return self.asked is not None and monotonic() - self.asked > _SILENCE

    def end(self, run_id: Key, began: float) -> None:
        """Stop listening to a run that began at ``began``, and have the peer drop its part.

        A peer that owes no answer is sent :class:`DropRound` with the next message. A peer that
        owes one is sent :class:`StopRound` at once; :attr:`asked` then starts again from now,
        unless it dates from before the run.
        """
        self._listeners.pop(run_id, None)
        self._outbox.discard(run_id)
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
        if message.run_id != _PROBE:
            self.asked = None
        if listener := self._listeners.get(message.run_id):
            listener(message)

    def _probed(self, message: Message) -> None:
        if isinstance(message, MemoryProbed) and message.segment is not None:
            self.shared = _readable(SharedArray(*message.segment))

    async def _connect_and_read(self) -> None:
        comm = None
        try:
            comm = await connect(self.address, timeout=_CONNECT, **self._worker.connection_args)
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


def _readable(segment: SharedArray) -> bool:
    try:
        Mappings(most=0).view(segment)
    except OSError:
        return False
    return True


class Exchange:
    """The channels of a worker, and the parts of the package that handle messages on it.

    Each part registers the messages that it handles; this class knows none of them.

    Attributes
    ----------
    memory : Memory
        What this worker shares with others on its host.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._channels: dict[str, Channel] = {}
        self._handlers: dict[type[Message], Handler] = {}
        self._on_closed: list[Callable[[Answer], None]] = []
        self._on_fenced: list[Callable[[Attempt], None]] = []
        self._fences = Fences()
        self.memory = Memory()
        self._probe: SharedArray | None = None
        wanted = dask.config.get("coded.shared-memory")
        if wanted and (segment := self.memory.new(len(_PROBE))) is not None:
            self._segment = segment  # as long as this lives, peers can open it
            self._probe = segment.place(segment.array(np.dtype(np.uint8), (len(_PROBE),)))
        self.register(self._probe_memory, [ProbeMemory])
        worker.handlers["coded_channel"] = self._serve
        worker.stream_handlers["coded-fence"] = self._fence

    @classmethod
    def of(cls, worker: Any) -> Exchange:
        """Return the exchange of a worker; the first call creates it."""
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
        on_fenced: Callable[[Attempt], None] | None = None,
    ) -> None:
        """Hand messages of some kinds to ``handler`` from now on.

        Parameters
        ----------
        handler : callable(Message, Answer)
            Runs on the event loop.
        kinds : iterable of type
        on_closed : callable(Answer), optional
            Called when a channel has closed, with the ``Answer`` that its messages came with.
        on_fenced : callable(Attempt), optional
            Called when the scheduler has given up a run of a task, on this worker or elsewhere.
        """
        for kind in kinds:
            self._handlers[kind] = handler
        if on_closed is not None:
            self._on_closed.append(on_closed)
        if on_fenced is not None:
            self._on_fenced.append(on_fenced)

    # -- runs of tasks -------------------------------------------------------------------------

    def attempt(self, task: Key | None) -> Attempt | None:
        """Return the present run of a task on this worker; None outside of tasks."""
        ts = None if task is None else self._worker.state.tasks.get(task)
        return None if ts is None else (ts.key, ts.run_id)

    def is_over(self, task: Key) -> bool:
        """Whether a task on this worker is cancelled or taken over.

        Its thread runs on until it checks this.
        """
        ts = self._worker.state.tasks.get(task)
        if ts is None:
            return False
        return ts.state == "cancelled" or not self._fences.admits((ts.key, ts.run_id))

    def _fence(self, attempts: Iterable[Attempt]) -> None:
        """Stream handler: the scheduler has given up some runs of tasks."""
        for attempt in attempts:
            self._fences.put(attempt)
            for told in self._on_fenced:
                told(attempt)

    # -- channels ------------------------------------------------------------------------------

    def channel(self, address: str) -> Channel:
        """Return the channel to another worker, or to this one; open it if need be."""
        channel = self._channels.get(address)
        if channel is None or channel.closed:
            gone = [known for known, other in self._channels.items() if other.closed]
            for known in gone[:-_GONE]:
                del self._channels[known]
            local = self._receive_own if address == self._worker.address else None
            channel = self._channels[address] = Channel(self._worker, address, local, self._probe)
        return channel

    def is_usable(self, address: str) -> bool:
        """Whether nothing is known against sending to a worker: not closed, not silent."""
        channel = self._channels.get(address)
        return channel is None or not (channel.closed or channel.silent)

    @property
    def silent(self) -> list[str]:
        """Addresses of the peers that have owed an answer for too long."""
        return [address for address, channel in self._channels.items() if channel.silent]

    @property
    def has_memory(self) -> bool:
        """Whether this worker can let others on its host read its memory."""
        return self._probe is not None

    @property
    def readable_memory(self) -> Memory | None:
        """This worker's memory, if it can let others on its host use it."""
        return self.memory if self.has_memory else None

    @property
    def shares_memory(self) -> bool:
        """Whether any peer can read this worker's memory."""
        # A copy, because algorithms ask from their own threads.
        channels = list(self._channels.values())
        return any(channel.shared and not channel.closed for channel in channels)

    def _probe_memory(self, message: Message, answer: Answer) -> None:
        assert isinstance(message, ProbeMemory)
        readable = _readable(SharedArray(*message.segment))
        answer(MemoryProbed(message.run_id, self._probe if readable else None))

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self.memory.close()

    def flush(self) -> None:
        """Tell all peers of the rounds that are over, so that they keep nothing for them."""
        for channel in self._channels.values():
            channel.flush()

    def _receive_own(self, message: Message) -> None:
        self._handle(message, self._answer_self)

    def _answer_self(self, message: Message) -> None:
        if channel := self._channels.get(self._worker.address):
            self._worker.loop.add_callback(channel.receive, message)

    def _handle(self, message: Message, answer: Answer) -> None:
        handler = self._handlers.get(type(message))
        if handler and self._fences.admits(getattr(message, "attempt", None)):
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
    """Hand each message of a channel, with a way to answer, to ``handle`` until the peer goes."""
    loop = asyncio.get_running_loop()
    outbox = _Outbox()
    outbox.open(comm)

    def answer(message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no answer is needed
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
