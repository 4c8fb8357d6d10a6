"""From request to execution, with a trace that cannot lie.

Dispatch splits a mixed batch by phase, asks each kernel for its limits, and never lets one kernel stand in for another
without a record of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from pabench_kernels.contract import PHASES, Kernel, PagedBatch
from pabench_kernels.registry import get_kernel, kernel_names
from pabench_kernels.request import PAIRED, KernelRequest
from pabench_kernels.trace import ExecutionTrace, tracing

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SUMMED = 1 << 26  # elements of a cache that is watched for writes
Proof = Literal["proved", "claimed", "fell_back", "unknown"]


class ContractBrokenError(RuntimeError):
    """A kernel returned something that is not an attention output of this batch. The text is for the user."""


class InterpreterLimitError(NotImplementedError):
    """A kernel asked Triton's interpreter for what it computes wrongly, so its output says nothing about it."""

    def __init__(self, used: Collection[str]) -> None:
        dtypes = sorted({what.partition(" ")[0] for what in used})
        self.reason = "interpreter_bf16" if "bf16" in dtypes else "interpreter_fp8"
        super().__init__(
            f"Triton's interpreter computes {' and '.join(dtypes)} wrongly here ({', '.join(sorted(used))}), whatever "
            "the kernel; judge fp32 or fp16, or run on a GPU"
        )


@dataclass(frozen=True)
class FallbackKey:
    """One kind of fallback: from the asked kernel to the one that ran, with the reasons, where."""

    from_: str
    to: str
    reasons: tuple[str, ...]
    phase: str
    layer: int


