"""A judged kernel case as a record, and the distinct faults of a kernel over all of its cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pabench.batch_spec import longest
from pabench.checks.execution import execution_group
from pabench.checks.kernel.case import KernelCase, KernelOutcome
from pabench.records import Diagnosis, FaultSummary, Record

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
MAX_VALUES = 3  # a condition that lists more of them says nothing


def kernel_record(case: KernelCase, **fields: Any) -> Record:
    """The record of ``case`` with ``fields`` (status, message, groups) filled in."""
    trial = case.trial
    return Record.model_validate(
        {
            "case_id": case.case_id,
            "pair_key": trial.key,
            "check": "kernel",
            "kernel": case.kernel,
            "dtype": trial.precision.dtype,
            "kv_dtype": trial.precision.kv_dtype,
            "block_size": trial.shape.block_size,
            "batch_spec": trial.shape.batch_spec,
            "probe": trial.probe,
            "repro": case.repro,
            **fields,
        }
    )


def outcome_fields(outcome: KernelOutcome) -> dict[str, Any]:
    """status, reason, message and the groups execution, accuracy and diagnosis."""
    finding = outcome.finding
    diagnosis = None
    if finding is not None:
        diagnosis = Diagnosis(
            fault=finding.fault, confidence=finding.confidence, evidence={finding.reason: finding.message}
        )
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "message": outcome.message,
        "execution": execution_group(outcome.dispatcher),
        "accuracy": outcome.accuracy,
        "diagnosis": diagnosis,
    }


def distinct_faults(records: Iterable[Record]) -> list[FaultSummary]:
    """One entry per kernel and kind of failure of its kernel cases, the most frequent first.

    Non-finite outputs that come only where NaN lies in unowned slots are ``stale_read``: nothing else was non-finite.
    """
    by_kernel: dict[str, list[Record]] = {}
    for r in records:
        if r.check == "kernel" and r.kernel is not None:
            by_kernel.setdefault(r.kernel, []).append(r)
    found = []
    for kernel, own in by_kernel.items():
        groups: dict[tuple[str, str], list[Record]] = {}
        for r in own:
            if r.status in ("FAIL", "ERROR") and r.reason != "not_run":
                groups.setdefault(_kind(r, own), []).append(r)
        entries = [_entry(kernel, fault, what, failed, own) for (fault, what), failed in groups.items()]
        found += sorted(entries, key=lambda e: -e.n_cases)
    return found


def _kind(record: Record, own: Sequence[Record]) -> tuple[str, str]:
    if record.status == "ERROR":
        return "unknown", _DEATHS.get(record.reason or "", f"raised {record.message.partition(':')[0]}")
    fault = "unknown" if record.diagnosis is None else record.diagnosis.fault
    if fault == "plan_reuse":
        return fault, "state left over from earlier calls makes the output wrong, a fresh process does not,"
    if fault == "nonfinite" and _only_poison_is_nonfinite(own):
        return "stale_read", "NaN from slots that nobody may read reaches the output"
    return fault, {
        "attention_error": "the output is off the fp64 oracle",
        "slot_count": "slots are left out, read twice or read from elsewhere",
        "nonfinite": "NaN or Inf in the output",
        "inputs_written": "the kernel writes into its inputs",
        "contract": "the output has the wrong shape, dtype or device",
        "lse": "lse is wrong",
        "fallback": "another registered kernel computed the result",
    }.get(record.reason or "", record.reason or "wrong")


def _only_poison_is_nonfinite(own: Sequence[Record]) -> bool:
    """Whether every non-finite output came from a probe with NaN around, and the same data without NaN was finite."""
    poisoned = {"poison", "needle"}
    judged = [r for r in own if r.accuracy is not None]
    wrong = {r.probe for r in judged if r.accuracy is not None and r.accuracy.nonfinite}
    return bool(wrong) and wrong <= poisoned and any(r.probe not in poisoned for r in judged)


def _entry(kernel: str, fault: str, what: str, failed: Sequence[Record], own: Sequence[Record]) -> FaultSummary:
    judged = [r for r in own if r.status in ("PASS", "FAIL", "ERROR")]
    conditions = []
    for name, value in (
        ("dtype", lambda r: r.dtype if r.kv_dtype == r.dtype else f"{r.dtype}/{r.kv_dtype}"),
        ("block size", lambda r: r.block_size),
        ("probe", lambda r: r.probe),
        ("phase", _phase),
    ):
        bad, all_ = {value(r) for r in failed}, {value(r) for r in judged}
        if bad < all_ and len(bad) <= MAX_VALUES:
            conditions.append(f"{name} {', '.join(map(str, sorted(bad, key=str)))}")
    lengths = [n for r in failed if (n := longest(r.batch_spec)) is not None]
    if lengths and min(lengths) > min((longest(r.batch_spec) or 0 for r in judged), default=0):
        conditions.append(f"longest sequence {min(lengths)} or more")
    first = failed[0]
    known = first.diagnosis.confidence if first.diagnosis is not None else 0.0
    return FaultSummary(
        kernel=kernel,
        fault=fault,
        confidence=0.8 if fault == "stale_read" else known,
        summary=f"{what} in {len(failed)} of {len(judged)} judged kernel cases",
        condition="only " + "; ".join(conditions) if conditions else None,
        n_cases=len(failed),
        repro=first.repro,
    )


def _phase(record: Record) -> str:
    spec = (record.batch_spec or "").rpartition(":")[2]
    groups = [g.partition("s")[0].lstrip("0123456789") for g in spec.split("_")]
    decode = [g == "q1" for g in groups]
    return "decode" if all(decode) else "mixed" if any(decode) else "prefill"
