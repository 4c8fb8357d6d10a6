"""vLLM's ROCm decode operator. It reads keys as [NB, Hkv, D/x, BS, x], x 16 bytes of elements, values [NB, Hkv, D, BS].

Written from ``paged_attention_rocm`` in ``vllm/_custom_ops.py``, its caller ``chunked_prefill_paged_decode.py`` and its
limits on CDNA in ``platforms/rocm.py``, release 0.32; never run where this was written, for want of an AMD GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import HALVES, Limits
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "vllm_rocm"
LIMITS = Limits(
    NAME,
    "vLLM's ROCm operator",
    dtypes=HALVES,
    head_dims=(64, 128),
    block_sizes=(16, 32),
    alibi=True,
    bidirectional=True,  # one query token sees every key either way
    device="cuda",
)
MAX_GROUP, MAX_LENGTH = 16, 128 * 1024
PARTITION = 256  # tokens whose partial results are kept apart
_PACKED_BYTES = 16


@dataclass(frozen=True)
class _State:
    keys: Tensor  # [NB, Hkv, D/x, BS, x]
    values: Tensor  # [NB, Hkv, D, BS]
    sums: Tensor  # scratch, fp32 [S, Hq, partitions]
    tops: Tensor
    partial: Tensor  # [S, Hq, partitions, D]
    one: Tensor  # the scale of a cache without scales


@cache
def _function() -> Callable[..., Any] | str:
    if torch.version.hip is None:
        return "vLLM's ROCm operator needs a ROCm build of torch"
    try:
        import vllm._rocm_C  # noqa: F401
        from vllm._custom_ops import paged_attention_rocm
    except Exception as error:  # vLLM's own imports may fail in any way
        return f"vLLM's ROCm operator cannot be imported: {type(error).__name__}: {error}"
    return paged_attention_rocm  # type: ignore[no-any-return]


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = LIMITS.reasons(batch)
    if batch.group_size > MAX_GROUP:
        reasons.append(f"vLLM's ROCm operator has at most {MAX_GROUP} query heads per KV head, got {batch.group_size}")
    if batch.max_seq_len > MAX_LENGTH:
        reasons.append(f"vLLM's ROCm operator reads at most {MAX_LENGTH} tokens, got {batch.max_seq_len}")
    if not reasons and isinstance(function := _function(), str):
        reasons.append(function)
    return reasons


def _plan(batch: PagedBatch) -> _State:
    blocks, size, heads, dim = batch.key_cache.shape
    x = _PACKED_BYTES // batch.key_cache.element_size()
    partitions = max(1, -(-batch.max_seq_len // PARTITION))
    sums = torch.empty(batch.num_seqs, batch.num_q_heads, partitions, dtype=torch.float32, device=batch.query.device)
    return _State(
        batch.key_cache.reshape(blocks, size, heads, dim // x, x).permute(0, 2, 3, 1, 4).contiguous(),
        batch.value_cache.permute(0, 2, 3, 1).contiguous(),
        sums,
        torch.empty_like(sums),
        torch.empty(*sums.shape, dim, dtype=batch.query.dtype, device=batch.query.device),
        torch.ones((), dtype=torch.float32, device=batch.query.device),
    )


@kernel(NAME, phases=("decode",), unsupported=_unsupported, plan=_plan, wants_finite_pool=True)
def vllm_rocm(batch: PagedBatch, *, state: _State, out: Tensor | None = None) -> Tensor:
    """Decode attention: [T, Hq, D] in the query's dtype."""
    function = _function()
    if isinstance(function, str):
        raise NotImplementedError(function)
    result = torch.zeros_like(batch.query, memory_format=torch.contiguous_format) if out is None else out.zero_()
    count_launch(NAME)
    function(
        result,
        state.sums,
        state.tops,
        state.partial,
        batch.query.contiguous(),
        state.keys,
        state.values,
        batch.num_kv_heads,
        batch.scale,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        batch.block_size,
        batch.max_seq_len,
        batch.alibi_slopes,
        "auto",
        state.one,
        state.one,
    )
    return result
