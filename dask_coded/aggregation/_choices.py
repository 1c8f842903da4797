"""Aggregations along trees: uncoded, with one coded layer, or coded in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dask_coded.aggregation import trees
from dask_coded.aggregation._machine import (
    AGGREGATIONS,
    Aggregation,
    check_workers,
)
from dask_coded.aggregation._tree import TreePlan
from dask_coded.arguments import check_whole
from dask_coded.codes import CyclicMDS, FractionalRepetition

#: The gradient codes that can be chosen by name.
CodeName = Literal["fractional", "cyclic"]

CODE_OF = {"fractional": FractionalRepetition, "cyclic": CyclicMDS}


def check_code(name: str) -> None:
    """Raise a ValueError if there is no gradient code of this name."""
    if name not in CODE_OF:
        raise ValueError(f"Argument 'code' must be one of {sorted(CODE_OF)}, it is {name!r}.")


@AGGREGATIONS.register("Star")
@dataclass(frozen=True)
class Star(Aggregation):
    """Workers send their gradients to the root, which waits for all of them.

    There is no code, and every gradient reaches the root directly, in one message.

    Parameters
    ----------
    segments : int
        Number of segments of the gradient; each is summed as soon as it is computed.

    Examples
    --------
    >>> plan = Star().plan(4)
    >>> plan.stored, plan.rooted
    (((0,), (1,), (2,), (3,)), True)
    """

    segments: int = 1

    def __post_init__(self) -> None:
        check_whole("segments", self.segments)

    def plan(self, workers: int) -> TreePlan:
        """Return the plan for this number of workers."""
        check_workers(self, workers)
        return TreePlan(trees.star(FractionalRepetition(workers, 0)), self.segments)


@AGGREGATIONS.register("Tree")
@dataclass(frozen=True)
class Tree(Aggregation):
    """Sum up a tree, layer by layer, so that no node receives more than ``fan_in`` gradients.

    Parameters
    ----------
    fan_in : int, optional
        Largest number of children of a parent. By default the smallest that suffices with
        ``depth`` layers.
    depth : int, optional
        Number of layers of workers. By default two, or as many as ``fan_in`` requires.
    segments : int
        Number of segments of the gradient: while one is on its way up, the next is sent.

    Examples
    --------
    >>> Tree().plan(6).allocation.parents
    (-1, -1, 0, 1, 0, 1)
    """

    fan_in: int | None = None
    depth: int | None = None
    segments: int = 1

    def __post_init__(self) -> None:
        _check_shape(self.fan_in, self.depth)
        check_whole("segments", self.segments)

    def plan(self, workers: int) -> TreePlan:
        """Return the plan for this number of workers.

        Raises
        ------
        ValueError
            If both ``fan_in`` and ``depth`` were given and the tree is too small.
        """
        check_workers(self, workers)
        fan_in, depth = trees.shape(workers, 0, self.fan_in, self.depth)
        return TreePlan(trees.replicated(workers, fan_in, depth), self.segments)


@AGGREGATIONS.register("GradientCoding")
@dataclass(frozen=True)
class GradientCoding(Aggregation):
    """Workers send coded gradients to the root, which does not wait for the slowest workers.

    Parameters
    ----------
    stragglers : int
        Number of workers that need not be waited for, whichever they are. Each worker computes
        ``stragglers + 1`` times as much as in a :class:`Star`.
    code : {"fractional", "cyclic"}
        :class:`~dask_coded.codes.FractionalRepetition` loses no digits, works with every codec, and
        often tolerates more late workers. :class:`~dask_coded.codes.CyclicMDS` has a lower load if
        the number of workers is not a multiple of ``stragglers + 1``.
    segments : int
        Number of segments of the gradient.

    References
    ----------
    .. [1] Tandon, Lei, Dimakis and Karampatziakis, "Gradient coding: avoiding stragglers in
       distributed learning", ICML 2017.

    Examples
    --------
    >>> plan = GradientCoding(stragglers=1).plan(4)
    >>> plan.stored, plan.load
    (((0,), (0,), (1,), (1,)), 0.5)
    """

    stragglers: int = 1
    code: CodeName = "fractional"
    segments: int = 1

    def __post_init__(self) -> None:
        check_whole("stragglers", self.stragglers, least=0)
        check_code(self.code)
        check_whole("segments", self.segments)

    def plan(self, workers: int) -> TreePlan:
        """Return the plan for this number of workers, at least ``stragglers + 1``."""
        check_workers(self, workers, self.stragglers + 1)
        return TreePlan(trees.star(CODE_OF[self.code](workers, self.stragglers)), self.segments)


@AGGREGATIONS.register("CodedReduce")
@dataclass(frozen=True)
class CodedReduce(Aggregation):
    """Sum up a tree in which no parent waits for its slowest ``stragglers`` children.

    The load is the least possible one (see :mod:`dask_coded.aggregation.trees`). If workers are
    lost, or if there are fewer than a full tree has, the last layer is not full. There is a plan
    for any number of workers from ``stragglers + 1`` on.

    Parameters
    ----------
    fan_in : int, optional
        Largest number of children of a parent; with the fractional code a multiple of
        ``stragglers + 1``. By default the smallest that suffices with ``depth`` layers.
    depth : int, optional
        Number of layers of workers. By default as many as ``fan_in`` requires; without ``fan_in``
        two, or one if there are too few workers for two, which is :class:`GradientCoding`.
    stragglers : int
        Number of children of every parent that may be late.
    code : {"fractional", "cyclic"}
        As in :class:`GradientCoding`. A cyclic tree becomes narrower, and finally a star, if more
        than ``stragglers`` leaves per parent are missing.
    segments : int
        Number of segments of the gradient: while one is on its way up, the next is sent.

    References
    ----------
    .. [1] Reisizadeh, Prakash, Pedarsani and Avestimehr, "CodedReduce: a fast and robust framework
       for gradient aggregation in distributed learning", arXiv 1902.01981.

    Examples
    --------
    >>> plan = CodedReduce(fan_in=4, depth=2, stragglers=1).plan(20)
    >>> plan.parts, plan.load == 1 / 6
    (6, True)
    >>> CodedReduce(fan_in=4, depth=2, stragglers=1).plan(19).parts
    5
    """

    fan_in: int | None = None
    depth: int | None = None
    stragglers: int = 1
    code: CodeName = "fractional"
    segments: int = 1

    def __post_init__(self) -> None:
        _check_shape(self.fan_in, self.depth)
        check_whole("stragglers", self.stragglers, least=0)
        check_code(self.code)
        check_whole("segments", self.segments)
        copies = self.stragglers + 1
        if self.fan_in is None:
            return
        if self.code == "fractional" and self.fan_in % copies:
            raise ValueError(
                f"Argument 'fan_in' must be a multiple of stragglers + 1 = {copies} with the "
                f"fractional code, it is {self.fan_in}: pass "
                f"{max(self.fan_in // copies, 1) * copies}, or code='cyclic'."
            )
        if self.fan_in < copies:
            raise ValueError(
                f"Argument 'fan_in' must be more than the {self.stragglers} stragglers, it is "
                f"{self.fan_in}."
            )

    def plan(self, workers: int) -> TreePlan:
        """Return the plan for this number of workers, at least ``stragglers + 1``.

        Raises
        ------
        ValueError
            If both ``fan_in`` and ``depth`` were given and the tree is too small.
        """
        check_workers(self, workers, self.stragglers + 1)
        fan_in, depth = trees.shape(workers, self.stragglers, self.fan_in, self.depth)
        grow = trees.replicated if self.code == "fractional" else trees.cyclic
        return TreePlan(grow(workers, fan_in, depth, self.stragglers), self.segments)


def _check_shape(fan_in: int | None, depth: int | None) -> None:
    if fan_in is not None:
        check_whole("fan_in", fan_in)
    if depth is not None:
        check_whole("depth", depth)
