"""What an algorithm can learn about a round that has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dask_coded.rounds import StripeRange, stripes_in


@dataclass
class RoundReport:
    """What happened in a round.

    Attributes
    ----------
    seconds : float
        From the operand to the decoded result.
    workers : int
        Workers whose shares were used.
    messages : int
        Messages sent and received by the coordinator.
    alone : bool
        Whether the coordinator has computed the product alone, because a round takes longer.
    doubtful : int
        Rows of the result that have lost digits, see :class:`dask_coded.AccuracyWarning`.
    error : float
        Estimate of the largest error of these rows, relative to ``|A| @ |x|`` of the row.
    failed : dict of str to str
        The exceptions of workers whose stripes were computed elsewhere, by address.
    timeline : list of (address, piece, start stripe, stop stripe, begin, end)
        Which worker computed which stripes when, in seconds since the round started.
    """

    seconds: float = 0.0
    workers: int = 0
    messages: int = 0
    alone: bool = False
    doubtful: int = 0
    error: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    timeline: list[tuple[str, int, int, int, float, float]] = field(default_factory=list)

    def add(self, address: str, ranges: Sequence[StripeRange], seconds: float, end: float) -> None:
        """Add the stripes of a share, which a worker computed in ``seconds`` until ``end``."""
        total = stripes_in(ranges)
        begin = end - seconds
        for part in ranges:
            until = begin + seconds * (part.stop - part.start) / total
            self.timeline.append((address, *part, begin, until))
            begin = until
