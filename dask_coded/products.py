"""Arrays that are derived from a coded one, and what products are to them.

A :class:`ProductArray` is a dask array of two dimensions that decides itself how ``@`` is computed:

- :class:`dask_coded.CodedArray`: by rounds.
- :class:`CodedView`, which is ``factor * C[rows]``: as ``factor * (C @ x)[rows]``.
- :class:`UncodedArray`: by dask.array. It says so, because such a product waits for all workers.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any, Self

import numpy as np
from dask.array.core import Array

from dask_coded.compat import handle_out
from dask_coded.labels import UNLABELLED, Labels, as_factor, lost
from dask_coded.spellings import FUNCTIONS, UFUNCS, Factor, adopted, as_plain, dot, matmul, swapaxes
from dask_coded.uncoded import (
    COLUMNS,
    ROWS,
    TRANSPOSED,
    elementwise,
    say_uncoded,
    uncoded_product,
)

# Smaller factors are rounded to fewer digits.
_TINY = np.finfo(np.float64).tiny


class ProductArray(Factor):
    """A dask array, shape (rows, columns), whose products may be coded, and those of its like."""

    # What subclasses implement, with `_times`.

    @abstractmethod
    def _scaled(self, plain: Array, factor: Any) -> ProductArray:
        """Return ``factor * self``, which as a dask array is ``plain``."""

    @abstractmethod
    def _selected(self, plain: Array, rows: Any) -> ProductArray:
        """Return ``self[rows]``, which as a dask array is ``plain``."""

    @abstractmethod
    def _transposed(self, plain: Array) -> ProductArray:
        """Return ``self.T``, which as a dask array is ``plain``."""

    @abstractmethod
    def _persisted(self, dsk: Any, rebuild: Any, args: Any, *, rename: Any = None) -> Array:
        """Return this array over another graph; ``rebuild`` makes the plain dask array."""

    def __dask_postpersist__(self) -> Any:
        return self._persisted, super().__dask_postpersist__()

    # Products.

    def __matmul__(self, other: Any) -> Any:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return matmul(other, self)

    def dot(self, other: Any) -> Any:
        """Return the product, as ``@`` does."""
        if (found := dot(self, other)) is NotImplemented:
            kind = type(other).__name__
            raise TypeError(f"The operand of a product must be an array, it is of type {kind}.")
        return found

    def transpose(self, *axes: Any) -> Array:
        """Return the transposed array; its products are coded if it was encoded, too."""
        plain = as_plain(self).transpose(*axes)
        order = axes[0] if len(axes) == 1 else axes
        # dask.array knows the identity only as a tuple.
        same = order is not None and [axis % 2 for axis in order] == [0, 1]
        return self if same else self._transposed(plain)

    def swapaxes(self, axis1: int, axis2: int) -> Array:
        """Return the array with two axes exchanged, as ``transpose`` does."""
        return swapaxes(self, axis1, axis2)

    def __array_ufunc__(self, numpy_ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        outs = kwargs.get("out", ())
        if any(isinstance(out, ProductArray) and out.is_coded for out in outs):
            raise TypeError(_FIXED)
        if method == "__call__" and numpy_ufunc in UFUNCS:
            if kwargs:
                say_uncoded(f"`{numpy_ufunc.__name__}` with keywords is not coded: leave them out")
            elif (result := UFUNCS[numpy_ufunc](*inputs)) is not NotImplemented:
                return result
        if outs:
            kwargs["out"] = tuple(map(as_plain, outs))
        plain = map(as_plain, inputs)
        result = as_plain(self).__array_ufunc__(numpy_ufunc, method, *plain, **kwargs)
        if len(outs) == 1 and isinstance(outs[0], ProductArray) and result is not NotImplemented:
            return handle_out(outs, result)
        return _derived(numpy_ufunc, inputs, result, kwargs) if method == "__call__" else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in FUNCTIONS:
            result = FUNCTIONS[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        types = tuple(Array if issubclass(kind, ProductArray) else kind for kind in types)
        return _derived(func, args, super().__array_function__(func, types, args, kwargs))

    # Derived arrays.

    def elementwise(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a ufunc of dask.array."""
        return _derived(op, args, super().elementwise(op, *args, **kwargs), kwargs)

    def __getitem__(self, index: Any) -> Any:
        plain = super().__getitem__(index)
        if plain is self or not isinstance(plain, Array) or plain.ndim != 2:
            return plain
        rows, *rest = index if isinstance(index, tuple) else (index,)
        whole = (p is Ellipsis or (isinstance(p, slice) and p == slice(None)) for p in rest)
        if rows is None or rows is Ellipsis or not all(whole):
            return UncodedArray(plain, COLUMNS, labels=lost(self.labels))
        # A copy, because the caller may change the indices before the product is computed.
        return self._selected(plain, copy(rows))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(_FIXED)

    def assigned(self, name: str, value: Any) -> None:
        """Refuse a new graph or new chunks, unless these are what was unknown before."""
        known = name == "dask" or not (self.chunks == value or np.isnan(self.shape).any())
        if self.is_coded and known:
            raise TypeError(_FIXED)

    def astype(self, dtype: Any, **kwargs: Any) -> Array:
        """Return a dask array of another dtype. Products stay coded if no entry is truncated."""
        plain = super().astype(dtype, **kwargs)
        if plain is self:
            return self
        before, after = self.dtype, plain.dtype
        inexact = before.kind in "fc" and np.can_cast(before, after, "same_kind")
        if inexact or np.can_cast(before, after, "safe"):
            return self._scaled(plain, 1)
        return UncodedArray(plain, elementwise("astype"), labels=self.labels)

    def rechunk(self, *args: Any, **kwargs: Any) -> Array:
        """Return a dask array of the same values in other chunks; products stay coded."""
        plain = super().rechunk(*args, **kwargs)
        return self if plain is self else self._scaled(plain, 1)

    def map_blocks(  # type: ignore[override]
        self, func: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Apply a function to the blocks, as for any dask array."""
        return _derived(func, (self, *args), super().map_blocks(func, *args, **kwargs), kwargs)

    def copy(self) -> Array:
        """Return a plain dask array, whose elements can be set and whose products are not coded."""
        return UncodedArray(super().copy(), elementwise("copy"), labels=self.labels)


_FIXED = (
    "The elements of a coded array cannot be set, because its other pieces would not follow: set "
    "those of `C.copy()`, or encode the changed array."
)


class CodedView(ProductArray):
    """``factor * C[rows]`` of a coded array ``C``, whose products are rounds of ``C``.

    Parameters
    ----------
    plain : dask array, shape (m, columns)
        Its values.
    base : ProductArray, shape (rows, columns)
        ``C``.
    factor : number
    selections : tuple
        Indices of rows, each of which selects from the rows that the one before left.
    """

    base: ProductArray
    factor: Any
    selections: tuple[Any, ...]

    def __new__(
        cls, plain: Array, base: ProductArray, factor: Any = 1, selections: tuple[Any, ...] = ()
    ) -> Self:
        self = adopted(cls, plain)
        self.base, self.factor, self.selections = base, factor, selections
        rows, columns = base.labels
        self.labels = (rows.lost() if selections else rows, columns)
        return self

    def __reduce__(self) -> Any:
        return type(self), (as_plain(self), self.base, self.factor, self.selections)

    def _persisted(self, dsk: Any, rebuild: Any, args: Any, *, rename: Any = None) -> Array:
        plain = rebuild(dsk, *args, rename=rename)
        return CodedView(plain, self.base, self.factor, self.selections)

    def _times(self, x: Any) -> Any:
        if not isinstance(x := as_factor(x, self.labels[1]), np.ndarray | Array):
            return self.base._times(x)
        dtype = np.result_type(self.dtype, x.dtype)
        if self.factor == 1:
            y = self.base @ x.astype(dtype, copy=False)
        else:
            # A dtype may not hold the product without the factor, or the operand with all of it, so
            # about its root comes first: a power of two, which rounds nothing.
            wide = np.dtype(np.float32) if dtype == np.float16 else dtype
            exponent = int(np.frexp(abs(self.factor))[1]) // 2
            first = 2.0 ** min(max(exponent, -60), 60)
            x = x.astype(wide, copy=False)
            y = self.base @ (x if first == 1 else x * wide.type(first))
        for rows in self.selections:
            y = y[rows]
        return (y if self.factor == 1 else y * (self.factor / first)).astype(dtype)

    def _scaled(self, plain: Array, factor: Any) -> ProductArray:
        product = self.factor * factor
        if not np.isfinite(product) or (0 not in (self.factor, factor) and np.abs(product) < _TINY):
            return UncodedArray(plain, elementwise("multiply"), labels=self.labels)
        return CodedView(plain, self.base, product, self.selections)

    def _selected(self, plain: Array, rows: Any) -> ProductArray:
        return CodedView(plain, self.base, self.factor, (*self.selections, rows))

    def _transposed(self, plain: Array) -> ProductArray:
        if self.selections:
            return UncodedArray(plain, ROWS, self, self.labels[::-1])
        if not (back := self.base.T).is_coded:
            return UncodedArray(plain, TRANSPOSED, self, self.labels[::-1])
        return CodedView(plain, back, self.factor)


class UncodedArray(ProductArray):
    """A dask array that is derived from a coded one in a way that its products cannot follow.

    Parameters
    ----------
    plain : dask array, shape (m, n)
        Its values.
    reason : str
        Why its products are not coded and what to do, without a full stop.
    transposed : ProductArray, shape (n, m), optional
        Its transpose, if the products of that are coded.
    labels : (Axis, Axis), optional
    """

    is_coded = False
    reason: str
    transposed: ProductArray | None

    def __new__(
        cls,
        plain: Array,
        reason: str,
        transposed: ProductArray | None = None,
        labels: Labels = UNLABELLED,
    ) -> Self:
        self = adopted(cls, plain)
        self.reason, self.transposed, self.labels = reason, transposed, labels
        return self

    def __reduce__(self) -> Any:
        return type(self), (as_plain(self), self.reason, self.transposed, self.labels)

    def _persisted(self, dsk: Any, rebuild: Any, args: Any, *, rename: Any = None) -> Array:
        plain = rebuild(dsk, *args, rename=rename)
        return UncodedArray(plain, self.reason, self.transposed, self.labels)

    __setitem__ = Array.__setitem__

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "dask":
            self.transposed = None  # The elements are others now.

    def _times(self, x: Any) -> Any:
        x = as_plain(as_factor(x, self.labels[1]))
        say_uncoded(self.reason)
        return uncoded_product(as_plain(self), x)

    def _scaled(self, plain: Array, factor: Any) -> ProductArray:
        return UncodedArray(plain, self.reason, labels=self.labels)

    def _selected(self, plain: Array, rows: Any) -> ProductArray:
        labels = (self.labels[0].lost(), self.labels[1])
        return UncodedArray(plain, self.reason, labels=labels)

    def _transposed(self, plain: Array) -> ProductArray:
        if self.transposed is not None:
            return self.transposed
        return UncodedArray(plain, self.reason, labels=self.labels[::-1])


def _derived(op: Any, args: tuple[Any, ...], plain: Any, kwargs: Any = ()) -> Any:
    """Return the result of an elementwise operation as what it is to products."""
    if not isinstance(plain, Array) or isinstance(plain, ProductArray) or plain.ndim != 2:
        return plain
    matrices = [arg for arg in args if isinstance(arg, ProductArray) and arg.shape == plain.shape]
    if not matrices:
        return plain
    factor = None
    # Integers overflow, and multiples of them then depend on the order of the operations. Keywords
    # change what the operation does, as `where=` and `dtype=` do.
    if len(matrices) == 1 and plain.dtype.kind in "fc" and not kwargs:
        factor = _factor(op, args)
    if factor is None:
        reason = elementwise(getattr(op, "__name__", repr(op)))
        return UncodedArray(plain, reason, labels=_labels_after(op, matrices))
    return matrices[0]._scaled(plain, factor)


def _labels_after(op: Any, matrices: list[ProductArray]) -> Labels:
    """Return the labels of the result: unknown if entries may have moved, or labels differ."""
    labels = matrices[0].labels
    stay = isinstance(op, np.ufunc) or op is getattr(operator, getattr(op, "__name__", ""), None)
    alike = all(
        own.same(other)
        for matrix in matrices[1:]
        for own, other in zip(labels, matrix.labels, strict=True)
    )
    return labels if stay and alike else lost(labels)


def _factor(op: Any, args: tuple[Any, ...]) -> Any:
    """Return the number that an operation multiplies its only array by, or None."""
    if op in (operator.neg, np.negative):
        return -1
    if op in (operator.pos, np.positive):
        return 1
    if op in (np.conjugate, np.conj) and args[0].dtype.kind != "c":
        return 1
    if len(args) != 2:
        return None
    numbers = [arg for arg in args if not isinstance(arg, Array)]
    if len(numbers) != 1 or np.ndim(numbers[0]) or np.asarray(numbers[0]).dtype.kind not in "biufc":
        return None
    # As a Python number, so that its dtype does not round or overflow what it is multiplied with.
    number = np.asarray(numbers[0]).item()
    number = float(number) if isinstance(number, int) else number
    if op in (operator.truediv, np.divide) and numbers[0] is args[1] and number:
        number = 1 / number
    elif op not in (operator.mul, np.multiply):
        return None
    return number if np.isfinite(number) else None


def _operator(name: str, op: Any = None) -> Callable[..., Any]:
    """Return the method of an operator, which also marks its result unless ``op`` is None."""
    plain = getattr(Array, name)

    @wraps(plain)
    def method(self: ProductArray, *others: Any) -> Any:
        # Plain arrays, because dask.array defers to subclasses that are not those of `self`.
        found = plain(as_plain(self), *map(as_plain, others))
        args = (*others, self) if name.startswith("__r") else (self, *others)
        return found if op is None else _derived(op, args, found)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
              "neg", "abs", "invert"):  # fmt: skip
    for _method in (f"__{_name}__", f"__r{_name}__"):
        if hasattr(Array, _method):
            setattr(ProductArray, _method, _operator(_method, getattr(operator, f"__{_name}__")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "divmod", "rdivmod", "lshift", "rlshift",
              "rshift", "rrshift"):  # fmt: skip
    setattr(ProductArray, f"__{_name}__", _operator(f"__{_name}__"))
