"""Cases and contenders of the comparison, and the figures that the paper published.

All contenders of a case do the same work: with every worker at speed 1 and the work shared evenly,
a round takes one second. The yardstick of a case is the fluid bound of its (n, k) code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.evidence.s2c2.overdecomposition import PARTS as PARTITIONS
from benchmarks.evidence.s2c2.overdecomposition import Stores, over_decomposed
from benchmarks.traces import PARTS, Over, before_test, series
from dask_coded.codes import MDS, Code, Repetition
from dask_coded.simulation import Assigner

#: Bytes of all data, and bytes per second of each worker's link (1 Gbit/s).
MOVED_BYTES = 1.4e9
LINK = 1.25e8


@dataclass(frozen=True, eq=False)
class Case:
    """Workers, their speeds round by round, and a code.

    Parameters
    ----------
    name : str
    n, k : int
    speeds : ndarray, shape (rounds, n)
        Relative speeds, one row per round.
    operand, result : int
        Bytes of the operand and of the whole result.
    fields : dict
        Additional entries of the report's rows.
    """

    name: str
    n: int
    k: int
    speeds: np.ndarray
    operand: int = 40_000
    result: int = 2_800_000
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A method to do the work of a case.

    Parameters
    ----------
    name : str
    code : callable(n, k) -> Code
    policy : str
        A key of ``POLICIES``; empty for plain dask.array, which has none.
    assigner : callable(n) -> Assigner, optional
        Makes the function that replaces the policy's first assignment in the rounds of one run.
        Only the simulator supports it.
    """

    name: str
    code: Callable[[int, int], Code]
    policy: str
    assigner: Callable[[int], Assigner] | None = None


def _over_decomposition(n: int) -> Assigner:
    return Stores(n, move_seconds=MOVED_BYTES / (PARTITIONS * n) / LINK).assign


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("uncoded", lambda n, k: Repetition(n, 1), "static"),
        Contender("replication", lambda n, k: Repetition(n, min(3, n)), "replication"),
        Contender(
            "over-decomposition", lambda n, k: over_decomposed(n), "static", _over_decomposition
        ),
        Contender("MDS", MDS, "static"),
        Contender("S2C2 basic", MDS, "s2c2-basic"),
        Contender("S2C2", MDS, "s2c2"),
        Contender("continuous", MDS, "continuous"),
    )
}


def plain_dask(tasks: int) -> Contender:
    """Return plain dask.array with so many tasks for each worker."""
    name = f"dask.array, {tasks} task{'s' * (tasks > 1)} a worker"
    return Contender(name, lambda n, k: Repetition(n, 1), "")


def stragglers(
    n: int, rounds: int, slow: int, factor: float, spread: float = 0.2, seed: int = 0
) -> np.ndarray:
    """Return speeds: ``slow`` workers slowed ``factor`` times, others by at most ``spread``."""
    rng = np.random.default_rng([seed, n, slow])
    speeds = 1 - spread * rng.random(n)
    speeds[rng.permutation(n)[:slow]] = 1 / factor
    return np.tile(speeds, (rounds, 1))


def replayed(trace: str, n: int, rounds: int, seed: int = 0, over: Over = "trace") -> np.ndarray:
    """Return speeds of ``n`` machines of a trace, each from a random moment on.

    Only machines and times that no predictor was trained on are used. By default the machines keep
    their differences; ``over="machine"`` removes them, see `benchmarks.traces.series`.
    """
    test = PARTS["test"]
    unseen = [v[before_test(v) :] for i, v in enumerate(series(trace, over)) if test.has(i)]
    rng = np.random.default_rng([seed, n])
    columns = []
    for machine in rng.choice(len(unseen), n, replace=len(unseen) < n):
        values = unseen[machine]
        start = int(rng.integers(len(values)))
        columns.append(np.take(values, np.arange(start, start + rounds), mode="wrap"))
    # A machine that is fully used by others still does some work.
    return np.maximum(np.array(columns).T, 0.02)


#: Bytes of operand and result of the paper's three algorithms, double precision.
SHAPES = {
    "logistic regression": (5_000 * 8, 350_000 * 8),
    "PageRank": (40_000 * 8, 40_000 * 8),
    "graph filtering": (24_000 * 8, 24_000 * 8),
}


def controlled(
    codes: Sequence[tuple[int, int]],
    slowed: Sequence[int],
    factors: Sequence[float],
    rounds: int,
    shapes: Sequence[str] = tuple(SHAPES),
) -> list[Case]:
    """Return cases of the controlled cluster: some of 12 workers slowed, others within 20 %."""
    return [
        Case(
            f"({n},{k}), {slow} slowed {factor:g}x, {shape}",
            n,
            k,
            stragglers(n, rounds, slow, factor),
            *SHAPES[shape],
            {"section": "controlled", "slowed": slow, "factor": factor, "shape": shape},
        )
        for n, k in codes
        for factor in factors
        for slow in slowed
        for shape in shapes
        if slow or factor == factors[0]  # without slowed workers the factor has no effect
    ]


#: Traces that replace the paper's two clouds, by how often predictions fail.
CLOUDS = {"low": "stream-triad", "high": "bytedance-SE"}


#: How cases name what speeds are divided by.
OVER: dict[Over, str] = {"trace": "", "machine": ", each over its own mean"}


def cloud(codes: Sequence[tuple[int, int]], rounds: int, over: Over = "trace") -> list[Case]:
    """Return cases with speeds of real machines, easy and hard to predict."""
    return [
        Case(
            f"({n},{k}), {level} misprediction ({trace}{OVER[over]})",
            n,
            k,
            replayed(trace, n, rounds, over=over),
            fields={"section": "cloud", "misprediction": level, "trace": trace, "over": over},
        )
        for level, trace in CLOUDS.items()
        for n, k in codes
    ]
