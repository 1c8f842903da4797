"""Options for the rounds of an array, as set in the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from dask_coded.rounds.reporting import Reporting


@dataclass(frozen=True)
class RoundOptions:
    """How rounds are run.

    Parameters
    ----------
    policy, predictor : str
        Keys of ``POLICIES`` and ``PREDICTORS``.
    lead : float
        Seconds before a worker runs dry at which it is fed.
    reporting : Reporting
        How often workers report.
    tolerant : bool
        Whether the algorithm corrects the errors of a round in later ones, as iterations do. It
        then warns only of rows that have lost more than half of their digits.
    alone : bool
        Whether the coordinator of a loop may compute a product alone, if a round takes longer.
    """

    policy: str = "continuous"
    predictor: str = "adaptive"
    lead: float = 0.004
    reporting: Reporting = field(default_factory=Reporting)
    tolerant: bool = False
    alone: bool = True
