"""Run algorithms inside the cluster, and report their rounds to the client.

:func:`submit` runs a function of operators as one task. :func:`run` also waits for the result; the
algorithms of this package use it. The client receives reports of the last round and of at most ten
rounds per second before it, through a topic of the scheduler's event log. Callbacks are therefore
not sent anywhere, and a client that disconnects does not disturb the algorithm.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from dask.base import is_dask_collection
from distributed import Client, Future

from dask_coded.arguments import unlabelled, unwrapped
from dask_coded.array import CodedArray, encode
from dask_coded.compat import TaskRef, leave_topic
from dask_coded.loop import TOPIC, Loop, PiecesMade, Progress
from dask_coded.pair import CodedPair
from dask_coded.products import ProductArray
from dask_coded.runtime.client.install import install
from dask_coded.runtime.client.waiting import (
    TaskFuture,
    current_client,
    in_task,
    outside_pool,
    result_of,
    waiting_client,
    while_connected,
)
from dask_coded.runtime.coordinator.tasks import (
    DataSlot,
    LoopSlot,
    OperatorSlot,
    map_nested,
    run_loop,
)
from dask_coded.runtime.spec import CodedTask, round_options
from dask_coded.sameness import coded_in, owner_of
from dask_coded.uncoded import say_uncoded


def client_for(client: Client | None, *values: Any) -> Client:
    """Return the given client, or that of the first coded array in values, or the current one.

    Raises
    ------
    TypeError
        If the given one is no client.
    ValueError
        If there is none.
    """
    coded = [] if client is not None else coded_in(values)
    return current_client(coded[0].encoded.client if coded else client)


def submit(
    function: Callable[..., Any],
    *args: Any,
    client: Client | None = None,
    workers: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Future:
    """Run an algorithm inside the cluster, as one task.

    The function is ordinary NumPy code over operators with ``@``. Each :class:`CodedArray` among
    its arguments, also in lists, tuples and dicts, becomes such an operator (see
    :class:`dask_coded.Operator`), and each ``operator @ x`` is one coded round of a few
    milliseconds. A :class:`CodedPair` becomes an operator with ``product`` (see
    :class:`dask_coded.PairOperator`). Other dask collections become their values, also arrays such
    as ``2 * C``, which emit an :class:`UncodedWarning`. A :class:`Loop` becomes a loop whose state
    other workers keep: if its worker is lost, the function runs again and resumes from that state.
    With :class:`Loop(storage=...) <Loop>` it resumes on another cluster, too.

    If its worker is lost, or only seems to be, the function runs again on another one. So what it
    does besides returning a result, such as writing a file, may happen twice.

    Parameters
    ----------
    function : callable
    *args, **kwargs
        Its arguments. Options of ``Client.submit``, such as ``retries``, are not taken.
    client : distributed.Client, optional
        By default that of a coded array among the arguments, or else the current one.
    workers : str or sequence of str, optional
        Addresses of workers to run the function on; by default a fast worker is chosen.

    Returns
    -------
    distributed.Future
        Future of the function's result.

    Raises
    ------
    TypeError
        If the function is not callable, if an argument is an option of ``Client.submit``, or if a
        coded array is in a container other than a list, a tuple or a dict.
    ValueError
        If there is no client, or if two loops have one place.

    Examples
    --------
    >>> import numpy as np, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> C = coded.encode(np.diag([1.0, 2.0, 3.0]), coded.MDS(n=3, k=2))
    >>> def power(operator, rounds):
    ...     x = np.ones(3)
    ...     for _ in range(rounds):
    ...         x = operator @ x
    ...         x /= np.linalg.norm(x)
    ...     return x @ (operator @ x)
    >>> round(float(coded.submit(power, C, rounds=30).result()), 6)
    3.0
    >>> client.close()
    """
    if not callable(function):
        raise TypeError(f"Argument 'function' must be callable, it is {function!r}.")
    _refuse_options(function, kwargs)
    while isinstance(function, functools.partial) and all(
        value is not _PLACEHOLDER for value in function.args
    ):
        # Its arguments are arguments like others.
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    client = client_for(client, *args, *kwargs.values())
    options, arrays = round_options(), dict[str, CodedArray | CodedPair]()
    if any(isinstance(value, _Own) and value.tolerant for value in kwargs.values()):
        options = replace(options, tolerant=True)
    data: list[Any] = []
    loops: list[Loop] = []
    storages: set[str] = set()

    def slot(value: Any) -> Any:
        if isinstance(found := unlabelled(value), ProductArray):
            value = found
        if isinstance(value, CodedArray | CodedPair):
            arrays[value.encoded.spec.id] = value
            return OperatorSlot(value.encoded.spec.id, value.labels)
        if isinstance(value, Loop):
            if isinstance(value, _Own):
                return value.slot
            loops.append(value)
            if value.storage in storages:
                raise ValueError(f"Two loops have the storage {value.storage!r}: pass one each.")
            if value.storage is None:
                return LoopSlot()
            storages.add(value.storage)
            return LoopSlot(None, value.storage, *owner_of(function, args, kwargs))
        if isinstance(value, Future):
            data.append(value)
            return DataSlot(len(data) - 1)
        if isinstance(value, ProductArray):
            say_uncoded(
                "An array that is derived from a coded one reaches the algorithm as its values, "
                "all on one worker: submit the coded array, and derive from products there"
            )
        if is_dask_collection(value):
            data.append(client.compute(value))
            return DataSlot(len(data) - 1)
        if isinstance(value, np.ndarray) and in_process:
            return value.copy()  # the task would get the caller's memory
        _refuse_hidden(value)
        return value

    in_process = getattr(client.scheduler, "address", "").startswith("inproc://")
    places, named = map_nested(slot, args), map_nested(slot, kwargs)
    if loops and not (arrays or client.asynchronous):
        # The cluster may have no array yet, and no plugins, which keep the state of a loop.
        with outside_pool():
            client.sync(lambda: while_connected(client, install(client)))
    name = getattr(function, "__name__", "function")
    key = f"coded-{name}-{uuid.uuid4().hex}"
    task = CodedTask(
        key,
        run_loop,
        tuple(arrays),
        options,
        function,
        places,
        named,
        *(TaskRef(future.key) for future in data),
    )
    graph = {key: task, **{future.key: future for future in data}}
    future = client.get(graph, key, sync=False, workers=workers)
    return TaskFuture(key, client) if in_task() else future


def _refuse_hidden(value: Any) -> None:
    """Refuse a container that is not searched, and would hand on a coded array as a lazy one."""
    if is_dataclass(value):
        held: Iterable[Any] = (getattr(value, field.name, None) for field in fields(value))
    elif isinstance(value, dict | UserDict) and type(value) is not dict:
        held = value.values()
    elif isinstance(value, list | tuple | set | frozenset) and type(value) not in (list, tuple):
        held = value
    else:
        return
    if any(isinstance(item, CodedArray | CodedPair | Loop) for item in held):
        raise TypeError(
            "`submit` finds coded arrays and loops in lists, tuples and dicts, not in one of type "
            f"{type(value).__qualname__}: pass them as arguments of their own."
        )


# Of a partial whose arguments are not the first ones, from Python 3.14 on.
_PLACEHOLDER = getattr(functools, "Placeholder", object())

#: What `Client.submit` takes for itself, and `submit` does not.
_NOT_OURS = {
    *("actor", "actors", "allow_other_workers", "fifo_timeout"),
    *("key", "priority", "pure", "resources", "retries"),
}


def _refuse_options(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse options of `Client.submit` that the function does not name as its own."""
    if not (options := _NOT_OURS & kwargs.keys()):
        return
    try:
        options -= inspect.signature(function).parameters.keys()
    except ValueError:  # it does not tell
        return
    if options:
        raise TypeError(
            f"`submit` would pass {', '.join(map(repr, sorted(options)))} to the function, whose "
            "signature does not name it: leave out options of `Client.submit`."
        )


