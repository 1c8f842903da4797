"""What rounds and trainings have done, for reports, the dashboard and metrics.

Workers that coordinate count what is done, see :mod:`dask_coded.runtime.activity`. The scheduler
asks them for it when a client wants a report, and once a second while a page of the dashboard is
open or metrics are read. Otherwise nothing travels.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

from dask_coded.config import timeouts
from dask_coded.membership import Timeouts
from dask_coded.runtime.scheduler.arrays import ArrayDirectory
from dask_coded.runtime.scheduler.homes import Homes
from dask_coded.runtime.spec import NAME, as_key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

#: What each worker tells of its stripes and speeds, in this order.
STRIPES, SPEEDS, SHARE = ("computed", "moved", "wasted"), ("predicted", "measured"), "share"
_COUNTS = ("rounds", "seconds", "alone", "alone_seconds")
BYTES = ("operand_bytes", "share_bytes")
_TOTALS = (*_COUNTS, *STRIPES, *BYTES, "steps", "step_seconds")
_OF_TRAININGS = ("step", "seconds", "workers", "units", "moved")
#: So many coordinators that have left are shown with all that they know of others. More would only
#: lengthen the page: with two thousand it took 32 ms of the scheduler's loop.
_GONE = 16
#: What all earlier ones have told, as if they were one.
_EARLIER = "earlier"

logger = logging.getLogger("distributed.dask_coded")


class Observer:
    """Gathers what coordinators count, and says it together with what the scheduler knows.

    Parameters
    ----------
    scheduler : Scheduler
    able : container of str
        Addresses of workers that have the plugin.
    suspects : collection of str
        Those that are silent.
    arrays : ArrayDirectory
    homes : Homes
    keeping : callable() -> set of str
        Returns the workers that keep states of loops.

    Attributes
    ----------
    events : Counter
        How often each action was logged in the topic of the package, and workers that were
        ``lost``: they have left without being retired.
    asked : int
        How often coordinators were asked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        able: Container[str],
        suspects: Collection[str],
        arrays: ArrayDirectory,
        homes: Homes,
        keeping: Callable[[], set[str]],
    ) -> None:
        self._scheduler = scheduler
        self._able = able
        self._suspects = suspects
        self._arrays = arrays
        self._homes = homes
        self._keeping = keeping
        self.events: Counter[str] = Counter()
        self.asked = 0
        #: The last task of each worker that has coordinated since it was last asked.
        self._tasks: dict[str, Key] = {}
        #: What each worker told last; and the totals of workers that have left.
        self._told: dict[str, dict[str, Any]] = {}
        self._left: Counter[str] = Counter()
        #: Names of workers by address, also of those that have left.
        self._names: dict[str, str] = {}
        self._wanted = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._timer = PeriodicCallback(self._look, 1000 * Timeouts.WATCH)
        scheduler.periodic_callbacks[f"{NAME}-observer"] = self._timer
        scheduler.handlers["coded_report"] = self.report

    # -- what happens --------------------------------------------------------------------------

    def coordinates(self, key: Key) -> None:
        """Record that a task coordinates: its worker will have something to tell."""
        if (ts := self._scheduler.tasks.get(as_key(key))) and ts.processing_on:
            self._tasks[ts.processing_on.address] = ts.key

    def logged(self, action: str) -> None:
        """Count an event of the package's topic."""
        self.events[action] += 1

    def lost(self, address: str) -> None:
        """Count a worker that is about to leave the cluster without being retired."""
        if address in self._able:
            self.events["lost"] += 1

    def remove_worker(self, address: str) -> None:
        """Keep what a worker has told that has left, without its numbers for all arrays."""
        self._tasks.pop(address, None)
        if told := self._told.get(address):
            self._left.update(told.pop("totals", {}))

    # -- asking --------------------------------------------------------------------------------

    def want(self) -> None:
        """Ask coordinators from now on, for about a minute."""
        self._wanted = monotonic()
        # The process's registry of metrics may be read in any thread; the timer is the loop's.
        self._scheduler.loop.add_callback(self._begin)

    def _begin(self) -> None:
        if not self._timer.is_running():
            self._timer.start()

    def _look(self) -> None:
        if monotonic() > self._wanted + Timeouts.WATCHED:
            self._timer.stop()
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self.refresh())

    async def refresh(self) -> None:
        """Ask the workers of all tasks that have coordinated since they were asked."""
        asked = dict(self._tasks)
        # What has ended is counted in this answer; what runs has more to tell later.
        ended = {address for address, key in asked.items() if not self._runs(address, key)}
        answers = await asyncio.gather(*map(self._ask, asked), return_exceptions=True)
        for (address, key), answer in zip(asked.items(), answers, strict=True):
            if isinstance(answer, Exception):
                logger.warning("Worker %s cannot say what it has done: %r", address, answer)
            elif answer and address in ended and self._tasks.get(address) == key:
                del self._tasks[address]
        for address in [a for a, told in self._told.items() if not self._lives(a, told)]:
            del self._told[address]
        self._fold()
        kept = self._scheduler.workers.keys() | self._told.keys()
        # Those that are gone are shown as long as a coordinator knows what they have computed.
        kept |= {
            worker
            for told in self._told.values()
            for array in told["arrays"].values()
            for worker in array["workers"]
        }
        self._names = {address: name for address, name in self._names.items() if address in kept}
        self.asked += 1

    def _fold(self) -> None:
        """Keep what all but the last coordinators that have left told as that of one.

        Of workers that have left, too, it says nothing then: on some clusters they always do.
        """
        there = self._scheduler.workers
        gone = [address for address in self._told if address not in there and address != _EARLIER]
        for address in gone[:-_GONE]:
            told, found = self._told.pop(address), self._told.setdefault(_EARLIER, _nothing())
            for array, each in told["arrays"].items():
                if array in self._arrays:
                    known = found["arrays"].get(array)
                    found["arrays"][array] = each if known is None else _sum(known, each)
        if earlier := self._told.get(_EARLIER):
            arrays = {a: each for a, each in earlier["arrays"].items() if a in self._arrays}
            for each in arrays.values():
                each["workers"] = {a: row for a, row in each["workers"].items() if a in there}
            earlier["arrays"] = arrays

    def _lives(self, address: str, told: dict[str, Any]) -> bool:
        return address in self._scheduler.workers or any(a in self._arrays for a in told["arrays"])

    async def _ask(self, address: str) -> bool:
        """Ask a worker, and return whether it has answered."""
        if address not in self._able or address in self._suspects:
            return False
        with suppress(OSError):  # among them TimeoutError
            async with asyncio.timeout(timeouts().answer):
                told = await self._scheduler.rpc(address).coded_activity()
            now = monotonic()
            for each in (*told["arrays"].values(), *told["trainings"].values()):
                each["at"] = now - each.pop("age")
            if address in self._scheduler.workers:
                self._told[address] = told
            return True
        return False

    # -- saying --------------------------------------------------------------------------------

    def totals(self) -> dict[str, float]:
        """Return numbers and seconds of rounds, products alone and steps, stripes, and bytes."""
        sums = self._left.copy()
        for told in self._told.values():
            sums.update(told.get("totals", {}))
        return {name: sums[name] for name in _TOTALS}

    async def report(self, arrays: Sequence[str] | None = None) -> dict[str, Any]:
        """Handler: return the :meth:`overview` of some arrays, or of all, as it is now."""
        await self.refresh()
        return self.overview(arrays)

    def overview(self, arrays: Sequence[str] | None = None) -> dict[str, Any]:
        """Return what is known of the rounds of some arrays, or of all, as it was told last.

        Returns
        -------
        dict
            ``rounds``, ``seconds`` in all; ``alone``, ``alone_seconds`` of products that
            coordinators have computed alone; ``last_seconds``, ``bound``, ``coordinator`` of the
            last round; ``events``, how often each action was logged; ``workers``, a dict for each;
            ``trainings``, a dict for each; ``lost``, those of the arrays that do not exist.
        """
        wanted = dict.fromkeys(self._arrays if arrays is None else arrays)
        rounds = sorted(
            (each for told in self._told.values() for a, each in told["arrays"].items()
             if a in wanted and a in self._arrays),
            key=lambda each: each["at"],
        )  # fmt: skip
        last: dict[str, Any] = next((each for each in reversed(rounds) if each["rounds"]), {})
        workers = {address: self._worker(ws) for address, ws in self._scheduler.workers.items()}
        for array in wanted:
            if state := self._arrays.get(array):
                for key in state.spec.keys:
                    if (holder := self._homes.holder_of(key)) in workers:
                        workers[holder]["pieces"] += 1
                        workers[holder]["nbytes"] += self._scheduler.tasks[key].get_nbytes()
        for address in self._keeping() & workers.keys():
            workers[address]["keeps"] = True
        for each in rounds:
            for address, (*stripes, predicted, measured, share) in each["workers"].items():
                if (row := workers.get(address)) is None:
                    name = self._names.get(address, address)
                    row = workers[address] = _row(name, address, "gone")
                for name, number in zip(STRIPES, stripes, strict=True):
                    row[name] += number
                for name, speed in zip((*SPEEDS, SHARE), (predicted, measured, share), strict=True):
                    if not math.isnan(speed):  # a later round may have measured it
                        row[name] = speed
        return {
            **{name: sum(each[name] for each in rounds) for name in _COUNTS},
            "last_seconds": last.get("last_seconds", math.nan),
            "bound": last.get("bound", math.nan),
            "coordinator": last.get("coordinator", ""),
            "events": dict(self.events),
            "workers": list(workers.values()),
            "trainings": [
                {"task": str(key), **{name: each[name] for name in _OF_TRAININGS}}
                for told in self._told.values()
                for key, each in told["trainings"].items()
                if (ts := self._scheduler.tasks.get(key)) and ts.processing_on
            ],
            "lost": [array for array in wanted if array not in self._arrays],
        }

    def _worker(self, ws: WorkerState) -> dict[str, Any]:
        standing = "alive"
        if ws.address in self._suspects:
            standing = "silent"
        elif ws.address not in self._able:
            standing = "unprepared"
        elif ws.status != Status.running:
            standing = ws.status.name
        name = self._names[ws.address] = str(ws.name)
        row = _row(name, ws.address, standing)
        key = self._tasks.get(ws.address)
        row["coordinates"] = key is not None and self._runs(ws.address, key)
        return row

    def _runs(self, address: str, key: Key) -> bool:
        ts = self._scheduler.tasks.get(key)
        return ts is not None and ts.processing_on is self._scheduler.workers.get(address, self)


def _nothing() -> dict[str, Any]:
    return {"arrays": {}, "trainings": {}}


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what two coordinators have told of an array as that of one."""
    # Products alone have no last round.
    earlier, later = sorted((one, other), key=lambda each: (each["rounds"] > 0, each["at"]))
    workers = dict(earlier["workers"])
    for address, row in later["workers"].items():
        known = workers.get(address, row)
        count = len(STRIPES) if address in workers else 0
        sums = [a + b for a, b in zip(known[:count], row, strict=False)]
        speeds = [
            old if math.isnan(new) else new
            for old, new in zip(known[len(sums) :], row[len(sums) :], strict=True)
        ]
        workers[address] = (*sums, *speeds)
    counts = {name: earlier[name] + later[name] for name in _COUNTS}
    return {**later, **counts, "workers": workers}


def _row(name: str, address: str, standing: str) -> dict[str, Any]:
    return {
        "name": name,
        "address": address,
        "standing": standing,
        "coordinates": False,
        "keeps": False,
        "pieces": 0,
        "nbytes": 0,
        **dict.fromkeys((SHARE, *SPEEDS), math.nan),
        **dict.fromkeys(STRIPES, 0),
    }
