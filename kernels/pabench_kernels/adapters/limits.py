"""What a library documents that its attention can do; everything else is a reason why a batch is unsupported."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from pabench_kernels.availability import why_not
from pabench_kernels.contract import PagedBatch
from pabench_kernels.registry import kernel_specs

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Limits:
    """Features are off unless named. ``kernel`` is the registered name, ``library`` how messages call it."""

    kernel: str
    library: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    head_dims: Collection[int] = ()  # any where empty
    value_head_dim: bool = False  # may differ from the head_dim
    block_multiple: int = 1
    block_sizes: Collection[int] = ()
    alibi: bool = False
    soft_cap: bool = False
    sinks: bool = False
    window: bool = False
    bidirectional: bool = False
    bidirectional_window: bool = False
    scales: tuple[str, ...] = ()  # "tensor", "head"
    cache_dtypes: tuple[torch.dtype, ...] = ()  # besides the query's own
    device: str = ""  # "cpu" or "cuda", which ROCm's is called too; any where empty

    def missing(self) -> list[str]:
        """Why the library cannot run on this machine."""
        return why_not(kernel_specs()[self.kernel])

    def reasons(self, batch: PagedBatch) -> list[str]:
        """Why this batch is outside what the library documents; empty if it is inside."""
        found = [*self.missing(), *self._features(batch), *self._scales(batch)]
        dtype, cache = batch.query.dtype, batch.key_cache.dtype
        if dtype not in self.dtypes:
            found.append(f"{self.library} computes in {_names(self.dtypes)}, got {_name(dtype)}")
        if cache not in (dtype, *self.cache_dtypes) or batch.value_cache.dtype != cache:
            found.append(f"{self.library} has no {_name(cache)} cache for {_name(dtype)} queries")
        if self.device and batch.query.device.type != self.device:
            found.append(f"{self.library} runs on {self.device}, got tensors on {batch.query.device}")
        if batch.num_q_heads % batch.num_kv_heads:
            found.append(f"{batch.num_q_heads} query heads are no multiple of {batch.num_kv_heads} KV heads")
        if self.head_dims and batch.head_dim not in self.head_dims:
            dims = ", ".join(map(str, self.head_dims))
            found.append(f"{self.library} has head_dim {dims}, got {batch.head_dim}")
        if not self.value_head_dim and batch.head_dim_v != batch.head_dim:
            found.append(f"{self.library} wants values as wide as keys, got {batch.head_dim_v} and {batch.head_dim}")
        if batch.block_size % self.block_multiple:
            found.append(f"{self.library} has blocks of multiples of {self.block_multiple}, got {batch.block_size}")
        if self.block_sizes and batch.block_size not in self.block_sizes:
            sizes = ", ".join(map(str, self.block_sizes))
            found.append(f"{self.library} has blocks of {sizes} tokens, got {batch.block_size}")
        return found

    def _features(self, batch: PagedBatch) -> list[str]:
        windowed = batch.sliding_window is not None
        asked = {
            "ALiBi": batch.alibi_slopes is not None and not self.alibi,
            "soft cap": batch.logits_soft_cap is not None and not self.soft_cap,
            "sinks": batch.sinks is not None and not self.sinks,
            "sliding window": windowed and not self.window,
            "attention without a causal mask": not batch.causal and not self.bidirectional,
        }
        found = [f"{self.library} has no {name}" for name, refused in asked.items() if refused]
        if windowed and not batch.causal and not self.bidirectional_window:
            found.append(f"without a causal mask {self.library}'s window bounds both sides")
        return found

    def _scales(self, batch: PagedBatch) -> list[str]:
        found = []
        for name, scale in (("k_scale", batch.k_scale), ("v_scale", batch.v_scale)):
            kind = None if scale is None else {0: "tensor", 1: "head"}.get(scale.ndim, "token")
            if kind is not None and kind not in self.scales:
                found.append(f"{self.library} takes no {name} per {kind} for a {_name(batch.key_cache.dtype)} cache")
        return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Collection[torch.dtype]) -> str:
    return ", ".join(map(_name, dtypes))