@dataclass
class Dispatcher:
    """Runs the kernels of one request and remembers what ran. One per judged case."""

    request: KernelRequest
    fallback_name: str = PAIRED
    trace: ExecutionTrace = field(default_factory=ExecutionTrace)
    fallbacks: Counter[FallbackKey] = field(default_factory=Counter)
    interpreter_limit: str | None = None  # "interpreter_bf16" where a call was refused for Triton's interpreter's sake

    def __call__(self, batch: PagedBatch, layer: int) -> Tensor:
        """Attention of ``batch`` in ``layer``: [T, Hq, Dv] in the query's dtype.

        Raises ``ContractBrokenError`` for an output of another shape, dtype or device; what a kernel raises passes.
        """
        kernels = self.request.kernels
        phases = batch.phases
        if len(phases) == 1:
            (phase,) = phases
            return self._run(kernels[phase], batch, layer, phase, phase in self.request.under_test)
        if kernels["prefill"] is kernels["decode"]:
            return self._run(kernels["prefill"], batch, layer, "mixed", True)
        out = batch.query.new_empty(batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
        lens = batch.query_start_loc.diff()
        for phase in PHASES:
            rows = torch.nonzero((lens == 1) == (phase == "decode")).flatten()
            part, tokens = _select(batch, rows)
            out[tokens] = self._run(kernels[phase], part, layer, phase, phase in self.request.under_test)
        return out

    def _run(self, kernel: Kernel, batch: PagedBatch, layer: int, phase: str, under_test: bool) -> Tensor:
        with tracing(self.trace, layer, phase), _inputs_kept(kernel, batch):  # also around a stranger's `unsupported`
            reasons = kernel.unsupported(batch)
            if not reasons:
                self.trace.selected[kernel.name, layer, phase] += 1
                try:
                    with _honest_interpreter():
                        return _checked(kernel, kernel(batch), batch)
                except NotImplementedError as error:  # a limit found late
                    reasons = [str(error) or "raised NotImplementedError"]
                    self.trace.selected[kernel.name, layer, phase] -= 1
                    if isinstance(error, InterpreterLimitError):
                        self.interpreter_limit = error.reason
        other = get_kernel(self.fallback_name)
        if not under_test or other.name == kernel.name:
            raise ContractBrokenError(
                f"kernel '{kernel.name}' is needed here and does not support it: {'; '.join(reasons)}"
            )
        self.fallbacks[FallbackKey(kernel.name, other.name, tuple(reasons), phase, layer)] += 1
        with tracing(self.trace, layer, f"fallback {phase}"):
            return _checked(other, other(batch), batch)

    @property
    def executed(self) -> Counter[str]:
        """Calls of each kernel that was entered, whoever called it."""
        calls: Counter[str] = Counter()
        for (name, _, _), n in self.trace.entered.items():
            calls[name] += n
        return calls

    @property
    def under_test_ran(self) -> bool:
        """Whether a kernel under test was selected at least once and did not refuse late."""
        return any(n > 0 for (name, _, _), n in self._tested_calls().items() if name)

    @property
    def refused_everything(self) -> bool:
        """Every phase under test has come up and each call of it fell back, so that going on can judge nothing."""
        refused = {p for key in self.fallbacks for p in (PHASES if key.phase == "mixed" else (key.phase,))}
        return not self.under_test_ran and self.request.under_test <= refused

    def intruders(self) -> Counter[tuple[str, str, str, int]]:
        """Registered kernels entered or launched from inside another: (selected, other, phase, layer) → calls."""
        selected = {(layer, phase): name for (name, layer, phase) in self.trace.selected}
        found: Counter[tuple[str, str, str, int]] = Counter()
        for (name, layer, phase), n in (self.trace.entered | self.trace.launched).items():
            chosen = selected.get((layer, phase))
            if chosen is not None and name != chosen and name in kernel_names():
                found[chosen, name, phase, layer] += n
        return found

    def proof(self) -> Proof:
        """How sure it is that the kernels under test produced the outputs (design: proof)."""
        if self.fallbacks or self.intruders():
            return "fell_back"
        calls = {where: n for where, n in self._tested_calls().items() if n > 0}
        if not calls:
            return "unknown"
        counted = {where for where, n in calls.items() if self.trace.launched[where] >= n}
        if len(counted) == len(calls):
            return "proved"
        strangers = {k.name for k in self.request.kernels.values() if k.stranger}
        entered = all(self.trace.entered[where] >= n for where, n in calls.items())
        return "claimed" if entered and {name for name, _, _ in calls.keys() - counted} <= strangers else "unknown"

    def _tested_calls(self) -> dict[tuple[str, int, str], int]:
        """Selected calls of the kernels under test, by (kernel, layer, phase)."""
        tested: set[tuple[str, str]] = {(self.request.kernels[p].name, p) for p in self.request.under_test}
        if len(self.request.under_test) == len(PHASES):
            tested |= {(k.name, "mixed") for k in self.request.kernels.values()}
        return {w: n for w, n in self.trace.selected.items() if (w[0], w[2]) in tested}


def _select(batch: PagedBatch, rows: Tensor) -> tuple[PagedBatch, Tensor]:
    """The sub-batch of the sequences ``rows`` [n], and the indices of its tokens in the whole batch."""
    starts, lens = batch.query_start_loc[rows].long(), batch.query_start_loc.diff()[rows].long()
    tokens = torch.cat(
        [torch.arange(s, s + n, device=rows.device) for s, n in zip(starts.tolist(), lens.tolist(), strict=True)]
    )
    start_loc = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
    start_loc[1:] = lens.cumsum(0)
    seq_lens = batch.seq_lens[rows]
    part = replace(
        batch,
        query=batch.query[tokens],
        block_table=batch.block_table[rows],
        seq_lens=seq_lens,
        query_start_loc=start_loc,
        max_query_len=int(lens.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return part, tokens


@contextmanager
def _honest_interpreter() -> Iterator[None]:
    """Raises ``InterpreterLimitError``, also in place of what the kernel raised: it may have failed over garbage."""
    if sys.modules.get("triton") is None:  # no kernel of Triton's can have been defined
        yield
        return
    from pabench_kernels.interpreter import watched

    with watched() as used:
        try:
            yield
        except Exception as error:
            if used:
                raise InterpreterLimitError(used) from error
            raise
    if used:
        raise InterpreterLimitError(used)


@contextmanager
def _inputs_kept(kernel: Kernel, batch: PagedBatch) -> Iterator[None]:
    """Raises ``ContractBrokenError`` if the call wrote into an input.

    What was written is undone, also when the kernel raises: scales and sinks belong to the next kernel's case too. The
    caches are too big to copy and belong to this case only: their bits are summed up before and after.
    """
    sums = {name: _bit_sum(getattr(batch, name)) for name in ("key_cache", "value_cache")}
    names = ("query", "block_table", "seq_lens", "query_start_loc", "k_scale", "v_scale", "alibi_slopes", "sinks")
    before = {name: x.clone() for name in names if (x := getattr(batch, name)) is not None}
    written = []
    try:
        yield
    finally:
        for name, x in before.items():
            if not torch.equal(_bits(getattr(batch, name)), _bits(x)):
                getattr(batch, name).copy_(x)
                written.append(name)
    written += [name for name, total in sums.items() if total != _bit_sum(getattr(batch, name))]
    for name in written:
        raise ContractBrokenError(f"kernel '{kernel.name}' wrote into its input '{name}'; inputs are read only")


def _bit_sum(x: Tensor) -> int | None:
    """The sum of a cache's bits; None for one that is strided (its view may be far larger than its memory) or huge."""
    if not x.is_contiguous() or x.numel() > _MAX_SUMMED or x.nbytes % 4:
        return None
    return int(x.view(torch.uint8).view(-1).view(torch.int32).sum(dtype=torch.int64))


def _bits(x: Tensor) -> Tensor:
    """NaN equals itself as bits."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def _checked(kernel: Kernel, out: object, batch: PagedBatch) -> Tensor:
    shape = (batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
    want = f"must return a tensor [{shape[0]}, {shape[1]}, {shape[2]}] of {batch.query.dtype} on {batch.query.device}"
    if not isinstance(out, torch.Tensor):
        raise ContractBrokenError(f"kernel '{kernel.name}' {want}, got {type(out).__name__}")
    if tuple(out.shape) != shape or out.dtype != batch.query.dtype or out.device != batch.query.device:
        raise ContractBrokenError(
            f"kernel '{kernel.name}' {want}, got {list(out.shape)} of {out.dtype} on {out.device}"
        )
    return out
