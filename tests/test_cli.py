"""The command line: output, errors and exit codes."""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import click
import dask
import numpy as np
import pytest
import scipy.sparse
from click.testing import CliRunner
from distributed.comm import CommClosedError

from dask_coded import cli, demo, display, local
from dask_coded.bench import Comparison, Way
from dask_coded.cli import commands, printing, steps
from dask_coded.codes import MDS, Repetition
from dask_coded.graph import ConvergenceError, read_graph
from dask_coded.loop import Progress

# The package has a function of the module's name.
pagerank_module = importlib.import_module("dask_coded.graph.pagerank")

VOTES = "# voter candidate\n30 1412\n30 3352\n3352 1412\n"
CITIES = "Łódź Кёльн\nКёльн 東京\n東京 Łódź\n"


@pytest.fixture
def votes(tmp_path):
    path = tmp_path / "votes.txt"
    path.write_text(VOTES)
    return path


def run(*args, charset="utf-8", **given):
    return CliRunner(charset=charset).invoke(cli.coded, [str(arg) for arg in args], **given)


def complaint(result) -> str:
    """Return the last line on standard error; check that no traceback or usage is above it."""
    assert "Traceback" not in result.output
    assert "Usage" not in result.output
    return result.stderr.splitlines()[-1]


class FakeClient:
    """The part of a client that the command uses."""

    def __init__(self, workers):
        self.workers = workers

    def nthreads(self):
        return dict.fromkeys(range(self.workers), 1)


@pytest.fixture
def here(monkeypatch):
    """Run `pagerank` in this process and record its arguments."""
    seen = []

    @contextlib.contextmanager
    def local_client(workers):
        yield FakeClient(workers)

    def pagerank(graph, *, damping, tol, max_iter, code, client, callback):
        seen.append({"graph": graph, "code": code, "workers": client.workers})
        matrix, dangling = pagerank_module.transition_matrix(graph.adjacency)
        ranks = pagerank_module.pagerank_rounds(
            matrix, dangling, damping=damping, tol=tol, max_iter=max_iter
        )
        callback(Progress(ranks.rounds, ranks.residual, seconds=0.012, workers=3))
        return dict(zip(graph.nodes.tolist(), ranks.scores.tolist()))

    monkeypatch.setattr(steps, "local_client", local_client)
    monkeypatch.setattr(commands, "pagerank", pagerank)
    return seen


# -- output ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_prints_the_top_nodes_and_a_summary(votes):
    result = run("pagerank", votes, "--top", 2)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["1412", "3352"]
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Done. Round ")
    assert "12.0 ms per round, 3 workers used" in last


@pytest.mark.usefixtures("here")
def test_writes_all_scores_highest_first(votes, tmp_path):
    output = tmp_path / "ranks.csv"
    result = run("pagerank", votes, "--top", 0, "--output", output)
    assert (result.exit_code, result.stdout) == (0, "")
    header, *rows = csv.reader(output.read_text().splitlines())
    assert header == ["node", "score"]
    assert [node for node, _ in rows] == ["1412", "3352", "30"]
    scores = [float(score) for _, score in rows]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1, abs=1e-12)


@pytest.mark.usefixtures("here")
def test_zero_tolerance_takes_exactly_max_iter_rounds(votes):
    result = run("pagerank", votes, "--tol", 0, "--max-iter", 3)
    assert result.exit_code == 0
    assert "Done. Round 3:" in result.stderr


def test_undirected_takes_edges_both_ways(here, votes):
    assert run("pagerank", votes, "--undirected").exit_code == 0
    assert here[0]["graph"].adjacency.nnz == 2 * read_graph(votes).adjacency.nnz


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], None),
        (["--code", "mds"], "mds"),
        (["--code", "mds", "--redundancy", "2"], MDS(8, 6)),
        (["--code", "repetition", "--redundancy", "1"], Repetition(8, 2)),
        (["--redundancy", "2"], Repetition(8, 3)),
        (["--redundancy", "0"], Repetition(8, 1)),
    ],
)
def test_code_and_redundancy(here, votes, options, code):
    assert run("pagerank", votes, "--workers", 8, *options).exit_code == 0
    assert here[0]["workers"] == 8
    assert here[0]["code"] == code


