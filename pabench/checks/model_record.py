"""A judged model case as the groups of a record."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from pabench.checks.candidate import CandidateRun
from pabench.checks.execution import execution_group
from pabench.checks.memory import measure
from pabench.checks.model import ModelOutcome
from pabench.checks.shadow import ShadowReport
from pabench.checks.tokens import prefix_match
from pabench.records import (
    Accuracy,
    DeltaP,
    Diagnosis,
    Distribution,
    DivergenceIndex,
    FirstDivergence,
    Logits,
    Memory,
    NoiseFloor,
    OracleKld,
    TokenClasses,
    Tokens,
    Worst,
)


def record_groups(outcome: ModelOutcome) -> dict[str, Any]:
    """The groups execution, accuracy, logits, tokens, diagnosis and memory of the record; None where nothing was
    measured."""
    candidate = outcome.candidate
    return {
        "execution": execution_group(outcome.dispatcher),
        "accuracy": None if candidate is None or outcome.shadow is None else _accuracy(candidate, outcome.shadow),
        "logits": None if candidate is None else _logits(candidate),
        "tokens": None if candidate is None else _tokens(candidate, outcome),
        "diagnosis": _diagnosis(outcome),
        "memory": None if candidate is None else _memory(candidate),
    }


def _memory(candidate: CandidateRun) -> Memory:
    pool = candidate.engine.pool
    loaded = candidate.reference.path.loaded
    return measure(candidate.memory, loaded, [*pool.keys, *pool.values], candidate.shadow.kept_bytes)


def _accuracy(candidate: CandidateRun, shadow: ShadowReport) -> Accuracy:
    worst = None
    if (w := shadow.worst) is not None:
        geometry = candidate.reference.path.loaded.geometry
        size = candidate.block_size
        table = candidate.engine.blocks.table(w.seq)
        physical = table[w.token // size]
        worst = Worst(
            seq=w.seq,
            q_head=w.q_head,
            kv_head=w.q_head // (geometry.num_q_heads // geometry.num_kv_heads),
            token=w.token,
            block=w.token // size,
            physical_block=physical,
            slot=physical * size + w.token % size,
            dim=w.dim,
            layer=w.layer,
            phase=w.phase,
        )
    return Accuracy(
        rel_l2_max=shadow.rel_l2_max,
        noise_floor=shadow.honest_error,
        ratio_to_floor=shadow.rel_l2_max / shadow.honest_error if shadow.honest_error > 0 else float("inf"),
        max_abs=shadow.max_abs,
        nonfinite=shadow.nonfinite,
        worst=worst,
        tolerance_ratio=shadow.ratio,
        rows=shadow.rows,
        first_bad_layer=shadow.first_layer,
    )


def _distribution(values: np.ndarray[Any, np.dtype[np.float64]]) -> Distribution:
    spread = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
    median, p95, p99 = (float(np.quantile(values, q)) for q in (0.5, 0.95, 0.99))
    return Distribution(
        mean=float(values.mean()), stderr=spread, median=median, p95=p95, p99=p99, max=float(values.max())
    )


def _logits(candidate: CandidateRun) -> Logits | None:
    stats, reference = candidate.stats, candidate.reference
    if not len(stats):
        return None
    dp = stats.column("delta_p")
    floor = reference.floor
    oracle = None
    if reference.oracle_kld is not None and len(candidate.oracle_stats):
        oracle = OracleKld(kld_reference=reference.oracle_kld, kld_candidate=candidate.oracle_stats.mean_kld)
    return Logits(
        n_tokens=len(stats),
        kld=_distribution(stats.column("kld")),
        dp=DeltaP(
            mean=float(dp.mean()),
            rms=float(np.sqrt((dp**2).mean())),
            p1=float(np.quantile(dp, 0.01)),
            p99=float(np.quantile(dp, 0.99)),
        ),
        same_top_p=float(stats.column("same_top").mean()),
        ppl_ratio=stats.ppl_ratio,
        max_abs=float(stats.column("max_abs").max()),
        noise_floor=NoiseFloor(
            kld_mean=floor.mean_kld,
            kld=_distribution(np.concatenate([v.column("kld") for v in floor.variants.values()])),
            same_top_p=min(float(v.column("same_top").mean()) for v in floor.variants.values()),
            max_abs=floor.max_abs,
            margin=floor.margin,
            variants={name: v.mean_kld for name, v in floor.variants.items()},
        ),
        oracle=oracle,
        quantization_kld=reference.quantization_kld,
    )


def _tokens(candidate: CandidateRun, outcome: ModelOutcome) -> Tokens:
    reference = candidate.reference
    diverged = [run.divergence for run in outcome.runs if run.divergence is not None]
    indices = sorted(d.index for d in diverged)
    first = None
    if diverged:
        d = min(diverged, key=lambda d: d.index)
        tokenizer = reference.path.loaded.tokenizer
        first = FirstDivergence(
            prompt=str(d.prompt),
            index=d.index,
            reference_token=d.reference_token,
            candidate_token=d.candidate_token,
            margin=d.margin,
            margin_over_floor=d.margin / reference.floor.margin,
            reference_text=str(tokenizer.decode([d.reference_token])),
            candidate_text=str(tokenizer.decode([d.candidate_token])),
            prompt_text=str(tokenizer.decode(list(reference.prompts[d.prompt]))),
        )
    return Tokens(
        n_seq=len(outcome.runs),
        divergence_index=DivergenceIndex(
            min=indices[0] if indices else None,
            median=float(np.median(indices)) if indices else None,
            max=indices[-1] if indices else None,
            per_prompt={str(i): r.divergence.index if r.divergence else None for i, r in enumerate(outcome.runs)},
        ),
        prefix_match=float(np.mean([prefix_match(run) for run in outcome.runs])),
        classes=TokenClasses.model_validate(Counter(outcome.classes)),
        first=first,
    )


def _diagnosis(outcome: ModelOutcome) -> Diagnosis | None:
    if not outcome.findings:
        return None
    known = max(outcome.findings, key=lambda f: f.confidence)
    return Diagnosis(
        fault=known.fault,
        confidence=known.confidence,
        evidence={f.check: f.message for f in outcome.findings},
        first_layer=None if outcome.shadow is None else outcome.shadow.first_layer,
    )
