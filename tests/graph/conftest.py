"""What the tests of graph algorithms share."""

from __future__ import annotations

import networkx as nx
import pytest

from dask_coded.loop import Loop


class Heard(Loop):
    """A loop that remembers what it is told, and can begin where another one was."""

    def __init__(self, state=None):
        self.state = state
        self.states = []
        self.reports = []

    def resume(self, state):
        return state if self.state is None else self.state

    def report(self, progress, state=None, last=False):
        self.state = state
        self.states.append(state)
        self.reports.append((progress, last))


@pytest.fixture
def heard():
    """Makes loops that remember."""
    return Heard


@pytest.fixture
def here(monkeypatch):
    """Run the coded operations of a function in this process; gives what was run."""
    functions = []

    def run(function, *args, client, callback, **kwargs):
        functions.append(function)
        return function(*args, **kwargs)

    def take(public):
        monkeypatch.setitem(
            public.__globals__, "encode", lambda matrix, code, client, transpose=False: matrix
        )
        monkeypatch.setitem(public.__globals__, "run", run)
        return functions

    return take


@pytest.fixture
def friends():
    """The karate club, with weights."""
    return nx.karate_club_graph()
