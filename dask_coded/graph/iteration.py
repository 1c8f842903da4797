"""The power iteration that all rankings share.

Each ranking of this package is a step ``x -> x'`` of one or two products with an operator and a few
vector operations. This module repeats the step, decides when to stop, reports the rounds, and
resumes after the worker that ran the iteration was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.loop import ConvergenceError, Loop, Progress
from dask_coded.summary import Summary

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Ranks(Summary):
    """The result of a power iteration.

    Parameters
    ----------
    scores : ndarray, shape (n,)
    rounds : int
        Number of iterations.
    residual : float
        Sum of the absolute changes in the last iteration.
    """

    scores: Vector
    rounds: int
    residual: float


def product(operator: Any, x: Vector) -> Vector:
    """Return ``operator @ x`` in an array that the caller may change in place.

    Vector operations in place are not only faster: the result of a coded round lies in memory that
    other workers can read, so it need not be copied to be the next operand.

    Examples
    --------
    >>> import numpy as np
    >>> product(np.array([[0, 2], [1, 0]]), np.ones(2))
    array([2., 1.])
    """
    found = np.asarray(operator @ x)
    dtype = np.result_type(found, np.float64)  # a complex Laplacian has complex products
    # Other operators may keep the array that they return. The result of a round is ours alone.
    own = getattr(operator, "last_round", None) is not None and found.flags.writeable
    return found if own and found.dtype == dtype else found.astype(dtype)


def iterate(
    name: str,
    step: Callable[[Vector], Vector],
    start: Vector,
    *,
    operator: Any,
    tol: float,
    max_iter: int,
    loop: Loop,
    advice: str = "raise max_iter or tol",
) -> Ranks:
    """Repeat a step until it changes the vector by less than a tolerance.

    Parameters
    ----------
    name : str
        What is computed, for the error message.
    step : callable
        Returns the next vector. It must not modify its argument.
    start : ndarray, shape (n,)
    operator : object
        The operator of the last product in ``step``. If it records that product's duration and
        workers, the reports include them.
    tol : float
        Stop when the absolute changes of all elements sum to less than this. With 0, run exactly
        ``max_iter`` steps.
    max_iter : int
        Maximum number of steps.
    loop : Loop
        Receives a report of each step.
    advice : str
        What to do if ``tol`` is not reached, for the error message.

    Returns
    -------
    Ranks

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` steps, or the vector overflows.

    Examples
    --------
    >>> import numpy as np
    >>> from dask_coded.loop import QUIET
    >>> halfway = lambda x: (x + 1) / 2
    >>> arguments = dict(operator=None, tol=1e-3, max_iter=99, loop=QUIET)
    >>> iterate("One", halfway, np.zeros(1), **arguments)
    Ranks(scores=<(1,) float64: 0.999023>, rounds=10, residual=0.000976562)
    """
    first, x = loop.resume((1, start))
    # Workers of Dask return freed memory to the system, so each new array of this size would cost a
    # few times as much as computing its entries.
    changes = sizes = None
    # Divergence shows in the residual, so NumPy's warnings would add nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        # At least one: a loop that has ended may be resumed.
        for i in range(min(first, max_iter), max_iter + 1):
            found = step(x)
            changes = np.subtract(found, x, out=changes)
            x = found
            sizes = np.abs(changes, out=sizes)
            residual = float(sizes.sum())
            converged = residual < tol
            last = converged or i == max_iter or not np.isfinite(residual)
            loop.report(Progress.of(operator, i, residual), state=(i + 1, x), last=last)
            if last:
                break
    if not np.isfinite(residual) or (tol > 0 and not converged):
        raise ConvergenceError(
            f"{name} did not reach tol={tol:g} in {i} of max_iter={max_iter} rounds and still "
            f"changes by {residual:.3g} in a round: {advice}."
        )
    return Ranks(x, i, residual)
