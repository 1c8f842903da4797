"""Evidence of the papers on training: baselines, verdicts from rows, tiny runs of each section."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.evidence import asynchronous, gradiveq, pipe_sgd
from benchmarks.evidence.command import main
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.page import lines
from benchmarks.evidence.summing import AllGather, HalvingDoubling, Qsgd
from benchmarks.evidence.terms import communication, predicted
from benchmarks.evidence.trainings import best, steps_to
from benchmarks.report import Report
from dask_coded.aggregation import Compute, Finished, Send
from dask_coded.compression import EXACT, Partial, Quantization
from dask_coded.training import SGD

# ------------------------------------------------------------------------------------------ summing


def summed(aggregation, vectors, codec=EXACT, seed=0):
    """Return the sum of each node, with messages in random order and some of them twice."""
    rng = random.Random(seed)
    plan = aggregation.plan(len(vectors))
    machines = [plan.machine(node, codec=codec) for node in range(len(vectors))]
    queue: deque = deque()
    for node, machine in enumerate(machines):
        queue += [(node, command) for command in machine.begin()]
    found: dict[int, Partial] = {}
    while queue:
        queue.rotate(rng.randrange(len(queue)))
        node, command = queue.popleft()
        if isinstance(command, Compute):
            own = Partial(vectors[node].copy(), float(node))
            more = machines[node].computed(command, 0, own)
        elif isinstance(command, Send):
            for _ in range(rng.choice([1, 2])):
                answer = machines[command.to].received(node, command.tag, command.payload)
                queue += [(command.to, c) for c in answer]
            continue
        else:
            assert isinstance(command, Finished) and node not in found
            found[node] = command.total
            continue
        queue += [(node, c) for c in more]
    return [found[node] for node in range(len(vectors))]


@pytest.mark.parametrize("aggregation", [HalvingDoubling(), AllGather()])
@pytest.mark.parametrize("codec", [EXACT, Quantization(), Qsgd(levels=127)])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_all_workers_get_the_same_bits_of_the_sum(aggregation, codec, workers):
    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal(101).astype(np.float32) for _ in range(workers)]
    for seed in range(5):
        totals = summed(aggregation, vectors, codec, seed)
        assert len({total.vector.tobytes() for total in totals}) == 1
        assert {total.loss for total in totals} == {sum(range(workers))}
        error = np.abs(totals[0].vector - np.sum(vectors, axis=0)).max()
        assert error < (1e-5 if codec is EXACT else 0.5)


def test_halving_needs_a_power_of_two():
    with pytest.raises(ValueError, match="power of two of workers, there are 6"):
        HalvingDoubling().plan(6)


@pytest.mark.parametrize("codec", [Qsgd(127), Qsgd(7, 64), Qsgd(1, 64, "max")])
def test_random_rounding_is_right_on_average(codec):
    rng = np.random.default_rng(1)
    vector = rng.standard_normal(64).astype(np.float32)
    found = []
    for i in range(2000):
        # The draw depends on the numbers, so these differ a little from time to time.
        shaken = vector * np.float32(1 + 1e-6 * i)
        found.append(codec.unpack(codec.pack(Partial(shaken))).vector)
    spread = np.std(found, axis=0) / math.sqrt(2000)
    assert np.all(np.abs(np.mean(found, axis=0) - vector) < 5 * spread + 0.003)


@pytest.mark.parametrize(("codec", "bits"), [(Qsgd(127), 8), (Qsgd(7), 4), (Qsgd(1), 2)])
def test_random_rounding_takes_so_many_bits(codec, bits):
    packed = codec.pack(Partial(np.ones(4096, np.float32)))
    assert codec.nbytes(packed) == 4096 * bits // 8 + 4 * 4096 // 512
    again = codec.pack(Partial(np.ones(4096, np.float32)))
    assert packed[0].tobytes() == again[0].tobytes()  # a training can be replayed


# ------------------------------------------------------------------------------------- asynchronous


def squares(w, X, y):
    error = X @ w - y
    return error @ error / 2, X.T @ error


def test_the_server_counts_the_updates_that_a_gradient_missed():
    server = asynchronous.Server(np.zeros(2), SGD(1.0), most=3, every=2)
    (_, first), (_, second) = server.exchange(None, 0), server.exchange(None, 0)
    parameters, version = server.exchange(np.array([1.0, 0.0]), first)
    assert parameters.tolist() == [-1, 0] and version == 1
    _, version = server.exchange(np.array([0.0, 1.0]), second)
    assert server.exchange(np.array([1.0, 1.0]), version) == (None, 3)
    assert server.exchange(np.array([9.0, 9.0]), 0) == (None, 3)  # it has had enough
    staleness, snapshots = server.found()
    assert staleness == [0, 1, 0]
    assert [(each.updates, each.parameters.tolist()) for each in snapshots] == [(2, [-1, -1])]


def test_workers_that_take_turns_learn_as_they_would_alone_if_there_is_one():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 3))
    y = X @ [1.0, -2.0, 0.5]
    for workers in (1, 4):
        trained = asynchronous.replay(
            squares, np.zeros(3), (X, y), workers=workers, optimizer=SGD(0.05), batch=10
        )
        w = next(itertools.islice(trained, 800, None))
        np.testing.assert_allclose(w, [1, -2, 0.5], atol=1e-3)


# --------------------------------------------------------------------------------------- the model

TERMS = {
    "latency": 0.001,
    "transfer": 0.4,
    "summation": 0.004,
    "synchronisation": 0.002,
    "update": 0.003,
    "pack, 8 bits": 0.01,
    "unpack, 8 bits": 0.02,
}


def test_the_model_has_all_terms():
    ring = communication("ring", "none", 4, TERMS)
    assert ring == pytest.approx(6 * 0.001 + 0.75 * (0.8 + 0.004) + 0.002)
    packed = communication("ring", "8 bits", 4, TERMS)
    assert packed == pytest.approx(0.006 + 0.75 * (0.2 + 0.004) + 0.01 + 1.5 * 0.02 + 0.002)
    assert communication("halving-doubling", "none", 4, TERMS) == pytest.approx(ring - 2 * 0.001)
    assert communication("server", "none", 4, TERMS) == pytest.approx(0.002 + 4 * 0.804 + 0.002)
    assert communication("DDP", "none", 4, TERMS) is None
    assert communication("ring", "QSGD", 4, TERMS) is None


def test_a_pipelined_step_takes_the_longer_of_its_two_parts():
    row = {"computing": 0.1, "workers": 4, "aggregation": "ring", "compression": "none"}
    ring = communication("ring", "none", 4, TERMS)
    assert predicted([row | {"width": 1}], TERMS, 1) == pytest.approx(0.103 + ring)
    assert predicted([row | {"width": 2}], TERMS, 1) == pytest.approx(ring)
    assert predicted([row | {"width": 2, "computing": 9.0}], TERMS, 1) == pytest.approx(9.003)
    assert predicted([row | {"width": 1}], {}, 1) is None


# ------------------------------------------------------------------------------ verdicts from rows


def test_the_rate_that_is_first_at_the_accuracy_is_chosen():
    of = {"net": "convolutional", "steps": [5, 10]}
    never = {**of, "accuracy": [0.5, 0.96], "value": 0.96}
    soon = {**of, "accuracy": [0.98, 0.9], "value": 0.9}
    late = {**of, "accuracy": [0.9, 0.99], "value": 0.99}
    assert best([never, late, soon]) is soon
    assert best([never, never | {"value": 0.97}])["value"] == 0.97
    assert steps_to(late) == 10 and steps_to(never) == math.inf
    with pytest.raises(ValueError, match="measure the section 'tuning'"):
        best([])


def add(kept, measure, value, **keys):
    kept.report.add(str(keys), measure, value, **keys)


def pipe_sgd_rows(step_of_ours: float = 0.1, reached: bool = True) -> Kept:
    kept = Kept(Report("pipe-sgd"))
    net, link = pipe_sgd.CASES[0]
    for seed in range(3):
        for width, codec in itertools.product((1, 2, 3), ("none", "8 bits")):
            last = 0.98 if reached or width == 1 else 0.9
            about = {"learning_rate": 0.1, "momentum": 0.5, "warmup": 0, "steps": [50, 100 + seed]}
            about |= {"accuracy": [0.9, last], "net": net, "width": width, "seed": seed}
            add(kept, "curve", last - 0.02 * (width - 1), compression=codec, **about)
        common = {"net": net, "link": link, "workers": 4, "turn": seed, "computing": 0.05}
        for method in pipe_sgd.METHODS:
            ours = method.width > 1
            add(
                kept,
                "step",
                step_of_ours if ours else 0.6,
                **common,
                method=method.name,
                aggregation=method.aggregation,
                compression=method.compression,
                width=method.width,
            )
        about = {"net": net, "link": link, "seed": seed, "steps": [3.0, 30.0]}
        add(kept, "asynchronous", 0.97, accuracy=[0.5, 0.98], staleness=[1, 0, 3], **about)
    for name, value in {**TERMS, "numbers": 80_202.0}.items():
        add(kept, "term", value, term=name, net=net, link=link)
    return kept


def test_pipe_sgd_is_compared_with_every_conventional_way():
    found = {f.case: f for f in pipe_sgd.gains(pipe_sgd_rows())}
    assert len(found) == len(pipe_sgd.BASELINES)
    server = found["convolutional network, 20mbit, against synchronous server"]
    assert server.cluster.value == pytest.approx(6)
    other = found["convolutional network, 20mbit, against asynchronous server"]
    assert other.cluster.value == pytest.approx(90 / 0.1 / (100 + 101 + 102))
    assert [f.cluster.value for f in pipe_sgd.widths(pipe_sgd_rows())] == pytest.approx([6, 1])
    [found] = pipe_sgd.lost(pipe_sgd_rows())
    assert found.cluster.value == pytest.approx(2)


def test_an_accuracy_that_is_never_reached_is_not_reproduced():
    found = pipe_sgd.gains(pipe_sgd_rows(reached=False))
    assert all(f.cluster.value == 0 and "never reach" in f.reason for f in found)


def test_the_page_of_pipe_sgd():
    text = "\n".join(lines(pipe_sgd.PAPER, pipe_sgd_rows()))
    assert "- **Reproduced in 4 of 5 cases.** Time to accuracy" in text
    assert "## Time to 97%: convolutional network, links of 20mbit" in text
    assert "| synchronous server | 600 ms | " in text
    assert "| convolutional, 20mbit | 1.50 | 2 |" in text
    assert "| latency | 1 ms |" in text
    assert "`terms-convolutional-20mbit`" in text and "not measured yet" in text


def gradiveq_rows() -> Kept:
    kept = Kept(Report("gradiveq"))
    for turn in range(3):
        trial = gradiveq.TRIALS[0]
        for workers, method in [(w, m) for w in gradiveq.WORKERS for m in trial.timed(w)]:
            ours = method.name == "GradiVeQ"
            about = {
                "net": trial.net,
                "workers": workers,
                "method": method.name,
                "turn": turn,
                "bytes": 1e5,
            }
            about |= {"computing": None if method.aggregation == "DDP" else 0.1}
            add(kept, "step", 0.2 if ours else 0.5, compressed=0.05 if ours else None, **about)
        for method in trial.replayed:
            about = {"net": trial.net, "method": method.name, "seed": turn}
            about |= {"steps": [100], "accuracy": [0.98]}
            add(kept, "curve", 0.98, **about)
    return kept


def test_gradiveq_is_compared_step_by_step_and_end_to_end():
    kept = gradiveq_rows()
    found = {f.case: f.cluster.value for f in gradiveq.faster(kept)}
    assert found["convolutional network, 4 workers, GradiVeQ, all steps"] == pytest.approx(4)
    assert found["convolutional network, 8 workers, GradiVeQ, compressed steps"] == pytest.approx(8)
    [found] = gradiveq.end_to_end(kept)
    assert found.cluster.value == pytest.approx(2.5)
    assert {f.cluster.value for f in gradiveq.lost(kept)} == {0}
    text = "\n".join(lines(gradiveq.PAPER, kept))
    assert "- **Reproduced in 2 of 4 cases.** Aggregation" in text
    assert "- **Exceeded.** Time to accuracy end to end" in text
    assert "| PowerSGD | 98 KiB | – | 500 ms | – |" in text


# ----------------------------------------------------------------------------- tiny runs, in a lab


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "sections", "measures"),
    [
        ("gradiveq", ["energy", "errors"], {"energy", "error"}),
        pytest.param(
            "pipe-sgd",
            [
                "tuning-convolutional",
                "accuracy-convolutional",
                "asynchronous-convolutional-200mbit",
            ],
            {"tuning", "curve", "asynchronous"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pipe-sgd",
            ["terms-convolutional-200mbit", "steps-convolutional-200mbit"],
            {"term", "step"},
            marks=pytest.mark.long,
        ),
        pytest.param("gradiveq", ["accuracy"], {"curve"}, marks=pytest.mark.long),
        pytest.param("gradiveq", ["timeline-residual"], {"span"}, marks=pytest.mark.long),
        pytest.param(
            "gradiveq", ["aggregation-4", "powersgd"], {"step", "curve"}, marks=pytest.mark.long
        ),
        pytest.param(
            "gradiveq",
            ["accuracy-residual", "aggregation-residual-4"],
            {"curve", "step"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_tiny_run_of_a_section(paper, sections, measures, data_folder: Path, tmp_path: Path):
    pytest.importorskip("torch")
    from benchmarks.evidence.command import paper_of
    from benchmarks.network import unavailable

    if measures & {"term", "step", "asynchronous"} and (reason := unavailable()):
        pytest.skip(reason)
    kept = Kept(Report(paper), smoke=True)
    for section in sections:
        pieces = paper_of(paper).sections[section].pieces
        for name, run in pieces.items():
            # One of many alike is enough.
            if name[:4] in ("seed", "turn") and name[5] != "0":
                continue
            found = Kept(Report(paper), smoke=True, known=kept.report.rows)
            run(found)
            kept.merge(found)
    assert measures <= {row["measure"] for row in kept.report.rows}
    kept.write(tmp_path / paper / f"{sections[-1]}.json")
    json.loads((tmp_path / paper / f"{sections[-1]}.json").read_text())
    options = [paper, "--smoke", "--page", "--pages", str(tmp_path), "--keep", str(tmp_path)]
    kept.pieces["whole"] = {"date": "2026-11-28"}
    kept.write(tmp_path / paper / f"{sections[-1]}.json")
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / f"{paper}.md").read_text().startswith("# Evidence: ")
