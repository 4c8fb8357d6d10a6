"""Paged attention of a mixed batch in Triton, in one launch: prompts, chunks after a cached past and decode together.

The packed batch is cut into tiles of rows, and a program finds its tile's sequence by binary search in
``query_start_loc``, as vLLM's unified attention does. So a short query beside a long prompt costs one tile, not as many
as the prompt. Where queries are alike, giving each sequence the same number of tiles makes fewer, and nothing is
searched.
"""

from __future__ import annotations

import triton
from torch import Tensor

from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.triton_common import (
    MIN_DOT,
    Tiling,
    attention,
    decode_rows,
    gpu_tiling,
    interpreted_tiling,
    interpreting,
    limits,
    max_rows,
    padded,
)

NAME = "triton_unified"
INTERPRETED_ROWS = 512
INTERPRETED_KEYS = 256


def _tiles(batch: PagedBatch, rows: int) -> tuple[int, int]:
    """Tiles of ``rows`` for each KV head, and how many of them each sequence has; 0: as its query needs (packed)."""
    packed = batch.num_tokens * batch.group_size // rows + batch.num_seqs  # counted as the kernel does: some are spare
    each = -(-batch.max_query_len * batch.group_size // rows)
    return (packed, 0) if packed < batch.num_seqs * each else (batch.num_seqs * each, each)


def _tiling(batch: PagedBatch) -> Tiling:
    mean = -(
        -batch.num_tokens // max(1, batch.num_seqs)
    )  # a tile for the mean query: decode rows must not fill a prompt's
    rows = max(MIN_DOT, triton.next_power_of_2(mean * batch.group_size))
    if not interpreting():
        dim = padded(max(batch.head_dim, batch.head_dim_v))
        return gpu_tiling(min(max_rows(dim, batch.query.itemsize), rows), dim, batch.query.itemsize)
    rows = decode_rows(batch) if batch.max_query_len <= 1 else min(INTERPRETED_ROWS, rows)
    keys = max(MIN_DOT, min(INTERPRETED_KEYS, triton.next_power_of_2(batch.max_seq_len)))
    return interpreted_tiling(batch, rows, keys, _tiles(batch, rows)[0] * batch.num_kv_heads)


@kernel(NAME, unsupported=limits, per_token_scales=True)
def triton_unified(batch: PagedBatch, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Paged attention of any batch, phases mixed or not.

    ``query`` [T, Hq, D] fp32, fp16 or bf16; caches in its dtype, fp8_e4m3fn, fp8_e5m2 or int8; last dimensions
    contiguous. Gives [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]. On a GPU products are taken in
    the query's dtype and summed in fp32; under the interpreter all is fp32. Does not wait for the device.
    """
    tiling = _tiling(batch)
    tiles, each = _tiles(batch, tiling.rows)
    if each == 0:
        return attention(NAME, batch, return_lse, tiling, -(-tiles * batch.num_kv_heads // tiling.pairs), packed=True)
    programs = -(-batch.num_seqs * batch.num_kv_heads // tiling.pairs) * each
    return attention(NAME, batch, return_lse, tiling, programs, row_tiles=each)
