"""Attention row by row in fp64, straight from the contract's text, and the rule that judges a kernel by it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pabench_kernels.contract import PagedBatch

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SLACK = {torch.float32: 32, torch.float16: 1, torch.bfloat16: 1}  # c: units of roundoff beside the dense error


@dataclass(frozen=True)
class Truth:
    """``out`` fp64 [T, Hq, Dv], ``lse`` fp64 [T, Hq], ``size`` fp64 [T, Hq]: max(‖out‖, √Σ p²‖v‖²)."""

    out: np.ndarray
    lse: np.ndarray
    size: np.ndarray


def own_tokens(cache: Tensor, scale: Tensor | None, batch: PagedBatch, seq: int, first: int) -> Tensor:
    """Tokens first…seq_len−1 of a sequence, dequantised: fp64 [L − first, Hkv, dim]."""
    tokens = []
    for pos in range(first, int(batch.seq_lens[seq])):
        block = int(batch.block_table[seq, pos // batch.block_size])
        token = cache[block, pos % batch.block_size].float().double()
        if scale is not None:
            factor = scale[block, pos % batch.block_size] if scale.ndim == 3 else scale
            token = token * factor.double().reshape(-1, 1)
        tokens.append(token)
    return torch.stack(tokens)


def first_seen(batch: PagedBatch, first_query: int) -> int:
    return 0 if batch.sliding_window is None else max(0, first_query - batch.sliding_window + 1)


def oracle(batch: PagedBatch) -> Truth:
    shape = (batch.num_tokens, batch.num_q_heads)
    out, lse, size = np.zeros((*shape, batch.head_dim_v)), np.full(shape, -math.inf), np.zeros(shape)
    starts = batch.query_start_loc.tolist()
    for seq in range(batch.num_seqs):
        length, queries = int(batch.seq_lens[seq]), starts[seq + 1] - starts[seq]
        if length == 0 or queries == 0:
            continue
        first_query = length - queries
        first = first_seen(batch, first_query)
        keys = own_tokens(batch.key_cache, batch.k_scale, batch, seq, first).numpy()
        values = own_tokens(batch.value_cache, batch.v_scale, batch, seq, first).numpy()
        for n in range(queries):
            query_pos = first_query + n
            last = query_pos if batch.causal else length - 1
            low = first_seen(batch, query_pos)
            seen = slice(low - first, last + 1 - first)
            distance = np.arange(low, last + 1) - query_pos
            for head in range(batch.num_q_heads):
                kv_head = head // batch.group_size
                query = batch.query[starts[seq] + n, head].double().numpy()
                logits = keys[seen, kv_head] @ query * batch.scale
                if batch.logits_soft_cap is not None:
                    logits = batch.logits_soft_cap * np.tanh(logits / batch.logits_soft_cap)
                if batch.alibi_slopes is not None:
                    logits = logits + float(batch.alibi_slopes[head]) * distance
                sink = -math.inf if batch.sinks is None else float(batch.sinks[head])
                top = max(logits.max(), sink)
                total = np.exp(logits - top).sum() + np.exp(sink - top)
                p = np.exp(logits - top) / total
                v = values[seen, kv_head]
                row = starts[seq] + n, head
                out[row], lse[row] = p @ v, top + np.log(total)
                size[row] = max(np.linalg.norm(out[row]), np.sqrt((p**2 * (v**2).sum(-1)).sum()))
    return Truth(out, lse, size)


def dense(batch: PagedBatch) -> np.ndarray:
    """What honest attention in the query's dtype gives on contiguous K and V: [T, Hq, Dv]."""
    dtype = batch.query.dtype
    out = torch.zeros(batch.num_tokens, batch.num_q_heads, batch.head_dim_v, dtype=dtype)
    starts = batch.query_start_loc.tolist()
    for seq in range(batch.num_seqs):
        length, rows = int(batch.seq_lens[seq]), slice(starts[seq], starts[seq + 1])
        first_query = length - (rows.stop - rows.start)
        if length == 0 or rows.start == rows.stop:
            continue
        first = first_seen(batch, first_query)
        key, value = (
            own_tokens(cache, scale, batch, seq, first).to(dtype).repeat_interleave(batch.group_size, 1).transpose(0, 1)
            for cache, scale in ((batch.key_cache, batch.k_scale), (batch.value_cache, batch.v_scale))
        )
        query = batch.query[rows].transpose(0, 1)
        distance = torch.arange(first, length) - torch.arange(first_query, length)[:, None]
        bias = torch.zeros(distance.shape)
        if batch.causal:
            bias = bias.masked_fill(distance > 0, -math.inf)
        if batch.sliding_window is not None:
            bias = bias.masked_fill(distance <= -batch.sliding_window, -math.inf)
        if batch.alibi_slopes is not None:
            bias = bias + batch.alibi_slopes[:, None, None] * distance
        if batch.logits_soft_cap is None and batch.sinks is None:
            bias = bias.expand(1, batch.num_q_heads, *distance.shape)
            found = F.scaled_dot_product_attention(query[None], key[None], value[None], bias, scale=batch.scale)[0]
        else:
            logits = (query @ key.transpose(1, 2) * batch.scale).float()
            if batch.logits_soft_cap is not None:
                logits = batch.logits_soft_cap * torch.tanh(logits / batch.logits_soft_cap)
            logits = logits + bias
            if batch.sinks is not None:
                sinks = batch.sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)
                p = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
            else:
                p = logits.softmax(-1)
            found = p.to(dtype) @ value
        out[rows] = found.transpose(0, 1)
    return out.double().numpy()


def wrong_rows(out: Tensor, batch: PagedBatch, truth: Truth) -> list[tuple[int, int]]:
    """(token, head) rows farther from the oracle than 2 × dense attention of the same dtype (+ c units of roundoff)."""
    assert tuple(out.shape) == truth.out.shape
    assert out.dtype == batch.query.dtype

    def error(found: np.ndarray) -> np.ndarray:
        size = np.where(truth.size == 0, 1.0, truth.size)
        return np.asarray(np.linalg.norm(found - truth.out, axis=-1) / size)

    dtype = batch.query.dtype
    honest = error(dense(batch))
    pooled = np.sqrt(np.mean(honest**2))
    limit = 2 * np.maximum(honest, pooled) + SLACK[dtype] * UNIT[dtype]
    limit[truth.size == 0] = 0.0  # nothing to attend to: exactly zero
    right = error(out.double().numpy()) <= limit  # NaN is never right
    return [(int(t), int(h)) for t, h in np.argwhere(~right)]
