"""What the shares of a round say about each other: which of them agree with the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dask_coded.codes import Code
from dask_coded.rounds import StripeRange, Verifier
from dask_coded.rounds.blame import Evidence
from dask_coded.typing import Bools


class Verdict:
    """Verifies the shares of one round, and keeps what contradicts the checks.

    Parameters
    ----------
    code : Code
    holders : sequence of str
        Address of the worker with each piece.
    prepare : callable, optional
        Prepares the verifier, in the algorithm's thread; by default shares are not verified.

    Attributes
    ----------
    waits : bool
        Whether shares cannot be verified yet, because the verifier is being prepared.
    """

    def __init__(
        self, code: Code, holders: Sequence[str], prepare: Callable[[], Verifier] | None
    ) -> None:
        self._code = code
        self._holders = holders
        self._prepare = prepare
        self._verifier: Verifier | None = None
        # With how much each contradicts its checks.
        self._contradicted: list[tuple[StripeRange, float]] = []
        self.waits = prepare is not None

    def prepare(self) -> Verifier:
        """Prepare the verifier, in the algorithm's thread."""
        assert self._prepare is not None
        return self._prepare()

    def begin(self, verifier: Verifier) -> None:
        """Verify shares from now on."""
        self._verifier, self.waits = verifier, False

    def accepts(self, ranges: Sequence[StripeRange], rows: Sequence[Any]) -> bool:
        """Return whether all shares of one message agree with the checks of their stripes."""
        if (verifier := self._verifier) is None:
            return True
        before = len(self._contradicted)
        for part, found in zip(ranges, rows, strict=True):
            if not verifier.accepts(part, found):
                self._contradicted.append((part, verifier.deviation(part, found)))
        return len(self._contradicted) == before

    def contradicting(self) -> set[str]:
        """Return the workers of which some share contradicts the checks."""
        return {self._holders[part.piece] for part, _ in self._contradicted}

    def evidence(self, computed: Bools) -> Evidence | None:
        """Return what the shares say about the checks; None if all agree with them.

        ``computed`` says which stripes of each piece do, shape (pieces, stripes).
        """
        if self._verifier is None or not self._contradicted:
            return None
        deviation = np.zeros(computed.shape)
        for (piece, start, stop), size in self._contradicted:
            deviation[piece, start:stop] = size
        return Evidence(self._code, computed, deviation, self._verifier.limits)

    def holders(self, pieces: Iterable[int]) -> set[str]:
        """Return the workers with these pieces."""
        return {self._holders[piece] for piece in pieces}
