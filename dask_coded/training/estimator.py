"""Training with scikit-learn's conventions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from dask_coded.aggregation import Aggregation
from dask_coded.compression import Compression
from dask_coded.loop import Progress
from dask_coded.training._train import train
from dask_coded.training.optimizers import Optimizer, Vector
from dask_coded.training.replica import Augment, Gradient
from dask_coded.training.schedules import Schedule


class GradientEstimator(BaseEstimator):
    """A model with ``fit`` and ``predict``, defined by a gradient and a prediction function.

    Parameters
    ----------
    gradient : callable
        As for :func:`train`.
    prediction : callable
        ``prediction(parameters, samples)`` returns an array with one row or number per sample.
    parameters : array_like of float, shape (n,)
        Initial parameters.
    optimizer, steps, epochs, batch_size, aggregation, compression, schedule, layers, averages, \
    clip_norm, augment, seed, verbose
        As for :func:`train`.

    Attributes
    ----------
    parameters_ : ndarray, shape (n,)
    history_ : list of Step
    result_ : TrainingResult

    Examples
    --------
    >>> import numpy as np, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> line = coded.training.GradientEstimator(
    ...     lambda w, X, y: X.T @ (X @ w - y), lambda w, X: X @ w, np.zeros(1), steps=50
    ... )
    >>> line.fit(np.array([[1.0], [2.0]]), np.array([3.0, 6.0])).predict(np.array([[4.0]])).round(3)
    array([12.])
    >>> client.close()
    """

    def __init__(
        self,
        gradient: Gradient,
        prediction: Callable[[Vector, Any], Any],
        parameters: Any,
        *,
        optimizer: Optimizer | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        aggregation: Aggregation | None = None,
        compression: Compression | None = None,
        schedule: Schedule | None = None,
        layers: Any = None,
        averages: Any = None,
        clip_norm: float | None = None,
        augment: Augment | None = None,
        seed: int = 0,
        verbose: bool = False,
    ) -> None:
        self.gradient = gradient
        self.prediction = prediction
        self.parameters = parameters
        self.optimizer = optimizer
        self.steps = steps
        self.epochs = epochs
        self.batch_size = batch_size
        self.aggregation = aggregation
        self.compression = compression
        self.schedule = schedule
        self.layers = layers
        self.averages = averages
        self.clip_norm = clip_norm
        self.augment = augment
        self.seed = seed
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        client: Client | None = None,
        callback: Callable[[Progress], object] | None = None,
    ) -> GradientEstimator:
        """Train on samples and targets, in any form that :func:`train` accepts."""
        options = self.get_params(deep=False)
        del options["prediction"]
        first = (options.pop("gradient"), options.pop("parameters"), (X, y))
        self.result_ = train(*first, client=client, callback=callback, **options)
        self.parameters_ = self.result_.parameters
        self.history_ = self.result_.history
        return self

    def predict(self, X: Any) -> Any:
        """Return the prediction for each sample: a dask array if ``X`` is one."""
        check_is_fitted(self)
        if not isinstance(X, da.Array):
            return self.prediction(self.parameters_, X)
        whole = X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
        predict = partial(self.prediction, self.parameters_)
        # Predicting two samples shows the shape and dtype of predictions.
        two = predict(np.ones((2, *X.shape[1:]), dtype=X.dtype))
        return da.map_blocks(
            predict,
            whole,
            chunks=(whole.chunks[0], *((length,) for length in two.shape[1:])),
            drop_axis=list(range(1, X.ndim)),
            new_axis=list(range(1, two.ndim)),
            dtype=two.dtype,
            meta=two[:0],
        )
