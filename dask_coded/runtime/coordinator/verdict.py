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
    stripes : int
        Stripes of each piece.
    holders : sequence of str
        Address of the worker with each piece.
    prepare : callable, optional
        Prepares the verifier, in the algorithm's thread; by default shares are not verified.

    Attributes
    ----------
    waits : bool
        Whether shares cannot be verified yet, because the verifier is being prepared.
    odd : set of str
        Addresses of workers that sent what cannot be shares of theirs.
    """

    def __init__(
        self,
        code: Code,
        stripes: int,
        holders: Sequence[str],
        prepare: Callable[[], Verifier] | None,
    ) -> None:
        self._code = code
        self._stripes = stripes
        self._holders = holders
        self._prepare = prepare
        self._verifier: Verifier | None = None
        # With how much each contradicts its checks.
        self._contradicted: list[tuple[StripeRange, float]] = []
        self.waits = prepare is not None
        self.odd: set[str] = set()

    def prepare(self) -> Verifier:
        """Prepare the verifier, in the algorithm's thread."""
        assert self._prepare is not None
        return self._prepare()

    def begin(self, verifier: Verifier) -> None:
        """Verify shares from now on."""
        self._verifier, self.waits = verifier, False

    def accepts(self, address: str, ranges: Sequence[StripeRange], rows: Sequence[Any]) -> bool:
        """Return whether all shares of one message are possible, and agree with the checks."""
        if not self._are_possible(address, ranges, rows):
            self.odd.add(address)
            return False
        if (verifier := self._verifier) is None:
            return True
        before = len(self._contradicted)
        for part, found in zip(ranges, rows, strict=True):
            if not verifier.accepts(part, found):
                self._contradicted.append((part, verifier.deviation(part, found)))
        return len(self._contradicted) == before

    def _are_possible(
        self, address: str, ranges: Sequence[StripeRange], rows: Sequence[Any]
    ) -> bool:
        """Whether these are rows of pieces that the worker holds."""
        return len(rows) == len(ranges) and all(
            0 <= piece < len(self._holders)
            and self._holders[piece] == address
            and 0 <= start < stop <= self._stripes
            and isinstance(found, np.ndarray)
            for (piece, start, stop), found in zip(ranges, rows, strict=True)
        )

    def contradicting(self) -> set[str]:
        """Return the workers with some share that contradicts the checks, or cannot be one."""
        return self.odd | {self._holders[part.piece] for part, _ in self._contradicted}

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
