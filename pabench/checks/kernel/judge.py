"""One output of a kernel against the truth of its case: non-finite first, then slot counts or the three-way rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pabench.checks.kernel.inputs import KernelInputs
from pabench.checks.kernel.probes import read_fingerprint
from pabench.checks.kernel.truth import Truth
from pabench.checks.tolerance import allowed, unit_roundoff
from pabench.records import Accuracy, Worst

COUNT_SLACK = 0.1  # slots; one slot too many or too few moves a channel by about 1
COUNT_ROUNDOFFS = 4.0  # × u × the channel's sum: the output itself is rounded
SUM_ROUNDOFFS = 16.0  # × √n × u of fp32 × the channel's sum: n weights of 1/n are added up; honest ones reached 5
ADD_ROUNDOFFS = 8.0  # × √n × u of fp32, for the rows of the other probes; honest ones reached 3.9
LSE_SLACK = 1e-4
LSE_ROUNDOFFS = 4.0  # × u of the query's dtype × (1 + the largest |score| a row may hold)


@dataclass(frozen=True)
class Finding:
    """What is wrong with an output: a word for programs, a sentence for people, a fault name of the contract."""

    reason: str
    message: str
    fault: str = "unknown"
    confidence: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)


def judge_output(inputs: KernelInputs, truth: Truth, out: Tensor) -> tuple[Finding | None, Accuracy]:
    """``out`` [T, Hq, Dv] in the query's dtype, already of the right shape."""
    found = out.double()
    finite = found.isfinite().all(-1)
    difference = found - truth.out
    zero = truth.size == 0
    size = truth.size.clamp_min(torch.finfo(torch.float64).tiny)
    off = difference.norm(dim=-1)
    error = torch.where(zero, torch.where(off == 0, 0.0, torch.inf), off / size)
    error = torch.where(finite, error, torch.inf)
    limit = row_limits(inputs, truth)
    ratio = error / limit
    slots = None
    if inputs.exact:
        slots, ratio = count_ratios(inputs, truth, found)
        ratio = torch.where(finite, ratio, torch.inf)
    if not ratio.numel():
        return None, Accuracy(rel_l2_max=0.0, noise_floor=truth.pooled, ratio_to_floor=0.0, max_abs=0.0, rows=0)
    token, head = divmod(int(ratio.argmax()), ratio.shape[1])
    rel = float(error.max())
    worst = locate(inputs, token, head, int(difference[token, head].abs().nan_to_num(torch.inf).argmax()))
    accuracy = Accuracy(
        rel_l2_max=rel,
        noise_floor=truth.pooled,
        ratio_to_floor=rel / truth.pooled if truth.pooled > 0 else (0.0 if rel == 0 else float("inf")),
        max_abs=float(difference.abs().nan_to_num(torch.inf).max()),
        nonfinite=int((~finite).sum()),
        quantization_rel_l2=truth.quantization,
        worst=worst,
        tolerance_ratio=float(ratio.max()),
        rows=ratio.numel(),
        rows_beyond=int((ratio > 1).sum()),
    )
    if accuracy.rows_beyond == 0:
        return None, accuracy
    where = f"{accuracy.rows_beyond} of {accuracy.rows} rows (token × head), worst in {place(worst)}"
    if accuracy.nonfinite:
        message = f"NaN or Inf in {accuracy.nonfinite} rows where the oracle is finite; {where}"
        return Finding("nonfinite", message, "nonfinite", 1.0), accuracy
    if slots is not None:
        message = (
            f"the slots counted are off by {float(slots[token, head]):.3g} (minimum required tolerance; "
            f"tolerated {COUNT_SLACK:g}) in {where}"
        )
        return Finding("slot_count", message), accuracy
    message = (
        f"off the fp64 oracle by {float(ratio.max()):.3g} × what is tolerated in {where}; minimum required tolerance "
        f"{float(error[token, head]):.3g} (relative L2 of a row), tolerated {float(limit[token, head]):.3g}"
    )
    return Finding("attention_error", message + _named(inputs, truth, out, token, head)), accuracy


