"""Codes as JSON.

A generator is stored with all its digits and not computed again, because another release of NumPy
or LAPACK may round it otherwise, and pieces could not be decoded.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dask_coded.codes import MDS, Code, RandomLinear, Repetition

#: The codes that can be stored, with their attributes besides those of all codes.
_KINDS: dict[str, tuple[type[Code], tuple[str, ...]]] = {
    "Code": (Code, ()),
    "MDS": (MDS, ()),
    "RandomLinear": (RandomLinear, ("density", "seed")),
    "Repetition": (Repetition, ("r",)),
}


def check_storable(code: Code) -> None:
    """Check that a code can be stored.

    Raises
    ------
    TypeError
        If it is of a class of the user's, which another process could not find.
    """
    if _KINDS.get(type(code).__name__, (None,))[0] is not type(code):
        raise TypeError(
            f"A store cannot name the class of {code!r}: encode with one of {sorted(_KINDS)}, such "
            "as `coded.Code(G, place=..., group=..., need=...)` with its generator."
        )


def to_json(code: Code) -> dict[str, Any]:
    """Return a code as JSON.

    Examples
    --------
    >>> from_json(to_json(MDS(5, 3))) == MDS(5, 3)
    True
    """
    check_storable(code)
    kind = type(code).__name__
    generator = code.G.astype("<f8").tobytes()
    return {
        "kind": kind,
        "attributes": {name: getattr(code, name) for name in _KINDS[kind][1]},
        "shape": list(code.G.shape),
        "generator": base64.b64encode(generator).decode(),
        "sha256": hashlib.sha256(generator).hexdigest(),
        "place": code.place.tolist(),
        "group": code.group.tolist(),
        "need": code.need.tolist(),
    }


def from_json(found: Mapping[str, Any]) -> Code:
    """Return the code that :func:`to_json` was given.

    Raises
    ------
    ValueError
        If its class is unknown, or its generator is damaged.
    """
    if found["kind"] not in _KINDS:
        raise ValueError(f"the code {found['kind']!r} is unknown")
    generator = base64.b64decode(found["generator"])
    if hashlib.sha256(generator).hexdigest() != found["sha256"]:
        raise ValueError("the generator of the code is damaged")
    kind, names = _KINDS[found["kind"]]
    code = kind.__new__(kind)
    for name in names:
        setattr(code, name, found["attributes"][name])
    Code.__init__(
        code,
        np.frombuffer(generator, "<f8").reshape(found["shape"]),
        place=found["place"],
        group=found["group"],
        need=found["need"],
    )
    return code
