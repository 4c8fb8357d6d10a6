"""The wrong call made again with one thing changed: other fillings, no NaN around, one sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pabench.checks.kernel.inputs import KernelInputs
from pabench.checks.kernel.judge import judge_output
from pabench.checks.kernel.truth import Truth
from pabench_kernels.contract import PagedBatch

FILL = 7.0  # what unwritten memory holds the second time
Call = Callable[[PagedBatch], Tensor]
Found = tuple[str, float, str]  # fault, confidence, clause

_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class _Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New memory that Python code asks for holds ``FILL``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY and out.is_floating_point() and out.dtype.itemsize > 1:
            out.fill_(FILL)
        return out


def nonfinite_fault(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> Found | None:
    """NaN that another filling turns into that filling was never written; NaN that comes from NaN around is stale."""
    bad = ~out.isfinite()
    try:
        with _filled():
            again = call(inputs.batch)
        if bool((again[bad].float() == FILL).all()):
            dims = torch.nonzero(bad.any(0).any(0)).flatten()
            begin = int(dims[0])
            rows = bad[..., begin:]
            if begin > 0 and bool((rows.all(-1) | ~rows.any(-1)).all()) and len(dims) == out.shape[-1] - begin:
                return "head_dim_tail", 0.9, f"the channels from {begin} on are never written"
            return "unwritten_output", 1.0, f"{int(bad.any(-1).sum())} rows are not, or not wholly, written"
        if inputs.probe.name == "poison":  # the others hold so little that much may go wrong unseen
            with _clean_pool(inputs):
                clean = call(inputs.batch)
            if judge_output(inputs, truth, clean)[0] is None:
                return "stale_read", 1.0, "right as soon as the slots that nobody may read hold no NaN"
    except Exception:  # a kernel that now raises has told nothing
        return None
    return None


def outsiders_fault(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> Found | None:
    """Whether slots behind the end, or the other sequences of the batch, make the difference."""
    try:
        if inputs.ordinary_pool and (seq := _moved_by_own_tail(inputs, truth, out, call)) is not None:
            return "unknown", 0.0, f"slots behind the end of sequence {seq} reach its output"
        if _right_alone(inputs, truth, out, call):
            return "unknown", 0.0, "right as soon as the sequence is alone in the batch"
    except Exception:
        return None
    return None


def _moved_by_own_tail(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> int | None:
    """The first wrong sequence whose own last block, behind its end, moves its own output."""
    shape, batch = inputs.shape, inputs.batch
    for s, rows in _wrong_sequences(inputs, truth, out):
        length = shape.seqs[s][1]
        if length % shape.block_size == 0:
            continue
        block = int(batch.block_table[s, length // shape.block_size])
        tails = [_bytes(c[block, length % shape.block_size :]) for c in (batch.key_cache, batch.value_cache)]
        before = [t.clone() for t in tails]
        again = call(batch)[rows]
        if not _same(again, out[rows]):
            return None  # not even the same call gives the same
        try:
            for t in tails:
                t.copy_(torch.where(t == 0, 1, t // 2 if t.dtype == torch.uint8 else t / 2))  # finite stays finite
            moved = call(batch)[rows]
        finally:
            for t, old in zip(tails, before, strict=True):
                t.copy_(old)
        if not _same(moved, out[rows]):
            return s
    return None


def _right_alone(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> bool:
    """Right alone, and still wrong beside one sequence more: a stale plan of this size would be right there too."""
    if len(inputs.shape.seqs) < 2:
        return False
    wrong = list(_wrong_sequences(inputs, truth, out))
    if not wrong:
        return False
    for s, rows in wrong[:3]:
        solo = inputs.picked([s])
        if judge_output(solo, truth.rows(rows), call(solo.batch))[0] is not None:
            return False
    order = [*range(len(inputs.shape.seqs)), wrong[0][0]]
    more = inputs.picked(order)
    longer = call(more.batch)[: out.shape[0]]
    return judge_output(inputs, truth, longer)[0] is not None


def _wrong_sequences(inputs: KernelInputs, truth: Truth, out: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(sequence, indices of its rows)."""
    for s, (_, length) in enumerate(inputs.shape.seqs):
        rows = inputs.rows([s])
        if length and judge_output(inputs.picked([s]), truth.rows(rows), out[rows])[0] is not None:
            yield s, rows


@contextmanager
def _filled() -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with _Filled():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextmanager
def _clean_pool(inputs: KernelInputs) -> Iterator[None]:
    """The pool without NaN: what a sequence owns has none anyway."""
    pools = {id(p): p for p in (inputs.base["key_cache"], inputs.base["value_cache"])}.values()
    places = [(p, torch.isnan(p.float()) if p.dtype.itemsize == 1 else p.isnan()) for p in pools]
    kept = []
    for p, nan in places:
        raw = _bytes(p)
        kept.append((raw, raw.clone()))
        raw.masked_fill_(nan, 0) if raw.dtype == torch.uint8 else raw.masked_fill_(nan, 0.0)
    try:
        yield
    finally:
        for raw, old in kept:
            raw.copy_(old)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(FILL), b.nan_to_num(FILL))
