"""All that the package uses of dask and distributed without a promise that it stays.

No other module imports these names or touches these attributes, as ``tests/test_compat.py`` checks.
If a new version of Dask breaks the package, it is probably here. Each entry says what breaks
without it. All have been seen in 2024.12.0, 2025.5.0, 2025.12.0 and 2026.8.0, unless the entry says
something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import scipy.sparse

# Tasks that the scheduler recognises by their type. Without them it would not see which tasks
# coordinate rounds. Before 2024.12.0 there are none.
from dask._task_spec import Alias, GraphNode, Task, TaskRef, convert_legacy_graph

# What `einsum` of coded arrays needs to read its arguments.
from dask.array.core import Array, elemwise, handle_out

# With these, Dask concatenates chunks; see `_concatenate`.
from dask.array.dispatch import concatenate_lookup
from dask.array.einsumfuncs import parse_einsum_input
from dask.typing import Key

# Without them an array in a file could be sent to no other worker.
from distributed.protocol.numpy import deserialize_numpy_ndarray, serialize_numpy_ndarray

# How often workers report; without it, silent workers would be noticed at the wrong time.
from distributed.scheduler import heartbeat_interval

# Where Dask keeps data that it may spill. Without it, pieces larger than the memory fail.
from distributed.spill import SpillBuffer

# What a thread of a worker runs, and whether it is in the worker's pool.
from distributed.threadpoolexecutor import thread_state as _pool_state

# The states in which a worker runs tasks; without them, trainings go on while it closes.
from distributed.worker import WORKER_ANY_RUNNING
from distributed.worker import thread_state as _task_state

from dask_coded.arguments import meta_of

if TYPE_CHECKING:
    from distributed import Client
    from distributed.scheduler import Scheduler, TaskState

__all__ = [
    "WORKER_ANY_RUNNING",
    "Alias",
    "GraphNode",
    "HookedArray",
    "SpillBuffer",
    "Task",
    "TaskRef",
    "UnfusedTask",
    "add_page",
    "convert_legacy_graph",
    "count_workers",
    "current_key",
    "deserialize_numpy_ndarray",
    "drop_topics",
    "elemwise",
    "end_fetches",
    "forget_file",
    "handle_out",
    "heartbeat_interval",
    "in_pool",
    "known_workers",
    "leave_topic",
    "makes_result",
    "parse_einsum_input",
    "send_to_scheduler",
    "serialize_numpy_ndarray",
]

# What Dask calls a connection through which it fetches data for tasks.
_GATHER = "Ephemeral Worker->Worker for gather"


# -- arrays and tasks --------------------------------------------------------------------------


@meta_of.register(Array)
def _(array: Array) -> Any:
    # `Array._meta`: without it, sparse and masked chunks cannot be told from dense ones.
    return array._meta


class HookedArray(Array):
    """A dask array that sees what dask.array does to it without asking any public method."""

    def elementwise(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a ufunc of dask.array."""
        return elemwise(op, *args, **kwargs)

    def assigned(self, name: str, value: Any) -> None:
        """Learn before the fact that dask.array is about to set ``chunks`` or ``dask``."""

    def _elemwise(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        # The ufuncs of dask.array ask for this. Without it, the product with their result would be
        # silently uncoded.
        return self.elementwise(op, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # dask.array sets `_chunks` first, then `dask`, if the array is given as `out=`. Without it,
        # such an array would keep the products of its old elements. While the array is made, it
        # has no `_meta`.
        if name in ("_chunks", "dask") and hasattr(self, "_meta"):
            self.assigned(name.lstrip("_"), value)
        super().__setattr__(name, value)


class UnfusedTask(Task):
    """A task that Dask does not merge with others when it optimizes a graph."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        # Without it, the scheduler would see neither pieces nor rounds in merged tasks.
        return True


if concatenate_lookup.dispatch(scipy.sparse.sparray) is not concatenate_lookup.dispatch(
    scipy.sparse.spmatrix
):

    @concatenate_lookup.register(scipy.sparse.sparray)
    def _concatenate(arrays: Any, axis: int = 0) -> Any:
        # 2024.12.0 concatenates sparse matrices, but no sparse arrays; 2025.5.0 has both. Without
        # it, no dask array of sparse arrays can be encoded or computed there.
        return (scipy.sparse.vstack, scipy.sparse.hstack)[axis](arrays)


# -- on workers --------------------------------------------------------------------------------


def current_key() -> Any:
    """Return the key of the task that runs in this thread, None outside of tasks.

    Without it, a round does not know which task it belongs to, and cannot end with it.
    """
    return getattr(_task_state, "key", None)


def in_pool() -> bool:
    """Return whether this is a thread of a worker's pool, which a task may leave.

    Without it, a round in a thread that has left already would leave twice, which is an error.
    """
    return bool(getattr(_pool_state, "proceed", False))


def end_fetches(pool: Any, address: str) -> None:
    """End what Dask fetches from a worker for tasks or clients, and what only connects to it.

    Without it, these wait for a silent worker as long as Dask does. ``pool`` is ``Worker.rpc``, or
    that of the scheduler.
    """
    for comm in tuple(pool.occupied.get(address, ())):
        if comm.name == _GATHER:  # others may be the user's, for example calls of actors
            comm.abort()
    for end in tuple(pool._connecting.get(address, ())):
        end("The worker is silent.")


def forget_file(buffer: Any, key: Key) -> None:
    """Forget the size of a file that could not be deleted, or Dask spills the key no more."""
    slow = buffer.slow.data
    if size := slow.weight_by_key.pop(key, None):
        slow.total_weight -= size


# -- on the scheduler, and on the way there ----------------------------------------------------


def drop_topics(scheduler: Scheduler, start: str) -> None:
    """Drop the topics that begin so and that no client listens to.

    Without it, the topic of each loop would stay, with the reports of a thousand rounds.
    """
    topics, clients = scheduler._broker._topics, scheduler.clients.keys()
    for name in [n for n in topics if n.startswith(start) and not topics[n].subscribers & clients]:
        del topics[name]


def leave_topic(client: Client, topic: str) -> None:
    """Let go of the handler of a topic, and have the scheduler send no more of its events.

    `Client.unsubscribe_topic` keeps the handler, and all that it refers to, for as long as the
    client lives, and an event that is on its way to no handler is an error. So what takes its place
    stays until the scheduler says, by an event of None, that no other comes.
    """
    handlers = client._event_handlers

    def take(event: tuple[float, Any]) -> None:
        if event[1] is None:
            handlers.pop(topic, None)

    async def leave() -> None:
        scheduler: Any = client.scheduler
        with suppress(Exception):  # it may be gone, or another one by now
            await scheduler.coded_left(topic=topic, client=client.id)

    handlers[topic] = take
    loop: Any = client.loop
    if client.status == "running":
        loop.add_callback(leave)


def add_page(scheduler: Scheduler, path: str, title: str, draw: Callable[[Any], None]) -> None:
    """Add a page to a scheduler's dashboard and its menu, if it has a dashboard.

    ``draw(document)`` fills Bokeh's document of each visitor. Without it there is no page. Pages of
    others are not on the list that JupyterLab's extension reads, in 2026.8 neither.
    """
    found = [app for app in scheduler.http_application.applications if hasattr(app, "app_paths")]
    if not found:
        return
    # Only now, because Dask imports them only if Bokeh is there, in a release that suits it.
    from distributed.dashboard.components.scheduler import env
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    def document(_: Scheduler, extra: Mapping[str, Any], doc: Any) -> None:
        doc.title = f"Dask: {title}"
        draw(doc)
        doc.template = env.get_template("simple.html")
        doc.template_variables.update(extra)

    shown = template_variables(scheduler)
    app = BokehApplication({path: document}, scheduler, found[0].prefix, shown)
    scheduler.http_application.add_application(app)
    app.initialize(IOLoop.current())
    app.start()
    shown["plots"].append({"url": path.strip("/"), "name": title})
    shown["plots"].sort(key=lambda plot: plot["name"])


def makes_result(ts: TaskState) -> bool:
    """Return whether ``compute`` has added a task, to put the chunks of a result together.

    Without it, a client's result is lost with the worker that finishes it.
    """
    return bool(ts.who_wants) and isinstance(ts.key, str) and ts.key.startswith("finalize-")


def known_workers(client: Client | None) -> int | None:
    """Return how many workers a cluster has, as its client has heard within the last two seconds.

    None if it is closed, or not known, as of futures that were unpickled. Without it, the
    representation of an array does not say that workers have left, because a representation must
    not wait for the scheduler.
    """
    found = client._scheduler_identity if client is not None else None
    # 2024.12.0 has all workers and no number; newer ones have the number and a few workers.
    number: int | None = found.get("n_workers", len(found["workers"])) if found else None
    return number


async def count_workers(client: Client) -> None:
    """Have a client hear how many workers there are, which it may not know after waiting for them.

    Without it, the representation of an array may say for two seconds that workers have left.
    """
    await client._update_scheduler_info()


def send_to_scheduler(client: Client, message: Mapping[str, Any]) -> None:
    """Send a message on the stream on which a client has sent its graphs.

    Without it, the scheduler may hear of tasks before they exist.
    """
    client._send_to_scheduler(message)
