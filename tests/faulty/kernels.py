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
