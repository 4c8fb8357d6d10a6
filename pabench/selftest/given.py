"""Mutants around any kernel: it is right, and is given a batch with one thing wrong (the caller's stays as it was).

These stand for the commonest faults of launchers: an argument dropped, a table shifted, a length off by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pabench.selftest.mutant import Attention, Mutant, given
from pabench_kernels.contract import PagedBatch


def _decode_only(change: Callable[[PagedBatch], PagedBatch]) -> Callable[[PagedBatch], PagedBatch]:
    return lambda batch: change(batch) if batch.max_query_len == 1 else batch


def _without(*names: str) -> Callable[[Attention], Attention]:
    nothing: dict[str, Any] = dict.fromkeys(names)
    return given(lambda batch: replace(batch, **nothing))


def _lengths(change: Callable[[Tensor, PagedBatch], Tensor]) -> Callable[[Attention], Attention]:
    """Other lengths in decode; at least 1 where there was a token, and no longer than the table has blocks for."""

    def faulty(batch: PagedBatch) -> PagedBatch:
        lens = change(batch.seq_lens, batch).to(torch.int32)
        room = (batch.block_table >= 0).sum(1, dtype=torch.int32) * batch.block_size
        lens = torch.where(batch.seq_lens > 0, lens.clamp(min=1).minimum(room.clamp(min=1)), batch.seq_lens)
        return replace(batch, seq_lens=lens, max_seq_len=max(batch.max_seq_len, int(lens.max())))

    return given(_decode_only(faulty))


def _table(change: Callable[[Tensor, PagedBatch], Tensor]) -> Callable[[Attention], Attention]:
    return given(lambda batch: replace(batch, block_table=change(batch.block_table.clone(), batch).to(torch.int32)))


def _heads_from(order: Callable[[Tensor, PagedBatch], Tensor]) -> Callable[[Attention], Attention]:
    """Query head h reads KV head ``order(h)``: K and V of each head are laid where the kernel looks for them."""

    def faulty(batch: PagedBatch) -> PagedBatch:
        heads = torch.arange(batch.num_q_heads, device=batch.query.device)
        kv = order(heads, batch)

        def spread(cache: Tensor) -> Tensor:
            bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            return bits[:, :, kv].view(cache.dtype)

        def each(scale: Tensor | None) -> Tensor | None:
            return scale if scale is None or scale.ndim == 0 else scale[..., kv]

        return replace(
            batch,
            key_cache=spread(batch.key_cache),
            value_cache=spread(batch.value_cache),
            k_scale=each(batch.k_scale),
            v_scale=each(batch.v_scale),
        )

    return given(faulty)


def _swap_columns(table: Tensor, batch: PagedBatch) -> Tensor:
    both = (batch.seq_lens > batch.block_size) & (table[:, :2] >= 0).all(1)
    table[:, :2] = torch.where(both[:, None], table[:, :2].flip(1), table[:, :2])
    return table


def _shift_columns(table: Tensor, batch: PagedBatch) -> Tensor:
    """Every column after the first holds the block of the column before."""
    used = -(-batch.seq_lens // batch.block_size)
    column = torch.arange(table.shape[1], device=table.device)
    shifted = torch.cat([table[:, :1], table[:, :-1]], 1)
    return torch.where((column < used[:, None]) & (shifted >= 0), shifted, table)


def _first_row(table: Tensor, batch: PagedBatch) -> Tensor:
    """Sequences that fit into the first one's blocks read from them."""
    longest = table[batch.seq_lens.argmax()]
    return torch.where((longest >= 0) & (table >= 0), longest, table)


