"""Smoke runs of the benchmarks of training with PyTorch, and their network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytestmark = pytest.mark.extras


@pytest.mark.long
def test_smoke_sized_run(tmp_path: Path) -> None:
    from benchmarks.pytorch import main

    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["--smoke", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["measure"] for row in rows} >= {"over_one_thread", "over_all_cores", "coded"}


def test_classes_of_made_images_are_as_frequent_and_told_by_no_pixel():
    from benchmarks import images

    training, held_out = images.made()
    assert (training.samples.shape, held_out.samples.shape) == ((8_000, 3_072), (2_000, 3_072))
    assert training.samples.dtype == np.uint8
    assert np.bincount(training.targets).min() > 700
    of_class = [training.samples[training.targets == c].mean(axis=0) for c in range(images.CLASSES)]
    assert np.std(of_class, axis=0).max() < 0.1 * training.samples.std()


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


def test_gradient_of_the_residual_network():
    from benchmarks import images, mnist

    training, _ = images.made()
    net = mnist.Net("residual")
    parameters = net.start()
    assert parameters.size == sum(int(np.prod(layer)) for layer in net.layers()) == 1_183_610
    batch = training.samples[:8], training.targets[:8]
    _, gradient = net.gradient(parameters, *batch)
    direction = gradient / np.linalg.norm(gradient)
    ahead, behind = (net.gradient(parameters + d * direction, *batch)[0] for d in (1e-3, -1e-3))
    assert (ahead - behind) / 2e-3 == pytest.approx(np.linalg.norm(gradient), rel=0.05)


def test_error_about_missing_images_names_the_variable(tmp_path: Path) -> None:
    from benchmarks import mnist

    with pytest.raises(FileNotFoundError, match="DASK_CODED_DATA"):
        mnist.load(tmp_path)
