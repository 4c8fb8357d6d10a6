"""Split decode attention in Triton: the keys of a sequence are cut into parts, and the parts' results are merged.

Flash-decoding (Dao, Haziza, Massa, Sizov, 2023). Each part leaves its unnormalised output, the maximum of its logits
and its sum; their logarithm would be the part's log-sum-exp, without the rounding that a large one suffers. A second
kernel weighs the parts. An empty part has maximum −inf, sum 0 and output 0: its weight is exp(−inf) = 0. A sink joins
the sum once, in the merge.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.standard import _elementwise_max, _sum_combine

from pabench_kernels.contract import Kernel, PagedBatch, kernel
from pabench_kernels.trace import count_launch
from pabench_kernels.triton_attend import attention_kernel
from pabench_kernels.triton_common import (
    MAX_INTERPRETED_TILE,
    MIN_DOT,
    Tiling,
    decode_rows,
    gpu_tiling,
    interpreted_tiling,
    interpreting,
    launch_arguments,
    limits,
    output_dtype,
    padded,
    reach,
    shared_arguments,
)

NAME = "triton_split"
MAX_SPLITS = 128
PLANNED_SPLITS = 32  # at most, unless asked for more
SHORTEST_PART = 128  # keys that are worth a program and their share of the merge
INTERPRETED_KEYS = 256
INTERPRETED_PROCESSORS = 64  # plan as for a GPU, so that parts are merged there too


@triton.jit
def merge_kernel(
    part_ptr,  # fp32 [T × Hq, num_splits, Dv], not yet divided by the sum
    top_ptr,  # fp32 [T × Hq, num_splits]: maximum of the part's logits
    total_ptr,  # fp32 [T × Hq, num_splits]: Σ exp(logit − maximum)
    sinks_ptr,  # [Hq]
    out_ptr,  # [T × Hq, Dv]
    lse_ptr,  # [T × Hq]
    num_rows,  # T × Hq
    num_q_heads,
    num_splits,
    HEAD_DIM_V: tl.constexpr,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, padded to a power of two
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    split = tl.arange(0, SPLITS).to(tl.int64)
    dv = tl.arange(0, DV).to(tl.int64)
    row_live = row < num_rows
    live = row_live[:, None] & (split < num_splits)[None, :]
    at = (row * num_splits)[:, None] + split[None, :]
    tops = tl.load(top_ptr + at, mask=live, other=float("-inf"))
    totals = tl.load(total_ptr + at, mask=live, other=0.0)
    top = tl.reduce(tops, 1, _elementwise_max)
    empty = top == float("-inf")  # no key in any part: 0 and −inf, sink or not
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % num_q_heads, mask=row_live, other=0.0).to(tl.float32)
        top = tl.where(empty, top, tl.maximum(top, sink))
    base = tl.where(empty, 0.0, top)
    weights = tl.exp(tops - base[:, None])
    total = tl.reduce(weights * totals, 1, _sum_combine)
    if HAS_SINKS:
        total += tl.where(empty, 0.0, tl.exp(sink - base))
    mask = live[:, :, None] & (dv < HEAD_DIM_V)[None, None, :]
    parts = tl.load(part_ptr + (at[:, :, None] * HEAD_DIM_V + dv[None, None, :]), mask=mask, other=0.0)
    acc = tl.reduce(parts * weights[:, :, None], 1, _sum_combine)
    safe_total = tl.where(empty, 1.0, total)
    out = (acc / safe_total[:, None]).to(out_ptr.dtype.element_ty)
    out_mask = row_live[:, None] & (dv < HEAD_DIM_V)[None, :]
    tl.store(out_ptr + (row[:, None] * HEAD_DIM_V + dv[None, :]), out, mask=out_mask)
    if HAS_LSE:
        tl.store(lse_ptr + row, tl.where(empty, float("-inf"), base + tl.log(safe_total)), mask=row_live)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def planned_splits(batch: PagedBatch) -> int:
    """Parts a sequence: two programs for each processor, parts of 128 keys or more. Reads nothing from the device."""
    processors = INTERPRETED_PROCESSORS if interpreting() else _processors(batch.query.device)
    programs = batch.num_seqs * batch.num_kv_heads * -(-batch.group_size // decode_rows(batch))
    wanted = triton.next_power_of_2(-(-2 * processors // max(1, programs)))
    return max(1, min(PLANNED_SPLITS, wanted, -(-reach(batch) // SHORTEST_PART)))


def with_splits(splits: int) -> Kernel:
    """``triton_split`` with this many parts a sequence, whatever the batch. Raises ``ValueError`` outside 1…128."""
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits must lie in 1…{MAX_SPLITS}, got {splits}")

    def fixed(batch: PagedBatch, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        return _launch(batch, return_lse, splits)

    return replace(triton_split, fn=fixed)


def _tiling(batch: PagedBatch, splits: int) -> Tiling:
    rows = decode_rows(batch)
    if not interpreting():
        return gpu_tiling(rows, padded(max(batch.head_dim, batch.head_dim_v)), batch.query.itemsize)
    keys = max(MIN_DOT, min(INTERPRETED_KEYS, triton.next_power_of_2(-(-reach(batch) // splits))))
    return interpreted_tiling(batch, rows, keys, batch.num_seqs * batch.num_kv_heads * splits)


@kernel(NAME, phases={"decode"}, unsupported=limits, per_token_scales=True)
def triton_split(
    batch: PagedBatch, return_lse: bool = False, num_splits: int | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Paged decode attention: at most one query token a sequence; two launches, parts and merge.

    ``query`` [T, Hq, D] fp32, fp16 or bf16; caches in its dtype, fp8_e4m3fn, fp8_e5m2 or int8; last dimensions
    contiguous. Gives [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]. On a GPU products are taken in
    the query's dtype and summed in fp32; under the interpreter all is fp32. Does not wait for the device: the number of
    parts follows from shapes, ``max_seq_len`` and the window, unless ``num_splits`` (1…128) is given.
    """
    return _launch(batch, return_lse, num_splits or planned_splits(batch))


