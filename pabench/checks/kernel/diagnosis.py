"""Why is a case wrong? Its wrong rows are held against every hypothesis, and the call is made again with one thing
changed. A fault is named only where the answer leaves no other; else it is "unknown", with what is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pabench.checks.kernel.experiments import nonfinite_fault, outsiders_fault
from pabench.checks.kernel.inputs import KernelInputs
from pabench.checks.kernel.judge import count_ratios, count_units, row_limits
from pabench.checks.kernel.probes import read_fingerprint
from pabench.checks.kernel.truth import Truth
from pabench.diagnose.explain import LOOSE, Explanation, explain
from pabench.diagnose.observed import Observed
from pabench.diagnose.setting import Reread, Setting
from pabench_kernels.contract import PagedBatch

MAX_SEQS, MAX_TOKENS = 4, 8
FEW_NUMBERS = frozenset({"two_level", "needle", "fingerprint"})  # one of many hypotheses may fit these by chance
MAX_SEARCHES = 60  # through all hypotheses, of one kernel
MAX_WORK = 4_000_000  # multiply-adds of q·k that one hypothesis may cost
TAIL_SHARE = 0.8  # of the channels behind the first wrong one must be wrong too, for a tail
Call = Callable[[PagedBatch], Tensor]


@dataclass(frozen=True)
class Named:
    """A fault, how sure it is, a clause for people ("as if …"), and evidence for programs."""

    fault: str
    confidence: float
    clause: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    sequences: list[int] = field(default_factory=list)  # with wrong rows


@dataclass
class History:
    """What explained a kernel's cases so far: a kernel that fails everywhere need not be searched a thousand times."""

    explained: Counter[str] = field(default_factory=Counter)
    in_vain: int = 0
    searches: int = MAX_SEARCHES

    @property
    def usual(self) -> frozenset[str]:
        return frozenset(self.explained) if self.explained.total() >= self.searches else frozenset()


_histories: WeakKeyDictionary[Callable[..., Any], History] = WeakKeyDictionary()


def history_of(fn: Callable[..., Any]) -> History:
    return _histories.setdefault(fn, History())


def diagnose(inputs: KernelInputs, truth: Truth, out: Tensor, call: Call, history: History) -> Named:
    """``out`` [T, Hq, Dv] is wrong; ``call`` runs the same request on any batch."""
    found = out.double()
    wrong = _wrong(inputs, truth, found) | ~found.isfinite().all(-1)
    named = _diagnose(inputs, truth, out, wrong, call, history)
    bad = [s for s in range(len(inputs.shape.seqs)) if bool(wrong[inputs.rows([s])].any())]
    return replace(named, sequences=bad)


def _diagnose(inputs: KernelInputs, truth: Truth, out: Tensor, wrong: Tensor, call: Call, history: History) -> Named:
    found = out.double()
    if not bool(found.isfinite().all()):
        return _named(nonfinite_fault(inputs, truth, out, call) or ("nonfinite", 1.0, ""))
    if (tail := _tail(inputs, truth, found, wrong)) is not None:
        return Named("head_dim_tail", 0.8, f"only the channels from {tail} on are wrong", {"first_dim": tail})
    observed = observe(inputs, truth, found, wrong)
    if not observed:
        return Named("unknown", 0.0, "only rows of empty sequences are wrong")
    explanation = explain(observed, history.usual) if history.usual else Explanation("unknown", 0.0)
    if not explanation.matches and history.in_vain < history.searches:
        explanation = explain(observed)
    if explanation.matches:
        history.explained.update(m.what for m in explanation.matches if explanation.fault != "unknown")
        whats = list(dict.fromkeys(m.what for m in explanation.matches))
        clause = "as if " + " or ".join(whats[:2])
        evidence: dict[str, Any] = {"candidates": list(explanation.candidates), "as_if": whats[:6]}
        for match in explanation.matches:
            evidence |= match.evidence
        if inputs.probe.name in FEW_NUMBERS and explanation.fault in LOOSE:
            return Named("unknown", 0.0, clause, evidence)
        return Named(explanation.fault, explanation.confidence, clause, evidence)
    if (read := _read(inputs, truth, found, wrong)) is not None:
        return read
    history.in_vain += 1
    if history.in_vain > history.searches:
        return Named("unknown", 0.0)
    if (outside := outsiders_fault(inputs, truth, out, call)) is not None:
        return _named(outside)
    if explanation.note:
        return Named("unknown", 0.0, explanation.note, {"factor": explanation.factor})
    return Named("unknown", 0.0)


def _named(found: tuple[str, float, str]) -> Named:
    fault, confidence, clause = found
    return Named(fault, confidence, clause)


