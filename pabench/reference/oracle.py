"""Attention in fp64 over plain contiguous K and V: the truth for one sequence. Shares no code with any kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OracleOutput:
    """``out`` fp64 [T, Hq, Dv]; ``size`` fp64 [T, Hq]: what an error is measured against, max(‖out‖, √Σ p²‖v‖²);
    ``lse`` fp64 [T, Hq]: log of the softmax denominator, sink included."""

    out: Tensor
    size: Tensor
    lse: Tensor


def visible(query_positions: Tensor, num_keys: int, *, causal: bool, window: int | None) -> Tensor:
    """Mask [T, L]: key j is visible to query at i if j ≤ i (causal) and j > i − window."""
    i = query_positions[:, None]
    j = torch.arange(num_keys, device=query_positions.device)[None, :]
    mask = torch.ones(i.shape[0], num_keys, dtype=torch.bool, device=query_positions.device)
    if causal:
        mask &= j <= i
    if window is not None:
        mask &= j > i - window
    return mask


def attention_oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_positions: Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> OracleOutput:
    """query [T, Hq, D], key [L, Hkv, D], value [L, Hkv, Dv] of any dtype; query_positions int64 [T].

    Order of operations as in the kernel contract: scale, soft cap, ALiBi, mask, sink, softmax (Vaswani et al. 2017).
    """
    group = query.shape[1] // key.shape[1]
    q = query.double().transpose(0, 1)  # [Hq, T, D]
    k = key.double().repeat_interleave(group, dim=1).permute(1, 2, 0)  # [Hq, D, L]
    v = value.double().repeat_interleave(group, dim=1).transpose(0, 1)  # [Hq, L, Dv]
    scores = (q @ k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        distance = torch.arange(key.shape[0], device=query.device)[None, :] - query_positions[:, None]
        scores = scores + alibi_slopes.double()[:, None, None] * distance
    mask = visible(query_positions, key.shape[0], causal=causal, window=window)
    scores = scores.masked_fill(~mask, float("-inf"))
    num_keys = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    probs = scores.softmax(-1)[..., :num_keys]
    lse = scores.logsumexp(-1).transpose(0, 1)
    out = (probs @ v).transpose(0, 1)
    spread = (probs.square() @ v.square().sum(-1, keepdim=True))[..., 0].sqrt().transpose(0, 1)
    return OracleOutput(out, torch.maximum(out.norm(dim=-1), spread), lse)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_positions: Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Ordinary dense attention in the query's dtype, [T, Hq, Dv]: the error of this one is the honest error."""
    group = query.shape[1] // key.shape[1]
    q = query.transpose(0, 1)
    k = key.to(query.dtype).repeat_interleave(group, dim=1).transpose(0, 1)
    v = value.to(query.dtype).repeat_interleave(group, dim=1).transpose(0, 1)
    mask = visible(query_positions, key.shape[0], causal=causal, window=window)
    if alibi_slopes is None and soft_cap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=None if bool(mask.all()) else mask[None, None], scale=scale
        )
        return out[0].transpose(0, 1)
    scores = (q @ k.transpose(1, 2)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.float()
    if alibi_slopes is not None:
        distance = torch.arange(key.shape[0], device=query.device)[None, :] - query_positions[:, None]
        scores = scores + alibi_slopes[:, None, None] * distance
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        probs = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    return (probs.to(query.dtype) @ v).transpose(0, 1)
