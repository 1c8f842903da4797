"""Training on a cluster: one loop, and independent choices of how gradients are summed.

All workers have a copy of the parameters. In each step every worker computes the gradients of its
own parts of the data, the aggregation sums the gradients, and every worker applies the same sum to
its copy. Only sums of gradients travel; the data stay where they are.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from threading import Lock
from typing import Any

import dask
import numpy as np
import numpy.typing as npt
from distributed import Client
from distributed.protocol.pickle import dumps

from dask_coded.aggregation import Aggregation, Squeeze
from dask_coded.arguments import check_place, check_positive, check_whole
from dask_coded.compression import EXACT, Compression, sum_dtype
from dask_coded.display import Display
from dask_coded.loop import Progress
from dask_coded.runtime.client.install import check_fit, install
from dask_coded.runtime.client.waiting import (
    outside_pool,
    threads_of,
    waiting_client,
    while_connected,
)
from dask_coded.sameness import hash_of
from dask_coded.submission import run
from dask_coded.training.aggregations import choose_aggregation
from dask_coded.training.batches import Batches
from dask_coded.training.checkpoints import (
    Checkpoint,
    check_same,
    found_state,
    has_address,
    without_addresses,
)
from dask_coded.training.checks import (
    check_choices,
    check_grid,
    first_parameters,
    momenta_of,
    named_workers,
    shapes_of,
    with_units,
)
from dask_coded.training.data import load
from dask_coded.training.loaders import joined
from dask_coded.training.optimizers import SGD, Optimizer
from dask_coded.training.replica import Augment, Gradient, Model
from dask_coded.training.result import TrainingResult
from dask_coded.training.runtime import TrainingSchedulerPlugin, lead
from dask_coded.training.runtime.spec import Outcome, Scoring, Training
from dask_coded.training.schedules import Schedule, Synchronous
from dask_coded.training.validation import Validation

logger = logging.getLogger("distributed.dask_coded")


def train(
    gradient: Gradient,
    parameters: npt.ArrayLike,
    data: Any,
    *,
    optimizer: Optimizer | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    aggregation: Aggregation | None = None,
    compression: Compression | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    layers: Sequence[tuple[int, ...]] | None = None,
    averages: npt.ArrayLike | None = None,
    clip_norm: float | None = None,
    augment: Augment | None = None,
    client: Client | None = None,
    workers: str | Sequence[str] | None = None,
    leader: str | Sequence[str] | None = None,
    checkpoint: Checkpoint | None = None,
    resume: str | os.PathLike[str] | bool | None = None,
    validation: Validation | None = None,
    callback: Callable[[Progress], object] | None = None,
    verbose: bool = False,
) -> TrainingResult:
    """Train a model on the cluster that holds the data.

    Ctrl-C stops the training on the cluster as well.

    Parameters
    ----------
    gradient : callable
        ``gradient(parameters, samples, targets)`` returns the *sum* over the given samples of the
        gradient of the loss, as a flat array as long as the parameters; or a pair of the sum of the
        losses and that array. It runs on the workers, must not change its arguments, and may use
        NumPy, JAX, PyTorch or anything else that returns an array. In steps over all data its
        arrays are read-only: copy what you change. If workers share parts of the data, it must
        return the same result for the same arguments.
    parameters : array_like of float, shape (n,)
        Initial parameters. Gradients are summed in their dtype, those of float16 in float32.
    data : (samples, targets) or iterable of batches
        Dask arrays with any chunks, NumPy arrays, PyTorch tensors, or lists of delayed objects or
        futures of arrays of rows. Samples and targets have the same length along the first axis.
        Or batches, pairs of NumPy arrays or tensors, as PyTorch's ``DataLoader`` or a generator
        yields them. They are read once, joined, and then spread over the workers. If they have no
        length, no more are read than ``steps`` uses; ``epochs`` reads them to their end. What
        :func:`from_loader` returns is read by the workers. All blocks have rows of one dtype and
        shape.
    optimizer : Optimizer, optional
        :class:`SGD`, :class:`Adam`, or one of PyTorch by :meth:`TorchModule.optimizer`; by default
        ``SGD(0.1)``. It receives the mean gradient over the samples of a step.
    steps : int, optional
        Total number of updates, including those made before a training was resumed; by default
        100.
    epochs : int, optional
        Number of passes over the data, instead of ``steps``.
    batch_size : int, optional
        Samples in a step, over all workers; by default all, or as many as in a batch if the data
        come in batches. Each epoch uses every sample once.
    aggregation : Aggregation, optional
        How gradients are summed; by default :func:`choose_aggregation` chooses. Then the
        log says if steps have waited for a slow worker.
    compression : Compression, optional
        How gradients are compressed; by default they are not.
    schedule : Schedule, optional
        :class:`Synchronous`, which is the default, or :class:`Pipelined`.
    seed : int
        Seed of the mini-batches.
    layers : sequence of tuple of int, optional
        Shapes of the layers that lie one after the other in the parameters, for compressions that
        work by layer. By default there is one layer.
    averages : array_like of float, shape (m,), optional
        The last ``m`` parameters are running averages with these momenta, such as statistics of
        batch normalisation. The gradient function returns at their places what is averaged, summed
        over the samples, as it does with gradients. After each step an average ``r`` becomes
        ``r + momentum * (mean - r)``; the optimizer never sees it. By default those of the
        :class:`TorchModule` whose :meth:`~TorchModule.gradient` is passed.
    clip_norm : float, optional
        A mean gradient with a larger norm is scaled down to it before the optimizer gets it.
    augment : callable, optional
        ``augment(samples, keys)`` returns changed samples, each time that they are used. It runs on
        the workers. Its random numbers must follow from ``keys``, an array of uint64 with one key
        for each sample. A key depends only on the seed, the epoch and the position of the sample
        in the data. If each sample is changed by itself, the result therefore does not depend on
        who computes it.
    client : distributed.Client, optional
        The cluster; by default the current one.
    workers : str or sequence of str, optional
        Addresses of the workers that may take part; by default all.
    leader : str or sequence of str, optional
        Addresses of workers that may lead the training; by default a fast worker leads.
    checkpoint : Checkpoint, optional
        A file to resume from if the cluster is lost.
    resume : path or bool, optional
        Such a file, as the client sees it; or True for that of the ``checkpoint``, if it has been
        written yet, so that the same call starts a training and goes on with it; a checkpoint of
        other settings or data of another length is refused. The training continues as if it had not
        been interrupted, except that a :class:`Pipelined` schedule fills its pipeline again, and
        that what :class:`~dask_coded.compression.GradiVeQ` keeps as residuals is dropped.
    validation : Validation, optional
        Has parameters scored on other data every few updates: see ``found.scores``, and the
        ``score`` of what the callback gets.
    callback : callable, optional
        Called in the client's event loop with a :class:`~dask_coded.Progress`, at most ten times a
        second and after the last step. Its objective is the mean loss; its residual is the norm of
        the mean gradient (of the compressed one, if gradients are compressed). If the callback
        returns True, the training ends some steps later: about a dozen with :class:`Ring` and
        :class:`Squeeze`.
    verbose : bool
        Show the progress.

    Returns
    -------
    TrainingResult

    Raises
    ------
    TypeError, ValueError
        If an argument or a computed gradient has a wrong type or value.
    FloatingPointError
        If a gradient is not finite, or the parameters are not after an update.
    MemoryError
        If batches take more than half of this machine's memory.
    ClusterUnfitError
        If no worker has this version of the package, or the scheduler has another one.
    ConnectionError
        If the scheduler ends.
    CodedDataLostError
        If data are lost with a worker and the cluster cannot compute them again.
    Exception
        Any exception that ``gradient`` raises, with its traceback and a note that names the worker.

    Examples
    --------
    >>> import dask.array as da, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> X = da.from_array(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), chunks=(1, 2))
    >>> def squares(w, X, y):
    ...     error = X @ w - y
    ...     return error @ error / 2, X.T @ error
    >>> found = coded.training.train(squares, np.zeros(2), (X, X @ [2.0, -1.0]), steps=500)
    >>> found.parameters.round(4)
    array([ 2., -1.])
    >>> client.close()
    """
    client = waiting_client(client)
    check_choices(
        gradient,
        augment,
        optimizer,
        aggregation,
        compression,
        schedule,
        checkpoint,
        validation,
        callback,
    )
    start = first_parameters(parameters)
    optimizer = optimizer or SGD(0.1)
    schedule = schedule or Synchronous()
    if epochs is None:
        steps = check_whole("steps", 100 if steps is None else steps)
    elif steps is not None:
        raise TypeError("Pass either 'steps' or 'epochs', not both.")
    else:
        check_whole("epochs", epochs)
    if batch_size is None:
        batch_size = getattr(data, "batch_size", None)
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    check_whole("seed", seed, least=0)
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm)
    module: Any = getattr(gradient, "__self__", None)
    if not hasattr(module, "hold_parameters"):
        module = None  # not as a `TorchModule` is
    if averages is None:
        averages = getattr(module, "averages", ())
    averages = momenta_of(averages, start, compression)
    if layers is None:
        layers = [start.shape]
        if averages.size:  # these differ too much in size from gradients for one grid
            layers = [(start.size - averages.size,), averages.shape]
    layers = shapes_of(layers)
    if (size := sum(int(np.prod(shape)) for shape in layers)) != start.size:
        raise ValueError(
            f"Argument 'layers' must have as many elements as the parameters, {start.size}; "
            f"it has {size}."
        )
    if compression is not None:
        compression.compressor(layers, 1, schedule.width)  # refuses what workers would refuse
    allowed = None if workers is None else named_workers(client, "workers", workers)
    leader = None if leader is None else named_workers(client, "leader", leader)
    state = found_state(resume, checkpoint, start, optimizer)

    async def prepare() -> None:
        await install(client, TrainingSchedulerPlugin())
        await check_fit(client, allowed)

    with outside_pool():
        client.sync(lambda: while_connected(client, prepare()))
    data, batch_size = joined(data, steps, batch_size)
    samples, targets, held = load(client, data)
    scoring = None
    if validation is not None:
        others, wanted, more = load(client, validation.data, "the validation's 'data'")
        scoring = Scoring(dumps(validation.score), others, wanted, validation.every)
        held += more
    chosen = aggregation is None
    if aggregation is None:
        there = threads_of(client)
        # If there is none just now, the training waits for one.
        count = len(there if allowed is None else set(there) & set(allowed)) or 1
        aggregation = choose_aggregation(count, start.size * sum_dtype(start.dtype).itemsize)
    total = sum(samples.rows)
    if isinstance(aggregation, Squeeze):
        check_grid(aggregation, start, layers, state)
        most = samples_of_step = min(batch_size or total, total)
        if averages.size:  # batch normalisation needs two samples of each unit
            most = max(total // Batches(total, 1, batch_size, seed).steps // 2, 1)
        aggregation = with_units(aggregation, samples_of_step, most, state)
    if epochs is not None:
        steps = epochs * Batches(total, 1, batch_size, seed).steps
    assert steps is not None
    setup = {
        "function": _name(gradient),
        "augment": None if augment is None else _name(augment),
        "samples": total,
        "batch_size": batch_size,
        "seed": seed,
        "optimizer": without_addresses(optimizer),
        "compression": without_addresses(compression),
        "clip_norm": clip_norm,
        "schedule": without_addresses(schedule),
        "averages": hashlib.blake2b(averages.tobytes(), digest_size=8).hexdigest(),
    }
    constants = getattr(module, "constants", None)
    if checkpoint is not None:
        functions: list[Any] = [gradient, augment]
        functions += filter(has_address, (optimizer, compression, schedule))
        setup["values in functions"] = hash_of(list(map(_values_in, functions)))
    if checkpoint is not None and constants is not None:
        # A module that is made again may have other random numbers in frozen layers.
        setup["frozen parameters and buffers"] = constants()
        setup["layers in training mode"] = sum(part.training for part in module.module.modules())
    if checkpoint is not None and resume is True and state is not None:
        check_same(checkpoint.path, state, setup, steps)
    model = Model(
        gradient,
        start,
        optimizer,
        total,
        batch_size,
        seed,
        compression,
        tuple(layers),
        schedule.width,
        state,
        dealt=isinstance(aggregation, Squeeze),
        clip_norm=clip_norm,
        averages=averages,
        augment=augment,
    )
    training = Training(
        id=f"coded-training-{uuid.uuid4().hex[:16]}",
        model=dumps(model),
        batches=partial(Batches, total, batch_size=batch_size, seed=seed),
        samples=samples,
        targets=targets,
        parameters=start.size,
        aggregation=aggregation,
        codec=EXACT if compression is None else compression.codec,
        remembers=compression is not None and compression.remembers,
        schedule=schedule,
        first=0 if state is None else state["version"],
        steps=steps,
        workers=allowed,
        checkpoint=None
        if checkpoint is None
        else (check_place("path", checkpoint.path), checkpoint.every),
        setup=setup,
        expects_none=resume is True and state is None,
        averages=averages.size,
        scoring=scoring,
    )
    watch = _Watch(client, training.id, callback, Display() if verbose else None)
    with _large_tasks, watch.display or nullcontext():
        outcome: Outcome = run(
            lead,
            training,
            client=client,
            callback=watch if callback or verbose else None,
            workers=leader,
        )
    del held
    found = TrainingResult(
        outcome.parameters,
        outcome.version,
        outcome.history,
        outcome.digests,
        aggregation,
        compression is None and schedule.width == 1 and (state is None or "units" in state),
    )
    if chosen and (advice := found.advice):
        logger.warning("A training has waited for a slow worker: %s", advice)
    return found


def _values_in(function: Any) -> str:
    """Return a hash of what a function was made with; nothing if that cannot be told apart."""
    try:
        return hash_of(function, trained=True)
    except TypeError:
        return ""


def _name(function: Any) -> str:
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


class _LargeTasks:
    """Suppresses Dask's warning that a task is large: ours carries the parameters, once.

    Calls may overlap in several threads, and the setting is that of the process.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._quiet: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._quiet = dask.config.set(
                    {"distributed.admin.large-graph-warning-threshold": "1TiB"}
                )
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._quiet.__exit__(None, None, None)


_large_tasks = _LargeTasks()


class _Watch:
    """Passes progress to display and callback; ends the training if the callback returns True."""

    def __init__(
        self,
        client: Client,
        training: str,
        callback: Callable[[Progress], object] | None,
        display: Display | None,
    ) -> None:
        self.display = display
        self._client = client
        self._training = training
        self._callback = callback
        self._enough = False

    def __call__(self, progress: Progress) -> None:
        if self.display is not None:
            with suppress(OSError, ValueError):  # a terminal that is gone ends no training
                self.display(progress)
        if self._callback is not None:
            answer = self._callback(progress)
            # Not any true value: a lambda may return what it happens to compute.
            self._enough |= isinstance(answer, bool | np.bool_) and bool(answer)
        if self._enough:
            # Again at each report, because the leader may be lost before it ends the training.
            client: Any = self._client
            client.loop.add_callback(client.scheduler.coded_enough, training=self._training)
