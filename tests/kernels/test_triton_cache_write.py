"""triton_reshape_and_cache stores, bit for bit, what the torch cache write stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pabench_kernels import reshape_and_cache
from pabench_kernels.triton_cache_write import triton_reshape_and_cache
from tests.kernels.cases import BF16, E4M3, E5M2, FP16, FP32, INT8
from tests.kernels.mutants import mutated

CACHES = [FP32, FP16, BF16, E4M3, E5M2, INT8]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
BLOCKS, BLOCK_SIZE, HEADS, DIM, DIM_V = 5, 3, 2, 8, 5
SLOTS = BLOCKS * BLOCK_SIZE
numpy_says_so = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit number; of fp32 a random quarter million, and ties of the narrower dtypes with their neighbours."""
    if dtype != FP32:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    rng = torch.Generator().manual_seed(7)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=rng).to(torch.int32)
    steps = torch.arange(-(1 << 15), 1 << 15).to(torch.int32) << 16  # ends of bf16 steps, which hold fp8's
    ties = torch.cat([steps + half + beside for half in (0, 1 << 15, 1 << 19, 1 << 20) for beside in (-1, 0, 1)])
    small = torch.arange(-4096, 4096).float() * 2.0**-12  # subnormals of fp8 and integers' halves
    halves = torch.arange(-600, 600).float() / 2
    return torch.cat([bits.view(FP32), ties.view(FP32), small * 2.0**-3, small * 2.0**-10, halves])


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Bits, all NaN alike: torch gives NaN in bf16 other bits in vectorised loops than outside them."""
    nan = x.float().isnan()
    return x.view(BITS[x.itemsize]).masked_fill(nan, 0).int() + (nan.int() << 20)


def pair(dtype: torch.dtype, blocks: int = BLOCKS) -> tuple[torch.Tensor, torch.Tensor]:
    """Two caches full of what was there before."""
    rng = torch.Generator().manual_seed(3)
    shape = (blocks, BLOCK_SIZE, HEADS)
    return tuple((torch.randn(*shape, d, generator=rng) * 20).to(dtype) for d in (DIM, DIM_V))  # type: ignore[return-value]


def tokens(n: int, dtype: torch.dtype = FP32) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(n)
    return tuple((torch.randn(n, HEADS, d, generator=rng) * 9).to(dtype) for d in (DIM, DIM_V))  # type: ignore[return-value]


def scale(kind: str, seed: int) -> torch.Tensor | None:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"tensor": (), "head": (HEADS,), "token": (BLOCKS, BLOCK_SIZE, HEADS)}
    return None if kind == "none" else torch.rand(shapes[kind], generator=rng) + 0.01


def assert_same_writes(
    caches: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> None:
    expected = tuple(c.clone() for c in caches)
    reshape_and_cache(key, value, *expected, *rest)
    triton_reshape_and_cache(key, value, *caches, *rest)
    for found, right, name in zip(caches, expected, ("key_cache", "value_cache"), strict=True):
        assert torch.equal(as_bits(found), as_bits(right)), name


@numpy_says_so
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
def test_every_number_is_rounded_as_torch_rounds_it(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    x = all_numbers(dtype)
    x = x[: len(x) // 64 * 64].view(-1, 1, 64)
    caches = tuple(torch.zeros(len(x), 1, 1, 64).to(cache_dtype) for _ in range(2))
    third = torch.tensor(3.0)  # a divisor of no number
    assert_same_writes(caches, x, x.clone(), torch.arange(len(x)), None, third)  # type: ignore[arg-type]


@numpy_says_so
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2, INT8], ids=str)
def test_finite_numbers_never_become_nan(cache_dtype: torch.dtype) -> None:
    x = all_numbers(FP32)
    x = x[x.isfinite()]
    x = x[: len(x) // 64 * 64].view(-1, 1, 64)
    caches = [torch.zeros(len(x), 1, 1, 64).to(cache_dtype) for _ in range(2)]
    scales = torch.zeros(()), torch.tensor(1e-30)
    triton_reshape_and_cache(x, x, caches[0], caches[1], torch.arange(len(x)), *scales)
    assert all(cache.float().isfinite().all() for cache in caches)


@pytest.mark.parametrize(("k_kind", "v_kind"), [("none", "tensor"), ("head", "token"), ("token", "head")])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
def test_scales_of_every_shape(cache_dtype: torch.dtype, dtype: torch.dtype, k_kind: str, v_kind: str) -> None:
    slots = torch.tensor([7, -1, 0, 14, 3])
    assert_same_writes(pair(cache_dtype), *tokens(5, dtype), slots, scale(k_kind, 1), scale(v_kind, 2))


@pytest.mark.parametrize("cache_dtype", [FP32, BF16, E4M3], ids=str)
def test_strided_caches_tokens_and_slots(cache_dtype: torch.dtype) -> None:
    def pool(dim: int) -> torch.Tensor:
        whole = torch.full((BLOCKS, HEADS, BLOCK_SIZE, dim + 3), 7.0).to(cache_dtype)
        return whole.transpose(1, 2)[..., :dim]

    new = torch.randn(DIM, 4, HEADS, generator=torch.Generator().manual_seed(0)).permute(1, 2, 0)
    slots = torch.tensor([[4, 99], [-1, 99], [13, 99], [0, 99]])[:, 0]
    caches = pool(DIM), pool(DIM)
    assert_same_writes(caches, new, new, slots, None, scale("token", 4))
    for cache in caches:
        beside = cache.as_strided((BLOCKS * HEADS * BLOCK_SIZE, 3), (DIM + 3, 1), DIM)
        assert beside.float().eq(7.0).all(), "what lies between the rows is nobody's to write"


def test_int32_slots() -> None:
    assert_same_writes(pair(E5M2), *tokens(3), torch.tensor([2, -1, 9], dtype=torch.int32), None, None)


@pytest.mark.parametrize("slot", [SLOTS, SLOTS + 1000, 1 << 40, -2])
def test_a_slot_outside_the_pool_is_skipped(slot: int) -> None:
    """No error: the launcher would have to wait for the device. Neither is anything written."""
    caches = pair(FP32)
    before = tuple(c.clone() for c in caches)
    triton_reshape_and_cache(*tokens(2), *caches, torch.tensor([slot, -1]))
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


def test_offsets_beyond_two_to_the_31() -> None:
    stride = (1 << 30) + 64
    room = torch.empty(2 * stride + 64, dtype=torch.uint8)
    far = room.view(E4M3).as_strided((3, 2, 1, 8), (stride, 8, 8, 1))
    far_values = room.view(E4M3).as_strided((3, 2, 1, 8), (stride, 8, 8, 1), 32)
    key = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(1))
    triton_reshape_and_cache(key, key * 2, far, far_values, torch.tensor([5, 0, 3]))
    for cache, given in ((far, key), (far_values, key * 2)):
        assert torch.equal(cache[[2, 0, 1], [1, 0, 1]].float(), given.to(E4M3).float())


def test_no_tokens() -> None:
    assert_same_writes(pair(FP32), *tokens(0), torch.zeros(0, dtype=torch.int64), None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, HEADS, DIM, dtype=torch.float64)}, "key must be fp32, fp16 or bf16, got torch.float64"),
        ({"value_cache": torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, DIM_V, dtype=torch.int16)}, "value_cache must be fp32"),
        ({"k_scale": torch.ones(BLOCKS, HEADS)}, r"k_scale must have shape \[\], \[2\] or \[5, 3, 2\], got \[5, 2\]"),
        ({"slot_mapping": torch.tensor([1])}, "as many tokens"),
    ],
)
def test_a_mistake_is_one_sentence(change: dict[str, Any], message: str) -> None:
    key, value = tokens(2)
    key_cache, value_cache = pair(FP32)
    given = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    with pytest.raises(ValueError, match=message):
        triton_reshape_and_cache(**{**given, "slot_mapping": torch.tensor([0, 1]), **change})


FAULTS = {
    "truncates": (
        "normal = (magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT",
        "normal = magnitude >> SHIFT",
    ),
    "ties-away": ("- 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT", ")) >> SHIFT"),
    "does-not-saturate": ("tl.where(bits > TOP, TOP, bits)", "bits"),
    "subnormals-as-normals": ("tl.where(magnitude < ((128 - BIAS) << 23), small, normal)", "normal"),
    "sign-lost": ("(rounded(x, 3, 7, 0x7E, 0x7F) | ((bits >> 24) & 0x80))", "rounded(x, 3, 7, 0x7E, 0x7F)"),
    "scale-of-another-token": ("offset * scale_stride_token", "0 * scale_stride_token + 0 * offset"),
    "minus-one-is-slot-0": (
        "live = (slot >= 0) & (slot < num_slots)",
        "slot = tl.where(slot < 0, 0, slot)\n    live = slot < num_slots",
    ),
}


@numpy_says_so
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, tmp_path: Path) -> None:
    module = mutated("triton_cache_write", *FAULTS[fault], tmp_path)
    x = (torch.arange(-1200, 1200) * 0.5).view(-1, 2, DIM)  # reaches beyond 448 and has ties; scaled down, subnormals
    key, value = torch.cat([x, x * 2.0**-9]), torch.ones(2 * len(x), HEADS, DIM_V)
    blocks = len(key) // BLOCK_SIZE + 1
    expected, found = pair(E4M3, blocks), pair(E4M3, blocks)
    slots = torch.arange(len(key)) - 1
    scales = None, torch.linspace(0.5, 2, blocks * BLOCK_SIZE * HEADS).view(blocks, BLOCK_SIZE, HEADS)
    reshape_and_cache(key, value, *expected, slots, *scales)
    module.triton_reshape_and_cache(key, value, *found, slots, *scales)
    assert any(not torch.equal(as_bits(a), as_bits(b)) for a, b in zip(found, expected, strict=True))
