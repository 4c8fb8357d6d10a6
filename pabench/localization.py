"""What ``localize`` and ``replay`` found, as plain data: for the terminal, ``--json``, across processes. No torch."""

from __future__ import annotations

from typing import Literal

from pabench.record_groups import Group, Num


class Place(Group):
    """The first wrong attention call. Numbers count from 0; ``length`` includes the call's own tokens."""

    phase: Literal["prefill", "chunk", "decode"]
    number: int  # which prefill chunk or decode step of the sequence
    step: int  # forward pass of the engine
    layer: int
    prompt: str | None
    batch_size: int
    length: int
    positions: list[int]  # of the query tokens that are wrong
    q_heads: list[int]
    kv_heads: list[int]
    block: int | None = None  # logical, the first that is read or was written wrongly
    physical_block: int | None = None
    slot: int | None = None
    error_over_tolerance: Num


class CauseFound(Group):
    fault: str
    confidence: Num
    clause: str


class ScenarioFound(Group):
    name: str
    what: str
    passed: bool
    error_over_tolerance: Num


class ReproFile(Group):
    file: str
    bytes: int
    fault: str
    command: str


class LocalizationReport(Group):
    """``verdict``: "kernel" (a call is wrong), "inputs" (it was given wrong ones), "elsewhere" (attention is right and
    the model parts), "dispatch" (another kernel ran), "contract" (what it returned is no attention output, or it wrote
    into its inputs), "clean"."""

    model: str
    kernel: str
    dtype: str
    kv_dtype: str
    block_size: int
    verdict: Literal["kernel", "inputs", "elsewhere", "dispatch", "contract", "clean"]
    status: str  # of the model case by itself
    message: str
    place: Place | None = None
    scenario: str | None = None  # where it shows, if the plain run passes
    causes: tuple[CauseFound, ...] = ()
    evidence: tuple[str, ...] = ()
    condition: str | None = None
    scenarios: tuple[ScenarioFound, ...] = ()
    repro: ReproFile | None = None
    repro_note: str | None = None  # why there is none
    notes: tuple[str, ...] = ()


class ReplayReport(Group):
    """``status``: PASS or FAIL. ``was`` is what the file's call was named when it was written."""

    kernel: str
    status: str
    rows: int
    rows_beyond: int
    nonfinite: int
    error_over_tolerance: Num
    fault: str | None
    clauses: list[str]
    was: str
    origin: str
    shape: str
