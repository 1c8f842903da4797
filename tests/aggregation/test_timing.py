"""Timing models, compared with the plans, with numerical integration and with limiting cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded import aggregation
from dask_coded.aggregation.timing import (
    Costs,
    Packing,
    Shape,
    Straggling,
    communication,
    predict,
    recommend,
    shapes,
)

COSTS = Costs(latency=1e-3, bandwidth=1e7, summation=1e-9, computation=0.6)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 12, 84, 156])
def test_every_shape_is_an_aggregation_of_the_same_load(workers):
    found = list(shapes(workers, stragglers=(1, 3)))
    assert {"Ring", "Star"} <= {shape.kind for shape in found}
    for shape in found:
        plan = getattr(aggregation, shape.kind)(**shape.parameters).plan(workers)
        assert plan.load == pytest.approx(shape.load(workers))


def test_loads_are_those_of_the_paper():
    assert Shape("CodedReduce", 4, 3, 1).load(84) == pytest.approx(1 / 14)
    assert Shape("CodedReduce", 12, 2, 1).load(156) == pytest.approx(1 / 42)
    assert Shape("CodedReduce", 12, 2, 3).load(156) == pytest.approx(1 / 12)


@given(
    st.integers(1, 60),
    st.floats(0, 0.9),
    st.integers(1, 3),
)
def test_the_delay_of_groups_is_that_of_the_integral(groups, share, copies):
    # E max = the integral of 1 - P(all groups are done by t).
    t = np.linspace(0, 40, 40_001)
    done = (1 - (share * np.exp(-t)) ** copies) ** groups
    expected = np.trapezoid(1 - done, t)
    assert Straggling(share, 1.0).delay(groups, copies) == pytest.approx(expected, abs=1e-3)


def test_communication_of_one_worker_and_of_large_rings():
    assert communication(Shape("Ring"), COSTS, 1, 1e6) == 0
    few, many = (communication(Shape("Ring"), COSTS, n, 1e9) for n in (50, 500))
    assert many == pytest.approx(few, rel=0.03)


def test_segments_follow_each_other_through_a_tree():
    whole, cut = (
        communication(Shape("Tree", 3, 2, segments=s), Costs(0.0, 1e6), 12, 8e6) for s in (1, 8)
    )
    assert cut == pytest.approx(whole * 9 / 16)


def test_two_steps_at_once_take_the_longer_half():
    one, two, three = (predict(Shape("Ring"), COSTS, 4, 1e6, width=w) for w in (1, 2, 3))
    assert one.seconds == one.computation + one.communication
    assert two.seconds == three.seconds == max(one.computation, one.communication)


def test_compression_takes_the_processor_and_frees_the_link():
    packed = predict(Shape("Star"), COSTS, 4, 8e6, packing=Packing("GradiVeQ 8x", 8, 0.01))
    plain = predict(Shape("Star"), COSTS, 4, 1e6)
    assert packed.communication == plain.communication
    assert packed.computation == pytest.approx(plain.computation + 0.01)
    assert str(packed).startswith("Star, width 1, GradiVeQ 8x: predicted ")


def test_rings_win_for_large_gradients_and_codes_where_workers_are_late():
    assert recommend(COSTS, 12, 8e6).best.shape.kind == "Ring"
    assert recommend(COSTS, 12, 4e3).best.shape.kind in ("Star", "Tree")
    late = Straggling(share=0.05, mean=5.0)
    assert recommend(COSTS, 12, 4e3, straggling=late).best.shape.stragglers == 1
    both = recommend(COSTS, 12, 8e6, widths=(1, 2), packings=[Packing("8 bit", 4)])
    assert (both.best.width, both.best.packing.name) == (2, "8 bit")
    assert both.best.seconds <= min(other.seconds for other in both.others)


def test_arguments_are_checked():
    star = Shape("Star")
    for name, call in (
        ("latency", lambda: Costs(-1.0, 1.0)),
        ("latency", lambda: Costs(np.nan, 1.0)),
        ("latency", lambda: Costs("1 ms", 1.0)),
        ("bandwidth", lambda: Costs(0.0, 0.0)),
        ("share", lambda: Straggling(2.0, 1.0)),
        ("mean", lambda: Straggling(0.5, -1.0)),
        ("copies", lambda: Straggling(0.5, 1.0).delay(3, copies=0)),
        ("ratio", lambda: Packing("none", 0.0)),
        ("seconds", lambda: Packing("none", 1.0, np.nan)),
        ("workers", lambda: recommend(COSTS, 0, 8)),
        ("workers", lambda: recommend(COSTS, 2.5, 8)),
        ("nbytes", lambda: recommend(COSTS, 2, 0)),
        ("nbytes", lambda: recommend(COSTS, 2, "8 MB")),
        ("widths", lambda: recommend(COSTS, 2, 8, widths=())),
        ("width", lambda: recommend(COSTS, 2, 8, widths=(0,))),
        ("stragglers", lambda: recommend(COSTS, 2, 8, stragglers=(-1,))),
        ("workers", lambda: communication(star, COSTS, 0, 8)),
        ("nbytes", lambda: communication(star, COSTS, 2, -8)),
    ):
        with pytest.raises(ValueError, match=f"^Argument '{name}' must "):
            call()
