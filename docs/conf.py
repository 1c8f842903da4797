"""Sphinx configuration. Neither builds nor readers need a network.

DASK_CODED_INTERSPHINX=1 links to other manuals.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

import dask_coded

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "dask-coded"
author = "The dask-coded developers"
project_copyright = "2026, the dask-coded developers"
version = release = dask_coded.__version__

extensions = [
    "mathml",
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_click",
    "sphinx_gallery.gen_gallery",
]
# Every gallery page is a program that runs when the documentation is built.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "download_all_examples": False,
    "show_memory": False,
    "abort_on_example_error": True,
    "capture_repr": (),  # no `<matplotlib.legend.Legend object …>` below a picture
    "min_reported_time": 1e9,
}
if os.environ.get("DASK_CODED_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "dask": ("https://docs.dask.org/en/stable", None),
        "distributed": ("https://distributed.dask.org/en/stable", None),
        "networkx": ("https://networkx.org/documentation/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "python": ("https://docs.python.org/3", None),
        "scipy": ("https://docs.scipy.org/doc/scipy", None),
    }

templates_path = ["_templates"]
exclude_patterns = ["_build", "_extensions", "gallery"]
default_role = "py:obj"
myst_heading_anchors = 3

autodoc_typehints = "none"  # the docstrings give types, with shapes and units
autosummary_generate = True
# Too large to install for a single page.
autodoc_mock_imports = ["torch"]
numpydoc_class_members_toctree = False
numpydoc_show_class_members = False

html_theme = "furo"
html_title = "dask-coded"
html_static_path = ["_static"]
html_css_files = ["cards.css"]
html_math_renderer = "mathml"

# `sphinx-build -b man docs OUT` writes it.
man_pages = [("command-line", "dask-coded", "coded products on Dask clusters", [author], 1)]


def _describe_thumbnails(app: Any, doctree: nodes.document, docname: str) -> None:
    """Give the pictures of the gallery's index the titles below them as their texts."""
    for image in doctree.findall(nodes.image):
        title = image.next_node(nodes.paragraph, descend=False, siblings=True)
        if image["uri"].endswith("_thumb.png") and title is not None:
            image["alt"] = title.astext()


def setup(app: Any) -> None:
    app.connect("doctree-resolved", _describe_thumbnails)
