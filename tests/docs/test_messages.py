"""The pages about events, logs and errors say what the package says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
from distributed.utils_test import async_poll_for, gen_cluster

import dask_coded as coded
from dask_coded.runtime.coordinator.report import RoundReport, WorkerPart
from dask_coded.runtime.spec import NAME

ROOT = Path(__file__).parents[2]
# The installed package: a release is tested without its sources beside the tests.
TREES = [ast.parse(path.read_text()) for path in Path(coded.__file__).parent.rglob("*.py")]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


# -- events ------------------------------------------------------------------------------------


def constants(nodes) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def logged() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each action that the package logs in its topic, with its other fields."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in (n for tree in TREES for n in ast.walk(tree) if isinstance(n, kinds)):
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
        calls = [(getattr(n.func, "attr", ""), n) for n in calls]
        for name, call in calls:
            if name == "_log" and (action := constants(call.args)):
                yield action[0], frozenset(keyword.arg for keyword in call.keywords)
        topics = [n.args[0] for name, n in calls if name == "log_event" and n.args]
        if any(isinstance(topic, ast.Name) and topic.id == "NAME" for topic in topics):
            # The fields are put together from several dictionaries of the function.
            dictionaries = [n for n in ast.walk(function) if isinstance(n, ast.Dict)]
            pairs = [pair for d in dictionaries for pair in zip(d.keys, d.values)]
            actions = constants(v for k, v in pairs if constants([k]) == ["action"])
            if actions:
                assert len(actions) == 1
                yield actions[0], frozenset(constants(k for k, _ in pairs)) - {"action"}


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table of the page whose first column has that heading."""
    found = re.search(rf"^\| {heading} \|.*?\n\n", page("diagnostics.md"), re.S | re.M)[0]
    return [line.strip("| ").split(" | ") for line in found.strip().splitlines()[2:]]


def documented() -> dict[str, frozenset[str]]:
    rows = table("action")
    return {row[0].strip("`"): frozenset(re.findall(r"`(\w+)`", row[2])) for row in rows}


def test_the_table_has_all_events_with_their_fields():
    found = dict(logged())
    assert len(found) == 11
    assert found == documented()
    meanings = re.search(r"^\| field \|.*?\n\n", page("diagnostics.md"), re.S | re.M)[0]
    explained = re.findall(r"^\| (.*?) \|", meanings, re.M)
    names = {name for cell in explained for name in re.findall(r"`(\w+)`", cell)}
    assert names == frozenset().union(*documented().values())


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 5)
async def test_events_have_the_fields_of_the_table(c, s, *workers):
    C = await coded.encode(np.eye(40), coded.RandomLinear(4, 2), client=c)
    D = await C.extend()
    holder = next(w for w in workers if w.address == C.encoded.workers[0])
    await holder.close()

    def actions():
        return [event["action"] for _, event in s.get_events(NAME)]

    await async_poll_for(lambda: "made" in actions(), timeout=60)
    del C, D
    await async_poll_for(lambda: "release" in actions(), timeout=60)
    assert {"register", "extend", "made", "release"} <= set(actions())
    for _, event in s.get_events(NAME):
        assert event.keys() - {"action"} == documented()[event["action"]]


# -- messages ----------------------------------------------------------------------------------


def text_of(node: ast.AST) -> str | None:
    """Return a string of the source; what differs from case to case is the character 0."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                getattr(part, "value", "\0") if isinstance(part, ast.Constant) else "\0"
                for part in parts
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            ends = text_of(left), text_of(right)
            return "".join(end or "\0" for end in ends) if any(ends) else None
    return None


SAID = {
    re.sub(r"%[sdr]", "\0", text)
    for tree in TREES
    for node in ast.walk(tree)
    if (text := text_of(node))
}


def is_said(message: str) -> bool:
    """Whether some string of the package has all parts of a message, in this order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" .,")]
    pattern = re.compile(".*?".join(parts), re.S)
    return any(pattern.search(text) for text in SAID)


def test_every_message_of_the_pages_is_in_the_package():
    entries = re.findall(r"^### `(.*)`$", page("troubleshooting.md"), re.M)
    assert len(entries) >= 20
    lines = re.search(r"^\| line \|.*?\n\n", page("diagnostics.md"), re.S | re.M)[0]
    entries += re.findall(r"^\| `(.*?)` \|", lines, re.M)
    assert [entry for entry in entries if not is_said(entry)] == []


def bare(text: str) -> str:
    """Return a line of a log without what differs from case to case, up to the first colon."""
    return " ".join(re.sub(r"%[sdr]|…", " ", text.split(": ")[0]).split())


def test_every_warning_in_a_log_is_on_the_page():
    lines = re.search(r"^\| line \|.*?\n\n", page("diagnostics.md"), re.S | re.M)[0]
    listed = [bare(line) for line in re.findall(r"^\| `(.*?)` \|", lines, re.M)]
    warnings = [
        bare(node.args[0].value)
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.warning"
    ]
    assert len(warnings) >= 8
    assert [line for line in warnings if not any(map(line.startswith, listed))] == []


# -- reports -----------------------------------------------------------------------------------


def test_the_tables_have_all_fields_of_reports():
    last = {f.name for f in fields(RoundReport) if f.repr} | {"parts", "bound", "timeline"}
    expected = {
        "field of a report": {f.name for f in fields(coded.Report)},
        "field of a worker": set(coded.WorkerStatus._fields),
        "attribute of `last_round`": last,
    }
    found = {heading: re.findall(r"`(\w+)`", " ".join(row[0] for row in table(heading)))
             for heading in expected}  # fmt: skip
    assert {heading: set(names) for heading, names in found.items()} == expected
    assert set(WorkerPart._fields) < set(coded.WorkerStatus._fields)
