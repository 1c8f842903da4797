"""Writing beside a computation, which does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic

# How long a computation that has ended waits for its last state: some seconds, or so many times as
# long as it took to write any other one, because one may be under way before it.
_ENDING, _TIMES = 10.0, 4


class Background:
    """A thread that does one thing after the other; of what waits meanwhile, only the latest.

    It starts with the first thing to do, and ends with :meth:`close`. It does not keep a process: a
    store that does not answer must not either.

    Examples
    --------
    >>> done = []
    >>> background = Background("example")
    >>> background.do(lambda: done.append("this"))
    >>> background.wait(), done
    (True, ['this'])
    >>> background.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        self._work: Callable[[], None] | None = None
        self._busy = self._started = self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether something is being done, or waits."""
        return self._busy

    def do(self, work: Callable[[], None]) -> None:
        """Have something done, which must raise no exception. What still waits is dropped."""
        with self._changed:
            assert not self._closed
            self._work, self._busy = work, True
            if not self._started:
                self._started = True
                Thread(target=self._run, name=self._name, daemon=True).start()
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all is done; return False if that takes longer than some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def close(self) -> None:
        """End the thread once all is done; there must be nothing more to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = self._work is not None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._work is not None)
                work, self._work = self._work, None
            if work is None:
                return
            work()


class Writer:
    """Writes states beside a computation, which goes on if one of them cannot be written.

    Parameters
    ----------
    name : str
        Of the thread.
    failed : callable(exception)
        Called, in the thread or by :meth:`finish`, if a state is not written.
    ending : float
        How many seconds to wait for the last state, at least, because a store may hang.
    """

    def __init__(
        self, name: str, failed: Callable[[BaseException], object], ending: float = _ENDING
    ) -> None:
        self._failed = failed
        self._ending = ending
        self._longest = 0.0
        self._background = Background(name)
        #: Ends the thread.
        self.close = self._background.close

    @property
    def is_busy(self) -> bool:
        """Whether a state is being written, or waits."""
        return self._background.is_busy

    def begin(self, write: Callable[[], object]) -> None:
        """Write a state, instead of one that still waits to be written."""

        def work() -> None:
            began = monotonic()
            try:
                write()
            except BaseException as exc:  # also those of libraries that fsspec uses
                self._failed(exc)
            else:
                self._longest = max(self._longest, monotonic() - began)

        self._background.do(work)

    def finish(self, seconds: float | None = None) -> None:
        """Wait until the last state is written, for some seconds."""
        if seconds is None:
            seconds = max(self._ending, _TIMES * self._longest)
        if not self._background.wait(seconds):
            self._failed(TimeoutError(f"the store has not answered for {seconds:g} seconds"))
