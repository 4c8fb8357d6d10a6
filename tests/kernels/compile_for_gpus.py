"""Compile the Triton kernels for GPUs that need not be there. Run as a script, without TRITON_INTERPRET.

``python compile_for_gpus.py ARCH…`` prints a line of JSON per binary: kernel, arch, what it was specialised for, bytes
of shared memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pabench_kernels.triton_attend import attention_kernel
from pabench_kernels.triton_cache_write import cache_write_kernel
from pabench_kernels.triton_common import MIN_DOT, gpu_tiling, max_rows, padded
from pabench_kernels.triton_split import merge_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COMPUTE = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
STORED_AS = {"e4m3": "u8", "e5m2": "u8", "int8": "i8"}
BITS = {"fp32": "i32", "fp16": "i16", "bf16": "i16", "e4m3": "u8", "e5m2": "u8", "int8": "u8"}

# launcher, query dtype, cache dtype, head_dim, query heads per KV head, features: none, all, all with scales per head
ATTENTION = [
    ("decode", "fp16", "fp16", 64, 3, "none"),
    ("prefill", "bf16", "bf16", 128, 4, "per-head"),
    ("split", "bf16", "e4m3", 128, 71, "none"),
    ("unified", "bf16", "e4m3", 128, 4, "all"),
]
MORE_ATTENTION = [
    *(("decode", "bf16", "bf16", 512, 71, "none"), ("decode", "fp32", "fp32", 64, 3, "all")),
    *(("prefill", "fp32", "fp32", 512, 1, "none"), ("prefill", "fp16", "int8", 256, 8, "all")),
    *(("split", "fp32", "fp32", 256, 1, "all"), ("split", "fp16", "e5m2", 40, 71, "per-head")),
    *(("unified", "fp16", "fp16", 512, 4, "all"), ("unified", "fp32", "e5m2", 80, 3, "none")),
]
MERGES = [
    ("fp32", 64, 1, True),
    ("bf16", 128, 32, False),
    ("fp16", 512, 128, True),
]  # output, head_dim, splits, features
WRITES = [("bf16", "e4m3", True), ("fp32", "bf16", False)]
MORE_WRITES = [
    *(("fp32", "e4m3", False), ("fp16", "e5m2", True), ("bf16", "int8", True)),
    *(("fp32", "fp16", False), ("bf16", "fp32", True), ("bf16", "bf16", False)),
]


def compile_one(
    fn: Any, arch: str, constants: dict[str, Any], elements: dict[str, str], options: dict[str, int]
) -> Any:
    """``elements``: what pointers point to, where not to fp32."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return "*" + elements.get(name, "fp32")
        return "fp32" if name in ("scale", "soft_cap") else "i32"

    source = ASTSource(
        fn,
        {name: type_of(name) for name in fn.arg_names},
        {name: value for name, value in constants.items() if name in fn.arg_names},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if name.endswith("_ptr")},
    )
    return triton.compile(source, target=TARGETS[arch], options=options)


def attention(arch: str, launcher: str, dtype: str, kv_dtype: str, head_dim: int, group: int, features: str) -> Any:
    width, itemsize = padded(head_dim), 4 if dtype == "fp32" else 2
    rows = max_rows(width, itemsize)
    if launcher in ("decode", "split"):
        rows = min(rows, max(MIN_DOT, triton.next_power_of_2(group)))
    tiling = gpu_tiling(rows, width, itemsize)
    kv_format = kv_dtype if kv_dtype in ("e4m3", "e5m2") else "plain"
    constants = {
        **{"HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim, "D": width, "DV": width, "BLOCK_SIZE": 16, "GROUP": group},
        **{"PAIRS": 1, "ROWS": rows, "KEYS": tiling.keys, "CAUSAL": launcher in ("prefill", "unified")},
        **{"K_FORMAT": kv_format, "V_FORMAT": kv_format, "Q_FORMAT": "plain", "COMPUTE": COMPUTE[dtype]},
        **{"SPLIT": launcher == "split", "PACKED": launcher == "unified"},
        **{name: features != "none" for name in attention_kernel.arg_names if name.startswith("HAS_")},
    }
    if features == "per-head":
        constants |= {"HAS_K_TOKEN_SCALE": False, "HAS_V_TOKEN_SCALE": False}
    if group > 64:  # a number that is 1 becomes a constant when the launcher is called
        constants |= dict.fromkeys(("num_kv_heads", "row_tiles", "num_splits", "window"), 1)
    if group == 4:
        constants |= {"search_from": 1}
    if launcher == "split":
        constants |= {"HAS_SINKS": False, "HAS_LSE": True}
    kv_element = STORED_AS.get(kv_dtype, kv_dtype)
    elements = {"q_ptr": dtype, "k_ptr": kv_element, "v_ptr": kv_element}
    elements |= {"out_ptr": "fp32" if launcher == "split" else dtype}
    elements |= dict.fromkeys(("table_ptr", "seq_lens_ptr", "query_start_ptr"), "i32")
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return compile_one(attention_kernel, arch, constants, elements, options)


def merge(arch: str, dtype: str, head_dim: int, splits: int, features: bool) -> Any:
    width = padded(head_dim)
    constants = {"HEAD_DIM_V": head_dim, "DV": width, "SPLITS": splits, "ROWS": 1}
    constants |= {"HAS_SINKS": features, "HAS_LSE": features}
    options = {"num_warps": 4 if splits * width <= 8192 else 8}
    return compile_one(merge_kernel, arch, constants, {"out_ptr": dtype}, options)


def cache_write(arch: str, dtype: str, cache_dtype: str, scales: bool) -> Any:
    target = "copy" if dtype == cache_dtype and not scales else cache_dtype
    constants = {"HEAD_DIM": 128, "HEAD_DIM_V": 80, "BLOCK_SIZE": 16, "TOKENS": 1, "ELEMENTS": 1024}
    constants |= {f"{side}_SOURCE": "plain" for side in "KV"} | {f"{side}_TARGET": target for side in "KV"}
    constants |= {f"HAS_{side}_SCALE": scales for side in "KV"}
    source = BITS[dtype] if target == "copy" else dtype
    elements = {"key_ptr": source, "value_ptr": source, "slot_ptr": "i64"}
    elements |= {"k_ptr": BITS[cache_dtype], "v_ptr": BITS[cache_dtype]}
    return compile_one(cache_write_kernel, arch, constants, elements, {"num_warps": 4})


def binaries(arch: str, more: bool) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for shape in MORE_ATTENTION if more else ATTENTION:
        yield "attention_kernel", shape, attention(arch, *shape)
    for shape in MERGES if more else MERGES[1:2]:
        yield "merge_kernel", shape, merge(arch, *shape)
    for shape in MORE_WRITES if more else WRITES:
        yield "cache_write_kernel", shape, cache_write(arch, *shape)


def main(archs: list[str], more: bool) -> None:
    for arch in archs:
        for kernel, shape, binary in binaries(arch, more):
            found = {"kernel": kernel, "arch": arch, "shape": list(shape), "shared": binary.metadata.shared}
            found["binary"] = sorted(binary.asm.keys() & {"cubin", "hsaco"})
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main([a for a in sys.argv[1:] if a != "--more"], "--more" in sys.argv)