def test_one_worker_on_purpose_is_no_warning(here, votes):
    assert run("pagerank", votes, "--workers", 1).exit_code == 0
    assert here[0]["code"] == Repetition(1, 1)


def test_there_are_at_least_two_workers(here, votes, monkeypatch):
    monkeypatch.setattr(steps, "CPU_COUNT", 1)
    run("pagerank", votes)
    monkeypatch.setattr(steps, "CPU_COUNT", 64)
    run("pagerank", votes)
    assert [call["workers"] for call in here] == [2, 8]


@pytest.mark.parametrize("charset", ["ascii", "cp1252", "utf-8"])
@pytest.mark.usefixtures("here")
def test_names_that_standard_output_lacks_become_escapes_there_only(tmp_path, charset):
    cities, output = tmp_path / "Städte.txt", tmp_path / "ränge.csv"
    cities.write_text(CITIES, encoding="utf-8")
    result = run("pagerank", cities, "--output", output, charset=charset)
    assert result.exit_code == 0, result.output
    shown = [line.split()[0] for line in result.stdout_bytes.decode(charset).splitlines()]
    names = ["Łódź", "Кёльн", "東京"]
    assert shown == [name.encode(charset, "backslashreplace").decode(charset) for name in names]
    rows = csv.reader(output.read_text(encoding="utf-8").splitlines())
    assert [node for node, _ in rows] == ["node", *names]


@pytest.mark.usefixtures("here")
def test_scores_are_written_before_anything_is_shown(votes, tmp_path, monkeypatch):
    def fail(*args):
        raise BrokenPipeError

    monkeypatch.setattr(printing.Printer, "table", fail)
    monkeypatch.setattr(printing.Printer, "summary", fail)
    output = tmp_path / "ranks.csv"
    assert run("pagerank", votes, "--output", output).exit_code == 1
    assert len(output.read_text().splitlines()) == 4


@pytest.mark.usefixtures("here")
def test_standard_input_and_output(votes):
    result = run("pagerank", "-", "--output", "-", input=VOTES)
    assert result.exit_code == 0
    header, *rows = csv.reader(result.stdout.splitlines())
    assert header == ["node", "score"]
    assert [node for node, _ in rows] == ["1412", "3352", "30"]
    assert "Reading standard input" in result.stderr
    result = run("pagerank", "-", input="1 2\n3\n")
    assert result.exit_code == 2
    assert "line 2 has 1" in complaint(result)


@pytest.mark.usefixtures("here")
def test_a_file_that_may_not_be_written_is_refused_before_anything_is_computed(
    votes, tmp_path, monkeypatch
):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    result = run("pagerank", votes, "--output", tmp_path / "ranks.csv")
    assert result.exit_code == 2
    assert "you may not write there" in result.output


