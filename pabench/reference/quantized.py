"""The dense path with a quantised cache: it quantises and dequantises its own K and V, never the candidate's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pabench.engine.engine import cache_argument
from pabench.engine.kv_cache import KVScales
from pabench.models.load import LoadedModel
from pabench_kernels.cache_write import dequantize, quantize


def fake_quantize(x: Tensor, kv_dtype: torch.dtype, scale: Tensor) -> Tensor:
    """What a cache of ``kv_dtype`` gives back for ``x`` [...]: quantised, dequantised, in x's dtype."""
    return dequantize(quantize(x, kv_dtype, scale), scale, x.dtype)


class QuantizedDenseCache(DynamicCache):
    """transformers' contiguous cache, each new K and V [1, Hkv, T, D] rounded to ``kv_dtype`` with fixed scales."""

    def __init__(self, config: Any, kv_dtype: torch.dtype, scales: KVScales) -> None:
        super().__init__(config=config)
        self._kv_dtype = kv_dtype
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key = fake_quantize(key_states, self._kv_dtype, self._scales.k[layer_idx])
        value = fake_quantize(value_states, self._kv_dtype, self._scales.v[layer_idx])
        keys, values = super().update(key, value, layer_idx, *args, **kwargs)
        return keys, values


class _AmaxCache(DynamicCache):
    """Remembers the largest magnitude of K and V in each layer."""

    def __init__(self, config: Any, amax: dict[tuple[int, str], float]) -> None:
        super().__init__(config=config)
        self._amax = amax

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for name, tensor in (("k", key_states), ("v", value_states)):
            largest = float(tensor.abs().max())
            self._amax[layer_idx, name] = max(largest, self._amax.get((layer_idx, name), 0.0))
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values


@torch.inference_mode()
def calibrate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], kv_dtype: torch.dtype) -> KVScales:
    """Per-tensor scales of each layer: the prompts' largest |K| and |V| on the dense path, over the dtype's maximum."""
    amax: dict[tuple[int, str], float] = {}
    model: PreTrainedModel = loaded.model
    for prompt in prompts:
        cache = _AmaxCache(model.config.get_text_config(), amax)
        ids = torch.tensor([list(prompt)], device=model.device)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    largest = 127.0 if kv_dtype == torch.int8 else torch.finfo(kv_dtype).max

    def scales(name: str) -> tuple[Tensor, ...]:
        return tuple(
            torch.tensor(max(amax[layer, name], 1e-6) / largest, dtype=torch.float32, device=model.device)
            for layer in range(loaded.geometry.num_layers)
        )

    return KVScales(scales("k"), scales("v"))
