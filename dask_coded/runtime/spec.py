"""What the parts of the runtime tell each other: a coded array, and the tasks that concern it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import dask
import numpy as np
from dask._task_spec import Task
from dask.typing import Key
from dask.utils import parse_timedelta

from dask_coded.codes import Code, Polynomial, RandomLinear
from dask_coded.planning import POLICIES, PREDICTORS, Policy, Reporting
from dask_coded.planning.layout import Floats
from dask_coded.planning.policies import Continuous
from dask_coded.rounds import Assembler, Geometry

#: Name under which both plugins register, and of the event topic.
NAME = "dask-coded"


def as_key(key: Any) -> Key:
    """A key that came over a comm, on which tuples travel as lists."""
    return tuple(key) if isinstance(key, list) else key


class CodedDataLostError(RuntimeError):
    """Too few pieces of a coded array are left to rebuild it."""


@dataclass(frozen=True)
class RoundOptions:
    """How rounds are played: the configuration of the client that asked for them.

    Parameters
    ----------
    policy, predictor : str
        Keys of ``POLICIES`` and ``PREDICTORS``.
    lead : float
        Seconds before a worker runs dry at which it is fed.
    reporting : Reporting
    """

    policy: str
    predictor: str
    lead: float
    reporting: Reporting

    @classmethod
    def from_config(cls) -> Self:
        """What ``coded:`` in Dask's configuration says now.

        Raises
        ------
        ValueError
            If it names a policy or predictor that there is not.
        """
        config = dask.config.get("coded")
        for what, table in (("policy", POLICIES), ("predictor", PREDICTORS)):
            if config[what] not in table:
                raise ValueError(
                    f"`coded.{what}` in Dask's configuration must be one of {sorted(table)}, "
                    f"it is {config[what]!r}."
                )
        timing = config["round"]
        return cls(
            policy=config["policy"],
            predictor=config["predictor"],
            lead=parse_timedelta(timing["lead"]),
            reporting=Reporting(
                parse_timedelta(timing["report-interval"]), float(timing["report-growth"])
            ),
        )

    def make_policy(self) -> Policy:
        """A fresh policy for one round."""
        kind = POLICIES[self.policy]
        return kind(self.lead) if issubclass(kind, Continuous) else kind()


class Ingredient(NamedTuple):
    """What a piece is made of: ``piece[at : at + rows] += weight * source[start : start + rows]``.

    Parameters
    ----------
    source : int
        A source block or another piece.
    weight : float
    rows, start, at : int
    """

    source: int
    weight: float
    rows: int
    start: int = 0
    at: int = 0


@dataclass(frozen=True, eq=False)
class ArraySpec:
    """A coded array, for whoever takes part in its rounds.

    Parameters
    ----------
    id : str
        Unique name.
    code : Code
    geometry : Geometry
        Rows of every block, stripes of every piece.
    columns : int
        Columns of the array.
    dtype : numpy.dtype
    sparse : type or None
        ``scipy.sparse.csr_array`` or ``csr_matrix`` if pieces are of that type, None for NumPy.
    keys : tuple
        Dask key of each piece.
    transposed : str or None
        The id of the encoding of the transposed array, if there is one.
    check_finite : bool
        Whether NaN and infinity are refused when pieces are made.
    """

    id: str
    code: Code
    geometry: Geometry
    columns: int
    dtype: np.dtype[Any]
    sparse: type | None
    keys: tuple[Key, ...]
    transposed: str | None = None
    check_finite: bool = True

    #: What workers compute on the stripes of their pieces, a key of ``KERNELS``.
    kernel: ClassVar[str] = "matvec"

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.geometry.rows), self.columns

    def piece_rows(self, piece: int) -> int:
        """Rows of a piece; parity of blocks of unequal length has those of the longest."""
        block = int(self.code.block_of[piece])
        return max(self.geometry.rows) if block < 0 else self.geometry.rows[block]

    @property
    def uniform_work(self) -> Floats:
        """Work per stripe of a dense piece, in rows: shape (pieces, stripes)."""
        return np.stack(
            [np.diff(self.geometry.edges(g)).astype(np.float64) for g in self.code.group.tolist()]
        )

    @property
    def homes(self) -> list[int]:
        """For each source block the piece beside which it is put while the array is encoded."""
        return self.code.systematic_pieces

    def extended(self, count: int) -> Self:
        """With so many pieces more, of a code that can grow."""
        assert isinstance(self.code, RandomLinear)
        first = self.code.pieces
        more = [(f"{self.id}-extra", i) for i in range(first, first + count)]
        return replace(self, code=self.code.extended(count), keys=(*self.keys, *more))

    def from_sources(self, piece: int) -> list[Ingredient]:
        """How to make a piece out of the source blocks."""
        return _combined(self.code.G[piece], self.geometry.rows)

    def from_pieces(self, piece: int, others: Sequence[int]) -> list[Ingredient]:
        """How to make a piece out of others.

        Raises
        ------
        DecodeError
            If the others do not determine it.
        """
        weights = self.code.combination(piece, others)
        return [
            Ingredient(i, float(w), self.piece_rows(i))
            for i, w in zip(others, weights, strict=True)
            if w
        ]

    def assembler(self, x: np.ndarray[Any, Any] | None) -> Assembler:
        """What shares of a round with this operand are decoded in."""
        assert x is not None
        return Assembler(self.code, self.geometry, np.result_type(self.dtype, x.dtype), x.shape[1:])

    def result(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What a finished round gives, from all its blocks: here these, ``A @ x``."""
        return rows


