"""The model check: one kernel request, one model and dtype, against one reference run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pabench.checks.candidate import CandidateRun, RefusedError
from pabench.checks.capture import CaptureObserver
from pabench.checks.shadow import ShadowReport
from pabench.checks.tokens import FreeRun, TokenClass, classify, degenerate
from pabench.records import FALLBACK_ALLOWED, MIN_POSITIONS, Status
from pabench.reference.run import ReferenceRun
from pabench_kernels.contract import PHASES
from pabench_kernels.dispatch import ContractBrokenError, Dispatcher
from pabench_kernels.request import KernelRequest

OnFallback = Literal["fail", "warn", "allow"]
KLD_LIMIT = 3.0  # × the floor's mean KLD (design: how a model run is judged)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with the check that saw it. ``fault`` is one of the contract's names."""

    check: str  # dispatch | attention | logits | tokens | coverage | contract
    reason: str
    message: str
    fault: str = "unknown"
    confidence: float = 0.0


@dataclass(frozen=True)
class ModelOutcome:
    """A judged model case; ``candidate`` and what it measured are None where nothing ran."""

    status: Status
    reason: str | None
    message: str
    findings: tuple[Finding, ...]
    dispatcher: Dispatcher
    candidate: CandidateRun | None = None
    shadow: ShadowReport | None = None
    runs: tuple[FreeRun, ...] = ()
    classes: tuple[TokenClass, ...] = ()


def judge(
    reference: ReferenceRun,
    request: KernelRequest,
    *,
    block_size: int,
    token_budget: int,
    on_fallback: OnFallback,
    stop_tokens: Iterable[int],
    progress: Callable[[str], None] = lambda _: None,
    capture: Path | None = None,
) -> ModelOutcome:
    """Run the candidate and judge it. What a kernel raises passes through, except refusals and broken contracts.
    Some of the attention calls are written to the folder ``capture``."""
    dispatcher = Dispatcher(request)
    longest = max(range(len(reference.prompts)), key=lambda p: len(reference.prompts[p]))
    name = reference.path.loaded.name
    captures = [] if capture is None else [CaptureObserver(capture, name, longest)]  # sequences are numbered as prompts
    candidate = CandidateRun(
        reference,
        dispatcher,
        block_size=block_size,
        token_budget=token_budget,
        stop_tokens=frozenset(stop_tokens),
        go_on_after_refusal=on_fallback != "fail",
        progress=progress,
        observers=tuple(captures),
    )
    try:
        candidate.run()
        for observer in captures:
            observer.write()
    except RefusedError:
        return _refused(dispatcher)
    except ContractBrokenError as error:
        finding = Finding("contract", "contract", str(error))
        return ModelOutcome("FAIL", "contract", f"contract: {error}", (finding,), dispatcher)
    nothing_ran = bool(dispatcher.fallbacks) and not dispatcher.under_test_ran
    if on_fallback == "fail" and (nothing_ran or dispatcher.interpreter_limit):
        return _refused(dispatcher)
    shadow = candidate.shadow.report(reference.path.loaded.model.dtype)
    runs = tuple(candidate.free_runs())
    classes = tuple(classify(run, reference.floor.margin) for run in runs)
    findings = [
        *_dispatch(dispatcher, on_fallback),
        *_attention(shadow),
        *_logits(candidate),
        *_tokens(runs, classes, reference),
    ]
    status, reason, message = _status(candidate, findings, classes, on_fallback)
    return ModelOutcome(status, reason, message, tuple(findings), dispatcher, candidate, shadow, runs, classes)


def _refused(dispatcher: Dispatcher) -> ModelOutcome:
    reason = dispatcher.interpreter_limit or "unsupported"
    return ModelOutcome("SKIPPED", reason, f"unsupported: {_reasons(dispatcher)}", (), dispatcher)


def _status(
    candidate: CandidateRun, findings: list[Finding], classes: tuple[TokenClass, ...], on_fallback: OnFallback
) -> tuple[Status, str | None, str]:
    dispatcher = candidate.dispatcher
    if findings:
        message = "; ".join(f"{f.check}: {f.message}" for f in findings)
        wrong = {f.reason for f in findings}
        return (
            ("DEGENERATE" if "degenerate" in wrong and "fallback" not in wrong else "FAIL"),
            findings[0].reason,
            message,
        )
    if gap := _coverage(dispatcher, candidate.reference.path.loaded.geometry.num_layers, on_fallback):
        return "INCONCLUSIVE", "coverage", f"coverage: {gap}"
    if len(candidate.stats) < MIN_POSITIONS:
        return (
            "INCONCLUSIVE",
            "too_few_positions",
            f"only {len(candidate.stats)} positions were compared, {MIN_POSITIONS} are needed; "
            "use more or longer prompts or a larger --max-new-tokens",
        )
    fell_back = dispatcher.proof() == "fell_back"
    note = f"computed by {_stand_ins(dispatcher)}: {_reasons(dispatcher)}" if fell_back else ""
    reason = FALLBACK_ALLOWED if fell_back else None
    return ("NEAR_TIE" if "near_tie" in classes else "PASS"), reason, note


