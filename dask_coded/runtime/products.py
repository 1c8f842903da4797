"""What algorithms in the cluster see of a coded pair: its product, with weights in between."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_coded.runtime.coordinator import Coordinator, RoundReport
from dask_coded.runtime.spec import check_weights


class PairOperator:
    """A coded pair inside the cluster: each :meth:`product` is one round, and gives a NumPy array.

    Algorithms get it in the place of a :class:`dask_coded.CodedPair`.

    Attributes
    ----------
    shape : (int, int)
        Of the product: columns of ``A`` and of ``B``.
    rows : int
        Rows of ``A`` and of ``B``: the length of the weights.
    dtype : numpy.dtype
    code : Polynomial
    last_round : RoundReport or None
        What happened in the round before.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        spec = coordinator.open()
        self.shape = spec.shape
        self.rows = spec.columns
        self.dtype = spec.dtype
        self.code = spec.code
        self.last_round: RoundReport | None = None

    def product(self, weights: Any = None) -> np.ndarray[Any, Any]:
        """``A.T @ diag(weights) @ B``, without weights ``A.T @ B``; as :meth:`CodedPair.product`.

        Parameters
        ----------
        weights : array_like, shape (rows,), optional

        Returns
        -------
        ndarray, shape (p, q)
        """
        if weights is not None:
            weights = check_weights(self.rows, np.asarray(weights))
        result, self.last_round = self._coordinator.play(weights)
        return result
