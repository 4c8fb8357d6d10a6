"""Mutants in the arithmetic itself: the plain kernel with one step changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pabench.selftest.mutant import Attention, Mutant
from pabench.selftest.plain import Row, Steps, attention
from pabench_kernels.contract import PagedBatch

PARTITION = 64  # keys of a partition of the split kernels


def changed(**steps: Any) -> Any:
    """A maker that ignores the kernel it is given and puts the plain one with these steps in its place."""

    def make(_: Attention) -> Attention:
        def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
            out, lse = attention(batch, Steps(**steps))
            return (out, lse) if return_lse else out

        return faulty

    return make


def _no_past(mask: Tensor, row: Row) -> Tensor:
    return mask & (row.j >= row.i[0]) if len(row.i) > 1 else mask


def _chunk_positions_from_zero(mask: Tensor, row: Row) -> Tensor:
    """Query positions of a continued chunk start at 0, so that it sees the beginning of the past only."""
    if len(row.i) == 1:
        return mask
    i = row.i - row.i[0]
    return row.j <= i


def _cap_twice(scores: Tensor, row: Row) -> Tensor:
    cap = row.batch.logits_soft_cap
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _cap_before_scale(scaled: Tensor, row: Row) -> Tensor:
    """The cap bounds q·k, and the scale comes after it."""
    cap, scale = row.batch.logits_soft_cap, row.batch.scale
    if cap is None:
        return scaled
    bounded = cap * torch.tanh(scaled / scale / cap) * scale
    return bounded  # the right cap that follows leaves so small a number as good as alone


def _alibi_from_block(scores: Tensor, row: Row) -> Tensor:
    """Distances are counted inside the block, not in the sequence."""
    slopes = row.batch.alibi_slopes
    if slopes is None:
        return scores
    wrong = row.j % row.batch.block_size - row.i
    return scores + slopes[:, None, None] * (wrong - (row.j - row.i))


def _partitions(length: int) -> list[slice]:
    return [slice(b, min(b + PARTITION, length)) for b in range(0, length, PARTITION)]


def _merged_without_weights(probs: Tensor, row: Row) -> Tensor:
    """Each partition is normalised by itself and the parts are averaged."""
    parts = _partitions(probs.shape[-1])
    if len(parts) == 1:
        return probs
    merged = torch.zeros_like(probs)
    filled = sum((probs[..., part].sum(-1, keepdim=True) > 0).float() for part in parts)
    for part in parts:
        total = probs[..., part].sum(-1, keepdim=True)
        merged[..., part] = torch.where(total > 0, probs[..., part] / total, 0.0) / filled
    return merged


def _partition_lost(probs: Tensor, row: Row) -> Tensor:
    """The last partition's partial result is dropped, its weight is kept."""
    parts = _partitions(probs.shape[-1])
    if len(parts) > 1:
        probs = probs.clone()
        probs[..., parts[-1]] = 0
    return probs


def _sink_in_every_partition(probs: Tensor, row: Row) -> Tensor:
    """The sink joins the denominator once a partition."""
    parts = len(_partitions(probs.shape[-1]))
    if row.batch.sinks is None or parts == 1:
        return probs
    seen = probs.sum(-1, keepdim=True)
    return probs / (seen + parts * (1 - seen))


def _lost_at(position: int) -> Any:
    def lose(mask: Tensor, row: Row) -> Tensor:
        return mask & (row.j != position) if row.length > position + 1 else mask

    return lose


def _every_17th_lost(mask: Tensor, row: Row) -> Tensor:
    return mask & ((row.j + 1) % 17 != 0)


def _first_lost(mask: Tensor, row: Row) -> Tensor:
    return mask & (row.j > 0) if row.length > 1 else mask


def _doubled_past(position: int) -> Any:
    """The key at ``position`` is read again in place of the one behind it: a tile that starts one too early."""

    def tokens(read: Tensor, row: Row) -> Tensor:
        return torch.where((read == position + 1) & (row.length > position + 1), position, read)

    return tokens


