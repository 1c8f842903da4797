"""What the scheduler runs: one round, or a whole algorithm of which each product is a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Reschedule, get_worker, secede

from dask_coded.compat import current_key
from dask_coded.labels import Labels
from dask_coded.rounds import RoundOptions
from dask_coded.runtime.coordinator.loop import KeptLoop
from dask_coded.runtime.coordinator.operators import Operator, PairOperator, sketch
from dask_coded.runtime.coordinator.rounds import Coordinator
from dask_coded.runtime.spec import PairSpec
from dask_coded.runtime.worker.plugin import worker_plugin
from dask_coded.storage import StateStore
from dask_coded.transport.attempts import RunOverError


@dataclass(frozen=True)
class OperatorSlot:
    """Stands for an operator among the arguments of an algorithm, with its array's labels."""

    array_id: str
    labels: Labels


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
        Event topic by which rounds are reported to the client.
    storage : str or None
        Where the state is kept in files.
    owner : dict or None
        What the loop is of, as JSON.
    arrays : sequence of str
        The coded arrays among that.
    """

    topic: str | None = None
    storage: str | None = None
    owner: dict[str, Any] | None = None
    arrays: Sequence[str] = ()


@contextmanager
def _operator(array_id: str, options: RoundOptions) -> Iterator[Operator | PairOperator]:
    """Make what an algorithm in a task gets instead of a coded array or a coded pair."""
    coordinator = Coordinator.of(array_id, options)
    try:
        pair = isinstance(coordinator.open(), PairSpec)
        yield PairOperator(coordinator) if pair else Operator(coordinator)
    finally:
        coordinator.close()


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value; if that is unchanged, also to what lists, tuples and dicts hold.

    The function need not call itself. If it did, it would be part of a reference cycle, and so
    would everything that it uses: a coded array would stay in the cluster until the garbage is
    collected.
    """
    if (found := function(value)) is not value:
        return found
    if type(value) in (list, tuple):
        return type(value)(map_nested(function, item) for item in value)
    if type(value) is dict:
        return {name: map_nested(function, item) for name, item in value.items()}
    return value


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """End a run that is over without a result.

    The scheduler knows already. Should it have assigned the task to this worker again meanwhile,
    the task runs once more, whereas an exception would be its result.
    """
    try:
        yield
    except RunOverError as exc:
        raise Reschedule(*exc.args) from exc


@_ending_quietly()
def run_round(
    array_ids: Sequence[str], options: RoundOptions, operand: Any
) -> np.ndarray[Any, Any]:
    """Run one round as a task, of an array with its right operand or a pair with its weights."""
    with _operator(array_ids[0], options) as found:
        return found.product(operand) if isinstance(found, PairOperator) else found @ operand


@_ending_quietly()
def run_loop(
    array_ids: Sequence[str],
    options: RoundOptions,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *found: Any,
) -> Any:
    """Run an algorithm as a task, with operators, data and the loop instead of their slots."""
    secede()
    kept: list[KeptLoop] = []
    with ExitStack() as ending:
        operators = {id_: ending.enter_context(_operator(id_, options)) for id_ in array_ids}
        # As many copies of the state as workers may be lost at once, and one more.
        copies = 1 + max((op.code.tolerance for op in operators.values()), default=0)

        def fill(value: Any) -> Any:
            if isinstance(value, OperatorSlot):
                chosen = operators[value.array_id]
                chosen.labels = value.labels
                return chosen
            if isinstance(value, DataSlot):
                return found[value.index]
            if isinstance(value, LoopSlot):
                loop = _kept_loop(value, operators, copies, number=len(kept))
                ending.callback(loop.close)
                kept.append(loop)
                return loop
            return value

        result = function(*map_nested(fill, args), **map_nested(fill, kwargs))
        for loop in kept:
            loop.returned()
        return result


def _kept_loop(
    slot: LoopSlot, operators: Mapping[str, Operator | PairOperator], copies: int, number: int
) -> KeptLoop:
    plugin = worker_plugin(get_worker())
    attempt = plugin.exchange.attempt(current_key())
    assert attempt is not None
    store = None
    if slot.storage is not None:
        sketches = [sketch(operators[id_]) for id_ in slot.arrays if id_ in operators]
        store = StateStore(slot.storage, (slot.owner or {}) | {"sketches": sketches})
    return KeptLoop(
        plugin.worker,
        plugin.keeper,
        plugin.exchange,
        attempt,
        copies,
        slot.topic,
        number,
        store,
    )
