"""GradiVeQ: linear, the same on all replicas, and as good as the exact principal directions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.compression import GradiVeQ, Projection, Truncation
from dask_coded.compression._gradiveq import _even
from dask_coded.compression._principal import order_free_product, principal_directions

LAYERS = [(4, 1, 5, 5), (4,), (32, 4, 5, 5), (32,), (64, 128), (64,)]
SIZE = sum(int(np.prod(layer)) for layer in LAYERS)

CHOICE = GradiVeQ(128, 16, exact_steps=4, period=10)


def gradients(workers: int, step: int, dtype: type = np.float32) -> list[np.ndarray]:
    """Return each worker's gradient, with slices that lie near few directions."""
    rng = np.random.default_rng(1000 * step + workers)
    t = np.arange(SIZE)
    waves = [np.sin(t * f + rng.uniform(0, 6, (workers, 1))) for f in (0.05, 0.1, 0.7)]
    noise = 0.02 * rng.standard_normal((workers, SIZE))
    return list((sum(waves) + noise).astype(dtype))


def run_steps(compressors: list[Projection], steps: range, segments: int = 1) -> list[np.ndarray]:
    """Run steps of replicas that add up their vectors; return each replica's last result."""
    totals: list[np.ndarray] = []
    for step in steps:
        cut = [np.array_split(g, segments) for g in gradients(len(compressors), step)]
        parts = []
        for segment in range(segments):
            sent = [c.compress(step, segment, g[segment]) for c, g in zip(compressors, cut)]
            total = np.sum(sent, axis=0, dtype=sent[0].dtype)
            parts.append([c.expand(step, segment, total) for c in compressors])
        totals = [np.concatenate(part) for part in zip(*parts)]
    return totals


def fitted(segments: int = 1, choice: GradiVeQ = CHOICE) -> Projection:
    compressor = choice.compressor(LAYERS, segments)
    run_steps([compressor], range(choice.exact_steps), segments)
    return compressor


# ----------------------------------------------------------------------------------- order of sums


@given(
    rows=st.integers(1, 5),
    inner=st.integers(1, 300),
    columns=st.integers(1, 5),
    scale=st.sampled_from([1e-300, 1e-30, 1.0, 1e30, 1e150]),
    seed=st.integers(0, 2**32 - 1),
)
def test_product_does_not_depend_on_the_order_of_its_terms(rows, inner, columns, scale, seed):
    rng = np.random.default_rng(seed)
    A, B = scale * rng.standard_normal((rows, inner)), rng.standard_normal((inner, columns))
    product = order_free_product(A, B)
    order = rng.permutation(inner)
    np.testing.assert_array_equal(product, order_free_product(A[:, order], B[order]))
    half = inner // 2  # as another BLAS or two threads may split it
    parts = [rng.permutation(inner)[:half], rng.permutation(inner)[half:]]
    parts[1] = np.setdiff1d(np.arange(inner), parts[0])
    bits = (53 - (inner - 1).bit_length()) // 2

    def rounded(M: np.ndarray) -> np.ndarray:
        step = 2.0 ** (np.frexp(np.abs(M).max())[1] - bits)
        return np.rint(M / step) * step

    A_, B_ = rounded(A), rounded(B)
    split = sum((A_[:, p, None] * B_[p]).sum(axis=1) for p in parts)
    np.testing.assert_array_equal(product, split)
    largest = np.abs(A).max() * np.abs(B).max()
    assert np.abs(product - A @ B).max() <= inner * 2.0**-bits * 2 * largest


def test_products_of_tiny_numbers_are_neither_nan_nor_rounded():
    least = np.nextafter(0.0, 1.0)
    assert order_free_product([[least]], [[1.0]]).tolist() == [[least]]
    assert np.isfinite(principal_directions(np.diag([1e-320, 1e-319]), 1)).all()
    rng = np.random.default_rng(0)
    A, order = 1e-160 * rng.standard_normal((3, 300)), rng.permutation(300)
    product = order_free_product(A, A.T)
    np.testing.assert_array_equal(product, order_free_product(A[:, order], A[:, order].T))


def test_product_of_zeros_of_empty_matrices_and_of_nan():
    assert order_free_product(np.zeros((2, 3)), np.ones((3, 2))).tolist() == [[0, 0], [0, 0]]
    assert order_free_product(np.ones((2, 0)), np.ones((0, 2))).tolist() == [[0, 0], [0, 0]]
    assert np.isnan(order_free_product([[np.nan]], [[1.0]])).all()


