"""Train the LSTM that ships with the package, on the traces of real machines.

    python -m benchmarks.lstm

writes the weights, with a record of their training, to the file that the package reads.
``python -m benchmarks.prediction`` evaluates them on machines and days that training has not seen;
see `benchmarks.traces.Part` for the split.

- Every batch takes the same number of windows from each trace, and each trace's squared errors are
  in units of those of an AR(8) fitted to that trace. So no trace dominates by its number of
  machines or by its variance.
- The linear part starts as the ridge regression over all traces, the cell at PyTorch's random
  initialisation, and its read-out at zero.
- Some windows lose their early rounds, because a cluster has no history when it starts.
- The weights that are kept are a moving average, from the epoch with the least validation loss.
"""

from __future__ import annotations

import copy
import json
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import traces
from benchmarks.traces import PARTS, Part, series
from dask_coded.prediction.predictors._lstm import NAMES, loudness

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError("Training needs PyTorch: pip install 'dask-coded[train]'.") from error

#: File from which the package reads its weights.
SHIPPED = Path(str(files("dask_coded.prediction.predictors"))) / "lstm.npz"

#: Rounds that the network looks back: as many as the runtime remembers.
HISTORY = 64

SETTINGS: dict[str, Any] = {
    "hidden": 12,
    "width": 4,  # rounds that the cell takes per step
    "epochs": 24,
    "batches": 250,  # per epoch
    "batch": 192,  # windows of each trace in a batch
    "learning_rate": 4e-3,
    "weight_decay": 0.1,
    "averaging": 0.995,
    "shortened": 0.15,  # share of windows that lose their early rounds
    "ridge": 0.01,
    "patience": 8,  # epochs without improvement
    "seed": 0,
}
SMOKE = {"epochs": 2, "batches": 2, "batch": 16}


