"""Pipe-SGD (Li et al., NeurIPS 2018): time to an accuracy, beside every conventional way to train.

Sections, for each network and rate of links: `tuning` tunes rate, momentum and warm-up of each
width on equal budgets; `accuracy` replays seeds with what was chosen; `steps` times steps;
`asynchronous` trains with an asynchronous parameter server; `terms` measures the terms of the
timing model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.evidence import asynchronous
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.papers import Claim, Finding, Paper, Section
from benchmarks.evidence.tables import span, table
from benchmarks.evidence.terms import measure_terms, predicted
from benchmarks.evidence.trainings import (
    TARGETS,
    Method,
    add_curve,
    best,
    curve,
    links,
    load,
    load_for_tuning,
    net_of,
    optimizer_of,
    replays,
    size_of,
    steps_to,
    time_steps,
)
from benchmarks.evidence.verdicts import Interval, Published, mean, ratio
from dask_coded.training import SGD

#: Networks and the links that they train over.
CASES = (("convolutional", "20mbit"), ("convolutional", "200mbit"), ("wide", "200mbit"))


@dataclass(frozen=True)
class Scope:
    """How much of a network is measured.

    Parameters
    ----------
    widths : tuple of int
        Of Pipe-SGD; 1 is a synchronous ring.
    seeds : int
        Number of seeds, and of turns of timed steps.
    """

    widths: tuple[int, ...]
    seeds: int

    @property
    def methods(self) -> list[Method]:
        return [method for method in METHODS if method.width in self.widths]


#: The wide network has fewer, because each of its replays takes minutes.
NETS = {"convolutional": Scope((1, 2, 3), 5), "wide": Scope((1, 2), 3)}

_CODECS = ("none", "16 bits", "8 bits")
METHODS = (
    *(Method("synchronous server", "server", codec) for codec in _CODECS),
    *(Method("ring", "ring", codec) for codec in _CODECS),
    *(Method("halving-doubling", "halving-doubling", codec) for codec in _CODECS),
    *(Method("PyTorch DDP", "DDP", codec) for codec in _CODECS[:2]),
    *(Method(f"Pipe-SGD, width {w}", "ring", codec, w) for w in (2, 3) for codec in _CODECS),
)
ASYNCHRONOUS = "asynchronous server"
#: What Pipe-SGD is compared with.
BASELINES = ("synchronous server", ASYNCHRONOUS, "ring", "halving-doubling", "PyTorch DDP")

#: Rates and momentum that each width, and the asynchronous server, choose from.
GRID = tuple(itertools.product((0.01, 0.02, 0.05, 0.1), (0.0, 0.5, 0.9)))
#: How many times as long replays are as those that tune: stale gradients take more steps.
LONGER = 2
#: Synchronous steps before the pipeline.
WARMUP = 20


# ---------------------------------------------------------------------------------------- sections


def tune(kept: Kept, net: str, width: int, warmup: int = 0) -> None:
    """Try all rates and momenta of a width, on a seed that is not used again."""
    for rate, momentum in GRID[: size_of(kept).tuned] if kept.smoke else GRID:
        method = Method(f"width {width}", width=width)
        optimizer = SGD(rate, momentum=momentum)
        curve(kept, net, method, optimizer, 100, warmup=warmup, measure="tuning")


def tune_asynchronous(kept: Kept, net: str) -> None:
    """Try all rates and momenta of the server, with workers that take turns."""
    size = size_of(kept)
    training, judged_by = load_for_tuning(size, net)
    chosen = net_of(net)
    for rate, momentum in GRID[: size.tuned] if kept.smoke else GRID:
        optimizer = SGD(rate, momentum=momentum)
        trained = asynchronous.replay(
            chosen.gradient,
            chosen.start(100),
            training,
            workers=size.workers,
            optimizer=optimizer,
            batch=size.batch // size.workers,
            seed=100,
        )
        method = Method(ASYNCHRONOUS, "server")
        add_curve(
            kept, net, method, optimizer, 100, trained, judged_by, "tuning", updates=size.workers
        )


def _tuned(kept: Kept, net: str, **wanted: Any) -> dict[str, Any]:
    rows = [*kept.known, *kept.report.rows]
    wanted |= {"net": net, "measure": "tuning"}
    return best([row for row in rows if wanted.items() <= row.items()])


def curves(kept: Kept, net: str, width: int, seed: int) -> None:
    """Replay a width with all codecs and the rates that were chosen."""
    row = _tuned(kept, net, method=f"width {width}")
    for codec in _CODECS:
        method = Method(f"width {width}", "ring", codec, width)
        curve(kept, net, method, optimizer_of(row), seed, warmup=row["warmup"], longer=LONGER)


def steps(kept: Kept, net: str, link: str, turn: int) -> None:
    """Time the steps of all methods once."""
    if not kept.processes:
        return
    with links(kept, net, size_of(kept).workers, link) as there:
        if kept.smoke:
            # One of each kind of machine shows that they work.
            some = [METHODS[0], METHODS[5], METHODS[6], METHODS[9], METHODS[-1]]
        else:
            some = NETS[net].methods
        for method in some:
            time_steps(kept, there, net, method, turn)


def asynchronously(kept: Kept, net: str, link: str, seed: int) -> None:
    """Train with the asynchronous server, and add accuracy over time and staleness."""
    if not kept.processes:
        return
    size = size_of(kept)
    _, held_out = load(size, net)
    chosen = net_of(net)
    row = _tuned(kept, net, method=ASYNCHRONOUS)
    with links(kept, net, size.workers, link) as there:
        found = asynchronous.train(
            there.lab.client,
            there.lab.workers,
            there.lab.free,
            chosen.gradient,
            chosen.start(seed),
            there.data,
            optimizer=optimizer_of(row),
            batch=size.batch // size.workers,
            updates=size.steps * size.workers,
            every=size.every * size.workers,
            seed=seed,
        )
    accuracy = [chosen.accuracy(each.parameters, held_out) for each in found.snapshots]
    kept.report.add(
        f"{net}, {ASYNCHRONOUS}, {link}, seed {seed}",
        "asynchronous",
        float(np.mean(accuracy[-3:])),
        "",
        net=net,
        method=ASYNCHRONOUS,
        compression="none",
        link=link,
        seed=seed,
        workers=size.workers,
        steps=[each.seconds for each in found.snapshots],
        accuracy=accuracy,
        updates=len(found.staleness),
        staleness=np.bincount(found.staleness).tolist(),
        sent=found.sent,
    )


def terms(kept: Kept, net: str, link: str) -> None:
    """Measure the terms of the timing model."""
    if not kept.processes:
        return
    with links(kept, net, size_of(kept).workers, link) as there:
        found = measure_terms(there.lab, net_of(net).start().size)
    for name, value in found.items():
        kept.report.add(f"{net}, {link}: {name}", "term", value, "s", term=name, net=net, link=link)


def _seeds(run: Any, net: str, **keys: Any) -> dict[str, Any]:
    name = "turn" if run is steps else "seed"
    return {
        f"{name} {i}": partial(run, net=net, **keys, **{name: i}) for i in range(NETS[net].seeds)
    }


SECTIONS = {
    **{
        f"tuning-{net}": Section(
            {
                **{f"width {w}": partial(tune, net=net, width=w) for w in scope.widths},
                **{
                    f"width {w}, warm-up": partial(tune, net=net, width=w, warmup=WARMUP)
                    for w in scope.widths[1:]
                },
                ASYNCHRONOUS: partial(tune_asynchronous, net=net),
            },
            20,
        )
        for net, scope in NETS.items()
    },
    **{
        f"accuracy-{net}": Section(
            {
                f"seed {i}, width {w}": partial(curves, net=net, width=w, seed=i)
                for i in range(scope.seeds)
                for w in scope.widths
            },
            20,
        )
        for net, scope in NETS.items()
    },
    **{
        f"{name}-{net}-{link}": Section(pieces, minutes)
        for net, link in CASES
        for name, pieces, minutes in (
            ("terms", {"all": partial(terms, net=net, link=link)}, 1),
            ("steps", _seeds(steps, net=net, link=link), 20),
            ("asynchronous", _seeds(asynchronously, net=net, link=link), 20),
        )
    },
}


# ------------------------------------------------------------------------------------ time, by seed


def seconds(kept: Kept, net: str, link: str) -> dict[tuple[str, str], np.ndarray]:
    """Return the seconds to the accuracy of each method and codec, by seed; infinite if never."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for method, codec in _methods(kept, net, link):
        times = kept.rows(measure="step", net=net, link=link, method=method, compression=codec)
        each = []
        for row in times:
            runs = kept.rows(
                measure="curve",
                net=net,
                width=row["width"],
                compression=codec,
                seed=row["turn"],
            )
            each += [row["value"] * steps_to(run) for run in runs]
        if each:
            found[method, codec] = np.array(each)
    if runs := kept.rows(measure="asynchronous", net=net, link=link):
        found[ASYNCHRONOUS, "none"] = np.array([steps_to(run) for run in runs])
    return found


