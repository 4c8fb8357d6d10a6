"""What the launchers of the Triton kernels share: limits, arguments, tile sizes.

The same sources run on a GPU and under Triton's interpreter. The interpreter pays per operation and not per element, so
there a program takes many (sequence, KV head) pairs (``PAIRS``) and long key tiles; on a GPU it takes one pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pabench_kernels.contract import PagedBatch
from pabench_kernels.trace import count_launch
from pabench_kernels.triton_attend import attention_kernel

MAX_HEAD_DIM = 512
MAX_ROWS = 128  # of a tile; more query heads or tokens take more tiles
MAX_ACCUMULATOR = 16384  # fp32 numbers of a tile; more would spill registers
MIN_DOT = 16  # tensor cores take no smaller tile
MAX_INTERPRETED_TILE = 1 << 20  # elements; Triton allows no larger tensor
MAX_FP32_ROWS = 16  # more spill kilobytes, and Triton 3.6 refuses 32 rows × 16 keys
INTERPRETED_PROGRAM = 100_000  # what one more program costs, in loaded elements
QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# How an element lies in memory: (the dtype it is passed as, the FORMAT that `to_number` reads). fp8 is decoded from its
# bits: sm_80 has no e4m3 conversion, and the interpreter reads fp8 NaN as finite numbers.
_QUANTIZED = {
    torch.float8_e4m3fn: (torch.uint8, "e4m3"),
    torch.float8_e5m2: (torch.uint8, "e5m2"),
    torch.int8: (torch.int8, "plain"),
}


def interpreting() -> bool:
    """Whether kernels are run by Triton's interpreter, which must be chosen before triton is imported."""
    return bool(triton.knobs.runtime.interpret)


def storage(x: Tensor) -> tuple[Tensor, str]:
    """``x`` of any shape as a kernel gets it, and its FORMAT. The interpreter has no bf16 arithmetic: it gets bits."""
    if x.dtype == torch.bfloat16 and interpreting():
        return x.view(torch.int16), "bf16_bits"
    dtype, fmt = _QUANTIZED.get(x.dtype, (x.dtype, "plain"))
    return x.view(dtype), fmt


