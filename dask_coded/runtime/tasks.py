"""What the scheduler runs: one round, or a whole algorithm of which each product is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import get_worker, secede
from distributed.worker import thread_state

from dask_coded.runtime.checkpoints import KeptLoop
from dask_coded.runtime.coordinator import Coordinator, Operator
from dask_coded.runtime.products import PairOperator
from dask_coded.runtime.spec import PairSpec, RoundOptions
from dask_coded.runtime.worker import worker_plugin


@dataclass(frozen=True)
class OperatorSlot:
    """Stands for an operator among the arguments of an algorithm."""

    array_id: str


@dataclass(frozen=True)
class DataSlot:
    """Stands for the result of another task among the arguments of an algorithm."""

    index: int


@dataclass(frozen=True)
class LoopSlot:
    """Stands for the loop among the arguments of an algorithm.

    Parameters
    ----------
    topic : str or None
        Event topic under which the client hears of rounds.
    interval : float
        Seconds between two of them, at least.
    """

    topic: str | None = None
    interval: float = 0.1


def operator(array_id: str, options: RoundOptions) -> Operator | PairOperator:
    """What an algorithm in a task has in the place of a coded array or of a coded pair."""
    coordinator = Coordinator.of(array_id, options)
    pair = isinstance(coordinator.open(), PairSpec)
    return PairOperator(coordinator) if pair else Operator(coordinator)


def run_round(
    array_ids: Sequence[str], options: RoundOptions, operand: Any
) -> np.ndarray[Any, Any]:
    """Task: one round, of an array with its right operand or of a pair with its weights."""
    found = operator(array_ids[0], options)
    return found.product(operand) if isinstance(found, PairOperator) else found @ operand


def run_loop(
    array_ids: Sequence[str],
    options: RoundOptions,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *found: Any,
) -> Any:
    """Task: a whole algorithm, with operators, data and the loop in the places marked for them."""
    secede()
    operators = {array_id: operator(array_id, options) for array_id in array_ids}
    # As many as may be lost at once, and this one beside.
    copies = 1 + max((op.code.tolerance for op in operators.values()), default=0)

    def fill(value: Any) -> Any:
        if isinstance(value, OperatorSlot):
            return operators[value.array_id]
        if isinstance(value, DataSlot):
            return found[value.index]
        if isinstance(value, LoopSlot):
            plugin = worker_plugin(get_worker())
            return KeptLoop(plugin, thread_state.key, copies, value.topic, value.interval)
        return value

    return function(*map(fill, args), **{name: fill(value) for name, value in kwargs.items()})
