"""Where the time of one step goes: computing, compressing, and what is being summed meanwhile.

A ring and a compression that note when they are called say it, on one worker. A segment is being
summed from the end of its compression until that worker has its total.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import dask_coded as coded
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.trainings import DRAINING, links, net_of, size_of
from dask_coded.aggregation import Command, Compute, Finished, Machine, Ring, Tag
from dask_coded.aggregation._ring import RingPlan
from dask_coded.compression import EXACT, Codec, Compressor, GradiVeQ, Partial
from dask_coded.training import SGD

#: What this worker did: which step, what, which segment, when it began and when it ended.
SEEN: list[tuple[int, str, int, float, float]] = []
#: Whose steps are looked at.
_WORKER = 0
#: How each is drawn.
_SIGNS = {"computes": "#", "compresses": "+", "sums": "=", "expands": "*"}
_WIDTH = 48


class _Compressor(Compressor):
    """Notes when another one is called."""

    def __init__(self, inner: Compressor) -> None:
        self._inner = inner

    def compress(self, step: int, segment: int, vector: Any) -> Any:
        began = perf_counter()
        found = self._inner.compress(step, segment, vector)
        SEEN.append((step, "compresses", segment, began, perf_counter()))
        return found

    def expand(self, step: int, segment: int, vector: Any) -> Any:
        began = perf_counter()
        found = self._inner.expand(step, segment, vector)
        SEEN.append((step, "expands", segment, began, perf_counter()))
        return found

    def state(self) -> Any:
        return self._inner.state()

    def restore(self, state: Any) -> None:
        self._inner.restore(state)


@dataclass(frozen=True)
class _Compression(GradiVeQ):
    def compressor(  # type: ignore[override]
        self, layers: Sequence[tuple[int, ...]], segments: int, width: int = 1
    ) -> Compressor:
        return _Compressor(super().compressor(layers, segments, width))


@dataclass(frozen=True)
class _Ring(Ring):
    def plan(self, workers: int) -> RingPlan:
        return _Plan(workers, self.segments)


class _Plan(RingPlan):
    def machine(self, node: int, choice: Sequence[int] = (), codec: Codec = EXACT) -> Machine:
        return _Machine(super().machine(node, choice, codec))


class _Machine(Machine):
    """Notes when a worker begins to compute and when it has the total of a segment."""

    def __init__(self, inner: Machine) -> None:
        self._inner = inner

    def begin(self) -> list[Command]:
        SEEN.append((-1, "begins", 0, perf_counter(), 0.0))
        return self._inner.begin()

    def computed(self, work: Compute, segment: int, partial: Partial) -> list[Command]:
        return self._look(self._inner.computed(work, segment, partial))

    def received(self, sender: int, tag: Tag, payload: Any) -> list[Command]:
        return self._look(self._inner.received(sender, tag, payload))

    @staticmethod
    def _look(commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Finished):
                SEEN.append((-1, "has", command.segment, 0.0, perf_counter()))
        return commands


def _taken() -> list[tuple[int, str, int, float, float]]:
    """Return what this worker did since the last call, as a task on it."""
    found = list(SEEN)
    SEEN.clear()
    return found


def spans(
    seen: Sequence[tuple[int, str, int, float, float]],
) -> dict[int, list[tuple[str, int, float, float]]]:
    """Return what a worker did in each step: what, which segment, from when to when.

    Examples
    --------
    >>> seen = [(-1, "begins", 0, 1.0, 0.0), (0, "compresses", 0, 3.0, 4.0)]
    >>> spans([*seen, (-1, "has", 0, 0.0, 7.0), (0, "expands", 0, 7.0, 8.0)])
    {0: [('computes', 0, 1.0, 3.0), ('compresses', 0, 3.0, 4.0), ('sums', 0, 4.0, 7.0), \
('expands', 0, 7.0, 8.0)]}
    """
    found: dict[int, list[tuple[str, int, float, float]]] = {}
    step, start = -1, 0.0
    compressed: dict[int, float] = {}
    for number, what, segment, began, ended in seen:
        if what == "begins":
            step, start, compressed = step + 1, began, {}
        elif what == "has":
            found[step].append(("sums", segment, compressed[segment], ended))
        else:
            its = found.setdefault(number, [])
            if what == "compresses":
                compressed[segment] = ended
                if not its:
                    its.append(("computes", 0, start, began))
            its.append((what, segment, began, ended))
    return found


def timeline(kept: Kept, net: str, link: str, segments: int) -> None:
    """Add what a worker does in a compressed step of median length."""
    if not kept.processes:
        return
    size, chosen = size_of(kept), net_of(net)
    compression = _Compression(exact_steps=5, period=50)
    steps = compression.exact_steps + kept.count(12) + DRAINING
    with links(kept, net, size.workers, link) as there:
        client, workers = there.lab.client, there.lab.workers
        # Steps in which some workers are still importing PyTorch are without them.
        for number in (1, steps):
            client.run(_taken)
            result = coded.training.train(
                chosen.gradient,
                chosen.start(),
                there.data,
                optimizer=SGD(0.01),
                batch_size=size.batch,
                steps=number,
                aggregation=_Ring(segments),
                compression=compression,
                layers=chosen.layers(),
                client=client,
                workers=workers,
                leader=there.lab.free,
            )
        seen = client.run(_taken, workers=[workers[_WORKER]])[workers[_WORKER]]
    computing = [step.computing for step in result.history[: steps - DRAINING]]
    if any(0 < len(found) < len(workers) for found in computing):
        raise RuntimeError("Some workers were not there from the first step on. Measure again.")
    by_step = spans(seen)
    chosen_steps = sorted(
        range(compression.exact_steps, steps - DRAINING), key=lambda step: _length(by_step[step])
    )
    median = by_step[chosen_steps[len(chosen_steps) // 2]]
    first = median[0][2]
    for what, segment, began, ended in median:
        kept.report.add(
            f"{net}, {link}, {segments} segments, {what}, segment {segment}",
            "span",
            ended - began,
            "s",
            net=net,
            link=link,
            workers=len(workers),
            segments=segments,
            what=what,
            segment=segment,
            begin=began - first,
        )


def _length(step: Sequence[tuple[str, int, float, float]]) -> float:
    return step[-1][3] - step[0][2]


def timelines(kept: Kept) -> Iterator[str]:
    """Yield a drawing of each step."""
    rows = kept.rows(measure="span")
    if not rows:
        return
    yield "## Where the time of a step goes\n"
    yield (
        "One worker in a compressed step of median length: `#` computes the gradient, `+` "
        "compresses a segment, `=` the segment is being summed, `*` its total is expanded.\n"
    )
    kinds = ("net", "workers", "link", "segments")
    for kind in dict.fromkeys(tuple(row[key] for key in kinds) for row in rows):
        net, workers, link, segments = kind
        some = kept.rows(measure="span", **dict(zip(kinds, kind, strict=True)))
        end = max(row["begin"] + row["value"] for row in some)
        count = f"{segments} segment{'s' * (segments > 1)}"
        yield f"{net.capitalize()} network, {workers} workers, links of {link}, {count}:\n"
        yield "```text"
        yield f"{'':12}0{f'{1e3 * end:.0f} ms':>{_WIDTH - 1}}"
        yield from _lanes(some, segments, end)
        yield "```\n"


def _lanes(rows: Sequence[dict[str, Any]], segments: int, end: float) -> Iterator[str]:
    """Yield a line for the gradient and one for each segment.

    Examples
    --------
    >>> step = {"computes": (0, 0.25), "compresses": (0.25, 0.25), "sums": (0.5, 0.5)}
    >>> rows = [{"what": w, "segment": 0, "begin": b, "value": v} for w, (b, v) in step.items()]
    >>> for line in _lanes(rows, 1, 1.0):
    ...     print(line)
    gradient    ############
    segment 1               ++++++++++++========================
    """
    for lane in range(-1, segments):
        line = [" "] * _WIDTH
        for row in rows:
            if (row["what"] == "computes") == (lane < 0) and row["segment"] == max(lane, 0):
                first, last = (
                    round(_WIDTH * at / end) for at in (row["begin"], row["begin"] + row["value"])
                )
                # What is too short to be seen has a sign none the less.
                stop = max(last, first + 1)
                line[first:stop] = _SIGNS[row["what"]] * (stop - first)
        name = "gradient" if lane < 0 else f"segment {lane + 1}"
        yield f"{name:12}{''.join(line[:_WIDTH])}".rstrip()