def judge_lse(inputs: KernelInputs, truth: Truth, lse: object) -> Finding | None:
    """``lse`` must be fp32 [T, Hq], natural logarithm, sink included; −inf for empty sequences."""
    want = tuple(truth.lse.shape)
    if not isinstance(lse, Tensor) or tuple(lse.shape) != want or lse.dtype != torch.float32:
        got = f"{list(lse.shape)} of {lse.dtype}" if isinstance(lse, Tensor) else type(lse).__name__
        return Finding("lse", f"lse must be fp32 [{want[0]}, {want[1]}], got {got}", "lse", 1.0)
    empty = truth.lse == -torch.inf
    if not bool((lse.double() == -torch.inf)[empty].all()):
        return Finding("lse", "lse of an empty sequence must be −inf", "lse", 1.0)
    expected, got_rows = truth.lse[~empty], lse.double()[~empty]
    if not expected.numel():
        return None
    u = unit_roundoff(inputs.batch.query.dtype)
    off = ((got_rows - expected).abs() / (LSE_SLACK + LSE_ROUNDOFFS * u * (1 + expected.abs()))).nan_to_num(torch.inf)
    if float(off.max()) <= 1:
        return None
    at = int(off.argmax())
    message = (
        f"lse is off by {float(off.max()):.3g} × what is tolerated in {int((off > 1).sum())} of {off.numel()} rows, "
        f"e.g. {float(got_rows[at]):.5g} where it is {float(expected[at]):.5g}"
    )
    return Finding("lse", message, "lse", 0.8)


def locate(inputs: KernelInputs, row: int, head: int, dim: int) -> Worst:
    """Where a row of the packed batch stands: its own token's position, logical and physical block, and slot."""
    shape, begin, seq = inputs.shape, 0, 0
    while row >= begin + shape.seqs[seq][0]:
        begin += shape.seqs[seq][0]
        seq += 1
    q, length = shape.seqs[seq]
    token = length - q + row - begin
    place = {"seq": seq, "q_head": head, "kv_head": head // shape.group, "token": max(token, 0), "dim": dim}
    if token >= 0:
        block = token // shape.block_size
        physical = int(inputs.batch.block_table[seq, block])
        place |= {"block": block, "physical_block": physical}
        place |= {"slot": physical * shape.block_size + token % shape.block_size}
    return Worst(**place, phase="decode" if q == 1 else "prefill")


def row_limits(inputs: KernelInputs, truth: Truth) -> Tensor:
    """What each row may be off by, relative to its size: [T, Hq]. Dense attention adds up in a tree; n terms added one
    after the other are off by √n roundings of fp32, which is more from some 4,000 tokens on."""
    adding = ADD_ROUNDOFFS * unit_roundoff(torch.float32) * truth.seen.sqrt()
    return allowed(truth.honest, truth.pooled, inputs.batch.query.dtype) + adding


def count_ratios(inputs: KernelInputs, truth: Truth, found: Tensor) -> tuple[Tensor, Tensor]:
    """Largest deviation of any channel, in slots, and the same over what is tolerated: [T, Hq] each."""
    unit, limit = count_units(inputs, truth)
    off = (found * unit - (truth.out * unit).round()).abs()
    empty = (truth.weight == 0)[..., None]
    off = torch.where(empty, torch.where(found == 0, 0.0, torch.inf), off)
    return off.amax(-1), (off / limit).amax(-1).nan_to_num(torch.inf)


def count_units(inputs: KernelInputs, truth: Truth) -> tuple[Tensor, Tensor]:
    """What turns an output into slots, [T, Hq, 1], and how many slots each channel may be off by, [T, Hq, Dv]."""
    unit = truth.weight[..., None]
    if inputs.batch.v_scale is not None:
        scale = inputs.batch.v_scale.double().expand(inputs.shape.kv_heads)
        unit = unit / scale.repeat_interleave(inputs.shape.group)[:, None]
    adding = SUM_ROUNDOFFS * unit_roundoff(torch.float32) * truth.weight.sqrt()[..., None]
    own = COUNT_ROUNDOFFS * unit_roundoff(inputs.batch.query.dtype)
    return unit, COUNT_SLACK + (own + adding) * (truth.out * unit).round().abs()


def place(w: Worst) -> str:
    """A row in words."""
    slot = "an empty sequence" if w.slot is None else f"block {w.block} (physical {w.physical_block}), slot {w.slot}"
    return f"sequence {w.seq}, token {w.token}, head {w.q_head} (KV head {w.kv_head}), {slot}"


def _named(inputs: KernelInputs, truth: Truth, out: Tensor, token: int, head: int) -> str:
    """What a fingerprint says was read, and what should have been."""
    if inputs.probe.name != "fingerprint":
        return ""
    factor = torch.ones((), device=out.device)
    if inputs.shape.scales == "token":
        return ""
    if inputs.batch.v_scale is not None:
        factor = inputs.batch.v_scale.expand(inputs.shape.kv_heads)[head // inputs.shape.group]
    got = read_fingerprint(out[token, head].double() / factor)
    want = read_fingerprint(truth.out[token, head] / factor)
    if got is None or want is None or got == want:
        return ""
    return f"; read {', '.join(f'{n} {got[n]} for {want[n]}' for n in got if got[n] != want[n])}"
