"""FlashAttention 2 with a block table, on GPUs: ``flash_attn_varlen_func``. It reads the pool as it lies.

Written from the documentation of ``flash_attn/flash_attn_interface.py``: the causal mask is aligned to the bottom
right, the ALiBi bias is −slope · |distance|, pages are multiples of 256 tokens. Never run where this was written, for
want of a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import HALVES, Limits
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "flash_attn"
LIMITS = Limits(
    NAME,
    "FlashAttention",
    dtypes=HALVES,
    head_dims=range(8, 257, 8),
    block_multiple=256,
    alibi=True,
    soft_cap=True,
    window=True,
    bidirectional=True,
    bidirectional_window=True,
    device="cuda",
)


@dataclass(frozen=True)
class _State:
    key_start_loc: Tensor  # int32 [S + 1]
    table: Tensor  # unused entries name block 0


@cache
def _function() -> Callable[..., Any] | str:
    try:
        from flash_attn import flash_attn_varlen_func
    except Exception as error:  # a binary for another torch fails in many ways
        return f"FlashAttention cannot be imported: {type(error).__name__}: {error}"
    if missing := {"block_table", "softcap"} - set(inspect.signature(flash_attn_varlen_func).parameters):
        return f"the installed FlashAttention takes no {', '.join(sorted(missing))}; release 2.6 does"
    return flash_attn_varlen_func  # type: ignore[no-any-return]


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = LIMITS.reasons(batch)
    if batch.alibi_slopes is not None and not batch.causal:
        reasons.append("without a causal mask FlashAttention's ALiBi counts distances to both sides")
    if not reasons and isinstance(function := _function(), str):
        reasons.append(function)
    return reasons


def _plan(batch: PagedBatch) -> _State:
    ends = batch.seq_lens.cumsum(0, dtype=torch.int32)
    return _State(torch.cat([torch.zeros_like(ends[:1]), ends]), batch.block_table.clamp(min=0))


@kernel(NAME, unsupported=_unsupported, plan=_plan)
def flash_attn(batch: PagedBatch, *, state: _State) -> Tensor:
    """Paged attention of any batch, phases mixed or not: [T, Hq, D] in the query's dtype."""
    function = _function()
    if isinstance(function, str):
        raise NotImplementedError(function)
    right = 0 if batch.causal else -1
    count_launch(NAME)
    out: Tensor = function(
        batch.query.contiguous(),
        batch.key_cache,
        batch.value_cache,
        cu_seqlens_q=batch.query_start_loc,
        cu_seqlens_k=state.key_start_loc,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=batch.scale,
        causal=batch.causal,
        window_size=(-1, -1) if batch.sliding_window is None else (batch.sliding_window - 1, right),
        softcap=batch.logits_soft_cap or 0.0,
        alibi_slopes=batch.alibi_slopes,
        block_table=state.table,
    )
    return out
