"""The iteration rules of the solvers, which :mod:`.solvers` describes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import scipy.linalg

from dask_coded.linear_model._objective import Objective, Point
from dask_coded.linear_model.families import Floats

_MEMORY = 10  # pairs that L-BFGS remembers
_SEARCHES = 60  # maximum number of evaluations in a line search; they cost no round
_FLAT = 0.01  # a line search ends when the slope has fallen to this fraction of its first value
_ROUNDING = 1e-14  # smaller relative differences of the objective are rounding errors


class Rule(Protocol):
    """One iteration of a solver. Immutable: state is passed on to the next rule."""

    def advance(self, objective: Objective, point: Point) -> tuple[Point, Self]:
        """Return the next point and the rule that continues from it."""
        ...


@dataclass(frozen=True)
class Gradient:
    """Steepest descent with exact line search."""

    def advance(self, objective: Objective, point: Point) -> tuple[Point, Self]:
        return _search(objective, point, -point.gradient), self


@dataclass(frozen=True)
class LBFGS:
    """The inverse Hessian, approximated from the last steps and gradient changes.

    Parameters
    ----------
    pairs : tuple of (step, change of the gradient)
    """

    pairs: tuple[tuple[Floats, Floats], ...] = ()

    def advance(self, objective: Objective, point: Point) -> tuple[Point, LBFGS]:
        after = _search(objective, point, self._direction(point.gradient))
        s, change = after.w - point.w, after.gradient - point.gradient
        # Without curvature along the step the update is undefined: drop all pairs.
        if np.vdot(s, change) <= 1e-16 * np.linalg.norm(s) * np.linalg.norm(change):
            return after, LBFGS()
        return after, LBFGS((*self.pairs, (s, change))[-_MEMORY:])

    def _direction(self, gradient: Floats) -> Floats:
        d, passed = -gradient, []
        for s, change in reversed(self.pairs):
            part = np.vdot(s, d) / np.vdot(s, change)
            d = d - part * change
            passed.append(part)
        if self.pairs:
            s, change = self.pairs[-1]
            d = d * (np.vdot(s, change) / np.vdot(change, change))
        for (s, change), part in zip(self.pairs, reversed(passed)):
            d = d + (part - np.vdot(change, d) / np.vdot(s, change)) * s
        return d


@dataclass(frozen=True)
class Newton:
    """A step to the minimum of the quadratic model, truncated far from the solution."""

    def advance(self, objective: Objective, point: Point) -> tuple[Point, Self]:
        H = objective.hessian(point.z)
        if H is None:
            d, q = self._conjugate_gradients(objective, point)
            return _search(objective, point, d, q), self
        d = np.full_like(point.w, np.nan)  # if the Hessian overflows
        if np.isfinite(H).all():
            # Without a penalty it may be singular.
            d = scipy.linalg.lstsq(H, -point.gradient)[0]
        return _search(objective, point, d), self

    def _conjugate_gradients(self, objective: Objective, point: Point) -> tuple[Floats, Floats]:
        times = objective.bend(point.z)
        d, q = np.zeros_like(point.w), np.zeros_like(point.z)
        left = -point.gradient
        v, size = left, float(np.vdot(left, left))
        # More exact steps closer to the solution make the convergence superlinear.
        enough = size * min(0.01, objective.residual(point))
        for _ in range(2 * d.size):
            if size <= enough:
                break
            Hv, Xv = times(v)
            curvature = float(np.vdot(v, Hv))
            if curvature <= 1e-16 * np.vdot(v, v):
                # The model has no minimum along v; the line search finds the objective's, if any.
                if not d.any():
                    d, q = v, Xv
                break
            step = size / curvature
            d, q, left = d + step * v, q + step * Xv, left - step * Hv
            size, before = float(np.vdot(left, left)), size
            v = left + size / before * v
        return d, q


@dataclass(frozen=True)
class Proximal:
    """A gradient step and the proximal map, followed by a backtracking line search.

    Parameters
    ----------
    step : float or None
        Length of the gradient step; None computes it from the curvature along the gradient.
    """

    step: float | None = None

    def advance(self, objective: Objective, point: Point) -> tuple[Point, Proximal]:
        step = self.step or _first_step(objective, point)
        d = objective.shrink(point.w - step * point.gradient, step) - point.w
        q = objective.predict(d)
        here = objective.value(point.w, point.z)
        gain = float(np.vdot(point.gradient, d))
        gain += objective.corner(point.w + d) - objective.corner(point.w)
        t = 1.0
        for _ in range(_SEARCHES):
            there = objective.value(point.w + t * d, point.z + t * q)
            if there <= here + 1e-4 * t * gain + _ROUNDING * abs(here):
                break
            t /= 2
        after = objective.point(point.w + t * d, point.z + t * q)
        s, change = after.w - point.w, after.gradient - point.gradient
        along = float(np.vdot(s, change))
        return after, Proximal(float(np.vdot(s, s)) / along if along > 0 else 2 * step)


@dataclass(frozen=True)
class Nesterov:
    """Proximal gradient with momentum; the current point is the extrapolated one.

    Parameters
    ----------
    step : float or None
        Length of the gradient step; None computes it from the curvature along the gradient.
    before : (coefficients, predictions) or None
        Of the previous iterate, not extrapolated.
    time : float
        Grows with the momentum; 1 at a restart.
    """

    step: float | None = None
    before: tuple[Floats, Floats] | None = field(default=None, repr=False)
    time: float = 1.0

    def advance(self, objective: Objective, point: Point) -> tuple[Point, Nesterov]:
        # Steps may grow again because the curvature may have decreased.
        step = 1.05 * self.step if self.step else _first_step(objective, point)
        here = objective.smooth(point.w, point.z)
        for _ in range(_SEARCHES):
            w = objective.shrink(point.w - step * point.gradient, step)
            d = w - point.w
            z = point.z + objective.predict(d)
            square = float(np.vdot(d, d))
            model = here + float(np.vdot(point.gradient, d)) + square / (2 * step)
            excess = objective.smooth(w, z) - model
            if excess <= _ROUNDING * abs(here) or not (square and np.isfinite(excess)):
                break
            # Slightly less than the step that the curvature along d allows.
            step = min(step / 2, 0.9 / (1 / step + 2 * excess / square))
        w_before, z_before = self.before or (point.w, point.z)
        if np.vdot(point.w - w, w - w_before) > 0:
            time, momentum = 1.0, 0.0
        else:
            time = (1 + (1 + 4 * self.time**2) ** 0.5) / 2
            momentum = (self.time - 1) / time
        after = objective.point(w + momentum * (w - w_before), z + momentum * (z - z_before))
        return after, Nesterov(step, (w, z), time)


RULES: dict[str, Any] = {
    "gradient": Gradient,
    "lbfgs": LBFGS,
    "newton": Newton,
    "nesterov": Nesterov,
    "proximal": Proximal,
}


# -- along a line ------------------------------------------------------------------------------


def _search(objective: Objective, point: Point, d: Floats, q: Floats | None = None) -> Point:
    """Return the approximate minimum of the smooth objective on the ray from a point along ``d``.

    The objective is convex, so its slope grows along the ray. The search brackets the zero of the
    slope, then applies false position (Illinois). It uses slopes because they show differences that
    values lose to rounding.
    """
    if np.vdot(point.gradient, d) >= 0:
        d, q = -point.gradient, None
    if q is None:
        q = objective.predict(d)

    def slope(t: float) -> float:
        return objective.slope(point.w + t * d, point.z + t * q, d, q)

    low, at_low = 0.0, slope(0.0)
    flat = _FLAT * abs(at_low)
    high, at_high = 1.0, slope(1.0)
    for _ in range(_SEARCHES):
        if at_high >= -flat:
            break
        low, at_low, high = high, at_high, 4 * high
        at_high = slope(high)
    t, at_t = high, at_high
    for _ in range(_SEARCHES):
        if abs(at_t) <= flat:
            break
        if at_high <= at_low:
            t = low  # rounding hides the slope
            break
        t = (low * at_high - high * at_low) / (at_high - at_low)
        if not low < t < high:
            t = low  # the bracket is at machine precision; here the slope is still negative
            break
        before, at_t = at_t, slope(t)
        if at_t < 0:
            low, at_low = t, at_t
            at_high /= 2 if before < 0 else 1
        else:
            high, at_high = t, at_t
            at_low /= 2 if before > 0 else 1
    return objective.point(point.w + t * d, point.z + t * q)


def _first_step(objective: Objective, point: Point) -> float:
    """Return the inverse of the curvature along the gradient; takes one round."""
    g = point.gradient
    square = float(np.vdot(g, g))
    q = objective.predict(g)
    curvature = objective.curvature(point.z, g, q)
    return square / curvature if curvature > 0 else 1.0
