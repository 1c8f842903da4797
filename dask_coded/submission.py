"""Algorithms inside the cluster: how they get there, and how the client hears of their rounds.

:func:`submit` runs a function of operators as one task. :func:`run` does so and waits, as the
algorithms of this package do. The client hears of at most ten rounds a second and of the last one,
through a topic of the scheduler's event log: no function travels, and a client that went away
disturbs nobody.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from dask._task_spec import TaskRef
from dask.base import is_dask_collection
from distributed import Client, Future

from dask_coded.array import CodedArray, current_client
from dask_coded.loop import QUIET, Loop, Progress
from dask_coded.pair import CodedPair
from dask_coded.runtime.spec import CodedTask, RoundOptions
from dask_coded.runtime.tasks import DataSlot, LoopSlot, OperatorSlot, run_loop


def submit(
    function: Callable[..., Any],
    *args: Any,
    client: Client | None = None,
    workers: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Future:
    """Run an algorithm inside the cluster, as one task.

    The function is ordinary NumPy code over operators with ``@``. Every :class:`CodedArray` among
    its arguments becomes such an operator (see :class:`dask_coded.Operator`), of which each
    ``operator @ x`` is one coded round of a few milliseconds; every :class:`CodedPair` becomes one
    with ``product`` (see :class:`dask_coded.PairOperator`); other dask collections become their
    values. A :class:`Loop` becomes one whose state is kept by other workers, so that the function
    goes on from there when it is run again because its worker was lost.

    Parameters
    ----------
    function : callable
    *args, **kwargs
        Its arguments.
    client : distributed.Client, optional
        By default the current one.
    workers : str or sequence of str, optional
        Addresses of workers to run the function on; by default a fast one is chosen.

    Returns
    -------
    distributed.Future
        Of what the function returns.

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
    client = current_client(client)
    arrays: dict[str, CodedArray | CodedPair] = {}
    data: list[Any] = []

    def slot(value: Any) -> Any:
        if isinstance(value, CodedArray | CodedPair):
            arrays[value.encoded.spec.id] = value
            return OperatorSlot(value.encoded.spec.id)
        if isinstance(value, Loop):
            return value.slot if isinstance(value, _Watched) else LoopSlot()
        if isinstance(value, Future):
            data.append(value)
            return DataSlot(len(data) - 1)
        if is_dask_collection(value):
            data.append(client.compute(value))
            return DataSlot(len(data) - 1)
        return value

    places = tuple(slot(value) for value in args)
    named = {name: slot(value) for name, value in kwargs.items()}
    name = getattr(function, "__name__", "function")
    key = f"coded-{name}-{uuid.uuid4().hex}"
    task = CodedTask(
        key,
        run_loop,
        tuple(arrays),
        RoundOptions.from_config(),
        function,
        places,
        named,
        *(TaskRef(future.key) for future in data),
    )
    graph = {key: task, **{future.key: future for future in data}}
    return client.get(graph, key, sync=False, workers=workers)


def run(
    function: Callable[..., Any],
    *args: Any,
    client: Client | None = None,
    callback: Callable[[Progress], object] | None = None,
    **kwargs: Any,
) -> Any:
    """Run an algorithm inside the cluster and wait for what it returns.

    Parameters
    ----------
    function : callable
        Takes a :class:`Loop` as ``loop``, beside what it is given here.
    *args, **kwargs
        As for :func:`submit`.
    client : distributed.Client, optional
        By default the current one.
    callback : callable, optional
        Called with a :class:`Progress` for the last round and for earlier ones, at most ten a
        second, in the client's event loop: it should return soon.

    Returns
    -------
    object
        What the function returns. Ctrl-C stops it in the cluster as well.
    """
    client = current_client(client)
    with _watch(callback, client) as loop:
        future = submit(function, *args, client=client, loop=loop, **kwargs)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


class _Watched(Loop):
    """Stands for the loop of which a client wants to hear."""

    def __init__(self, topic: str) -> None:
        self.slot = LoopSlot(topic)


@contextmanager
def _watch(callback: Callable[[Progress], object] | None, client: Client) -> Iterator[Loop]:
    """Call ``callback`` with the rounds of the loop that is yielded."""
    if callback is None:
        yield QUIET
        return
    topic = f"coded-progress-{uuid.uuid4().hex}"
    # The scheduler adds to the message who sent it.
    names = [field.name for field in fields(Progress)]
    client.subscribe_topic(
        topic, lambda event: callback(Progress(**{name: event[1][name] for name in names}))
    )
    try:
        yield _Watched(topic)
    finally:
        client.unsubscribe_topic(topic)
