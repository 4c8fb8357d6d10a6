"""A Localization in words and plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pabench.checks.forensics import Forensics
from pabench.checks.localize import Localization
from pabench.diagnose.reads import Misread
from pabench.localization import CauseFound, LocalizationReport, Place, ReproFile, ScenarioFound


def report_of(
    found: Localization,
    *,
    model: str,
    kernel: str,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    prompts: Sequence[str],
    repro: ReproFile | None = None,
    repro_note: str | None = None,
) -> LocalizationReport:
    """``prompts``: their ids, in the order of the reference's."""
    return LocalizationReport(
        model=model,
        kernel=kernel,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        verdict=_verdict(found),
        status=found.outcome.status,
        message=found.outcome.message,
        place=None if found.first is None else _place(found, found.first, prompts),
        scenario=None if found.scenario is None else found.scenario.what,
        causes=tuple(CauseFound(fault=c.fault, confidence=c.confidence, clause=c.clause) for c in found.causes),
        evidence=tuple(_evidence(found)),
        condition=found.condition,
        scenarios=tuple(
            ScenarioFound(
                name=r.scenario.name, what=r.scenario.what, passed=r.passed, error_over_tolerance=r.shadow.ratio
            )
            for r in found.results
        ),
        repro=repro,
        repro_note=repro_note,
    )


def _verdict(found: Localization) -> Literal["kernel", "inputs", "elsewhere", "dispatch", "contract", "clean"]:
    if not found.wrong:
        return "clean"
    if found.causes[0].fault == "fallback":
        return "dispatch"
    if found.first is None:
        return "contract" if any(f.check == "contract" for f in found.outcome.findings) else "elsewhere"
    return "inputs" if found.first.inputs else "kernel"


def _place(found: Localization, first: Forensics, prompts: Sequence[str]) -> Place:
    known = found.scenario is None and found.root < len(prompts)
    phase: Literal["prefill", "chunk", "decode"] = "decode"
    if first.phase != "decode":
        phase = "chunk" if first.start else "prefill"
    block = first.block
    return Place(
        phase=phase,
        number=found.number,
        step=first.step,
        layer=first.layer,
        prompt=prompts[found.root] if known else None,
        batch_size=first.batch_size,
        length=first.length,
        positions=list(first.tokens),
        q_heads=list(first.q_heads),
        kv_heads=list(first.kv_heads),
        block=block,
        physical_block=first.table[block] if block is not None and block < len(first.table) else None,
        slot=first.slot,
        error_over_tolerance=first.ratio,
    )


def _evidence(found: Localization) -> Iterator[str]:
    first = found.first
    if first is None:
        return
    if first.inputs:
        yield from (wrong.message for wrong in first.inputs)
        return
    yield "it was given right: lengths, block table, cache format, and every key and value where it belongs"
    if first.alone is not None:
        yield f"for this sequence alone it comes out {'right' if first.alone else 'wrong as well'}"
    if first.alone_shorter is not None:
        yield f"alone, one token shorter, it then comes out {'right' if first.alone_shorter else 'wrong'}"
    if first.repeated is not None:
        yield f"made again, the same call comes out {'right' if first.repeated else 'wrong again'}"
    if first.outsiders:
        yield "with zeros in the slots that nobody owns it comes out right"
    for m in first.misreads[:4]:
        yield _misread(m)
    if not first.misreads:
        yield "with contents that name their place, it reads every slot of the sequence as it should"
    if (explained := first.explanation) is not None:
        for match in explained.matches[:3]:
            yield f"the output is what it would be as if {match.what} (to {match.distance:.2g} × the tolerance)"
        if not explained.matches:
            yield explained.note or "no single change that was tried gives this output"


def _misread(m: Misread) -> str:
    heads = f"query head{'s' if len(m.q_heads) > 1 else ''} {_some(m.q_heads)}"
    if m.what == "heads":
        return f"{heads} read KV head {_some(m.read_from)} in place of {m.kv_head}"
    if m.foreign:
        return f"{heads} read {m.foreign} slots that are not the sequence's"
    where = f"block {_some(m.blocks)}" if m.blocks else "every block"
    if m.what == "keys":
        return f"{heads}: the keys of {where} get another weight than their own"
    counts = [f"{n} {word}" for n, word in ((m.missing, "not read"), (m.extra, "read too often")) if n]
    offsets = f", at offset {_some(m.offsets)}" if m.offsets else ""
    return f"{heads}: slots of {where} are read wrongly{': ' if counts else ''}{', '.join(counts)}{offsets}"


def _some(numbers: Sequence[int], limit: int = 6) -> str:
    text = ", ".join(map(str, numbers[:limit]))
    return text + (", …" if len(numbers) > limit else "")
