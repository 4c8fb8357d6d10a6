"""The hook into transformers: attention calls go to a paged kernel, K/V writes into the block pool.

Everything a call needs comes from the forward pass in progress (a context variable), never from state frozen earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from pabench.engine.kv_cache import PagedKVCache
from pabench.engine.step import StepMetadata
from pabench.errors import CannotJudge
from pabench_kernels.contract import PagedBatch

# transformers parses the names of attention implementations: no "sdpa", "flash", "flex_attention", "/" or "paged|"
HOOK_NAME = "pabench_blocks"

Attend = Callable[[PagedBatch, int], Tensor]


class Observer(Protocol):
    """Sees every attention call: new key [T, Hkv, D] and value [T, Hkv, Dv] as the model made them, and the output."""

    def __call__(
        self, *, layer: int, step: StepMetadata, batch: PagedBatch, key: Tensor, value: Tensor, out: Tensor
    ) -> None: ...


@dataclass
class _Forward:
    step: StepMetadata
    pool: PagedKVCache
    attend: Attend
    observers: Sequence[Observer]
    called: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


_forward: ContextVar[_Forward | None] = ContextVar("pabench_forward", default=None)


def _current() -> _Forward:
    if (forward := _forward.get()) is None:
        raise RuntimeError("the paged attention hook was called outside PagedEngine; set the model's attention back")
    return forward


class PoolCache(Cache):
    """What transformers takes for its cache: writes go to the pool, masks are none of its business."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        forward = _current()
        key, value = (t[0].transpose(0, 1) for t in (key_states, value_states))  # [1, Hkv, T, D] -> [T, Hkv, D]
        forward.pool.write(layer_idx, key, value, forward.step.slot_mapping)
        forward.written.append(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        raise RuntimeError("a dense mask was asked for: this model does not take the attention hook")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, Hq, T, D], the new key and value [1, Hkv, T, D] → [1, T, Hq, Dv]."""
    forward = _current()
    step, pool = forward.step, forward.pool
    if attention_mask is not None:
        raise RuntimeError("a dense mask reached the paged attention hook")
    layer = module.layer_idx
    assert isinstance(layer, int)
    forward.called.append(layer)
    k_scale, v_scale = pool.scale(layer)
    batch = PagedBatch(
        query=query[0].transpose(0, 1).contiguous(),
        key_cache=pool.keys[layer],
        value_cache=pool.values[layer],
        block_table=step.block_table,
        seq_lens=step.seq_lens,
        query_start_loc=step.query_start_loc,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        logits_soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    out = forward.attend(batch, layer)
    for observer in forward.observers:
        observer(
            layer=layer, step=step, batch=batch, key=key[0].transpose(0, 1), value=value[0].transpose(0, 1), out=out
        )
    return out.unsqueeze(0), None


AttentionInterface.register(HOOK_NAME, _attention)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use attention implementation ``name`` inside the block. Raises ``CannotJudge`` if the model ignores it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        if model.config.get_text_config()._attn_implementation != name:
            raise CannotJudge(
                f"{type(model).__name__} ignores attention implementation '{name}'; it cannot be run paged by this hook"
            )
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def paged_forward(
    model: PreTrainedModel,
    step: StepMetadata,
    pool: PagedKVCache,
    attend: Attend,
    *,
    num_layers: int,
    cache_argument: str,
    observers: Sequence[Observer] = (),
) -> Tensor:
    """Logits [len(step.logits_index), vocab] of one packed step.

    Raises ``RuntimeError`` unless every layer wrote its K/V once and called the attention once.
    """
    forward = _Forward(step, pool, attend, observers)
    token = _forward.set(forward)
    try:
        logits = model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=True,
            logits_to_keep=step.logits_index,
            **{cache_argument: PoolCache()},
        ).logits
    finally:
        _forward.reset(token)
    expected = list(range(num_layers))
    if sorted(forward.called) != expected or sorted(forward.written) != expected:
        raise RuntimeError(
            f"{type(model).__name__} called paged attention in layers {forward.called} and wrote K/V in layers "
            f"{forward.written}, expected each of {num_layers} layers once"
        )
    result: Tensor = logits[0]
    return result