def _launch(batch: PagedBatch, return_lse: bool, splits: int) -> Tensor | tuple[Tensor, Tensor]:
    shape = (batch.num_tokens, batch.num_q_heads)
    out = batch.query.new_empty(*shape, batch.head_dim_v, dtype=output_dtype(batch))
    lse = batch.query.new_empty(shape, dtype=torch.float32) if return_lse else batch.seq_lens
    if batch.num_tokens and batch.num_seqs:
        count_launch(NAME)
        parts = batch.query.new_empty(*shape, splits, batch.head_dim_v, dtype=torch.float32)
        tops, totals = batch.query.new_empty(2, *shape, splits, dtype=torch.float32).unbind()
        tiling = _tiling(batch, splits)
        row_tiles = -(-batch.group_size // tiling.rows)
        arguments = shared_arguments(batch)
        attention_kernel[(-(-arguments["num_pairs"] * splits // tiling.pairs) * row_tiles,)](
            **arguments,
            **launch_arguments(tiling),
            out_ptr=parts,
            lse_ptr=tops,
            total_ptr=totals,
            row_tiles=row_tiles,
            num_splits=splits,
            search_from=0,
            SPLIT=True,
            PACKED=False,
            HAS_SINKS=False,
            HAS_LSE=True,
        )
        num_rows = batch.num_tokens * batch.num_q_heads
        parts_width, dv = triton.next_power_of_2(splits), padded(batch.head_dim_v)
        most = MAX_INTERPRETED_TILE // (parts_width * dv)
        rows = min(triton.next_power_of_2(num_rows), most) if interpreting() else 1
        merge_kernel[(-(-num_rows // rows),)](
            part_ptr=parts,
            top_ptr=tops,
            total_ptr=totals,
            sinks_ptr=arguments["sinks_ptr"],
            out_ptr=out,
            lse_ptr=lse,
            num_rows=num_rows,
            num_q_heads=batch.num_q_heads,
            num_splits=splits,
            HEAD_DIM_V=batch.head_dim_v,
            DV=dv,
            SPLITS=parts_width,
            ROWS=rows,
            HAS_SINKS=batch.sinks is not None,
            HAS_LSE=return_lse,
            num_warps=4 if parts_width * dv <= 8192 else 8,
        )
    out = out.to(batch.query.dtype)
    return (out, lse) if return_lse else out
