"""Evidence of the papers on gradient codes: verdicts from rows, tiny runs of each section."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import datasets
from benchmarks.evidence import coded_reduce, gc_dc, rlnc
from benchmarks.evidence.command import main, paper_of
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.page import lines
from benchmarks.report import Report
from dask_coded.aggregation import Ring
from dask_coded.codes import Code
from dask_coded.simulation import TrainingSimulation, additive

needs_traces = pytest.mark.skipif(
    datasets.folder() is None, reason="needs the traces of real machines"
)


def gc_dc_rows(ours: float = 0.8) -> Kept:
    """Return rows in which GC takes 2 seconds and GC-SC about 1."""
    kept = Kept(Report("gc-dc"))
    seconds = {"GC": 2.0, "GC-SC": 1.0, "GC-DC": ours, "GC, fractional": 0.9}
    case = gc_dc.CASES["homogeneous"][0]
    for seed in range(5):
        for method, value in seconds.items():
            about = {"section": "homogeneous", "of": case.name, "method": method, "seed": seed}
            about |= {"steps": 1000, "gradients": 2e6, "placements": 0.0, "placed": 0}
            about |= {"fetched": 7e8, "memory": 0.25}
            if method == "GC-DC":
                about |= {"gradients": 1e6, "placements": 500.0, "placed": 9, "fetched": 3.5e9}
            value *= 1 + 0.01 * seed * (method == "GC-SC")
            kept.report.add(f"{method} {seed}", "step", value, **about)
    return kept


def test_gc_dc_is_compared_with_one_code_and_with_fixed_clusters():
    [found] = gc_dc.faster(gc_dc_rows(), "homogeneous", "GC")
    assert found.simulated.value == pytest.approx(2.5) and not found.reason
    [found] = gc_dc.faster(gc_dc_rows(), "homogeneous", "GC-SC")
    assert found.simulated.value == pytest.approx(1.275)
    assert gc_dc.faster(gc_dc_rows(), "recorded", "GC") == []


def test_the_reason_for_a_small_gain_is_the_memory_of_being_late():
    [found] = gc_dc.faster(gc_dc_rows(ours=1.0), "homogeneous", "GC-SC")
    assert found.reason.endswith("a memory of 0.25")
    text = "\n".join(lines(gc_dc.PAPER, gc_dc_rows(ours=1.0)))
    assert "- **Not reproduced, 3.0 / 3.0 points short, simulated only.** Time of a step" in text


def test_bytes_of_gc_dc_are_compared_with_and_without_the_data():
    found = [each.simulated.value for each in gc_dc.communication(gc_dc_rows())]
    assert found == pytest.approx([0.5, 0.50025, 4.5005 / 2.7])


def test_steps_that_a_difference_needs():
    theirs, ours = ([{"value": v, "steps": 1000} for v in values] for values in ([2, 3], [1, 2]))
    # Logarithms of 2 and 1.5: mean 0.549, standard deviation 0.203.
    assert gc_dc.apart(theirs, ours) == "527"
    assert gc_dc.apart(ours, ours) == "–"


# ------------------------------------------------------------------------------------ CodedReduce


def coded_reduce_rows() -> Kept:
    """Return rows of sweeps, of expected times and of their order."""
    kept = Kept(Report("coded-reduce"))

    def add(measure, value, **keys):
        kept.report.add(str(keys), measure, value, **keys)

    for seed in range(5):
        for setting in ("sweep-84", "sweep-156"):
            for times in coded_reduce.RATIOS:
                ways = {"ring": 0.1 * times, "gradient coding": 0.4, "CodedReduce": 0.05}
                for method, value in ways.items():
                    about = {"setting": setting, "times": times, "method": method, "seed": seed}
                    add("delayed", value, **about)
        for fan_in, value in ((4, 0.02), (10, 0.012), (84, 0.03)):
            about = {"workers": 84, "about": "messages dominate", "fan_in": fan_in, "depth": 2}
            about |= {"least": 0.011, "most": 0.013, "variance": 1e-8, "draws": 30, "seed": seed}
            if fan_in == 84:
                about |= {"least": 0.029, "most": 0.031}
            add("expected", value, **about)
        for workers in (72, 272, 1056):
            about = {"workers": workers, "seed": seed, "least": 0.01, "most": 0.02}
            add("order", 1e-3 * workers**0.48, method="CodedReduce", **about)
            add("order", 1e-3 * workers**1.02, method="gradient coding", **about)
    return kept


def test_coded_reduce_is_compared_for_every_delay():
    found = coded_reduce.faster(coded_reduce_rows(), "ring")
    assert len(found) == 2 * len(coded_reduce.RATIOS)
    values = {each.case: each.simulated.value for each in found}
    assert values["84 workers, delay 10"] == pytest.approx(20)
    assert values["156 workers, delay 0.1"] == pytest.approx(0.2)


def test_trees_outside_the_bounds_are_named():
    [found] = coded_reduce.within(coded_reduce_rows())
    assert found.simulated.value == pytest.approx(200 / 3)
    assert found.reason == "outside: (4, 2)"


def test_the_chosen_tree_is_compared_with_the_fastest():
    [found] = coded_reduce.best(coded_reduce_rows())
    # (4, 2) and (10, 2) have the same bounds, and the first one is chosen.
    assert found.case.endswith("(4, 2)") and found.reason == "the fastest is (10, 2)"
    assert found.simulated.value == pytest.approx(0.02 / 0.012)


def test_the_plot_of_coded_reduce(tmp_path):
    pytest.importorskip("matplotlib")
    coded_reduce.plot(tmp_path, coded_reduce_rows())
    assert (tmp_path / "coded-reduce-sweep.png").stat().st_size > 10_000


def test_the_page_of_coded_reduce():
    text = "\n".join(lines(coded_reduce.PAPER, coded_reduce_rows()))
    assert "as a power of N: at most 0.5" in text and "Simulated: 0.48." in text
    assert "**Exceeded, simulated only.** The same of gradient coding: 1" in text
    assert "| 10 | 1000.0 | 400.0 | **50.0** |" in text


def test_a_ring_waits_for_its_last_worker():
    setting = coded_reduce.Setting(
        6, 1e-2, coded_reduce.CodedReduce(), coded_reduce.Tree(), coded_reduce.GradientCoding(1)
    )
    delays = additive(6, 8, share=0.3, mean=0.05, seed=3)
    run = TrainingSimulation(Ring().plan(6), setting.costs, setting.nbytes, delays).run(8)
    assert run.ended.max() == pytest.approx(coded_reduce.ring(setting, delays).sum(), rel=0.02)


# ------------------------------------------------------------------------------------------- RLNC


def test_arrivals_that_are_not_innovative_are_counted():
    code = Code([[1.0, 0], [0, 1], [2, 0], [0, 0]])
    assert rlnc.arrivals(code, np.array([0, 2, 1, 3])) == 3
    assert rlnc.arrivals(code, np.array([0, 2, 3])) == 4


def test_workers_that_draw_alone_move_half_of_the_blocks_and_survive_less():
    kept = Kept(Report("rlnc"), smoke=True)
    rlnc.survival(kept, 0)
    alone, turn, best = kept.report.rows
    assert [row["way"] for row in (alone, turn, best)] == list(rlnc.WAYS)
    assert alone["value"] == pytest.approx(50, abs=10)
    assert best["value"] <= 53 and best["survived"][0] == 1
    assert alone["survived"][1] < best["survived"][1]


def test_bytes_are_counted_piece_by_piece():
    kept = Kept(Report("rlnc"))
    rlnc.counted(kept, 0)
    piece = 8 * rlnc.SAMPLES * rlnc.FEATURES / rlnc.K / 1e6
    counted = {(row["code"], row["part"]): row["value"] for row in kept.report.rows}
    dense, safe = "MDS, as many", "MDS, as safe"
    assert counted[dense, "encoding"] == pytest.approx(2 * piece * rlnc.K * (rlnc.N - rlnc.K))
    assert counted["RLNC", "encoding"] == pytest.approx(counted[dense, "encoding"] / 2)
    assert counted["RLNC", "encoding"] == pytest.approx(counted[safe, "encoding"])
    assert counted[dense, "repairs"] == pytest.approx(2 * piece * rlnc.K * 3)


@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_ours_minimises_what_scikit_learn_does(model):
    X, y = rlnc.data(80, 5, seed=0)
    ours, theirs = (
        rlnc.objective(model, X, y, each.fit(X, y).coef_[0]) for each in rlnc.models(model)
    )
    assert ours == pytest.approx(theirs, rel=1e-9)


def rlnc_rows() -> Kept:
    kept = Kept(Report("rlnc"))
    for seed in range(5):
        rlnc.counted(kept, seed)
        for code, encoding in (("RLNC", 5e7), ("MDS, as many", 1e8), ("MDS, as safe", 5e7)):
            kept.report.add(f"{code} {seed}", "encoded", encoding / 1e6, code=code, seed=seed)
            about = {"model": "svm", "code": code, "seed": seed}
            about |= {"rounds": 2e7, "churn": 3e7, "left": 3, "during": 2, "pieces": 10}
            kept.report.add(f"{code} {seed}", "churned", 1e-8 * (seed + 1), **about)
    return kept


def test_all_bytes_of_a_training_are_compared():
    found = {each.case: each for each in rlnc.everything(rlnc_rows())}
    assert found["svm, as many pieces"].cluster.value == pytest.approx(100 * 10 / 15)
    assert found["svm, as many losses survived"].cluster.value == pytest.approx(100)
    [found] = rlnc.halved(rlnc_rows())
    assert found.cluster.value == pytest.approx(50)
    [found] = rlnc.exact(rlnc_rows())
    assert found.cluster.value == pytest.approx(0.05)
    assert found.reason == "10 of 15 workers left during the fit"
    text = "\n".join(lines(rlnc.PAPER, rlnc_rows()))
    assert "| svm, MDS, as many | 100.0 | 20.0 | 30.0 | 5e-08 |" in text


# ------------------------------------------------------------------------------------- tiny runs


@pytest.mark.parametrize(
    ("paper", "section", "measure"),
    [
        ("gc-dc", "homogeneous", "step"),
        ("gc-dc", "heterogeneous", "step"),
        pytest.param("gc-dc", "recorded", "step", marks=needs_traces),
        pytest.param("gc-dc", "processes", "step_on_processes", marks=pytest.mark.long),
        ("coded-reduce", "expected", "expected"),
        ("coded-reduce", "order", "order"),
        ("coded-reduce", "sweep-84", "delayed"),
        ("coded-reduce", "sweep-156", "delayed"),
        ("coded-reduce", "sweep-24", "delayed"),
        ("coded-reduce", "sweep-24-large", "delayed"),
        pytest.param("coded-reduce", "processes", "on_processes", marks=pytest.mark.long),
        ("rlnc", "survival", "blocks"),
        ("rlnc", "counted", "counted"),
        pytest.param("rlnc", "encoding", "encoded", marks=pytest.mark.long),
        pytest.param("rlnc", "churn-logistic", "churned", marks=pytest.mark.long),
        pytest.param("rlnc", "churn-svm", "churned", marks=pytest.mark.long),
    ],
)
def test_tiny_run_of_a_section(paper, section, measure, tmp_path: Path):
    from benchmarks.network import unavailable

    if (section in ("processes", "encoding") or "churn" in section) and (reason := unavailable()):
        pytest.skip(reason)
    of = paper_of(paper)
    kept = Kept(Report(paper), smoke=True)
    # One piece of many alike is enough.
    name, run = next(iter(of.sections[section].pieces.items()))
    run(kept)
    assert {row["measure"] for row in kept.report.rows} == {measure}
    kept.pieces[name] = {"date": "2026-11-28"}
    kept.write(tmp_path / paper / f"{section}.json")
    folders = ["--page", "--pages", str(tmp_path), "--keep", str(tmp_path)]
    result = CliRunner().invoke(main, [paper, "--smoke", *folders])
    assert result.exit_code == 0, result.output
    assert (tmp_path / f"{paper}.md").read_text().startswith("# Evidence: ")
