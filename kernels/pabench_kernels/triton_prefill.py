"""Paged prefill attention in Triton: packed queries of any length, with or without a cached past.

The algorithm is FlashAttention-2's online softmax over query tiles (Dao, 2023) on PagedAttention's block table (Kwon
et al., 2023). A query tile is a run of (token, query head) rows of one KV head, heads fastest, so that any ratio of
query to KV heads fills it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.standard import _elementwise_max, _sum_combine

from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch
from pabench_kernels.triton_common import (
    MIN_DOT,
    Tiling,
    compute_dtype,
    gpu_tiling,
    interpreted_pairs,
    interpreting,
    limits,
    output_dtype,
    padded,
    shared_arguments,
    soft_capped,
    to_number,
)

NAME = "triton_prefill"
MAX_ROWS = 128
INTERPRETED_ROWS = 512
INTERPRETED_KEYS = 256


@triton.jit
def prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [NB, BS, Hkv, D]
    v_ptr,  # [NB, BS, Hkv, Dv]
    table_ptr,  # [S, max blocks]
    seq_lens_ptr,  # [S]
    query_start_ptr,  # [S + 1]
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,  # [Hq]
    sinks_ptr,  # [Hq]
    out_ptr,  # [T, Hq, Dv], contiguous
    lse_ptr,  # [T, Hq], contiguous
    scale,
    soft_cap,
    window,
    num_pairs,
    num_kv_heads,
    row_tiles,
    q_stride_token,
    q_stride_head,
    k_stride_block,
    k_stride_token,
    k_stride_head,
    v_stride_block,
    v_stride_token,
    v_stride_head,
    table_stride_seq,
    table_stride_block,
    k_scale_stride,
    v_scale_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    D: tl.constexpr,  # padded widths of the tiles
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,  # (token, query head) rows per pair in this program
    KEYS: tl.constexpr,  # keys per pair and iteration
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of what is multiplied; sums are fp32
    CAUSAL: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    first_pair = program // row_tiles * PAIRS
    first_row = program % row_tiles * ROWS
    d = tl.arange(0, D).to(tl.int64)
    dv = tl.arange(0, DV).to(tl.int64)
    n = tl.arange(0, KEYS).to(tl.int64)

    # One row per (pair, token, query head); pairs lie one after another, and only tl.dot sees them apart.
    r = tl.arange(0, PAIRS * ROWS).to(tl.int64)
    row_pair = first_pair + r // ROWS
    row_seq = row_pair // num_kv_heads
    row_kv_head = row_pair % num_kv_heads
    member = first_row + r % ROWS
    row_live = row_pair < num_pairs
    row_len = tl.load(seq_lens_ptr + row_seq, mask=row_live, other=0).to(tl.int64)
    row_start = tl.load(query_start_ptr + row_seq, mask=row_live, other=0).to(tl.int64)
    row_queries = tl.load(query_start_ptr + row_seq + 1, mask=row_live, other=0).to(tl.int64) - row_start
    row_live &= member < row_queries * GROUP
    head = row_kv_head * GROUP + member % GROUP
    token = row_start + member // GROUP
    query_pos = row_len - row_queries + member // GROUP
    row_hi = tl.minimum(row_len, query_pos + 1) if CAUSAL else row_len
    q_at = token * q_stride_token + head * q_stride_head
    q_mask = row_live[:, None] & (d < HEAD_DIM)[None, :]
    q = to_number(tl.load(q_ptr + (q_at[:, None] + d[None, :]), mask=q_mask, other=0), Q_FORMAT, COMPUTE)

    # One entry per (pair, key of the tile). A pair's keys go from the first that its first row sees to the last of any.
    c = tl.arange(0, PAIRS * KEYS).to(tl.int64)
    key_pair = first_pair + c // KEYS
    key_seq = key_pair // num_kv_heads
    key_kv_head = key_pair % num_kv_heads
    key_live = key_pair < num_pairs
    key_hi = tl.load(seq_lens_ptr + key_seq, mask=key_live, other=0).to(tl.int64)
    queries = tl.load(query_start_ptr + key_seq + 1, mask=key_live, other=0).to(tl.int64)
    queries -= tl.load(query_start_ptr + key_seq, mask=key_live, other=0).to(tl.int64)
    past = key_hi - queries
    if HAS_WINDOW:
        key_lo = tl.maximum(past + first_row // GROUP - window + 1, 0)
        row_lo = tl.maximum(row_len - row_queries + first_row // GROUP - window + 1, 0)
    else:
        key_lo = tl.full([PAIRS * KEYS], 0, tl.int64)
        row_lo = tl.full([PAIRS * ROWS], 0, tl.int64)
    if CAUSAL:
        key_hi = tl.minimum(key_hi, past + (first_row + ROWS - 1) // GROUP + 1)
    key_hi = tl.where(first_row < queries * GROUP, key_hi, 0)
    span = tl.reduce(key_hi - key_lo, 0, _elementwise_max)

    factor = tl.full([PAIRS * ROWS], 1.0, tl.float32) * scale
    if HAS_K_SCALE:
        factor *= tl.load(k_scale_ptr + row_kv_head * k_scale_stride, mask=row_live, other=0)
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + head, mask=row_live, other=0)
    if HAS_SINKS:  # the sink is one more key, seen first, without a value
        m = tl.load(sinks_ptr + head, mask=row_live, other=0).to(tl.float32)
        total = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full([PAIRS * ROWS], float("-inf"), tl.float32)
        total = tl.full([PAIRS * ROWS], 0.0, tl.float32)
    acc = tl.full([PAIRS * ROWS, DV], 0.0, tl.float32)

    for start in range(0, span, KEYS):
        pos = key_lo + (start + c % KEYS)
        live = pos < key_hi
        entry = table_ptr + (key_seq * table_stride_seq + pos // BLOCK_SIZE * table_stride_block)
        block = tl.load(entry, mask=live, other=0).to(tl.int64)
        slot = pos % BLOCK_SIZE

        k_at = block * k_stride_block + slot * k_stride_token + key_kv_head * k_stride_head
        k_mask = live[:, None] & (d < HEAD_DIM)[None, :]
        k = to_number(tl.load(k_ptr + (k_at[:, None] + d[None, :]), mask=k_mask, other=0), K_FORMAT, COMPUTE)
        if PAIRS == 1:
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            k3 = tl.permute(tl.reshape(k, [PAIRS, KEYS, D]), (0, 2, 1))
            s3 = tl.dot(tl.reshape(q, [PAIRS, ROWS, D]), k3, input_precision="ieee")
            s = tl.reshape(s3, [PAIRS * ROWS, KEYS])
        s *= factor[:, None]
        if HAS_SOFT_CAP:
            s = soft_capped(s, soft_cap)
        row_pos = row_lo[:, None] + (start + n)[None, :]
        seen = row_pos < row_hi[:, None]
        if HAS_WINDOW:
            seen &= row_pos > (query_pos - window)[:, None]
        if HAS_ALIBI:
            s += slope[:, None] * (row_pos - query_pos[:, None]).to(tl.float32)
        s = tl.where(seen, s, float("-inf"))

        m_new = tl.maximum(m, tl.reduce(s, 1, _elementwise_max))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - m_safe[:, None])
        alpha = tl.exp(m - m_safe)
        total = total * alpha + tl.reduce(p, 1, _sum_combine)
        m = m_new

        v_at = block * v_stride_block + slot * v_stride_token + key_kv_head * v_stride_head
        v_mask = live[:, None] & (dv < HEAD_DIM_V)[None, :]
        v = to_number(tl.load(v_ptr + (v_at[:, None] + dv[None, :]), mask=v_mask, other=0), V_FORMAT, COMPUTE)
        if PAIRS == 1:
            acc = tl.dot(p.to(COMPUTE), v, acc * alpha[:, None], input_precision="ieee")
        else:
            p3 = tl.reshape(p.to(COMPUTE), [PAIRS, ROWS, KEYS])
            o3 = tl.dot(p3, tl.reshape(v, [PAIRS, KEYS, DV]), input_precision="ieee")
            acc = acc * alpha[:, None] + tl.reshape(o3, [PAIRS * ROWS, DV])

    empty = (total == 0.0) | (row_len == 0)
    safe_total = tl.where(empty, 1.0, total)
    out = acc / safe_total[:, None]
    if HAS_V_SCALE:
        out *= tl.load(v_scale_ptr + row_kv_head * v_scale_stride, mask=row_live, other=0)[:, None]
    out_row = token * num_kv_heads * GROUP + head
    out_mask = row_live[:, None] & (dv < HEAD_DIM_V)[None, :]
    tl.store(out_ptr + (out_row[:, None] * HEAD_DIM_V + dv[None, :]), out.to(out_ptr.dtype.element_ty), mask=out_mask)
    if HAS_LSE:
        tl.store(lse_ptr + out_row, tl.where(empty, float("-inf"), m + tl.log(safe_total)), mask=row_live)


def _tiling(batch: PagedBatch) -> Tiling:
    rows = max(MIN_DOT, triton.next_power_of_2(batch.max_query_len * batch.group_size))
    if not interpreting():
        return gpu_tiling(min(MAX_ROWS, rows), padded(max(batch.head_dim, batch.head_dim_v)), batch.query.itemsize)
    rows = min(INTERPRETED_ROWS, rows)
    keys = max(MIN_DOT, min(INTERPRETED_KEYS, triton.next_power_of_2(batch.max_seq_len)))
    pairs = interpreted_pairs(batch, rows, keys)
    return Tiling(pairs, rows, keys, 4, 1)


@kernel(NAME, phases={"prefill"}, unsupported=limits)
def triton_prefill(batch: PagedBatch, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Paged prefill attention: any number of query tokens a sequence, after a cached past or none (chunked prefill).

    ``query`` [T, Hq, D] fp32, fp16 or bf16; caches in its dtype, fp8_e4m3fn, fp8_e5m2 or int8; last dimensions
    contiguous. Gives [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]. On a GPU products are taken in
    the query's dtype and summed in fp32; under the interpreter all is fp32.
    """
    shape = (batch.num_tokens, batch.num_q_heads)
    out = batch.query.new_empty(*shape, batch.head_dim_v, dtype=output_dtype(batch))
    lse = batch.query.new_empty(shape, dtype=torch.float32) if return_lse else batch.seq_lens
    tiling = _tiling(batch)
    row_tiles = -(-batch.max_query_len * batch.group_size // tiling.rows)
    arguments = shared_arguments(batch)
    if batch.num_tokens and batch.num_seqs:
        count_launch(NAME)
        prefill_kernel[(-(-arguments["num_pairs"] // tiling.pairs) * row_tiles,)](
            **arguments,
            out_ptr=out,
            lse_ptr=lse,
            row_tiles=row_tiles,
            COMPUTE=compute_dtype(batch),
            CAUSAL=batch.causal,
            HAS_LSE=return_lse,
            PAIRS=tiling.pairs,
            ROWS=tiling.rows,
            KEYS=tiling.keys,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    out = out.to(batch.query.dtype)
    return (out, lse) if return_lse else out
