"""Compare a measured figure with a published one. Nothing here measures, reads or writes.

A measured figure is an `Interval`: a value, and the ends of its 95 % interval. It is

* *exceeded* if the whole interval is above the published figure,
* *reproduced* if the value reaches it,
* *within the interval* if only the end of the interval reaches it, and
* *not reproduced* if even that does not.

A published time "saved" can be meant in per cent of the other method's time or in per cent of one's
own, and papers seldom say which. Both are judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import integrate
from scipy.special import ndtr, ndtri

#: Resampled sets of turns, and the share of them that an interval holds.
_RESAMPLED, _SHARE = 2000, 0.95

Kind = Literal["saved", "times", "level"]


class Interval(NamedTuple):
    """A measured figure with the ends of its 95 % interval; the ends are NaN if it ran once."""

    value: float
    low: float
    high: float

    def through(self, change: Callable[[float], float]) -> Interval:
        """Return the interval of an increasing function of the figure."""
        return Interval(*(change(end) for end in self))


def ratio(theirs: ArrayLike, ours: ArrayLike) -> Interval:
    """Return the sum of their times over the sum of ours; entry i of both is from the same turn.

    The interval is that of resampled turns.

    Parameters
    ----------
    theirs, ours : array_like, shape (turns,)

    Examples
    --------
    >>> ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    Interval(value=2.0, low=2.0, high=2.0)
    """
    above, below = (np.asarray(times, dtype=float) for times in (theirs, ours))
    value = float(above.sum() / below.sum())
    if len(above) < 2:
        return Interval(value, math.nan, math.nan)
    drawn = np.random.default_rng(0).integers(len(above), size=(_RESAMPLED, len(above)))
    return Interval(value, *_ends(above[drawn].sum(axis=1) / below[drawn].sum(axis=1)))


def mean(values: ArrayLike) -> Interval:
    """Return the mean of some runs; the interval is that of resampled runs.

    Examples
    --------
    >>> mean([3.0])
    Interval(value=3.0, low=nan, high=nan)
    """
    found = np.asarray(values, dtype=float)
    return ratio(found, np.ones_like(found))


def _ends(found: np.ndarray) -> tuple[float, float]:
    tail = (1 - _SHARE) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)


def from_ranges(theirs: Ranged, ours: Ranged) -> Interval:
    """Return the ratio of two medians of which only the ranges of their runs are known.

    The range of ``n`` normal numbers is on average a known multiple of their standard deviation,
    and the standard error of a median is 1.25 times that of a mean. Both figures are taken to be
    independent.

    Examples
    --------
    >>> from_ranges(Ranged(2.0, 2.0, 2.0, 3), Ranged(1.0, 1.0, 1.0, 3))
    Interval(value=2.0, low=2.0, high=2.0)
    """
    value = theirs.value / ours.value
    if min(theirs.runs, ours.runs) < 2:
        return Interval(value, math.nan, math.nan)
    error = math.hypot(*(math.sqrt(math.pi / 2) * each.error for each in (theirs, ours)))
    reach = math.exp(float(ndtri((1 + _SHARE) / 2)) * error)
    return Interval(value, value / reach, value * reach)


class Ranged(NamedTuple):
    """The median of some runs, with the least and the greatest of them."""

    value: float
    low: float
    high: float
    runs: int

    @property
    def error(self) -> float:
        """Standard error of the mean of the logarithms."""
        return math.log(self.high / self.low) / _mean_range(self.runs) / math.sqrt(self.runs)


@cache
def _mean_range(runs: int) -> float:
    """Return the mean range of ``runs`` standard normal numbers: 1.13 for 2, 1.69 for 3."""

    def outside(x: float) -> float:
        return float(1 - ndtr(x) ** runs - ndtr(-x) ** runs)

    return float(integrate.quad(outside, -10, 10)[0])


@dataclass(frozen=True)
class Published:
    """A published figure.

    Parameters
    ----------
    least, most : float
        The ends of a published range; equal if it is a single figure. ``most`` is infinite where
        the paper says "more than".
    kind : str
        ``"saved"``: per cent of time saved; measured as their time over ours. ``"times"``: how
        many times as fast; measured the same way. ``"level"``: any other figure.
    unit : str
        Of a level.
    at_most : bool
        Whether a level is reached by values of at most ``most``.
    """

    least: float
    most: float
    kind: Kind = "saved"
    unit: str = "%"
    at_most: bool = False

    def __str__(self) -> str:
        least = () if self.at_most else (self.least,)
        ends = [f"{end:g}" for end in dict.fromkeys((*least, self.most)) if math.isfinite(end)]
        sign = "at most " if self.at_most else "more than " if math.isinf(self.most) else ""
        return f"{sign}{' to '.join(ends)}{_suffix(self._unit)}"

    @property
    def _unit(self) -> str:
        return {"saved": "%", "times": "times", "level": self.unit}[self.kind]

    def readings(self, found: Interval) -> dict[str, Interval]:
        """Return the measured figure as each of the figures that the published one can be."""
        if self.kind == "saved":
            return {
                "less time": found.through(lambda ratio: 100 * (1 - 1 / ratio)),
                "faster": found.through(lambda ratio: 100 * (ratio - 1)),
            }
        return {"": found}

    def show(self, found: Interval) -> str:
        """Return the measured figure, by both measures, with its interval."""
        digits = 1 if self.kind == "saved" else 2
        shown = [
            f"{each.value:.{digits}f}"
            + (
                f" ({each.low:.{digits}f} to {each.high:.{digits}f})"
                if each.low < each.high
                else ""
            )
            for each in self.readings(found).values()
        ]
        return f"{' / '.join(shown)}{_suffix(self._unit)}"

    def verdict(self, found: Interval) -> str:
        """Return the verdict, by both measures if they differ."""
        words = {name: self._judge(each) for name, each in self.readings(found).items()}
        if len({word for word, _ in words.values()}) == 1:
            return self._phrase(words[next(iter(words))][0], [by for _, by in words.values()])
        return "; ".join(f"{name}: {self._phrase(w, [by])}" for name, (w, by) in words.items())

    def _judge(self, found: Interval) -> tuple[str, float]:
        """Return the word for a figure, and by how much it misses the published one."""
        value, low, high = found
        if self.at_most:
            by, within = value - self.most, low <= self.most
        elif low > self.most:
            return "exceeded", 0.0
        else:
            by, within = self.least - value, high >= self.least
        if by <= 0:
            return "reproduced", 0.0
        return "within the interval" if within else "not reproduced", by

    def _phrase(self, word: str, by: list[float]) -> str:
        if word in ("exceeded", "reproduced"):
            return word
        unit = "points" if self._unit == "%" else self._unit
        amount = " / ".join(f"{each:.1f}" if each >= 0.95 else f"{each:.2g}" for each in by)
        return f"{word}, {amount}{_suffix(unit)} {'above' if self.at_most else 'short'}"

    def reached(self, found: Interval) -> dict[str, bool]:
        """Return by which measures the figure is reproduced or exceeded."""
        return {
            name: self._judge(each)[0] in ("reproduced", "exceeded")
            for name, each in self.readings(found).items()
        }


def _suffix(unit: str) -> str:
    return f" {unit}" if unit else ""


def _with_ends(found: Interval, digits: int) -> str:
    value, low, high = (f"{end:.{digits}f}" for end in found)
    return f"{value} ({low} to {high})" if found.low < found.high else value
