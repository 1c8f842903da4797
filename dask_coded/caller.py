"""The code that called this library, which is where its warnings point to."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

# Through these a call may come, by the names of their packages.
_LIBRARIES = {
    "dask_coded",
    "dask",
    "distributed",
    "networkx",
    "numpy",
    "pandas",
    "sklearn",
    "xarray",
}


def warner(category: type[Warning]) -> Callable[[str], None]:
    """Return a function that warns, from any thread, where this library was called just now.

    Parameters
    ----------
    category : type of Warning

    Returns
    -------
    callable
        Takes the message. Python shows it once for each line that calls the library.
    """
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    file, line, names = frame.f_code.co_filename, frame.f_lineno, frame.f_globals
    module, registry = names.get("__name__"), names.setdefault("__warningregistry__", {})

    def warn(message: str) -> None:
        warnings.warn_explicit(message, category, file, line, module, registry)

    return warn