def run(
    function: Callable[..., Any],
    *args: Any,
    client: Client | None = None,
    callback: Callable[[Progress], object] | None = None,
    tolerant: bool = True,
    **kwargs: Any,
) -> Any:
    """Run an algorithm of this package inside the cluster and wait for its result.

    Parameters
    ----------
    function : callable
        Takes a :class:`Loop` as ``loop``, in addition to the arguments given here.
    *args, **kwargs
        As for :func:`submit`.
    client : distributed.Client, optional
        As for :func:`submit`.
    callback : callable, optional
        Called with a :class:`Progress` for the last round and for earlier ones, at most ten per
        second. It runs in the client's event loop and should return quickly. If it raises, the
        function is stopped, and the exception is raised here.
    tolerant : bool
        Whether it iterates until a residual is small, and so corrects the errors of a round in
        later ones. Then it warns only of rows that have lost more than half of their digits.

    Returns
    -------
    object
        The result of the function. Ctrl-C also stops the function in the cluster.
    """
    client = waiting_client(client_for(client, *args, *kwargs.values()))
    with _watch(callback, client, tolerant) as loop:
        future = loop.future = submit(function, *args, client=client, loop=loop, **kwargs)
        try:
            if loop.error is not None:  # it came before the future was known
                future.cancel()
            result = result_of(future)
        except KeyboardInterrupt:
            future.cancel()
            raise
        except CancelledError:
            if loop.error is None:
                raise
    if loop.error is not None:
        # Otherwise the error's traceback would keep them.
        future.release()
        result = None
        raise loop.error
    return result


