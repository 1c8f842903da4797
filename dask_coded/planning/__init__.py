"""Who computes what: assignments, policies and speed prediction as pure functions of arrays."""

from __future__ import annotations

from dask_coded.planning.assignment import InfeasibleError, deal, fluid_time
from dask_coded.planning.layout import Layout, Run, without
from dask_coded.planning.policies import POLICIES, Continuous, Policy
from dask_coded.planning.predictors import PREDICTORS, Predictor
from dask_coded.planning.progress import Assign, Command, Finish, Progress, Withdraw
from dask_coded.planning.reporting import Pace, Reporting
from dask_coded.planning.speeds import LagHistory, SpeedHistory, in_seconds

__all__ = [
    "POLICIES",
    "PREDICTORS",
    "Assign",
    "Command",
    "Continuous",
    "Finish",
    "InfeasibleError",
    "LagHistory",
    "Layout",
    "Pace",
    "Policy",
    "Predictor",
    "Progress",
    "Reporting",
    "Run",
    "SpeedHistory",
    "Withdraw",
    "deal",
    "fluid_time",
    "in_seconds",
    "without",
]
