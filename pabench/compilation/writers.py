"""Cache writers as kernels, so that they are compiled as the rest is: a batch's first query heads are its new keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from pabench_kernels.contract import Kernel, PagedBatch

WRITERS = ("triton_reshape_and_cache",)


def writer(name: str) -> Kernel:
    """The cache writer of that name."""
    import torch

    from pabench_kernels.contract import Kernel
    from pabench_kernels.triton_cache_write import triton_reshape_and_cache

    write = {"triton_reshape_and_cache": triton_reshape_and_cache}[name]

    def write_new_tokens(batch: PagedBatch) -> Tensor:
        new = batch.query[:, : batch.num_kv_heads]
        slots = torch.arange(batch.num_tokens, device=batch.query.device)
        write(new, new, batch.key_cache, batch.value_cache, slots, batch.k_scale, batch.v_scale)
        return batch.query

    return Kernel(name, write_new_tokens, phases=frozenset({"prefill"}))