def _only_first_and_last_block(mask: Tensor, row: Row) -> Tensor:
    size = row.batch.block_size
    block = row.j // size
    return mask & ((block == 0) | (block == (row.length - 1) // size))


def _last_head_of_last_sequence(probs: Tensor, row: Row) -> Tensor:
    """One cell of (sequence, head) gives every key the same weight."""
    if row.seq == row.batch.num_seqs - 1:
        probs = probs.clone()
        probs[-1] = (probs[-1] > 0) / (probs[-1] > 0).sum(-1, keepdim=True).clamp(min=1)
    return probs


def _p_through_fp8(probs: Tensor, row: Row) -> Tensor:
    """P is normalised before it is cast to fp8, so that small weights underflow."""
    return probs.to(torch.float8_e4m3fn).float()


def _k_for_v(value: Tensor, row: Row) -> Tensor:
    batch = row.batch
    if batch.head_dim != batch.head_dim_v:
        return value
    read = row.j
    blocks = batch.block_table[row.seq, read // batch.block_size].long()
    bits = batch.key_cache.view(torch.uint8) if batch.key_cache.dtype.itemsize == 1 else batch.key_cache
    return bits[blocks, read % batch.block_size].view(batch.key_cache.dtype).float()


def _key_tail_dropped(key: Tensor, row: Row) -> Tensor:
    """q·k leaves out dims beyond the last whole vector of 32."""
    key = key.clone()
    key[..., key.shape[-1] // 32 * 32 :] = 0
    return key


def _behind_window_read(probs: Tensor, row: Row) -> Tensor:
    """Keys that the window hides get weight zero, yet a block behind it is read: 0 × NaN."""
    batch = row.batch
    first = int(row.j[0])
    if batch.sliding_window is None or first < batch.block_size:
        return probs
    block = int(batch.block_table[row.seq, 0].clamp(min=0))
    return probs + 0.0 * batch.value_cache[block, 0].float().sum()


MUTANTS = (
    Mutant("past_ignored", "chunk_dependence", "a continued chunk sees no past", changed(mask=_no_past), inside=True),
    Mutant(
        "chunk_from_zero",
        "chunk_dependence",
        "a continued chunk takes itself for the beginning",
        changed(mask=_chunk_positions_from_zero),
        inside=True,
    ),
    Mutant("cap_twice", "soft_cap", "the soft cap is applied twice", changed(scores=_cap_twice), inside=True),
    Mutant(
        "cap_before_scale",
        "soft_cap",
        "the soft cap bounds q·k before the scale",
        changed(scaled=_cap_before_scale),
        inside=True,
    ),
    Mutant(
        "alibi_from_block",
        "alibi",
        "ALiBi distances are counted inside the block",
        changed(scores=_alibi_from_block),
        inside=True,
    ),
    Mutant(
        "merged_without_weights",
        "split_merge",
        "partitions are averaged without their weights",
        changed(probs=_merged_without_weights),
        inside=True,
    ),
    Mutant(
        "partition_lost",
        "split_merge",
        "the last partition's part is dropped, its weight kept",
        changed(probs=_partition_lost),
        inside=True,
        also=frozenset({"missing_tokens"}),
    ),
    Mutant(
        "sink_in_every_partition",
        "sink",
        "the sink joins the denominator once a partition",
        changed(probs=_sink_in_every_partition),
        inside=True,
        also=frozenset({"split_merge"}),
    ),
    Mutant(
        "token_512_lost",
        "missing_tokens",
        "the key at position 512 is dropped",
        changed(mask=_lost_at(512)),
        inside=True,
    ),
    Mutant(
        "every_17th_lost", "missing_tokens", "every 17th key is dropped", changed(mask=_every_17th_lost), inside=True
    ),
    Mutant("first_lost", "missing_tokens", "the first key is dropped", changed(mask=_first_lost), inside=True),
    Mutant(
        "first_and_last_block_only",
        "missing_tokens",
        "only the first and the last block are read",
        changed(mask=_only_first_and_last_block),
        inside=True,
    ),
    Mutant(
        "key_15_doubled",
        "wrong_block",
        "the last slot of the first block is read twice and the next one not",
        changed(tokens=_doubled_past(15)),
        inside=True,
        also=frozenset({"missing_tokens", "extra_tokens"}),
    ),
    Mutant(
        "one_cell_uniform",
        "unknown",
        "one (sequence, head) weighs all keys alike",
        changed(probs=_last_head_of_last_sequence),
        inside=True,
    ),
    Mutant(
        "p_through_fp8",
        "precision",
        "P is rounded to fp8 after it is normalised",
        changed(probs=_p_through_fp8),
        inside=True,
    ),
    Mutant(
        "k_for_v",
        "slot_write",
        "K is read where V belongs",
        changed(value=_k_for_v),
        inside=True,
        also=frozenset({"wrong_block", "unknown"}),
    ),
    Mutant(
        "key_tail_dropped",
        "head_dim_tail",
        "q·k leaves out dims beyond a multiple of 32",
        changed(key=_key_tail_dropped),
        inside=True,
    ),
    Mutant(
        "behind_window_read",
        "stale_read",
        "a block behind the window is read with weight zero",
        changed(probs=_behind_window_read),
        inside=True,
    ),
)
