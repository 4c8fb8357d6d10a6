"""What must not change an answer: the rest of the batch, bytes nobody may read, earlier calls, the number of splits.

A kernel is held against itself, so these see what is too small for the oracle. Bytes that may not be read must not move
a single bit; the rest may move the answer as far as two honest kernels of this dtype may differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pabench.checks.kernel.inputs import KernelInputs
from pabench.checks.kernel.judge import Finding, locate, place, row_limits
from pabench.checks.kernel.pool import carrier
from pabench.checks.kernel.truth import Truth
from pabench_kernels.contract import Kernel, PagedBatch

Call = Callable[[PagedBatch], Tensor]
SPLITS = (1, 2, 3, 8)


class NothingToVaryError(NotImplementedError):
    """The kernel or the batch has nothing to vary. The text says what."""


def judge_invariance(
    inputs: KernelInputs, truth: Truth, out: Tensor, call: Call, kernels: Sequence[Kernel]
) -> Finding | None:
    """``out`` is what ``call`` gave for the batch. Raises ``NothingToVaryError``."""
    match inputs.probe.name:
        case "batching":
            return _batching(inputs, truth, out, call)
        case "mutation":
            return _mutation(inputs, out, call)
        case "reuse":
            return _reuse(inputs, truth, out, call)
        case _:
            return _splits(inputs, truth, out, kernels)


def _batching(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> Finding | None:
    seqs = range(len(inputs.shape.seqs))
    again = call(inputs.batch)
    if finding := _moved(inputs, truth, out, again, seqs, "in the same call once more", "batch_dependence"):
        return finding
    order = [*reversed(seqs)]
    other = call(inputs.picked(order).batch)
    index = inputs.rows(order)
    if finding := _moved(inputs, truth, out[index], other, order, "in reverse order of sequences", "batch_dependence"):
        return finding
    for s in seqs:
        if inputs.shape.seqs[s][1] and len(seqs) > 1:
            solo = call(inputs.picked([s]).batch)
            rows = inputs.rows([s])
            if finding := _moved(inputs, truth, out[rows], solo, [s], "alone in the batch", "batch_dependence"):
                return finding
    return None


def _mutation(inputs: KernelInputs, out: Tensor, call: Call) -> Finding | None:
    with _other_bytes(inputs):
        moved = call(inputs.batch)
    if torch.equal(_bytes(moved), _bytes(out)):
        return None
    if not torch.equal(_bytes(call(inputs.batch)), _bytes(out)):
        return None  # not even the same call gives the same bits: the probe "batching" judges that
    row, head = divmod(int((moved != out).any(-1).flatten().double().argmax()), out.shape[1])
    where = place(locate(inputs, row, head, 0))
    message = f"other bytes past seq_lens and in unowned blocks change the output, first in {where}"
    return Finding("invariance", message, "stale_read", 0.95)


def _reuse(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> Finding | None:
    """Three calls of other sizes, and one of the same size with other lengths, in between."""
    seqs = len(inputs.shape.seqs)
    larger = [*range(seqs), *range(seqs)]
    call(inputs.picked(larger).batch)
    call(inputs.picked([0]).batch)
    rotated = [*range(1, seqs), 0]
    if seqs > 1:
        index = inputs.rows(rotated)
        other = call(inputs.picked(rotated).batch)
        if finding := _moved(
            inputs, truth, out[index], other, rotated, "after a call of the same size with other lengths", "plan_reuse"
        ):
            return finding
    again = call(inputs.batch)
    return _moved(inputs, truth, out, again, range(seqs), "after larger and smaller calls", "plan_reuse")


def _splits(inputs: KernelInputs, truth: Truth, out: Tensor, kernels: Sequence[Kernel]) -> Finding | None:
    offered = [k for k in kernels if "num_splits" in inspect.signature(k.fn).parameters]
    if not offered or len(kernels) != 1:
        raise NothingToVaryError("the kernel offers no number of splits (a parameter num_splits)")
    for n in SPLITS:
        other = offered[0].fn(inputs.batch, num_splits=n)
        seqs = range(len(inputs.shape.seqs))
        if finding := _moved(inputs, truth, out, other, seqs, f"with {n} splits", "split_merge"):
            return finding
    return None


def _moved(
    inputs: KernelInputs, truth: Truth, out: Tensor, other: Tensor, order: Sequence[int], how: str, fault: str
) -> Finding | None:
    """Rows of ``other`` that differ from ``out`` by more than two honest kernels may; both in ``order``."""
    index = inputs.rows(order)
    if other.shape != out.shape:
        return Finding("invariance", f"the output has shape {list(other.shape)} {how}", fault, 0.9)
    limit = 2 * row_limits(inputs, truth)[index]
    size = truth.size[index]
    off = (other.double() - out.double()).norm(dim=-1)
    same = (off <= limit * size) | (other == out).all(-1)
    if bool(same.all()):
        return None
    ratio = torch.where(same, 0.0, (off / (limit * size)).nan_to_num(torch.inf, torch.inf))
    row, head = divmod(int(ratio.argmax()), ratio.shape[1])
    where = place(locate(inputs, int(index[row]), head, 0))
    message = (
        f"the answer is another one {how}: by {float(ratio.max()):.3g} × what two honest kernels may differ by, "
        f"worst in {where}"
    )
    return Finding("invariance", message, fault, 0.9)


@contextmanager
def _other_bytes(inputs: KernelInputs) -> Iterator[None]:
    """Everything in the pool that belongs to no sequence changes its bytes, NaN among them; put back afterwards."""
    batch = inputs.batch
    kept = []
    for cache, base in ((batch.key_cache, inputs.base["key_cache"]), (batch.value_cache, inputs.base["value_cache"])):
        raw = cache.view(carrier(cache.dtype))
        kept.append((base, base.view(carrier(base.dtype)).clone()))
        foreign = ~_owned_slots(inputs)
        old = raw[foreign]
        raw[foreign] = old ^ 0x55 if old.dtype == torch.uint8 else torch.where(old.isfinite(), torch.nan, 1.0)
    try:
        yield
    finally:
        for base, old in reversed(kept):
            base.view(carrier(base.dtype)).copy_(old)


def _owned_slots(inputs: KernelInputs) -> Tensor:
    """bool [NB, BS]: slots that some query may see."""
    shape, table = inputs.shape, inputs.batch.block_table.long()
    owned = torch.zeros(inputs.batch.key_cache.shape[:2], dtype=torch.bool, device=table.device)
    for s, (q, length) in enumerate(shape.seqs):
        first = 0 if shape.window is None else max(0, length - q - shape.window + 1)
        j = torch.arange(first, length, device=table.device)
        owned[table[s, j // shape.block_size], j % shape.block_size] = True
    return owned


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