def test_scores_that_cannot_be_written_leave_the_earlier_file_alone(tmp_path, monkeypatch):
    def full(ranking, file):
        file.write(b"node,")
        raise OSError(28, "No space left on device")

    output = tmp_path / "ranks.csv"
    output.write_text("earlier")
    monkeypatch.setattr(steps, "writer_for", lambda *args: full)
    with pytest.raises(click.ClickException, match=r"ranks\.csv: No space left on device\."):
        steps.writer(output)([("a", 1.0)])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_pipe_is_written_to_and_a_link_followed(tmp_path):
    pipe, link, file = (tmp_path / name for name in ("pipe", "link.csv", "file.csv"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        steps.writer(path)([("a", 1.0)])
    assert os.read(reader, 100).decode() == file.read_text() == "node,score\na,1.0\n"
    os.close(reader)
    assert link.is_symlink() and pipe.is_fifo()


def test_a_cluster_that_ends_while_it_is_checked_is_exit_code_2(monkeypatch):
    class Ending(FakeClient):
        def sync(self, *args, **kwargs):
            raise CommClosedError("in <TCP (closed)>: Stream is closed")

    monkeypatch.setattr(commands, "connected", lambda *args: contextlib.nullcontext(Ending(2)))
    result = run("check", "tcp://127.0.0.1:8786")
    assert result.exit_code == 2
    assert complaint(result) == (
        "Error: The cluster at tcp://127.0.0.1:8786 cannot be checked, see whether its scheduler "
        "still runs: CommClosedError: in <TCP (closed)>: Stream is closed"
    )


@pytest.mark.usefixtures("here")
def test_the_ending_of_the_output_is_its_format(votes, tmp_path):
    for ending in ("json", "tsv"):
        assert run("pagerank", votes, "--output", tmp_path / f"ranks.{ending}").exit_code == 0
    records = json.loads((tmp_path / "ranks.json").read_text())
    assert [record["node"] for record in records] == [1412, 3352, 30]
    lines = (tmp_path / "ranks.tsv").read_text().splitlines()
    assert lines[0] == "node\tscore"
    assert [line.split("\t")[0] for line in lines[1:]] == ["1412", "3352", "30"]


@pytest.mark.usefixtures("here")
def test_a_format_by_option_and_a_packed_file(votes, tmp_path):
    result = run("pagerank", votes, "--output", "-", "--format", "json")
    assert [record["node"] for record in json.loads(result.stdout)] == [1412, 3352, 30]
    for name, options in (("ranks.csv.gz", []), ("ranks.GZ", ["--format", "csv"])):
        assert run("pagerank", votes, "--output", tmp_path / name, *options).exit_code == 0
        with gzip.open(tmp_path / name, "rt") as file:
            assert file.readline() == "node,score\n"
    result = run("pagerank", votes, "--format", "json")
    assert (result.exit_code, complaint(result)) == (
        2,
        "Error: --format needs --output, which '-' sends to standard output.",
    )


def test_parquet_without_pyarrow_is_refused_before_the_work(here, votes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("pagerank", votes, "--output", tmp_path / "ranks.parquet")
    assert result.exit_code == 2
    assert complaint(result).endswith(
        "ranks.parquet: this format needs pyarrow: pip install pyarrow, or write a .csv."
    )
    assert not here


def test_output_is_plain_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert display.terminal() is None


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--damping", "1.5"], "Error: Invalid value for '--damping': 1.5 is not in the range"),
        (["--damping", "much"], "Error: Invalid value for '--damping': 'much' is not"),
        (["--tol", "-1"], "Error: Invalid value for '--tol'"),
        (["--max-iter", "0"], "Error: Invalid value for '--max-iter'"),
        (["--workers", "0"], "Error: Invalid value for '--workers'"),
        (["--redundancy", "-1"], "Error: Invalid value for '--redundancy'"),
        (["--code", "fountain"], "Error: Invalid value for '--code': 'fountain' is not one of"),
        (["--workers", "2", "--redundancy", "2"], "Error: --redundancy 2 needs at least 3 workers"),
        (
            ["--workers", "4", "--code", "random", "--redundancy", "2"],
            "Error: Argument 'redundancy' must be a whole number from 0 to 1 with 4 workers",
        ),
        (["--workers", "2", "--scheduler", "tcp://a:1"], "Error: --workers starts a cluster and"),
        (["--output", "/no/such/folder/ranks.csv"], "Error: --output /no/such/folder/ranks.csv: "),
        (
            ["--output", "ranks.xlsx"],
            "Error: --output ranks.xlsx: expected a name that ends in .csv, .tsv, .txt, .json or "
            ".parquet, not in '.xlsx'.",
        ),
        (["--tol", "nan"], "Error: Argument 'tol' must be 0 or a positive number, it is nan."),
    ],
)
@pytest.mark.usefixtures("here")
def test_bad_options_are_one_line_and_exit_code_2(votes, options, expected):
    result = run("pagerank", votes, *options)
    assert result.exit_code == 2
    assert complaint(result).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "expected one edge a line, the file has none."),
        (
            "1 2\n3\n",
            "expected 2 columns as in the first line, line 2 has 1: `delimiter=` (on the command "
            "line --delimiter) says what separates columns.",
        ),
        ("1 2 -4\n", "expected weights that are finite and not negative, edge 1 -> 2 has -4.0."),
    ],
)
@pytest.mark.usefixtures("here")
def test_bad_files_are_one_line_and_exit_code_2(votes, content, expected):
    votes.write_text(content)
    result = run("pagerank", votes)
    assert result.exit_code == 2
    assert complaint(result) == f"Error: {votes}: {expected}"


