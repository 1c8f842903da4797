"""Coded arrays: dask arrays whose products end as soon as enough workers have answered.

:func:`encode` stores an array once as coded pieces on the workers of a cluster. It returns a
:class:`CodedArray`, a dask array over the pieces that are plain blocks. Everything that a dask
array can do therefore still works, and products with vectors and matrices are coded rounds.
:func:`dask_coded.submit` runs a whole algorithm inside the cluster, where each product is one
round.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Self

import dask
import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.utils import format_bytes
from distributed import Client
from scipy.sparse.linalg import LinearOperator

from dask_coded.arguments import check_workers, unwrapped
from dask_coded.caller import warner
from dask_coded.choice import Choice
from dask_coded.codes import Code, RandomLinear
from dask_coded.compat import Alias, TaskRef, known_workers
from dask_coded.dispatch import dispatch_products
from dask_coded.display import Display
from dask_coded.labels import UNLABELLED, Labels, as_factor, labels_of
from dask_coded.loop import PiecesMade
from dask_coded.products import CodedView, ProductArray, UncodedArray
from dask_coded.runtime.client.encoding import Encoded, encode_source, extend, new_id
from dask_coded.runtime.client.install import ClusterUnfitError
from dask_coded.runtime.client.source import (
    PieceCount,
    check_code,
    is_verified,
    matrix_source,
)
from dask_coded.runtime.client.stored import check_kept, complete
from dask_coded.runtime.client.waiting import (
    current_client,
    outside_pool,
    result_of,
    waiting_client,
    while_connected,
)
from dask_coded.runtime.coordinator.operators import (
    RoundOperator,
    check_operand,
    check_right,
    refuse_transpose,
)
from dask_coded.runtime.coordinator.tasks import run_round
from dask_coded.runtime.spec import CodedTask, round_options
from dask_coded.spellings import as_plain
from dask_coded.storage import Location, begin_store
from dask_coded.uncoded import TRANSPOSED


def encode(
    A: Any,
    code: Code | str | None = None,
    client: Client | None = None,
    *,
    redundancy: int | None = None,
    workers: Sequence[str] | None = None,
    minimum_workers: int | None = None,
    transpose: bool = False,
    oversubscribe: bool = False,
    check_finite: bool = True,
    verify: bool | None = None,
    storage: Any = None,
    verbose: bool = False,
    callback: Callable[[PiecesMade], object] | None = None,
) -> CodedArray:
    """Store a matrix as coded pieces on the workers of a cluster.

    Starts at once, as ``persist`` does. Afterwards the source is no longer needed because lost
    pieces are rebuilt from the others.

    Parameters
    ----------
    A : dask array, NumPy array, SciPy sparse matrix or xarray DataArray, shape (rows, columns)
        Dask arrays may be chunked in any way, with NumPy or SciPy sparse chunks. The labels of
        an xarray object or of a pandas DataFrame are kept; labelled operands are aligned by them.
    code : Code or str, optional
        :class:`MDS`, :class:`RandomLinear`, :class:`Repetition`, a code of your own, or the name of
        a code. By default MDS over all workers for floating-point and complex data, and repetition
        for sparse data, integers and booleans, which parity would make dense or inexact.
    client : distributed.Client, optional
        The cluster; by default the current one.
    redundancy : int, optional
        How many workers may be lost, if ``code`` is a name or not given. By default a quarter of
        them (``coded.redundancy`` in the configuration), but one with repetition, because each
        copy takes as much memory as the data.
    workers : sequence of str, optional
        Addresses of the workers that may hold pieces; by default all.
    minimum_workers : int, optional
        Wait until the cluster has so many workers, also if the code is given.
    transpose : bool
        Encode ``A.T`` as well, so that ``x @ C`` and ``C.T @ y`` are coded. Doubles the memory.
    oversubscribe : bool
        Allow several pieces on one worker if there are fewer workers than the code wants.
    check_finite : bool
        Reject NaN and infinity. If they are accepted, the results of their rows are NaN or
        infinite, and NaN if their block had to be recovered.
    verify : bool, optional
        Check every share of every round, so that a worker that computes wrongly does no harm: its
        shares are computed again elsewhere. For dense floating-point and complex matrices. By
        default as ``coded.verify`` in the configuration says, for matrices that can be verified.
    storage : str, path or Zarr store, optional
        Also write the pieces to this folder or address, such as ``s3://bucket/name``, which all
        workers and this process can write to. The array then outlives the cluster:
        :func:`dask_coded.open` opens it on another one. And the loss of more workers than the code
        tolerates is a pause, until those that are left or come have read the pieces.
    verbose : bool
        Show how many pieces are made, see :class:`dask_coded.Display`.
    callback : callable, optional
        Called with a :class:`dask_coded.PiecesMade` at the start and after each piece. It runs in
        the client's event loop and should return quickly.

    Returns
    -------
    CodedArray, shape (rows, columns)
        With an asynchronous client, a coroutine that returns it.

    Raises
    ------
    TypeError
        If A is not a matrix, its dtype does not suit the code or ``verify``, or a chunk of a dask
        array has a type or a dtype that cannot be converted to the declared one without loss. If
        ``storage`` cannot hold the class of the code, the dtype or labels.
    FileExistsError
        If ``storage`` is not empty.
    ValueError
        If A is empty, or has NaN, infinity or chunks of unknown size.
    ClusterUnfitError
        If the cluster has too few workers, or lacks this version of the package.
    RuntimeError
        If the client is closed, or dask.array plans queries (``array.query-planning`` in Dask's
        configuration).
    ConnectionError
        If the client loses its connection to the scheduler.

    Warns
    -----
    UserWarning
        If the code is chosen for a cluster whose other workers may not have joined yet: it has one
        worker, or two, or fewer than planned.

    Examples
    --------
    >>> import numpy as np, dask_coded as coded
    >>> from distributed import Client
    >>> client = Client(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)
    >>> A = np.arange(12.0).reshape(6, 2)
    >>> C = coded.encode(A, coded.MDS(n=4, k=3))
    >>> (C @ [1.0, 10.0]).compute()
    array([ 10.,  32.,  54.,  76.,  98., 120.])
    >>> client.close()
    """
    client = current_client(client)
    workers = check_workers(workers)
    labels = A.labels if isinstance(A, ProductArray) else labels_of(A)
    source = matrix_source(as_plain(unwrapped(A)))
    if redundancy is not None and isinstance(code, Code):
        raise TypeError("Pass either a code or a redundancy, not both: a code defines its own.")
    location = None if storage is None else Location.of(storage)
    choice = Choice(redundancy, workers, minimum_workers, warner(UserWarning))

    display = Display() if verbose else None
    listeners = [listener for listener in (display, callback) if listener is not None]

    async def shown() -> CodedArray:
        with display or nullcontext():
            return await while_connected(client, run())

    async def run() -> CodedArray:
        await choice.complete(client)
        chosen = code
        if not isinstance(chosen, Code):
            chosen = await choice.code(client, source, chosen, transpose)
        check_code(source, chosen)
        ids = new_id(), new_id()
        if location is not None:
            check_kept(chosen, np.dtype(source.dtype), labels)
            tokens = {"matrix": ids[0]} | ({"transposed": ids[1]} if transpose else {})
            await asyncio.to_thread(begin_store, location, tokens)
        pieces = chosen.pieces * (2 if transpose else 1)
        options: dict[str, Any] = {
            "oversubscribe": oversubscribe,
            "check_finite": check_finite,
            "verify": is_verified(source, verify),
            "workers": workers,
            "tally": PieceCount(listeners, pieces) if listeners else None,
            "location": location,
        }
        back = None
        if transpose:
            back = await encode_source(
                client,
                await asyncio.to_thread(matrix_source, source.T),
                chosen,
                array_id=ids[1],
                transposed=ids[0],
                group="transposed",
                **options,
            )
        there = None
        try:
            there = await encode_source(
                client,
                source,
                chosen,
                array_id=ids[0],
                transposed=ids[1] if back else None,
                **options,
            )
            if location is not None:
                kept = {"matrix": there} | ({"transposed": back} if back else {})
                names = (labels[0].name, labels[1].name)
                await asyncio.to_thread(complete, location, kept, names)
        except BaseException:
            for made in (there, back):
                if made is not None:
                    made.release()
            raise
        return CodedArray(there, back, labels)

    with outside_pool():
        return client.sync(shown)


class CodedArray(ProductArray):
    """A dask array whose products are coded.

    Created by :func:`encode`. ``C @ x`` with a NumPy or dask vector or matrix is a lazy coded round
    that returns a dask array, and so is ``x @ C`` if the array was encoded with
    ``transpose=True``. It may be written as ``dot``, ``matmul``, ``tensordot``, ``einsum`` or
    ``inner``, of NumPy or of ``dask.array``, and with ``-C``, ``alpha * C``, ``C.astype(...)`` or
    ``C[rows]``. Everything else works as for a dask array over the plain blocks. Products with
    ``C + D`` and other elementwise results, or with columns, emit an :class:`UncodedWarning`.

    Attributes
    ----------
    encoded : Encoded
        The pieces: ``spec``, ``futures``, ``workers``, ``nbytes``, ``bytes_moved``.
    code : Code
    labels : (Axis, Axis)
        What is known of rows and columns if the matrix was an xarray or pandas object.
    """

    encoded: Encoded
    _back: Encoded | None

    def __new__(
        cls, encoded: Encoded, back: Encoded | None = None, labels: Labels = UNLABELLED
    ) -> Self:
        spec = encoded.spec
        # Whoever holds the graph, such as a published dataset or a lazy result, holds all pieces.
        both = [encoded] if back is None else [encoded, back]
        graph: dict[Any, Any] = {f.key: f for each in both for f in (*each.futures, *each.checks)}
        meta: Any = np.empty((0, 0), dtype=spec.dtype)
        if spec.sparse:
            meta = spec.sparse((0, 0), dtype=spec.dtype)
        name, rows = spec.id, spec.geometry.rows
        if not all(rows):
            # Other functions of Dask do not expect chunks without rows.
            name = f"{spec.id}-rows"
            some = [(spec.id, j, 0) for j, count in enumerate(rows) if count]
            graph |= {(name, i, 0): Alias((name, i, 0), key) for i, key in enumerate(some)}
            rows = tuple(filter(None, rows))
        chunks = (rows, (spec.columns,))
        self = super().__new__(cls, graph, name, chunks, dtype=spec.dtype, meta=meta)
        self.encoded = encoded
        self._back = back
        self.labels = labels
        dispatch_products()
        return self

    def __reduce__(self) -> Any:
        return type(self), (self.encoded, self._back, self.labels)

    def _persisted(self, dsk: Any, rebuild: Any, args: Any, *, rename: Any = None) -> da.Array:
        # The pieces are in memory already, so persisting returns the same coded array.
        return self if rename is None else rebuild(dsk, *args, rename=rename)

    @property
    def code(self) -> Code:
        return self.encoded.spec.code

    # -- products ------------------------------------------------------------------------------

    def _times(self, x: Any) -> Any:
        x = check_right(as_factor(x, self.labels[1]))
        if not isinstance(x, np.ndarray | da.Array):
            return NotImplemented
        return self._product(check_operand(self.shape, x))

    def _scaled(self, plain: da.Array, factor: Any) -> ProductArray:
        return CodedView(plain, self, factor)

    def _selected(self, plain: da.Array, rows: Any) -> ProductArray:
        return CodedView(plain, self, selections=(rows,))

    def _transposed(self, plain: da.Array) -> ProductArray:
        if self._back is None:
            return UncodedArray(plain, TRANSPOSED, self, self.labels[::-1])
        return CodedArray(self._back, self.encoded, self.labels[::-1])

    def _product(self, x: Any) -> da.Array:
        """Return the product as one lazy round per column chunk of ``x``."""
        spec = self.encoded.spec
        options = round_options()
        name = f"coded-round-{tokenize(spec.id, x, options)}"
        dependencies: list[Any] = []
        columns: tuple[tuple[int, ...], ...] = tuple((c,) for c in x.shape[1:])
        # A copy, because the caller may change `x` before the product is computed.
        parts: list[Any] = [np.array(x)] if isinstance(x, np.ndarray) else []
        if isinstance(x, da.Array):
            x = x.rechunk({0: -1})
            columns = x.chunks[1:]
            parts = [TaskRef(key) for key in dask.core.flatten(x.__dask_keys__())]
            dependencies = [x]
        suffix: list[tuple[int, ...]] = [()] if x.ndim == 1 else [(j,) for j in range(len(parts))]
        ids = HeldIds(self.encoded)
        tasks: dict[Any, Any] = {
            (name, 0, *index): CodedTask((name, 0, *index), run_round, ids, options, part)
            for index, part in zip(suffix, parts, strict=True)
        }
        dtype = np.result_type(spec.dtype, x.dtype)
        graph = HighLevelGraph.from_collections(name, tasks, dependencies=dependencies)
        meta = np.empty((0,) * x.ndim, dtype=dtype)
        return da.Array(graph, name, ((self.shape[0],), *columns), dtype=dtype, meta=meta)

    def as_linear_operator(self) -> LinearOperator:
        """Return a SciPy linear operator that computes each product immediately, as one round.

        With it the solvers of :mod:`scipy.sparse.linalg` run on the client: ``cg``, ``gmres`` and
        ``eigsh`` always; ``lsqr``, ``lsmr`` and ``svds``, which also need the adjoint, if the array
        was encoded with ``transpose=True``. Run a solver that takes many rounds inside the cluster,
        where a round costs less and the array itself is the operator:
        ``coded.submit(scipy.sparse.linalg.eigsh, C, k=3).result()``.

        Returns
        -------
        scipy.sparse.linalg.LinearOperator, shape (rows, columns)
            Its products are NumPy arrays. Those with the adjoint raise a TypeError if the array was
            encoded without its transpose.

        Examples
        --------
        >>> import numpy as np, scipy.sparse.linalg, dask_coded as coded
        >>> from distributed import Client
        >>> client = Client(
        ...     n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
        ... )
        >>> C = coded.encode(np.diag([1.0, 2.0, 4.0]), coded.MDS(n=3, k=2))
        >>> x, status = scipy.sparse.linalg.cg(C.as_linear_operator(), np.ones(3))
        >>> x.round(6), status
        (array([1.  , 0.5 , 0.25]), 0)
        >>> client.close()
        """
        return _ClientOperator(self)

    # -- workers that join ---------------------------------------------------------------------

    def extend(self, workers: Sequence[str] | None = None) -> CodedArray:
        """Add a new piece on each worker that has joined.

        Each of these workers builds its piece from existing ones, which it fetches from the workers
        that hold them. Afterwards the array is stored on more workers, survives more losses, and
        more workers share the rounds. Running rounds are not disturbed. Only :class:`RandomLinear`
        codes can grow.

        Lost pieces do not need this call. They are rebuilt on other workers automatically, and a
        worker that joins takes over pieces from workers that hold several.

        Parameters
        ----------
        workers : sequence of str, optional
            Addresses of the workers that may get one; by default all that hold none.

        Returns
        -------
        CodedArray
            With the same blocks and more pieces; the original is unchanged. With an asynchronous
            client, a coroutine that returns it.

        Raises
        ------
        TypeError
            If the code cannot grow.
        ClusterUnfitError
            If every worker holds a piece already.

        Examples
        --------
        >>> import numpy as np, dask_coded as coded
        >>> from distributed import Client
        >>> client = Client(
        ...     n_workers=5, threads_per_worker=1, processes=False, dashboard_address=None
        ... )
        >>> C = coded.encode(np.eye(6), coded.RandomLinear(n=4, k=3))
        >>> C.extend().code
        RandomLinear(n=5, k=3, density=0.5)
        >>> client.close()
        """
        workers = check_workers(workers)
        if not isinstance(self.code, RandomLinear):
            raise TypeError(
                f"{self.code!r} cannot grow: encode with `coded.RandomLinear` to add pieces on "
                f"workers that join."
            )

        async def run() -> CodedArray:
            there, back = self.encoded, self._back
            if back is not None:
                # A worker may have a piece of the transposed array, and none of this one.
                with suppress(ClusterUnfitError):
                    back = await extend(back, workers)
            try:
                there = await extend(there, workers)
            except ClusterUnfitError:
                if back is self._back:
                    raise
            except BaseException:
                if back is not None:
                    back.release(since=self._back)
                raise
            return CodedArray(there, back, self.labels)

        client = self.encoded.client
        with outside_pool():
            return client.sync(lambda: while_connected(client, run()))

    # -- representation ------------------------------------------------------------------------

    def _summary(self) -> dict[str, str]:
        encoded, code = self.encoded, self.code
        each = format_bytes(encoded.nbytes // code.pieces)
        per_worker = encoded.workers.count(encoded.workers[0])
        homes = len(set(encoded.workers))
        survives = f"the loss of any {code.tolerance} of its workers"
        placement = f"{per_worker} on each of {homes} workers"
        # Pieces of workers that have left move to others, one each as long as there are enough.
        now = known_workers(encoded.futures[0].client)
        if now is not None and now < homes:
            survives += f", once there are {homes} again"
            placement += f" when encoded, now on the {now} that {'is' if now == 1 else 'are'} left"
        left = [i for i, future in enumerate(encoded.futures) if future.status != "error"]
        if lost := code.pieces - len(left):
            placement += f", {lost} lost since"
            survives += f", less the {lost} that {'is' if lost == 1 else 'are'} lost"
            if not code.decodable(left):
                survives = "nothing more: too few of its pieces are left"
        kept = {} if encoded.storage is None else {"Kept in": str(encoded.storage.location)}
        return {
            "Code": repr(code),
            "Survives": survives,
            "Pieces": f"{code.pieces} of {each}, {format_bytes(encoded.nbytes)} in total",
            "Placement": placement,
            "Moved": f"{format_bytes(encoded.bytes_moved)} between workers to build the pieces",
            "Transpose": "coded" if self._back is not None else "not coded",
            **kept,
        }

    def __repr__(self) -> str:
        summary = self._summary()
        return (
            f"coded.CodedArray<{self.name}, shape={self.shape}, dtype={self.dtype}, "
            f"code={summary['Code']}, pieces={summary['Pieces']}, "
            f"placement={summary['Placement']}>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>"
            for k, v in self._summary().items()
        )
        return f"{super()._repr_html_()}<table>{rows}</table>"


class _ClientOperator(RoundOperator):
    """A coded array whose products are computed immediately."""

    def __init__(self, array: CodedArray) -> None:
        super().__init__(array.dtype, array.shape)
        self._array, self.labels = array, array.labels

    def _product(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # The client that holds the pieces, even if another one is current.
        client = waiting_client(self._array.encoded.client)
        return result_of(client.compute(self._array @ x))

    def _transpose(self) -> LinearOperator:
        if self._array._back is None:
            refuse_transpose()
        return _ClientOperator(self._array.T)


class HeldIds(tuple[str, ...]):
    """The ids of coded arrays, for the tasks of a lazy product; keeps the pieces alive.

    Dask may put tasks into other graphs and other tasks, but leaves their arguments as they are.

    Parameters
    ----------
    *arrays : Encoded
    """

    encoded: tuple[Encoded, ...]

    def __new__(cls, *arrays: Encoded) -> Self:
        self = super().__new__(cls, (encoded.spec.id for encoded in arrays))
        self.encoded = arrays
        return self

    def __reduce__(self) -> Any:
        # Futures stay with the client. In the cluster, a task names the arrays that it needs.
        return tuple, (list(self),)
