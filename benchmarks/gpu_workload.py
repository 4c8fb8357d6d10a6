"""One decode workload of ``kernels_gpu.py``: a paged batch, the same tokens contiguous, and the check of an output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pabench.checks.tolerance import allowed
from pabench.reference.oracle import attention_oracle, dense_attention
from pabench_kernels.cache_write import dequantize, quantize
from pabench_kernels.contract import PagedBatch

BLOCK_SIZE = 16
CHECKED_SEQUENCES = 3  # first, middle, last


@dataclass(frozen=True)
class Geometry:
    """Heads of Llama-3-8B, unless told otherwise."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Workload:
    """``batch`` sequences of ``context`` tokens; what is timed is one decode step of one layer."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        size = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {size}"

    def kv_bytes(self, geometry: Geometry, itemsize: int) -> int:
        """Bytes of K and V that one step must read."""
        return 2 * self.batch * self.context * geometry.kv_heads * geometry.head_dim * itemsize

    def need_bytes(self, geometry: Geometry) -> int:
        """Device memory: the 16-bit pool, its contiguous copy, the fp8 pool, and room for checking one sequence."""
        one = Workload(1, self.context).kv_bytes(geometry, 8) * geometry.q_heads // geometry.kv_heads
        return self.kv_bytes(geometry, 5) + 3 * one


def make_batch(workload: Workload, geometry: Geometry, dtype: torch.dtype, device: str, seed: int) -> PagedBatch:
    """Random K and V in shuffled blocks; every sequence at full length."""
    generator = torch.Generator(device).manual_seed(seed)
    g, per_seq = geometry, -(-workload.context // BLOCK_SIZE)
    blocks = workload.batch * per_seq
    pool = (blocks, BLOCK_SIZE, g.kv_heads, g.head_dim)

    def drawn(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    table = torch.randperm(blocks, device=device, generator=generator).view(workload.batch, per_seq)
    return PagedBatch(
        query=drawn(workload.batch, g.q_heads, g.head_dim),
        key_cache=drawn(*pool),
        value_cache=drawn(*pool),
        block_table=table.int(),
        seq_lens=torch.full((workload.batch,), workload.context, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(workload.batch + 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_seq_len=workload.context,
        scale=g.head_dim**-0.5,
    )


def in_fp8(batch: PagedBatch) -> PagedBatch:
    """The same batch over an fp8_e4m3 cache, quantised block by block to spare memory."""
    scale = torch.full((), 0.05, device=batch.query.device)

    def quantized(pool: Tensor) -> Tensor:
        out = torch.empty(pool.shape, dtype=torch.float8_e4m3fn, device=pool.device)
        for begin in range(0, pool.shape[0], 4096):
            part = quantize(pool[begin : begin + 4096], torch.float8_e4m3fn, scale)
            out.view(torch.uint8)[begin : begin + 4096] = part.view(torch.uint8)
        return out

    caches = {"key_cache": quantized(batch.key_cache), "value_cache": quantized(batch.value_cache)}
    return PagedBatch(**{**vars(batch), **caches, "k_scale": scale, "v_scale": scale})


def contiguous(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """K and V as [S, Hkv, L, D] views of contiguous [S, L, Hkv, D]: dense attention's cache."""
    size = (batch.num_seqs, -1, batch.num_kv_heads, batch.head_dim)
    index = batch.block_table.flatten().long()
    key, value = (c.index_select(0, index).view(size) for c in (batch.key_cache, batch.value_cache))
    return (
        key[:, : batch.max_seq_len].transpose(1, 2),
        value[:, : batch.max_seq_len].transpose(1, 2),
    )


def worst_ratio(batch: PagedBatch, out: Tensor) -> float:
    """Largest error of some sequences' rows over what the three-way rule tolerates; above 1 is wrong, NaN is inf."""
    dtype, device, length = batch.query.dtype, batch.query.device, batch.max_seq_len
    if out.shape != batch.query.shape or out.dtype != dtype or not bool(out.isfinite().all()):
        return float("inf")
    positions = torch.tensor([length - 1], device=device)
    worst = 0.0
    for s in sorted({0, batch.num_seqs // 2, batch.num_seqs - 1})[:CHECKED_SEQUENCES]:
        blocks = batch.block_table[s].long()
        key, value = (
            _numbers(cache[blocks].flatten(0, 1)[:length], scale)
            for cache, scale in ((batch.key_cache, batch.k_scale), (batch.value_cache, batch.v_scale))
        )
        query = batch.query[s : s + 1]
        oracle = attention_oracle(query, key, value, query_positions=positions, scale=batch.scale)
        dense = [dense_attention(query, key, value, query_positions=positions, scale=batch.scale)]
        if dtype != torch.float32:
            rounded = (x.to(dtype).float() for x in (query, key, value))
            dense.append(dense_attention(*rounded, query_positions=positions, scale=batch.scale).to(dtype))
        honest = torch.stack([(d.double() - oracle.out).norm(dim=-1) for d in dense]).amax(0) / oracle.size
        pooled = float(honest.square().mean().sqrt())
        error = (out[s : s + 1].double() - oracle.out).norm(dim=-1) / oracle.size
        worst = max(worst, float((error / allowed(honest, pooled, dtype)).max()))
    return worst


def _numbers(stored: Tensor, scale: Tensor | None) -> Tensor:
    return stored if scale is None else dequantize(stored, scale)
