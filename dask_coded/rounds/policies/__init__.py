"""The rules that make the first assignment and react to what comes back.

A policy is one file with a subclass of :class:`Policy`, registered by ``@POLICIES.register(name)``.
"""

from __future__ import annotations

from dask_coded.rounds.policies._continuous import Continuous
from dask_coded.rounds.policies._policy import POLICIES, Policy
from dask_coded.rounds.policies._replication import Replication
from dask_coded.rounds.policies._s2c2 import S2C2, BasicS2C2
from dask_coded.rounds.policies._static import Static

__all__ = ["POLICIES", "S2C2", "BasicS2C2", "Continuous", "Policy", "Replication", "Static"]
