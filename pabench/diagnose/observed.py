"""What was seen of a wrong kernel, and how far a hypothesis is from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pabench.diagnose.hypotheses import Hypothesis
from pabench.diagnose.setting import Setting, attend


@dataclass(frozen=True)
class Observed:
    """Rows of one sequence: ``out`` fp64 [T, Hq, Dv] is what a kernel returned, ``limit`` [T, Hq] what each row may be
    off by: relative to its size, or absolute. ``wrong`` [T, Hq] rows exceed it. Every value is finite."""

    setting: Setting
    out: Tensor
    limit: Tensor
    wrong: Tensor
    absolute: bool = False


@dataclass(frozen=True)
class Match:
    """``distance``: the worst row's error under this hypothesis, in tolerances."""

    fault: str
    what: str
    distance: float
    evidence: dict[str, Any] = field(default_factory=dict)


def distances(seen: Observed, setting: Setting) -> Tensor:
    """Error of every row in tolerances, [T, Hq], if ``setting`` were what the kernel computed."""
    out, size = attend(setting)
    off = (seen.out - out).norm(dim=-1)
    limit = seen.limit if seen.absolute else seen.limit * size.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(off == 0, 0.0, off / limit).nan_to_num(torch.inf, torch.inf)


def distance(observed: Sequence[Observed], hypothesis: Hypothesis, give_up: float = math.inf) -> float:
    """The worst row over all sequences; infinite where it changes nothing in any of them."""
    worst, applies = 0.0, False
    for seen in observed:
        changed = hypothesis.change(seen.setting)
        applies |= changed is not None
        worst = max(worst, float(distances(seen, changed or seen.setting).max()))
        if worst > give_up:
            return math.inf
    return worst if applies else math.inf


def truth_distance(observed: Sequence[Observed]) -> float:
    return max(float(distances(seen, seen.setting).max()) for seen in observed)
