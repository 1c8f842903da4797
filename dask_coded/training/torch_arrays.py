"""Tensors of PyTorch as flat arrays, and arrays as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dask_coded.training.optimizers import Vector


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of real numbers, which shares its memory if the tensor is dense."""
    tensor = tensor.detach().to_dense()  # gradients of embeddings may be sparse
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def joined(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the numbers of some tensors in one tensor, in the order of their indices."""
    # Numbers may lie in another order in memory, as with `torch.channels_last`.
    return torch.cat([real(tensor).cpu().reshape(-1) for tensor in tensors], out=out)


def flat(tensors: Sequence[torch.Tensor]) -> Vector:
    """Return the numbers of some tensors in one array, in the order of their indices."""
    return as_array(joined(tensors))


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's numbers as an array, which shares its memory if the dtype allows it."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)


def as_tensor(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
