"""Tables of the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table, with an empty line before and after it.

    Examples
    --------
    >>> table(["", "ms"], [["ring", "3"]])
    ['', '|  | ms |', '| --- | --- |', '| ring | 3 |', '']
    """
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *rows]
    return ["", *("| " + " | ".join(line) + " |" for line in lines), ""]


def span(values: ArrayLike, unit: str = "", digits: int = 1) -> str:
    """Return the median and the range of seeds, or how many of them have no finite value.

    Without the range if it is empty.

    Examples
    --------
    >>> span([3.0, 1.0, 2.0], "s"), span([3.0, float("inf")]), span([3.0, 3.0])
    ('2.0 s (1.0 to 3.0)', 'never in 1 of 2 seeds', '3.0')
    """
    found = np.asarray(values, dtype=float)
    if missing := int((~np.isfinite(found)).sum()):
        return f"never in {missing} of {len(found)} seeds"
    middle, least, most = (
        f"{each:.{digits}f}" for each in (np.median(found), found.min(), found.max())
    )
    shown = f"{middle} {unit}".rstrip()
    return shown if least == most else f"{shown} ({least} to {most})"


def spans(values: Sequence[ArrayLike]) -> list[str]:
    """Return the spans of several methods; that of the least median is bold.

    Examples
    --------
    >>> spans([[3.0, 1.0, 2.0], [4.0]])
    ['**2.0 (1.0 to 3.0)**', '4.0']
    """
    middles = [float(np.median(np.asarray(each, dtype=float))) for each in values]
    cells = map(span, values)
    return [
        f"**{cell}**" if middle == min(middles) else cell
        for cell, middle in zip(cells, middles, strict=True)
    ]
