"""Both ends of a long-lived two-way channel from one worker of a cluster to another.

A worker opens one channel to each peer, for all runs and all arrays. When the peer dies, the
channel closes at once, long before the scheduler misses a heartbeat. Messages from a worker to
itself stay in the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from dask.typing import Key
from distributed.comm import connect, get_address_host
from distributed.core import Status

from dask_coded.membership import Membership
from dask_coded.transport.memory import SharedArray, is_readable
from dask_coded.transport.messages import (
    PROTOCOL,
    Closed,
    EndRun,
    Message,
    Ping,
    Pong,
    ProbeMemory,
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

#: The run id of messages about shared memory.
PROBE = "memory"
# A message that cannot be handled ends its own channel, and with it what came that way. The peer
# notices that at once; it might wait for ever for an answer to a message that is dropped.
_HANG_UP = "The channel to %s is closed because a message from there cannot be handled"


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

    @property
    def is_open(self) -> bool:
        return self._comm is not None

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
        """Take the next batch. What is bulky goes one by one, so that the rest can be discarded."""
        chunks = (i for i, m in enumerate(self._waiting) if m.is_bulky)
        end = next(chunks, len(self._waiting)) + 1
        batch, self._waiting = self._waiting[:end], self._waiting[end:]
        return batch

    def discard(self, run_id: Key) -> None:
        """Do not write the bulky messages of a run that are still waiting."""
        self._waiting = [m for m in self._waiting if m.run_id != run_id or not m.is_bulky]

    def withdraw(self, run_id: Key) -> bool:
        """If the first message of a run still waits, write none of it; return whether it did."""
        if not any(m.opens_run and m.run_id == run_id for m in self._waiting):
            return False
        self._waiting = [m for m in self._waiting if m.run_id != run_id]
        return True

    @property
    def will_stop(self) -> bool:
        """Whether a message waits whose answer shows that the peer runs."""
        return any(isinstance(m, EndRun) and m.answer for m in self._waiting)

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
    membership : Membership
        Which peers of this worker are there. Messages of all runs count as signs of life.
    owes : callable(), optional
        Called when the peer has been sent a message that it answers.
    local : callable(Message), optional
        Takes the messages, if the peer is this worker.
    probe : SharedArray, optional
        Lets the peer find out whether it shares memory with this worker.
    own : str, optional
        Address by which others know this worker, if it is not what the worker itself says.

    Attributes
    ----------
    closed : bool
    near : bool
        Whether messages stay in this process.
    shared : bool or None
        Whether both ends can read each other's memory; None until the peer has tried.
    unreadable : int
        How often the peer could not read the memory of another worker on its host.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        membership: Membership,
        owes: Callable[[], None] = lambda: None,
        local: Callable[[Message], None] | None = None,
        probe: SharedArray | None = None,
        own: str = "",
    ) -> None:
        self.address = address
        self._own = own or worker.address
        self.shared: bool | None = False
        self.unreadable = 0
        self._membership = membership
        self._owes = owes
        membership.opened(address, monotonic())
        # The run of the oldest ping that has not been answered.
        self._called: Key | None = None
        self.closed = False
        self._worker = worker
        self._listeners: dict[Key, Listener] = {}
        # When each run began, by the time of the membership.
        self._began: dict[Key, float] = {}
        # Runs that the peer knows and must be told to drop when they are over.
        self._sent: set[Key] = set()
        self._over: list[Message] = []
        self._loop = asyncio.get_running_loop()
        self._local = local
        self.near = local is not None or address.startswith("inproc://")
        self._outbox = _Outbox()
        if probe is not None and not self.near:
            self.shared = None
            self.listen(PROBE, self._probed)
            self.post(ProbeMemory(PROBE, probe))
        self._task = None if local else asyncio.create_task(self._connect_and_read())
        if self._task is not None:
            # A callback, because a task that is cancelled before its first step runs no `finally`.
            self._task.add_done_callback(self._ended)

    def listen(self, run_id: Key, listener: Listener) -> None:
        """Hand the messages of a run to ``listener`` from now on."""
        self._listeners[run_id] = listener
        # Later than the end of the run before, which the peer may still have to answer.
        self._began[run_id] = self._membership.at(monotonic())

    def unlisten(self, run_id: Key) -> None:
        """Drop the messages of a run from now on, without telling the peer."""
        self._listeners.pop(run_id, None)
        self._began.pop(run_id, None)
        self._sent.discard(run_id)
        self._outbox.discard(run_id)

    def send(self, message: Message) -> None:
        """Send a message that the peer answers. Messages keep their order."""
        self.flush()
        if message.run_id in self._listeners:
            self._sent.add(message.run_id)
        call = isinstance(message, Ping)
        if call and self._called is None:
            self._called = message.run_id
        self._membership.asked(self.address, monotonic(), call=call)
        self._owes()
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
        """Break the connection, or end the attempt, so that listeners receive :class:`Closed`."""
        if self._task is not None:
            self._task.cancel()

    @property
    def idle(self) -> bool:
        """Whether no run listens, and the peer owes no answer."""
        return not self._membership.owes(self.address) and self._listeners.keys() <= {PROBE}

    @property
    def connected(self) -> bool:
        """Whether messages now reach the peer, as far as is known."""
        return self._local is not None or self._outbox.is_open

    @property
    def may_share(self) -> bool:
        """Whether both ends can read each other's memory, as far as is known.

        Until the peer has tried, which a slow one may do late, it is believed of ends whose network
        addresses are the same.
        """
        if self.shared is None:
            return get_address_host(self.address) == get_address_host(self._own)
        return self.shared

    @property
    def silent(self) -> bool:
        """Whether the peer has owed an answer for longer than its event loop may be busy."""
        return self.address in self._membership.suspects

    def end(self, run_id: Key) -> None:
        """Stop listening to a run, and have the peer drop its part.

        If the run's first message still waits for earlier ones, it is not sent any more. A peer
        that owes no answer is sent :class:`EndRun` with the next message. A peer that owes one
        is sent it at once, and answers; it owes that answer from now on, unless it has owed one
        since before the run. One such message is enough for all runs that were not begun.
        """
        self._listeners.pop(run_id, None)
        began = self._began.pop(run_id, 0.0)
        # Messages, and their operands, must not pile up for a peer that is stopped.
        unheard = self._outbox.withdraw(run_id)
        self._outbox.discard(run_id)
        if run_id not in self._sent:
            return
        self._sent.discard(run_id)
        owes = self._membership.owes(self.address)
        self._called = None  # a peer does not answer calls of a round that it has dropped
        covered = unheard and self._outbox.will_stop
        self._membership.settled(self.address, math.inf if covered else began)
        if self.closed or (covered and owes):
            return
        if owes:
            self.send(EndRun(run_id, answer=True))
        elif not unheard:
            self._over.append(EndRun(run_id))

    def receive(self, message: Message) -> None:
        """Hand a message from the peer to the listener of its run."""
        # It may also be the answer to the end of another run.
        answers = isinstance(message, Pong) and message.run_id == self._called
        if answers:
            self._called = None
        if message.run_id != PROBE:
            self._membership.heard(self.address, monotonic(), answers)
        if listener := self._listeners.get(message.run_id):
            listener(message)

    def _probed(self, message: Message) -> None:
        if isinstance(message, ProbeMemory):
            found = message.segment
            self.shared = found is not None and is_readable(found)

    async def _connect_and_read(self) -> None:
        comm = None
        try:
            # Dask tries for long, even if the worker's process has ended; the scheduler knows
            # earlier. Once connected, whatever listens there may say nothing.
            timeouts = self._membership.timeouts
            async with asyncio.timeout(timeouts.handshake):
                comm = await connect(
                    self.address, timeout=timeouts.longest, **self._worker.connection_args
                )
            comm.name = "coded channel"
            await comm.write({"op": "coded_channel", "protocol": PROTOCOL, "reply": False})
            self._outbox.open(comm)
            while True:
                packed = await comm.read()
                if isinstance(packed, dict):
                    logger.error("%s", packed.get("refused"))
                    break
                for message in unpack(packed):
                    self.receive(message)
        except OSError:
            pass
        except Exception:
            logger.exception(_HANG_UP, self.address)
        finally:
            if comm is not None:
                comm.abort()

    def _end(self) -> None:
        """Say once that the channel is closed: another one may be opened from then on."""
        if not self.closed:
            self.closed = True
            self._membership.closed(self.address)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._end()
        self._outbox.close()
        for run_id, listener in list(self._listeners.items()):
            listener(Closed(run_id))

    async def close(self) -> None:
        self._end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def from_any_thread(take: Callable[[Message], None]) -> Answer:
    """Return a function that has the running event loop call ``take``, whoever calls it."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def answer(message: Message) -> None:
        if threading.get_ident() == thread:
            loop.call_soon(take, message)  # need not wake the loop, which takes system calls
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: no answer is needed
            loop.call_soon_threadsafe(take, message)

    return answer


async def serve(comm: Comm, handle: Handler, closed: Callable[[Answer], None]) -> Status:
    """Hand each message of a channel, with a way to answer, to ``handle`` until the peer goes.

    The channel also ends with a message that cannot be handled.
    """
    outbox = _Outbox()
    outbox.open(comm)
    answer = from_any_thread(outbox.send)
    try:
        while True:
            for message in unpack(await comm.read()):
                handle(message, answer)
    except OSError:
        pass
    except Exception:
        logger.exception(_HANG_UP, comm.peer_address)
    finally:
        closed(answer)
        outbox.close()
    return Status.dont_reply
