"""Waiting between attempts."""

from __future__ import annotations

import asyncio

from dask_coded.membership import Timeouts


class Backoff:
    """Waits between attempts, each time twice as long, from 10 ms up to half a second.

    Attributes
    ----------
    attempts : int
        How often it has waited.

    Examples
    --------
    >>> backoff = Backoff()
    >>> asyncio.run(backoff.wait())
    >>> backoff.attempts
    1
    """

    def __init__(self) -> None:
        self.attempts = 0
        self._seconds = Timeouts.FIRST_LOOK

    async def wait(self) -> None:
        await asyncio.sleep(self._seconds)
        self.attempts += 1
        self._seconds = min(2 * self._seconds, Timeouts.LOOK)
