"""The dense path: the same model with ordinary contiguous K/V attention, stepped as a user would step it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pabench.engine.attention_hook import attention_implementation
from pabench.engine.engine import cache_argument
from pabench.engine.kv_cache import KVScales
from pabench.models.load import LoadedModel
from pabench.reference.quantized import QuantizedDenseCache

Row = tuple[int, int, Tensor]  # sequence, position of the token computed, logits [vocab]


@dataclass(frozen=True)
class DensePath:
    """Dense attention of one model; ``attention`` is "sdpa" or "eager"; quantised if ``scales`` are given."""

    loaded: LoadedModel
    attention: str = "sdpa"
    kv_dtype: torch.dtype | None = None
    scales: KVScales | None = None

    def _cache(self) -> DynamicCache:
        config = self.loaded.model.config.get_text_config()
        if self.scales is None or self.kv_dtype is None:
            return DynamicCache(config=config)
        return QuantizedDenseCache(config, self.kv_dtype, self.scales)

    def _forward(self, cache: DynamicCache, ids: Tensor, keep: Tensor | int, **kwargs: Any) -> Tensor:
        model = self.loaded.model
        kwargs[cache_argument(model)] = cache
        logits: Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=keep, **kwargs).logits
        return logits

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], num_tokens: int, on_row: Callable[[int, Tensor], None], keep: Sequence[int]
    ) -> list[int]:
        """Greedy continuation of exactly ``num_tokens`` (end-of-text is not a stop), batch 1.

        ``on_row(position, logits)`` is called for the prompt positions ``keep`` (the last one included) and every
        decode position.
        """
        tokens: list[int] = []
        for position, row in self.forced(prompt, lambda i: tokens[i], num_tokens, keep):
            on_row(position, row)
            if position >= len(prompt) - 1:
                tokens.append(int(row.argmax()))
        return tokens

    @torch.inference_mode()
    def forced(
        self, prompt: Sequence[int], next_token: Callable[[int], int], num_tokens: int, keep: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Prefill, then step by step through ``next_token(0..num_tokens−2)``, batch 1; yields (position, logits)."""
        device = self.loaded.model.device
        cache = self._cache()
        with attention_implementation(self.loaded.model, self.attention):
            index = torch.tensor(list(keep), device=device)
            logits = self._forward(cache, torch.tensor([list(prompt)], device=device), index)[0]
            yield from zip(keep, logits, strict=True)
            for i in range(num_tokens - 1):
                ids = torch.tensor([[next_token(i)]], device=device)
                yield len(prompt) + i, self._forward(cache, ids, 1)[0, -1]

    @torch.inference_mode()
    def forced_batch(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], keep: Sequence[Sequence[int]]
    ) -> Iterator[Row]:
        """The same in one left-padded batch: another batch composition, so another valid order of the same sums."""
        model = self.loaded.model
        width = max(len(p) for p in prompts)
        pads = [width - len(p) for p in prompts]
        ids = torch.tensor([[0] * pad + list(p) for pad, p in zip(pads, prompts, strict=True)], device=model.device)
        mask = torch.tensor(
            [[0] * pad + [1] * len(p) for pad, p in zip(pads, prompts, strict=True)], device=model.device
        )
        cache = self._cache()
        columns = sorted({pad + k for pad, kept in zip(pads, keep, strict=True) for k in kept})
        column_of = {c: i for i, c in enumerate(columns)}
        with attention_implementation(model, self.attention):
            logits = self._forward(
                cache,
                ids,
                torch.tensor(columns, device=model.device),
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            )
            for s, kept in enumerate(keep):
                for k in kept:
                    yield s, k, logits[s, column_of[pads[s] + k]]
            for i in range(len(tokens[0]) - 1):
                ids = torch.tensor([[t[i]] for t in tokens], device=model.device)
                mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
                positions = torch.tensor([[len(p) + i] for p in prompts], device=model.device)
                logits = self._forward(cache, ids, 1, attention_mask=mask, position_ids=positions)
                for s, prompt in enumerate(prompts):
                    yield s, len(prompt) + i, logits[s, -1]

    @torch.inference_mode()
    def whole(self, tokens: Sequence[int], keep: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """All of ``tokens`` in one prefill; yields (position, logits) for the positions ``keep``."""
        device = self.loaded.model.device
        with attention_implementation(self.loaded.model, self.attention):
            index = torch.tensor(list(keep), device=device)
            logits = self._forward(self._cache(), torch.tensor([list(tokens)], device=device), index)[0]
        yield from zip(keep, logits, strict=True)
