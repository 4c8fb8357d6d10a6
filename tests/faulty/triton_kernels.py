"""Right Triton kernels as strangers write them for a GPU: what the interpreter makes of them is another matter."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.language as tl

_spec = importlib.util.spec_from_file_location("faulty_kernels", Path(__file__).parent / "kernels.py")
_faulty = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_faulty)


@triton.jit
def _doubled(x_ptr, out_ptr, n, IN_FP32: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    if IN_FP32:
        x = x.to(tl.float32)
    tl.store(out_ptr + at, x + x, mask=at < n)


@triton.jit
def _scaled(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n).to(tl.float32) * factor, mask=at < n)


def _launch(function, x, out, *more):
    x = x.contiguous()
    function[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), *more, BLOCK=1024)
    return out


def computes_in_the_query_dtype(batch):
    doubled = _launch(_doubled, batch.query, torch.empty(batch.query.shape, dtype=batch.query.dtype), False)
    return _faulty.honest_whole(replace(batch, query=doubled, scale=batch.scale / 2))


def computes_in_fp32(batch):
    doubled = _launch(_doubled, batch.query, torch.empty(batch.query.shape, dtype=torch.float32), True)
    out = _faulty.honest_whole(replace(batch, query=doubled, scale=batch.scale / 2))
    return out.to(batch.query.dtype)


def rounds_by_storing(batch):
    out = _faulty.honest_whole(replace(batch, query=batch.query.float())) * 3
    return _launch(_scaled, out, torch.empty(out.shape, dtype=batch.query.dtype), 1 / 3)
