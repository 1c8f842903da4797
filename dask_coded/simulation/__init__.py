"""The simulator: the round engine of the cluster, driven in virtual time.

:class:`Simulation` runs the same :class:`~dask_coded.rounds.Round` with the same policies and
predictors as a cluster, but its workers are only numbers. A policy that wins in simulation is
therefore the very code that runs on a cluster. Only the speeds are random, and they follow from a
seed. :class:`TrainingSimulation` does the same for the state machines of
:mod:`dask_coded.aggregation`, with messages that occupy links, and :class:`SqueezeSimulation` for
trainings whose work moves between workers.
"""

from __future__ import annotations

from dask_coded.simulation._aggregation import SimulatedTraining, TrainingSimulation
from dask_coded.simulation._broadcast import Outage, broadcast_times
from dask_coded.simulation._cluster import Network
from dask_coded.simulation._operator import SimulatedOperator
from dask_coded.simulation._simulation import Assigner, SimulatedRound, Simulation
from dask_coded.simulation._squeeze import SqueezedStep, SqueezeSimulation, UnitSpan
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
    "Assigner",
    "Delays",
    "Network",
    "Outage",
    "SimulatedOperator",
    "SimulatedRound",
    "SimulatedTraining",
    "Simulation",
    "Speeds",
    "SqueezeSimulation",
    "SqueezedStep",
    "TrainingSimulation",
    "UnitSpan",
    "additive",
    "broadcast_times",
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
