"""Samples and targets as blocks of rows in the cluster's memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse
from dask.base import is_dask_collection
from distributed import Client, Future, futures_of

from dask_coded.arguments import check_chunk, check_unmasked, to_csr, unwrapped
from dask_coded.compat import send_to_scheduler
from dask_coded.runtime.client.source import check_arrays, settled
from dask_coded.runtime.client.waiting import naming_loss, outside_pool, threads_of, while_connected
from dask_coded.training.runtime.spec import Blocks


def load(
    client: Client, data: Any, name: str = "Argument 'data'"
) -> tuple[Blocks, Blocks, list[Future]]:
    """Bring samples and targets into the cluster, unless they are already there.

    Parameters
    ----------
    client : distributed.Client
    data : (samples, targets)
        Each a dask array, a NumPy array, a PyTorch tensor, a SciPy sparse matrix, or a sequence of
        delayed objects or futures of arrays.
    name : str
        Of the data, in messages.

    Returns
    -------
    samples, targets : Blocks
    futures : list of Future
        They keep the blocks in memory.

    Raises
    ------
    TypeError, ValueError
        If the data have another type, or samples and targets differ in length.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        given, way_out = type(data).__name__, ""
        if isinstance(data, tuple | list):
            given += f" of {len(data)}"
        elif not hasattr(data, "shape"):
            # A data set of PyTorch can be indexed, a loader can only be iterated.
            is_set = hasattr(data, "__getitem__")
            way_out = ": pass a `DataLoader` of it" if is_set else ": pass whole arrays"
        raise TypeError(
            f"{name[0].upper()}{name[1:]} must be a pair, samples and targets, its type is "
            f"{given}{way_out}."
        )
    futures: list[Future] = []
    found = []
    for each, values in zip(("samples", "targets"), _begun(client, data), strict=True):
        blocks, held = _load(client, each, values)
        found.append(blocks)
        futures += held
    samples, targets = (sum(blocks.rows) for blocks in found)
    if samples != targets:
        raise ValueError(
            f"Each sample must have a target, there are {samples} samples and {targets} targets."
        )
    if not samples:
        raise ValueError(f"{name[0].upper()}{name[1:]} must hold at least one sample.")
    return found[0], found[1], futures


def _begun(client: Client, data: Sequence[Any]) -> list[Any]:
    """Return samples and targets with all that is lazy in them being computed.

    All of one type at once, because samples and targets often come from the same source, which is
    read once then.
    """
    given = []
    for name, values in zip(("samples", "targets"), map(unwrapped, data), strict=True):
        check_unmasked(f"The {name}", values)
        if isinstance(values, da.Array):
            values = _whole(name, values)
        elif isinstance(values, Sequence) and len(items := [*values]) and all(map(_is_lazy, items)):
            values = items
        given.append(values)
    begun: dict[int, Any] = {}
    arrays = [values for values in given if isinstance(values, da.Array)]
    if arrays:  # Dask refuses none
        begun |= dict(zip(map(id, arrays), client.persist(arrays), strict=True))
    alike: defaultdict[type, list[Any]] = defaultdict(list)
    for values in given:
        for value in values if isinstance(values, list) else ():
            if is_dask_collection(value) and not isinstance(value, Future):
                alike[type(value)].append(value)
    # Of several types at once, Dask returns the futures in the order of the types.
    for lazy in alike.values():
        begun |= dict(zip(map(id, lazy), client.compute(lazy), strict=True))
    return [
        [begun.get(id(value), value) for value in values]
        if isinstance(values, list)
        else begun.get(id(values), values)
        for values in given
    ]


def _load(client: Client, name: str, values: Any) -> tuple[Blocks, list[Future]]:
    if isinstance(values, da.Array):
        return _array(client, name, values)
    if isinstance(values, list) and values and all(isinstance(v, Future) for v in values):
        return _partitions(client, name, values)
    if (isinstance(values, np.ndarray) and values.ndim) or scipy.sparse.issparse(values):
        return _scattered(client, values)
    raise TypeError(
        f"The {name} must be a dask array, a NumPy array, or a list of delayed objects or futures "
        f"of arrays, not a {type(values).__name__}{_way_out(values)}."
    )


def _way_out(values: Any) -> str:
    for method in ("to_dask_array(lengths=True)", "to_numpy()"):
        if hasattr(values, method.partition("(")[0]):
            return f": pass the result of its `{method}`"
    return ""


