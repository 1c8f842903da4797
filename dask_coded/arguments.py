"""Argument checks whose messages say what was expected and what was passed."""

from __future__ import annotations

import math
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from functools import singledispatch
from numbers import Real
from typing import Any

import numpy as np


def check_whole(name: str, value: Any, least: int | None = 1) -> int:
    """Return a value as int; it must be a whole number, of at least ``least`` unless that is None.

    Raises
    ------
    ValueError
        If it is not.

    Examples
    --------
    >>> check_whole("steps", 2.5)
    Traceback (most recent call last):
        ...
    ValueError: Argument 'steps' must be a whole number of at least 1, it is 2.5.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):
        limit = "" if least is None else f" of at least {least}"
        raise ValueError(f"Argument {name!r} must be a whole number{limit}, it is {value!r}.")
    return int(value)


def check_place(name: str, value: Any) -> str:
    """Return a path as an absolute one, and an address that fsspec knows as it is.

    Raises
    ------
    TypeError
        If it is neither.

    Examples
    --------
    >>> check_place("storage", "s3://bucket/name")
    's3://bucket/name'
    """
    place = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(place, str) or not place:
        raise TypeError(
            f"Argument {name!r} must be a path, or an address such as 's3://bucket/name', it is "
            f"{value!r}."
        )
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))


def check_redundancy(value: Any, n: int, losses: int = 1) -> int:
    """Return a redundancy as int; ``losses * redundancy`` must be less than ``n`` workers.

    Raises
    ------
    ValueError
        If it is not, or the redundancy is negative or no whole number.

    Examples
    --------
    >>> check_redundancy(4, n=4)
    Traceback (most recent call last):
        ...
    ValueError: Argument 'redundancy' must be a whole number from 0 to 3 with 4 workers, it is 4.
    """
    n = check_whole("n", n)
    most = (n - 1) // losses
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not 0 <= value <= most:
        workers = "worker" if n == 1 else "workers"
        raise ValueError(
            f"Argument 'redundancy' must be a whole number from 0 to {most} with {n} {workers}, "
            f"it is {value!r}."
        )
    return int(value)


def check_positive(
    name: str, value: float, *, or_zero: bool = False, or_infinite: bool = False
) -> None:
    """Check that a number is positive and finite.

    Raises
    ------
    ValueError
        If it is not, apart from zero with ``or_zero`` and infinity with ``or_infinite``.

    Examples
    --------
    >>> check_positive("tol", -1, or_zero=True)
    Traceback (most recent call last):
        ...
    ValueError: Argument 'tol' must be 0 or a positive number, it is -1.
    """
    above = isinstance(value, Real) and (value >= 0 if or_zero else value > 0)
    if not above or (value == math.inf and not or_infinite):
        wanted = "0 or a positive number" if or_zero else "a positive number"
        raise ValueError(f"Argument {name!r} must be {wanted}, it is {value!r}.")


def check_fraction(name: str, value: float) -> None:
    """Check that a number is between 0 and 1.

    Raises
    ------
    ValueError
        If it is not.

    Examples
    --------
    >>> check_fraction("floor", 2)
    Traceback (most recent call last):
        ...
    ValueError: Argument 'floor' must be between 0 and 1, it is 2.
    """
    if not (isinstance(value, Real) and 0 <= value <= 1):
        raise ValueError(f"Argument {name!r} must be between 0 and 1, it is {value}.")


@singledispatch
def meta_of(array: Any) -> Any:
    """Return an array of the type that an array's chunks have: by default the array itself.

    :mod:`dask_coded.compat` knows dask arrays; this module knows no Dask.
    """
    return array


def check_unmasked(what: str, array: Any) -> Any:
    """Return an array, or a dask array, unless its elements are masked.

    Raises
    ------
    TypeError
        If it is a masked array: a product would silently use the values under the mask.

    Examples
    --------
    >>> check_unmasked("The operand", np.ma.masked_equal([1.0, 2.0], 2.0))
    Traceback (most recent call last):
        ...
    TypeError: The operand must not be masked: replace masked elements, as `x.filled(0)` does.
    """
    if isinstance(meta_of(array), np.ma.MaskedArray):
        raise TypeError(
            f"{what} must not be masked: replace masked elements, as `x.filled(0)` does."
        )
    return array


def check_chunk(what: str, found: Sequence[int], declared: Sequence[int]) -> None:
    """Check that a chunk of a dask array has the shape that the array declares.

    The shapes of arrays made by ``map_blocks``, for example, may be wrong. Rows would be lost then.

    Raises
    ------
    ValueError
        If it has another shape.

    Examples
    --------
    >>> check_chunk("X", (80, 6), declared=(40, 6))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: A chunk of X has shape (80, 6), its dask array declares (40, 6): call ...
    """
    if tuple(found) != tuple(declared):
        raise ValueError(
            f"A chunk of {what} has shape {tuple(found)}, its dask array declares "
            f"{tuple(declared)}: call `compute_chunk_sizes()` first."
        )


def check_dense(what: str, array: Any) -> Any:
    """Return an array, or a dask array, unless it or its chunks are sparse, of any package.

    Raises
    ------
    TypeError
        If it is sparse.

    Examples
    --------
    >>> import scipy.sparse
    >>> check_dense("The operand", scipy.sparse.eye_array(2))
    Traceback (most recent call last):
        ...
    TypeError: The operand must be dense, it is sparse: pass a NumPy array, as `x.todense()` is.
    """
    if hasattr(meta_of(array), "todense"):
        raise TypeError(
            f"{what} must be dense, it is sparse: pass a NumPy array, as `x.todense()` is."
        )
    return array


def unwrapped(x: Any) -> Any:
    """Return the array in a PyTorch tensor or in an xarray object, and anything else unchanged.

    The array shares the tensor's memory, unless that is a GPU's. Numbers of a dtype that NumPy does
    not have, such as bfloat16 of PyTorch or of ml_dtypes, are converted to the smallest type
    that holds them all.

    Raises
    ------
    RuntimeError
        If the tensor requires a gradient, which would silently miss what is done with the array.
    """
    # These can only be here if their libraries have been imported.
    torch: Any = sys.modules.get("torch")
    if torch and isinstance(x, torch.Tensor):
        return _of_tensor(torch, x.cpu())
    x = unlabelled(x)
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.type.__module__ == "ml_dtypes":
        fitting = (kind for kind in _WIDER if np.can_cast(dtype, kind, "safe"))
        x = x.astype(next(fitting, np.float64))
    return x


def unlabelled(x: Any) -> Any:
    """Return the array in an xarray object, and anything else unchanged."""
    xarray: Any = sys.modules.get("xarray")
    return x.data if xarray and isinstance(x, xarray.DataArray | xarray.Variable) else x


# What holds the numbers of small dtypes.
_WIDER = (np.int8, np.uint8, np.float32, np.complex64)


def _of_tensor(torch: Any, x: Any) -> Any:
    if x.is_floating_point() and x.dtype not in (torch.float16, torch.float32, torch.float64):
        x = x.to(torch.float32)
    elif x.dtype == torch.complex32:
        x = x.to(torch.complex64)
    return x.resolve_conj().resolve_neg().numpy()


def to_tensor(array: np.ndarray[Any, Any], like: Any) -> Any:
    """Return a NumPy array as a PyTorch tensor if ``like`` is one, and unchanged otherwise."""
    torch: Any = sys.modules.get("torch")
    return torch.from_numpy(array) if torch and isinstance(like, torch.Tensor) else array


def check_stopping(tol: float, max_iter: int) -> None:
    """Check the stopping criteria of an iteration.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check_positive("tol", tol, or_zero=True)
    check_whole("max_iter", max_iter)


