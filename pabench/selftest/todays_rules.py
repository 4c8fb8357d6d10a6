"""The rules that kernel tests use today, so that a reader sees what each would have let through.

They judge the same output against the same truth; none of them is used by any check of pabench.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# rule → does it accept ``found`` [T, Hq, Dv] against ``truth`` fp64 of the same shape?
Rule = Callable[[Tensor, Tensor], bool]

ATOL = RTOL = 1e-2  # what paged-attention unit tests commonly take for half precision
MISMATCHES = 0.05  # share of elements that may miss, as some suites allow
COSINE = 0.99


def allclose(found: Tensor, truth: Tensor) -> bool:
    """One global absolute and relative tolerance for all elements."""
    return torch.allclose(found.double(), truth, atol=ATOL, rtol=RTOL)


def mostly_close(found: Tensor, truth: Tensor) -> bool:
    """The same tolerance, 5 % of the elements excused."""
    missed = ~torch.isclose(found.double(), truth, atol=ATOL, rtol=RTOL)
    return float(missed.double().mean()) <= MISMATCHES if missed.numel() else True


def cosine(found: Tensor, truth: Tensor) -> bool:
    """Cosine similarity of the flattened outputs above 0.99."""
    a, b = found.double().flatten(), truth.flatten()
    if not bool(b.any()):
        return not bool(a.any())
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > COSINE


RULES: dict[str, Rule] = {"atol=rtol=1e-2": allclose, "5 % outliers": mostly_close, "cosine > 0.99": cosine}
