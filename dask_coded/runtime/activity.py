"""What the rounds and trainings that a worker coordinates have done, for whoever asks.

Nothing here travels with a round. The scheduler asks for :meth:`Activity.told` when a client wants
a report, and while a page of the dashboard is open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any, Protocol

import numpy as np
from dask.typing import Key

from dask_coded.typing import Floats, Ints

# How much of a measured speed, or of the stripes of recent rounds, is that of the last round.
_SHARE = 0.1
# Arrays, trainings, and workers that have left, that are remembered; the oldest ones are dropped.
_MOST = 64


class Ended(Protocol):
    """A round that has ended, see :class:`dask_coded.runtime.coordinator.report.RoundReport`."""

    addresses: tuple[str, ...]
    stripes: Ints
    coordinator: str
    operand_bytes: int
    share_bytes: int

    @property
    def predicted(self) -> Floats: ...

    @property
    def work(self) -> Floats: ...

    @property
    def bound(self) -> float: ...

    def without_details(self) -> Ended: ...


@dataclass
class _Array:
    """The rounds of one array, and its products that were computed alone."""

    rounds: int = 0
    seconds: float = 0.0
    alone: int = 0
    alone_seconds: float = 0.0
    last_seconds: float = 0.0
    ended: float = 0.0
    last: Ended | None = None
    #: Of the workers of the last round, in its order; and of those of earlier ones.
    stripes: Ints = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int64))
    earlier: dict[str, Ints] = field(default_factory=dict)
    #: Of the same: stripes of recent rounds in which they have computed any, seconds for them; and
    #: stripes of all recent rounds.
    work: Floats = field(default_factory=lambda: np.zeros((3, 0)))

    def ended_round(self, report: Ended, seconds: float) -> None:
        self.rounds += 1
        self.seconds += seconds
        self.last_seconds, self.ended = seconds, monotonic()
        if self.last is None or self.last.addresses != report.addresses:
            self.earlier = _sums(self)
            _keep_last(self.earlier, _MOST + len(report.addresses))
            self.work = _moved(self, report.addresses)
            self.stripes = np.zeros_like(report.stripes)
        self.stripes += report.stripes
        # The workers that have computed anything: one that is slow, or has short bursts, takes part
        # in few rounds.
        fresh = report.work
        self.work[:2] *= np.where(fresh[0] > 0, 1 - _SHARE, 1.0)
        self.work[:2] += fresh
        self.work[2] *= 1 - _SHARE
        self.work[2] += report.stripes[0]
        self.last = report.without_details()


class Activity:
    """Counts what the rounds and training steps have done that one worker has coordinated.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._rounds = 0
        self._seconds = 0.0
        self._alone = 0
        self._alone_seconds = 0.0
        self._stripes: Ints = np.zeros(3, dtype=np.int64)
        self._operands = self._shares = 0  # bytes
        self._steps = 0
        self._step_seconds = 0.0
        self._arrays: dict[str, _Array] = {}
        self._trainings: dict[Key, dict[str, Any]] = {}

    def ended(self, array: str, report: Ended, seconds: float) -> None:
        """Record a round that has taken so many seconds."""
        with self._lock:
            self._rounds += 1
            self._seconds += seconds
            self._stripes += report.stripes.sum(axis=1)
            self._operands += report.operand_bytes
            self._shares += report.share_bytes
            self._array(array).ended_round(report, seconds)

    def alone(self, array: str, seconds: float) -> None:
        """Record a product that the coordinator has computed alone in so many seconds."""
        with self._lock:
            self._alone += 1
            self._alone_seconds += seconds
            found = self._array(array)
            found.alone += 1
            found.alone_seconds += seconds

    def _array(self, array: str) -> _Array:
        found = self._arrays.pop(array, _Array())
        self._arrays[array] = found
        _keep_last(self._arrays)
        return found

    def stepped(
        self,
        training: Key,
        step: int,
        seconds: float,
        workers: dict[str, float],
        units: int,
        moved: int,
    ) -> None:
        """Record a step of a training, and for how many seconds each worker has computed.

        Of a squeezed one, also into how many units it was cut, and how many of them moved.
        """
        with self._lock:
            self._steps += 1
            self._step_seconds += seconds
            self._trainings.pop(training, None)
            self._trainings[training] = {
                "step": step,
                "seconds": seconds,
                "workers": dict(workers),
                "units": units,
                "moved": moved,
                "ended": monotonic(),
            }
            _keep_last(self._trainings)

    def forget(self, array: str) -> None:
        """Drop an array that has gone; the totals stay."""
        with self._lock:
            self._arrays.pop(array, None)

    def told(self) -> dict[str, Any]:
        """Return all of it as plain numbers, texts, lists and dicts; trainings by their task's key.

        Of each worker: the stripes that it has computed, of these the moved and the wasted ones,
        its predicted and measured speed in stripes per second, and its share of the stripes, of
        recent rounds.
        """
        with self._lock:
            now = monotonic()
            stripes = zip(("computed", "moved", "wasted"), self._stripes.tolist(), strict=True)
            return {
                "totals": {
                    "rounds": self._rounds,
                    "seconds": self._seconds,
                    "alone": self._alone,
                    "alone_seconds": self._alone_seconds,
                    **dict(stripes),
                    "operand_bytes": self._operands,
                    "share_bytes": self._shares,
                    "steps": self._steps,
                    "step_seconds": self._step_seconds,
                },
                "arrays": {array: _told(found, now) for array, found in self._arrays.items()},
                "trainings": {
                    training: {**last, "age": now - last["ended"]}
                    for training, last in self._trainings.items()
                },
            }


def _moved(found: _Array, addresses: tuple[str, ...]) -> Floats:
    """Return the work of recent rounds in the order of the workers of a new one."""
    before = (
        {} if found.last is None else dict(zip(found.last.addresses, found.work.T, strict=True))
    )
    none = np.zeros(3)
    return np.array([before.get(address, none) for address in addresses]).reshape(-1, 3).T


def _sums(found: _Array) -> dict[str, Ints]:
    """Return the stripes of all workers, by address."""
    sums = dict(found.earlier)
    if found.last is not None:
        for worker, address in enumerate(found.last.addresses):
            sums[address] = sums.pop(address, 0) + found.stripes[:, worker]
    return sums


def _told(found: _Array, now: float) -> dict[str, Any]:
    alone = {"alone": found.alone, "alone_seconds": found.alone_seconds}
    if (last := found.last) is None:  # its rounds are forgotten, or another task has run them
        return {"rounds": 0, "seconds": 0.0, **alone, "age": now - found.ended, "workers": {}}
    unknown = math.nan
    stripes, seconds, computed = found.work
    measured = np.where(seconds > 0, stripes / np.where(seconds > 0, seconds, 1.0), unknown)
    shares = computed / max(computed.sum(), 1e-9)
    speeds = zip(last.predicted.tolist(), measured.tolist(), shares.tolist(), strict=True)
    known = dict(zip(last.addresses, speeds, strict=True))
    return {
        "rounds": found.rounds,
        "seconds": found.seconds,
        **alone,
        "last_seconds": found.last_seconds,
        "bound": last.bound,
        "coordinator": last.coordinator,
        "age": now - found.ended,
        "workers": {
            address: [*sums.tolist(), *known.get(address, (unknown,) * 3)]
            for address, sums in _sums(found).items()
        },
    }


def _keep_last(found: dict[Any, Any], most: int = _MOST) -> None:
    while len(found) > most:
        del found[next(iter(found))]
