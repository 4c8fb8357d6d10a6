"""From what was seen of a wrong model case to one fault name, how sure it is, and why: the first rule that holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pabench.checks.drift import Drift
from pabench.checks.forensics import Forensics
from pabench.checks.model import ModelOutcome
from pabench.checks.scenarios import Scenario
from pabench.diagnose.given import WrongInput
from pabench.diagnose.reads import Misread


@dataclass(frozen=True)
class Cause:
    """``fault`` of the contract; ``clause`` goes on after "…: "."""

    fault: str
    confidence: float
    clause: str


def causes(
    outcome: ModelOutcome,
    first: Forensics | None,
    later: Forensics | None,
    scenario: Scenario | None,
    drift: Drift | None,
    told: WrongInput | None,
) -> list[Cause]:
    """What may be wrong, most likely first; the second is the runner-up. Empty where nothing was wrong.

    ``first`` is the first wrong attention call, ``later`` a wrong decode call after it; ``scenario`` is where they were
    seen, None for the plain run of the case. ``told`` is what the model itself was told wrongly.
    """
    found = list(_causes(outcome, first, later, scenario, drift, told))
    return list({c.fault: c for c in reversed(found)}.values())[::-1]


def _causes(
    outcome: ModelOutcome,
    first: Forensics | None,
    later: Forensics | None,
    scenario: Scenario | None,
    drift: Drift | None,
    told: WrongInput | None,
) -> Iterator[Cause]:
    if told is not None:
        yield Cause(told.fault, 0.95, told.message)
    for finding in outcome.findings:
        if finding.fault == "fallback" or finding.check == "contract":
            yield Cause(finding.fault, finding.confidence, finding.message)
    if first is None:
        yield from _without_attention(outcome, drift)
        return
    for wrong in first.inputs:
        yield Cause(wrong.fault, 0.95, wrong.message)
    if first.inputs:
        return
    if first.repeated:  # then nothing that was asked of it afterwards says anything
        yield Cause("plan_reuse", 0.8, "the same call, made again, comes out right: something is kept between calls")
        yield Cause("unknown", 0.0, "no hypothesis gives this output")
        return
    if first.outsiders and not _foreign(first.misreads):
        yield Cause("stale_read", 0.9, "it comes out right once slots that nobody owns hold zeros")
    if later is not None and (grown := _grown(first, later)) is not None:
        yield Cause("plan_reuse", 0.85, grown)
    if first.alone_shorter is False:
        yield Cause("plan_reuse", 0.85, "right for the sequence alone, then wrong for one token less: a plan is kept")
    explained = first.explanation
    named = explained is not None and explained.fault != "unknown"
    if first.alone and not (named and explained is not None and explained.fault == "wrong_block"):
        yield Cause("batch_dependence", 0.85, "it comes out right for this sequence alone")
    if scenario is not None and not named:
        yield Cause(scenario.fault, 0.7, f"it is wrong only {scenario.what}")
    if explained is not None:
        for match in explained.matches:
            confidence = explained.confidence if named else 0.3
            yield Cause(match.fault if named else "unknown", confidence, f"as if {match.what}")
        if not explained.matches and explained.note:
            fault = "degenerate_output" if explained.factor == 0 else "unknown"
            yield Cause(fault, 0.5 if fault != "unknown" else 0.0, explained.note)
        yield from _of_misreads(m for m in first.misreads if m.what == "heads" or m.foreign)
    else:
        if all(m.what == "slots" and _unclear(m) for m in first.misreads):
            yield Cause("nonfinite", 0.9, "NaN or Inf comes out of finite keys and values")
        yield from _of_misreads(first.misreads)
    yield Cause("unknown", 0.0, "no hypothesis gives this output")


def _without_attention(outcome: ModelOutcome, drift: Drift | None) -> Iterator[Cause]:
    if drift is not None:
        step = "the prefill" if drift.forward == 0 else f"decode step {drift.forward}"
        yield Cause(
            "unknown",
            0.0,
            f"attention is right in every call; the model itself parts in {step} at {drift.module}, by "
            f"{drift.error:.2g} where dense runs differ by {drift.floor:.2g}",
        )
    elif any(f.check == "logits" or f.check == "tokens" for f in outcome.findings):
        yield Cause("unknown", 0.0, "attention is right in every call, and no module of the model parts by itself")


def _foreign(misreads: Iterable[Misread]) -> bool:
    return any(m.foreign for m in misreads)


def _unclear(m: Misread) -> bool:
    return not (m.missing or m.extra or m.foreign)


def _grown(first: Forensics, later: Forensics) -> str | None:
    """Whether more and more of the newest tokens are hidden: lengths that were frozen at an earlier call.

    Where what is read ends with a block, it may as well be the unfilled block that is left out.
    """
    hidden = [sum(len(m.offsets) for m in f.misreads[:1] if m.what == "slots" and m.missing) for f in (first, later)]
    same = first.seq_id == later.seq_id and first.layer == later.layer
    end = first.length - hidden[0]
    if (
        same
        and first.phase == "decode"
        and 0 < hidden[0] < hidden[1]
        and end == later.length - hidden[1]
        and end % first.block_size
    ):
        return f"{hidden[0]} of the newest tokens are hidden at length {first.length}, {hidden[1]} at {later.length}"
    return None


def _of_misreads(misreads: Iterable[Misread]) -> Iterator[Cause]:
    for m in misreads:
        heads = f"query heads {', '.join(map(str, m.q_heads))}"
        if m.what == "heads":
            read = ", ".join(map(str, m.read_from))
            yield Cause("head_map", 0.8, f"{heads} read KV head {read} in place of {m.kv_head}")
        elif m.foreign:
            yield Cause("extra_tokens", 0.8, f"{heads} read {m.foreign} slots that are not the sequence's")
        elif m.missing and not m.extra:
            where = f"block {m.blocks[0]}" if m.blocks else "the sequence"
            yield Cause("missing_tokens", 0.4, f"{heads} leave out {m.missing} slots of {where}")
