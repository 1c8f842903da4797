"""What a function raises on one worker is the same exception on another one."""

from __future__ import annotations

import pickle
import threading
import traceback

import numpy as np
import pytest
from distributed.utils_test import captured_logger
from scipy.sparse.linalg import ArpackNoConvergence

from dask_coded.transport.exceptions import logged, portable, unpacked


class Keywords(Exception):
    """Needs keywords, and may hold anything."""

    def __init__(self, *, code, held=None):
        super().__init__(f"code {code}")
        self.code = code
        self.held = held


class TwoArguments(OSError):
    def __init__(self, number, text):
        super().__init__(f"{text} {number}")


class Particular(Exception):
    def __new__(cls, text, number):
        return super().__new__(cls, text, number)

    def __reduce__(self):
        raise TypeError("on purpose")


def raised(fail):
    """Return what arrives when a function raises."""
    try:
        fail()
    except BaseException as exc:
        return pickle.loads(portable(exc, "here"))


def throw(exc):
    raise exc


@pytest.mark.parametrize(
    "make",
    [
        lambda: ArpackNoConvergence("no convergence", np.ones(2), np.ones((3, 2))),
        lambda: Keywords(code=5),
        lambda: TwoArguments(5, "number"),
        lambda: ExceptionGroup("some", [Keywords(code=5), ValueError("text")]),
        lambda: Keywords(code=5, held=threading.Lock()),
        lambda: ValueError("text", (x for x in "generator")),
    ],
)
def test_an_exception_arrives_as_itself_with_its_traceback(make):
    expected = make()
    found = raised(lambda: throw(expected))
    assert type(found) is type(expected)
    assert vars(found).keys() == vars(expected).keys()
    assert len(found.args) == len(expected.args)
    assert found.args[0] == expected.args[0]
    assert traceback.extract_tb(found.__traceback__)[-1].name == "throw"
    assert found.__notes__ == ["Raised here"]


def test_what_an_exception_holds_arrives_too_if_it_can_be_pickled():
    values, vectors = np.ones(2), np.ones((3, 2))
    found = raised(lambda: throw(ArpackNoConvergence("no convergence", values, vectors)))
    np.testing.assert_array_equal(found.eigenvalues, values)
    np.testing.assert_array_equal(found.eigenvectors, vectors)
    mixed = raised(lambda: throw(Keywords(code=[1, 2], held=threading.Lock())))
    assert mixed.code == [1, 2]
    assert "lock object" in mixed.held


def test_the_causes_of_an_exception_arrive_whatever_they_hold():
    def fail():
        try:
            raise Keywords(code=5, held=threading.Lock())
        except Keywords as exc:
            exc.add_note("of the user")
            raise ValueError("because of it") from exc

    found = raised(fail)
    assert str(found) == "because of it"
    assert type(found.__cause__) is Keywords
    assert found.__cause__.__notes__ == ["of the user"]
    assert found.__suppress_context__


def test_a_function_that_calls_itself_for_ever_says_where():
    def endless():
        endless()

    found = raised(endless)
    assert type(found) is RecursionError
    assert "in endless" in found.__notes__[-1]


def test_an_exception_without_a_text_is_described():
    class Silent(Particular):
        def __str__(self):
            raise ValueError("no text")

    found = raised(lambda: throw(Silent("text", 5)))
    assert type(found) is RuntimeError
    assert str(found).startswith("Silent: ")


def test_an_exception_of_an_unknown_class_is_described_where_it_arrives():
    packed = portable(Keywords(code=5), "here")
    assert type(unpacked(packed)) is Keywords
    found = unpacked(packed.replace(b"Keywords", b"Unknown8"))
    assert type(found) is RuntimeError
    assert "Unknown8" in str(found)


@pytest.mark.parametrize("exc", [SystemExit("text"), Particular("text", 5)], ids=repr)
def test_exceptions_that_cannot_travel_are_described(exc):
    found = raised(lambda: throw(exc))
    assert type(found) is RuntimeError
    assert str(found).startswith(f"{type(exc).__name__}: ")
    assert "text" in str(found)
    assert found.__notes__[0].startswith("Raised here:\nTraceback")


def test_a_hook_that_raises_is_logged_and_has_no_effect():
    with captured_logger("distributed.dask_coded") as log:
        logged(divmod)(1, 0)
        found = []
        logged(found.append)(3)
    assert "ZeroDivisionError" in log.getvalue()
    assert found == [3]
