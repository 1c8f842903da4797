"""Smoke runs of the benchmarks of training with PyTorch, and their network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytestmark = pytest.mark.extras


@pytest.mark.slow
def test_smoke_sized_run(tmp_path: Path) -> None:
    from benchmarks.pytorch import main

    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["measure"] for row in rows} >= {"over_one_thread", "over_all_cores", "coded"}


@pytest.mark.parametrize(("kind", "weights"), [("convolutional", 80_202), ("wide", 1_333_770)])
def test_gradient_of_the_loss_is_summed_over_the_samples(kind, weights, data_folder: Path) -> None:
    from benchmarks import mnist

    training, held_out = mnist.load(data_folder)
    assert (len(training.targets), len(held_out.targets)) == (8_000, 2_000)
    net = mnist.Net(kind)
    parameters = net.start()
    assert parameters.size == sum(int(np.prod(layer)) for layer in net.layers()) == weights
    samples, targets = training.samples[:6], training.targets[:6]
    loss, gradient = net.gradient(parameters, samples, targets)
    parts = [net.gradient(parameters, samples[i : i + 3], targets[i : i + 3]) for i in (0, 3)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(sum(part[1] for part in parts), gradient, atol=1e-4)
    direction = gradient / np.linalg.norm(gradient)
    ahead, _ = net.gradient(parameters + 1e-3 * direction, samples, targets)
    behind, _ = net.gradient(parameters - 1e-3 * direction, samples, targets)
    assert (ahead - behind) / 2e-3 == pytest.approx(np.linalg.norm(gradient), rel=0.02)


def test_error_about_missing_images_names_the_variable(tmp_path: Path) -> None:
    from benchmarks import mnist

    with pytest.raises(FileNotFoundError, match="DASK_CODED_DATA"):
        mnist.load(tmp_path)