@dataclass(frozen=True, eq=False)
class PairSpec(ArraySpec):
    """A coded pair of matrices ``A`` (N, p) and ``B`` (N, q), whose rounds give ``A.T @ D @ B``.

    A piece is one matrix, ``N`` columns wide: on top the transposed combination of blocks of ``A``,
    below it that of blocks of ``B``, each as high as its longest block. So a pair of factors is
    stored, moved and spilled as any piece is, and neither can be lost without the other. Stripes
    are rows of the upper part: those of the piece's product. The geometry is that of the blocks
    of the product, ``A_j.T @ B_l`` in the order of the code.

    Parameters
    ----------
    right_rows : tuple of int, length b
        Columns of each block of ``B``.
    right_source : int
        Number of the first block of ``B`` among the source blocks: ``a``, or 0 if both matrices
        have the same blocks.
    """

    code: Polynomial
    right_rows: tuple[int, ...] = field(kw_only=True)
    right_source: int = field(kw_only=True)

    kernel: ClassVar[str] = "bilinear"

    @property
    def left_rows(self) -> tuple[int, ...]:
        """Columns of each block of ``A``."""
        return self.geometry.rows[:: self.code.b]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.left_rows), sum(self.right_rows)

    def piece_rows(self, piece: int) -> int:
        return max(self.left_rows) + max(self.right_rows)

    @property
    def homes(self) -> list[int]:
        return [j % self.code.pieces for j in range(self.right_source + self.code.b)]

    def from_sources(self, piece: int) -> list[Ingredient]:
        left, right = self.code.left.G[piece], self.code.right.G[piece]
        below = max(self.left_rows)
        return [
            *_combined(left, self.left_rows),
            *_combined(right, self.right_rows, first=self.right_source, at=below),
        ]

    def from_pieces(self, piece: int, others: Sequence[int]) -> list[Ingredient]:
        parts = (
            (self.code.left, 0, max(self.left_rows)),
            (self.code.right, max(self.left_rows), max(self.right_rows)),
        )
        return [
            Ingredient(i, float(w), rows, start=start, at=start)
            for code, start, rows in parts
            for i, w in zip(others, code.combination(piece, others), strict=True)
            if w
        ]

    def assembler(self, x: np.ndarray[Any, Any] | None) -> Assembler:
        dtype = self.dtype if x is None else np.result_type(self.dtype, x.dtype)
        return Assembler(self.code, self.geometry, dtype, (max(self.right_rows),))

    def result(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``A.T @ diag(x) @ B``, without weights ``A.T @ B``."""
        out = np.empty(self.shape, dtype=rows.dtype)
        row = first = 0
        for height in self.left_rows:
            column = 0
            for columns in self.right_rows:
                block = rows[first : first + height, :columns]
                out[row : row + height, column : column + columns] = block
                first += height
                column += columns
            row += height
        return out


def _combined(
    weights: Floats, rows: Sequence[int], first: int = 0, at: int = 0
) -> list[Ingredient]:
    return [
        Ingredient(first + j, float(weights[j]), rows[j], at=at)
        for j in np.flatnonzero(weights).tolist()
    ]


class CodedTask(Task):
    """A task that runs rounds: ``args[0]`` are the ids of the arrays that it needs.

    The scheduler plugin knows it by its type: names may change on the way to the scheduler, and
    annotations are dropped by dask.array's optimisation.
    """

    __slots__ = ()

    @property
    def array_ids(self) -> tuple[str, ...]:
        return tuple(self.args[0])

    @property
    def block_fusion(self) -> bool:
        return True


class PieceTask(Task):
    """The task that makes a piece, ``args = (array id, piece)``: from its source or from others."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        return True


def check_weights(rows: int, weights: Any) -> Any:
    """``weights``, if they can stand as a diagonal matrix between two matrices of so many rows.

    Raises
    ------
    TypeError
        If they are no numbers.
    ValueError
        If they are no vector of that length.
    """
    if weights.dtype.kind not in "fciub":
        raise TypeError(f"Argument 'weights' must hold numbers, its dtype is {weights.dtype}.")
    if weights.shape != (rows,):
        raise ValueError(
            f"Argument 'weights' must be a vector with one number for each of the {rows} rows, "
            f"its shape is {weights.shape}."
        )
    return weights


def check_operand(shape: tuple[int, int], x: Any) -> Any:
    """``x``, if it can stand to the right of an array of this shape.

    Raises
    ------
    TypeError
        If it does not hold numbers.
    ValueError
        As NumPy does, with both shapes.
    """
    if x.dtype.kind not in "fciub":
        raise TypeError(
            f"The right operand of a coded product must hold numbers, its dtype is {x.dtype}."
        )
    if x.ndim not in (1, 2):
        raise ValueError(
            f"The right operand of a coded product must be a vector or a matrix, "
            f"it has {x.ndim} dimensions."
        )
    if x.shape[0] != shape[1]:
        raise ValueError(
            f"Shapes {shape} and {x.shape} do not fit together: "
            f"{shape[1]} columns on the left, {x.shape[0]} rows on the right."
        )
    return x
