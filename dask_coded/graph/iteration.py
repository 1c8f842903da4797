"""The power iteration, once for all rankings: a step is repeated until it changes little.

Each ranking of this package is a step ``x -> x'`` of one or two products with an operator and a few
vector operations. How often it is repeated, when that is enough, what is told of it and where it
goes on after its worker was lost is the same for all, and is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.loop import ConvergenceError, Loop, Progress

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranks:
    """What a power iteration ends with.

    Parameters
    ----------
    scores : ndarray, shape (n,)
    rounds : int
        Iterations done.
    residual : float
        Sum of the absolute changes in the last one.
    """

    scores: Vector
    rounds: int
    residual: float


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
    """Repeat a step until it changes little.

    Parameters
    ----------
    name : str
        What is computed, for the error.
    step : callable
        Gives the next vector. It must not change the one that it is given.
    start : ndarray, shape (n,)
    operator : object
        What ``step`` multiplies with last: it may know how that product went.
    tol : float
        Stop when the vector changes by less than this, summed over all elements. 0: do exactly
        ``max_iter`` steps.
    max_iter : int
        Most steps to do.
    loop : Loop
        Told of each step.
    advice : str
        What to do if ``tol`` is not reached, for the error.

    Returns
    -------
    Ranks

    Raises
    ------
    ConvergenceError
        If ``tol`` is positive and not reached within ``max_iter`` steps, or the vector has outgrown
        floating point.

    Examples
    --------
    >>> import numpy as np
    >>> from dask_coded.loop import QUIET
    >>> halfway = lambda x: (x + 1) / 2
    >>> arguments = dict(operator=None, tol=1e-3, max_iter=99, loop=QUIET)
    >>> iterate("One", halfway, np.zeros(1), **arguments)
    Ranks(scores=array([0.99902344]), rounds=10, residual=0.0009765625)
    """
    first, x = loop.resume((1, start))
    # An iteration that diverges is noticed by its residual: no need to warn of it as well.
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(first, max_iter + 1):
            previous, x = x, step(x)
            residual = float(np.abs(x - previous).sum())
            converged = residual < tol
            last = converged or i == max_iter or not np.isfinite(residual)
            loop.report(Progress.of(operator, i, residual), state=(i + 1, x), last=last)
            if last:
                break
    if not np.isfinite(residual) or (tol > 0 and not converged):
        raise ConvergenceError(
            f"{name} is to change by less than tol={tol:g} in a round, after {i} of "
            f"max_iter={max_iter} rounds it still changes by {residual:.3g}: {advice}."
        )
    return Ranks(x, i, residual)
