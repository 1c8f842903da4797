"""A gradient that one worker gets late, shared by all workers of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Slow:
    """The first worker that asks for a gradient gets each one only when others have computed more.

    A pickle is the object itself, because this module can be imported by its name.

    Parameters
    ----------
    gradient : callable
    more : int
        Gradients that all others have to compute meanwhile.
    """

    present: Slow

    def __init__(self, gradient: Callable[..., Any], more: int) -> None:
        self._gradient = gradient
        self._more = more
        self._slow: int | None = None
        self._count = 0
        self._over = False
        self._changed = threading.Condition()
        Slow.present = self

    def __call__(self, *arguments: Any) -> Any:
        with self._changed:
            here = threading.get_ident()
            self._slow = self._slow or here
            if here == self._slow:
                goal = self._count + self._more
                self._changed.wait_for(lambda: self._over or self._count >= goal)
            else:
                self._count += 1
                self._changed.notify_all()
        return self._gradient(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Slow], tuple[()]]:
        return present, ()

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


def present() -> Slow:
    return Slow.present


class Held:
    """Has the updates of some workers wait, shared by all workers of this process."""

    released = threading.Event()

    @staticmethod
    def hold(dask_worker: Any) -> None:
        """Hold the next update of the training that a worker takes part in."""
        (trainer,) = dask_worker.extensions["dask-coded-training"].trainers.values()
        apply = trainer.replica.apply

        def wait(*arguments: Any) -> Any:
            Held.released.wait()
            return apply(*arguments)

        trainer.replica.apply = wait