@pytest.mark.parametrize(
    ("content", "options", "pairs"),
    [
        ("ada cy 0,5\n", ["--delimiter", " "], [("ada", "cy")]),
        ("a b\tc\n", ["--delimiter", "\\t"], [("a b", "c")]),
        ("#a %b\n", ["--comments", ""], [("#a", "%b")]),
        ("// x y\n#a b\n", ["--comments", "// %"], [("#a", "b")]),
        ("source,target\na,b\n", ["--no-header"], [("a", "b"), ("source", "target")]),
        ("1,2\n3,4\n", ["--header"], [(3, 4)]),
    ],
)
def test_options_say_how_an_edge_list_is_written(here, votes, content, options, pairs):
    votes.write_text(content)
    result = run("pagerank", votes, *options)
    assert result.exit_code == 0, result.output
    graph = here[0]["graph"]
    assert set(graph.nodes) == {name for pair in pairs for name in pair}
    assert graph.adjacency.nnz == len(pairs)


@pytest.mark.usefixtures("here")
def test_an_option_for_edge_lists_that_is_wrong_is_exit_code_2(votes):
    result = run("pagerank", votes, "--delimiter", "::")
    assert result.exit_code == 2
    assert complaint(result).startswith("Error: Argument 'delimiter' must be one character")


@pytest.mark.usefixtures("here")
def test_names_cannot_control_a_terminal(votes, tmp_path, monkeypatch):
    votes.write_text("a\x1b[2J\tb\u202e\nb\u202e\t=cmd\n")
    output = tmp_path / "ranks.csv"
    result = run("pagerank", votes, "--output", output)
    assert result.exit_code == 0, result.output
    assert not {"\x1b", "\u202e"} & set(result.output)
    assert "a\\x1b[2J" in result.stdout
    with output.open(encoding="utf-8", newline="") as file:
        assert {row[0] for row in csv.reader(file)} == {"node", "a\x1b[2J", "b\u202e", "=cmd"}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
def test_an_archive_with_indices_out_of_range_is_exit_code_2(tmp_path, layout):
    matrix = scipy.sparse.csr_array(np.eye(3)).asformat(layout)
    scipy.sparse.save_npz(tmp_path / "good.npz", matrix)
    with np.load(tmp_path / "good.npz") as good:
        arrays = dict(good)
    name = "indices" if "indices" in arrays else "coords" if "coords" in arrays else "row"
    arrays[name].flat[0] = -7
    np.savez(tmp_path / "bad.npz", **arrays)
    result = run("pagerank", tmp_path / "bad.npz")
    assert result.exit_code == 2
    assert complaint(result).startswith(f"Error: {tmp_path / 'bad.npz'}: ")


@pytest.mark.usefixtures("here")
def test_files_that_memory_does_not_hold_are_exit_code_2(tmp_path):
    path = tmp_path / "g.mtx"
    path.write_text(
        "%%MatrixMarket matrix coordinate real general\n1000000000000 1000000000000 0\n"
    )
    for file in (path, "/dev/zero"):
        result = run("pagerank", file)
        assert result.exit_code == 2
        complaint(result)


def test_a_missing_file_is_exit_code_2(tmp_path):
    result = run("pagerank", tmp_path / "absent.txt")
    assert result.exit_code == 2
    assert complaint(result).startswith("Error: expected a graph file, ")


@pytest.mark.parametrize(("args", "expected"), [(["pagerank"], "FILE"), (["rank"], "rank")])
def test_wrong_usage_is_one_line_and_exit_code_2(args, expected):
    result = run(*args)
    assert result.exit_code == 2
    assert expected in complaint(result)


def test_an_unreachable_scheduler_is_exit_code_2(votes, monkeypatch):
    monkeypatch.setattr(steps, "_CONNECT_SECONDS", 0.05)
    result = run("pagerank", votes, "--scheduler", "tcp://127.0.0.1:1")
    assert result.exit_code == 2
    assert complaint(result).startswith("Error: No scheduler answered at tcp://127.0.0.1:1 within")


