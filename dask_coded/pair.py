"""Products of two matrices: ``A.T @ B``, Gram matrices, and Hessians ``A.T @ diag(d) @ A``.

:func:`encode_pair` stores two matrices as coded pieces of a :class:`Polynomial` code. Each product
of the matrices, with different weights every time if needed, is then one coded round. Each worker
multiplies its own two pieces, and slow workers compute fewer rows of this product than fast ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from distributed import Client

from dask_coded.arguments import check_dense, check_unmasked, check_workers, unwrapped
from dask_coded.array import HeldIds
from dask_coded.caller import warner
from dask_coded.choice import Choice
from dask_coded.codes import Polynomial
from dask_coded.compat import TaskRef
from dask_coded.labels import UNLABELLED, Axis, Labels, aligned, labels_of
from dask_coded.products import ProductArray
from dask_coded.runtime.client.encoding import Encoded, encode_factors
from dask_coded.runtime.client.source import check_dtype, matrix_source, sparse_type
from dask_coded.runtime.client.waiting import current_client, outside_pool, while_connected
from dask_coded.runtime.coordinator.operators import check_weights
from dask_coded.runtime.coordinator.tasks import run_round
from dask_coded.runtime.spec import CodedTask, round_options
from dask_coded.spellings import as_plain


def encode_pair(
    A: Any,
    B: Any,
    code: Polynomial | None = None,
    client: Client | None = None,
    *,
    redundancy: int | None = None,
    workers: Sequence[str] | None = None,
    minimum_workers: int | None = None,
    oversubscribe: bool = False,
    check_finite: bool = True,
) -> CodedPair:
    """Store two matrices as coded pieces, for products ``A.T @ diag(weights) @ B``.

    Starts at once, as ``persist`` does. Afterwards neither matrix is needed because lost pieces are
    rebuilt from the others.

    Parameters
    ----------
    A : dask array or NumPy array, shape (N, p)
    B : dask array or NumPy array, shape (N, q)
        May be ``A`` itself.
    code : Polynomial, optional
        By default the code over all workers that stores the least, see
        :meth:`Polynomial.with_redundancy`.
    client : distributed.Client, optional
        The cluster; by default the current one.
    redundancy : int, optional
        How many workers a round must be able to do without, if no code is given; by default a
        quarter of them (``coded.redundancy`` in the configuration).
    workers : sequence of str, optional
        Addresses of the workers that may hold pieces; by default all.
    minimum_workers : int, optional
        Wait until the cluster has so many workers, also if the code is given.
    oversubscribe : bool
        Allow several pieces on one worker if there are fewer workers than the code wants.
    check_finite : bool
        Reject NaN and infinity. If they are accepted, the results of their columns are NaN.

    Returns
    -------
    CodedPair
        With an asynchronous client, a coroutine that returns it.

    Raises
    ------
    TypeError
        If A or B is not a dense matrix of floating-point or complex numbers.
    ValueError
        If A and B have different numbers of rows, hold NaN or infinity, or have chunks of unknown
        size.
    ClusterUnfitError
        If the cluster has too few workers, or lacks this version of the package.

    References
    ----------
    Polynomial codes: Q. Yu, M. Maddah-Ali, S. Avestimehr, NeurIPS 2017; with work assigned by
    speed: K. G. Narra et al., "Slack squeeze coded computing for adaptive straggler mitigation",
    SC 2019, section 5.

    Examples
    --------
    >>> import numpy as np, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=6, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> A = np.arange(12.0).reshape(3, 4)
    >>> P = coded.encode_pair(A, A, coded.Polynomial(n=6, a=2, b=2))
    >>> P
    coded.CodedPair<shape=(4, 4), rows=3, dtype=float64, code=Polynomial(n=6, a=2, b=2)>
    >>> np.allclose(P.product().compute(), A.T @ A)
    True
    >>> weights = [1.0, 0.0, 2.0]
    >>> np.allclose(P.product(weights).compute(), A.T @ np.diag(weights) @ A)
    True
    >>> client.close()
    """
    client = current_client(client)
    A, B, labels = _factors(A, B)
    choice = _choice(code, redundancy, workers, minimum_workers)
    options = {"oversubscribe": oversubscribe, "check_finite": check_finite}

    async def run() -> CodedPair:
        encoding = _encode(client, A, B, code, choice, labels=labels, **options)
        return await while_connected(client, encoding)

    with outside_pool():
        return client.sync(run)


def gram(
    A: Any,
    weights: Any = None,
    code: Polynomial | None = None,
    client: Client | None = None,
    *,
    redundancy: int | None = None,
    workers: Sequence[str] | None = None,
    minimum_workers: int | None = None,
    oversubscribe: bool = False,
    check_finite: bool = True,
) -> da.Array:
    """Return ``A.T @ diag(weights) @ A``, or ``A.T @ A`` without weights, as one coded round.

    This is for a single product. For many products with different weights, as in Newton's method,
    store ``P = encode_pair(A, A)`` and call ``P.product(weights)``, because encoding costs more
    than the product.

    Parameters
    ----------
    A : dask array or NumPy array, shape (N, p)
    weights : array_like or dask array, shape (N,), optional
    code, client, redundancy, workers, minimum_workers, oversubscribe, check_finite
        As for :func:`encode_pair`.

    Returns
    -------
    dask.array.Array, shape (p, p)
        Symmetric up to rounding. It is lazy, but the pieces are stored at once; they are kept as
        long as the result exists. With an asynchronous client, a coroutine that returns it.

    Raises
    ------
    TypeError, ValueError, ClusterUnfitError
        As for :func:`encode_pair`, and if the weights do not match A.

    Examples
    --------
    >>> import numpy as np, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> coded.gram(np.array([[1.0, 2.0], [3.0, 4.0]]), weights=[1.0, 10.0]).compute().round(9)
    array([[ 91., 122.],
           [122., 164.]])
    >>> client.close()
    """
    client = current_client(client)
    A, _, labels = _factors(A, A)
    weights = _weights(A.shape[0], weights, labels[0])
    choice = _choice(code, redundancy, workers, minimum_workers)
    options = {"oversubscribe": oversubscribe, "check_finite": check_finite}

    async def run() -> da.Array:
        encoding = _encode(client, A, A, code, choice, labels=labels, **options)
        pair = await while_connected(client, encoding)
        return pair.product(weights)

    with outside_pool():
        return client.sync(run)


class CodedPair:
    """Two matrices ``A`` (N, p) and ``B`` (N, q) whose products are coded rounds.

    Created by :func:`encode_pair`. As an argument of :func:`dask_coded.submit` it becomes a
    :class:`dask_coded.PairOperator`, whose ``product`` is computed immediately.

    Attributes
    ----------
    shape : (int, int)
        Of the product: ``(p, q)``.
    rows : int
        ``N``.
    dtype : numpy.dtype
        Of the product, without weights.
    code : Polynomial
    encoded : Encoded
        The pieces: ``spec``, ``futures``, ``workers``, ``nbytes``.
    labels : (Axis, Axis)
        Of ``A``, if it was an xarray or pandas object. Labelled weights are aligned with its rows.
    """

    #: NumPy leaves ``@`` and other operators alone: a pair has none, only :meth:`product`.
    __array_ufunc__ = None

    def __init__(self, encoded: Encoded, labels: Labels = UNLABELLED) -> None:
        spec = encoded.spec
        self.encoded = encoded
        self.labels = labels
        self.shape = spec.shape
        self.rows = spec.columns
        self.dtype = spec.dtype
        self.code = spec.code

    def product(self, weights: Any = None) -> da.Array:
        """Return ``A.T @ diag(weights) @ B``, or ``A.T @ B`` without weights, as a lazy round.

        Nothing is conjugated.

        Parameters
        ----------
        weights : array_like or dask array, shape (N,), optional

        Returns
        -------
        dask.array.Array, shape (p, q), one chunk

        Raises
        ------
        TypeError
            If the weights are not numbers.
        ValueError
            If they are not a vector of length N.
        """
        weights = _weights(self.rows, weights, self.labels[0])
        spec = self.encoded.spec
        options = round_options()
        name = f"coded-product-{tokenize(spec.id, weights, options)}"
        operand, dependencies = weights, []
        if isinstance(weights, da.Array):
            weights = weights.rechunk(-1)
            operand, dependencies = TaskRef((weights.name, 0)), [weights]
        key = (name, 0, 0)
        ids = HeldIds(self.encoded)
        tasks: dict[Any, Any] = {key: CodedTask(key, run_round, ids, options, operand)}
        graph = HighLevelGraph.from_collections(name, tasks, dependencies=dependencies)
        dtype = self.dtype if weights is None else np.result_type(self.dtype, weights.dtype)
        meta = np.empty((0, 0), dtype=dtype)
        return da.Array(graph, name, tuple((m,) for m in self.shape), dtype=dtype, meta=meta)

    def __repr__(self) -> str:
        return (
            f"coded.CodedPair<shape={self.shape}, rows={self.rows}, dtype={self.dtype}, "
            f"code={self.code!r}>"
        )


async def _encode(
    client: Client,
    A: Any,
    B: Any,
    code: Polynomial | None,
    choice: Choice,
    *,
    labels: Labels,
    oversubscribe: bool,
    check_finite: bool,
) -> CodedPair:
    await choice.complete(client)
    if code is None:
        code = await choice.pair_code(client, (A.shape[1], B.shape[1]))
    for source in (A, B):
        check_dtype(source, code)
    encoded = await encode_factors(
        client,
        A,
        B,
        code,
        workers=choice.workers,
        oversubscribe=oversubscribe,
        check_finite=check_finite,
    )
    return CodedPair(encoded, labels)


def _choice(
    code: Any,
    redundancy: int | None,
    workers: Sequence[str] | None,
    minimum_workers: int | None,
) -> Choice:
    if code is not None and not isinstance(code, Polynomial):
        raise TypeError(f"Argument 'code' must be a `coded.Polynomial`, it is {code!r}.")
    if code is not None and redundancy is not None:
        raise TypeError("Pass either a code or a redundancy, not both: a code defines its own.")
    return Choice(redundancy, check_workers(workers), minimum_workers, warner(UserWarning))


def _factors(A: Any, B: Any) -> tuple[Any, Any, Labels]:
    """Return two dense matrices with equal numbers of rows, the same object if A is B.

    Also returns the labels of A. If both have labels, the rows of B are in the order of those of A.
    """
    labels = A.labels if isinstance(A, ProductArray) else labels_of(A)
    if B is not A:
        B = aligned("Argument 'B'", B, labels[0])
    A, B = as_plain(unwrapped(A)), as_plain(unwrapped(B))
    same = A is B or (isinstance(A, da.Array) and isinstance(B, da.Array) and A.name == B.name)
    left = matrix_source(A)
    right = left if same else matrix_source(B)
    for name, source in (("A", left), ("B", right)):
        if scipy.sparse.issparse(source) or sparse_type(source):
            raise TypeError(
                f"Argument {name!r} must be dense, it is sparse. The pieces and products of coded "
                f"pairs are dense: pass `{name}.toarray()`, or a dask array of dense chunks."
            )
    if left.shape[0] != right.shape[0]:
        raise ValueError(
            f"Arguments 'A' and 'B' must have the same number of rows, they have "
            f"{left.shape[0]} and {right.shape[0]}."
        )
    return left, right, labels


def _weights(rows: int, weights: Any, axis: Axis) -> Any:
    if weights is None:
        return None
    what = "The weights of a coded product"
    weights = aligned(what, weights, axis)
    check_dense(what, check_unmasked(what, weights))
    # A copy, because the caller may change the weights before the product is computed.
    weights = weights if isinstance(weights, da.Array) else np.array(weights)
    return check_weights(rows, weights)
