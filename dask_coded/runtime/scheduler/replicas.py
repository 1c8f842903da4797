"""Keeps each piece on its own worker while Dask moves and copies data.

A task that uses pieces, such as the one that makes the result of ``C.compute()``, leaves copies of
them on its worker, and Dask's active memory manager may drop the originals instead. It also moves
the data of a worker that retires to any other one. In both cases one worker would hold several
pieces, and the code could survive fewer losses.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed import Status
from distributed.active_memory_manager import (
    ActiveMemoryManagerExtension,
    ActiveMemoryManagerPolicy,
    ReduceReplicas,
    Suggestion,
    SuggestionGenerator,
)

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: The pieces in memory, each with the worker that it belongs to.
Homes = Callable[[], Iterable[tuple["TaskState", "WorkerState"]]]

# Seconds between two looks at all pieces.
_INTERVAL = 2.0


class PiecesAtHome(ActiveMemoryManagerPolicy):
    """Copies each piece to the worker that it belongs to, then drops the other copies.

    Parameters
    ----------
    rescue : callable()
        Called before.
    homes : callable() -> iterable of (TaskState, WorkerState)
    """

    __slots__ = ("_homes", "_rescue")

    def __init__(self, rescue: Callable[[], None], homes: Homes) -> None:
        self._rescue = rescue
        self._homes = homes

    def run(self) -> SuggestionGenerator:
        self._rescue()
        for ts, home in self._homes():
            holders = ts.who_has or set()
            if home not in holders:
                yield Suggestion("replicate", ts, {home})
            elif not ts.waiters and home.status == Status.running:
                # The copies of what a worker has that is about to close are made on purpose.
                for ws in holders - {home}:
                    yield Suggestion("drop", ts, {ws})


class ReduceOtherReplicas(ReduceReplicas):
    """Dask's policy for superfluous copies, for all data but pieces.

    Parameters
    ----------
    pieces : container of Key
    """

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Container[Key]) -> None:
        self._pieces = pieces

    def run(self) -> SuggestionGenerator:
        for suggestion in super().run():
            if suggestion.ts.key not in self._pieces:
                yield suggestion


def keep_home(
    scheduler: Scheduler, rescue: Callable[[], None], homes: Homes, pieces: Container[Key]
) -> Callable[[], None]:
    """Keep pieces at home from now on; return a function that looks after them at once.

    Parameters
    ----------
    scheduler : Scheduler
    rescue : callable()
        Gives pieces that are not in memory another home if need be.
    homes : callable() -> iterable of (TaskState, WorkerState)
    pieces : container of Key
    """
    shared: Any = scheduler.extensions.get("amm")
    if isinstance(shared, ActiveMemoryManagerExtension):
        for policy in list(shared.policies):
            if type(policy) is ReduceReplicas:
                shared.policies.remove(policy)
                shared.add_policy(ReduceOtherReplicas(pieces))
    own = ActiveMemoryManagerExtension(
        scheduler, {PiecesAtHome(rescue, homes)}, register=False, start=True, interval=_INTERVAL
    )
    due = False

    def run() -> None:
        nonlocal due
        due = False
        own.run_once()

    def soon() -> None:
        nonlocal due
        if not due:  # many pieces move together
            due = True
            scheduler.loop.add_callback(run)

    return soon
