"""Labels of rows and columns, of xarray and pandas, by which operands are aligned.

A product of two labelled arrays sums over equal labels, wherever they are. The pieces of a coded
array have no labels, so the array keeps those of the matrix that was encoded. An operand that has
the same labels in another order is put in the matrix's order. One with other labels is refused, as
pandas does, because its product would leave out some of the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_coded.arguments import unwrapped


@dataclass(frozen=True)
class Axis:
    """The labels of the rows or columns of a matrix, as far as they are known.

    Parameters
    ----------
    name : hashable or None
        The dimension of an xarray object.
    index : pandas.Index or None
        One label for each row or column.
    known : bool
        Whether the labels are known, if there are any. They are not after a selection.
    """

    name: Hashable | None = None
    index: Any = None
    known: bool = True

    def lost(self) -> Axis:
        """Return the axis after a selection, whose labels are not known any more."""
        return self if self.index is None else Axis(self.name, None, known=False)

    def same(self, other: Axis) -> bool:
        """Whether another axis has the same labels in the same order."""
        if self.index is None or other.index is None:
            return self == other
        return self.name == other.name and bool(self.index.equals(other.index))


#: Of the rows and the columns of a matrix.
Labels = tuple[Axis, Axis]

UNLABELLED: Labels = (Axis(), Axis())


def lost(labels: Labels) -> Labels:
    """Return the labels after a selection from both axes."""
    return (labels[0].lost(), labels[1].lost())


def axes_of(x: Any) -> tuple[Axis, ...]:
    """Return the axes of an xarray or pandas object; none of other objects."""
    # These can only be here if their libraries have been imported.
    xarray: Any = sys.modules.get("xarray")
    if xarray and isinstance(x, xarray.DataArray):
        return tuple(Axis(name, x.indexes.get(name)) for name in x.dims)
    if xarray and isinstance(x, xarray.Variable):
        return tuple(map(Axis, x.dims))
    pandas: Any = sys.modules.get("pandas")
    if pandas and isinstance(x, pandas.Series | pandas.DataFrame):
        return tuple(Axis(None, index) for index in x.axes)
    return ()


def labels_of(A: Any) -> Labels:
    """Return the labels of the rows and columns of a matrix."""
    axes = axes_of(A)
    return (axes[0], axes[1]) if len(axes) == 2 else UNLABELLED


def aligned(what: str, x: Any, axis: Axis) -> Any:
    """Return the array in an operand, in the order of the axis that its first one is summed with.

    Parameters
    ----------
    what : str
        What the operand is, for messages.
    x : object
        Anything but xarray and pandas objects is in order already.
    axis : Axis
        Of the other factor.

    Returns
    -------
    array, or pandas object

    Raises
    ------
    ValueError
        If ``x`` has other dimensions or other labels than the axis.

    Examples
    --------
    >>> aligned("The operand", [1, 2], Axis("place"))  # has no labels
    [1, 2]
    """
    if not (axes := axes_of(x)):
        return unwrapped(x)
    if None not in (axis.name, axes[0].name) and axis.name != axes[0].name:
        if len(axes) != 2 or axes[1].name != axis.name:
            raise ValueError(
                f"{what} must have the dimension {axis.name!r}, which the product sums over, its "
                f"dimensions are {x.dims}: rename them, or pass `x.data`."
            )
        x, axes = x.T, axes[::-1]
    own = axes[0].index
    if own is not None and not axis.known:
        raise ValueError(
            f"{what} has labels, those of this selection of a labelled array are not known: select "
            "from the operand as well, and pass it without labels, as `x.data` or `x.to_numpy()`."
        )
    if own is not None and axis.index is not None and not own.equals(axis.index):
        unique = own.is_unique and axis.index.is_unique
        order = own.get_indexer(axis.index) if unique else [-1]
        if len(own) != len(axis.index) or min(order, default=0) < 0:
            raise ValueError(
                f"{what} must have the labels that the product sums over, each of them once, in "
                "any order: reindex it, or pass it without labels, as `x.data` or `x.to_numpy()`."
            )
        x = x.iloc[order] if hasattr(x, "iloc") else x.isel({axes[0].name: order})
    return unwrapped(x)


def as_factor(x: Any, axis: Axis = UNLABELLED[1]) -> Any:
    """Return numbers, sequences, tensors and pandas objects as a NumPy array.

    Anything else is returned unchanged. ``axis`` is that of the other factor that the product sums
    over.

    Raises
    ------
    ValueError
        If the labels of ``x`` are not those of the axis.
    """
    x = aligned("The operand of a product", x, axis)
    pandas: Any = sys.modules.get("pandas")
    if pandas and isinstance(x, pandas.Series | pandas.DataFrame):
        return x.to_numpy()
    return np.asarray(x) if isinstance(x, list | tuple) or np.isscalar(x) else x
