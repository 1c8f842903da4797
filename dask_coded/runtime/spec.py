"""What the parts of the runtime tell each other: a coded array, and the tasks that concern it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import dask
import numpy as np
from dask._task_spec import Task
from dask.typing import Key
from dask.utils import parse_timedelta

from dask_coded.codes import Code
from dask_coded.planning import POLICIES, PREDICTORS, Policy, Reporting
from dask_coded.planning.layout import Floats
from dask_coded.planning.policies import Continuous
from dask_coded.rounds import Geometry

#: Name under which both plugins register, and of the event topic.
NAME = "dask-coded"


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
