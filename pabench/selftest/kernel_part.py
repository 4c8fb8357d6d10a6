"""Mutants through the kernel check: which probe sees which, what today's rules would have said, what is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from pabench.cases import Precision
from pabench.checks.kernel.case import KernelCase, Trial, judge_kernel, nan_in_new_tensors
from pabench.checks.kernel.diagnosis import history_of
from pabench.checks.kernel.faults import distinct_faults
from pabench.checks.kernel.probes import PROBES
from pabench.checks.kernel.record import kernel_record, outcome_fields
from pabench.checks.kernel.shapes import find_shape
from pabench.process_state import process_state_kept
from pabench.records import Record
from pabench.selftest.mutant import Attention, Mutant
from pabench.selftest.todays_rules import RULES
from pabench_kernels.contract import ALL_PHASES, Kernel
from pabench_kernels.dispatch import ContractBrokenError, Dispatcher
from pabench_kernels.request import KernelRequest

PRECISIONS = (Precision("bf16", "bf16", "bf16"), Precision("fp8", "bf16", "fp8_e4m3"))
SHAPES = (  # short ones that between them have every feature, and long ones, where tolerances go blind
    *("plain-decode", "plain-mixed", "gqa71-decode", "head-dim-33", "head-dim-256", "value-dim-smaller"),
    *("block-size-is-kv-heads", "long-empty-short", "chunk-33-of-80", "window-freed-blocks", "window-edges", "alibi"),
    *("soft-cap", "sinks", "everything", "per-head-scales", "scale-0.3", "padded-cache", "interleaved-cache"),
    *("partition-edges", "ids-past-65536"),
)
VARIED = ("plain-decode", "plain-mixed")  # in which batches are taken apart, reordered, repeated
ALWAYS = ("count", "iid")  # probes that every shape meets
TURNS = 2  # of the others, in turn
SEARCHES = 8  # through all hypotheses, of one mutant: what they name is enough for a name over all cases
TODAYS_PROBE = "iid"  # what those suites draw


@dataclass
class KernelKills:
    """What the kernel check said of one mutant, per probe: True killed, False not; absent where it changed nothing."""

    mutant: Mutant
    probes: dict[str, bool] = field(default_factory=dict)
    rules: dict[str, bool] = field(default_factory=dict)
    named: str | None = None  # the first run-level diagnosis
    records: list[Record] = field(default_factory=list)

    @property
    def killed(self) -> bool:
        return any(self.probes.values())


def probes_of(kind: str) -> list[str]:
    return [name for name, probe in PROBES.items() if probe.kind == kind]


def trials(seed: int) -> list[Trial]:
    """Each (shape, probe) in one of the precisions in turn; the same for the same seed."""
    content = [p for p in probes_of("content") if p not in ALWAYS]
    pairs = []
    for i, name in enumerate(SHAPES):
        turns = [content[(i + n * len(content) // TURNS) % len(content)] for n in range(TURNS)]
        pairs += [(find_shape(name, 16), probe) for probe in (*ALWAYS, *turns)]
    pairs += [(find_shape(name, 16), probe) for name in VARIED for probe in probes_of("invariance")]
    return [Trial(s, probe, PRECISIONS[i % len(PRECISIONS)], seed) for i, (s, probe) in enumerate(pairs)]


def request_of(name: str, fn: Attention) -> KernelRequest:
    """A function as the kernel of both phases."""
    kernel = Kernel(name=name, fn=fn, phases=ALL_PHASES, stranger=True, has_lse=True)
    return KernelRequest(name, name, {"prefill": kernel, "decode": kernel}, ALL_PHASES)


def with_fault(mutant: Mutant, honest: KernelRequest) -> KernelRequest:
    """``honest`` with the fault planted in each kernel under test. They keep their names: their launchers count under
    them, and another name would be taken for a fallback."""
    made: dict[str, Kernel] = {}
    kernels = dict(honest.kernels)
    for phase in honest.under_test:
        kernel = honest.kernels[phase]
        if kernel.name not in made:
            made[kernel.name] = replace(kernel, fn=mutant.make(kernel.fn), stranger=True)
        kernels[phase] = made[kernel.name]
    return replace(honest, kernels=kernels)


def kernel_kills(
    mutants: Sequence[Mutant], honest: KernelRequest, seed: int, note: Callable[[str], None] = lambda _: None
) -> Iterator[KernelKills]:
    """Judge every mutant on every trial whose inputs ``honest`` supports. Inputs and truths are shared by all."""
    planned = trials(seed)
    for mutant in mutants:
        note(f"kernel check: {mutant.name}")
        kills = KernelKills(mutant)
        request = with_fault(mutant, honest)
        for kernel in request.kernels.values():
            history_of(kernel.fn).searches = SEARCHES
        for trial in planned:
            with process_state_kept():
                outcome = judge_kernel(trial, request)
            case = KernelCase(trial, mutant.name, mutant.name)
            record = kernel_record(case, **outcome_fields(outcome))
            kills.records.append(record)
            if record.status == "FAIL":
                kills.probes[trial.probe] = True
            elif record.status == "SKIPPED":
                continue
            elif trial.probe not in kills.probes and _differs(trial, request, honest):
                kills.probes[trial.probe] = False
            if trial.probe == TODAYS_PROBE:
                _todays(trial, request, kills)
        summaries = distinct_faults(kills.records)
        kills.named = summaries[0].fault if summaries else None
        yield kills


def _differs(trial: Trial, faulty: KernelRequest, honest: KernelRequest) -> bool:
    """Whether the mutant changes anything here at all; where it does not, nothing was there to see."""
    with nan_in_new_tensors():
        a, b = (Dispatcher(request)(trial.inputs.batch, 0) for request in (faulty, honest))
    return a.shape != b.shape or not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def _todays(trial: Trial, faulty: KernelRequest, kills: KernelKills) -> None:
    try:
        found = Dispatcher(faulty)(trial.inputs.batch, 0)
    except ContractBrokenError:  # none of those rules looks at more than an output
        return
    for rule, accepts in RULES.items():
        kills.rules[rule] = kills.rules.get(rule, False) or not accepts(found, trial.truth.out)
