"""Sentences about a run, for the terminal and for any other report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from pabench.records import FALLBACK_ALLOWED, Fallback, Record, RunHeader, Tokens
from pabench.verdict import UNJUDGED, WRONG

_PROMPT_CHARS = 60


def number(value: float | None) -> str:
    """Three figures at most; "—" where there is none, "NaN" and "∞" as such."""
    if value is None:
        return "—"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) >= 1000 or abs(value) < 0.01:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def quoted(text: str | None, limit: int = _PROMPT_CHARS) -> str:
    """The text in quotes, on one line, control characters visible."""
    if text is None:
        return "nothing"
    shown = json.dumps(text if len(text) <= limit else text[: limit - 1] + "…", ensure_ascii=False)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def dtypes(record: Record) -> str:
    """ "bf16", or "bf16 / fp8_e4m3" where the cache has another dtype."""
    if record.dtype is None:
        return "—"
    return record.dtype if record.kv_dtype in (None, record.dtype) else f"{record.dtype} / {record.kv_dtype}"


def breakable(name: str, width: int) -> str:
    """The name on several lines of at most ``width``, cut after a separator; only a longer word is cut inside."""
    lines = [""]
    for piece in re.findall(r"[^_,:/.=\-]*[_,:/.=\-]+|[^_,:/.=\-]+", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line[i : i + width] for line in lines for i in range(0, max(1, len(line)), width))


def short_kernel(kernel: str | None) -> str:
    """ "a + b" for "prefill=a,decode=b"."""
    first, _, second = (kernel or "—").removeprefix("prefill=").partition(",decode=")
    return f"{first} + {second}" if second else first


def subject(record: Record) -> str:
    parts = [record.kernel or "dense", "on", record.model, dtypes(record), record.batch_spec, record.probe]
    if record.model is None:
        parts.remove("on")
    return " ".join(p for p in parts if p)


def tokens_in_words(tokens: Tokens | None) -> str:
    """How far the free-running texts agree: "4/5 same, parts at 14: near tie"."""
    if tokens is None:
        return "—"
    c = tokens.classes
    if c.identical == tokens.n_seq:
        return f"{c.identical}/{tokens.n_seq} same"
    why = "degenerate" if c.degenerate else "beyond noise" if c.beyond_noise else "near tie"
    where = "" if tokens.divergence_index.min is None else f" parts at {tokens.divergence_index.min}:"
    return f"{c.identical}/{tokens.n_seq} same,{where} {why}"


def divergence_in_words(record: Record) -> str | None:
    """The first divergence of this case: prompt, position, both tokens, margin against the floor."""
    first = None if record.tokens is None else record.tokens.first
    if first is None:
        return None
    prompt = f"prompt '{first.prompt}'" + (f" ({quoted(first.prompt_text)})" if first.prompt_text else "")

    def token(text: str | None, token_id: int | None) -> str:
        if token_id is None:
            return "nothing (it ended)"
        return f"token {token_id}" if text is None else f"{quoted(text).replace(' ', '␣')} (token {token_id})"

    if first.margin_over_floor <= 1:
        meaning = "a near tie, which correct arithmetic may turn either way"
    else:
        meaning = "more than rounding can turn"
    return (
        f"{subject(record)}: in {prompt} the texts part at generated token {first.index} (counted from 0). "
        f"Dense attention writes {token(first.reference_text, first.reference_token)}, "
        f"the candidate {token(first.candidate_text, first.candidate_token)}. "
        f"The reference's top-2 margin there is {number(first.margin)} logits, "
        f"{number(first.margin_over_floor)} × the noise floor: {meaning}."
    )


def fallbacks_in_words(record: Record) -> list[str]:
    """One sentence per distinct substitution, layers and calls summed up."""
    merged: dict[tuple[str, str, str, str], list[Fallback]] = {}
    judged = record.execution is not None and record.status != "SKIPPED"  # a skipped case has no result to own up to
    for f in record.execution.fallbacks if judged and record.execution is not None else ():
        merged.setdefault((f.from_, f.to, f.phase, "; ".join(f.reasons)), []).append(f)
    sentences = []
    for (wanted, got, phase, reasons), found in merged.items():
        layers = sorted({f.layer for f in found if f.layer is not None})
        where = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers" if layers else ""
        calls = f"{sum(f.calls for f in found)} calls"
        place = ", ".join(filter(None, (phase, where, calls)))
        sentences.append(f"{got} ran in place of {wanted} ({place}): {reasons}")
    return sentences


def ran_in_words(records: Sequence[Record]) -> str:
    """Which kernels computed the results, fallbacks named as such."""
    names: dict[str, None] = {}
    swaps: dict[tuple[str, str, bool], int] = {}
    for r in records:
        if r.execution is None or r.status == "SKIPPED":
            continue
        names.update(dict.fromkeys(name for name, calls in r.execution.executed.items() if calls))
        for swap in {(f.from_, f.to) for f in r.execution.fallbacks}:
            key = (*swap, r.reason == FALLBACK_ALLOWED)
            swaps[key] = swaps.get(key, 0) + 1
    if not names:
        return "no kernel ran"
    text = f"computed by {', '.join(names)}"
    for (wanted, got, allowed), n in swaps.items():
        leave = "fallback allowed" if allowed else "a fallback nobody allowed"
        text += f"; {got} ran in place of {wanted} in {n} {'case' if n == 1 else 'cases'} ({leave})"
    return text


def verdict_sentence(header: RunHeader, records: Sequence[Record]) -> str:
    """The last line of a report: verdict, exit code, what it rests on, and which kernels produced it."""
    s = header.summary
    judged = [r for r in records if r.status not in UNJUDGED]
    wrong = sum(r.status in WRONG for r in records)
    n = len(judged)
    cases = "case" if n == 1 else "cases"
    match s.verdict:
        case "passed":
            text = f"{n} of {n} judged {cases} agree with dense attention within the noise floor"
        case "failed":
            text = f"{wrong} of {n} judged {cases} {'is' if wrong == 1 else 'are'} wrong"
        case "error":
            text = f"{s.errors} of {len(records)} cases did not finish, {wrong} of the others are wrong"
        case "could_not_judge":
            text = f"{s.skipped} skipped and {s.inconclusive} inconclusive leave something asked for unjudged"
        case "nothing_ran":
            text = "nothing ran"
        case _:
            text = f"{len(records)} cases are finished so far"
    label = {"passed": "PASS", "failed": "FAIL", "error": "ERROR"}.get(s.verdict, s.verdict.upper().replace("_", " "))
    code = "" if s.exit_code is None else f" (exit {s.exit_code})"
    ran = f"; {ran_in_words(records)}" if records else ""
    return f"{label}{code}: {text}{ran}."
