"""One sequence's attention in fp64 with every step replaceable: what a hypothesis changes is one of these steps.

Shape legend: T query tokens looked at, L keys, Hq query heads, Hkv KV heads, D head_dim, Dv value head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# (physical blocks [L], offsets [L], as if contiguous) → stored K and V [L, Hkv, D]
Reread = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """What one sequence's answer follows from. ``key`` and ``value`` are as stored, before their scales.

    The optional functions stand for steps: ``on_scores`` sees scores [Hq, T, L] after soft cap and ALiBi, ``on_mask``
    the visible keys [T, L], ``on_probs`` the weights [Hq, T, L], ``on_out`` the output [T, Hq, Dv].
    """

    query: Tensor  # fp64 [T, Hq, D]
    key: Tensor  # [L, Hkv, D]
    value: Tensor  # [L, Hkv, Dv]
    k_scale: Tensor  # fp64 [Hkv], 1 where there is none
    v_scale: Tensor
    positions: Tensor  # int64 [T]: where the query tokens stand
    kv_head: Tensor  # int64 [Hq]: the KV head of each query head
    chunk_begin: int  # position of the sequence's first query token, also where it is not looked at
    scale: float
    causal: bool
    window: int | None
    slopes: Tensor | None  # [Hq]
    cap: float | None
    sinks: Tensor | None  # [Hq]
    block_size: int
    has_scales: bool
    dtype: torch.dtype  # the query's own
    table: Tensor | None = None  # int64 [columns]: this sequence's row of the block table
    other_tables: tuple[Tensor, ...] = ()  # those of all sequences, −1 where a block is not the sequence's own
    reread: Reread | None = None
    on_raw: Callable[[Tensor], Tensor] | None = None  # q·k × scale before the soft cap
    on_scores: Callable[[Tensor], Tensor] | None = None
    on_mask: Callable[[Tensor], Tensor] | None = None
    on_probs: Callable[[Tensor], Tensor] | None = None
    on_out: Callable[[Tensor], Tensor] | None = None

    @property
    def length(self) -> int:
        return int(self.key.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.key.shape[1])

    @property
    def j(self) -> Tensor:
        return torch.arange(self.length, device=self.query.device)

    @property
    def i(self) -> Tensor:
        return self.positions[:, None]

    @property
    def is_chunk(self) -> bool:
        """Several query tokens with a past: a continued prefill."""
        return 0 < self.chunk_begin < self.length - 1

    def masked(self, rule: Callable[[Tensor], Tensor]) -> Setting:
        return replace(self, on_mask=rule)

    def reading(self, tokens: Tensor) -> Setting:
        """Position j of the sequence holds what position ``tokens[j]`` should hold."""
        return replace(self, key=_pick(self.key, tokens), value=_pick(self.value, tokens))

    def visible(self) -> Tensor:
        """bool [T, L], before any hypothesis."""
        mask = torch.ones(len(self.positions), self.length, dtype=torch.bool, device=self.query.device)
        if self.causal:
            mask &= self.j <= self.i
        if self.window is not None:
            mask &= self.j > self.i - self.window
        return mask

    def scores(self) -> Tensor:
        """fp64 [Hq, T, L]: scaled, capped, with ALiBi, not masked."""
        key = (_double(self.key) * self.k_scale[:, None])[:, self.kv_head]
        scores = torch.einsum("thd,lhd->htl", self.query, key) * self.scale
        if self.on_raw is not None:
            scores = self.on_raw(scores)
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        if self.slopes is not None:
            scores = scores + self.slopes.double()[:, None, None] * (self.j - self.i)
        return scores if self.on_scores is None else self.on_scores(scores)

    def values(self) -> Tensor:
        """fp64 [L, Hq, Dv]."""
        return (_double(self.value) * self.v_scale[:, None])[:, self.kv_head]


def attend(s: Setting) -> tuple[Tensor, Tensor]:
    """(out fp64 [T, Hq, Dv], size [T, Hq]: max(‖out‖, √Σ p²‖v‖²), what an error is relative to)."""
    mask = s.visible()
    if s.on_mask is not None:
        mask = s.on_mask(mask)
    scores = s.scores().masked_fill(~mask, -torch.inf)
    if s.sinks is not None:
        column = s.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    probs = scores.softmax(-1)[..., : s.length]
    if s.on_probs is not None:
        probs = s.on_probs(probs)
    value = s.values().transpose(0, 1)  # [Hq, L, Dv]
    broken = ~value.isfinite().all(-1)  # [Hq, L]: NaN times a weight of 0 must stay 0 here
    if bool(broken.any()):
        value = value.nan_to_num(0.0, 0.0, 0.0)
    out = (probs @ value).transpose(0, 1)
    if bool(broken.any()):
        out[((probs != 0) & broken[:, None]).any(-1).transpose(0, 1)] = torch.nan
    spread = (probs.square() @ value.square().sum(-1, keepdim=True))[..., 0].sqrt().transpose(0, 1)
    if s.on_out is not None:
        out = s.on_out(out)
    return out, torch.maximum(out.norm(dim=-1), spread)


def _double(x: Tensor) -> Tensor:
    return x.float().double() if x.dtype.itemsize == 1 else x.double()


def _bits(x: Tensor) -> Tensor:
    """fp8 has few operators: its bytes can be indexed everywhere."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _pick(x: Tensor, rows: Tensor) -> Tensor:
    return _bits(x)[rows].view(x.dtype)
