"""The commands on matrices, on a cluster in this process."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json

import numpy as np
import pytest
import scipy.sparse
from click.testing import CliRunner
from distributed import Client

import dask_coded as coded
from dask_coded import cli
from dask_coded.cli import steps

MATRIX = np.random.default_rng(0).standard_normal((60, 8)) * np.arange(1, 9)


@pytest.fixture(autouse=True)
def here(client, monkeypatch):
    """Use a cluster that is there already; a command's connection to it ends with the command."""

    @contextlib.contextmanager
    def local_client(workers):
        with Client(client.scheduler.address, set_as_default=False) as another:
            yield another

    monkeypatch.setattr(steps, "local_client", local_client)


@pytest.fixture
def matrix(tmp_path):
    np.save(tmp_path / "A.npy", MATRIX)
    return tmp_path / "A.npy"


@pytest.fixture
def samples(tmp_path):
    """Samples of two classes in the format of svmlight."""
    targets = np.where(MATRIX @ np.ones(8) > 0, 1, -1)
    rows = [
        " ".join([str(target), *(f"{i}:{value!r}" for i, value in enumerate(row.tolist(), 1))])
        for target, row in zip(targets.tolist(), MATRIX)
    ]
    path = tmp_path / "samples.txt"
    path.write_text("\n".join(rows))
    return path, targets


def run(*args, **given):
    return CliRunner().invoke(cli.coded, [str(arg) for arg in args], **given)


def succeeded(result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


# -- svd ---------------------------------------------------------------------------------------


def test_the_largest_singular_values(matrix, tmp_path):
    output = tmp_path / "found.npz"
    text = succeeded(run("svd", matrix, "-k", 3, "--seed", 0, "--output", output))
    expected = np.linalg.svd(MATRIX, compute_uv=False)[:3]
    assert [float(line.split()[-1]) for line in text.splitlines()[1:4]] == pytest.approx(expected)
    assert text.splitlines()[4].startswith("The last pass changed them by up to ")
    with np.load(output) as found:
        product = (found["U"] * found["s"]) @ found["Vh"]
    left, values, right = np.linalg.svd(MATRIX, full_matrices=False)
    np.testing.assert_allclose(product, (left[:, :3] * values[:3]) @ right[:3], atol=1e-8)
    found = json.loads(succeeded(run("svd", matrix, "-k", 2, "--json")))
    assert 0 <= found["last_change"] < expected[0]
    assert found["singular_values"] == pytest.approx(expected[:2])


@pytest.mark.extras
def test_a_matrix_is_encoded_once_and_used_again(matrix, tmp_path, client):
    pytest.importorskip("zarr")
    storage = tmp_path / "kept"
    text = succeeded(run("encode", matrix, storage, "--transpose", "--redundancy", 1))
    assert text.startswith(f"{storage}: 60 x 8, float64, MDS(n=")
    C = coded.open(storage, client)
    np.testing.assert_allclose(client.compute(C @ np.ones(8)).result(), MATRIX @ np.ones(8))
    found = json.loads(succeeded(run("svd", storage, "-k", 1, "--json")))
    assert found["singular_values"] == pytest.approx([np.linalg.norm(MATRIX, 2)])
    again = run("encode", matrix, storage)
    assert again.exit_code == 2 and "is not empty" in again.stderr
    other = tmp_path / "without"
    succeeded(run("encode", matrix, other))
    half = run("svd", other)
    assert half.exit_code == 2 and "encode it with --transpose." in half.stderr
    twice = run("svd", storage, "--code", "mds")
    assert twice.exit_code == 2 and "is coded already" in twice.stderr


def test_entries_of_narrow_integers_are_added_up_in_full(tmp_path):
    twice = scipy.sparse.coo_array(([100, 100], ([0, 0], [0, 0])), shape=(3, 3), dtype=np.int8)
    scipy.sparse.save_npz(tmp_path / "A.npz", twice)
    found = json.loads(succeeded(run("svd", tmp_path / "A.npz", "-k", 1, "--json")))
    assert found["singular_values"] == pytest.approx([200])


def test_a_matrix_of_zeros_is_one(tmp_path):
    scipy.sparse.save_npz(tmp_path / "A.npz", scipy.sparse.csr_array((6, 4)))
    found = json.loads(succeeded(run("svd", tmp_path / "A.npz", "-k", 1, "--json")))
    assert found["singular_values"] == [0]


def test_a_result_that_cannot_be_written_is_one_line_and_shown_all_the_same(
    matrix, tmp_path, monkeypatch
):
    def full(*args, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    output = tmp_path / "found.npz"
    output.write_bytes(b"before")
    result = run("svd", matrix, "-k", 1, "--output", output)
    assert result.exit_code == 1 and "singular value" in result.stdout
    assert result.stderr.splitlines()[-1] == f"Error: --output {output}: No space left on device."
    assert output.read_bytes() == b"before" and set(tmp_path.iterdir()) == {matrix, output}


# -- fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("standard_input", [False, True])
def test_a_classifier_of_svmlight_samples(samples, tmp_path, standard_input):
    joblib = pytest.importorskip("joblib")
    path, targets = samples
    output = tmp_path / "model.joblib"
    given = {"input": path.read_bytes()} if standard_input else {}
    source = "-" if standard_input else path
    options = ["-p", "C=10", "-p", "solver=auto", "--output", output]
    text = succeeded(run("fit", source, *options, **given))
    assert text.startswith("LogisticRegression(C=10): 60 samples of 8 features\n")
    model = joblib.load(output)
    expected = coded.linear_model.LogisticRegression(C=10).fit(MATRIX, targets)
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-3)
    assert f"score {model.score(MATRIX, targets):.4f}" in text


def test_a_regressor_of_arrays(tmp_path):
    pytest.importorskip("sklearn")
    scipy.sparse.save_npz(tmp_path / "X.npz", scipy.sparse.csr_array(MATRIX))
    np.save(tmp_path / "y.npy", MATRIX @ np.arange(8.0))
    options = ["--targets", tmp_path / "y.npy", "--model", "ridge", "-p", "alpha=0.5", "--json"]
    found = json.loads(succeeded(run("fit", tmp_path / "X.npz", *options)))
    assert found["model"] == "Ridge(alpha=0.5)"
    assert (found["samples"], found["features"]) == (60, 8)
    assert found["score"] == pytest.approx(1, abs=1e-3)


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["fit", "A.npy"], "A.npy has no targets: give a NumPy array of them by --targets."),
        (["fit", "A.npy", "--targets", "no.npy"], "no.npy: expected a NumPy array (.npy)"),
        (["fit", "A.npy", "--targets", "A.npy"], "1d array"),
        (["fit", "words.txt"], "expected samples in the format of svmlight"),
        (["fit", "words.txt", "--targets", "A.npy"], "only .npy and .npz files need --targets"),
        (["fit", "A.npy", "-p", "C"], "--parameter C: expected NAME=VALUE, such as C=0.1."),
        (["fit", "A.npy", "-p", "c=1"], "Invalid parameter 'c' for estimator"),
        (["fit", "A.npy", "--output", "model.txt"], "expected a name that ends in .joblib."),
        (["svd", "A.npy", "--output", "no/USV.npz"], "expected a file in a folder that exists."),
        (["svd", "A.npy", "-k", "9"], "Argument 'k' must be at most 8"),
        (["svd", "no.npy"], "no.npy: expected a NumPy array (.npy)"),
        (["svd", "A.npy", "--redundancy", "99"], "redundancy"),
        (["svd", "A.npy", "--workers", "2", "--scheduler", "tcp://a:1"], "give only one."),
    ],
)
def test_one_line_and_exit_code_2(matrix, tmp_path, monkeypatch, command, expected):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("no samples\n")
    result = run(*command)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


