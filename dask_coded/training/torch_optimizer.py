"""Optimizers and schedulers of PyTorch on a flat array of parameters."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from distributed.protocol.pickle import dumps

from dask_coded.arguments import check_positive
from dask_coded.training.optimizers import Decay, Optimizer, Vector
from dask_coded.training.torch_arrays import as_array, real


@dataclass(frozen=True, eq=False)
class TorchOptimizer(Optimizer):
    """An optimizer of ``torch.optim`` on a flat array; see :meth:`TorchModule.optimizer`.

    Parameters
    ----------
    learning_rate : float
        Of the first group.
    kind : type
    shapes : sequence of tuple of int
        Of the module's parameters, which lie one after the other in the flat array.
    groups : sequence of (dict, sequence of int)
        Options of each group, and the positions of its parameters in the module.
    first : dict
        What the optimizer keeps for its parameters already: arrays by position and name.
    decay : callable, optional
        As for :class:`SGD`, or a scheduler.
    """

    kind: Callable[[Any], torch.optim.Optimizer]
    shapes: Sequence[tuple[int, ...]]
    groups: Sequence[tuple[dict[str, Any], Sequence[int]]]
    first: dict[str, Vector]
    decay: Decay | Scheduled | None = None

    def __post_init__(self) -> None:
        # A schedule may begin with no learning at all.
        check_positive("learning_rate", self.learning_rate, or_zero=True)

    def start(self, parameters: Vector) -> dict[str, Vector]:
        if self.first:
            return {name: value.copy() for name, value in self.first.items()}
        # A step without a gradient shows which arrays there will be. The first update makes them.
        state: dict[str, Vector] = {}
        self.update(parameters.copy(), np.zeros_like(parameters), state, 0)
        return state

    def update(
        self, parameters: Vector, gradient: Vector, state: dict[str, Vector], step: int
    ) -> None:
        # PyTorch wants gradients in the dtype of their parameters.
        gradient = gradient.astype(parameters.dtype, copy=False)
        tensors, at = [], 0
        for shape in self.shapes:
            part = slice(at, at := at + math.prod(shape))
            # The tensor and the array share their memory.
            tensor = torch.from_numpy(parameters[part].reshape(shape)).requires_grad_()
            tensor.grad = torch.from_numpy(gradient[part].reshape(shape))
            tensors.append(tensor)
        optimizer = self.kind(
            [
                {**options, "params": [tensors[i] for i in members]}
                for options, (_, members) in zip(self._options(step), self.groups, strict=True)
            ]
        )
        if step or self.first:
            for name, value in state.items():
                number, key = name.split(":")
                optimizer.state[tensors[int(number)]][key] = torch.from_numpy(value)
        before = [dict(group) for group in optimizer.param_groups]
        optimizer.step()
        for old, new in zip(before, optimizer.param_groups, strict=True):
            if changed := [name for name in new if not _same(new[name], old.get(name, _MISSING))]:
                raise TypeError(
                    f"{type(optimizer).__name__} changes the options {changed} of its groups in "
                    f"a step. Workers make it again in each step and would lose the change: use an "
                    f"optimizer of `torch.optim`."
                )
        state.update(kept_state(optimizer, tensors))

    def _options(self, step: int) -> list[dict[str, Any]]:
        """Return the options of each group in a step."""
        if isinstance(self.decay, Scheduled):
            return self.decay.options(step)
        factor = 1.0 if self.decay is None else float(self.decay(step))
        return [{**options, "lr": factor * options["lr"]} for options, _ in self.groups]


class _Snapshots:
    """Where schedulers have been in this process, by what they start from.

    Each group of workers unpickles its optimizer once more. Its scheduler goes on from here,
    instead of making all steps of a long training again.
    """

    #: Steps between two snapshots.
    EVERY = 1000
    # Schedulers of so many trainings, the last ones.
    _MOST = 16

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: dict[bytes, tuple[int, bytes]] = {}

    def take(self, start: bytes, step: int, packed: bytes) -> None:
        """Take what is pickled after so many steps."""
        with self._lock:
            self._latest.pop(start, None)
            self._latest[start] = step, packed
            if len(self._latest) > self._MOST:
                del self._latest[next(iter(self._latest))]

    def last(self, start: bytes, step: int) -> tuple[int, bytes]:
        """Return how many steps the latest one has made that is not beyond a step, and that one."""
        with self._lock:
            found = self._latest.get(start, (0, start))
        return found if found[0] <= step else (0, start)


_snapshots = _Snapshots()


class _Groups:
    """Stands for an optimizer whose scheduler changes the options of its groups."""

    # A scheduler warns if the optimizer was not stepped before.
    _opt_called = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def step(self) -> None:
        raise AssertionError("It has no parameters.")

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


class Scheduled:
    """What a scheduler of PyTorch makes of the options of an optimizer's groups, by step."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        if scheduler.optimizer is not optimizer:
            raise ValueError(
                f"The {type(scheduler).__name__} must be of the optimizer that is passed with it, "
                f"it is of another one."
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric in each step, which workers do not have: pass "
                "another scheduler, or a function of the step."
            )
        groups = _Groups(optimizer)
        # A scheduler may hold others, all of this optimizer.
        copied = copy.deepcopy(scheduler, {id(optimizer): groups})
        self._start = dumps((groups, copied))  # it may hold functions
        self._step = -1

    def options(self, step: int) -> list[dict[str, Any]]:
        """Return the options of each group in a step, counted from 0."""
        if not 0 <= self._step <= step:
            self._step, packed = _snapshots.last(self._start, step)
            self._groups, self._scheduler = pickle.loads(packed)
        while self._step < step:
            self._scheduler.step()
            self._step += 1
            if self._step % _snapshots.EVERY == 0:
                # A scheduler that cannot be pickled has no snapshot: it starts from step 0.
                with suppress(Exception):
                    packed = dumps((self._groups, self._scheduler))
                    _snapshots.take(self._start, self._step, packed)
        return [dict(group) for group in self._groups.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        return {"_start": self._start, "_step": -1}


_MISSING = object()


def check_carried(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer is made again from its groups, as workers make it in each step.

    Raises
    ------
    TypeError
        If it has hooks or other attributes, or cannot be made from groups alone.
    """
    kind: Callable[[Any], torch.optim.Optimizer] = type(optimizer)
    name = type(optimizer).__name__
    way_out = "use an optimizer of `torch.optim`, or write a `training.Optimizer`"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise TypeError(
            f"The {name} has hooks, which workers do not call: remove them; `train` has "
            f"`clip_norm`."
        )
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    try:
        again = kind(groups)
    except Exception as exc:
        raise TypeError(
            f"A {name} cannot be made from its groups alone, which workers do in each step "
            f"({exc}): {way_out}."
        ) from exc
    # What has an underscore is PyTorch's own, and a scheduler replaces `step`.
    known = {"state", "param_groups", "defaults", "step"}
    own = {key: value for key, value in vars(optimizer).items() if key[0] != "_"}
    other = [k for k in own if k not in known and not _same(own[k], vars(again).get(k, _MISSING))]
    if other:
        raise TypeError(
            f"The {name} keeps {other} beside the options of its groups, and workers would not "
            f"have the same: {way_out}."
        )


def _same(one: Any, other: Any) -> bool:
    """Whether two options are equal, as far as can be told."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # arrays
        return False


def kept_state(
    optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]
) -> dict[str, Vector]:
    """Return what an optimizer keeps for some tensors: arrays by position and name."""
    found = {}
    for i, tensor in enumerate(tensors):
        for name, value in optimizer.state.get(tensor, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{i}:{name}"] = as_array(real(value))
            elif value is not None:
                raise TypeError(
                    f"The state of {type(optimizer).__name__} has {name!r}, a "
                    f"{type(value).__name__}: only optimizers that keep tensors can be used."
                )
    return found
