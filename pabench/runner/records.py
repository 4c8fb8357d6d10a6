"""Records of model cases. No torch."""

from __future__ import annotations

from typing import Any

from pabench.cases import ModelCase
from pabench.records import Record


def model_record(case: ModelCase, **fields: Any) -> Record:
    """The record of ``case`` with ``fields`` (status, message, groups) filled in."""
    return Record.model_validate(
        {
            "case_id": case.case_id,
            "pair_key": case.pair_key,
            "check": "model",
            "model": case.model,
            "kernel": case.kernel,
            "dtype": case.precision.dtype,
            "kv_dtype": case.precision.kv_dtype,
            "block_size": case.block_size,
            "repro": case.repro,
            **fields,
        }
    )
