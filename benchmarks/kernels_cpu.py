"""What interpretation costs: the Triton decode kernels under Triton's interpreter against torch_paged, one thread.

``python benchmarks/kernels_cpu.py [S] [M]``. Workloads, block 16, fp32: S is 4 sequences of 256 tokens, 9 query and 3
KV heads of 64; M is 8 sequences of 2,048 tokens, 32 query and 8 KV heads of 128. Kernels take turns; what is counted is
the thread's own time, so that a busy machine does not show.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[threads] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import torch  # noqa: E402

from pabench_kernels.contract import PagedBatch  # noqa: E402
from pabench_kernels.registry import get_kernel  # noqa: E402

KERNELS = ("torch_paged", "triton_decode", "triton_split", "triton_unified")
BLOCK_SIZE = 16
WORKLOADS = {"S": (4, 9, 3, 64, 256, 40), "M": (8, 32, 8, 128, 2048, 5)}  # …, rounds


def workload(seqs: int, q_heads: int, kv_heads: int, dim: int, tokens: int) -> PagedBatch:
    torch.manual_seed(0)
    blocks = seqs * tokens // BLOCK_SIZE
    return PagedBatch(
        query=torch.randn(seqs, q_heads, dim),
        key_cache=torch.randn(blocks, BLOCK_SIZE, kv_heads, dim),
        value_cache=torch.randn(blocks, BLOCK_SIZE, kv_heads, dim),
        block_table=torch.randperm(blocks).view(seqs, -1).int(),
        seq_lens=torch.full((seqs,), tokens, dtype=torch.int32),
        query_start_loc=torch.arange(seqs + 1, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=tokens,
        scale=dim**-0.5,
    )


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    kernels = [get_kernel(name) for name in KERNELS]
    for name in names or list(WORKLOADS):
        *shape, rounds = WORKLOADS[name]
        batch = workload(*shape)
        right = kernels[0](batch)
        for kernel in kernels[1:]:
            torch.testing.assert_close(kernel(batch), right)  # no speed for a wrong answer
        latency_us: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
        for _ in range(rounds):
            for kernel in kernels:
                start = time.thread_time()
                kernel(batch)
                latency_us[kernel.name].append((time.thread_time() - start) * 1e6)
        medians = {kernel: statistics.median(times) for kernel, times in latency_us.items()}
        for kernel_name, median in medians.items():
            print(f"{name} {kernel_name:14} {median:10.0f} us {median / medians['torch_paged']:7.1f}×")


if __name__ == "__main__":
    main(sys.argv[1:])
