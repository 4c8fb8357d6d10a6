"""Mutants and faults of the engine through the model check and `localize`, on a small random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pabench.checks.localize import localize
from pabench.checks.model import ModelOutcome, judge
from pabench.models.load import load_model, resolve_model
from pabench.process_state import process_state_kept
from pabench.prompts import choose
from pabench.reference.run import ReferenceRun, run_reference
from pabench.selftest.engine_faults import ENGINE_FAULTS
from pabench.selftest.kernel_part import with_fault
from pabench.selftest.mutant import Mutant
from pabench_kernels.request import KernelRequest

MODEL = "tiny-llama"
KINDS = ("question", "code", "list", "dialogue")
MAX_PROMPT = 72  # tokens
NEW_TOKENS = 33
BLOCK_SIZE, TOKEN_BUDGET = 8, 48
EQUAL_TOKENS = 32  # over which people compare texts
CHECKS = ("attention", "logits", "tokens", "dispatch", "contract", "scenario")
# Faults of features that this model does not have: the model check has nothing to see there.
UNSEEN = frozenset(
    {"alibi", "soft_cap", "sink", "sliding_window", "lse", "block_alias", "layout_stride", "kernel_limit"}
)


@dataclass
class ModelKills:
    """Which part of the model check failed for one fault; ``tokens_equal``: what comparing texts would have said."""

    name: str
    checks: dict[str, bool] = field(default_factory=dict)
    named: str | None = None
    tokens_equal: bool | None = None
    changed: bool = True  # whether it made any difference to logits or status

    @property
    def killed(self) -> bool:
        return any(self.checks.values())


class References:
    """One reference run a precision, made when first asked for."""

    def __init__(self, seed: int, note: Callable[[str], None]) -> None:
        self._loaded = load_model(resolve_model(MODEL, offline=True), dtype=torch.bfloat16, device="cpu")
        tokenizer = self._loaded.tokenizer
        self._prompts = [list(tokenizer(p.text)["input_ids"])[:MAX_PROMPT] for p in choose(KINDS, seed)]
        self._note = note
        self._made: dict[torch.dtype | None, ReferenceRun] = {}

    def get(self, kv_dtype: torch.dtype | None) -> ReferenceRun:
        """In bf16, over a cache of ``kv_dtype``; None: its own dtype."""
        if kv_dtype not in self._made:
            self._note("selftest: dense reference")
            self._made[kv_dtype] = run_reference(self._loaded, self._prompts, NEW_TOKENS, kv_dtype=kv_dtype)
        return self._made[kv_dtype]

    def close(self) -> None:
        for reference in self._made.values():
            reference.close()


def kv_dtype_of(fault: str, quantized: bool = False) -> torch.dtype | None:
    """fp8 where the fault has to do with a quantised cache."""
    return torch.float8_e4m3fn if quantized or fault in ("kv_scale", "dtype_ignored") else None


def mutant_kills(
    mutants: Sequence[Mutant], honest: KernelRequest, references: References, note: Callable[[str], None]
) -> Iterator[ModelKills]:
    """Kernel mutants through the model check, where the model has what they spoil."""
    for mutant in mutants:
        if mutant.fault in UNSEEN:
            continue
        note(f"model check: {mutant.name}")
        kills = ModelKills(mutant.name)
        with process_state_kept():  # what raises here is a bug of ours, and must not count as a kill
            outcome = judge(
                references.get(kv_dtype_of(mutant.fault)),
                with_fault(mutant, honest),
                block_size=BLOCK_SIZE,
                token_budget=TOKEN_BUDGET,
                on_fallback="fail",
                stop_tokens=(),
            )
        _read(outcome, kills)
        yield kills


def engine_kills(honest: KernelRequest, references: References, note: Callable[[str], None]) -> Iterator[ModelKills]:
    """Faults of the engine around an honest kernel, through `localize`."""
    for fault in ENGINE_FAULTS:
        note(f"localize: {fault.name}")
        kills = ModelKills(fault.name)
        with process_state_kept():
            found = localize(
                references.get(kv_dtype_of(fault.fault, fault.quantized)),
                honest,
                block_size=BLOCK_SIZE,
                token_budget=TOKEN_BUDGET,
                stop_tokens=(),
                engine_type=fault.engine_type,
            )
        _read(found.outcome, kills)
        if found.scenario is not None:
            kills.checks["scenario"] = True
        kills.named = found.causes[0].fault if found.causes else None
        yield kills


def _read(outcome: ModelOutcome, kills: ModelKills) -> None:
    for finding in outcome.findings:
        kills.checks[finding.check] = True
    if outcome.runs:
        kills.tokens_equal = all(run.candidate[:EQUAL_TOKENS] == run.reference[:EQUAL_TOKENS] for run in outcome.runs)
    if not outcome.findings and outcome.candidate is not None:
        kills.changed = outcome.candidate.stats.mean_kld > 0
