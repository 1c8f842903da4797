"""PyTorch modules as functions of a flat array of parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dask_coded.training.optimizers import Vector


class TorchModule:
    """A PyTorch module with its parameters in one flat array.

    Parameters
    ----------
    module : torch.nn.Module
        In the mode in which it is trained.
    loss : callable
        ``loss(predictions, targets)`` returns the *sum* over the samples: one of PyTorch's losses
        with ``reduction="sum"``, or a function.

    Attributes
    ----------
    parameters : ndarray, shape (n,)
        All parameters that require a gradient, concatenated.
    layers : tuple of tuple of int
        Their shapes.

    Raises
    ------
    ValueError
        If the loss is a mean, or the module has batch normalisation.

    Notes
    -----
    Random draws of a module, such as dropout, are seeded from the parameters and the samples, so
    all workers that compute with the same samples draw the same numbers.

    Batch normalisation is refused because its running statistics would differ between workers and
    its gradient is not a sum over samples. Group and layer normalisation are fine.

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

    def __init__(self, module: torch.nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        if getattr(loss, "reduction", "sum") != "sum":
            raise ValueError(
                f"The loss must be a sum over samples, {loss!r} is a {loss.reduction}: "  # type: ignore[attr-defined]
                'pass reduction="sum".'
            )
        for part in module.modules():
            if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.track_running_stats:
                raise ValueError(
                    f"The module contains {part!r}, whose gradient is not a sum over samples: use "
                    f"GroupNorm or LayerNorm."
                )
        self.module = module
        self._loss = loss
        self._wanted = [p for p in module.parameters() if p.requires_grad]
        self.layers = tuple(tuple(p.shape) for p in self._wanted)

    @property
    def parameters(self) -> Vector:
        return torch.nn.utils.parameters_to_vector(self._wanted).detach().cpu().numpy().copy()

    def gradient(self, parameters: Vector, samples: Any, targets: Any) -> tuple[float, Vector]:
        """Return the loss and its gradient, summed over samples, as :func:`train` expects."""
        self.load(parameters)
        self.module.zero_grad(set_to_none=True)
        seed = zlib.crc32(samples[:1].tobytes(), zlib.crc32(parameters[:1024].tobytes()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loss = self._loss(self.module(_tensor(samples)), _tensor(targets))
            loss.backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._wanted]
        return float(loss.detach()), torch.cat([g.reshape(-1) for g in found]).cpu().numpy()

    def load(self, parameters: Vector) -> torch.nn.Module:
        """Copy a flat array into the module's parameters and return the module."""
        # Copied because PyTorch expects a writable array.
        flat = torch.from_numpy(np.array(parameters))
        with torch.no_grad():
            start = 0
            for parameter in self._wanted:
                stop = start + parameter.numel()
                parameter.copy_(flat[start:stop].view_as(parameter))
                start = stop
        return self.module

    def prediction(self, parameters: Vector, samples: Any) -> Any:
        """Return the module's output for a NumPy array of samples, as a NumPy array."""
        self.load(parameters)
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return self.module(_tensor(samples)).cpu().numpy()
        finally:
            self.module.train(training)


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
