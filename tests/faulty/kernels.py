"""Paged-attention kernels with one planted fault each, as a stranger would write them: FILE.py:FUNCTION.

``honest`` has none. Written in plain torch, so that none of them enters a registered kernel unless it is meant to.
"""

from dataclasses import replace

import torch

from pabench_kernels import PagedBatch, get_kernel
from pabench_kernels.contract import kernel


def _gather(pool, table, length, scale):
    size = pool.shape[1]
    blocks = table[: -(-length // size)].long()
    bits = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
    rows = bits[blocks].view(pool.dtype).float().flatten(0, 1)[:length]
    return rows if scale is None else rows * scale


def _attend(batch: PagedBatch, head_of=None):
    outs = []
    starts = batch.query_start_loc.tolist()
    for s, length in enumerate(batch.seq_lens.tolist()):
        q = batch.query[starts[s] : starts[s + 1]].float()
        k = _gather(batch.key_cache, batch.block_table[s], length, batch.k_scale)
        v = _gather(batch.value_cache, batch.block_table[s], length, batch.v_scale)
        heads = torch.arange(batch.num_q_heads) // batch.group_size
        if head_of is not None:
            heads = head_of(heads, batch.num_kv_heads)
        scores = torch.einsum("thd,lhd->htl", q, k[:, heads]) * batch.scale
        i = torch.arange(length - len(q), length)[:, None]
        j = torch.arange(length)[None]
        mask = j <= i
        if batch.sliding_window is not None:
            mask &= j > i - batch.sliding_window
        probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outs.append(torch.einsum("htl,lhd->thd", probs, v[:, heads]))
    return torch.cat(outs).to(batch.query.dtype)


def honest(batch):
    return _attend(batch)


def zeros(batch):
    return torch.zeros_like(batch.query)


def nan_in_one_head(batch):
    out = _attend(batch)
    out[:, 1] = float("nan")
    return out


def newest_token_hidden(batch):
    """Decode sees one token less; prefill is right."""
    if batch.max_query_len > 1:
        return _attend(batch)
    return _attend(replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=1)))


def keys_of_one_block_swapped(batch):
    """The first two tokens' keys of logical block 0 change places."""
    cache = batch.key_cache.clone()
    first = batch.block_table[:, 0].long()
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    bits[first, 0], bits[first, 1] = bits[first, 1].clone(), bits[first, 0].clone()
    return _attend(replace(batch, key_cache=cache))


def wrong_kv_head(batch):
    return _attend(batch, lambda heads, n: (heads + 1) % n)


def scale_ten_percent_off(batch):
    return _attend(replace(batch, scale=batch.scale * 1.1))


def k_scale_ignored(batch):
    return _attend(replace(batch, k_scale=None))


_last_tables: dict[int, torch.Tensor] = {}


def stale_block_table(batch):
    """Uses the block table of the step before, where the batch has the same shape."""
    key = batch.key_cache.data_ptr()
    before = _last_tables.get(key)
    _last_tables[key] = batch.block_table.clone()
    if before is not None and before.shape[0] == batch.block_table.shape[0] and batch.max_query_len == 1:
        width = batch.block_table.shape[1]
        stale = torch.full_like(batch.block_table, -1)
        stale[:, : min(width, before.shape[1])] = before[:, :width]
        batch = replace(batch, block_table=stale)
    return _attend(batch)


@kernel("enters_another")
def enters_another(batch):
    return get_kernel("torch_paged")(batch)


def raises(batch):
    raise ZeroDivisionError("planted")


def wrong_shape(batch):
    return _attend(batch)[:, :1]


def refuses_late(batch):
    raise NotImplementedError("only head_dim 7")


def _no_small_heads(batch):
    return [] if batch.head_dim == 128 else [f"head_dim {batch.head_dim} (only 128)"]


def declares_head_dim_128(batch):
    return _attend(batch)


declares_head_dim_128.unsupported = _no_small_heads


def _short_only(batch):
    return [] if batch.max_seq_len <= 40 else [f"length {batch.max_seq_len} above 40"]


def declares_short_only(batch):
    return _attend(batch)


declares_short_only.unsupported = _short_only


def exits(batch):
    raise SystemExit(0)


def prints(batch):
    print("hello from a kernel")
    return _attend(batch)


