"""What a kept state is of, so that no other call resumes from it.

The client says which function and which arguments. What a function's code does, and what its global
names refer to, is not compared: code may be mended before a loop is resumed. Coded arrays are told
apart by shape, dtype and, if they are kept in files, their encoding; by their entries in the task
that runs the loop, see `sketch` in `dask_coded.runtime.coordinator.operators`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import WRAPPER_ASSIGNMENTS, cached_property, partial
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import scipy.sparse
from dask.tokenize import normalize_token, tokenize
from distributed import Future

from dask_coded.arguments import unlabelled
from dask_coded.array import CodedArray
from dask_coded.loop import Loop
from dask_coded.pair import CodedPair
from dask_coded.runtime.client.encoding import Encoded
from dask_coded.runtime.coordinator.tasks import map_nested

# What is described by what it says of itself.
_SCALARS = (bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, *_SCALARS)
# Buffers of batch normalisation that follow the samples.
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
# What `functools.update_wrapper` adds to an object.
_OF_WRAPPERS = ("__wrapped__", *WRAPPER_ASSIGNMENTS)


def coded_in(values: Any) -> list[CodedArray | CodedPair]:
    """Return the coded arrays and pairs in values, also in lists, tuples and dicts."""
    coded: list[CodedArray | CodedPair] = []

    def look(value: Any) -> Any:
        if isinstance(value := unlabelled(value), CodedArray | CodedPair):
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
    return {"function": name, "arrays": arrays, "arguments": hash_of([function, *arguments])}, ids


def hash_of(value: Any, *, trained: bool = False) -> str:
    """Return a hash that is the same in every process that runs the same program.

    With ``trained``, what a training changes does not count: parameters and modes of PyTorch's
    modules, and random generators.

    That of `dask.tokenize` is not, for objects whose class or function is defined in a script: it
    pickles them, and pickles of these have numbers of their own. It also depends on the version of
    Dask, and on which packages are installed.

    Raises
    ------
    TypeError
        If the value, or one within it, cannot be told from others of its type.
    """
    return _Comparison(trained).hash(value)


def _add(digest: Any, plain: Any) -> None:
    """Add lists of numbers, strings and arrays to a hash."""
    if isinstance(plain, np.ndarray):
        plain = np.ascontiguousarray(plain)
        digest.update(f"{plain.dtype.descr} {plain.shape} ".encode())
        if plain.nbytes:
            digest.update(plain.reshape(-1).view(np.uint8))
    elif isinstance(plain, list | tuple):
        digest.update(f"{len(plain)} parts ".encode())
        for part in plain:
            _add(digest, part)
    else:
        shown = repr(plain).encode(errors="surrogatepass")
        digest.update(f"{len(shown)} ".encode() + shown)


class _Comparison:
    """Describes values by what is the same in every process that runs the same program."""

    def __init__(self, trained: bool) -> None:
        self._trained = trained
        # What is being described, by `id`.
        self._within: set[int] = set()

    def hash(self, value: Any) -> str:
        """Return a hash of what describes a value."""
        digest = hashlib.blake2b(digest_size=16)
        _add(digest, self.plain(value))
        return digest.hexdigest()

    def plain(self, value: Any) -> Any:
        """Return lists of numbers, strings and arrays that are equal if two values are.

        Raises
        ------
        TypeError
            If the value cannot be told from others of its type.
        """
        if value is None or type(value) in _SCALARS:
            return value
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return value
        if id(value) in self._within:  # it refers to itself
            return type(value).__qualname__
        self._within.add(id(value))
        try:
            return [type(value).__qualname__, self._parts(value)]
        finally:
            self._within.discard(id(value))

    def _parts(self, value: Any) -> Any:
        if isinstance(unlabelled(value), CodedArray | CodedPair | Loop):
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
        if hasattr(type(value), "compared_by"):
            return self.plain(value.compared_by())
        if hasattr(value, "__dask_tokenize__"):
            return self.plain(value.__dask_tokenize__())
        if isinstance(value, np.ndarray) or scipy.sparse.issparse(value):
            return self._array(value)
        if isinstance(value, _CONTAINERS):
            return [self._held(value), self._attributes(value)]  # a subclass may have some
        if is_dataclass(value):
            names = [field.name for field in fields(value)]
            own = [self.plain(getattr(value, name, None)) for name in names]
            return [own, self._attributes(value, names)]
        if (compiled := getattr(value, "py_func", None)) is not None:
            return self.plain(compiled)  # by numba, whose attributes are those of its compiler
        if (inner := getattr(value, "__wrapped__", None)) is not None:
            # A function that is cached, say, or an object that stands for one.
            return [self.plain(inner), self._attributes(value, _OF_WRAPPERS)]
        if self._trained and hasattr(value, "named_modules"):
            return self._module(value)
        if self._trained and isinstance(value, np.random.Generator | np.random.RandomState):
            return None
        if hasattr(value, "detach"):  # a tensor of PyTorch; NumPy has no bfloat16
            tensor = value.detach().cpu()
            return np.asarray(tensor.float() if tensor.dtype.itemsize == 2 else tensor)
        if normalize_token.dispatch(type(value)) is not normalize_token.dispatch(object):
            return tokenize(value)
        return self._pickled(value)

    def _held(self, value: Any) -> Any:
        """Describe what a container holds, or the number or text that a subclass stands for."""
        if isinstance(value, dict):
            return self._items(value)
        if isinstance(value, list | tuple):
            return list(map(self.plain, value))
        if isinstance(value, set | frozenset):
            return sorted(map(self.hash, value))
        kinds: Any = (kind for kind in _SCALARS if isinstance(value, kind))
        return next(kinds)(value)

    def _module(self, module: Any) -> Any:
        """Describe a module of PyTorch without what a training changes."""
        parts = [
            (name, type(part).__qualname__, *(self._items(own) for own in _constants(part)))
            for name, part in module.named_modules()
        ]
        return parts

    def _array(self, value: Any) -> Any:
        if scipy.sparse.issparse(value):
            value = value.tocsr()
            return [value.shape, value.indptr, value.indices, value.data]
        if isinstance(value, np.ma.MaskedArray):
            return [self.plain(np.ma.getdata(value)), np.ma.getmaskarray(value)]
        plain = np.asarray(value)
        return plain if not plain.dtype.hasobject else [plain.shape, self._held(plain.tolist())]

    def _items(self, value: Mapping[Any, Any]) -> Any:
        return sorted(
            ([self.hash(key), self.plain(own)] for key, own in value.items()), key=itemgetter(0)
        )

    def _attributes(self, value: Any, known: Collection[str] = ()) -> Any:
        """Describe the attributes of a value that are neither known nor cached."""
        own = getattr(value, "__dict__", {})
        kept = {
            name: own[name]
            for name in own.keys() - set(known)
            if not isinstance(getattr(type(value), name, None), cached_property)
        }
        return self._items(kept)

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


def _constants(module: Any) -> Iterator[dict[str, Any]]:
    """Yield the options of a module, and what it computes with that is not learned."""
    yield {k: v for k, v in vars(module).items() if k[0] != "_" and k != "training"}
    yield {k: v for k, v in module.named_buffers(recurse=False) if k not in _RUNNING}
    yield {k: v for k, v in module.named_parameters(recurse=False) if not v.requires_grad}
