"""Mutants around any kernel: what it computed is right, and is returned spoiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pabench.selftest.mutant import Attention, Mutant, returned
from pabench_kernels.contract import PagedBatch
from pabench_kernels.registry import get_kernel


def _nan_in_head(out: Tensor, batch: PagedBatch) -> Tensor:
    out[:, -1] = torch.nan
    return out


def _no_tail(out: Tensor, batch: PagedBatch) -> Tensor:
    """Dims beyond the last whole vector of 32 are left as the allocator gave them; all beyond 128 too."""
    fresh = torch.empty_like(out)
    done = min(128, out.shape[-1] // 32 * 32)
    fresh[..., :done] = out[..., :done]
    return fresh


def _zero_tail(out: Tensor, batch: PagedBatch) -> Tensor:
    out[..., out.shape[-1] // 32 * 32 :] = 0
    return out


def _padding_rows(out: Tensor, batch: PagedBatch) -> Tensor:
    """Rows of empty sequences are left as the allocator gave them."""
    fresh = torch.empty_like(out)
    starts = batch.query_start_loc.tolist()
    for seq, length in enumerate(batch.seq_lens.tolist()):
        if length:
            fresh[starts[seq] : starts[seq + 1]] = out[starts[seq] : starts[seq + 1]]
    return fresh


def _tail_slot_times_zero(out: Tensor, batch: PagedBatch) -> Tensor:
    """V of the slot behind the end has weight 0, and 0 × NaN is NaN."""
    heads = torch.arange(batch.num_q_heads, device=out.device) // batch.group_size
    starts = batch.query_start_loc.tolist()
    for seq, length in enumerate(batch.seq_lens.tolist()):
        if length % batch.block_size:
            block = int(batch.block_table[seq, length // batch.block_size])
            tail = batch.value_cache[block, length % batch.block_size].float()
            out[starts[seq] : starts[seq + 1]] += (0.0 * tail[heads]).to(out.dtype)
    return out


def _sixteen_heads(out: Tensor, batch: PagedBatch) -> Tensor:
    """A group of more than 16 query heads is computed in its first 16 only."""
    for kv_head in range(batch.num_kv_heads):
        begin = kv_head * batch.group_size
        out[:, begin + 16 : begin + batch.group_size] = 0
    return out


def _rows_swapped(out: Tensor, batch: PagedBatch) -> Tensor:
    """In a batch, the first two sequences' decode rows change places."""
    if batch.num_seqs > 1 and batch.max_query_len == 1:
        out[:2] = out[:2].flip(0)
    return out


def _writes_query(kernel_fn: Attention) -> Attention:
    def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
        out = kernel_fn(batch, return_lse=True) if return_lse else kernel_fn(batch)
        batch.query.mul_(batch.scale)
        return out

    return faulty


def _falls_back(kernel_fn: Attention) -> Attention:
    """Decode is computed by another registered kernel, without a word."""

    def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
        if batch.max_query_len == 1:
            out = get_kernel("torch_paged")(batch)
            return (out, kernel_fn(batch, return_lse=True)[1]) if return_lse else out
        return kernel_fn(batch, return_lse=True) if return_lse else kernel_fn(batch)

    return faulty


def _lse_zero(kernel_fn: Attention) -> Attention:
    def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
        if not return_lse:
            return kernel_fn(batch)
        out, lse = kernel_fn(batch, return_lse=True)
        return out, torch.zeros_like(lse)

    return faulty


def _lse_base_two(kernel_fn: Attention) -> Attention:
    def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
        if not return_lse:
            return kernel_fn(batch)
        out, lse = kernel_fn(batch, return_lse=True)
        return out, lse / 0.6931471805599453

    return faulty


def _coarse(out: Tensor, batch: PagedBatch) -> Tensor:
    """The output went through fp8 on its way."""
    return out.to(torch.float8_e4m3fn).to(out.dtype)


MUTANTS = (
    Mutant(
        "zeros",
        "degenerate_output",
        "all zeros",
        returned(lambda out, b: torch.zeros_like(out)),
        also=frozenset({"unwritten_output", "unknown"}),
    ),
    Mutant("nan_in_one_head", "nonfinite", "NaN in the last head", returned(_nan_in_head)),
    Mutant(
        "tail_dims_unwritten",
        "unwritten_output",
        "dims beyond a multiple of 32, or beyond 128, are not written",
        returned(_no_tail),
        also=frozenset({"head_dim_tail", "nonfinite"}),
    ),
    Mutant("tail_dims_zero", "head_dim_tail", "dims beyond a multiple of 32 are zero", returned(_zero_tail)),
    Mutant(
        "padding_rows_unwritten",
        "unwritten_output",
        "rows of empty sequences are not written",
        returned(_padding_rows),
        also=frozenset({"nonfinite"}),
    ),
    Mutant(
        "tail_slot_times_zero",
        "stale_read",
        "V behind the end is read with weight zero",
        returned(_tail_slot_times_zero),
    ),
    Mutant(
        "sixteen_heads",
        "kernel_limit",
        "query heads beyond 16 of a group are left zero",
        returned(_sixteen_heads),
        also=frozenset({"head_map", "unwritten_output"}),
    ),
    Mutant(
        "rows_swapped",
        "batch_dependence",
        "two sequences of a batch get each other's output",
        returned(_rows_swapped),
        also=frozenset({"wrong_block"}),
    ),
    Mutant("output_through_fp8", "precision", "the output is rounded to fp8 on its way", returned(_coarse)),
    Mutant("writes_its_query", "unknown", "scales the query in place", _writes_query),
    Mutant("silent_fallback", "fallback", "decode is handed to another registered kernel", _falls_back),
    Mutant("lse_zero", "lse", "lse is zero", _lse_zero),
    Mutant("lse_base_two", "lse", "lse is in base 2", _lse_base_two),
)
