r"""The base class of linear codes.

The rows of a matrix ``A`` are cut into ``k`` blocks ``A_0 … A_{k-1}``. A code stores *pieces*

.. math:: P_i = \sum_j G_{ij} A_j

so ``P_i @ x`` is the same combination of the products ``A_j @ x``. The pieces whose products have
been computed select rows of ``G``; solving the system of these rows gives the blocks of the result.

A code is data: the generator ``G``, the *place* of each piece (all pieces of one place live on one
worker), and the *group* of each piece. Any ``need`` pieces of a group suffice to recover the blocks
that the group combines. An MDS code is one group that needs ``k`` pieces; a repetition code is one
group per block, each of which needs one piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dask_coded.arguments import check_whole
from dask_coded.codes._span import DEPENDENT, Span, combination, recovery, span
from dask_coded.codes._subsets import (
    EXHAUSTIVE_SUBSETS,
    DecodeProbability,
    all_span,
    k_subsets,
    most_lost,
)
from dask_coded.registry import Registry

#: Codes by the name under which the command line and :func:`dask_coded.encode` select them.
CODES: Registry[type[Code]] = Registry("code")

_FACTORS_KEPT = 1_024


class DecodeError(ValueError):
    """The available pieces or workers do not determine the result."""


class Code:
    """A linear code given by its generator matrix.

    Subclass it to plug in a code of your own: pass ``G`` to this constructor, decorate the class
    with ``CODES.register`` to make it selectable by name, and override :meth:`with_redundancy` if
    it can be built from a number of workers and a number of losses to survive.

    Parameters
    ----------
    G : array_like, shape (pieces, k)
        Generator matrix: piece ``i`` is ``sum_j G[i, j] * block_j``.
    place : array_like of int, shape (pieces,), optional
        The place of each piece, ``0 … n-1``. Pieces of one place are stored on one worker.
        Default: every piece has a place of its own.
    group : array_like of int, shape (pieces,), optional
        The group of each piece. Default: one group.
    need : array_like of int, shape (groups,), optional
        How many pieces of each group suffice. Default: ``k`` pieces of a single group.

    Attributes
    ----------
    n : int
        Number of places, that is, of workers that store pieces.
    k : int
        Number of blocks.
    pieces : int
        Number of pieces, ``len(G)``.
    tolerance : int
        Number of places that may be lost, whichever they are.
    systematic : bool
        Whether every block is itself a piece.
    block_of : ndarray of int, shape (pieces,)
        The block that each piece equals, -1 for parity pieces.
    exact : bool
        Whether encoding and decoding only copy. If so, every dtype, sparsity and non-finite value
        survives bit for bit.
    threshold : bool
        Whether any ``need`` pieces of a group suffice, so that counting them is enough. Otherwise
        rounds call :meth:`span` for every set of pieces. It is found from ``G`` if there is one
        group, by a sample of the sets if there are many. A subclass may set it to False.

    Raises
    ------
    ValueError
        If ``G`` is not a matrix of finite numbers with at least as many rows as columns, or
        ``need`` of a single group is not ``k``. With several groups, if some ``need`` pieces of one
        do not suffice to make its others, or all pieces do not determine all blocks.

    Examples
    --------
    >>> import numpy as np
    >>> code = Code([[1, 0], [0, 1], [1, 1]])
    >>> code.n, code.k, code.systematic
    (3, 2, True)
    >>> pieces = code.encode([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    >>> code.decode([pieces[0], pieces[2]], [0, 2])
    array([[ 1.,  2.],
           [10., 20.]])
    """

    exact: ClassVar[bool] = False
    threshold: bool = True
    #: Whether a class need not examine ``G`` to know that.
    _proven: ClassVar[bool] = False

    def __init__(
        self,
        G: npt.ArrayLike,
        *,
        place: npt.ArrayLike | None = None,
        group: npt.ArrayLike | None = None,
        need: npt.ArrayLike | None = None,
    ) -> None:
        if np.iscomplexobj(G):
            raise TypeError("Argument 'G' must be real, it is complex.")
        generator = np.array(G, dtype=np.float64)
        if generator.ndim != 2 or min(generator.shape) == 0:
            raise ValueError(
                f"Argument 'G' must be a matrix (pieces, k), its shape is {generator.shape}."
            )
        pieces, k = generator.shape
        if pieces < k:
            raise ValueError(
                f"Argument 'G' must have at least as many rows as columns, "
                f"{pieces} is less than {k}."
            )
        if not np.isfinite(generator).all():
            raise ValueError("Argument 'G' must be finite, it holds NaN or infinity.")
        generator.flags.writeable = False
        self.G: npt.NDArray[np.float64] = generator
        self.k = k
        self.pieces = pieces
        self.place = _labels("place", np.arange(pieces) if place is None else place, pieces)
        self.n = int(self.place.max()) + 1
        self.group = _labels("group", np.zeros(pieces) if group is None else group, pieces)
        self.need: npt.NDArray[np.intp] = np.asarray([k] if need is None else need, dtype=np.intp)
        if len(self.need) != int(self.group.max()) + 1:
            raise ValueError(
                f"Argument 'need' must have one entry per group, it has {len(self.need)} for "
                f"{int(self.group.max()) + 1} groups."
            )
        # The block that each piece equals, -1 for parity pieces.
        unit = (np.count_nonzero(generator, axis=1) == 1) & (generator.max(axis=1) == 1)
        self.block_of = np.where(unit, generator.argmax(axis=1), -1)
        self._factors: dict[tuple[int, ...], tuple[list[int], npt.NDArray[np.float64]]] = {}
        self._spans: dict[bytes, Span] = {}
        if not self._proven:
            self._examine()

    def _examine(self) -> None:
        """Find whether it is enough to count pieces; with several groups it must be."""
        if len(self.need) == 1:
            if (need := int(self.need[0])) != self.k:
                raise ValueError(
                    f"Argument 'need' must be [{self.k}], the number of blocks, for a code of one "
                    f"group, it is [{need}]: leave it out."
                )
            self.threshold = self.threshold and all_span(self.G, self.k, self.k)
            return
        for group, need in enumerate(self.need.tolist()):
            rows = self.G[self.group == group]
            rank = int(np.linalg.matrix_rank(rows))
            enough = 0 < need <= len(rows) and all_span(rows, need, rank)
            if not (self.threshold and enough):
                raise ValueError(
                    f"Any {need} pieces of group {group} must suffice to make its other pieces, "
                    f"which is not so: pass another 'need', or leave out 'group'."
                )
        if (rank := int(np.linalg.matrix_rank(self.G))) < self.k:
            raise ValueError(
                f"The pieces of all groups must determine all {self.k} blocks, 'G' has rank "
                f"{rank}: add pieces that combine the others."
            )

    @classmethod
    def with_redundancy(cls, n: int, redundancy: int) -> Code:
        """Build the code for ``n`` workers that survives the loss of any ``redundancy`` of them.

        Raises
        ------
        TypeError
            If this kind of code cannot be built from those two numbers.
        """
        raise TypeError(
            f"{cls.__name__} cannot be built from a number of workers and a redundancy: "
            f"pass an instance."
        )

    @property
    def systematic(self) -> bool:
        """Whether every block is itself a piece."""
        return set(range(self.k)) <= set(self.block_of.tolist())

    @cached_property
    def systematic_pieces(self) -> tuple[int, ...]:
        """For each of the blocks 0, 1, … ``k - 1``, the first piece that equals it.

        Raises
        ------
        ValueError
            If the code is not systematic.
        """
        if not self.systematic:
            raise ValueError(f"{self!r} is not systematic: its pieces do not include the blocks.")
        first = {j: piece for piece, j in reversed([*enumerate(self.block_of.tolist())])}
        return tuple(first[j] for j in range(self.k))

    @property
    def tolerance(self) -> int:
        """Number of places that may be lost, whichever they are; at least, of a large code.

        If it is not enough to count pieces, all sets of one loss are tried, then of two, and so on,
        as long as there are at most some thousands of one size.
        """
        if self.threshold:
            return most_lost(self.place, self.group, self.need)
        return self._tried_tolerance

    @cached_property
    def _tried_tolerance(self) -> int:
        for size in range(1, self.n + 1):
            if math.comb(self.n, size) > EXHAUSTIVE_SUBSETS:
                return size - 1
            if not all(map(self.survives, itertools.combinations(range(self.n), size))):
                return size - 1
        return self.n

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={self.n}, k={self.k})"

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and isinstance(other, Code)
            and np.array_equal(self.G, other.G)
            and np.array_equal(self.place, other.place)
            and np.array_equal(self.group, other.group)
            and np.array_equal(self.need, other.need)
        )

    def __hash__(self) -> int:
        return hash((type(self), self.n, self.k, self.G.tobytes()))

    def __getstate__(self) -> dict[str, Any]:
        # The caches are not pickled, because they may be large and are cheap to rebuild.
        state = {**self.__dict__, "_factors": {}, "_spans": {}}
        for name in ("systematic_pieces", "_tried_tolerance"):
            state.pop(name, None)
        return state

    # -- encoding ------------------------------------------------------------------------------

    def encode(self, blocks: Sequence[Any]) -> list[Any]:
        """Combine ``k`` blocks into the pieces.

        Parameters
        ----------
        blocks : sequence of k arrays, all of shape (rows, …)
            NumPy arrays or SciPy sparse matrices. A block that is itself a piece is not copied.

        Returns
        -------
        list of arrays
            One per piece, each of shape (rows, …).

        Raises
        ------
        ValueError
            If there are not ``k`` blocks, or if their shapes differ.
        """
        if len(blocks) != self.k:
            raise ValueError(f"{self!r} encodes {self.k} blocks, {len(blocks)} were given.")
        if len(shapes := {b.shape for b in blocks}) > 1:
            raise ValueError(f"All blocks must have the same shape, they have {sorted(shapes)}.")
        return [
            blocks[j] if j >= 0 else sum(g * b for g, b in zip(row, blocks, strict=True) if g)
            for j, row in zip(self.block_of, self.G, strict=True)
        ]

    def combination(self, piece: int, sources: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return coefficients that make a piece from others: ``piece = sum_i c[i] * sources[i]``.

        Parameters
        ----------
        piece : int
            The piece to make.
        sources : sequence of int
            Available pieces; they must determine the piece.

        Returns
        -------
        ndarray, shape (len(sources),)
            Coefficients; zero for the sources that are not needed.

        Raises
        ------
        DecodeError
            If the sources do not determine the piece.
        """
        row = self.G[piece]
        for i, source in enumerate(sources):
            if np.array_equal(self.G[source], row):
                return np.asarray(np.eye(len(sources))[i])
        if (weights := combination(self.G, self.block_of, row, sources)) is None:
            raise DecodeError(f"Pieces {list(sources)} of {self!r} do not determine piece {piece}.")
        return weights

    # -- decoding ------------------------------------------------------------------------------

    def decode(
        self, results: Sequence[npt.NDArray[Any]], pieces: Sequence[int]
    ) -> npt.NDArray[Any]:
        """Recover the ``k`` blocks of a stripe from the results for enough of its pieces.

        Computed blocks are copied. Only missing blocks are recovered, in double precision
        regardless of the dtype of the results.

        Parameters
        ----------
        results : sequence of arrays, each of shape (rows, …)
            The results for the pieces, in the order of ``pieces``.
        pieces : sequence of int
            The pieces that the results belong to. There may be more than are needed.

        Returns
        -------
        ndarray, shape (k, rows, …)
            In the common dtype of the results. Blocks of integers that had to be recovered are
            not exact, so the result is then in double precision.

        Raises
        ------
        DecodeError
            If the pieces do not determine the blocks.
        """
        if len(results) != len(pieces):
            raise ValueError(
                f"Each piece needs one result, {len(results)} were given for {len(pieces)} pieces."
            )
        if wrong := [piece for piece in pieces if not 0 <= piece < self.pieces]:
            raise ValueError(
                f"Pieces of {self!r} are numbered from 0 to {self.pieces - 1}, not {wrong}."
            )
        missing, weights = self.recovery(pieces)
        first = np.asarray(results[0])
        dtype = np.result_type(*results)
        if missing and dtype.kind in "biu":
            dtype = np.result_type(dtype, np.float64)
        out = np.empty((self.k, *first.shape), dtype=dtype)
        have = self.block_of[list(pieces)]
        for block, result in zip(have, results, strict=True):
            if block >= 0:
                out[block] = result
        if missing:
            used = np.flatnonzero(weights.any(axis=0))
            stack = np.stack([np.asarray(results[i]) for i in used.tolist()])
            solved = np.tensordot(weights[:, used], stack.astype(_wide(dtype)), axes=1)
            out[missing] = solved.astype(dtype)
        return out

    def recovery(self, pieces: Sequence[int]) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Return the blocks missing from a set of pieces, and the weights that recover them.

        Parameters
        ----------
        pieces : sequence of int

        Returns
        -------
        missing : list of int
            Blocks that are not themselves among the pieces.
        weights : ndarray, shape (len(missing), len(pieces))
            ``block[missing[i]] = sum_j weights[i, j] * piece[pieces[j]]``.

        Raises
        ------
        DecodeError
            If the pieces do not determine the blocks.
        """
        key = tuple(int(p) for p in pieces)
        if (found := self._factors.get(key)) is None:
            if len(self._factors) >= _FACTORS_KEPT:
                self._factors.clear()
            found = self._factors[key] = self._factor(key)
        return found

    def _factor(self, pieces: tuple[int, ...]) -> tuple[list[int], npt.NDArray[np.float64]]:
        if not self.decodable(pieces):
            missing = sorted(set(range(self.k)) - set(self.block_of[list(pieces)].tolist()))
            raise DecodeError(
                f"Pieces {list(pieces)} of {self!r} do not determine blocks {missing}: "
                f"any {self.k} independent pieces do."
            )
        blocks, weights = recovery(self.G, self.block_of, pieces)
        return blocks.tolist(), weights

    # -- decodability --------------------------------------------------------------------------

    def span(self, have: npt.NDArray[np.bool_]) -> Span:
        """Return the rank of a set of pieces, and which pieces would raise it or can be spared.

        Parameters
        ----------
        have : ndarray of bool, shape (pieces,)
            Marks the pieces of the set.

        Returns
        -------
        Span
            Cached per set, because a round asks for the same sets repeatedly.
        """
        key = have.tobytes()
        if (found := self._spans.get(key)) is None:
            if len(self._spans) >= _FACTORS_KEPT:
                self._spans.clear()
            limit = None if self.threshold else DEPENDENT
            found = self._spans[key] = span(self.G, self.block_of, have, limit)
        return found

    def decodable(self, pieces: Sequence[int]) -> bool:
        """Return whether a set of pieces determines all blocks.

        The answer follows from the rank of their rows of ``G`` and is exact up to rounding.

        Examples
        --------
        >>> code = Code([[1, 0], [0, 1], [1, 1], [2, 2]])
        >>> code.decodable([0, 2]), code.decodable([2, 3])
        (True, False)
        """
        have = np.zeros(self.pieces, dtype=bool)
        have[list(pieces)] = True
        return bool(self.span(have).rank == self.k)

    def survives(self, lost: Sequence[int]) -> bool:
        """Return whether the remaining pieces determine all blocks when these places are lost."""
        return bool(self.span(~np.isin(self.place, lost)).rank == self.k)

    def decode_probability(
        self, failures: int, limit: int = EXHAUSTIVE_SUBSETS
    ) -> DecodeProbability:
        """Return the probability that the blocks survive the loss of random places.

        Parameters
        ----------
        failures : int
            Number of places that are lost at once, ``0 … n``.
        limit : int
            Largest number of sets of places to examine. If there are more, a fixed sample of
            ``limit`` sets is examined.

        Returns
        -------
        DecodeProbability
            ``(probability, error)``; the error is zero if all sets were examined.

        Raises
        ------
        ValueError
            If ``failures`` is not between 0 and ``n``, or the limit is less than 1.

        Examples
        --------
        >>> Code([[1, 0], [0, 1], [1, 1], [0, 1]]).decode_probability(2)
        DecodeProbability(probability=0.8333333333333334, error=0.0)
        """
        check_whole("limit", limit)
        if not 0 <= check_whole("failures", failures, None) <= self.n:
            raise ValueError(
                f"Argument 'failures' must be between 0 and 'n' = {self.n}, it is {failures}."
            )
        sets = k_subsets(self.n, failures, limit)
        found = sum(map(self.survives, sets))
        return DecodeProbability.of(found, len(sets), math.comb(self.n, failures))

    # -- conditioning --------------------------------------------------------------------------

    def condition_number(self, subset: Sequence[int]) -> float:
        """Return the 2-norm condition number of the rows of ``G`` in ``subset``.

        Its decimal logarithm estimates the digits lost in decoding. The condition number is
        infinite if the subset does not determine the blocks.

        Examples
        --------
        >>> Code([[1, 0], [0, 1], [1, 1]]).condition_number([0, 1])
        1.0
        """
        values = np.linalg.svd(self.G[list(subset)], compute_uv=False)
        if len(values) < self.k or values[-1] < values[0] * np.finfo(float).eps:
            return math.inf
        return float(values[0] / values[-1])

    def worst_condition_number(self) -> float:
        """Return the largest :meth:`condition_number` over subsets of ``k`` pieces.

        All subsets are examined if there are at most 3,000, otherwise a fixed sample of them. The
        result of a sample is a lower bound.
        """
        subsets = k_subsets(self.pieces, self.k)
        return max(self.condition_number(s) for s in subsets)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.result_type(dtype, np.float64)


def _labels(name: str, values: npt.ArrayLike, pieces: int) -> npt.NDArray[np.intp]:
    labels = np.asarray(values).astype(np.intp)
    if labels.shape != (pieces,) or labels.min() < 0:
        raise ValueError(
            f"Argument {name!r} must hold one non-negative integer per piece ({pieces}), "
            f"its shape is {labels.shape}."
        )
    return labels