def test_the_address_of_a_dashboard_is_exit_code_2(votes, monkeypatch):
    monkeypatch.setattr(steps, "_CONNECT_SECONDS", 0.5)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"tcp://127.0.0.1:{server.server_port}"
            result = run("pagerank", votes, "--scheduler", address)
        finally:
            server.shutdown()
            serving.join()
    assert result.exit_code == 2
    assert complaint(result).startswith(f"Error: No scheduler answered at {address} within")


def test_a_protocol_that_dask_does_not_know_is_exit_code_2():
    result = run("check", "gateway://example.org:8786")
    assert result.exit_code == 2
    assert "unknown address scheme 'gateway'" in complaint(result)


@pytest.mark.parametrize("address", ["nonsense", "tcp://10.0.0.1", "10.0.0.1:port"])
def test_what_is_no_address_is_exit_code_2(votes, address):
    result = run("pagerank", votes, "--scheduler", address)
    assert result.exit_code == 2
    assert complaint(result).startswith("Error: Expected the address of a scheduler")


def test_an_address_that_needs_certificates_is_exit_code_2(votes):
    result = run("pagerank", votes, "--scheduler", "tls://127.0.0.1:1")
    assert result.exit_code == 2
    assert complaint(result).startswith("Error: No connection to tls://127.0.0.1:1 is possible: ")


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_no_convergence_is_exit_code_1(votes):
    result = run("pagerank", votes, "--max-iter", 1)
    assert result.exit_code == 1
    assert complaint(result).startswith("Error: PageRank did not reach tol=1e-10")


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ConvergenceError("too slow"), 1, "Error: too slow"),
        (RuntimeError("all lost\nhere is where"), 1, "Error: RuntimeError: all lost"),
        (np.linalg.LinAlgError("singular"), 1, "Error: LinAlgError: singular"),
        (OSError(), 1, "Error: OSError: "),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
@pytest.mark.usefixtures("here")
def test_failures_are_one_line(votes, monkeypatch, error, code, expected):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(commands, "pagerank", fail)
    result = run("pagerank", votes)
    assert result.exit_code == code
    assert complaint(result) == expected


# -- the demo's parts --------------------------------------------------------------------------

needs_stopping = pytest.mark.skipif(
    not hasattr(signal, "SIGSTOP"), reason="this system cannot stop processes"
)


@needs_stopping
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_slowed_processes_run_again_afterwards(monkeypatch, error):
    sent = []
    stopped = threading.Event()

    def kill(pid, number):
        sent.append((pid, number))
        if number == signal.SIGSTOP:
            stopped.set()
        if pid == 2:
            raise ProcessLookupError

    monkeypatch.setattr(demo.os, "kill", kill)
    try:
        with demo.slow_down([1, 2, 3], factor=5, period=1e-3):
            assert stopped.wait(60)
            if error:
                raise error
    except KeyboardInterrupt:
        pass
    assert sent[-3:] == [(1, signal.SIGCONT), (2, signal.SIGCONT), (3, signal.SIGCONT)]
    assert not [t for t in threading.enumerate() if t.name == "slow-down"]


def test_plain_and_coded_rounds_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plain = demo.Panel("plain", [demo.Bar("a", 0.0, 0.3, 5), demo.Bar("b", 0.0, 0.1, 5)], [0.4])
    bars = [demo.Bar("a", 0.0, 0.1, 2, 0.1), demo.Bar("b", 0.0, 0.1, 8, 0.5)]
    coded = demo.Panel("coded", bars, [0.1])
    demo._draw([plain, coded], ["a", "b", "c"], ["a"], tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_one_clear_error(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / ("x" * 300)
    panel = demo.Panel("plain", [demo.Bar("a", 0.0, 0.3, 5)], [0.4])
    with pytest.raises(click.ClickException, match="x: File name too long"):
        demo._draw([panel, panel], ["a"], [], path)


def test_without_matplotlib_the_demo_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    demo._draw([], [], [], tmp_path / "rounds.png")
    assert "dask-coded[complete]" in capsys.readouterr().out


def test_the_loop_of_the_demo_times_each_round():
    class Operator:
        rounds = iter("abc")

        def __matmul__(self, x):
            self.last_round = SimpleNamespace(timeline=[next(self.rounds)])

    found = demo._loop(Operator(), None, rounds=3)
    assert [r.timeline for r in found] == [["a"], ["b"], ["c"]]
    assert all(a.began + a.seconds <= b.began for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--workers", 3, "--slow", 3],
            "Error: --slow 3 must be less than the number of workers, 3: lower --slow or raise "
            "--workers.",
        ),
        (
            ["--output", "/nowhere/x.png"],
            "Error: --output /nowhere/x.png: expected a file in a folder that exists.",
        ),
    ],
)
def test_wrong_options_of_the_demo(options, expected):
    result = run("demo", *options)
    assert result.exit_code == 2
    assert complaint(result) == expected