def reachable(tol: float, operator: Any) -> float:
    """Return a tolerance for a residual of products, unless it is 0 no less than can be reached.

    Parity is rounded when it is stored, and so are all products that are decoded from it. Other
    operators multiply the matrix itself.

    Parameters
    ----------
    tol : float
        Relative.
    operator : anything with ``operator @ x``
        A coded one has a ``code`` and a ``dtype``.
    """
    code = getattr(operator, "code", None)
    if not tol or code is None or min(code.block_of) >= 0:
        return tol
    return max(tol, 10 * float(np.finfo(operator.dtype).eps))


def check_workers(workers: Sequence[str] | None) -> list[str] | None:
    """Return the addresses that a user named as a list; None stands for all workers.

    Raises
    ------
    TypeError
        If they are not a list of addresses.
    """
    if workers is None:
        return None
    named = [] if isinstance(workers, str) or not isinstance(workers, Iterable) else list(workers)
    if not named or not all(isinstance(address, str) for address in named):
        raise TypeError(
            f"Argument 'workers' must be a list of the addresses of workers, it is {workers!r}."
        )
    return named


def to_csr(matrix: Any) -> Any:
    """Return a SciPy sparse matrix in CSR format, with the same products.

    In COO format a cell may have several entries, whose sum is the element. SciPy's conversion adds
    them up in the matrix's dtype, where the sum may not fit; its products add them up in the
    product's dtype. Entries of a narrow dtype are therefore kept apart.

    Parameters
    ----------
    matrix : scipy.sparse array or matrix, shape (m, n)

    Returns
    -------
    scipy.sparse.csr_array or csr_matrix, shape (m, n)
        Of the same dtype.

    Raises
    ------
    ValueError
        If an index is out of range: SciPy would read or write other memory.

    Examples
    --------
    >>> import scipy.sparse
    >>> twice = scipy.sparse.coo_array(([200, 100], ([0, 0], [0, 0])), dtype=np.uint8)
    >>> to_csr(twice) @ [1.0], twice.tocsr() @ [1.0]
    (array([300.]), array([44.]))
    """
    if matrix.format in ("csr", "csc", "bsr"):
        # Of another object, because the check replaces attributes.
        parts = matrix.data, matrix.indices, matrix.indptr
        type(matrix)(parts, shape=matrix.shape).check_format(full_check=True)
    found = matrix.tocsr()
    wide = np.result_type(matrix.dtype, np.float64) == matrix.dtype
    if matrix.format != "coo" or wide or found.nnz == matrix.nnz:
        return found
    row, column = matrix.coords
    order = np.argsort(row, kind="stable")
    indptr = np.searchsorted(row[order], np.arange(matrix.shape[0] + 1))
    return type(found)((matrix.data[order], column[order], indptr), shape=matrix.shape)


def printable(text: str, encoding: str | None = None) -> str:
    r"""Return text for a terminal: escapes stand for what it would obey or cannot show.

    Parameters
    ----------
    text : str
    encoding : str, optional
        Of the terminal; by default it shows all characters.

    Examples
    --------
    >>> print(printable("Kr\u00e4he \u6771 \x1b[2J", "latin-1"))
    Krähe \u6771 \x1b[2J
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or _is_shown(c) else ascii(c)[1:-1] for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding) if encoding else text


def _is_shown(character: str) -> bool:
    """Whether it is a space, or joins or parts letters as some scripts and emoji need it."""
    return character in "\u200c\u200d" or unicodedata.category(character) == "Zs"
