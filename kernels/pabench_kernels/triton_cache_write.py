"""The paged cache write in Triton: scale, round and scatter new keys and values into their slots, in one launch.

Shape legend: T new tokens, Hkv KV heads, D head_dim, Dv value head_dim, NB blocks in the pool, BS tokens per block.

Rounding is integer arithmetic on the bits of fp32 numbers, the same on a GPU as under the interpreter (whose casts to
bf16 and fp8 truncate and lose carries), and division is IEEE's: what is stored equals ``cache_write.reshape_and_cache``
bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pabench_kernels.cache_write import check_shapes
from pabench_kernels.triton_attend import to_number
from pabench_kernels.triton_common import MAX_INTERPRETED_TILE, interpreting, scale_strides

GPU_TILE = 1024  # elements of a program
_SOURCES = {torch.float32: "plain", torch.float16: "plain", torch.bfloat16: "bf16_bits"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_TARGETS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}


@triton.jit
def rounded(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr, NAN: tl.constexpr):
    """Bits, without sign, of |x| fp32 in a narrower float, rounded to nearest even; what is larger gives TOP."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.where(is_nan, 0, magnitude)
    normal = (magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # Subnormals: adding the power of two whose last bit is their step makes the addition round, and the sum's last bits
    # count the steps.
    SUBNORMAL_BITS: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    anchor = tl.full(x.shape, SUBNORMAL_BITS, tl.int32).to(tl.float32, bitcast=True)
    small = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - SUBNORMAL_BITS
    bits = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    return tl.where(is_nan, NAN, tl.where(bits > TOP, TOP, bits))


@triton.jit
def stored(x, TARGET: tl.constexpr):
    """fp32 numbers as a cache's bits. fp8 and int8 saturate, fp16 and bf16 overflow to ±Inf, as torch's casts do."""
    bits = x.to(tl.int32, bitcast=True)
    if TARGET == "fp32":
        return bits
    elif TARGET == "int8":  # adding 1.5 × 2²³ rounds to an integer, which the sum's last bits hold; NaN gives 0
        y = tl.where(x > 127.0, 127.0, tl.where(x < -127.0, -127.0, x))
        y = tl.where(y == y, y, 0.0)
        return ((y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.uint8)
    elif TARGET == "e4m3":
        return (rounded(x, 3, 7, 0x7E, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)
    elif TARGET == "e5m2":
        return (rounded(x, 2, 15, 0x7B, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)
    elif TARGET == "fp16":
        return (rounded(x, 10, 15, 0x7C00, 0x7E00) | ((bits >> 16) & 0x8000)).to(tl.int16)
    else:
        return (rounded(x, 7, 127, 0x7F80, 0x7FC0) | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def write_elements(
    new_ptr,
    cache_ptr,
    scale_ptr,
    token,  # [TOKENS]
    block,
    offset,
    live,
    element,  # [ELEMENTS]: head × DIM + dim
    num_heads,
    new_stride_token,
    new_stride_head,
    new_stride_dim,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    cache_stride_dim,
    scale_stride_block,
    scale_stride_token,
    scale_stride_head,
    DIM: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,  # "copy": the bits as they are
    HAS_SCALE: tl.constexpr,
):
    head = element // DIM
    dim = element % DIM
    mask = live[:, None] & (head < num_heads)[None, :]
    from_at = (token * new_stride_token)[:, None] + (head * new_stride_head + dim * new_stride_dim)[None, :]
    x = tl.load(new_ptr + from_at, mask=mask, other=0)
    if TARGET != "copy":
        x = to_number(x, SOURCE, tl.float32)
        if HAS_SCALE:
            scale_at = (block * scale_stride_block + offset * scale_stride_token)[:, None]
            scale = tl.load(scale_ptr + (scale_at + (head * scale_stride_head)[None, :]), mask=mask, other=1.0)
            x = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
        x = stored(x, TARGET)
    to_at = (block * cache_stride_block + offset * cache_stride_token)[:, None]
    to_at += (head * cache_stride_head + dim * cache_stride_dim)[None, :]
    tl.store(cache_ptr + to_at, x, mask=mask)


@triton.jit
def cache_write_kernel(
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, Dv]
    k_ptr,  # [NB, BS, Hkv, D], as bits
    v_ptr,  # [NB, BS, Hkv, Dv], as bits
    slot_ptr,  # [T]
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    num_slots,
    num_kv_heads,
    element_tiles,
    key_stride_token,
    key_stride_head,
    key_stride_dim,
    value_stride_token,
    value_stride_head,
    value_stride_dim,
    k_stride_block,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_block,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    k_scale_stride_block,
    k_scale_stride_token,
    k_scale_stride_head,
    v_scale_stride_block,
    v_scale_stride_token,
    v_scale_stride_head,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # per program
    ELEMENTS: tl.constexpr,  # of each token, per program
    K_SOURCE: tl.constexpr,
    V_SOURCE: tl.constexpr,
    K_TARGET: tl.constexpr,
    V_TARGET: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    token = program // element_tiles * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    element = program % element_tiles * ELEMENTS + tl.arange(0, ELEMENTS).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    write_elements(
        key_ptr,
        k_ptr,
        k_scale_ptr,
        token,
        block,
        offset,
        live,
        element,
        num_kv_heads,
        key_stride_token,
        key_stride_head,
        key_stride_dim,
        k_stride_block,
        k_stride_token,
        k_stride_head,
        k_stride_dim,
        k_scale_stride_block,
        k_scale_stride_token,
        k_scale_stride_head,
        HEAD_DIM,
        K_SOURCE,
        K_TARGET,
        HAS_K_SCALE,
    )
    write_elements(
        value_ptr,
        v_ptr,
        v_scale_ptr,
        token,
        block,
        offset,
        live,
        element,
        num_kv_heads,
        value_stride_token,
        value_stride_head,
        value_stride_dim,
        v_stride_block,
        v_stride_token,
        v_stride_head,
        v_stride_dim,
        v_scale_stride_block,
        v_scale_stride_token,
        v_scale_stride_head,
        HEAD_DIM_V,
        V_SOURCE,
        V_TARGET,
        HAS_V_SCALE,
    )


def triton_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each new token into its slot of both caches, in place: ``cache_write.reshape_and_cache`` as one launch.

    ``key`` [T, Hkv, D] and ``value`` [T, Hkv, Dv] fp32, fp16 or bf16 in any strides; ``key_cache`` [NB, BS, Hkv, D] and
    ``value_cache`` [NB, BS, Hkv, Dv] fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2 or int8 in any strides; ``slot_mapping``
    int64 or int32 [T]; scales fp32 [], [Hkv] or [NB, BS, Hkv]. What is stored is x / scale rounded to nearest even. fp8
    and int8 saturate, also ±Inf; NaN stays NaN, in int8 it becomes 0. A cache in the model's own dtype without a scale
    gets the bits as they are. Raises ``ValueError`` before anything is written if shapes or dtypes do not fit, but it
    does not wait for the device to look at slots: one outside the pool is skipped as −1 is.
    """
    check_shapes(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    for name, new in (("key", key), ("value", value)):
        if new.dtype not in _SOURCES:
            raise ValueError(f"{name} must be fp32, fp16 or bf16, got {new.dtype}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype not in _TARGETS:
            raise ValueError(f"{name} must be fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2 or int8, got {cache.dtype}")
    tokens, heads = key.shape[:2]
    most = max(key[0].numel(), value[0].numel()) if tokens else 0
    if most == 0:
        return
    elements = min(triton.next_power_of_2(most), MAX_INTERPRETED_TILE if interpreting() else GPU_TILE)
    tile = MAX_INTERPRETED_TILE // elements if interpreting() else max(1, GPU_TILE // elements)
    tile = min(tile, triton.next_power_of_2(tokens))
    element_tiles = -(-most // elements)
    arguments = {**_side("k", "key", key, key_cache, k_scale), **_side("v", "value", value, value_cache, v_scale)}
    cache_write_kernel[(-(-tokens // tile) * element_tiles,)](
        **arguments,
        slot_ptr=slot_mapping,
        num_tokens=tokens,
        num_slots=key_cache.shape[0] * key_cache.shape[1],
        num_kv_heads=heads,
        element_tiles=element_tiles,
        slot_stride=slot_mapping.stride(0),
        HEAD_DIM=key.shape[2],
        HEAD_DIM_V=value.shape[2],
        BLOCK_SIZE=key_cache.shape[1],
        TOKENS=tile,
        ELEMENTS=elements,
        num_warps=4,
    )


def _side(short: str, name: str, new: Tensor, cache: Tensor, scale: Tensor | None) -> dict[str, object]:
    """Arguments of the key's side, or the value's."""
    copied = scale is None and new.dtype == cache.dtype
    bits = _BITS[cache.dtype.itemsize]
    source = new
    if copied or (new.dtype == torch.bfloat16 and interpreting()):
        source = new.view(_BITS[new.dtype.itemsize])
    strides = {f"{name}_stride_{at}": n for at, n in zip(("token", "head", "dim"), new.stride(), strict=True)}
    places = zip(("block", "token", "head", "dim"), cache.stride(), strict=True)
    return {
        f"{name}_ptr": source,
        f"{short}_ptr": cache.view(bits),
        f"{short}_scale_ptr": new if scale is None else scale,
        **strides,
        **{f"{short}_stride_{place}": n for place, n in places},
        **scale_strides(short, scale),
        f"{short.upper()}_SOURCE": "bf16_bits" if source.dtype == torch.int16 else "plain",
        f"{short.upper()}_TARGET": "copy" if copied else _TARGETS[cache.dtype],
        f"HAS_{short.upper()}_SCALE": scale is not None,
    }
