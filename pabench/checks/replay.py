"""One attention call judged by itself: any batch, any kernel, the three-way rule, and what explains a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pabench.checks.explain_call import explain_call
from pabench.checks.shadow import SeenCall
from pabench.checks.tolerance import allowed
from pabench.diagnose.explain import Explanation
from pabench.engine.step import Work
from pabench.errors import CannotJudge
from pabench.reference.oracle import attention_oracle, dense_attention
from pabench_kernels.cache_write import dequantize
from pabench_kernels.contract import PagedBatch


@dataclass(frozen=True)
class CallVerdict:
    """``ratio``: the worst row's error over its tolerance; ``worst`` the sequence it is in, None for an empty batch."""

    ratio: float
    rows: int
    rows_beyond: int
    nonfinite: int
    worst: SeenCall | None

    @property
    def passed(self) -> bool:
        return self.rows > 0 and self.rows_beyond == 0

    def explain(self) -> Explanation | None:
        """Held against every hypothesis; None where that says nothing."""
        return None if self.passed or self.worst is None or len(self.worst.key) == 0 else explain_call(self.worst)


def judge_call(batch: PagedBatch, out: Tensor) -> CallVerdict:
    """``out`` [T, Hq, Dv] against the fp64 oracle over what the cache of ``batch`` holds.

    Raises ``CannotJudge`` where that holds NaN or Inf.
    """
    seen = [_seen(batch, out, seq) for seq in range(batch.num_seqs)]
    seen = [s for s in seen if s is not None]
    if not all(bool(s.truth.isfinite().all()) for s in seen if s is not None):
        raise CannotJudge("the call's own keys or values are NaN or Inf, so no answer would be right")
    ratios = [s.ratio(s.out) for s in seen if s is not None]
    if not ratios:
        return CallVerdict(0.0, 0, 0, 0, None)
    worst = max(range(len(ratios)), key=lambda i: float(ratios[i].max()))
    return CallVerdict(
        ratio=float(ratios[worst].max()),
        rows=sum(r.numel() for r in ratios),
        rows_beyond=sum(int((r > 1).sum()) for r in ratios),
        nonfinite=sum(int((~s.out.isfinite().all(-1)).sum()) for s in seen if s is not None),
        worst=seen[worst],
    )


def _seen(batch: PagedBatch, out: Tensor, seq: int) -> SeenCall | None:
    starts = batch.query_start_loc.tolist()
    rows, length = slice(starts[seq], starts[seq + 1]), int(batch.seq_lens[seq])
    tokens = rows.stop - rows.start
    if tokens == 0:
        return None
    query = batch.query[rows]
    key, value = (_stored(batch, seq, length, which) for which in ("key", "value"))
    positions = torch.arange(length - tokens, length, device=query.device)
    arguments: dict[str, Any] = {
        "query_positions": positions,
        "scale": batch.scale,
        "causal": batch.causal,
        "window": batch.sliding_window,
        "alibi_slopes": batch.alibi_slopes,
        "soft_cap": batch.logits_soft_cap,
        "sinks": batch.sinks,
    }
    if length == 0:
        truth = torch.zeros(tokens, batch.num_q_heads, batch.head_dim_v, dtype=torch.float64, device=query.device)
        size = torch.full(truth.shape[:2], torch.finfo(torch.float64).tiny, dtype=torch.float64, device=query.device)
        limit = torch.ones_like(size)
    else:
        oracle = attention_oracle(query, key, value, **arguments)
        truth, size = oracle.out, oracle.size.clamp_min(torch.finfo(torch.float64).tiny)
        honest = (dense_attention(query, key, value, **arguments).double() - truth).norm(dim=-1) / size
        limit = allowed(honest, float(honest.square().mean().sqrt()), query.dtype)
    work = Work(seq, (0,) * tokens, length - tokens)
    return SeenCall(0, 0, seq, rows, work, None, batch, key, value, out[rows], truth, size, limit)


def _stored(batch: PagedBatch, seq: int, length: int, which: str) -> Tensor:
    """K or V of one sequence as the cache gives it back; zeros for freed blocks, which no query may see."""
    cache, scale = (batch.key_cache, batch.k_scale) if which == "key" else (batch.value_cache, batch.v_scale)
    position = torch.arange(length, device=cache.device)
    blocks, offsets = batch.block_table[seq, position // batch.block_size].long(), position % batch.block_size
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    found = raw[blocks.clamp(min=0), offsets].view(cache.dtype)
    if scale is None:
        found = found.float() if cache.dtype.itemsize == 1 else found
    elif scale.ndim == 3:
        found = found.float() * scale[blocks.clamp(min=0), offsets][..., None]
    else:
        found = dequantize(found, scale)
    return torch.where((blocks >= 0)[:, None, None], found, torch.zeros((), dtype=found.dtype, device=found.device))
