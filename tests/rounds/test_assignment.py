"""First assignments: each stripe exactly often enough, and no load longer than necessary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, Repetition
from dask_coded.rounds import InfeasibleError, Layout, deal, fluid_time

speeds_strategy = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 10)), min_size=2, max_size=12)


def covered(layout: Layout, ranges: list) -> np.ndarray:
    """Return the copies of each stripe per group; check that no piece is dealt a stripe twice."""
    held = np.zeros((layout.pieces, layout.stripes), dtype=int)
    for worker, mine in enumerate(ranges):
        for run in mine:
            assert layout.host[run.piece] == worker
            assert 0 <= run.start < run.stop <= layout.stripes
            held[run.piece, run.start : run.stop] += 1
    assert held.max() <= 1
    out = np.zeros((len(layout.need), layout.stripes), dtype=int)
    np.add.at(out, layout.group, held)
    return out


def slowest(layout: Layout, ranges: list, speeds: np.ndarray) -> float:
    return max(
        sum(layout.cost(run) for run in mine) / speed
        for mine, speed in zip(ranges, speeds, strict=True)
        if mine
    )


@given(speeds_strategy, st.data(), st.integers(1, 80))
def test_ring_covers_every_stripe_k_times(speeds: list, data: st.DataObject, stripes: int) -> None:
    k = data.draw(st.integers(1, len(speeds)))
    check_ring(np.array(speeds), k, stripes)


def test_no_load_overlaps_itself_if_loads_end_within_a_stripe() -> None:
    check_ring(np.array([0.25, 0.25, 1.0, 1.0, 0.25, 0.25]), k=3, stripes=1)


@given(st.data(), st.integers(1, 6), st.integers(1, 40))
def test_speeds_of_any_size(data: st.DataObject, need: int, stripes: int) -> None:
    powers = st.one_of(st.none(), st.integers(-300, 300))
    found = data.draw(st.lists(powers, min_size=need, max_size=9))
    u = np.array([0.0 if power is None else 10.0**power for power in found])
    assume((u > 0).sum() >= need)
    for code in [MDS(len(u), need), Repetition(len(u), len(u))]:
        layout = Layout.of(code, code.place.tolist(), np.ones((1, stripes)))
        ranges = deal(layout, u)
        assert (covered(layout, ranges) == (need if isinstance(code, MDS) else 1)).all()
        assert not any(mine for mine, speed in zip(ranges, u, strict=True) if not speed)


def check_ring(u: np.ndarray, k: int, stripes: int) -> None:
    code = MDS(len(u), k)
    layout = Layout.of(code, range(len(u)), np.ones((1, stripes)))
    if (u > 0).sum() < k:
        with pytest.raises(InfeasibleError, match="wait for lost workers"):
            deal(layout, u)
        return
    ranges = deal(layout, u)
    assert (covered(layout, ranges) == k).all()
    bound = fluid_time(u, k, stripes)
    # Rounding to whole stripes costs at most one stripe of one worker.
    assert slowest(layout, ranges, u) <= bound + 1 / u[u > 0].min() + 1e-9


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.data())
def test_fluid_time_is_the_water_level(rates: list, data: st.DataObject) -> None:
    u = np.array(rates)
    assume((u > 1e-3).any())
    u[u <= 1e-3] = 0
    need = data.draw(st.integers(1, int((u > 0).sum())))
    time = fluid_time(u, need, size=7.0)
    assert np.minimum(u * time, 7.0).sum() == pytest.approx(need * 7.0, rel=1e-9)
    lags = np.array(data.draw(st.lists(st.floats(0, 5), min_size=len(u), max_size=len(u))))
    time = fluid_time(u, need, 7.0, lags)
    done = np.minimum(u * np.maximum(time - lags, 0.0), 7.0)
    assert done.sum() == pytest.approx(need * 7.0, rel=1e-9)
    pieces = np.array(data.draw(st.lists(st.integers(1, 3), min_size=len(u), max_size=len(u))))
    need = data.draw(st.integers(1, int(pieces[u > 0].sum())))
    time = fluid_time(u, need, 7.0, pieces=pieces)
    assert np.minimum(u * time, 7.0 * pieces).sum() == pytest.approx(need * 7.0, rel=1e-9)


@given(st.data(), st.integers(2, 7), st.integers(1, 40))
def test_every_stripe_is_covered_by_workers_of_any_speed(
    data: st.DataObject, places: int, stripes: int
) -> None:
    """Empty blocks, and speeds and lags that differ by many orders of magnitude, among others."""
    code = Repetition(places, data.draw(st.integers(1, places)))
    logs = st.lists(st.floats(-6, 6), min_size=places, max_size=places)
    work = data.draw(st.lists(st.sampled_from([0, 1, 5]), min_size=places, max_size=places))
    layout = Layout.of(code, code.place, np.array(work)[code.group, None] * np.ones((1, stripes)))
    speeds, lags = 10 ** np.array(data.draw(logs)), 10 ** np.array(data.draw(logs))
    assert (covered(layout, deal(layout, speeds, lags)) == 1).all()


@pytest.mark.parametrize("code", [MDS(6, 4), Repetition(6, 3)])
def test_a_worker_that_could_not_start_in_time_gets_no_stripes(code: Code) -> None:
    places = int(code.place.max()) + 1
    layout = Layout.of(code, code.place.tolist(), np.ones((1, 48)))
    lags = np.zeros(places)
    lags[2], lags[4] = 1000.0, 5.0
    ranges = deal(layout, np.ones(places), lags)
    loads = [sum(run.stop - run.start for run in part) for part in ranges]
    assert loads[2] == 0
    others = [load for worker, load in enumerate(loads) if worker not in (2, 4)]
    assert max(others) - min(others) <= 1
    assert min(others) - loads[4] == pytest.approx(5, abs=2)
    assert (covered(layout, ranges) == code.need[:, None]).all()


@given(speeds_strategy, st.data())
@settings(deadline=None)
def test_intervals_cover_the_ring_once(speeds: list, data: st.DataObject) -> None:
    u = np.array(speeds)
    n = len(u)
    r = data.draw(st.integers(1, n))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    code = Repetition(n, r)
    sizes = rng.integers(0, 50, size=(n, 24)).astype(float) + 0.5
    layout = Layout.of(code, code.place, sizes[code.group])
    held = np.zeros(n, dtype=bool)
    held[code.group[u[code.place] > 0]] = True
    if not held.all():
        with pytest.raises(InfeasibleError):
            deal(layout, u)
        return
    ranges = deal(layout, u)
    assert (covered(layout, ranges) == 1).all()


@given(st.data(), st.booleans())
@settings(deadline=None)
def test_stripes_are_covered_after_pieces_are_rebuilt_on_any_worker(
    data: st.DataObject, exact: bool
) -> None:
    n = data.draw(st.integers(1, 6))
    r = data.draw(st.integers(1, n))
    code = Repetition(n, r) if exact else MDS(n, r)
    workers = data.draw(st.integers(1, n))
    host = data.draw(
        st.lists(st.integers(-1, workers - 1), min_size=code.pieces, max_size=code.pieces)
    )
    u = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=n, max_size=n)))
    layout = Layout.of(code, host, np.ones((1, data.draw(st.integers(1, 9)))), workers=n)
    able = (layout.host >= 0) & (u[layout.host] > 0)
    if (np.bincount(code.group[able], minlength=len(code.need)) < code.need).any():
        with pytest.raises(InfeasibleError):
            deal(layout, u)
        return
    ranges = deal(layout, u)
    assert (covered(layout, ranges) == code.need[:, None]).all()
    assert not any(mine for mine, speed in zip(ranges, u, strict=True) if not speed)


@pytest.mark.parametrize(("n", "r"), [(8, 2), (12, 3), (5, 5)])
def test_slide_reaches_the_best_possible_time(n: int, r: int) -> None:
    """The optimum is from a linear programme for the part of each block that a holder computes."""
    from scipy.optimize import linprog

    rng = np.random.default_rng(n)
    u = rng.uniform(0.2, 2, n)
    code = Repetition(n, r)
    stripes = 400
    layout = Layout.of(code, code.place, np.ones((1, stripes)))
    cost = np.zeros(code.pieces + 1)
    cost[-1] = 1
    loads = np.zeros((n, code.pieces + 1))
    loads[code.place, np.arange(code.pieces)] = 1
    loads[:, -1] = -u
    blocks = np.zeros((n, code.pieces + 1))
    blocks[code.group, np.arange(code.pieces)] = 1
    best = linprog(cost, A_ub=loads, b_ub=np.zeros(n), A_eq=blocks, b_eq=np.full(n, stripes)).fun
    assert slowest(layout, deal(layout, u), u) <= best * 1.02


def test_several_pieces_on_one_worker_share_its_speed() -> None:
    code = MDS(6, 4)
    layout = Layout.of(code, [0, 0, 1, 1, 2, 2], np.ones((1, 60)))
    u = np.array([1.0, 1.0, 2.0])
    ranges = deal(layout, u)
    assert (covered(layout, ranges) == 4).all()
    assert slowest(layout, ranges, u) == pytest.approx(60, abs=1)


def test_denser_pieces_get_fewer_stripes() -> None:
    code = MDS(3, 2)
    work = np.array([[1.0], [1.0], [4.0]]) * np.ones((3, 90))
    ranges = deal(Layout.of(code, [0, 1, 2], work), np.ones(3))
    loads = [sum(run.stop - run.start for run in mine) for mine in ranges]
    assert loads[2] < loads[0] / 3


def test_a_code_with_two_groups() -> None:
    """Two independent (3, 2) groups: blocks 0, 1 and blocks 2, 3."""
    parity = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    code = Code(np.vstack([np.eye(4), parity]), group=[0, 0, 1, 1, 0, 1], need=[2, 2])
    layout = Layout.of(code, range(6), np.ones((1, 30)))
    assert (covered(layout, deal(layout, np.ones(6))) == 2).all()
    assert code.tolerance == 1


@pytest.mark.parametrize(
    ("place", "group"),
    [
        ([0, 0, 1], [0, 1, 0]),  # not as many pieces on each place
        ([0, 0, 1, 1, 2, 2], [0, 2, 1, 0, 2, 1]),  # the other way around the ring
        ([0, 1, 2, 0, 1, 2], [0, 1, 2, 1, 2, 0]),  # not ordered by place
        ([0] * 4 + [1] * 4, [0, 1, 0, 1, 1, 0, 1, 0]),  # more pieces on a place than blocks
    ],
)
def test_copies_that_lie_otherwise_than_those_of_repetition(place: list, group: list) -> None:
    blocks = max(group) + 1
    code = Code(np.eye(blocks)[group], place=place, group=group, need=np.ones(blocks))
    layout = Layout.of(code, place, np.ones((1, 4)))
    u = np.arange(1.0, code.n + 1)
    assert (covered(layout, deal(layout, u)) == 1).all()


def test_a_ring_of_blocks_that_each_need_two_pieces() -> None:
    cyclic = Repetition(3, 2)
    code = Code(
        np.vander(np.arange(1.0, 7.0), 6), place=cyclic.place, group=cyclic.group, need=[2, 2, 2]
    )
    layout = Layout.of(code, cyclic.place.tolist(), np.ones((1, 4)))
    assert (covered(layout, deal(layout, np.ones(3))) == 2).all()


@pytest.mark.parametrize("gap", [1e-5, 1e-6, 1e-7, 3e-8, 1e-8, 3e-9, 1e-9, 1e-11, 1e-13, 0.0])
def test_pieces_that_depend_on_each_other_nearly_are_dealt(gap: float) -> None:
    """One was taken out and put back for ever, on the event loop of the scheduler."""
    code = Code([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [1, 1, 1 + gap], [1, 1, 1]])
    layout = Layout.of(code, list(range(6)), np.ones((6, 4)))
    dealt = deal(layout, np.array([1.0, 0.2, 0.2, 1.0, 1.0, 1.0]))
    counts = np.zeros(4, dtype=int)
    for part in [part for parts in dealt for part in parts]:
        counts[part.start : part.stop] += 1
    assert (counts == 3).all()
