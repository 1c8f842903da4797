"""Every way to write a product with a coded array, or with an array derived from one.

NumPy and dask.array write a product of two matrices as ``@``, ``dot``, ``matmul``, ``tensordot``,
``einsum`` and in other ways. This module reduces all of them to ``matrix @ x``.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import dask.array as da
import numpy as np
from dask.array import routines
from dask.array.core import Array
from numpy.lib.array_utils import normalize_axis_index

from dask_coded.arguments import meta_of
from dask_coded.compat import HookedArray, parse_einsum_input
from dask_coded.labels import UNLABELLED, Labels, as_factor, axes_of
from dask_coded.uncoded import say_uncoded, uncoded_product

# Before :mod:`dask_coded.dispatch` replaces it.
_einsum_of_dask = da.einsum
_NO_OUTPUT = "Argument 'out' must be None: products of coded arrays are new arrays."


class Factor(HookedArray, ABC):
    """A dask array, shape (rows, columns), that decides itself how its products are computed."""

    #: Whether ``self @ x`` is computed by coded rounds.
    is_coded = True
    #: By which labelled operands are aligned.
    labels: Labels = UNLABELLED

    @abstractmethod
    def _times(self, x: Any) -> Any:
        """Return ``self @ x``, or NotImplemented."""


def adopted(cls: Any, plain: Array) -> Any:
    """Return an instance of a subclass of dask's array with the values of a dask array."""
    return Array.__new__(cls, plain.dask, plain.name, plain.chunks, meta=meta_of(plain))


def as_plain(x: Any) -> Any:
    """Return a plain dask array instead of a Factor, and anything else unchanged."""
    return adopted(Array, x) if isinstance(x, Factor) else x


def matmul(a: Any, b: Any) -> Any:
    """Return ``a @ b``; at least one is a Factor."""
    from_left = isinstance(a, Factor)
    if from_left and not a.is_coded and isinstance(b, Factor):
        from_left = not b.T.is_coded
    if from_left:
        return _stacked(a, b) if np.ndim(b) > 2 else a._times(b)
    # Its last axis is summed over.
    a = as_factor(a.T, b.labels[0]).T if axes_of(a) else as_factor(a)
    if not isinstance(a, np.ndarray | Array):
        return NotImplemented
    if a.ndim > 2:
        return _stacked(a, b)
    if b.T.is_coded:
        return (b.T @ a.T).T
    say_uncoded(b.T.reason)
    return uncoded_product(a, as_plain(b))


def _stacked(a: Any, b: Any) -> Any:
    """Return ``a @ b``, of which one has more than two dimensions, as a product of matrices."""
    _check_unlabelled("matmul", (a, b))
    a, b = as_factor(a), as_factor(b)
    if not all(isinstance(factor, np.ndarray | Array) for factor in (a, b)):
        return NotImplemented
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"Shapes {a.shape} and {b.shape} do not fit together: the product sums over the last "
            "axis of the first factor and the last but one of the second."
        )
    if a.ndim > 2:
        *rest, summed = a.shape
        found = matmul(a.reshape(math.prod(rest), summed), b)
        return found.reshape(*rest, b.shape[1])
    *rest, summed, columns = b.shape
    beside = np.moveaxis(b, -2, 0).reshape(summed, math.prod(rest) * columns)
    found = matmul(a, beside).reshape(a.shape[0], *rest, columns)
    return np.moveaxis(found, 0, -2)


def dot(a: Any, b: Any) -> Any:
    """Return ``np.dot(a, b)``; at least one is a Factor."""
    if not (np.ndim(a) and np.ndim(b)):
        return np.multiply(a, b)
    # Of more than two dimensions, `dot` and `matmul` are different products.
    return _contract(a, -1, b, -2) if np.ndim(b) > 2 else matmul(a, b)


def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    if isinstance(axes, int | np.integer):
        axes = range(-axes, 0), range(axes)
    of_a, of_b = ([int(i) for i in np.atleast_1d(part)] for part in axes)
    if len(of_a) != 1 or len(of_b) != 1:
        # A sum over all elements, or no sum: what a reduction is to a coded array.
        _check_unlabelled("tensordot", (a, b))
        return NotImplemented
    return _contract(a, of_a[0], b, of_b[0])


def _contract(a: Any, of_a: int, b: Any, of_b: int) -> Any:
    """Sum over one axis of each factor."""
    if max(np.ndim(a), np.ndim(b)) > 2 or not (axes_of(a) or axes_of(b)):
        a, b = as_factor(a), as_factor(b)
    of_a, of_b = range(a.ndim)[of_a], range(b.ndim)[of_b]
    if max(a.ndim, b.ndim) > 2:
        return _plainly("tensordot", routines.tensordot, a, b, axes=((of_a,), (of_b,)))
    left = a if of_a == a.ndim - 1 else a.T
    right = b if of_b == 0 else b.T
    return matmul(left, right)


def _inner(a: Any, b: Any) -> Any:
    return _contract(a, -1, b, -1) if np.ndim(a) and np.ndim(b) else np.multiply(a, b)


