"""What the rounds and trainings that a worker coordinates have done, for whoever asks.

Nothing here travels with a round. The scheduler asks for :meth:`Activity.told` when a client wants
a report, and while a page of the dashboard is open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import numpy as np

from dask_coded.typing import Floats, Ints

# Arrays, trainings, and workers that have left, that are remembered; the oldest ones are dropped.
_MOST = 64


class Ended(Protocol):
    """A round that has ended, see :class:`dask_coded.runtime.coordinator.report.RoundReport`."""

    addresses: tuple[str, ...]
    stripes: Ints
    coordinator: str

    @property
    def predicted(self) -> Floats: ...

    @property
    def measured(self) -> Floats: ...

    @property
    def bound(self) -> float: ...

    def without_details(self) -> Ended: ...


@dataclass
class _Array:
    """The rounds of one array."""

    rounds: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0
    ended: float = 0.0
    last: Ended | None = None
    #: Of the workers of the last round, in its order; and of those of earlier ones.
    stripes: Ints = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int64))
    earlier: dict[str, Ints] = field(default_factory=dict)
    #: The last measured speed of each worker, perhaps of an earlier round.
    measured: dict[str, float] = field(default_factory=dict)


class Activity:
    """Counts what the rounds and training steps have done that one worker has coordinated."""

    def __init__(self) -> None:
        self._rounds = 0
        self._seconds = 0.0
        self._stripes: Ints = np.zeros(3, dtype=np.int64)
        self._steps = 0
        self._step_seconds = 0.0
        self._arrays: dict[str, _Array] = {}
        self._trainings: dict[str, dict[str, Any]] = {}

    def ended(self, array: str, report: Ended, seconds: float) -> None:
        """Record a round that has taken so many seconds."""
        self._rounds += 1
        self._seconds += seconds
        self._stripes += report.stripes.sum(axis=1)
        found = self._arrays.pop(array, None) or _Array()
        self._arrays[array] = found
        found.rounds += 1
        found.seconds += seconds
        found.last_seconds, found.ended = seconds, monotonic()
        if found.last is None or found.last.addresses != report.addresses:
            found.earlier = _sums(found)
            _keep_last(found.earlier, _MOST + len(report.addresses))
            found.measured = {a: s for a, s in found.measured.items() if a in report.addresses}
            found.stripes = np.zeros_like(report.stripes)
        found.stripes += report.stripes
        measured = zip(report.addresses, report.measured.tolist(), strict=True)
        found.measured |= {address: speed for address, speed in measured if speed > 0}
        found.last = report.without_details()
        _keep_last(self._arrays)

    def stepped(self, training: str, step: int, seconds: float, workers: dict[str, float]) -> None:
        """Record a step of a training, and for how many seconds each worker has computed.

        Called from the thread of the training's leader.
        """
        self._steps += 1
        self._step_seconds += seconds
        self._trainings.pop(training, None)
        self._trainings[training] = {
            "step": step,
            "seconds": seconds,
            "workers": dict(workers),
            "ended": monotonic(),
        }
        _keep_last(self._trainings)

    def forget(self, array: str) -> None:
        """Drop an array that has gone; the totals stay."""
        self._arrays.pop(array, None)

    def told(self) -> dict[str, Any]:
        """Return all of it as plain numbers, texts, lists and dicts.

        Of each worker: the stripes that it has computed, of these the moved and the wasted ones,
        and its predicted and measured speed, in stripes per second: the last that are known.
        """
        now = monotonic()
        return {
            "totals": {
                "rounds": self._rounds,
                "seconds": self._seconds,
                **dict(zip(("computed", "moved", "wasted"), self._stripes.tolist(), strict=True)),
                "steps": self._steps,
                "step_seconds": self._step_seconds,
            },
            "arrays": {array: _told(found, now) for array, found in self._arrays.items()},
            "trainings": {
                training: {**last, "age": now - last["ended"]}
                for training, last in tuple(self._trainings.items())
            },
        }


def _sums(found: _Array) -> dict[str, Ints]:
    """Return the stripes of all workers, by address."""
    sums = dict(found.earlier)
    if found.last is not None:
        for worker, address in enumerate(found.last.addresses):
            sums[address] = sums.pop(address, 0) + found.stripes[:, worker]
    return sums


def _told(found: _Array, now: float) -> dict[str, Any]:
    last, unknown = found.last, math.nan
    assert last is not None
    predicted = dict(zip(last.addresses, last.predicted.tolist(), strict=True))
    return {
        "rounds": found.rounds,
        "seconds": found.seconds,
        "last_seconds": found.last_seconds,
        "bound": last.bound,
        "coordinator": last.coordinator,
        "age": now - found.ended,
        "workers": {
            address: [
                *stripes.tolist(),
                predicted.get(address, unknown),
                found.measured.get(address, unknown),
            ]
            for address, stripes in _sums(found).items()
        },
    }


def _keep_last(found: dict[str, Any], most: int = _MOST) -> None:
    while len(found) > most:
        del found[next(iter(found))]
