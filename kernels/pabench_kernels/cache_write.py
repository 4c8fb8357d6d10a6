"""Writing new keys and values into the block pool, quantised where the cache is narrower than the model.

Shape legend: T new tokens, Hkv KV heads, D head_dim, Dv value head_dim, NB blocks in the pool, BS tokens per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED_DTYPES = (*FP8_DTYPES, torch.int8)
INT8_MAX = 127  # symmetric: −128 is never written


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """``x / scale`` in ``dtype``, rounded to nearest even; fp8 and int8 saturate at ±max instead of NaN or wrapping.

    ``x`` is [..., Hkv, D] in any float dtype, ``scale`` fp32 [], [Hkv] or [..., Hkv]; None = 1.0. The division is done
    in fp32; a scale of 0, as an all-zero token has, stores 0 and not 0 / 0. ±Inf saturates too, NaN stays NaN in fp8
    and becomes 0 in int8.
    """
    if scale is None and x.dtype == dtype:
        return x
    scaled = x.float() if scale is None else x.float() / per_head(scale.masked_fill(scale == 0, 1))
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        return scaled.clamp(-limit, limit).to(dtype)
    if dtype == torch.int8:
        return scaled.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(nan=0.0).to(dtype)
    return scaled.to(dtype)


def dequantize(x: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """``x × scale`` computed in fp32, then rounded to ``dtype``. ``x`` [..., Hkv, D], ``scale`` [] or [..., Hkv]."""
    if scale is None and x.dtype == dtype:
        return x
    return (x.float() if scale is None else x.float() * per_head(scale)).to(dtype)


def per_head(scale: Tensor) -> Tensor:
    """A dequantisation factor [], [Hkv] or [..., Hkv], shaped to broadcast over [..., Hkv, D]."""
    return scale if scale.ndim == 0 else scale.unsqueeze(-1)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each new token into its slot of both caches, in place.

    ``key`` [T, Hkv, D] and ``value`` [T, Hkv, Dv] in any float dtype; ``key_cache`` [NB, BS, Hkv, D] and
    ``value_cache`` [NB, BS, Hkv, Dv] in any strides; ``slot_mapping`` int64 [T] holds block × BS + offset, or −1 to
    skip that token. ``k_scale`` and ``v_scale`` are fp32 [], [Hkv] or [NB, BS, Hkv], one per token and head. What is
    stored is ``quantize(key, key_cache.dtype, k_scale)``, a token's scale being that of its slot. Raises ``ValueError``
    before anything is written if shapes disagree or a slot lies outside the pool. The operation is vLLM's
    ``reshape_and_cache``.
    """
    check_shapes(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    _check_slots(slot_mapping, key_cache)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = key_cache.shape[1]
    where = (slots // block_size, slots % block_size)
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored = quantize(new[kept], cache.dtype, scale if scale is None or scale.ndim < 3 else scale[where])
        if cache.dtype in FP8_DTYPES:  # index_put has no fp8, the bytes are what counts
            cache.view(torch.uint8)[where] = stored.view(torch.uint8)
        else:
            cache[where] = stored


def check_shapes(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Raises ``ValueError`` if the arguments of a cache write do not fit together. Reads shapes and dtypes only.

    key [T, Hkv, D], value [T, Hkv, Dv], caches [NB, BS, Hkv, D or Dv], slot_mapping [T], scales [], [Hkv] or
    [NB, BS, Hkv].
    """
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if new.ndim != 3 or cache.ndim != 4 or new.shape[1:] != cache.shape[2:]:
            raise ValueError(
                f"{name} [T, heads, dim] must match its cache [blocks, block_size, heads, dim], "
                f"got {list(new.shape)} and {list(cache.shape)}"
            )
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"key and value cache must agree in blocks, block_size and heads, "
            f"got {list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    tokens = key.shape[0]
    if value.shape[0] != tokens or tuple(slot_mapping.shape) != (tokens,):
        raise ValueError(
            f"key, value and slot_mapping must have as many tokens, "
            f"got {tokens}, {value.shape[0]} and slot_mapping {list(slot_mapping.shape)}"
        )
    if slot_mapping.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    heads = key.shape[1]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and tuple(scale.shape) not in ((), (heads,), tuple(key_cache.shape[:3])):
            shapes = f"[], [{heads}] or {list(key_cache.shape[:3])}"
            raise ValueError(f"{name} must have shape {shapes}, got {list(scale.shape)}")


def _check_slots(slot_mapping: Tensor, key_cache: Tensor) -> None:
    if slot_mapping.numel():
        low, high = (int(bound) for bound in slot_mapping.aminmax())
        num_slots = key_cache.shape[0] * key_cache.shape[1]
        if low < -1 or high >= num_slots:
            wrong = low if low < -1 else high
            raise ValueError(f"slots must lie in −1…{num_slots - 1}, got {wrong}")
