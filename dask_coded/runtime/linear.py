"""What SciPy asks of a matrix, from its products and those of its transpose."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from scipy.sparse.linalg import LinearOperator

from dask_coded.runtime.spec import check_operand


class RoundOperator(LinearOperator):
    """A matrix of which every product, with a vector or with a whole block, is one round.

    SciPy's solvers take it as it is. They ask for products with the adjoint, for which the array
    must have been encoded with ``transpose=True``: one more round each, none of it conjugated
    twice. A subclass has ``_matmat`` and ``_transpose``.
    """

    def _matvec(self, x: Any) -> Any:
        return self._matmat(x)

    def _rmatmat(self, x: Any) -> Any:
        return (self.T @ x.conj()).conj()

    def _rmatvec(self, x: Any) -> Any:
        return self._rmatmat(x)

    def dot(self, x: Any) -> Any:
        """The product, as ``@``: a NumPy array, or an operator if ``x`` is one."""
        if isinstance(x, LinearOperator) or np.isscalar(x):
            return super().dot(x)
        return self._matmat(check_operand(self.shape, np.asarray(x)))

    def _rdot(self, x: Any) -> Any:
        if isinstance(x, LinearOperator) or np.isscalar(x):
            return super()._rdot(x)
        return (self.T @ np.asarray(x).T).T


def refuse_transpose() -> NoReturn:
    """Say that a product with the transpose needs a transposed encoding."""
    raise TypeError(
        "This array was encoded without its transpose: "
        "encode it with `transpose=True` to multiply from the left."
    )
