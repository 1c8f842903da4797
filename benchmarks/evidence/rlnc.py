"""RLNC: traffic of sparse random parity, what it survives, fits while workers come and go."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from distributed import wait

import dask_coded as coded
from benchmarks.evidence.kept import Kept
from benchmarks.evidence.papers import Claim, Finding, Paper, Section
from benchmarks.evidence.tables import table
from benchmarks.evidence.verdicts import Interval, Published, mean, ratio
from dask_coded.codes import MDS, Code, RandomLinear

SEEDS = 5
#: Pieces and blocks of the codes whose losses are drawn.
CODES = ((10, 7), (12, 9), (20, 16))
#: Losses of each code, and draws of a code and of lost workers.
LOSSES, DRAWS = 4, 200

#: Pieces and blocks in the counts and on processes, and the share of workers that leave and join.
N, K, CHURN = 10, 6, 0.3
#: Samples, features and rounds of a fit whose bytes are counted.
SAMPLES, FEATURES, ROUNDS = 6000, 5000, 200


# --------------------------------------------------------------------------------- what is survived


def own_draws(n: int, k: int, seed: int) -> Code:
    """Return a code whose parity workers draw zeros and weights each from its own seed."""
    parity = []
    for worker in range(k, n):
        rng = np.random.default_rng([seed, n, k, worker])
        row = rng.choice([-1.0, 1.0], k) * rng.uniform(0.5, 1.5, k) * (rng.random(k) < 0.5)
        parity.append(row)
    return Code(np.vstack([np.eye(k), *parity]))


def in_turn(n: int, k: int, seed: int) -> Code:
    """Return a code whose parity workers draw one after another, the rarest blocks first."""
    return RandomLinear(k, k, seed=seed).extended(n - k)


def together(n: int, k: int, seed: int) -> Code:
    """Return the best of several draws of all parity together."""
    return RandomLinear(n, k, seed=seed)


WAYS: dict[str, Callable[[int, int, int], Code]] = {
    "each from its own seed": own_draws,
    "one after another": in_turn,
    "together, best of 24": together,
}


def arrivals(code: Code, order: np.ndarray) -> int:
    """Return how many arriving pieces decode, or one more than there are if not even all do.

    An arrival counts whether it is innovative or not, that is, whether or not the rank grows.
    """
    rank = 0
    for count in range(1, len(order) + 1):
        rank = int(np.linalg.matrix_rank(code.G[order[:count]], tol=1e-9))
        if rank == code.k:
            return count
    return len(order) + 1


def survival(kept: Kept, seed: int) -> None:
    """Add the share of losses that each way of drawing survives, its blocks, and its arrivals."""
    draws = 20 if kept.smoke else DRAWS // SEEDS
    for n, k in CODES[: 1 if kept.smoke else None]:
        for way, make in WAYS.items():
            rng = np.random.default_rng([seed, n, k])
            survived = np.zeros(min(LOSSES, n - k))
            blocks, needed = [], []
            for draw in range(draws):
                # The search for the best draw takes long, and finds similar ones.
                code = make(n, k, seed * draws + draw if way != "together, best of 24" else seed)
                order = rng.permutation(n)
                for lost in range(1, len(survived) + 1):
                    survived[lost - 1] += code.survives(order[:lost].tolist())
                blocks.append(np.count_nonzero(code.G[k:]) / (k * (n - k)))
                needed.append(arrivals(code, order))
            kept.report.add(
                f"({n},{k}), seed {seed}: {way}",
                "blocks",
                100 * float(np.mean(blocks)),
                "%",
                n=n,
                k=k,
                way=way,
                seed=seed,
                survived=(survived / draws).tolist(),
                arrivals=float(np.mean(needed)) - k,
            )


# ----------------------------------------------------------------------------------------- counts


def codes() -> dict[str, Code]:
    """Return what is compared: as many pieces, and as many losses that are always survived."""
    sparse = RandomLinear(N, K)
    return {"RLNC": sparse, "MDS, as many": MDS(N, K), "MDS, as safe": MDS(K + sparse.tolerance, K)}


def repaired(code: Code, lost: int) -> int:
    """Return the number of pieces from which a lost one is made."""
    others = [i for i in range(code.pieces) if i != lost]
    return int(np.count_nonzero(code.combination(lost, others)))


def counted(kept: Kept, seed: int) -> None:
    """Add the megabytes of a fit during which workers leave, and others make the lost pieces.

    Both encodings count: that of the samples, and that of the features. Every round sends the
    operand to all workers; enough shares come back.
    """
    rng = np.random.default_rng(seed)
    megabytes = 8 * SAMPLES * FEATURES / K / 1e6  # of a piece
    for name, code in codes().items():
        n = code.pieces
        leaving = rng.permutation(n)[: round(CHURN * n)]
        encoding = 2 * megabytes * np.count_nonzero(code.G[K:])
        repairs = 2 * megabytes * sum(repaired(code, int(lost)) for lost in leaving)
        rounds = ROUNDS * 8 * (n * FEATURES + SAMPLES + n * SAMPLES + FEATURES) / 1e6
        for part, value in (("encoding", encoding), ("repairs", repairs), ("rounds", rounds)):
            kept.report.add(
                f"{name}, seed {seed}: {part}",
                "counted",
                float(value),
                "MB",
                code=name,
                part=part,
                seed=seed,
                pieces=n,
                tolerance=code.tolerance,
                leaving=len(leaving),
            )


# --------------------------------------------------------------------------------------- processes


def data(samples: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and classes that no plane separates."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((samples, features))
    scores = X @ rng.standard_normal(features) / np.sqrt(features)
    return X, (scores + rng.standard_normal(samples) > 0).astype(int)


def objective(model: str, X: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """Return what a fit without intercept minimises: the sum of losses, and half a squared norm."""
    margins = np.where(y == 1, 1, -1) * (X @ weights)
    if model == "logistic":
        losses = np.logaddexp(0, -margins)
    else:
        losses = np.maximum(1 - margins, 0) ** 2
    return float(losses.sum() + weights @ weights / 2)


def models(name: str) -> tuple[Any, Any]:
    """Return our estimator and scikit-learn's."""
    from sklearn import linear_model, svm

    from dask_coded.linear_model import LinearSVC, LogisticRegression

    if name == "logistic":
        return (
            LogisticRegression(fit_intercept=False, tol=1e-9, max_iter=1000),
            linear_model.LogisticRegression(fit_intercept=False, tol=1e-10, max_iter=10_000),
        )
    return (
        LinearSVC(fit_intercept=False),
        svm.LinearSVC(fit_intercept=False, tol=1e-10, max_iter=100_000, dual=False),
    )


