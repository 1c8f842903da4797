r"""GradiVeQ: compress gradients in a basis of principal directions that every node fits itself.

Neighbouring entries of a layer's gradient are correlated. The gradient of a layer is cut into
slices of ``K`` numbers, the rows of a matrix :math:`S` (slices x K). Steps come in periods::

    step     0 ......... 9  10 .......................... 99  100 ...
             exact steps    compressed steps                  exact steps
             sum of S       sum of S B^T: rank numbers        sum of S
             fit B          per slice                         fit B

In exact steps gradients are summed uncompressed, and every node accumulates the same covariance
:math:`S^T S` of the *summed* slices. Its leading eigenvectors are the rows of :math:`B` (rank x K),
the basis that keeps as much of the slices as possible. In compressed steps node ``i`` sends
:math:`C_i = S_i B^T`, and :math:`(\sum_i C_i) B` is the projection of the summed gradient. The map
is linear, so it acts once, before the sum, and works with every aggregation, including coded ones.

No basis is sent, but all nodes must have the same basis, or their replicas would drift apart. Fit
and expansion therefore give the same bits on every machine
(``dask_coded/compression/_principal.py``). Compression need not, because every node compresses a
different gradient anyway.

A node may keep what the projection loses and add it to its gradient later. Adding it within the
same period would send nothing, because :math:`B` maps it to zero. It is therefore added in the
first exact step of the next period.

References
----------
.. [1] M. Yu et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in
       distributed CNN training", NeurIPS 2018, arXiv:1811.03617. Only its abstract and its reviews
       were available, so the lengths of periods, the way layers are cut, the residual and the
       arithmetic are ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_coded.arguments import check_whole
from dask_coded.compression._compression import EXACT, Codec, Compression, Compressor, Vector
from dask_coded.compression._principal import Matrix, order_free_product, principal_directions


@dataclass(frozen=True)
class GradiVeQ(Compression):
    """Project gradients onto the leading principal directions of their slices.

    Compressed steps send ``rank`` numbers for each slice of ``slice_length``. The resulting ratio
    for a network's gradient, including exact steps, is ``compressor.ratio``.

    Parameters
    ----------
    slice_length : int
        Largest number of entries per slice. The slices of a layer are as long as possible under two
        conditions: they cut the layer evenly along its axes, into whole kernels, filters or rows,
        and the exact steps provide at least twice as many slices as directions are kept. Longer
        slices keep more at the same ratio.
    rank : int
        Number of directions kept of slices of ``slice_length``; of shorter slices, proportionally
        fewer are kept.
    exact_steps : int
        Number of steps at the start of each period whose sums are exact. The basis is fitted to
        these sums.
    period : int
        Number of steps from one fit to the next.
    warmup : int
        Number of exact steps before the first period.
    residual : bool
        Whether a node keeps what the projection loses of its gradients, and adds it to its gradient
        in the first exact step of the next period. That step is then left out of the fit, and a
        node that misses it drops its residual, as all nodes do when workers leave or join. Must be
        False with codes that subtract.
    codec : Codec
        Codec for the messages of all steps, for example ``Truncation()`` for 2 bytes per number.

    Raises
    ------
    ValueError
        If not ``1 <= rank < slice_length`` or ``1 <= exact_steps < period``, ``warmup`` is
        negative, or any of them is not a whole number.

    See Also
    --------
    Truncation, Quantization : act on every message, from the first step on.

    Notes
    -----
    Layers with fewer than ``slice_length`` numbers, such as biases, are sent exactly, and so are
    slices that the end of a segment cuts.

    Examples
    --------
    A basis of 2 directions keeps rows of 8 numbers that lie in a plane:

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> plane = rng.standard_normal((2, 8))
    >>> compression = GradiVeQ(8, 2, exact_steps=2, period=10)
    >>> compressor = compression.compressor([(16, 8)], segments=1)
    >>> for step in range(3):
    ...     gradient = (rng.standard_normal((16, 2)) @ plane).ravel()
    ...     sent = compressor.compress(step, 0, gradient)
    ...     total = compressor.expand(step, 0, sent)
    ...     print(len(sent), bool(np.allclose(total, gradient, atol=1e-5)))
    128 True
    128 True
    32 True
    >>> compressor.ratio  # (2 * 1 + 8 * 2 / 8) / 10
    0.4
    """

    slice_length: int = 512
    rank: int = 64
    exact_steps: int = 10
    period: int = 100
    warmup: int = 0
    residual: bool = True
    codec: Codec = EXACT

    def __post_init__(self) -> None:
        for name in ("slice_length", "rank", "exact_steps", "period", "warmup"):
            check_whole(name, getattr(self, name), None)
        if not 1 <= self.rank < self.slice_length:
            raise ValueError(
                f"Argument 'rank' must be between 1 and 'slice_length' - 1 = "
                f"{self.slice_length - 1}, it is {self.rank}."
            )
        if not 1 <= self.exact_steps < self.period:
            raise ValueError(
                f"Argument 'exact_steps' must be between 1 and 'period' - 1 = {self.period - 1}, "
                f"it is {self.exact_steps}."
            )
        if self.warmup < 0:
            raise ValueError(f"Argument 'warmup' must be 0 or more steps, it is {self.warmup}.")

    @property
    def remembers(self) -> bool:
        return self.residual

    def compressor(
        self, layers: Sequence[tuple[int, ...]], segments: int, width: int = 1
    ) -> Projection:
        """Return one node's compressor.

        Raises
        ------
        ValueError
            If there are too few exact steps for a schedule of that width, because the sums of the
            last ``width - 1`` steps have not arrived when the first compressed step starts.
        """
        first, last = int(self.residual), self.exact_steps - width
        if last < first:
            raise ValueError(
                f"Argument 'exact_steps' must be at least {first + width} for a schedule of width "
                f"{width}, it is {self.exact_steps}."
            )
        fitted = range(first, last + 1)
        return Projection(self, self._segments(layers, segments, len(fitted)), fitted)

    def place(self, step: int) -> tuple[int, int]:
        """Return the period of a step and its number in it; (-1, -1) in the warm-up."""
        return divmod(step - self.warmup, self.period) if step >= self.warmup else (-1, -1)

    def _segments(
        self, layers: Sequence[tuple[int, ...]], segments: int, fitted: int
    ) -> list[_Segment]:
        lengths = [self._length(layer, fitted) for layer in layers]
        edges = [0, *itertools.accumulate(math.prod(layer) for layer in layers)]
        size, longer = divmod(edges[-1], segments)
        cuts = [i * size + min(i, longer) for i in range(segments + 1)]
        found = []
        for begin, end in itertools.pairwise(cuts):
            runs = []
            for (start, stop), K in zip(itertools.pairwise(edges), lengths):
                first = start + max(0, -((start - begin) // K)) * K  # not before the segment
                slices = (min(stop, end) - first) // K
                rank = -(-K * self.rank // self.slice_length)
                large = stop - start >= self.slice_length
                if large and rank < K and slices * fitted >= 2 * rank:
                    runs.append(_Run(slice(first - begin, first - begin + slices * K), K, rank))
            found.append(_Segment(end - begin, runs))
        return found

    def _length(self, layer: tuple[int, ...], fitted: int) -> int:
        """Return the length of a layer's slices."""
        # A step has size / K slices of length K, and K * rank / slice_length directions are kept.
        enough = math.isqrt(math.prod(layer) * fitted * self.slice_length // (2 * self.rank))
        return _even(layer, max(1, min(enough, self.slice_length)))


class Projection(Compressor):
    """One node's compressor for :class:`GradiVeQ`, made by its ``compressor`` method.

    Attributes
    ----------
    ratio : float
        Numbers sent divided by numbers of the gradient, on average over a period.
    """

    def __init__(self, choice: GradiVeQ, segments: list[_Segment], fitted: range) -> None:
        self._choice = choice
        self._segments = segments
        self._fitted = fitted  # the steps of each period that the basis is fitted to
        full = sum(segment.size for segment in segments)
        sent = sum(segment.sent for segment in segments)
        exact = choice.exact_steps
        self.ratio = (exact + (choice.period - exact) * sent / max(full, 1)) / choice.period

    def compress(self, step: int, segment: int, vector: Vector) -> Vector:
        """Return the gradient in exact steps, otherwise coefficients and then the exact rest."""
        cut = self._segments[segment]
        period, number = self._choice.place(step)
        if self._exact(period, number, cut):
            return cut.with_residual(period - 1, vector) if number == 0 else vector
        sent = cut.project(vector)
        if self._choice.residual:
            cut.keep(period, vector, sent)
        return sent

    def expand(self, step: int, segment: int, total: Vector) -> Vector:
        """Return an exact sum as it is or expand a compressed one; fit the basis to exact sums."""
        cut = self._segments[segment]
        period, number = self._choice.place(step)
        exact = self._exact(period, number, cut)
        if len(total) != (expected := cut.size if exact else cut.sent):
            raise ValueError(
                f"The sum of step {step} has {len(total)} numbers instead of {expected}: pass the "
                f"width of the schedule to 'compressor' as 'width'."
            )
        if not exact:
            return cut.expand(total)
        if number in self._fitted:
            cut.learn(total)
        if number == self._fitted[-1]:
            cut.fit(period)
        return total

    def _exact(self, period: int, number: int, cut: _Segment) -> bool:
        # A node that starts within a period without a state has no basis until the next period.
        return number < self._choice.exact_steps or cut.fitted_in != period

    def state(self) -> Any:
        """Return covariances and bases, but not the residual, which belongs to one node."""
        return [cut.state() for cut in self._segments]

    def restore(self, state: Any) -> None:
        """Continue from the state of another replica, without a residual.

        Raises
        ------
        ValueError
            If the state belongs to a gradient with other layers or segments.
        """
        lengths = [len(cut.runs) for cut in self._segments]
        if state is None or [len(runs) for _, runs in state] != lengths:
            raise ValueError(
                "The state belongs to other layers or segments than this compressor's: resume with "
                "the same model, aggregation and compression."
            )
        for cut, learnt in zip(self._segments, state):
            cut.restore(learnt)


@dataclass
class _Run:
    """Consecutive slices of one layer that lie in one segment."""

    where: slice
    length: int
    rank: int
    covariance: Matrix | None = None
    basis: Matrix | None = None

    @property
    def directions(self) -> Matrix:
        """The fitted basis."""
        assert self.basis is not None
        return self.basis

    @property
    def count(self) -> int:
        """Number of slices."""
        return int(self.where.stop - self.where.start) // self.length

    def of(self, vector: Vector) -> Vector:
        """Return the slices as a view, shape (count, length)."""
        return vector[self.where].reshape(-1, self.length)


class _Segment:
    """A segment of the gradient: runs of slices in order, and the rest between them."""

    def __init__(self, size: int, runs: list[_Run]) -> None:
        self.size = size
        self.runs = runs
        self.sent = size - sum(run.count * (run.length - run.rank) for run in runs)
        edges = [0, *(edge for run in runs for edge in (run.where.start, run.where.stop)), size]
        self._rest = [slice(*edges[i : i + 2]) for i in range(0, len(edges), 2)]
        #: The period that the bases were fitted in.
        self.fitted_in: int | None = None
        self._residual: Vector | None = None
        self._lost_in = 0

    def project(self, vector: Vector) -> Vector:
        """Return the coefficients run by run, shape (count, rank) each, then the rest."""
        sent = [
            (run.of(vector) @ run.directions.astype(vector.dtype).T).ravel() for run in self.runs
        ]
        return np.concatenate([*sent, *(vector[rest] for rest in self._rest)])

    def expand(self, total: Vector) -> Vector:
        """Return the segment for summed projections, with the same bits on every node."""
        vector = np.empty(self.size, dtype=total.dtype)
        for run, coefficients in self._coefficients(total):
            run.of(vector)[:] = order_free_product(coefficients, run.directions)
        at = len(total) - sum(rest.stop - rest.start for rest in self._rest)
        for rest in self._rest:
            vector[rest] = total[at : (at := at + rest.stop - rest.start)]
        return vector

    def _coefficients(self, sent: Vector) -> Iterator[tuple[_Run, Vector]]:
        at = 0
        for run in self.runs:
            yield run, sent[at : (at := at + run.count * run.rank)].reshape(-1, run.rank)

    def learn(self, total: Vector) -> None:
        """Add the slices of an exact sum to the covariances."""
        for run in self.runs:
            slices = run.of(total)
            covariance = order_free_product(slices.T, slices)
            if run.covariance is not None:
                covariance += run.covariance  # not in place: it may be part of a state
            run.covariance = covariance

    def fit(self, period: int) -> None:
        """Compute the bases of a period."""
        for run in self.runs:
            assert run.covariance is not None  # it includes the sum of this step
            run.basis = principal_directions(run.covariance, run.rank)
            run.covariance = None
        self.fitted_in = period

    def keep(self, period: int, vector: Vector, sent: Vector) -> None:
        """Add what the projection of a gradient loses to the residual."""
        if self._residual is None or self._lost_in != period:
            self._residual, self._lost_in = np.zeros_like(vector), period
        for run, coefficients in self._coefficients(sent):
            kept = coefficients @ run.directions.astype(vector.dtype)
            run.of(self._residual)[:] += run.of(vector) - kept

    def with_residual(self, period: int, vector: Vector) -> Vector:
        """Return the gradient plus the residual of a period, and clear the residual."""
        residual, self._residual = self._residual, None
        return vector if residual is None or self._lost_in != period else vector + residual

    def state(self) -> Any:
        """Return the period of the bases, and covariances and bases, without the residual."""
        return self.fitted_in, [(run.covariance, run.basis) for run in self.runs]

    def restore(self, state: Any) -> None:
        """Restore covariances and bases, and clear the residual."""
        self._residual = None
        self.fitted_in, learnt = state
        for run, (covariance, basis) in zip(self.runs, learnt, strict=True):
            run.covariance, run.basis = covariance, basis


def _even(layer: tuple[int, ...], most: int) -> int:
    """Return the greatest length up to ``most`` that cuts a layer evenly along its axes.

    Return ``most`` if that length is less than half of it, for example with a prime dimension.

    Examples
    --------
    >>> _even((32, 16, 5, 5), 128), _even((32, 16, 5, 5), 512), _even((7, 101), 64)
    (100, 400, 64)
    """
    length = 1
    for axis in reversed(layer):
        if length * axis > most:
            length *= next(part for part in range(most // length, 0, -1) if axis % part == 0)
            break
        length *= axis
    return length if 2 * length >= most else most
