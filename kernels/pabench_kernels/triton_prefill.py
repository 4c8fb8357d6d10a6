"""Paged prefill attention in Triton: packed queries of any length, with or without a cached past.

Query tiles after FlashAttention-2 (Dao, 2023): each (sequence, KV head) pair has as many as the longest query needs. A
batch of mostly short queries is better served by ``triton_unified``.
"""

from __future__ import annotations

import triton
from torch import Tensor

from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.triton_common import (
    MIN_DOT,
    Tiling,
    attention,
    gpu_tiling,
    interpreted_tiling,
    interpreting,
    limits,
    max_rows,
    padded,
)

NAME = "triton_prefill"
INTERPRETED_ROWS = 512
INTERPRETED_KEYS = 256


def _tiling(batch: PagedBatch) -> Tiling:
    rows = max(MIN_DOT, triton.next_power_of_2(batch.max_query_len * batch.group_size))
    if not interpreting():
        dim = padded(max(batch.head_dim, batch.head_dim_v))
        return gpu_tiling(min(max_rows(dim, batch.query.itemsize), rows), dim, batch.query.itemsize)
    rows = min(INTERPRETED_ROWS, rows)
    keys = max(MIN_DOT, min(INTERPRETED_KEYS, triton.next_power_of_2(batch.max_seq_len)))
    return interpreted_tiling(batch, rows, keys, batch.num_seqs * batch.num_kv_heads)


@kernel(NAME, phases={"prefill"}, unsupported=limits, per_token_scales=True)
def triton_prefill(batch: PagedBatch, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Paged prefill attention: any number of query tokens a sequence, after a cached past or none (chunked prefill).

    ``query`` [T, Hq, D] fp32, fp16 or bf16; caches in its dtype, fp8_e4m3fn, fp8_e5m2 or int8; last dimensions
    contiguous. Gives [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]. On a GPU products are taken in
    the query's dtype and summed in fp32; under the interpreter all is fp32. Does not wait for the device.
    """
    tiling = _tiling(batch)
    row_tiles = -(-batch.max_query_len * batch.group_size // tiling.rows)
    programs = -(-batch.num_seqs * batch.num_kv_heads // tiling.pairs) * row_tiles
    return attention(NAME, batch, return_lse, tiling, programs, row_tiles=row_tiles)
