"""The engine of a squeezed training step: units of samples, dealt out and moved as in a round.

``ledger`` grants units to workers and moves them while the step runs, on the engine of rounds;
``contribution`` is its other end, on each worker. Each unit counts exactly once. No I/O, no clock.
"""

from __future__ import annotations

from dask_coded.squeeze.contribution import Contribute, Contribution, Drop, Fold, Restart, UnitCount
from dask_coded.squeeze.dealing import Dealer
from dask_coded.squeeze.ledger import Ledger
from dask_coded.squeeze.units import UnitLayout

__all__ = [
    "Contribute",
    "Contribution",
    "Dealer",
    "Drop",
    "Fold",
    "Ledger",
    "Restart",
    "UnitCount",
    "UnitLayout",
]
