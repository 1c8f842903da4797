"""Gradients of units, and their sums, which do not depend on the order of the units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_coded.aggregation.grid import Exponents, Integers


@dataclass
class UnitSum:
    """A sum of gradients of units, in integers on the grid of the step.

    Parameters
    ----------
    integers : ndarray of int32, or None
        None if a unit did not fit the grid, or there was none.
    peaks : ndarray of int16, shape (blocks,)
        The largest of all units.
    losses : dict of int to float
        Of each unit in the sum. They are added up in the end, exactly.
    grid : ndarray of int16, optional
        The peaks that the grid was made of, if it was not the predicted one.
    """

    integers: Integers | None
    peaks: Exponents
    losses: dict[int, float]
    grid: Exponents | None = None
    #: Whether nothing else refers to the arrays, so that they may be changed.
    owned: bool = field(default=True, repr=False)
    #: Where to leave integers that are not needed any more, for those of the next unit.
    spare: list[Integers] | None = field(default=None, repr=False, compare=False)

    def plus(self, other: UnitSum) -> UnitSum:
        """Return the sum of both, in place if this one owns its arrays; drop the other one."""
        integers = None
        if self.integers is not None and other.integers is not None:
            out = self.integers if self.owned else None
            integers = np.add(self.integers, other.integers, out=out)
        peaks = np.maximum(self.peaks, other.peaks)
        other.drop()
        return UnitSum(integers, peaks, self.losses | other.losses, spare=self.spare)

    def drop(self) -> None:
        """Leave the integers to the next unit. Memory that is new costs as much as rounding them.

        Under a nanny, because it has the system take back and clear what is freed.
        """
        if self.owned and self.spare is not None and self.integers is not None:
            self.spare.append(self.integers)
            self.integers = None

    def chunk(self, index: int, count: int) -> tuple[Any, ...]:
        """Return one of ``count`` chunks of the sum as plain values; the arrays are views."""
        integers = None if self.integers is None else _part(self.integers, index, count)
        return self.losses, integers, _part(self.peaks, index, count)

    @classmethod
    def joined(cls, chunks: Sequence[UnitSum]) -> UnitSum:
        """Return the sum that was cut into these chunks."""
        integers = [chunk.integers for chunk in chunks if chunk.integers is not None]
        return cls(
            np.concatenate(integers) if len(integers) == len(chunks) else None,
            np.concatenate([chunk.peaks for chunk in chunks]),
            chunks[0].losses,
        )

    @property
    def loss(self) -> float:
        """The sum of the losses, which does not depend on their order."""
        losses = list(self.losses.values())
        if odd := [loss for loss in losses if not math.isfinite(loss)]:
            return sum(odd)
        try:
            return math.fsum(losses)
        except OverflowError:  # on the way: the sum itself may be finite
            return math.fsum(math.ldexp(loss, -64) for loss in losses) * 2.0**64


def _part(array: Any, index: int, count: int) -> Any:
    """Return a read-only part of an array."""
    part = array[len(array) * index // count : len(array) * (index + 1) // count]
    part.flags.writeable = False
    return part


@dataclass(frozen=True)
class ComputeUnit:
    """Compute the gradient of a unit, on the grid of these peaks or on the predicted one."""

    unit: int
    turn: int
    grid: Exponents | None


@dataclass(frozen=True)
class FinishedUnits:
    """This node has the sum over all units."""

    total: UnitSum