def observe(inputs: KernelInputs, truth: Truth, found: Tensor, wrong: Tensor) -> list[Observed]:
    """Up to four sequences with wrong rows, the shortest first; some tokens of each, wrong and right."""
    limits = row_limits(inputs, truth)
    seqs: list[tuple[int, int, slice]] = []
    begin = 0
    for s, (q, length) in enumerate(inputs.shape.seqs):
        rows = slice(begin, begin + q)
        begin = rows.stop
        if length > 0 and bool(wrong[rows].any()):
            seqs.append((length, s, rows))
    observed = []
    for length, s, rows in sorted(seqs, key=lambda x: x[:2])[:MAX_SEQS]:
        heads = inputs.shape.group * inputs.shape.kv_heads
        room = max(1, MAX_WORK // (length * heads * inputs.shape.head_dim))
        picked = _tokens(wrong[rows], min(MAX_TOKENS, room))
        at = rows.start + picked
        setting = setting_of(inputs, s, rows, picked)
        if not inputs.exact:
            observed.append(Observed(setting, found[at], limits[at], wrong[at]))
            continue
        setting = _without_ones(setting)
        observed.append(Observed(setting, found[at][..., :-1], _absolute(inputs, truth)[at], wrong[at], absolute=True))
    return observed


def _without_ones(setting: Setting) -> Setting:
    """Without the last channel of a count: it is rounded by whole slots."""
    whole = setting.reread

    def reread(blocks: Tensor, offsets: Tensor, contiguous: bool) -> tuple[Tensor, Tensor]:
        assert whole is not None
        key, value = whole(blocks, offsets, contiguous)
        return key, value[..., :-1]

    return replace(setting, value=setting.value[..., :-1], reread=None if whole is None else reread)


def _tokens(wrong: Tensor, room: int) -> Tensor:
    """Indices of ``room`` rows: a wrong one first, then first, last and others spread over all."""
    bad = torch.nonzero(wrong.any(1)).flatten().tolist()
    spread = [bad[0], bad[-1], 0, len(wrong) - 1, *bad[:: max(1, len(bad) // room)], *range(len(wrong))]
    return torch.tensor(sorted(dict.fromkeys(spread[: 4 * room + 4]), key=spread.index)[:room]).sort().values


def setting_of(inputs: KernelInputs, s: int, rows: slice, picked: Tensor) -> Setting:
    batch, shape = inputs.batch, inputs.shape
    length, q = shape.seqs[s][1], shape.seqs[s][0]
    device = batch.query.device

    per_token = shape.scales == "token"

    def factors(scale: Tensor | None) -> Tensor:
        if scale is None or per_token:
            return torch.ones(shape.kv_heads, dtype=torch.float64, device=device)
        return scale.double().expand(shape.kv_heads)

    tables, reread = batch.block_table.long(), _reread(inputs)
    stored = (inputs.keys, inputs.values) if per_token else (inputs.stored_k, inputs.stored_v)
    key, value = (x[s].to(device) if x[s].dtype.itemsize == 1 else x[s].to(device).double() for x in stored)
    first = 0 if batch.sliding_window is None else max(0, length - q - batch.sliding_window + 1)
    gone = 0 if per_token else first // shape.block_size * shape.block_size
    if gone:  # what a kernel finds there that ignores the window
        j = torch.arange(gone, device=device)
        found = reread(tables[s][j // shape.block_size], j % shape.block_size, False)
        key, value = (torch.cat([a.float(), b[gone:].float()]) for a, b in zip(found, (key, value), strict=True))
    return Setting(
        query=batch.query[rows][picked].double(),
        key=key,
        value=value,
        k_scale=factors(batch.k_scale),
        v_scale=factors(batch.v_scale),
        positions=(length - q + picked).to(device),
        kv_head=torch.arange(batch.num_q_heads, device=device) // shape.group,
        chunk_begin=length - q,
        scale=batch.scale,
        causal=batch.causal,
        window=batch.sliding_window,
        slopes=batch.alibi_slopes,
        cap=batch.logits_soft_cap,
        sinks=batch.sinks,
        block_size=shape.block_size,
        has_scales=not per_token and (batch.k_scale is not None or batch.v_scale is not None),
        dtype=batch.query.dtype,
        table=tables[s],
        other_tables=tuple(_owned(inputs, n) for n in range(len(tables))),
        reread=None if per_token else reread,
    )


def _owned(inputs: KernelInputs, s: int) -> Tensor:
    """A sequence's row of the block table, −1 where the block is not its own."""
    shape, row = inputs.shape, inputs.batch.block_table[s].long().clone()
    q, length = shape.seqs[s]
    first = 0 if shape.window is None else max(0, length - q - shape.window + 1)
    row[: first // shape.block_size] = -1
    row[-(-length // shape.block_size) :] = -1
    return row


def _reread(inputs: KernelInputs) -> Reread:
    """Blocks that nobody owns read as NaN where they all hold one number: that would prove any hypothesis."""
    batch = inputs.batch
    owned = torch.cat([_owned(inputs, s) for s in range(batch.num_seqs)])
    telling = inputs.probe.overlay == "plausible"

    def flat(cache: Tensor) -> Tensor:
        """The memory that begins where the cache does, taken for contiguous."""
        room = cache.untyped_storage().nbytes() // cache.itemsize - cache.storage_offset()
        return cache.as_strided((min(room, cache.numel()),), (1,), cache.storage_offset())

    def read(blocks: Tensor, offsets: Tensor, contiguous: bool) -> tuple[Tensor, Tensor]:
        found = []
        for cache in (batch.key_cache, batch.value_cache):
            raw = bits(cache)
            if contiguous:
                raw = flat(raw).view(raw.shape)
            inside = blocks.clamp(0, cache.shape[0] - 1)
            picked = raw[inside, offsets].view(cache.dtype)
            if not telling and not bool((known := torch.isin(inside, owned)).all()):
                picked = torch.where(known[:, None, None], picked.float(), torch.nan)
            found.append(picked)
        return found[0], found[1]

    return read


def bits(x: Tensor) -> Tensor:
    """fp8 has few operators: its bytes can be indexed and joined everywhere."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _wrong(inputs: KernelInputs, truth: Truth, found: Tensor) -> Tensor:
    """bool [T, Hq]"""
    wrong: Tensor
    if inputs.exact:
        wrong = count_ratios(inputs, truth, found)[1] > 1
        return wrong
    size = truth.size.clamp_min(torch.finfo(torch.float64).tiny)
    off = (found - truth.out).norm(dim=-1)
    wrong = torch.where(truth.size == 0, off > 0, off / size > row_limits(inputs, truth))
    return wrong


def _absolute(inputs: KernelInputs, truth: Truth) -> Tensor:
    """What the norm of a counted row may be off by, [T, Hq], but for the channel of ones."""
    unit, limit = count_units(inputs, truth)
    norm: Tensor = (limit[..., :-1] / unit.clamp_min(torch.finfo(torch.float64).tiny)).norm(dim=-1)
    return norm


def _tail(inputs: KernelInputs, truth: Truth, found: Tensor, wrong: Tensor) -> int | None:
    """The first wrong channel, if every wrong row is right before it and wrong behind it."""
    dim = found.shape[-1]
    rows = torch.nonzero(wrong & (truth.size > 0))
    if not len(rows) or inputs.exact:  # a count's tolerance is another one
        return None
    t, h = rows.T
    off = (found - truth.out)[t, h].abs()
    tolerated = (row_limits(inputs, truth) * truth.size)[t, h][:, None]
    bad = off > tolerated / dim**0.5 * 2
    first = torch.where(bad.any(1), bad.double().argmax(1), dim)
    begin = int(first.min())
    if begin < 8 or begin % 8 or begin >= dim or int(first.max()) > begin + max(2, (dim - begin) // 4):
        return None
    before = off[:, :begin].norm(dim=-1) <= tolerated[:, 0]
    return begin if bool(before.all()) and float(bad[:, begin:].double().mean()) > TAIL_SHARE else None


def _read(inputs: KernelInputs, truth: Truth, found: Tensor, wrong: Tensor) -> Named | None:
    """What a fingerprint says was read. Another head is a fault; another slot may have many causes."""
    if inputs.probe.name != "fingerprint" or not inputs.ordinary_pool or inputs.shape.scales == "token":
        return None
    names: set[str] = set()
    for t, h in torch.nonzero(wrong).tolist()[:32]:
        factor = torch.ones((), dtype=torch.float64, device=found.device)
        if inputs.batch.v_scale is not None:
            factor = inputs.batch.v_scale.double().expand(inputs.shape.kv_heads)[h // inputs.shape.group]
        got, want = read_fingerprint(found[t, h] / factor), read_fingerprint(truth.out[t, h] / factor)
        if got is None or want is None or got == want:
            return None
        names |= {n for n in got if got[n] != want[n]}
    if names == {"head"}:
        return Named("head_map", 0.7, "another KV head was read")
    return Named("unknown", 0.0, f"another {' and '.join(sorted(names))} was read") if names else None
