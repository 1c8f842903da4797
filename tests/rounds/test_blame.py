"""Workers lie in products, in what they store and in checks: the honest are never blamed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_coded.codes import MDS, Code, DecodeError, RandomLinear, Repetition
from dask_coded.rounds import Assembler, Scales, StripeRange
from dask_coded.rounds.blame import Evidence, Witness, proven
from dask_coded.rounds.verification import (
    Verification,
    add_rows,
    check_error,
    empty_check,
    is_possible,
    size_bounds,
    sizes_of,
    sums_of,
)
from tests.rounds.test_verification import Array

STRIPES, COLUMNS = 3, 6


def parts(weights: dict[int, float]) -> frozenset[tuple[int, float]]:
    return frozenset((piece, round(weight, 9)) for piece, weight in weights.items())


def fetched(code: Code, block: int) -> frozenset[object]:
    """What the check of a block is made from, which a worker holds: the block, and the check."""
    return frozenset([f"check {block}", *parts({int(code.systematic_pieces[block]): 1.0})])


class Liars:
    """Rounds of one array among workers that lie, one piece and at most one check on each.

    Pieces in ``products`` are multiplied wrongly, those in ``rotten`` are stored wrongly, and
    checks of blocks in ``checks`` are wrong.
    """

    def __init__(
        self,
        code: Code,
        rng: np.random.Generator,
        products: set[int],
        rotten: set[int],
        checks: set[int],
        spread: float = 0.0,
    ) -> None:
        rows = rng.integers(4, 9, code.k)
        sizes = 10.0 ** rng.uniform(-8, 8, (code.k, 8, 1))
        columns = 10.0 ** rng.uniform(-spread, spread, COLUMNS)
        blocks = [
            rng.standard_normal((r, COLUMNS)) * s[:r] * columns
            for r, s in zip(rows, sizes, strict=True)
        ]
        self.code, self.rng, self.products = code, rng, products
        self.true = Array(code, blocks, STRIPES)
        self.found = Array(code, blocks, STRIPES)
        self.right = list(self.true.checks)
        for piece in rotten:
            self.found.pieces[piece] = self.found.pieces[piece] * rng.uniform(1.1, 2)
        self.witnesses: list[list[Witness]] = []
        for j in range(code.k):
            check = self.right[j]
            if j in checks:
                check = check * rng.uniform(1.1, 2)
            self.witnesses.append([Witness(check, fetched(code, j))])
        self.checks = [found[0] for found in self.witnesses]
        self.settled: set[int] = set()

    def bounds(self, block: int) -> np.ndarray:
        edges = self.true.geometry.edges(block)
        return size_bounds(self.true.weights, edges, self.true.exponents[block])

    def made_from(self, block: int, weights: dict[int, float]) -> Witness:
        """Make a check from stored pieces, as the cluster does."""
        array, code = self.found, self.code
        length = array.geometry.rows[block]
        total = np.zeros((length, COLUMNS))
        for piece, weight in weights.items():
            rows, source = array.pieces[piece][:length], int(code.block_of[piece])
            if source >= 0:
                rows = rows * 2.0 ** -array.exponents[source][: len(rows), None].astype(float)
            total[: len(rows)] += weight * rows
        check = empty_check(STRIPES, COLUMNS, "f8")
        add_rows(check, array.weights, array.geometry.edges(block), 0, total)
        growth = 0.0 if len(weights) == 1 else sum(2 * abs(w) for w in weights.values())
        return Witness(check, parts(weights), growth)

    def sources(self, block: int) -> list[dict[int, float]]:
        """Return ways to make a check: the block itself, then smallest sets of other pieces."""
        code = self.code
        piece = int(code.systematic_pieces[block])
        others = [p for p in range(code.pieces) if p != piece]
        found: list[dict[int, float]] = [{piece: 1.0}]
        for size in (1, code.k):
            for some in itertools.combinations(others, size):
                try:
                    weights = code.combination(piece, list(some))
                except (DecodeError, ValueError):
                    continue
                used = {p: float(w) for p, w in zip(some, weights, strict=True) if abs(w) > 1e-9}
                if used not in found:
                    found.append(used)
        return found

    def round(self, x: np.ndarray) -> tuple[np.ndarray | None, set[int], bool]:
        """Run a round; return its result, the pieces to blame, and whether checks have changed."""
        array, code = self.found, self.code
        current = [witness.check for witness in self.checks]
        growth = np.abs(code.G) @ [witness.growth for witness in self.checks]
        verification = Verification(
            code, array.geometry, array.exponents, array.weights, current, "f8"
        )
        verifier = verification.verifier(x, growth.tolist())
        scales = None if code.exact else Scales(array.exponents)
        assembler = Assembler(code, array.geometry, "f8", (), scales)
        computed = np.zeros((code.pieces, STRIPES), dtype=bool)
        contradicted: list[tuple[StripeRange, float]] = []
        lost: set[int] = set()
        parts = []
        for piece in range(code.pieces):
            # Shares of one stripe and of several.
            cuts = [0, *np.flatnonzero(self.rng.random(STRIPES - 1) < 0.5) + 1, STRIPES]
            parts += [StripeRange(piece, *map(int, ends)) for ends in itertools.pairwise(cuts)]
        for i in self.rng.permutation(len(parts)).tolist():
            part = parts[i]
            stripes = slice(part.start, part.stop)
            known = [code.span(have).rank == code.k for have in computed[:, stripes].T]
            if part.piece in lost or all(known):
                continue
            rows = array.share(part, x)
            if part.piece in self.products:
                rows = rows * self.rng.uniform(1.1, 2)
            if size := verifier.deviation(part, rows):
                contradicted.append((part, size))
                lost.add(part.piece)
                continue
            computed[part.piece, stripes] = True
            ready = np.array([code.span(c).rank == code.k for c in computed.T])
            assembler.add([(part, rows)], computed, ready)
        evidence = Evidence(code, computed, contradicted, verifier.limits)
        right, changed = set(), False
        for block in evidence.disputed():
            if self.prove(block):
                changed = True
            elif block in self.settled:
                right.add(block)
        done = all(code.span(c).rank == code.k for c in computed.T)
        return assembler.rows if done else None, set(evidence.to_blame(right)), changed

    def prove(self, block: int) -> bool:
        """Make a check again until two agree; return whether it has changed."""
        if block in self.settled:
            return False
        witnesses = [self.checks[block]]
        for weights in self.sources(block):
            witnesses.append(self.made_from(block, weights))
            checks = [witness.check for witness in self.checks]
            bounds = self.bounds(block)
            if agreeing := proven(witnesses, self.code, block, checks, bounds, "f8"):
                self.settled.add(block)
                before, self.checks[block] = self.checks[block], agreeing[0]
                return self.checks[block] is not before
        return False


CODES = [MDS(6, 4), MDS(5, 2), RandomLinear(7, 4), Repetition(6, 2), Repetition(4, 3), MDS(4, 4)]


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_the_honest_are_never_blamed(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(CODES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pieces, blocks = st.integers(0, code.pieces - 1), st.integers(0, code.k - 1)
    products = data.draw(st.sets(pieces, max_size=2))
    rotten = data.draw(st.sets(pieces, max_size=2))
    checks = data.draw(st.sets(blocks, max_size=2))
    # As far as digits of a light column still come through the solving of the others.
    cluster = Liars(code, rng, products, rotten, checks, data.draw(st.sampled_from([0.0, 2.0])))
    whole = np.concatenate(cluster.true.blocks)
    left = [p for p in range(code.pieces) if p not in products | rotten]
    result = None
    for _ in range(4 + len(checks)):
        x = rng.standard_normal(COLUMNS)
        result, blamed, _changed = cluster.round(x)
        assert blamed <= products | rotten
        if result is not None:
            error = np.abs(result - whole @ x)
            assert (error <= 1e-9 * (np.abs(whole) @ np.abs(x))).all()
    for block in cluster.settled:  # what two witnesses agree on is right
        found, right = cluster.checks[block], cluster.right[block]
        largest = sum(sizes_of(check) for check in cluster.right) * np.abs(code.G).max()
        bounds = cluster.bounds(block)
        limit = check_error(found.growth, "f8", sizes_of(right), largest, bounds)
        assert (np.abs(sums_of(found.check) - sums_of(right)) <= limit).all()
    # With few enough liars, there are two right witnesses of each check, and enough right shares.
    few = all(
        any(
            one.isdisjoint(other)
            for one, other in itertools.combinations(
                [
                    *([fetched(code, block)] if block not in checks else []),
                    *(parts(used) for used in cluster.sources(block) if set(used) <= set(left)),
                ],
                2,
            )
        )
        for block in range(code.k)
    )
    if few and code.decodable(left):
        assert result is not None


def test_a_share_supports_a_check_only_up_to_the_error_that_it_would_have_shown() -> None:
    """Parity may deviate more than the block, because errors of other blocks add up in it."""
    computed, part = np.zeros((4, 1), dtype=bool), StripeRange(0, 0, 1)
    computed[2] = True
    limits = np.array([1e-15, 1e-15, 1e-9, 1e-9])
    evidence = Evidence(MDS(4, 2), computed, [(part, 1e-12)], limits)
    assert evidence.disputed() == {0} and not evidence.to_blame()
    assert evidence.to_blame(right=[0]) == [0]
    evidence = Evidence(MDS(4, 2), computed, [(part, np.inf)], limits)
    assert not evidence.disputed() and evidence.to_blame() == [0]


@pytest.mark.parametrize("code", [MDS(6, 4), Repetition(6, 3)], ids=repr)
def test_a_check_made_from_a_wrong_block_is_not_proven_by_that_block(code: Code) -> None:
    """The block was damaged before its check was made, so both are wrong in the same way."""
    cluster = Liars(code, np.random.default_rng(0), set(), {0}, set())
    copy = cluster.made_from(0, {0: 1.0})
    cluster.checks[0] = Witness(copy.check, fetched(code, 0))
    assert cluster.prove(0)
    found, right = cluster.checks[0].check, cluster.right[0]
    np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stripes", [[(0, 3)], [(0, 1), (1, 3)]], ids=str)
def test_the_share_of_a_block_does_not_prove_a_check_made_from_it(stripes: list[Any]) -> None:
    """Parity contradicts both, by what one error of the check would cause."""
    code, limits = MDS(6, 4), np.full(6, 1e-12)
    computed = np.zeros((6, 3), dtype=bool)
    computed[:4] = True
    weights = np.abs(code.G)
    alike = [
        (StripeRange(piece, *ends), 0.5 * weights[piece, 1]) for piece in (4, 5) for ends in stripes
    ]
    evidence = Evidence(code, computed, alike, limits)
    assert 1 in evidence.disputed() and evidence.to_blame() == []
    assert evidence.to_blame(right=[1, 3]) == [4, 5]
    # Two workers that compute wrongly contradict it by amounts that have nothing in common.
    unlike = [(part, size * (1 + 0.1 * part.piece)) for part, size in alike]
    evidence = Evidence(code, computed, unlike, limits)
    assert evidence.disputed() == set() and evidence.to_blame() == [4, 5]
    # Sums over other stripes cannot be compared.
    other = [(StripeRange(4, 0, 2), 0.1), (StripeRange(5, 1, 3), 0.7)]
    evidence = Evidence(code, computed, other, limits)
    assert evidence.disputed() == {0, 1, 2, 3} and evidence.to_blame() == []


def test_no_evidence_blames_no_worker() -> None:
    evidence = Evidence(MDS(4, 2), np.zeros((4, 1), dtype=bool), [], np.full(4, 1e-9))
    assert evidence.disputed() == set() and evidence.to_blame() == []


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_a_check_is_possible_at_every_scale(dtype: str) -> None:
    rng = np.random.default_rng(0)
    reach = 35 if np.dtype(dtype).itemsize // (1 + (dtype[0] == "c")) == 4 else 300
    rows = rng.standard_normal((40, 5)) * 10.0 ** rng.uniform(-reach, reach, (40, 1))
    if dtype[0] == "c":
        rows = rows * (1 + 1j)
    with np.errstate(over="ignore"):
        rows = rows.astype(dtype)
    rows[3] = 0
    rows[4, 2] = np.nan
    rows[5] = np.finfo(dtype).max
    array = Array(Repetition(2, 1), [rows, rows[:7]], 4)
    for block in range(2):
        edges, check = array.geometry.edges(block), array.checks[block]
        bounds = size_bounds(array.weights, edges, array.exponents[block])
        assert is_possible(check, bounds, 5)
        for wrong in (check + np.inf, check * 1e9, check[1:], check[:, 1:], None):
            assert not is_possible(wrong, bounds, 5)
