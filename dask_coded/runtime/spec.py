"""What a coded array is to all parts of the runtime, and the tasks that use one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import dask
import distributed
import numpy as np
import numpy.typing as npt
from dask.typing import Key
from dask.utils import parse_timedelta

from dask_coded.codes import Code, Polynomial, RandomLinear
from dask_coded.compat import Task, UnfusedTask
from dask_coded.prediction import PREDICTORS
from dask_coded.rounds import POLICIES, Assembler, Geometry, Reporting, RoundOptions, Scales
from dask_coded.rounds.accuracy import LIMIT, Accuracy, AccuracyWarning
from dask_coded.rounds.decode import Empty
from dask_coded.rounds.footprint import Footprints
from dask_coded.rounds.scaling import LARGEST, Exponents, least_exponent
from dask_coded.typing import Floats

#: Name of both plugins, and of the event topic.
NAME = "dask-coded"


def as_key(key: Any) -> Key:
    """Return a key as it was before a comm turned its tuple into a list."""
    return tuple(key) if isinstance(key, list) else key


class CodedDataLostError(RuntimeError):
    """Too few pieces of a coded array are left to rebuild it."""


class CorruptSharesError(RuntimeError):
    """Too many shares do not agree with their checks."""


def say_inaccurate(message: str) -> None:
    """Emit an :class:`AccuracyWarning` on this worker and in its clients."""
    # Where warnings are errors, this one must not end the round.
    with suppress(AccuracyWarning):
        distributed.warn(message, AccuracyWarning)


def _coarser(stored: npt.DTypeLike, result: npt.DTypeLike) -> float:
    """Return how much more pieces are rounded than a result, as those of float32 times float64."""
    return max(float(np.finfo(stored).eps / np.finfo(result).eps), 1.0)


def inaccurate(doubtful: int, error: float, spec: CodedSpec, dtype: np.dtype[Any]) -> str:
    """Say which rows of a result of this dtype have lost digits, why, and what to do."""
    rows = spec.shape[0]
    # The rows of a pair are counted once for each block of columns.
    text = (
        f"{min(doubtful, rows)} of {rows} rows of a product with {spec.code!r} have lost digits: "
        "they were recovered from "
    )
    eps = float(np.finfo(spec.dtype).eps)
    if eps > np.finfo(dtype).eps and error <= LIMIT * eps:
        return (
            f"{text}pieces that are stored as {spec.dtype}, and the result is {dtype}. Pass an "
            f"operand of {spec.dtype}, convert the matrix to {dtype} before it is encoded, or "
            "encode it with `dask_coded.Repetition`."
        )
    advice = (
        "Bring the columns of both matrices to one scale, or encode them with less redundancy."
        if isinstance(spec, PairSpec)
        else "Bring the columns of the matrix to one scale, or encode it with "
        "`dask_coded.Repetition`."
    )
    return (
        f"{text}larger rows, and may be wrong by more than {LIMIT} times the rounding error of a "
        f"plain product, one by {min(error, 1.0):.1g} of |A| @ |x|. {advice}"
    )


def round_options() -> RoundOptions:
    """Return what ``coded:`` in Dask's configuration says now.

    Raises
    ------
    ValueError
        If it names a policy or a predictor that does not exist.
    """

    def get(name: str) -> Any:
        # By its whole name. Only so does Dask find `report_interval`, as in environment variables.
        return dask.config.get(f"coded.{name}")

    for what, table in (("policy", POLICIES), ("predictor", PREDICTORS)):
        if get(what) not in table:
            raise ValueError(
                f"`coded.{what}` in Dask's configuration must be one of {sorted(table)}, "
                f"it is {get(what)!r}."
            )
    return RoundOptions(
        policy=get("policy"),
        predictor=get("predictor"),
        lead=parse_timedelta(get("round.lead")),
        reporting=Reporting(
            parse_timedelta(get("round.report-interval")), float(get("round.report-growth"))
        ),
        alone=bool(get("round.alone")),
    )


class Ingredient(NamedTuple):
    """A part of a piece: ``piece[at : at + rows] += weight * source[start : start + rows]``.

    Parameters
    ----------
    source : int
        The number of a source block or of another piece.
    weight : float
    rows, start, at : int
    block : int
        Number of the source block whose rows these are, which are scaled before they are added; -1
        for rows of a piece that are scaled already.
    """

    source: int
    weight: float
    rows: int
    start: int = 0
    at: int = 0
    block: int = -1


# The scheduler is told how large the entries of at most so many columns are: eight bytes for each,
# from each block. It keeps four bytes for each, and as many numbers for each block only if all
# blocks together have no more columns.
_SIZED = 2**20
# In each round that recovers rows, a coordinator multiplies as many numbers as sizes are kept. With
# more than so many times more columns than rows, that would be a large part of what a worker
# computes. By counting operations, not measured.
_WIDE = 8


@dataclass(frozen=True, eq=False)
class CodedSpec(ABC):
    """A matrix or a pair stored as coded pieces, as all participants in its rounds know it.

    Parameters
    ----------
    id : str
        Unique name.
    code : Code
    geometry : Geometry
        Rows of every block of the result, stripes of every piece.
    columns : int
        Columns of a piece.
    dtype : numpy.dtype
    keys : tuple
        Dask key of each piece.
    check_finite : bool
        Whether NaN and infinity are refused when pieces are made.
    exponents : tuple of ndarray, or None
        For each source block, the exponents by which its rows are scaled, see
        :mod:`dask_coded.rounds.scaling`; None while they are found during encoding, and if nothing
        is scaled.
    typical : tuple of ndarray
        Exponents of the typical entries of the scaled rows, see
        :func:`dask_coded.rounds.scaling.typical_of`; empty if ``exponents`` is None.
    check_keys : tuple
        Dask key of the check of each block; empty if shares are not verified.
    footprints : Footprints or None
        The columns that each source block of a sparse array touches; None if any block touches most
        of them.
    """

    id: str
    code: Code
    geometry: Geometry
    columns: int
    dtype: np.dtype[Any]
    keys: tuple[Key, ...]
    check_finite: bool = True
    exponents: tuple[Exponents, ...] | None = None
    typical: tuple[Exponents, ...] = ()
    check_keys: tuple[Key, ...] = ()
    footprints: Footprints | None = None

    #: What workers compute on the stripes of their pieces: a key of ``KERNELS``.
    kernel: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Of the operator, or of the product."""

    @property
    def sparse_type(self) -> type | None:
        """``scipy.sparse.csr_array`` or ``csr_matrix`` if pieces are of that type, else None."""
        return None

    @property
    def uniform_work(self) -> Floats:
        """Work per stripe of a dense piece, in rows: shape (pieces, stripes)."""
        # Each plan needs it, and an MDS code of a thousand pieces has one group.
        groups, index = np.unique(self.code.group, return_inverse=True)
        work = np.stack([np.diff(self.geometry.edges(g)) for g in groups.tolist()])
        return work.astype(np.float64)[index]

    @abstractmethod
    def piece_rows(self, piece: int) -> int:
        """Return the number of rows of a piece."""

    @property
    @abstractmethod
    def homes(self) -> Sequence[int]:
        """For each source block, the piece whose worker holds it during encoding."""

    @property
    def combines(self) -> bool:
        """Whether any piece combines blocks, or may do so once the array is extended."""
        return isinstance(self.code, RandomLinear) or bool((self.code.block_of < 0).any())

    @property
    def scaled(self) -> bool:
        """Whether rows are scaled before they are combined to pieces or to checks."""
        return self.combines or bool(self.check_keys)

    @property
    def least_exponent(self) -> int:
        """The least exponent by which rows are scaled."""
        return least_exponent(self.dtype)

    @property
    def sized(self) -> bool:
        """Whether it is found how large the entries of each column are."""
        return False

    @property
    @abstractmethod
    def reporters(self) -> Sequence[int]:
        """For each source block, the piece whose maker reports the exponents of its rows."""

    def blocks_of(self, pieces: Iterable[int]) -> set[int]:
        """Return the source blocks that some pieces equal or combine."""
        return {part.block for piece in pieces for part in self.from_sources(piece)}

    @abstractmethod
    def from_sources(self, piece: int) -> list[Ingredient]:
        """Return how to make a piece from the source blocks."""

    @abstractmethod
    def from_pieces(self, piece: int, others: Sequence[int]) -> list[Ingredient]:
        """Return how to make a piece from others.

        Raises
        ------
        DecodeError
            If the others do not determine it.
        """

    @abstractmethod
    def assembler(
        self,
        operand: np.ndarray[Any, Any] | None,
        empty: Empty = np.empty,
        errors: Sequence[float] = (),
    ) -> Assembler:
        """Return what decodes the shares of a round with this operand.

        ``empty(shape, dtype)`` makes the array that the rows are decoded into. ``errors`` are those
        of the pieces, see :class:`~dask_coded.rounds.decode.Assembler`.
        """

    def result(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the result of a finished round, from the rows of all its blocks."""
        return rows


@dataclass(frozen=True, eq=False)
class ArraySpec(CodedSpec):
    """A coded array ``A``, whose rounds give ``A @ x``.

    Parameters
    ----------
    sparse : type or None
        ``scipy.sparse.csr_array`` or ``csr_matrix`` if pieces are of that type, None for NumPy.
    transposed : str or None
        The id of the encoding of the transposed array, if there is one.
    sizes : ndarray of float32, shape (k, columns) or (1, columns), or None
        Root mean square of the entries of the scaled rows in each column, of each block if columns
        are few; None while they are found during encoding, and if no piece combines blocks.
    """

    sparse: type | None = None
    transposed: str | None = None
    sizes: npt.NDArray[np.float32] | None = None

    kernel: ClassVar[str] = "matvec"

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.geometry.rows), self.columns

    @property
    def sized(self) -> bool:
        """Whether columns are so few that their sizes cost nothing beside the matrix."""
        return self.columns <= min(_WIDE * self.shape[0], _SIZED)

    @property
    def sized_by_block(self) -> bool:
        """Whether they are so few that the sizes of each block are kept."""
        return self.sized and self.code.k * self.columns <= _SIZED

    @property
    def sparse_type(self) -> type | None:
        return self.sparse

    def piece_rows(self, piece: int) -> int:
        # A parity piece has as many rows as the longest block.
        block = int(self.code.block_of[piece])
        return max(self.geometry.rows) if block < 0 else self.geometry.rows[block]

    @property
    def homes(self) -> Sequence[int]:
        return self.code.systematic_pieces

    @property
    def reporters(self) -> Sequence[int]:
        return self.homes

    def extended(self, count: int) -> Self:
        """Return this spec with ``count`` more pieces; the code must be able to grow."""
        assert isinstance(self.code, RandomLinear)
        first = self.code.pieces
        more = [(f"{self.id}-extra", i) for i in range(first, first + count)]
        return replace(self, code=self.code.extended(count), keys=(*self.keys, *more))

    def from_sources(self, piece: int) -> list[Ingredient]:
        return _combined(self.code.G[piece], self.geometry.rows)

    def from_pieces(self, piece: int, others: Sequence[int]) -> list[Ingredient]:
        weights = self.code.combination(piece, others)
        return [
            Ingredient(i, float(w), self.piece_rows(i), block=int(self.code.block_of[i]))
            for i, w in zip(others, weights, strict=True)
            if w
        ]

    @cached_property
    def _scales(self) -> Scales:
        # Once for all rounds, because it takes a look at the exponents of all rows.
        return Scales(self.exponents or (), typical=self.typical, sizes=self.sizes)

    def assembler(
        self,
        operand: np.ndarray[Any, Any] | None,
        empty: Empty = np.empty,
        errors: Sequence[float] = (),
    ) -> Assembler:
        assert operand is not None
        dtype = np.result_type(self.dtype, operand.dtype)
        scales = accuracy = None
        if self.exponents is not None:
            scales = self._scales
            coarser = _coarser(self.dtype, dtype)
            accuracy = Accuracy(operand, scales, coarser, dtype) if self.typical else None
        columns = operand.shape[1:]
        return Assembler(self.code, self.geometry, dtype, columns, scales, empty, accuracy, errors)


@dataclass(frozen=True, eq=False)
class PairSpec(CodedSpec):
    """A coded pair of matrices ``A`` (N, p) and ``B`` (N, q), whose rounds give ``A.T @ D @ B``.

    A piece is one matrix with ``N`` columns. Its upper part is the transposed combination of blocks
    of ``A``, its lower part that of blocks of ``B``; each is as high as its longest block. So a
    pair of factors is stored, moved and spilled like any piece, and neither can be lost without
    the other. Stripes are rows of the upper part: those of the piece's product. The geometry is
    that of the blocks of the product, ``A_j.T @ B_l`` in the order of the code.

    Parameters
    ----------
    right_rows : tuple of int, length b
        Columns of each block of ``B``.
    right_source : int
        Number of the first block of ``B`` among the source blocks: ``a``, or 0 if both matrices
        have the same blocks.
    """

    code: Polynomial
    right_rows: tuple[int, ...] = ()
    right_source: int = 0

    kernel: ClassVar[str] = "bilinear"

    @property
    def left_rows(self) -> tuple[int, ...]:
        """Columns of each block of ``A``."""
        return self.geometry.rows[:: self.code.b]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.left_rows), sum(self.right_rows)

    @property
    def least_exponent(self) -> int:
        # No piece is a block, so all shares are products of scaled rows.
        return -LARGEST

    def piece_rows(self, piece: int) -> int:
        return max(self.left_rows) + max(self.right_rows)

    @property
    def homes(self) -> Sequence[int]:
        return [j % self.code.pieces for j in range(self.right_source + self.code.b)]

    @property
    def reporters(self) -> Sequence[int]:
        # The first piece that the block is part of.
        left, right = (np.argmax(code.G != 0, axis=0) for code in (self.code.left, self.code.right))
        return [*left.tolist(), *right.tolist()][: self.right_source + self.code.b]

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

    def assembler(
        self,
        operand: np.ndarray[Any, Any] | None,
        empty: Empty = np.empty,
        errors: Sequence[float] = (),
    ) -> Assembler:
        dtype = self.dtype if operand is None else np.result_type(self.dtype, operand.dtype)
        scales = accuracy = None
        if self.exponents is not None:
            left = [j // self.code.b for j in range(self.code.k)]
            right = [self.right_source + j % self.code.b for j in range(self.code.k)]
            rows, across, typical, typical_across = (
                tuple(found[j] for j in of if found)
                for found in (self.exponents, self.typical)
                for of in (left, right)
            )
            scales = Scales(rows, across, typical, typical_across)
            if self.typical:
                of_all = np.ones(self.columns) if operand is None else operand
                accuracy = Accuracy(of_all, scales, _coarser(self.dtype, dtype), dtype)
        columns = (max(self.right_rows),)
        return Assembler(self.code, self.geometry, dtype, columns, scales, empty, accuracy)

    def result(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return ``A.T @ diag(operand) @ B``, or ``A.T @ B`` without an operand."""
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
        Ingredient(first + j, float(weights[j]), rows[j], at=at, block=first + j)
        for j in np.flatnonzero(weights).tolist()
    ]


class CodedTask(UnfusedTask):
    """A task that runs rounds: ``args[0]`` are the ids of the arrays that it needs.

    The scheduler plugin recognises it by its type, because names may change on the way to the
    scheduler, and dask.array's optimisation drops annotations.
    """

    __slots__ = ()

    @property
    def array_ids(self) -> tuple[str, ...]:
        return tuple(self.args[0])


def coded_task(run_spec: Any) -> CodedTask | None:
    """Return the rounds that a task is, None if it is something else.

    Where a product is an argument of ``dask.delayed`` or a keyword of ``map_blocks``, Dask wraps
    its tasks in others, which return what these do.
    """
    while isinstance(run_spec, Task) and not isinstance(run_spec, CodedTask):
        if len(run_spec.args) != 1 or run_spec.kwargs:
            return None
        (run_spec,) = run_spec.args
    return run_spec if isinstance(run_spec, CodedTask) else None


class PieceTask(UnfusedTask):
    """The task that makes a piece from source blocks or other pieces; args: array id, piece."""

    __slots__ = ()
