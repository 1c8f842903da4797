"""Trees have the least load and tolerate their stragglers, for any number of workers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.aggregation import trees
from dask_coded.aggregation.trees import ROOT, Allocation


def optimal(fan_in: int, depth: int, stragglers: int) -> Fraction:
    return 1 / sum(Fraction(fan_in, stragglers + 1) ** layer for layer in range(1, depth + 1))


@pytest.mark.parametrize(
    ("fan_in", "depth", "stragglers", "load"),
    [
        (4, 3, 1, Fraction(1, 14)),
        (12, 2, 1, Fraction(1, 42)),
        (12, 2, 3, Fraction(1, 12)),
        (12, 2, 0, Fraction(1, 156)),
        (6, 2, 2, Fraction(1, 6)),
    ],
)
def test_replicated_trees_have_the_least_load(
    fan_in: int, depth: int, stragglers: int, load: Fraction
) -> None:
    tree = trees.replicated(trees.capacity(fan_in, depth), fan_in, depth, stragglers)
    assert load == optimal(fan_in, depth, stragglers)
    assert {Fraction(len(work), tree.parts) for work in tree.work} == {load}
    assert {len(children) for children in tree.children.values()} == {fan_in}


@pytest.mark.parametrize(
    ("fan_in", "depth", "stragglers", "load", "parts"),
    [
        (3, 2, 1, Fraction(4, 15), 15),
        (4, 3, 1, Fraction(1, 14), 28),
        (12, 2, 1, Fraction(1, 42), 84),
        (12, 2, 3, Fraction(1, 12), 48),
        (5, 2, 2, Fraction(9, 40), 40),
    ],
)
def test_cyclic_trees_have_the_least_load(
    fan_in: int, depth: int, stragglers: int, load: Fraction, parts: int
) -> None:
    tree = trees.cyclic(trees.capacity(fan_in, depth), fan_in, depth, stragglers)
    assert load == optimal(fan_in, depth, stragglers)
    assert tree.parts == parts
    assert {Fraction(len(work), tree.parts) for work in tree.work} == {load}


def total(tree: Allocation, node: int, rng: np.random.Generator) -> np.ndarray:
    """Return what a node delivers if every parent has as many late children as it tolerates."""
    out = np.zeros(tree.parts)
    if node != ROOT:
        for part, factor in tree.work[node]:
            out[part] += factor
    children = tree.children.get(node, ())
    if not children:
        return out
    code = tree.codes[node]
    may_be_late = code.stragglers - (code.n - len(children))
    have = rng.permutation(len(children))[: len(children) - may_be_late].tolist()
    delivered = [total(tree, children[row], rng) for row in have]
    return out + code.weights(have) @ np.array(delivered)


def check(tree: Allocation, workers: int, stragglers: int, seed: int) -> None:
    assert len(tree.parents) == len(tree.work) == workers
    assert all(parent < worker for worker, parent in enumerate(tree.parents))
    assert {part for work in tree.work for part, _ in work} == set(range(tree.parts))
    rng = np.random.default_rng(seed)
    for _ in range(3):
        np.testing.assert_allclose(total(tree, ROOT, rng), 1, atol=1e-10)


@given(st.integers(1, 90), st.integers(0, 3), st.integers(0, 99), st.data())
def test_any_number_of_workers_makes_a_tree(
    workers: int, stragglers: int, seed: int, data: st.DataObject
) -> None:
    workers += stragglers
    copies = stragglers + 1
    fan_in = data.draw(st.none() | st.integers(2, 5).map(lambda groups: groups * copies))
    depth = data.draw(st.none() | st.integers(1, 3)) if fan_in is None else None
    width, layers = trees.shape(workers, stragglers, fan_in, depth)
    tree = trees.replicated(workers, width, layers, stragglers)
    check(tree, workers, stragglers, seed)
    assert all(code.stragglers >= stragglers for code in tree.codes.values())
    assert {len(work) for work in tree.work} == {1}
    if stragglers == 0:
        assert tree.parts == workers
        assert max(len(children) for children in tree.children.values()) <= width


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 99))
def test_any_number_of_workers_makes_a_cyclic_tree(
    workers: int, stragglers: int, seed: int
) -> None:
    workers += stragglers
    fan_in, depth = trees.shape(workers, stragglers)
    check(trees.cyclic(workers, fan_in, depth, stragglers), workers, stragglers, seed)


def test_a_lost_leaf_of_a_cyclic_tree_is_a_straggler() -> None:
    full, less = (trees.cyclic(workers, 3, 2, 1) for workers in (12, 11))
    assert less.work == full.work[:11]
    assert trees.cyclic(8, 3, 2, 1).parents == (ROOT,) * 8


def test_a_lost_worker_costs_one_part() -> None:
    parts = [trees.replicated(workers, 12, 2, 1).parts for workers in (156, 155, 153, 152, 151)]
    assert parts == [42, 41, 41, 41, 40]


def test_a_tree_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="fan_in=4 and depth=2 holds 20 workers, there are 21"):
        trees.shape(21, 1, 4, 2)
