"""The memory that keys and values lie in: filled with what must not be read, in several layouts, some of it far apart.

A pool whose blocks lie past 2^31 bytes or elements is several GiB of address space of which a few pages are touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pabench.checks.kernel.probes import Overlay
from pabench.checks.kernel.shapes import Shape
from pabench_kernels.cache_write import quantize

SPARE_BLOCKS = 5  # blocks nobody owns, the first and the last of the pool among them
FAR_STRIDE = 1 << 20  # elements from one block to the next where offsets cross 2^31


class NoMemoryError(RuntimeError):
    """The pool cannot be allocated here. The text says how large it is."""


@dataclass(frozen=True)
class Pool:
    """``key_cache`` [NB, BS, Hkv, D] and ``value_cache`` [NB, BS, Hkv, Dv] are views of ``base_k`` and ``base_v``."""

    base_k: Tensor
    key_cache: Tensor
    base_v: Tensor
    value_cache: Tensor


def border_block(shape: Shape, itemsize: int) -> int | None:
    """The first block id at or past the border that the shape is about; None where it has none."""
    return {
        "none": None,
        "2^16 ids": 1 << 16,
        "2^31 bytes": (1 << 31) // itemsize // FAR_STRIDE,
        "2^31 elements": (1 << 31) // FAR_STRIDE,
    }[shape.border]


def make_pool(
    shape: Shape, num_blocks: int, dtype: torch.dtype, overlay: Overlay, rng: torch.Generator, device: str
) -> Pool:
    """Raises ``NoMemoryError``."""
    dim_v = shape.head_dim_v or shape.head_dim
    if shape.border.startswith("2^31"):
        return _far_pool(shape, num_blocks, dim_v, dtype, overlay, rng, device)
    base_k, key_cache = _near(shape, num_blocks, shape.head_dim, dtype, overlay, rng, device)
    base_v, value_cache = _near(shape, num_blocks, dim_v, dtype, overlay, rng, device)
    if shape.layout == "interleaved" and dim_v == shape.head_dim:
        raw = carrier(dtype)  # K and V of a block side by side
        base_k = base_v = torch.stack([base_k.view(raw), base_v.view(raw)], 1).view(dtype)
        key_cache, value_cache = base_k[:, 0], base_k[:, 1]
    return Pool(base_k, key_cache, base_v, value_cache)


def _near(
    shape: Shape, num_blocks: int, dim: int, dtype: torch.dtype, overlay: Overlay, rng: torch.Generator, device: str
) -> tuple[Tensor, Tensor]:
    """(whole memory, the cache [NB, BS, Hkv, dim] in it)."""
    size = (num_blocks, shape.block_size, shape.kv_heads, dim)
    if shape.layout == "padded":  # heads before tokens, and rows wider than a head
        size = (num_blocks, shape.kv_heads, shape.block_size, dim + 8)
    whole = filled(size, dtype, overlay, rng).to(device)
    return whole, whole.transpose(1, 2)[..., :dim] if shape.layout == "padded" else whole


def _far_pool(
    shape: Shape, num_blocks: int, dim_v: int, dtype: torch.dtype, overlay: Overlay, rng: torch.Generator, device: str
) -> Pool:
    """K and V of a block side by side, blocks ``FAR_STRIDE`` apart. Blocks near the used ones and the first are filled;
    the others are never touched."""
    border = border_block(shape, dtype.itemsize) or 0
    dims = shape.head_dim, dim_v
    each = [shape.block_size * shape.kv_heads * dim for dim in dims]
    elements = num_blocks * FAR_STRIDE
    try:
        whole = torch.empty(elements, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:  # also torch's own out-of-memory errors
        size = elements * dtype.itemsize / (1 << 30)
        raise NoMemoryError(f"a block pool of {size:.1f} GiB of address space cannot be allocated here") from error
    caches = []
    for dim, offset in zip(dims, (0, each[0]), strict=True):
        stride = (FAR_STRIDE, shape.kv_heads * dim, dim, 1)
        cache = whole.as_strided((num_blocks, shape.block_size, shape.kv_heads, dim), stride, offset)
        near = list(range(max(0, 2 * border - num_blocks), num_blocks))
        for block in {0, 1, *near}:
            raw = carrier(dtype)
            cache[block].view(raw).copy_(filled(tuple(cache.shape[1:]), dtype, overlay, rng).to(device).view(raw))
        caches.append(cache)
    return Pool(caches[0], caches[0], caches[1], caches[1])


def filled(size: tuple[int, ...], dtype: torch.dtype, overlay: Overlay, rng: torch.Generator) -> Tensor:
    if overlay == "plausible":
        return quantize(torch.randn(size, generator=rng), dtype)
    number = math.nan if overlay == "nan" and dtype != torch.int8 else 1e4
    return quantize(torch.tensor(number), dtype).view(carrier(dtype)).expand(size).clone().view(dtype)


def write(cache: Tensor, stored: Tensor, blocks: Tensor, block_size: int) -> None:
    """Write one sequence's tokens into its blocks."""
    raw, new = cache.view(carrier(cache.dtype)), stored.view(carrier(cache.dtype))
    for column in range(-(-len(new) // block_size)):
        part = new[column * block_size : (column + 1) * block_size]
        raw[int(blocks[column]), : len(part)] = part


def carrier(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width in which copying and filling work everywhere: fp8 lacks most operators."""
    return torch.uint8 if dtype.itemsize == 1 else dtype
