"""The simulator: the round engine of the cluster, driven in virtual time.

What wins here is what runs there: :class:`Simulation` plays the same :class:`~dask_coded.rounds.
Round` with the same policies and predictors, among workers that are only numbers. Nothing is random
but the speeds, which are made from a seed. :class:`TrainingSimulation` does the same for the
machines of :mod:`dask_coded.aggregation`, with messages that take up links.
"""

from __future__ import annotations

from dask_coded.simulation._aggregation import SimulatedTraining, TrainingSimulation
from dask_coded.simulation._cluster import Network
from dask_coded.simulation._operator import SimulatedOperator
from dask_coded.simulation._simulation import SimulatedRound, Simulation
from dask_coded.simulation.delays import (
    Delays,
    additive,
    markov,
    proportional,
    replayed,
    undelayed,
)
from dask_coded.simulation.speeds import (
    Speeds,
    changed,
    constant,
    drifting,
    gilbert_elliott,
    shifted_exponential,
)

__all__ = [
    "Delays",
    "Network",
    "SimulatedOperator",
    "SimulatedRound",
    "SimulatedTraining",
    "Simulation",
    "Speeds",
    "TrainingSimulation",
    "additive",
    "changed",
    "constant",
    "drifting",
    "gilbert_elliott",
    "markov",
    "proportional",
    "replayed",
    "shifted_exponential",
    "undelayed",
]
