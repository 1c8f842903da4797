"""Every aggregation gives all workers the exact sum, whichever are late and in any order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.aggregation import (
    ROOT,
    Aggregation,
    CodedReduce,
    DynamicClusters,
    GradientCoding,
    Plan,
    Ring,
    Star,
    StaticClusters,
    Tag,
    Tree,
    TreePlan,
)
from dask_coded.codes import FractionalRepetition
from dask_coded.compression import EXACT, Partial

from .driver import Group, agree

AGGREGATIONS = [
    Star(),
    Star(segments=3),
    Ring(),
    Ring(segments=3),
    Tree(),
    Tree(fan_in=2, segments=2),
    GradientCoding(stragglers=1),
    GradientCoding(stragglers=2, code="cyclic", segments=2),
    StaticClusters(size=3, load=2),
    StaticClusters(size=3, load=2, code="cyclic"),
    DynamicClusters(size=3, load=2),
    DynamicClusters(size=3, load=2, code="cyclic", segments=2),
    CodedReduce(stragglers=1),
    CodedReduce(fan_in=2, stragglers=1, segments=2),
    CodedReduce(fan_in=3, stragglers=1, code="cyclic"),
]


def gradients(parts: int, length: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((parts, length))


def nodes(plan: Plan) -> list[int]:
    return [*range(plan.workers), *([ROOT] if plan.rooted else [])]


def admissible(plan: TreePlan, rng: random.Random) -> set[int]:
    """Return as many late children of every parent as its code tolerates."""
    tree = plan.allocation
    late: set[int] = set()
    for parent, children in tree.children.items():
        code = tree.codes[parent]
        count = code.stragglers - (code.n - len(children))
        late |= set(rng.sample(children, count))
    return late


@given(
    st.sampled_from(AGGREGATIONS),
    st.integers(3, 14),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_order_of_messages_gives_the_sum(
    aggregation: Aggregation, workers: int, twice: bool, rng: random.Random
) -> None:
    plan = aggregation.plan(workers)
    assert plan.workers == workers == len(plan.stored)
    assert 1 / workers <= plan.load <= 1
    group = Group(plan, gradients(plan.parts))
    group.run(rng.randrange, twice=twice)
    agree(group, nodes(plan))


@given(
    st.sampled_from([a for a in AGGREGATIONS if not isinstance(a, Ring)]),
    st.integers(3, 20),
    st.randoms(use_true_random=False),
)
def test_admissible_stragglers_are_not_waited_for(
    aggregation: Aggregation, workers: int, rng: random.Random
) -> None:
    plan = aggregation.plan(workers)
    assert isinstance(plan, TreePlan)
    group = Group(plan, gradients(plan.parts), stopped=admissible(plan, rng))
    group.run(rng.randrange)
    agree(group, nodes(plan))
    # Late results change nothing and are not sent.
    before = len(group.sent)
    group.wake()
    group.run(rng.randrange)
    agree(group, nodes(plan))
    assert len(group.sent) == before


def one_late_everywhere(plan: TreePlan) -> Iterator[set[int]]:
    children = [[set(), *({c} for c in found)] for found in plan.allocation.children.values()]
    return (set().union(*late) for late in itertools.product(*children))


@pytest.mark.parametrize(
    ("aggregation", "workers", "patterns"),
    [
        (GradientCoding(stragglers=1), 6, 7),
        (GradientCoding(stragglers=1, code="cyclic"), 7, 8),
        (CodedReduce(fan_in=2, depth=2, stragglers=1), 6, 27),
        (CodedReduce(fan_in=2, depth=3, stragglers=1), 14, 2187),
        (CodedReduce(fan_in=3, depth=2, stragglers=1, code="cyclic"), 12, 256),
    ],
)
def test_every_admissible_pattern(aggregation: Aggregation, workers: int, patterns: int) -> None:
    plan = aggregation.plan(workers)
    assert isinstance(plan, TreePlan)
    values = gradients(plan.parts, length=2)
    seen = 0
    for late in one_late_everywhere(plan):
        group = Group(plan, values, stopped=late)
        group.run(lambda count: 0)
        agree(group, nodes(plan))
        seen += 1
    assert seen == patterns


@pytest.mark.parametrize("code", ["fractional", "cyclic"])
def test_every_set_of_stragglers_of_one_layer(code: str) -> None:
    plan = GradientCoding(stragglers=3, code=code).plan(8)  # type: ignore[arg-type]
    values = gradients(plan.parts)
    for count in range(4):
        for late in itertools.combinations(range(8), count):
            group = Group(plan, values, dead=late)
            group.run(lambda count: count - 1)
            agree(group, [ROOT, *(set(range(8)) - set(late))])


@pytest.mark.parametrize(
    ("aggregation", "workers"),
    [
        (CodedReduce(fan_in=4, depth=3, stragglers=1), 84),
        (CodedReduce(fan_in=4, depth=3, stragglers=1, code="cyclic"), 84),
        (CodedReduce(fan_in=12, depth=2, stragglers=1), 156),
        (CodedReduce(fan_in=12, depth=2, stragglers=3), 156),
        (CodedReduce(fan_in=12, depth=2, stragglers=3, code="cyclic"), 156),
        (CodedReduce(fan_in=12, depth=2, stragglers=3), 151),
        (GradientCoding(stragglers=14), 156),
    ],
    ids=str,
)
def test_large_trees_with_stragglers(aggregation: Aggregation, workers: int) -> None:
    plan = aggregation.plan(workers)
    assert isinstance(plan, TreePlan)
    rng = random.Random(workers)
    for seed in range(4):
        group = Group(plan, gradients(plan.parts, seed=seed), stopped=admissible(plan, rng))
        group.run(rng.randrange)
        agree(group, nodes(plan))


def test_workers_below_a_dead_worker_wait_and_the_others_do_not() -> None:
    plan = CodedReduce(fan_in=4, depth=2, stragglers=1).plan(20)
    group = Group(plan, gradients(plan.parts), dead=[1])
    group.run(random.Random(0).randrange)
    below = set(plan.allocation.children[1])
    assert set(group.complete()) == set(nodes(plan)) - below - {1}


def test_a_root_does_not_go_through_all_deliveries_at_each(monkeypatch) -> None:
    """Time would grow with the square of the workers."""

    def gone_through(*args: object) -> bool:
        raise AssertionError("all deliveries were looked at")

    root = GradientCoding(stragglers=1).plan(4).machine(ROOT)
    monkeypatch.setattr(FractionalRepetition, "adds", gone_through)
    monkeypatch.setattr(FractionalRepetition, "decodable", gone_through)
    packed = EXACT.pack(Partial(np.ones(2)))
    delivered = [root.received(worker, Tag("part"), packed) for worker in (0, 1, 3)]
    assert delivered[:2] == [[], []]
    assert delivered[2]


def test_a_worker_that_has_not_begun_passes_the_sum_on() -> None:
    plan = CodedReduce(fan_in=4, depth=2, stragglers=1).plan(20)
    group = Group(plan, gradients(plan.parts))
    late = [event for event in group.under_way if event[:2] == ("begin", 1)]
    group.under_way = [event for event in group.under_way if event not in late]
    group.run(lambda count: 0)
    agree(group, nodes(plan))
    group.under_way = late
    group.run(lambda count: 0)
    agree(group, nodes(plan))


def test_a_ring_sends_twice_the_gradient_less_two_chunks() -> None:
    group = Group(Ring().plan(5), gradients(5, length=50))
    group.run(lambda count: 0)
    for worker in range(5):
        sent = [send for sender, send in group.sent if sender == worker]
        assert {send.to for send in sent} == {(worker + 1) % 5}
        assert sum(EXACT.nbytes(send.payload) for send in sent) == 2 * 4 * 10 * 8


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
def test_sent_vectors_are_read_only_and_do_not_change(aggregation: Aggregation) -> None:
    if isinstance(aggregation, Ring):
        pytest.skip("a ring overwrites a chunk once its receiver has read it")
    plan = aggregation.plan(7)
    group = Group(plan, gradients(plan.parts))
    bits: dict[int, bytes] = {}
    rng = random.Random(1)

    def vectors() -> Iterator[tuple[int, np.ndarray]]:
        for i, (_, send) in enumerate(group.sent):
            yield i, EXACT.unpack(send.payload).vector

    def pick(count: int) -> int:
        for i, vector in vectors():
            bits.setdefault(i, vector.tobytes())
        return rng.randrange(count)

    group.run(pick)
    assert bits
    for i, vector in vectors():
        assert not vector.flags.writeable
        assert vector.tobytes() == bits.get(i, vector.tobytes())
    assert not any(
        p.vector.flags.writeable for found in group.totals.values() for p in found.values()
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
def test_single_precision_stays_single_precision(aggregation: Aggregation) -> None:
    plan = aggregation.plan(6)
    group = Group(plan, gradients(plan.parts).astype(np.float32))
    group.run(random.Random(2).randrange)
    assert group.total(0)[0].dtype == np.float32
    agree(group, nodes(plan), rtol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
def test_sums_of_half_precision_may_be_beyond_its_range(aggregation: Aggregation) -> None:
    plan = aggregation.plan(6)
    values = np.tile(np.float16([[30_000, -30_000, 1]]), (plan.parts, 3))
    group = Group(plan, values)
    group.run(random.Random(2).randrange)
    expected = plan.parts * np.array([30_000, -30_000, 1] * 3)
    for node in nodes(plan):
        np.testing.assert_allclose(group.total(node)[0], expected, rtol=1e-4)
        assert group.total(node)[0].tobytes() == group.total(0)[0].tobytes()


@pytest.mark.parametrize(
    ("aggregation", "workers", "least"),
    [(Star(), 0, 1), (Ring(), 0, 1), (GradientCoding(2), 2, 3), (CodedReduce(stragglers=3), 3, 4)],
)
def test_too_few_workers_are_refused(aggregation: Aggregation, workers: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"needs at least {least} workers, there are {workers}"):
        aggregation.plan(workers)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"multiple of stragglers \+ 1 = 2 .* pass 2, or code='cy"):
        CodedReduce(fan_in=3, stragglers=1)
    with pytest.raises(ValueError, match="more than the 3 stragglers"):
        CodedReduce(fan_in=3, stragglers=3, code="cyclic")
    with pytest.raises(ValueError, match="must be one of"):
        GradientCoding(code="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'size' must be at least 'load' = 3, it is 2"):
        StaticClusters(size=2, load=3)
    with pytest.raises(ValueError, match="'segments' must be a whole number of at least 1"):
        Ring(segments=0)
    with pytest.raises(ValueError, match="holds 20 workers, there are 21"):
        Tree(fan_in=4, depth=2).plan(21)
