"""The choice of a code for the workers that a cluster has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dask
from distributed import Client

from dask_coded.arguments import check_redundancy, check_whole
from dask_coded.codes import CODES, MDS, Code, Polynomial, RandomLinear, Repetition
from dask_coded.runtime.client.source import is_long, sparse_type
from dask_coded.runtime.client.waiting import in_task


@dataclass(frozen=True)
class Choice:
    """What a user says about the code of an array, instead of a code.

    Parameters
    ----------
    redundancy : int or None
        How many workers may be lost; None to choose it.
    workers : sequence of str or None
        Addresses of the workers that may hold pieces; None for all.
    minimum_workers : int or None
        Wait for so many workers.
    warn : callable(message)
        Called if a code is chosen for a cluster that may be incomplete.

    Raises
    ------
    TypeError
        If workers are named, and others are to be waited for.
    ValueError
        If the minimum is no whole number of at least 1.
    """

    redundancy: int | None
    workers: Sequence[str] | None
    minimum_workers: int | None
    warn: Callable[[str], None]
    #: Whether a task chooses, which does not know what its user has planned.
    in_task: bool = field(default_factory=in_task)

    def __post_init__(self) -> None:
        if self.minimum_workers is None:
            return
        check_whole("minimum_workers", self.minimum_workers)
        if self.workers is not None:
            raise TypeError(
                "Pass either 'workers' or 'minimum_workers', not both: only the workers that are "
                "named would get pieces, however many there are."
            )

    async def complete(self, client: Client) -> None:
        """Wait for workers, on the client's event loop."""
        if self.minimum_workers is not None:
            waiting: Any = client.wait_for_workers  # on the event loop it returns a coroutine
            await waiting(self.minimum_workers)

    async def code(self, client: Client, source: Any, name: str | None, transpose: bool) -> Code:
        """Choose the code of a matrix, of the kind that is named or that suits the matrix."""
        n, redundancy = await self._size(client)
        if name is None:
            # Decoding is in double precision.
            longer = is_long(source.dtype)
            plain = sparse_type(source) or source.dtype.kind in "biu" or longer
            kind: type[Code] = Repetition if plain else MDS
        elif isinstance(name, str) and name in CODES:
            kind = CODES[name]
        else:
            raise ValueError(
                f"Argument 'code' must be a Code or one of {sorted(CODES)}, it is {name!r}."
            )
        if self.redundancy is None:
            # A copy of all data costs as much as the data, so there is one for any n. RandomLinear
            # has two parity pieces for each loss.
            most = {Repetition: 1, RandomLinear: (n - 1) // 2}
            redundancy = min(redundancy, most.get(kind, redundancy))
        # In a thread, as for pairs below: large codes take a second.
        code = await asyncio.to_thread(kind.with_redundancy, n, redundancy)
        rows = min(source.shape) if transpose else source.shape[0]
        if code.k > rows:  # Dask's functions do not expect chunks without rows
            fewer = max(n - (code.k - rows), redundancy + 1)
            code = await asyncio.to_thread(kind.with_redundancy, fewer, redundancy)
        self._tell(client, code, n)
        return code

    async def pair_code(self, client: Client, shape: tuple[int, int]) -> Polynomial:
        """Choose the code of two factors with so many columns."""
        n, redundancy = await self._size(client)
        build = Polynomial.accurate if self.redundancy is None else Polynomial.with_redundancy
        # In a thread: for a thousand workers it takes a second.
        code = await asyncio.to_thread(build, n, redundancy, shape)
        self._tell(client, code, n)
        return code

    async def _size(self, client: Client) -> tuple[int, int]:
        """Return how many workers may hold pieces, and how many of them may be lost."""
        scheduler: Any = client.scheduler
        # Paused and retiring workers take no pieces.
        n = len(self.workers or await scheduler.ncores_running())
        if not n:
            raise ValueError(
                "The cluster has no running workers yet: call `client.wait_for_workers(n)`, or "
                "pass `minimum_workers=n`."
            )
        if self.redundancy is not None:
            return n, check_redundancy(self.redundancy, n)
        share = dask.config.get("coded.redundancy")
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(
                f"`coded.redundancy` in Dask's configuration must be a fraction of the workers, "
                f"from 0 to below 1, it is {share!r}."
            )
        # At least one worker may be lost, and at least one is left.
        return n, min(max(1, round(n * share)), n - 1)

    def _tell(self, client: Client, code: Code | Polynomial, n: int) -> None:
        """Warn if a code is what a cluster would get that has not grown to its size yet."""
        if self.redundancy is not None or self.workers is not None or self.minimum_workers:
            return
        running = f"{n} worker is" if n == 1 else f"{n} workers are"
        planned = len(getattr(client.cluster, "plan", ()))
        if planned > n:
            found = f"is for the {n} of {planned} workers that are running"
        elif code.tolerance == 0:
            found = f"survives the loss of no worker, because only {running} running"
        elif n == 2 and not isinstance(code, Repetition) and not (planned or self.in_task):
            found = f"stores the matrix twice, because only {running} running"
        else:
            return
        self.warn(
            f"The code that was chosen, {code!r}, {found}. If more are coming, call "
            "`client.wait_for_workers(n)` and encode again, or pass `minimum_workers=n` to "
            f"`encode`; if not, pass `redundancy={code.tolerance}` to it."
        )