# -- on a real cluster -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cluster_of_processes_ranks(tmp_path):
    output, ring = tmp_path / "ranks.csv", tmp_path / "ring.txt"
    ring.write_text("".join(f"{i} {(i + step) % 20}\n" for i in range(20) for step in (1, i)))
    options = ["--workers", 3, "--code", "mds", "--redundancy", 1, "--output", output]
    result = run("pagerank", ring, *options)
    assert result.exit_code == 0, result.output
    graph = read_graph(ring)
    expected = pagerank_module.pagerank_rounds(
        *pagerank_module.transition_matrix(graph.adjacency), tol=1e-13
    )
    rows = list(csv.reader(output.read_text().splitlines()))[1:]
    scores = {int(node): float(score) for node, score in rows}
    assert [scores[node] for node in graph.nodes.tolist()] == pytest.approx(
        expected.scores.tolist(), abs=1e-9
    )
    assert "used" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_of_any_encoding_shows_progress_and_scores(tmp_path, encoding):
    pty = pytest.importorskip("pty")
    pytest.importorskip("rich")
    (tmp_path / "cities.txt").write_text(CITIES, encoding="utf-8")
    terminal, process_end = pty.openpty()
    command = "from dask_coded.cli import coded; coded()"
    options = ["cities.txt", "--workers", "2", "--output", "ranks.csv"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, "pagerank", *options],
        stdin=subprocess.DEVNULL,
        stdout=process_end,
        stderr=process_end,
        env=os.environ | {"PYTHONIOENCODING": encoding, "TERM": "xterm", "COLUMNS": "80"},
        cwd=tmp_path,
    )
    os.close(process_end)
    shown = io.BytesIO()
    # A terminal that no process has open any more is an error to Linux, and empty elsewhere.
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            shown.write(part)
    os.close(terminal)
    text = shown.getvalue().decode(encoding)
    assert process.wait() == 0, text
    assert "Starting 2 workers" in text
    assert "Done. Round " in text
    assert r"\u6771\u4eac" in text
    rows = csv.reader((tmp_path / "ranks.csv").read_text(encoding="utf-8").splitlines())
    assert sorted(node for node, _ in rows) == sorted(["node", "Łódź", "Кёльн", "東京"])


