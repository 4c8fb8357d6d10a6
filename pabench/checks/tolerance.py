"""The three-way rule: ‖out − oracle‖/d ≤ K · honest error + C · u, row by row. Calibrated in docs/judging.md."""

from __future__ import annotations

import torch
from torch import Tensor

K = 2.0
C = {torch.float32: 128.0, torch.float16: 1.0, torch.bfloat16: 1.0}


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def allowed(honest: Tensor, pooled: float, dtype: torch.dtype) -> Tensor:
    """What each row may be off by. ``honest`` is the error of same-dtype dense attention in the row, ``pooled`` its
    root mean square over the case; both relative to d = max(‖oracle‖, √Σ p²‖v‖²)."""
    return K * honest.clamp_min(pooled) + C[dtype] * unit_roundoff(dtype)
