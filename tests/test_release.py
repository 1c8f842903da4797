"""What a release consists of. `.ci/run` builds the distributions and looks into them."""

from __future__ import annotations

from pathlib import Path

from dask_coded._version import __version__

ROOT = Path(__file__).parents[1]


def test_the_citation_names_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_change_log_has_a_section_for_what_comes_next():
    assert (ROOT / "CHANGELOG.md").read_text().count("\n## [Unreleased]\n") == 1
