"""How a product that is not coded says so: a warning, an error or nothing."""

from __future__ import annotations

import dask

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