def limits(batch: PagedBatch) -> list[str]:
    """What no Triton kernel computes, as sentences; empty if they can."""
    reasons = []
    if batch.query.device.type == "cpu" and not interpreting():
        reasons.append("Triton needs a GPU or TRITON_INTERPRET=1")
    if batch.query.dtype not in QUERY_DTYPES:
        reasons.append(f"query dtype must be fp32, fp16 or bf16, got {batch.query.dtype}")
    if batch.num_q_heads % batch.num_kv_heads:
        reasons.append(f"{batch.num_q_heads} query heads are no multiple of {batch.num_kv_heads} KV heads")
    for name, dim in (("head_dim", batch.head_dim), ("value head_dim", batch.head_dim_v)):
        if dim > MAX_HEAD_DIM:
            reasons.append(f"{name} must be at most {MAX_HEAD_DIM}, got {dim}")
    tensors = {"query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache}
    for name, x in tensors.items():
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            reasons.append(f"{name}'s last dimension must be contiguous, got stride {x.stride(-1)}")
        if name != "query" and x.dtype != batch.query.dtype and x.dtype not in _QUANTIZED:
            reasons.append(f"{name} must be {batch.query.dtype}, fp8_e4m3fn, fp8_e5m2 or int8, got {x.dtype}")
    return reasons


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and GPU launch settings: ``pairs`` tiles a program, of ``rows`` query rows and ``keys`` keys each."""

    pairs: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def gpu_tiling(rows: int, dim: int, itemsize: int) -> Tiling:
    """At most ``rows`` query rows of padded width ``dim``, so few that neither registers nor shared memory run out.

    `pabench compile` shows what a change here costs. A K or V tile takes at most 16 KiB of shared memory a stage.
    """
    if itemsize == 4:  # no tensor core takes fp32 exactly: a thread holds its operands in registers
        return Tiling(1, min(rows, MAX_FP32_ROWS), max(16, min(32, 2048 // dim)), 4, 1)
    rows = min(rows, MAX_ACCUMULATOR // dim)
    keys = max(16, min(64, 8192 // dim))
    return Tiling(1, rows, keys, 4 if rows * dim < 8192 else 8, 2)


def interpreted_tiling(batch: PagedBatch, rows: int, keys: int, tiles: int) -> Tiling:
    """Few programs under the interpreter: a power of two of the ``tiles`` in each that leaves few places empty."""
    dim = padded(max(batch.head_dim, batch.head_dim_v))
    tile = max(rows * keys, rows * dim, keys * dim)
    choices = [1 << i for i in range(21) if tile << i <= MAX_INTERPRETED_TILE] or [1]
    pairs = min(choices, key=lambda pairs: -(-tiles // pairs) * (pairs * tile + INTERPRETED_PROGRAM))
    return Tiling(pairs, rows, keys, 4, 1)


def decode_rows(batch: PagedBatch) -> int:
    """Rows of a tile that holds one query token: the query heads of a KV head, padded."""
    least = 1 if interpreting() else MIN_DOT
    return min(MAX_ROWS, max(least, int(triton.next_power_of_2(batch.group_size))))


def max_rows(dim: int, itemsize: int) -> int:
    """The most query rows of padded width ``dim`` whose sums registers hold."""
    return max(MIN_DOT, min(MAX_ROWS, MAX_ACCUMULATOR // dim // (itemsize // 2)))


def reach(batch: PagedBatch) -> int:
    """How many keys a decode row can see."""
    return batch.max_seq_len if batch.sliding_window is None else min(batch.max_seq_len, batch.sliding_window)


def compute_dtype(batch: PagedBatch) -> Any:
    """The dtype in which products are taken: on a GPU the query's, for its tensor cores."""
    if interpreting():
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[batch.query.dtype]


def output_dtype(batch: PagedBatch) -> torch.dtype:
    """What the kernel stores: under the interpreter fp32, which torch rounds (the interpreter would truncate)."""
    return torch.float32 if interpreting() else batch.query.dtype


def padded(dim: int) -> int:
    """The tile width of a head_dim: the next power of two, at least what a tensor core takes."""
    return max(MIN_DOT, int(triton.next_power_of_2(dim)))


def scale_strides(which: str, scale: Tensor | None) -> dict[str, int]:
    """Strides of a scale [], [Hkv] or [NB, BS, Hkv] over block, token and head; 0 where it does not vary."""
    strides = () if scale is None else scale.stride()
    places = zip(("block", "token", "head"), (0, 0, 0, *strides)[-3:], strict=True)
    return {f"{which}_scale_stride_{place}": stride for place, stride in places}


def shared_arguments(batch: PagedBatch) -> dict[str, Any]:
    """The arguments that all attention kernels take by the same names: caches, scales, features and strides.

    A tensor that the batch lacks is passed as ``seq_lens`` and never read: its HAS_ flag is off.
    """
    query, q_format = storage(batch.query)
    key_cache, k_format = storage(batch.key_cache)
    value_cache, v_format = storage(batch.value_cache)
    unread = batch.seq_lens
    k_scale, v_scale = batch.k_scale, batch.v_scale
    return {
        "q_ptr": query,
        "k_ptr": key_cache,
        "v_ptr": value_cache,
        "table_ptr": batch.block_table,
        "seq_lens_ptr": batch.seq_lens,
        "query_start_ptr": batch.query_start_loc,
        "k_scale_ptr": unread if k_scale is None else k_scale,
        "v_scale_ptr": unread if v_scale is None else v_scale,
        "slopes_ptr": unread if batch.alibi_slopes is None else batch.alibi_slopes,
        "sinks_ptr": unread if batch.sinks is None else batch.sinks,
        "scale": float(batch.scale),
        "soft_cap": float(batch.logits_soft_cap or 1.0),
        "window": batch.sliding_window or 0,
        "num_pairs": batch.num_seqs * batch.num_kv_heads,
        "num_kv_heads": batch.num_kv_heads,
        "q_stride_token": query.stride(0),
        "q_stride_head": query.stride(1),
        "k_stride_block": key_cache.stride(0),
        "k_stride_token": key_cache.stride(1),
        "k_stride_head": key_cache.stride(2),
        "v_stride_block": value_cache.stride(0),
        "v_stride_token": value_cache.stride(1),
        "v_stride_head": value_cache.stride(2),
        "table_stride_seq": batch.block_table.stride(0),
        "table_stride_block": batch.block_table.stride(1),
        **scale_strides("k", k_scale),
        **scale_strides("v", v_scale),
        "HEAD_DIM": batch.head_dim,
        "HEAD_DIM_V": batch.head_dim_v,
        "D": padded(batch.head_dim),
        "DV": padded(batch.head_dim_v),
        "BLOCK_SIZE": batch.block_size,
        "GROUP": batch.group_size,
        "Q_FORMAT": q_format,
        "K_FORMAT": k_format,
        "V_FORMAT": v_format,
        "COMPUTE": compute_dtype(batch),
        "CAUSAL": batch.causal and batch.max_query_len > 1,
        "HAS_K_SCALE": k_scale is not None,
        "HAS_K_TOKEN_SCALE": k_scale is not None and k_scale.ndim == 3,
        "HAS_V_SCALE": v_scale is not None,
        "HAS_V_TOKEN_SCALE": v_scale is not None and v_scale.ndim == 3,
        "HAS_ALIBI": batch.alibi_slopes is not None,
        "HAS_SOFT_CAP": batch.logits_soft_cap is not None,
        "HAS_WINDOW": batch.sliding_window is not None,
    }


def launch_arguments(tiling: Tiling) -> dict[str, int]:
    """Tile sizes and launch settings by the names that kernel and launch know them under."""
    return {
        "PAIRS": tiling.pairs,
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def attention(
    name: str,
    batch: PagedBatch,
    return_lse: bool,
    tiling: Tiling,
    programs: int,
    *,
    row_tiles: int = 1,
    packed: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One launch of the attention kernel: [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]."""
    shape = (batch.num_tokens, batch.num_q_heads)
    out = batch.query.new_empty(*shape, batch.head_dim_v, dtype=output_dtype(batch))
    lse = batch.query.new_empty(shape, dtype=torch.float32) if return_lse else batch.seq_lens
    if batch.num_tokens and batch.num_seqs:
        count_launch(name)
        attention_kernel[(programs,)](
            **shared_arguments(batch),
            **launch_arguments(tiling),
            out_ptr=out,
            lse_ptr=lse,
            total_ptr=lse,
            row_tiles=row_tiles,
            num_splits=1,
            search_from=triton.next_power_of_2(batch.num_seqs) // 2,
            SPLIT=False,
            PACKED=packed,
            HAS_SINKS=batch.sinks is not None,
            HAS_LSE=return_lse,
        )
    out = out.to(batch.query.dtype)
    return (out, lse) if return_lse else out
