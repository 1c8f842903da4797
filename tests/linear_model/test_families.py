"""Families: values, and derivatives compared with finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.linear_model import (
    Hinge,
    Logistic,
    Multinomial,
    Penalty,
    SquaredError,
    SquaredHinge,
)

SEPARATE = [SquaredError(), Logistic(), SquaredHinge(), Hinge(1.0), Hinge(0.1)]
numbers = st.floats(-5, 5)


@pytest.mark.parametrize("family", SEPARATE, ids=repr)
@given(z=numbers, y=st.sampled_from([-1.0, 1.0]))
def test_derivatives(family, z, y):
    z, y, h = np.array([z]), np.array([y]), 1e-6
    slope = (family.loss(z + h, y) - family.loss(z - h, y)) / (2 * h)
    np.testing.assert_allclose(family.slope(z, y), slope, atol=1e-5)
    # Finite differences across a corner of the slope are meaningless.
    if isinstance(family, (Hinge, SquaredHinge)):
        inside = 1 - y * z
        corners = [0.0, getattr(family, "width", 0.0)]
        if min(abs(inside[0] - corner) for corner in corners) < 1e-3:
            return
    bend = (family.slope(z + h, y) - family.slope(z - h, y)) / (2 * h)
    np.testing.assert_allclose(family.curvature(z, y), bend, atol=1e-5)
    np.testing.assert_allclose(family.bend(z, y, 3 * y), 3 * y * bend, atol=1e-4)


@given(z=st.lists(numbers, min_size=3, max_size=3), label=st.integers(0, 2))
def test_derivatives_of_softmax(z, label):
    family, h = Multinomial(), 1e-6
    z, y = np.array([z]), np.eye(3)[[label]]
    for direction in np.eye(3):
        d = h * direction[np.newaxis]
        slope = (family.loss(z + d, y).sum() - family.loss(z - d, y).sum()) / (2 * h)
        assert family.slope(z, y)[0] @ direction == pytest.approx(slope, abs=1e-6)
        bend = (family.slope(z + d, y) - family.slope(z - d, y)) / (2 * h)
        np.testing.assert_allclose(family.bend(z, y, direction[np.newaxis]), bend, atol=1e-6)


def test_softmax_of_two_classes_is_logistic():
    z = np.linspace(-40, 40, 9)
    both = np.stack([np.zeros(9), z], axis=1)
    labels = np.arange(9) % 2
    np.testing.assert_allclose(
        Multinomial().loss(both, np.eye(2)[labels])[:, 0],
        Logistic().loss(z, 2.0 * labels - 1),
        atol=1e-14,
    )


@given(z=numbers, y=st.sampled_from([-1.0, 1.0]), width=st.floats(1e-3, 2))
def test_a_smooth_hinge_is_below_the_hinge_by_at_most_half_its_width(z, y, width):
    z, y = np.array([z]), np.array([y])
    below = Hinge(0).loss(z, y) - Hinge(width).loss(z, y)
    assert -1e-15 <= below[0] <= width / 2 + 1e-15


def test_losses_of_huge_predictions_are_finite():
    z = np.array([1e300, -1e300])
    assert np.isfinite(Logistic().loss(z, np.array([-1.0, 1.0]))).all()
    assert np.isfinite(Multinomial().loss(z[np.newaxis], np.eye(2)[:1])).all()


@given(w=numbers, step=st.floats(0.01, 2), l1=st.floats(0, 2))
def test_shrink_is_the_proximal_map(w, step, l1):
    penalty = Penalty(l1=l1)
    found = penalty.shrink(np.array([w]), step)

    def cost(v):
        return step * penalty.corner(v) + ((v - w) ** 2).sum() / 2

    for other in (found + 1e-3, found - 1e-3, np.zeros(1), np.array([w])):
        assert cost(found) <= cost(other) + 1e-12


def test_penalties_of_several_targets_are_those_of_each():
    w = np.random.default_rng(0).standard_normal((4, 2))
    both = Penalty(l1=(0.1, 0.5), l2=(2.0, 0.0))
    each = [Penalty(l1=0.1, l2=2.0), Penalty(l1=0.5)]
    assert both.value(w) == pytest.approx(sum(p.value(v) for p, v in zip(each, w.T)))
    for name, rest in (("gradient", ()), ("shrink", (0.7,))):
        expected = [getattr(p, name)(v, *rest) for p, v in zip(each, w.T)]
        np.testing.assert_array_equal(getattr(both, name)(w, *rest).T, expected)
    for targets in ((), (3,)):
        with pytest.raises(ValueError, match="'l1' must be one number or one for each target"):
            both.check(targets)


@pytest.mark.parametrize(
    "wrong", [{"l1": -1.0}, {"l2": float("nan")}, {"l2": float("inf")}, {"l2": (1.0, -1.0)}]
)
def test_penalties_out_of_range(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"'{name}' must be 0 or a positive number"):
        Penalty(**wrong)
