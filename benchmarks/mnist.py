"""Networks in PyTorch, and the MNIST images that most of them learn.

The data are the 10,000 images of MNIST's test set, of which the last 2,000 are held out. They are
read from the folder that the environment variable ``DASK_CODED_DATA`` names. The residual network
learns the images of `benchmarks.images`.
"""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import datasets
from benchmarks.images import COLOURS, SIDE, Split

IMAGES = "img_mnist_t10k-images-idx3-ubyte.gz"
LABELS = "img_mnist_t10k-labels-idx1-ubyte.gz"

#: Images that are not trained on.
HELD_OUT = 2_000


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
    folder = folder or datasets.folder() or Path("data")
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


def _convolutional() -> nn.Sequential:
    """Return two convolutions and two dense layers, 80,202 weights."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _wide() -> nn.Sequential:
    """Return three dense layers, 1,333,770 weights."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
    )


class _Block(nn.Module):
    """Two convolutions beside a shortcut.

    Normalised by the images at hand, in evaluation too: no running average is part of the state, so
    a network stays a function of its weights.
    """

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(channels, track_running_stats=False) for _ in range(2)
        )
        self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.one(images)))
        return torch.relu(self.norms[1](self.two(inner)) + self.shortcut(images))


def _residual() -> nn.Sequential:
    """Return a residual network of three blocks, 1,183,610 weights."""
    return nn.Sequential(
        nn.Unflatten(1, (COLOURS, SIDE, SIDE)),
        nn.Conv2d(COLOURS, 16, 3, 2, 1, bias=False),
        _Block(16, 16, 1),
        _Block(16, 64, 2),
        _Block(64, 320, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(320, 10),
    )


_KINDS = {"convolutional": _convolutional, "wide": _wide, "residual": _residual}


@dataclass(frozen=True)
class Net:
    """A network as functions of a flat array of its weights.

    Parameters
    ----------
    kind
        ``"convolutional"``, ``"wide"``, or ``"residual"`` for images in colour.
    """

    kind: Literal["convolutional", "wide", "residual"] = "convolutional"

    def module(self, seed: int = 0) -> nn.Sequential:
        """Return the network, with weights drawn from a seed."""
        torch.manual_seed(seed)
        return _KINDS[self.kind]()

    def layers(self) -> list[tuple[int, ...]]:
        """Return the shapes of the layers, in their order in the gradient."""
        return [tuple(parameter.shape) for parameter in self.module().parameters()]

    def start(self, seed: int = 0) -> np.ndarray:
        """Return the initial weights, float32."""
        found: np.ndarray = parameters_to_vector(self.module(seed).parameters()).detach().numpy()
        return found

    def gradient(
        self, parameters: np.ndarray, samples: np.ndarray, targets: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Return the cross entropy summed over the samples, and its gradient.

        Parameters
        ----------
        parameters
            All weights, float32.
        samples
            Images, uint8 of shape (n, pixels).
        targets
            Their classes, shape (n,).
        """
        net = self._set(parameters)
        loss = cross_entropy(net(scaled(samples)), torch.tensor(targets), reduction="sum")
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        return loss.item(), parameters_to_vector(gradients).numpy()

    def accuracy(self, parameters: np.ndarray, split: Split) -> float:
        """Return the share of images that are classified correctly."""
        net = self._set(parameters)
        with torch.no_grad():
            # Blocks stay in the cache: twice as fast as 2,000 images at once.
            found = [net(block).argmax(1) for block in scaled(split.samples).split(250)]
        return float(np.mean(torch.cat(found).numpy() == split.targets))

    def _set(self, parameters: np.ndarray) -> nn.Sequential:
        net = _networks.of(self)
        weights = torch.from_numpy(np.array(parameters, dtype=np.float32))
        vector_to_parameters(weights, net.parameters())
        return net


class _Networks(threading.local):
    """One network of each kind for each thread, because its weights are overwritten."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # workers share the cores; sums are reproducible
        self._found: dict[Net, nn.Sequential] = {}

    def of(self, net: Net) -> nn.Sequential:
        if net not in self._found:
            self._found[net] = net.module()
        return self._found[net]


_networks = _Networks()


def scaled(samples: np.ndarray) -> torch.Tensor:
    """Scale pixels to between -1 and 1."""
    return torch.tensor(samples).float() / 127.5 - 1