@settings(max_examples=25)
@given(
    K=st.integers(2, 60),
    slices=st.integers(1, 200),
    decay=st.floats(0, 3),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_directions_keep_nearly_as_much_as_the_exact_ones(K, slices, decay, seed, data):
    rank = data.draw(st.integers(1, K - 1))
    rng = np.random.default_rng(seed)
    S = rng.standard_normal((slices, K)) * np.arange(1, K + 1.0) ** -decay
    S = S @ np.linalg.qr(rng.standard_normal((K, K)))[0]
    covariance = S.T @ S
    basis = principal_directions(covariance, rank)
    gram = basis @ basis.T  # rows are zero where there are fewer directions than asked for
    np.testing.assert_allclose(gram, np.diag(np.rint(np.diag(gram))), atol=1e-12)
    best = np.linalg.eigvalsh(covariance)[::-1][:rank].sum()
    assert np.trace(basis @ covariance @ basis.T) >= 0.9 * best


def test_directions_of_a_zero_covariance_are_zero():
    assert not principal_directions(np.zeros((5, 5)), 2).any()


# -------------------------------------------------------------------------------- sums and replicas


@pytest.mark.parametrize("segments", [1, 3, 5])
@pytest.mark.parametrize("workers", [1, 4])
def test_compressed_sum_is_the_sum_of_the_compressed(segments, workers):
    compressor = fitted(segments)
    for segment, _ in enumerate(np.array_split(np.empty(SIZE), segments)):
        cut = [np.array_split(g, segments)[segment] for g in gradients(workers, 7, np.float64)]
        weights = np.arange(1.0, workers + 1)  # coefficients of a code
        of_sum = compressor.compress(7, segment, sum(w * g for w, g in zip(weights, cut)))
        sum_of = sum(w * compressor.compress(7, segment, g) for w, g in zip(weights, cut))
        assert len(of_sum) < len(cut[0])
        np.testing.assert_allclose(sum_of, of_sum, atol=1e-11)


@pytest.mark.parametrize("segments", [1, 3])
def test_sums_of_exact_steps_are_exact(segments):
    compressors = [CHOICE.compressor(LAYERS, segments) for _ in range(3)]
    totals = run_steps(compressors, range(CHOICE.exact_steps), segments)
    exact = np.sum(gradients(3, CHOICE.exact_steps - 1), axis=0, dtype=np.float32)
    np.testing.assert_array_equal(totals[0], exact)


@pytest.mark.parametrize("segments", [1, 3])
def test_replicas_end_with_the_same_bits_without_a_broadcast(segments):
    compressors = [CHOICE.compressor(LAYERS, segments) for _ in range(4)]
    for step in range(25):
        totals = run_steps(compressors, range(step, step + 1), segments)
        assert len({total.tobytes() for total in totals}) == 1


def test_replica_whose_blas_adds_in_another_order_ends_with_the_same_bits(monkeypatch):
    here = CHOICE.compressor(LAYERS, segments=1)
    there = CHOICE.compressor(LAYERS, segments=1)

    def elsewhere(A, B):
        return order_free_product(np.asarray(A)[:, ::-1], np.asarray(B)[::-1])

    for step in range(6):
        sent = here.compress(step, 0, gradients(1, step)[0])
        total = here.expand(step, 0, sent)
        with monkeypatch.context() as patch:
            patch.setattr("dask_coded.compression._gradiveq.order_free_product", elsewhere)
            patch.setattr("dask_coded.compression._principal.order_free_product", elsewhere)
            other = there.expand(step, 0, sent)
        np.testing.assert_array_equal(total, other)


def test_energy_of_the_gradients_is_kept_where_a_random_basis_loses_it():
    compressor = fitted()
    gradient = gradients(1, 8)[0]
    kept = compressor.expand(8, 0, compressor.compress(8, 0, gradient))
    norm = np.linalg.norm
    assert norm(kept) ** 2 > 0.99 * norm(gradient) ** 2  # a random basis would keep an eighth
    assert norm(gradient - kept) ** 2 < 0.01 * norm(gradient) ** 2


def test_layers_are_cut_along_their_axes_and_small_ones_are_left():
    runs = CHOICE.compressor(LAYERS, segments=1)._segments[0].runs
    assert [(run.where.start, run.length, run.rank, run.count) for run in runs] == [
        (104, 100, 13, 32),
        (3336, 128, 16, 64),
    ]
    assert _even((3, 50), 100) == 50
    assert _even((1009,), 100) == 100


@given(segments=st.integers(1, 40), length=st.integers(2, 300), data=st.data())
def test_slices_never_straddle_segments(segments, length, data):
    choice = GradiVeQ(length, data.draw(st.integers(1, length - 1)), exact_steps=5, period=9)
    compressor = choice.compressor(LAYERS, segments)
    edges = np.cumsum([0, *(np.prod(layer) for layer in LAYERS)])
    start = 0
    for cut, segment in zip(compressor._segments, np.array_split(np.arange(SIZE), segments)):
        assert cut.size == len(segment)
        stop = 0
        for run in cut.runs:
            assert stop <= run.where.start < run.where.stop <= cut.size
            assert (run.where.stop - run.where.start) % run.length == 0
            stop = run.where.stop
            layer = np.searchsorted(edges, start + run.where.start, side="right") - 1
            assert start + run.where.stop <= edges[layer + 1]
            assert (start + run.where.start - edges[layer]) % run.length == 0
        start += cut.size


def test_ratio_is_that_of_the_numbers_sent():
    compressor = CHOICE.compressor(LAYERS, segments=2)
    sent = 0
    for step in range(CHOICE.period):
        for segment, gradient in enumerate(np.array_split(gradients(1, step)[0], 2)):
            vector = compressor.compress(step, segment, gradient)
            sent += len(vector)
            compressor.expand(step, segment, vector)
    assert compressor.ratio == pytest.approx(sent / CHOICE.period / SIZE)
    assert GradiVeQ().compressor([(3,)], segments=1).ratio == 1


def test_a_layer_too_small_to_compress_is_sent_exactly():
    compressor = GradiVeQ(8, 2, exact_steps=2, period=4).compressor([(3,)], segments=5)
    for step in range(8):
        for segment, gradient in enumerate(np.array_split(np.arange(3.0), 5)):
            sent = compressor.compress(step, segment, gradient)
            np.testing.assert_array_equal(compressor.expand(step, segment, sent), gradient)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_type_is_kept(dtype):
    compressor = CHOICE.compressor(LAYERS, segments=1)
    for step in range(6):
        sent = compressor.compress(step, 0, gradients(1, step, dtype)[0])
        assert sent.dtype == dtype
        assert compressor.expand(step, 0, sent).dtype == dtype


def test_codec_is_passed_on():
    assert GradiVeQ(codec=Truncation()).codec == Truncation()
    assert not GradiVeQ().codec.lossy


# ------------------------------------------------------------------------------------- the residual


def lost_in_a_period(compressor: Projection) -> np.ndarray:
    lost = np.zeros(SIZE)
    for step in range(CHOICE.exact_steps, CHOICE.period):
        gradient = gradients(1, step)[0]
        lost += gradient - compressor.expand(step, 0, compressor.compress(step, 0, gradient))
    return lost


def test_residual_is_added_once_in_the_first_exact_step():
    compressor = fitted()
    lost = lost_in_a_period(compressor)
    gradient = gradients(1, 10)[0]
    np.testing.assert_allclose(compressor.compress(10, 0, gradient) - gradient, lost, atol=1e-3)
    assert compressor.compress(10, 0, gradient) is gradient
    assert compressor.compress(11, 0, gradient) is gradient


def test_residual_of_a_worker_that_misses_that_step_is_dropped():
    compressor = fitted()
    lost_in_a_period(compressor)
    for step in range(10, 14):
        compressor.expand(step, 0, gradients(1, step)[0])
    compressor.compress(14, 0, gradients(1, 14)[0])
    lost = gradients(1, 14)[0] - compressor.expand(
        14, 0, compressor.compress(14, 0, gradients(1, 14)[0])
    )
    gradient = gradients(1, 20)[0]
    np.testing.assert_allclose(compressor.compress(20, 0, gradient) - gradient, 2 * lost, atol=1e-3)


def test_residual_is_left_out_of_the_fit():
    choice = GradiVeQ(128, 16, exact_steps=4, period=10)
    one, other = fitted(choice=choice), fitted(choice=choice)
    for step in range(4, 14):
        gradient = gradients(1, step)[0]
        one.expand(step, 0, one.compress(step, 0, gradient))
        sent = other.compress(step, 0, gradient)
        other.expand(step, 0, gradient if step == 10 else sent)
    for run, same in zip(one._segments[0].runs, other._segments[0].runs):
        np.testing.assert_array_equal(run.basis, same.basis)


def test_without_residual_a_node_remembers_nothing():
    choice = GradiVeQ(128, 16, exact_steps=4, period=10, residual=False)
    assert not choice.remembers
    assert CHOICE.remembers
    compressor = fitted(choice=choice)
    lost_in_a_period(compressor)
    gradient = gradients(1, 10)[0]
    assert compressor.compress(10, 0, gradient) is gradient


# ------------------------------------------------------------- schedules, warm-up, joining replicas


def test_all_steps_of_the_warmup_are_exact():
    choice = GradiVeQ(128, 16, exact_steps=2, period=5, warmup=3)
    compressor = choice.compressor(LAYERS, segments=1)
    lengths = []
    for step in range(12):
        sent = compressor.compress(step, 0, gradients(1, step)[0])
        lengths.append(len(sent) == SIZE)
        compressor.expand(step, 0, sent)
    assert lengths == [True] * 5 + [False] * 3 + [True] * 2 + [False] * 2


@pytest.mark.parametrize("width", [1, 2, 3])
def test_sums_may_be_late_by_the_width_of_the_schedule(width):
    compressor = CHOICE.compressor(LAYERS, segments=1, width=width)
    in_flight: list[np.ndarray] = []
    kept = []
    for step in range(24):
        if len(in_flight) == width:
            kept.append(compressor.expand(step - width, 0, in_flight.pop(0)))
        in_flight.append(compressor.compress(step, 0, gradients(1, step)[0]))
    for step, total in enumerate(kept):
        if step not in (10, 20):  # these include the residual
            gradient = gradients(1, step)[0]
            error = np.linalg.norm(total - gradient) / np.linalg.norm(gradient)
            assert error < 0.1
            assert (error == 0) == (step % 10 < 4)


def test_missing_width():
    compressor = CHOICE.compressor(LAYERS, segments=1)
    sent = [compressor.compress(step, 0, gradients(1, step)[0]) for step in range(5)]
    for step in range(4):
        compressor.expand(step, 0, sent[step])
    with pytest.raises(ValueError, match="pass the width of the schedule"):
        compressor.expand(4, 0, sent[4])


def test_exact_steps_must_be_enough_for_the_width():
    GradiVeQ(8, 2, exact_steps=3, period=9).compressor([(8, 8)], segments=1, width=2)
    with pytest.raises(ValueError, match="'exact_steps' must be at least 4 for a schedule of w"):
        GradiVeQ(8, 2, exact_steps=3, period=9).compressor([(8, 8)], segments=1, width=3)
    GradiVeQ(8, 2, exact_steps=1, period=9, residual=False).compressor([(8, 8)], segments=1)


@pytest.mark.parametrize("step", [2, 4, 7, 10, 13])
def test_joining_replica_continues_with_the_same_bits(step):
    old = CHOICE.compressor(LAYERS, segments=2)
    run_steps([old], range(step), segments=2)
    state = old.state()
    new = CHOICE.compressor(LAYERS, segments=2)
    new.restore(state)
    for later in range(step, 25):
        for segment, gradient in enumerate(np.array_split(gradients(1, later)[0], 2)):
            sent = old.compress(later, segment, gradient)
            total = old.expand(later, segment, sent)
            np.testing.assert_array_equal(total, new.expand(later, segment, sent))


def test_state_is_not_changed_by_later_steps():
    compressor = CHOICE.compressor(LAYERS, segments=1)
    run_steps([compressor], range(2))
    state = compressor.state()
    before = [run.copy() for run, _ in state[0][1]]
    run_steps([compressor], range(2, 9))
    for covariance, (same, basis) in zip(before, state[0][1]):
        np.testing.assert_array_equal(covariance, same)
        assert basis is None


def test_state_of_other_segments_is_refused():
    with pytest.raises(ValueError, match="other layers or segments"):
        CHOICE.compressor(LAYERS, segments=2).restore(fitted().state())


def test_replicas_without_a_state_are_exact_until_the_next_fit():
    compressors = [CHOICE.compressor(LAYERS, segments=1) for _ in range(2)]
    for step in range(7, 20):
        sent = [c.compress(step, 0, g) for c, g in zip(compressors, gradients(2, step))]
        assert (len(sent[0]) == SIZE) == (step < 14)
        for compressor in compressors:
            compressor.expand(step, 0, sum(sent))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank": 0}, "'rank' must be between 1 and 'slice_length' - 1 = 511, it is 0"),
        ({"slice_length": 64}, "'rank' must be between 1 and 'slice_length' - 1 = 63, it is 64"),
        ({"exact_steps": 0}, "'exact_steps' must be between 1 and 'period' - 1 = 99, it is 0"),
        ({"exact_steps": 100}, "'exact_steps' must be between 1"),
        ({"warmup": -1}, "'warmup' must be 0 or more steps, it is -1"),
        ({"rank": 64.0}, "'rank' must be a whole number, it is 64.0"),
    ],
)
def test_arguments_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GradiVeQ(**kwargs)
