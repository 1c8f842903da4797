"""From shares to the result: copy what is systematic, solve for what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.planning.layout import Bools, Run

# Numbers that are solved for at a time: half a MiB of them.
_STACKED = 1 << 16


@dataclass(frozen=True)
class Geometry:
    """Where rows lie: how many each block has, and how many stripes it is cut into.

    Parameters
    ----------
    rows : tuple of int, length k
        Rows of each block.
    stripes : int
        Stripes of every piece.
    mixed : bool
        Whether pieces mix blocks (then all have as many rows as the longest block).
    """

    rows: tuple[int, ...]
    stripes: int
    mixed: bool

    def edges(self, group: int) -> npt.NDArray[np.intp]:
        """First row of each stripe of the pieces of a group, and the end: shape (stripes + 1,)."""
        rows = max(self.rows) if self.mixed else self.rows[group]
        return np.arange(self.stripes + 1) * rows // self.stripes


def assemble(
    code: Code,
    geometry: Geometry,
    computed: Bools,
    shares: Iterable[tuple[Run, npt.NDArray[Any]]],
    dtype: npt.DTypeLike,
    columns: tuple[int, ...] = (),
) -> npt.NDArray[Any]:
    """Decode a finished round.

    Parameters
    ----------
    code : Code
    geometry : Geometry
    computed : ndarray of bool, shape (pieces, stripes)
        Which stripes of which pieces have come back.
    shares : iterable of (Run, ndarray of shape (rows of the run, *columns))
        What has come back; a share may end early where its block does.
    dtype : dtype
        Of the result.
    columns : tuple of int
        Shape of one row of the result.

    Returns
    -------
    ndarray, shape (sum of rows, *columns)
    """
    dtype = np.dtype(dtype)
    offsets = np.concatenate([[0], np.cumsum(geometry.rows)])
    out = np.empty((int(offsets[-1]), *columns), dtype=dtype)
    edges = [geometry.edges(g) for g in range(len(code.need))]
    block_of = code.block_of
    parity: dict[int, npt.NDArray[Any]] = {}
    for run, rows in shares:
        own = edges[code.group[run.piece]]
        start = int(own[run.start])
        if (block := int(block_of[run.piece])) >= 0:
            place, room = int(offsets[block]) + start, geometry.rows[block] - start
            out[place : place + min(len(rows), room)] = rows[:room]
        else:
            if run.piece not in parity:
                parity[run.piece] = np.zeros((int(own[-1]), *columns), dtype=dtype)
            parity[run.piece][start : start + len(rows)] = rows
    if not code.exact:
        _solve(code, geometry, computed, edges[0], offsets, parity, out)
    return out


def _solve(
    code: Code,
    geometry: Geometry,
    computed: Bools,
    edges: npt.NDArray[np.intp],
    offsets: npt.NDArray[np.intp],
    parity: dict[int, npt.NDArray[Any]],
    out: npt.NDArray[Any],
) -> None:
    """Fill the missing blocks, one run of stripes with the same pieces at a time."""
    wide = np.result_type(out.dtype, np.float64)
    changes = np.flatnonzero((computed[:, 1:] != computed[:, :-1]).any(axis=0)) + 1
    for a, b in zip([0, *changes.tolist()], [*changes.tolist(), computed.shape[1]], strict=True):
        pieces = np.flatnonzero(computed[:, a]).tolist()
        missing, weights = code.recovery(pieces)
        first, last = int(edges[a]), int(edges[b])
        if not missing or first == last:
            continue
        used = np.flatnonzero(weights.any(axis=0)).tolist()
        # A few rows at a time: what is stacked up for them stays in the cache.
        step = max(1, _STACKED // max(1, len(used) * math.prod(out.shape[1:])))
        for start in range(first, last, step):
            stop = min(start + step, last)
            stack = np.zeros((len(used), stop - start, *out.shape[1:]), dtype=wide)
            for row, i in zip(stack, used, strict=True):
                block = int(code.block_of[pieces[i]])
                if block >= 0:
                    end = min(stop, geometry.rows[block])
                    row[: max(end - start, 0)] = out[offsets[block] + start : offsets[block] + end]
                else:
                    row[:] = parity[pieces[i]][start:stop]
            solved = np.tensordot(weights[:, used], stack, axes=1)
            for block, rows in zip(missing, solved, strict=True):
                end = min(stop, geometry.rows[block])
                if end > start:
                    out[offsets[block] + start : offsets[block] + end] = rows[: end - start]