def _dispatch(dispatcher: Dispatcher, on_fallback: OnFallback) -> Iterable[Finding]:
    if on_fallback == "fail" and dispatcher.proof() == "fell_back":
        message = f"fell_back to {_stand_ins(dispatcher)}: {_reasons(dispatcher)}"
        yield Finding("dispatch", "fallback", message, "fallback", 1.0)


def _stand_ins(dispatcher: Dispatcher) -> str:
    names = {key.to for key in dispatcher.fallbacks} | {entered for _, entered, _, _ in dispatcher.intruders()}
    return ", ".join(sorted(names))


def _reasons(dispatcher: Dispatcher) -> str:
    """Why other kernels ran, each reason once with where it held."""
    where: dict[str, list[tuple[str, int]]] = {}
    for key in dispatcher.fallbacks:
        text = "; ".join(key.reasons)
        where.setdefault(text, []).append((key.phase, key.layer))
    for chosen, entered, phase, layer in dispatcher.intruders():
        where.setdefault(f"{chosen} entered {entered} from inside", []).append((phase, layer))
    return "; ".join(f"{text} ({_places(places)})" for text, places in where.items())


def _places(places: list[tuple[str, int]]) -> str:
    phases = "/".join(p for p in (*PHASES, "mixed") if p in {phase for phase, _ in places})
    layers = sorted({layer for _, layer in places})
    span = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}"
    return f"{phases}, {span}"


def _attention(shadow: ShadowReport) -> Iterable[Finding]:
    if shadow.passed or shadow.worst is None:
        return
    w = shadow.worst
    where = f"layer {w.layer}, {w.phase}, sequence {w.seq}, token {w.token}, head {w.q_head}"
    layers = f"first bad layer {shadow.first_layer}, {len(shadow.failing_layers)} bad in all"
    if shadow.nonfinite:
        heads = ", ".join(map(str, shadow.failing_heads[:8]))
        message = f"NaN or Inf in {shadow.nonfinite} of {shadow.rows} output rows, heads {heads} ({layers})"
        yield Finding("attention", "nonfinite", message, "nonfinite", 1.0)
    else:
        yield Finding(
            "attention",
            "attention_error",
            f"off the fp64 oracle by {shadow.ratio:.3g} × what is tolerated, worst in {where} ({layers})",
        )


def _logits(candidate: CandidateRun) -> Iterable[Finding]:
    stats, floor = candidate.stats, candidate.reference.floor.mean_kld
    if stats.nonfinite:
        yield Finding(
            "logits", "nonfinite", f"NaN or Inf at {stats.nonfinite} of {len(stats)} positions", "nonfinite", 1.0
        )
        return
    mean = stats.mean_kld
    if mean <= KLD_LIMIT * floor:
        return
    reference_kld = candidate.reference.oracle_kld
    if reference_kld is not None and candidate.oracle_stats.mean_kld <= reference_kld:
        return  # nearer to the truth than the reference is: not worse
    yield Finding(
        "logits",
        "kld_above_floor",
        f"mean KLD {mean:.3g} is {mean / floor:.3g} × the noise floor (limit {KLD_LIMIT:g})",
    )


def _tokens(runs: tuple[FreeRun, ...], classes: tuple[TokenClass, ...], reference: ReferenceRun) -> Iterable[Finding]:
    for kind, reason, fault in (
        ("degenerate", "degenerate", "degenerate_output"),
        ("beyond_noise", "beyond_noise", "unknown"),
    ):
        bad = [run for run, c in zip(runs, classes, strict=True) if c == kind and run.divergence is not None]
        if not bad:
            continue
        first = min(bad, key=lambda run: run.divergence.index if run.divergence else 0)
        assert first.divergence is not None
        what = degenerate(first) if kind == "degenerate" else "parts at a margin that noise does not explain"
        margin = max(first.divergence.margin, first.later_margin)
        yield Finding(
            "tokens",
            reason,
            f"{len(bad)} of {len(runs)} texts, e.g. prompt {first.divergence.prompt} from token "
            f"{first.divergence.index}: {what} "
            f"(margin {margin:.3g}, floor {reference.floor.margin:.3g})",
            fault,
            0.9 if kind == "degenerate" else 0.0,
        )


def _coverage(dispatcher: Dispatcher, num_layers: int, on_fallback: OnFallback) -> str | None:
    """What of the request was never exercised or cannot be proved; None if all was."""
    proof = dispatcher.proof()
    if proof == "fell_back":
        return None if on_fallback != "fail" else "another kernel ran"
    seen: dict[str, set[int]] = {phase: set() for phase in PHASES}
    for (_, layer, phase), n in dispatcher.trace.selected.items():
        if n > 0:
            for p in PHASES if phase == "mixed" else (phase,):
                seen[p].add(layer)
    for phase in sorted(dispatcher.request.under_test):
        if len(seen[phase]) < num_layers:
            name = dispatcher.request.kernels[phase].name
            return (
                f"{name} was called in {phase} in {len(seen[phase])} of {num_layers} layers, so nothing is known of it"
            )
    if proof == "unknown":
        return f"no launch of {dispatcher.request.name} was counted, so what computed the result is unknown"
    return None
