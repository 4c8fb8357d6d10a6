"""Make a failing attention call smaller while it still fails in the same way (delta debugging: Zeller & Hildebrandt,
2002): fewer sequences, heads, tokens and dimensions, plainer numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pabench.checks.replay import CallVerdict, judge_call
from pabench.diagnose.structured import stored_raw
from pabench.repro.tensors import used_ids
from pabench_kernels.contract import PagedBatch
from pabench_kernels.dispatch import select_sequences

Call = Callable[[PagedBatch], Tensor]
MAX_TRIALS = 80


def fault_of(verdict: CallVerdict) -> str | None:
    """The name that the failing call has by itself; None where it passes."""
    if verdict.passed:
        return None
    explanation = verdict.explain()
    if explanation is None:
        return "nonfinite"
    return explanation.fault


def shrink(
    batch: PagedBatch, call: Call, note: Callable[[str], None] = lambda _: None
) -> tuple[PagedBatch, str] | None:
    """(a smaller batch that fails in the same way, its fault), or None where ``batch`` by itself does not fail: the
    failure then depends on something outside of the call."""

    def tried(candidate: PagedBatch) -> str | None:
        try:
            return fault_of(judge_call(candidate, call(candidate)))
        except Exception:  # a smaller call that the kernel cannot compute is no repro of a wrong answer
            return None

    own = _compact(batch)
    fault = tried(own)
    if fault is None:
        own = _cloned(batch)
        fault = tried(own)
    if fault is None:
        return None
    left, progress = MAX_TRIALS, True
    while progress and left > 0:
        progress = False
        for smaller in _smaller(own, call):
            left -= 1
            if left <= 0:
                break
            note(f"shrinking the call: {smaller.num_tokens} query tokens, longest sequence {smaller.max_seq_len}")
            if tried(smaller) == fault:
                own, progress = smaller, True
                break
    plain = _plainer(own)
    if tried(plain) == fault:
        own = plain
    return own, fault


def _smaller(batch: PagedBatch, call: Call) -> Iterator[PagedBatch]:
    """Candidates, those that leave out most first."""
    verdict = judge_call(batch, call(batch))
    seen = verdict.worst
    if seen is None:
        return
    if batch.num_seqs > 1:
        only, _ = select_sequences(batch, torch.tensor([seen.seq_index], device=batch.query.device))
        yield _compact(only)
        return
    bad = seen.ratio(seen.out)
    token, head = divmod(int(bad.argmax()), bad.shape[1])
    kv_head = head // batch.group_size
    if batch.num_kv_heads > 1:
        yield _heads(batch, [kv_head], list(range(kv_head * batch.group_size, (kv_head + 1) * batch.group_size)))
        if batch.num_kv_heads > 2:
            other = (kv_head + 1) % batch.num_kv_heads  # a wrong head needs a second one to be wrong
            pair = sorted((kv_head, other))
            yield _heads(
                batch, pair, [h for k in pair for h in range(k * batch.group_size, (k + 1) * batch.group_size)]
            )
    if batch.group_size > 1:
        one = head % batch.group_size
        yield _heads(
            batch, list(range(batch.num_kv_heads)), [k * batch.group_size + one for k in range(batch.num_kv_heads)]
        )
    tokens, length = batch.num_tokens, batch.max_seq_len
    if tokens > 1:
        yield _last_tokens(batch, 1, length - tokens + token + 1)
        yield _last_tokens(batch, max(2, tokens // 2), length)
        yield _last_tokens(batch, max(2, token + 1), length - tokens + token + 1)
    for shorter in (length // 2, length - batch.block_size, length - 1):
        if tokens <= shorter < length and shorter > 0:
            yield _last_tokens(batch, tokens, shorter, keep_query=True)
    for dim in (batch.head_dim // 2,):
        if dim >= 8 and batch.head_dim == batch.head_dim_v:
            yield replace(
                batch,
                query=batch.query[..., :dim].contiguous(),
                key_cache=_dims(batch.key_cache, dim),
                value_cache=_dims(batch.value_cache, dim),
            )


def _cloned(batch: PagedBatch) -> PagedBatch:
    return replace(
        batch,
        query=batch.query.clone(),
        key_cache=stored_raw(batch.key_cache).clone().view(batch.key_cache.dtype),
        value_cache=stored_raw(batch.value_cache).clone().view(batch.value_cache.dtype),
    )


def _compact(batch: PagedBatch) -> PagedBatch:
    """Only the blocks in the table, in the order of their ids, and one that nobody owns."""
    used = used_ids(batch)
    table = torch.full_like(batch.block_table, -1)
    there = batch.block_table >= 0
    table[there] = torch.searchsorted(used, batch.block_table[there].long()).to(torch.int32)
    width = int(-(-batch.seq_lens.max() // batch.block_size)) if batch.num_seqs else 0

    def pool(cache: Tensor) -> Tensor:
        raw = stored_raw(cache)
        fresh = torch.empty((len(used) + 1, *raw.shape[1:]), dtype=raw.dtype, device=raw.device)
        fresh.fill_(0x7F if cache.dtype.itemsize == 1 else float("nan"))
        fresh[: len(used)] = raw[used]
        return fresh.view(cache.dtype)

    return replace(
        batch,
        query=batch.query.contiguous(),
        key_cache=pool(batch.key_cache),
        value_cache=pool(batch.value_cache),
        block_table=table[:, : max(1, width)].contiguous(),
    )


def _heads(batch: PagedBatch, kv_heads: list[int], q_heads: list[int]) -> PagedBatch:
    def each(x: Tensor | None, heads: list[int]) -> Tensor | None:
        return x if x is None or x.ndim == 0 else x[..., heads].contiguous()

    def pool(cache: Tensor) -> Tensor:
        return stored_raw(cache)[:, :, kv_heads].contiguous().view(cache.dtype)

    return replace(
        batch,
        query=batch.query[:, q_heads].contiguous(),
        key_cache=pool(batch.key_cache),
        value_cache=pool(batch.value_cache),
        k_scale=each(batch.k_scale, kv_heads),
        v_scale=each(batch.v_scale, kv_heads),
        alibi_slopes=each(batch.alibi_slopes, q_heads),
        sinks=each(batch.sinks, q_heads),
    )


def _last_tokens(batch: PagedBatch, tokens: int, length: int, keep_query: bool = False) -> PagedBatch:
    """One sequence cut to ``length``, its last ``tokens`` being the query: its own rows there, or the same rows as
    before, moved."""
    tokens = min(tokens, length)
    end = batch.num_tokens if keep_query else batch.num_tokens - (batch.max_seq_len - length)
    begin = max(0, end - tokens)
    query = batch.query[begin:end].contiguous()
    return _compact(
        replace(
            batch,
            query=query,
            seq_lens=torch.full_like(batch.seq_lens, length),
            query_start_loc=torch.tensor([0, len(query)], dtype=torch.int32, device=batch.query.device),
            max_query_len=len(query),
            max_seq_len=length,
            block_table=batch.block_table[:, : -(-length // batch.block_size)],
        )
    )


def _dims(cache: Tensor, dim: int) -> Tensor:
    return stored_raw(cache)[..., :dim].contiguous().view(cache.dtype)


def _plainer(batch: PagedBatch) -> PagedBatch:
    """Numbers rounded to quarters, where the cache's dtype can hold them unscaled."""
    if batch.key_cache.dtype.itemsize == 1:
        return batch
    return replace(
        batch,
        query=(batch.query * 4).round() / 4,
        key_cache=(batch.key_cache * 4).round() / 4,
        value_cache=(batch.value_cache * 4).round() / 4,
    )
