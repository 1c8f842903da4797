"""Pages of the manual: programs run as they stand, configuration is what Dask and YAML read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest
import yaml

from dask_coded import preload

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("deploying.md", "diagnostics.md", "quick-start.md", "troubleshooting.md")
#: Programs that start machines elsewhere: they are compiled only.
ELSEWHERE = {"dask_jobqueue", "dask_cloudprovider", "coiled", "SSHCluster"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


PROGRAMS = [(page, program) for page in PAGES for program in blocks(page, "python")]
HERE = [(page, p) for page, p in PROGRAMS if not any(word in p for word in ELSEWHERE)]


def test_every_program_is_guarded_and_complete():
    assert len(PROGRAMS) - len(HERE) == len(ELSEWHERE)
    for page, program in PROGRAMS:
        assert 'if __name__ == "__main__":' in program
        compile(program, page, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "program"),
    [
        # All of them start processes that only import; the others are like these.
        pytest.param(page, program, id=f"{page}-{i}", marks=[pytest.mark.long] * (i % 3 > 0))
        for i, (page, program) in enumerate(HERE)
    ],
)
def test_a_program_runs_as_a_script(page, program, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    command = [sys.executable, "-W", "error:::__main__", script]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.parametrize(("i", "needs"), [(0, "zarr"), (1, "sklearn"), (2, "torch")])
def test_the_tutorial_runs_as_scripts(i, needs, tmp_path):
    pytest.importorskip(needs)
    script = tmp_path / "program.py"
    script.write_text(blocks("tutorial.md", "python")[i])
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.long
def test_the_training_in_jax_runs_as_a_script(tmp_path):
    pytest.importorskip("jax")
    (program,) = (p for p in blocks("training.md", "python") if "import jax\n" in p)
    script = tmp_path / "program.py"
    script.write_text(program)
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) > 0.9


@pytest.mark.extras
@pytest.mark.slow
def test_the_programs_on_keeping_an_array_run_as_scripts(tmp_path):
    pytest.importorskip("zarr")
    script = tmp_path / "program.py"
    program, loop, _ = blocks("keeping.md", "python")
    script.write_text(loop)
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "39\n"), result.stderr
    script.write_text(program)
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("True\n")
    # The page shows what the command prints.
    said = result.stdout.splitlines()[1:]
    shown = blocks("keeping.md", "console")[1].splitlines()[1:]
    assert [said[0].replace(f"{tmp_path}/", ""), *said[1:]] == shown


def test_every_preload_is_read_as_the_module():
    """The environment variable as Dask reads it, wherever a page sets it."""
    image = (DOCS.parent / "Dockerfile").read_text()
    text = (DOCS / "deploying.md").read_text() + image
    name = "DASK_DISTRIBUTED__SCHEDULER__PRELOAD"
    values = re.findall(rf"{name}='(.*)'$", text, re.M)
    values += [
        each["value"]
        for found in blocks("deploying.md", "yaml")
        for each in (yaml.safe_load(found).get("scheduler") or {}).get("env", [])
    ]
    assert len(values) == 3
    for value in values:
        read = dask.config.collect_env({name: value})
        assert read == {"distributed": {"scheduler": {"preload": [preload.__name__]}}}
    lists = re.findall(r'"distributed.scheduler.preload": (\[.*?\])', text)
    assert {tuple(ast.literal_eval(found)) for found in lists} == {(preload.__name__,)}


def test_the_operator_starts_what_dask_has():
    cluster, _ = map(yaml.safe_load, blocks("deploying.md", "yaml"))
    assert (cluster["apiVersion"], cluster["kind"]) == ("kubernetes.dask.org/v1", "DaskCluster")
    for part in ("worker", "scheduler"):
        [container] = cluster["spec"][part]["spec"]["containers"]
        assert container["args"][:2] == ["dask", part]
        assert all(isinstance(word, str) for word in container["args"])
    named = {port["name"] for port in cluster["spec"]["scheduler"]["service"]["ports"]}
    assert named == {"tcp-comm", "http-dashboard"}


def test_links_between_pages_lead_somewhere():
    for page in (*PAGES, "citing.md", "faq.md", "glossary.md", "keeping.md", "tutorial.md"):
        for target, anchor in re.findall(
            r"\]\(([\w/-]+\.(?:md|rst))?(?:#([\w-]+))?\)", (DOCS / page).read_text()
        ):
            text = (DOCS / (target or page)).read_text()
            titles = re.findall(r"^#+ (.*)$", text, re.M)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in slugs, (page, target, anchor)