def _methods(kept: Kept, net: str, link: str) -> list[tuple[str, str]]:
    rows = kept.rows(measure="step", net=net, link=link)
    return list(dict.fromkeys((row["method"], row["compression"]) for row in rows))


def _ours(times: Mapping[tuple[str, str], np.ndarray]) -> tuple[str, str] | None:
    """Return the codec with which width 2 reaches the accuracy first."""
    ours = {key: found.mean() for key, found in times.items() if key[0] == "Pipe-SGD, width 2"}
    return min(ours, key=ours.__getitem__) if ours else None


def gains(kept: Kept) -> list[Finding]:
    """Find how many times as fast Pipe-SGD with its best codec is as each conventional way."""
    found = []
    for net, link in CASES:
        times = seconds(kept, net, link)
        best_of_ours = _ours(times)
        if best_of_ours is None:
            continue
        for baseline in BASELINES:
            theirs = times.get((baseline, "none"))
            if theirs is None:
                continue
            case = f"{net} network, {link}, against {baseline}"
            ours = times[best_of_ours]
            count = min(len(theirs), len(ours))
            if not np.isfinite([theirs[:count], ours[:count]]).all():
                value = _never(theirs[:count], ours[:count])
                reason = f"some seeds never reach {TARGETS[net]:.0%} in the replayed steps"
            else:
                value = ratio(theirs[:count], ours[:count])
                reason = f"with {best_of_ours[1]}"
            found.append(Finding(case, value, None, reason, _disturbed(kept, net, link)))
    return found


