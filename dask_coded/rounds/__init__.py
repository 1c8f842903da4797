"""The engine of a round: events in, commands out, no I/O and no clock.

``layout`` says which worker holds what. ``assignment`` makes the first assignment, ``policies``
react to what comes back, ``round`` is the state machine, and ``decode`` assembles the result.
"""

from __future__ import annotations

from dask_coded.rounds.assignment import InfeasibleError, deal, fluid_time
from dask_coded.rounds.batches import PRODUCT_ROWS, batch_size, least_batch
from dask_coded.rounds.decode import Assembler, Geometry
from dask_coded.rounds.history import LoopHistory, Rest
from dask_coded.rounds.layout import Layout, StripeRange, stripes_in, without
from dask_coded.rounds.options import RoundOptions
from dask_coded.rounds.policies import POLICIES, Policy
from dask_coded.rounds.reporting import Pace, Reporting
from dask_coded.rounds.round import Round
from dask_coded.rounds.scaling import Scales
from dask_coded.rounds.state import Assign, Command, Finish, RoundState, Withdraw
from dask_coded.rounds.verification import Verifier
from dask_coded.rounds.workers import Forecast

__all__ = [
    "POLICIES",
    "PRODUCT_ROWS",
    "Assembler",
    "Assign",
    "Command",
    "Finish",
    "Forecast",
    "Geometry",
    "InfeasibleError",
    "Layout",
    "LoopHistory",
    "Pace",
    "Policy",
    "Reporting",
    "Rest",
    "Round",
    "RoundOptions",
    "RoundState",
    "Scales",
    "StripeRange",
    "Verifier",
    "Withdraw",
    "batch_size",
    "deal",
    "fluid_time",
    "least_batch",
    "stripes_in",
    "without",
]
