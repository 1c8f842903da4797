"""All channels of a worker, and which part of the package acts on the messages that arrive."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from dask.typing import Key
from distributed.core import Status

from dask_coded.config import timeouts
from dask_coded.membership import Ask, Membership, Standing
from dask_coded.transport.attempts import Attempts, RunOverError
from dask_coded.transport.channels import PROBE, Answer, Channel, Handler, from_any_thread, serve
from dask_coded.transport.memory import Memory, SharedArray, is_readable
from dask_coded.transport.messages import (
    PROTOCOL,
    Attempt,
    EndRun,
    Message,
    ProbeMemory,
)

if TYPE_CHECKING:
    from distributed.comm import Comm
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

# How many peers that are gone a worker remembers; workers may come and go for months.
_GONE = 100


class Exchange:
    """The channels of a worker, and the parts of the package that handle messages on it.

    Each part registers the messages that it handles; this class knows none of them.

    Attributes
    ----------
    memory : Memory
        What this worker shares with others on its host.
    address : str
        By which the scheduler and other workers know this one. The worker itself may know its host
        by name.
    attempts : Attempts
        Which runs of tasks on other workers have begun something here.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._channels: dict[str, Channel] = {}
        #: Which peers are there. It needs no looks unless a peer owes an answer.
        self.membership = Membership(timeouts())
        self._next_look: asyncio.TimerHandle | None = None
        self._handlers: dict[type[Message], Handler] = {}
        self._on_closed: list[Callable[[Answer], None]] = []
        self.attempts = Attempts()
        self.memory = Memory(self.room)
        self.address: str = worker.address
        self._probe: SharedArray | None = None
        wanted = dask.config.get("coded.shared-memory")
        if wanted and (segment := self.memory.new(len(PROBE))) is not None:
            self._segment = segment  # as long as this lives, peers can open it
            self._probe = segment.place(segment.array(np.dtype(np.uint8), (len(PROBE),)))
        self.register(self._probe_memory, [ProbeMemory])
        worker.handlers["coded_channel"] = self._serve

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
    ) -> None:
        """Hand messages of some kinds to ``handler`` from now on.

        Parameters
        ----------
        handler : callable(Message, Answer)
            Runs on the event loop.
        kinds : iterable of type
        on_closed : callable(Answer), optional
            Called when a channel has closed, with the ``Answer`` that its messages came with.
        """
        for kind in kinds:
            self._handlers[kind] = handler
        if on_closed is not None:
            self._on_closed.append(on_closed)

    # -- runs of tasks -------------------------------------------------------------------------

    def attempt(self, task: Key | None) -> Attempt | None:
        """Return the present run of a task on this worker; None outside of tasks.

        A thread asks when it begins: once its task is given back to this worker, Dask counts the
        same thread as the next run.
        """
        ts = None if task is None else self._worker.state.tasks.get(task)
        return None if ts is None else (ts.key, ts.run_id)

    def check(self, attempt: Attempt | None) -> None:
        """Check that a run of a task on this worker is not over.

        Its thread runs on until it checks this.

        Raises
        ------
        RunOverError
            If the task is cancelled, or was taken over.
        """
        if attempt is None:
            return
        ts = self._worker.state.tasks.get(attempt[0])
        if ts is None or ts.state == "cancelled" or ts.run_id != attempt[1]:
            raise RunOverError(attempt[0])

    # -- channels ------------------------------------------------------------------------------

    def channel(self, address: str) -> Channel:
        """Return the channel to another worker, or to this one; open it if need be."""
        channel = self._channels.get(address)
        if channel is None or channel.closed:
            # A worker opens one to each of a thousand others, so it does not look at all of them.
            while len(gone := self.membership.gone) > _GONE:
                known = next(iter(gone))
                self._channels.pop(known, None)
                self.membership.forget(known)
            local = self._receive_own if address == self.address else None
            channel = Channel(
                self._worker,
                address,
                self.membership,
                self._look_soon,
                local,
                self._probe,
                self.address,
            )
            self._channels[address] = channel
        return channel

    def flush(self) -> None:
        """Tell all peers of the rounds that are over."""
        for channel in self._channels.values():
            channel.flush()

    async def close_idle(self) -> None:
        """Close the channels to other workers that no run uses; the next run opens them again."""
        for address, channel in list(self._channels.items()):
            if channel.idle and self._channels.get(address) is channel:
                # Before anything waits: a round may open another channel meanwhile.
                del self._channels[address]
                self.membership.forget(address)  # it has not left
                await channel.close()

    def is_usable(self, address: str) -> bool:
        """Whether nothing is known against sending to a worker: not closed, not silent."""
        return self.membership.standing(address) is Standing.ALIVE

    @property
    def silent(self) -> list[str]:
        """Addresses of the peers that have owed an answer for too long."""
        return list(self.membership.suspects)

    def heard(self, address: str) -> None:
        """Record that a worker has answered beside its channel."""
        self.membership.heard(address, monotonic())

    def look(self, watched: Mapping[str, float]) -> list[str]:
        """Look which peers are silent; return those to ask, see :meth:`Membership.react`."""
        commands = self.membership.react(monotonic(), watched)
        return [command.peer for command in commands if isinstance(command, Ask)]

    def _look_soon(self) -> None:
        """Look a tick from now, and again as long as a peer owes an answer."""
        if self._next_look is None and (wake := self.membership.wake) is not None:
            self._next_look = asyncio.get_running_loop().call_later(wake, self._look)

    def _look(self) -> None:
        self._next_look = None
        self.look({})
        self._look_soon()

    def room(self) -> float:
        """Return how many bytes this process may use until it exceeds Dask's target, or infinity.

        May be called from any thread.
        """
        limits: Any = self._worker.memory_manager
        target = limits.memory_target_fraction or limits.memory_spill_fraction
        if not limits.memory_limit or not target:
            return math.inf
        used = self._worker.monitor.get_process_memory()
        return float(target * limits.memory_limit - used)

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
        """Whether any peer can read this worker's memory, as far as is known."""
        # A copy, because algorithms ask from their own threads.
        channels = list(self._channels.values())
        if not channels:  # none has tried
            return self.has_memory
        return any(channel.may_share and not channel.closed for channel in channels)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array for a result, which peers can read if it is an operand next."""
        make = self.memory.empty if self.shares_memory else np.empty
        return make(shape, dtype)

    def _probe_memory(self, message: Message, answer: Answer) -> None:
        assert isinstance(message, ProbeMemory)
        readable = message.segment is not None and is_readable(message.segment)
        answer(ProbeMemory(message.run_id, self._probe if readable else None))

    async def close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self.memory.close()

    @cached_property
    def _answer_self(self) -> Answer:
        return from_any_thread(self._receive_answer)

    def _receive_own(self, message: Message) -> None:
        self._handle(message, self._answer_self)

    def _receive_answer(self, message: Message) -> None:
        if channel := self._channels.get(self.address):
            channel.receive(message)

    def _handle(self, message: Message, answer: Answer) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            return
        if self.attempts.admits(getattr(message, "attempt", None)):
            handler(message, answer)
        else:
            answer(EndRun(message.run_id))

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
