"""vLLM's unified Triton attention, on GPUs. It reads the pool as it lies: [NB, BS, Hkv, D], any phase.

Written from ``vllm/v1/attention/ops/triton_unified_attention.py`` and its caller ``backends/triton_attn.py``, release
0.32; never run where this was written, for want of a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import Limits
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "vllm_triton"
LIMITS = Limits(
    NAME,
    "vLLM's Triton attention",
    block_multiple=16,
    alibi=True,
    soft_cap=True,
    sinks=True,
    window=True,
    bidirectional=True,
    device="cuda",
)
MIN_HEAD_DIM = 32
_KNOWN = {"cu_seqlens_q", "seqused_k", "softmax_scale", "window_size", "block_table", "softcap", "k_descale", "sinks"}


@cache
def _function() -> Callable[..., Any] | str:
    """vLLM's launcher, or the reason why there is none."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except Exception as error:  # vLLM's own imports may fail in any way
        return f"vLLM's Triton attention cannot be imported: {type(error).__name__}: {error}"
    if missing := _KNOWN - set(inspect.signature(unified_attention).parameters):
        return f"the installed vLLM's unified_attention takes no {', '.join(sorted(missing))}; release 0.32 does"
    return unified_attention  # type: ignore[no-any-return]


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = LIMITS.reasons(batch)
    if batch.head_dim < MIN_HEAD_DIM:
        reasons.append(f"vLLM's Triton attention has head_dim from {MIN_HEAD_DIM}, got {batch.head_dim}")
    if not reasons and isinstance(function := _function(), str):
        reasons.append(function)
    return reasons


@kernel(NAME, unsupported=_unsupported, wants_finite_pool=True)
def vllm_triton(batch: PagedBatch, *, out: Tensor | None = None) -> Tensor:
    """Paged attention of any batch, phases mixed or not: [T, Hq, D] in the query's dtype."""
    function = _function()
    if isinstance(function, str):
        raise NotImplementedError(function)
    query = batch.query.contiguous()
    result = torch.zeros_like(query) if out is None else out.zero_()
    count_launch(NAME)
    function(
        q=query,
        k=batch.key_cache,
        v=batch.value_cache,
        out=result,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=batch.max_query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=batch.scale,
        causal=batch.causal,
        window_size=(-1, -1) if batch.sliding_window is None else (batch.sliding_window - 1, 0),
        block_table=batch.block_table,
        softcap=batch.logits_soft_cap or 0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        alibi_slopes=batch.alibi_slopes,
        sinks=batch.sinks,
    )
    return result
