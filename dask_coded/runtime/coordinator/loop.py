"""A loop that outlives its worker: after a round the state goes to a few other workers.

They keep it in memory until the task has ended. A round sends its operand to every worker anyway,
so a state of a few vectors costs little more. The scheduler names the keepers when a loop starts:
the workers that kept its state before, if there are any. A state in files outlives all of them.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from contextlib import suppress
from functools import partial
from operator import index
from time import monotonic
from typing import TYPE_CHECKING, Any

from distributed import get_worker
from distributed.utils import sync

from dask_coded.config import timeouts
from dask_coded.loop import Loop, Progress, State
from dask_coded.membership import Timeouts
from dask_coded.runtime.messages import KeepState, StateKept
from dask_coded.runtime.worker.keeper import StateKeeper
from dask_coded.storage import StateStore, StateWriter, Stored, StoreError
from dask_coded.transport import Channel, Exchange
from dask_coded.transport.messages import Attempt, Message
from dask_coded.transport.rows import large_answer

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.dask_coded")

# Pickling and sending states may take at most this fraction of the loop's time.
_SHARE = 0.05


class KeptLoop(Loop):
    """The loop of a task in the cluster.

    Parameters
    ----------
    worker : Worker
        Runs the task.
    keeper : StateKeeper
        Of that worker.
    exchange : Exchange
        Of that worker.
    attempt : Attempt
        The run of the task.
    copies : int
        On how many other workers to keep the state.
    topic : str or None
        Event topic by which rounds are reported to the client.
    number : int
        Of this loop among those of the task.
    store : StateStore or None
        Where the state is also kept in files.
    """

    def __init__(
        self,
        worker: Worker,
        keeper: StateKeeper,
        exchange: Exchange,
        attempt: Attempt,
        copies: int,
        topic: str | None = None,
        number: int = 0,
        store: StateStore | None = None,
    ) -> None:
        self._worker = worker
        self._keeper = keeper
        self._exchange = exchange
        self._attempt = attempt
        self._key = attempt[0]
        self._copies = copies
        self._topic = topic
        # Which loop of the task has a state, and which algorithm, if several use it in turn.
        self._place = number, 0
        self._keepers: list[str] = []
        self._reported = self._kept = float("-inf")
        # What was not reported, because reports would have come too often.
        self._held_back: Progress | None = None
        self._cost = 0.0
        # When the last state was sent, until a keeper has confirmed it.
        self._sent: float | None = None
        self._store = store
        self._stored: Stored | None = None
        self._writer = None
        self._unreadable: OSError | None = None
        if store is None:
            return
        try:
            self._stored = store.open(str(self._key), index(attempt[1]))
        except FileExistsError:
            raise
        except OSError as exc:  # other workers may keep the state, and read the place
            self._unreadable = exc
        else:
            self._writer = StateWriter(store, self._failed, self._is_present)

    def resume(self, state: State) -> State:
        number, resumed = self._place
        self._place = number, resumed + 1
        stored = self._stored
        if stored is None or stored.place != self._place:
            stored = None
        else:
            self._stored = None  # it may be large, and is not needed again
        found: tuple[int, bytes] | None = sync(self._worker.loop, self._resume)
        if self._unreadable is not None:
            if found is None:
                raise self._unreadable
            self._failed(self._unreadable)
        if found is not None:
            sync(self._worker.loop, self._resumed, found[0])
            place, kept = pickle.loads(found[1])
            # Otherwise it is of an algorithm that has used the loop before or after this one.
            if place == self._place and (stored is None or stored.round <= found[0]):
                state = kept
                stored = None
        if stored is not None:
            sync(self._worker.loop, self._resumed, stored.round)
            try:
                _, state = pickle.loads(stored.state)
            except Exception as exc:  # its classes may be gone or changed
                raise StoreError(
                    f"The state of a loop in {self._store} cannot be read: {exc!r}. Delete it to "
                    f"start over."
                ) from exc
            logger.info("A loop goes on after round %d from %s.", stored.round, self._store)
        return state

    async def _resumed(self, round: int) -> None:
        await self._worker.scheduler.coded_resumed(key=self._key, round=round)

    async def _resume(self) -> tuple[int, bytes] | None:
        """Return the last round whose state other workers keep, and that state."""
        earlier = await self._find_keepers()
        found = self._keeper.kept.get(self._key)
        keepers = [*self._keepers, *(a for a in earlier if a != self._exchange.address)]
        rounds = await asyncio.gather(*map(self._round_kept, keepers))
        # A keeper may have just died or stopped; then the others must suffice.
        for round, address in sorted(zip(rounds, keepers, strict=True), reverse=True):
            if round <= (found[0] if found else 0):
                break
            with suppress(OSError):
                answer = await large_answer(
                    self._worker.rpc(address).coded_kept(key=self._key),
                    partial(self._ask_round, address),
                )
                if answer is not None:  # otherwise the keeper has just been told to forget it
                    found = answer["round"], answer["state"]
                    break
        return found

    async def _round_kept(self, address: str) -> int:
        """Return the round whose state a worker keeps; 0 if it keeps none or does not answer."""
        try:
            async with asyncio.timeout(timeouts().answer):
                return (await self._ask_round(address)) or 0
        except OSError:
            return 0

    async def _ask_round(self, address: str) -> int | None:
        found: int | None = await self._worker.rpc(address).coded_kept(key=self._key, whole=False)
        self._exchange.heard(address)  # otherwise it would be silent while a large state travels
        return found

    async def _find_keepers(self) -> list[str]:
        """Have the scheduler name keepers, and return earlier ones."""
        self._keepers, earlier = await self._worker.scheduler.coded_keepers(
            key=self._key,
            run=self._attempt[1],
            worker=self._exchange.address,
            copies=self._copies,
            avoid=self._exchange.silent,
        )
        return list(earlier)

    def report(self, progress: Progress, state: Any = None, last: bool = False) -> None:
        now = monotonic()
        self._held_back = progress
        if last or now >= self._reported + Timeouts.REPORTS:
            self._send_report(now)
        # States would pile up for a keeper that has not received the last one.
        due = self._key not in self._keeper.owing and now >= self._kept + self._cost / _SHARE
        write = self._writer is not None and (last or self._writer.is_due())
        due = due and not last
        if state is None or not (due or write):
            return
        kept = pickle.dumps((self._place, state), protocol=pickle.HIGHEST_PROTOCOL)
        if self._writer is not None and write:
            self._writer.write(now, self._place, progress.round, kept)
        if due:
            sync(self._worker.loop, self._keep, progress.round, kept)
            self._kept = monotonic()
            self._cost = self._kept - now

    def _send_report(self, now: float) -> None:
        if self._topic and self._held_back is not None:
            get_worker().log_event(self._topic, vars(self._held_back))
        self._reported, self._held_back = now, None

    def returned(self) -> None:
        """Report the last round, if the algorithm did not say that it was the last.

        And wait for the last state, from which the same call has the same result at once.
        """
        self._send_report(monotonic())
        if self._writer is not None:
            self._writer.finish()

    def close(self) -> None:
        """End what writes the state."""
        if self._writer is not None:
            self._writer.close()

    def _is_present(self) -> bool:
        """Whether no other worker has taken over this run, which no store can know."""

        async def ask() -> bool:
            key, run = self._attempt
            present: bool = await self._worker.scheduler.coded_leads(key=key, run=run)
            return present

        # The event loop ends with the worker, which must not keep this thread.
        return bool(sync(self._worker.loop, ask, callback_timeout=2 * timeouts().answer))

    def _failed(self, reason: BaseException) -> None:
        logger.warning("The state of a loop is not written to %s: %s", self._store, reason)

    async def _keep(self, round: int, state: bytes) -> None:
        usable = [address for address in self._keepers if self._exchange.is_usable(address)]
        if len(usable) < len(self._keepers) or not usable:
            # A keeper died or is stopped. States would pile up for it, so another one replaces it.
            await self._find_keepers()
            silent = self._exchange.silent
            usable = [address for address in self._keepers if address not in silent]
        if self._key in self._keeper.owing:
            return  # another thread of the task has reported meanwhile, and listens for the answers
        message = KeepState(self._key, round, state, self._attempt)
        self._sent = monotonic()
        for address in usable:
            channel = self._exchange.channel(address)
            answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            channel.listen(self._key, partial(_resolve, answer))
            channel.send(message)
            self._keeper.owe(self._key, self._confirmed(channel, answer))

    async def _confirmed(self, channel: Channel, answer: asyncio.Future[Message]) -> None:
        """Wait until a keeper has received the state; no longer if it has stopped or died."""
        try:
            # Its channel is silent for as long as a large state travels, so it is asked beside it.
            message = await large_answer(answer, partial(self._ask_round, channel.address))
        except (OSError, RuntimeError):  # the latter from the connections of a worker that closes
            return
        finally:
            channel.unlisten(self._key)
        if isinstance(message, StateKept) and self._sent is not None:
            # Only the first confirmation counts, because other keepers may be slow.
            self._cost = max(self._cost, monotonic() - self._sent)
            self._sent = None


def _resolve(answer: asyncio.Future[Message], message: Message) -> None:
    if not answer.done():
        answer.set_result(message)
