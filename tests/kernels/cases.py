"""One shared table of awkward shapes, and the batches built from it: everything that must not be read is poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pabench_kernels.cache_write import quantize
from pabench_kernels.contract import PagedBatch

Phase = Literal["decode", "prefill"]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}


@dataclass(frozen=True)
class Case:
    group: int = 3
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    block_size: int = 16
    lens: tuple[int, ...] = (17, 0, 40, 1, 16, 15)
    dtype: torch.dtype = FP32
    kv_dtype: torch.dtype | None = None
    scales: Literal["none", "tensor", "head", "token"] = "none"
    causal: bool = True
    window: int | None = None
    alibi: bool = False
    cap: float | None = None
    sinks: bool = False
    strided: bool = False
    seed: int = field(default=0)


def edges(block_size: int) -> tuple[int, ...]:
    return (block_size + 1, max(block_size - 1, 0), block_size)


CASES: dict[str, Case] = {
    "plain": Case(),
    "mha": Case(group=1, kv_heads=5, head_dim=40),
    "gqa2-17-kv-heads": Case(group=2, kv_heads=17, head_dim=32, lens=(17, 5)),
    "gqa8": Case(group=8, kv_heads=1, head_dim=80),
    "gqa71": Case(group=71, kv_heads=1, head_dim=64, lens=(33, 1, 9)),
    "gqa142": Case(group=142, kv_heads=1, head_dim=32, lens=(9,)),
    "head-dim-1": Case(head_dim=1),
    "head-dim-96": Case(head_dim=96),
    "head-dim-128": Case(head_dim=128),
    "head-dim-256": Case(head_dim=256, lens=(17, 40)),
    "head-dim-320": Case(head_dim=320, head_dim_v=288, lens=(17, 40)),
    "head-dim-512": Case(head_dim=512, group=2, kv_heads=1, lens=(17, 40)),
    "value-dim-smaller": Case(head_dim=64, head_dim_v=32),
    "value-dim-larger": Case(head_dim=40, head_dim_v=72),
    "block-1": Case(block_size=1, lens=(2, 0, 1, 9)),
    "block-3": Case(block_size=3, lens=(*edges(3), 31)),
    "block-17": Case(block_size=17, lens=(*edges(17), 52)),
    "block-256": Case(block_size=256, lens=edges(256), group=1, head_dim=32),
    "block-512": Case(block_size=512, lens=edges(512), group=1, kv_heads=1, head_dim=32),
    "block-size-is-kv-heads": Case(block_size=3, kv_heads=3),
    "length-257": Case(lens=(257, 240), group=2, kv_heads=1),
    "one-sequence": Case(lens=(129,)),
    "nine-sequences": Case(lens=(3, 20, 7, 1, 18, 33, 2, 16, 31)),
    "only-empty": Case(lens=(0, 0)),
    "window-1": Case(window=1, lens=(17, 0, 40, 1)),
    "window-7": Case(window=7),
    "window-16": Case(window=16, lens=(15, 16, 17, 64, 80)),
    "window-long": Case(window=100, lens=(300, 99, 101), kv_heads=1),
    "window-beyond": Case(window=1000),
    "bidirectional": Case(causal=False),
    "bidirectional-window": Case(causal=False, window=9),
    "alibi": Case(alibi=True, lens=(70, 1, 16)),
    "alibi-window": Case(alibi=True, window=20, lens=(70, 1, 16)),
    "soft-cap": Case(cap=2.5),
    "soft-cap-wide": Case(cap=50.0),
    "sinks": Case(sinks=True),
    "sinks-window": Case(sinks=True, window=5),
    "everything": Case(alibi=True, cap=8.0, sinks=True, window=21, lens=(50, 0, 21, 22, 20), block_size=7),
    "scaled-fp32-cache": Case(scales="tensor"),
    "e4m3": Case(kv_dtype=E4M3, scales="tensor"),
    "e5m2-per-head": Case(kv_dtype=E5M2, scales="head", kv_heads=3),
    "int8-per-head": Case(kv_dtype=INT8, scales="head"),
    "e4m3-unscaled": Case(kv_dtype=E4M3),
    "fp32-per-token": Case(scales="token", head_dim_v=48),
    "e4m3-per-token": Case(kv_dtype=E4M3, scales="token", kv_heads=3, window=7),
    "e5m2-per-token": Case(kv_dtype=E5M2, scales="token", block_size=3),
    "int8-per-token": Case(kv_dtype=INT8, scales="token", group=1),
    "strided": Case(strided=True),
    "strided-e4m3": Case(strided=True, kv_dtype=E4M3, scales="head"),
    "fp16": Case(dtype=FP16),
    "fp16-everything": Case(dtype=FP16, alibi=True, cap=8.0, sinks=True, window=21, lens=(50, 0, 21)),
    "fp16-int8-per-token": Case(dtype=FP16, kv_dtype=INT8, scales="token"),
    "fp16-e5m2": Case(dtype=FP16, kv_dtype=E5M2, scales="tensor"),
    "bf16": Case(dtype=BF16),
    "bf16-strided-window": Case(dtype=BF16, strided=True, window=7),
    "bf16-everything": Case(dtype=BF16, alibi=True, cap=8.0, sinks=True, window=21, lens=(50, 0, 21)),
    "bf16-e4m3-per-head": Case(dtype=BF16, kv_dtype=E4M3, scales="head"),
    "bf16-e4m3-per-token": Case(dtype=BF16, kv_dtype=E4M3, scales="token", strided=True),
    "bf16-int8": Case(dtype=BF16, kv_dtype=INT8, scales="tensor"),
    "bf16-length-257": Case(dtype=BF16, lens=(257,), group=2, kv_heads=1),
}


def query_lens(case: Case, phase: Phase) -> list[int]:
    """Decode: one each. Prefill: whole prompts, chunks of 5 and 33 after a past, in turn; a padding row has one."""
    if phase == "decode":
        return [1] * len(case.lens)
    return [max(1, min(length, (length, 5, 33)[i % 3])) for i, length in enumerate(case.lens)]


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN wherever the dtype has one, else its largest number."""
    if dtype == INT8:
        return torch.full(shape, 127, dtype=INT8)
    return torch.full(shape, math.nan, dtype=FP32).to(dtype)


