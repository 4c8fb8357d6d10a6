"""Structured contents in a live pool: numbers one-hot in V, marks in K, and the shares of the weight that come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pabench.reference.oracle import attention_oracle
from pabench_kernels.cache_write import per_head
from pabench_kernels.contract import PagedBatch


@dataclass(frozen=True)
class Content:
    """What each token of one sequence holds."""

    code: Tensor  # int64 [L, Hkv]: the number that V holds one-hot; −1 for none
    marks: Tensor | None  # int64 [L]: 1 where the key scores high, else 0; None: nowhere
    codes: int  # numbers are 0 … codes − 1


def stored_raw(cache: Tensor) -> Tensor:
    """A view that can be indexed and written in every cache dtype."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def used_blocks(batch: PagedBatch) -> Tensor:
    """Physical ids in the block table, int64, each once."""
    ids: Tensor = torch.unique(batch.block_table[batch.block_table >= 0])
    return ids.long()


def shares(
    batch: PagedBatch, call: Callable[[PagedBatch], Tensor], seq: int, content: Content
) -> tuple[Tensor, Tensor]:
    """(found, expected) share of the softmax weight per number, fp64 [T, Hq, codes], for the rows of sequence ``seq``.

    As many numbers a pass as V has channels. All other sequences hold zeros, so that what is read of them is weight
    that no number gets. The pool is left overwritten.
    """
    starts, dim, device = batch.query_start_loc.tolist(), batch.head_dim_v, batch.query.device
    rows, length = slice(starts[seq], starts[seq + 1]), content.code.shape[0]
    key = torch.zeros(length, batch.num_kv_heads, batch.head_dim, device=device)
    if content.marks is not None:
        key[..., 0] = content.marks[:, None].float()
    token, head = torch.meshgrid(
        torch.arange(length, device=device), torch.arange(batch.num_kv_heads, device=device), indexing="ij"
    )
    found, expected = [], []
    for begin in range(0, content.codes, dim):
        value = torch.zeros(length, batch.num_kv_heads, dim, device=device)
        inside = (content.code >= begin) & (content.code < begin + dim)
        value[token[inside], head[inside], content.code[inside] - begin] = 1.0
        k, v = _store(batch, seq, key, value)
        unit = _unit(batch)
        found.append(call(batch)[rows].double() / unit)
        truth = attention_oracle(
            batch.query[rows],
            k,
            v,
            query_positions=torch.arange(length - (rows.stop - rows.start), length, device=device),
            scale=batch.scale,
            causal=batch.causal,
            window=batch.sliding_window,
            alibi_slopes=batch.alibi_slopes,
            soft_cap=batch.logits_soft_cap,
            sinks=batch.sinks,
        )
        expected.append(truth.out / unit)
    return torch.cat(found, -1)[..., : content.codes], torch.cat(expected, -1)[..., : content.codes]


def _store(batch: PagedBatch, seq: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Write raw 0s and 1s into the blocks of ``seq``, zeros into all others. Returns K and V as they are read."""
    used = used_blocks(batch)
    position = torch.arange(len(key), device=key.device)
    blocks = batch.block_table[seq, position // batch.block_size].long()
    there = blocks >= 0  # blocks behind the window may be freed
    stored = []
    for cache, x, scale in ((batch.key_cache, key, batch.k_scale), (batch.value_cache, value, batch.v_scale)):
        raw = stored_raw(cache)
        raw[used] = 0
        raw[blocks[there], position[there] % batch.block_size] = stored_raw(x.to(cache.dtype))[there]
        if scale is None:
            stored.append(x)
        elif scale.ndim == 3:
            stored.append(x * scale[blocks, position % batch.block_size][..., None])
        else:
            stored.append(x * per_head(scale))
    return stored[0], stored[1]


def _unit(batch: PagedBatch) -> Tensor:
    """What a stored 1 in V reads as, fp64 [Hq, 1]; 1 where every token has a scale of its own."""
    scale = batch.v_scale
    if scale is None or scale.ndim == 3:
        return torch.ones(batch.num_q_heads, 1, dtype=torch.float64, device=batch.query.device)
    return scale.double().expand(batch.num_kv_heads).repeat_interleave(batch.group_size)[:, None]
