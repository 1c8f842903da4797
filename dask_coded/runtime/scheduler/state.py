"""What the scheduler knows of one coded array."""

from __future__ import annotations

from dataclasses import dataclass, field

from dask.typing import Key

from dask_coded.rounds.footprint import Footprint
from dask_coded.rounds.scaling import Exponents
from dask_coded.runtime.spec import CodedSpec
from dask_coded.typing import Floats


@dataclass
class ArrayState:
    """What the scheduler knows of one coded array."""

    spec: CodedSpec
    #: While the array is being encoded, keys of the source blocks, then those of their steps.
    sources: tuple[Key, ...] | None
    #: The client that encodes it.
    client: str
    work: Floats | None = None
    #: Bytes that workers have fetched from each other to make pieces.
    received: int = 0
    #: Exponents of the rows of source blocks, and those of their typical entries, as far as they
    #: have been reported: shape (2, rows).
    exponents: dict[int, Exponents] = field(default_factory=dict)
    #: Footprints of source blocks, as far as they have been reported.
    footprints: dict[int, Footprint] = field(default_factory=dict)
    #: For each rebuilt piece, see :attr:`RoundPlan.growth`.
    growth: dict[int, float] = field(default_factory=dict)
    #: Blocks whose checks were wrong, each with the worker that held the check.
    wrong_checks: set[tuple[int, str]] = field(default_factory=set)
    #: Keys of pieces that a client or a task still wants.
    alive: set[Key] = field(default_factory=set)
    #: The workers that the user named for it; None for all.
    allowed: set[str] | None = None

    def lost_message(self, held: int) -> str:
        """Say that the pieces that are left do not suffice."""
        code = self.spec.code
        return (
            f"{code!r} can lose {code.tolerance} workers; {held} of its {code.pieces} pieces are "
            f"left, which do not suffice: encode the array again, with more redundancy if workers "
            f"come and go."
        )
