"""Ways to sum and to pack gradients that the papers compare with and the library does not have.

`HalvingDoubling` sums by recursive halving and doubling [1]_: in ``log2 n`` exchanges each worker
halves the part of the gradient that it adds up, in as many the totals spread again. `AllGather`
sends every worker's packed gradient to all others, which add them up. `Qsgd` rounds at random, so
that the expected value is right [2]_; with one level and one scale it is TernGrad [3]_.

References
----------
.. [1] Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
   MPICH", International Journal of High Performance Computing Applications 19 (2005).
.. [2] Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD", NeurIPS 2017.
.. [3] Wen, Xu, Yan, Wu, Wang, Chen and Li, "TernGrad", NeurIPS 2017.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dask_coded.aggregation import (
    Aggregation,
    Command,
    Compute,
    Finished,
    Machine,
    Plan,
    Send,
    Tag,
)
from dask_coded.compression import EXACT, Codec, Compression, Partial


class _AllPlan(Plan):
    """Worker ``i`` computes part ``i``, and all workers make the sum."""

    rooted = False

    def __init__(self, workers: int, kind: type[_Machine]) -> None:
        self.workers = self.parts = workers
        self.stored = tuple((worker,) for worker in range(workers))
        self._kind = kind

    @property
    def load(self) -> float:
        return 1 / self.workers

    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        return self._kind(node, self.workers, codec)


class _Machine(Machine):
    """Messages wait until this worker has computed its gradient."""

    def __init__(self, node: int, workers: int, codec: Codec) -> None:
        self._node = node
        self._workers = workers
        self._codec = codec
        self._own: Partial | None = None
        self._inbox: dict[tuple[int, Tag], Any] = {}
        self._over = False

    def begin(self) -> list[Command]:
        return [Compute((self._node,), (1.0,))]

    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        if self._own is not None:
            return []
        self._own = partial
        return [*self._start(), *self._advance()]

    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        if self._over:
            return []
        self._inbox.setdefault((sender, tag), payload)
        return [] if self._own is None else self._advance()

    def _finished(self, total: Partial) -> Finished:
        self._over = True
        return Finished(0, total.read_only())

    def _start(self) -> list[Command]:
        return []

    def _advance(self) -> list[Command]:
        raise NotImplementedError


@dataclass(frozen=True)
class HalvingDoubling(Aggregation):
    """All-reduce by recursive halving and doubling, for a power of two of workers.

    Examples
    --------
    >>> HalvingDoubling().plan(4).load
    0.25
    """

    def plan(self, workers: int) -> Plan:
        if workers & (workers - 1):
            raise ValueError(f"{self!r} needs a power of two of workers, there are {workers}.")
        return _AllPlan(workers, _Halving)


class _Halving(_Machine):
    """In exchange ``l`` of both phases the partner differs in one bit of its number.

    A message may be a view of this worker's vector: it changes only when its total is known, for
    which the receiver must have read it.
    """

    def __init__(self, node: int, workers: int, codec: Codec) -> None:
        super().__init__(node, workers, codec)
        self._levels = workers.bit_length() - 1
        self._done = 0  # exchanges, of both phases
        self._range = (0, workers)  # chunks that this worker still adds up
        self._totals: dict[int, Any] = {}  # packed, by chunk
        self._cuts: list[int] = []

    def _start(self) -> list[Command]:
        assert self._own is not None
        n, size = self._workers, len(self._own.vector)
        self._cuts = [i * (size // n) + min(i, size % n) for i in range(n + 1)]
        return [self._halve()] if self._levels else []

    def _advance(self) -> list[Command]:
        commands: list[Command] = []
        while self._done < 2 * self._levels:
            message = (self._partner(), self._tag())
            if message not in self._inbox:
                return commands
            payload = self._inbox.pop(message)
            if self._done < self._levels:
                self._add(payload)
            else:
                self._totals |= dict(zip(payload[0], payload[1:], strict=True))
            self._done += 1
            if self._done < self._levels:
                commands.append(self._halve())
                continue
            if self._done == self._levels:
                self._totals[self._node] = self._packed(self._node, self._node + 1)
            if self._done < 2 * self._levels:
                chunks = sorted(self._totals)
                whole = (tuple(chunks), *(self._totals[chunk] for chunk in chunks))
                commands.append(Send(self._partner(), self._tag(), whole))
        return [*commands, *self._finish()]

    def _finish(self) -> list[Command]:
        assert self._own is not None
        if not self._levels:
            self._totals[0] = self._packed(0, 1)
        for chunk, packed in self._totals.items():
            total = self._codec.unpack(packed)
            mine = self._own.vector[self._cuts[chunk] : self._cuts[chunk + 1]]
            if not np.may_share_memory(mine, total.vector):
                mine[...] = total.vector
            if chunk == 0:
                self._own.loss = total.loss
        return [self._finished(self._own)]

    def _partner(self) -> int:
        halving = self._done < self._levels
        bit = self._levels - 1 - self._done if halving else self._done - self._levels
        return self._node ^ (1 << bit)

    def _tag(self) -> Tag:
        return Tag("part" if self._done < self._levels else "sum", 0, self._done)

    def _halve(self) -> Command:
        """Send the half of the range that the partner adds up, and keep the other."""
        start, stop = self._range
        middle = (start + stop) // 2
        halves = ((start, middle), (middle, stop))
        mine = int(self._node >= middle)
        self._range = halves[mine]
        return Send(self._partner(), self._tag(), self._packed(*halves[1 - mine]))

    def _add(self, packed: Any) -> None:
        assert self._own is not None
        partial = self._codec.unpack(packed)
        start, stop = self._range
        mine = self._own.vector[self._cuts[start] : self._cuts[stop]]
        mine += partial.vector
        if start == 0:
            self._own.loss += partial.loss

    def _packed(self, start: int, stop: int) -> Any:
        assert self._own is not None
        vector = self._own.vector[self._cuts[start] : self._cuts[stop]]
        return self._codec.pack(Partial(vector, self._own.loss if start == 0 else 0.0))


@dataclass(frozen=True)
class AllGather(Aggregation):
    """Every worker sends its gradient to all others, packed once; nothing is packed again.

    Examples
    --------
    >>> AllGather().plan(3).load
    0.3333333333333333
    """

    def plan(self, workers: int) -> Plan:
        return _AllPlan(workers, _Gathering)


class _Gathering(_Machine):
    """Gradients are added in the order of the workers, so that all replicas get the same bits."""

    def _start(self) -> list[Command]:
        assert self._own is not None
        packed = self._codec.pack(self._own)
        self._inbox[self._node, Tag("part")] = packed
        others = (node for node in range(self._workers) if node != self._node)
        return [Send(node, Tag("part"), packed) for node in others]

    def _advance(self) -> list[Command]:
        if len(self._inbox) < self._workers:
            return []
        assert self._own is not None
        total = Partial(np.zeros_like(self._own.vector))
        for node in range(self._workers):
            total.add(self._codec.unpack(self._inbox[node, Tag("part")]))
        return [self._finished(total)]


@dataclass(frozen=True)
class Qsgd(Codec, Compression):
    """Round at random to multiples of a scale, so that the expected value is the number itself.

    Parameters
    ----------
    levels : int
        Positive levels. With 1 a number takes 2 bits, with up to 7 levels 4, with up to 127 8.
    block : int
        How many numbers share a scale.
    norm : {"l2", "max"}
        A block's scale is this norm over the levels; QSGD has the former, TernGrad the latter.

    Examples
    --------
    >>> codec = Qsgd(levels=7, block=4, norm="max")
    >>> packed = codec.pack(Partial(np.array([7.0, -3.0, 0.0, 1.0, 2.0], np.float32)))
    >>> codec.nbytes(packed), codec.unpack(packed).vector.tolist()
    (11, [7.0, -3.0, 0.0, 1.0, 2.0])
    """

    levels: int = 7
    block: int = 512
    norm: str = "l2"

    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.levels not in (1, 7, 127):
            raise ValueError(f"Argument 'levels' must be 1, 7 or 127, it is {self.levels}.")

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return {1: 2, 7: 4, 127: 8}[self.levels]

    def pack(self, partial: Partial) -> Any:
        """Return the levels in bytes, the scales, the length and the loss."""
        vector = np.ascontiguousarray(partial.vector, dtype=np.float32)
        block = self._block(len(vector))
        blocks = np.pad(vector, (0, -len(vector) % block)).reshape(-1, block)
        if self.norm == "max":
            scales = np.abs(blocks).max(axis=1)
        else:
            scales = np.sqrt(np.einsum("ij,ij->i", blocks, blocks))
        scales = scales / np.float32(self.levels)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        # Seeded by the numbers themselves, so that a training can be replayed.
        rng = np.random.default_rng(zlib.crc32(vector.tobytes()))
        drawn = rng.random(blocks.shape, dtype=np.float32)
        whole = np.floor(blocks * inverse[:, None] + drawn)
        # Rounding errors of the scale can lead one above the highest level.
        shifted = (np.clip(whole, -self.levels, self.levels) + self.levels).astype(np.uint8)
        shifted = shifted.ravel()[: len(vector)]
        each = 8 // self.bits
        slots = np.pad(shifted, (0, -len(shifted) % each)).reshape(-1, each)
        shifts = np.arange(each, dtype=np.uint8) * np.uint8(self.bits)
        packed = np.bitwise_or.reduce(slots << shifts, axis=1)
        return packed, scales, len(vector), partial.loss

    def unpack(self, packed: Any) -> Partial:
        """Return the rounded numbers, float32."""
        data, scales, size, loss = packed
        each = 8 // self.bits
        shifts = np.arange(each, dtype=np.uint8) * np.uint8(self.bits)
        slots = (data[:, None] >> shifts) & np.uint8(2**self.bits - 1)
        whole = slots.ravel()[:size].astype(np.float32) - np.float32(self.levels)
        return Partial(whole * np.repeat(scales, self._block(size))[:size], loss)

    def _block(self, size: int) -> int:
        return max(min(self.block, size), 1)

    def nbytes(self, packed: Any) -> int:
        """Return the packed size in bytes."""
        return int(packed[0].nbytes + packed[1].nbytes)
