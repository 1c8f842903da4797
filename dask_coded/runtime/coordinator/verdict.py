"""What the shares of a round say about each other: which of them agree with the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dask_coded.rounds import StripeRange, Verifier
from dask_coded.rounds.blame import Evidence
from dask_coded.runtime.coordinator.run_spec import RunSpec
from dask_coded.typing import Bools


class Verdict:
    """Verifies the shares of one round, and keeps what contradicts the checks.

    Parameters
    ----------
    run_spec : RunSpec
    prepare : callable, optional
        Prepares the verifier, in the algorithm's thread; by default shares are not verified.

    Attributes
    ----------
    waits : bool
        Whether shares cannot be verified yet, because the verifier is being prepared.
    odd : set of str
        Addresses of workers that sent what cannot be shares of theirs.
    """

    def __init__(self, run_spec: RunSpec, prepare: Callable[[], Verifier] | None) -> None:
        self._code, self._geometry = run_spec.spec.code, run_spec.spec.geometry
        self._row = run_spec.columns
        self._holders = run_spec.holders
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
            if deviation := verifier.deviation(part, found):
                self._contradicted.append((part, deviation))
        return len(self._contradicted) == before

    def _are_possible(
        self, address: str, ranges: Sequence[StripeRange], rows: Sequence[Any]
    ) -> bool:
        """Whether these are rows of pieces that the worker holds."""
        return len(rows) == len(ranges) and all(
            0 <= part.piece < len(self._holders)
            and self._holders[part.piece] == address
            and 0 <= part.start < part.stop <= self._geometry.stripes
            and isinstance(found, np.ndarray)
            and found.dtype.kind in "biufc"
            and found.shape == (self._rows(part), *self._row)
            for part, found in zip(ranges, rows, strict=True)
        )

    def _rows(self, part: StripeRange) -> int:
        """Return the rows of a range of stripes; a block may end within it."""
        edges = self._geometry.edges(int(self._code.group[part.piece]))
        block = int(self._code.block_of[part.piece])
        last = self._geometry.rows[block] if block >= 0 else int(edges[-1])
        return min(int(edges[part.stop]), last) - min(int(edges[part.start]), last)

    def contradicting(self) -> set[str]:
        """Return the workers with some share that contradicts the checks, or cannot be one."""
        return self.odd | {self._holders[part.piece] for part, _ in self._contradicted}

    def evidence(self, computed: Bools) -> Evidence | None:
        """Return what the shares say about the checks; None if all agree with them.

        ``computed`` says which stripes of each piece do, shape (pieces, stripes).
        """
        if self._verifier is None or not self._contradicted:
            return None
        return Evidence(self._code, computed, self._contradicted, self._verifier.limits)

    def holders(self, pieces: Iterable[int]) -> set[str]:
        """Return the workers with these pieces."""
        return {self._holders[piece] for piece in pieces}
