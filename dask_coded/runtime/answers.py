"""The scheduler plugin's answers to workers and clients: one frozen dataclass each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key
from distributed.protocol.serialize import ToPickle

from dask_coded.rounds import Layout, StripeRange
from dask_coded.runtime.spec import CodedSpec
from dask_coded.storage import Storage
from dask_coded.typing import Floats


@dataclass(frozen=True)
class Lost:
    """What was asked for is no longer available; the message says why and what to do."""

    message: str


@dataclass(frozen=True)
class Unfit:
    """The cluster cannot do what was asked for; the message says why and what to do."""

    message: str


@dataclass(frozen=True)
class Fit:
    """Workers can take part, or may come."""


@dataclass(frozen=True)
class Waiting:
    """What was asked for is being made: ask again.

    Parameters
    ----------
    waited : bool
        Whether the scheduler has waited for it before it answered.
    """

    waited: bool = False


@dataclass(frozen=True)
class Over:
    """The run of the task that asks is over: there is a later one, or it was cancelled."""


@dataclass(frozen=True)
class Placed:
    """Where the pieces of a new array go.

    Parameters
    ----------
    workers : tuple of str
        The address for each piece.
    """

    workers: tuple[str, ...]


@dataclass(frozen=True)
class Extended:
    """An array has new pieces, which are to be made.

    Parameters
    ----------
    spec : CodedSpec
        With the new pieces.
    pieces : tuple of int
        The new ones.
    workers : tuple of str
        The address for each of them.
    """

    spec: CodedSpec
    pieces: tuple[int, ...]
    workers: tuple[str, ...]


class Source(NamedTuple):
    """A part of a piece: ``piece[at : at + rows] += weight * data[start : start + rows]``.

    Parameters
    ----------
    key : Key
        Of the data.
    holders : tuple of str
        Addresses of the workers that hold them.
    weight : float
    rows, start, at : int
    block : int
        As in :class:`~dask_coded.runtime.spec.Ingredient`.
    """

    key: Key
    holders: tuple[str, ...]
    weight: float
    rows: int
    start: int
    at: int
    block: int


@dataclass(frozen=True)
class Recipe:
    """How to make a piece, and its error when it is made so, in units of half a last place.

    If there is a ``storage``, the piece is to be written there.
    """

    spec: CodedSpec
    sources: tuple[Source, ...]
    growth: float = 0.0
    storage: Storage | None = None


@dataclass(frozen=True)
class Stored:
    """The pieces of an array can be read from a store."""

    spec: CodedSpec
    storage: Storage


@dataclass(frozen=True)
class Holders:
    """Addresses of the workers that hold a block of data."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """The plan of a round.

    Parameters
    ----------
    addresses : tuple of str
        The workers of the round.
    host : tuple of int
        The number of the worker that holds each piece, -1 where none does.
    speeds : tuple of float
        Predicted speed of each worker.
    lags : tuple of float
        Seconds that each worker is expected to need to start and to report.
    first : list of lists of StripeRange, or None
        The first assignment; None if the workers that are expected to make progress do not suffice.
    work : ndarray, shape (pieces, stripes), or None
        Work of each stripe; None if all pieces are dense.
    spec : CodedSpec or None
        Of the array, if it has changed since the asking worker last received it.
    checks : tuple of str
        Address of the worker that holds the check of each block, empty where none does.
    growth : tuple of float
        For each piece of an array whose shares are verified, see
        :meth:`~dask_coded.rounds.rebuilding.RoundingErrors.of_shares`.
    errors : tuple of float
        Of each piece, see :meth:`~dask_coded.rounds.rebuilding.RoundingErrors.usual`; empty if none
        has been made from others.
    """

    addresses: tuple[str, ...]
    host: tuple[int, ...]
    speeds: tuple[float, ...]
    lags: tuple[float, ...]
    first: list[list[StripeRange]] | None
    work: Floats | None
    spec: CodedSpec | None
    checks: tuple[str, ...]
    growth: tuple[float, ...]
    errors: tuple[float, ...] = ()

    def layout(self, spec: CodedSpec) -> Layout:
        """The layout of a round of this array."""
        work = spec.uniform_work if self.work is None else self.work
        return Layout.of(spec.code, self.host, work, len(self.addresses))

    def without_parity(self, spec: CodedSpec) -> RoundPlan:
        """Return the plan of a round to which only pieces that equal blocks contribute."""
        hosts = zip(self.host, spec.code.block_of.tolist(), strict=True)
        kept = tuple(host if block >= 0 else -1 for host, block in hosts)
        return replace(self, host=kept, first=None)

    def without(self, resting: Container[str]) -> RoundPlan:
        """Return the plan with workers that get work only if the others do not suffice."""
        if not any(address in resting for address in self.addresses):
            return self
        speeds = [
            0.0 if address in resting else speed
            for address, speed in zip(self.addresses, self.speeds, strict=True)
        ]
        return replace(self, speeds=tuple(speeds), first=None)

    @property
    def speed(self) -> Floats:
        """Predicted speeds, shape (workers,)."""
        return np.array(self.speeds, dtype=np.float64)


Answer = (
    Lost | Unfit | Fit | Waiting | Over | Placed | Extended | Recipe | Stored | Holders | RoundPlan
)


#: An answer as it travels.
Reply = dict[str, ToPickle[Answer]]


def reply(answer: Answer) -> Reply:
    """Return an answer as a handler of the scheduler returns it."""
    return {"answer": ToPickle(answer)}


async def ask(handler: Callable[..., Awaitable[Any]], **arguments: Any) -> Any:
    """Ask a handler of the scheduler, and return its :data:`Answer`."""
    return (await handler(**arguments))["answer"]
