"""Which worker holds which units of a training step, and which units are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Granted:
    """Each unit has one holder at most, and one copy at most, each worker one copy at most.

    Parameters
    ----------
    units, workers : int

    Attributes
    ----------
    holder : list of int or None
        The worker that each unit is granted to.
    done : set of int
        Units that their holders have computed.
    owed : list of set of int
        Units that each worker was granted and has not computed.
    maker : dict of int to int
        The worker that makes a copy of a unit.
    made : set of int
        Units whose copies are computed.

    Examples
    --------
    >>> granted = Granted(units=2, workers=2)
    >>> granted.grant(0, [0, 1])
    >>> granted.may_copy(1, 1)
    False
    >>> granted.new(0, [0]), granted.may_copy(1, 1)
    ([0], True)
    """

    def __init__(self, units: int, workers: int) -> None:
        self.holder: list[int | None] = [None] * units
        self.done: set[int] = set()
        self.owed: list[set[int]] = [set() for _ in range(workers)]
        self.maker: dict[int, int] = {}
        self.made: set[int] = set()

    def grant(self, worker: int, units: Iterable[int]) -> None:
        """Record that free units are granted to a worker."""
        for unit in units:
            assert self.holder[unit] is None, f"unit {unit} is granted already"
            self.holder[unit] = worker
            self.owed[worker].add(unit)

    def new(self, worker: int, units: Iterable[int]) -> list[int]:
        """Record units that a worker has computed; return those that count and are new.

        A worker reports a copy again when it is granted the unit, and it may report one that was
        given up meanwhile.
        """
        found = []
        for unit in units:
            if self.holder[unit] == worker and unit not in self.done:
                self.done.add(unit)
                self.owed[worker].discard(unit)
            elif self.maker.get(unit) == worker and unit not in self.made:
                self.made.add(unit)
            else:
                continue
            found.append(unit)
        return found

    def release(self, unit: int) -> None:
        """Record that a holder has given back a unit."""
        worker = self.holder[unit]
        assert worker is not None, f"unit {unit} is not granted"
        self.holder[unit] = None
        self.owed[worker].discard(unit)

    def may_copy(self, worker: int, unit: int) -> bool:
        """Whether a worker may make a copy of a unit: the last that its holder owes."""
        holder = self.holder[unit]
        last = holder is not None and self.owed[holder] == {unit}
        return last and unit not in self.maker and worker not in self.maker.values()

    def give_up_copy(self, unit: int) -> int:
        """Record that only the holder computes a unit; return the worker that made the copy."""
        self.made.discard(unit)
        return self.maker.pop(unit)

    def free(self, worker: int) -> tuple[list[int], dict[int, int]]:
        """Free all units of a worker, and drop its copy.

        Returns
        -------
        units : list of int
            What it held.
        copies : dict of int to int
            The workers with copies of these. They hold nothing of them yet; see :meth:`promote`.
        """
        for unit in [u for u, maker in self.maker.items() if maker == worker]:
            self.give_up_copy(unit)
        units = [unit for unit, holder in enumerate(self.holder) if holder == worker]
        for unit in units:
            self.release(unit)
            self.done.discard(unit)
        return units, {unit: self.maker.pop(unit) for unit in units if unit in self.maker}

    def promote(self, unit: int) -> None:
        """Record that the holder of a unit may have computed it before, as a copy."""
        if unit in self.made:
            holder = self.holder[unit]
            assert holder is not None, f"unit {unit} is not granted"
            self.made.discard(unit)
            self.done.add(unit)
            self.owed[holder].discard(unit)

    def settle(self) -> dict[int, int]:
        """Give units whose copies were computed first to those who made them.

        Returns
        -------
        dict of int to int
            The holders that these units had.
        """
        before = {}
        for unit in list(self.maker):
            holder = self.holder[unit]
            assert holder is not None and unit in self.made, f"the copy of {unit} is not computed"
            before[unit] = holder
            self.release(unit)
            self.holder[unit] = self.give_up_copy(unit)
            self.done.add(unit)
        return before

    def shares(self) -> dict[int, int]:
        """Return the number of units of each worker that holds any."""
        return dict(Counter(holder for holder in self.holder if holder is not None))

    def sets(self) -> dict[int, tuple[int, ...]]:
        """Return the units of each worker that holds any."""
        found: dict[int, list[int]] = {}
        for unit, holder in enumerate(self.holder):
            assert holder is not None, f"unit {unit} is not granted"
            found.setdefault(holder, []).append(unit)
        return {worker: tuple(units) for worker, units in sorted(found.items())}
