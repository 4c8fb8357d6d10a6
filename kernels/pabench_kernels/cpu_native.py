"""Paged attention in C++ for CPUs: ``cpu_native.cpp``, compiled on first use. Decode, prefill, or both in one batch.

Shape legend: T packed query tokens, S sequences, Hq query heads, Hkv KV heads, D head_dim, Dv value head_dim.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.native_build import BuildError, build
from pabench_kernels.trace import count_launch

NAME = "cpu_native"
SOURCE = Path(__file__).with_suffix(".cpp")
QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FORMATS = {  # `Format` of the source
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
}
_BAD_QUERY_RANGE, _BAD_BLOCK, _NO_MEMORY = 1, 2, 3

_POINTERS = (
    "query key_cache value_cache block_table seq_lens query_start_loc k_scale v_scale alibi_slopes sinks out lse"
)
_NUMBERS = (
    "query_format key_format value_format num_tokens num_seqs num_q_heads num_kv_heads head_dim head_dim_v num_blocks "
    "block_size columns"
)
_INT64 = ctypes.c_int64


class _Args(ctypes.Structure):
    """``Args`` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, _INT64) for name in _NUMBERS.split()),
        ("query_strides", _INT64 * 2),
        ("key_strides", _INT64 * 3),
        ("value_strides", _INT64 * 3),
        ("table_stride", _INT64),
        ("token_scales", _INT64 * 2),
        ("causal", _INT64),
        ("window", _INT64),
        ("threads", _INT64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("bad_seq", _INT64),
        ("bad_column", _INT64),
        ("bad_id", _INT64),
    )


@cache
def _function() -> Any:
    """The compiled function, or the reason why there is none; found once in a process."""
    try:
        library = build(SOURCE)
        function = ctypes.CDLL(str(library)).pabench_paged_attention
    except BuildError as error:
        return str(error)
    except OSError as error:
        return f"the compiled kernel cannot be loaded: {error}"
    function.argtypes, function.restype = [ctypes.POINTER(_Args)], ctypes.c_int
    return function


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = []
    tensors = {"query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache}
    if devices := sorted({str(x.device) for x in tensors.values() if x.device.type != "cpu"}):
        reasons.append(f"{NAME} runs on the CPU, got tensors on {', '.join(devices)}")
    if batch.query.dtype not in QUERY_DTYPES:
        reasons.append(f"query dtype must be fp32, fp16 or bf16, got {batch.query.dtype}")
    for name in ("key_cache", "value_cache"):
        x = tensors[name]
        if x.dtype not in _FORMATS:
            reasons.append(f"{name} must be fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2 or int8, got {x.dtype}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            reasons.append(f"{name}'s last dimension must be contiguous, got stride {x.stride(-1)}")
    if batch.num_q_heads % batch.num_kv_heads:
        reasons.append(f"{batch.num_q_heads} query heads are no multiple of {batch.num_kv_heads} KV heads")
    if not reasons and isinstance(reason := _function(), str):  # last: it compiles
        reasons.append(reason)
    return reasons


@kernel(NAME, unsupported=_unsupported, per_token_scales=True)
def cpu_native(batch: PagedBatch, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Paged attention of any batch, phases mixed or not, on ``torch.get_num_threads()`` threads.

    Gives [T, Hq, Dv] in the query's dtype and, if asked, lse fp32 [T, Hq]. ``query`` [T, Hq, D] is fp32, fp16 or bf16;
    the caches are fp32, fp16, bf16, fp8 or int8 in any strides with a contiguous last dimension. Everything is computed
    in fp32, whatever the dtypes. The results of a row depend neither on the other sequences nor on the threads. Raises
    ``NotImplementedError`` with the reason where ``unsupported`` has one about the compiler, ``ValueError`` before
    anything is read if a block id or a query range lies outside its tensor.
    """
    function = _function()
    if isinstance(function, str):
        raise NotImplementedError(function)
    query = batch.query if batch.head_dim == 1 or batch.query.stride(-1) == 1 else batch.query.contiguous()
    out = torch.zeros(batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
    lse = torch.full((batch.num_tokens, batch.num_q_heads), -math.inf) if return_lse else None
    table = batch.block_table if batch.block_table.stride(-1) == 1 else batch.block_table.contiguous()
    heads, kv_heads = (batch.num_q_heads,), (batch.num_kv_heads,)
    pointed = {  # held until the call returns
        "query": query,
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "block_table": table.to(torch.int32),
        "seq_lens": batch.seq_lens.to(torch.int32).contiguous(),
        "query_start_loc": batch.query_start_loc.to(torch.int32).contiguous(),
        "k_scale": _floats(batch.k_scale, kv_heads),
        "v_scale": _floats(batch.v_scale, kv_heads),
        "alibi_slopes": _floats(batch.alibi_slopes, heads),
        "sinks": _floats(batch.sinks, heads),
        "out": out,
        "lse": lse,
    }
    args = _Args(
        **{name: x.data_ptr() for name, x in pointed.items() if x is not None},
        query_format=_FORMATS[query.dtype],
        key_format=_FORMATS[batch.key_cache.dtype],
        value_format=_FORMATS[batch.value_cache.dtype],
        num_tokens=batch.num_tokens,
        num_seqs=batch.num_seqs,
        num_q_heads=batch.num_q_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        head_dim_v=batch.head_dim_v,
        num_blocks=min(batch.key_cache.shape[0], batch.value_cache.shape[0]),
        block_size=batch.block_size,
        columns=table.shape[1],
        query_strides=query.stride()[:2],
        key_strides=batch.key_cache.stride()[:3],
        value_strides=batch.value_cache.stride()[:3],
        table_stride=table.stride(0),
        token_scales=tuple(scale is not None and scale.ndim == 3 for scale in (batch.k_scale, batch.v_scale)),
        causal=batch.causal,
        window=-1 if batch.sliding_window is None else batch.sliding_window,
        threads=torch.get_num_threads(),
        scale=batch.scale,
        soft_cap=batch.logits_soft_cap or 0.0,
    )
    count_launch(NAME)
    error = function(args)
    if error:
        raise _error(error, args)
    found = out.to(batch.query.dtype)
    return found if lse is None else (found, lse)


def _floats(x: Tensor | None, shape: tuple[int]) -> Tensor | None:
    """fp32, contiguous; a scalar repeated to ``shape``, scales per token and head as they are."""
    if x is None:
        return None
    return x.to(torch.float32).expand(x.shape if x.ndim == 3 else shape).contiguous()


def _error(code: int, args: _Args) -> Exception:
    if code == _BAD_BLOCK:
        return ValueError(
            f"block_table[{args.bad_seq}, {args.bad_column}] is needed and holds {args.bad_id}; "
            f"the pool has blocks 0…{args.num_blocks - 1} and the table {args.columns} columns"
        )
    if code == _BAD_QUERY_RANGE:
        return ValueError(
            f"query_start_loc of sequence {args.bad_seq} must rise within 0…{args.num_tokens}, the query's tokens"
        )
    return MemoryError(f"{NAME} ran out of memory")