def _einsum(*operands: Any, **kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        raise TypeError(_NO_OUTPUT)
    terms, output, arrays = parse_einsum_input(operands)
    # As they were given, because their conversion has lost the labels.
    given = operands[1:] if isinstance(operands[0], str) else operands[: 2 * len(arrays) : 2]
    if len(arrays) < 2 or not output:
        # One matrix, or a sum over all elements: what a reduction is to a coded array.
        _check_unlabelled("einsum", given)
        return NotImplemented
    if len(arrays) == 2 and not kwargs.get("dtype"):
        a, b = terms.split(",")
        free_a, free_b = ([i for i in t if i in output] for t in (a, b))
        summed = set(a + b) - set(output)
        single = len(summed) == 1 and all(len(set(t)) == len(t) <= 2 for t in (a, b))
        if single and summed <= set(a) & set(b) and len(output) == len(free_a) + len(free_b):
            found = _contract(given[0], a.index(*summed), given[1], b.index(*summed))
            return found if list(output) == free_a + free_b else found.T
    return _plainly("einsum", _einsum_of_dask, *operands, **kwargs)


def _check_unlabelled(name: str, args: Iterable[Any]) -> None:
    if any(axis.index is not None for arg in args for axis in axes_of(arg)):
        raise ValueError(
            f"This form of `{name}` would ignore the labels of its operands: write it as products "
            "`C @ x`, or pass the operands without labels, as `x.data` or `x.to_numpy()`."
        )


def _plainly(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _say_uncoded(name, args)
    return function(*map(as_plain, args), **kwargs)


def _say_uncoded(name: str, args: Iterable[Any]) -> None:
    _check_unlabelled(name, args)
    say_uncoded(f"This form of `{name}` is not coded: write it as products `C @ x`, if it is some")


def _uncoded(function: Any) -> Callable[..., Any]:
    """Return what says that a function is not coded, and leaves it to dask.array."""

    def product(*args: Any, **kwargs: Any) -> Any:
        _say_uncoded(function.__name__, args)
        return NotImplemented

    return product


def _transpose(a: Any, axes: Any = None) -> Any:
    return a.transpose() if axes is None else a.transpose(axes)


def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """Return a Factor with two axes exchanged."""
    first, second = (normalize_axis_index(axis, 2) for axis in (axis1, axis2))
    return a if first == second else a.transpose()


def _matvec(a: Any, b: Any) -> Any:
    if np.ndim(b) == 1:
        return matmul(a, b)
    # One of its vectors is a row of `b`.
    return matmul(b, a.T) if np.ndim(a) == 2 else _uncoded(np.matvec)(a, b)


def _vecmat(a: Any, b: Any) -> Any:
    return matmul(np.conj(a), b) if np.ndim(b) == 2 else _uncoded(np.vecmat)(a, b)


def _vecdot(a: Any, b: Any, axis: int = -1) -> Any:
    if np.ndim(a) == 1:
        return _contract(b, axis, np.conj(a), axis)
    if np.ndim(b) == 1:
        return np.conj(_contract(a, axis, np.conj(b), axis))
    if not np.ndim(a) == np.ndim(b) == 2:
        return _uncoded(np.linalg.vecdot)(a, b)
    # Row by row, or column by column: what a reduction is to a coded array.
    _check_unlabelled("vecdot", (a, b))
    if np.shape(a)[axis] != np.shape(b)[axis]:
        raise ValueError(
            f"Shapes {np.shape(a)} and {np.shape(b)} do not fit together: `vecdot` sums over axis "
            f"{axis} of both."
        )
    terms = np.multiply(np.conj(a), b)
    return terms.sum(axis=axis, dtype=terms.dtype)


def _multi_dot(arrays: Iterable[Any], *, out: Any = None) -> Any:
    if out is not None:
        raise TypeError(_NO_OUTPUT)
    factors = [a if axes_of(a) else as_factor(a) for a in arrays]
    shapes = list(map(np.shape, factors))
    if len(shapes) < 2 or any(len(shape) != 2 for shape in shapes[1:-1]):
        raise ValueError(
            "Argument 'arrays' of `multi_dot` must hold at least two matrices, of which the first "
            f"and the last may be vectors, the shapes are {shapes}."
        )

    def product(a: Any, b: Any) -> Any:
        return matmul(a, b) if isinstance(a, Factor) or isinstance(b, Factor) else a @ b

    if math.prod(shapes[0][:-1]) < math.prod(shapes[-1][1:]):
        return reduce(product, factors)
    # From the right, where products with a coded array do not need its transpose.
    return reduce(lambda right, left: product(left, right), reversed(factors))


def _matrix_power(a: Any, n: int) -> Any:
    if operator.index(n) < 1:
        return _uncoded(np.linalg.matrix_power)(a, n)
    return reduce(lambda power, _: matmul(a, power), range(n - 1), a)


UFUNCS: dict[Any, Callable[..., Any]] = {
    getattr(np, name): function
    for name, function in {
        "matmul": matmul,
        "matvec": _matvec,
        "vecmat": _vecmat,
        "vecdot": _vecdot,
    }.items()
    # NumPy 2.2 has all of them.
    if hasattr(np, name)
}
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.dot: dot,
    np.einsum: _einsum,
    np.inner: _inner,
    np.linalg.matmul: matmul,
    np.linalg.matrix_power: _matrix_power,
    np.linalg.matrix_transpose: _transpose,
    np.linalg.multi_dot: _multi_dot,
    np.linalg.tensordot: _tensordot,
    np.linalg.vecdot: _vecdot,
    np.matrix_transpose: _transpose,
    np.swapaxes: swapaxes,
    np.tensordot: _tensordot,
    np.transpose: _transpose,
    # dask.array does not have these, and would bring the whole matrix to this process.
    **{function: _uncoded(function) for function in (np.cross, np.kron, np.linalg.cross)},
}
#: By the names of functions of dask.array.
SPELLINGS: dict[str, Callable[..., Any]] = {
    "dot": dot,
    "einsum": _einsum,
    "matmul": matmul,
    "swapaxes": swapaxes,
    "tensordot": _tensordot,
    "transpose": _transpose,
}
