"""Paged decode attention in Triton: one query token a sequence, one program for each (sequence, KV head) pair.

A program holds all query heads of its pair, so each cached element is read once. Where few long sequences leave
processors idle, ``triton_split`` cuts them into parts.
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
    padded,
    reach,
)

NAME = "triton_decode"
INTERPRETED_KEYS = 256


def _tiling(batch: PagedBatch) -> Tiling:
    rows = decode_rows(batch)
    if not interpreting():
        return gpu_tiling(rows, padded(max(batch.head_dim, batch.head_dim_v)), batch.query.itemsize)
    keys = max(MIN_DOT, min(INTERPRETED_KEYS, triton.next_power_of_2(reach(batch))))
    return interpreted_tiling(batch, rows, keys, batch.num_seqs * batch.num_kv_heads)


@kernel(NAME, phases={"decode"}, unsupported=limits, per_token_scales=True)
def triton_decode(batch: PagedBatch, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Paged decode attention: at most one query token a sequence, which sees the whole sequence or its window.

    ``query`` [T, Hq, D] fp32, fp16 or bf16; caches in its dtype, fp8_e4m3fn, fp8_e5m2 or int8; last dimensions
    contiguous. Gives [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]. On a GPU products are taken in
    the query's dtype and summed in fp32; under the interpreter all is fp32. Does not wait for the device.
    """
    tiling = _tiling(batch)
    row_tiles = -(-batch.group_size // tiling.rows)
    programs = -(-batch.num_seqs * batch.num_kv_heads // tiling.pairs) * row_tiles
    return attention(NAME, batch, return_lse, tiling, programs, row_tiles=row_tiles)
