"""Tables of implementations by name: codes, policies, predictors and aggregations.

All of them are entered in one way, by a decorator where they are defined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """Implementations of one kind, by name.

    Parameters
    ----------
    kind : str
        What the entries are, for messages.

    Examples
    --------
    >>> norms: Registry[Callable[[list[float]], float]] = Registry("norm")
    >>> @norms.register("max")
    ... def largest(x):
    ...     return max(map(abs, x))
    >>> norms["max"]([1.0, -2.0])
    2.0
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that enters a class or a function under a name.

        Raises
        ------
        ValueError
            If the name is taken.
        """

        def enter(entry: T) -> T:
            if name in self:
                raise ValueError(
                    f"The {self.kind} {name!r} is registered already, as {self[name]!r}: "
                    f"choose another name."
                )
            self[name] = entry
            return entry

        return enter
