"""What is special about MDS codes: how much decoding amplifies errors."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.codes import MDS
from dask_coded.codes._subsets import k_subsets, smallest_of_minors


@pytest.mark.parametrize("k", [2, 3, 4, 7, 10, 21, 40])
def test_two_parity_pieces_are_as_far_from_singular_as_can_be(k: int) -> None:
    """Neighbouring columns of the parity include an angle of 90 / (k / 2 + 1) degrees."""
    code = MDS(k + 2, k)
    subsets = [s for s in k_subsets(code.n, k) if s[-1] >= k]
    parity = code.G[k:]
    np.testing.assert_allclose(np.linalg.norm(parity, axis=1), 1)
    least = smallest_of_minors(parity, subsets).min()
    apart = np.sin(np.pi / 2 / ((k + 1) // 2 + 1))
    assert least > 0.5 * apart * np.linalg.norm(parity, axis=0).min()
