"""What interpretation costs: triton_decode under Triton's interpreter against torch_paged, one thread, interleaved.

``python benchmarks/kernels_cpu.py``. Workload S: 4 sequences of 256 tokens, 9 query and 3 KV heads of 64, block 16,
fp32.
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
from pabench_kernels.torch_paged import torch_paged  # noqa: E402
from pabench_kernels.triton_decode import triton_decode  # noqa: E402

SEQS, Q_HEADS, KV_HEADS, DIM, TOKENS, BLOCK_SIZE = 4, 9, 3, 64, 256, 16
ROUNDS = 40


def workload() -> PagedBatch:
    torch.manual_seed(0)
    blocks = SEQS * TOKENS // BLOCK_SIZE
    return PagedBatch(
        query=torch.randn(SEQS, Q_HEADS, DIM),
        key_cache=torch.randn(blocks, BLOCK_SIZE, KV_HEADS, DIM),
        value_cache=torch.randn(blocks, BLOCK_SIZE, KV_HEADS, DIM),
        block_table=torch.randperm(blocks).view(SEQS, -1).int(),
        seq_lens=torch.full((SEQS,), TOKENS, dtype=torch.int32),
        query_start_loc=torch.arange(SEQS + 1, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=TOKENS,
        scale=DIM**-0.5,
    )


def main() -> None:
    torch.set_num_threads(1)
    batch = workload()
    kernels = (torch_paged, triton_decode)
    torch.testing.assert_close(triton_decode(batch), torch_paged(batch))  # no speed for a wrong answer
    latency_us: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
    for _ in range(ROUNDS):
        for kernel in kernels:
            start = time.perf_counter()
            kernel(batch)
            latency_us[kernel.name].append((time.perf_counter() - start) * 1e6)
    medians = {name: statistics.median(times) for name, times in latency_us.items()}
    for name, median in medians.items():
        print(f"{name:14} {median:10.0f} us")
    print(f"ratio          {medians['triton_decode'] / medians['torch_paged']:10.1f}")


if __name__ == "__main__":
    main()
