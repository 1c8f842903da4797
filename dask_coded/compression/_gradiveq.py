r"""GradiVeQ: gradients in a basis of their own, which every node finds by itself.

Neighbouring gradients of a layer are correlated. The gradient of a layer is cut into slices of
``K`` numbers, the rows of a matrix :math:`S` (slices x K). Steps come in periods::

    step     0 ......... 9  10 .......................... 99  100 ...
             exact steps    compressed steps                  exact steps
             sum of S       sum of S B^T: rank numbers        sum of S
             fit B          per slice                         fit B

In the exact steps gradients are summed as they are, and every node adds up the same covariance
:math:`S^T S` of the *summed* slices. Its leading eigenvectors are the rows of :math:`B` (rank x K):
the basis that keeps as much of the slices as possible. In the compressed steps node ``i`` sends
:math:`C_i = S_i B^T`, and :math:`(\sum_i C_i) B` is the projection of the summed gradient. The map
is linear: it acts once, before the sum, whatever the aggregation, codes included.

No basis is sent, and yet all nodes must have the same, or their replicas would drift apart. Fit and
expansion therefore give the same bits on every machine (``dask_coded/compression/_principal.py``).
Nodes may compress with whatever their BLAS returns: each has a gradient of its own anyway.

What the projection loses, a node may keep and add to its gradient later. Within a period that sends
nothing, since :math:`B` maps it to zero; it is added in the first exact step of the next.

References
----------
.. [1] M. Yu et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in
       distributed CNN training", NeurIPS 2018, arXiv:1811.03617. Only its abstract and its reviews
       were at hand: lengths of periods, cut of the layers, residual and arithmetic are ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_coded.compression._compression import EXACT, Codec, Compression, Compressor, Vector
from dask_coded.compression._principal import Matrix, order_free_product, principal_directions


@dataclass(frozen=True)
class GradiVeQ(Compression):
    """Send a gradient in the leading principal directions of its slices.

    In compressed steps ``rank`` numbers are sent for each ``slice_length``; what that makes of a
    network's gradient, exact steps included, is ``compressor.ratio``.

    Parameters
    ----------
    slice_length : int
        Numbers per slice at most. A layer's own length is the greatest one up to this that cuts the
        layer evenly along its axes, into whole kernels, filters or rows, and of which the exact
        steps bring twice as many slices as directions are kept. Longer slices keep more at the same
        ratio.
    rank : int
        Directions kept of slices of ``slice_length``; of shorter ones in proportion.
    exact_steps : int
        Steps at the start of each period whose sums are exact, and to which the basis is fitted.
    period : int
        Steps from one fit to the next.
    warmup : int
        Exact steps before the first period.
    residual : bool
        Whether a node keeps what the projection loses of its gradients, and adds it to its gradient
        in the first exact step of the next period, which is then left out of the fit. A node that
        misses that step drops it. Not with codes that subtract.
    codec : Codec
        How the numbers are packed for a hop, in all steps: ``Truncation()`` for 2 bytes each.

    Raises
    ------
    ValueError
        If not ``1 <= rank < slice_length`` or ``1 <= exact_steps < period``, or ``warmup`` is
        negative.

    See Also
    --------
    Truncation, Quantization : act on every hop, from the first step on.

    Notes
    -----
    Layers with fewer than ``slice_length`` numbers, biases for example, are left exact, and so are
    slices that the end of a segment cuts.

    Examples
    --------
    Rows of 8 numbers that lie in a plane are kept by a basis of 2:

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
        """One node's compressor.

        Raises
        ------
        ValueError
            If the exact steps are too few for a schedule of that width: when the first compressed
            step begins, the sums of the last ``width - 1`` are still on their way.
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
        """The period of a step and its number in it; (-1, -1) in the warm-up."""
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
        """How long the slices of a layer are."""
        # Slices of length K are size / K a step, and K * rank / slice_length directions are kept.
        enough = math.isqrt(math.prod(layer) * fitted * self.slice_length // (2 * self.rank))
        return _even(layer, max(1, min(enough, self.slice_length)))


class Projection(Compressor):
    """One node's part in :class:`GradiVeQ`, made by its ``compressor``.

    Attributes
    ----------
    ratio : float
        Numbers sent over numbers of the gradient, on average over a period.
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
        """The gradient itself in exact steps, else coefficients, then what is left exact."""
        cut = self._segments[segment]
        period, number = self._choice.place(step)
        if self._exact(period, number, cut):
            return cut.with_residual(period - 1, vector) if number == 0 else vector
        sent = cut.project(vector)
        if self._choice.residual:
            cut.keep(period, vector, sent)
        return sent

    def expand(self, step: int, segment: int, total: Vector) -> Vector:
        """The sum, or its projection; from exact sums all nodes learn the same basis."""
        cut = self._segments[segment]
        period, number = self._choice.place(step)
        exact = self._exact(period, number, cut)
        if len(total) != (expected := cut.size if exact else cut.sent):
            raise ValueError(
                f"A sum of step {step} has {len(total)} numbers instead of {expected}: tell the "
                f"compressor how wide the schedule is."
            )
        if not exact:
            return cut.expand(total)
        if number in self._fitted:
            cut.learn(total)
        if number == self._fitted[-1]:
            cut.fit(period)
        return total

    def _exact(self, period: int, number: int, cut: _Segment) -> bool:
        # Those who start in the middle of a period without a state have no basis until the next.
        return number < self._choice.exact_steps or cut.fitted_in != period

    def state(self) -> Any:
        """Covariances and bases; residuals are each node's own."""
        return [cut.state() for cut in self._segments]

    def restore(self, state: Any) -> None:
        """Go on from the state of another replica, without a residual.

        Raises
        ------
        ValueError
            If it is of a gradient that is cut in another way.
        """
        lengths = [len(cut.runs) for cut in self._segments]
        if state is None or [len(runs) for _, runs in state] != lengths:
            raise ValueError(
                "The state is of other layers or segments than this compressor's: go on with the "
                "same model, aggregation and compression."
            )
        for cut, learnt in zip(self._segments, state):
            cut.restore(learnt)


