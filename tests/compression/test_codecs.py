"""Codecs: the error of one packing, and the error of a sum that travels around a ring."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dask_coded.compression import EXACT, Codec, Partial, Quantization, Truncation

CODECS = [Truncation(), Quantization(), Quantization(bits=16), Quantization(block=3)]
DTYPES = [np.float32, np.float64]


def vectors(dtype: type, **kwargs: object) -> st.SearchStrategy[np.ndarray]:
    width = 8 * np.dtype(dtype).itemsize
    return arrays(dtype, st.integers(0, 20), elements=st.floats(width=width, **kwargs))


def back(codec: Codec, vector: np.ndarray) -> np.ndarray:
    """Return a vector after packing and unpacking."""
    return codec.unpack(codec.pack(Partial(vector))).vector


# ------------------------------------------------------------------------------------- one packing


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 1000])
def test_dtype_length_and_loss_are_kept_and_the_vector_is_unchanged(codec, dtype, size):
    vector = np.random.default_rng(0).standard_normal(size).astype(dtype)
    before = vector.copy()
    packed = codec.pack(Partial(vector, loss=2.5))
    partial = codec.unpack(packed)
    assert partial.vector.dtype == dtype
    assert partial.vector.shape == vector.shape
    assert partial.loss == 2.5
    np.testing.assert_array_equal(vector, before)
    partial.vector += 1  # unpacked arrays are new
    np.testing.assert_array_equal(codec.unpack(packed).vector + 1, partial.vector)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bytes_are_those_of_the_packed_arrays(codec):
    packed = codec.pack(Partial(np.ones(1000, dtype=np.float32)))
    sizes = sum(part.nbytes for part in packed if isinstance(part, np.ndarray))
    assert codec.nbytes(packed) == sizes < 4000


@given(vectors(np.float32, allow_nan=False, allow_infinity=False))
def test_truncation_rounds_to_the_nearest_bfloat16(vector):
    rounded = back(Truncation(), vector)
    assert not (rounded.view(np.uint32) & 0xFFFF).any()
    lower = (vector.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    upper = ((vector.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    finite = np.isfinite(upper)
    nearest = np.minimum(np.abs(vector - lower), np.abs(upper.astype(np.float64) - vector))
    error = np.abs(rounded.astype(np.float64) - vector)
    np.testing.assert_array_equal(error[finite], nearest[finite])
    np.testing.assert_array_equal(back(Truncation(), rounded), rounded)


@given(vectors(np.float64, allow_nan=False, min_value=-1e38, max_value=1e38))
def test_truncation_of_normal_numbers_is_off_by_a_256th_at_most(vector):
    vector[np.abs(vector) < np.finfo(np.float32).tiny] = 0
    assert (np.abs(back(Truncation(), vector) - vector) <= np.abs(vector) / 256).all()


def test_truncation_keeps_numbers_that_need_no_more_bits():
    for dtype in DTYPES:
        vector = np.array([0.0, -0.0, 1.0, -1.5, 255.0, 2.0**-126, 2.0**127], dtype=dtype)
        np.testing.assert_array_equal(back(Truncation(), vector), vector)
        np.testing.assert_array_equal(np.signbit(back(Truncation(), vector)), np.signbit(vector))


def test_truncation_of_ties_goes_to_even():
    vector = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], dtype=np.float32)
    assert back(Truncation(), vector).tolist() == [1, 1 + 2**-6, -1]


def test_truncation_keeps_infinities_and_nan_whatever_their_bits():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000], dtype=np.uint32)
    vector = bits.view(np.float32)
    np.testing.assert_array_equal(back(Truncation(), vector), vector)


@pytest.mark.parametrize("dtype", DTYPES)
def test_truncation_of_too_large_numbers_is_infinite(dtype):
    largest = np.array([np.finfo(dtype).max, -np.finfo(dtype).max])
    assert back(Truncation(), largest).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 16])
@given(data=st.data())
def test_quantization_is_off_by_half_a_scale_at_most(dtype, bits, data):
    vector = data.draw(vectors(dtype, allow_nan=False, allow_infinity=False))
    codec = Quantization(bits, block=4)
    found = back(codec, vector)
    assert np.isfinite(found).all()
    top = 2 ** (bits - 1) - 1
    eps = np.finfo(dtype).eps
    for i in range(0, len(vector), 4):
        block = vector[i : i + 4].astype(np.longdouble)
        greatest = np.abs(block).max()
        error = np.abs(found[i : i + 4] - block).max()
        if greatest < top * np.finfo(dtype).tiny:
            assert error <= greatest
        else:
            assert error <= greatest / top * (0.5 + 4 * top * eps)


@pytest.mark.parametrize("codec", [EXACT, Truncation(), Quantization(bits=16)], ids=repr)
def test_half_precision_is_sent_in_single_precision(codec):
    """As sums are, which may be beyond its range."""
    vector = np.array([65504.0, -65504.0, 1000.0, -3.0], dtype=np.float16)
    found = back(codec, vector)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, vector, rtol=1 / 256, atol=1.01)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_quantization_of_a_block_that_is_not_finite_is_nan(value):
    vector = np.array([1, value, 2, 0, 1, 2, 4], dtype=np.float32)
    found = back(Quantization(block=4), vector)
    assert np.isnan(found[:4]).all()
    np.testing.assert_allclose(found[4:], [1, 2, 4], rtol=0.02)


def test_quantization_of_zeros_and_of_the_least_numbers_is_zero():
    vector = np.array([0, 0, 1e-45, -1e-40], dtype=np.float32)
    assert back(Quantization(block=2), vector).tolist() == [0, 0, 0, 0]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="'bits' must be 8 or 16, it is 4"):
        Quantization(bits=4)
    with pytest.raises(ValueError, match="'block' must be a whole number of at least 1, it is 0"):
        Quantization(block=0)


def test_a_codec_is_a_compression_without_a_linear_compressor():
    for codec in (Truncation(), Quantization()):
        assert codec.codec is codec
        assert codec.lossy
        assert not codec.remembers
        vector = np.ones(4)
        compressor = codec.compressor([(4,)], segments=1)
        assert compressor.expand(0, 0, compressor.compress(0, 0, vector)) is vector
    assert not EXACT.lossy


# ------------------------------------------------------------------------------------------- a ring


def error_of_a_sum(send: Callable[[np.ndarray], np.ndarray], workers: int) -> float:
    """Return the relative error of a sum of Gaussian gradients that is packed for each message."""
    gradients = np.random.default_rng(workers).standard_normal((workers, 8192)).astype(np.float32)
    total = gradients[0]
    for gradient in gradients[1:]:
        total = send(total) + gradient
    total = send(total)
    exact = gradients.sum(axis=0, dtype=np.float64)
    return float(np.linalg.norm(total - exact) / np.linalg.norm(exact))


def toward_zero(vector: np.ndarray) -> np.ndarray:
    """Drop the lower half of each number's bits."""
    return (vector.view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(
    ("codec", "at_2"),
    [
        (Truncation(), 0.0020),
        (Quantization(), 0.0087),
        (Quantization(block=8192), 0.0111),
        (Quantization(bits=16), 3.4e-5),
    ],
    ids=repr,
)
def test_error_of_a_sum_grows_with_the_square_root_of_the_ring(codec, at_2):
    errors = [error_of_a_sum(lambda v: back(codec, v), workers) for workers in (2, 8, 32, 64)]
    roots = np.sqrt([(2 + 1) / 2, 8 / 2, 32 / 2, 64 / 2]) / np.sqrt(3 / 2)
    np.testing.assert_allclose(errors, at_2 * roots, rtol=0.2)


def test_error_of_dropped_bits_would_grow_in_proportion():
    errors = [error_of_a_sum(toward_zero, workers) for workers in (8, 16, 32, 64)]
    np.testing.assert_allclose(errors, [0.0145, 0.0275, 0.052, 0.099], rtol=0.1)