class Churn(threading.Thread):
    """Ends one worker after another while a fit runs, and starts as many.

    Parameters
    ----------
    lab : NetworkLab
    C : CodedArray
    leaving : list of int
        The workers that are killed, by their number.

    Attributes
    ----------
    rounds : Queue
        Takes a number for each report of the fit, and None at its end.
    during : int
        How many left while the fit was running.
    """

    def __init__(self, lab: Any, C: coded.CodedArray, leaving: list[int]) -> None:
        super().__init__(name="churn")
        self._lab, self.C, self._leaving = lab, C, leaving
        self.rounds: queue.Queue[int | None] = queue.Queue()
        self.during = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            running = True
            for worker in self._leaving:
                if running:
                    running = self.rounds.get() is not None
                self.during += running
                self._replace(worker)
        except BaseException as error:
            self.error = error

    def _replace(self, worker: int) -> None:
        client = self._lab.client
        there = set(client.scheduler_info(n_workers=-1)["workers"])
        self._lab.kill(worker)
        self._lab.start(worker)
        client.wait_for_workers(len(there), timeout=120)
        if isinstance(self.C.code, RandomLinear):
            # There is nothing to add if the new worker has taken over a piece.
            with suppress(coded.ClusterUnfitError):
                self.C = self.C.extend()
        wait([*self.C.encoded.futures, *self.C.T.encoded.futures], timeout=120)


