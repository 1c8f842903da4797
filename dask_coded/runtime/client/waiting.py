"""Waiting for the cluster: from a task of the same cluster, and not on its event loop.

Whatever waits for a cluster goes through :func:`outside_pool`. A task that waits would occupy a
thread which what it waits for may need: with one thread per worker it would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, TypeVar

from distributed import Client, Future, default_client, get_client, rejoin, secede

from dask_coded.compat import current_key
from dask_coded.membership import Timeouts

T = TypeVar("T")

# What Dask gives as the reason for which it cancels all futures of a client.
_LOST = "scheduler-connection-lost"


def in_task() -> bool:
    """Return whether this thread runs a task of a Dask worker."""
    return bool(current_key())


@contextmanager
def outside_pool() -> Iterator[None]:
    """Let another task use this task's thread in the worker's pool; outside of tasks do nothing.

    Like ``Client.get``, and unlike ``worker_client``, the task waits for a thread of the pool at
    the end, so that a worker does not compute more tasks at once than it has threads.
    """
    try:
        if left := in_task():
            secede()
    except KeyError:
        # The task has left the pool before, and stays outside: an algorithm, or `worker_client`.
        left = False
    try:
        yield
    finally:
        if left:
            rejoin()


def result_of(future: Future) -> Any:
    """Wait for the result of a future that nothing else uses.

    A client keeps the error of a future. Once it is raised, its traceback keeps the future, and
    what the future depends on would stay in the cluster. So the future is released.

    Raises
    ------
    ConnectionError
        If the client loses its connection to the scheduler.
    """
    try:
        with naming_loss(future), outside_pool():
            return future.result()
    except Exception:
        future.release()
        raise


def lost(client: Client) -> ConnectionError:
    """Return the error of a client whose scheduler has ended, or cannot be reached."""
    if client.status in ("closing", "closed"):
        return ConnectionError("The client was closed, and what was being computed is cancelled.")
    address = client.scheduler.address if client.scheduler else "its address"
    return ConnectionError(
        f"The client has no connection to the scheduler at {address} any more, and what was being "
        "computed is lost. Start the scheduler again if it has ended; once `client.status` is "
        "'running' again, or with another client, call this again: arrays in files are opened by "
        "`coded.open`, loops with a `storage` and trainings with `resume=True` go on."
    )


@contextmanager
def naming_loss(of: Client | Future) -> Iterator[None]:
    """Say what has happened if futures are cancelled because the scheduler has ended."""
    try:
        yield
    except CancelledError as exc:
        client = of.client if isinstance(of, Future) else of
        # Dask 2024.12 gives no reason, and cancels all before it tries to connect again.
        reason = getattr(exc, "reason", None)
        gone = client.status == "connecting" if reason is None else reason == _LOST
        if not gone:
            raise
        raise lost(client) from exc


def current_client(client: Client | None) -> Client:
    """Return the given client, or the current one; in a task, that of the worker.

    Raises
    ------
    TypeError
        If it is no client.
    ValueError
        If there is none.
    RuntimeError
        If it is closed.
    ConnectionError
        If it has lost its scheduler, for which it would wait half a minute.
    """
    if client is not None:
        if not isinstance(client, Client):
            raise TypeError(f"Argument 'client' must be a `distributed.Client`, it is {client!r}.")
        if client.status in ("closing", "closed"):
            raise RuntimeError(
                "The client is closed, and the arrays that were encoded with it are released: "
                "create another client, and encode them again."
            )
        return _connected(client)
    try:
        return _connected(get_client() if in_task() else default_client())
    except ValueError:
        raise ValueError(
            "A Dask cluster is required, but there is no current client: create a "
            "`dask.distributed.Client()` first, or pass one as `client`."
        ) from None


def _connected(client: Client) -> Client:
    # An asynchronous client may not have been awaited yet.
    if client.status == "connecting" and not client.asynchronous:
        raise lost(client)
    return client


def waiting_client(client: Client | None) -> Client:
    """Return the given client, or the current one, for a caller that waits.

    Raises
    ------
    RuntimeError
        If this is the thread of the client's event loop, which would wait for itself.
    """
    client = current_client(client)
    if client.asynchronous:
        raise RuntimeError(
            "An algorithm waits for its result, and must not do so on the event loop of its "
            "client: call it in a thread, as `await asyncio.to_thread(function, *args)` does."
        )
    return client


async def while_connected(client: Client, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of what is done on a client's event loop, while its scheduler is there.

    Without a scheduler each request to it would wait for a new connection until a timeout.

    Raises
    ------
    ConnectionError
        If the client loses its connection to the scheduler.
    """
    if client.status != "running":
        try:  # its start may still be under way, and goes on if this is cancelled
            await asyncio.shield(asyncio.ensure_future(client))
        except BaseException:
            work.close()
            raise
    task = asyncio.create_task(work)
    try:
        while not task.done() and client.status == "running":
            await asyncio.wait([task], timeout=Timeouts.LOOK)
    finally:
        task.cancel()
        await asyncio.wait([task])
    if client.status != "running" and (task.cancelled() or task.exception()):
        raise lost(client) from (None if task.cancelled() else task.exception())
    return task.result()


def threads_of(client: Client) -> dict[str, int]:
    """Return how many threads each worker has.

    Raises
    ------
    ConnectionError
        If the client has lost its scheduler.
    """
    scheduler: Any = client.scheduler
    with outside_pool():
        found: dict[str, int] = client.sync(lambda: while_connected(client, scheduler.ncores()))
    return found


class TaskFuture(Future):
    """A future whose result a task can wait for."""

    def result(self, timeout: Any = None) -> Any:
        with outside_pool():
            return super().result(timeout)

    def exception(self, timeout: Any = None, **kwargs: Any) -> Any:
        with outside_pool():
            return super().exception(timeout, **kwargs)
