"""Rows of an array on another worker, fetched straight from it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import dask
from dask.utils import parse_timedelta

if TYPE_CHECKING:
    from distributed.worker import Worker


class RowsGoneError(Exception):
    """A worker does not answer, or no longer holds the array.

    Attributes
    ----------
    address : str
    silent : bool
        Whether it did not answer in time. It may be stopped, so do not ask it again.
    """

    def __init__(self, address: str, silent: bool) -> None:
        super().__init__(address)
        self.address = address
        self.silent = silent


async def rows_of(worker: Worker, address: str, key: Any, start: int, stop: int) -> Any:
    """Fetch the rows ``start … stop - 1`` of an array or a sparse matrix on another worker.

    Raises
    ------
    RowsGoneError
        If the worker no longer holds it, or does not answer within ``coded.encode.timeout``.
    """
    timeout = parse_timedelta(dask.config.get("coded.encode.timeout"))
    asked = worker.rpc(address).coded_rows(key=key, start=start, stop=stop)
    try:
        rows = (await asyncio.wait_for(asked, timeout))["rows"]
    except OSError as exc:  # a TimeoutError is one, too
        raise RowsGoneError(address, isinstance(exc, TimeoutError)) from exc
    if rows is None:
        raise RowsGoneError(address, silent=False)
    return rows
