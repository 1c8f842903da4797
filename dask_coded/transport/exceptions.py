"""Exceptions as bytes: what a user's function raises on one worker is raised on another one.

An exception is unpickled by calling its class with its arguments. Many classes cannot be called in
that way: SciPy's ``ArpackNoConvergence`` needs more arguments than it keeps, others take keywords.
tblib, with which distributed sends the exceptions of tasks, makes them without a call, and pickles
their tracebacks. What an exception holds may also be impossible to pickle, such as a lock. It then
travels with the text of that object, because handlers depend on its class.
"""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec

from distributed.protocol.pickle import dumps
from tblib import pickling_support

logger = logging.getLogger("distributed.dask_coded")

P = ParamSpec("P")


def logged(hook: Callable[P, None]) -> Callable[P, None]:
    """Log what a hook of Dask raises, which would end the connection or close the worker for it."""

    @wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            logger.exception("A message of dask_coded cannot be handled, and has no effect")

    return call


def portable(exc: BaseException, where: str) -> bytes:
    """Pickle an exception that has been raised, with a note that says where.

    Parameters
    ----------
    exc : BaseException
    where : str

    Returns
    -------
    bytes
        A pickle of the exception, with its traceback, causes and notes. Objects in it that cannot
        be pickled are replaced by their text, and so is a traceback that is too deep. If that does
        not suffice, or it is no :class:`Exception`, as ``SystemExit`` is not, a pickle of a
        :class:`RuntimeError` with its text.
    """
    text = "".join(traceback.format_exception(exc, limit=-6))
    exc.add_note(f"Raised {where}")
    pickling_support.install(exc)
    versions = (_unchanged, _with_texts, partial(_traced, text))
    for version in versions if isinstance(exc, Exception) else ():
        try:
            packed: bytes = dumps(version(exc))
            if type(pickle.loads(packed)) is type(exc):
                return packed
        except Exception:  # pickling calls what the user's classes define
            continue
    shown = traceback.format_exception_only(exc)[0]  # also if its text cannot be made
    described = RuntimeError(f"{type(exc).__name__}: {shown.partition(': ')[2].strip()}")
    packed = dumps(_traced(f"Raised {where}:\n{text}", described))
    return packed


def unpacked(packed: bytes) -> Exception:
    """Return the exception that :func:`portable` has packed on another worker.

    A RuntimeError stands for one that cannot be rebuilt here, where its class may be unknown.
    """
    try:
        found = pickle.loads(packed)
    except Exception as exc:
        return RuntimeError(
            f"A worker has raised an exception that cannot be rebuilt here: {exc!r}"
        )
    assert isinstance(found, Exception)
    return found


def _unchanged(exc: BaseException) -> BaseException:
    return exc


def _with_texts(exc: BaseException) -> BaseException:
    """Return a copy of an exception that holds only what can be pickled."""
    found = type(exc).__new__(type(exc), *exc.args)
    found.args = tuple(map(_or_text, exc.args))
    for name, value in vars(exc).items():
        vars(found)[name] = list(value) if name == "__notes__" else _or_text(value)
    for name in ("__cause__", "__context__"):
        other = getattr(exc, name)
        setattr(found, name, None if other is None else _with_texts(other))
    found.__suppress_context__ = exc.__suppress_context__
    return found.with_traceback(exc.__traceback__)


def _traced(text: str, exc: BaseException) -> BaseException:
    """Return a copy of an exception with its traceback as a note."""
    found = _with_texts(exc).with_traceback(None)
    found.__cause__ = found.__context__ = None
    found.add_note(text)
    return found


def _or_text(value: Any) -> Any:
    try:
        pickle.loads(dumps(value))
    except Exception:
        return repr(value)
    return value
