"""What algorithms see of a coded array or a coded pair, and what SciPy's solvers see."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import numpy as np
from scipy.sparse.linalg import LinearOperator

from dask_coded.arguments import check_dense, check_unmasked, to_tensor
from dask_coded.labels import UNLABELLED, Axis, Labels, aligned, axes_of
from dask_coded.runtime.coordinator.report import RoundReport
from dask_coded.runtime.coordinator.rounds import Coordinator
from dask_coded.runtime.spec import ArraySpec

# Sums of a sketch: with one, a row in fifty could change unnoticed, in single precision.
_SUMS = 3

#: Functions of NumPy that only ask, and how to answer.
_PROPERTIES: dict[Any, Callable[[Any], Any]] = {
    np.ndim: lambda operator: 2,
    np.shape: lambda operator: operator.shape,
    np.size: lambda operator: operator.shape[0] * operator.shape[1],
    np.transpose: lambda operator: operator.T,
    np.iscomplexobj: lambda operator: operator.dtype.kind == "c",
    np.isrealobj: lambda operator: operator.dtype.kind != "c",
}


class RoundOperator(LinearOperator, ABC):
    """A matrix whose every product, with a vector or with a whole block, is one round.

    SciPy's solvers take it as it is. Products with the adjoint, which some of them also need, are
    one more round each; for these the array must have been encoded with ``transpose=True``. A
    subclass implements ``_product`` and ``_transpose``.

    Attributes
    ----------
    labels : (Axis, Axis)
        By which ``@`` aligns labelled operands.
    """

    labels: Labels = UNLABELLED

    @abstractmethod
    def _product(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the product with a vector or a matrix that fits."""

    def _matmat(self, x: Any) -> Any:
        # SciPy passes sparse matrices and others that are not arrays, too.
        return self._product(check_operand(self.shape, as_operand(x, self.labels[1])))

    def _matvec(self, x: Any) -> Any:
        return self._matmat(x)

    def _rmatmat(self, x: Any) -> Any:
        return (self.T @ x.conj()).conj()

    def _rmatvec(self, x: Any) -> Any:
        return self._rmatmat(x)

    def dot(self, x: Any) -> Any:
        """Return the product, as ``@``: an array, or a tensor or an operator if ``x`` is one."""
        if isinstance(x, LinearOperator) or np.isscalar(x):
            return super().dot(x)
        return to_tensor(self._matmat(x), like=x)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Compute NumPy's products and properties; others would see an array of one object."""
        if func in _PROPERTIES:
            return _PROPERTIES[func](self)
        if func in (np.result_type, np.common_type):
            empty = (np.empty(0, a.dtype) if isinstance(a, RoundOperator) else a for a in args)
            return func(*empty)
        if func is np.dot and len(args) == 2 and not kwargs:
            a, b = args
            return a.dot(b) if isinstance(a, RoundOperator) else b._rdot(a)
        raise TypeError(
            f"`np.{func.__name__}` does not take a coded operator: only `operator @ x`, "
            "`x @ operator` and `np.dot` are products, and `operator.T` is the transpose."
        )

    def _rdot(self, x: Any) -> Any:
        if isinstance(x, LinearOperator) or np.isscalar(x):
            return super()._rdot(x)
        left = x.T if axes_of(x) else as_operand(x).T
        return to_tensor((self.T @ left).T, like=x)