def _never(theirs: np.ndarray, ours: np.ndarray) -> Interval:
    """Return 0 if ours never reach the accuracy, infinity if theirs do not."""
    value = 0.0 if not np.isfinite(ours).all() else float("inf")
    return Interval(value, value, value)


def _disturbed(kept: Kept, net: str, link: str) -> bool:
    """Return whether the turns of the synchronous server differ by more than 1.3."""
    rows = kept.rows(
        measure="step", net=net, link=link, method="synchronous server", compression="none"
    )
    values = [row["value"] for row in rows]
    return bool(values) and max(values) > 1.3 * min(values)


def widths(kept: Kept) -> list[Finding]:
    """Find how long width 1 and width 3 take to the accuracy, over width 2."""
    found = []
    for net, link in CASES:
        times = seconds(kept, net, link)
        for other in ("ring", "Pipe-SGD, width 3"):
            pair = [times.get((name, "8 bits")) for name in (other, "Pipe-SGD, width 2")]
            if pair[0] is None or pair[1] is None:
                continue
            count = min(map(len, pair))  # type: ignore[arg-type]
            theirs, ours = (each[:count] for each in pair if each is not None)
            finite = np.isfinite([theirs, ours]).all()
            value = ratio(theirs, ours) if finite else _never(theirs, ours)
            name = "width 1" if other == "ring" else "width 3"
            found.append(Finding(f"{net} network, {link}, {name} over width 2, 8 bits", value))
    return found


def lost(kept: Kept) -> list[Finding]:
    """Find how many points of accuracy width 2 with 8 bits is below synchronous training."""
    found = []
    for net in NETS:
        runs = {
            width: kept.rows(measure="curve", net=net, width=width, compression=codec)
            for width, codec in ((1, "none"), (2, "8 bits"))
        }
        if all(runs.values()):
            pairs = zip(*(sorted(rows, key=lambda row: row["seed"]) for rows in runs.values()))
            points = [100 * (plain["value"] - ours["value"]) for plain, ours in pairs]
            found.append(Finding(f"{net} network", mean(points)))
    return found


# ------------------------------------------------------------------------------------------- tables


def times(kept: Kept) -> Iterator[str]:
    for net, link in CASES:
        measured = kept.rows(measure="step", net=net, link=link)
        if not measured:
            continue
        found = seconds(kept, net, link)
        base = found.get(("synchronous server", "none"))
        measured_terms = {
            row["term"]: row["value"] for row in kept.rows(measure="term", net=net, link=link)
        }
        yield f"## Time to {TARGETS[net]:.0%}: {net} network, links of {link}\n"
        yield (
            "Mean step, its prediction from measured terms, and steps and time to the accuracy: "
            "medians and ranges over seeds."
        )
        lines = []
        for key in [*_methods(kept, net, link), (ASYNCHRONOUS, "none")]:
            rows = [row for row in measured if (row["method"], row["compression"]) == key]
            step = float(np.median([row["value"] for row in rows])) if rows else None
            model = predicted(rows, measured_terms, net_of_size(kept, net)) if rows else None
            each = found.get(key)
            lines.append(
                [
                    f"{key[0]}, {key[1]}" if key[1] != "none" else key[0],
                    f"{1e3 * step:.0f} ms" if step else "–",
                    f"{1e3 * model:.0f} ms" if model else "–",
                    span(each, "s") if each is not None else "–",
                    _over(base, each),
                ]
            )
        yield from table(["", "step", "predicted", "time", "server's time over it"], lines)


