"""The round engine under arbitrary speeds, deaths, late and duplicate messages."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, RandomLinear, Repetition
from dask_coded.rounds import (
    Assembler,
    Assign,
    Command,
    Finish,
    Geometry,
    Layout,
    Reporting,
    Round,
    RoundState,
    StripeRange,
    Withdraw,
)
from dask_coded.rounds.assignment import InfeasibleError, all_tried
from dask_coded.rounds.marks import bits_of
from dask_coded.rounds.policies import POLICIES, Continuous


def as_bits(marks: np.ndarray) -> int:
    return sum(1 << stripe for stripe in marks.nonzero()[0].tolist())


@dataclass
class Cluster:
    """Workers in virtual time, each computing the stripes of its list one by one.

    Commands and shares take ``latency`` seconds. A worker falls silent at its time of death, and
    the round is notified ``notice`` seconds later. What workers in ``corrupt`` compute is wrong, so
    the round is told that they are lost when their first share comes. Computing the pieces in
    ``erring`` raises an exception. Workers whose ``prior`` is
    zero are asked if others have stopped, as on a cluster.
    """

    code: Code
    layout: Layout
    policy: str
    speeds: np.ndarray
    prior: np.ndarray
    latency: float = 0.001
    deaths: dict[int, float] = field(default_factory=dict)
    stopped: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    erring: frozenset[int] = frozenset()
    notice: float = 0.05
    duplicate: bool = False
    batch: int = 3
    results: dict[int, np.ndarray] | None = None

    def run(self) -> Round:
        self.round = Round(
            self.layout, POLICIES[self.policy](), self.prior, 0.0, Reporting(0.01, 0.2)
        )
        self.lists: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.workers)]
        self.current: list[tuple[int, int] | None] = [None] * self.layout.workers
        self.shares: list[tuple[StripeRange, np.ndarray]] = []
        self.batches: list[tuple[list[tuple[StripeRange, np.ndarray]], np.ndarray, np.ndarray]] = []
        self.dealt = np.zeros((self.layout.pieces, self.layout.stripes), dtype=bool)
        self.events: list = []
        self.count = itertools.count()
        self.finish = 0
        for worker, time in self.deaths.items():
            self.at(time + self.notice, "dead", worker)
        if self.stopped:
            self.at(self.notice, "reserve", -1)
        try:
            commands = self.round.start()
        except InfeasibleError:
            for worker, speed in enumerate(all_tried(self.prior)):
                self.round.expect(worker, speed)
            commands = self.round.start()
        self.obey(commands, 0.0)
        for _ in range(20_000):
            wake = self.round.wake
            if wake is not None and (not self.events or wake < self.events[0][0]):
                self.now = max(wake, getattr(self, "now", 0.0))
                self.obey(self.round.react(self.now), self.now)
            elif self.events:
                self.now, _, kind, worker, what = heapq.heappop(self.events)
                getattr(self, kind)(worker, what)
            if self.round.finished or self.round.failed or not (self.events or self.round.wake):
                return self.round
        raise AssertionError("the round does not end")

    def at(self, time: float, kind: str, worker: int, what: object = None) -> None:
        heapq.heappush(self.events, (time, next(self.count), kind, worker, what))

    def alive(self, worker: int, time: float) -> bool:
        return worker not in self.stopped and time < self.deaths.get(worker, np.inf)

    def obey(self, commands: list[Command], now: float) -> None:
        state = self.round.state
        if not (self.round.finished or self.round.failed):
            assert not self.layout.lacking(state.held.array()).any(), (
                "a stripe that nothing will finish"
            )
        if commands:
            self.check_counts(state)
        for command in commands:
            if isinstance(command, Finish):
                self.finish += 1
                continue
            for run in command.ranges:
                span = self.dealt[run.piece, run.start : run.stop]
                if isinstance(command, Assign):
                    assert not span.any(), "dealt twice"
                    assert not self.round.state.computed.of[run.piece] & bits_of(run)
                span[:] = isinstance(command, Assign)
            self.at(now + self.latency, "message", command.worker, command)

    def check_counts(self, state: RoundState) -> None:
        """What the state keeps up to date is what follows from its lists and arrays."""
        layout = self.layout
        np.testing.assert_array_equal(state.missing.clip(0), layout.lacking(state.computed.array()))
        np.testing.assert_array_equal(state.short.clip(0), layout.lacking(state.held.array()))
        assert state.unfinished != state.complete.all()
        np.testing.assert_array_equal(
            state.present, [state.available[pieces].any() for pieces in layout.pieces_of]
        )
        movable = np.zeros(layout.work.shape, dtype=bool)
        for worker, queue in enumerate(state.queues):
            owed = [(part.piece, s) for part in queue for s in range(part.start, part.stop)]
            for piece, stripe in owed[1:]:
                movable[piece, stripe] = True
            assert state.workers.todo[worker] == pytest.approx(sum(layout.work[o] for o in owed))
        np.testing.assert_array_equal(state.movable.array(), movable)
        for marks in (state.computed, state.held, state.movable):
            assert marks.of == [as_bits(row) for row in marks.array()]
        assert state.open == [as_bits(row > 0) for row in state.missing]

    def message(self, worker: int, command: Assign | Withdraw) -> None:
        stripes = [(run.piece, s) for run in command.ranges for s in range(run.start, run.stop)]
        if isinstance(command, Assign):
            self.lists[worker] += stripes
            self.work(worker, None)
        else:
            gone = set(stripes)
            self.lists[worker] = [s for s in self.lists[worker] if s not in gone]

    def work(self, worker: int, done: tuple[int, int] | None) -> None:
        if not self.alive(worker, self.now):
            return
        if done is not None:
            self.current[worker] = None
            self.at(self.now + self.latency, "share", worker, done)
            if self.duplicate:
                self.at(self.now + 3 * self.latency, "share", worker, done)
        if self.current[worker] is None and self.lists[worker]:
            self.current[worker] = piece, stripe = self.lists[worker].pop(0)
            cost = self.layout.work[piece, stripe] / self.speeds[worker]
            if piece in self.erring:
                self.current[worker] = None
                self.lists[worker] = [(p, s) for p, s in self.lists[worker] if p != piece]
                self.at(self.now + self.latency, "raised", worker, piece)
                self.work(worker, None)
            else:
                self.at(self.now + cost, "work", worker, (piece, stripe))

    def raised(self, _: int, piece: int) -> None:
        self.dealt[piece] = False
        self.obey(self.round.raised([piece], self.now), self.now)

    def share(self, worker: int, what: tuple[int, int]) -> None:
        if worker in self.corrupt:
            self.dead(worker, None)
            return
        piece, stripe = what
        run = StripeRange(piece, stripe, stripe + 1)
        seconds = self.layout.work[piece, stripe] / self.speeds[worker]
        fresh, commands = self.round.share(worker, [run], seconds, self.now)
        if fresh and self.results is not None:
            self.shares.append((run, self.results[piece][stripe : stripe + 1]))
        if self.round.finished or len(self.shares) >= self.batch:
            state = self.round.state
            self.batches.append((self.shares, state.computed.array(), state.complete))
            self.shares = []
        self.obey(commands, self.now)

    def reserve(self, _: int, __: object) -> None:
        for worker in np.flatnonzero(self.prior == 0):
            self.round.expect(worker, 1.0)
        self.obey(self.round.react(self.now), self.now)

    def dead(self, worker: int, _: object) -> None:
        for piece in self.layout.pieces_of[worker]:
            self.dealt[piece] = False
        self.obey(self.round.lost([worker], self.now), self.now)


@st.composite
def clusters(draw: st.DrawFn, doubled: bool = True) -> Cluster:
    """Draw any code on any workers; if ``doubled``, some hold the pieces of several places."""
    n = draw(st.integers(1, 9))
    kind = draw(st.sampled_from([MDS, Repetition, RandomLinear]))
    code: Code = kind(n, draw(st.integers(1, n)))
    stripes = draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    workers = draw(st.integers(1, code.n)) if doubled else code.n
    host = code.place if workers == code.n else rng.integers(0, workers, code.n)[code.place]
    speeds = rng.uniform(20, 200, workers)
    slow = draw(st.lists(st.integers(0, workers - 1), max_size=3))
    speeds[slow] /= draw(st.sampled_from([5, 50]))
    work = rng.uniform(0.5, 2, (code.pieces, stripes))
    if code.exact:
        work = work[code.group]
    layout = Layout.of(code, host, work, workers)
    down: list[int] = []
    for worker in draw(st.permutations(range(workers)))[: draw(st.integers(0, workers - 1))]:
        left = ~np.isin(host, [*down, worker])
        if not layout.lacking(left[:, None]).any():
            down.append(worker)
    silent = draw(st.integers(0, len(down)))
    wrong = draw(st.integers(silent, len(down)))
    policy = draw(st.sampled_from(sorted(POLICIES)))
    deaths = {w: float(rng.uniform(0, 0.5)) for w in down[wrong:]}
    stopped = frozenset(down[:silent])
    prior = np.ones(workers) if draw(st.booleans()) else rng.uniform(0.1, 2, workers)
    prior[draw(st.lists(st.integers(0, workers - 1), max_size=3))] = 0.0  # not trusted
    return Cluster(
        code,
        layout,
        policy,
        speeds,
        prior,
        deaths=deaths,
        stopped=stopped,
        corrupt=frozenset(down[silent:wrong]),
        duplicate=draw(st.booleans()),
        batch=draw(st.integers(1, 30)),
    )


def _results(cluster: Cluster, stripes: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((cluster.code.k, stripes))
    cluster.results = dict(enumerate(np.asarray(p) for p in cluster.code.encode(list(blocks))))
    return blocks


@given(clusters())
@settings(deadline=None, max_examples=100)
def test_a_round_with_enough_surviving_pieces_ends_and_decodes(cluster: Cluster) -> None:
    stripes = cluster.layout.stripes
    blocks = _results(cluster, stripes)
    round_ = cluster.run()
    assert round_.finished and not round_.failed
    assert cluster.finish == 1
    code = cluster.code
    geometry = Geometry((stripes,) * code.k, stripes, mixed=not code.exact)
    assembler = Assembler(code, geometry, "f8")
    for shares, computed, ready in cluster.batches:
        assembler.add(shares, computed, ready)
    np.testing.assert_allclose(
        assembler.rows.reshape(code.k, stripes), blocks, rtol=1e-7, atol=1e-7
    )


@given(st.permutations(range(8)), st.integers(1, 60), st.integers(1, 3), st.data())
def test_shares_in_any_parts_are_decoded(
    order: list[int], stacked: int, width: int, data: st.DataObject
) -> None:
    """Also if few rows are recovered at a time, and if blocks end within the last stripe."""
    code, stripes = MDS(8, 5), 4
    geometry = Geometry((9, 8, 9, 8, 8), stripes, mixed=True)
    rng = np.random.default_rng(0)
    blocks = [rng.standard_normal((rows, width)) for rows in geometry.rows]
    pieces = [np.pad(b, [(0, 9 - len(b)), (0, 0)]) for b in blocks]
    pieces = list(code.encode(pieces))
    assembler = Assembler(code, geometry, "f8", (width,))
    edges, computed = geometry.edges(0), np.zeros((8, stripes), dtype=bool)
    with mock.patch("dask_coded.rounds.decode._STACKED", stacked):
        for piece in order:
            cut = data.draw(st.integers(0, stripes))
            for start, stop in ((cut, stripes), (0, cut)):
                if start < stop:
                    rows = pieces[piece][edges[start] : edges[stop]]
                    computed[piece, start:stop] = True
                    ready = computed.sum(axis=0) >= 5
                    assembler.add([(StripeRange(piece, start, stop), rows)], computed, ready)
    np.testing.assert_allclose(assembler.rows, np.concatenate(blocks), atol=1e-9)


@given(clusters(doubled=False), st.integers(0, 8))
@settings(deadline=None)
def test_a_round_with_too_few_surviving_pieces_fails(cluster: Cluster, first: int) -> None:
    tolerance = cluster.code.tolerance
    if tolerance + 1 > cluster.code.n:
        return
    # Neighbouring places: for repetition these hold all copies of some block.
    gone = [(first + i) % cluster.code.n for i in range(tolerance + 1)]
    cluster.deaths = dict.fromkeys(gone, 1e-6)
    cluster.stopped = cluster.corrupt = frozenset()
    if cluster.code.survives(gone):
        return
    round_ = cluster.run()
    assert not round_.finished
    assert "too few are within reach" in str(round_.failed)


@given(clusters(), st.data())
@settings(deadline=None, max_examples=100)
def test_pieces_that_raise_exceptions_end_a_round_only_if_the_others_do_not_suffice(
    cluster: Cluster, data: st.DataObject
) -> None:
    layout, stripes = cluster.layout, cluster.layout.stripes
    cluster.erring = frozenset(data.draw(st.sets(st.integers(0, layout.pieces - 1))))
    lost = np.isin(layout.host, [*cluster.deaths, *cluster.corrupt, *cluster.stopped])
    erring = np.isin(np.arange(layout.pieces), list(cluster.erring))
    sufficient = not layout.lacking(~(lost | erring)[:, None]).any()
    if not sufficient:
        cluster.stopped = frozenset()  # the round would wait for them
    blocks = _results(cluster, stripes)
    round_ = cluster.run()
    if not round_.finished:
        assert round_.failed and round_.erred and not sufficient
        return
    code = cluster.code
    geometry = Geometry((stripes,) * code.k, stripes, mixed=not code.exact)
    assembler = Assembler(code, geometry, "f8")
    for shares, computed, ready in cluster.batches:
        assembler.add(shares, computed, ready)
    np.testing.assert_allclose(
        assembler.rows.reshape(code.k, stripes), blocks, rtol=1e-7, atol=1e-7
    )


def test_a_round_that_lost_too_many_workers_does_not_blame_exceptions() -> None:
    code = MDS(4, 2)
    round_ = Round(
        Layout.of(code, range(4), np.ones((1, 4))), POLICIES["static"](), np.ones(4), 0.0
    )
    round_.start()
    round_.lost([0, 1, 2], 0.1)
    assert round_.failed and not round_.erred
    other = Round(Layout.of(code, range(4), np.ones((1, 4))), POLICIES["static"](), np.ones(4), 0.0)
    other.start()
    other.lost([0, 1], 0.1)
    other.raised([2], 0.2)
    assert other.failed and other.erred


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_round_with_too_few_independent_surviving_pieces_fails(policy: str) -> None:
    code = RandomLinear(10, 7)
    lost = next(s for s in itertools.combinations(range(10), 3) if not code.survives(s))
    cluster = Cluster(
        code,
        Layout.of(code, range(10), np.ones((1, 8))),
        policy,
        np.full(10, 50.0),
        np.ones(10),
        deaths=dict.fromkeys(lost, 1e-6),
    )
    round_ = cluster.run()
    assert not round_.finished
    assert "needs 7 independent pieces, too few are within reach: 7 of 10" in str(round_.failed)


def test_a_round_ends_with_the_first_pieces_that_decode_not_with_the_first_k() -> None:
    code = RandomLinear(10, 7)
    round_ = Round(
        Layout.of(code, range(10), np.ones((1, 4))), POLICIES["static"](), np.ones(10), 0.0
    )
    round_.start()
    lost = next(s for s in itertools.combinations(range(10), 3) if not code.survives(s))
    for worker in set(range(10)) - set(lost):
        round_.share(worker, [StripeRange(worker, 0, 4)], 1.0, 1.0)
        assert not round_.finished
    rank = code.span(round_.state.computed.at(0)).rank
    assert (round_.state.missing == 7 - rank).all()
    for worker in lost:
        if not round_.finished:
            round_.share(worker, [StripeRange(worker, 0, 4)], 1.0, 2.0)
    assert round_.finished


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_events_after_the_end_change_nothing(policy: str) -> None:
    code = MDS(3, 2)
    cluster = Cluster(
        code, Layout.of(code, range(3), np.ones((1, 4))), policy, np.ones(3) * 50, np.ones(3)
    )
    round_ = cluster.run()
    assert round_.finished
    before = round_.state.computed.array()
    assert round_.share(0, [StripeRange(0, 0, 4)], 1.0, 99.0) == ([], [])
    assert round_.lost([0, 1, 2], 99.0) == []
    assert round_.react(99.0) == []
    assert (round_.state.computed.array() == before).all()


def test_a_move_between_workers_with_several_pieces_leaves_no_stripe_short() -> None:
    """Worker 0 owes the same stripes of two pieces; worker 1 can replace only one of them."""
    layout = Layout.of(MDS(4, 3), [0, 0, 1, 2], np.ones((1, 8)))
    state = RoundState(layout, np.ones(3), 0.0)
    state.assign(0, [StripeRange(0, 0, 8), StripeRange(1, 0, 8)])
    state.assign(2, [StripeRange(3, 0, 8)])
    policy = Continuous()
    moved = policy._move(state, donor=0, receiver=1, amount=16.0, most=16.0)
    assert moved == 8
    assert not layout.lacking(state.held.array()).any()
    given = [c.ranges for c in state.commands if isinstance(c, Assign) and c.worker == 1]
    assert given == [(StripeRange(2, 0, 8),)]


@pytest.mark.parametrize("seed", range(30))
def test_a_round_ends_when_each_worker_holds_two_pieces(seed: int) -> None:
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(50, 150, 4)
    speeds[:2] /= 20
    code = MDS(8, 6)
    layout = Layout.of(code, [0, 1, 2, 3, 0, 1, 2, 3], np.ones((1, 40)))
    round_ = Cluster(code, layout, "continuous", speeds, np.ones(4)).run()
    assert round_.finished


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("code", [MDS(6, 4), Repetition(6, 3)], ids=repr)
def test_a_round_ends_if_a_worker_stops_beside_two_that_are_not_trusted(policy, code) -> None:
    for stopped, *distrusted in [(0, 1, 2), (3, 5, 0), (1, 4, 5)]:
        for corrupt in (distrusted[:1], []):
            cluster = Cluster(
                code,
                Layout.of(code, code.place, np.ones((1, 12))),
                policy,
                np.full(6, 50.0),
                np.where(np.isin(np.arange(6), distrusted), 0.0, 1.0),
                stopped=frozenset([stopped]),
                corrupt=frozenset(corrupt),
            )
            assert cluster.run().finished


def _ratio(policy: str, n: int, k: int, speeds: np.ndarray, prior: np.ndarray) -> float:
    from dask_coded.rounds import fluid_time

    code = MDS(n, k)
    cluster = Cluster(
        code,
        Layout.of(code, range(n), np.ones((1, 64))),
        policy,
        speeds,
        prior,
        latency=1e-6,
    )
    cluster.run()
    return cluster.now / fluid_time(speeds, k, 64)


@pytest.mark.parametrize("slow", [1, 5])
def test_no_work_is_wasted_if_not_every_k_pieces_decode(slow: float) -> None:
    """With known speeds, a sparse code takes as long as a code of which any k pieces suffice."""
    speeds = np.array([50.0 / slow] * 2 + [50.0] * 10)
    seconds = {}
    for code in (MDS(12, 8), RandomLinear(12, 8)):
        cluster = Cluster(
            code, Layout.of(code, range(12), np.ones((1, 64))), "s2c2", speeds, speeds, 1e-6
        )
        round_ = cluster.run()
        assert round_.state.computed.array().sum() <= 8 * 64 * 1.02
        seconds[type(code)] = cluster.now
    assert seconds[RandomLinear] < 1.1 * seconds[MDS]


@pytest.mark.parametrize(("n", "k"), [(10, 7), (12, 10), (12, 6)])
def test_continuous_needs_no_prediction_and_s2c2_does(n: int, k: int) -> None:
    """Ratios of round times to the fluid bound, which are exact in virtual time."""
    rng = np.random.default_rng(n * k)
    speeds = 100 * np.clip(1 + 0.3 * rng.standard_normal(n), 0.2, None)
    uniform = np.ones(n)
    assert _ratio("continuous", n, k, speeds, uniform) < 1.10
    assert _ratio("s2c2", n, k, speeds, speeds) < 1.05
    assert _ratio("s2c2", n, k, speeds, uniform) > _ratio("continuous", n, k, speeds, uniform)
    assert _ratio("static", n, k, speeds, uniform) > 1.2
