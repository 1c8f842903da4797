"""What a policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dask_coded.planning.layout import Floats, Layout, Run
from dask_coded.planning.progress import Progress


class Policy(ABC):
    """One round's rule: a first assignment, then a reaction to every event.

    A policy sees nothing but a :class:`Progress`; it does no I/O and reads no clock. An instance
    serves one round, so that it may keep state.
    """

    @abstractmethod
    def first(self, layout: Layout, speeds: Floats, lags: Floats) -> list[list[Run]]:
        """The runs that each worker is given when the round begins.

        Parameters
        ----------
        layout : Layout
        speeds : ndarray, shape (workers,)
            Predicted work per second.
        lags : ndarray, shape (workers,)
            Seconds that each worker is expected to need to begin and to tell.
        """

    def react(self, progress: Progress) -> float | None:
        """Move work after an event, by ``progress.assign`` and ``progress.withdraw``.

        Returns
        -------
        float or None
            The time at which to be called again if nothing happens before.
        """
        return None

    def delays(self) -> Floats | None:
        """Seconds before each worker can begin what :meth:`first` gave it; None for at once.

        For baselines that move data between rounds; only the simulator charges it.
        """
        return None
