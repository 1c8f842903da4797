"""Measure Hessians ``A.T @ diag(d) @ A`` with some slow workers, and the errors of their codes.

The case is that of the S2C2 paper: 6000 x 6000, cut in three both ways, on 12 workers of which any
9 suffice. Conventional polynomial coding (the static policy: every worker computes all of its
product, the first 9 are used) is compared with rows dealt out by speed, and with dask.array on the
same workers. The yardstick is the fluid bound from the workers' speeds on their pieces, which are
measured before and after every round because speeds on a shared machine change.

The numerics need no cluster. For every set of workers that suffices, they show how much decoding
amplifies errors, with the points of `Polynomial` and with codes from the literature. Roots of unity
stand for the rotation embedding, which has the same condition numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import dask
import dask.array as da
import numpy as np
from distributed import wait

import dask_coded as coded
from benchmarks.cluster import Lab
from benchmarks.report import Report, Summary, options
from dask_coded.codes import DecodeError
from dask_coded.rounds import fluid_time
from dask_coded.rounds.kernels import bilinear

# (name, policy, predictor): conventional polynomial coding, then work dealt out by speed.
WAYS = [
    ("conventional", "static", "uniform"),
    ("s2c2", "s2c2", "adaptive"),
    ("continuous", "continuous", "adaptive"),
]


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    rows: int = 6_000
    columns: int = 6_000
    # Leaves a third of one of the two cores to the coordinator, which decodes the whole product.
    share: float = 0.14
    code: tuple[int, int, int] = (12, 3, 3)
    slowed: tuple[int, ...] = (0, 2, 4)
    turns: int = 2
    codes: tuple[tuple[int, int, int], ...] = ((12, 3, 3), (18, 5, 3), (31, 4, 7))
    draws: int = 10


SMOKE = Size(
    rows=60,
    columns=40,
    code=(4, 1, 3),
    slowed=(1,),
    turns=1,
    codes=((6, 2, 2),),
    draws=1,
)

#: Worst condition numbers over all sufficient sets, computed apart from this package from the
#: authors' definitions of their codes; the papers do not state them.
EARLIER_CONDITION = {
    ((18, 5, 3), "roots of unity"): 102.7,
    ((31, 4, 7), "roots of unity"): 404.3,
    ((18, 5, 3), "chebyshev"): 2.51e4,
    ((31, 4, 7), "chebyshev"): 5.15e5,
    ((31, 4, 7), "chebyshev from T_1"): 8.35e4,
    ((18, 5, 3), "random"): 6.0e3,
    ((31, 4, 7), "random"): 1.9e5,
}

#: Squared error of the worst set for noisy workers (80 dB) over that of the rotation embedding:
#: figures of A. Ramamoorthy, L. Tang, from their own plotting script.
PUBLISHED_ERROR = {
    ((31, 4, 7), "roots of unity"): 2.44e-8 / 2.46e-8,
    ((31, 4, 7), "chebyshev from T_1"): 9.71e-4 / 2.46e-8,
    ((31, 4, 7), "random"): 1.16e-4 / 2.46e-8,
}


# ------------------------------------------------------------------------------------------ rounds


def run_product(pair: Any, d: np.ndarray) -> float:
    """Compute one product inside the cluster and return its seconds."""
    pair.product(d)
    return pair.last_round.seconds


class Bench:
    """A matrix in a lab, encoded as a pair with itself, and as a plain dask array."""

    def __init__(self, lab: Lab, size: Size) -> None:
        lab.set_speeds(math.inf)
        code = coded.Polynomial(*size.code)
        self.d = np.random.default_rng(1).random(size.rows)
        # Each chunk of the product is one task, so n workers share n * n tasks.
        A = da.random.default_rng(0).standard_normal(
            (size.rows, size.columns), chunks=(-1, -(-size.columns // code.n))
        )
        self.plain: Any = lab.client.persist(A, workers=lab.workers)
        wait(self.plain)
        self.pair = coded.encode_pair(self.plain, self.plain, code, lab.client, workers=lab.workers)
        self._lab = lab

    def bound(self) -> float:
        """Return the least seconds of a round at the current speeds of the workers."""
        encoded = self.pair.encoded
        keys = {w: piece.key for w, piece in zip(encoded.workers, encoded.futures, strict=True)}
        rows = max(encoded.spec.geometry.rows)
        measured = self._lab.client.run(
            _measure_speed, keys, rows, encoded.spec.geometry.stripes, self.d, workers=list(keys)
        )
        return fluid_time(np.array([measured[w] for w in keys]), self.pair.code.k, rows)

    def run_round(self, policy: str, predictor: str) -> float:
        """Run a coded round and return its seconds."""
        with dask.config.set({"coded.policy": policy, "coded.predictor": predictor}):
            return coded.submit(
                run_product,
                self.pair,
                self.d,
                client=self._lab.client,
                workers=[self._lab.free],
            ).result()

    def compute(self) -> float:
        """Return the seconds of the product by dask.array, whose chunks stay on the workers."""
        A = self.plain
        with warnings.catch_warnings():
            # dask.array needs many small tasks to balance the load.
            warnings.simplefilter("ignore", da.PerformanceWarning)
            product = (A.T * self.d) @ A
        began = perf_counter()
        wait(self._lab.client.persist(product, workers=self._lab.workers))
        return perf_counter() - began


async def _measure_speed(
    keys: Mapping[str, Any], rows: int, stripes: int, d: np.ndarray, dask_worker: Any
) -> float:
    """Return the rows of its product that an idle worker computes per second, in batches."""
    kernel = bilinear(dask_worker.data[keys[dask_worker.address]], rows, d)
    edges = np.append(np.arange(0, stripes, 3), stripes) * rows // stripes  # three at a time

    def work() -> float:
        done, began = 0, perf_counter()
        for a, b in itertools.pairwise(edges.tolist()):
            kernel(a, b, None)
            done += b - a
            if perf_counter() - began > 1:
                break
        return done / (perf_counter() - began)

    return await asyncio.get_running_loop().run_in_executor(None, work)


def compare(
    bench: Bench, ways: dict[str, Callable[[], float]], turns: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run all methods in turn; return the seconds and the fluid bound of each run."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    bounds: dict[str, list[float]] = {name: [] for name in ways}
    bench.bound()  # the first access to a new piece is slower
    before = bench.bound()
    for _ in range(turns):
        for name, run in ways.items():
            seconds[name].append(run())
            after = bench.bound()
            bounds[name].append((before + after) / 2)
            before = after
    return seconds, bounds


def report_rounds(report: Report, size: Size) -> None:
    """Add rounds of all methods, with some of the workers slowed five times."""
    n, a, b = size.code
    with Lab(n, size.share) as lab:
        report.machine["throttle"] = lab.kind
        bench = Bench(lab, size)
        ways: dict[str, Callable[[], float]] = {
            name: partial(bench.run_round, policy, predictor) for name, policy, predictor in WAYS
        }
        ways["dask.array"] = bench.compute
        for slowed in size.slowed:
            lab.set_speeds([1 / 5] * slowed + [1] * (n - slowed))
            # An untimed round learns the speeds first.
            bench.run_round("continuous", "adaptive")
            seconds, bounds = compare(bench, ways, size.turns)
            # Dividing each round by its own fluid bound removes changes of the machine itself.
            ratios = {name: np.divide(seconds[name], bounds[name]) for name in ways}
            for name in ways:
                case = f"({n},{a * b}), {slowed} slowed 5x: {name}"
                keys: dict[str, Any] = {"n": n, "a": a, "b": b, "slowed": slowed, "way": name}
                keys["seconds"] = float(np.median(seconds[name]))
                report.add(case, "round_over_fluid", Summary.of(ratios[name]), **keys)
                for other in ("conventional", "dask.array"):
                    if name != other:
                        measure = f"round_over_{other.replace('.', '_')}"
                        report.add(case, measure, Summary.of(ratios[name] / ratios[other]), **keys)


# ---------------------------------------------------------------------------------------- numerics


def generators(n: int, a: int, b: int, draws: int) -> dict[str, np.ndarray]:
    """Return the generators to compare, each (n, a b): ours, other points, published codes."""
    out = {
        points: coded.Polynomial(n, a, b, points).G
        for points in ("circle", "chebyshev", "integers")
    }
    angles = 2 * np.pi / n * np.arange(n)
    out["roots of unity"] = np.exp(1j * np.outer(angles, np.arange(a * b)))
    out["chebyshev from T_1"] = _chebyshev_from_1(n, a, b)
    # Systematic, with random Khatri-Rao parity: the best of a few draws.
    candidates = [_random(n, a, b, seed) for seed in range(draws)]
    out["random"] = min(candidates, key=lambda G: worst(G)[0])
    return out


def _chebyshev_from_1(n: int, a: int, b: int) -> np.ndarray:
    """Return the variant with published errors: degrees 1 to a, and a to a b."""
    angles = (2 * np.arange(n) + 1) * np.pi / (2 * n)
    left = np.cos(np.outer(angles, np.arange(1, a + 1)))
    right = np.cos(np.outer(angles, a * np.arange(1, b + 1)))
    return (left[:, :, None] * right[:, None, :]).reshape(n, a * b)


def _random(n: int, a: int, b: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((n - a * b, a)), rng.standard_normal((n - a * b, b))
    parity = (left[:, :, None] * right[:, None, :]).reshape(n - a * b, a * b)
    return np.vstack([np.eye(a * b), parity / np.sqrt(a * b)])


def worst(G: np.ndarray) -> tuple[float, float]:
    """Return the worst condition number and error amplification over all sufficient sets.

    The amplification is of squared errors, for errors proportional to each worker's result and
    blocks of equal size.
    """
    condition = amplification = 0.0
    for part in _subsets(*G.shape):
        rows = G[part]
        # With rows of norm one each worker's error has the same size.
        scaled = rows / np.linalg.norm(rows, axis=2, keepdims=True)
        values, of_scaled = (np.linalg.svd(M, compute_uv=False) for M in (rows, scaled))
        # A singular set makes both infinite; only some machines' LAPACK finds an exact zero.
        with np.errstate(divide="ignore"):
            conditions, errors = values[:, 0] / values[:, -1], (of_scaled**-2.0).sum(axis=1)
        condition = max(condition, float(conditions.max()))
        amplification = max(amplification, float(errors.max()) / G.shape[1])
    return condition, amplification


def _subsets(n: int, k: int) -> Iterator[np.ndarray]:
    subsets = np.array(list(itertools.combinations(range(n), k)))
    yield from np.array_split(subsets, -(-len(subsets) // 1_000))


def decoding_error(code: coded.Polynomial, dtype: str) -> float:
    """Return the error of a product decoded from the worst set, relative to double precision."""
    rng = np.random.default_rng(0)
    A = rng.standard_normal((200, 8 * code.a)).astype(dtype)
    B = rng.standard_normal((200, 8 * code.b)).astype(dtype)
    left = code.left.encode(np.split(A, code.a, axis=1))
    right = code.right.encode(np.split(B, code.b, axis=1))
    products = [x.astype(dtype).T @ y.astype(dtype) for x, y in zip(left, right, strict=True)]
    exact = A.astype(float).T @ B.astype(float)
    error = 0.0
    for part in _subsets(code.n, code.k):
        for subset in part.tolist():
            blocks = code.decode([products[i] for i in subset], subset)
            found = np.block([list(row) for row in blocks.reshape(code.a, code.b, 8, 8)])
            error = max(error, float(np.linalg.norm(found - exact) / np.linalg.norm(exact)))
    return error


def report_numerics(report: Report, size: Size) -> None:
    """Add worst condition numbers and errors of the codes, next to figures of others."""
    for n, a, b in size.codes:
        found = {name: worst(G) for name, G in generators(n, a, b, size.draws).items()}
        for name, (condition, amplification) in found.items():
            keys: dict[str, Any] = {"n": n, "a": a, "b": b, "points": name}
            what = f"({n}, {a}x{b}): {name}"
            for measure, value, table, kind in (
                ("worst_condition", condition, EARLIER_CONDITION, "computed before"),
                (
                    "worst_error_over_roots_of_unity",
                    amplification / found["roots of unity"][1],
                    PUBLISHED_ERROR,
                    "published",
                ),
            ):
                other = table.get(((n, a, b), name))
                case = what if other is None else f"{what} ({kind}: {other:.4g})"
                report.add(case, measure, value, **keys, other=other, other_is=kind)
    n, a, b = size.codes[0]
    for points in ("circle", "chebyshev", "integers"):
        code = coded.Polynomial(n, a, b, points)
        for dtype in ("float64", "float32"):
            try:
                error = decoding_error(code, dtype)
            except DecodeError:  # numerically singular
                error = math.inf
            report.add(f"({n}, {a}x{b}): {points}, {dtype}", "worst_decoding_error", error)


@click.command()
@options
def main(json_file: Path | None, png_file: Path | None, smoke: bool) -> None:
    """Measure Hessians with 0, 2 and 4 of 12 workers slowed 5x, and the errors of the codes."""
    if png_file:
        raise click.UsageError("This benchmark draws no picture: leave out --png.")
    size = SMOKE if smoke else Size()
    report = Report("hessian")
    report_numerics(report, size)
    report_rounds(report, size)
    report.finish(json_file)


if __name__ == "__main__":
    main()
