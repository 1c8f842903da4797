"""PyTorch modules as functions of a flat array of parameters."""

from __future__ import annotations

import copy
import hashlib
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.nn.utils.parametrize import is_parametrized

from dask_coded.arguments import unwrapped
from dask_coded.compression import sum_dtype
from dask_coded.training.optimizers import Decay, Vector, check_decay
from dask_coded.training.torch_arrays import as_array, as_tensor, flat, joined, real
from dask_coded.training.torch_optimizer import (
    Scheduled,
    TorchOptimizer,
    check_carried,
    kept_state,
)

# All threads of a process draw from the same random numbers, also those of workers in one process.
_RANDOM = threading.Lock()
# What a normalisation averages over steps.
_AVERAGES = ("running_mean", "running_var")


class TorchModule:
    """A PyTorch module with its parameters in one flat array.

    Parameters
    ----------
    module : torch.nn.Module
        In the mode in which it is trained.
    loss : callable
        ``loss(predictions, targets)`` returns the *sum* over the samples: one of PyTorch's losses
        with ``reduction="sum"``, or a function.
    find_unused_parameters : bool
        Whether parameters that some samples do not need have a gradient of zero for these; by
        default that is an error, as with PyTorch's DDP. Weight decay then changes them, too.

    Attributes
    ----------
    parameters : ndarray, shape (n,)
        All parameters that require a gradient, concatenated: complex ones as pairs of real numbers,
        and bfloat16, which NumPy lacks, as float32.
        Behind them come the running averages of batch normalisation, if there are any.
    layers : tuple of tuple of int
        Their shapes; that of complex ones ends with 2.
    averages : ndarray, shape (m,)
        The momenta of the running averages, which are the last ``m`` parameters. :func:`train`
        finds them if it is passed :meth:`gradient`. Pass it ``averages=model.averages`` with a
        function of your own that calls it.

    Raises
    ------
    ValueError
        If the loss is a mean, no parameter requires a gradient, a parameter has no numbers yet,
        the module has parametrizations, or running averages have no momentum.

    Notes
    -----
    A module in bfloat16 computes its gradients in bfloat16, while sums and updates are in float32.
    Floating-point samples are converted to bfloat16 if its first parameter is in bfloat16.

    Random draws of a module, such as dropout, are seeded from the parameters and the samples, so
    all workers that compute with the same samples draw the same numbers.

    Batch normalisation takes its statistics from the samples of one call, at least two: those of a
    unit of :class:`~dask_coded.aggregation.Squeeze`, which do not depend on the workers, or those
    of a worker in a step, as with PyTorch's DDP. Its running averages follow the mean over all
    calls of a step.

    Examples
    --------
    >>> import numpy as np, torch
    >>> model = TorchModule(torch.nn.Linear(2, 1), torch.nn.MSELoss(reduction="sum"))
    >>> model.layers, model.parameters.dtype
    (((1, 2), (1,)), dtype('float32'))
    >>> X, y = np.ones((3, 2), dtype=np.float32), np.zeros((3, 1), dtype=np.float32)
    >>> loss, gradient = model.gradient(np.zeros(3, dtype=np.float32), X, y)
    >>> loss, gradient.tolist()
    (0.0, [0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        find_unused_parameters: bool = False,
    ) -> None:
        if getattr(loss, "reduction", "sum") != "sum":
            raise ValueError(
                f"The loss must be a sum over samples, {loss!r} is a {loss.reduction}: "  # type: ignore[attr-defined]
                'pass reduction="sum".'
            )
        for name, parameter in module.named_parameters():
            if parameter.is_meta or torch.nn.parameter.is_lazy(parameter):
                raise ValueError(
                    f"The module's parameter {name!r} has no numbers yet: call a lazy module with "
                    f"some samples first, or create the module on a device."
                )
        parts = [name or "itself" for name, p in module.named_modules() if is_parametrized(p)]
        if parts:
            raise ValueError(
                f"The module has parametrizations, in {', '.join(parts)}, with which PyTorch "
                f"cannot send it to workers: use layers without `torch.nn.utils.parametrizations`."
            )
        self.module = module
        self._loss = loss
        self._find_unused = find_unused_parameters
        self._wanted = [p for p in module.parameters() if p.requires_grad]
        if not self._wanted:
            raise ValueError("The module must have a parameter that requires a gradient.")
        # Those that take their statistics from the samples, and have running ones.
        self._normed = [
            part
            for part in module.modules()
            if isinstance(part, torch.nn.modules.batchnorm._NormBase)
            and part.training
            and part.running_mean is not None
        ]
        for part in self._normed:
            if part.momentum is None:
                raise ValueError(
                    f"The module contains {part!r} without a momentum, whose averages would be "
                    f"over all steps: give it one, such as 0.1."
                )
        self.layers = tuple(tuple(real(p).shape) for p in (*self._wanted, *self._running))
        first = next(iter(module.parameters())).dtype
        self._is_sum = hasattr(loss, "reduction")
        self._half = any(p.dtype == torch.float16 for p in self._wanted)
        self._narrow = torch.bfloat16 if first == torch.bfloat16 else None
        # Parameters that were loaded and do not change, and the seed that follows from them.
        self._held: Vector | None = None
        self._seed = 0
        # Where gradients are written as long as these are held.
        self._room: torch.Tensor | None = None

    @property
    def _running(self) -> list[torch.Tensor]:
        """The running averages, mean and variance of each normalisation."""
        return [part.get_buffer(name) for part in self._normed for name in _AVERAGES]

    @property
    def averages(self) -> Vector:
        entries = [len(_AVERAGES) * part.num_features for part in self._normed]
        return np.repeat(
            np.array([part.momentum for part in self._normed], dtype=float),
            np.array(entries, dtype=np.intp),
        )

    @property
    def parameters(self) -> Vector:
        return flat([*self._wanted, *self._running])

    def gradient(self, parameters: Vector, samples: Any, targets: Any) -> tuple[float, Vector]:
        """Return the loss and its gradient, summed over samples, as :func:`train` expects.

        Raises
        ------
        ValueError
            If the module has changed a buffer, as spectral normalisation does, the loss is no sum
            over samples or does not depend on a parameter, or there are too few samples for batch
            normalisation.
        """
        if parameters is not self._held:
            self.hold_parameters(parameters)
            self._held = None
        samples = unwrapped(samples)
        seed = zlib.crc32(samples[:1].tobytes(), self._seed)
        versions = [parameter._version for parameter in self._wanted]
        if self._normed and len(samples) < 2:
            raise ValueError(
                "Batch normalisation needs at least 2 samples at a time, there is 1: pass a larger "
                "`batch_size`, or fewer units."
            )
        own = {id(b) for part in self._normed for b in part.buffers(recurse=False)}
        buffers = {name: (b, b._version) for name, b in self.module.named_buffers()}
        with _seeded(seed), self._statistics() as statistics:
            predictions, wanted = self.module(self._input(samples)), as_tensor(targets)
            # Before the backward pass, in which a module may compute parts again.
            averages = [statistics(len(samples))] if self._normed else []
            loss = self._loss(predictions, wanted)
            found = self._gradient(loss, len(samples))
            if averages:
                found = np.concatenate([found, *averages])
        for name, buffer in self.module.named_buffers():
            before, version = buffers.get(name, (None, 0))
            if id(buffer) in own:
                continue
            if buffer is not before or buffer._version != version:
                raise ValueError(
                    f"The module must not change its buffers when it computes, it has changed "
                    f"{name!r}: use a module without such a state, because workers do not share it."
                )
        if versions != [parameter._version for parameter in self._wanted]:
            self._held = None  # as an embedding with `max_norm` does
        if not self._is_sum:
            self._check_sum(predictions, wanted, float(loss.detach()))
        return self._number(loss, predictions, wanted), found

    def _number(self, loss: torch.Tensor, predictions: Any, targets: torch.Tensor) -> float:
        """Return the loss, of which float16 may not hold the sum."""
        number = float(loss.detach())
        if self._half and not math.isfinite(number):
            # A loss with weights of its own takes no other dtype.
            with torch.no_grad(), suppress(Exception):
                number = float(self._loss(predictions.float(), targets))
        return number

    @contextmanager
    def _statistics(self) -> Iterator[Callable[[int], Vector]]:
        """Have normalisations keep the statistics of one call, which a function sums over samples.

        Afterwards they have the running averages again.
        """
        before = [tensor.clone() for tensor in self._running]
        calls = [int(part.get_buffer("num_batches_tracked")) for part in self._normed]
        momenta = [part.momentum for part in self._normed]

        def summed(samples: int) -> Vector:
            for part, count in zip(self._normed, calls, strict=True):
                if int(part.get_buffer("num_batches_tracked")) > count + 1:
                    raise ValueError(
                        f"The module must use {part!r} at most once when it computes: use another "
                        f"one at each place, because each has statistics of its own."
                    )
            found = flat(self._running)
            return samples * found.astype(sum_dtype(found.dtype), copy=False)

        try:
            for part in self._normed:
                part.momentum = 1.0
            yield summed
        finally:
            for part, momentum in zip(self._normed, momenta, strict=True):
                part.momentum = momentum
            with torch.no_grad():
                for tensor, value in zip(self._running, before, strict=True):
                    tensor.copy_(value)

    def _check_sum(self, predictions: Any, targets: torch.Tensor, loss: float) -> None:
        """Check that a function is a sum over samples: it has no attribute that says so."""
        middle = len(targets) // 2
        if not middle or getattr(predictions, "shape", ())[:1] != targets.shape[:1]:
            return
        try:
            with torch.no_grad():
                if float(self._loss(predictions, targets)) != loss:
                    return  # it draws random numbers
                parts = [
                    float(self._loss(predictions[rows], targets[rows]))
                    for rows in (slice(middle), slice(middle, None))
                ]
        except Exception:  # rows of predictions are not those of samples
            return
        # What is not finite counts as equal, because float16 may hold the parts but not the sum.
        tolerance = math.sqrt(torch.finfo(predictions.dtype).eps) * sum(map(abs, parts))
        if math.isfinite(loss) and abs(sum(parts) - loss) > tolerance:
            raise ValueError(
                f"The loss must be a sum over samples. It is {loss:.4g} for {len(targets)} "
                f"samples, but {parts[0]:.4g} and {parts[1]:.4g} for their halves: pass "
                f'reduction="sum" to functions of PyTorch, and `weight_decay` to the optimizer '
                f"instead of a penalty."
            )
        self._is_sum = True

    def _gradient(self, loss: torch.Tensor, samples: int) -> Vector:
        """Return the gradient of the loss, a sum over samples."""
        self.module.zero_grad(set_to_none=True)
        loss.backward(retain_graph=self._half)
        found = self._gathered()
        if self._half and not np.isfinite(found).all():
            # Float16 does not hold the sum, but it may hold the mean.
            self.module.zero_grad(set_to_none=True)
            loss.backward(torch.full_like(loss, 1 / samples))
            found = samples * self._gathered().astype(np.float32)
        return found

    def _gathered(self) -> Vector:
        unused = {id(p) for p in self._wanted if p.grad is None}
        if unused and not self._find_unused:
            names = [name for name, p in self.module.named_parameters() if id(p) in unused]
            raise ValueError(
                f"The loss does not depend on the parameters {names}, which optimizers may change "
                "all the same: freeze them with `requires_grad_(False)`, or pass "
                "`find_unused_parameters=True` if other samples need them."
            )
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._wanted]
        if self._held is None:
            return flat(gradients)
        # New memory takes longer than copying, see `UnitSum.drop`.
        self._room = joined(gradients, self._room)
        return as_array(self._room)

    def hold_parameters(self, parameters: Vector) -> None:
        """Load parameters that do not change as long as :meth:`gradient` is called with this array.

        Other calls load them first, which takes three passes over all parameters. Until then, each
        call writes its gradient into the array that the one before has returned.
        """
        flat = unwrapped(parameters)
        self.load(flat)
        # All parameters count, because an optimizer may change few of them. This is exact, so all
        # workers find the same.
        state = np.bitwise_xor.reduce(flat.view(f"u{flat.itemsize}"))
        self._seed = zlib.crc32(state.tobytes())
        self._held = parameters

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": None, "_room": None}

    def constants(self) -> str:
        """Return a hash of what the module computes with and no training changes.

        That is frozen parameters, and buffers other than running averages.
        """
        learned = {id(tensor) for tensor in (*self._wanted, *self._running)}
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if id(tensor) not in learned and not name.endswith("num_batches_tracked"):
                digest.update(name.encode())
                digest.update(as_array(real(tensor)).tobytes())
        return digest.hexdigest()

    def compared_by(self) -> Any:
        """Return what two of these are compared by: the module, the loss and the option."""
        return self.module, self._loss, self._find_unused

    def load(self, parameters: Vector) -> torch.nn.Module:
        """Copy a flat array or tensor into the module's parameters and return the module."""
        self._held = None
        # Copied because PyTorch expects a writable array.
        flat = torch.from_numpy(np.array(unwrapped(parameters)))
        with torch.no_grad():
            start = 0
            for parameter, shape in zip(self._wanted + self._running, self.layers, strict=True):
                stop = start + math.prod(shape)
                numbers = flat[start:stop].reshape(shape)
                if parameter.is_complex():
                    numbers = torch.complex(numbers[..., 0], numbers[..., 1])
                parameter.copy_(numbers)
                start = stop
        if any((part.get_buffer("running_var") < 0).any() for part in self._normed):
            raise ValueError(
                "A running variance is negative, because an optimizer has changed it: pass "
                "`averages=model.averages` to `train` as well."
            )
        return self.module

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        decay: Decay | torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> TorchOptimizer:
        """Return an optimizer of PyTorch as :func:`train` takes it.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Over parameters of the module, as ``torch.optim.AdamW(module.parameters())`` is, with
            any groups. It is not changed: the training continues with a copy of its state.
        decay : callable or LRScheduler, optional
            As for :class:`SGD`: the factor of all learning rates in a step. Or a scheduler of this
            optimizer from ``torch.optim.lr_scheduler``, which is stepped after each update, not
            after each epoch.

        Raises
        ------
        TypeError
            If it is no optimizer of PyTorch, needs a closure, has hooks, or keeps anything but
            options of groups and tensors of parameters; or if ``decay`` is neither a function nor a
            scheduler, or a scheduler that needs a metric. An optimizer that changes its groups in
            a step is refused in the first step.
        ValueError
            If it has a parameter that is not the module's, or the scheduler is of another one.

        Examples
        --------
        >>> module = torch.nn.Linear(2, 1, bias=False)
        >>> model = TorchModule(module, torch.nn.MSELoss(reduction="sum"))
        >>> optimizer = model.optimizer(torch.optim.SGD(module.parameters(), lr=0.5))
        >>> x = np.array([1.0, 2.0], dtype=np.float32)
        >>> optimizer.update(x, np.ones(2, dtype=np.float32), optimizer.start(x), step=0)
        >>> x
        array([0.5, 1.5], dtype=float32)
        """
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(
            optimizer, torch.optim.LBFGS
        ):
            raise TypeError(
                f"Argument 'optimizer' must be an optimizer of PyTorch that takes one gradient per "
                f"step, such as `torch.optim.Adam(module.parameters())`, it is {optimizer!r}."
            )
        check_carried(optimizer)
        position = {id(p): i for i, p in enumerate(self._wanted)}
        groups = []
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            members = [p for p in group["params"] if p.requires_grad]
            if not all(id(p) in position for p in members):
                raise ValueError(
                    "The optimizer must be over parameters of this module: pass "
                    "`module.parameters()` of the same module to both."
                )
            groups.append((options, [position[id(p)] for p in members]))
        rule: Decay | Scheduled | None
        if isinstance(decay, torch.optim.lr_scheduler.LRScheduler):
            rule = Scheduled(decay, optimizer)
        else:
            check_decay(decay)
            rule = decay
        return TorchOptimizer(
            learning_rate=float(groups[0][0]["lr"]),
            kind=type(optimizer),
            shapes=self.layers[: len(self._wanted)],
            groups=groups,
            first={name: a.copy() for name, a in kept_state(optimizer, self._wanted).items()},
            decay=rule,
        )

    def prediction(self, parameters: Vector, samples: Any) -> Any:
        """Return the module's output for samples: a tensor if they are one, else a NumPy array."""
        # In a copy, because other threads may be using the module, in this mode or for training.
        module = copy.deepcopy(self).load(parameters).eval()
        # Copied, because a module may work in place on what it gets.
        own = samples.clone() if isinstance(samples, torch.Tensor) else np.array(samples)
        with torch.no_grad():
            found = module(self._input(own))
        return found if isinstance(samples, torch.Tensor) else as_array(found)

    def _input(self, samples: Any) -> torch.Tensor:
        """Return samples as a tensor for the module, which adapts no dtypes."""
        tensor = as_tensor(samples)
        if self._narrow and tensor.is_floating_point() and not isinstance(samples, torch.Tensor):
            return tensor.to(self._narrow)
        return tensor


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's random numbers, and continue with the usual ones afterwards."""
    with _RANDOM:
        # `torch.manual_seed`, for every device, takes longer than a small gradient.
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        try:
            yield
        finally:
            torch.set_rng_state(state)
