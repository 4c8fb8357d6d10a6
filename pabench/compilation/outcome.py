"""What the compiler said against what the kernel declares: one outcome a case, and the exit code of all. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pabench.compilation.cases import CompileCase


@dataclass(frozen=True)
class CompileOutcome:
    """``status`` PASS: both accept, or both refuse. FAIL: they disagree. INCONCLUSIVE: the launcher could not be
    followed. ERROR: the compiler crashed."""

    case: CompileCase
    status: str
    message: str
    declared: tuple[str, ...] = ()  # reasons of the kernel's ``unsupported``
    refusal: str | None = None  # reason of the compiler
    binaries: tuple[Mapping[str, Any], ...] = ()
    duration_s: float = 0.0
    log: str = ""  # what the child wrote meanwhile

    def as_json(self) -> dict[str, Any]:
        c = self.case
        return {
            "case_id": c.case_id,
            "check": "compile",
            "kernel": c.kernel,
            "phase": c.phase,
            "target": c.target,
            "dtype": c.dtype,
            "kv_dtype": c.kv_dtype,
            "head_dim": c.head_dim,
            "variant": c.variant,
            "status": self.status,
            "message": self.message,
            "repro": c.repro,
            "compiler": {"accepts": bool(self.binaries), "reason": self.refusal},
            "declared": {"accepts": not self.declared, "reasons": list(self.declared)},
            "binaries": [{**{k: v for k, v in b.items() if k != "resources"}, **b["resources"]} for b in self.binaries],
            "duration_s": self.duration_s,
        }


def judge(case: CompileCase, answer: Mapping[str, Any], duration_s: float, log: str = "") -> CompileOutcome:
    """The outcome of a worker's answer."""
    declared, binaries = tuple(answer["declared"]), tuple(answer["binaries"])
    refusal = answer["refusal"]
    says = f"unsupported() says: {'; '.join(declared)}" if declared else "unsupported() declares no limit"
    if answer["crashed"]:
        status, message = "ERROR", f"the compiler crashed: {answer['crashed']}"
    elif answer["failed"] and declared:
        status, refusal, message = "PASS", f"nothing was launched: {answer['failed']}", f"refused by both; {says}"
    elif answer["failed"]:
        status, message = "INCONCLUSIVE", f"the launcher cannot be followed without a GPU: {answer['failed']}"
    elif refusal is None and not binaries:
        status, message = "INCONCLUSIVE", f"{case.kernel} launched no Triton function on this batch"
    elif (refusal is None) == (not declared):
        status, message = "PASS", "" if refusal is None else f"refused by both; {says}; compiler: {refusal}"
    elif refusal is not None:
        status, message = "FAIL", f"{says}, and the compiler refuses: {refusal}"
    else:
        status, message = "FAIL", f"{says}, and the compiler accepts it"
    return CompileOutcome(case, status, message, declared, refusal, binaries, round(duration_s, 3), log)


def crashed(case: CompileCase, how: str, duration_s: float, log: str = "") -> CompileOutcome:
    """The child died or took too long."""
    return CompileOutcome(case, "ERROR", f"the compiler crashed: {how}", duration_s=round(duration_s, 3), log=log)


def summary(outcomes: Sequence[CompileOutcome]) -> dict[str, Any]:
    """Counts, verdict word and exit code; a crash weighs more than a disagreement, that more than an open case."""
    n = Counter(o.status for o in outcomes)
    if n["ERROR"]:
        verdict, code = "error", 4
    elif n["FAIL"]:
        verdict, code = "failed", 1
    elif n["INCONCLUSIVE"]:
        verdict, code = "could_not_judge", 3
    else:
        verdict, code = ("passed", 0) if outcomes else ("nothing_ran", 5)
    return {
        "passed": n["PASS"],
        "failed": n["FAIL"],
        "inconclusive": n["INCONCLUSIVE"],
        "errors": n["ERROR"],
        "verdict": verdict,
        "exit_code": code,
    }
