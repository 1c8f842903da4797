"""What a release consists of. `.ci/run` builds the distributions and looks into them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

from dask_coded._version import __version__

ROOT = Path(__file__).parents[1]


def test_the_citation_names_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_change_log_has_a_section_for_what_comes_next():
    assert (ROOT / "CHANGELOG.md").read_text().count("\n## [Unreleased]\n") == 1


def test_the_conda_recipe_has_the_version_and_the_requirements():
    recipe = yaml.safe_load((ROOT / ".conda" / "recipe.yaml").read_text())
    assert recipe["package"]["version"] == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    other = {"dask[array]": "dask-core", "msgpack": "msgpack-python"}  # numpy is listed anyway
    wanted = {f"python {project['requires-python']}"}
    for text in project["dependencies"]:
        name, _, least = text.partition(">=")
        wanted.add(f"{other.get(name, name)} >={least}")
    assert set(recipe["requirements"]["run"]) == wanted
