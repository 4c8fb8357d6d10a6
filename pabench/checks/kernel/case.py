"""The kernel check: one kernel request on one generated batch, without a model."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pabench.capture.meta import built_in_captures
from pabench.cases import Precision
from pabench.checks.kernel.diagnosis import diagnose, history_of
from pabench.checks.kernel.inputs import KernelInputs, build
from pabench.checks.kernel.invariance import NothingToVaryError, judge_invariance
from pabench.checks.kernel.judge import Finding, judge_lse, judge_output
from pabench.checks.kernel.pool import NoMemoryError
from pabench.checks.kernel.shapes import Shape
from pabench.checks.kernel.truth import Truth, find_truth
from pabench.records import Accuracy, Status
from pabench_kernels.contract import PHASES, Kernel, PagedBatch
from pabench_kernels.dispatch import ContractBrokenError, Dispatcher
from pabench_kernels.request import KernelRequest

LSE_PROBE = "iid"  # one probe is enough: it has every feature of its shape


@dataclass(frozen=True)
class Trial:
    """What the kernels of a run have in common: one shape, probe and precision."""

    shape: Shape
    probe: str
    precision: Precision
    seed: int
    device: str = "cpu"

    @property
    def key(self) -> str:
        p, shape = self.precision, self.shape
        return f"kernel:{p.dtype}:kv-{p.kv_dtype}:b{shape.block_size}:{shape.batch_spec}:{self.probe}:s{self.seed}"

    @cached_property
    def inputs(self) -> KernelInputs:
        return build(self.shape, self.probe, self.precision, self.seed, self.device)

    @cached_property
    def truth(self) -> Truth:
        return find_truth(self.inputs)

    def drop(self) -> None:
        """Free the tensors; a run holds hundreds of trials."""
        for name in ("inputs", "truth"):
            self.__dict__.pop(name, None)


@dataclass(frozen=True)
class KernelCase:
    """One kernel request on one trial."""

    trial: Trial
    kernel: str
    kernel_text: str

    @property
    def case_id(self) -> str:
        return f"{self.trial.key}:{self.kernel}"

    @property
    def repro(self) -> str:
        """A command that runs this one case again."""
        t = self.trial
        words = ["pabench", "run", "kernels", "-k", self.kernel_text, "--checks", "kernel"]
        words += ["--dtype", t.precision.asked, "--batch-spec", shape_text(t.shape), "--probe", t.probe]
        if t.precision.quantized and (t.precision.asked, t.precision.kv_dtype) != ("fp8", "fp8_e4m3"):
            words += ["--kv-dtype", t.precision.kv_dtype]
        return shlex.join([*words, "--block-size", str(t.shape.block_size), "--seed", str(t.seed)])


def shape_text(shape: Shape) -> str:
    """What names this shape on the command line: a capture of the user's by its file."""
    ours = shape.capture is None or Path(shape.capture).stem in built_in_captures()
    return shape.batch_spec if ours else str(shape.capture)


@dataclass(frozen=True)
class KernelOutcome:
    status: Status
    reason: str | None
    message: str
    dispatcher: Dispatcher
    accuracy: Accuracy | None = None
    finding: Finding | None = None


def judge_kernel(trial: Trial, request: KernelRequest, *, fail_on_fallback: bool = True) -> KernelOutcome:
    """Run the request on the trial's batch and judge what it gives. What a kernel raises passes through."""
    dispatcher = Dispatcher(request)
    try:
        inputs = trial.inputs
    except NoMemoryError as error:
        return KernelOutcome("SKIPPED", "no_memory", f"unsupported: {error}", dispatcher)
    batch = inputs.batch
    missing = batch.phases - request.under_test
    if missing == batch.phases:
        message = f"unsupported: {request.name} has no {' and no '.join(sorted(missing))} phase"
        return KernelOutcome("SKIPPED", "unsupported", message, dispatcher)
    if trial.shape.scales == "token" and not all(k.per_token_scales for k in request.kernels.values()):
        message = f"unsupported: {request.name} does not declare per_token_scales"
        return KernelOutcome("SKIPPED", "unsupported", message, dispatcher)
    _ = inputs.snapshot
    moved = None
    try:
        with nan_in_new_tensors():
            out = dispatcher(batch, layer=0)
            lse = _lse(request, inputs, dispatcher)
            if inputs.probe.kind == "invariance" and not dispatcher.fallbacks:
                moved = _invariance(trial, request, dispatcher, out)
    except NothingToVaryError as error:
        return KernelOutcome("SKIPPED", "unsupported", f"unsupported: {error}", dispatcher)
    except ContractBrokenError as error:
        return _failed(dispatcher, Finding("contract", str(error), confidence=0.5))
    finally:
        changed = inputs.changed()
    if dispatcher.fallbacks:
        reasons = "; ".join(dict.fromkeys(r for key in dispatcher.fallbacks for r in key.reasons))
        refused = dispatcher.interpreter_limit or "unsupported"
        return KernelOutcome("SKIPPED", refused, f"unsupported: {reasons}", dispatcher)
    if changed:
        message = f"wrote into its inputs: {', '.join(changed)}"
        return _failed(dispatcher, Finding("inputs_written", message, confidence=0.5))
    finding, accuracy = judge_output(inputs, trial.truth, out)
    if inputs.probe.kind == "invariance":  # what is off the oracle the other probes search for the fault of
        unnamed = None if finding is None else replace(finding, evidence={"searched": False})
        finding = moved if moved is not None and (unnamed is None or moved.fault != "unknown") else unnamed
    elif finding is not None:
        finding = _explained(trial, request, out, finding)
    if finding is None and lse is not None:
        finding = _judge_with_lse(trial, *lse)
    if fail_on_fallback and dispatcher.proof() == "fell_back":
        entered = ", ".join(sorted({name for _, name, _, _ in dispatcher.intruders()}))
        finding = Finding("fallback", f"fell_back: {request.name} entered {entered} from inside", "fallback", 1.0)
    if finding is not None:
        return _failed(dispatcher, finding, accuracy)
    if dispatcher.proof() == "unknown":
        message = f"no launch of {request.name} was counted, so what computed the result is unknown"
        return KernelOutcome("INCONCLUSIVE", "coverage", message, dispatcher, accuracy)
    reason = "fallback_allowed" if dispatcher.proof() == "fell_back" else None
    return KernelOutcome("PASS", reason, "", dispatcher, accuracy)