# -- shells ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell):
    result = run(prog_name="dask-coded", env={"_DASK_CODED_COMPLETE": f"{shell}_source"})
    assert "_DASK_CODED_COMPLETE" in succeeded(result)


@pytest.mark.parametrize("kind", ["gz", "bz2", "damaged.gz"])
def test_damaged_samples_are_named(samples, tmp_path, kind):
    packed = (bz2 if kind == "bz2" else gzip).compress(samples[0].read_bytes())
    file = tmp_path / f"samples.txt.{kind.rpartition('.')[2]}"
    half = len(packed) // 2
    file.write_bytes(packed[:half] + (b"\0" * 200 + packed[half:] if "damaged" in kind else b""))
    result = run("fit", file)
    assert result.exit_code == 2, result.output
    assert f"{file}: expected samples in the format of svmlight" in result.output


def test_damaged_archives_are_named_in_one_line(tmp_path):
    file = tmp_path / "A.npz"
    scipy.sparse.save_npz(file, scipy.sparse.random_array((60, 60), density=0.5, rng=0).tocsr())
    whole = bytearray(file.read_bytes())
    whole[20:60] = bytes(40)
    file.write_bytes(whole)
    result = run("svd", file)
    assert result.exit_code == 2
    assert len(result.output) < 500


def test_targets_in_an_archive_are_refused(matrix, tmp_path):
    np.savez(tmp_path / "targets.npz", y=np.ones(60))
    result = run("fit", matrix, "--targets", tmp_path / "targets.npz")
    assert result.exit_code == 2
    assert "expected a NumPy array (.npy): it holds a NpzFile" in result.output


def test_indices_outside_of_a_matrix_are_refused(tmp_path):
    file = tmp_path / "A.npz"
    A = scipy.sparse.csr_array((np.ones(3), [0, 1, 9], [0, 1, 2, 3]), shape=(3, 3))
    scipy.sparse.save_npz(file, A)
    result = run("svd", file)
    assert result.exit_code == 2
    assert "expected a NumPy array (.npy) or a SciPy sparse matrix (.npz)" in result.output
