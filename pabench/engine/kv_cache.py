"""The block pool: one key and one value tensor a layer, in the cache's dtype, with the scales to read them by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pabench.models.geometry import AttentionGeometry
from pabench_kernels import reshape_and_cache


@dataclass(frozen=True)
class KVScales:
    """Per-tensor dequantisation factors of each layer, fp32 scalars: ``value = stored × scale``."""

    k: tuple[Tensor, ...]  # num_layers × []
    v: tuple[Tensor, ...]


class PagedKVCache:
    """Pools [num_blocks, block_size, num_kv_heads, head_dim] for every layer.

    Filled with NaN where the dtype has one: a slot that was never written must not be read. ``finite``: with zeros, as
    engines do whose kernels multiply what they must not read by a weight of 0.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        scales: KVScales | None = None,
        finite: bool = False,
    ) -> None:
        self.dtype = dtype
        self.finite = finite
        self.scales = scales
        shape = (num_blocks, block_size, geometry.num_kv_heads)
        self.keys = [self._pool((*shape, geometry.head_dim), device) for _ in range(geometry.num_layers)]
        self.values = [self._pool((*shape, geometry.head_dim_v), device) for _ in range(geometry.num_layers)]

    def _pool(self, shape: tuple[int, ...], device: str | torch.device) -> Tensor:
        pool = torch.empty(shape, dtype=self.dtype, device=device)
        if self.finite:
            pool.zero_()
        elif self.dtype.itemsize == 1:  # fill_(nan) is not defined for every 8-bit dtype: 0x7f is NaN in both fp8 kinds
            pool.view(torch.uint8).fill_(0x7F)
        else:
            pool.fill_(float("nan"))
        return pool

    def scale(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """(k_scale, v_scale) of a layer; None where the cache is not scaled."""
        return (None, None) if self.scales is None else (self.scales.k[layer], self.scales.v[layer])

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store new tokens: key [T, Hkv, D], value [T, Hkv, Dv], slot_mapping int64 [T]."""
        k_scale, v_scale = self.scale(layer)
        reshape_and_cache(key, value, self.keys[layer], self.values[layer], slot_mapping, k_scale, v_scale)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers: the copy of copy-on-write."""
        if not pairs:
            return
        source, target = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
        for pool in (*self.keys, *self.values):
            bits = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
            bits[target] = bits[source]
