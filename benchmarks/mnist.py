"""A small convolutional network in PyTorch, and the MNIST images that it learns.

The data are the 10,000 images of MNIST's test set, of which the last 2,000 are held out. They are
read from the folder that the environment variable ``DASK_CODED_DATA`` names.
"""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

IMAGES = "img_mnist_t10k-images-idx3-ubyte.gz"
LABELS = "img_mnist_t10k-labels-idx1-ubyte.gz"

#: Images that are not trained on.
HELD_OUT = 2_000


class Split(NamedTuple):
    """Images and their digits: uint8 of shape (n, 784), int64 of shape (n,)."""

    samples: np.ndarray
    targets: np.ndarray


def load(folder: Path | None = None) -> tuple[Split, Split]:
    """Load the training and held-out images.

    Parameters
    ----------
    folder
        Folder of the files; by default the one that ``DASK_CODED_DATA`` names.

    Raises
    ------
    FileNotFoundError
        If the files are missing.
    """
    folder = folder or Path(os.environ.get("DASK_CODED_DATA", "data"))
    for name in (IMAGES, LABELS):
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"There is no {name} in {folder}: set DASK_CODED_DATA to the folder of data sets."
            )
    images = np.frombuffer(gzip.decompress((folder / IMAGES).read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / LABELS).read_bytes()), np.uint8, offset=8)
    samples = images.reshape(-1, 28 * 28)
    targets = labels.astype(np.int64)
    return (
        Split(samples[:-HELD_OUT], targets[:-HELD_OUT]),
        Split(samples[-HELD_OUT:], targets[-HELD_OUT:]),
    )


def network(seed: int = 0) -> torch.nn.Sequential:
    """Return a network of two convolutions and two dense layers, 80,000 weights."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 28, 28)),
        torch.nn.Conv2d(1, 16, 5),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 5),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


def layers() -> list[tuple[int, ...]]:
    """Return the shapes of the network's layers, in their order in the gradient."""
    return [tuple(parameter.shape) for parameter in network().parameters()]


def start(seed: int = 0) -> np.ndarray:
    """Return the initial weights, float32."""
    return parameters_to_vector(network(seed).parameters()).detach().numpy()


class _Networks(threading.local):
    """One network for each thread, because its weights are overwritten."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # workers share the cores; sums are reproducible
        self.network = network()


_networks = _Networks()


def gradient(
    parameters: np.ndarray, samples: np.ndarray, targets: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return the cross entropy summed over the samples, and its gradient.

    Parameters
    ----------
    parameters
        All weights, float32.
    samples
        Images, uint8 of shape (n, 784).
    targets
        Their digits, shape (n,).
    """
    net = _set(parameters)
    loss = cross_entropy(net(_scaled(samples)), torch.tensor(targets), reduction="sum")
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return loss.item(), parameters_to_vector(gradients).numpy()


def accuracy(parameters: np.ndarray, split: Split) -> float:
    """Return the share of images that are classified correctly."""
    net = _set(parameters)
    with torch.no_grad():
        found = net(_scaled(split.samples)).argmax(1).numpy()
    return float(np.mean(found == split.targets))


def _scaled(samples: np.ndarray) -> torch.Tensor:
    """Scale pixels to between -1 and 1."""
    return torch.tensor(samples).float() / 127.5 - 1


def _set(parameters: np.ndarray) -> torch.nn.Sequential:
    net = _networks.network
    weights = torch.from_numpy(np.array(parameters, dtype=np.float32))
    vector_to_parameters(weights, net.parameters())
    return net