def writes_into_its_query(batch):
    out = _attend(batch)
    batch.query.mul_(batch.scale)
    return out


def writes_into_its_lengths(batch):
    out = _attend(batch)
    batch.seq_lens.add_(1)
    return out


def calls_a_launcher_behind_the_registry(batch):
    return get_kernel("torch_paged").fn(batch)


def changes_the_default_dtype(batch):
    torch.set_default_dtype(torch.float64)
    return _attend(batch)


def _one_sentence(batch):
    return "needs a GPU"


def declares_in_one_sentence(batch):
    return _attend(batch)


declares_in_one_sentence.unsupported = _one_sentence


def declares_none(batch):
    return _attend(batch)


declares_none.unsupported = lambda batch: None


# For the kernel check: every feature of the contract, and one fault each.


def _paged(
    batch: PagedBatch, *, change=lambda scores, **_: scores, head_of=None, tokens_of=None, drop=(), on_probs=None
):
    """Right attention over the whole contract; ``change`` sees the scores, ``head_of`` and ``tokens_of`` the reads."""
    batch = replace(batch, **dict.fromkeys(drop))
    out = torch.zeros(batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
    starts, size = batch.query_start_loc.tolist(), batch.block_size
    for s, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        q = batch.query[rows].float()
        if length == 0:
            continue
        first_query = length - len(q)
        window = batch.sliding_window
        first = 0 if window is None else max(0, first_query - window + 1)
        j = torch.arange(first, length)
        read = j if tokens_of is None else tokens_of(j, batch, length)
        block, offset = batch.block_table[s, read // size].long(), read % size

        def gather(pool, scale, block=block, offset=offset):
            bits = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
            found = bits[block, offset].view(pool.dtype).float()
            if scale is None:
                return found
            return found * (scale if scale.ndim == 0 else scale[:, None])

        k, v = gather(batch.key_cache, batch.k_scale), gather(batch.value_cache, batch.v_scale)
        heads = torch.arange(batch.num_q_heads)
        heads = heads // batch.group_size if head_of is None else head_of(heads, batch)
        scores = torch.einsum("thd,lhd->htl", q, k[:, heads]) * batch.scale
        if batch.logits_soft_cap is not None:
            scores = batch.logits_soft_cap * torch.tanh(scores / batch.logits_soft_cap)
        i = torch.arange(first_query, length)[:, None]
        if batch.alibi_slopes is not None:
            scores = scores + batch.alibi_slopes[:, None, None] * (j - i)
        mask = j <= i if batch.causal else torch.ones(len(q), len(j), dtype=torch.bool)
        if window is not None:
            mask = mask & (j > i - window)
        scores = change(scores.masked_fill(~mask, float("-inf")), i=i, j=j, batch=batch)
        if batch.sinks is not None:
            column = batch.sinks[:, None, None].expand(-1, len(q), 1)
            probs = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            probs = scores.softmax(-1)
        if on_probs is not None:
            probs = on_probs(probs)
        out[rows] = torch.einsum("htl,lhd->thd", probs, v[:, heads])
    return out.to(batch.query.dtype)


def honest_whole(batch):
    return _paged(batch)


def heads_modulo(batch):
    return _paged(batch, head_of=lambda h, b: h % b.num_kv_heads)


def window_one_too_long(batch):
    wider = None if batch.sliding_window is None else batch.sliding_window + 1
    return _paged(replace(batch, sliding_window=wider))


def window_ignored(batch):
    clean = replace(batch, block_table=batch.block_table.clamp(min=0))
    return _paged(clean, drop=("sliding_window",))


def alibi_ignored(batch):
    return _paged(batch, drop=("alibi_slopes",))


def cap_ignored(batch):
    return _paged(batch, drop=("logits_soft_cap",))


def sinks_ignored(batch):
    return _paged(batch, drop=("sinks",))


def causal_ignored(batch):
    return _paged(replace(batch, causal=False))


def scale_one_percent_off(batch):
    return _paged(replace(batch, scale=batch.scale * 1.01))


def scale_always_from_head_dim(batch):
    return _paged(replace(batch, scale=batch.head_dim**-0.5))


def scales_shared_by_all_heads(batch):
    def first(scale):
        return scale if scale is None or scale.ndim == 0 else scale[0]

    return _paged(replace(batch, k_scale=first(batch.k_scale), v_scale=first(batch.v_scale)))


def v_scale_ignored(batch):
    return _paged(replace(batch, v_scale=None))


def past_512_one_token_lost(batch):
    """Drops the key at position 512, where a second partition of 512 would begin."""

    def lose(scores, j, **_):
        return scores.masked_fill((j == 512) & (scores.shape[-1] > 1), float("-inf"))

    return _paged(batch, change=lose)


def last_block_twice_in_front(batch):
    """Reads the second block where the first belongs."""

    def tokens(j, b, length):
        return torch.where((j < b.block_size) & (length >= 2 * b.block_size), j + b.block_size, j)

    return _paged(batch, tokens_of=tokens)


def offset_zero_only(batch):
    return _paged(batch, tokens_of=lambda j, b, _: j // b.block_size * b.block_size)


def ids_wrap_at_65536(batch):
    return _paged(replace(batch, block_table=batch.block_table & 0xFFFF))


def layout_from_shape(batch):
    """Takes a padded or interleaved cache for a contiguous one."""

    def flat(cache):
        size = cache.untyped_storage().nbytes() // cache.itemsize
        whole = cache.as_strided((size,), (1,), 0)
        return whole[: cache.numel()].view(cache.shape)

    return _paged(replace(batch, key_cache=flat(batch.key_cache), value_cache=flat(batch.value_cache)))


def reads_past_the_end(batch):
    """Weights 0 on V of the slots behind the end, which hold NaN."""
    out = _paged(batch)
    starts, size = batch.query_start_loc.tolist(), batch.block_size
    for s, length in enumerate(batch.seq_lens.tolist()):
        if length % size:
            tail = batch.value_cache[batch.block_table[s, length // size].long(), length % size].float()
            heads = torch.arange(batch.num_q_heads) // batch.group_size
            out[starts[s] : starts[s + 1]] += (0.0 * tail[heads]).to(out.dtype)
    return out


def leaves_last_dims_unwritten(batch):
    out = batch.query.new_empty(batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
    out[..., : batch.head_dim_v // 32 * 32] = _paged(batch)[..., : batch.head_dim_v // 32 * 32]
    return out


def leaves_padding_rows_unwritten(batch):
    out, right = batch.query.new_empty(batch.num_tokens, batch.num_q_heads, batch.head_dim_v), _paged(batch)
    starts = batch.query_start_loc.tolist()
    for s, length in enumerate(batch.seq_lens.tolist()):
        if length:
            out[starts[s] : starts[s + 1]] = right[starts[s] : starts[s + 1]]
    return out


def writes_its_query(batch):
    out = _paged(batch)
    batch.query.mul_(batch.scale)
    return out


def ignores_the_past(batch):
    """Continued prefill attends to its own chunk only."""
    if batch.max_query_len == 1:
        return _paged(batch)

    def chunk_only(scores, i, j, **_):
        return scores.masked_fill(j < i[0], float("-inf")) if len(i) > 1 else scores

    return _paged(batch, change=chunk_only)


def lse_always_zero(batch, return_lse=False):
    out = _paged(batch)
    return (out, torch.zeros(out.shape[:2])) if return_lse else out


def wrong_dtype(batch):
    return _paged(batch).double()


def no_mixed_batches(batch):
    """Takes every sequence for a decode of its last token."""
    out = torch.zeros_like(_paged(batch))
    last = (batch.query_start_loc[1:] - 1).long()
    return out.index_copy(0, last, _paged(batch)[last])


def _plain_only(batch):
    limits = {
        "a sliding window": batch.sliding_window,
        "ALiBi": batch.alibi_slopes,
        "a soft cap": batch.logits_soft_cap,
        "sinks": batch.sinks,
        "scales": batch.k_scale,
    }
    reasons = [f"{what} is not supported" for what, given in limits.items() if given is not None]
    return reasons + ([] if batch.causal else ["only causal attention is supported"])


# Kinds that the launchers and tiles of fast kernels are prone to.


def parts_averaged(batch):
    """A split kernel that merges its parts without their weights."""

    def merge(probs, size=64):
        parts = [probs[..., b : b + size] for b in range(0, probs.shape[-1], size)]
        sums = [p.sum(-1, keepdim=True) for p in parts]
        alive = sum((t > 0).float() for t in sums).clamp(min=1)
        return torch.cat([torch.where(t > 0, p / t, 0.0) / alive for p, t in zip(parts, sums, strict=True)], -1)

    return _paged(batch, on_probs=merge)


def window_one_too_short(batch):
    shorter = None if batch.sliding_window is None else max(1, batch.sliding_window - 1)
    return _paged(replace(batch, sliding_window=shorter))


def cap_twice(batch):
    def again(scores, batch, **_):
        cap = batch.logits_soft_cap
        return scores if cap is None else torch.where(scores.isfinite(), cap * torch.tanh(scores / cap), scores)

    return _paged(batch, change=again)


def alibi_inside_the_block(batch):
    def local(scores, i, j, batch):
        if batch.alibi_slopes is None:
            return scores
        return scores + batch.alibi_slopes[:, None, None] * (j % batch.block_size - j)

    return _paged(batch, change=local)


def scales_of_the_next_head(batch):
    def rolled(scale):
        return scale if scale is None or scale.ndim == 0 else scale.roll(-1)

    return _paged(replace(batch, k_scale=rolled(batch.k_scale), v_scale=rolled(batch.v_scale)))


def chunk_takes_itself_for_the_beginning(batch):
    """A continued prefill whose causal mask leaves out the offset."""

    def shifted(scores, i, j, batch):
        if len(i) == 1:
            return scores
        return scores.masked_fill(j > i - i[0], float("-inf"))

    return _paged(batch, change=shifted)


def tail_channels_left_out_of_scores(batch):
    """q·k takes whole vectors of 32 channels only."""
    whole = batch.head_dim // 32 * 32
    if whole in (0, batch.head_dim):
        return _paged(batch)
    query = batch.query.clone()
    query[..., whole:] = 0
    return _paged(replace(batch, query=query))


def _newest_hidden_where(batch, wrong):
    lens = torch.tensor([n - 1 if n > 1 and wrong(n) else n for n in batch.seq_lens.tolist()], dtype=torch.int32)
    return _paged(replace(batch, seq_lens=lens)) if batch.max_query_len == 1 else _paged(batch)


def newest_hidden_between_33_and_256(batch):
    return _newest_hidden_where(batch, lambda n: 33 <= n <= 256)


def newest_hidden_one_behind_a_block(batch):
    return _newest_hidden_where(batch, lambda n: n % batch.block_size == 1)


def offsets_wrap_at_two_gib(batch):
    """Byte offsets of blocks in int32: what lies further reads from the beginning."""
    stride = batch.key_cache.stride(0) * batch.key_cache.itemsize
    last = (2**31 - 1) // stride
    return _paged(replace(batch, block_table=torch.where(batch.block_table > last, 0, batch.block_table)))


def two_sequences_swapped(batch):
    """Neighbours in a decode batch get each other's output."""
    out = _paged(batch)
    if batch.num_seqs > 1 and batch.max_query_len == 1:
        out[:2] = out[:2].flip(0)
    return out


_plans = {}


def keeps_its_first_plan(batch):
    """Lengths of the first decode batch of this size are used for all later ones."""
    key = (batch.num_seqs, batch.num_tokens, batch.head_dim, tuple(batch.key_cache.shape))
    lens = _plans.setdefault(key, batch.seq_lens.clone())
    if batch.max_query_len > 1:
        return _paged(batch)
    room = (batch.block_table >= 0).sum(1, dtype=torch.int32) * batch.block_size
    return _paged(replace(batch, seq_lens=torch.minimum(lens, room)))


def reads_a_slot_behind_the_end(batch):
    """A finite read past the end that hardly moves the answer."""
    out = _paged(batch)
    starts, size = batch.query_start_loc.tolist(), batch.block_size
    for s, length in enumerate(batch.seq_lens.tolist()):
        if length % size:
            slot = batch.value_cache[batch.block_table[s, length // size].long(), length % size]
            out[starts[s] : starts[s + 1]] += (1e-6 * slot.float().abs().max().clamp(max=1.0)).to(out.dtype)
    return out


def splits_change_the_answer(batch, num_splits=1):
    return _paged(batch) * (1.0 + 0.1 * (num_splits - 1))


def honest_limited(batch):
    return _attend(batch)


honest_limited.unsupported = _plain_only
