"""Two logit rows at one position, and what many positions add up to. All arithmetic in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PositionStats:
    """How two paths differ at one teacher-forced position. ``target`` is the next token that both are fed."""

    kld: float  # KL(reference ‖ other), nats, clamped at 0
    delta_p: float  # p_other(target) − p_reference(target)
    same_top: bool
    nll_reference: float
    nll_other: float
    max_abs: float
    margin_shift: float  # |change of the reference's top-2 margin|: what can flip an argmax
    top_logit: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.max_abs)


def compare_rows(reference: Tensor, other: Tensor, target: int) -> PositionStats:
    """reference, other: logits [vocab] at one position."""
    a, b = reference.double(), other.double()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    p = log_a.exp()
    kld = float((p * (log_a - log_b)).sum())
    top2 = a.topk(2)
    first, second = top2.indices.tolist()
    shift = abs(float(b[first] - b[second]) - float(top2.values[0] - top2.values[1]))
    return PositionStats(
        kld=max(kld, 0.0) if math.isfinite(kld) else kld,
        delta_p=float(log_b[target].exp() - p[target]),
        same_top=int(b.argmax()) == first,
        nll_reference=-float(log_a[target]),
        nll_other=-float(log_b[target]),
        max_abs=float((a - b).abs().max()),
        margin_shift=shift,
        top_logit=float(top2.values[0]),
    )


@dataclass
class LogitStats:
    """Positions added one by one; only scalars are kept."""

    positions: list[PositionStats] = field(default_factory=list)

    def add(self, stats: PositionStats) -> None:
        self.positions.append(stats)

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """One field of all positions as float64 [n]."""
        return np.array([float(getattr(p, name)) for p in self.positions], dtype=np.float64)

    @property
    def mean_kld(self) -> float:
        return float(self.column("kld").mean())

    @property
    def nonfinite(self) -> int:
        return sum(not p.finite for p in self.positions)

    @property
    def ppl_ratio(self) -> float:
        """exp of the mean difference of negative log-likelihoods: above 1 the other path is more surprised."""
        return float(np.exp((self.column("nll_other") - self.column("nll_reference")).mean()))


def roundoff_kld(stats: LogitStats, dtype: torch.dtype) -> float:
    """The mean KLD that rounding the logits alone implies: half the variance of a rounding error of
    half an ulp at most, an ulp being 1 to 2 u of the logit."""
    unit = torch.finfo(dtype).eps / 2
    return float((0.5 * (1.5 * unit * stats.column("top_logit")) ** 2 / 12).mean())
