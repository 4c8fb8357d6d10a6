"""The record of one case and the header of a run (contract), and the verdict that follows from records.

``results/<run-id>/run.json`` is a ``RunHeader``; each line of ``cases.jsonl`` is a ``Record``. No torch here.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pabench.record_groups import (
    Accuracy,
    Bandwidth,
    DeltaP,
    Diagnosis,
    Distribution,
    DivergenceIndex,
    Execution,
    Fallback,
    FirstDivergence,
    Flips,
    FreeForm,
    Group,
    Logits,
    Memory,
    MemoryItem,
    NoiseFloor,
    Num,
    OracleKld,
    Proof,
    Speed,
    Tasks,
    Timing,
    TokenClasses,
    Tokens,
    Worst,
)
from pabench.verdict import Status, Summary, summarize

__all__ = [
    "FALLBACK_ALLOWED",
    "MIN_POSITIONS",
    "SCHEMA_VERSION",
    "Accuracy",
    "Bandwidth",
    "DeltaP",
    "Diagnosis",
    "Distribution",
    "DivergenceIndex",
    "Environment",
    "Execution",
    "Fallback",
    "FaultSummary",
    "FirstDivergence",
    "Flips",
    "Gate",
    "Git",
    "Logits",
    "Memory",
    "MemoryItem",
    "NoiseFloor",
    "OracleKld",
    "Proof",
    "Record",
    "Rule",
    "RunHeader",
    "RunInfo",
    "RunWithCases",
    "Speed",
    "Status",
    "Summary",
    "Tasks",
    "Timing",
    "TokenClasses",
    "Tokens",
    "Worst",
    "dumps",
    "jsonable",
    "looks_absolute",
    "summarize",
]

SCHEMA_VERSION = 1
MIN_POSITIONS = 100  # teacher-forced positions without which a model case has judged nothing
FALLBACK_ALLOWED = "fallback_allowed"  # the reason of a PASS that another kernel computed, by the user's leave

Check = Literal["kernel", "model", "tasks", "bench"]
Dtype = Literal["fp32", "bf16", "fp16"]
KvDtype = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8"]

# "/x", "~/x" or "C:\x" at the start or after anything that is no path character; "org/name" and "tests/k.py" are fine
_ABSOLUTE = re.compile(r"(?:^|[^\w.\-/)\]])(?:~?/+\w|[A-Za-z]:[\\/])")


def looks_absolute(name: str) -> bool:
    """Whether a name would put an absolute path into a record."""
    return _ABSOLUTE.search(name) is not None


class Record(Group):
    """One case, judged. The validator refuses what no honest run can produce."""

    case_id: str = Field(min_length=1)
    pair_key: str = Field(min_length=1)  # everything resolved except the kernel: what `compare` pairs by
    check: Check
    model: str | None = None
    kernel: str | None = None
    dtype: Dtype | None = None
    kv_dtype: KvDtype | None = None
    block_size: int | None = None
    batch_spec: str | None = None
    probe: str | None = None
    status: Status
    reason: str | None = None  # one word for programs: "fallback", "kld_above_floor", …
    message: str = ""  # a sentence for people
    repro: str
    execution: Execution | None = None
    accuracy: Accuracy | None = None
    logits: Logits | None = None
    tokens: Tokens | None = None
    tasks: Tasks | None = None
    timing: Timing | None = None
    bandwidth: Bandwidth | None = None
    diagnosis: Diagnosis | None = None
    memory: Memory | None = None
    duration_s: Num | None = None

    @property
    def passed(self) -> bool:
        return self.status in ("PASS", "NEAR_TIE")

    @model_validator(mode="after")
    def _honest(self) -> Record:
        for name, value in (("case_id", self.case_id), ("pair_key", self.pair_key)):
            if looks_absolute(value):
                raise ValueError(f"{name} must hold no absolute path, got '{value}'")
        if self.passed:
            self._check_pass()
        else:
            if not self.message.strip():
                raise ValueError(f"status {self.status} must come with a message")
            if self.timing is not None or self.bandwidth is not None:
                raise ValueError(f"a record with status {self.status} must carry no timing and no bandwidth")
        return self

    def _check_pass(self) -> None:
        """A pass needs proof of what ran and, for a model, enough positions; NaN never passes as an error."""
        if self.check == "model" and (self.execution is None or self.logits is None):
            raise ValueError(f"a model case with status {self.status} must carry execution and logits")
        if self.execution is not None:
            if self.execution.proof == "unknown":
                raise ValueError(f"status {self.status} with proof 'unknown': what ran is not known")
            if self.execution.proof == "fell_back" and self.reason != FALLBACK_ALLOWED:
                raise ValueError(f"status {self.status} after a fallback must have the reason '{FALLBACK_ALLOWED}'")
            if not any(self.execution.executed.values()):
                raise ValueError(f"status {self.status} without one kernel call has judged nothing")
        if self.logits is not None:
            if self.check == "model" and self.logits.n_tokens < MIN_POSITIONS:
                raise ValueError(f"a model pass must judge {MIN_POSITIONS} positions, got {self.logits.n_tokens}")
            if not math.isfinite(self.logits.kld.mean):
                raise ValueError(f"status {self.status} with a mean KLD of {self.logits.kld.mean}")
        if self.accuracy is not None and (self.accuracy.nonfinite or not math.isfinite(self.accuracy.rel_l2_max)):
            raise ValueError(f"status {self.status} with a non-finite attention output")


class Git(Group):
    sha: str | None = None
    dirty: bool | None = None


class RunInfo(Group):
    id: str
    created_utc: str
    argv: list[str]
    suite: str | None
    config: FreeForm
    config_hash: str
    seed: int
    git: Git = Git()
    finished_utc: str | None = None
    duration_s: Num | None = None
    peak_rss_bytes: int | None = None


class Environment(Group):
    """What a result may depend on. No host names, no absolute paths."""

    pabench: str | None = None
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    transformers: str | None = None
    platform: str | None = None
    cpu: str | None = None
    cores: int | None = None
    threads: int | None = None
    device: str | None = None
    device_name: str | None = None
    triton_mode: Literal["interpreter", "gpu", "none"] | None = None


class FaultSummary(Group):
    """One distinct fault of a kernel: what fails, and under which condition."""

    kernel: str
    fault: str
    confidence: Num
    summary: str
    condition: str | None = None
    factor: Num | None = None
    n_cases: int
    repro: str | None = None


class Rule(Group):
    rule: str
    observed: Num | None = None
    limit: Num | None = None
    verdict: str
    reason: str | None = None


class Gate(Group):
    policy: str
    rules: list[Rule]


class RunHeader(Group):
    schema_version: Annotated[int, Field(ge=1)] = SCHEMA_VERSION
    run: RunInfo
    environment: Environment
    summary: Summary = Summary()
    diagnoses: list[FaultSummary] = Field(default_factory=list)
    gate: Gate | None = None


class RunWithCases(RunHeader):
    """What ``pabench run --json`` prints: run.json with its cases."""

    cases: list[Record]


def jsonable(model: Group) -> dict[str, Any]:
    """The model as JSON data: contract names, NaN and Inf as strings, null groups kept."""
    data: dict[str, Any] = json.loads(model.model_dump_json(by_alias=True))
    return data


def dumps(model: Group, *, indent: int | None = None) -> str:
    return model.model_dump_json(by_alias=True, indent=indent)
