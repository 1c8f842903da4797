"""Tables of the pages."""

from __future__ import annotations

from collections.abc import Iterable


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
