"""No module but :mod:`dask_coded.compat` uses what dask and distributed keep to themselves.

This reads the sources. It cannot see a private attribute that has the name of one of ours, nor one
whose name is put together when the program runs, nor that a public name has changed its meaning.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_coded import compat

PACKAGE = Path(compat.__file__).parent
TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")
}
COMPAT = TREES.pop("compat.py")
#: Of named tuples, `sys`, SciPy and PyTorch.
OTHERS = {"_fields", "_getframe", "_replace", "_sparsetools", "_version", "_BatchNorm", "_NormBase"}
OTHERS |= {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module imports from dask and distributed: module and name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        else:
            continue
        yield from (each for each in found if each[0].split(".")[0] in ("dask", "distributed"))


def attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes that a module touches, or names in a string."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                pass
            case ast.Constant(value=str(name)) if name.isidentifier():
                pass
            case _:
                continue
        if name.startswith("_") and name.strip("_") and not name.startswith("__"):
            yield name


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module gives to functions, classes, attributes and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


OWN = {name for tree in TREES.values() for name in defined(tree)}
#: What compat imports, and whatever it touches that begins with an underscore.
IMPORTS = {
    (module, name)
    for module, name in imported(COMPAT)
    if (module, name) not in {("dask.array.core", "Array"), ("dask.typing", "Key")}
    and name not in {"Client", "Scheduler", "TaskState"}
}
TOUCHED = set(attributes(COMPAT)) | {"_elemwise", "_rebuild"}


@pytest.mark.parametrize("module", sorted(TREES))
def test_private_names_are_used_in_one_module(module):
    tree = TREES[module]
    for source, name in imported(tree):
        private = [part for part in (*source.split("."), name) if part.startswith("_")]
        assert not private, f"{source}.{name}: use `dask_coded.compat`"
        assert (source, name) not in IMPORTS, f"{source}.{name}: use `dask_coded.compat`"
    assert not set(attributes(tree)) - OWN - OTHERS
    assert not {*attributes(tree), *defined(tree)} & TOUCHED, "use `dask_coded.compat`"


def test_what_the_test_looks_for_is_there():
    assert {"_broker", "_chunks", "_connecting", "_meta", "_send_to_scheduler"} <= TOUCHED
    assert ("dask._task_spec", "TaskRef") in IMPORTS
    assert all(hasattr(compat, name) for name in compat.__all__)
