"""my_kernel.py with one word wrong, to see what pabench says: query heads meet the wrong KV heads."""

import torch

from pabench_kernels import PagedBatch


def broken_kernel(batch: PagedBatch) -> torch.Tensor:
    """Paged attention, sequence by sequence, in fp32. Returns [num_tokens, num_q_heads, head_dim_v]."""
    out = batch.query.new_empty(batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
    starts = batch.query_start_loc.tolist()
    for s, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        query = batch.query[rows].float()
        blocks = batch.block_table[s, : -(-length // batch.block_size)].long()
        key = batch.key_cache[blocks].flatten(0, 1)[:length].float()
        value = batch.value_cache[blocks].flatten(0, 1)[:length].float()
        key = key.repeat(1, batch.group_size, 1)
        value = value.repeat(1, batch.group_size, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * batch.scale
        future = torch.ones(len(query), length, dtype=torch.bool, device=query.device).triu(length - len(query) + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out


def _limits(batch: PagedBatch) -> list[str]:
    """Everything this kernel would get wrong: declared, it is skipped with the reason instead of failing."""
    limits = {
        "a quantised cache": batch.k_scale is not None or batch.v_scale is not None,
        "a sliding window": batch.sliding_window is not None,
        "ALiBi": batch.alibi_slopes is not None,
        "a soft cap": batch.logits_soft_cap is not None,
        "sinks": batch.sinks is not None,
        "attention that is not causal": not batch.causal,
    }
    return [f"{what} is not supported" for what, present in limits.items() if present]


broken_kernel.unsupported = _limits
