"""Algorithms whose matrices are files, and the ways that are compared."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse as sp
from distributed import Client, wait
from scipy.special import expit

import dask_coded as coded
from benchmarks.graphs import web_like
from dask_coded.graph.pagerank import transition_matrix
from dask_coded.training import SGD, Checkpoint, train

_STEP = 1.0
_DAMPING = 0.85
NO_LOOP = coded.Loop()


class Files:
    """Blocks of a matrix in files, and a file in which each reading is noted.

    Parameters
    ----------
    where : Path
        A new folder.
    blocks : sequence of ndarray or sparse array
    """

    def __init__(self, where: Path, blocks: Sequence[Any]) -> None:
        where.mkdir()
        self._where = where
        self._log = where / "read"
        self._log.touch()
        self.shapes = [block.shape for block in blocks]
        self.dtype = blocks[0].dtype
        self.sparse = sp.issparse(blocks[0])
        for i, block in enumerate(blocks):
            if self.sparse:
                sp.save_npz(self._file(i), sp.csr_array(block), compressed=False)
            else:
                np.save(self._file(i), block)

    def _file(self, i: int) -> Path:
        return self._where / f"block-{i}.{'npz' if self.sparse else 'npy'}"

    def read(self, i: int) -> Any:
        """Return a block; runs on a worker."""
        file = self._file(i)
        note(self._log, file.stat().st_size)
        return sp.load_npz(file) if self.sparse else np.load(file)

    @property
    def bytes_read(self) -> int:
        """How many bytes were read so far."""
        return sum(map(int, self._log.read_text().split()))

    @property
    def size(self) -> int:
        """How many bytes the files have."""
        return sum(self._file(i).stat().st_size for i in range(len(self.shapes)))

    def array(self) -> Any:
        """Return a new dask array of them."""
        meta = sp.csr_array((0, 0), dtype=self.dtype) if self.sparse else None
        read = dask.delayed(self.read, pure=False)
        return da.concatenate(
            [
                da.from_delayed(read(i), shape, self.dtype, meta=meta)
                for i, shape in enumerate(self.shapes)
            ]
        )


def note(file: Path, *values: object) -> None:
    """Append a line to a file that several processes write."""
    with file.open("a") as out:
        out.write(" ".join(map(str, values)) + "\n")


class Plain:
    """A dask array as an operator; the client computes each product."""

    def __init__(self, client: Client, array: Any) -> None:
        self._client = client
        self._array = array
        self.shape = array.shape

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        product = self._array.map_blocks(
            lambda block, x: block @ x, x=x, dtype=float, drop_axis=1, meta=np.empty(0)
        )
        return self._client.compute(product).result()

    @property
    def T(self) -> _PlainTransposed:
        return _PlainTransposed(self._client, self._array)


@dataclass
class _PlainTransposed:
    client: Client
    array: Any

    def __matmul__(self, y: np.ndarray) -> np.ndarray:
        return self.client.compute(self.array.T @ da.from_array(y, self.array.chunks[0])).result()


def pagerank(
    dangling: np.ndarray, operator: Any, rounds: int, log: Path, loop: Any = NO_LOOP
) -> np.ndarray:
    """Run rounds of PageRank; resume after the last state that the loop has."""
    n = operator.shape[0]
    first, x = loop.resume((0, np.full(n, 1 / n)))
    for i in range(first, rounds):
        before = x
        x = _DAMPING * (operator @ x + x[dangling].sum() / n) + (1 - _DAMPING) / n
        change = float(np.abs(x - before).sum())
        loop.report(coded.Progress(i + 1, change), state=(i + 1, x), last=i + 1 == rounds)
        note(log, i, time.time())
    return x


def logistic(
    labels: np.ndarray, step: float, operator: Any, rounds: int, log: Path, loop: Any = NO_LOOP
) -> np.ndarray:
    """Run steps of gradient descent; resume after the last state that the loop has."""
    first, w = loop.resume((0, np.zeros(operator.shape[1])))
    for i in range(first, rounds):
        gradient = operator.T @ (expit(operator @ w) - labels)
        w = w - step * gradient
        loop.report(
            coded.Progress(i + 1, float(np.linalg.norm(gradient))),
            state=(i + 1, w),
            last=i + 1 == rounds,
        )
        note(log, i, time.time())
    return w


def logistic_gradient(w: np.ndarray, samples: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the sum of the gradients of the logistic loss."""
    return samples.T @ (expit(samples @ w) - labels)


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    scale: int = 16
    samples: int = 24_000
    features: int = 200
    workers: int = 12
    #: How many may be lost at once.
    tolerance: int = 3
    calibration: int = 200


SMOKE = Size(scale=8, samples=600, features=10, workers=4, tolerance=1, calibration=9)


#: Runs that many rounds, notes them in a file, and returns the result, if it can be checked.
Run = Callable[[int, Path], np.ndarray | None]


