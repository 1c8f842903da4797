"""A coded matrix in this process: its products are decoded from pieces, some of them parity."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_coded.codes import Code


class Decoded:
    """A matrix whose products are decoded from the pieces of other workers in each round.

    Parameters
    ----------
    matrix : ndarray, shape (rows, columns)
        Its pieces have its dtype.
    code : Code
    """

    def __init__(self, matrix: np.ndarray[Any, Any], code: Code) -> None:
        self.code, self.dtype, self.shape = code, matrix.dtype, matrix.shape
        self._random = np.random.default_rng(0)
        self._sides = [self._encode(side) for side in (matrix, matrix.T)]

    def _encode(self, matrix: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        k = self.code.k
        padded = np.pad(matrix, ((0, -len(matrix) % k), (0, 0)))
        blocks = list(padded.reshape(k, -1, matrix.shape[1]))
        return [piece.astype(matrix.dtype) for piece in self.code.encode(blocks)]

    def __matmul__(self, x: Any) -> np.ndarray[Any, Any]:
        pieces = self._sides[0]
        while not self.code.decodable(have := self._random.permutation(len(pieces))[: self.code.k]):
            pass
        blocks = self.code.decode([pieces[i] @ x for i in have], have.tolist())
        return blocks.reshape(-1, *blocks.shape[2:])[: self.shape[0]]

    @property
    def T(self) -> Decoded:
        """The transposed matrix, which has pieces of its own."""
        other = object.__new__(Decoded)
        vars(other).update(vars(self), shape=self.shape[::-1], _sides=self._sides[::-1])
        return other
