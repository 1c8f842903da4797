"""Fixtures that the tests of graph algorithms share."""

from __future__ import annotations

from copy import deepcopy

import networkx as nx
import pytest

from dask_coded.loop import Loop


class Heard(Loop):
    """A loop that records its reports, and can resume from the state of another loop."""

    def __init__(self, state=None):
        self.state = state
        self.states = []
        self.reports = []

    def resume(self, state):
        return state if self.state is None else self.state

    def report(self, progress, state=None, last=False):
        self.state = deepcopy(state)  # algorithms may go on in the same arrays
        self.states.append(self.state)
        self.reports.append((progress, last))


@pytest.fixture
def heard():
    """Return the class of recording loops."""
    return Heard


@pytest.fixture
def here(monkeypatch):
    """Run a function's coded operations in this process; return the list of functions that ran."""
    functions = []

    def run(function, *args, client, callback, tolerant=True, **kwargs):
        functions.append(function)
        return function(*args, **kwargs)

    def take(public):
        monkeypatch.setitem(
            public.__globals__, "as_coded", lambda matrix, code, client, transpose=False: matrix
        )
        monkeypatch.setitem(public.__globals__, "run", run)
        return functions

    return take


@pytest.fixture
def friends():
    """The karate club, with weights."""
    return nx.karate_club_graph()


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file
