"""Colour images of the size of CIFAR's, made here, which a small residual network can learn.

Each class is a texture, a sum of a few waves in each colour. An image shows the texture of its
class shifted, perhaps mirrored, and fainter or stronger, with that of another class and noise on
it. No pixel alone tells the class, as in photographs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SIDE, COLOURS, CLASSES = 32, 3, 10
#: Images, and those of them that are not trained on.
COUNT, HELD_OUT = 10_000, 2_000
_WAVES = 4


class Split(NamedTuple):
    """Images and their classes: uint8 of shape (n, pixels), int64 of shape (n,)."""

    samples: np.ndarray
    targets: np.ndarray


def made(seed: int = 0) -> tuple[Split, Split]:
    """Make the training and held-out images, of shape (n, 3072): colour by colour, row by row."""
    rng = np.random.default_rng(seed)
    textures = _textures(rng)
    targets = rng.integers(CLASSES, size=COUNT)
    others = (targets + rng.integers(1, CLASSES, size=COUNT)) % CLASSES
    strength = rng.uniform(0.4, 1, (COUNT, 1, 1, 1))
    images = strength * _seen(textures, targets, rng)
    images += rng.uniform(0, 0.4, (COUNT, 1, 1, 1)) * _seen(textures, others, rng)
    images += 1.4 * rng.standard_normal(images.shape, dtype=np.float32)
    samples = np.clip(127.5 + 45 * images, 0, 255).astype(np.uint8).reshape(COUNT, -1)
    return (
        Split(samples[:-HELD_OUT], targets[:-HELD_OUT]),
        Split(samples[-HELD_OUT:], targets[-HELD_OUT:]),
    )


def _textures(rng: np.random.Generator) -> np.ndarray:
    """Return one texture of each class, of mean 0 and variance 1, that shifts round its edges."""
    rows, columns = np.mgrid[:SIDE, :SIDE] * (2 * np.pi / SIDE)
    waves = rng.integers(-5, 6, (CLASSES, COLOURS, _WAVES, 2, 1, 1))
    phases = rng.uniform(0, 2 * np.pi, (CLASSES, COLOURS, _WAVES, 1, 1))
    found = np.cos(waves[..., 0, :, :] * rows + waves[..., 1, :, :] * columns + phases).sum(axis=2)
    found -= found.mean(axis=(2, 3), keepdims=True)
    return (found / found.std(axis=(1, 2, 3), keepdims=True)).astype(np.float32)


def _seen(textures: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the textures of classes, each shifted at random, half of them mirrored."""
    count = len(classes)
    down, right = rng.integers(SIDE, size=(2, count, 1))
    columns = (np.arange(SIDE) + right) % SIDE
    columns = np.where(rng.random((count, 1)) < 0.5, columns[:, ::-1], columns)
    rows = (np.arange(SIDE) + down) % SIDE
    colours = np.arange(COLOURS)[:, None, None]
    which = classes[:, None, None, None]
    return textures[which, colours, rows[:, None, :, None], columns[:, None, None, :]]
