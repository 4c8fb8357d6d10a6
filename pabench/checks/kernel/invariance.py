"""What must not change an answer: the rest of the batch, bytes nobody may read, earlier calls, the number of splits.

A kernel is held against itself, so these see what is too small for the oracle. Bytes that may not be read must not move
a single bit; the rest may move the answer as far as two honest kernels of this dtype may differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

from pabench.checks.kernel.inputs import KernelInputs
from pabench.checks.kernel.judge import Finding, judge_output, locate, place, row_limits
from pabench.checks.kernel.pool import carrier
from pabench.checks.kernel.truth import Truth
from pabench_kernels.contract import Kernel, PagedBatch

Call = Callable[[PagedBatch], Tensor]
SPLITS = (1, 2, 3, 8)
MAX_MORE = 16
_sizes = count()


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
            return _mutation(inputs, truth, out, call)
        case "reuse":
            return _reuse(inputs, truth, out, call)
        case _:
            return _splits(inputs, truth, out, kernels)


def _batching(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> Finding | None:
    seqs = range(len(inputs.shape.seqs))
    again = call(inputs.batch)
    if _worst(inputs, truth, out, again, seqs) is not None:
        return _finding(inputs, truth, out, again, seqs, "in the same call once more", "unknown")
    orders = [([*reversed(seqs)], "in reverse order of sequences")]
    orders += [([s], "alone in the batch") for s in seqs if inputs.shape.seqs[s][1] and len(seqs) > 1]
    found = None
    for order, how in orders:
        other = call(inputs.picked(order).batch)
        if _worst(inputs, truth, out, other, order) is None:
            continue
        fault = _blame(inputs, truth, out, other, order, call)
        if found is None or fault != "unknown":
            found = _finding(inputs, truth, out, other, order, how, fault)
        if fault != "unknown":
            break
    return found


def _blame(inputs: KernelInputs, truth: Truth, out: Tensor, other: Tensor, order: Sequence[int], call: Call) -> str:
    """One of the two answers is wrong. Some sequences more make another size of it, for which nothing was planned:
    right there, the plan was at fault; wrong there too, the batch, unless a sequence alone is wrong for itself."""
    first_is_wrong = judge_output(inputs, truth, out)[0] is not None
    other_is_wrong = _wrong(inputs, truth, other, order)
    if first_is_wrong == other_is_wrong:
        return "unknown"
    bad = [*range(len(inputs.shape.seqs))] if first_is_wrong else list(order)
    more = [bad[-1]] * (1 + next(_sizes) % MAX_MORE)  # another number each time
    longer = call(inputs.picked([*bad, *more]).batch)[: len(inputs.rows(bad))]
    if not _wrong(inputs, truth, longer, bad):
        return "unknown" if first_is_wrong else "plan_reuse"
    return "batch_dependence" if first_is_wrong or len(order) > 1 else "unknown"


def _wrong(inputs: KernelInputs, truth: Truth, out: Tensor, order: Sequence[int]) -> bool:
    return judge_output(inputs.picked(order), truth.rows(inputs.rows(order)), out)[0] is not None


def _mutation(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> Finding | None:
    with _other_bytes(inputs):
        moved = call(inputs.batch)
    if torch.equal(_bytes(moved), _bytes(out)):
        return None
    if not torch.equal(_bytes(call(inputs.batch)), _bytes(out)):
        return None  # not even the same call gives the same bits: the probe "batching" judges that
    row, head = divmod(int((moved != out).any(-1).flatten().double().argmax()), out.shape[1])
    where = place(locate(inputs, row, head, 0))
    message = f"other bytes past seq_lens and in unowned blocks change the output, first in {where}"
    if judge_output(inputs, truth, out)[0] is not None:  # many faults lead there: a wrong block, a window ignored
        return Finding("invariance", message)
    return Finding("invariance", message, "stale_read", 0.95, {"clause": "bytes that nobody may read move the output"})


def _reuse(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call) -> Finding | None:
    """Calls of other sizes, and one of the same size with other lengths, in between."""
    seqs = range(len(inputs.shape.seqs))
    call(inputs.picked([*seqs, *seqs]).batch)
    call(inputs.picked([0]).batch)
    if len(seqs) > 1:
        rotated = [*seqs[1:], 0]
        other = call(inputs.picked(rotated).batch)
        if _worst(inputs, truth, out, other, rotated) is not None:
            how = "in a call of the same size with other lengths"
            return _finding(inputs, truth, out, other, rotated, how, _blame(inputs, truth, out, other, rotated, call))
    again = call(inputs.batch)
    if _worst(inputs, truth, out, again, seqs) is None or _worst(inputs, truth, again, call(inputs.batch), seqs):
        return None  # the same, or never twice the same: the probe "batching" judges that
    return _finding(inputs, truth, out, again, seqs, "after larger and smaller calls", "plan_reuse")


def _splits(inputs: KernelInputs, truth: Truth, out: Tensor, kernels: Sequence[Kernel]) -> Finding | None:
    offered = [k for k in kernels if "num_splits" in inspect.signature(k.fn).parameters]
    if not offered or len(kernels) != 1:
        raise NothingToVaryError("the kernel offers no number of splits (a parameter num_splits)")
    seqs = range(len(inputs.shape.seqs))
    for n in SPLITS:
        other = offered[0].fn(inputs.batch, num_splits=n)
        if _worst(inputs, truth, out, other, seqs) is not None:
            return _finding(inputs, truth, out, other, seqs, f"with {n} splits", "split_merge")
    return None


def _worst(
    inputs: KernelInputs, truth: Truth, out: Tensor, other: Tensor, order: Sequence[int]
) -> tuple[float, int, int] | None:
    """(ratio, row, head) where ``other``, a call with the sequences in ``order``, is furthest from ``out``, in units of
    what two honest kernels may differ by; None where that is below 1."""
    index = inputs.rows(order)
    limit = 2 * row_limits(inputs, truth)[index] * truth.size[index]
    off = (other.double() - out[index].double()).norm(dim=-1)
    same = (off <= limit) | (other == out[index]).all(-1)
    if bool(same.all()):
        return None
    ratio = torch.where(same, 0.0, (off / limit).nan_to_num(torch.inf, torch.inf))
    row, head = divmod(int(ratio.argmax()), ratio.shape[1])
    return float(ratio.max()), int(index[row]), head


def _finding(
    inputs: KernelInputs, truth: Truth, out: Tensor, other: Tensor, order: Sequence[int], how: str, fault: str
) -> Finding:
    ratio, row, head = _worst(inputs, truth, out, other, order) or (0.0, 0, 0)
    message = (
        f"the answer is another one {how}: by {ratio:.3g} × what two honest kernels may differ by, "
        f"worst in {place(locate(inputs, row, head, 0))}"
    )
    return Finding(
        "invariance", message, fault, 0.0 if fault == "unknown" else 0.9, {"clause": f"another answer {how}"}
    )


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
        raw[foreign] = (
            old ^ 0x55 if old.dtype == torch.uint8 else torch.where(old.isfinite(), torch.nan, torch.ones_like(old))
        )
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
