"""What the scheduler knows of one coded array."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from dask.typing import Key
from distributed.metrics import time

from dask_coded.membership import Timeouts
from dask_coded.rounds.footprint import Footprint
from dask_coded.rounds.rebuilding import RoundingErrors
from dask_coded.rounds.scaling import Exponents
from dask_coded.runtime.spec import CodedSpec
from dask_coded.storage import Storage
from dask_coded.typing import Floats

# Requests that may wait for the pieces of one array at the scheduler; others ask again. Each holds
# a connection, of which a scheduler often has a thousand for everything.
_WAITING = 16
RELEASED = (
    "The scheduler has no such coded array any more: it was released, as it is when its client "
    "closes or nothing holds it any more, or the cluster was restarted. Encode it again."
)


@dataclass
class ArrayState:
    """What the scheduler knows of one coded array."""

    spec: CodedSpec
    #: While the array is being encoded, keys of the source blocks, then those of their steps.
    sources: tuple[Key, ...] | None
    #: The client that encodes it.
    client: str
    work: Floats | None = None
    #: Bytes that workers have fetched from each other to make pieces.
    received: int = 0
    #: Exponents of the rows of source blocks, and those of their typical entries, as far as they
    #: have been reported: shape (2, rows).
    exponents: dict[int, Exponents] = field(default_factory=dict)
    #: Sums of squares of the columns of each source block that has been reported; with many
    #: columns, of all of them under 0.
    squares: dict[int, Floats] = field(default_factory=dict)
    squared: set[int] = field(default_factory=set)
    #: Footprints of source blocks, as far as they have been reported.
    footprints: dict[int, Footprint] = field(default_factory=dict)
    #: Of its pieces, and so of what their shares are verified by.
    errors: RoundingErrors = field(init=False)
    #: Whether it was said that a piece has lost half of its digits.
    inexact: bool = False
    #: Blocks whose checks were wrong, each with the worker that held the check.
    wrong_checks: set[tuple[int, str]] = field(default_factory=set)
    #: Keys of pieces that a client or a task still wants.
    alive: set[Key] = field(default_factory=set)
    #: When clients were told to have pieces of an extension made.
    promised: dict[Key, float] = field(default_factory=dict)
    #: Whether no worker holds more pieces than it should, as it was found when one joined.
    even: bool = False
    #: The workers that the user named for it; None for all.
    allowed: set[str] | None = None

    #: Where its pieces are kept; None for an array that lives in workers alone.
    storage: Storage | None = None
    #: Pieces whose copies in the store were damaged when they were last read.
    damaged: set[int] = field(default_factory=set)
    #: Pieces that a worker may not read from the store, each with the reason.
    refused: dict[int, str] = field(default_factory=dict)
    #: How many workers in succession were lost while they made a piece.
    losses: Counter[int] = field(default_factory=Counter)
    #: When it was encoded, or a round was last planned.
    used: float = field(default_factory=time)
    #: The workers that its last round was planned over.
    planned: Sequence[str] = ()
    #: How many seconds the last rounds took of which speeds were measured.
    seconds: float = math.nan
    #: Whether it has just been opened, so that blocks are read before parity.
    opening: bool = False

    #: Until when products wait for checks of blocks, of an array that was opened.
    checks_due: float = -math.inf
    #: Is set when a piece or a check is made.
    arrival: asyncio.Event = field(default_factory=asyncio.Event)
    #: How many requests wait for pieces.
    waiting: int = 0

    def __post_init__(self) -> None:
        dtype = self.spec.dtype if self.spec.dtype.kind in "fc" else np.dtype(float)
        self.errors = RoundingErrors(self.spec.code, dtype)

    async def arrived(self, enough: Callable[[], bool]) -> bool:
        """Wait until enough is made, but not for long; return whether it has waited.

        It does not if many requests wait already: each occupies a connection.
        """
        if self.waiting == _WAITING:
            return False
        self.waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(Timeouts.LOOK):
                    while not enough():
                        self.arrival.clear()
                        await self.arrival.wait()
        finally:
            self.waiting -= 1
        return True

    def is_stored(self, piece: int) -> bool:
        """Whether a piece can be read from a store, as far as is known."""
        storage = self.storage
        stored = storage is not None and self.sources is None and piece < storage.pieces
        return stored and piece not in self.damaged and piece not in self.refused

    def lost_message(self, held: int) -> str:
        """Say that the pieces that are left do not suffice."""
        code = self.spec.code
        if self.storage is not None and self.sources is None:
            if self.refused:
                return (
                    f"Workers may not read pieces {sorted(self.refused)} of the {code.pieces} of "
                    f"{code!r} from the store {self.storage.location} "
                    f"({next(iter(self.refused.values()))}), and the others do not suffice to make "
                    "them again: let all workers read it, then open it again."
                )
            if not self.damaged:
                return (
                    f"Workers cannot read the pieces of {code!r} from the store "
                    f"{self.storage.location}: their logs say why."
                )
            return (
                f"Pieces {sorted(self.damaged)} of the {code.pieces} of {code!r} in the store "
                f"{self.storage.location} are damaged or missing, and the others do not suffice to "
                "make them again: encode the array again."
            )
        return (
            f"{code!r} can lose {code.tolerance} of its workers; {held} of its {code.pieces} "
            f"pieces are left, which do not suffice: encode the array again, with `storage=` to "
            f"keep its pieces in files, or with more redundancy, if workers come and go."
        )
