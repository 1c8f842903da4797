"""Samples and targets as blocks of rows in the cluster's memory."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse
from dask.base import is_dask_collection
from dask.utils import format_bytes
from distributed import Client, Future, futures_of
from distributed.system import MEMORY_LIMIT

from dask_coded.arguments import check_chunk, check_unmasked, to_csr, unwrapped
from dask_coded.compat import send_to_scheduler
from dask_coded.runtime.client.source import check_arrays, settled
from dask_coded.runtime.client.waiting import naming_loss, outside_pool, threads_of, while_connected
from dask_coded.training.runtime.spec import Blocks


def load(client: Client, data: Any) -> tuple[Blocks, Blocks, list[Future]]:
    """Bring samples and targets into the cluster, unless they are already there.

    Parameters
    ----------
    client : distributed.Client
    data : (samples, targets)
        Each a dask array, a NumPy array, a PyTorch tensor, a SciPy sparse matrix, or a sequence of
        delayed objects or futures of arrays.

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
        raise TypeError(
            "Argument 'data' must be a pair, samples and targets, or yield such pairs as batches."
        )
    futures: list[Future] = []
    found = []
    for name, values in zip(("samples", "targets"), data, strict=True):
        blocks, held = _load(client, name, values)
        found.append(blocks)
        futures += held
    samples, targets = (sum(blocks.rows) for blocks in found)
    if samples != targets:
        raise ValueError(
            f"Each sample must have a target, there are {samples} samples and {targets} targets."
        )
    if not samples:
        raise ValueError("Argument 'data' must hold at least one sample.")
    return found[0], found[1], futures


def joined(data: Any, steps: int | None, batch_size: int | None) -> tuple[Any, int | None]:
    """Return data that come in batches as a pair of arrays, and the samples of a step.

    Parameters
    ----------
    data : (samples, targets) or iterable of batches
        Batches are pairs of NumPy arrays or tensors, as a ``DataLoader`` of PyTorch yields them. A
        pair is returned unchanged.
    steps : int or None
        Total number of steps, if it is known. An iterable without a length may never end, so no
        more is read than these steps use.
    batch_size : int or None
        Samples of a step, by default those of the largest batch.

    Raises
    ------
    TypeError, ValueError
        If there is no batch, or one is not such a pair.
    MemoryError
        If the batches are too large to be joined.
    """
    if not isinstance(data, Iterable) or isinstance(data, tuple | list | np.ndarray | da.Array):
        return data, batch_size
    pairs: list[list[np.ndarray[Any, Any]]] = []
    limit = math.inf if steps is None or _has_end(data) else steps
    largest = samples = nbytes = 0
    for batch in _in_order(data):
        pair = [unwrapped(a) for a in batch] if isinstance(batch, tuple | list) else []
        if len(pair) != 2 or not all(isinstance(a, np.ndarray) and a.ndim for a in pair):
            raise TypeError(
                "Each batch must be a pair of arrays or tensors, samples and targets: pass a pair "
                "of whole arrays, or a DataLoader without a `collate_fn` that returns other types."
            )
        pairs.append(pair)
        nbytes += sum(array.nbytes for array in pair)
        if nbytes > MEMORY_LIMIT / 2:  # the joined arrays need as much again
            raise MemoryError(
                f"Argument 'data' has yielded batches of {format_bytes(nbytes)}. Joining them "
                f"needs twice that, this machine has {format_bytes(MEMORY_LIMIT)}: pass delayed "
                f"objects, or `steps` and `batch_size` if the batches never end."
            )
        samples += len(pair[0])
        largest = max(largest, len(pair[0]), 1)
        if samples >= limit * (batch_size or largest):
            break
    if not pairs:
        raise ValueError("Argument 'data' must yield at least one batch.")
    for name, arrays in zip(("samples", "targets"), zip(*pairs, strict=True), strict=True):
        if len(shapes := {array.shape[1:] for array in arrays}) > 1:
            one, other, *_ = sorted(shapes)
            raise ValueError(
                f"The {name} of all batches must have the same shape, some are of shape {one} and "
                f"others of {other}: pad all of them to one length."
            )
    return [np.concatenate(arrays) for arrays in zip(*pairs, strict=True)], batch_size or largest


def _has_end(batches: Any) -> bool:
    """Whether batches have a length, which iterators and streams of a ``DataLoader`` lack."""
    try:
        len(batches)
    except (TypeError, NotImplementedError):
        return False
    return True


def _in_order(batches: Iterable[Any]) -> Iterable[Any]:
    """Return a ``DataLoader`` that does not shuffle, if ``batches`` is one that does.

    The training shuffles the samples itself, with its seed. When it is resumed, it must find the
    samples in the same order.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(batches, torch.utils.data.DataLoader):
        return batches
    sampler = batches.sampler
    whole = type(sampler) is torch.utils.data.RandomSampler and not sampler.replacement
    if batches.batch_size is None or not whole or len(sampler) != len(batches.dataset):
        return batches
    in_order: Iterable[Any] = torch.utils.data.DataLoader(
        batches.dataset,
        batches.batch_size,
        collate_fn=batches.collate_fn,
        num_workers=batches.num_workers,
        drop_last=batches.drop_last,
        timeout=batches.timeout,
        worker_init_fn=batches.worker_init_fn,
        multiprocessing_context=batches.multiprocessing_context,
        generator=batches.generator,
    )
    return in_order


def _load(client: Client, name: str, values: Any) -> tuple[Blocks, list[Future]]:
    values = unwrapped(values)
    check_unmasked(f"The {name}", values)
    if isinstance(values, da.Array):
        return _array(client, name, values)
    if isinstance(values, Sequence) and values and all(map(_is_lazy, values)):
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


def _array(client: Client, name: str, values: da.Array) -> tuple[Blocks, list[Future]]:
    check_arrays()
    if not values.ndim:
        raise ValueError(f"The {name} must be an array of rows, not a single number.")
    if np.isnan(values.shape).any():
        raise ValueError(
            f"The {name} have chunks of unknown size: call `compute_chunk_sizes()` first."
        )
    whole = values.rechunk(dict.fromkeys(range(1, values.ndim), -1))
    persisted = client.persist(whole)
    futures = futures_of(persisted, client=client)
    _settle(client, futures)
    for found, declared in zip(_counted(client, name, futures), persisted.chunks[0], strict=True):
        check_chunk(f"the {name}", (found, *values.shape[1:]), (declared, *values.shape[1:]))
    tail = (0,) * (values.ndim - 1)
    keys = tuple((persisted.name, i, *tail) for i in range(persisted.numblocks[0]))
    return Blocks(keys, persisted.chunks[0]), futures


def _partitions(client: Client, name: str, values: Any) -> tuple[Blocks, list[Future]]:
    futures = [v if isinstance(v, Future) else client.compute(v) for v in values]
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
    """
    counted = client.map(_rows, futures, pure=False)
    _settle(client, counted)
    with naming_loss(client), outside_pool():
        rows: list[int] = client.gather(counted)
    if None in rows:
        raise TypeError(
            f"The partitions of the {name} must be NumPy or SciPy sparse arrays of rows: convert "
            f"data frames with `to_dask_array(lengths=True)` or `to_numpy()`."
        )
    return rows


def _rows(values: Any) -> int | None:
    shape = getattr(values, "shape", ())
    # Indexing a data frame does not select rows by position.
    return int(shape[0]) if shape and not hasattr(values, "iloc") else None


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
