"""The rules that make the first assignment and react to what comes back.

One file and one row each: a policy is a subclass of :class:`Policy` entered in ``POLICIES``.
"""

from __future__ import annotations

from dask_coded.planning.policies._continuous import Continuous
from dask_coded.planning.policies._overdecomposition import (
    OverDecomposition,
    Stores,
    over_decomposed,
)
from dask_coded.planning.policies._policy import Policy
from dask_coded.planning.policies._replication import Replication
from dask_coded.planning.policies._s2c2 import S2C2, BasicS2C2
from dask_coded.planning.policies._static import Static

#: Policies by the name under which the configuration and the benchmarks select them.
POLICIES: dict[str, type[Policy]] = {
    "continuous": Continuous,
    "replication": Replication,
    "s2c2": S2C2,
    "s2c2-basic": BasicS2C2,
    "static": Static,
}

__all__ = [
    "POLICIES",
    "S2C2",
    "BasicS2C2",
    "Continuous",
    "OverDecomposition",
    "Policy",
    "Replication",
    "Static",
    "Stores",
    "over_decomposed",
]
