"""Run the cases in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.evidence.s2c2.cases import Case, Contender
from dask_coded.prediction import SpeedHistory
from dask_coded.rounds import fluid_time
from dask_coded.simulation import Network, Simulation, Speeds

#: The default of the package; section `predictors` compares it with the others.
PREDICTOR = "adaptive"


def bounds(case: Case) -> np.ndarray:
    """Return the fluid bound of each round in seconds, shape (rounds,)."""
    size = case.n / case.k
    return np.array([fluid_time(row, case.k, size) for row in case.speeds])


def run_case(
    case: Case,
    contender: Contender,
    predictor: str = PREDICTOR,
    foresight: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Simulate a case and return the seconds of each round, shape (rounds,)."""
    code = contender.code(case.n, case.k)
    # Each block of a code is a k-th of the work, which takes one worker n seconds in all.
    piece = case.n / code.k
    simulation = Simulation(
        code,
        Speeds(case.speeds),
        policy=contender.policy,
        assigner=contender.assigner and contender.assigner(case.n),
        predictor=predictor,
        foresight=foresight,
        piece_seconds=piece,
        network=Network(operand=case.operand, result=case.result // code.k),
    )
    return np.array([round_.seconds for round_ in simulation.run(len(case.speeds))])


def mispredicted(case: Case, predictor: str = PREDICTOR, by: float = 0.15) -> float:
    """Return how often a worker is slower than predicted by more than the time-out allows."""
    history = SpeedHistory()
    names = [str(worker) for worker in range(case.n)]
    wrong = []
    for row in case.speeds:
        expected = history.predict(names, predictor)
        expected = expected * row.sum() / expected.sum()
        wrong.append(row < expected / (1 + by))
        history.record(dict(zip(names, row.tolist(), strict=True)))
    return float(np.mean(wrong[1:]))
