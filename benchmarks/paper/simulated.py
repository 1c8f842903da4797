"""Cases in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.paper.cases import Case, Contender
from dask_coded.planning import SpeedHistory, fluid_time
from dask_coded.simulation import Network, Simulation, Speeds

#: The default of the package; `predictors` in the report says how the others do.
PREDICTOR = "exponential"


def bounds(case: Case) -> np.ndarray:
    """Fluid bound of each round in seconds, shape (rounds,)."""
    size = case.n / case.k
    return np.array([fluid_time(row, case.k, size) for row in case.speeds])


def play(
    case: Case,
    contender: Contender,
    predictor: str = PREDICTOR,
    foresight: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Seconds of each round, shape (rounds,)."""
    code = contender.code(case.n, case.k)
    # A code's blocks are a k-th of the work each; all the work is n seconds of a worker.
    piece = case.n / code.k
    simulation = Simulation(
        code,
        Speeds(case.speeds),
        policy=contender.policy(case.n),
        predictor=predictor,
        foresight=foresight,
        piece_seconds=piece,
        network=Network(operand=case.operand, result=case.result // code.k),
    )
    return np.array([round_.seconds for round_ in simulation.run(len(case.speeds))])


def mispredicted(case: Case, predictor: str = PREDICTOR, by: float = 0.15) -> float:
    """How often a worker is slower than predicted by more than the time-out allows for."""
    history = SpeedHistory()
    names = [str(worker) for worker in range(case.n)]
    wrong = []
    for row in case.speeds:
        expected = history.predict(names, predictor)
        expected = expected * row.sum() / expected.sum()
        wrong.append(row < expected / (1 + by))
        history.record(dict(zip(names, row.tolist(), strict=True)))
    return float(np.mean(wrong[1:]))
