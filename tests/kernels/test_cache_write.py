"""reshape_and_cache: each token lands in its slot and nowhere else, rounded to nearest even, saturated, never NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pabench_kernels import reshape_and_cache
from pabench_kernels.cache_write import dequantize, quantize
from tests.kernels.cases import BF16, E4M3, E5M2, FP16, FP32, INT8

BLOCKS, BLOCK_SIZE, HEADS, DIM, DIM_V = 4, 3, 2, 8, 5
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}


def caches(dtype: torch.dtype = FP32) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (BLOCKS, BLOCK_SIZE, HEADS)
    return torch.zeros(*shape, DIM).to(dtype), torch.zeros(*shape, DIM_V).to(dtype)


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(n)
    return torch.randn(n, HEADS, DIM, generator=rng), torch.randn(n, HEADS, DIM_V, generator=rng)


def by_slot(cache: torch.Tensor) -> torch.Tensor:
    return cache.float().flatten(0, 1)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, E4M3, E5M2, INT8], ids=str)
def test_each_token_lands_in_its_slot_and_nowhere_else(dtype: torch.dtype) -> None:
    key, value = tokens(3)
    key_cache, value_cache = caches(dtype)
    k_scale, v_scale = torch.tensor(0.03), torch.tensor([0.05, 0.07])
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([7, 0, 11]), k_scale, v_scale)
    expected = torch.zeros(BLOCKS * BLOCK_SIZE, HEADS, DIM)
    expected[[7, 0, 11]] = quantize(key / 0.03, dtype).float()
    torch.testing.assert_close(by_slot(key_cache), expected, rtol=1e-6, atol=1e-6)
    expected = torch.zeros(BLOCKS * BLOCK_SIZE, HEADS, DIM_V)
    expected[[7, 0, 11]] = quantize(value / v_scale[:, None], dtype).float()
    assert torch.equal(by_slot(value_cache), expected)


def test_slot_minus_one_skips_the_token() -> None:
    key, value = tokens(3)
    key_cache, value_cache = caches()
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([-1, 4, -1]))
    assert torch.equal(by_slot(key_cache)[4], key[1])
    assert by_slot(key_cache).count_nonzero() == key[1].numel()
    assert by_slot(value_cache).count_nonzero() == value[1].numel()


@pytest.mark.parametrize("dtype", [FP32, E4M3], ids=str)
def test_strided_caches_are_written_in_place(dtype: torch.dtype) -> None:
    key, value = tokens(2)
    pool = torch.zeros(2, BLOCKS, HEADS, BLOCK_SIZE, DIM + 3).to(dtype)
    key_cache, value_cache = pool[0].transpose(1, 2)[..., :DIM], pool[1].transpose(1, 2)[..., :DIM_V]
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([5, 6]))
    assert torch.equal(pool[0, 1, :, 2, :DIM].float(), quantize(key[0], dtype).float())
    assert torch.equal(pool[1, 2, :, 0, :DIM_V].float(), quantize(value[1], dtype).float())
    assert pool.float().count_nonzero() == key_cache.float().count_nonzero() + value_cache.float().count_nonzero()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_too_large_saturates(dtype: torch.dtype) -> None:
    big = torch.tensor([1e30, -1e30, math.inf, -math.inf, LARGEST[dtype] * 1.2, 0.0]).view(1, 1, 6)
    stored = quantize(big, dtype).float().flatten().tolist()
    top = LARGEST[dtype]
    assert stored == [top, -top, top, -top, top, 0.0]


@pytest.mark.parametrize(
    ("dtype", "given", "stored"),
    [
        (INT8, [0.5, 1.5, 2.5, -0.5, -1.5], [0, 2, 2, 0, -2]),
        (E4M3, [17.0, 19.0, 31.1, 0.001], [16, 20, 32, 0.001953125]),  # step 2 in 16…32; the last is subnormal
        (E5M2, [9.0, 11.0, 15.1], [8, 12, 16]),  # step 2 in 8…16
        (BF16, [1 + 2**-8, 1 + 3 * 2**-8], [1, 1 + 2**-6]),
    ],
    ids=str,
)
def test_rounds_to_nearest_even(dtype: torch.dtype, given: list[float], stored: list[float]) -> None:
    assert quantize(torch.tensor(given)[None], dtype).float().flatten().tolist() == stored


def test_nan_stays_nan_in_fp8() -> None:
    assert quantize(torch.tensor([[math.nan]]), E4M3).float().isnan().all()


def test_bf16_input_is_divided_in_fp32() -> None:
    x = torch.tensor([[3.0]], dtype=BF16)
    assert quantize(x, FP32, torch.tensor(7.0)).item() == torch.tensor(3.0).div(7.0).item()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_dequantize_undoes_quantize_within_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.03, 0.04, 0.05])
    back = dequantize(quantize(x, dtype, scale), scale)
    step = {E4M3: 2.0**-4, E5M2: 2.0**-3, INT8: 0.0}[dtype]
    assert ((back - x).abs() <= x.abs() * step + scale[:, None] * 0.51).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": torch.tensor([0, 12])}, "slots must lie in −1…11, got 12"),
        ({"slot_mapping": torch.tensor([-2, 1])}, "slots must lie in −1…11, got -2"),
        ({"slot_mapping": torch.tensor([1])}, "as many tokens"),
        ({"slot_mapping": torch.tensor([0.0, 1.0])}, "slot_mapping must be int64"),
        ({"value": torch.zeros(3, HEADS, DIM_V)}, "as many tokens"),
        ({"key": torch.zeros(2, HEADS + 1, DIM)}, "key .* must match its cache"),
        ({"value": torch.zeros(2, HEADS, DIM)}, "value .* must match its cache"),
        ({"value_cache": torch.zeros(BLOCKS + 1, BLOCK_SIZE, HEADS, DIM_V)}, "must agree in blocks"),
        ({"k_scale": torch.ones(3)}, r"k_scale must have shape \[\], \[2\] or \[4, 3, 2\], got \[3\]"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    key, value = tokens(2)
    key_cache, value_cache = caches()
    arguments = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(**{**arguments, **change})
    assert key_cache.count_nonzero() == 0
    assert value_cache.count_nonzero() == 0


def test_no_tokens() -> None:
    key_cache, value_cache = caches()
    before = key_cache.clone(), value_cache.clone()
    reshape_and_cache(*tokens(0), key_cache, value_cache, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(key_cache, before[0])
    assert torch.equal(value_cache, before[1])
