"""What a planted fault is: a name, the fault name a diagnosis should give, and how it is built around a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pabench_kernels.contract import PagedBatch

# A kernel's function: ``fn(batch) -> out``, or ``fn(batch, return_lse=True) -> (out, lse)``
Attention = Callable[..., Any]


@dataclass(frozen=True)
class Mutant:
    """One planted fault. ``make(kernel)`` gives the faulty kernel; ``inside`` ones replace the kernel altogether.

    ``also`` are fault names that describe the same thing as well; ``unknown`` is never counted as named right.
    """

    name: str
    fault: str
    what: str
    make: Callable[[Attention], Attention]
    inside: bool = False
    also: frozenset[str] = frozenset()
    mandatory: bool = True

    @property
    def names(self) -> frozenset[str]:
        return self.also | {self.fault}


def given(change: Callable[[PagedBatch], PagedBatch]) -> Callable[[Attention], Attention]:
    """The kernel is right and is given something else: ``change`` makes it from the batch."""

    def make(kernel: Attention) -> Attention:
        def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
            changed = change(batch)
            return kernel(changed, return_lse=True) if return_lse else kernel(changed)

        return faulty

    return make


def returned(change: Callable[[Tensor, PagedBatch], Tensor]) -> Callable[[Attention], Attention]:
    """The kernel is right and its output is spoiled: ``change`` gets the output [T, Hq, Dv] and the batch."""

    def make(kernel: Attention) -> Attention:
        def faulty(batch: PagedBatch, return_lse: bool = False) -> Any:
            if return_lse:
                out, lse = kernel(batch, return_lse=True)
                return change(out, batch), lse
            return change(kernel(batch), batch)

        return faulty

    return make
