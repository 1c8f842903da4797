"""What is fixed in a training and in each of its groups, and how a training ends.

A *training* is one call of :func:`dask_coded.training.train`. *Groups* run it: a leader and some
workers with a plan. When a worker is lost, another group goes on. Each group has a run id, which
all its messages carry.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dask.typing import Key

from dask_coded.aggregation import Aggregation, Plan, UnitSum
from dask_coded.compression import Codec
from dask_coded.summary import Summary

#: Of so many recent steps, a leader keeps what each worker has done: 2.4 MB with 16 workers, which
#: go to the workers that keep its state.
RECENT = 1000


class Replica(Protocol):
    """One worker's copy of what is trained: see :class:`dask_coded.training.replica.Replica`."""

    version: int
    losses: array[float]

    def part(self, part: int) -> tuple[int, int]: ...
    def gradient(self, step: int, part: int, samples: Any, targets: Any) -> tuple[Any, float]: ...
    def unit(
        self, step: int, unit: int, samples: Any, targets: Any, grid: Any = None
    ) -> UnitSum: ...
    def compress(self, step: int, segment: int, vector: Any) -> Any: ...
    def apply(self, totals: Sequence[Any], beside: bool = False) -> Any: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def digest(self) -> str: ...


class Model(Protocol):
    """Makes replicas."""

    def replica(self, parts: int, segments: int) -> Replica: ...


class Batches(Protocol):
    """Which samples a step uses."""

    def count(self, step: int) -> int: ...


class Schedule(Protocol):
    """When a step may begin."""

    width: int

    def version(self, step: int) -> int: ...


@dataclass(frozen=True)
class Blocks:
    """Rows that lie in the cluster.

    Parameters
    ----------
    keys : tuple of Key
        Of the blocks, in order.
    rows : tuple of int
        Of each block.
    """

    keys: tuple[Key, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Training:
    """All that is fixed when a training begins.

    Parameters
    ----------
    id : str
    model : bytes
        A pickled :class:`Model`, which the leader does not need.
    batches : callable
        ``batches(parts)`` returns how many samples a step uses.
    samples, targets : Blocks
    parameters : int
        How many are trained.
    aggregation : Aggregation
    codec : Codec
    remembers : bool
        Whether the compression keeps a remainder of each worker's own gradients.
    schedule : Schedule
    first : int
        How many updates the parameters have seen already.
    steps : int
        The number of updates at which the training ends.
    workers : tuple of str or None
        Addresses of the workers that may take part; None for all.
    checkpoint : (str, int) or None
        A file, and the number of updates between two writes.
    setup : dict
        What the training is of, for those that resume it.
    expects_none : bool
        Whether it was to go on from that file, which the client has not found.
    averages : int
        How many of the parameters, the last ones, are running averages.
    scoring : Scoring or None
    """

    id: str
    model: bytes
    batches: Callable[[int], Batches]
    samples: Blocks
    targets: Blocks
    parameters: int
    aggregation: Aggregation
    codec: Codec
    remembers: bool
    schedule: Schedule
    first: int
    steps: int
    workers: tuple[str, ...] | None = None
    checkpoint: tuple[str, int] | None = None
    setup: dict[str, Any] = field(default_factory=dict)
    expects_none: bool = False
    averages: int = 0
    scoring: Scoring | None = None

    def wants_state(self, version: int) -> bool:
        """Whether the leader wants the state after so many updates."""
        every = [self.checkpoint[1]] if self.checkpoint else []
        every += [self.scoring.every] if self.scoring else []
        return any(version % each == 0 for each in every)


@dataclass(frozen=True, eq=False)
class Scoring:
    """How parameters are scored, see :class:`dask_coded.training.Validation`.

    Parameters
    ----------
    score : bytes
        The pickled function.
    samples, targets : Blocks
    every : int
        Number of updates between scores.
    """

    score: bytes
    samples: Blocks
    targets: Blocks
    every: int


@dataclass(frozen=True, eq=False)
class Group:
    """Some workers that train together, and how.

    Parameters
    ----------
    run_id : str
    training : Training
    plan : Plan
    addresses : tuple of str
        One per node of the plan.
    version : int
        How many updates had been applied when it was formed.
    sources : tuple of str
        Addresses of the workers that have that state, bit for bit; empty if the model has it.
    choice : tuple of int
        What the plan chose for the first steps.
    state : bytes or None
        That state, if it comes from the training's own checkpoint.
    """

    run_id: str
    training: Training
    plan: Plan
    addresses: tuple[str, ...]
    version: int
    sources: tuple[str, ...]
    choice: tuple[int, ...] = ()
    state: bytes | None = None

    def begins_with(self, step: int) -> int:
        """Return how many updates the parameters of a step have seen, by the schedule.

        A new group starts with nothing in flight.
        """
        return max(self.training.schedule.version(step), self.version)


@dataclass(repr=False)
class Step(Summary):
    """What the leader saw of a step.

    ``late``, ``computing``, ``units`` and ``speeds`` are kept for a training's last 1000 steps; for
    earlier ones they are empty.

    Parameters
    ----------
    step : int
        From 0.
    loss : float
        Mean over the samples of the step; NaN where the gradient gives none.
    seconds : float
        From the end of the previous step, as the leader saw it. The first step of a group includes
        the fetching of data. NaN for a step that only a lost leader has seen.
    late : tuple of str
        Addresses of the workers that had not computed their part when the step ended.
    computing : dict of str to float
        Seconds that each worker computed, before it waited for others. A late worker is included
        if it finished while the training went on.
    units : dict of str to int
        With :class:`~dask_coded.aggregation.Squeeze`, the number of units that each worker has
        computed of the sum; otherwise empty.
    moved : int
        Units that moved to another worker while the step was computed.
    speeds : dict of str to float
        Units per second of each worker that has computed any; otherwise empty.
    score : float or None
        Of the parameters after this step, if a :class:`~dask_coded.training.Validation` has scored
        them: the mean over its samples.
    """

    step: int
    loss: float
    seconds: float = float("nan")
    late: tuple[str, ...] = ()
    computing: dict[str, float] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    score: float | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a training ended.

    Parameters
    ----------
    parameters : ndarray
    version : int
        How many updates they have seen.
    history : list of Step
    digests : dict of str to str
        Of the parameters of each worker that finished in time.
    """

    parameters: Any
    version: int
    history: list[Step]
    digests: dict[str, str]
