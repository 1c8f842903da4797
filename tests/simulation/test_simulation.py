"""Rounds in virtual time: exact durations, repeatable results, effects of policy and speed."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, RandomLinear, Repetition
from dask_coded.rounds import Layout, Reporting, Round, StripeRange, fluid_time
from dask_coded.rounds.policies import POLICIES
from dask_coded.simulation import (
    Network,
    SimulatedOperator,
    SimulatedRound,
    Simulation,
    Speeds,
    broadcast_times,
    changed,
    constant,
    drifting,
    gilbert_elliott,
    shifted_exponential,
)
from dask_coded.simulation._cluster import VirtualRound, _Worker

nan = np.nan
IDEAL = Network(latency=0.0, bandwidth=np.inf)


def ratios(rounds: list[SimulatedRound]) -> np.ndarray:
    return np.array([round_.seconds / round_.bound for round_ in rounds])


def test_equal_workers_that_compute_everything_take_the_time_of_one_piece() -> None:
    simulation = Simulation(MDS(5, 3), constant([1.0] * 5), policy="static", network=IDEAL)
    [round_] = simulation.run(1)
    assert round_.seconds == pytest.approx(1.0)
    assert round_.bound == pytest.approx(3 / 5)
    assert round_.computed == pytest.approx(5 / 3)


@pytest.mark.parametrize("policy", ["s2c2", "continuous"])
def test_perfect_prediction_reaches_the_bound(policy: str) -> None:
    speeds = constant([1.0, 0.5, 0.75, 0.25])
    simulation = Simulation(
        MDS(4, 2), speeds, policy=policy, foresight=lambda u: u, network=IDEAL, stripes=400
    )
    [round_] = simulation.run(1)
    assert round_.bound == pytest.approx(fluid_time(np.array([1.0, 0.5, 0.75, 0.25]), 2))
    assert round_.seconds <= 1.02 * round_.bound


@pytest.mark.parametrize("speeds", [constant([1.0, 0.1]), Speeds(np.array([[1.0, 0.1]]), 0.1)])
@pytest.mark.parametrize(("blocks", "bound"), [(2, 2 / 1.1), (3, 10.0)])
def test_workers_with_several_pieces(speeds: Speeds, blocks: int, bound: float) -> None:
    code = Code(MDS(4, blocks).G, place=[0, 0, 1, 1])
    [round_] = Simulation(code, speeds, network=IDEAL).run(1)
    assert round_.bound == pytest.approx(bound)
    assert round_.seconds >= 0.999 * bound


@pytest.mark.parametrize("stripes", [10, 20])
def test_without_redundancy_the_bound_is_that_of_the_slowest(stripes: int) -> None:
    speeds = Speeds(np.array([[0.3, 0.7, 1.1, 0.9, 1.3, 0.6, 0.17]]), 0.1)
    [round_] = Simulation(Code(np.eye(7)), speeds, network=IDEAL, stripes=stripes).run(1)
    assert round_.bound == pytest.approx(1 / 0.17)


@pytest.mark.parametrize("seconds", [None, 0.1])
def test_groups_that_need_several_pieces(seconds: float | None) -> None:
    parity = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    code = Code(np.vstack([np.eye(4), parity]), group=[0, 0, 1, 1, 0, 1], need=[2, 2])
    [round_] = Simulation(code, Speeds(np.ones((1, 6)), seconds), network=IDEAL).run(1)
    assert round_.bound == pytest.approx(4 / 6)
    assert round_.bound <= round_.seconds < 1.1 * round_.bound


@pytest.mark.parametrize("policy", ["s2c2", "continuous"])
def test_a_worker_that_has_recovered_gets_work_again(policy: str) -> None:
    simulation = Simulation(
        MDS(4, 2), constant([1.0] * 4), policy=policy, network=IDEAL, stripes=16
    )
    for _ in range(40):
        simulation.history.record({"0": 0.001, "1": 1.0, "2": 1.0, "3": 1.0})
    found = ratios(simulation.run(40))
    assert found[:30].min() > 1.2  # three workers do the work of four
    assert found[-1] < 1.1


def test_static_waits_for_the_slowest_worker_that_is_needed() -> None:
    simulation = Simulation(
        MDS(4, 3), constant([1.0, 1.0, 0.5, 0.1]), policy="static", network=IDEAL
    )
    assert simulation.step().seconds == pytest.approx(2.0)


def test_handling_messages_takes_the_workers_time() -> None:
    network = Network(latency=0.0, bandwidth=np.inf, handling=0.25)
    simulation = Simulation(
        Repetition(1, 1), constant([0.5]), policy="static", network=network, stripes=1
    )
    [round_] = simulation.run(1)
    # One message comes in: 0.5 s at half speed, before 2 s of computing.
    assert round_.messages == 2
    assert round_.seconds == pytest.approx(2.5)


def test_many_equal_workers_get_one_message_and_send_two_once_speeds_are_known() -> None:
    simulation = Simulation(Repetition(200, 2), constant(np.ones(200)))
    simulation.run(4)  # in the first rounds nothing is known
    assert simulation.step().messages == 3 * 200


def test_messages_and_decoding_take_their_time() -> None:
    slow = Network(latency=0.25, bandwidth=10.0, operand=1, result=0)
    simulation = Simulation(
        Repetition(2, 1), constant([1.0, 1.0]), policy="static", network=slow, decode_seconds=3.0
    )
    # The second operand leaves after the first; one message there, one back.
    assert simulation.step().seconds == pytest.approx(0.2 + 0.25 + 1.0 + 0.25 + 3.0)


def test_results_queue_at_the_coordinators_link() -> None:
    link = Network(latency=0.0, bandwidth=10.0, result=5)
    simulation = Simulation(Repetition(3, 1), constant([1.0] * 3), policy="static", network=link)
    assert simulation.step().seconds >= 1.5


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_seed_gives_the_same_rounds(policy: str) -> None:
    def run() -> list[SimulatedRound]:
        code = Repetition(8, 3) if policy == "replication" else MDS(8, 6)
        return Simulation(code, gilbert_elliott(8, 30, seed=3), policy=policy).run(30)

    assert run() == run()


def test_speeds_are_learnt_from_round_to_round() -> None:
    simulation = Simulation(MDS(6, 4), constant([1, 1, 1, 1, 1, 0.3]), policy="s2c2")
    first, *_, last = ratios(simulation.run(8))
    assert last < first
    assert last < 1.1


def test_a_sudden_slow_down_within_a_round() -> None:
    steady = Speeds(np.ones((1, 8)), seconds=0.1)
    slowed = changed(steady, [0, 1], first=3, last=1000, factor=0.2)
    [round_] = Simulation(MDS(8, 6), slowed, network=IDEAL).run(1)
    # 0.3 s at full speed, then at the speed of 6.4 workers.
    assert round_.bound == pytest.approx(0.3 + (6 - 8 * 0.3) / 6.4)
    assert round_.seconds < 1.2 * round_.bound


def test_two_workers_die_in_the_middle_of_a_round_and_return() -> None:
    steady = Speeds(np.ones((1, 8)), seconds=0.1)
    speeds = changed(steady, [2, 5], first=3, last=12, factor=nan)
    simulation = Simulation(MDS(8, 6), speeds)
    rounds = simulation.run(3)
    assert (ratios(rounds) < 1.3).all()
    assert rounds[0].bound == pytest.approx(0.3 + (6 - 8 * 0.3) / 6)


def test_a_stopped_worker_is_distinguished_from_a_busy_one() -> None:
    stopped = constant([1, 1, 1, 0, 1, 1])
    rounds = Simulation(MDS(6, 4), stopped).run(4)
    assert (ratios(rounds) < 1.35).all()


def test_too_many_losses_are_reported() -> None:
    simulation = Simulation(MDS(4, 3), constant([1, 1, nan, nan]))
    with pytest.raises(RuntimeError, match="too few are within reach: 2 of 4 are left"):
        simulation.step()
    simulation = Simulation(MDS(4, 3), constant([1, 1, 0, 0]), policy="static")
    with pytest.raises(RuntimeError, match="All workers that could finish it have stopped"):
        simulation.step()


@pytest.mark.timeout(60)  # without an end, a round wakes for ever
@pytest.mark.parametrize("seconds", [None, 0.3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_round_ends_that_workers_which_have_stopped_could_finish(
    policy: str, seconds: float | None
) -> None:
    copies = policy == "replication"
    code: Code = Repetition(4, 2) if copies else MDS(4, 3)
    values = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    with pytest.raises(RuntimeError, match="All workers that could finish it have stopped"):
        Simulation(code, Speeds(values, seconds), policy=policy).step()
    # One more suffices, also if it works for a while only.
    values[0, 2] = 1.0
    assert Simulation(code, Speeds(values, seconds), policy=policy).step().seconds < 100


def test_a_round_ends_whose_policy_does_not_use_the_workers_that_are_left() -> None:
    def assigner(layout: Layout, speeds: np.ndarray) -> tuple[list[list[StripeRange]], np.ndarray]:
        whole = [StripeRange(piece, 0, layout.stripes) for piece in range(layout.pieces)]
        return [[whole[0]], [whole[2]]], np.zeros(2)

    stopped = Speeds(np.array([[1.0, 0.0]]), seconds=0.3)
    with pytest.raises(RuntimeError, match="All workers that could finish it have stopped"):
        Simulation(Repetition(2, 2), stopped, policy="static", assigner=assigner).step()


def test_speeds_of_another_number_of_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="needs speeds of 10 workers, got those of 3"):
        Simulation(MDS(10, 7), constant([1.0, 1.0, 1.0]))


def test_arguments_are_checked() -> None:
    code, speeds = MDS(3, 2), constant([1.0] * 3)
    for name, call in (
        ("stripes", lambda: Simulation(code, speeds, stripes=0)),
        ("piece_seconds", lambda: Simulation(code, speeds, piece_seconds=nan)),
        ("decode_seconds", lambda: Simulation(code, speeds, decode_seconds=-1.0)),
        ("policy", lambda: Simulation(code, speeds, policy="fast")),
        ("predictor", lambda: Simulation(code, speeds, predictor="best")),
        ("rounds", lambda: Simulation(code, speeds).run(-1)),
        ("latency", lambda: Network(latency=-1.0)),
        ("bandwidth", lambda: Network(bandwidth=0.0)),
        ("seconds", lambda: Speeds(np.ones((1, 2)), seconds=0.0)),
        ("rounds", lambda: drifting(3, 0)),
        ("workers", lambda: drifting(2.5, 3)),  # type: ignore[arg-type]
        ("to_bad", lambda: gilbert_elliott(3, 3, to_bad=nan)),
        ("slowdown", lambda: gilbert_elliott(3, 3, slowdown=0)),
        ("size", lambda: broadcast_times(-1, np.ones(3))),
        ("rates", lambda: broadcast_times(1, np.ones(1))),
        ("rates", lambda: broadcast_times(1, np.zeros(3))),
    ):
        with pytest.raises(ValueError, match=f"^Argument '{name}' must "):
            call()


@pytest.mark.parametrize("values", [np.ones(3), np.ones((0, 3)), -np.ones((1, 2)), [[np.inf]]])
def test_impossible_speeds_are_refused(values: object) -> None:
    with pytest.raises(ValueError, match=r"Speeds must be|Argument 'values'"):
        Speeds(np.array(values))


@pytest.mark.parametrize("make", [drifting, gilbert_elliott, shifted_exponential])
def test_models_are_made_from_a_seed(make: object) -> None:
    one, same, other = make(5, 20, seed=1), make(5, 20, seed=1), make(5, 20, seed=2)  # type: ignore[operator]
    assert one.values.shape == (20, 5)
    assert (one.values > 0).all()
    assert (one.values == same.values).all()
    assert (one.values != other.values).any()


def test_many_clusters_from_one_trace() -> None:
    trace = Speeds(np.arange(1.0, 13.0).reshape(4, 3))
    cluster = trace.restarted(seed=0, workers=2)
    assert cluster.values.shape == (4, 2)
    for column in cluster.values.T:
        begins = [np.roll(trace.values, -row, axis=0) for row in range(4)]
        assert any((column == b[:, c]).all() for b in begins for c in range(3))


def test_an_algorithm_runs_on_a_simulated_operator_as_on_a_matrix() -> None:
    def power_iteration(operator: object, rounds: int = 5) -> np.ndarray:
        x = np.ones(6)
        for _ in range(rounds):
            x = operator @ x  # type: ignore[operator]
            x /= np.linalg.norm(x)
        return x

    A = np.random.default_rng(0).standard_normal((6, 6))
    operator = SimulatedOperator(A, Simulation(MDS(4, 3), constant([1, 1, 1, 0.5])))
    np.testing.assert_array_equal(power_iteration(operator), power_iteration(A))
    assert len(operator.rounds) == 5
    np.testing.assert_allclose(np.ones(6) @ operator, np.ones(6) @ A)
    assert len(operator.rounds) == 6
    assert operator.simulation.now == pytest.approx(sum(r.seconds for r in operator.rounds))


@given(st.data())
@settings(max_examples=60)
def test_nothing_beats_the_bound_and_every_round_ends(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    policy = data.draw(st.sampled_from(sorted(POLICIES)))
    copies = policy == "replication" or data.draw(st.booleans())
    k = data.draw(st.integers(1, n))
    code: Code = Repetition(n, k) if copies else MDS(n, k)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    seconds = data.draw(st.sampled_from([None, 0.07]))
    speeds = Speeds(rng.uniform(0.1, 1, (5, n)), seconds)
    tick = data.draw(st.sampled_from([0.0, 0.05]))
    simulation = Simulation(
        code, speeds, policy=policy, stripes=16, network=Network(latency=1e-3, tick=tick)
    )
    for round_ in simulation.run(3):
        assert round_.seconds >= round_.bound * (1 - 1e-6)
        assert round_.computed >= 1 - 1e-3


def test_simulated_workers_compute_batches_as_real_ones_do() -> None:
    code = MDS(2, 1)
    layout = Layout.of(code, code.place, np.ones((1, 32)))
    often = Reporting(1e-6, growth=0.0)
    round_ = Round(layout, POLICIES["static"](), np.array([1.0, 0.0]), 0.0, often)
    sizes: list[int] = []
    record = round_.record

    def recorded(worker: int, ranges: list[StripeRange], *rest: Any) -> None:
        sizes.extend(part.stop - part.start for part in ranges)
        record(worker, ranges, *rest)

    round_.record = recorded  # type: ignore[method-assign, assignment]
    rates = np.array([100.0, 0.0])
    VirtualRound(round_, lambda now: (rates, np.inf), IDEAL, often, lead=0.0).run()
    # As in `test_batches_become_smaller_towards_the_end_of_the_list` of a worker's job.
    assert sizes == [1, 3, 3, 3, 2, 2, 2, 2] + [1] * 14


def test_a_simulated_worker_finishes_the_batch_that_it_has_in_hand() -> None:
    worker = _Worker(queue=deque([StripeRange(0, 4, 10), StripeRange(0, 0, 2)]), batch=2)
    in_hand, rest = worker.split()
    assert in_hand == [StripeRange(0, 4, 6)]
    assert rest == [StripeRange(0, 6, 10), StripeRange(0, 0, 2)]
    assert _Worker(queue=deque([StripeRange(0, 4, 10)])).split() == ([], [StripeRange(0, 4, 10)])


@pytest.mark.parametrize("policy", ["static", "s2c2", "continuous"])
@pytest.mark.parametrize("gap", [1e-6, 1e-8, 1e-10, 1e-12, 1e-15])
def test_pieces_that_nearly_depend_on_each_other_end_a_round(policy: str, gap: float) -> None:
    """A round that needs both waited for ever: by one limit they sufficed, by another not."""
    code = Code([[1, 0], [0, 1], [1, 1], [1, 1 + gap], [1, 1]])
    speeds = Speeds(np.array([[nan, nan, 1.0, 1.0, 1.0]]))
    simulation = Simulation(code, speeds, policy=policy)
    if gap > 1e-7:
        assert simulation.run(1)[0].seconds > 1
    else:
        with pytest.raises(RuntimeError, match="can no longer finish"):
            simulation.run(1)


@given(st.integers(0, 2**20), st.integers(2, 8))
def test_stripes_lack_nothing_exactly_if_they_decode(seed: int, k: int) -> None:
    code = RandomLinear(2 * k, k, density=0.5)
    have = np.random.default_rng(seed).random((2 * k, 6)) < 0.6
    layout = Layout.of(code, list(range(2 * k)), np.ones((1, 6)))
    lacking = layout.lacking(have)[0]
    for pieces, count in zip(have.T, lacking.tolist(), strict=True):
        rank = np.linalg.matrix_rank(code.G[pieces])
        assert (count == 0) == (rank == k)
        assert 0 <= count <= k - rank


def test_rounds_start_whatever_is_predicted() -> None:
    """In the cluster, all workers are tried if too few are expected to make progress."""
    speeds = Speeds(np.array([[1.0, 1.0, 0.0, 0.0], [1.0] * 4]), seconds=0.5)
    simulation = Simulation(MDS(4, 3), speeds, foresight=lambda actual: actual)
    assert all(1 < round_.seconds < 2 for round_ in simulation.run(3))


def test_a_coordinator_acts_on_shares_that_come_within_a_tick_together() -> None:
    def over(tick: float) -> float:
        simulation = Simulation(MDS(10, 7), drifting(10, 20), network=Network(tick=tick))
        return float(ratios(simulation.run(20)).mean())

    assert over(0.0) < over(0.05) < over(0.5)


def test_a_change_of_speeds_ends_where_it_says() -> None:
    given = Speeds(np.array([[1.0], [2.0], [3.0]]))
    found = changed(given, [0], first=1, last=5, factor=0.5).values[:, 0]
    np.testing.assert_array_equal(found, [1, 1, 1.5, 0.5, 1, 3])
