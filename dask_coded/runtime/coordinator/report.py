"""What an algorithm can learn about a round that has ended, and which worker is slow in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from dask_coded.rounds import Assign, Command, Layout, StripeRange, stripes_in
from dask_coded.rounds.capacity import Capacity
from dask_coded.rounds.marks import bits_of
from dask_coded.rounds.state import RoundState
from dask_coded.summary import Summary, brief, lanes, table
from dask_coded.typing import Floats, Ints

_NONE: Floats = np.zeros(0)


class WorkerPart(NamedTuple):
    """A worker's part in a round.

    Parameters
    ----------
    address : str
    predicted, measured : float
        Speed in stripes per second, as expected before the round and as the round has found it.
        NaN if it is not known: a worker without work is not measured.
    computed : int
        Stripes that have come back from this worker.
    moved : int
        Those of them that the first assignment had not given it: it has taken them over.
    wasted : int
        Those of them that others had returned already.
    """

    address: str
    predicted: float
    measured: float
    computed: int
    moved: int
    wasted: int


@dataclass(repr=False, eq=False)
class RoundReport(Summary):
    """What happened in a round.

    Attributes
    ----------
    seconds : float
        From the operand to the decoded result.
    workers : int
        Workers that have sent shares.
    messages : int
        Messages sent and received by the coordinator.
    alone : bool
        Whether the coordinator has computed the product alone, because a round takes longer.
    doubtful : int
        Rows of the result that have lost digits, see :class:`dask_coded.AccuracyWarning`.
    error : float
        Estimate of the largest error of these rows, relative to ``|A| @ |x|`` of the row.
    failed : dict of str to str
        The exceptions of workers whose stripes were computed elsewhere, by address.
    timeline : list of (address, piece, start stripe, stop stripe, begin, end)
        Which worker computed which stripes when, in seconds since the round started.
    coordinator : str
        Address of the worker that ran the round.
    operand_bytes, share_bytes : int
        Bytes of the operand, and of all rows that have come back, whether they came over the
        network or lie in memory that both workers share.
    bound : float
        Seconds that the round would have taken at the measured speeds if all workers had been busy
        to the end and no stripe had been computed twice; NaN if too few speeds are known.
    parts : list of WorkerPart
        Speed and stripes of each worker.
    """

    seconds: float = 0.0
    workers: int = 0
    messages: int = 0
    alone: bool = False
    doubtful: int = 0
    error: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    timeline: list[tuple[str, int, int, int, float, float]] = field(
        default_factory=list, repr=False
    )
    coordinator: str = ""
    operand_bytes: int = 0
    share_bytes: int = 0
    #: The workers of the round; their stripes (computed, moved, wasted): shape (3, workers).
    addresses: tuple[str, ...] = field(default=(), repr=False)
    stripes: Ints = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int64), repr=False)
    #: Of each worker: the predicted speed, the work that has come back, the seconds for it.
    _accounts: tuple[Floats, Floats, Floats] = field(default=(_NONE, _NONE, _NONE), repr=False)
    _in_seconds: bool = field(default=False, repr=False)
    _layout: Layout | Capacity | None = field(default=None, repr=False)
    _stripe: float = field(default=1.0, repr=False)

    def add(self, address: str, ranges: Sequence[StripeRange], seconds: float, end: float) -> None:
        """Add the stripes of a share, which a worker computed in ``seconds`` until ``end``."""
        total = stripes_in(ranges)
        begin = end - seconds
        for part in ranges:
            until = begin + seconds * (part.stop - part.start) / total
            self.timeline.append((address, *part, begin, until))
            begin = until

    def close(
        self, addresses: tuple[str, ...], stripes: Ints, state: RoundState, in_seconds: bool
    ) -> None:
        """Take what the workers have done in a round that has ended."""
        workers = state.workers
        self.workers = int((workers.done > 0).sum())
        self.addresses, self.stripes, self._in_seconds = addresses, stripes, in_seconds
        self._accounts = workers.prior, workers.done, workers.busy
        self._layout, self._stripe = state.layout, state.layout.mean_stripe

    def __getstate__(self) -> dict[str, Any]:
        # A layout has the work of all stripes.
        layout = self._layout
        return vars(self) | {
            "_layout": Capacity.of(layout) if isinstance(layout, Layout) else layout
        }

    @property
    def work(self) -> Floats:
        """Stripes that have come back, by their work, and the seconds for them: (2, workers)."""
        _, done, busy = self._accounts
        return np.stack([done / self._stripe, busy]) * ((done > 0) & (busy > 0))

    @property
    def measured(self) -> Floats:
        """Measured speeds in stripes per second, shape (workers,)."""
        stripes, seconds = self.work
        return np.where(seconds > 0, stripes / np.where(seconds > 0, seconds, 1.0), np.nan)

    @property
    def predicted(self) -> Floats:
        """Predicted speeds in stripes per second, shape (workers,)."""
        predicted, measured = self._accounts[0] / self._stripe, self.measured
        if not self._in_seconds:
            # Only ratios were predicted: the typical worker is as fast as expected.
            both = (measured > 0) & (predicted > 0)
            ratio = np.median(measured[both] / predicted[both]) if both.any() else np.nan
            predicted = ratio * predicted
        return np.asarray(predicted)

    def without_details(self) -> RoundReport:
        """Return what is worth remembering of many rounds: no timeline."""
        return replace(self, timeline=[], failed={})

    @property
    def bound(self) -> float:
        # Computed only when it is read, because rounds may take 2 ms.
        if self._layout is None:
            return math.nan
        layout, measured = self._layout, self.measured
        capacity = Capacity.of(layout) if isinstance(layout, Layout) else layout
        return capacity.seconds(np.where(np.isnan(measured), self.predicted, measured))

    @property
    def parts(self) -> list[WorkerPart]:
        columns = (self.predicted.tolist(), self.measured.tolist(), *self.stripes.tolist())
        return [WorkerPart(*part) for part in zip(self.addresses, *columns, strict=True)]

    def _parts(self) -> list[tuple[str, str]]:
        shown = [f.name for f in fields(self) if f.repr]
        return [(name, brief(getattr(self, name))) for name in (*shown, "bound")]

    def _repr_html_(self) -> str:
        columns = ("worker", *WorkerPart._fields[1:])
        rows = [[brief(value).strip("'") for value in part] for part in self.parts]
        bars = [(address, begin, end) for address, _, _, _, begin, end in self.timeline]
        return super()._repr_html_() + table(columns, rows) + lanes(bars)


class StripeCount:
    """Counts the stripes of each worker while a round runs."""

    def __init__(self, layout: Layout) -> None:
        self._group = layout.group.tolist()
        self._host = layout.host.tolist()
        # Stripes of each piece in the first assignment, as bits.
        self._first = [0] * layout.pieces
        self._stripes = [[0] * layout.workers for _ in range(3)]

    def begin(self, commands: Iterable[Command]) -> None:
        """Take the first assignment."""
        for command in commands:
            if isinstance(command, Assign):
                for part in command.ranges:
                    self._first[part.piece] |= bits_of(part)

    def share(self, ranges: Iterable[StripeRange], lacking: Sequence[int]) -> None:
        """Count a share, given the stripes that each group lacks before it, as bits."""
        computed, moved, wasted = self._stripes
        for part in ranges:
            worker, bits = self._host[part.piece], bits_of(part)
            computed[worker] += part.stop - part.start
            moved[worker] += (bits & ~self._first[part.piece]).bit_count()
            wasted[worker] += (bits & ~lacking[self._group[part.piece]]).bit_count()

    @property
    def stripes(self) -> Ints:
        """Stripes computed, moved and wasted, shape (3, workers)."""
        return np.array(self._stripes, dtype=np.int64)