class Operator(RoundOperator):
    """A coded array inside the cluster: ``operator @ x`` is one round and gives a NumPy array.

    Algorithms get it instead of a :class:`dask_coded.CodedArray`. It has what a NumPy matrix has:
    ``shape``, ``dtype``, ``@`` on either side, ``.T``, ``.dot``. It is also a
    :class:`scipy.sparse.linalg.LinearOperator`, so that SciPy's solvers take it. The
    product with a PyTorch tensor is a tensor.

    Attributes
    ----------
    code : Code
    last_round : RoundReport or None
        What happened in the last round.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        spec = coordinator.open()
        super().__init__(spec.dtype, spec.shape)
        self._coordinator = coordinator
        self.code = spec.code
        self.last_round: RoundReport | None = None
        self._transposed: Operator | None = None
        # Weakly, because the two would keep each other, and the last result, once the task is over.
        self._original: ReferenceType[Operator] | None = None

    def _product(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        result, self.last_round = self._coordinator.run(x)
        return result

    def _transpose(self) -> Operator:
        if self._original is not None and (original := self._original()) is not None:
            return original
        if self._transposed is None:
            spec = self._coordinator.open()
            if not isinstance(spec, ArraySpec) or spec.transposed is None:
                refuse_transpose()
            self._transposed = Operator(self._coordinator.other(spec.transposed))
            self._transposed._original = ref(self)
            self._transposed.labels = self.labels[::-1]
        return self._transposed


class PairOperator:
    """A coded pair inside the cluster: each :meth:`product` is one round and gives a NumPy array.

    Algorithms get it instead of a :class:`dask_coded.CodedPair`.

    Attributes
    ----------
    shape : (int, int)
        Of the product: columns of ``A`` and of ``B``.
    rows : int
        Rows of ``A`` and of ``B``: the length of the weights.
    dtype : numpy.dtype
    code : Polynomial
    last_round : RoundReport or None
        What happened in the last round.
    labels : (Axis, Axis)
        Of ``A``. Labelled weights are aligned with its rows.
    """

    labels: Labels = UNLABELLED

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        spec = coordinator.open()
        self.shape = spec.shape
        self.rows = spec.columns
        self.dtype = spec.dtype
        self.code = spec.code
        self.last_round: RoundReport | None = None

    def product(self, weights: Any = None) -> np.ndarray[Any, Any]:
        """Return ``A.T @ diag(weights) @ B``, or ``A.T @ B`` without weights.

        Parameters
        ----------
        weights : array_like, shape (rows,), optional

        Returns
        -------
        ndarray, shape (p, q)

        See Also
        --------
        dask_coded.CodedPair.product
        """
        if weights is not None:
            weights = check_weights(self.rows, as_operand(weights, self.labels[0]))
        result, self.last_round = self._coordinator.run(weights)
        return result


def sketch(operator: Operator | PairOperator) -> list[Any]:
    """Return what follows from the entries of a coded array, by one round, as JSON.

    Of one fixed random product: a hash of which numbers are finite, how much of the others is
    rounding, their norm, and their sums with random weights, real and imaginary. These depend
    neither on the code nor on the cluster.
    """
    rng = np.random.default_rng(0)
    entries = np.empty(0, operator.dtype).real.dtype
    kind = np.result_type(entries, np.float32)
    length = operator.rows if isinstance(operator, PairOperator) else operator.shape[1]
    # With both signs, so that the norm of the product hides no single row.
    operand = (rng.uniform(0.5, 1.5, length) * rng.choice((-1, 1), length)).astype(kind)
    if isinstance(operator, PairOperator):
        product = operator.product(operand).ravel()
    else:
        product = operator @ operand
    digits = [dtype for dtype in (entries, product.dtype) if dtype.kind in "fc"]
    rounding = max(float(np.finfo(dtype).eps) for dtype in digits) ** 0.5
    if operator.last_round is not None:  # what the code may lose
        rounding = max(rounding, operator.last_round.error)
    finite = np.isfinite(product)
    # As complex numbers of double precision about 1, whose squares are neither infinite nor zero.
    product = np.where(finite, product, 0).astype(complex)
    largest = float(np.abs(product).max(initial=0.0))
    product /= largest or 1.0
    numbers = [float(np.linalg.norm(product))]
    for _ in range(_SUMS):
        total = rng.standard_normal(len(product)) @ product
        numbers += [float(total.real), float(total.imag)]
    where = hashlib.blake2b(np.packbits(finite).tobytes(), digest_size=8).hexdigest()
    size = min(largest, 1e300)  # of which the norm is finite, too
    return [where, rounding, *(size * number for number in numbers)]


def refuse_transpose() -> NoReturn:
    """Raise a TypeError: a product with the transpose needs a transposed encoding."""
    raise TypeError(
        "This array was encoded without its transpose: "
        "encode it with `transpose=True` to multiply from the left."
    )


def as_operand(x: Any, axis: Axis = UNLABELLED[1]) -> np.ndarray[Any, Any]:
    """Return ``x`` as a NumPy array, in the order of the axis that it is summed with.

    Raises
    ------
    TypeError
        If it is masked or sparse.
    ValueError
        If its labels are not those of the axis.
    """
    return np.asarray(check_right(aligned("The operand of a coded product", x, axis)))


def check_right(x: Any) -> Any:
    """Return the operand of a product, unless it is masked or sparse.

    Raises
    ------
    TypeError
        If it is masked or sparse.
    """
    what = "The operand of a coded product"
    return check_dense(what, check_unmasked(what, x))


def check_weights(rows: int, weights: Any) -> Any:
    """Return ``weights`` if they can stand as a diagonal matrix between matrices of ``rows`` rows.

    Raises
    ------
    TypeError
        If they are not numbers.
    ValueError
        If they are not a vector of that length.
    """
    if weights.dtype.kind not in "fciub":
        raise TypeError(f"Argument 'weights' must hold numbers, its dtype is {weights.dtype}.")
    if weights.shape != (rows,):
        raise ValueError(
            f"Argument 'weights' must be a vector with one number for each of the {rows} rows, "
            f"its shape is {weights.shape}."
        )
    return weights


def check_operand(shape: tuple[int, int], x: Any) -> Any:
    """Return ``x`` if it can stand to the right of an array of this shape.

    Raises
    ------
    TypeError
        If it does not hold numbers.
    ValueError
        If it is not a vector or a matrix, or its length does not match.
    """
    if x.dtype.kind not in "fciub":
        raise TypeError(
            f"The operand of a coded product must hold numbers, its dtype is {x.dtype}."
        )
    if x.ndim not in (1, 2):
        raise ValueError(
            f"The operand of a coded product must be a vector or a matrix, "
            f"it has {x.ndim} dimensions."
        )
    if np.isnan(x.shape).any():
        raise ValueError(
            "The operand of a coded product has chunks of unknown size: call "
            "`x.compute_chunk_sizes()` first."
        )
    if x.shape[0] != shape[1]:
        raise ValueError(
            f"Shapes {shape} and {x.shape} do not fit together: "
            f"{shape[1]} columns on the left, {x.shape[0]} rows on the right."
        )
    return x