def size_of(kept: Kept) -> tuple[int, int]:
    """Return the samples and features of a fit on processes."""
    return (120, 10) if kept.smoke else (12_000, 1_000)


@contextmanager
def behind_links(kept: Kept, name: str, X: np.ndarray) -> Iterator[tuple[Any, Any, int]]:
    """Start workers behind limited links, and encode; yield the lab, the array, and the bytes."""
    from benchmarks.network import NetworkLab

    code = MDS(3, 2) if kept.smoke else codes()[name]
    if kept.smoke and name == "RLNC":
        code = RandomLinear(4, 2)
    with NetworkLab(code.pieces, "100mbit") as lab:
        source = da.from_array(X, chunks=(len(X) // code.k, -1))
        source = lab.client.persist(source, workers=lab.workers)
        wait(source)
        before = received(lab)
        C = coded.encode(source, code, lab.client, workers=lab.workers, transpose=True)
        yield lab, C, received(lab) - before


def received(lab: Any) -> int:
    """Return the bytes that workers have received; the last link is that of the client."""
    return int(lab.traffic().received[:-1].sum())


def encoding(kept: Kept, name: str, seed: int) -> None:
    """Add the bytes that encoding moves, with headers."""
    if not kept.processes:
        return
    X, _ = data(*size_of(kept), seed)
    with behind_links(kept, name, X) as (_, C, moved):
        about = {"code": name, "seed": seed, "pieces": C.code.pieces}
        kept.report.add(f"{name}, seed {seed}: encoding", "encoded", moved / 1e6, "MB", **about)


def trained(kept: Kept, model: str, name: str, seed: int) -> None:
    """Fit while workers leave and join, and add the error of the objective and all bytes."""
    if not kept.processes:
        return
    X, y = data(*size_of(kept), seed)
    ours, theirs = models(model)
    best = objective(model, X, y, theirs.fit(X, y).coef_[0])
    with behind_links(kept, name, X) as (lab, C, _):
        n = C.code.pieces
        leaving = np.random.default_rng(seed).permutation(n)[: round(CHURN * n)]
        marks = [received(lab)]
        ours.fit(C, y)
        marks.append(received(lab))
        churn = Churn(lab, C, leaving.tolist())
        churn.start()
        ours.fit(C, y, callback=lambda progress: churn.rounds.put(progress.round))
        churn.rounds.put(None)
        churn.join()
        if churn.error is not None:
            raise churn.error
        marks.append(received(lab))
        pieces = churn.C.code.pieces
    quiet, busy = np.diff(marks).tolist()
    kept.report.add(
        f"{model}, {name}, seed {seed}",
        "churned",
        abs(objective(model, X, y, ours.coef_[0]) / best - 1),
        model=model,
        code=name,
        seed=seed,
        rounds=quiet,
        churn=busy - quiet,
        left=len(leaving),
        during=churn.during,
        pieces=pieces,
    )


NAMES = ("RLNC", "MDS, as many", "MDS, as safe")

SECTIONS = {
    "survival": Section({f"seed {i}": partial(survival, seed=i) for i in range(SEEDS)}, 4),
    "counted": Section({f"seed {i}": partial(counted, seed=i) for i in range(SEEDS)}, 1),
    "encoding": Section(
        {
            f"seed {i}, {name}": partial(encoding, name=name, seed=i)
            for i in range(SEEDS)
            for name in NAMES
        },
        6,
    ),
    **{
        f"churn-{model}": Section(
            {
                f"seed {i}, {name}": partial(trained, model=model, name=name, seed=i)
                for i in range(SEEDS)
                for name in NAMES
            },
            20,
        )
        for model in ("logistic", "svm")
    },
}


# ------------------------------------------------------------------------------- what was measured


def halved(kept: Kept) -> list[Finding]:
    """Find the blocks that encoding moves, in per cent of those of MDS with as many pieces."""
    found = []
    for n, k in CODES:
        rows = kept.rows(measure="blocks", n=n, k=k, way="together, best of 24")
        if rows:
            value = mean([row["value"] for row in rows])
            found.append(Finding(f"blocks of ({n},{k})", None, value))
    ours, theirs = _of_both(*(_encoded(kept, name) for name in NAMES[:2]))
    if len(ours):
        reason = "also blocks that are moved to their workers, and rows for the transposed matrix"
        found.append(Finding("bytes on processes", ratio(100 * ours, theirs), None, reason))
    return found


def everything(kept: Kept) -> list[Finding]:
    """Find all bytes of a training during which workers leave, in per cent of those with MDS."""
    found = []
    for name, what in zip(NAMES[1:], ("as many pieces", "as many losses survived")):
        ours, theirs = (_counted(kept, each) for each in (NAMES[0], name))
        if len(ours):
            found.append(Finding(f"counted, {what}", None, ratio(100 * ours, theirs)))
        for model in ("logistic", "svm"):
            ours, theirs = _of_both(*(_bytes(kept, model, each) for each in (NAMES[0], name)))
            if len(ours):
                rows = kept.rows(measure="churned", model=model, code=NAMES[0])
                most = max(row["pieces"] for row in rows)
                reason = f"workers that join make new pieces as well: {N} became up to {most}"
                found.append(Finding(f"{model}, {what}", ratio(100 * ours, theirs), None, reason))
    return found


def _encoded(kept: Kept, name: str) -> dict[int, float]:
    """Return the bytes of encoding by seed."""
    return {row["seed"]: 1e6 * row["value"] for row in kept.rows(measure="encoded", code=name)}


def _bytes(kept: Kept, model: str, name: str) -> dict[int, float]:
    """Return all bytes of a training by seed."""
    encoded = _encoded(kept, name)
    return {
        row["seed"]: encoded[row["seed"]] + row["rounds"] + row["churn"]
        for row in kept.rows(measure="churned", model=model, code=name)
        if row["seed"] in encoded
    }


def _of_both(ours: dict[int, float], theirs: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of the seeds that both have."""
    seeds = sorted(ours.keys() & theirs.keys())
    return np.array([ours[i] for i in seeds]), np.array([theirs[i] for i in seeds])


def _counted(kept: Kept, name: str) -> np.ndarray:
    rows = kept.rows(measure="counted", code=name)
    seeds = sorted({row["seed"] for row in rows})
    return np.array([sum(r["value"] for r in rows if r["seed"] == seed) for seed in seeds])


def exact(kept: Kept) -> list[Finding]:
    """Find the largest error of the objective after workers have left and joined."""
    found = []
    for model in ("logistic", "svm"):
        rows = kept.rows(measure="churned", model=model, code=NAMES[0])
        if rows:
            worst = max(row["value"] for row in rows)
            left, during = (sum(row[key] for row in rows) for key in ("left", "during"))
            reason = f"{during} of {left} workers left during the fit"
            value = Interval(worst / 1e-6, float("nan"), float("nan"))
            found.append(Finding(model, value, None, reason))
    return found


# ------------------------------------------------------------------------------------------ tables


def survivals(kept: Kept) -> Iterator[str]:
    if not kept.rows(measure="blocks"):
        return
    yield "## What random parity survives\n"
    yield (
        "Share of the losses of 1 to 4 workers, drawn at random, after which the blocks can be "
        f"recovered, of {DRAWS} draws; half of the weights are zero. An MDS code survives all of "
        "them. *Each from its own seed*: zeros are drawn independently, as without any "
        "coordination. *One after another*: a worker that joins draws too, but combines the blocks "
        "that are in the fewest pieces (`extend`). *Together*: `RandomLinear`, which all workers "
        "compute from one seed. *More arrivals*: pieces beyond k, in random order, until the rank "
        "is k, because some are not innovative."
    )
    lines = []
    for n, k in CODES:
        for way in WAYS:
            rows = kept.rows(measure="blocks", n=n, k=k, way=way)
            if not rows:
                continue
            shares = np.mean([row["survived"] for row in rows], axis=0)
            cells = [f"{share:.2f}" for share in shares] + ["–"] * (LOSSES - len(shares))
            blocks, more = (np.mean([row[key] for row in rows]) for key in ("value", "arrivals"))
            lines.append([f"({n},{k}), {way}", *cells, f"{blocks:.0f} %", f"{more:.2f}"])
    header = [*(f"{lost} lost" for lost in range(1, LOSSES + 1)), "blocks over MDS"]
    yield from table(["", *header, "more arrivals"], lines)


def traffic(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="counted")
    if not rows:
        return
    yield "## Where the bytes go\n"
    yield (
        f"Counted, without a cluster: {SAMPLES} samples of {FEATURES} features, both encodings, "
        f"{ROUNDS} rounds, {CHURN:.0%} of the workers leave and others make the lost pieces. "
        "Megabytes, mean of five choices of who leaves."
    )
    lines = []
    for name in NAMES:
        some = [row for row in rows if row["code"] == name]
        parts = {
            part: np.mean([row["value"] for row in some if row["part"] == part])
            for part in ("encoding", "repairs", "rounds")
        }
        about = some[0]
        lines.append(
            [
                f"{name}: {about['pieces']} pieces, any {about['tolerance']} may be lost",
                *(f"{value:.0f}" for value in parts.values()),
                f"{sum(parts.values()):.0f}",
            ]
        )
    yield from table(["", "encoding", "repairs", "rounds", "all"], lines)


def fits(kept: Kept) -> Iterator[str]:
    rows = kept.rows(measure="churned")
    if not rows:
        return
    yield "## Fits during which workers leave and join\n"
    yield (
        "Worker processes behind links of 100 Mbit/s; megabytes that links carried to workers, "
        "headers included, median of seeds. *Rounds* is a fit in peace; *churn* is what the fit "
        "with leaving and joining workers takes beyond it."
    )
    lines = []
    for model, name in dict.fromkeys((row["model"], row["code"]) for row in rows):
        some = [row for row in rows if (row["model"], row["code"]) == (model, name)]
        parts = [np.array(list(_encoded(kept, name).values()))]
        parts += [np.array([row[key] for row in some]) for key in ("rounds", "churn")]
        cells = [f"{np.median(part) / 1e6:.1f}" if part.size else "–" for part in parts]
        error = max(row["value"] for row in some)
        lines.append([f"{model}, {name}", *cells, f"{error:.1g}"])
    yield from table(["", "encoding", "rounds", "churn", "error of the objective"], lines)


PAPER = Paper(
    name="rlnc",
    title="Evidence: RLNC",
    intro=(
        "Lin, Narra, Yu, Avestimehr and Annavaram (arXiv:1910.10283) train on coded data whose "
        "parity is sparse and random, so that devices exchange less and may come and go. "
        "[Encoding with less network traffic](../rlnc.md) explains `RandomLinear`, which computes "
        "all parity from one seed and keeps the best of several draws. That each worker draws "
        "alone, and an arrival is tested for innovation, is only counted here: the library does "
        "so for workers that join, but not when it encodes."
    ),
    claims=(
        Claim(
            "Blocks or bytes moved by encoding, of those with MDS",
            Published(0, 50, "level", "%", at_most=True),
            "abstract",
            "sure",
            ("survival", "encoding"),
            halved,
        ),
        Claim(
            "All bytes of a training, of those with MDS",
            Published(0, 50, "level", "%", at_most=True),
            'abstract, "total required communication bandwidth"',
            "sure",
            ("counted", "encoding", "churn-logistic", "churn-svm"),
            everything,
        ),
        Claim(
            "Error of the objective beside scikit-learn's, over 1e-6, after leaving and joining",
            Published(0, 1, "level", "", at_most=True),
            "devices join and leave; the limit is ours",
            "sure",
            ("churn-logistic", "churn-svm"),
            exact,
        ),
    ),
    sections=SECTIONS,
    parts=(survivals, traffic, fits),
)