class Windows:
    """Windows of one part of some traces, drawn without storing them.

    Parameters
    ----------
    machines : dict
        Speeds of the machines of each trace, see `series`.
    part : Part
    """

    def __init__(self, machines: dict[str, list[np.ndarray]], part: Part) -> None:
        flat, length = [], 0
        self.ends: dict[str, torch.Tensor] = {}
        for name, speeds in machines.items():
            ends = []
            for number, values in enumerate(speeds):
                if not part.has(number):
                    continue
                targets = np.array(part.targets(len(values)))
                flat += [np.full(HISTORY, np.nan), values]
                ends.append(length + HISTORY + targets)
                length += HISTORY + len(values)
            self.ends[name] = torch.tensor(np.concatenate(ends))
        self._flat = torch.tensor(np.concatenate(flat), dtype=torch.float32)

    def draw(self, name: str, size: int, generator: torch.Generator) -> torch.Tensor:
        """Draw windows of a trace at random, shape (size, HISTORY + 1); targets come last."""
        ends = self.ends[name]
        return self._at(ends[torch.randint(len(ends), (size,), generator=generator)])

    def spread_out(self, name: str, most: int) -> torch.Tensor:
        """Return at most ``most`` windows of a trace, evenly spaced."""
        ends = self.ends[name]
        return self._at(ends[:: -(-len(ends) // most)])

    def _at(self, ends: torch.Tensor) -> torch.Tensor:
        return self._flat[ends[:, None] + torch.arange(-HISTORY, 1)]


def normalised(history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, spread and deviations, as ``_lstm.normalised`` does in NumPy."""
    known = ~torch.isnan(history)
    values = torch.nan_to_num(history)
    count = known.sum(1).clamp(min=1)
    mean = (values.sum(1) / count).clamp(min=1e-12)
    z = (values / mean[:, None] - 1) * known
    spread = (z.square().sum(1) / count).sqrt().clamp(min=1e-9)
    return mean, spread, z / spread[:, None]


class Net(torch.nn.Module):
    """The network of ``dask_coded/prediction/predictors/_lstm.py``, in PyTorch."""

    def __init__(self, hidden: int, width: int, line: torch.Tensor) -> None:
        super().__init__()
        self.width = width
        self.cell = torch.nn.LSTM(width + 1, hidden, batch_first=True)
        self.head = torch.nn.Parameter(torch.zeros(hidden))
        self.line = torch.nn.Parameter(line)

    def forward(self, u: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        steps = u.reshape(len(u), -1, self.width)
        loud = torch.from_numpy(loudness(spread.numpy()))
        loud = loud[:, None, None].expand(-1, steps.shape[1], 1)
        hidden = self.cell(torch.cat([steps, loud], 2))[0][:, -1]
        return hidden @ self.head + u @ self.line

    def errors(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the last speed of each window minus its prediction from the others."""
        mean, spread, u = normalised(windows[:, :-1])
        return windows[:, -1] - mean * (1 + spread * self(u, spread))

    def weights(self) -> dict[str, np.ndarray]:
        """Return the arrays that the package reads."""
        cell = dict(self.cell.named_parameters())
        tensors: tuple[torch.Tensor, ...] = (
            cell["weight_ih_l0"],
            cell["weight_hh_l0"],
            cell["bias_ih_l0"] + cell["bias_hh_l0"],
            self.head,
            self.line,
        )
        return {n: t.detach().numpy().astype(np.float64) for n, t in zip(NAMES, tensors)}


def regression(samples: list[torch.Tensor], order: int, ridge: float) -> torch.Tensor:
    """Fit the last speed to those before by ridge regression, with equal weight for each set."""
    gram, product = torch.zeros(order, order).double(), torch.zeros(order).double()
    for windows in samples:
        mean, _, _ = normalised(windows[:, :-1])
        z = torch.nan_to_num(windows / mean[:, None] - 1).double()
        inputs, targets = z[:, -order - 1 : -1], z[:, -1]
        scale = len(z) * targets.var()
        gram += inputs.T @ inputs / scale
        product += inputs.T @ targets / scale
    penalty = ridge * gram.trace() / order + 1e-12
    return torch.linalg.solve(gram + penalty * torch.eye(order).double(), product).float()


def yardstick(windows: torch.Tensor) -> float:
    """Return the mean squared error of an AR(8) fitted to the same windows."""
    mean, _, _ = normalised(windows[:, :-1])
    z = torch.nan_to_num(windows / mean[:, None] - 1)
    wrong = z[:, -1] - z[:, -9:-1] @ regression([windows], 8, 1e-4)
    return float((mean * wrong).square().mean())


def shorten(windows: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Remove all rounds before a random one from a share of the windows."""
    keep = torch.randint(1, HISTORY + 1, (len(windows),), generator=generator)
    keep[torch.rand(len(windows), generator=generator) >= share] = HISTORY
    early = torch.arange(HISTORY + 1) < (HISTORY - keep)[:, None]
    return torch.where(early, torch.nan, windows)


def losses(net: Net, samples: dict[str, torch.Tensor], unit: dict[str, float]) -> dict[str, float]:
    """Return the mean squared error on each trace over that of the yardstick."""
    with torch.no_grad():
        return {n: float(net.errors(w).square().mean()) / unit[n] for n, w in samples.items()}


def train(
    machines: dict[str, list[np.ndarray]], settings: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Train on the training part of the machines, and stop early by their validation part.

    Returns
    -------
    weights : dict of ndarray
    losses : dict
        Validation losses of the weights that were kept and of the linear part before training: mean
        squared error over that of an AR(8) fitted to the same windows, by trace and their mean.
    """
    torch.manual_seed(settings["seed"])
    generator = torch.Generator().manual_seed(settings["seed"])
    training, validation = (Windows(machines, PARTS[p]) for p in ("training", "validation"))
    many = 100 * settings["batch"]
    samples = {name: training.spread_out(name, many) for name in machines}
    unit = {name: yardstick(windows) for name, windows in samples.items()}
    checks = {name: validation.spread_out(name, many) for name in machines}
    check_unit = {name: yardstick(windows) for name, windows in checks.items()}

    line = regression(list(samples.values()), HISTORY, settings["ridge"])
    net = Net(settings["hidden"], settings["width"], line)
    weight = torch.cat([torch.full((settings["batch"],), 1 / unit[name]) for name in machines])
    rate, steps = settings["learning_rate"], settings["epochs"] * settings["batches"]
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=settings["weight_decay"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    average = best = copy.deepcopy(net)
    start = least = losses(net, checks, check_unit)
    best_epoch = 0

    for epoch in range(1, settings["epochs"] + 1):
        total = 0.0
        for batch in range(settings["batches"]):
            drawn = [training.draw(name, settings["batch"], generator) for name in machines]
            windows = shorten(torch.cat(drawn), settings["shortened"], generator)
            loss = (net.errors(windows).square() * weight).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
            done = (epoch - 1) * settings["batches"] + batch
            _follow(average, net, min(settings["averaging"], (done + 1) / (done + 10)))
        now = losses(average, checks, check_unit)
        print(
            f"epoch {epoch:2}: training {total / settings['batches']:.4f}, "
            f"validation {_mean(now):.4f}"
        )
        if _mean(now) < _mean(least):
            best, best_epoch, least = copy.deepcopy(average), epoch, now
        elif epoch - best_epoch >= settings["patience"]:
            break
    return best.weights(), {
        "unit": "mean squared error over that of an AR(8) fitted to the same windows",
        "validation": {"mean": _mean(least), **least},
        "validation of the line before training": {"mean": _mean(start), **start},
        "training windows": {name: len(ends) for name, ends in training.ends.items()},
        "validation windows": {name: len(ends) for name, ends in validation.ends.items()},
        "epochs run": epoch,
        "epoch kept": best_epoch,
    }


def _follow(average: Net, net: Net, memory: float) -> None:
    with torch.no_grad():
        for old, new in zip(average.parameters(), net.parameters()):
            old.lerp_(new, 1 - memory)


def _mean(by_trace: dict[str, float]) -> float:
    return sum(by_trace.values()) / len(by_trace)


@click.command()
@click.option("--epochs", type=click.IntRange(min=1), help="Maximum number of epochs.")
@click.option("--smoke", is_flag=True, help="A tiny run that only shows that it works.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File for the weights; by default the one that the package reads.",
)
def main(epochs: int | None, smoke: bool, output: Path | None) -> None:
    """Train the LSTM on the traces of real machines."""
    if smoke and output is None:
        raise click.UsageError("A smoke run must not replace the weights: pass --output.")
    torch.set_num_threads(1)  # makes sums reproducible on machines of the same kind
    settings = SETTINGS | (SMOKE if smoke else {})
    if epochs is not None:
        settings["epochs"] = epochs
    names = ("stream-triad", "bytedance-SE") if smoke else traces.NAMES
    machines = {name: series(name) for name in names}
    weights, history = train(machines, settings)
    record = {
        "trained by": "python -m benchmarks.lstm",
        "data": {name: f"{len(speeds)} machines" for name, speeds in machines.items()},
        "split": {name: part.description for name, part in PARTS.items()},
        "settings": settings,
        "losses": history,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
    }
    file = output or SHIPPED
    arrays = {"record": np.array(json.dumps(record, indent=1)), **weights}
    with file.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    size = sum(array.size for array in weights.values())
    print(f"wrote {file}: {size} weights, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
