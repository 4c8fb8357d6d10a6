"""Compile the Triton kernels for GPUs that need not be there. Run as a script, without TRITON_INTERPRET.

``python compile_for_gpus.py ARCH…`` prints a line of JSON per binary: kernel, arch, dtypes, head_dim, bytes of shared
memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pabench_kernels.triton_common import gpu_tiling
from pabench_kernels.triton_decode import decode_kernel
from pabench_kernels.triton_prefill import prefill_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COMPUTE = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
STORED_AS = {"e4m3": "u8", "e5m2": "u8", "int8": "i8"}
SHAPES = [  # query dtype, cache dtype, head_dim, query heads per KV head, every feature or none
    ("fp16", "fp16", 64, 3, False),
    ("bf16", "bf16", 128, 4, True),
    ("bf16", "e4m3", 128, 71, False),
]
MORE_SHAPES = [
    ("fp32", "fp32", 64, 3, True),
    ("fp32", "fp32", 256, 1, False),
    ("fp16", "int8", 256, 8, True),
    ("fp16", "e5m2", 40, 71, True),
    ("bf16", "bf16", 256, 4, True),
]


def compile_one(fn: Any, arch: str, dtype: str, kv_dtype: str, head_dim: int, group: int, features: bool) -> Any:
    width = max(16, triton.next_power_of_2(head_dim))
    itemsize = 4 if dtype == "fp32" else 2
    if fn is decode_kernel:
        rows = min(128, max(16, triton.next_power_of_2(group)))
    else:
        rows = min(128, 16384 // width // (itemsize // 2))
    tiling = gpu_tiling(rows, width, itemsize)
    kv_format = kv_dtype if kv_dtype in ("e4m3", "e5m2") else "plain"
    constants = {
        **{"HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim, "D": width, "DV": width, "BLOCK_SIZE": 16, "GROUP": group},
        **{"PAIRS": 1, "ROWS": rows, "ROW_TILES": -(-group // rows), "KEYS": tiling.keys, "CAUSAL": True},
        **{"K_FORMAT": kv_format, "V_FORMAT": kv_format, "Q_FORMAT": "plain", "COMPUTE": COMPUTE[dtype]},
        **{name: features for name in fn.arg_names if name.startswith("HAS_")},
    }
    kv_element = STORED_AS.get(kv_dtype, kv_dtype)
    elements = {"q_ptr": dtype, "out_ptr": dtype, "k_ptr": kv_element, "v_ptr": kv_element}
    elements |= dict.fromkeys(("table_ptr", "seq_lens_ptr", "query_start_ptr"), "i32")

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
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return triton.compile(source, target=TARGETS[arch], options=options)


def main(archs: list[str], more: bool) -> None:
    for arch in archs:
        for fn in (decode_kernel, prefill_kernel):
            for shape in MORE_SHAPES if more else SHAPES:
                binary = compile_one(fn, arch, *shape)
                found = {"kernel": fn.__name__, "arch": arch, "shape": list(shape), "shared": binary.metadata.shared}
                found["binary"] = sorted(binary.asm.keys() & {"cubin", "hsaco"})
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main([a for a in sys.argv[1:] if a != "--more"], "--more" in sys.argv)
