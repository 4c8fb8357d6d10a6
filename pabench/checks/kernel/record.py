"""A judged kernel case as a record."""

from __future__ import annotations

from typing import Any

from pabench.checks.execution import execution_group
from pabench.checks.kernel.case import KernelCase, KernelOutcome
from pabench.records import Diagnosis, Record


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
            fault=finding.fault,
            confidence=finding.confidence,
            evidence={finding.reason: finding.message, **finding.evidence},
        )
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "message": outcome.message,
        "execution": execution_group(outcome.dispatcher),
        "accuracy": outcome.accuracy,
        "diagnosis": diagnosis,
    }