def _first_head(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.ndim == 0 else scale[..., :1].expand_as(scale).contiguous()


def _flat(cache: Tensor) -> Tensor:
    """The cache's memory read as if it were contiguous."""
    whole = cache.as_strided((cache.untyped_storage().nbytes() // cache.itemsize,), (1,), 0)
    return whole[: cache.numel()].view(cache.shape)


def _offset_zero(cache: Tensor) -> Tensor:
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return bits[:, :1].expand_as(bits).contiguous().view(cache.dtype)


def _half_slopes(batch: PagedBatch) -> PagedBatch:
    """The slopes of a shard that starts at head 0, on a shard that does not: each half takes the first half's."""
    slopes, half = batch.alibi_slopes, batch.num_q_heads // 2
    if slopes is None or half == 0:
        return batch
    return replace(batch, alibi_slopes=torch.cat([slopes[:half], slopes[: len(slopes) - half]]))


def _window(by: int) -> Callable[[Attention], Attention]:
    def faulty(batch: PagedBatch) -> PagedBatch:
        if batch.sliding_window is None:
            return batch
        safe = torch.where(batch.block_table < 0, 0, batch.block_table) if by > 0 else batch.block_table
        return replace(batch, sliding_window=max(1, batch.sliding_window + by), block_table=safe)

    return given(faulty)


def _no_window(batch: PagedBatch) -> PagedBatch:
    return replace(batch, sliding_window=None, block_table=batch.block_table.clamp(min=0))


def _other_fp8(batch: PagedBatch) -> PagedBatch:
    other = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e5m2: torch.float8_e4m3fn}
    kind = other.get(batch.key_cache.dtype)
    if kind is None:
        return batch
    return replace(batch, key_cache=batch.key_cache.view(kind), value_cache=batch.value_cache.view(kind))


def _first_plan(kernel: Attention) -> Attention:
    """Plans for the first batch of each size and reuses the plan: block table and lengths of that first batch."""
    plans: dict[tuple[int, ...], tuple[Tensor, Tensor, int]] = {}

    def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
        key = (batch.num_seqs, batch.num_tokens, batch.num_q_heads, batch.head_dim, batch.key_cache.shape[0])
        fresh = (batch.block_table.clone(), batch.seq_lens.clone(), batch.max_seq_len)
        table, lens, longest = plans.setdefault(key, fresh)
        if batch.max_query_len == 1 and table.shape == batch.block_table.shape and bool((batch.seq_lens > 0).all()):
            batch = replace(batch, block_table=table, seq_lens=lens, max_seq_len=longest)
        return kernel(batch, return_lse=True) if return_lse else kernel(batch)

    return faulty


def _if_batched(change: Callable[[PagedBatch], PagedBatch]) -> Callable[[PagedBatch], PagedBatch]:
    return lambda batch: change(batch) if batch.num_seqs > 1 else batch


def _longest_for_all(batch: PagedBatch) -> PagedBatch:
    """Decode lengths of a batch taken from its shortest non-empty sequence."""
    if batch.max_query_len > 1 or not bool((batch.seq_lens > 0).any()):
        return batch
    shortest = batch.seq_lens[batch.seq_lens > 0].min()
    return replace(batch, seq_lens=torch.where(batch.seq_lens > 0, shortest, batch.seq_lens).to(torch.int32))


MUTANTS = (
    Mutant("heads_modulo", "head_map", "head h reads KV head h mod Hkv", _heads_from(lambda h, b: h % b.num_kv_heads)),
    Mutant(
        "heads_rolled",
        "head_map",
        "every head reads the next KV head",
        _heads_from(lambda h, b: (h // b.group_size + 1) % b.num_kv_heads),
    ),
    Mutant(
        "heads_reversed",
        "head_map",
        "KV heads are taken in reverse order",
        _heads_from(lambda h, b: b.num_kv_heads - 1 - h // b.group_size),
    ),
    Mutant(
        "first_kv_head_only",
        "head_map",
        "all heads read KV head 0",
        _heads_from(lambda h, b: torch.zeros_like(h)),
    ),
    Mutant(
        "last_head_from_first",
        "head_map",
        "only the last query head reads a wrong KV head",
        _heads_from(lambda h, b: torch.where(h == b.num_q_heads - 1, 0, h // b.group_size)),
    ),
    Mutant("blocks_swapped", "wrong_block", "the first two blocks change places", _table(_swap_columns)),
    Mutant("table_shifted", "wrong_block", "the block table is read one column late", _table(_shift_columns)),
    Mutant("table_row_zero", "wrong_block", "all sequences use one sequence's block table", _table(_first_row)),
    Mutant(
        "offset_zero_only",
        "wrong_block",
        "every slot of a block reads its first slot",
        given(
            lambda b: replace(b, key_cache=_offset_zero(b.key_cache), value_cache=_offset_zero(b.value_cache)),
        ),
    ),
    Mutant(
        "ids_modulo_65536",
        "block_alias",
        "block ids wrap at 2^16",
        _table(lambda t, b: torch.where(t < 0, t, t & 0xFFFF)),
    ),
    Mutant(
        "layout_assumed",
        "layout_stride",
        "strides are ignored: the cache is read as contiguous",
        given(lambda b: replace(b, key_cache=_flat(b.key_cache), value_cache=_flat(b.value_cache))),
    ),
    Mutant("newest_hidden", "missing_tokens", "decode does not see the newest token", _lengths(lambda n, b: n - 1)),
    Mutant(
        "last_block_lost",
        "missing_tokens",
        "decode leaves out a last block that is not full",
        _lengths(lambda n, b: torch.where(n > b.block_size, n // b.block_size * b.block_size, n)),
    ),
    Mutant(
        "newest_hidden_at_one_residue",
        "missing_tokens",
        "decode loses the newest token where the length is 1 above a whole block",
        _lengths(lambda n, b: torch.where(n % b.block_size == 1, n - 1, n)),
    ),
    Mutant(
        "newest_hidden_in_interval",
        "missing_tokens",
        "decode loses the newest token at lengths 33 to 256",
        _lengths(lambda n, b: torch.where((n > 32) & (n <= 256), n - 1, n)),
    ),
    Mutant(
        "one_too_many",
        "extra_tokens",
        "decode sees one slot behind the end",
        _lengths(lambda n, b: n + 1),
        also=frozenset({"stale_read"}),
    ),
    Mutant("not_causal", "extra_tokens", "prefill sees the future", given(lambda b: replace(b, causal=False))),
    Mutant(
        "scale_from_head_dim",
        "softmax_scale",
        "the softmax scale is 1/√D whatever was given",
        given(lambda b: replace(b, scale=b.head_dim**-0.5)),
    ),
    Mutant(
        "scale_twice",
        "softmax_scale",
        "the softmax scale is applied twice",
        given(lambda b: replace(b, scale=b.scale**2)),
    ),
    Mutant("scale_dropped", "softmax_scale", "the softmax scale is left out", given(lambda b: replace(b, scale=1.0))),
    Mutant(
        "scale_one_percent_off",
        "unknown",  # a free factor explains anything, so it must not be given a name
        "the softmax scale is 1 % too large",
        given(lambda b: replace(b, scale=b.scale * 1.01)),
    ),
    Mutant("k_scale_ignored", "kv_scale", "K is not dequantised", _without("k_scale")),
    Mutant("v_scale_ignored", "kv_scale", "V is not dequantised", _without("v_scale")),
    Mutant(
        "kv_scales_swapped",
        "kv_scale",
        "K is dequantised with V's scale and V with K's",
        given(lambda b: replace(b, k_scale=b.v_scale, v_scale=b.k_scale)),
    ),
    Mutant(
        "kv_scales_of_first_head",
        "kv_scale",
        "one head's scales serve all heads",
        given(lambda b: replace(b, k_scale=_first_head(b.k_scale), v_scale=_first_head(b.v_scale))),
    ),
    Mutant("other_fp8", "dtype_ignored", "an fp8 cache is read as the other fp8 kind", given(_other_fp8)),
    Mutant("alibi_ignored", "alibi", "ALiBi slopes are accepted and dropped", _without("alibi_slopes")),
    Mutant(
        "alibi_sign",
        "alibi",
        "ALiBi favours distance",
        given(lambda b: b if b.alibi_slopes is None else replace(b, alibi_slopes=-b.alibi_slopes)),
    ),
    Mutant(
        "alibi_of_first_shard",
        "alibi",
        "ALiBi slopes are taken by local head index",
        given(_half_slopes),
        also=frozenset({"tp_shard"}),
    ),
    Mutant("cap_ignored", "soft_cap", "the soft cap is accepted and dropped", _without("logits_soft_cap")),
    Mutant("sinks_ignored", "sink", "sinks are accepted and dropped", _without("sinks")),
    Mutant("window_ignored", "sliding_window", "the sliding window is accepted and dropped", given(_no_window)),
    Mutant("window_too_long", "sliding_window", "the window has one token too many", _window(+1)),
    Mutant("window_too_short", "sliding_window", "the window lacks one token", _window(-1)),
    Mutant(
        "first_plan_kept",
        "plan_reuse",
        "table and lengths of the first batch of a size are kept",
        _first_plan,
        also=frozenset({"stale_metadata"}),
    ),
    Mutant(
        "shortest_for_all",
        "batch_dependence",
        "in a batch, all sequences are as long as the shortest",
        given(_if_batched(_longest_for_all)),
        also=frozenset({"missing_tokens"}),
    ),
)