@pytest.mark.slow
@pytest.mark.parametrize("graph", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_demo_compares_four_ways_and_draws_two(tmp_path, monkeypatch, votes, graph):
    for name, value in {"_SIZE": 60, "_WARM_UP": 1, "_TURNS": 2, "_LOOP": 3}.items():
        monkeypatch.setattr(demo, name, value)
    drawn = []
    monkeypatch.setattr(demo, "_draw", lambda *args: drawn.append(args))
    options = ["--workers", 2, "--slow", 1, "--factor", 2, "--output", tmp_path / "demo.png"]
    result = run("demo", *options, *(["--graph", votes] if graph else []))
    assert result.exit_code == 0, result.output
    assert "Encoding: " in result.stderr
    code = "Repetition(n=2, r=2)" if graph else "MDS(n=2, k=1)"
    assert code in result.stdout
    assert result.stdout.count("speed-up") == (2 if hasattr(signal, "SIGSTOP") else 1)
    [((plain, coded), workers, *_)] = drawn
    rows = 3 if graph else 60
    assert sum(bar.rows for bar in plain.bars) == rows
    assert {bar.worker for bar in [*plain.bars, *coded.bars]} <= set(workers)
    assert len(plain.ends) == 1 and 1 <= len(coded.ends) <= 2


@pytest.mark.slow
def test_workers_of_a_local_cluster_block_interrupts():
    # Forked ones have what was blocked when the server was started that forks them.
    spawned = dask.config.set({"distributed.worker.multiprocessing-method": "spawn"})
    with spawned, local.local_client(1) as client:
        masks = client.run(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert all(signal.SIGINT in mask for mask in masks.values())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_bench_times_five_ways_and_says_whether_coding_pays(tmp_path, sparse):
    matrix = np.eye(40, 30)
    if sparse:
        file = tmp_path / "matrix.npz"
        scipy.sparse.save_npz(file, scipy.sparse.csr_array(matrix))
    else:
        file = tmp_path / "matrix.npy"
        np.save(file, matrix)
    result = run("bench", str(file), "--workers", "2", "--rounds", "2", "--width", "3", "--json")
    found = json.loads(result.stdout)
    assert found["shape"] == [40, 30]
    assert [len(way["seconds"]) for way in found["ways"]] == [2] * 5
    assert found["verdict"].startswith("Coding does not pay here: one process takes 0.")


@pytest.mark.parametrize(
    ("plain", "small", "lazily", "loop", "alone", "expected"),
    [
        (
            0.2,
            0.2,
            0.3,
            0.05,
            True,
            "This matrix is too small to code: coded, in a loop takes 0.50 of",
        ),
        (0.2, 0.2, 0.04, 0.05, True, "Coding pays after .*: coded, lazily takes 0.40 .*dask.array"),
        (
            0.2,
            0.2,
            0.3,
            0.05,
            False,
            r"Coding pays after 20 rounds, .*: coded, in a loop takes 0.50 .*dask.array",
        ),
        (
            0.2,
            0.2,
            0.3,
            0.19,
            False,
            "Coding does not pay here: dask.array takes 0.53 of the time of coded, in a",
        ),
        (
            0.2,
            0.04,
            0.3,
            0.05,
            False,
            "Coding does not pay here: dask.array, small chunks takes 0.80 of the time of coded",
        ),
    ],
)
def test_the_verdict_of_the_bench(plain, small, lazily, loop, alone, expected):
    dask = 0.1
    times = {"one process": plain, "dask.array": dask, "dask.array, small chunks": small}
    times["coded, lazily"] = lazily
    times["coded, in a loop"] = loop
    ways = [Way(name, [seconds] * 3) for name, seconds in times.items()]
    verdict = Comparison(4, (9, 9), "MDS(n=4, k=3)", 1.0, ways, alone).verdict
    assert re.match(expected, verdict), verdict


def test_a_file_without_a_matrix(tmp_path):
    file = tmp_path / "vector.npy"
    np.save(file, np.arange(3))
    result = run("bench", file)
    assert result.exit_code == 2
    assert "expected a matrix of numbers, it has the shape (3,)" in complaint(result)
    assert "expected a NumPy array (.npy)" in complaint(run("bench", tmp_path / "none.npy"))
    (tmp_path / "text.txt").write_text("1 2:3")
    assert complaint(run("bench", tmp_path / "text.txt")).endswith(": it is neither")
    (tmp_path / "empty.npy").touch()
    assert "expected a NumPy array (.npy)" in complaint(run("bench", tmp_path / "empty.npy"))
    (tmp_path / "half.npz").write_bytes(b"PK\x03\x04")
    assert "expected a NumPy array (.npy)" in complaint(run("bench", tmp_path / "half.npz"))
    np.savez(tmp_path / "archive.npz", np.eye(2))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    assert "it holds a NpzFile" in complaint(run("bench", tmp_path / "archive.npy"))


@pytest.mark.slow
def test_the_address_of_a_worker_is_exit_code_2():
    with local.local_client(1) as client:
        [address] = client.nthreads()
        result = run("check", address)
    assert result.exit_code == 2
    assert "is no scheduler, but perhaps a worker" in complaint(result)
