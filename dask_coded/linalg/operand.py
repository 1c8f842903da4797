"""Encoding of an algorithm's matrix."""

from __future__ import annotations

from typing import Any

from dask_coded.array import CodedArray, encode


def as_coded(A: Any, code: Any, client: Any, *, transpose: bool = False) -> CodedArray:
    """Encode a matrix, unless it is already coded.

    Parameters
    ----------
    A, code, client
        See :func:`dask_coded.encode`.
    transpose : bool
        Whether products with the adjoint are needed.

    Raises
    ------
    TypeError
        If A is coded and ``code`` is given, or its transpose is needed and is not coded.
    """
    if not isinstance(A, CodedArray):
        return encode(A, code, client=client, transpose=transpose)
    if code is not None:
        raise TypeError(
            f"Argument 'code' is for an array that is not coded, this one is coded with {A.code}: "
            "leave out 'code'."
        )
    if transpose and not isinstance(A.T, CodedArray):
        raise TypeError(
            "Products with the transpose are needed, but this array was encoded without it: "
            "encode it with `transpose=True`."
        )
    return A
