"""A batch for one specialisation, on tensors that stand in for a GPU's; its values are never looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from pabench.compilation.cases import DEFAULT_HEAD_DIMS
from pabench.torch_dtypes import TORCH_DTYPES
from pabench_kernels.contract import Kernel, PagedBatch
from pabench_kernels.standin import standin

FEATURES = ("group71", "window", "alibi", "soft_cap", "sinks", "head_scales")
BLOCK_SIZE = 16
_SEQ_LENS = (4096, 129, 17)  # long enough that a kernel which splits the keys does so
_PREFILL_TOKENS = (128, 129, 5)


def build(phase: str, dtype: str, kv_dtype: str, head_dim: int, features: Collection[str] = ()) -> PagedBatch:
    """Three sequences; in ``features`` is what of ``FEATURES`` the batch has."""
    group, kv_heads = (71, 1) if "group71" in features else (4, 2)
    queries = _PREFILL_TOKENS if phase == "prefill" else (1, 1, 1)
    heads, cache_dtype = group * kv_heads, TORCH_DTYPES[kv_dtype]
    pool = (max(_SEQ_LENS) // BLOCK_SIZE, BLOCK_SIZE, kv_heads, head_dim)

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return standin(torch.empty(size, dtype=dtype))

    def ints(numbers: Iterable[int]) -> Tensor:
        return standin(torch.tensor(list(numbers), dtype=torch.int32))

    optional: dict[str, Any] = {}
    if "head_scales" in features:
        optional |= {"k_scale": empty(kv_heads), "v_scale": empty(kv_heads)}
    elif kv_dtype != dtype:
        optional |= {"k_scale": empty(), "v_scale": empty()}
    if "window" in features:
        optional["sliding_window"] = 100
    if "soft_cap" in features:
        optional["logits_soft_cap"] = 30.0
    for name, field in (("alibi", "alibi_slopes"), ("sinks", "sinks")):
        if name in features:
            optional[field] = empty(heads)
    return PagedBatch(
        query=empty(sum(queries), heads, head_dim, dtype=TORCH_DTYPES[dtype]),
        key_cache=empty(*pool, dtype=cache_dtype),
        value_cache=empty(*pool, dtype=cache_dtype),
        block_table=standin(torch.zeros(len(_SEQ_LENS), pool[0], dtype=torch.int32)),
        seq_lens=ints(_SEQ_LENS),
        query_start_loc=ints(torch.tensor([0, *queries]).cumsum(0).tolist()),
        max_query_len=max(queries),
        max_seq_len=max(_SEQ_LENS),
        scale=head_dim**-0.5,
        **optional,
    )


def supported_features(kernel: Kernel, phase: str) -> frozenset[str]:
    """Features that the kernel does not refuse by themselves, on the first plain batch that it takes.

    A limit on a feature is not what is judged here: the variant "features" leaves out what the kernel declares.
    """
    for dtype in ("fp16", "bf16", "fp32"):
        for head_dim in (*DEFAULT_HEAD_DIMS, 32, 96):
            if not kernel.unsupported(build(phase, dtype, dtype, head_dim)):
                one_by_one = {f: kernel.unsupported(build(phase, dtype, dtype, head_dim, {f})) for f in FEATURES}
                return frozenset(f for f, reasons in one_by_one.items() if not reasons)
    return frozenset()
