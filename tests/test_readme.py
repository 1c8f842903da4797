"""The programs in README.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
COMMANDS = re.findall(r"(?<!-->\n)```sh\n(.*?)```", TEXT, re.S)
ENDINGS = [  # what each program prints last
    r"\d{7}\.\d+\n",
    r"\[.*\]\n",
    r"\(20, 20\)\n",
    r"\[-?0\. +1\. +2\. +3\. +4\. +5\. +6\. +7\. +8\. +9\.\s*\]\n",
]


def test_every_program_is_guarded_and_complete():
    assert len(PROGRAMS) == len(ENDINGS)
    for program in PROGRAMS:
        assert 'if __name__ == "__main__":' in program
        compile(program, "README.md", "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("program", "ending"), [*zip(PROGRAMS, ENDINGS, strict=True)])
def test_a_program_runs_as_a_script(program, ending, tmp_path):
    pytest.importorskip("sklearn")
    script = tmp_path / "program.py"
    script.write_text(program)
    result = run([sys.executable, "-W", "error:::__main__", script], tmp_path)
    assert re.search(ending + r"\Z", result.stdout), result.stdout


@pytest.mark.slow
def test_the_command_line_runs(tmp_path):
    (command,) = COMMANDS
    installed = f"{sys.executable} -c 'from dask_coded.cli import coded; coded()' "
    command = command.replace("dask-coded ", installed)
    run(["sh", "-ec", command], tmp_path)
    assert (tmp_path / "ranks.csv").read_text().count("\n") == 4


def run(command, folder) -> subprocess.CompletedProcess:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result