class Workload:
    """An algorithm, in the ways that are compared.

    Parameters
    ----------
    name : str
    files : Files
    code : Code
    algorithm : callable(operator, rounds, log, loop=...) -> ndarray
    transpose : bool
    whole : sparse or dense array
        The matrix, in this process.
    """

    def __init__(
        self,
        name: str,
        files: Files,
        code: coded.Code,
        algorithm: Callable[..., np.ndarray],
        whole: Any,
        *,
        transpose: bool = False,
    ) -> None:
        self.name, self.files, self.code = name, files, code
        self._algorithm, self._whole, self._transpose = algorithm, whole, transpose

    @property
    def enough(self) -> int:
        """How many workers the code needs, with one piece each."""
        return self.code.n - self.code.tolerance

    def expected(self, rounds: int) -> np.ndarray:
        """Return the result, computed here."""
        return self._algorithm(self._whole, rounds, Path(os.devnull))

    @contextmanager
    def coded(self, client: Client, where: Path) -> Iterator[Run]:
        """Encode with a store; yield what runs rounds in the cluster."""
        C = coded.encode(
            self.files.array(),
            self.code,
            client,
            storage=where / "array",
            transpose=self._transpose,
        )

        def run(rounds: int, log: Path) -> np.ndarray:
            loop = coded.Loop(storage=where / log.stem)
            future = coded.submit(self._algorithm, C, rounds, log, loop=loop, client=client)
            found: np.ndarray = future.result()
            return found

        yield run

    @contextmanager
    def dask(self, client: Client, where: Path) -> Iterator[Run]:
        """Persist the blocks; yield what runs rounds from here."""
        array = client.persist(self.files.array())
        wait(array)
        yield lambda rounds, log: self._algorithm(Plain(client, array), rounds, log)


def pagerank_load(size: Size, where: Path) -> Workload:
    """Return PageRank of a graph like that of the web."""
    A = web_like(size.scale)
    M, dangling = transition_matrix(sp.csr_array(A))
    whole = sp.csr_array(M)
    cuts = np.linspace(0, whole.shape[0], size.workers + 1).astype(int)
    files = Files(where / "pagerank", [whole[a:b] for a, b in pairwise(cuts)])
    code = coded.Repetition(size.workers, size.tolerance + 1)
    algorithm = partial(pagerank, np.flatnonzero(dangling))
    return Workload("PageRank", files, code, algorithm, whole)


def logistic_load(size: Size, where: Path) -> Workload:
    """Return gradient descent for a logistic regression."""
    X, labels = _samples(size)
    files = Files(where / "logistic", np.array_split(X, size.workers))
    code = coded.MDS(size.workers, size.workers - size.tolerance)
    algorithm = partial(logistic, labels, _rate(X))
    return Workload("logistic regression", files, code, algorithm, X, transpose=True)


class Training(Workload):
    """The same by a training, whose samples are kept in Zarr, and by XGBoost."""

    def __init__(self, size: Size, where: Path) -> None:
        X, self._labels = _samples(size)
        self._step = _rate(X)
        files = Files(where / "training", np.array_split(X, size.workers))
        code = coded.MDS(size.workers, size.workers - size.tolerance)
        super().__init__("training", files, code, partial(logistic, self._labels, self._step), X)

    @contextmanager
    def coded(self, client: Client, where: Path) -> Iterator[Run]:
        X = self.files.array()
        X.to_zarr(where / "samples")
        X = client.persist(da.from_zarr(where / "samples"))
        data = (X, da.from_array(self._labels, X.chunks[0]))
        wait(X)

        def run(rounds: int, log: Path) -> np.ndarray:
            return train(
                logistic_gradient,
                np.zeros(X.shape[1]),
                data,
                optimizer=SGD(self._step * X.shape[0]),
                steps=rounds,
                client=client,
                checkpoint=Checkpoint(where / f"{log.stem}.checkpoint"),
                callback=lambda progress: note(log, progress.round - 1, time.time()),
            ).parameters

        yield run

    @contextmanager
    def dask(self, client: Client, where: Path) -> Iterator[Run]:
        import xgboost.dask

        X = client.persist(self.files.array())
        labels = client.persist(da.from_array(self._labels, X.chunks[0]))
        wait([X, labels])

        def run(rounds: int, log: Path) -> None:
            matrix = xgboost.dask.DaskDMatrix(client, X, labels)
            options = {"objective": "binary:logistic", "nthread": 1}
            xgboost.dask.train(client, options, matrix, num_boost_round=rounds)

        yield run


def _rate(X: np.ndarray) -> float:
    return _STEP / float(np.linalg.norm(X, 2)) ** 2


def _samples(size: Size) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((size.samples, size.features))
    truth = rng.standard_normal(size.features) / math.sqrt(size.features)
    return X, (rng.random(size.samples) < expit(X @ truth)).astype(float)
