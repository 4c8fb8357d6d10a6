"""cpu_native against torch_paged, one thread, interleaved: medians per call.

``python benchmarks/cpu_native.py``. Workload S: 4 sequences of 256 tokens, 9 query and 3 KV heads of 64. Workload M:
8 sequences of 2,048 tokens, 32 query and 8 KV heads of 128. Workload P: prefill of one prompt of 512 tokens, heads as
in S. Block 16.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[threads] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import torch  # noqa: E402

from pabench_kernels.cache_write import quantize  # noqa: E402
from pabench_kernels.contract import PagedBatch  # noqa: E402
from pabench_kernels.cpu_native import cpu_native  # noqa: E402
from pabench_kernels.torch_paged import torch_paged  # noqa: E402

BLOCK_SIZE = 16
SHAPES = {"S": (4, 256, 1, 9, 3, 64), "M": (8, 2048, 1, 32, 8, 128), "P": (1, 512, 512, 9, 3, 64)}
ROUNDS = {"S": 200, "M": 15, "P": 20}
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16/e4m3": (torch.bfloat16, torch.float8_e4m3fn),
    "bf16/int8": (torch.bfloat16, torch.int8),
}


def workload(shape: str, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> PagedBatch:
    torch.manual_seed(0)
    seqs, tokens, queries, q_heads, kv_heads, dim = SHAPES[shape]
    blocks = seqs * tokens // block_size
    scale = torch.tensor(0.03) if kv_dtype == torch.int8 else None

    def pool() -> torch.Tensor:
        return quantize(torch.randn(blocks, block_size, kv_heads, dim), kv_dtype, scale)

    return PagedBatch(
        query=torch.randn(seqs * queries, q_heads, dim).to(dtype),
        key_cache=pool(),
        value_cache=pool(),
        block_table=torch.randperm(blocks).view(seqs, -1).int(),
        seq_lens=torch.full((seqs,), tokens, dtype=torch.int32),
        query_start_loc=torch.arange(seqs + 1, dtype=torch.int32) * queries,
        max_query_len=queries,
        max_seq_len=tokens,
        scale=dim**-0.5,
        k_scale=scale,
        v_scale=scale,
    )


def read_gb_per_s() -> float:
    """What one thread reads from memory, by summing 256 MiB."""
    data = torch.ones(64 << 20)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(times) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    bandwidth = read_gb_per_s()
    print(f"one thread reads {bandwidth:.1f} GB/s")
    print(f"{'':3}{'dtype':11}{'cpu_native us':>14}{'torch_paged us':>16}{'ratio':>7}{'GB/s':>7}{'of read':>9}")
    for shape in SHAPES:
        for name, dtypes in DTYPES.items():
            batch = workload(shape, *dtypes)
            torch.testing.assert_close(cpu_native(batch), torch_paged(batch), atol=0.02, rtol=0.02)
            times: dict[str, list[float]] = {"cpu_native": [], "torch_paged": []}
            for _ in range(ROUNDS[shape]):
                for kernel in (cpu_native, torch_paged):
                    start = time.perf_counter()
                    kernel(batch)
                    times[kernel.name].append((time.perf_counter() - start) * 1e6)
            own, torchs = (statistics.median(t) for t in times.values())
            read = (batch.key_cache.nbytes + batch.value_cache.nbytes) / own / 1e3
            print(
                f"{shape:3}{name:11}{own:14.0f}{torchs:16.0f}{own / torchs:7.2f}{read:7.1f}{read / bandwidth:9.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
