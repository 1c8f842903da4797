"""What the scheduler and the workers are asked; a client sends these functions to them.

Nothing stays: no plugin is installed, and what a worker offers others to read is gone after a
while by itself, also if the client is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from distributed.comm import connect

from dask_coded.membership import Timeouts
from dask_coded.runtime.scheduler.plugin import CodedSchedulerPlugin
from dask_coded.runtime.spec import NAME
from dask_coded.runtime.worker.probe import Probe
from dask_coded.training.runtime.memberships import NAME as TRAINING
from dask_coded.transport.memory import Segment, is_readable

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler
    from distributed.worker import Worker

_PLUGINS = {"rounds": NAME, "training": TRAINING}
# A product is measured for so many seconds, with pauses, and the fastest counts: others may be
# measured on the same core.
_MEASURED, _PAUSE = 0.6, 0.05
# Round trips of which the fastest counts.
_TRIPS = 5


def plugins(extensions: Mapping[str, Any]) -> list[str]:
    """Return which of the package's plugins a scheduler or a worker has."""
    return [name for name, key in _PLUGINS.items() if key in extensions]


def on_scheduler(dask_scheduler: Scheduler) -> dict[str, Any]:
    """Return what the scheduler knows: its plugins, refusals, and speeds of workers in rounds."""
    found: dict[str, Any] = {"plugins": plugins(dask_scheduler.extensions)}
    coded = dask_scheduler.extensions.get(NAME)
    if isinstance(coded, CodedSchedulerPlugin):
        # In short rounds latency counts, and no speed can be told from it.
        longer = [s for s in coded.arrays.values() if s.seconds >= Timeouts.PLANS]
        measured = {address for state in longer for address in state.planned}
        known = [address for address in dask_scheduler.workers if address in measured]
        speeds = coded.speeds.predict(known)
        if len(known) and speeds.max() > 0:
            speeds = speeds / speeds.max()
        found["speeds"] = dict(zip(known, speeds.tolist(), strict=True))
        found["refused"] = dict(coded.refused)
    return found


async def on_worker(offer_seconds: float, dask_worker: Worker) -> dict[str, Any]:
    """Return what a worker knows of itself: plugins, memory that others may read, speed.

    The memory is offered for so many seconds.
    """
    wanted = bool(dask.config.get("coded.shared-memory"))
    place = None
    if wanted:
        try:
            segment = Segment(1)
        except (AttributeError, OSError):  # the system has no such memory, or refuses
            pass
        else:
            place = tuple(segment.place(segment.array(np.dtype(np.uint8), (1,))))
            asyncio.get_running_loop().call_later(offer_seconds, segment.close)
    with ThreadPoolExecutor(1, thread_name_prefix="Coded-check") as thread:
        probe = Probe(thread)
        began, product = perf_counter(), await probe.start()
        while perf_counter() - began < _MEASURED:
            await asyncio.sleep(_PAUSE)
            product = min(product, await probe.start())
    return {
        "plugins": plugins(dask_worker.extensions),
        "wanted": wanted,
        "place": place,
        "product": product,
    }


async def towards(
    peers: Sequence[str], places: Mapping[str, Any], timeout: float, dask_worker: Worker
) -> dict[str, Any]:
    """Connect to some workers, and try to read memory that some offer.

    Returns
    -------
    dict
        ``links``: by address, seconds of a round trip or an error. ``readable``: by address.
    """
    trips = await asyncio.gather(*(_connected(peer, timeout, dask_worker) for peer in peers))
    links: dict[str, float | str] = {}
    for peer, comm in zip(peers, trips, strict=True):  # one by one, so that they do not interfere
        links[peer] = comm if isinstance(comm, str) else await _round_trip(comm, timeout)
    return {
        "links": links,
        "readable": {address: is_readable(place) for address, place in places.items()},
    }


async def _connected(address: str, timeout: float, worker: Worker) -> Any:
    """Return a connection, or what Dask says instead."""
    try:
        async with asyncio.timeout(timeout):
            # Dask tries again until its own timeout, and then says why. Once it is connected,
            # what listens there may say nothing.
            return await connect(address, timeout=timeout / 2, **worker.connection_args)
    except OSError as error:
        return _cause(error)


async def _round_trip(comm: Any, timeout: float) -> float | str:
    """Return the seconds of a round trip, or why there was no answer; close the connection."""
    try:
        async with asyncio.timeout(timeout):
            trips = [await _echo(comm) for _ in range(_TRIPS)]
            await comm.write({"op": "close", "reply": False})
    except OSError as error:
        return _cause(error)
    finally:
        comm.abort()
    return min(trips)


async def _echo(comm: Any) -> float:
    began = perf_counter()
    await comm.write({"op": "echo", "data": 0, "reply": True})
    await comm.read()
    return perf_counter() - began


def _cause(error: BaseException) -> str:
    """Return the innermost cause, because Dask's own message is long and the same for all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or "no answer"
