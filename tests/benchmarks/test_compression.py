"""Smoke runs of the benchmarks of training with PyTorch, and their network."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytestmark = pytest.mark.extras


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "measures", "limited"),
    [
        (
            "compression",
            {"energy_kept", "sum_relative_error", "steps_to_accuracy_over_none"},
            {"bytes_over_none", "aggregation_over_none", "time_to_accuracy_over_none"},
        ),
        (
            "pipeline",
            {"accuracy", "accuracy_difference"},
            {"step_over_longer", "step_over_synchronous", "step_over_server"},
        ),
        ("pytorch", {"over_one_thread", "over_all_cores", "coded"}, set()),
        ("ddp", set(), {"step", "step_over_ddp"}),
    ],
)
def test_smoke_sized_run(
    name: str, measures: set[str], limited: set[str], data_folder: Path, tmp_path: Path
) -> None:
    from benchmarks.network import unavailable

    main = importlib.import_module(f"benchmarks.{name}").main
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    found = {row["measure"] for row in rows}
    assert measures <= found
    if unavailable() is None:
        assert limited <= found
    for row in rows:
        if row["measure"] == "equals_replay":
            assert row["met"]


def test_gradient_of_the_loss_is_summed_over_the_samples(data_folder: Path) -> None:
    from benchmarks import mnist

    training, held_out = mnist.load(data_folder)
    assert (len(training.targets), len(held_out.targets)) == (8_000, 2_000)
    parameters = mnist.start()
    assert parameters.size == sum(int(np.prod(layer)) for layer in mnist.layers())
    samples, targets = training.samples[:6], training.targets[:6]
    loss, gradient = mnist.gradient(parameters, samples, targets)
    parts = [mnist.gradient(parameters, samples[i : i + 3], targets[i : i + 3]) for i in (0, 3)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(sum(part[1] for part in parts), gradient, atol=1e-4)
    direction = gradient / np.linalg.norm(gradient)
    ahead, _ = mnist.gradient(parameters + 1e-3 * direction, samples, targets)
    behind, _ = mnist.gradient(parameters - 1e-3 * direction, samples, targets)
    assert (ahead - behind) / 2e-3 == pytest.approx(np.linalg.norm(gradient), rel=0.02)


def test_error_about_missing_images_names_the_variable(tmp_path: Path) -> None:
    from benchmarks import mnist

    with pytest.raises(FileNotFoundError, match="DASK_CODED_DATA"):
        mnist.load(tmp_path)
