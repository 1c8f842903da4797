"""The contract of policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from dask_coded.registry import Registry
from dask_coded.rounds.layout import Layout, StripeRange
from dask_coded.rounds.options import RoundOptions
from dask_coded.rounds.state import RoundState
from dask_coded.typing import Floats


class Policy(ABC):
    """The rule of one round: a first assignment, then a reaction to every event.

    A policy sees a :class:`RoundState` and nothing else; it does no I/O and reads no clock. The
    first assignment belongs to the class, because the scheduler makes it and knows no round. An
    instance reacts to the events of one round and may keep state.
    """

    @classmethod
    def from_options(cls, options: RoundOptions) -> Self:
        """Return an instance for one round, with the options that this policy uses."""
        return cls()

    @classmethod
    @abstractmethod
    def first(cls, layout: Layout, speeds: Floats, lags: Floats) -> list[list[StripeRange]]:
        """Return the ranges that each worker is assigned when the round starts.

        Parameters
        ----------
        layout : Layout
        speeds : ndarray, shape (workers,)
            Predicted work per second.
        lags : ndarray, shape (workers,)
            Seconds that each worker is expected to need to start and to report.

        Raises
        ------
        InfeasibleError
            If too few workers are expected to make progress.
        """

    def react(self, state: RoundState) -> float | None:
        """Move work after an event, by ``state.assign`` and ``state.withdraw``.

        Returns
        -------
        float or None
            The time at which to be called again if nothing happens before.
        """
        return None


#: Policies by the name under which the configuration and the benchmarks select them.
POLICIES: Registry[type[Policy]] = Registry("policy")
