"""Triton kernels that declare too little, too much, or what is so. They are compiled and never launched."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from pabench_kernels.target import TARGETS, target_of


@triton.jit
def read_natively(k_ptr, out_ptr, N: tl.constexpr):
    """sm_80 has no e4m3 conversion."""
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(k_ptr + n).to(tl.float32))


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, steps, TILE: tl.constexpr):
    n = tl.arange(0, TILE)
    at = n[:, None] * TILE + n[None, :]
    total = tl.full([TILE, TILE], 0.0, tl.float32)
    for step in range(0, steps):
        offset = step * TILE * TILE
        total = tl.dot(tl.load(a_ptr + offset + at), tl.load(b_ptr + offset + at), total)
    tl.store(out_ptr + at, total)


def _output(batch):
    return torch.empty(batch.num_tokens, batch.num_q_heads, batch.head_dim_v, device=batch.query.device)


def _launch(batch):
    out = _output(batch)
    read_natively[(1,)](batch.key_cache, out, N=64)
    return out.to(batch.query.dtype)


def undeclared(batch):
    return _launch(batch)


def honest(batch):
    return _launch(batch)


def _no_e4m3_on_sm_80(batch):
    if batch.key_cache.dtype == torch.float8_e4m3fn and target_of(batch) == "sm_80":
        return ["sm_80 reads no e4m3"]
    return []


def overcautious(batch):
    return _launch(batch)


def too_much_shared(batch):
    out = _output(batch)
    multiply[(1,)](batch.query, batch.query, out, 4, TILE=128, num_warps=8, num_stages=3)
    return out.to(batch.query.dtype)


def knows_its_shared(batch):
    return too_much_shared(batch)


def late(batch):
    raise NotImplementedError("found out late")


def syncs_and_chooses(batch):
    """Reads values, as a launcher may: the stand-ins have some."""
    if int(batch.seq_lens.max()) > 0 and batch.query_start_loc.tolist()[0] == 0:
        return _launch(batch)
    raise ValueError("no such batch")


def broken_launcher(batch):
    raise KeyError("no tiling")


def crashes(batch):
    os.kill(os.getpid(), signal.SIGSEGV)


def sleeps(batch):
    Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
    time.sleep(600)


@triton.autotune(configs=[triton.Config({"N": n}, num_warps=w) for n, w in ((48, 4), (64, 2))], key=[])
@triton.jit
def tuned(k_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)  # 48 is no power of two
    tl.store(out_ptr + n, tl.load(k_ptr + n).to(tl.float32))


def autotuned(batch):
    out = _output(batch)
    tuned[(1,)](batch.key_cache, out)
    return out.to(batch.query.dtype)


for kernel in (undeclared, honest, overcautious, too_much_shared, knows_its_shared, late, syncs_and_chooses):
    kernel.phases = {"decode"}
for kernel in (broken_launcher, crashes, sleeps, autotuned):
    kernel.phases = {"decode"}
honest.unsupported = _no_e4m3_on_sm_80
overcautious.unsupported = lambda batch: ["bf16 is too coarse"] if batch.query.dtype == torch.bfloat16 else []
knows_its_shared.unsupported = lambda batch: (
    ["needs 130 KiB of shared memory"] if TARGETS[target_of(batch)].shared_bytes < 130 << 10 else []
)
