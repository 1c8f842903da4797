"""A lazy product keeps the pieces that it needs, whatever Dask does with its graph."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask import graph_manipulation
from dask.base import tokenize

from dask_coded.array import CodedArray
from dask_coded.codes import MDS, Polynomial
from dask_coded.pair import CodedPair
from dask_coded.rounds import Geometry
from dask_coded.runtime.client.encoding import Encoded
from dask_coded.runtime.spec import ArraySpec, PairSpec

pytestmark = pytest.mark.versions


def encoded() -> Encoded:
    """Return what a client holds of an array, with no cluster behind it."""
    geometry = Geometry((3, 3), stripes=1, mixed=True)
    spec = ArraySpec("matrix", MDS(3, 2), geometry, 4, np.dtype("f8"), ("a", "b", "c"))
    futures: Any = tuple(SimpleNamespace(key=key) for key in spec.keys)
    return Encoded(spec, futures, ("one", "two", "three"), 0, 0)


def encoded_pair() -> Encoded:
    geometry = Geometry((2,), stripes=1, mixed=True)
    code = Polynomial(2, 1, 1)
    spec = PairSpec("pair", code, geometry, 4, np.dtype("f8"), ("a", "b"), right_rows=(2,))
    futures: Any = tuple(SimpleNamespace(key=key) for key in spec.keys)
    return Encoded(spec, futures, ("one", "two"), 0, 0)


def product() -> tuple[da.Array, Any]:
    found = encoded()
    return CodedArray(found) @ da.ones((4, 6), chunks=(2, 3)), weakref.ref(found)


def product_of_a_pair() -> tuple[da.Array, Any]:
    found = encoded_pair()
    return CodedPair(found).product(da.ones(4, chunks=2)), weakref.ref(found)


def data_frame(y: da.Array) -> Any:
    return pytest.importorskip("dask.dataframe").from_dask_array(y)


WAYS: dict[str, Callable[[da.Array], Any]] = {
    "as it is": lambda y: y,
    "chunks": lambda y: (y + 1)[:, 2:],
    "optimize": lambda y: dask.optimize(y),
    "optimize twice": lambda y: dask.optimize(*dask.optimize(y + 1)),
    "an argument of delayed": lambda y: dask.delayed(len)(y),
    "an argument of an argument of delayed": lambda y: dask.delayed(len)({"y": [y, 1]}),
    "to_delayed": lambda y: y.to_delayed(),
    "to_delayed, not optimized": lambda y: y.to_delayed(optimize_graph=False)[0, 0],
    "a keyword of map_blocks": lambda y: da.ones(2).map_blocks(np.clip, a_max=y, dtype=y.dtype),
    "an argument of blockwise": lambda y: da.map_blocks(np.add, y, y, dtype=y.dtype),
    "clone": lambda y: graph_manipulation.clone(y),
    "bind": lambda y: graph_manipulation.bind(y, da.ones(2)),
    "checkpoint": lambda y: graph_manipulation.checkpoint(y),
    "wait_on": lambda y: graph_manipulation.wait_on(y),
    "a data frame": data_frame,
    "the plain graph": lambda y: dict(y.__dask_graph__()),
}


@pytest.mark.parametrize("make", [product, product_of_a_pair])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_dask_makes_of_a_product_keeps_the_pieces(
    way: str, make: Callable[[], tuple[da.Array, Any]]
) -> None:
    y, held = make()
    result = WAYS[way](y)
    del y
    gc.collect()
    assert held() is not None
    del result
    gc.collect()
    assert held() is None


def test_what_is_sent_to_the_cluster_names_the_pieces_only() -> None:
    y, held = product()
    sent = pickle.dumps(dict(y.__dask_graph__()))
    del y
    gc.collect()
    assert held() is None
    ids = {task.args[0] for task in pickle.loads(sent).values() if hasattr(task, "array_ids")}
    assert ids == {("matrix",)}
    assert {type(found) for found in ids} == {tuple}


def test_equal_products_are_one_task() -> None:
    names = {product()[0].name for _ in range(2)}
    assert len(names) == 1
    y, again = product()[0], product()[0]
    assert tokenize(dict(y.__dask_graph__())) == tokenize(dict(again.__dask_graph__()))
