"""Coded arrays that outlive their cluster: open one that was kept in files, and check its files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from distributed import Client

from dask_coded.arguments import check_workers
from dask_coded.array import CodedArray
from dask_coded.labels import Axis
from dask_coded.runtime.client.encoding import Encoded, new_id
from dask_coded.runtime.client.stored import open_stored
from dask_coded.runtime.client.waiting import current_client, outside_pool, while_connected
from dask_coded.storage import Location, StoreCondition, condition_of, read_description


def open(
    storage: Any, client: Client | None = None, *, workers: Sequence[str] | None = None
) -> CodedArray:
    """Open a coded array that was kept in files, on any cluster.

    Nothing is computed. Workers read the pieces, several each if there are fewer workers than
    pieces, and products wait for those that they need. A piece that is missing or differs from its
    checksums is made from the others and written again.

    Parameters
    ----------
    storage : str, path or Zarr store
        Where :func:`dask_coded.encode` has kept the array: a folder or address that all workers and
        this process can read.
    client : distributed.Client, optional
        The cluster; by default the current one.
    workers : sequence of str, optional
        Addresses of the workers that may hold pieces; by default all.

    Returns
    -------
    CodedArray, shape (rows, columns)
        With an asynchronous client, a coroutine that returns it.

    Raises
    ------
    FileNotFoundError
        If there is no array.
    StoreError
        If the store is half written, or its description is damaged. A ValueError.
    ClusterUnfitError
        If the cluster has no workers, or lacks this version of the package.
    ImportError
        If zarr is not installed, which the extra ``storage`` brings.

    Examples
    --------
    An array that one cluster has encoded is used on another one:

    >>> C = coded.encode(A, coded.MDS(12, 9), storage="/shared/A")  # doctest: +SKIP
    >>> C = coded.open("/shared/A", client=another)  # doctest: +SKIP
    """
    client = current_client(client)
    workers = check_workers(workers)
    location = Location.of(storage)

    async def run() -> CodedArray:
        description = await asyncio.to_thread(read_description, location)
        ids = {group: new_id() for group in description.arrays}
        others = {"matrix": ids.get("transposed"), "transposed": ids["matrix"]}
        opened: dict[str, Encoded] = {}
        try:
            for group, found in description.arrays.items():
                opened[group] = await open_stored(
                    client,
                    found,
                    description.code,
                    description.storage(location, group),
                    ids[group],
                    others[group],
                    workers,
                )
        except BaseException:
            for made in opened.values():
                made.release()
            raise
        first, second = (Axis(name) for name in description.names)
        return CodedArray(opened["matrix"], opened.get("transposed"), (first, second))

    with outside_pool():
        return client.sync(lambda: while_connected(client, run()))


def check(storage: Any) -> StoreCondition:
    """Read all pieces of a store in this process, and compare them with their checksums.

    Parameters
    ----------
    storage : str, path or Zarr store

    Returns
    -------
    StoreCondition
        Which pieces are whole, and whether they suffice. As a string it says so in sentences.

    Raises
    ------
    FileNotFoundError
        If there is no array.
    StoreError
        If the store is half written, or its description is damaged. A ValueError.
    OSError
        If no piece can be read, as without the permission.
    ImportError
        If zarr is not installed, which the extra ``storage`` brings.

    Examples
    --------
    >>> print(coded.check("/shared/A"))  # doctest: +SKIP
    /shared/A: 1000 x 20, float64, MDS(n=12, k=9), written by dask_coded 0.2.0
    12 of 12 pieces are whole.
    """
    return condition_of(Location.of(storage))
