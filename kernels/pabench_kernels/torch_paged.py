"""Paged attention from torch operators: gather a sequence's blocks, then ordinary attention on what was gathered.

Shape legend: T packed query tokens, S sequences, Hq query heads, Hkv KV heads, G = Hq / Hkv, N query tokens and L keys
of one sequence, D head_dim, Dv value head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pabench_kernels.cache_write import FP8_DTYPES, dequantize
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "torch_paged"
MAX_LOGITS = 1 << 24  # fp32 logits held at once on the general path: 64 MiB


@dataclass(frozen=True)
class _Sequence:
    """One sequence's query rows and the keys that any of them may see."""

    query: Tensor  # [Hkv, G, N, D]
    key: Tensor  # [Hkv, L, D]
    value: Tensor  # [Hkv, L, Dv]
    first_query: int  # position of the first query token
    first_key: int  # position of key row 0; what is before it lies behind every window


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = []
    if not batch.query.dtype.is_floating_point or batch.query.dtype in FP8_DTYPES:
        reasons.append(f"query dtype {batch.query.dtype} is not a float that attention is computed in")
    if batch.num_q_heads % batch.num_kv_heads:
        reasons.append(f"{batch.num_q_heads} query heads are no multiple of {batch.num_kv_heads} KV heads")
    return reasons


@kernel(NAME, unsupported=_unsupported, per_token_scales=True)
def torch_paged(batch: PagedBatch, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Paged attention of any batch, phases mixed or not.

    Gives [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]. Without soft cap, sinks, ALiBi and lse it is
    ``scaled_dot_product_attention`` in the query's dtype over the gathered blocks, so that a model's results are those
    of dense SDPA; anything else is computed in fp32. Reads lengths and the block table on the host: on a GPU it waits.
    """
    count_launch(NAME)
    out = batch.query.new_zeros(batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
    lse = batch.query.new_full((batch.num_tokens, batch.num_q_heads), -math.inf, dtype=torch.float32)
    plain = batch.logits_soft_cap is None and batch.sinks is None and batch.alibi_slopes is None and not return_lse
    starts = batch.query_start_loc.tolist()
    for seq, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if length == 0 or rows.start == rows.stop:
            continue
        part = _gather(batch, seq, rows, length)
        if plain:
            out[rows] = _unfold(_sdpa(batch, part))
        else:
            found, part_lse = _fp32(batch, part)
            out[rows] = _unfold(found).to(out.dtype)
            lse[rows] = part_lse.flatten(0, 1).T
    return (out, lse) if return_lse else out


def _gather(batch: PagedBatch, seq: int, rows: slice, length: int) -> _Sequence:
    first_query = length - (rows.stop - rows.start)
    first_key = 0 if batch.sliding_window is None else max(0, first_query - batch.sliding_window + 1)
    block_size = batch.block_size
    first_block = first_key // block_size
    blocks = batch.block_table[seq, first_block : -(-length // block_size)]
    own = slice(first_key - first_block * block_size, length - first_block * block_size)

    def pick(cache: Tensor, scale: Tensor | None) -> Tensor:
        raw = cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache
        chosen = raw.index_select(0, blocks).flatten(0, 1)[own].view(cache.dtype)
        if scale is not None and scale.ndim == 3:
            scale = scale.index_select(0, blocks).flatten(0, 1)[own]
        return dequantize(chosen, scale, batch.query.dtype).transpose(0, 1)

    query = batch.query[rows]
    query = query.view(len(query), batch.num_kv_heads, batch.group_size, -1).permute(1, 2, 0, 3)
    key, value = pick(batch.key_cache, batch.k_scale), pick(batch.value_cache, batch.v_scale)
    return _Sequence(query, key, value, first_query, first_key)


def _sdpa(batch: PagedBatch, part: _Sequence) -> Tensor:
    """[Hkv, G, N, Dv] in the query's dtype."""
    n_query, n_keys = part.query.shape[2], part.key.shape[1]
    mask = None
    if n_query == 1 or (not batch.causal and batch.sliding_window is None):  # every row sees every gathered key
        folded = part.query.flatten(1, 2)
        out = F.scaled_dot_product_attention(folded[None], part.key[None], part.value[None], scale=batch.scale)
        return out[0].view(batch.num_kv_heads, batch.group_size, n_query, -1)
    window = batch.sliding_window
    square = batch.causal and n_query == n_keys and (window is None or window >= n_keys)
    if not square:
        mask = _visible(batch, part, 0, n_query)
    heads = (part.query.shape[0], part.query.shape[1], n_keys, -1)
    return F.scaled_dot_product_attention(
        part.query,
        part.key[:, None].expand(heads),
        part.value[:, None].expand(heads),
        attn_mask=mask,
        is_causal=square,
        scale=batch.scale,
    )


def _fp32(batch: PagedBatch, part: _Sequence) -> tuple[Tensor, Tensor]:
    """([Hkv, G, N, Dv], lse [Hkv, G, N]), every step in fp32."""
    n_query, n_keys = part.query.shape[2], part.key.shape[1]
    step = max(1, MAX_LOGITS // (batch.num_q_heads * n_keys))
    key, value = part.key.float()[:, None], part.value.float()[:, None]
    outs, lses = [], []
    for start in range(0, n_query, step):
        stop = min(start + step, n_query)
        logits = (part.query[:, :, start:stop].float() @ key.transpose(-1, -2)) * batch.scale
        if batch.logits_soft_cap is not None:
            logits = batch.logits_soft_cap * torch.tanh(logits / batch.logits_soft_cap)
        if batch.alibi_slopes is not None:
            slopes = batch.alibi_slopes.view(batch.num_kv_heads, batch.group_size, 1, 1)
            logits = logits + slopes * _distance(part, start, stop, logits.device)
        logits = logits.masked_fill(~_visible(batch, part, start, stop), -math.inf)
        top = logits.amax(-1, keepdim=True)
        if batch.sinks is not None:
            sinks = batch.sinks.float().view(batch.num_kv_heads, batch.group_size, 1, 1)
            top = torch.maximum(top, sinks)
        weights = (logits - top).exp()
        total = weights.sum(-1, keepdim=True)
        if batch.sinks is not None:
            total = total + (sinks - top).exp()
        outs.append(weights @ value / total)  # not exp(logits − lse): rounding a large lse would scale the whole row
        lses.append((top + total.log())[..., 0])
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _distance(part: _Sequence, start: int, stop: int, device: torch.device) -> Tensor:
    """key_pos − query_pos of query rows start…stop−1: int64 [N, L]."""
    key_pos = torch.arange(part.first_key, part.first_key + part.key.shape[1], device=device)
    query_pos = torch.arange(part.first_query + start, part.first_query + stop, device=device)
    return key_pos - query_pos[:, None]


def _visible(batch: PagedBatch, part: _Sequence, start: int, stop: int) -> Tensor:
    """Which keys query rows start…stop−1 may see: bool [N, L]."""
    distance = _distance(part, start, stop, part.query.device)
    visible = distance <= 0 if batch.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if batch.sliding_window is None else visible & (distance > -batch.sliding_window)


def _unfold(out: Tensor) -> Tensor:
    """[Hkv, G, N, Dv] → [N, Hq, Dv]."""
    return out.permute(2, 0, 1, 3).flatten(1, 2)
