"""Paged-attention kernels and the contract they keep. Needs torch and triton only; importing this imports neither."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pabench_kernels.cache_write import reshape_and_cache
    from pabench_kernels.contract import Kernel, KernelSpec, PagedBatch, Phase
    from pabench_kernels.registry import get_kernel, kernel_names

_HOME = {
    "Kernel": "contract",
    "KernelSpec": "contract",
    "PagedBatch": "contract",
    "Phase": "contract",
    "get_kernel": "registry",
    "kernel_names": "registry",
    "reshape_and_cache": "cache_write",
}
__all__ = ["Kernel", "KernelSpec", "PagedBatch", "Phase", "get_kernel", "kernel_names", "reshape_and_cache"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
