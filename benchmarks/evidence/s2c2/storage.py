"""Where coding pays: time of a round over storage, for uncoded, replicated and coded data.

Times are relative to the ideal of the *data*: their work over the sum of all speeds. That is the
same for every method, so methods that store more or less can be compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.evidence.s2c2 import simulated
from benchmarks.evidence.s2c2.cases import (
    CONTENDERS,
    LINK,
    MOVED_BYTES,
    Case,
    Contender,
    replayed,
    stragglers,
)
from benchmarks.evidence.s2c2.overdecomposition import Stores, over_decomposed
from benchmarks.report import picture
from dask_coded.codes import Code, Repetition
from dask_coded.prediction import SpeedHistory
from dask_coded.simulation import Assigner

WORKERS = 12
ROUNDS = 30
# Equal parts of uncoded data, small enough that their number does not matter.
_PARTS = 3000


class Regime(NamedTuple):
    """How fast workers are.

    Attributes
    ----------
    name : str
    speeds : ndarray, shape (rounds, workers)
    """

    name: str
    speeds: np.ndarray


def regimes(rounds: int) -> Iterator[Regime]:
    """Yield steady workers, of which some are slow, and machines of a trace."""
    for slow, factor in ((0, 5), (1, 5), (3, 5), (3, 20)):
        name = f"{slow} of {WORKERS} slowed {factor} times" if slow else "none slowed"
        yield Regime(name, stragglers(WORKERS, rounds, slow, factor))
    speeds = replayed("bytedance-SE", WORKERS, rounds)
    yield Regime("machines of bytedance-SE", speeds / speeds.mean())


def methods() -> Iterator[tuple[str, float, int, Contender]]:
    """Yield name, storage over that of the data, k, and what to run."""
    yield "uncoded", 1.0, WORKERS, CONTENDERS["uncoded"]
    for parts in (4, 16):
        for copies in (1.0, 1.2, 1.5, 2.0):
            contender = _over_decomposition(copies, parts)
            yield f"over-decomposition, {parts} parts", copies, WORKERS, contender
    for copies in (2, 3):
        for name, policy in (("replication", "replication"), ("copies, continuous", "continuous")):
            yield name, float(copies), WORKERS, Contender(name, _copies(copies), policy)
    for k in (11, 10, 9, 8, 6):
        for name in ("MDS", "S2C2", "continuous"):
            yield name, WORKERS / k, k, CONTENDERS[name]


def _copies(copies: int) -> Callable[[int, int], Code]:
    return lambda n, k: Repetition(n, copies)


def _over_decomposition(copies: float, parts: int) -> Contender:
    def assigner(n: int) -> Assigner:
        move = MOVED_BYTES / (parts * n) / LINK
        return Stores(n, parts, copies=copies, move_seconds=move).assign

    plain = CONTENDERS["over-decomposition"]
    return Contender(plain.name, lambda n, k: over_decomposed(n, parts), plain.policy, assigner)


def over_ideal(regime: Regime, k: int, contender: Contender) -> np.ndarray:
    """Return the time of each round over the ideal of the data.

    The first rounds, in which speeds are being learned, are left out.
    """
    case = Case(regime.name, WORKERS, k, regime.speeds)
    seconds = simulated.run_case(case, contender)
    # With speed 1, a worker takes one second for its even share of the data.
    ratios: np.ndarray = seconds / (WORKERS / regime.speeds.sum(axis=1))
    return ratios[min(5, len(ratios) - 1) :]


def held(speeds: np.ndarray) -> np.ndarray:
    """Return the share of uncoded data that each worker comes to hold if none is dropped.

    In every round each worker computes as many rows as its predicted speed allows, from where the
    worker before it ends. What it lacks it fetches and keeps.

    Parameters
    ----------
    speeds : ndarray, shape (rounds, workers)

    Returns
    -------
    ndarray, shape (workers,)
    """
    history = SpeedHistory()
    names = [str(worker) for worker in range(speeds.shape[1])]
    stored = np.zeros((speeds.shape[1], _PARTS), dtype=bool)
    for row in speeds:
        expected = history.predict(names, simulated.PREDICTOR)
        ends = np.round(np.cumsum(expected) / expected.sum() * _PARTS).astype(int)
        for worker, (a, b) in enumerate(pairwise([0, *ends.tolist()])):
            stored[worker, a:b] = True
        history.record(dict(zip(names, row.tolist(), strict=True)))
    shares: np.ndarray = stored.mean(axis=1)
    return shares


def plot(file: Path, found: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    """Draw one panel for each regime, one line for each method.

    Parameters
    ----------
    file : Path
    found : dict
        Storage and time over the ideal, by regime and method.
    """
    with picture(file, figsize=(11, 6.5)) as figure:
        panels = figure.subplots(2, 3, sharex=True).ravel()
        for axes, (regime, lines) in zip(panels, found.items(), strict=False):
            for method, points in lines.items():
                axes.plot(*zip(*sorted(points), strict=True), marker="o", ms=4, label=method)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_yscale("log")
            axes.set_title(regime, fontsize=10)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.tick_params(axis="y", which="both", labelsize=7)
        for axes in panels[2:5]:
            axes.set_xlabel("storage over that of the data", fontsize=9)
            axes.tick_params(labelbottom=True)
        for axes in panels[::3]:
            axes.set_ylabel("time over the ideal", fontsize=9)
        handles, labels = panels[0].get_legend_handles_labels()
        panels[-1].axis("off")
        panels[-1].legend(handles, labels, loc="center", fontsize=9, frameon=False)
