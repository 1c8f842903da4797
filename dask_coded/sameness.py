"""What a loop's state in files is of, so that no other call resumes from it.

The client says which function and which arguments. What a function's code does, and what its global
names refer to, is not compared: code may be mended before a loop is resumed. Coded arrays are told
apart by shape, dtype and, if they are kept in files, their encoding; by their entries in the task
that runs the loop, see `sketch` in `dask_coded.runtime.coordinator.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
from dask.tokenize import TokenizationError, tokenize
from distributed import Future

from dask_coded.array import CodedArray
from dask_coded.loop import Loop
from dask_coded.pair import CodedPair
from dask_coded.runtime.client.encoding import Encoded
from dask_coded.runtime.coordinator.tasks import map_nested


def coded_in(values: Any) -> list[CodedArray | CodedPair]:
    """Return the coded arrays and pairs in values, also in lists, tuples and dicts."""
    coded: list[CodedArray | CodedPair] = []

    def look(value: Any) -> Any:
        if isinstance(value, CodedArray | CodedPair):
            coded.append(value)
        return value

    map_nested(look, values)
    return coded


def owner_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return what a state in files is of, as JSON, and which arrays, in an order of their own.

    Raises
    ------
    TypeError
        If an argument cannot be told from others of its type.
    """
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    arguments = [*args, *sorted(kwargs.items())]  # keywords have no order
    arrays, ids = [], []
    for array in coded_in(arguments):
        ids.append(array.encoded.spec.id)
        encoded = array.encoded
        token = encoded.storage.token if isinstance(encoded, Encoded) and encoded.storage else ""
        shape = " x ".join(map(str, array.shape))
        arrays.append(f"{shape} {array.dtype} {token}".rstrip())
    # Not the module, which is `__main__` if it is run as a script.
    name = getattr(function, "__qualname__", type(function).__qualname__)
    described = _Comparison().plain([function, *arguments])
    return {"function": name, "arrays": arrays, "arguments": tokenize(described)}, ids


class _Comparison:
    """Describes values by what is the same in every process."""

    def __init__(self) -> None:
        self._within: set[int] = set()

    def plain(self, value: Any) -> Any:
        """Return lists of numbers, strings and arrays that are equal if two values are."""
        if isinstance(value, dict):
            items = ((str(key), self.plain(own)) for key, own in value.items())
            return ["dict", *sorted(items, key=itemgetter(0))]
        if isinstance(value, list | tuple):
            return list(map(self.plain, value))
        if isinstance(value, set | frozenset):
            return ["set", *sorted(tokenize(self.plain(item)) for item in value)]
        named = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        if named or (isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject):
            return value
        if isinstance(value, CodedArray | CodedPair | Loop):
            return type(value).__qualname__
        if isinstance(value, Future):
            return value.key
        if isinstance(value, partial):
            return ["partial", *map(self.plain, (value.func, value.args, value.keywords))]
        if isinstance(value, MethodType):
            return ["method", self.plain(value.__self__), value.__func__.__qualname__]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type | BuiltinFunctionType):
            return value.__qualname__
        try:
            return tokenize(value, ensure_deterministic=True)
        except TokenizationError:
            raise TypeError(
                f"A loop with storage cannot tell if it is resumed with the same "
                f"{type(value).__qualname__}: pass numbers, strings, arrays or dataclasses, or "
                "give the class a method `__dask_tokenize__`."
            ) from None

    def _function(self, function: FunctionType) -> Any:
        """Describe a function by its name, and by the values that it was made with."""
        if id(function) in self._within:  # it refers to itself
            return function.__qualname__
        self._within.add(id(function))
        cells = [self._content(cell) for cell in function.__closure__ or ()]
        made_with = cells, function.__defaults__, function.__kwdefaults__
        # A lambda has no name of its own.
        code = function.__code__.co_code if function.__name__ == "<lambda>" else b""
        constants = [c for c in function.__code__.co_consts if not hasattr(c, "co_code")]
        described = [function.__qualname__, self.plain(made_with), code]
        if code:
            described += [self.plain(constants), list(function.__code__.co_names)]
        self._within.discard(id(function))
        return described

    def _content(self, cell: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return None
