"""Tensors of PyTorch, and arrays of dtypes that NumPy itself does not have."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

import dask_coded as coded

pytestmark = pytest.mark.extras

A = np.random.default_rng(0).integers(-8, 8, (12, 4)) / 4.0
x = np.arange(4.0)


def times(operator, operand):
    return operator @ operand


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "complex32"])
def test_tensors_of_small_dtypes_are_data_and_operands(client, name):
    torch = pytest.importorskip("torch")
    matrix, vector = (torch.from_numpy(v).to(getattr(torch, name)) for v in (A, x))
    kind = {"float16": "f2", "complex32": "c8"}.get(name, "f4")
    D = coded.encode(matrix, coded.MDS(4, 3), client)
    assert D.dtype == kind
    np.testing.assert_allclose(client.compute(D @ x.astype("f4")).result(), A @ x, rtol=1e-2)
    C = coded.encode(A.astype("f4"), coded.MDS(4, 3), client)
    product = client.compute(C @ vector).result()
    assert product.dtype == np.result_type("f4", kind)  # sums of float32
    np.testing.assert_allclose(product, A @ x, rtol=1e-5)
    if name in ("float8_e4m3fn", "complex32"):
        return  # Dask cannot send it
    found = coded.submit(times, C, vector).result()
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), A @ x, rtol=1e-5)


def test_conjugated_tensors_are_operands(client):
    torch = pytest.importorskip("torch")
    C = coded.encode(A, coded.MDS(4, 3), client)
    vector = torch.from_numpy(x * (1 + 2j)).conj()
    np.testing.assert_allclose(client.compute(C @ vector).result(), A @ x * (1 - 2j))


def test_a_tensor_that_requires_a_gradient_is_refused(client):
    torch = pytest.importorskip("torch")
    C = coded.encode(A, coded.MDS(4, 3), client)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(RuntimeError, match="requires grad"):
            C @ torch.ones(4, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("name", "kind"), [("bfloat16", "f4"), ("float8_e5m2", "f4"), ("int4", "i1")]
)
def test_arrays_of_ml_dtypes_are_data_and_operands(client, name, kind):
    dtype = getattr(pytest.importorskip("ml_dtypes"), name)
    values, vector = np.rint(A).astype(dtype), x.astype(dtype)
    plain = np.rint(A)
    for source in (values, da.from_array(values, chunks=5)):
        D = coded.encode(source, coded.Repetition(4, 2), client)
        assert D.dtype == kind
        np.testing.assert_allclose(client.compute(D @ x).result(), plain @ x)
    C = coded.encode(plain, coded.MDS(4, 3), client)
    for operand in (vector, da.from_array(vector, chunks=2)):
        np.testing.assert_allclose(client.compute(C @ operand).result(), plain @ x)
    np.testing.assert_allclose(coded.submit(times, C, vector).result(), plain @ x)
