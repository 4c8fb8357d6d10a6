"""PyTorch's FlexAttention over a paged cache, with its own ``PagedAttention`` for the block mask.

Two kernels, so that the record says which one ran: ``flex_paged_compiled`` is the fused kernel that ``torch.compile``
generates, anew for every shape (about 10 s on a CPU); ``flex_paged`` is the same call uncompiled, which materialises
all scores. The pool becomes [1, Hkv, slots, D], the queries [S, Hq, longest, D]; both are done in ``plan``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import Limits
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME, COMPILED = "flex_paged", "flex_paged_compiled"
QUERY_BLOCK = 128
_LIMITS = {
    name: Limits(
        name,
        "FlexAttention",
        value_head_dim=True,
        alibi=True,
        soft_cap=True,
        window=True,
        bidirectional=True,
        bidirectional_window=True,
    )
    for name in (NAME, COMPILED)
}


@dataclass(frozen=True)
class _State:
    query: Tensor  # [S, Hq, longest, D], shorter sequences padded at the end
    key: Tensor  # [1, Hkv, NB × BS, D]
    value: Tensor
    block_mask: Any
    score_mod: Callable[..., Tensor] | None
    rows: tuple[Tensor, Tensor]  # where the packed tokens stand: sequence, query index


def _unsupported(name: str) -> Callable[[PagedBatch], list[str]]:
    def reasons(batch: PagedBatch) -> list[str]:
        found = _LIMITS[name].reasons(batch)
        blocks, pool = -(-batch.max_seq_len // batch.block_size), batch.key_cache.shape[0]
        if blocks > pool:  # behind a window they need not exist, but its table is no wider than its pool
            found.append(f"FlexAttention's PagedAttention maps at most the pool's {pool} blocks, got {blocks}")
        return found

    return reasons


def _plan(batch: PagedBatch) -> _State:
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask

    device, size = batch.query.device, batch.block_size
    lens, starts = batch.seq_lens.long(), batch.query_start_loc.long()
    first_query = lens - starts.diff()
    window, causal = batch.sliding_window, batch.causal
    pages = PagedAttention(batch.key_cache.shape[0], size, batch.num_seqs, device=str(device))
    _fill(pages, batch, first_query)

    def visible(seq: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key < lens[seq]
        if causal:
            seen = seen & (key <= first_query[seq] + query)
        return seen if window is None else seen & (key > first_query[seq] + query - window)

    cap, slopes = batch.logits_soft_cap, batch.alibi_slopes

    def biased(score: Tensor, seq: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if slopes is None else score + slopes[head] * (key - first_query[seq] - query)

    columns = max(1, -(-batch.max_seq_len // size))
    longest = max(1, batch.max_query_len)
    logical = create_block_mask(
        visible, batch.num_seqs, None, longest, columns * size, device=str(device), BLOCK_SIZE=(QUERY_BLOCK, size)
    )
    tokens = torch.arange(batch.num_tokens, device=device)
    seqs = torch.repeat_interleave(torch.arange(batch.num_seqs, device=device), starts.diff())
    rows = seqs, tokens - starts[seqs]
    query = batch.query.new_zeros(batch.num_seqs, longest, batch.num_q_heads, batch.head_dim)
    query[rows] = batch.query
    key, value = (x.flatten(0, 1).transpose(0, 1)[None].contiguous() for x in (batch.key_cache, batch.value_cache))
    return _State(
        query.transpose(1, 2),
        key,
        value,
        pages.convert_logical_block_mask(logical, kv_len=lens),
        pages.get_score_mod(biased, kv_len=lens) if cap is not None or slopes is not None else None,
        rows,
    )


def _fill(pages: Any, batch: PagedBatch, first_query: Tensor) -> None:
    """Tell ``pages`` which blocks hold what some query may see; all others stay unmapped."""
    columns = torch.arange(batch.block_table.shape[1], device=batch.query.device)
    behind = torch.zeros_like(first_query)
    if batch.sliding_window is not None:
        behind = (first_query - batch.sliding_window + 1).clamp(min=0) // batch.block_size
    used = (columns * batch.block_size < batch.seq_lens[:, None]) & (columns >= behind[:, None])
    seqs, logical = used.nonzero(as_tuple=True)
    physical = batch.block_table[seqs, logical].long()
    pages.page_table[seqs, logical] = physical
    pages.physical_to_logical[seqs, physical] = logical


def _attend(attention: Callable[..., Any], batch: PagedBatch, state: _State, return_lse: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to compile; that is the other kernel's name
        found = attention(
            state.query,
            state.key,
            state.value,
            score_mod=state.score_mod,
            block_mask=state.block_mask,
            scale=batch.scale,
            enable_gqa=batch.group_size > 1,
            **({"return_lse": True} if return_lse else {}),
        )
    if not return_lse:
        return found.transpose(1, 2)[state.rows]
    out, lse = found
    return out.transpose(1, 2)[state.rows], lse.transpose(1, 2)[state.rows].float()


@kernel(NAME, unsupported=_unsupported(NAME), plan=_plan, wants_finite_pool=True)
def flex_paged(batch: PagedBatch, return_lse: bool = False, *, state: _State) -> Any:
    """Uncompiled FlexAttention: [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]."""
    from torch.nn.attention.flex_attention import flex_attention

    count_launch(NAME)
    return _attend(flex_attention, batch, state, return_lse)


@kernel(COMPILED, unsupported=_unsupported(COMPILED), plan=_plan, wants_finite_pool=True)
def flex_paged_compiled(batch: PagedBatch, return_lse: bool = False, *, state: _State) -> Any:
    """FlexAttention compiled for this shape: [T, Hq, Dv] in the query's dtype, lse on GPUs only.

    ``dynamic=False``: torch 2.13 on CPUs compiles shapes that vary to code that g++ refuses, or that ignores a window.
    """
    if return_lse and batch.query.device.type == "cpu":
        raise NotImplementedError("FlexAttention compiled for CPUs gives no lse")
    count_launch(COMPILED)
    return _attend(_compiled(), batch, state, return_lse)


@cache
def _compiled() -> Callable[..., Any]:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of processes outlives a killed worker
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch imports here warns of its own deprecated parts
        return torch.compile(flex_attention, dynamic=False)
