"""A round as a state machine: events in, commands out, no I/O and no clock."""

from __future__ import annotations

from dask_coded.rounds._decode import Assembler, Geometry
from dask_coded.rounds._round import Round

__all__ = ["Assembler", "Geometry", "Round"]