def _is_lazy(value: Any) -> bool:
    return isinstance(value, Future) or is_dask_collection(value)


def _whole(name: str, values: da.Array) -> da.Array:
    """Return an array in blocks of whole rows."""
    check_arrays()
    if not values.ndim:
        raise ValueError(f"The {name} must be an array of rows, not a single number.")
    if np.isnan(values.shape).any():
        raise ValueError(
            f"The {name} have chunks of unknown size: call `compute_chunk_sizes()` first."
        )
    return values.rechunk(dict.fromkeys(range(1, values.ndim), -1))


def _array(client: Client, name: str, persisted: da.Array) -> tuple[Blocks, list[Future]]:
    futures = futures_of(persisted, client=client)
    _settle(client, futures)
    for found, declared in zip(_counted(client, name, futures), persisted.chunks[0], strict=True):
        check_chunk(f"the {name}", (found, *persisted.shape[1:]), (declared, *persisted.shape[1:]))
    tail = (0,) * (persisted.ndim - 1)
    keys = tuple((persisted.name, i, *tail) for i in range(persisted.numblocks[0]))
    return Blocks(keys, persisted.chunks[0]), futures


def _partitions(client: Client, name: str, futures: list[Future]) -> tuple[Blocks, list[Future]]:
    _settle(client, futures)
    rows = _counted(client, name, futures)
    return Blocks(tuple(future.key for future in futures), tuple(rows)), futures


def _settle(client: Client, futures: list[Future]) -> None:
    """Wait for data, which the cluster may be computing again because a worker was lost."""

    async def settle() -> None:
        # On the stream on which the graph has been sent, so that the tasks are known by then.
        keys = [future.key for future in futures]
        send_to_scheduler(client, {"op": "coded-awaited", "keys": keys})
        await settled(client, futures)

    with naming_loss(client), outside_pool():
        client.sync(lambda: while_connected(client, settle()))


def _counted(client: Client, name: str, futures: list[Future]) -> list[int]:
    """Return the number of rows of each block.

    Raises
    ------
    TypeError
        If a block has no rows that can be selected.
    ValueError
        If blocks differ: gradients would depend on which of them a worker joins.
    """
    looked_at = client.map(_looked_at, futures, pure=False)
    _settle(client, looked_at)
    with naming_loss(client), outside_pool():
        found: list[tuple[int, str] | None] = client.gather(looked_at)
    blocks = [block for block in found if block is not None]
    if len(blocks) < len(found):
        raise TypeError(
            f"The partitions of the {name} must be NumPy or SciPy sparse arrays of rows: convert "
            f"data frames with `to_dask_array(lengths=True)` or `to_numpy()`."
        )
    # What is in a file without rows may have any type.
    different = sorted({kind for rows, kind in blocks if rows})
    if len(different) > 1:
        raise ValueError(
            f"All blocks of the {name} must have the same kind of rows, some have rows of "
            f"{different[0]} and others of {different[1]}: convert them."
        )
    return [rows for rows, _ in blocks]


def _looked_at(values: Any) -> tuple[int, str] | None:
    """Return the number of rows and what they are."""
    shape = getattr(values, "shape", ())
    # Indexing a data frame does not select rows by position.
    if not shape or hasattr(values, "iloc"):
        return None
    kind = f"dtype {getattr(values, 'dtype', None)} and shape {tuple(shape[1:])}"
    if scipy.sparse.issparse(values):
        kind += f", a sparse {'array' if isinstance(values, scipy.sparse.sparray) else 'matrix'}"
    return int(shape[0]), kind


def _scattered(client: Client, values: Any) -> tuple[Blocks, list[Future]]:
    """Scatter equal blocks, as many as there are workers."""
    if scipy.sparse.issparse(values):
        values = to_csr(values)  # rows of some other formats cannot be selected
    # Not from `scheduler_info`, whose answer may be replaced before it is read: every two seconds
    # the client asks for one without any worker.
    workers = threads_of(client)
    count = max(min(len(workers), values.shape[0]), 1)
    edges = [i * values.shape[0] // count for i in range(count + 1)]
    blocks = [values[a:b] for a, b in itertools.pairwise(edges)]
    if any(address.startswith("inproc://") for address in workers):
        # They get the caller's memory as it is, which the caller may change during the training.
        blocks = [block.copy() for block in blocks]
    futures = client.scatter(blocks, hash=False)
    return Blocks(tuple(f.key for f in futures), tuple(b.shape[0] for b in blocks)), futures
