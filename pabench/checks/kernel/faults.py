"""The distinct faults of a kernel over all of its cases: what one case leaves open, the others may settle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pabench.batch_spec import parse_batch_spec
from pabench.checks.kernel.shapes import Shape, find_shape
from pabench.diagnose.conditions import Facts, condition
from pabench.errors import UsageError
from pabench.records import FaultSummary, Record

OPEN = frozenset({"unknown", "nonfinite"})  # say that something is wrong, not what
PECULIAR = frozenset(  # faults of what only some batches have: elsewhere nothing speaks against them
    {"sliding_window", "alibi", "soft_cap", "sink", "kv_scale", "layout_stride", "block_alias", "lse", "fallback"}
)
MIN_SHARE = 0.25
INFERRED = 0.7  # confidence of what only the whole run says
_KINDS = {
    "attention_error": "the output is off the fp64 oracle",
    "slot_count": "slots are left out, read twice or read from elsewhere",
    "nonfinite": "NaN or Inf in the output",
    "invariance": "the answer depends on what it must not depend on",
    "inputs_written": "the kernel writes into its inputs",
    "contract": "the output has the wrong shape, dtype or device",
    "lse": "lse is wrong",
    "fallback": "another registered kernel computed the result",
}


_DEATHS = {
    "segfault": "the process died of a segmentation fault",
    "abort": "the process was aborted",
    "out_of_memory": "the process was killed, most likely because memory ran out,",
    "exited": "the kernel ended its process",
    "hung": "the kernel hung",
    "lost": "the kernel closed its process's pipes",
    "killed": "the process died of a signal",
    "bus_error": "the process died of a bus error",
    "illegal_instruction": "the process died of an illegal instruction",
    "arithmetic_exception": "the process died of an arithmetic exception",
}
_LEFT_OVER = "state left over from earlier calls makes the output wrong, a fresh process does not,"


def distinct_faults(records: Iterable[Record]) -> list[FaultSummary]:
    """One entry per kernel and fault of its kernel cases, the most frequent first, with the condition it holds under.

    A case that leaves several faults open goes to the one that other cases name; one that names none goes to the only
    fault found, if its shape has what that fault is about.
    """
    by_kernel: dict[str, list[Record]] = {}
    for r in records:
        if r.check == "kernel" and r.kernel is not None:
            by_kernel.setdefault(r.kernel, []).append(r)
    found = []
    for kernel, own in by_kernel.items():
        groups = _grouped([r for r in own if r.status in ("FAIL", "ERROR") and r.reason != "not_run"], own)
        entries = [_entry(kernel, fault, failed, own) for (fault, _), failed in groups.items()]
        found += sorted(entries, key=lambda e: (e.fault in OPEN, -e.n_cases))
    return found


def _grouped(failed: Sequence[Record], own: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """(fault, kind) → cases; kinds keep cases apart that no fault joins."""
    named = _named(failed)
    if not named and (inferred := _inferred(failed, own)):
        return {(inferred, ""): list(failed)}
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in failed:
        fault = _fault(r)
        if fault not in named and fault not in OPEN:
            fault = "unknown"
        if fault in OPEN:
            fault = _settled(r, named) or fault
        kind = "" if fault not in OPEN else _words(r) if r.status == "ERROR" else r.reason or ""
        groups.setdefault((fault, kind), []).append(r)
    return groups


def _named(failed: Sequence[Record]) -> Counter[str]:
    """Faults that cases name, but those that most other cases speak against: one output may fit by chance."""
    named = Counter(f for r in failed if (f := _fault(r)) not in OPEN)
    shown = {_fault(r) for r in failed if r.reason == "invariance"}  # by two calls of one kernel: no chance in that
    for fault, n in list(named.items()):
        if fault in PECULIAR | shown:
            continue
        against = sum(_fault(r) == "unknown" and fault not in _candidates(r) and _comparable(r) for r in failed)
        if n < MIN_SHARE * (n + against):
            del named[fault]
    if (n := named["batch_dependence"]) and max(named.values()) > n:  # who reads another's data depends on it
        del named["batch_dependence"]
    return +named


def _candidates(record: Record) -> list[str]:
    return [] if record.diagnosis is None else list(record.diagnosis.evidence.get("candidates", []))


def _comparable(record: Record) -> bool:
    """Whether the output was finite and off, so that hypotheses were held against it."""
    return record.status == "FAIL" and record.reason in ("attention_error", "slot_count") and _searched(record)


def _searched(record: Record) -> bool:
    return record.diagnosis is not None and record.diagnosis.evidence.get("searched", True) is True


def _fault(record: Record) -> str:
    return "unknown" if record.diagnosis is None or record.status == "ERROR" else record.diagnosis.fault


def _settled(record: Record, named: Counter[str]) -> str | None:
    if record.reason not in ("attention_error", "slot_count", "nonfinite", "invariance"):
        return None
    candidates = _candidates(record)
    if kept := [f for f, _ in named.most_common() if f in candidates]:
        return kept[0]
    if len(named) == 1 and not candidates:
        (fault,) = named
        return fault if _concerns(fault, _shape(record), record) else None
    return None


def _concerns(fault: str, shape: Shape, record: Record) -> bool:
    """Whether a batch of this shape has what the fault is about."""
    quantized = record.kv_dtype != record.dtype
    return {
        "sliding_window": shape.window is not None,
        "alibi": shape.alibi,
        "soft_cap": shape.cap is not None,
        "sink": shape.sinks,
        "kv_scale": quantized or shape.scales != "none",
        "head_map": shape.kv_heads > 1,
        "layout_stride": shape.layout != "plain",
        "block_alias": shape.border != "none",
        "lse": False,
        "fallback": False,
    }.get(fault, True)


def _inferred(failed: Sequence[Record], own: Sequence[Record]) -> str | None:
    """A fault that only the pattern of cases names: strides or large ids, wrong there and only there."""
    if any(r.status == "ERROR" for r in failed) or not failed:
        return None
    passed = [r for r in own if r.status == "PASS"]
    for fault in ("layout_stride", "block_alias"):
        if all(_concerns(fault, _shape(r), r) for r in failed):
            spared = sum(_concerns(fault, _shape(r), r) for r in passed)
            if len(passed) > spared and spared < len(failed):
                return fault
    return None


def _entry(kernel: str, fault: str, failed: Sequence[Record], own: Sequence[Record]) -> FaultSummary:
    judged = [r for r in own if r.status in ("PASS", "FAIL", "ERROR")]
    first = max(failed, key=lambda r: (_fault(r) == fault, _confidence(r)))
    what = _words(first) if first.status == "ERROR" or fault in OPEN else _clause(first) or _words(first)
    where = condition([f for r in failed for f in _failing_facts(r)], list(_passing_facts(judged)))
    factors = {f for r in failed if (f := _factor(r)) is not None}
    return FaultSummary(
        kernel=kernel,
        fault=fault,
        confidence=_confidence(first) if _fault(first) == fault else INFERRED,
        summary=f"{what} in {len(failed)} of {len(judged)} judged kernel cases",
        condition=where,
        factor=factors.pop() if len(factors) == 1 else None,
        n_cases=len(failed),
        repro=first.repro,
    )


def _confidence(record: Record) -> float:
    return 0.0 if record.diagnosis is None else record.diagnosis.confidence


def _words(record: Record) -> str:
    if record.status == "ERROR":
        return _DEATHS.get(record.reason or "", f"raised {record.message.partition(':')[0]}")
    if _fault(record) == "plan_reuse":
        return _LEFT_OVER
    return _KINDS.get(record.reason or "", record.reason or "wrong")


def _clause(record: Record) -> str:
    return "" if record.diagnosis is None else str(record.diagnosis.evidence.get("clause", ""))


def _factor(record: Record) -> float | None:
    factor = None if record.diagnosis is None else record.diagnosis.evidence.get("factor")
    return None if factor is None else round(float(factor), 3)


def _shape(record: Record) -> Shape:
    try:
        return find_shape(record.batch_spec or "", record.block_size or 16)
    except UsageError:  # a record of another version's table
        return Shape("spec", parse_batch_spec((record.batch_spec or "").rpartition(":")[2]))


def _failing_facts(record: Record) -> Iterator[Facts]:
    found = [] if record.diagnosis is None else record.diagnosis.evidence.get("sequences", [])
    worst = None if record.accuracy is None else record.accuracy.worst
    for seq in found or [0 if worst is None or worst.seq is None else worst.seq]:
        yield _facts(record, seq)


def _facts(record: Record, seq: int) -> Facts:
    """What a condition may speak of, of one sequence of the case."""
    shape = _shape(record)
    q, length = shape.seqs[min(seq, len(shape.seqs) - 1)]
    features = [n for n in ("window", "alibi", "cap", "sinks") if getattr(shape, n) not in (None, False)]
    facts: dict[str, str | int] = {
        "phase": "decode" if q == 1 else "prefill" if q == length else "chunked prefill",
        "dtype": record.dtype or "",
        "KV dtype": record.kv_dtype or "",
        "cache layout": shape.layout,
        "scales": shape.scales,
        "causal": str(shape.causal).lower(),
        "softmax scale": "odd" if shape.odd_scale else "1/√D",
        **{name: "given" if name in features else "absent" for name in ("window", "alibi", "cap", "sinks")},
        "length": length,
        "query tokens": q,
        "batch size": len(shape.seqs),
        "block size": shape.block_size,
        "queries per KV head": shape.group,
        "KV heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "pool": "small" if shape.border == "none" else f"past {shape.border}",
        "probe": record.probe or "",
    }
    return facts


def _passing_facts(judged: Sequence[Record]) -> Iterator[Facts]:
    for r in judged:
        if r.status == "PASS":
            for seq in range(len(_shape(r).seqs)):
                yield _facts(r, seq)