def _invariance(trial: Trial, request: KernelRequest, dispatcher: Dispatcher, out: Tensor) -> Finding | None:
    kernels = {request.kernels[p].name: request.kernels[p] for p in trial.inputs.batch.phases}
    return judge_invariance(
        trial.inputs, trial.truth, out, lambda batch: dispatcher(batch, layer=0), list(kernels.values())
    )


def _explained(trial: Trial, request: KernelRequest, out: Tensor, finding: Finding) -> Finding:
    """The finding with the fault that explains it, if one does."""

    def call(batch: PagedBatch) -> Tensor:
        with nan_in_new_tensors():
            return Dispatcher(request)(batch, layer=0)

    history = history_of(next(request.kernels[p].fn for p in PHASES if p in request.under_test))
    try:
        named = diagnose(trial.inputs, trial.truth, out, call, history)
    except Exception as error:  # whatever it was: the case stays wrong, and says that nothing more is known
        return replace(finding, evidence={"not_diagnosed": f"{type(error).__name__}: {error}", "searched": False})
    trial.inputs.changed()  # puts back what the calls may have written
    message = finding.message
    if named.clause:
        message += f"; {named.clause}"
        if named.fault not in ("unknown", finding.fault):
            message += f" ({named.fault})"
    evidence = {"sequences": named.sequences, **({"clause": named.clause} if named.clause else {}), **named.evidence}
    return replace(finding, message=message, fault=named.fault, confidence=named.confidence, evidence=evidence)


def _judge_with_lse(trial: Trial, out: object, lse: object) -> Finding | None:
    """What ``return_lse=True`` gave: its output may be computed another way, and is judged like any."""
    shape, dtype = tuple(trial.truth.out.shape), trial.inputs.batch.query.dtype
    if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != dtype:
        return Finding("lse", "the output that comes with lse has another shape or dtype than without", "lse", 0.5)
    return judge_lse(trial.inputs, trial.truth, lse) or judge_output(trial.inputs, trial.truth, out)[0]


def _failed(dispatcher: Dispatcher, finding: Finding, accuracy: Accuracy | None = None) -> KernelOutcome:
    return KernelOutcome("FAIL", finding.reason, finding.message, dispatcher, accuracy, finding)


def _lse(request: KernelRequest, inputs: KernelInputs, dispatcher: Dispatcher) -> tuple[Tensor, Tensor] | None:
    """(out, lse) where one kernel computes the whole batch and has lse."""
    kernels = {request.kernels[p].name: request.kernels[p] for p in inputs.batch.phases}
    if inputs.probe.name != LSE_PROBE or dispatcher.fallbacks or len(kernels) != 1:
        return None
    (kernel,) = kernels.values()
    if not isinstance(kernel, Kernel) or not kernel.has_lse:
        return None
    try:
        found: tuple[Tensor, Tensor] = kernel(inputs.batch, return_lse=True)
    except NotImplementedError:  # no lse for this batch, found late
        return None
    if not isinstance(found, tuple) or len(found) != 2:
        raise ContractBrokenError(
            f"kernel '{kernel.name}' must return (out, lse) when asked, got {type(found).__name__}"
        )
    return found


@contextmanager
def nan_in_new_tensors() -> Iterator[None]:
    """Everything allocated inside begins as NaN (or the largest integer), so that an unwritten output shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