@dataclass
class _Run:
    """Slices of one layer that lie in one segment, one after the other."""

    where: slice
    length: int
    rank: int
    covariance: Matrix | None = None
    basis: Matrix | None = None

    @property
    def directions(self) -> Matrix:
        """The basis that has been fitted."""
        assert self.basis is not None
        return self.basis

    @property
    def count(self) -> int:
        """How many slices."""
        return int(self.where.stop - self.where.start) // self.length

    def of(self, vector: Vector) -> Vector:
        """The slices, shape (count, length): a view."""
        return vector[self.where].reshape(-1, self.length)


class _Segment:
    """A segment of the gradient: runs of slices in its order, and the rest between them."""

    def __init__(self, size: int, runs: list[_Run]) -> None:
        self.size = size
        self.runs = runs
        self.sent = size - sum(run.count * (run.length - run.rank) for run in runs)
        edges = [0, *(edge for run in runs for edge in (run.where.start, run.where.stop)), size]
        self._rest = [slice(*edges[i : i + 2]) for i in range(0, len(edges), 2)]
        #: Of which period the bases are.
        self.fitted_in: int | None = None
        self._residual: Vector | None = None
        self._lost_in = 0

    def project(self, vector: Vector) -> Vector:
        """Coefficients run by run, shape (count, rank) each, then the rest."""
        sent = [
            (run.of(vector) @ run.directions.astype(vector.dtype).T).ravel() for run in self.runs
        ]
        return np.concatenate([*sent, *(vector[rest] for rest in self._rest)])

    def expand(self, total: Vector) -> Vector:
        """The segment whose projection this is: the same bits on every node."""
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
                covariance += run.covariance  # not in place: that may be part of a state
            run.covariance = covariance

    def fit(self, period: int) -> None:
        """Make the bases of a period."""
        for run in self.runs:
            assert run.covariance is not None  # the sum of this very step is in it
            run.basis = principal_directions(run.covariance, run.rank)
            run.covariance = None
        self.fitted_in = period

    def keep(self, period: int, vector: Vector, sent: Vector) -> None:
        """Add to the residual what is lost of a gradient."""
        if self._residual is None or self._lost_in != period:
            self._residual, self._lost_in = np.zeros_like(vector), period
        for run, coefficients in self._coefficients(sent):
            kept = coefficients @ run.directions.astype(vector.dtype)
            run.of(self._residual)[:] += run.of(vector) - kept

    def with_residual(self, period: int, vector: Vector) -> Vector:
        """The gradient and what was lost of those of a period, which is forgotten."""
        residual, self._residual = self._residual, None
        return vector if residual is None or self._lost_in != period else vector + residual

    def state(self) -> Any:
        """Without the residual."""
        return self.fitted_in, [(run.covariance, run.basis) for run in self.runs]

    def restore(self, state: Any) -> None:
        """Forget the residual, too."""
        self._residual = None
        self.fitted_in, learnt = state
        for run, (covariance, basis) in zip(self.runs, learnt, strict=True):
            run.covariance, run.basis = covariance, basis


def _even(layer: tuple[int, ...], most: int) -> int:
    """The greatest length up to ``most`` that cuts a layer evenly along its axes.

    ``most`` itself where that would be less than half of it, for example for a prime number.

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
