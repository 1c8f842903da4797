"""Functions of dask.array that compute products, made to see coded arrays.

Functions of dask.array do not dispatch on their arguments. Therefore :func:`dispatch_products` has
six of them ask first, as soon as there is a coded array in the process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import dask.array as da
from dask.array import einsumfuncs, routines

from dask_coded.products import ProductArray
from dask_coded.spellings import SPELLINGS, as_plain

_ORIGINALS: dict[str, Callable[..., Any]] = {name: getattr(da, name) for name in SPELLINGS}


def dispatch_products() -> None:
    """Have functions of dask.array, such as ``da.dot`` and ``da.einsum``, see coded arrays."""
    for name, original in _ORIGINALS.items():
        if getattr(da, name) is original:
            home = einsumfuncs if name == "einsum" else routines
            # In both, so that it is pickled by its name, as the original is.
            setattr(da, name, seeing := _seeing(original, SPELLINGS[name]))
            setattr(home, name, seeing)


def _seeing(original: Callable[..., Any], product: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def seeing(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, ProductArray) for arg in (*args, *kwargs.values())):
            bound = signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
            result = product(*args, **kwargs)
            if result is not NotImplemented:
                return result
            args = tuple(map(as_plain, args))
        return original(*args, **kwargs)

    return seeing
