"""How a product that is not coded is computed, and says so: a warning, an error or nothing."""

from __future__ import annotations

import operator
from typing import Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse

from dask_coded.arguments import meta_of
from dask_coded.caller import warner

# Reasons, without their full stops: why a product is not coded, and what to do.
TRANSPOSED = (
    "A product with the transpose is not coded, because this array was encoded without it: "
    "encode it with `transpose=True`"
)
ROWS = (
    "A product with some rows of a coded array is not coded from the left: multiply all rows, by "
    "a vector with zeros for the others"
)
COLUMNS = (
    "A product with some columns of a coded array is not coded: multiply all columns, by a vector "
    "with zeros for the others"
)


def elementwise(name: str) -> str:
    """Return the reason for the result of an operation that products cannot follow."""
    return (
        f"A product with the result of `{name}` is not coded: encode that result, or use that "
        "products are linear, as in `C @ x + D @ x` for `(C + D) @ x`"
    )


class UncodedWarning(UserWarning):
    """A product with a coded array is computed by plain dask.array, and waits for all workers."""


def say_uncoded(reason: str) -> None:
    """Say that a product is not coded, as ``coded.on-uncoded`` in Dask's configuration wants it.

    Parameters
    ----------
    reason : str
        A sentence without its full stop: why, and what to do.

    Raises
    ------
    UncodedWarning
        If the configuration says "error".
    ValueError
        If it says neither "warn" nor "error" nor "ignore".
    """
    wanted = dask.config.get("coded.on-uncoded")
    if wanted not in ("warn", "error", "ignore"):
        raise ValueError(
            "`coded.on-uncoded` in Dask's configuration must be 'warn', 'error' or 'ignore', it is "
            f"{wanted!r}."
        )
    message = f"{reason}. Until then it waits for the slowest worker, as any dask array does."
    if wanted == "error":
        raise UncodedWarning(message)
    if wanted == "warn":
        warner(UncodedWarning)(message)


def uncoded_product(a: Any, b: Any) -> Any:
    """Return ``a @ b`` of at least one dask array, one of which may have SciPy's sparse chunks.

    Those dask.array does not multiply by dense ones.
    """
    sparse = [scipy.sparse.issparse(meta_of(x)) for x in (a, b)]
    if sum(sparse) != 1 or max(a.ndim, b.ndim) > 2:
        return a @ b
    a, b = (da.asanyarray(x) for x in (a, b))
    left, right = "ij"[2 - a.ndim :], "jk"[: b.ndim]
    kept = (left + right).replace("j", "")
    dtype = np.result_type(a.dtype, b.dtype)
    return da.blockwise(
        operator.matmul,
        kept,
        a.rechunk({a.ndim - 1: -1}),
        left,
        b.rechunk({0: -1}),
        right,
        concatenate=True,
        dtype=dtype,
        meta=np.empty((0,) * len(kept), dtype),
    )
