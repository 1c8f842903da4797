"""A matrix whose products take virtual time, for running algorithms as in a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_coded.simulation._simulation import SimulatedRound, Simulation


class SimulatedOperator:
    """A NumPy or SciPy matrix on which every ``operator @ x`` is one simulated round.

    The matrix computes the product; only the time that a cluster would take is simulated.

    Parameters
    ----------
    matrix : ndarray or sparse matrix, shape (rows, columns)
    simulation : Simulation

    Attributes
    ----------
    rounds : list of SimulatedRound
        One for each product so far.

    Examples
    --------
    >>> from dask_coded.codes import MDS
    >>> from dask_coded.simulation import Simulation, SimulatedOperator, constant
    >>> operator = SimulatedOperator(np.eye(3), Simulation(MDS(4, 3), constant([1, 1, 1, 0.2])))
    >>> (operator @ np.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    >>> round(operator.rounds[0].bound, 3)
    0.938
    """

    __array_ufunc__ = None  # so that `ndarray @ operator` comes here

    def __init__(self, matrix: Any, simulation: Simulation) -> None:
        self._matrix = matrix
        self.simulation = simulation
        self.rounds: list[SimulatedRound] = []
        self.shape: tuple[int, int] = matrix.shape
        self.dtype: np.dtype[Any] = matrix.dtype
        self.ndim = 2

    def __matmul__(self, other: Any) -> Any:
        product = self._matrix @ other
        self.rounds.append(self.simulation.step())
        return product

    dot = __matmul__

    def __rmatmul__(self, other: Any) -> Any:
        return (self.T @ np.asarray(other).T).T

    @property
    def T(self) -> SimulatedOperator:
        """The transposed operator; both share one list of rounds."""
        other = SimulatedOperator(self._matrix.T, self.simulation)
        other.rounds = self.rounds
        return other