def net_of_size(kept: Kept, net: str) -> int:
    """Return the number of weights, as the terms were measured with it."""
    rows = kept.rows(measure="term", net=net, term="numbers")
    return int(rows[0]["value"]) if rows else 0


def _over(theirs: np.ndarray | None, ours: np.ndarray | None) -> str:
    if theirs is None or ours is None:
        return "–"
    count = min(len(theirs), len(ours))
    pair = theirs[:count], ours[:count]
    return Published(1, 1, "level", "").show(ratio(*pair)) if np.isfinite(pair).all() else "–"


def accuracies(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="curve")
    if not rows:
        return
    last = max(max(row["steps"]) for row in rows)
    yield "## Accuracy by width and codec\n"
    yield (
        f"Replays with rates tuned for each width. Steps to the accuracy that trainings are timed "
        f"to, and accuracy after {last} steps: medians and ranges over seeds."
    )
    lines = []
    for net, width, codec in dict.fromkeys((r["net"], r["width"], r["compression"]) for r in rows):
        runs = kept.rows(measure="curve", net=net, width=width, compression=codec)
        first = runs[0]
        taken = span([steps_to(run) for run in runs], digits=0)
        lines.append(
            [
                f"{net}, width {width}, {codec}",
                f"{first['learning_rate']:g}, {first['momentum']:g}, {first['warmup']}",
                taken,
                span([run["value"] for run in runs], digits=3),
            ]
        )
    header = ["", "rate, momentum, warm-up", "steps", "accuracy"]
    yield from table(header, lines)


def staleness(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="asynchronous")
    if not rows:
        return
    yield "## Staleness of the asynchronous server\n"
    yield "Updates since a gradient's parameters were sent, over all seeds."
    lines = []
    for net, link in dict.fromkeys((row["net"], row["link"]) for row in rows):
        runs = [row["staleness"] for row in kept.rows(measure="asynchronous", net=net, link=link)]
        counts = np.zeros(max(map(len, runs)))
        for run in runs:
            counts[: len(run)] += run
        average = float((counts * np.arange(len(counts))).sum() / counts.sum())
        lines.append([f"{net}, {link}", f"{average:.2f}", str(len(counts) - 1)])
    yield from table(["", "mean", "most"], lines)


def costs(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="term")
    if not rows:
        return
    yield "## Terms of the timing model\n"
    yield (
        "A synchronous step takes computation, update, messages, sums, codecs and synchronisation; "
        "a pipelined one the longer of computation with update and of the rest. Codec terms are "
        "for packing and unpacking one gradient."
    )
    names = [name for name in dict.fromkeys(row["term"] for row in rows) if name != "numbers"]
    cases = list(dict.fromkeys((row["net"], row["link"]) for row in rows))
    values = {(row["term"], row["net"], row["link"]): row["value"] for row in rows}
    lines = [[name, *(f"{1e3 * values[name, *case]:.3g} ms" for case in cases)] for name in names]
    yield from table(["", *(f"{net}, {link}" for net, link in cases)], lines)


PAPER = Paper(
    name="pipe-sgd",
    title="Evidence: Pipe-SGD",
    intro=(
        "Pipe-SGD (Li et al., NeurIPS 2018, arXiv:1811.03619) overlaps the all-reduce of one step "
        "with the gradient of the next, and packs gradients lightly on the way. "
        "[Pipelined steps](../pipe-sgd.md) explains it. Here networks learn MNIST on four worker "
        "processes behind limited links, the parameter servers' among them."
    ),
    claims=(
        Claim(
            "Time to accuracy, times as fast as conventional ways",
            Published(5.4, 5.4, "times"),
            "abstract",
            "sure, but not which way and which data",
            tuple(name for name in SECTIONS if not name.startswith("terms")),
            gains,
        ),
        Claim(
            "Width 2 is best: others take longer",
            Published(1, float("inf"), "times"),
            "abstract",
            "sure",
            tuple(name for name in SECTIONS if name.startswith(("tuning", "accuracy", "steps"))),
            widths,
        ),
        Claim(
            "Convergence is kept: accuracy lost with width 2 and 8 bits",
            Published(0, 1, "level", "points", at_most=True),
            "abstract; the limit of one point is ours",
            "sure",
            tuple(name for name in SECTIONS if name.startswith(("tuning", "accuracy"))),
            lost,
        ),
    ),
    sections=SECTIONS,
    parts=(times, accuracies, staleness, costs, replays),
)
