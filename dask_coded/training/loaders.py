"""Data that come in batches, as a ``DataLoader`` of PyTorch yields them."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask import delayed
from dask.delayed import Delayed
from dask.utils import format_bytes
from distributed.protocol.pickle import dumps, loads
from distributed.system import MEMORY_LIMIT
from numpy.typing import NDArray

from dask_coded.arguments import unwrapped

# Blocks at most: enough for a few dozen workers, and few tasks for the scheduler.
_BLOCKS = 256


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
    pairs: list[list[NDArray[Any]]] = []
    limit = math.inf if steps is None or _has_end(data) else steps
    largest = samples = nbytes = 0
    for batch in _in_order(data):
        # Copied, because the same arrays may come again, with other numbers.
        pair = [array.copy() for array in _pair(batch)]
        pairs.append(pair)
        nbytes += sum(array.nbytes for array in pair)
        if nbytes > MEMORY_LIMIT / 2:  # the joined arrays need as much again
            raise MemoryError(
                f"Argument 'data' has yielded batches of {format_bytes(nbytes)}. Joining them "
                f"needs twice that, this machine has {format_bytes(MEMORY_LIMIT)}: pass "
                f"`from_loader(loader)` or delayed objects, or `steps` and `batch_size` if the "
                f"batches never end."
            )
        samples += len(pair[0])
        largest = max(largest, len(pair[0]), 1)
        if samples >= limit * (batch_size or largest):
            break
    if not pairs:
        raise ValueError("Argument 'data' must yield at least one batch.")
    return _joined(pairs), batch_size or largest


def from_loader(loader: Any) -> tuple[list[Delayed], list[Delayed]]:
    """Return the data of a ``DataLoader`` of PyTorch as delayed objects, which workers read.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        Its data set must have a length, and workers must find what it reads. It is sent to them.
        Its sampler is asked once, here, unless it shuffles all samples, which :func:`train` does
        itself. To resume a training, give a random sampler a seeded generator.
        Processes of the loader (``num_workers``) are not used.

    Returns
    -------
    samples, targets : list of Delayed
        Some batches each, as :func:`train` takes them. Pass it the ``batch_size`` of a step.

    Raises
    ------
    TypeError
        If it is not a ``DataLoader`` that makes batches of a data set with a length, or its sampler
        never ends.
    ValueError
        If it yields nothing.

    Notes
    -----
    Each sample is read once and then kept in the memory of workers, and read again only if it is
    lost with one. What a data set draws at random would differ then: use ``augment`` of
    :func:`train` for that.

    Examples
    --------
    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.ones(100, 5), torch.zeros(100))
    >>> loader = torch.utils.data.DataLoader(data, batch_size=20)
    >>> samples, targets = from_loader(loader)
    >>> len(samples), samples[0].compute().shape
    (5, (20, 5))
    """
    torch: Any = sys.modules.get("torch")
    if (
        torch is None
        or not isinstance(loader, torch.utils.data.DataLoader)
        or isinstance(loader.dataset, torch.utils.data.IterableDataset)
        or loader.batch_sampler is None
        or not _has_end(loader.batch_sampler)
    ):
        raise TypeError(
            f"Argument 'loader' must be a DataLoader of PyTorch with a batch size and a data set "
            f"that has a length, it is {loader!r}: pass streams to `train` as they are."
        )
    loader = _in_order(loader)
    batches = list(loader.batch_sampler)
    if not batches:
        raise ValueError("Argument 'loader' must yield at least one batch.")
    edges = np.linspace(0, len(batches), min(len(batches), _BLOCKS) + 1).astype(int)
    # As bytes, so that each task has a copy of its own: a data set may open files when it is first
    # used, and cannot be sent to another worker then, or used by two threads.
    dataset = delayed(dumps(loader.dataset), traverse=False)
    found = [
        # A partial, because Dask would walk through all indices in a list.
        delayed(partial(_read, batches[a:b], loader.collate_fn), nout=2)(dataset)
        for a, b in itertools.pairwise(edges)
    ]
    samples, targets = zip(*found, strict=True)
    return [*samples], [*targets]


def _read(
    batches: list[list[int]], collate: Callable[[Any], Any], pickled: bytes
) -> list[NDArray[Any]]:
    """Read some batches of a data set, as a ``DataLoader`` does."""
    dataset: Any = loads(pickled)
    several = getattr(dataset, "__getitems__", None) or (lambda rows: [dataset[i] for i in rows])
    return _joined([_pair(collate(several(rows))) for rows in batches])


def _pair(batch: Any) -> list[NDArray[Any]]:
    """Return a batch as arrays of samples and targets.

    Raises
    ------
    TypeError
        If it is anything else.
    """
    pair = [unwrapped(a) for a in batch] if isinstance(batch, tuple | list) else []
    if len(pair) != 2 or not all(isinstance(a, np.ndarray) and a.ndim for a in pair):
        raise TypeError(
            "Each batch must be a pair of arrays or tensors, samples and targets: pass a pair "
            "of whole arrays, or a DataLoader without a `collate_fn` that returns other types."
        )
    return pair


def _joined(pairs: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Return batches one after the other.

    Raises
    ------
    ValueError
        If they differ in shape.
    """
    for name, arrays in zip(("samples", "targets"), zip(*pairs, strict=True), strict=True):
        if len(shapes := {array.shape[1:] for array in arrays}) > 1:
            one, other, *_ = sorted(shapes)
            raise ValueError(
                f"The {name} of all batches must have the same shape, some are of shape {one} and "
                f"others of {other}: pad all of them to one length."
            )
    return [np.concatenate(arrays) for arrays in zip(*pairs, strict=True)]


def _has_end(batches: Any) -> bool:
    """Whether batches have a length, which iterators and streams of a ``DataLoader`` lack."""
    try:
        len(batches)
    except (TypeError, NotImplementedError):
        return False
    return True


def _in_order(batches: Iterable[Any]) -> Iterable[Any]:
    """Return the same ``DataLoader`` without shuffling; return anything else unchanged.

    The training shuffles the samples itself, with its seed. When it is resumed, it must find the
    samples in the same order. It has no smaller last batch that would have to be dropped, and a
    loader in this order would always drop the same samples.
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
        timeout=batches.timeout,
        worker_init_fn=batches.worker_init_fn,
        multiprocessing_context=batches.multiprocessing_context,
        generator=batches.generator,
    )
    return in_order
