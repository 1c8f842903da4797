"""Run the cases on worker processes whose quotas follow the speeds, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import dask
import dask.array as da
import numpy as np
from distributed import wait

import dask_coded as coded
from benchmarks.cluster import Lab, PlainRounds, Rounds
from benchmarks.evidence.s2c2 import simulated
from benchmarks.evidence.s2c2.cases import Case, Contender
from benchmarks.evidence.s2c2.overdecomposition import PARTS, DealtRounds
from dask_coded.rounds import fluid_time


@dataclass(frozen=True)
class Size:
    """Size of the matrix, and resources of the workers.

    Parameters
    ----------
    rows, columns, right : int
        Shape of the matrix, and columns of its operand.
    cores : float
        Cores that the workers share evenly when all have speed 1.
    measure : float
        Seconds for which speeds are measured before and after every round, or half of the time of
        the last round if that is more. Nearly as long as most rounds, because workers that were
        idle start faster than they go on (3 % in a second).
    """

    # The matrix is wide and takes each worker more than a tenth of a second of a core, so that
    # a round sends and decodes little compared with what it computes. Section `lengths` shows what
    # shorter and longer rounds lose.
    rows: int = 60_000
    columns: int = 10_000
    right: int = 40
    cores: float = 1.0
    measure: float = 2.0


#: A round is disturbed if just before or after it the machine was faster or slower than usual by
#: this factor. Quotas do not share out its memory, and other machines on the same host use it, too.
DISTURBED = 1.25


@dataclass(frozen=True)
class Measured:
    """Rounds over the fluid bound.

    Attributes
    ----------
    ratios : ndarray, shape (rounds,)
    disturbed : ndarray of bool, shape (rounds,)
        Whether the speeds measured before or after say little about those of the round.
    """

    ratios: np.ndarray
    disturbed: np.ndarray


def disturbed(speeds: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """Return in which rounds the machine was much faster or slower than usual, shape (rounds,).

    None if that would be most of them, because then nothing is usual.

    Parameters
    ----------
    speeds : ndarray, shape (rounds, 2, workers)
        Rows per second before and after each round.
    quotas : ndarray, shape (rounds, workers)

    Examples
    --------
    >>> quotas = np.full((3, 2), 0.1)
    >>> speeds = np.array([[[5.0, 5.0], [5.0, 4.0]], [[5.0, 5.0], [3.0, 3.5]], [[5, 5], [5, 5]]])
    >>> disturbed(speeds, quotas)
    array([False,  True, False])
    """
    machine = np.median(speeds / quotas[:, None], axis=2)
    change = machine / np.median(machine)
    found = ((change > DISTURBED) | (change < 1 / DISTURBED)).any(axis=1)
    return found & (found.mean() <= 0.5)


SMOKE = Size(rows=480, columns=60, right=2, measure=0.01)


class Bench:
    """A lab of ``n`` workers with one matrix, encoded for the current contender."""

    def __init__(self, lab: Lab, size: Size) -> None:
        self.lab = lab
        self.size = size
        self._x = np.random.default_rng(1).standard_normal((size.columns, size.right))
        self._code: tuple[object, ...] = ()

    @classmethod
    @contextmanager
    def open(cls, n: int, size: Size) -> Iterator[Bench]:
        with Lab(n, size.cores / n) as lab:
            yield cls(lab, size)

    def _data(self, chunks_per_worker: int = 1) -> da.Array:
        chunk = -(-self.size.rows // (len(self.lab.workers) * chunks_per_worker))
        return da.random.default_rng(0).standard_normal(
            (self.size.rows, self.size.columns), chunks=(chunk, -1)
        )

    def _encoded(self, contender: Contender, case: Case) -> coded.CodedArray:
        """Return the matrix in the contender's code; only one encoding is kept at a time."""
        code = contender.code(case.n, case.k)
        wanted = (type(code), case.n, case.k if code.exact is False else code.pieces)
        if wanted != self._code:
            self._array = None
            self.lab.set_speeds(np.inf)
            self._array = coded.encode(self._data(), code, workers=self.lab.workers)
            self._code = wanted
            self.lab.set_speeds(1.0)
            self._measure()  # the first access to a new piece is slower
        assert self._array is not None
        return self._array

    def _measure(self, seconds: float = 0.0) -> np.ndarray:
        """Return the current rows per second of each worker, measured for so long at least.

        Quotas are those of the round, so nothing is assumed about how speeds depend on them.
        """
        return self.lab.measure_speeds(self._array, self._x, max(seconds, self.size.measure))

    def _run(self, case: Case, *runs: Callable[[], float]) -> list[Measured]:
        """Measure rounds of contenders, which take turns in each row of speeds.

        The bound is that of the speeds measured before and after each round. An additional first
        row opens connections and is left out.
        """
        seconds = np.zeros((1 + len(case.speeds), len(runs)))
        speeds = np.zeros((*seconds.shape, 2, case.n))
        order = np.arange(len(runs))
        for turn, row in enumerate([case.speeds[0], *case.speeds]):
            self.lab.set_speeds(row)
            # A worker with a hundredth of a core needs seconds for a few products.
            last = self._measure(seconds[turn - 1].max() / 2)
            for number in np.roll(order, -turn):
                seconds[turn, number] = runs[number]()
                before, last = last, self._measure(seconds[turn, number] / 2)
                speeds[turn, number] = before, last
        rows = self.size.rows / case.k
        return [
            Measured(
                seconds[1:, number]
                / [fluid_time(mean, case.k, rows) for mean in found.mean(axis=1)],
                disturbed(found, case.speeds),
            )
            for number, found in enumerate(speeds[1:].swapaxes(0, 1))
        ]

    def run_case(self, case: Case, *contenders: Contender) -> list[Measured]:
        """Measure one round of each contender for each row of speeds; all have the same code.

        They share what the cluster knows of its workers' speeds.
        """
        array = self._encoded(contenders[0], case)
        with ExitStack() as stack:
            loops = []
            for contender in contenders:
                with dask.config.set({"coded.policy": contender.policy}):
                    loop = Rounds(self.lab.client, array, self._x, self.lab.free)
                loops.append(stack.enter_context(loop))
            return self._run(case, *(loop.run_round for loop in loops))

    def dask_array(self, case: Case, chunks_per_worker: int) -> Measured:
        """Measure rounds of plain dask.array, with its data on the workers.

        The pieces of the previous contender stay there, because speeds are measured on them.
        """
        client, workers = self.lab.client, self.lab.workers
        self.lab.set_speeds(np.inf)
        data = client.persist(self._data(chunks_per_worker), workers=workers)
        wait(data)
        rounds = PlainRounds(client, data, self._x, workers, self.lab.free)
        [found] = self._run(case, rounds.run_round)
        self.lab.set_speeds(np.inf)
        return found

    def over_decomposed(self, case: Case) -> tuple[Measured, int]:
        """Measure rounds of partitions that are dealt out by predicted speed.

        Return also how many were moved. The pieces of the previous contender stay there, because
        speeds are measured on them.
        """
        lab = self.lab
        lab.set_speeds(np.inf)
        data, predictor = self._data(PARTS), simulated.PREDICTOR
        rounds = DealtRounds(lab.client, data, self._x, lab.workers, lab.free, predictor)
        [found] = self._run(case, rounds.run_round)
        lab.set_speeds(np.inf)
        return found, rounds.moved