def as_coded(
    A: Any,
    code: Any,
    client: Client | None,
    *,
    transpose: bool = False,
    callback: Callable[[PiecesMade], object] | None = None,
) -> CodedArray:
    """Encode the matrix of an algorithm that waits, unless it is already coded.

    An array that is derived from a coded one, such as ``2 * C``, emits an UncodedWarning.

    Parameters
    ----------
    A, code, client, callback
        See :func:`dask_coded.encode`.
    transpose : bool
        Whether products with the adjoint are needed.

    Raises
    ------
    TypeError
        If A is coded and ``code`` is given, or its transpose is needed and is not coded.
    RuntimeError
        If this is the thread of the client's event loop.
    """
    if isinstance(found := unwrapped(A), CodedArray):
        A = found
    if not isinstance(A, CodedArray):
        client = waiting_client(client)
        if isinstance(A, ProductArray):
            say_uncoded(
                "An array that is derived from a coded one is encoded again, as another copy: pass "
                "the coded array, or the result of `encode` for the derived one"
            )
        return encode(A, code, client=client, transpose=transpose, callback=callback)
    if code is not None:
        raise TypeError(
            f"Argument 'code' is for an array that is not coded, this one is coded with {A.code}: "
            "leave out 'code'."
        )
    if transpose and not isinstance(A.T, CodedArray):
        raise TypeError(
            "Products with the transpose are needed, but this array was encoded without it: "
            "encode it with `transpose=True`."
        )
    return A


class _Own(Loop):
    """Stands for the loop of an algorithm of this package; its topic reports rounds to a client."""

    def __init__(self, topic: str | None, tolerant: bool) -> None:
        self.slot = LoopSlot(topic)
        self.tolerant = tolerant
        #: The task of the algorithm, and what a callback has raised.
        self.future: Future | TaskFuture | None = None
        self.error: Exception | None = None
        self._cancelling: asyncio.Future[Any] | None = None

    def fail(self, error: Exception) -> None:
        """Stop the algorithm, on the client's event loop."""
        self.error = error
        if self.future is not None:
            self._cancelling = asyncio.ensure_future(self.future.cancel())


@contextmanager
def _watch(
    callback: Callable[[Progress], object] | None, client: Client, tolerant: bool
) -> Iterator[_Own]:
    """Call ``callback`` with the rounds of the loop that is yielded, until it raises."""
    if callback is None:
        yield _Own(None, tolerant)
        return
    topic = f"{TOPIC}{uuid.uuid4().hex}"
    # Drop the sender, which the scheduler adds to the message.
    names = [field.name for field in fields(Progress)]
    # A notebook finds the cell that output belongs to in the caller's context.
    context = copy_context()

    loop = _Own(topic, tolerant)

    def call(event: tuple[float, dict[str, Any]]) -> None:
        if loop.error is not None:
            return
        try:
            context.run(callback, Progress(**{name: event[1][name] for name in names}))
        except Exception as error:
            loop.fail(error)

    client.subscribe_topic(topic, call)
    try:
        yield loop
    finally:
        leave_topic(client, topic)
