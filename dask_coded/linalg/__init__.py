"""Eigenvalues and singular values by coded products: NumPy code over an operator with ``@``.

SciPy's own solvers run over coded rounds as well, see
:meth:`dask_coded.CodedArray.as_linear_operator`.
"""

from __future__ import annotations

from dask_coded.linalg.power import Eigenpair, power_iteration
from dask_coded.linalg.randomized import randomized_svd
from dask_coded.loop import ConvergenceError

__all__ = ["ConvergenceError", "Eigenpair", "power_iteration", "randomized_svd"]
