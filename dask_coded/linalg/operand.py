"""How the matrix of an algorithm gets to the cluster."""

from __future__ import annotations

from typing import Any

from dask_coded.array import CodedArray, encode


def as_coded(A: Any, code: Any, client: Any, *, transpose: bool = False) -> CodedArray:
    """Encode a matrix, unless it has been already.

    Parameters
    ----------
    A, code, client
        See :func:`dask_coded.encode`.
    transpose : bool
        Whether products with the adjoint are needed.

    Raises
    ------
    TypeError
        If A is coded and a code is asked for, or its transpose is needed and is not coded.
    """
    if not isinstance(A, CodedArray):
        return encode(A, code, client=client, transpose=transpose)
    if code is not None:
        raise TypeError(
            f"Argument 'code' is for an array that is not coded, this one has {A.code}."
        )
    if transpose and not isinstance(A.T, CodedArray):
        raise TypeError(
            "Products with the transpose are needed and this array was encoded without it: "
            "encode it with `transpose=True`."
        )
    return A
