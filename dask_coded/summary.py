"""Short representations of results: shapes and a few numbers instead of whole arrays."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

_FEW = 3  # this many numbers or items are shown


class Summary:
    """Base class of dataclasses whose representation is short, on terminals and in notebooks.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(repr=False)
    ... class Found(Summary):
    ...     vector: np.ndarray
    ...     residual: float
    ...     history: list
    >>> Found(np.arange(1000) / 3, 1 / 3, [3.0, 2.0, 1.0, 0.5])
    Found(vector=<(1000,) float64: 0, 0.333333, 0.666667, ...>, residual=0.333333, \
history=<4 items, the last: 0.5>)
    """

    def __repr__(self) -> str:
        parts = (f"{name}={text}" for name, text in self._parts())
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self._parts()
        )
        return f"<b>{type(self).__name__}</b><table>{rows}</table>"

    def _parts(self) -> list[tuple[str, str]]:
        own: Any = self
        return [(f.name, brief(getattr(self, f.name))) for f in fields(own) if f.repr]


def brief(value: Any) -> str:
    """Return a representation that is short however large the value is."""
    if isinstance(value, np.ndarray) and value.ndim:
        few = ", ".join(map(brief, value.flat[:_FEW].tolist()))
        more = ", ..." if value.size > _FEW else ""
        return f"<{value.shape} {value.dtype}: {few}{more}>"
    if isinstance(value, np.ndarray | np.generic):
        return brief(value.item())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, complex):
        return f"{value:.6g}"
    if isinstance(value, list | tuple) and len(value) > _FEW:
        return f"<{len(value)} items, the last: {brief(value[-1])}>"
    if isinstance(value, dict) and len(value) > _FEW:
        return f"<{len(value)} items>"
    return repr(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML."""
    style = "style='text-align:left;padding:2px 12px 2px 0'"
    head = "".join(f"<th {style}>{html.escape(name)}</th>" for name in columns)
    cells = ("".join(f"<td {style}>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def lanes(bars: Sequence[tuple[str, float, float]]) -> str:
    """Return a picture as SVG: for each name a lane with its bars, from the first to the last time.

    Parameters
    ----------
    bars : sequence of (str, float, float)
        The name of the lane, and begin and end of the bar in seconds.
    """
    if not bars:
        return ""
    names = sorted({name for name, _, _ in bars})
    first, last = min(begin for _, begin, _ in bars), max(end for _, _, end in bars)
    scale = 480 / max(last - first, 1e-9)
    texts = "".join(
        f"<text x='0' y='{18 * i + 13}'>{html.escape(name)}</text>" for i, name in enumerate(names)
    )
    rectangles = "".join(
        f"<rect x='{200 + scale * (begin - first):.1f}' y='{18 * names.index(name) + 2}' "
        f"width='{max(scale * (end - begin) - 0.5, 0.5):.1f}' height='14' fill='#4c78a8'/>"
        for name, begin, end in bars
    )
    bottom = 18 * len(names)
    axis = (
        f"<text x='200' y='{bottom + 13}'>{1e3 * first:.3g} ms</text>"
        f"<text x='680' y='{bottom + 13}' text-anchor='end'>{1e3 * last:.3g} ms</text>"
    )
    return (
        f"<svg width='690' height='{bottom + 20}' font-size='12' font-family='sans-serif' "
        f"fill='currentColor'>{texts}{rectangles}{axis}</svg>"
    )
