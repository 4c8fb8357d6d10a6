"""Plain torch paged attention, step by step, every step replaceable: what a mutant changes is one of these steps.

Shape legend: T query tokens of one sequence, L its keys, Hq query heads, Hkv KV heads, D head_dim, Dv value head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pabench_kernels.contract import PagedBatch


@dataclass(frozen=True)
class Row:
    """One sequence of a batch: its query positions ``i`` [T, 1] and the key positions ``j`` [L] it looks at."""

    batch: PagedBatch
    seq: int
    length: int
    i: Tensor
    j: Tensor


def _keep(x: Tensor, row: Row) -> Tensor:
    return x


@dataclass(frozen=True)
class Steps:
    """The replaceable steps, in the order of the computation; each gets its input and the row, and returns the same."""

    tokens: Callable[[Tensor, Row], Tensor] = _keep  # int64 [L]: whose slot is read for each key position
    blocks: Callable[[Tensor, Row], Tensor] = _keep  # int64 [L]: physical block ids
    key: Callable[[Tensor, Row], Tensor] = _keep  # fp32 [L, Hkv, D], dequantised
    value: Callable[[Tensor, Row], Tensor] = _keep  # fp32 [L, Hkv, Dv], dequantised
    scaled: Callable[[Tensor, Row], Tensor] = _keep  # fp32 [Hq, T, L]: q·k × scale
    scores: Callable[[Tensor, Row], Tensor] = _keep  # fp32 [Hq, T, L]: capped, with ALiBi, not yet masked
    mask: Callable[[Tensor, Row], Tensor] = _keep  # bool [T, L]
    probs: Callable[[Tensor, Row], Tensor] = _keep  # fp32 [Hq, T, L]
    lse: Callable[[Tensor, Row], Tensor] = _keep  # fp32 [T, Hq]


HONEST = Steps()


def attention(batch: PagedBatch, steps: Steps = HONEST) -> tuple[Tensor, Tensor]:
    """(out [num_tokens, Hq, Dv] in the query's dtype, lse fp32 [num_tokens, Hq]) over the whole contract.

    Arithmetic is fp32; only the output is rounded. It looks at one sequence at a time and reads no block that lies
    wholly behind the window.
    """
    out = batch.query.new_zeros(batch.num_tokens, batch.num_q_heads, batch.head_dim_v, dtype=torch.float32)
    lse = torch.full((batch.num_tokens, batch.num_q_heads), -torch.inf, device=out.device)
    starts = batch.query_start_loc.tolist()
    for seq, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if length > 0 and rows.stop > rows.start:
            out[rows], lse[rows] = _one(batch, seq, length, rows, steps)
    return out.to(batch.query.dtype), lse


def _one(batch: PagedBatch, seq: int, length: int, rows: slice, steps: Steps) -> tuple[Tensor, Tensor]:
    device = batch.query.device
    query = batch.query[rows].float()
    begin = length - len(query)
    first = 0 if batch.sliding_window is None else max(0, begin - batch.sliding_window + 1)
    row = Row(
        batch,
        seq,
        length,
        torch.arange(begin, length, device=device)[:, None],
        torch.arange(first, length, device=device),
    )
    read = steps.tokens(row.j, row)
    blocks = steps.blocks(batch.block_table[seq, read // batch.block_size].long(), row)
    offsets = read % batch.block_size
    key = steps.key(_dequantised(batch.key_cache, blocks, offsets, batch.k_scale), row)
    value = steps.value(_dequantised(batch.value_cache, blocks, offsets, batch.v_scale), row)
    kv_heads = torch.arange(batch.num_q_heads, device=device) // batch.group_size
    scores = steps.scaled(torch.einsum("thd,lhd->htl", query, key[:, kv_heads]) * batch.scale, row)
    if batch.logits_soft_cap is not None:
        scores = batch.logits_soft_cap * torch.tanh(scores / batch.logits_soft_cap)
    if batch.alibi_slopes is not None:
        scores = scores + batch.alibi_slopes[:, None, None] * (row.j - row.i)
    scores = steps.scores(scores, row)
    mask = row.j <= row.i if batch.causal else torch.ones(len(query), len(row.j), dtype=torch.bool, device=device)
    if batch.sliding_window is not None:
        mask = mask & (row.j > row.i - batch.sliding_window)
    scores = scores.masked_fill(~steps.mask(mask, row), -torch.inf)
    if batch.sinks is not None:
        scores = torch.cat([scores, batch.sinks[:, None, None].expand(-1, len(query), 1)], -1)
    probs = steps.probs(scores.softmax(-1)[..., : len(row.j)], row)
    lse = steps.lse(scores.logsumexp(-1).transpose(0, 1), row)
    return torch.einsum("htl,lhd->thd", probs, value[:, kv_heads]), lse


def _dequantised(cache: Tensor, blocks: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # fp8 cannot be indexed everywhere
    found = bits[blocks, offsets].view(cache.dtype).float()
    if scale is None:
        return found
    if scale.ndim == 3:  # per token and head
        return found * scale[blocks, offsets][..., None]
    return found * (scale[:, None] if scale.ndim == 1 else scale)
