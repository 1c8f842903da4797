r"""Random Fourier features, which turn linear models into kernel machines.

For a Gaussian kernel and a matrix :math:`X` of rows,

.. math:: K(x, y) = e^{-\gamma |x - y|^2} \approx z(x) \cdot z(y), \qquad
          z(x) = \sqrt{2 / D} \, \cos(W^T x + b),

with the columns of :math:`W` drawn from a normal distribution of variance :math:`2 \gamma` and
:math:`b` from :math:`[0, 2 \pi]` [1]_. A linear model of the :math:`D` features is the kernel
machine, up to an error of the kernel that falls as :math:`1 / \sqrt{D}`. Its matrix is
:math:`z(X)`, so this is what is encoded: the features of a sum of rows are not the sum of their
features.

References
----------
.. [1] A. Rahimi, B. Recht, "Random features for large-scale kernel machines", NIPS 2007,
   algorithm 1.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from sklearn import kernel_approximation
from sklearn.utils.validation import check_is_fitted

from dask_coded.arguments import meta_of, unwrapped
from dask_coded.linear_model._base import rowwise
from dask_coded.linear_model._fit import check_dask


class _Lazy:
    """Methods that scikit-learn would wrap in the class below, to make data frames of results."""

    def fit_transform(self: Any, X: Any, y: Any = None) -> Any:
        """Draw the features and return those of each row, as :meth:`transform` does."""
        return self.fit(X, y).transform(X)

    def transform(self: Any, X: Any) -> Any:
        """Return the features of each row, lazily if ``X`` is a dask array.

        Parameters
        ----------
        X : dask array, array or sparse matrix, shape (n_samples, n_features)

        Returns
        -------
        dask array or ndarray, shape (n_samples, n_components)
            A data frame only if ``set_output`` asks for one and ``X`` is in memory.
        """
        check_is_fitted(self)
        X = unwrapped(X)
        if not check_dask(X):
            return kernel_approximation.RBFSampler.transform(self, X)
        if X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
        features = partial(_features, self)
        dtype = self.random_weights_.dtype
        return rowwise(X.rechunk({1: -1}), features, self.random_offset_.shape, dtype)


class RBFSampler(_Lazy, kernel_approximation.RBFSampler):
    """scikit-learn's random features of a Gaussian kernel, also for dask arrays.

    With :class:`Ridge` it makes a kernel ridge regression, and with :class:`LinearSVC` a kernel
    support vector machine. The same ``random_state`` gives the same features as scikit-learn's.

    Parameters
    ----------
    gamma : float or "scale"
        Of the kernel ``exp(-gamma * |x - y|**2)``; "scale" is 1 over the number of columns times
        the variance of all of ``X``.
    n_components : int
        Number of features. The coded matrix has so many columns, all of them dense.
    random_state : int, RandomState instance or None

    Attributes
    ----------
    random_weights_ : ndarray, shape (n_features, n_components)
    random_offset_ : ndarray, shape (n_components,)

    See Also
    --------
    sklearn.kernel_approximation.RBFSampler

    References
    ----------
    A. Rahimi, B. Recht, "Random features for large-scale kernel machines", NIPS 2007, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.pipeline import make_pipeline
    >>> from dask_coded.linear_model import LinearSVC, RBFSampler
    >>> X = np.random.default_rng(0).standard_normal((300, 2))
    >>> y = np.linalg.norm(X, axis=1) < 1  # no line separates a disk from what surrounds it
    >>> machine = make_pipeline(RBFSampler(random_state=0), LinearSVC()).fit(X, y)
    >>> LinearSVC().fit(X, y).score(X, y) < 0.7, machine.score(X, y) > 0.95
    (True, True)
    """

    def fit(self, X: Any, y: Any = None) -> RBFSampler:
        """Draw the features.

        Parameters
        ----------
        X : dask array, array or sparse matrix, shape (n_samples, n_features)
            Of a dask array only the number of columns and the dtype are used, and the variance with
            ``gamma="scale"``.
        y
            Not used.
        """
        X = unwrapped(X)
        if check_dask(X):
            # Two rows with the same variance as all of X; the draws depend on nothing else.
            spread = _deviation(X) if self.gamma == "scale" else 1.0
            dtype = np.float32 if X.dtype == np.float32 else np.float64  # as scikit-learn has it
            X = np.outer([spread, -spread], np.ones(X.shape[1])).astype(dtype)
        return super().fit(X, y)


def _features(sampler: Any, rows: Any) -> Any:
    """Return the features of a block, as an array even if ``set_output`` asks for a data frame."""
    if not rows.shape[0]:  # which scikit-learn refuses
        return np.empty((0, *sampler.random_offset_.shape), sampler.random_weights_.dtype)
    return inspect.unwrap(kernel_approximation.RBFSampler.transform)(sampler, rows)


def _deviation(X: da.Array) -> float:
    """Return the standard deviation of all elements."""
    if not sp.issparse(meta_of(X)):
        return float(X.std().compute())
    moments = da.map_blocks(
        _moments, X.rechunk({1: -1}), chunks=((1,) * X.numblocks[0], (3,)), meta=np.empty((0, 0))
    ).compute()
    mean, square = np.average(moments[:, :2], axis=0, weights=moments[:, 2])
    return math.sqrt(max(square - mean**2, 0.0))


def _moments(block: Any) -> np.ndarray[Any, Any]:
    if not (size := math.prod(block.shape)):
        return np.zeros((1, 3))
    block = block.astype(np.float64)  # squares of narrow integers overflow
    return np.array([[block.mean(), block.multiply(block).mean(), size]])
