"""What a loop's state in files is of, so that no other call resumes from it.

The client says which function and which arguments. What a function's code does, and what its global
names refer to, is not compared: code may be mended before a loop is resumed. Coded arrays are told
apart by shape, dtype and, if they are kept in files, their encoding; by their entries in the task
that runs the loop, see `sketch` in `dask_coded.runtime.coordinator.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from dask.tokenize import normalize_token, tokenize
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
    """Describes values by what is the same in every process that runs the same program.

    `dask.tokenize` is not, for objects whose class or function is defined in a script: it pickles
    them, and pickles of these have numbers of their own.
    """

    def __init__(self) -> None:
        # What is being described, by `id`.
        self._within: set[int] = set()

    def plain(self, value: Any) -> Any:
        """Return lists of numbers, strings and arrays that are equal if two values are.

        Raises
        ------
        TypeError
            If the value cannot be told from others of its type.
        """
        named = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        if named and not isinstance(value, Enum):
            return value
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return value
        if id(value) in self._within:  # it refers to itself
            return type(value).__qualname__
        self._within.add(id(value))
        try:
            return [type(value).__qualname__, self._parts(value)]
        finally:
            self._within.discard(id(value))

    def _parts(self, value: Any) -> Any:
        if isinstance(value, dict):
            items = ((str(key), self.plain(own)) for key, own in value.items())
            return sorted(items, key=itemgetter(0))
        if isinstance(value, list | tuple):
            return list(map(self.plain, value))
        if isinstance(value, set | frozenset):
            return sorted(tokenize(self.plain(item)) for item in value)
        if isinstance(value, CodedArray | CodedPair | Loop):
            return None
        if isinstance(value, Future):
            return value.key
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, type | ModuleType):
            return value.__name__
        if isinstance(value, partial):
            return list(map(self.plain, (value.func, value.args, value.keywords)))
        if isinstance(value, MethodType):
            return self.plain(value.__self__), value.__func__.__qualname__
        if isinstance(value, BuiltinFunctionType):
            return self.plain(value.__self__), value.__qualname__
        if isinstance(value, FunctionType):
            return self._function(value)
        if hasattr(value, "__dask_tokenize__"):
            return self.plain(value.__dask_tokenize__())
        if is_dataclass(value):
            return [self.plain(getattr(value, field.name, None)) for field in fields(value)]
        if (inner := getattr(value, "__wrapped__", getattr(value, "py_func", None))) is not None:
            return self.plain(inner)  # what was compiled or cached
        if hasattr(value, "detach"):  # a tensor of PyTorch; NumPy has no bfloat16
            tensor = value.detach().cpu()
            return np.asarray(tensor.float() if tensor.dtype.itemsize == 2 else tensor)
        if normalize_token.dispatch(type(value)) is not normalize_token.dispatch(object):
            return tokenize(value)
        return self._pickled(value)

    def _pickled(self, value: Any) -> Any:
        """Describe an object by what its pickle would have of it."""
        try:
            how = value.__reduce_ex__(4)
        except Exception:
            raise TypeError(
                f"A loop with storage cannot tell if it is resumed with the same "
                f"{type(value).__qualname__}: pass numbers, strings, arrays or dataclasses, or "
                "give the class a method `__dask_tokenize__`."
            ) from None
        if isinstance(how, str):  # the name of a global object
            return how
        make, args, *state = how
        rest = [list(each) if isinstance(each, Iterator) else each for each in state]
        return [make.__qualname__, *map(self.plain, (*args, *rest))]

    def _function(self, function: FunctionType) -> Any:
        """Describe a function by its name, and by the values that it was made with."""
        cells = [self._content(cell) for cell in function.__closure__ or ()]
        made_with = self.plain([cells, function.__defaults__, function.__kwdefaults__])
        # A lambda has no name of its own.
        code = self._code(function.__code__) if function.__name__ == "<lambda>" else None
        return [function.__qualname__, made_with, code]

    def _code(self, code: CodeType) -> Any:
        inner = [c if not isinstance(c, CodeType) else self._code(c) for c in code.co_consts]
        return [code.co_code, list(code.co_names), self.plain(inner)]

    def _content(self, cell: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return None
