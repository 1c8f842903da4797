"""Short representations of results: shapes and a few numbers instead of whole arrays."""

from __future__ import annotations

import html
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
        few = ", ".join(map(brief, value.ravel()[:_FEW].tolist()))
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