def make_batch(case: Case, phase: Phase) -> PagedBatch:
    rng = torch.Generator().manual_seed(case.seed + 1)
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    kv_dtype = case.dtype if case.kv_dtype is None else case.kv_dtype
    queries = query_lens(case, phase)
    firsts = [
        0 if case.window is None else max(0, length - n - case.window + 1)
        for length, n in zip(case.lens, queries, strict=True)
    ]
    used = [-(-length // case.block_size) for length in case.lens]
    num_blocks = sum(used) + 5
    ids = torch.randperm(num_blocks, generator=rng)
    columns = max(used) + 2
    table = torch.full((len(case.lens), columns), -1, dtype=torch.int32)
    table[::2] = int(ids[-1])  # a stale id of a block that nobody owns

    def scale(factor: float) -> Tensor | None:
        if case.scales == "none":
            return None
        if case.scales == "tensor":
            return torch.tensor(factor)
        per_head = factor * (1 + 0.37 * torch.arange(case.kv_heads))
        if case.scales == "head":
            return per_head
        return torch.full((num_blocks, case.block_size, case.kv_heads), torch.nan)  # of own tokens only: see `pool`

    narrow = kv_dtype == INT8
    k_scale, v_scale = scale(0.031 if narrow else 0.37), scale(0.023 if narrow else 0.61)

    def pool(dim: int, factors: Tensor | None) -> Tensor:
        if case.strided:  # heads before tokens, and rows wider than a head
            whole = poison((num_blocks, case.kv_heads, case.block_size, dim + 8), kv_dtype)
            cache = whole.transpose(1, 2)[..., :dim]
        else:
            cache = poison((num_blocks, case.block_size, case.kv_heads, dim), kv_dtype)
        block = 0
        for seq, length in enumerate(case.lens):
            tokens = torch.randn(length, case.kv_heads, dim, generator=rng)
            for column in range(used[seq]):
                if (column + 1) * case.block_size > firsts[seq]:  # else freed: wholly behind every window
                    table[seq, column] = ids[block]
                    part = tokens[column * case.block_size : (column + 1) * case.block_size]
                    factor = factors
                    if factors is not None and case.scales == "token":
                        factor = part.abs().amax(-1) / LARGEST.get(kv_dtype, 3.0)
                        factors[ids[block], : len(part)] = factor
                    cache[ids[block], : len(part)] = quantize(part, kv_dtype, factor)
                else:
                    table[seq, column] = -1 if seq % 2 else int(ids[-2])
                block += 1
        return cache

    heads = case.group * case.kv_heads
    wide = torch.randn(sum(queries), heads + 2, case.head_dim + 8, generator=rng).mul_(2).to(case.dtype)
    query = wide[:, :heads, : case.head_dim] if case.strided else wide[:, :heads, : case.head_dim].contiguous()
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    return PagedBatch(
        query=query,
        key_cache=pool(case.head_dim, k_scale),
        value_cache=pool(head_dim_v, v_scale),
        block_table=table,
        seq_lens=torch.tensor(case.lens, dtype=torch.int32),
        query_start_loc=starts,
        max_query_len=max(queries),
        max_seq_len=max(case.lens),
        scale=case.head_dim**-0.5,
        k_scale=k_scale,
        v_scale=v_scale,
        causal=case.causal,
        sliding_window=case.window,
        alibi_slopes=0.5 ** torch.linspace(1, 6, heads) if case.alibi else None,
        logits_soft_cap=case.cap,
        sinks=torch.randn(heads, generator=rng) if case.sinks else None,
    )


def changed(batch: PagedBatch, **changes: Any) -> PagedBatch:
    return replace(batch, **changes)
