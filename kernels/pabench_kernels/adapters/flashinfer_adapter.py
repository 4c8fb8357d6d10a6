"""FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``, on NVIDIA GPUs, for both phases. It reads the pool as it lies.

Written from the documentation of ``flashinfer/prefill.py``: pages are given as CSR lists, the last page by its number
of tokens from 1 on, so sequences of length 0 are left out; ``window_left`` counts the keys before the query. Never run
where this was written, for want of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import HALVES, Limits
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "flashinfer"
LIMITS = Limits(
    NAME,
    "FlashInfer",
    dtypes=HALVES,
    head_dims=(64, 128, 256),
    soft_cap=True,
    window=True,
    bidirectional=True,
    bidirectional_window=True,
    device="cuda",
)
WORKSPACE_BYTES = 128 << 20  # as its documentation advises


@dataclass(frozen=True)
class _State:
    wrapper: Any
    kept: Tensor  # the packed tokens that belong to a sequence which is not empty


@cache
def _library() -> Any:
    try:
        import flashinfer

        return flashinfer.BatchPrefillWithPagedKVCacheWrapper
    except Exception as error:  # a binary for another torch fails in many ways
        return f"FlashInfer cannot be imported: {type(error).__name__}: {error}"


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = LIMITS.reasons(batch)
    if batch.max_seq_len == 0:
        reasons.append("FlashInfer knows no padding rows, and this batch has no others")
    if not reasons and isinstance(library := _library(), str):
        reasons.append(library)
    return reasons


def _plan(batch: PagedBatch) -> _State:
    library = _library()
    if isinstance(library, str):
        raise NotImplementedError(library)
    device, size = batch.query.device, batch.block_size
    lens, counts = batch.seq_lens.long(), batch.query_start_loc.long().diff()
    own = lens > 0
    kept = own.repeat_interleave(counts).nonzero().flatten()
    pages = -(-lens[own] // size)
    listed = torch.arange(batch.block_table.shape[1], device=device) < pages[:, None]
    wrapper = library(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")
    wrapper.plan(
        _starts(counts[own]),
        _starts(pages),
        batch.block_table[own][listed].clamp(min=0),
        ((lens[own] - 1) % size + 1).int(),
        batch.num_q_heads,
        batch.num_kv_heads,
        batch.head_dim,
        size,
        causal=batch.causal,
        sm_scale=batch.scale,
        window_left=-1 if batch.sliding_window is None else batch.sliding_window - 1,
        logits_soft_cap=batch.logits_soft_cap,
        q_data_type=batch.query.dtype,
        kv_data_type=batch.key_cache.dtype,
    )
    return _State(wrapper, kept)


def _starts(counts: Tensor) -> Tensor:
    """int32 [n + 1]: 0 and the running sums."""
    ends = counts.cumsum(0).int()
    return torch.cat([torch.zeros_like(ends[:1]), ends])


@kernel(NAME, unsupported=_unsupported, plan=_plan)
def flashinfer(batch: PagedBatch, *, state: _State) -> Tensor:
    """Paged attention of any batch, phases mixed or not: [T, Hq, D] in the query's dtype; empty ones are 0."""
    out = torch.zeros_like(batch.query, memory_format=torch.contiguous_format)
    count_launch(NAME)
    out[state.kept] = state.wrapper.run(batch.query[state.kept], (batch.key_cache, batch.value_cache))
    return out
